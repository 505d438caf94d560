//! Opens the device of the config key `device`.

use super::error::RunError;
use super::memory::RESERVED;
use crate::dist::Rank;
use crate::metrics::available_memory_bytes;
use crate::ops::{
    CUDA_BUILD, count_gpus, gpu_memory, gpu_of_rank, gpu_properties, needed_driver, open_gpu,
};
use crate::train::DeviceChoice;
use candle_core::Device;
use std::path::Path;

pub(super) fn device_hint() -> String {
    if CUDA_BUILD {
        let driver = needed_driver();
        format!(
            "run `nvidia-smi`: it must list a GPU of this number and {driver}; \
             `CUDA_VISIBLE_DEVICES` may hide GPUs. `device: cpu` trains without a GPU"
        )
    } else {
        "this binary was built without CUDA: build it with `--features cuda`, or use `device: cpu`"
            .to_owned()
    }
}

/// The memory that a run can use on the GPU `device`, in bytes: what is free, the memory of tensors
/// that exist, and the memory of CUDA itself, which exists as soon as the GPU is open. Predictions
/// contain all three.
pub(super) fn usable_gpu_memory(device: &Device) -> Option<f64> {
    let (gpu, own) = (gpu_properties(device)?, gpu_memory(device)?);
    Some((gpu.free + own.reserved) as f64 + RESERVED)
}

impl DeviceChoice {
    /// Opens the device. `auto` falls back to the CPU, with a warning in a build that supports
    /// GPUs.
    pub fn open(self) -> Result<Device, RunError> {
        self.open_for(Rank::ALONE)
    }

    /// The device that `auto` chooses, before it is opened.
    #[must_use]
    pub fn resolved(self) -> Self {
        match self {
            Self::Auto if count_gpus() > 0 => Self::Cuda(gpu_of_rank(0)),
            Self::Auto => Self::Cpu,
            known => known,
        }
    }

    /// The bytes that a new process can use on the device; `None` if they are not known.
    pub fn free_memory(self) -> Option<f64> {
        match self.resolved() {
            Self::Cuda(_) if !CUDA_BUILD => None,
            Self::Cuda(ordinal) => usable_gpu_memory(&open_gpu(ordinal).ok()?),
            _ => Some(available_memory_bytes()? as f64),
        }
    }

    /// Opens the device of a rank. With `auto`, each rank of a machine has a GPU of its own.
    pub fn open_for(self, rank: Rank) -> Result<Device, RunError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(ordinal) => {
                // candle appends a backtrace if `RUST_BACKTRACE` is set
                let first_line = |text: String| text.lines().next().unwrap_or_default().to_owned();
                open_gpu(ordinal).map_err(|error| RunError::Device {
                    ordinal,
                    problem: first_line(error.to_string()),
                })
            }
            Self::Auto if !CUDA_BUILD => Ok(Device::Cpu),
            Self::Auto if rank.world > 1 => Self::Cuda(gpu_of_rank(rank.local_rank)).open(),
            Self::Auto => Ok(open_gpu(0).unwrap_or_else(|error| {
                tracing::warn!(%error, "`device: auto` found no usable GPU: training on the CPU");
                Device::Cpu
            })),
        }
    }
}

/// `cpu` or `cuda:N`.
pub fn device_name(device: &Device) -> String {
    match device.location() {
        candle_core::DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        _ => "cpu".to_owned(),
    }
}

/// The name of the GPU, or of the CPU with its number of threads.
pub(super) fn machine_name(device: &Device) -> String {
    if let Some(gpu) = gpu_properties(device) {
        return gpu.name;
    }
    let cpus = crate::files::read(Path::new("/proc/cpuinfo")).unwrap_or_default();
    let cpus = String::from_utf8_lossy(&cpus);
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, name)| name.trim());
    format!("{model}, {} threads", rayon::current_num_threads())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fault::Fault;

    #[test]
    fn a_missing_gpu_is_an_error_unless_the_device_is_auto() {
        assert!(DeviceChoice::Auto.open().is_ok());
        let error = DeviceChoice::Cuda(4096).open().unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("`device` is `cuda:4096`, which cannot be used: "),
            "{message}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(error.hint().unwrap().contains("`device: cpu`"));
    }
}
