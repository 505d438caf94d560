//! A vision-language model: features of a vision encoder replace embeddings, and are added to the
//! first decoder layers.
//!
//! Shapes: `T` tokens, `P` patches, `M` merged vision tokens, `D` and `Dv` hidden sizes of the
//! decoder and the vision encoder, `H` heads, `Dh` head dim, `F` intermediate size, `V` vocabulary.

mod config;
mod cost;
mod encoder;
mod input;
mod merger;
mod norm;
mod params;
mod positions;
mod stages;
mod vision;
mod vision_mlp;
mod windows;

pub use config::{MropeLayout, VisionConfig, VisionKind, VisionLanguageConfig};
pub use params::{LLM, MERGER, VISION, param_specs};
