use serde::{Deserialize, Deserializer, Serialize};
use settings::{Choice, Kind, Setting, above, section};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// A low-rank adapter: the weights of the model stay as they are, and small matrices next to some
/// of its linear layers are trained.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// The adapter; `dora` is LoRA with a trained length of each row
    #[key(default)]
    pub kind: AdapterKind,
    /// Rank of the two matrices
    // Above the width of a model, a higher rank changes nothing.
    #[key(default = NonZeroUsize::MIN.saturating_add(7))]
    #[valid(range = ..=8192.0, expected = "at most 8192")]
    pub rank: NonZeroUsize,
    /// The output of the adapter is multiplied by `alpha / rank`, or see `rslora`
    #[key(default = 32.0)]
    #[valid(
        range = above(0.0),
        expected = "a finite number above 0",
        hint = "a usual value is twice `adapter.rank`, or more"
    )]
    pub alpha: f64,
    /// Probability with which an input of the adapter is 0 in training; `0` with [adapters of
    /// experts](adapters.md#experts)
    #[key(default = 0.05)]
    #[valid(range = 0.0..1.0, expected = "a number of 0 or more and below 1")]
    pub dropout: f64,
    /// Linear layers that receive an adapter: `all-linear`, or globs over their names and those of
    /// [experts](adapters.md#experts)
    #[key(default)]
    pub target: Targets,
    /// Components whose layers `target` selects from: `llm`, `vision`, `merger`
    #[key(default = vec!["llm".to_owned()])]
    pub parts: Vec<String>,
    /// `true`: multiply by `alpha / sqrt(rank)`
    #[key(default)]
    pub rslora: bool,
    /// Values at the start: `default` and `gaussian` (A is random, B is 0), or [parts of the
    /// weights](adapters.md#what-is-computed)
    #[key(default)]
    pub init: AdapterInit,
    /// Globs over parameter names of the model; their modules are trained completely
    #[key(default)]
    pub train_also: Vec<String>,
    /// How the frozen linear layers and experts are stored: in `model.precision`, or in 4 bits
    /// (QLoRA)
    #[key(default)]
    pub quantize: Quantize,
    /// Folder of a PEFT adapter whose values training starts from
    pub start_from: Option<PathBuf>,
}

impl AdapterConfig {
    /// Factor of the output of the adapter.
    pub fn scale(&self) -> f64 {
        let rank = self.rank.get() as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

/// Kind of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum AdapterKind {
    /// `W x + scale B A x` (Hu et al. 2021).
    #[default]
    Lora,
    /// As `lora`, with a trained length of each row of the sum of both matrices (Liu et al. 2024).
    Dora,
}

/// How the frozen linear layers of a model are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Quantize {
    /// In the compute dtype.
    #[default]
    None,
    /// In 4 bits, as in bitsandbytes (Dettmers et al. 2023).
    Nf4,
}

/// Initial values of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum AdapterInit {
    /// `A` is uniform in `-1 / sqrt(K) .. 1 / sqrt(K)` for `K` inputs, as in PEFT; `B` is zero.
    #[default]
    Default,
    /// `A` is normal with the standard deviation `1 / rank`; `B` is zero.
    Gaussian,
    /// `B A` is the part of `W` of its largest singular values; the layer computes with the rest of
    /// `W` (Meng et al. 2024).
    Pissa,
    /// `B A` is the product of the first columns of `Q` and rows of `R`, where `W = Q R`; the layer
    /// computes with the rest of `W` (Buyukakyuz 2024).
    Olora,
}

impl AdapterInit {
    /// Whether an adapter starts from a part of the weights.
    pub fn is_part(self) -> bool {
        matches!(self, Self::Pissa | Self::Olora)
    }
}

/// The linear layers that receive an adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Targets {
    /// All linear layers of the parts, without the head.
    #[default]
    #[serde(serialize_with = "all_linear")]
    AllLinear,
    /// Those whose names match one of these globs.
    Globs(Vec<String>),
}

impl Setting for Targets {
    fn kind() -> Kind {
        Kind::OneOf(vec![Kind::Text, Kind::List(Kind::Text.into())])
    }
}

const ALL_LINEAR: &str = "all-linear";

fn all_linear<S: serde::Serializer>(serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(ALL_LINEAR)
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TargetsVisitor;
        impl<'de> serde::de::Visitor<'de> for TargetsVisitor {
            type Value = Targets;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "`{ALL_LINEAR}`, a glob, or a list of globs")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Targets, E> {
                Ok(match text {
                    ALL_LINEAR => Targets::AllLinear,
                    glob => Targets::Globs(vec![glob.to_owned()]),
                })
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> Result<Targets, A::Error> {
                let mut globs = Vec::new();
                while let Some(glob) = seq.next_element::<String>()? {
                    globs.push(glob);
                }
                Ok(Targets::Globs(globs))
            }
        }
        deserializer.deserialize_any(TargetsVisitor)
    }
}
