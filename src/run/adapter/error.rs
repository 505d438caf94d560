//! Errors of adapters.

use crate::checkpoint::CheckpointError;
use crate::optim::GroupError;
use std::path::PathBuf;

/// The reason why an adapter cannot be made or loaded.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// An entry of `adapter.parts` is not a component.
    #[error("`adapter.parts`: `{part}` is not a component of the model")]
    Part {
        /// As written.
        part: String,
        /// Names of the components.
        components: Vec<String>,
    },
    /// An entry of `adapter.target` matches no linear layer of the parts.
    #[error(
        "`adapter.target`: `{pattern}` matches no linear layer of {parts}; the nearest name is \
         `{nearest}`"
    )]
    Target {
        /// As written.
        pattern: String,
        /// The parts.
        parts: String,
        /// A layer with a similar name.
        nearest: String,
    },
    /// The list of targets is empty.
    #[error("`adapter.target` is `[]`: no layer would receive an adapter")]
    NoTarget,
    /// The parts have no linear layer.
    #[error("`adapter.parts`: {parts} has no linear layer")]
    NoLayer {
        /// The parts.
        parts: String,
    },
    /// A pattern of `adapter.target` or `adapter.train_also` cannot be applied.
    #[error(transparent)]
    Pattern(#[from] GroupError),
    /// A layer has an adapter and is trained completely.
    #[error("`adapter.train_also`: `{pattern}` names `{layer}`, which has an adapter")]
    Both {
        /// As written.
        pattern: String,
        /// The layer.
        layer: String,
    },
    /// The embedding is also the head.
    #[error(
        "`adapter.train_also`: `{pattern}` names the embedding, which is also the head of this \
         model: the adapter's folder cannot store it for both"
    )]
    Tied {
        /// As written.
        pattern: String,
    },
    /// The folder of an adapter cannot have whole experts.
    #[error(
        "`adapter.train_also`: `{pattern}` names `{experts}`: the folder of an adapter cannot have \
         whole experts"
    )]
    Experts {
        /// As written.
        pattern: String,
        /// The parameter.
        experts: String,
    },
    /// Adapters of experts cannot have this setting.
    #[error("`{key}` is `{found}`, which an adapter of the experts `{experts}` cannot have")]
    OfExperts {
        /// Config key.
        key: &'static str,
        /// Its value.
        found: String,
        /// The first of the experts that have an adapter.
        experts: String,
    },
    /// The folder of an adapter cannot be read.
    #[error("adapter folder `{}` cannot be used", .folder.display())]
    Files {
        /// The folder.
        folder: PathBuf,
        /// The underlying error; boxed because of its size.
        source: Box<CheckpointError>,
    },
    /// The adapter has a property that is not supported.
    #[error("adapter folder `{}`: `{field}` in adapter_config.json is `{found}`, which is not supported", .folder.display())]
    Unsupported {
        /// The folder.
        folder: PathBuf,
        /// Field of `adapter_config.json`.
        field: String,
        /// Its value.
        found: String,
    },
    /// The adapter has a tensor that does not belong to this model.
    #[error("adapter folder `{}`: tensor `{tensor}` {problem}", .folder.display())]
    Tensor {
        /// The folder.
        folder: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// What is wrong, after the name.
        problem: String,
    },
    /// transformers 4 has no module with such an adapter.
    #[error(
        "adapter folder `{}` has no experts that transformers 4 has in one tensor: those of a \
         vision-language model, with the same rank", .folder.display()
    )]
    NoExchange {
        /// The folder.
        folder: PathBuf,
    },
    /// The adapter was trained on another model.
    #[error(
        "adapter folder `{}` was trained on `{trained_on}`, whose {differs} of \
         `{}`", .folder.display(), .base.display()
    )]
    OtherBase {
        /// The folder.
        folder: PathBuf,
        /// The model of the training.
        trained_on: String,
        /// The model that is given now.
        base: PathBuf,
        /// What differs, as a clause that the message ends with.
        differs: String,
    },
    /// A layer has fewer singular values than the adapter starts from.
    #[error(
        "`adapter.rank` is `{rank}`, but the weight of `{layer}` has {limit} singular values, and \
         `adapter.init` takes {rank} of them"
    )]
    Rank {
        /// Name of the layer.
        layer: String,
        /// Rank of the adapter.
        rank: usize,
        /// The smaller one of the numbers of inputs and outputs.
        limit: usize,
    },
    /// The config contradicts the adapter to start from.
    #[error("`{key}` is `{found}`, but the adapter in `adapter.start_from` has `{expected}`")]
    StartFrom {
        /// Config key.
        key: &'static str,
        /// Value of the config.
        found: String,
        /// Value of the adapter.
        expected: String,
    },
}

