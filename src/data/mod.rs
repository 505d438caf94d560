//! JSONL to token streams, on host threads.

mod chat;
mod collate;
mod config;
mod encode;
pub mod image;
mod loader;
mod loader_error;
mod order;
mod packing;
mod plan;
mod rope_index;
mod row;
mod source;
mod steps;
mod tokenizer;
mod workers;
