//! Sizes of a decoder, and the names of its tensors.

use super::experts::{MoeConfig, sparse_specs, stored};
use super::init::Init;
use super::params::{Component, ParamSpec, Stored};
use kernels::{DeltaHeads, Masking, NormScale, Scores};
use std::num::NonZeroUsize;

#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    pub vocab_size: usize,
    /// Hidden size, `D`.
    pub hidden_size: usize,
    /// Width of the MLP, `F`.
    pub intermediate_size: usize,
    /// Number of query heads, `H`.
    pub num_attention_heads: usize,
    /// Number of key and value heads, `Hkv`; divides `H`.
    pub num_key_value_heads: usize,
    /// Size of a head, `Dh`. `H * Dh` may differ from `D`.
    pub head_dim: usize,
    /// Factor of the product of a query and a key.
    pub attention_scale: f32,
    /// Added to the mean square of every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Which rotary frequencies turn with time, height and width; `None`: all of them turn with
    /// time, as in models that read text only.
    pub mrope: Option<Mrope>,
    /// Whether the head and the embedding are one tensor.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
    /// Number of leading dimensions of a head that are rotated, even.
    pub rotary_dim: usize,
    /// How all RMS norms but the gated norm of linear attention multiply by their weights.
    pub norm_scale: NormScale,
    /// The layers, from the first.
    pub layers: Vec<LayerSpec>,
}

/// What a layer consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpec {
    /// The first half, which mixes the tokens of a sample.
    pub mixer: MixerSpec,
    /// The second half.
    pub mlp: MlpSpec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixerSpec {
    Attention(AttentionSpec),
    LinearAttention(LinearAttentionSpec),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpSpec {
    /// An MLP of width [`DecoderConfig::intermediate_size`].
    Dense,
    /// A router selects experts for each token.
    Experts(MoeConfig),
}

/// What attention has besides projections and a rotation of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionSpec {
    /// An RMS norm of each head of queries and keys.
    pub qk_norm: bool,
    /// Biases of queries, keys and values.
    pub qkv_bias: bool,
    /// A gate that multiplies the output of each head.
    pub output_gate: bool,
    /// Number of tokens that a token attends to: itself and those directly before it.
    pub window: Option<NonZeroUsize>,
}

/// Sizes of linear attention (the gated delta rule).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearAttentionSpec {
    /// Number of query and key heads, `Hk`.
    pub num_key_heads: usize,
    /// Number of value heads, `Hv`, a multiple of `Hk`.
    pub num_value_heads: usize,
    /// Size of a query or key head, `dk`.
    pub key_head_dim: usize,
    /// Size of a value head, `dv`.
    pub value_head_dim: usize,
    /// Number of tokens that the convolution reads.
    pub conv_kernel: usize,
}

/// Rotary frequencies of the three axes of a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mrope {
    /// Numbers of frequencies of time, height and width; they sum to half of the rotated dimensions.
    pub section: [usize; 3],
    pub layout: MropeLayout,
}

/// Which rotary frequencies of the decoder turn with time, height and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MropeLayout {
    /// In turns: time, height, width, time, .. (Qwen3-VL).
    Interleaved,
    /// First those of time, then those of height, then those of width (Qwen2.5-VL).
    Blocks,
}

impl Mrope {
    /// The axis that frequency `k` turns with. Interleaved: height if `k % 3 == 1`, width if
    /// `k % 3 == 2` (below three times the section's length), else time.
    pub(super) fn axis_of(self, k: usize) -> usize {
        let section = self.section;
        match (self.layout, k % 3) {
            (MropeLayout::Interleaved, axis @ (1 | 2)) if k < 3 * section[axis] => axis,
            (MropeLayout::Interleaved, _) => 0,
            (MropeLayout::Blocks, _) => {
                usize::from(k >= section[0]) + usize::from(k >= section[0] + section[1])
            }
        }
    }
}

