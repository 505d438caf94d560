//! Tests of the public interface and of the binary, one module per topic.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "tests read their own files")]

kernels::test_allocator!();

mod adapter_parity;
mod adapter_runs;
mod adapter_start;
mod architecture;
mod background_saves;
mod bad_input;
mod bench;
mod best;
mod budgets;
mod check;
mod circles;
mod cli;
mod config_page;
mod convert;
mod convert_adapters;
mod corpora;
mod dataset_info;
mod doc_commands;
mod docs;
mod encoding;
mod encoding_folders;
mod expert_adapters;
mod experts;
mod fp8;
mod generate;
mod gguf;
mod gpu_ranks;
mod grounding;
mod harness;
mod health;
mod held_out;
#[cfg(feature = "hub")]
mod hub;
mod image_columns;
mod images;
mod inspect_html;
mod internvl;
mod laws;
mod length_cache;
mod length_cache_passes;
mod length_laws;
mod limits;
mod memory;
mod minicpm;
mod model_folders;
mod new_config;
mod new_tokens;
mod output_dir;
mod overlap;
mod parity;
mod plan;
mod published_folders;
mod qlora;
mod quantized_experts;
mod qwen2;
mod qwen2_media;
mod qwen35;
mod ranks;
mod recipes;
mod report;
mod resume;
mod rounding;
mod rows;
mod run_end;
mod selftest;
mod sequence;
mod simd;
mod sources;
mod supervision;
mod templates;
mod toolkit;
mod trackers;
#[cfg(feature = "hub")]
mod transient;
#[cfg(feature = "testing")]
mod urls;
mod verify;
mod video;
#[cfg(feature = "video")]
mod video_files;
#[cfg(feature = "hub")]
mod web;
