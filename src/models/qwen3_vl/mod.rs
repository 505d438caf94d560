//! Dense Qwen3-VL.

mod config;

pub(super) use config::read;
