//! Model families, one folder each.

pub mod qwen3_vl;

pub use qwen3_vl::*;
