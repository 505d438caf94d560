//! The memory that a run is predicted to need, for its log, its metrics, and the message when there
//! is no more.

use super::device::usable_gpu_memory;
use super::error::RunError;
use super::estimate::ModelShape;
use super::plan_data::sample_fractions;
use super::plan_memory::{Load, RunMemory, advice};
use crate::config::RunConfig;
use crate::data::{JsonlRows, Plan};
use crate::metrics::{available_memory_bytes, memory_text, resident_memory_bytes};
use crate::ops::{memory_advice, set_memory_advice, set_predicted_memory};
use crate::train::{DeviceChoice, Ranks, RecomputeChoice};
use candle_core::Device;

/// The fractions of tokens of images and of supervised tokens before the data is read: an
/// assumption.
pub(super) const FRACTIONS: (f64, f64) = (0.5, 0.25);

/// The fraction of the memory that `recompute: auto` uses by prediction, which may be too low.
const USED: f64 = 0.9;

impl RunMemory {
    /// The cheapest `model.recompute` with which the run needs at most `memory` bytes, otherwise
    /// the one that needs least.
    fn cheapest(&self, shape: &ModelShape, memory: f64) -> Result<RecomputeChoice, RunError> {
        let mut choice = self.config.model.recompute;
        for (_, tried) in self.with_recompute() {
            choice = tried.config.model.recompute;
            if tried.bytes(shape)? <= memory {
                break;
            }
        }
        Ok(choice)
    }

    /// A run whose data is not known.
    pub(super) fn before_data(shape: &ModelShape, config: &RunConfig, world: usize) -> Self {
        let mut config = config.clone();
        config.device = config.device.resolved();
        let load = Load::full(shape, &config, FRACTIONS);
        Self { config, load, world }
    }

    /// Sets the message of a process without memory; returns the predicted bytes.
    pub(super) fn announce(&self, shape: &ModelShape) -> Result<f64, RunError> {
        let bytes = self.bytes(shape)?;
        set_predicted_memory(bytes as u64);
        if let Some(advice) = advice(&self.savings()?) {
            set_memory_advice(advice);
        }
        Ok(bytes)
    }
}

/// The memory that this process can use on the device, with what it uses already. `processes` share
/// the free memory of the host.
fn capacity(device: &Device, processes: usize) -> Option<f64> {
    if device.is_cpu() {
        let free = available_memory_bytes()? as f64 / processes as f64;
        return Some(free + resident_memory_bytes() as f64);
    }
    usable_gpu_memory(device)
}

/// The config with the cheapest `model.recompute` that fits into the memory of all ranks, instead of
/// `auto`; `none` if the micro-batches or the memory are not known.
pub(super) fn choose_recompute(
    config: &RunConfig,
    rows: &JsonlRows,
    plan: Option<&Plan>,
    ranks: &Ranks,
    device: &Device,
) -> Result<RunConfig, RunError> {
    let mut config = config.clone();
    if config.model.recompute != RecomputeChoice::Auto {
        return Ok(config);
    }
    let world = ranks.rank().world;
    let own = run_memory(&config, rows, plan, (world, device)).zip(capacity(device, world));
    let own = own.and_then(|((run, shape), free)| run.cheapest(&shape, USED * free).ok());
    let own = own.unwrap_or(RecomputeChoice::None);
    let choices = ranks.gather(own)?;
    config.model.recompute = choices.into_iter().max_by_key(|choice| choice.place()).unwrap_or(own);
    tracing::info!(recompute = config.model.recompute.name(), "`model.recompute` was chosen");
    Ok(config)
}

/// Predicts the peak memory of a rank from the data of the run, and warns if it exceeds what is
/// free. `plan` has its packs, if they are known. `None`: the micro-batches are not known.
pub(super) fn forecast(
    config: &RunConfig,
    rows: &JsonlRows,
    plan: Option<&Plan>,
    (world, device): (usize, &Device),
) -> Option<u64> {
    let (run, shape) = run_memory(config, rows, plan, (world, device))?;
    let need = run.announce(&shape).ok()?;
    if let Some(free) = capacity(device, 1)
        && need > free
    {
        let (need, free, advice) = (memory_text(need), memory_text(free), memory_advice());
        tracing::warn!(need, free, "the predicted memory exceeds what is free: {advice}");
    }
    let parts = run.parts(&shape).ok()?;
    Some(if device.is_cpu() { parts.process() } else { parts.device() } as u64)
}

/// The run on this device, with the packs of `plan`; `None` if the micro-batches are not known.
fn run_memory(
    config: &RunConfig,
    rows: &JsonlRows,
    plan: Option<&Plan>,
    (world, device): (usize, &Device),
) -> Option<(RunMemory, ModelShape)> {
    let on_cpu = device.is_cpu();
    let mut config = config.clone();
    config.device = match config.device {
        DeviceChoice::Cuda(index) => DeviceChoice::Cuda(index),
        _ if on_cpu => DeviceChoice::Cpu,
        _ => DeviceChoice::Cuda(0),
    };
    let shape = ModelShape::read(&config).ok()?;
    let [patches, targets] = sample_fractions(rows);
    let load = match plan {
        Some(plan) => Load::of(&shape, plan, targets).ok()?,
        None if config.data.packing => {
            Load::full(&shape, &config, (patches / shape.patches_per_token(), targets))
        }
        None => return None,
    };
    Some((RunMemory { config, load, world }, shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;
    use std::path::Path;

    /// The quickstart trains the vision encoder too.
    #[test]
    fn the_cheapest_recomputation_that_fits_is_chosen() {
        let settings = ["device=cpu", "model.recompute=auto"].map(str::to_owned);
        let config = load(Path::new("configs/quickstart.yaml"), &settings).unwrap();
        let shape = ModelShape::read(&config).unwrap();
        let run = RunMemory::before_data(&shape, &config, 1);
        let chosen = |memory| run.cheapest(&shape, memory).unwrap();
        let tried: Vec<(RecomputeChoice, f64)> = run
            .with_recompute()
            .iter()
            .map(|(_, run)| (run.config.model.recompute, run.bytes(&shape).unwrap()))
            .collect();
        assert_eq!(
            tried.iter().map(|(choice, _)| choice.name()).collect::<Vec<_>>(),
            ["least", "none", "vision", "llm", "full"]
        );
        let [least, none, .., full] = tried[..] else { panic!("{tried:?}") };
        assert!(least.1 > none.1 && none.1 > full.1, "{tried:?}");
        assert_eq!(chosen(least.1), RecomputeChoice::Least);
        assert_eq!(chosen(least.1 - 1.0), RecomputeChoice::None);
        assert_eq!(chosen(0.0), RecomputeChoice::Full);
        let fits = tried.iter().find(|(_, bytes)| *bytes < none.1).unwrap();
        assert_eq!(chosen(none.1 - 1.0), fits.0);
    }

    #[test]
    fn ranks_on_the_cpu_share_the_free_memory() {
        let [alone, shared] = [1, 4].map(|ranks| capacity(&Device::Cpu, ranks).unwrap());
        assert!(shared < alone, "{shared} {alone}");
    }
}
