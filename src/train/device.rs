use serde::{Deserialize, Deserializer, Serialize, Serializer};
use settings::{Kind, Setting};
use std::fmt;
use std::str::FromStr;

/// Device of a run: `auto`, `cpu` or `cuda:N` in a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first GPU, or the CPU if this build or this machine has no usable GPU.
    #[default]
    Auto,
    /// All cores of the CPU.
    Cpu,
    /// The GPU with this number, from 0.
    Cuda(usize),
}

impl Setting for DeviceChoice {
    fn kind() -> Kind {
        Kind::Text
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
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = |rest: &str| rest.strip_prefix(':')?.parse().ok();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.strip_prefix("cuda").and_then(ordinal) {
                Some(ordinal) => Ok(Self::Cuda(ordinal)),
                None => Err(format!(
                    "`{text}` is not a device, expected `auto`, `cpu` or `cuda:N`, for example `cuda:0`"
                )),
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
            assert!(error.contains("expected `auto`, `cpu` or `cuda:N`"), "{error}");
        }
    }
}