impl LinearAttentionSpec {
    pub(super) fn heads(&self) -> DeltaHeads {
        DeltaHeads {
            key_heads: self.num_key_heads,
            value_heads: self.num_value_heads,
            key_dim: self.key_head_dim,
            value_dim: self.value_head_dim,
        }
    }

    /// Width of queries, keys and values together, `2 Hk dk + Hv dv`.
    pub fn qkv_width(&self) -> usize {
        2 * self.num_key_heads * self.key_head_dim + self.value_width()
    }

    /// Width of the values, `Hv dv`.
    pub fn value_width(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }
}

impl AttentionSpec {
    pub(super) fn masking(self) -> Masking {
        self.window.map_or(Masking::Causal, Masking::Window)
    }
}

impl DecoderConfig {
    pub(super) fn scores(&self, spec: AttentionSpec) -> Scores {
        Scores { masking: spec.masking(), scale: self.attention_scale }
    }

    /// The sizes of linear attention, which are the same in all layers; `None` if no layer has it.
    pub fn linear_attention(&self) -> Option<&LinearAttentionSpec> {
        self.layers.iter().find_map(LayerSpec::linear_attention)
    }

    /// The experts, which have the same sizes in all layers; `None` if all layers have an MLP.
    pub fn moe(&self) -> Option<&MoeConfig> {
        self.layers.iter().find_map(LayerSpec::experts)
    }

    pub(super) fn num_with_experts(&self) -> usize {
        self.layers.iter().filter_map(LayerSpec::experts).count()
    }

    /// Number of weights of experts that a token is not multiplied with.
    pub fn idle_weights(&self) -> usize {
        let experts = self.layers.iter().filter_map(LayerSpec::experts);
        experts.map(|moe| moe.idle_weights(self.hidden_size)).sum()
    }

    /// The same sizes, with the experts as weight files have them; `prefix` is the name of the
    /// decoder's module, and `shape_of` the shape of a tensor in the files.
    #[must_use]
    pub fn of_files(&self, prefix: &str, shape_of: &dyn Fn(&str) -> Option<Vec<usize>>) -> Self {
        let mut layers = self.layers.iter().enumerate();
        let Some((k, moe)) = layers.find_map(|(k, layer)| Some((k, layer.experts()?))) else {
            return self.clone();
        };
        let found = moe.of_files(self.hidden_size, &layer_name(prefix, k), shape_of);
        let of_files = |layer: &LayerSpec| match layer.mlp {
            MlpSpec::Dense => *layer,
            MlpSpec::Experts(_) => LayerSpec { mlp: MlpSpec::Experts(found), ..*layer },
        };
        Self { layers: self.layers.iter().map(of_files).collect(), ..self.clone() }
    }
}

impl LayerSpec {
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match &self.mixer {
            MixerSpec::Attention(spec) => Some(spec),
            MixerSpec::LinearAttention(_) => None,
        }
    }

    pub fn linear_attention(&self) -> Option<&LinearAttentionSpec> {
        match &self.mixer {
            MixerSpec::LinearAttention(spec) => Some(spec),
            MixerSpec::Attention(_) => None,
        }
    }

    pub fn experts(&self) -> Option<&MoeConfig> {
        match &self.mlp {
            MlpSpec::Experts(moe) => Some(moe),
            MlpSpec::Dense => None,
        }
    }
}

/// Name of an untied head.
pub(super) const LM_HEAD: &str = "lm_head.weight";

