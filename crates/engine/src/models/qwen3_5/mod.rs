//! Qwen3.5, dense and with experts: three of four layers have linear attention (the gated delta
//! rule), the others attention with an output gate.

mod config;

pub(super) use config::{read, read_moe, read_text, read_text_moe};
