//! The vision encoder: its features replace embeddings of the decoder, and are added to the first
//! decoder layers.
//!
//! Shapes: `P` patches, `M` merged vision tokens, `D` and `Dv` hidden sizes of the decoder and the
//! vision encoder, `H` heads, `Dh` head dim, `F` intermediate size.

mod blocks;
mod config;
mod cost;
mod encoder;
mod gelu_mlp;
mod input;
mod merger;
mod params;
mod positions;
mod windows;

pub use config::{VisionConfig, VisionMlp, VisionNorm, VisionParts, VisionWindows};
pub(super) use config::{expect_rope, gelu};
pub(super) use encoder::{Features, VisionEncoder, VisionTape};
pub(super) use input::VisionInput;
pub(super) use params::param_specs;
pub use params::{MERGER, VISION};
