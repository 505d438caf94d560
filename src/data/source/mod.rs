//! Rows of data files -> [`Sample`](crate::batch::Sample). Text only: no picture is opened here.

mod content;
mod error;
mod formats;
mod jsonl;

pub use error::SampleError;
pub use formats::RowForm;
pub use jsonl::{JsonlFile, SourceError};
