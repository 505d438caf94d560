//! JSONL to token streams, on host threads.

mod cache;
mod chat;
mod collate;
mod config;
mod corpus;
mod encode;
pub mod image;
mod loader;
mod loader_error;
mod mixture;
#[cfg(test)]
mod mixture_tests;
mod order;
mod packing;
mod plan;
mod rope_index;
mod row;
mod source;
mod steps;
#[cfg(test)]
mod test_reader;
mod tokenizer;
mod truncate;
pub mod video;
mod workers;

pub use cache::{CacheError, CacheWork, LengthCache, open_indexed};
pub use collate::{CollateError, collate};
pub use config::{
    Balance, DataConfig, DataConfigError, DatasetConfig, OnError, PackingStrategy, Truncation,
    dataset_names,
};
pub use corpus::{
    Corpus, CorpusConfig, CorpusError, CorpusOptions, Purpose, Sampling, Spacing, Windows,
};
pub use encode::{Encoder, EncoderError, Measured};
pub use image::{ImageConfig, ImageConfigError, ImageError, ImageProcessor, Pixels};
pub use loader::{Loader, StepData};
pub use loader_error::LoaderError;
pub use mixture::{Mixture, StoppingStrategy};
pub use order::{DatasetShare, Order, OrderError, RowOrder};
pub use packing::{Overlong, PackRules, Packing};
pub use plan::{Plan, first_epoch_packs, plan};
pub use row::{FirstLook, Length, Rejection, Row, RowReader, SampleSize};
pub use source::{JsonlFile, RowForm, SampleError, SourceError};
pub use steps::{DataState, LoaderOptions, Rmpad};
pub use tokenizer::TokenizerError;
pub use truncate::{Cut, CutError, Dropped, Keep, Outline};
pub use video::{VideoConfig, VideoConfigError, VideoError, VideoProcessor};
