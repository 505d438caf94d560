//! Rows of data files -> [`Sample`](crate::batch::Sample). Text only: no image is opened here.

mod content;
mod error;
mod formats;
mod jsonl;
mod stamp;

pub use error::SampleError;
pub use formats::RowForm;
pub(in crate::data) use jsonl::LineIndex;
pub use jsonl::{JsonlFile, SourceError};
pub(in crate::data) use stamp::{ImageStamp, Stamp};
