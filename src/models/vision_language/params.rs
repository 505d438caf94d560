//! Components, and the list of parameters with their published names.

use super::config::Config;
use crate::nn::{Component, Init, Inputs, ParamSpec, decoder_specs};

/// The vision encoder without its mergers.
pub const VISION: Component = Component { name: "vision", inputs: Inputs::Media };
/// The main merger and the deepstack mergers.
pub const MERGER: Component = Component { name: "merger", inputs: Inputs::Media };
/// Embeddings, decoder layers, final norm, head.
pub const LLM: Component = Component { name: "llm", inputs: Inputs::All };

/// Name of the decoder's module.
pub(super) const DECODER: &str = "model.language_model";

/// Every tensor of a model of this shape in a fixed order. A tied head is not listed.
pub fn param_specs(config: &Config) -> Vec<ParamSpec> {
    let mut specs = Vec::new();
    let mut add = |component: Component, name: String, shape: &[usize]| {
        // norms and biases are the only vectors of the vision encoder
        let init = match shape {
            [_] if name.ends_with("bias") => Init::Zero,
            [_] => Init::One,
            _ => Init::Normal,
        };
        specs.push(ParamSpec { name, shape: shape.to_vec(), component, init });
    };
    let v = &config.vision;
    let kernel = [v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size];
    add(VISION, "model.visual.patch_embed.proj.weight".to_owned(), &kernel);
    add(VISION, "model.visual.patch_embed.proj.bias".to_owned(), &[v.hidden_size]);
    let table = [v.num_position_embeddings, v.hidden_size];
    add(VISION, "model.visual.pos_embed.weight".to_owned(), &table);
    for block in 0..v.depth {
        let mut linear = |name: &str, rows: usize, columns: usize| {
            let name = format!("model.visual.blocks.{block}.{name}");
            add(VISION, format!("{name}.weight"), &[rows, columns]);
            add(VISION, format!("{name}.bias"), &[rows]);
        };
        linear("attn.qkv", 3 * v.hidden_size, v.hidden_size);
        linear("attn.proj", v.hidden_size, v.hidden_size);
        linear("mlp.linear_fc1", v.intermediate_size, v.hidden_size);
        linear("mlp.linear_fc2", v.hidden_size, v.intermediate_size);
        for norm in ["norm1", "norm2"] {
            let name = format!("model.visual.blocks.{block}.{norm}");
            add(VISION, format!("{name}.weight"), &[v.hidden_size]);
            add(VISION, format!("{name}.bias"), &[v.hidden_size]);
        }
    }
    let merged = v.hidden_size * v.spatial_merge_size * v.spatial_merge_size;
    let mut merger = |name: String, norm: usize| {
        add(MERGER, format!("{name}.norm.weight"), &[norm]);
        add(MERGER, format!("{name}.norm.bias"), &[norm]);
        for (linear, rows) in [("linear_fc1", merged), ("linear_fc2", v.out_hidden_size)] {
            add(MERGER, format!("{name}.{linear}.weight"), &[rows, merged]);
            add(MERGER, format!("{name}.{linear}.bias"), &[rows]);
        }
    };
    merger("model.visual.merger".to_owned(), v.hidden_size);
    for k in 0..v.deepstack_visual_indexes.len() {
        merger(format!("model.visual.deepstack_merger_list.{k}"), merged);
    }
    specs.extend(decoder_specs(&config.text, DECODER, LLM));
    specs
}
