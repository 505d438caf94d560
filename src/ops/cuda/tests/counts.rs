//! What kernels execute as a function of their sizes, and the time that this takes an H100 at least.
//!
//! The PTX of each kernel is executed whole at a few small sizes. A polynomial through them has the
//! counts at the sizes of training; it is tested at two other sizes.

use super::operand;
use crate::batch::CuSeqlens;
use crate::ops::cuda::{self, attention, interpreted::counted, select::Gpu};
use crate::ops::testing::{gradient_buffer, rope_table};
use crate::ops::{DeltaHeads, DeltaInputs, Masking, NormScale, Qkv, RecomputeInput};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::BTreeMap;

/// Instructions of warps, bytes of global memory, bytes of shared memory, products of elements.
type Work = [f64; 4];

/// Rates of an H100 SXM (132 multiprocessors at 1.755 GHz, four instructions and 128 bytes of shared
/// memory a cycle each), in the order of [`Work`]. Global memory: 3.35 TB/s.
const RATES: Work = [132.0 * 4.0 * 1.755e9, 3.35e12, 132.0 * 128.0 * 1.755e9, 494.7e12];
const LIMITS: [&str; 4] = ["instructions", "memory", "shared memory", "tensor cores"];

/// An op of a step.
struct Op<'a> {
    name: &'static str,
    /// Degree of the counts in the number of tokens.
    degree: usize,
    /// Tokens of the smallest size that is executed.
    unit: usize,
    /// How often a step has it, for each execution.
    times: f64,
    /// Whether most bytes of global memory are read more than once, from the L2 cache.
    from_cache: bool,
    run: &'a dyn Fn(usize) -> Result<()>,
}

/// A published shape.
struct Shape {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    /// Layers with linear attention, of 16 key heads and 32 value heads of 128.
    linear: usize,
    heads: usize,
    key_heads: usize,
    head_dim: usize,
}

const SHAPES: [Shape; 4] = [
    Shape {
        name: "2B",
        hidden: 2048,
        intermediate: 6144,
        layers: 28,
        linear: 0,
        heads: 16,
        key_heads: 8,
        head_dim: 128,
    },
    Shape {
        name: "4B",
        hidden: 2560,
        intermediate: 9728,
        layers: 36,
        linear: 0,
        heads: 32,
        key_heads: 8,
        head_dim: 128,
    },
    Shape {
        name: "8B",
        hidden: 4096,
        intermediate: 12288,
        layers: 36,
        linear: 0,
        heads: 32,
        key_heads: 8,
        head_dim: 128,
    },
    Shape {
        name: "Qwen3.5 4B",
        hidden: 2560,
        intermediate: 9216,
        layers: 32,
        linear: 24,
        heads: 16,
        key_heads: 4,
        head_dim: 256,
    },
];

/// Work of an op with `tokens`, by kernel.
fn measure(op: &Op<'_>, tokens: usize) -> Result<BTreeMap<String, Work>> {
    let mut all: BTreeMap<String, Work> = BTreeMap::new();
    for (kernel, counts) in counted(|| (op.run)(tokens))? {
        let numbers = [
            counts.instructions,
            counts.global_read + counts.global_written,
            counts.shared_read + counts.shared_written,
            counts.products,
        ];
        let work = all.entry(kernel).or_default();
        for (sum, number) in work.iter_mut().zip(numbers) {
            *sum += number as f64;
        }
    }
    assert!(!all.is_empty(), "no PTX is executed: export TRAINER_PTX=$(scripts/cuda/ptx.sh)");
    Ok(all)
}

/// The value at `x` of the polynomial through `points` (Lagrange).
fn polynomial(points: &[(f64, f64)], x: f64) -> f64 {
    let others = |at: usize| points.iter().enumerate().filter(move |(other, _)| *other != at);
    let basis = |at: usize, (own, _): &(f64, f64)| -> f64 {
        others(at).map(|(_, (other, _))| (x - other) / (own - other)).product()
    };
    points.iter().enumerate().map(|(at, point)| point.1 * basis(at, point)).sum()
}

