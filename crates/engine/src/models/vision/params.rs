//! Components, and the list of parameters with their published names.

use super::config::{VisionConfig, VisionMlp, VisionNorm};
use crate::nn::{Component, Init, Inputs, ParamSpec, Stored};

/// The vision encoder without its mergers.
pub const VISION: Component = Component { name: "vision", inputs: Inputs::Media };
/// The main merger and the deepstack mergers.
pub const MERGER: Component = Component { name: "merger", inputs: Inputs::Media };
/// Every tensor of a vision encoder in a fixed order.
pub(in crate::models) fn param_specs(v: &VisionConfig) -> Vec<ParamSpec> {
    let mut specs = Vec::new();
    let mut add = |component: Component, name: String, shape: &[usize]| {
        // norms and biases are the only vectors of the vision encoder
        let init = match shape {
            [_] if name.ends_with("bias") => Init::Zero,
            [_] => Init::One,
            _ => Init::Normal,
        };
        specs.push(ParamSpec {
            name,
            shape: shape.to_vec(),
            component,
            init,
            stored: Stored::Whole,
        });
    };
    let kernel = [v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size];
    add(VISION, "model.visual.patch_embed.proj.weight".to_owned(), &kernel);
    if v.parts.has_patch_bias {
        add(VISION, "model.visual.patch_embed.proj.bias".to_owned(), &[v.hidden_size]);
    }
    if let Some(rows) = v.parts.num_position_embeddings {
        let table = [rows, v.hidden_size];
        add(VISION, "model.visual.pos_embed.weight".to_owned(), &table);
    }
    let has_norm_bias = v.parts.norm == VisionNorm::Layer;
    let norm = |add: &mut dyn FnMut(Component, String, &[usize]), of, name: &str, width| {
        add(of, format!("{name}.weight"), &[width]);
        if has_norm_bias {
            add(of, format!("{name}.bias"), &[width]);
        }
    };
    for block in 0..v.depth {
        let name = |part: &str| format!("model.visual.blocks.{block}.{part}");
        let mut linear = |part: &str, rows: usize, columns: usize| {
            add(VISION, format!("{}.weight", name(part)), &[rows, columns]);
            add(VISION, format!("{}.bias", name(part)), &[rows]);
        };
        linear("attn.qkv", 3 * v.hidden_size, v.hidden_size);
        linear("attn.proj", v.hidden_size, v.hidden_size);
        let (into, out) = match v.parts.mlp {
            VisionMlp::Gelu { layers: [fc1, fc2], .. } => (&[fc1][..], fc2),
            VisionMlp::SwiGlu => (&["gate_proj", "up_proj"][..], "down_proj"),
        };
        for part in into {
            linear(&format!("mlp.{part}"), v.intermediate_size, v.hidden_size);
        }
        linear(&format!("mlp.{out}"), v.hidden_size, v.intermediate_size);
        for part in ["norm1", "norm2"] {
            norm(&mut add, VISION, &name(part), v.hidden_size);
        }
    }
    let merged = v.hidden_size * v.spatial_merge_size * v.spatial_merge_size;
    let [norm_name, fc1, fc2] = v.parts.merger_names;
    let mut merger = |name: String, width: usize| {
        norm(&mut add, MERGER, &format!("{name}.{norm_name}"), width);
        for (linear, rows) in [(fc1, merged), (fc2, v.out_hidden_size)] {
            add(MERGER, format!("{name}.{linear}.weight"), &[rows, merged]);
            add(MERGER, format!("{name}.{linear}.bias"), &[rows]);
        }
    };
    merger("model.visual.merger".to_owned(), v.hidden_size);
    for k in 0..v.parts.deepstack.len() {
        merger(format!("model.visual.deepstack_merger_list.{k}"), merged);
    }
    specs
}
