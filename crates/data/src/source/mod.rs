//! Reads the rows of data files as [`Sample`](batch::Sample). It does not open images or
//! videos.

mod dataset_info;
pub(crate) mod files;
mod raw_row;
mod row_file;
mod rows;
pub(crate) mod sample_error;
mod source_error;
mod stamp;

pub use dataset_info::{DatasetInfo, DatasetInfoError};
pub use raw_row::ColumnNames;
pub use row_file::RowFile;
pub(crate) use rows::{BOX_PLACEHOLDER, MAX_TEXT_BYTES, NAME_PLACEHOLDER, texts_mut};
pub use rows::{RowForm, RowRules, UnknownKeys, texts};
pub(crate) use sample_error::{AtRow, retry};
pub use sample_error::{GroundingError, SampleError, SampleFault, TransientFailure};
pub use source_error::SourceError;
pub(crate) use stamp::{ImageStamp, Stamp};
