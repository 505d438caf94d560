//! Atomic, Hugging Face-compatible checkpoints.
//!
//! ```text
//! <output_dir>/checkpoints/step-00000200/
//!     config.json  model.safetensors (or shards + index)  tokenizer.json ..  published layout
//!     optimizer.safetensors  trainer_state.json                              needed to resume
//!     manifest.json                                                          written last
//! <output_dir>/final/                                                        no optimizer state
//! <output_dir>/best/                                          the same, of the best evaluation
//! ```
//!
//! A `step-` folder appears only after all of its files are on disk: a save fills a `.tmp-` folder,
//! syncs each file and the folder, renames the folder, and syncs the parent. Reading compares sizes
//! and checksums with the manifest, so that a damaged checkpoint is detected before it is used.

mod atomic;
mod background;
mod bitsandbytes;
mod checkpointer;
mod config;
mod error;
mod gguf;
mod hf;
mod manifest;
mod peft;
mod ranks;
mod shard;
mod tensors;
mod weight_files;

pub use atomic::write_atomically;
pub use background::{BackgroundSave, OwnedContents};
pub use bitsandbytes::{nf4_tensors, quantization_config};
pub use checkpointer::{Checkpoint, Checkpointer, Contents};
pub use config::{BestConfig, BestMode, CheckpointConfig};
pub use error::CheckpointError;
pub(crate) use error::write_hint;
pub use gguf::{GgufDtype, GgufFile, GgufTensor, GgufValue};
pub use hf::{COPIED_FILES, CarriedFiles, FolderLayout, ModelFolder, is_model_file};
pub use peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, Patterns, PeftConfig, adapter_weights};
pub use ranks::{Alone, Together};
pub use tensors::SavedTensor;
pub use weight_files::WeightFiles;

/// Files and ranges of bytes of the tensors that were read, for tests.
#[cfg(test)]
pub(crate) static READS: std::sync::Mutex<Vec<(std::path::PathBuf, std::ops::Range<usize>)>> =
    std::sync::Mutex::new(Vec::new());

#[cfg(test)]
fn make_pipe(path: &std::path::Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}
