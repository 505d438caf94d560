//! A second implementation of the model: plain tensor operations in `f64`, dense masks, one-hot
//! matrices in place of indexing, and candle's automatic differentiation.
//!
//! It follows the description of the architecture and shares no code with `src/`. It uses only
//! operations with a correct derivative in candle: no fused op, no scatter.

use super::{Weights, media_of};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use trainer::batch::{IGNORE_INDEX, VarlenBatch};
use trainer::models::{
    EarlyMerger, MergerParts, ModelConfig, NormPlace, TableReading, VisionAttention, VisionConfig,
    VisionMlp, VisionNorm,
};
use trainer::nn::{AttentionSpec, ExpertFiles, LinearAttentionSpec, MixerSpec, MoeConfig};
use trainer::nn::{Mrope, MropeLayout};
use trainer::ops::{Gelu, NormScale};

const CPU: &Device = &Device::Cpu;
const LAYER_NORM_EPS: f64 = 1e-6;

pub(super) struct Oracle {
    config: ModelConfig,
    vars: BTreeMap<String, Var>,
    names: Vec<String>,
}

/// A matrix from a function of row and column.
fn matrix(rows: usize, columns: usize, value: impl Fn(usize, usize) -> f64) -> Result<Tensor> {
    let value = &value;
    let values = (0..rows).flat_map(|row| (0..columns).map(move |column| value(row, column)));
    Tensor::from_vec(values.collect::<Vec<f64>>(), (rows, columns), CPU)
}

