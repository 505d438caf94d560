//! Reads the rows of data files as [`Sample`](crate::batch::Sample). It does not open images or
//! videos.

pub(in crate::data) mod error;
mod jsonl;
mod raw_row;
mod rows;
mod stamp;

pub use error::SampleError;
pub(in crate::data) use jsonl::LineIndex;
pub use jsonl::{JsonlFile, SourceError};
pub use rows::{RowForm, RowRules, UnknownKeys};
pub(in crate::data) use stamp::{ImageStamp, Stamp};
