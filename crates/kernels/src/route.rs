//! Routing of a mixture of experts: which experts compute which tokens, the rows of each expert,
//! and the sum of their results.
//!
//! Shapes: `T` tokens, `E` experts, `k` experts of each token, `R = T k` rows, `D` hidden size.
//! Choice `t k + j` is the `j`-th expert of token `t`. Rows are choices in the order of their
//! experts; the rows of one expert are in the order of the tokens. So a row has the same neighbours
//! and the same sums for any number of threads, and no sum depends on the rows of other tokens.

use super::cpu::blocks::{filled, span};
use super::cpu::simd::{exp, kernels};
use super::cpu::{self, Element, ROWS, compute_dtype, expect_f32, expect_shape, read};
use super::launch::{self, Launch, THREADS, empty, launch, on_gpu};
use super::rows::expect_u32;
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;
use std::cmp::Reverse;

/// Which experts compute which tokens.
#[derive(Debug, Clone)]
pub struct Routing {
    /// `[T, k]`, `f32`: softmax over the `k` largest logits of a token, largest first.
    pub weights: Tensor,
    /// `[T, k]`, `u32`: the experts with these logits. Of equal logits, that of the lower expert
    /// comes first.
    pub experts: Tensor,
    /// `[R]`, `u32`: the choice of each row.
    pub order: Tensor,
    /// `[R]`, `u32`: the row of each choice, the inverse of `order`.
    pub places: Tensor,
    /// `[E + 1]`, `u32`: the first row of each expert, and `R`.
    pub offsets: Tensor,
}

impl Routing {
    /// Returns `(T, k)`.
    pub(super) fn choices(&self) -> Result<(usize, usize)> {
        self.weights.dims2()
    }

    /// Returns `R`. Fails if a tensor has another shape or dtype than a routing has.
    pub(super) fn check(&self, op: &str) -> Result<usize> {
        let (t, k) = self.choices()?;
        expect_f32(op, "weights", &self.weights, &[t, k])?;
        for (name, tensor, shape) in [
            ("experts", &self.experts, &[t, k][..]),
            ("order", &self.order, &[t * k]),
            ("places", &self.places, &[t * k]),
            ("offsets", &self.offsets, self.offsets.dims()),
        ] {
            expect_u32(op, name, tensor)?;
            expect_shape(op, name, tensor, shape)?;
        }
        Ok(t * k)
    }
}

