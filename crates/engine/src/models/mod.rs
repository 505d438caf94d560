//! [`ModelConfig`] and [`Model`], of any family.
//!
//! A family is a reader of `config.json`, selected by `model_type` ([`read_config`]), that returns
//! a [`ModelConfig`]. Other modules see only that. `docs/dev/architecture.md` lists the places of a
//! family.

mod config;
mod experts;
mod generate;
mod model;
mod model_config;
mod qwen2_5_vl;
mod qwen3;
mod qwen3_5;
mod qwen3_vl;
mod registry;
mod vision;

pub use config::ModelConfigError;
pub use generate::Cache;
pub use model::{Model, ModelInput, RecomputePolicy, Tape};
pub use model_config::{LLM, ModelConfig};
pub use registry::{FAMILIES, ReadConfig, config_from_json, read_config};
pub use vision::{MERGER, VISION, VisionConfig, VisionMlp, VisionNorm, VisionParts, VisionWindows};
