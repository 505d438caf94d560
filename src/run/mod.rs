//! Assembles a run from its config: device, model, data, optimizer, checkpoints and plan.
//!
//! [`Run`] does all of it. The commands that need only a part of a run (`inspect`, `eval`, `cache`,
//! `bench`) call the functions below. Nothing here prints or reads arguments; slow work reports
//! its progress to a [`SetupObserver`].

mod adapter;
mod algorithms;
mod build;
mod check;
mod contradictions;
mod converted_config;
mod device;
mod error;
mod estimate;
mod evaluations;
mod experts;
mod export;
mod hub;
mod inputs;
mod load_model;
mod load_shares;
mod model_files;
mod new_config;
mod observer;
mod output_dir;
mod placed;
mod plan;
mod plan_calibrate;
mod plan_data;
mod plan_forecast;
mod plan_memory;
mod plan_search;
mod ranks;
mod read_together;
mod replay;
mod resume;
mod runner;
mod sequence;
mod setup_error;
mod sinks;
mod stages;
mod start_log;
mod starts;
mod stored_weights;
mod temporary;
mod trackers;
pub mod verify;

pub use adapter::{AdapterError, OpenAdapter};
pub use algorithms::read_table;
pub use build::{Run, RunOptions};
pub use check::{CheckReport, Finding, Note, Topic, check_run};
pub(crate) use check::{copy_of_checkpoint, predicted_memory};
pub use converted_config::{ConvertedConfig, convert_config};
pub use device::{DeviceError, device_name};
pub use error::RunError;
pub(crate) use estimate::memory_model;
pub use estimate::{Estimate, ModelShape};
pub use export::{ExportDtype, Exported, export_adapter, export_model};
pub use hub::{download, model_folder};
pub use load_model::{LoadedModel, OpenModel, load_model, trainable};
pub use new_config::{NewRun, new_config};
pub use observer::{SetupObserver, SetupWork};
pub use plan_calibrate::{Calibration, calibrate};
pub use plan_data::{DataPlan, plan_data};
pub use plan_memory::{Load, RESERVED, RunMemory, Saving, advice};
pub use plan_search::{Fit, search};
pub use replay::{Replay, StageNorm, replay};
pub use resume::Resume;
pub use setup_error::SetupError;

pub(crate) use adapter::{load_for_run, load_to_generate, load_with_adapter};
pub(crate) use algorithms::{read_algorithms, use_algorithms};
pub(crate) use contradictions::check_model_folder;
pub(crate) use inputs::{DataList, check, encoder, loader_options, open_data, order};
pub(crate) use load_shares::whole_model;
pub(crate) use plan::update_cache;
pub(crate) use runner::step_runner;
pub(crate) use sequence::check_world;
pub(crate) use stored_weights::weight_storage;
