//! Qwen2.5-VL: windows in the vision encoder, biases in the attention of the decoder.

mod config;

pub(super) use config::read;
