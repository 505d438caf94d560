//! Dense Qwen3: the text-only decoder.

mod config;

pub(super) use config::read;
