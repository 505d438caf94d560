//! The vision encoder: its features replace embeddings of the decoder, and are added to the first
//! decoder layers.
//!
//! Shapes: `P` patches, `R` rows of the blocks (the patches, and class tokens), `M` merged vision tokens, `D` and `Dv` hidden sizes of the decoder and the
//! vision encoder, `H` heads, `Dh` head dim, `F` intermediate size.

mod attention;
mod blocks;
mod branch;
mod config;
mod cost;
mod encoder;
mod gelu_mlp;
mod input;
mod merger;
mod params;
mod positions;
mod windows;

pub use config::{
    EarlyMerger, MergerHidden, MergerParts, NormPlace, TableReading, VisionAttention, VisionConfig,
    VisionMlp, VisionNames, VisionNorm, VisionParts, VisionWindows,
};
pub(super) use config::{expect_rope, gelu};
pub(super) use encoder::{Features, VisionEncoder, VisionTape};
pub(super) use input::VisionInput;
pub(super) use params::param_specs;
pub use params::{MERGER, VISION};
