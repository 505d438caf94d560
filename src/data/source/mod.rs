//! Reads the rows of data files as [`Sample`](crate::batch::Sample). It does not open images or
//! videos.

mod content;
pub(in crate::data) mod error;
mod file_error;
pub(in crate::data) mod files;
mod formats;
mod raw_row;
mod row_file;
mod source_error;
mod stamp;

pub use error::SampleError;
pub use file_error::FileError;
pub use formats::RowForm;
pub use row_file::RowFile;
pub use source_error::SourceError;
pub(in crate::data) use stamp::{ImageStamp, Stamp};