/// Executes an op at small sizes, and returns its work as a function of the tokens. Adds what the
/// function does not predict at two further sizes to `wrong`.
fn counts_of(
    op: &Op<'_>,
    wrong: &mut Vec<String>,
) -> Result<impl Fn(f64) -> BTreeMap<String, Work>> {
    let fitted = op.degree + 1;
    let sizes: Vec<usize> = (1..=fitted + 2).map(|units| units * op.unit).collect();
    let measured = sizes.iter().map(|tokens| measure(op, *tokens)).collect::<Result<Vec<_>>>()?;
    let (sizes_fitted, measured_fitted) = (sizes[..fitted].to_vec(), measured[..fitted].to_vec());
    let at = move |tokens: f64| {
        let kernels = measured_fitted[0].keys();
        let work = |kernel: &String| {
            std::array::from_fn(|kind| {
                let value = |all: &BTreeMap<String, Work>| all[kernel][kind];
                let points = sizes_fitted.iter().map(|size| *size as f64);
                let points: Vec<_> = points.zip(measured_fitted.iter().map(value)).collect();
                polynomial(&points, tokens)
            })
        };
        kernels.map(|kernel| (kernel.clone(), work(kernel))).collect()
    };
    for (tokens, measured) in sizes.iter().zip(&measured).skip(fitted) {
        let predicted: BTreeMap<String, Work> = at(*tokens as f64);
        for (kernel, work) in measured {
            for (kind, (found, expected)) in work.iter().zip(predicted[kernel]).enumerate() {
                // Hopper's kernels execute instructions while they wait, and boxes of 80 or 48 keys do
                // not divide the sizes.
                let most = if op.from_cache { 0.05 } else { 0.01 };
                let off = (found - expected).abs() / found.max(1.0);
                if off > most {
                    wrong.push(format!(
                        "{} with {tokens} tokens: {kernel} has {found} {}, predicted {expected}",
                        op.name, LIMITS[kind]
                    ));
                }
            }
        }
    }
    Ok(at)
}

fn bf16(seed: u64, dims: &[usize]) -> Tensor {
    operand(seed, dims, DType::BF16)
}

fn one_segment(tokens: usize) -> CuSeqlens {
    CuSeqlens::from_lengths(&[tokens as u32]).unwrap()
}

/// Attention of one key head and its query heads, forward and backward, with Hopper's kernels.
fn attend(shape: &Shape, tokens: usize) -> Result<()> {
    let (group, dh) = (shape.heads / shape.key_heads, shape.head_dim);
    let (q, d_o) = (bf16(1, &[tokens, group, dh]), bf16(2, &[tokens, group, dh]));
    let (k, v) = (bf16(3, &[tokens, 1, dh]), bf16(4, &[tokens, 1, dh]));
    let (qkv, ends) = (Qkv { q: &q, k: &k, v: &v }, one_segment(tokens));
    let (o, lse) = attention::flash_attention_on(Gpu::H100, qkv, &ends, Masking::Causal)?;
    attention::flash_attention_backward_on(Gpu::H100, qkv, &o, &lse, &d_o, &ends, Masking::Causal)
        .map(|_| ())
}

fn norms(hidden: usize, tokens: usize) -> Result<()> {
    let (x, w, dy) = (bf16(1, &[tokens, hidden]), bf16(2, &[hidden]), bf16(3, &[tokens, hidden]));
    let (scale, dw) = (NormScale::Weight, gradient_buffer(&[hidden]));
    let (_, rstd) = cuda::rms_norm(&x, &w, scale, 1e-6)?;
    cuda::rms_norm_backward(&x, &rstd, &w, scale, &dy, Some(&x), Some(&dw)).map(|_| ())
}

fn rotations(heads: usize, dh: usize, tokens: usize) -> Result<()> {
    let (x, w) = (bf16(1, &[tokens, heads * dh]), bf16(2, &[dh]));
    let (dy, dw) = (bf16(3, &[tokens, heads, dh]), gradient_buffer(&[dh]));
    let (scale, table) = (NormScale::Weight, rope_table(tokens, dh / 2));
    let (_, rstd) = cuda::qk_norm_rope(&x, &w, scale, 1e-6, &table)?;
    cuda::qk_norm_rope_backward(&x, &rstd, &w, scale, &table, &dy, Some(&dw)).map(|_| ())
}

fn activations(width: usize, tokens: usize) -> Result<()> {
    let operand = |seed| bf16(seed, &[tokens, width]);
    cuda::swiglu(&operand(1), &operand(2))?;
    cuda::swiglu_backward(operand(1), operand(2), operand(3), RecomputeInput::Yes).map(|_| ())
}