/// 1 if the condition holds, otherwise 0.
fn indicator(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

/// Position of a patch.
#[derive(Debug, Clone, Copy)]
struct Place {
    frame: usize, // index over all images of the batch
    row: usize,
    column: usize,
    height: usize, // of the grid, in patches
    width: usize,
}

impl Oracle {
    pub(super) fn new(weights: &Weights) -> Self {
        let vars = weights.specs.iter().zip(&weights.values).map(|(spec, values)| {
            let values: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
            let tensor = Tensor::from_vec(values, spec.shape.as_slice(), CPU).unwrap();
            (spec.name.clone(), Var::from_tensor(&tensor).unwrap())
        });
        let names = weights.specs.iter().map(|spec| spec.name.clone()).collect();
        Self { config: weights.config.clone(), vars: vars.collect(), names }
    }

    fn p(&self, name: &str) -> &Tensor {
        self.vars[name].as_tensor()
    }

    pub(super) fn values(&self, name: &str) -> Vec<f64> {
        self.p(name).flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Replaces one parameter.
    pub(super) fn set(&self, name: &str, values: Vec<f64>) {
        let shape = self.p(name).shape().clone();
        self.vars[name].set(&Tensor::from_vec(values, shape, CPU).unwrap()).unwrap();
    }

    /// `x W^T (+ b)`; a kernel of any rank is a matrix with one row per output.
    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let y = x.matmul(&self.p(&format!("{name}.weight")).flatten_from(1)?.t()?)?;
        match self.vars.get(&format!("{name}.bias")) {
            Some(bias) => y.broadcast_add(bias.as_tensor()),
            None => Ok(y),
        }
    }

    fn layer_norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = centred.broadcast_div(&(variance + LAYER_NORM_EPS)?.sqrt()?)?;
        normed
            .broadcast_mul(self.p(&format!("{name}.weight")))?
            .broadcast_add(self.p(&format!("{name}.bias")))
    }

    /// `x` divided by the root of its mean square.
    fn over_rms(&self, x: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean_square + self.config.text.rms_norm_eps)?.sqrt()?)
    }

    /// A norm of the layers, of queries or of keys. Qwen3.5 adds 1 to the weights.
    fn rms_norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let weight = self.p(&format!("{name}.weight"));
        let added = f64::from(u8::from(self.config.text.norm_scale == NormScale::OnePlusWeight));
        self.over_rms(x)?.broadcast_mul(&(weight + added)?)
    }

    fn places(&self, batch: &VarlenBatch) -> Vec<Place> {
        let merge = self.encoder().spatial_merge_size;
        let has_squares = self.encoder().parts.early_merger.is_some();
        let (mut places, mut frame) = (Vec::new(), 0);
        for media in &media_of(&self.config, batch) {
            let [t, height, width] = media.grid_thw.map(|n| n as usize);
            for _ in 0..t {
                for patch in 0..height * width {
                    // The patches of one token are contiguous.
                    let (block, inside) = (patch / (merge * merge), patch % (merge * merge));
                    // So are those of a square that an early merger merges.
                    let (down, right) = if has_squares {
                        (inside / 8 * 2 + inside % 4 / 2, inside / 4 % 2 * 2 + inside % 2)
                    } else {
                        (inside / merge, inside % merge)
                    };
                    let row = block / (width / merge) * merge + down;
                    let column = block % (width / merge) * merge + right;
                    places.push(Place { frame, row, column, height, width });
                }
                frame += 1;
            }
        }
        places
    }

    fn encoder(&self) -> &VisionConfig {
        self.config.vision.as_ref().unwrap()
    }

    /// Features of the images, each `[M, D]`: those of the merger, then those of each deepstack
    /// merger.
    fn vision(&self, batch: &VarlenBatch) -> Result<Vec<Tensor>> {
        let v = self.encoder();
        let mut places = self.places(batch);
        let (mut num_patches, names) = (places.len(), &v.parts.names);
        let media = media_of(&self.config, batch);
        let pixels = media.iter().flat_map(|media| &media.pixel_values);
        let pixels: Vec<f64> = pixels.map(|value| f64::from(*value)).collect();
        let pixels = Tensor::from_vec(pixels, (num_patches, v.patch_values()), CPU)?;

        let mut h = self.embed_patches(&pixels, &places)?;

        // In each half of the head, the first half of the angles is by row, the second by column.
        let head_dim = v.hidden_size / v.num_heads;
        let quarter = head_dim / 4;
        let angles = matrix(num_patches, head_dim, |patch, dim| {
            let k = dim % (2 * quarter);
            let frequency = 10000f64.powf(-((k % quarter) as f64) / quarter as f64);
            let at = if k < quarter { places[patch].row } else { places[patch].column };
            at as f64 * frequency
        })?;
        let mut taps = Vec::new();
        for block in 0..v.depth {
            let name = |part: &str| format!("{}.{block}.{part}", names.blocks);
            let side = match &v.parts.windows {
                Some(windows) if !windows.full_attention_blocks.contains(&block) => {
                    windows.side * v.spatial_merge_size
                }
                _ => usize::MAX,
            };
            let scaled = |x: Tensor, part: usize| match names.layer_scales {
                Some(scales) => x.broadcast_mul(self.p(&name(scales[part]))),
                None => Ok(x),
            };
            let block_name = format!("{}.{block}", names.blocks);
            let attended =
                self.vision_attention(&h, &block_name, names.norms[0], (&places, side), &angles)?;
            h = (h + scaled(attended, 0)?)?;
            let x = self.vision_norm(&h, &name(names.norms[1]))?;
            h = (h + scaled(self.vision_mlp(&x, &name("mlp"))?, 1)?)?;
            if v.parts.deepstack.contains(&block) {
                let name = format!("model.visual.deepstack_merger_list.{}", taps.len());
                let joined = self.layer_norm(&Self::joined(&h)?, &format!("{name}.norm"))?;
                taps.push(self.merge(&joined, &name, ["linear_fc1", "linear_fc2"])?);
            }
            if let Some(of) = v.parts.early_merger.as_ref().filter(|of| of.after_block == block) {
                h = self.merged_early(&h, of, &places, &angles)?;
                let first = places.iter().step_by(4).copied();
                let halved = first.map(|at| Place { row: at.row / 2, column: at.column / 2, ..at });
                places = halved.collect();
                num_patches = places.len();
            }
        }
        let MergerParts { name, layers: [norm, linears @ ..], place, .. } = &v.parts.merger;
        if let Some(name) = v.parts.post_norm {
            h = self.vision_norm(&h, name)?;
        }
        let (h, norm) = (h.narrow(0, 0, num_patches)?, format!("{name}.{norm}"));
        let by_norm = |x: &Tensor| match v.parts.merger.norm {
            VisionNorm::Layer => self.layer_norm(x, &norm),
            VisionNorm::Rms => self.norm_by_rms(x, &norm),
        };
        let joined = match place {
            NormPlace::BeforeMerge => Self::joined(&by_norm(&h)?)?,
            NormPlace::AfterMerge => by_norm(&Self::joined(&h)?)?,
        };
        let mut features = vec![self.merge(&joined, name, *linears)?];
        features.extend(taps);
        Ok(features)
    }

    /// The output layer of the attention of a block inside squares of `side` patches, without the
    /// residual.
    fn vision_attention(
        &self,
        h: &Tensor,
        block: &str,
        norm: &str,
        (places, side): (&[Place], usize),
        angles: &Tensor,
    ) -> Result<Tensor> {
        let (v, num_rows) = (self.encoder(), h.dim(0)?);
        let names = &v.parts.names;
        // The square of a frame that a patch is in.
        let window = |row: usize| match places.get(row) {
            Some(at) => (at.frame, at.row / side, at.column / side),
            None => (row - places.len(), 0, 0), // a class token
        };
        let mask = matrix(num_rows, num_rows, |i, j| indicator(window(i) == window(j)))?;
        let x = self.vision_norm(h, &format!("{block}.{norm}"))?;
        let name = format!("{block}.{}", names.attention);
        let [q, k, value] = self.vision_heads(&x, &name, angles)?;
        let scale = ((v.hidden_size / v.num_heads) as f64).sqrt().recip();
        let attended = attention(&q, &k, &value, &mask, scale)?;
        self.linear(&attended, &format!("{block}.{}", names.attention_output))
    }

    /// The rows after an early merger, a quarter of `h`.
    fn merged_early(
        &self,
        h: &Tensor,
        of: &EarlyMerger,
        places: &[Place],
        angles: &Tensor,
    ) -> Result<Tensor> {
        let (name, [norm, first, second]) = (of.merger.name, of.merger.layers);
        let attended = self.vision_attention(h, name, of.norm, (places, 2), angles)?;
        let h = (h + attended)?;
        let (rows, width) = h.dims2()?;
        let square = |row: usize| (places[row].frame, places[row].row / 2, places[row].column / 2);
        let mean = matrix(rows / 4, rows, |merged, row| {
            0.25 * indicator(square(4 * merged) == square(row))
        })?;
        let joined = h.reshape((rows / 4, 4 * width))?;
        let x = self.layer_norm(&joined, &format!("{name}.{norm}"))?;
        let inner = gelu_tanh(&self.linear(&x, &format!("{name}.{first}"))?)?;
        self.linear(&inner, &format!("{name}.{second}"))? + mean.matmul(&h)?
    }

    /// The rows of the first block: the patches at their places, then a class token for each frame.
    fn embed_patches(&self, pixels: &Tensor, places: &[Place]) -> Result<Tensor> {
        let (v, num_patches) = (self.encoder(), places.len());
        let names = &v.parts.names;
        // The learned table of side x side cells is resized to the grid by linear interpolation.
        let mut h = self.linear(pixels, names.patch_embed)?;
        if let Some(num_position_embeddings) = v.parts.num_position_embeddings {
            let first = usize::from(names.class_token.is_some());
            let side = (num_position_embeddings - first).isqrt();
            let along = |i: usize, n: usize| {
                if n > 1 { i as f64 * (side - 1) as f64 / (n - 1) as f64 } else { 0.0 }
            };
            let hat = |at: f64, cell: usize| (1.0 - (at - cell as f64).abs()).max(0.0);
            let stretch = matrix(num_patches, side * side, |patch, cell| {
                let at = places[patch];
                if v.parts.table_reading == TableReading::Nearest {
                    let row = at.row * side / at.height;
                    return indicator(cell == row * side + at.column * side / at.width);
                }
                hat(along(at.row, at.height), cell / side)
                    * hat(along(at.column, at.width), cell % side)
            })?;
            let table = self.p(names.positions).reshape(((), v.hidden_size))?;
            h = (h + stretch.matmul(&table.narrow(0, first, side * side)?)?)?;
            if let Some(name) = names.class_token {
                // The class tokens of all frames follow the patches.
                let class_token = self.p(name).reshape((1, ()))?;
                let class_token = (class_token + table.narrow(0, 0, 1)?)?;
                let num_frames = places.last().map_or(0, |place| place.frame + 1);
                h = Tensor::cat(&[h, class_token.repeat((num_frames, 1))?], 0)?;
            }
        }
        Ok(h)
    }

    /// Queries, keys and values of the rows `x`, `[R, H, Dh]` each; `name` is that of the attention.
    fn vision_heads(&self, x: &Tensor, name: &str, angles: &Tensor) -> Result<[Tensor; 3]> {
        let v = self.encoder();
        let heads = |x: &Tensor| x.reshape((x.dim(0)?, v.num_heads, v.hidden_size / v.num_heads));
        let layer = |layer: &str| format!("{name}.{layer}");
        if let VisionAttention::Separate { has_norms, .. } = v.parts.attention {
            let project = |part: &str| self.linear(x, &layer(&format!("{part}_proj")));
            let normed = |part: &str| {
                let norm = layer(&format!("{part}_norm"));
                if has_norms { self.norm_by_rms(&project(part)?, &norm) } else { project(part) }
            };
            return Ok([heads(&normed("q")?)?, heads(&normed("k")?)?, heads(&project("v")?)?]);
        }
        let qkv = self.linear(x, &layer("qkv"))?;
        let part =
            |i: usize| heads(&qkv.narrow(1, i * v.hidden_size, v.hidden_size)?.contiguous()?);
        Ok([rotate(&part(0)?, angles)?, rotate(&part(1)?, angles)?, part(2)?])
    }

    /// A norm of the vision encoder; those of Qwen2.5-VL have no bias and subtract no mean.
    fn vision_norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        match self.encoder().parts.norm {
            VisionNorm::Layer => self.layer_norm(x, name),
            VisionNorm::Rms => self.norm_by_rms(x, name),
        }
    }

    fn norm_by_rms(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = x.broadcast_div(&(mean_square + LAYER_NORM_EPS)?.sqrt()?)?;
        normed.broadcast_mul(self.p(&format!("{name}.weight")))
    }

    fn vision_mlp(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let part = |part: &str| format!("{name}.{part}");
        match self.encoder().parts.mlp {
            VisionMlp::Gelu { act, layers: [first, second] } => {
                let inner = self.linear(x, &part(first))?;
                let inner =
                    if act == Gelu::Quick { gelu_quick(&inner)? } else { gelu_tanh(&inner)? };
                self.linear(&inner, &part(second))
            }
            VisionMlp::SwiGlu => {
                let gate = silu(&self.linear(x, &part("gate_proj"))?)?;
                let inner = gate.mul(&self.linear(x, &part("up_proj"))?)?;
                self.linear(&inner, &part("down_proj"))
            }
        }
    }

    fn joined(x: &Tensor) -> Result<Tensor> {
        let together = 4; // an early merger has merged the others
        let (patches, width) = x.dims2()?;
        x.reshape((patches / together, together * width))
    }

    fn merge(&self, joined: &Tensor, name: &str, [first, second]: [&str; 2]) -> Result<Tensor> {
        let inner = self.linear(joined, &format!("{name}.{first}"))?;
        let activated = (&inner * 0.5)?.mul(&((inner / 2f64.sqrt())?.erf()? + 1.0)?)?;
        self.linear(&activated, &format!("{name}.{second}"))
    }

    /// Hidden states after the last norm, `[T, D]`.
    pub(super) fn hidden(&self, batch: &VarlenBatch) -> Result<Tensor> {
        let c = &self.config.text;
        let num_tokens = batch.input_ids.len();
        let chosen = matrix(num_tokens, c.vocab_size, |token, id| {
            indicator(batch.input_ids[token] as usize == id)
        })?;
        let mut h = chosen.matmul(self.p("model.language_model.embed_tokens.weight"))?;

        let mut features = Vec::new(); // at the rows of their tokens, [T, D] each
        if !batch.vision_rows.is_empty() {
            let rows = &batch.vision_rows;
            let placed =
                matrix(num_tokens, rows.len(), |token, m| indicator(rows[m] as usize == token))?;
            for feature in self.vision(batch)? {
                features.push(placed.matmul(&feature)?);
            }
            let text =
                matrix(num_tokens, 1, |token, _| indicator(!rows.contains(&(token as u32))))?;
            h = (h.broadcast_mul(&text)? + &features[0])?;
        }

        let rotary_dim = c.rotary_dim;
        let half = rotary_dim / 2;
        let angles = matrix(num_tokens, rotary_dim, |token, dim| {
            let k = dim % half;
            let axis = self.config.text.mrope.map_or(0, |Mrope { section, layout }| {
                let [time, height, width] = section;
                match (layout, k % 3) {
                    (MropeLayout::Interleaved, 1) if k < 3 * height => 1,
                    (MropeLayout::Interleaved, 2) if k < 3 * width => 2,
                    (MropeLayout::Blocks, _) if k >= time + height => 2,
                    (MropeLayout::Blocks, _) if k >= time => 1,
                    _ => 0,
                }
            });
            let frequency = c.rope_theta.powf(-2.0 * k as f64 / rotary_dim as f64);
            f64::from(batch.position_ids[token][axis]) * frequency
        })?;
        let mut sample = vec![0; num_tokens];
        for (index, segment) in batch.cu_seqlens.segments().enumerate() {
            sample[segment].fill(index);
        }

        for (layer, spec) in c.layers.iter().enumerate() {
            let name = |part: &str| format!("model.language_model.layers.{layer}.{part}");
            let x = self.rms_norm(&h, &name("input_layernorm"))?;
            let mixed = match &spec.mixer {
                MixerSpec::LinearAttention(sizes) => {
                    self.linear_attention(&x, &name("linear_attn"), sizes, &sample)?
                }
                MixerSpec::Attention(parts) => {
                    let window = parts.window.map_or(num_tokens, NonZeroUsize::get);
                    let mask = matrix(num_tokens, num_tokens, |i, j| {
                        indicator(sample[i] == sample[j] && j <= i && i < j + window)
                    })?;
                    self.self_attention(&x, &name("self_attn"), *parts, &angles, &mask)?
                }
            };
            h = (h + mixed)?;
            let x = self.rms_norm(&h, &name("post_attention_layernorm"))?;
            h = (h + self.feed_forward(&x, &name("mlp"), spec.experts())?)?;
            if let Some(feature) = features.get(layer + 1) {
                h = (h + feature)?;
            }
        }
        self.rms_norm(&h, "model.language_model.norm")
    }

    /// The MLP of a decoder layer, or its experts, `[T, D]`.
    fn feed_forward(&self, x: &Tensor, name: &str, moe: Option<&MoeConfig>) -> Result<Tensor> {
        let swiglu = |gate: &Tensor, up: &Tensor| silu(gate)?.mul(up);
        let Some(moe) = moe else {
            let part = |part: &str| self.linear(x, &format!("{name}.{part}_proj"));
            let inner = swiglu(&part("gate")?, &part("up")?)?;
            return self.linear(&inner, &format!("{name}.down_proj"));
        };
        // Every expert computes every token; the weight of an expert that is not chosen is 0.
        let logits = self.linear(x, &format!("{name}.gate"))?; // [T, E]
        let all: Vec<Vec<f64>> = logits.to_vec2()?;
        let chosen = matrix(x.dim(0)?, moe.num_experts, |token, expert| {
            let larger = all[token].iter().filter(|other| **other > all[token][expert]);
            indicator(larger.count() < moe.experts_per_token)
        })?;
        let shares = logits.exp()?.mul(&chosen)?;
        let shares = shares.broadcast_div(&shares.sum_keepdim(1)?)?;
        let mut sum = x.zeros_like()?;
        if moe.shared_size.is_some() {
            let part = |part: &str| self.linear(x, &format!("{name}.shared_expert.{part}_proj"));
            let inner = swiglu(&part("gate")?, &part("up")?)?;
            let output = self.linear(&inner, &format!("{name}.shared_expert.down_proj"))?;
            let gate = sigmoid(&self.linear(x, &format!("{name}.shared_expert_gate"))?)?;
            sum = output.broadcast_mul(&gate)?;
        }
        for expert in 0..moe.num_experts {
            let product = |x: &Tensor, part: &str| {
                let weight = self.p(&format!("{name}.experts.{part}"));
                let weight = weight.narrow(0, expert, 1)?.squeeze(0)?;
                x.matmul(&if moe.files == ExpertFiles::InOut { weight } else { weight.t()? })
            };
            let both = product(x, "gate_up_proj")?; // [T, 2I]
            let half = |at: usize| {
                both.narrow(1, at * moe.intermediate_size, moe.intermediate_size)?.contiguous()
            };
            let output = product(&swiglu(&half(0)?, &half(1)?)?, "down_proj")?;
            sum = (sum + output.broadcast_mul(&shares.narrow(1, expert, 1)?)?)?;
        }
        Ok(sum)
    }

    /// Attention of a decoder layer, `[T, D]`, with the projection of its output.
    fn self_attention(
        &self,
        x: &Tensor,
        name: &str,
        parts: AttentionSpec,
        angles: &Tensor,
        mask: &Tensor,
    ) -> Result<Tensor> {
        let (num_tokens, head_dim) = (x.dim(0)?, self.config.text.head_dim);
        let project = |part: &str, width: usize| {
            let y = self.linear(x, &format!("{name}.{part}_proj"))?;
            y.reshape((num_tokens, y.dim(1)? / width, width))
        };
        let turned = |x: &Tensor, part: &str| {
            let norm = format!("{name}.{part}_norm");
            if parts.qk_norm {
                rotate(&self.rms_norm(x, &norm)?, angles)
            } else {
                rotate(x, angles)
            }
        };
        let k = turned(&project("k", head_dim)?, "k")?;
        let v = project("v", head_dim)?;
        let scale = f64::from(self.config.text.attention_scale);
        let attended = if parts.output_gate {
            // Each head has its query, and then the gate of its output.
            let both = project("q", 2 * head_dim)?;
            let q = turned(&both.narrow(2, 0, head_dim)?, "q")?;
            let gate = both.narrow(2, head_dim, head_dim)?.contiguous()?.flatten_from(1)?;
            attention(&q, &k, &v, mask, scale)?.mul(&sigmoid(&gate)?)?
        } else {
            attention(&turned(&project("q", head_dim)?, "q")?, &k, &v, mask, scale)?
        };
        self.linear(&attended, &format!("{name}.o_proj"))
    }

    /// The gated delta rule of a decoder layer, `[T, D]`, one token after the other. `sample` is the
    /// number of each token's sample; state and convolution begin with each sample.
    fn linear_attention(
        &self,
        x: &Tensor,
        name: &str,
        sizes: &LinearAttentionSpec,
        sample: &[usize],
    ) -> Result<Tensor> {
        let num_tokens = sample.len();
        let part = |part: &str| format!("{name}.{part}");
        let (heads, dk, dv) = (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim);

        let qkv = self.linear(x, &part("in_proj_qkv"))?; // [T, C]
        let taps = self.p(&part("conv1d.weight")).squeeze(1)?; // [C, 4]
        let mut sum = qkv.zeros_like()?;
        for back in 0..4 {
            let moved = matrix(num_tokens, num_tokens, |i, j| {
                indicator(j + back == i && sample[i] == sample[j])
            })?;
            sum = (sum + moved.matmul(&qkv)?.broadcast_mul(&taps.narrow(1, 3 - back, 1)?.t()?)?)?;
        }
        let mixed = silu(&sum)?;

        let width = sizes.num_key_heads * dk;
        // Several value heads share a key head.
        let shared = |from: usize| {
            let x = mixed.narrow(1, from, width)?.reshape((num_tokens, sizes.num_key_heads, dk))?;
            let norm = (x.sqr()?.sum_keepdim(2)? + 1e-6)?.sqrt()?;
            let unit = x.broadcast_div(&norm)?;
            let group = heads / sizes.num_key_heads;
            let of_head = |head: usize| unit.narrow(1, head / group, 1);
            Tensor::cat(&(0..heads).map(of_head).collect::<Result<Vec<_>>>()?, 1) // [T, Hv, dk]
        };
        let (q, k) = ((shared(0)? / (dk as f64).sqrt())?, shared(width)?);
        let v = mixed.narrow(1, 2 * width, heads * dv)?.reshape((num_tokens, heads, dv))?;
        let beta = sigmoid(&self.linear(x, &part("in_proj_b"))?)?; // [T, Hv]
        let step = self.linear(x, &part("in_proj_a"))?.broadcast_add(self.p(&part("dt_bias")))?;
        let step = (step.exp()? + 1.0)?.log()?;
        let decay = step.broadcast_mul(&self.p(&part("A_log")).exp()?)?.neg()?.exp()?; // [T, Hv]

        let start = Tensor::zeros((heads, dk, dv), DType::F64, CPU)?;
        let (mut state, mut outputs) = (start.clone(), Vec::new());
        for token in 0..num_tokens {
            if token == 0 || sample[token] != sample[token - 1] {
                state = start.clone();
            }
            let row = |x: &Tensor, width| x.get(token)?.reshape((heads, 1, width));
            state = state.broadcast_mul(&row(&decay, 1)?)?;
            let (k, v) = (row(&k, dk)?, row(&v, dv)?);
            let error = (v - k.matmul(&state)?)?.broadcast_mul(&row(&beta, 1)?)?;
            state = (state + k.reshape((heads, dk, 1))?.matmul(&error)?)?;
            outputs.push(row(&q, dk)?.matmul(&state)?.reshape((1, heads, dv))?);
        }
        let o = self.over_rms(&Tensor::cat(&outputs, 0)?)?; // [T, Hv, dv]
        let o = o.broadcast_mul(self.p(&part("norm.weight")))?.flatten_from(1)?;
        let gated = o.mul(&silu(&self.linear(x, &part("in_proj_z"))?)?)?;
        self.linear(&gated, &part("out_proj"))
    }

    /// Negative log likelihood of each supervised token except the first of a sample, `[S]`.
    fn nll(&self, hidden: &Tensor, batch: &VarlenBatch) -> Result<Tensor> {
        let mut targets = Vec::new(); // (token that predicts, id that it should predict)
        for segment in batch.cu_seqlens.segments() {
            for token in segment.clone().skip(1) {
                if batch.labels[token] != IGNORE_INDEX {
                    targets.push((token - 1, batch.labels[token] as usize));
                }
            }
        }
        let (num_tokens, s) = (batch.input_ids.len(), targets.len());
        let rows = matrix(s, num_tokens, |i, token| indicator(targets[i].0 == token))?;
        let head = if self.config.text.tie_word_embeddings {
            self.p("model.language_model.embed_tokens.weight")
        } else {
            self.p("lm_head.weight")
        };
        let logits = rows.matmul(hidden)?.matmul(&head.t()?)?; // [S, V]
        let right = matrix(s, head.dim(0)?, |i, id| indicator(targets[i].1 == id))?;
        logits.exp()?.sum(1)?.log()? - logits.mul(&right)?.sum(1)?
    }

    /// The nll of each target.
    pub(super) fn losses(&self, batch: &VarlenBatch) -> Result<Vec<f64>> {
        self.nll(&self.hidden(batch)?, batch)?.to_vec1()
    }

    /// Mean over the targets of the batch.
    pub(super) fn loss(&self, batch: &VarlenBatch) -> Result<f64> {
        self.nll(&self.hidden(batch)?, batch)?.mean_all()?.to_scalar()
    }

    /// Gradient of [`Self::loss`] for every parameter, in the model's order; zeros for a parameter
    /// that the loss does not depend on.
    pub(super) fn gradients(&self, batch: &VarlenBatch) -> Result<Vec<Vec<f64>>> {
        let loss = self.nll(&self.hidden(batch)?, batch)?.mean_all()?;
        let grads = loss.backward()?;
        let gradient = |name: &String| match grads.get(self.p(name)) {
            Some(gradient) => gradient.flatten_all()?.to_vec1(),
            None => Ok(vec![0.0; self.p(name).elem_count()]),
        };
        self.names.iter().map(gradient).collect()
    }
}

