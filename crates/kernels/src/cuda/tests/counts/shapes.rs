//! Published shapes, and the ops of their steps.

use super::super::operand;
use crate::attention::gpu;
use crate::cuda::select::Gpu;
use crate::testing::{gradient_buffer, rope_table};
use crate::{
    CONV_TAPS, DeltaHeads, DeltaInputs, GPU_DELTA_BYTES, Masking, NormScale, Qkv, RecomputeInput,
    Scores,
};
use batch::CuSeqlens;
use candle_core::{DType, Device, Result, Tensor};

/// Tokens of a step.
pub(super) const TOKENS: [usize; 2] = [8192, 16384];

pub(super) struct Op<'a> {
    pub(super) name: &'static str,
    /// Ops with the same one have the same counts.
    pub(super) key: String,
    /// Numbers of tokens that are executed: those that the polynomial goes through, one more than its
    /// degree, and two others.
    pub(super) sizes: Vec<usize>,
    /// Largest relative difference from the prediction that is right.
    pub(super) tolerance: f64,
    /// How many such executions one launch does, for each of [`TOKENS`], and how many a step has.
    pub(super) at_once: [usize; 2],
    pub(super) times: usize,
    /// The size of an execution in a step: [`TOKENS`], or elements.
    pub(super) at: [usize; 2],
    pub(super) run: &'a dyn Fn(usize) -> Result<()>,
}

/// A published shape, without its vision encoder.
pub(super) struct Shape {
    pub(super) name: &'static str,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) layers: usize,
    /// Layers with linear attention.
    pub(super) linear: usize,
    pub(super) heads: usize,
    pub(super) key_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocabulary: usize,
    /// Whether the head has the weight of the embedding.
    pub(super) tied: bool,
}

const QWEN3: Shape = Shape {
    name: "4B",
    hidden: 2560,
    intermediate: 9728,
    layers: 36,
    linear: 0,
    heads: 32,
    key_heads: 8,
    head_dim: 128,
    vocabulary: 151_936,
    tied: true,
};

pub(super) const SHAPES: [Shape; 4] = [
    Shape { name: "2B", hidden: 2048, intermediate: 6144, layers: 28, heads: 16, ..QWEN3 },
    QWEN3,
    Shape { name: "8B", hidden: 4096, intermediate: 12288, tied: false, ..QWEN3 },
    Shape {
        name: "Qwen3.5 4B",
        intermediate: 9216,
        layers: 32,
        linear: 24,
        heads: 16,
        key_heads: 4,
        head_dim: 256,
        vocabulary: 248_320,
        ..QWEN3
    },
];

