mod images;