impl AdapterError {
    /// The config key that is the cause, if there is one.
    pub fn key(&self) -> Option<&'static str> {
        Some(match self {
            Self::Part { .. } | Self::NoLayer { .. } => "adapter.parts",
            Self::Target { .. } | Self::NoTarget => "adapter.target",
            Self::Pattern(error) => error.origin().0,
            Self::Both { .. } | Self::Tied { .. } | Self::Experts { .. } => "adapter.train_also",
            Self::Rank { .. } => "adapter.rank",
            Self::StartFrom { key, .. } | Self::OfExperts { key, .. } => key,
            _ => return None,
        })
    }

    /// Returns the fix that the error message suggests; `None` if the wrapped error has it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Part { components, .. } => {
                let names: Vec<String> =
                    components.iter().map(|name| format!("`{name}`")).collect();
                return Some(format!("the components are {}", names.join(", ")));
            }
            Self::Target { pattern, .. } if pattern.contains(',') => {
                "write a list of names or globs, such as `[q_proj, v_proj]`"
            }
            Self::Target { .. } => {
                "write the name of a linear layer or a glob, such as `*.q_proj`; embeddings, \
                 convolutions and norms have no adapter, but `adapter.train_also` trains them"
            }
            Self::NoTarget => "write `all-linear`, or globs over names of linear layers",
            Self::NoLayer { .. } => "name a component with linear layers, for example `llm`",
            Self::Pattern(error) => return Some(error.hint()),
            Self::Both { .. } => "remove the layer from one of `adapter.target` and `train_also`",
            Self::Experts { .. } => {
                "name the experts in `adapter.target` to train adapters of them, or train without \
                 `adapter`"
            }
            Self::OfExperts { key, .. } => {
                let value = match *key {
                    "adapter.dropout" => "0",
                    "adapter.kind" => "lora",
                    _ => "default",
                };
                return Some(format!(
                    "set `{key}: {value}`, which PEFT requires for parameters too, or name other \
                     layers in `adapter.target`"
                ));
            }
            Self::Tied { .. } => {
                "remove the embedding from `train_also`, or train without `adapter`"
            }
            Self::Files { .. } => return None,
            Self::Unsupported { field, .. } if field == "init_lora_weights" => {
                "this adapter belongs to changed weights of its model: save it with PEFT's \
                 `path_initial_model_for_weight_conversion`, or merge it into its model"
            }
            Self::Unsupported { field, .. } if field.ends_with("_pattern") => {
                "write the key as a regular expression without look-around and back-references, or \
                 as the name of a module"
            }
            Self::Unsupported { .. } => {
                "merge the adapter into its model with PEFT, and use that model"
            }
            Self::Tensor { .. } => {
                "use the model that the adapter was trained on, and an adapter of its linear layers"
            }
            Self::NoExchange { .. } => {
                "export the adapter without `--transformers-4`, or merge it into its model"
            }
            Self::OtherBase { .. } => {
                "pass the model that the adapter was trained on; with another one, it gives wrong \
                 answers"
            }
            Self::Rank { .. } => {
                "set a smaller `adapter.rank`, or exclude the layer with `adapter.target`"
            }
            Self::StartFrom { .. } => {
                "remove the key: with `start_from`, it follows from the adapter"
            }
        };
        Some(hint.to_owned())
    }
}
