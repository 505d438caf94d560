//! Errors of the boxes of a row.

/// The reason why the boxes of a row (`objects`) cannot be rendered.
#[derive(Debug, Clone, PartialEq, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum GroundingError {
    #[error("the turns have {placeholders} `{placeholder}` but `objects.{key}` has {listed}")]
    #[fault(
        hint = "list one value for each placeholder, in the order of the text; if `<bbox>` and `<ref-object>` are plain text, set `literal_placeholders: true` in the data set",
        reason = "box_count"
    )]
    Count {
        /// `<bbox>` or `<ref-object>`.
        placeholder: &'static str,
        placeholders: usize,
        /// `bbox` or `ref`.
        key: &'static str,
        listed: usize,
    },
    #[error("`objects.bbox_type` is `{found}`, expected `real`, `norm1` or `norm1000`")]
    #[fault(
        hint = "pixels are `real`, fractions `norm1`, thousandths `norm1000`",
        reason = "box_type"
    )]
    Unit { found: String },
    #[error("`objects.bbox[{index}]` is in image {image}, but the row has {images} images")]
    #[fault(hint = "`objects.image_id` counts the images of the row from 0", reason = "box_image")]
    NoImage { index: usize, image: usize, images: usize },
    #[error(
        "`objects.bbox[{index}]` is {found}, expected `[x1, y1, x2, y2]` with x1 <= x2 and y1 <= y2"
    )]
    #[fault(
        hint = "boxes are corners, not a corner with width and height",
        reason = "box_inverted"
    )]
    Inverted { index: usize, found: String },
    #[error(
        "all numbers of `objects.bbox` are from 0 to 1, and `objects.bbox_type` is not `norm1`"
    )]
    #[fault(
        hint = "write `\"bbox_type\": \"norm1\"` for fractions of the sides; pixels and thousandths are larger numbers",
        reason = "box_type"
    )]
    Fractions,
    #[error("`objects.bbox[{index}]` is {found}, expected x1 < x2 and y1 < y2")]
    #[fault(hint = "remove the box, or write a point as `[x, y]`", reason = "box_no_area")]
    NoArea { index: usize, found: String },
    #[error(
        "`objects.bbox[{index}]` is {found}, expected 0 <= x <= {width} and 0 <= y <= {height}"
    )]
    #[fault(
        hint = "pixels count in the upright image before any resize; relative boxes need `bbox_type`",
        reason = "box_range"
    )]
    Outside {
        index: usize,
        found: String,
        /// Width of the image in the unit of the boxes.
        width: u32,
        /// Height of the image in the unit of the boxes.
        height: u32,
    },
}
