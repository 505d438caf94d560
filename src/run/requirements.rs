//! What a run requires of its config and its device besides valid values. A run stops at the first
//! requirement that fails; `check` reports all that fail.

use super::error::RunError;
use super::load_model::{check_masks, check_matmul, check_world};
use super::resume::eval_rule;
use crate::config::RunConfig;
use crate::train::DeviceChoice;
use candle_core::Device;

/// A requirement of the config, with the list that it reads as a whole, if there is one. The second
/// argument is the number of ranks; `None`: the launcher chooses it.
type ConfigRequirement =
    (Option<&'static str>, fn(&RunConfig, Option<usize>) -> Result<(), RunError>);

const CONFIG_REQUIREMENTS: [ConfigRequirement; 2] = [
    (None, |config, world| world.map_or(Ok(()), |world| check_world(config, world))),
    (Some("data.eval"), |config, _| eval_rule(config).map(drop)),
];

/// A requirement of the device. `None`: it was not opened.
type DeviceRequirement = fn(&RunConfig, Option<&Device>) -> Result<(), RunError>;

const DEVICE_REQUIREMENTS: [DeviceRequirement; 2] = [check_product, check_attention];

/// The requirements of the config that fail. `has_all`: whether a list of the config has all items
/// of its file.
pub(super) fn of_config(
    config: &RunConfig,
    world: Option<usize>,
    has_all: impl Fn(&str) -> bool,
) -> impl Iterator<Item = RunError> {
    let known = CONFIG_REQUIREMENTS.into_iter();
    let known = known.filter(move |(list, _)| list.is_none_or(&has_all));
    known.filter_map(move |(_, check)| check(config, world).err())
}

/// The requirements of the device that fail.
pub(super) fn of_device(
    config: &RunConfig,
    device: Option<&Device>,
) -> impl Iterator<Item = RunError> {
    DEVICE_REQUIREMENTS.into_iter().filter_map(move |check| check(config, device).err())
}

/// Fails with the first error, if there is one.
pub(super) fn first(mut errors: impl Iterator<Item = RunError>) -> Result<(), RunError> {
    errors.next().map_or(Ok(()), Err)
}

/// FP8 needs a GPU that multiplies in it, or the CPU.
fn check_product(config: &RunConfig, device: Option<&Device>) -> Result<(), RunError> {
    Ok(device.map_or(Ok(()), |device| check_matmul(config.model.matmul, device))?)
}

/// The masks of `model.attention: masked` exist on the CPU only.
fn check_attention(config: &RunConfig, device: Option<&Device>) -> Result<(), RunError> {
    let chosen = || matches!(config.device.resolved(), DeviceChoice::Cuda(_));
    let on_gpu = device.map_or_else(chosen, |device| !device.is_cpu());
    Ok(check_masks(config.model.attention, on_gpu)?)
}
