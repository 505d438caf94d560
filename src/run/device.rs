//! Opens the device of the config key `device`.

use crate::dist::Rank;
use crate::ops::{CUDA_BUILD, open_gpu};
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
    pub fn hint(&self) -> &'static str {
        if CUDA_BUILD {
            "run `nvidia-smi`: it must list a GPU of this number and a driver of version 580 or later; `CUDA_VISIBLE_DEVICES` may hide GPUs. \
             `device: cpu` trains without a GPU"
        } else {
            "this binary was built without CUDA: build it with `--features cuda`, or use `device: cpu`"
        }
    }
}

impl DeviceChoice {
    /// Opens the device. `auto` falls back to the CPU, with a warning in a build that supports
    /// GPUs.
    pub fn open(self) -> Result<Device, DeviceError> {
        self.open_for(Rank::ALONE)
    }

    /// Opens the device of a rank. With `auto`, each rank of a machine has a GPU of its own.
    pub fn open_for(self, rank: Rank) -> Result<Device, DeviceError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(ordinal) => {
                open_gpu(ordinal).map_err(|source| DeviceError { ordinal, source })
            }
            Self::Auto if !CUDA_BUILD => Ok(Device::Cpu),
            Self::Auto if rank.world > 1 => Self::Cuda(rank.local_rank).open(),
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
