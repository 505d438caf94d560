//! Sizes of a decoder, and the names of its tensors.

/// Sizes of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Vocabulary size, `V`.
    pub vocab_size: usize,
    /// Hidden size, `D`.
    pub hidden_size: usize,
    /// Width of the MLP, `F`.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of query heads, `H`.
    pub num_attention_heads: usize,
    /// Number of key and value heads, `Hkv`; divides `H`.
    pub num_key_value_heads: usize,
    /// Size of a head, `Dh`. `H * Dh` may differ from `D`.
    pub head_dim: usize,
    /// Added to the mean square of every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
}

/// Names and shapes of a decoder's tensors without the head; `prefix` is the name of its module.
pub fn decoder_specs(config: &DecoderConfig, prefix: &str) -> Vec<(String, Vec<usize>)> {
    let hidden = config.hidden_size;
    let (q, kv) = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    );
    let layer = [
        ("input_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![q, hidden]),
        ("self_attn.k_proj", vec![kv, hidden]),
        ("self_attn.v_proj", vec![kv, hidden]),
        ("self_attn.o_proj", vec![hidden, q]),
        ("self_attn.q_norm", vec![config.head_dim]),
        ("self_attn.k_norm", vec![config.head_dim]),
        ("post_attention_layernorm", vec![hidden]),
        ("mlp.gate_proj", vec![config.intermediate_size, hidden]),
        ("mlp.up_proj", vec![config.intermediate_size, hidden]),
        ("mlp.down_proj", vec![hidden, config.intermediate_size]),
    ];
    let mut specs = vec![(embedding_name(prefix), vec![config.vocab_size, hidden])];
    for k in 0..config.num_hidden_layers {
        let name = |part: &str| format!("{}.{part}.weight", layer_name(prefix, k));
        specs.extend(layer.iter().map(|(part, shape)| (name(part), shape.clone())));
    }
    specs.push((format!("{prefix}.norm.weight"), vec![hidden]));
    specs
}

pub(super) fn embedding_name(prefix: &str) -> String {
    format!("{prefix}.embed_tokens.weight")
}

pub(super) fn layer_name(prefix: &str, k: usize) -> String {
    format!("{prefix}.layers.{k}")
}
