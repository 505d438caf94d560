//! Assembles a run from its config: device, model, data, optimizer, checkpoints and plan.
//!
//! [`Run`] does all of it. The commands that need only a part of a run (`inspect`, `eval`, `cache`,
//! `bench`) call the functions below. Nothing here prints or reads arguments; slow work reports
//! its progress to a [`SetupObserver`].

mod adapter;
mod build;
mod check;
mod device;
mod error;
mod export;
mod gguf;
mod inputs;
mod load_model;
mod load_shares;
mod logs;
mod memory;
mod model_files;
mod new_config;
mod new_tokens;
mod output_dir;
mod plan;
mod requirements;
mod resume;
mod runner;
mod stored_weights;
mod trackers;
mod trials;
pub mod verify;

pub use adapter::{AdapterError, OpenAdapter};
pub use build::{Run, RunOptions};
pub use check::{CheckReport, Finding, Note, Topic, check_run};
pub(crate) use check::{copy_of_checkpoint, predicted_memory};
pub use device::device_name;
pub use error::{RunError, SetupError};
pub use export::{ExportDtype, Exported, export_adapter, export_model};
pub use gguf::export_gguf;
pub use inputs::{SetupObserver, SetupWork, download, model_folder};
pub use load_model::{LoadedModel, OpenModel, load_model, trainable};
pub(crate) use memory::memory_model;
pub use memory::{Estimate, Fit, Load, ModelShape, RESERVED, RunMemory, Saving, advice, search};
pub use new_config::{ConvertedConfig, NewRun, convert_config, new_config};
pub use new_tokens::NewVocabulary;
pub use plan::{DataPlan, plan_data};
pub use resume::Resume;
pub use trackers::track;
pub use trials::{Calibration, Replay, StageNorm, calibrate, replay};

pub(crate) use adapter::{load_for_run, load_to_generate, load_with_adapter};
pub(crate) use inputs::{DataList, check, encoder, loader_options, open_data, order};
pub(crate) use load_model::check_world;
pub(crate) use load_shares::whole_model;
pub(crate) use model_files::check_model_folder;
pub(crate) use new_tokens::with_tokens_of;
pub(crate) use plan::{FRACTIONS, update_cache};
pub(crate) use runner::step_runner;
pub(crate) use stored_weights::weight_storage;
