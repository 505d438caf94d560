//! A text-only model: embedding, decoder, head.

mod config;
mod stages;

pub use config::{LLM, TextConfig};
