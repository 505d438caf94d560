//! The decoder: sizes, and the names of its tensors.
//!
//! Shapes: `Hk` key heads and `Hv` value heads of linear attention.

use super::{Metadata, TensorPart, count, same};
use crate::checkpoint::GgufValue;
use crate::models::ModelConfig;
use crate::nn::{DecoderConfig, LinearAttentionSpec, ParamSpec};
use crate::ops::NormScale;
use candle_core::{Result as TensorResult, Tensor};
use serde_json::Value;

/// Parts of a layer, and their names in a file.
const NAMES: [(&str, &str); 17] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
];

/// Fails if llama.cpp would compute something else.
pub(super) fn check(text: &DecoderConfig) -> Result<(), String> {
    if text.moe().is_some() {
        return Err("it has experts".to_owned());
    }
    if text.layers.iter().filter_map(|layer| layer.attention()).any(|spec| spec.window.is_some()) {
        return Err("its attention has a sliding window".to_owned());
    }
    let Some(linear) = text.linear_attention() else { return Ok(()) };
    if linear.key_head_dim != linear.value_head_dim {
        return Err(format!(
            "`linear_key_head_dim` is {} and `linear_value_head_dim` is {}, expected the same size",
            linear.key_head_dim, linear.value_head_dim
        ));
    }
    let interval = interval(text);
    let is_full = |k: usize| (k + 1).is_multiple_of(interval);
    let mut layers = text.layers.iter().enumerate();
    match layers.find(|(k, layer)| layer.attention().is_some() != is_full(*k)) {
        Some((k, _)) => {
            Err(format!("`layer_types`: layer {k} breaks the interval of {interval} layers"))
        }
        None => Ok(()),
    }
}

/// Number of layers from one with full attention to the next.
fn interval(text: &DecoderConfig) -> usize {
    let first = text.layers.iter().position(|layer| layer.attention().is_some());
    first.unwrap_or(text.layers.len()) + 1
}

pub(super) fn metadata(
    family: &str,
    config: &ModelConfig,
    json: &Value,
) -> Result<Metadata, String> {
    let text = &config.text;
    let context = [&json["text_config"], json]
        .into_iter()
        .find_map(|section| section["max_position_embeddings"].as_u64())
        .ok_or("config.json has no `max_position_embeddings`")?;
    let number = |key: &str, value: usize| count(family, key, value);
    let float = |key: &str, value: f64| (format!("{family}.{key}"), GgufValue::F32(value as f32));
    let word = |key: &str, value: &str| (key.to_owned(), GgufValue::Text(value.to_owned()));
    let mut found = vec![
        word("general.architecture", family),
        word("general.type", "model"),
        number("block_count", text.layers.len()),
        number("context_length", context as usize),
        number("embedding_length", text.hidden_size),
        number("feed_forward_length", text.intermediate_size),
        number("attention.head_count", text.num_attention_heads),
        number("attention.head_count_kv", text.num_key_value_heads),
        number("attention.key_length", text.head_dim),
        number("attention.value_length", text.head_dim),
        number("rope.dimension_count", text.rotary_dim),
        float("attention.layer_norm_rms_epsilon", text.rms_norm_eps),
        float("rope.freq_base", text.rope_theta),
    ];
    if let Some(mrope) = &text.mrope {
        // the fourth axis has no frequencies
        let sections = mrope.section.iter().map(|of_axis| *of_axis as i32).chain([0]).collect();
        found.push((format!("{family}.rope.dimension_sections"), GgufValue::I32s(sections)));
    }
    let deepstack = config.vision.as_ref().map(|vision| vision.parts.deepstack.len());
    found.extend(deepstack.filter(|n| *n > 0).map(|n| number("n_deepstack_layers", n)));
    if let Some(linear) = text.linear_attention() {
        found.extend([
            number("full_attention_interval", interval(text)),
            number("ssm.conv_kernel", linear.conv_kernel),
            number("ssm.state_size", linear.key_head_dim),
            number("ssm.group_count", linear.num_key_heads),
            number("ssm.time_step_rank", linear.num_value_heads),
            number("ssm.inner_size", linear.value_width()),
        ]);
    }
    Ok(found)
}

