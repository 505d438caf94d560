//! Dense Qwen3: the text-only decoder.

mod config;
mod stages;

pub use config::{Config, LLM};
