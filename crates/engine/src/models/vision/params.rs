//! Components, and the list of parameters with their published names.

use super::config::{MergerParts, NormPlace, VisionAttention, VisionConfig, VisionMlp, VisionNorm};
use super::encoder::deepstack_merger;
use crate::nn::{Component, Init, Inputs, ParamSpec, Stored};

/// The vision encoder without its mergers.
pub const VISION: Component = Component { name: "vision", inputs: Inputs::Media };
/// The main merger and the deepstack mergers.
pub const MERGER: Component = Component { name: "merger", inputs: Inputs::Media };

/// Every tensor of a vision encoder in a fixed order.
pub(in crate::models) fn param_specs(v: &VisionConfig) -> Vec<ParamSpec> {
    let mut specs = Specs { v, specs: Vec::new() };
    specs.patches();
    for block in 0..v.depth {
        specs.block(block);
    }
    if let Some(of) = &v.parts.early_merger {
        specs.attention(of.merger.name);
        specs.norm(VISION, &format!("{}.{}", of.merger.name, of.norm), v.parts.norm, v.hidden_size);
        specs.merger(VISION, of.merger.name, &of.merger, v.hidden_size);
    }
    if let Some(name) = v.parts.post_norm {
        specs.norm(VISION, name, v.parts.norm, v.hidden_size);
    }
    let merger = &v.parts.merger;
    specs.merger(MERGER, merger.name, merger, v.out_hidden_size);
    for k in 0..v.parts.deepstack.len() {
        let merger = MergerParts { place: NormPlace::AfterMerge, ..merger.clone() };
        specs.merger(MERGER, &deepstack_merger(k), &merger, v.out_hidden_size);
    }
    specs.specs
}

struct Specs<'a> {
    v: &'a VisionConfig,
    specs: Vec<ParamSpec>,
}

impl Specs<'_> {
    fn add(&mut self, component: Component, name: String, shape: &[usize]) {
        // norms, biases and layer scales are the only vectors of the vision encoder
        let names = &self.v.parts.names;
        let is_scale = names.layer_scales.iter().flatten().any(|scale| name.ends_with(scale));
        let is_zero = names
            .class_token
            .is_some_and(|token| [token, names.positions].contains(&name.as_str()));
        let init = match shape {
            _ if is_zero => Init::Zero,
            [_] if is_scale => Init::LayerScale,
            [_] if name.ends_with("bias") => Init::Zero,
            [_] => Init::One,
            _ => Init::Normal,
        };
        let shape = shape.to_vec();
        self.specs.push(ParamSpec { name, shape, component, init, stored: Stored::Whole });
    }

    fn linear(&mut self, of: Component, name: &str, shape: [usize; 2], has_bias: bool) {
        self.add(of, format!("{name}.weight"), &shape);
        if has_bias {
            self.add(of, format!("{name}.bias"), &shape[..1]);
        }
    }

    fn norm(&mut self, of: Component, name: &str, kind: VisionNorm, width: usize) {
        self.add(of, format!("{name}.weight"), &[width]);
        if kind == VisionNorm::Layer {
            self.add(of, format!("{name}.bias"), &[width]);
        }
    }

    fn patches(&mut self) {
        let (v, parts, names) = (self.v, &self.v.parts, &self.v.parts.names);
        let [frames, side] = [v.temporal_patch_size, v.patch_size];
        let kernel = if parts.has_temporal_kernel {
            vec![v.hidden_size, v.in_channels, frames, side, side]
        } else {
            vec![v.hidden_size, v.in_channels, side, side]
        };
        self.add(VISION, format!("{}.weight", names.patch_embed), &kernel);
        if parts.has_patch_bias {
            self.add(VISION, format!("{}.bias", names.patch_embed), &[v.hidden_size]);
        }
        if let Some(name) = names.class_token {
            self.add(VISION, name.to_owned(), &[1, 1, v.hidden_size]);
        }
        if let Some(rows) = parts.num_position_embeddings {
            let table = [1, rows, v.hidden_size];
            let shape = if names.class_token.is_some() { &table[..] } else { &table[1..] };
            self.add(VISION, names.positions.to_owned(), shape);
        }
    }

    fn block(&mut self, block: usize) {
        let (v, parts, names) = (self.v, &self.v.parts, &self.v.parts.names);
        let name = |part: &str| format!("{}.{block}.{part}", names.blocks);
        let (width, inner) = (v.hidden_size, v.intermediate_size);
        self.attention(&format!("{}.{block}", names.blocks));
        let (into, out) = match parts.mlp {
            VisionMlp::Gelu { layers: [fc1, fc2], .. } => (&[fc1][..], fc2),
            VisionMlp::SwiGlu => (&["gate_proj", "up_proj"][..], "down_proj"),
        };
        for part in into {
            self.linear(VISION, &name(&format!("mlp.{part}")), [inner, width], true);
        }
        self.linear(VISION, &name(&format!("mlp.{out}")), [width, inner], true);
        if let VisionAttention::Separate { has_norms: true, .. } = parts.attention {
            for part in ["q_norm", "k_norm"] {
                let part = name(&format!("{}.{part}", names.attention));
                self.norm(VISION, &part, VisionNorm::Rms, width);
            }
        }
        for part in names.norms {
            self.norm(VISION, &name(part), parts.norm, width);
        }
        for part in names.layer_scales.into_iter().flatten() {
            self.add(VISION, name(part), &[width]);
        }
    }

    /// The linear layers of the attention of a block.
    fn attention(&mut self, block: &str) {
        let (v, names, width) = (self.v, &self.v.parts.names, self.v.hidden_size);
        let name = |layer: &str| format!("{block}.{}.{layer}", names.attention);
        match v.parts.attention {
            VisionAttention::Rotary => {
                self.linear(VISION, &name("qkv"), [3 * width, width], true);
            }
            VisionAttention::Separate { has_bias, .. } => {
                for layer in ["q_proj", "k_proj", "v_proj"] {
                    self.linear(VISION, &name(layer), [width, width], has_bias);
                }
            }
        }
        let output = format!("{block}.{}", names.attention_output);
        self.linear(VISION, &output, [width, width], true);
    }

    /// A merger to rows of `out` values.
    fn merger(&mut self, of: Component, name: &str, merger: &MergerParts, out: usize) {
        let v = self.v;
        let merged = v.hidden_size * v.rows_per_token();
        let width = match merger.place {
            NormPlace::BeforeMerge => v.hidden_size,
            NormPlace::AfterMerge => merged,
        };
        let [norm, fc1, fc2] = merger.layers.map(|layer| format!("{name}.{layer}"));
        self.norm(of, &norm, merger.norm, width);
        let hidden = v.hidden_of(merger);
        self.linear(of, &fc1, [hidden, merged], true);
        self.linear(of, &fc2, [out, hidden], true);
    }
}
