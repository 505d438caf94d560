//! The vision encoder: sizes, and the names of its tensors.

use super::super::error::{RunError, SetupError};
use super::{Metadata, TensorPart, count, same};
use crate::checkpoint::GgufValue;
use crate::data::{ImageConfig, ImageProcessor};
use crate::models::{VisionConfig, VisionMlp};
use crate::nn::ParamSpec;
use crate::ops::Gelu;
use std::path::Path;

/// Names of the parameters begin with this.
pub(super) const PREFIX: &str = "model.visual.";
/// Side in pixels of the windows of Qwen2.5-VL, a constant of llama.cpp.
const WINDOW: usize = 112;
/// `image_size` without a table of positions, as the converter of llama.cpp has it.
const IMAGE_SIZE: usize = 560;
/// Parts of a block, and their names in a file.
const NAMES: [(&str, &str); 9] = [
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

pub(super) fn metadata(folder: &Path, vision: &VisionConfig) -> Result<Metadata, RunError> {
    let unsupported = |what| SetupError::NoGguf { folder: folder.to_owned(), what };
    check(vision).map_err(unsupported)?;
    let images = ImageProcessor::from_folder(folder, &ImageConfig::default())?;
    let [mean, std] = images.mean_and_std().map(|list| list.map(|value| value / 255.0).to_vec());
    let side = vision.parts.num_position_embeddings.map(|rows| rows.isqrt() * vision.patch_size);
    let number = |key: &str, value: usize| count("clip.vision", key, value);
    let word = |key: &str, value: &str| (key.to_owned(), GgufValue::Text(value.to_owned()));
    let flag = |key: &str| (key.to_owned(), GgufValue::Bool(true));
    let list = |key: &str, value: Vec<f32>| (format!("clip.vision.{key}"), GgufValue::F32s(value));
    let mut found = vec![
        word("general.architecture", "clip"),
        word("general.type", "mmproj"),
        flag("clip.has_vision_encoder"),
        number("projection_dim", vision.out_hidden_size),
        number("image_size", side.unwrap_or(IMAGE_SIZE)),
        number("patch_size", vision.patch_size),
        number("embedding_length", vision.hidden_size),
        number("feed_forward_length", vision.intermediate_size),
        number("block_count", vision.depth),
        number("attention.head_count", vision.num_heads),
        (
            "clip.vision.attention.layer_norm_epsilon".to_owned(),
            GgufValue::F32(vision.parts.eps as f32),
        ),
        number("spatial_merge_size", vision.spatial_merge_size),
        list("image_mean", mean),
        list("image_std", std),
    ];
    if let Some(interval) = interval(vision) {
        found.push(word("clip.projector_type", "qwen2.5vl_merger"));
        found.extend([flag("clip.use_silu"), number("n_wa_pattern", interval)]);
    } else {
        let deepstack =
            (0..vision.depth).map(|block| vision.parts.deepstack.contains(&block)).collect();
        found.push(word("clip.projector_type", "qwen3vl_merger"));
        found.push(flag("clip.use_gelu"));
        let key = "clip.vision.is_deepstack_layers".to_owned();
        found.push((key, GgufValue::Bools(deepstack)));
    }
    Ok(found)
}

/// Number of blocks from one with full attention to the next; `None` if all blocks have it.
fn interval(vision: &VisionConfig) -> Option<usize> {
    let first = vision.parts.windows.as_ref()?.full_attention_blocks.first();
    Some(first.map_or(vision.depth, |first| *first) + 1)
}

/// Fails if llama.cpp would compute something else.
fn check(vision: &VisionConfig) -> Result<(), String> {
    for (key, found, expected) in [
        ("temporal_patch_size", vision.temporal_patch_size, 2),
        ("spatial_merge_size", vision.spatial_merge_size, 2),
        ("in_channels", vision.in_channels, 3),
    ] {
        if found != expected {
            return Err(format!("`vision_config.{key}` is {found}, expected {expected}"));
        }
    }
    let other = match vision.parts.mlp {
        VisionMlp::Gelu { act: Gelu::Erf, .. } => Some("gelu"),
        VisionMlp::Gelu { act: Gelu::Quick, .. } => Some("quick_gelu"),
        VisionMlp::Gelu { act: Gelu::Tanh, .. } | VisionMlp::SwiGlu => None,
    };
    if let Some(other) = other {
        return Err(format!(
            "`vision_config.hidden_act` is `{other}`, expected `gelu_pytorch_tanh`"
        ));
    }
    let (Some(windows), Some(interval)) = (&vision.parts.windows, interval(vision)) else {
        return Ok(());
    };
    let side = windows.side * vision.spatial_merge_size * vision.patch_size;
    if side != WINDOW {
        return Err(format!("a window of the vision encoder has {side} pixels, expected {WINDOW}"));
    }
    let mut blocks = 0..vision.depth;
    match blocks.find(|k| vision.has_windows(*k) == (k + 1).is_multiple_of(interval)) {
        Some(k) => Err(format!(
            "`vision_config.fullatt_block_indexes`: block {k} breaks the interval of {interval} blocks"
        )),
        None => Ok(()),
    }
}

/// The tensors of the file for a parameter of the vision encoder.
pub(super) fn parts(vision: &VisionConfig, spec: &ParamSpec) -> Vec<TensorPart> {
    let name = spec.name.strip_prefix(PREFIX).unwrap_or(&spec.name);
    let (part, kind) = name.rsplit_once('.').unwrap_or((name, "weight"));
    let keep = |name: String| vec![same(name, &spec.shape)];
    let [norm, fc1, fc2] = vision.parts.merger.layers;
    if let Some((block, part)) = part.strip_prefix("blocks.").and_then(|rest| rest.split_once('.'))
    {
        let theirs =
            NAMES.iter().find(|(ours, _)| *ours == part).map_or(part, |(_, theirs)| *theirs);
        if part == "attn.qkv" && vision.parts.windows.is_some() {
            return thirds(&format!("v.blk.{block}"), kind, &spec.shape);
        }
        return keep(format!("v.blk.{block}.{theirs}.{kind}"));
    }
    if let Some(part) = part.strip_prefix("merger.") {
        let theirs = if part == norm {
            "v.post_ln"
        } else if part == fc1 {
            "mm.0"
        } else {
            "mm.2"
        };
        return keep(format!("{theirs}.{kind}"));
    }
    let deepstack = part.strip_prefix("deepstack_merger_list.");
    if let Some((k, part)) = deepstack.and_then(|rest| rest.split_once('.')) {
        let block = k.parse().ok().and_then(|k: usize| vision.parts.deepstack.get(k).copied());
        let theirs = if part == norm {
            "norm"
        } else if part == fc2 {
            "fc2"
        } else {
            "fc1"
        };
        return keep(format!("v.deepstack.{}.{theirs}.{kind}", block.unwrap_or_default()));
    }
    match (part, kind) {
        ("pos_embed", _) => keep("v.position_embd.weight".to_owned()),
        (_, "bias") => keep("v.patch_embd.bias".to_owned()),
        _ => frames(&spec.shape),
    }
}

/// The kernel of the patches, `[Dv, C, 2, p, p]`, as one of each frame.
fn frames(shape: &[usize]) -> Vec<TensorPart> {
    let frame = |(frame, name): (usize, &str)| {
        let mut part = same(format!("v.patch_embd.{name}"), shape);
        part.shape.remove(2);
        part.change = Box::new(move |values| values.narrow(2, frame, 1)?.squeeze(2));
        part
    };
    ["weight", "weight.1"].into_iter().enumerate().map(frame).collect()
}

/// Queries, keys and values apart.
fn thirds(block: &str, kind: &str, shape: &[usize]) -> Vec<TensorPart> {
    let rows = shape[0] / 3;
    let third = |(k, name): (usize, &str)| {
        let mut part = same(format!("{block}.attn_{name}.{kind}"), shape);
        part.shape[0] = rows;
        part.change = Box::new(move |values| values.narrow(0, k * rows, rows));
        part
    };
    ["q", "k", "v"].into_iter().enumerate().map(third).collect()
}
