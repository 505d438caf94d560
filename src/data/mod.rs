//! JSONL to token streams, on host threads.

pub mod collate;
pub mod config;
pub mod loader;
mod loader_error;
pub mod order;
pub mod packing;
pub mod plan;
pub mod row;
mod steps;
#[cfg(test)]
mod test_reader;
mod workers;