/// Rotates the first `R` dimensions of `x: [N, H, Dh]` by `angles: [N, R]`; dimension `i` pairs with
/// `i + R / 2`.
fn rotate(x: &Tensor, angles: &Tensor) -> Result<Tensor> {
    let (head_dim, rotated) = (x.dim(2)?, angles.dim(1)?);
    let half = rotated / 2;
    let (first, second) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let turned = Tensor::cat(&[&second.neg()?, &first], 2)?;
    let (cos, sin) = (angles.cos()?.unsqueeze(1)?, angles.sin()?.unsqueeze(1)?); // [N, 1, R]
    let front = x.narrow(2, 0, rotated)?;
    let front = (front.broadcast_mul(&cos)? + turned.broadcast_mul(&sin)?)?;
    if rotated == head_dim {
        return Ok(front);
    }
    Tensor::cat(&[&front, &x.narrow(2, rotated, head_dim - rotated)?], 2)
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

fn silu(x: &Tensor) -> Result<Tensor> {
    x.mul(&sigmoid(x)?)
}

/// Attention, one head at a time: `q: [N, H, Dh]`, `k`, `v`: `[N, Hkv, Dh]`, `mask: [N, N]` of
/// zeros and ones. Returns `[N, H * Dh]`.
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor, scale: f64) -> Result<Tensor> {
    let num_heads = q.dim(1)?;
    let group = num_heads / k.dim(1)?;
    let mut outputs = Vec::with_capacity(num_heads);
    for head in 0..num_heads {
        let one = |x: &Tensor, head: usize| x.narrow(1, head, 1)?.squeeze(1)?.contiguous();
        let (q, k, v) = (one(q, head)?, one(k, head / group)?, one(v, head / group)?); // [N, Dh]
        let scores = (q.matmul(&k.t()?)? * scale)?; // [N, N]
        let weights = scores.exp()?.mul(mask)?; // scores are small: no maximum to subtract
        outputs.push(weights.matmul(&v)?.broadcast_div(&weights.sum_keepdim(1)?)?);
    }
    Tensor::cat(&outputs, 1)
}

fn gelu_quick(x: &Tensor) -> Result<Tensor> {
    x.mul(&((x * -1.702)?.exp()? + 1.0)?.recip()?)
}

fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let cube = x.mul(x)?.mul(x)?;
    let inner = ((x + (cube * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    (x * 0.5)?.mul(&(inner.tanh()? + 1.0)?)
}
