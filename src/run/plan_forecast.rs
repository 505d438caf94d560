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
use crate::train::DeviceChoice;
use candle_core::Device;

/// The fractions of tokens of images and of supervised tokens before the data is read: an
/// assumption.
pub(super) const FRACTIONS: (f64, f64) = (0.5, 0.25);

impl RunMemory {
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

/// The memory that this process can use on the device, with what it uses already.
fn capacity(device: &Device) -> Option<f64> {
    if device.is_cpu() {
        return Some((available_memory_bytes()? + resident_memory_bytes()) as f64);
    }
    usable_gpu_memory(device)
}

/// Predicts the peak memory of a rank from the data of the run, and warns if it exceeds what is
/// free. `plan` has its packs, if they are known. `None`: the micro-batches are not known.
pub(super) fn forecast(
    config: &RunConfig,
    rows: &JsonlRows,
    plan: Option<&Plan>,
    (world, device): (usize, &Device),
) -> Option<u64> {
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
    let run = RunMemory { config, load, world };
    let need = run.announce(&shape).ok()?;
    if let Some(free) = capacity(device)
        && need > free
    {
        let (need, free, advice) = (memory_text(need), memory_text(free), memory_advice());
        tracing::warn!(need, free, "the predicted memory exceeds what is free: {advice}");
    }
    let parts = run.parts(&shape).ok()?;
    Some(if on_cpu { parts.process() } else { parts.device() } as u64)
}
