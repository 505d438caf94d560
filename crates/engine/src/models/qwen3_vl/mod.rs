//! Qwen3-VL, dense and with experts.

mod config;

pub(super) use config::{read, read_moe};
