//! The list of parameters: published names, shapes, and the part that each belongs to.

use super::ModelConfig;
use crate::tape::Param;
use std::collections::HashMap;

/// The parts that `freeze` and `lr_multipliers` know by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// The vision tower without its mergers.
    Vision,
    /// The main and all deepstack mergers.
    Merger,
    /// Embeddings, layers, norm, head.
    Llm,
}

impl Part {
    /// As written in a config.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vision => "vision",
            Self::Merger => "merger",
            Self::Llm => "llm",
        }
    }
}

/// One tensor of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Published name.
    pub name: String,
    /// Published shape.
    pub shape: Vec<usize>,
    /// For freezing and learning rates.
    pub part: Part,
}

/// A tensor that the model needs and that is not there, or has another shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// Not among the tensors given.
    #[error("the model has no tensor `{name}`")]
    Missing {
        /// Published name.
        name: String,
    },
}

/// Name of the token embedding.
pub(super) const EMBED_TOKENS: &str = "model.language_model.embed_tokens.weight";
/// Name of an untied head.
pub(super) const LM_HEAD: &str = "lm_head.weight";

/// Every tensor of a model of this shape, in a fixed order; a tied head is not listed.
pub fn param_specs(config: &ModelConfig) -> Vec<ParamSpec> {
    let mut specs = Vec::new();
    let mut add = |part: Part, name: String, shape: &[usize]| {
        specs.push(ParamSpec { name, shape: shape.to_vec(), part });
    };
    let v = &config.vision;
    let kernel = [v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size];
    add(Part::Vision, "model.visual.patch_embed.proj.weight".to_owned(), &kernel);
    add(Part::Vision, "model.visual.patch_embed.proj.bias".to_owned(), &[v.hidden_size]);
    let table = [v.num_position_embeddings, v.hidden_size];
    add(Part::Vision, "model.visual.pos_embed.weight".to_owned(), &table);
    for block in 0..v.depth {
        let mut linear = |name: &str, rows: usize, columns: usize| {
            let name = format!("model.visual.blocks.{block}.{name}");
            add(Part::Vision, format!("{name}.weight"), &[rows, columns]);
            add(Part::Vision, format!("{name}.bias"), &[rows]);
        };
        linear("attn.qkv", 3 * v.hidden_size, v.hidden_size);
        linear("attn.proj", v.hidden_size, v.hidden_size);
        linear("mlp.linear_fc1", v.intermediate_size, v.hidden_size);
        linear("mlp.linear_fc2", v.hidden_size, v.intermediate_size);
        for norm in ["norm1", "norm2"] {
            let name = format!("model.visual.blocks.{block}.{norm}");
            add(Part::Vision, format!("{name}.weight"), &[v.hidden_size]);
            add(Part::Vision, format!("{name}.bias"), &[v.hidden_size]);
        }
    }
    let merged = v.hidden_size * v.spatial_merge_size * v.spatial_merge_size;
    let mut merger = |name: String, norm: usize| {
        add(Part::Merger, format!("{name}.norm.weight"), &[norm]);
        add(Part::Merger, format!("{name}.norm.bias"), &[norm]);
        for (linear, rows) in [("linear_fc1", merged), ("linear_fc2", v.out_hidden_size)] {
            add(Part::Merger, format!("{name}.{linear}.weight"), &[rows, merged]);
            add(Part::Merger, format!("{name}.{linear}.bias"), &[rows]);
        }
    };
    merger("model.visual.merger".to_owned(), v.hidden_size);
    for k in 0..v.deepstack_visual_indexes.len() {
        merger(format!("model.visual.deepstack_merger_list.{k}"), merged);
    }
    let t = &config.text;
    add(Part::Llm, EMBED_TOKENS.to_owned(), &[t.vocab_size, t.hidden_size]);
    for layer in 0..t.num_hidden_layers {
        let mut weight = |name: &str, shape: &[usize]| {
            add(Part::Llm, format!("model.language_model.layers.{layer}.{name}.weight"), shape);
        };
        let (q, kv) = (t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim);
        weight("input_layernorm", &[t.hidden_size]);
        weight("self_attn.q_proj", &[q, t.hidden_size]);
        weight("self_attn.k_proj", &[kv, t.hidden_size]);
        weight("self_attn.v_proj", &[kv, t.hidden_size]);
        weight("self_attn.o_proj", &[t.hidden_size, q]);
        weight("self_attn.q_norm", &[t.head_dim]);
        weight("self_attn.k_norm", &[t.head_dim]);
        weight("post_attention_layernorm", &[t.hidden_size]);
        weight("mlp.gate_proj", &[t.intermediate_size, t.hidden_size]);
        weight("mlp.up_proj", &[t.intermediate_size, t.hidden_size]);
        weight("mlp.down_proj", &[t.hidden_size, t.intermediate_size]);
    }
    add(Part::Llm, "model.language_model.norm.weight".to_owned(), &[t.hidden_size]);
    if !config.tie_word_embeddings {
        add(Part::Llm, LM_HEAD.to_owned(), &[t.vocab_size, t.hidden_size]);
    }
    specs
}

/// Hands out parameters by name while a model is put together.
pub(super) struct ParamMap<'a>(HashMap<&'a str, &'a Param>);

impl<'a> ParamMap<'a> {
    pub(super) fn new(params: &'a [Param]) -> Self {
        Self(params.iter().map(|param| (param.name(), param)).collect())
    }

    pub(super) fn get(&self, name: &str) -> Result<Param, WeightError> {
        let missing = || WeightError::Missing { name: name.to_owned() };
        self.0.get(name).map(|param| (*param).clone()).ok_or_else(missing)
    }
}
