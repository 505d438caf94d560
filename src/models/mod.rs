//! Model families, one folder each, behind the traits [`ModelConfig`] and [`Model`].
//!
//! [`read_config`] selects the family by `model_type` in `config.json`. Other modules see only the
//! traits. To add a family, add a folder, and a line in [`FAMILIES`].

mod config;
mod generate;
mod model;
mod opaque;
pub mod qwen3;
pub mod qwen3_vl;
mod registry;

pub use config::ModelConfigError;
pub use generate::Cache;
pub use model::{Model, ModelConfig, RecomputePolicy, report_without_backward};
pub use opaque::{ModelInput, Tape};
pub use registry::{FAMILIES, ReadConfig, config_from_json, read_config};
