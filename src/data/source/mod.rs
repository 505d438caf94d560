//! Reads the rows of data files as [`Sample`](crate::batch::Sample). It does not open images or
//! videos.

mod content;
pub(in crate::data) mod error;
mod formats;
mod jsonl;
mod limits;
mod raw_row;
mod stamp;

pub use error::SampleError;
pub use formats::RowForm;
pub(in crate::data) use jsonl::LineIndex;
pub use jsonl::{JsonlFile, SourceError};
pub(in crate::data) use stamp::{ImageStamp, Stamp};
