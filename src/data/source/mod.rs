//! Reads the rows of data files as [`Sample`](crate::batch::Sample). It does not open images or
//! videos.

mod column_names;
mod dataset_info;
pub(in crate::data) mod error;
mod file_error;
pub(in crate::data) mod files;
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
pub(in crate::data) use error::PIXELS_OF_MEDIA;
pub use error::SampleError;
pub use file_error::FileError;
pub use grounding_error::GroundingError;
pub use row_file::RowFile;
pub(in crate::data) use rows::MAX_TEXT_BYTES;
pub use rows::{RowForm, RowRules, UnknownKeys};
pub use source_error::SourceError;
pub(in crate::data) use stamp::{ImageStamp, Stamp};
pub(crate) use texts::texts;
pub(in crate::data) use texts::{BOX_PLACEHOLDER, NAME_PLACEHOLDER, texts_mut};
pub use trouble::Trouble;
pub(in crate::data) use trouble::with_patience;
