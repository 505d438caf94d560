//! Models behind the traits [`ModelConfig`] and [`Model`].
//!
//! A family is a reader of `config.json`, selected by `model_type` ([`read_config`]). It describes
//! its models to [`text`] or [`vision_language`]. Other modules see only the traits. To add a
//! family, add a folder, and a line in [`FAMILIES`].

mod config;
mod experts;
mod generate;
mod model;
mod opaque;
mod qwen2_5_vl;
mod qwen3;
mod qwen3_5;
mod qwen3_vl;
mod registry;
pub mod text;
pub mod vision_language;

pub use config::ModelConfigError;
pub use generate::Cache;
pub use model::{Model, ModelConfig, RecomputePolicy, report_without_backward};
pub use opaque::{ModelInput, Tape};
pub use registry::{FAMILIES, ReadConfig, config_from_json, read_config};
