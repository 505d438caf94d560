//! Qwen3-VL dense, as a list of stages with a hand-written backward.
//!
//! Shapes: `T` tokens, `P` patches, `M` merged vision tokens, `D` hidden size, `H` heads, `Hkv` kv
//! heads, `Dh` head dim, `F` intermediate size, `V` vocabulary.
//! Knows nothing of files of data, tokenizers or our run config.

pub mod config;
mod generate;
pub mod init;
mod input;
mod linear;
mod merger;
mod params;
mod rope;
mod stages;
mod text;
mod vision;

pub use config::{ModelConfig, ModelConfigError, TextConfig, VisionConfig};
pub use generate::Cache;
pub use input::ModelInput;
pub use params::{ParamSpec, Part, WeightError, param_specs};
pub use stages::{Model, RecomputePolicy, Tape};
