//! `device`: where a run computes.

use crate::ops::{CUDA_BUILD, open_gpu};
use candle_core::Device;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Where a run computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first GPU, if this build and this machine have one, else the CPU; the log says which and why.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

/// A `device` that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a device, expected `auto`, `cpu` or `cuda:N`, for example `cuda:0`")]
pub struct UnknownDevice(String);

/// A GPU that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("`device` is `cuda:{ordinal}`, which cannot be used")]
pub struct DeviceError {
    ordinal: usize,
    source: candle_core::Error,
}

impl DeviceError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        if CUDA_BUILD {
            "look at `nvidia-smi`: the driver must be 580 or later and the number one of its list; `CUDA_VISIBLE_DEVICES` hides others. \
             `device: cpu` trains without it"
        } else {
            "this binary was built without CUDA: build it with `--features cuda`, or use `device: cpu`"
        }
    }
}

impl DeviceChoice {
    /// Opens the device, and says in the log which one it is.
    pub fn open(self) -> Result<Device, DeviceError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(ordinal) => {
                open_gpu(ordinal).map_err(|source| DeviceError { ordinal, source })
            }
            Self::Auto if !CUDA_BUILD => Ok(Device::Cpu),
            Self::Auto => Ok(open_gpu(0).unwrap_or_else(|error| {
                tracing::warn!(%error, "`device: auto` found no GPU that can be used: computing on the CPU");
                Device::Cpu
            })),
        }
    }
}

/// `cpu`, or `cuda:N`.
pub fn device_name(device: &Device) -> String {
    match device.location() {
        candle_core::DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        _ => "cpu".to_owned(),
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let ordinal = |rest: &str| rest.strip_prefix(':')?.parse().ok();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.strip_prefix("cuda").and_then(ordinal) {
                Some(ordinal) => Ok(Self::Cuda(ordinal)),
                None => Err(UnknownDevice(text.to_owned())),
            },
        }
    }
}

impl Serialize for DeviceChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_reads_as_it_is_written() {
        for text in ["auto", "cpu", "cuda:0", "cuda:7"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for text in ["gpu", "cuda:", "cuda:x", "cuda0", "CPU", ""] {
            let error = text.parse::<DeviceChoice>().unwrap_err();
            assert!(error.to_string().contains("expected `auto`, `cpu` or `cuda:N`"), "{error}");
        }
    }

    #[test]
    fn a_gpu_that_is_not_there_is_an_error_and_auto_is_not() {
        assert!(DeviceChoice::Auto.open().is_ok());
        let error = DeviceChoice::Cuda(4096).open().unwrap_err();
        assert_eq!(error.to_string(), "`device` is `cuda:4096`, which cannot be used");
        assert!(error.hint().contains("`device: cpu`"));
    }
}