/// The loss and its gradient for half of the tokens.
fn losses(tokens: usize) -> Result<()> {
    const VOCABULARY: usize = 151_936;
    let rows = tokens / 2;
    let (h, w) = (bf16(1, &[rows, 8]), bf16(2, &[VOCABULARY, 8]));
    let targets = Tensor::zeros(rows, DType::U32, &Device::Cpu)?;
    cuda::linear_cross_entropy("counts", &h, &w, &targets, rows).map(|_| ())
}

/// The delta rule of one key head and its two value heads.
fn delta_rule(tokens: usize) -> Result<()> {
    let heads = DeltaHeads { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128 };
    let qkv = (bf16(1, &[tokens, 4 * 128]) * 0.1)?;
    let gate = |seed, sign: f64| operand(seed, &[tokens, 2], DType::F32).abs()? * sign;
    let (g, beta) = (gate(2, -0.1)?, gate(3, 0.1)?);
    let (inputs, ends) = (DeltaInputs { qkv: &qkv, g: &g, beta: &beta }, one_segment(tokens));
    let o = cuda::gated_delta_rule(inputs, heads, &ends, None)?;
    cuda::gated_delta_rule_backward(inputs, heads, &ends, &o).map(|_| ())
}

/// The ops of a step without its products of cuBLASLt.
fn with_ops(shape: &Shape, then: impl FnOnce(&[Op<'_>]) -> Result<()>) -> Result<()> {
    let full = (shape.layers - shape.linear) as f64;
    let of = |name, degree, unit, times, run| Op {
        name,
        degree,
        unit,
        times,
        from_cache: degree == 2,
        run,
    };
    let attention = |tokens: usize| attend(shape, tokens);
    let norm = |tokens: usize| norms(shape.hidden, tokens);
    let rotation = |tokens: usize| {
        rotations(shape.heads, shape.head_dim, tokens)?;
        rotations(shape.key_heads, shape.head_dim, tokens)
    };
    let swiglu = |tokens: usize| activations(shape.intermediate, tokens);
    let mut ops = vec![
        of("attention, one segment", 2, 640, full * shape.key_heads as f64, &attention),
        // Their backward passes have a fixed number of blocks above some number of rows.
        of("norms", 1, 1024, 2.0 * shape.layers as f64, &norm),
        of("norm and rotation of q and k", 1, 256, full, &rotation),
        of("SwiGLU", 1, 64, shape.layers as f64, &swiglu),
        of("cross-entropy", 1, 8, 1.0, &losses),
    ];
    if shape.linear > 0 {
        ops.push(of("delta rule", 1, 64, 16.0 * shape.linear as f64, &delta_rule));
    }
    then(&ops)
}

#[test]
#[ignore = "prints the table of docs/performance.md; needs TRAINER_PTX, and takes minutes"]
fn the_time_of_a_step_on_an_h100_is_at_least() -> Result<()> {
    println!("| shape | tokens | op | ms a step | limit | the others |\n|---|---|---|---|---|---|");
    let mut wrong = Vec::new();
    for shape in &SHAPES {
        with_ops(shape, |ops| {
            for op in ops {
                let at = counts_of(op, &mut wrong)?;
                for tokens in [8192.0, 16384.0] {
                    let mut sum = [0.0; 4];
                    for work in at(tokens).values() {
                        for (sum, work) in sum.iter_mut().zip(work) {
                            *sum += work * op.times;
                        }
                    }
                    if op.from_cache {
                        sum[1] = 0.0;
                    }
                    let ms: Work = std::array::from_fn(|kind| 1e3 * sum[kind] / RATES[kind]);
                    let largest = (0..4).max_by(|a, b| ms[*a].total_cmp(&ms[*b])).unwrap();
                    let others: Vec<String> = (0..4)
                        .filter(|kind| *kind != largest && ms[*kind] > 0.005)
                        .map(|kind| format!("{} {:.2}", LIMITS[kind], ms[kind]))
                        .collect();
                    println!(
                        "| {} | {tokens} | {} | {:.2} | {} | {} |",
                        shape.name,
                        op.name,
                        ms[largest],
                        LIMITS[largest],
                        others.join(", ")
                    );
                }
            }
            Ok(())
        })?;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