/// The tensors of a decoder and of an untied head; `prefix` is the name of the decoder's module.
pub fn decoder_specs(config: &DecoderConfig, prefix: &str, component: Component) -> Vec<ParamSpec> {
    let hidden = config.hidden_size;
    let norm = match config.norm_scale {
        NormScale::Weight => Init::One,
        NormScale::OnePlusWeight => Init::Zero,
    };
    let table = [config.vocab_size, hidden];
    let mut specs = Vec::new();
    let mut push = |name: String, shape: &[usize], init, stored| {
        specs.push(ParamSpec { name, shape: shape.to_vec(), component, init, stored });
    };
    push(embedding_name(prefix), &table, Init::Normal, Stored::Whole);
    for (k, layer) in config.layers.iter().enumerate() {
        let mut add = |part: &str, shape: &[usize], init| {
            let stored = stored(layer.experts(), part);
            push(format!("{}.{part}", layer_name(prefix, k)), shape, init, stored);
        };
        add("input_layernorm.weight", &[hidden], norm);
        match &layer.mixer {
            MixerSpec::LinearAttention(spec) => linear_attention_specs(spec, hidden, &mut add),
            MixerSpec::Attention(spec) => attention_specs(*spec, config, norm, &mut add),
        }
        add("post_attention_layernorm.weight", &[hidden], norm);
        match &layer.mlp {
            MlpSpec::Experts(moe) => sparse_specs(moe, hidden, &mut add),
            MlpSpec::Dense => mlp_specs(config.intermediate_size, hidden, &mut add),
        }
    }
    push(format!("{prefix}.norm.weight"), &[hidden], norm, Stored::Whole);
    if !config.tie_word_embeddings {
        push(LM_HEAD.to_owned(), &table, Init::Normal, Stored::Whole);
    }
    specs
}

fn mlp_specs(inner: usize, hidden: usize, add: &mut dyn FnMut(&str, &[usize], Init)) {
    add("mlp.gate_proj.weight", &[inner, hidden], Init::Normal);
    add("mlp.up_proj.weight", &[inner, hidden], Init::Normal);
    add("mlp.down_proj.weight", &[hidden, inner], Init::Normal);
}

fn attention_specs(
    spec: AttentionSpec,
    config: &DecoderConfig,
    norm: Init,
    add: &mut dyn FnMut(&str, &[usize], Init),
) {
    let (hidden, head_dim) = (config.hidden_size, config.head_dim);
    let q = config.num_attention_heads * head_dim;
    let kv = config.num_key_value_heads * head_dim;
    let q_and_gate = if spec.output_gate { 2 * q } else { q };
    add("self_attn.q_proj.weight", &[q_and_gate, hidden], Init::Normal);
    add("self_attn.k_proj.weight", &[kv, hidden], Init::Normal);
    add("self_attn.v_proj.weight", &[kv, hidden], Init::Normal);
    add("self_attn.o_proj.weight", &[hidden, q], Init::Normal);
    if spec.qk_norm {
        add("self_attn.q_norm.weight", &[head_dim], norm);
        add("self_attn.k_norm.weight", &[head_dim], norm);
    }
    if spec.qkv_bias {
        add("self_attn.q_proj.bias", &[q_and_gate], Init::Zero);
        add("self_attn.k_proj.bias", &[kv], Init::Zero);
        add("self_attn.v_proj.bias", &[kv], Init::Zero);
    }
}

fn linear_attention_specs(
    config: &LinearAttentionSpec,
    hidden: usize,
    add: &mut dyn FnMut(&str, &[usize], Init),
) {
    let (qkv, values, heads) = (config.qkv_width(), config.value_width(), config.num_value_heads);
    add("linear_attn.in_proj_qkv.weight", &[qkv, hidden], Init::Normal);
    add("linear_attn.in_proj_z.weight", &[values, hidden], Init::Normal);
    add("linear_attn.in_proj_b.weight", &[heads, hidden], Init::Normal);
    add("linear_attn.in_proj_a.weight", &[heads, hidden], Init::Normal);
    add("linear_attn.conv1d.weight", &[qkv, 1, config.conv_kernel], Init::Normal);
    add("linear_attn.dt_bias", &[heads], Init::One);
    add("linear_attn.A_log", &[heads], Init::LogDecay);
    add("linear_attn.norm.weight", &[config.value_head_dim], Init::One);
    add("linear_attn.out_proj.weight", &[hidden, values], Init::Normal);
}

pub(super) fn embedding_name(prefix: &str) -> String {
    format!("{prefix}.embed_tokens.weight")
}

pub(super) fn layer_name(prefix: &str, k: usize) -> String {
    format!("{prefix}.layers.{k}")
}
