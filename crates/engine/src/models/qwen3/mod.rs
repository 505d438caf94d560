//! Qwen3, dense and with experts: the text-only decoder.

mod config;
mod moe;

pub(super) use config::read;
pub(super) use moe::read_moe;