/// An integer with the order of `x`. Both zeros are equal, and NaN is above all numbers, so that a
/// token with such a logit has weights of NaN.
fn rank(x: f32) -> u32 {
    if x.is_nan() {
        return u32::MAX;
    }
    let bits = (x + 0.0).to_bits(); // -0 becomes 0
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

kernels! {
    /// Replaces logits, the largest first, by their softmax.
    fn softmax(logits: &mut [f32]) {
        let largest = logits[0];
        let mut sum = 0.0;
        for x in logits.iter_mut() {
            *x = exp(*x - largest);
            sum += *x;
        }
        for x in logits.iter_mut() {
            *x /= sum;
        }
    }
}

/// Writes the experts of one token and their weights.
fn choose(logits: &[f32], candidates: &mut Vec<u32>, experts: &mut [u32], weights: &mut [f32]) {
    let key = |expert: &u32| (Reverse(rank(logits[*expert as usize])), *expert);
    let k = experts.len();
    candidates.clear();
    candidates.extend(0..logits.len() as u32);
    if k < candidates.len() {
        candidates.select_nth_unstable_by_key(k - 1, key);
    }
    let chosen = &mut candidates[..k];
    chosen.sort_unstable_by_key(key);
    experts.copy_from_slice(chosen);
    for (weight, expert) in weights.iter_mut().zip(chosen) {
        *weight = logits[*expert as usize];
    }
    softmax(weights);
}

/// Chooses the `k` experts with the largest `logits: [T, E]` (`f32`) for each token, and sorts the
/// choices by expert.
pub fn route(logits: &Tensor, k: usize) -> Result<Routing> {
    let op = "route";
    let (t, e) = logits.dims2()?;
    expect_f32(op, "logits", logits, &[t, e])?;
    if k == 0 || k > e {
        bail!("{op}: found k = {k}, expected 1 to {e}, the number of experts");
    }
    if on_gpu(logits) {
        return route_on_gpu(op, logits, k);
    }
    let (rows, cpu) = (t * k, &Device::Cpu);
    if u32::try_from(rows).is_err() {
        bail!("{op}: found {t} tokens with {k} experts each, expected fewer than 2^32 choices");
    }
    let logits = read(op, "logits", logits)?;
    let logits = logits.slice::<f32>()?;
    let (mut experts, mut weights) = (vec![0u32; rows], vec![0f32; rows]);
    let tokens = experts.par_chunks_mut(k).zip(weights.par_chunks_mut(k)).zip(logits.par_chunks(e));
    tokens.with_min_len(ROWS).for_each_with(Vec::new(), |free, ((experts, weights), logits)| {
        choose(logits, free, experts, weights);
    });
    let mut offsets = vec![0u32; e + 1];
    for expert in &experts {
        offsets[*expert as usize + 1] += 1;
    }
    for expert in 0..e {
        offsets[expert + 1] += offsets[expert];
    }
    let (mut next, mut order, mut places) = (offsets.clone(), vec![0u32; rows], vec![0u32; rows]);
    for (choice, (expert, place)) in experts.iter().zip(&mut places).enumerate() {
        let row = &mut next[*expert as usize];
        (*place, order[*row as usize]) = (*row, choice as u32);
        *row += 1;
    }
    Ok(Routing {
        weights: Tensor::from_vec(weights, (t, k), cpu)?,
        experts: Tensor::from_vec(experts, (t, k), cpu)?,
        order: Tensor::from_vec(order, rows, cpu)?,
        places: Tensor::from_vec(places, rows, cpu)?,
        offsets: Tensor::from_vec(offsets, e + 1, cpu)?,
    })
}

/// Number of tokens of a block of a kernel of a router, one per warp.
pub(super) const TOKENS: usize = 4;
/// Number of choices that are sorted together, one per thread: `TILE` of the kernels.
const TILE: usize = 1024;
/// Maximum number of bytes of shared memory without a choice of the GPU.
const SHARED_BYTES: usize = 48 << 10;

fn route_on_gpu(op: &str, logits: &Tensor, k: usize) -> Result<Routing> {
    let (t, e) = logits.dims2()?;
    let rows = t * k;
    let shared = 4 * TOKENS * (e + 2 * k);
    if shared > SHARED_BYTES || i32::try_from(rows).is_err() {
        bail!("{op}: {t} tokens with {k} of {e} experts are too many for the kernels");
    }
    let ids = |shape: &[usize]| empty(shape, DType::U32, logits);
    let weights = empty((t, k), DType::F32, logits)?;
    let (experts, order, places) = (ids(&[t, k])?, ids(&[rows])?, ids(&[rows])?);
    let tiles = rows.div_ceil(TILE);
    let (offsets, counts) = (ids(&[e + 1])?, ids(&[tiles, e])?);
    let kernel =
        |name, blocks, threads| Launch::new(name, DType::F32).grid(blocks).threads(threads);
    let choose = kernel("choose_experts", t.div_ceil(TOKENS), 32 * TOKENS as u32).shared(shared);
    launch!(op, choose; logits, weights, experts, t, e, k)?;
    launch!(op, kernel("count_choices", tiles, THREADS); experts, counts, rows, e)?;
    launch!(op, kernel("start_experts", 1, TILE as u32); counts, offsets, tiles, e)?;
    let place = kernel("place_choices", tiles, TILE as u32);
    launch!(op, place; experts, counts, order, places, rows, e)?;
    Ok(Routing { weights, experts, order, places, offsets })
}

/// Returns the gradient of the logits, `[T, experts]` (`f32`), from that of the weights,
/// `d_weights: [T, k]` (`f32`). It is zero for experts that a token did not choose.
pub fn route_backward(routing: &Routing, d_weights: &Tensor, experts: usize) -> Result<Tensor> {
    let op = "route_backward";
    routing.check(op)?;
    let (t, k) = routing.choices()?;
    expect_f32(op, "d_weights", d_weights, &[t, k])?;
    if on_gpu(d_weights) {
        let Routing { weights, experts: chosen, .. } = routing;
        let d_logits = empty((t, experts), DType::F32, d_weights)?;
        let launch = Launch::new(op, DType::F32).grid(t.div_ceil(launch::ROWS)).threads(THREADS);
        launch!(op, launch; weights, ("experts", chosen), d_weights, d_logits, t, experts, k)?;
        return Ok(d_logits);
    }
    let chosen = read(op, "experts", &routing.experts)?;
    let (weights, grads) =
        (read(op, "weights", &routing.weights)?, read(op, "d_weights", d_weights)?);
    let (chosen, weights, grads) =
        (chosen.slice::<u32>()?, weights.slice::<f32>()?, grads.slice::<f32>()?);
    if let Some(expert) = chosen.iter().find(|expert| **expert as usize >= experts) {
        bail!("{op}: expert `{expert}` is out of range for {experts} experts");
    }
    let [d_logits] = filled(t, ROWS, [(experts, DType::F32)], |tokens, [d_logits]| {
        for (token, d_logits) in tokens.zip(d_logits.chunks_mut(experts)) {
            let choices = token * k..(token + 1) * k;
            let (weights, grads) = (&weights[choices.clone()], &grads[choices.clone()]);
            let mut mean = 0.0;
            weights.iter().zip(grads).for_each(|(w, g)| mean = w.mul_add(*g, mean));
            for ((expert, w), g) in chosen[choices].iter().zip(weights).zip(grads) {
                d_logits[*expert as usize] = w * (g - mean);
            }
        }
    });
    d_logits.tensor((t, experts))
}

/// Returns the rows of the experts, `[R, D]`: for each row its token of `x: [T, D]`.
pub fn expert_rows(x: &Tensor, routing: &Routing) -> Result<Tensor> {
    let op = "expert_rows";
    let rows = routing.check(op)?;
    let ((t, k), (_, d)) = (routing.choices()?, x.dims2()?);
    expect_shape(op, "x", x, &[t, d])?;
    let dtype = compute_dtype(op, &[("x", x)])?;
    if on_gpu(x) {
        let y = empty((rows, d), dtype, x)?;
        let launch = Launch::for_rows(op, (rows, d), &[x, &y])?;
        launch!(op, launch; x, routing.order, y, rows, k, d)?;
        return Ok(y);
    }
    let (x, order) = (read(op, "x", x)?, read(op, "order", &routing.order)?);
    let order = order.slice::<u32>()?;
    match dtype {
        DType::BF16 => copies(x.slice::<bf16>()?, order, (rows, k, d)),
        _ => copies(x.slice::<f32>()?, order, (rows, k, d)),
    }
}

fn copies<T: Element>(
    x: &[T],
    order: &[u32],
    (rows, k, d): (usize, usize, usize),
) -> Result<Tensor> {
    let mut y = vec![T::zero(); rows * d];
    y.par_chunks_mut(ROWS * d.max(1)).zip(order.par_chunks(ROWS)).for_each(|(y, order)| {
        for (y, choice) in y.chunks_mut(d).zip(order) {
            let token = *choice as usize / k;
            y.copy_from_slice(&x[token * d..(token + 1) * d]);
        }
    });
    Tensor::from_vec(y, (rows, d), &Device::Cpu)
}

/// Returns the gradient of the tokens, `[T, D]`, from that of the rows, `d_rows: [R, D]`: the sum
/// over the choices of a token, in their order.
pub fn expert_rows_backward(d_rows: &Tensor, routing: &Routing) -> Result<Tensor> {
    sums("expert_rows_backward", "d_rows", d_rows, routing, None)
}

/// Returns `residual` (or 0) plus the sum of the `rows: [R, D]` of each token in the order of its
/// choices, `[T, D]`. The gradient of `rows` is [`expert_rows`] of that of the result.
pub fn combine(rows: &Tensor, routing: &Routing, residual: Option<&Tensor>) -> Result<Tensor> {
    sums("combine", "rows", rows, routing, residual)
}

fn sums(
    op: &'static str,
    name: &'static str,
    rows: &Tensor,
    routing: &Routing,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let num_rows = routing.check(op)?;
    let ((t, k), (_, d)) = (routing.choices()?, rows.dims2()?);
    expect_shape(op, name, rows, &[num_rows, d])?;
    let dtype = compute_dtype(op, &[(name, rows)])?;
    if let Some(residual) = residual {
        compute_dtype(op, &[(name, rows), ("residual", residual)])?;
        expect_shape(op, "residual", residual, &[t, d])?;
    }
    if on_gpu(rows) {
        let y = empty((t, d), dtype, rows)?;
        let mut accessed = vec![rows, &y];
        accessed.extend(residual);
        let launch = Launch::for_rows("combine_experts", (t, d), &accessed)?;
        launch!(op, launch; (name, rows), routing.places, residual, y, t, k, d)?;
        return Ok(y);
    }
    let residual = residual.map(|residual| read(op, "residual", residual)).transpose()?;
    let residual = residual.as_ref().map(cpu::Operand::values).transpose()?;
    let (rows, places) = (read(op, name, rows)?, read(op, "places", &routing.places)?);
    let (rows, places) = (rows.values()?, places.slice::<u32>()?);
    let [y] = filled(t, ROWS, [(d, dtype)], |tokens, [y]| {
        if let Some(residual) = residual {
            y.copy_from_slice(&residual.view(span(&tokens, d)));
        }
        for (token, y) in tokens.zip(y.chunks_mut(d)) {
            for place in &places[token * k..(token + 1) * k] {
                let row = *place as usize;
                cpu::add(&rows.view(span(&(row..row + 1), d)), y);
            }
        }
    });
    y.tensor((t, d))
}

#[cfg(test)]
mod tests;
