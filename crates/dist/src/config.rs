//! The section `distributed` of the config.

use serde::de::{self, Deserializer, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use settings::{Choice, Kind, Setting, section};
use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

/// How the ranks of a run are started, and how they work together.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distributed {
    /// Number of ranks; `auto`: as many as the launcher has started, and without a launcher one per
    /// visible GPU, or 1 on the CPU
    #[key(default)]
    pub processes: Processes,
    /// `true`: the same bits for 1, 2, 4 .. ranks. `false`: sums in the order of the engine. `auto`:
    /// `true` on the CPU
    #[key(default)]
    pub exact: Exact,
    /// The parts of the training state that ranks divide
    #[key(default)]
    pub shard: Shard,
    /// The ranks that divide it: all, or those of each machine, with equal copies on all machines
    #[key(default)]
    pub shard_group: ShardGroup,
    /// Number of neighbouring ranks that compute the tokens of the same micro-batches, for long
    /// samples; divides the numbers of ranks and of heads
    #[key(default = NonZeroUsize::MIN)]
    pub sequence: NonZeroUsize,
    /// Seconds without progress, or until all ranks have connected, after which the run ends
    #[key(default = 300)]
    #[valid(range = 1.0..=86_400.0, expected = "a number of seconds from 1 to 86400")]
    pub timeout_s: u32,
    /// Network interface on which rank 0 listens: a name, such as `eth0`, or an IP address
    pub interface: Option<String>,
    /// TCP port of rank 0
    #[valid(range = 1.0.., expected = "a port from 1 to 65535")]
    pub port: Option<u16>,
}

impl Distributed {
    /// `timeout_s` as a duration.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.timeout_s))
    }
}

/// Number of ranks: `auto` or a number in a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Processes {
    /// The number that the launcher has started; without a launcher one for each visible GPU.
    #[default]
    Auto,
    /// This number.
    Count(NonZeroUsize),
}

/// Whether the gradients of a step have the same bits for every number of ranks: `auto`, `true` or
/// `false` in a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Exact {
    /// `true` on the CPU. `false` on GPUs, because an exact sum of several micro-batches needs more
    /// memory for gradients.
    #[default]
    Auto,
    /// The same bits for every number of ranks: micro-batches and ranks are added as one tree.
    Yes,
    /// Micro-batches are added in place, and ranks in the order of the engine; the results differ
    /// in rounding.
    No,
}

impl Exact {
    /// Whether sums are exact on a CPU or on a GPU.
    pub fn holds(self, on_cpu: bool) -> bool {
        match self {
            Self::Auto => on_cpu,
            Self::Yes => true,
            Self::No => false,
        }
    }
}

/// The parts of the training state that the ranks of a shard group divide among themselves. Each
/// rank has the rest completely.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, Choice,
)]
#[serde(rename_all = "snake_case")]
pub enum Shard {
    /// Nothing.
    #[default]
    None,
    /// Moments and master weights (ZeRO-1).
    Optimizer,
    /// Also gradients (ZeRO-2).
    Gradients,
    /// Also weights (ZeRO-3, FSDP).
    Full,
}

/// The ranks that divide the training state among themselves. Several groups have equal copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum ShardGroup {
    /// All ranks.
    #[default]
    All,
    /// The ranks of each machine.
    Node,
}

const AUTO: &str = "auto";

impl Setting for Processes {
    fn kind() -> Kind {
        Kind::OneOf(vec![Kind::Choice(vec![(AUTO, "")]), Kind::Integer { minimum: 1 }])
    }
}

impl Setting for Exact {
    fn kind() -> Kind {
        Kind::OneOf(vec![Kind::Choice(vec![(AUTO, "")]), Kind::Bool])
    }
}

impl Serialize for Processes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            Self::Count(count) => count.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Processes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ProcessesVisitor;

        impl Visitor<'_> for ProcessesVisitor {
            type Value = Processes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`auto` or a number of 1 or more")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Processes, E> {
                match text {
                    AUTO => Ok(Processes::Auto),
                    _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
                }
            }

            fn visit_u64<E: de::Error>(self, count: u64) -> Result<Processes, E> {
                let valid = usize::try_from(count).ok().and_then(NonZeroUsize::new);
                let wrong = || E::invalid_value(Unexpected::Unsigned(count), &self);
                valid.map(Processes::Count).ok_or_else(wrong)
            }
        }

        deserializer.deserialize_any(ProcessesVisitor)
    }
}

impl Serialize for Exact {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            exact => serializer.serialize_bool(*exact == Self::Yes),
        }
    }
}

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ExactVisitor;

        impl Visitor<'_> for ExactVisitor {
            type Value = Exact;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`auto`, `true` or `false`")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Exact, E> {
                match text {
                    AUTO => Ok(Exact::Auto),
                    _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
                }
            }

            fn visit_bool<E: de::Error>(self, exact: bool) -> Result<Exact, E> {
                Ok(if exact { Exact::Yes } else { Exact::No })
            }
        }

        deserializer.deserialize_any(ExactVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_str, to_string};

    #[test]
    fn every_value_reads_as_it_is_written() {
        for text in [
            r#"{"processes":"auto","exact":"auto","shard":"none","shard_group":"all","sequence":1,"timeout_s":300,"interface":null,"port":null}"#,
            r#"{"processes":8,"exact":true,"shard":"full","shard_group":"node","sequence":2,"timeout_s":1,"interface":"eth0","port":29500}"#,
            r#"{"processes":1,"exact":false,"shard":"optimizer","shard_group":"all","sequence":4,"timeout_s":86400,"interface":"::1","port":1}"#,
        ] {
            assert_eq!(to_string(&from_str::<Distributed>(text).unwrap()).unwrap(), text);
        }
        assert_eq!(from_str::<Distributed>("{}").unwrap(), Distributed::default());
    }

    #[test]
    fn another_value_is_refused_with_the_values_that_are_valid() {
        for (text, expected) in [
            (r#"{"processes": 0}"#, "expected `auto` or a number of 1 or more"),
            (r#"{"processes": "all"}"#, "expected `auto` or a number of 1 or more"),
            (r#"{"exact": "yes"}"#, "expected `auto`, `true` or `false`"),
            (r#"{"exact": 1}"#, "expected `auto`, `true` or `false`"),
            (r#"{"port": 70000}"#, "expected u16"),
            (r#"{"timeout": 5}"#, "unknown field `timeout`"),
        ] {
            let error = from_str::<Distributed>(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
