//! Reads the rows of data files as [`Sample`](batch::Sample). It does not open images or
//! videos.

mod column_names;
mod dataset_info;
pub(crate) mod error;
pub(crate) mod files;
mod grounding_error;
mod raw_row;
mod row_file;
mod rows;
mod source_error;
mod stamp;
mod texts;
mod trouble;

pub use column_names::ColumnNames;
pub use dataset_info::{DatasetInfo, DatasetInfoError};
pub(crate) use error::AtRow;
pub use error::{SampleError, SampleFault};
pub use grounding_error::GroundingError;
pub use row_file::RowFile;
pub(crate) use rows::MAX_TEXT_BYTES;
pub use rows::{RowForm, RowRules, UnknownKeys};
pub use source_error::SourceError;
pub(crate) use stamp::{ImageStamp, Stamp};
pub use texts::texts;
pub(crate) use texts::{BOX_PLACEHOLDER, NAME_PLACEHOLDER, texts_mut};
pub use trouble::Trouble;
pub(crate) use trouble::with_patience;
