//! What a run requires of its config and of its model besides valid values. A run stops at the first
//! requirement that fails; `check` reports all that fail.

use super::check::Topic;
use super::error::{RunError, SetupError};
use super::load_model::{OpenModel, check_heads, check_matmul, check_world};
use super::resume::eval_rule;
use crate::checkpoint::CarriedFiles;
use crate::config::RunConfig;
use crate::train::{AttentionChoice, DeviceChoice};
use candle_core::Device;

/// What is known at the start of a run, before it opens the model.
pub(super) struct Start<'a> {
    pub(super) config: &'a RunConfig,
    /// `None`: it cannot be opened, which is another error, or no requirement depends on it.
    pub(super) device: Option<&'a Device>,
    /// Number of ranks; `None`: the launcher chooses it.
    pub(super) world: Option<usize>,
}

/// A requirement of the config: the list that it reads as a whole, if there is one, and the check.
type OfConfig = (Option<&'static str>, fn(&Start<'_>) -> Result<(), RunError>);

const OF_CONFIG: [OfConfig; 4] = [
    (None, |start| start.world.map_or(Ok(()), |world| check_world(start.config, world))),
    (None, can_multiply),
    (None, can_mask),
    (Some("data.eval"), |start| eval_rule(start.config).map(drop)),
];

/// A requirement of the model folder.
type OfModel = fn(&RunConfig, &OpenModel) -> Result<(), RunError>;

const OF_MODEL: [OfModel; 2] = [
    |config, open| check_heads(open, config.distributed.sequence.get()),
    |config, _| Ok(CarriedFiles::read(&config.model.path).map(drop)?),
];

/// The errors of the config. `has_all`: whether a list of the config has all items of its file.
pub(super) fn of_config(
    start: &Start<'_>,
    has_all: impl Fn(&str) -> bool,
) -> impl Iterator<Item = (Topic, RunError)> {
    let known = OF_CONFIG.into_iter().filter(move |(list, _)| list.is_none_or(&has_all));
    known.filter_map(move |(_, check)| Some((Topic::Config, check(start).err()?)))
}

/// The errors of the model folder.
pub(super) fn of_model(
    config: &RunConfig,
    open: &OpenModel,
) -> impl Iterator<Item = (Topic, RunError)> {
    OF_MODEL.into_iter().filter_map(move |check| Some((Topic::Model, check(config, open).err()?)))
}

/// FP8 needs a GPU that multiplies in it.
fn can_multiply(start: &Start<'_>) -> Result<(), RunError> {
    let matmul = start.config.model.matmul;
    Ok(start.device.map_or(Ok(()), |device| check_matmul(matmul, device))?)
}

/// The masks of `model.attention: masked` exist on the CPU only.
fn can_mask(start: &Start<'_>) -> Result<(), RunError> {
    let is_gpu = matches!(start.config.device.resolved(), DeviceChoice::Cuda(_));
    if is_gpu && start.config.model.attention == AttentionChoice::Masked {
        return Err(SetupError::MaskedOnGpu.into());
    }
    Ok(())
}
