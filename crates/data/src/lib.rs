//! Reads data files and plain text, and turns rows into token streams, on threads of the host.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod checksums;
mod config;
mod dataset;
mod encode;
mod json;
mod length_cache;
mod loader;
mod media;
mod model_folder;
mod packing;
mod row;
mod source;
mod template;

pub use config::{
    Balance, DataConfig, DataPath, DatasetConfig, LengthCaching, OnError, Truncation, dataset_names,
};
pub use dataset::cached::{CachedRows, LengthSummary};
pub use dataset::corpus::{
    Corpus, CorpusConfig, CorpusOptions, Purpose, Sampling, Spacing, Windows,
};
pub use dataset::order::{DatasetShare, Mixture, Order, OrderError, RowOrder, StoppingStrategy};
pub use dataset::split::{EvalGroup, EvalSplit, SplitSize};
pub use dataset::{Chats, DataSet, DatasetRows, RowReader};
pub use encode::measure::Measured;
pub use encode::truncate::{DroppedTokens, KeptEnd, TokenCounts, TruncationError, TruncationRule};
pub use encode::{
    BoxFault, Encoder, ImageBox, LossScale, Vocabulary, chat_template_source, image_boxes,
    marked_boxes,
};
pub use length_cache::{
    CacheError, CacheWork, LengthCache, MediaDigests, MediaLook, MediaStamps, open_indexed,
};
pub use loader::Loader;
pub use loader::collate::collate;
pub use loader::error::{LoaderError, RejectedCounts, length_hint};
pub use loader::plan::{Plan, first_epoch_packs, plan};
pub use loader::share::LoaderShare;
pub use loader::steps::{DataState, LoaderOptions, Rmpad, StepData};
pub use media::image::{ImageConfig, ImageError, ImageProcessor, ImageSize, Pixels, UrlConfig};
pub use media::video::{VideoConfig, VideoError, VideoProcessor};
pub use media::{image, video};
pub use model_folder::ModelFolderError;
pub use packing::{Overlong, PackRules, Packing, PackingStrategy, StepPacks};
pub use row::{Length, Rejection, SampleCounts, SampleIndex, TransientRowError};
pub use source::{
    ColumnNames, DatasetInfo, DatasetInfoError, GroundingError, RowFile, RowForm, RowRules,
    SampleError, SampleFault, SourceError, TransientFailure, UnknownKeys, texts,
};
pub use tokenizer::{GrownTokenizer, NewToken, NewTokenProblem, TokenizerError, with_new_tokens};
