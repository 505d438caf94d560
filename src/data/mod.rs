//! JSONL to token streams, on host threads.

pub mod chat;
pub mod encode;
pub mod image;
pub mod rope_index;
pub mod source;
pub mod tokenizer;
