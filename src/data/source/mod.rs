//! Reads the rows of data files as [`Sample`](crate::batch::Sample). It does not open images or
//! videos.

pub(in crate::data) mod error;
mod grounding_error;
mod jsonl;
mod raw_row;
mod rows;
mod stamp;
mod texts;

pub use error::SampleError;
pub use grounding_error::GroundingError;
pub(in crate::data) use jsonl::LineIndex;
pub use jsonl::{JsonlFile, SourceError};
pub use rows::{RowForm, RowRules, UnknownKeys};
pub(in crate::data) use stamp::{ImageStamp, Stamp};
pub(in crate::data) use texts::{BOX_PLACEHOLDER, NAME_PLACEHOLDER, texts_mut};
