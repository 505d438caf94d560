//! State to disk and back: folders that load in transformers as they are, and never half of one.
//!
//! ```text
//! <output_dir>/checkpoints/step-00000200/
//!     config.json  model.safetensors (or shards + index)  tokenizer.json ..   the published layout
//!     optimizer.safetensors  trainer_state.json                               what resuming needs
//!     manifest.json                                                           written last
//! <output_dir>/final/                                                         without optimizer state
//! ```
//!
//! A `step-` name exists only once every file below it is on disk: a save builds a `.tmp-` folder,
//! syncs each file and the folder, renames it, and syncs the parent. Reading checks sizes and
//! checksums against the manifest, so a damaged checkpoint is found before it is used.

mod atomic;
mod carried;
mod checkpointer;
mod config;
mod error;
mod hf;
mod manifest;
mod tensors;

pub use atomic::write_atomically;
pub use carried::{COPIED_FILES, CarriedFiles};
pub use checkpointer::{Checkpointer, Contents, Found};
pub use config::CheckpointConfig;
pub use error::CheckpointError;
pub use hf::{ModelFiles, WeightFiles};
