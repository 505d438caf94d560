//! Host data types that pass between the steps of data loading: plain `Vec`s without devices or
//! files. Also the sizes in a model folder that data and models share.
//!
//! Shapes: `B` rows, `L` padded length, `T` tokens, `M` merged vision tokens, `P` patches.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod cu_seqlens;
mod encoded;
mod error;
mod merge_order;
mod pack;
mod padded;
mod sample;
mod sizes;
mod split;
mod varlen;

pub use cu_seqlens::CuSeqlens;
pub use encoded::{EncodedSample, Patches};
pub use error::BatchError;
pub use merge_order::merge_block_order;
pub use pack::Pack;
pub use padded::{Batch, PaddingSide};
pub use sample::{
    AreaLimits, BoxRef, BoxUnit, Content, FrameRate, ImageLimits, MediaRef, MediaSource, Medium,
    MediumKind, Message, Objects, Part, Sample, SampleId, VideoLimits, VideoRef,
};
pub use sizes::{PatchSizes, SliceSizes, TileSizes, WrongSize, read_side};
pub use split::BatchPart;
pub use varlen::{VarlenBatch, media_rows};

/// A label with this value contributes no loss, as in transformers.
pub const IGNORE_INDEX: i64 = -100;
