//! The config section `adapter`.

use serde::{Deserialize, Deserializer, Serialize};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// A low-rank adapter: the weights of the model stay as they are, and small matrices next to some
/// of its linear layers are trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdapterConfig {
    /// `lora` by default.
    pub kind: AdapterKind,
    /// Rank of the matrices; 8 by default.
    pub rank: NonZeroUsize,
    /// The output of the adapter is multiplied by `alpha / rank`; 32 by default.
    pub alpha: f64,
    /// Probability with which an input of the adapter is set to zero in training; 0.05 by default.
    pub dropout: f64,
    /// The linear layers that receive an adapter: `all-linear` (the default), or globs over their
    /// names.
    pub target: Targets,
    /// Components (`llm`, `vision`, `merger`) whose layers `target` selects from; `[llm]` by
    /// default.
    pub parts: Vec<String>,
    /// Whether the output is multiplied by `alpha / sqrt(rank)` instead of `alpha / rank`.
    pub rslora: bool,
    /// Initial values; `default` by default.
    pub init: AdapterInit,
    /// Globs over parameter names of the model whose modules are trained as well; none by default.
    pub train_also: Vec<String>,
    /// How the linear layers of the model are stored; `none` by default.
    pub quantize: Quantize,
    /// Folder of an adapter in PEFT's layout whose values training starts from.
    pub start_from: Option<PathBuf>,
}

impl Default for AdapterConfig {
    fn default() -> Self {
        Self {
            kind: AdapterKind::Lora,
            rank: NonZeroUsize::MIN.saturating_add(7),
            alpha: 32.0,
            dropout: 0.05,
            target: Targets::AllLinear,
            parts: vec!["llm".to_owned()],
            rslora: false,
            init: AdapterInit::Default,
            train_also: Vec::new(),
            quantize: Quantize::None,
            start_from: None,
        }
    }
}

impl AdapterConfig {
    /// Factor of the output of the adapter.
    pub fn scale(&self) -> f64 {
        let rank = self.rank.get() as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

/// Kind of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterKind {
    /// `W x + scale B A x` (Hu et al. 2021).
    #[default]
    Lora,
    /// As `lora`, with a trained length of each row of the sum of both matrices (Liu et al. 2024).
    Dora,
}

/// How the frozen linear layers of a model are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantize {
    /// In the compute dtype.
    #[default]
    None,
    /// In 4 bits, as in bitsandbytes (Dettmers et al. 2023).
    Nf4,
}

/// Initial values of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
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

/// The name of [`Targets::AllLinear`].
const ALL_LINEAR: &str = "all-linear";

fn all_linear<S: serde::Serializer>(serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(ALL_LINEAR)
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
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
        deserializer.deserialize_any(Visitor)
    }
}