/// Heads of a layer with linear attention.
const DELTA: DeltaHeads =
    DeltaHeads { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
/// Channels of its convolution, and of its values.
const CHANNELS: usize = 8192;
const VALUES: usize = 4096;

impl Shape {
    fn linear_parameters(&self) -> usize {
        let (heads, key_heads) = (self.heads * self.head_dim, self.key_heads * self.head_dim);
        // Qwen3.5 gates the output of each head.
        let gates = if self.linear > 0 { heads } else { 0 };
        let full = self.hidden * (2 * heads + gates + 2 * key_heads);
        let linear = self.hidden * (CHANNELS + 2 * VALUES + 2 * DELTA.value_heads);
        let mlp = 3 * self.hidden * self.intermediate;
        self.layers * mlp + (self.layers - self.linear) * full + self.linear * linear
    }

    fn head_parameters(&self) -> usize {
        self.hidden * self.vocabulary
    }

    /// Trained parameters, without those of norms.
    fn parameters(&self) -> usize {
        let tables = if self.tied { 1 } else { 2 };
        self.linear_parameters() + tables * self.head_parameters()
    }
}

/// Products of elements of all linear layers of a step, forward, and backward with the gradients of
/// inputs and weights. Half of the tokens have a target.
pub(super) fn matrix_products(shape: &Shape, tokens: usize) -> f64 {
    let head = shape.head_parameters() as f64 / 2.0;
    3.0 * tokens as f64 * (shape.linear_parameters() as f64 + head)
}

fn bf16(seed: u64, dims: &[usize]) -> Tensor {
    operand(seed, dims, DType::BF16)
}

fn f32(dims: &[usize]) -> Result<Tensor> {
    Tensor::zeros(dims, DType::F32, &Device::Cpu)
}

fn one_segment(tokens: usize) -> CuSeqlens {
    CuSeqlens::from_lengths(&[tokens as u32]).unwrap()
}

/// Attention of one query head and its keys, with Hopper's kernels. Other query heads with the same
/// keys add the same products, and share the loads of keys that the backward pass keeps.
fn attend(dh: usize, tokens: usize, is_backward: bool) -> Result<()> {
    let q = bf16(1, &[tokens, 1, dh]);
    let (k, v) = (bf16(3, &[tokens, 1, dh]), bf16(4, &[tokens, 1, dh]));
    let (qkv, ends) = (Qkv { q: &q, k: &k, v: &v }, one_segment(tokens));
    let (h100, scores) = (Gpu::H100, Scores::new(Masking::Causal, dh));
    if !is_backward {
        return gpu::attend("counts", h100, qkv, ends, 0, scores).map(|_| ());
    }
    // No count depends on the values.
    let (o, lse, d_o) = (bf16(5, &[tokens, 1, dh]), f32(&[1, tokens])?, bf16(2, &[tokens, 1, dh]));
    gpu::attend_backward("counts", h100, qkv, &o, &lse, &d_o, &ends, scores).map(|_| ())
}

/// Forward, again for the gradients of weights, and backward.
fn norms(hidden: usize, tokens: usize) -> Result<()> {
    let (x, w, dy) = (bf16(1, &[tokens, hidden]), bf16(2, &[hidden]), bf16(3, &[tokens, hidden]));
    // Different bytes are counted, so each operand is a tensor of its own.
    let (residual, dw) = (bf16(4, &[tokens, hidden]), gradient_buffer(&[hidden]));
    let scale = NormScale::Weight;
    let (_, rstd) = crate::rms_norm(&x, &w, scale, 1e-6)?;
    crate::rms_norm_apply(&x, &rstd, &w, scale)?;
    crate::rms_norm_backward(&x, &rstd, &w, scale, &dy, Some(&residual), Some(&dw)).map(|_| ())
}

/// Forward, again for the backward pass of attention, and backward.
fn rotations(heads: usize, dh: usize, tokens: usize) -> Result<()> {
    let (x, w) = (bf16(1, &[tokens, heads * dh]), bf16(2, &[dh]));
    let (dy, dw) = (bf16(3, &[tokens, heads, dh]), gradient_buffer(&[dh]));
    // Qwen3.5 rotates a quarter of its heads.
    let (scale, table) =
        (NormScale::Weight, rope_table(tokens, if dh > 128 { 32 } else { dh / 2 }));
    let (_, rstd) = crate::qk_norm_rope(&x, &w, scale, 1e-6, &table)?;
    crate::qk_norm_rope(&x, &w, scale, 1e-6, &table)?;
    crate::qk_norm_rope_backward(&x, &rstd, &w, scale, &table, &dy, Some(&dw)).map(|_| ())
}

fn activations(width: usize, tokens: usize) -> Result<()> {
    let operand = |seed| bf16(seed, &[tokens, width]);
    crate::swiglu(&operand(1), &operand(2))?;
    crate::swiglu_backward(operand(1), operand(2), operand(3), RecomputeInput::Yes).map(|_| ())
}

/// The loss and its gradient for half of the tokens, of logits that are products of eight elements.
fn losses(vocabulary: usize, tokens: usize) -> Result<()> {
    let rows = tokens / 2;
    let (h, w) = (bf16(1, &[rows, 8]), bf16(2, &[vocabulary, 8]));
    let targets = Tensor::zeros(rows, DType::U32, &Device::Cpu)?;
    let scale = 1.0.into();
    crate::linear_cross_entropy_backward(&h, &w, &targets, scale, None, true).map(|_| ())
}

/// The delta rule of one key head and its two value heads.
fn delta_rule(tokens: usize, is_backward: bool) -> Result<()> {
    let heads = DeltaHeads { key_heads: 1, value_heads: 2, ..DELTA };
    let qkv = (bf16(1, &[tokens, 4 * 128]) * 0.1)?;
    let gate = |seed, sign: f64| operand(seed, &[tokens, 2], DType::F32).abs()? * sign;
    let (g, beta) = (gate(2, -0.1)?, gate(3, 0.1)?);
    let (inputs, ends) = (DeltaInputs { qkv: &qkv, g: &g, beta: &beta }, one_segment(tokens));
    if is_backward {
        let d_o = bf16(4, &[tokens, 2 * 128]);
        crate::gated_delta_rule_backward(inputs, heads, &ends, &d_o).map(|_| ())
    } else {
        crate::gated_delta_rule(inputs, heads, &ends, None).map(|_| ())
    }
}

/// An eighth of the convolution and of the gated norm of a layer, which is what a block has of the
/// channels: forward, again for the gradients of weights, and backward.
fn convolutions_and_norms(tokens: usize) -> Result<()> {
    let channels = CHANNELS / 8;
    let (x, dy) = (bf16(1, &[tokens, channels]), bf16(2, &[tokens, channels]));
    let (w, dw) = (bf16(3, &[channels, CONV_TAPS]), gradient_buffer(&[channels, CONV_TAPS]));
    let ends = one_segment(tokens);
    crate::causal_conv1d(&x, &w, &ends)?;
    crate::causal_conv1d(&x, &w, &ends)?;
    crate::causal_conv1d_backward(&x, &w, &dy, &ends, Some(&dw))?;
    let operand = |seed| bf16(seed, &[VALUES / 8 / 128 * tokens, 128]);
    let (x, z, w, dw) = (operand(4), operand(5), bf16(6, &[128]), gradient_buffer(&[128]));
    let (_, rstd) = crate::gated_rms_norm(&x, &z, &w, 1e-6)?;
    crate::gated_rms_norm(&x, &z, &w, 1e-6)?;
    crate::gated_rms_norm_backward(&x, &z, &rstd, &w, &operand(7), Some(&dw)).map(|_| ())
}

/// The norm of the gradients, and the update of bf16 weights with f32 masters.
fn updates(elements: usize) -> Result<()> {
    use crate::AdamWTensors;
    let (weight, master, grad) = (bf16(1, &[elements]), f32(&[elements])?, f32(&[elements])?);
    let (exp_avg, exp_avg_sq) = (f32(&[elements])?, f32(&[elements])?);
    let tensors = AdamWTensors {
        weight: &weight,
        master: Some(&master),
        exp_avg: &exp_avg,
        exp_avg_sq: &exp_avg_sq,
        absmax: None,
        grad: &grad,
    };
    crate::sums_of_squares(&[&grad])?;
    let hyper = crate::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    crate::adamw_step(&hyper, &tensors, 1e-4, 0.1, 1, 1.0)
}

/// Key heads of a launch of the delta rule.
fn launched_key_heads(tokens: usize, is_backward: bool) -> usize {
    let chunks = tokens.div_ceil(crate::gated_delta_rule::gpu_chunk(DType::BF16));
    let forward = DELTA.gpu_matrices(chunks, DType::BF16);
    let bytes = if is_backward { DELTA.gpu_backward(chunks, DType::BF16) } else { forward };
    DELTA.gpu_key_heads(bytes, GPU_DELTA_BYTES)
}

/// The ops of a step without its products of cuBLASLt, and without ops of less than 1 % of it.
pub(super) fn with_ops(shape: &Shape, then: impl FnOnce(&[Op<'_>]) -> Result<()>) -> Result<()> {
    let Shape { hidden, intermediate, layers, heads, key_heads, head_dim, vocabulary, .. } = *shape;
    let full = layers - shape.linear;
    let (once, of_heads) = ([1; 2], ([heads; 2], full * heads));
    let op = |name, key, sizes: &[usize], (at_once, times), run| Op {
        name,
        key: format!("{name} {key}"),
        sizes: sizes.to_vec(),
        tolerance: 0.01,
        at_once,
        times,
        at: TOKENS,
        run,
    };
    // Boxes of 80 keys divide the first three sizes, and not the others; blocks of 128 queries do.
    let squares = [640, 1280, 1920, 1536, 2176];
    // The backward passes of norms and rotations have a fixed number of blocks above these sizes.
    let (rows, few_rows) = ([1024, 2048, 3072, 4096], [1152, 1728, 2304, 2880]);
    let forward = |tokens: usize| attend(head_dim, tokens, false);
    let backward = |tokens: usize| attend(head_dim, tokens, true);
    let norm = |tokens: usize| norms(hidden, tokens);
    let rotation = |tokens: usize| {
        rotations(heads, head_dim, tokens)?;
        rotations(key_heads, head_dim, tokens)
    };
    let swiglu = |tokens: usize| activations(intermediate, tokens);
    let loss = |tokens: usize| losses(vocabulary, tokens);
    let (heads, dh) = (format!("{heads} {key_heads} {head_dim}"), head_dim.to_string());
    let mut ops = vec![
        op("attention, forward", dh.clone(), &squares, of_heads, &forward),
        op("attention, backward", dh, &squares, of_heads, &backward),
        op("norms", hidden.to_string(), &rows, (once, 2 * layers), &norm),
        op("norm and rotation of q and k", heads, &few_rows, (once, full), &rotation),
        op("SwiGLU", intermediate.to_string(), &[64, 128, 192, 256], (once, layers), &swiglu),
        op("cross-entropy", vocabulary.to_string(), &[8, 16, 24, 32], (once, 1), &loss),
    ];
    let rule = |tokens: usize| delta_rule(tokens, false);
    let rule_backward = |tokens: usize| delta_rule(tokens, true);
    let mixed = |tokens: usize| convolutions_and_norms(tokens);
    if shape.linear > 0 {
        let (rows, segments) = ([2048, 4096, 6144, 8192], [128, 256, 384, 512]);
        let at_once = |is_backward| TOKENS.map(|tokens| launched_key_heads(tokens, is_backward));
        let of_rule = |is_backward| (at_once(is_backward), shape.linear * DELTA.key_heads);
        let none = String::new;
        let eighths = ([8; 2], 8 * shape.linear);
        ops.push(op("delta rule, forward", none(), &segments, of_rule(false), &rule));
        ops.push(op("delta rule, backward", none(), &segments, of_rule(true), &rule_backward));
        ops.push(op("convolution, gated norm", none(), &rows, eighths, &mixed));
    }
    let chunks = [4, 8, 12, 16].map(|chunks| chunks << 16);
    let adamw = op("AdamW", String::new(), &chunks, (once, 1), &updates);
    ops.push(Op { at: [shape.parameters(); 2], ..adamw });
    then(&ops)
}
