//! Opens the device of the config key `device`.

use crate::dist::Rank;
use crate::metrics::available_memory_bytes;
use crate::ops::{CUDA_BUILD, count_gpus, gpu_of_rank, gpu_properties, needed_driver, open_gpu};
use crate::train::DeviceChoice;
use candle_core::Device;

/// A GPU that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("`device` is `cuda:{ordinal}`, which cannot be used")]
pub struct DeviceError {
    ordinal: usize,
    source: candle_core::Error,
}

impl DeviceError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> String {
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
}

impl DeviceChoice {
    /// Opens the device. `auto` falls back to the CPU, with a warning in a build that supports
    /// GPUs.
    pub fn open(self) -> Result<Device, DeviceError> {
        self.open_for(Rank::ALONE)
    }

    /// The device that `auto` stands for, before it is opened.
    #[must_use]
    pub fn resolved(self) -> Self {
        match self {
            Self::Auto if count_gpus() > 0 => Self::Cuda(gpu_of_rank(0)),
            Self::Auto => Self::Cpu,
            known => known,
        }
    }

    /// The bytes that are free on the device for a new process; `None` if they are not known.
    pub fn free_memory(self) -> Option<f64> {
        match self.resolved() {
            Self::Cuda(_) if !CUDA_BUILD => None,
            Self::Cuda(ordinal) => Some(gpu_properties(&open_gpu(ordinal).ok()?)?.free as f64),
            _ => Some(available_memory_bytes()? as f64),
        }
    }

    /// Opens the device of a rank. With `auto`, each rank of a machine has a GPU of its own.
    pub fn open_for(self, rank: Rank) -> Result<Device, DeviceError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(ordinal) => {
                open_gpu(ordinal).map_err(|source| DeviceError { ordinal, source })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_gpu_is_an_error_unless_the_device_is_auto() {
        assert!(DeviceChoice::Auto.open().is_ok());
        let error = DeviceChoice::Cuda(4096).open().unwrap_err();
        assert_eq!(error.to_string(), "`device` is `cuda:4096`, which cannot be used");
        assert!(error.hint().contains("`device: cpu`"));
    }
}
