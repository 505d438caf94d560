//! Reads the rows of data files as [`Sample`](crate::batch::Sample). It does not open images or
//! videos.

mod content;
mod dataset_info;
pub(in crate::data) mod error;
mod formats;
mod jsonl;
mod raw_row;
mod stamp;

pub(in crate::data) use dataset_info::Mapping;
pub use dataset_info::{DatasetInfo, DatasetInfoError};
pub use error::SampleError;
pub use formats::RowForm;
pub(in crate::data) use jsonl::LineIndex;
pub use jsonl::{JsonlFile, SourceError};
pub(in crate::data) use stamp::{ImageStamp, Stamp};