/// The tensors of the file for a parameter of the decoder.
pub(super) fn parts(text: &DecoderConfig, spec: &ParamSpec) -> Vec<TensorPart> {
    let name = spec.name.strip_prefix("model.language_model.");
    let name = name.or_else(|| spec.name.strip_prefix("model.")).unwrap_or(&spec.name);
    let plus_one =
        text.norm_scale == NormScale::OnePlusWeight && !name.ends_with("linear_attn.norm.weight");
    let is_norm = name.ends_with("norm.weight");
    let layer = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let Some((k, rest)) = layer else {
        let table = match name {
            "embed_tokens.weight" => "token_embd.weight",
            "norm.weight" => "output_norm.weight",
            _ => "output.weight",
        };
        return vec![norm(same(table.to_owned(), &spec.shape), is_norm && plus_one)];
    };
    let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    let of_layer = |name: &str| format!("blk.{k}.{name}");
    let named = match (part, kind) {
        ("linear_attn", "A_log") => of_layer("ssm_a"),
        ("linear_attn", _) => of_layer("ssm_dt.bias"),
        ("post_attention_layernorm", _) if text.linear_attention().is_some() => {
            of_layer("post_attention_norm.weight")
        }
        ("post_attention_layernorm", _) => of_layer("ffn_norm.weight"),
        _ => {
            let name = NAMES.iter().find(|(ours, _)| *ours == part);
            of_layer(&format!("{}.{kind}", name.map_or(part, |(_, theirs)| *theirs)))
        }
    };
    match text.linear_attention().zip(rest.strip_prefix("linear_attn.")) {
        Some((linear, part)) => vec![linear_part(*linear, part, named, &spec.shape)],
        None => vec![norm(same(named, &spec.shape), is_norm && plus_one)],
    }
}

/// The weights of a norm that adds one to them, as those of a norm that does not.
fn norm(part: TensorPart, plus_one: bool) -> TensorPart {
    if plus_one { TensorPart { change: Box::new(|values| values + 1.0), ..part } } else { part }
}

/// A tensor of linear attention. llama.cpp has the value heads of one key head `Hk` heads apart
/// instead of next to each other, the decay instead of its logarithm, and no size 1 in the kernel.
fn linear_part(
    linear: LinearAttentionSpec,
    part: &str,
    name: String,
    shape: &[usize],
) -> TensorPart {
    let (keys, size) = (2 * linear.num_key_heads * linear.key_head_dim, linear.value_head_dim);
    let mut part_of = same(name, shape);
    // the dimension of the value heads, the number of elements before them, the size of one
    let (dim, start, size) = match part {
        "in_proj_qkv.weight" | "conv1d.weight" => (0, keys, size),
        "in_proj_z.weight" => (0, 0, size),
        "out_proj.weight" => (1, 0, size),
        "norm.weight" => return part_of,
        _ => (0, 0, 1),
    };
    let (is_kernel, is_decay) = (part == "conv1d.weight", part == "A_log");
    if is_kernel {
        part_of.shape.remove(1);
    }
    part_of.change = Box::new(move |values| {
        let values = if is_kernel { values.squeeze(1)? } else { values.clone() };
        let values = if is_decay { values.exp()?.neg()? } else { values };
        tiled(&values, dim, start, linear, size)
    });
    part_of
}

/// Exchanges the order of value heads `[Hk, Hv / Hk]` of `size` elements in dimension `dim`, which
/// begin at element `start`.
fn tiled(
    values: &Tensor,
    dim: usize,
    start: usize,
    linear: LinearAttentionSpec,
    size: usize,
) -> TensorResult<Tensor> {
    let (keys, heads) = (linear.num_key_heads, linear.num_value_heads);
    let tail = values.narrow(dim, start, heads * size)?;
    let mut split = tail.dims().to_vec();
    split.splice(dim..=dim, [keys, heads / keys, size]);
    let moved = tail.contiguous()?.reshape(split)?.transpose(dim, dim + 1)?; // [.., Hv/Hk, Hk, size, ..]
    let moved = moved.contiguous()?.reshape(tail.dims())?;
    if start == 0 { Ok(moved) } else { Tensor::cat(&[&values.narrow(dim, 0, start)?, &moved], dim) }
}
