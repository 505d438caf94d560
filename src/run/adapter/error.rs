use crate::checkpoint::CheckpointError;
use crate::optim::GroupError;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum AdapterError {
    #[error("`adapter.parts`: `{part}` is not a component of the model")]
    #[fault(hint = format!("the components are {}", quoted(components)))]
    Part { part: String, components: Vec<String> },
    #[error(
        "`adapter.target`: `{pattern}` matches no linear layer of {parts}; the nearest name is \
         `{nearest}`"
    )]
    #[fault(hint = target_hint(pattern))]
    Target { pattern: String, parts: String, nearest: String },
    #[error("`adapter.target` is `[]`: no layer would receive an adapter")]
    #[fault(hint = "write `all-linear`, or globs over names of linear layers")]
    NoTarget,
    #[error("`adapter.parts`: {parts} has no linear layer")]
    #[fault(hint = "name a component with linear layers, for example `llm`")]
    NoLayer { parts: String },
    #[error(transparent)]
    Pattern(#[from] GroupError),
    #[error("`adapter.train_also`: `{pattern}` names `{layer}`, which has an adapter")]
    #[fault(hint = "remove the layer from one of `adapter.target` and `train_also`")]
    Both { pattern: String, layer: String },
    #[error(
        "`adapter.train_also`: `{pattern}` names `{experts}`: the folder of an adapter cannot have \
         whole experts"
    )]
    #[fault(
        hint = "name the experts in `adapter.target` to train adapters of them, or train without `adapter`"
    )]
    Experts { pattern: String, experts: String },
    #[error("`{key}` is `{found}`, which an adapter of the experts `{experts}` cannot have")]
    #[fault(
        hint = format!("set `{key}: {}`, which PEFT requires for parameters too, or name other layers in `adapter.target`", value_for_experts(key))
    )]
    OfExperts {
        key: &'static str,
        found: String,
        /// The first of the experts that have an adapter.
        experts: String,
    },
    #[error("adapter folder `{}` cannot be used", .folder.display())]
    #[fault(from = source)]
    Files {
        folder: PathBuf,
        /// The underlying error; boxed because of its size.
        source: Box<CheckpointError>,
    },
    #[error("adapter folder `{}`: `{field}` in adapter_config.json is `{found}`, which is not supported", .folder.display())]
    #[fault(hint = field_hint(field))]
    Unsupported { folder: PathBuf, field: String, found: String },
    #[error("adapter folder `{}`: tensor `{tensor}` {problem}", .folder.display())]
    #[fault(
        hint = "use the model that the adapter was trained on, and an adapter of its linear layers"
    )]
    Tensor {
        folder: PathBuf,
        tensor: String,
        /// What is wrong, after the name.
        problem: String,
    },
    #[error(
        "adapter folder `{}` has no experts that transformers 4 has in one tensor: those of a \
         vision-language model, with the same rank", .folder.display()
    )]
    #[fault(hint = "export the adapter without `--transformers-4`, or merge it into its model")]
    NoExchange { folder: PathBuf },
    #[error(
        "adapter folder `{}` was trained on `{trained_on}`, whose {differs} of \
         `{}`", .folder.display(), .base.display()
    )]
    #[fault(
        hint = "pass the model that the adapter was trained on; with another one, it gives wrong answers"
    )]
    OtherBase {
        folder: PathBuf,
        trained_on: String,
        base: PathBuf,
        /// What differs, as a clause that the message ends with.
        differs: String,
    },
    #[error(
        "adapter folder `{}` was trained with other tokens than `model.add_tokens` and \
         `model.add_special_tokens` add", .folder.display()
    )]
    #[fault(
        hint = "name the tokens that its tokenizer.json has beyond that of the model, in their order"
    )]
    Tokens { folder: PathBuf },
    #[error(
        "`adapter.rank` is `{rank}`, but the weight of `{layer}` has {limit} singular values, and \
         `adapter.init` takes {rank} of them"
    )]
    #[fault(hint = "set a smaller `adapter.rank`, or exclude the layer with `adapter.target`")]
    Rank {
        layer: String,
        rank: usize,
        /// The smaller one of the numbers of inputs and outputs.
        limit: usize,
    },
    #[error("`{key}` is `{found}`, but the adapter in `adapter.start_from` has `{expected}`")]
    #[fault(hint = "remove the key: with `start_from`, it follows from the adapter")]
    StartFrom { key: &'static str, found: String, expected: String },
}

impl AdapterError {
    /// The config key that is the cause, if there is one.
    pub fn key(&self) -> Option<&'static str> {
        Some(match self {
            Self::Part { .. } | Self::NoLayer { .. } => "adapter.parts",
            Self::Target { .. } | Self::NoTarget => "adapter.target",
            Self::Pattern(error) => error.origin().0,
            Self::Both { .. } | Self::Experts { .. } => "adapter.train_also",
            Self::Rank { .. } => "adapter.rank",
            Self::Tokens { .. } => "adapter.start_from",
            Self::StartFrom { key, .. } | Self::OfExperts { key, .. } => key,
            _ => return None,
        })
    }
}

fn quoted(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

fn target_hint(pattern: &str) -> &'static str {
    if pattern.contains(',') {
        "write a list of names or globs, such as `[q_proj, v_proj]`"
    } else {
        "write the name of a linear layer or a glob, such as `*.q_proj`; embeddings, \
         convolutions and norms have no adapter, but `adapter.train_also` trains them"
    }
}

fn value_for_experts(key: &str) -> &'static str {
    match key {
        "adapter.dropout" => "0",
        "adapter.kind" => "lora",
        _ => "default",
    }
}

fn field_hint(field: &str) -> &'static str {
    if field == "init_lora_weights" {
        "this adapter belongs to changed weights of its model: save it with PEFT's \
         `path_initial_model_for_weight_conversion`, or merge it into its model"
    } else if field.ends_with("_pattern") {
        "write the key as a regular expression without look-around and back-references, or \
         as the name of a module"
    } else {
        "merge the adapter into its model with PEFT, and use that model"
    }
}
