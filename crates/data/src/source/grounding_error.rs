//! Errors of the boxes of a row.

/// The reason why the boxes of a row (`objects`) cannot be rendered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GroundingError {
    /// The numbers of placeholders and of values differ.
    #[error("the turns have {placeholders} `{placeholder}` but `objects.{key}` has {listed}")]
    Count {
        /// `<bbox>` or `<ref-object>`.
        placeholder: &'static str,
        /// Number of placeholders in the texts.
        placeholders: usize,
        /// `bbox` or `ref`.
        key: &'static str,
        /// Number of values.
        listed: usize,
    },
    /// The unit of the boxes is unknown.
    #[error("`objects.bbox_type` is `{found}`, expected `real`, `norm1` or `norm1000`")]
    Unit {
        /// Found value.
        found: String,
    },
    /// A box names an image that the row does not have.
    #[error("`objects.bbox[{index}]` is in image {image}, but the row has {images} images")]
    NoImage {
        /// Index of the box.
        index: usize,
        /// Index of the image.
        image: usize,
        /// Number of images of the row.
        images: usize,
    },
    /// The first corner is not above and left of the second.
    #[error(
        "`objects.bbox[{index}]` is {found}, expected `[x1, y1, x2, y2]` with x1 <= x2 and y1 <= y2"
    )]
    Inverted {
        /// Index of the box.
        index: usize,
        /// The coordinates.
        found: String,
    },
    /// The boxes have no unit, and all numbers are from 0 to 1.
    #[error(
        "all numbers of `objects.bbox` are from 0 to 1, and `objects.bbox_type` is not `norm1`"
    )]
    Fractions,
    /// The corners of a box have the same x or y.
    #[error("`objects.bbox[{index}]` is {found}, expected x1 < x2 and y1 < y2")]
    NoArea {
        /// Index of the box.
        index: usize,
        /// The coordinates.
        found: String,
    },
    /// A coordinate is outside of the image.
    #[error(
        "`objects.bbox[{index}]` is {found}, expected 0 <= x <= {width} and 0 <= y <= {height}"
    )]
    Outside {
        /// Index of the box.
        index: usize,
        /// The coordinates.
        found: String,
        /// Width of the image in the unit of the boxes.
        width: u32,
        /// Height of the image in the unit of the boxes.
        height: u32,
    },
}

impl GroundingError {
    /// Returns the key under which rejected rows are counted, such as `box_count`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Count { .. } => "box_count",
            Self::Unit { .. } | Self::Fractions => "box_type",
            Self::NoArea { .. } => "box_no_area",
            Self::NoImage { .. } => "box_image",
            Self::Inverted { .. } => "box_inverted",
            Self::Outside { .. } => "box_range",
        }
    }

    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Count { .. } => {
                "list one value for each placeholder, in the order of the text; if `<bbox>` and `<ref-object>` are plain text, set `literal_placeholders: true` in the data set"
            }
            Self::Unit { .. } => "pixels are `real`, fractions `norm1`, thousandths `norm1000`",
            Self::Fractions => {
                "write `\"bbox_type\": \"norm1\"` for fractions of the sides; pixels and thousandths are larger numbers"
            }
            Self::NoArea { .. } => "remove the box, or write a point as `[x, y]`",
            Self::NoImage { .. } => "`objects.image_id` counts the images of the row from 0",
            Self::Inverted { .. } => "boxes are corners, not a corner with width and height",
            Self::Outside { .. } => {
                "pixels count in the upright image before any resize; relative boxes need `bbox_type`"
            }
        }
    }
}
