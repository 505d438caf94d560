//! The AdamW update in one pass over weight, gradient and moments, and what clipping needs.
//!
//! The order of operations is that of `torch.optim.AdamW`. Tensors are computed in `f32`, scalars
//! in `f64`. The moments may be stored in `bf16` (`stochastic_rounding.rs`) or in 8 bits
//! (`eight_bit.rs`), and a `bf16` weight may have no master copy.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::cpu::blocks::to_bf16_block;
use super::cpu::simd::kernels;
use super::cpu::{self, BLOCK, compute_dtype, expect_f32, expect_shape, read};
use super::eight_bit::{EIGHT_BIT_BLOCK, SIGNED, UNSIGNED};
use super::launch::{
    Arrays, Launch, Long, THREADS, Words, address, empty, launch, launch_elementwise, on_gpu,
};
use super::stochastic_rounding::{Draw, step_seed, tensor_seed};
use super::stored::{Seed, State, StoredElements};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

/// Hyperparameters that stay constant during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
}

/// A parameter, its optimizer state and its gradient, all of the same shape.
#[derive(Clone, Copy)]
pub struct AdamWTensors<'a> {
    /// The weight, `f32` or `bf16`; overwritten.
    pub weight: &'a Tensor,
    /// The master weight in `f32`, overwritten. Without one, a `bf16` weight is rounded at random.
    pub master: Option<&'a Tensor>,
    /// First moment, `f32`, `bf16`, or 8-bit codes (`u8`); overwritten.
    pub exp_avg: &'a Tensor,
    /// Second moment, in the dtype of the first; overwritten.
    pub exp_avg_sq: &'a Tensor,
    /// Scales of the moments, if they are 8-bit codes: `f32`, one for each [`EIGHT_BIT_BLOCK`]
    /// elements; overwritten.
    pub absmax: Option<[&'a Tensor; 2]>,
    /// Gradient, `f32`; only read.
    pub grad: &'a Tensor,
}

/// The update of one of the parameters of a step.
#[derive(Clone, Copy)]
pub struct AdamWUpdate<'a> {
    /// The parameter, its state and its gradient, or the same part of each.
    pub tensors: AdamWTensors<'a>,
    /// Number of the parameter among the trained ones. Random rounding depends on it.
    pub index: usize,
    /// The first element of the part, if the tensors are a part of the parameter; otherwise 0.
    pub first: usize,
    /// Learning rate of this parameter.
    pub lr: f64,
    /// Weight decay of this parameter; multiplied by `lr`.
    pub weight_decay: f64,
}

/// Scalars of the update of one parameter in one step, rounded to `f32`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalars {
    pub(super) keep: f32,
    pub(super) lerp: f32,
    pub(super) beta2: f32,
    pub(super) one_minus_beta2: f32,
    pub(super) sqrt_correction2: f32,
    pub(super) eps: f32,
    pub(super) step_size: f32,
}

impl Scalars {
    fn new(hyper: &AdamW, lr: f64, weight_decay: f64, step: u64) -> Self {
        let correction1 = 1.0 - hyper.beta1.powf(step as f64);
        let correction2 = 1.0 - hyper.beta2.powf(step as f64);
        Self {
            keep: (1.0 - lr * weight_decay) as f32,
            lerp: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            sqrt_correction2: correction2.sqrt() as f32,
            eps: hyper.eps as f32,
            step_size: (lr / correction1) as f32,
        }
    }
}

#[inline(always)]
fn update_element(s: Scalars, g: f32, p: &mut f32, m: &mut f32, v: &mut f32) {
    let decayed = *p * s.keep;
    *m = s.lerp.mul_add(g - *m, *m);
    *v = *v * s.beta2 + s.one_minus_beta2 * g * g;
    let denominator = v.sqrt() / s.sqrt_correction2 + s.eps;
    *p = decayed - s.step_size * *m / denominator;
}

kernels! {
    fn update(s: Scalars, grad_scale: f32, grad: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        let n = p.len();
        let (grad, m, v) = (&grad[..n], &mut m[..n], &mut v[..n]);
        for i in 0..n {
            update_element(s, grad[i] * grad_scale, &mut p[i], &mut m[i], &mut v[i]);
        }
    }

    fn sum_of_squares_block(x: &[f32]) -> f64 {
        let mut lanes = [0f64; 32];
        let whole = x.len() / 32 * 32;
        let mut at = 0;
        while at < whole {
            let a = &x[at..at + 32];
            for i in 0..32 {
                let v = a[i] as f64;
                lanes[i] = v.mul_add(v, lanes[i]);
            }
            at += 32;
        }
        let mut sum = 0.0;
        for lane in lanes {
            sum += lane;
        }
        for &v in &x[whole..] {
            sum += v as f64 * v as f64;
        }
        sum
    }
}

/// Fails unless the tensors have the same shape, the dtypes that an update needs, and separate
/// memory.
fn check(op: &str, tensors: &AdamWTensors<'_>, step: u64) -> Result<()> {
    let &AdamWTensors { weight, master, exp_avg, exp_avg_sq, absmax, grad } = tensors;
    let dims = weight.dims();
    let mut all = vec![("weight", weight), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    if let Some(absmax) = absmax {
        let blocks = weight.elem_count().div_ceil(EIGHT_BIT_BLOCK);
        for (name, moment) in [("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)] {
            if moment.dtype() != DType::U8 {
                bail!("{op}: `{name}` is {:?} and has scales, expected U8", moment.dtype());
            }
        }
        for absmax in absmax {
            expect_f32(op, "absmax", absmax, &[blocks])?;
            all.push(("absmax", absmax));
        }
    } else {
        compute_dtype(op, &[("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)])?;
    }
    expect_shape(op, "exp_avg", exp_avg, dims)?;
    expect_shape(op, "exp_avg_sq", exp_avg_sq, dims)?;
    expect_f32(op, "grad", grad, dims)?;
    if step == 0 {
        bail!("{op}: steps count from 1");
    }
    compute_dtype(op, &[("weight", weight)])?;
    if let Some(master) = master {
        if weight.dtype() == DType::F32 {
            bail!("{op}: `weight` is F32 and has a `master`, expected BF16");
        }
        expect_f32(op, "master", master, dims)?;
        all.push(("master", master));
    }
    for (i, (name, tensor)) in all.iter().enumerate() {
        cpu::distinct(op, name, tensor, &all[i + 1..])?;
        cpu::distinct(op, name, tensor, &[("grad", grad)])?;
    }
    Ok(())
}

/// Sum of the squares of each `f32` tensor, `[tensors]` in `f64`, on the device of the tensors.
/// Does not wait for a GPU. The bits do not depend on the number of threads.
pub fn sums_of_squares(tensors: &[&Tensor]) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        return Tensor::from_vec(Vec::<f64>::new(), 0, &Device::Cpu);
    };
    for tensor in tensors {
        expect_f32("sums_of_squares", "t", tensor, tensor.dims())?;
    }
    if on_gpu(first) {
        return sums_of_squares_on_gpu(tensors);
    }
    let squares = tensors.iter().map(|tensor| sum_of_squares(tensor));
    Tensor::from_vec(squares.collect::<Result<Vec<f64>>>()?, tensors.len(), first.device())
}

/// The factor, at most 1, that limits the joint L2 norm of gradients with these [`sums_of_squares`]
/// to `max_grad_norm`; 1 if `max_grad_norm` is 0, and `None` if the norm is not finite. Waits for a
/// GPU.
pub fn clip_scale(squares: &Tensor, max_grad_norm: f64) -> Result<Option<f32>> {
    let norm = squares.to_vec1::<f64>()?.iter().sum::<f64>().sqrt();
    // As torch.nn.utils.clip_grad_norm_.
    let clip = max_grad_norm / (norm + 1e-6);
    let scale = if max_grad_norm > 0.0 { clip.min(1.0) } else { 1.0 };
    Ok(norm.is_finite().then_some(scale as f32))
}

/// Update number `step` (from 1) of parameters, with the gradients scaled down to a joint L2 norm
/// of `max_grad_norm`; 0 switches the scaling off. `squares` are the [`sums_of_squares`] of all
/// gradients of the step, which may be more than those of `updates`. Changes nothing if their sum
/// is not finite. Does not wait for a GPU.
pub fn clipped_update(
    hyper: &AdamW,
    updates: &[AdamWUpdate<'_>],
    step: u64,
    squares: &Tensor,
    max_grad_norm: f64,
) -> Result<()> {
    let op = "clipped_update";
    if updates.is_empty() {
        return Ok(());
    }
    for update in updates {
        check(op, &update.tensors, step)?;
    }
    let scalars: Vec<Scalars> = updates
        .iter()
        .map(|update| Scalars::new(hyper, update.lr, update.weight_decay, step))
        .collect();
    let seed = step_seed(step);
    if on_gpu(updates[0].tensors.grad) {
        return clipped_update_on_gpu(updates, &scalars, seed, squares, max_grad_norm);
    }
    if let Some(grad_scale) = clip_scale(squares, max_grad_norm)? {
        for (update, scalars) in updates.iter().zip(scalars) {
            let seed = tensor_seed(seed, update.index);
            update_on_cpu(op, &update.tensors, update.first, scalars, grad_scale, seed)?;
        }
    }
    Ok(())
}

/// Update number `step` (from 1) of one parameter: decays the weight by `lr * weight_decay`, then
/// applies the Adam update of the gradient `grad_scale * grad`.
pub fn adamw_step(
    hyper: &AdamW,
    tensors: &AdamWTensors<'_>,
    lr: f64,
    weight_decay: f64,
    step: u64,
    grad_scale: f32,
) -> Result<()> {
    let op = "adamw_step";
    check(op, tensors, step)?;
    let scalars = Scalars::new(hyper, lr, weight_decay, step);
    let seed = step_seed(step);
    if on_gpu(tensors.grad) {
        let (grad_scale, seed) =
            (Tensor::new(&[grad_scale], tensors.weight.device())?, tensor_seed(seed, 0));
        let part = ParameterPart { tensors: *tensors, scalars, seed, first: 0 };
        return update_on_gpu(&[part], &grad_scale);
    }
    update_on_cpu(op, tensors, 0, scalars, grad_scale, tensor_seed(seed, 0))
}

fn update_on_cpu(
    op: &'static str,
    tensors: &AdamWTensors<'_>,
    first: usize,
    s: Scalars,
    grad_scale: f32,
    seed: u32,
) -> Result<()> {
    let &AdamWTensors { weight, master, exp_avg, exp_avg_sq, absmax, grad } = tensors;
    let grad = read(op, "grad", grad)?;
    let grad = grad.slice::<f32>()?;
    let state = |name, tensor, draw, absmax| State { name, tensor, absmax, draw: Some(draw) };
    let exact = state("weight", master.unwrap_or(weight), Draw::Weight, None);
    let m = state("exp_avg", exp_avg, Draw::First, absmax.map(|absmax| absmax[0]));
    let v = state("exp_avg_sq", exp_avg_sq, Draw::Second, absmax.map(|absmax| absmax[1]));
    let step = Step { s, grad_scale, seed: Seed { seed, first: first as u32 } };
    exact.write(op, |p| {
        m.write(op, |m| {
            v.write(op, |v| match master {
                None => {
                    step.update(grad, [p, m, v], None);
                    Ok(())
                }
                Some(_) => cpu::write(op, "weight", weight, |copy: &mut [bf16]| {
                    step.update(grad, [p, m, v], Some(copy));
                }),
            })
        })
    })
}

/// The scalars of the update of a parameter.
struct Step {
    s: Scalars,
    grad_scale: f32,
    seed: Seed,
}

impl Step {
    /// Updates weight and moments on all threads. `copy` becomes the rounded weight.
    fn update(&self, grad: &[f32], state: [StoredElements<'_>; 3], copy: Option<&mut [bf16]>) {
        let [p, m, v] = state.map(|stored| stored.blocks().into_par_iter());
        let blocks = p.zip(m).zip(v).zip(grad.par_chunks(BLOCK)).enumerate();
        let update = |(index, (((p, m), v), grad))| {
            self.update_block(index * BLOCK, grad, [p, m, v], None);
        };
        match copy {
            None => blocks.for_each(update),
            Some(copy) => blocks.zip(copy.par_chunks_mut(BLOCK)).for_each(
                |((index, (((p, m), v), grad)), copy)| {
                    self.update_block(index * BLOCK, grad, [p, m, v], Some(copy));
                },
            ),
        }
    }

    /// Updates a block whose first element is `start`.
    fn update_block(
        &self,
        start: usize,
        grad: &[f32],
        mut state: [StoredElements<'_>; 3],
        mut copy: Option<&mut [bf16]>,
    ) {
        let mut values = [[0f32; EIGHT_BIT_BLOCK]; 3]; // in the L1 cache
        for (at, grad) in (0..).step_by(EIGHT_BIT_BLOCK).zip(grad.chunks(EIGHT_BIT_BLOCK)) {
            let range = at..at + grad.len();
            let [p, m, v] = values.each_mut().map(|values| &mut values[..grad.len()]);
            for (stored, values) in state.iter().zip([&mut *p, &mut *m, &mut *v]) {
                stored.load(range.clone(), values);
            }
            update(self.s, self.grad_scale, grad, p, m, v);
            let first = self.seed.first.wrapping_add((start + at) as u32);
            let seed = Seed { first, ..self.seed };
            for (stored, values) in state.iter_mut().zip([&*p, &*m, &*v]) {
                stored.store(range.clone(), values, seed);
            }
            if let Some(copy) = &mut copy {
                to_bf16_block(p, &mut copy[range]);
            }
        }
    }
}

/// Sum of the squares of an `f32` tensor, in `f64`; the same bits for every thread count. On the
/// CPU, the sum of its [`squares_of_blocks`].
pub fn sum_of_squares(t: &Tensor) -> Result<f64> {
    expect_f32("sum_of_squares", "t", t, t.dims())?;
    if on_gpu(t) {
        return Ok(sums_of_squares_on_gpu(&[t])?.to_vec1::<f64>()?[0]); // waits for the device
    }
    Ok(squares_of_blocks(t)?.to_vec1::<f64>()?.iter().sum())
}

/// Number of elements of a block of [`squares_of_blocks`].
pub const SQUARES_BLOCK: usize = 4096;

/// Sums of the squares of consecutive blocks of [`SQUARES_BLOCK`] elements of an `f32` tensor, as
/// `[ceil(elements / SQUARES_BLOCK)]` in `f64`, on the device of the tensor. The last block may be
/// shorter; zeros at its end do not change the bits. Neither does the place of a block in its
/// tensor, nor the number of threads. Does not wait for a GPU.
pub fn squares_of_blocks(t: &Tensor) -> Result<Tensor> {
    let op = "squares_of_blocks";
    expect_f32(op, "t", t, t.dims())?;
    if on_gpu(t) {
        let blocks = t.elem_count().div_ceil(SQUARES_BLOCK);
        let squares = empty(blocks, DType::F64, t)?;
        let launch = Launch::new(op, DType::F32).grid(blocks).threads(THREADS);
        launch!(op, launch; t, Long(t.elem_count()), squares)?;
        return Ok(squares);
    }
    let data = read(op, "t", t)?;
    let squares = |block: &[f32]| {
        if block.len() == SQUARES_BLOCK {
            return sum_of_squares_block(block);
        }
        let mut whole = [0f32; SQUARES_BLOCK];
        whole[..block.len()].copy_from_slice(block);
        sum_of_squares_block(&whole)
    };
    let sums: Vec<f64> = data.slice::<f32>()?.par_chunks(SQUARES_BLOCK).map(squares).collect();
    let len = sums.len();
    Tensor::from_vec(sums, len, t.device())
}

/// Sum of the squares of each `f32` tensor: its [`squares_of_blocks`], added up in order. So a
/// tensor whose blocks are on several ranks has the same bits. Waits for a GPU once;
/// [`sums_of_squares`] does not, and adds in another order there.
pub fn sums_of_squares_in_order(tensors: &[Tensor]) -> Result<Vec<f64>> {
    let blocks: Vec<Tensor> = tensors.iter().map(squares_of_blocks).collect::<Result<_>>()?;
    if blocks.is_empty() {
        return Ok(Vec::new());
    }
    let all = Tensor::cat(&blocks, 0)?.to_vec1::<f64>()?;
    let mut rest = &all[..];
    let sums = blocks.iter().map(|blocks| {
        let (own, others) = rest.split_at(blocks.elem_count());
        rest = others;
        own.iter().sum()
    });
    Ok(sums.collect())
}

/// Sets all elements of `f32` tensors to zero, in place.
pub fn fill_zero_all(tensors: &[&Tensor]) -> Result<()> {
    let Some(first) = tensors.first() else { return Ok(()) };
    for tensor in tensors {
        expect_f32("fill_zero_all", "t", tensor, tensor.dims())?;
    }
    if on_gpu(first) {
        return fill_zero_all_on_gpu(tensors);
    }
    tensors.iter().try_for_each(|tensor| fill_zero(tensor))
}

/// Sets all elements of an `f32` or `bf16` tensor to zero, in place.
pub fn fill_zero(t: &Tensor) -> Result<()> {
    let op = "fill_zero";
    expect_shape(op, "t", t, t.dims())?;
    if on_gpu(t) {
        return launch_elementwise!(op; t);
    }
    match t.dtype() {
        DType::BF16 => cpu::write(op, "t", t, |t: &mut [bf16]| {
            t.par_chunks_mut(BLOCK).for_each(|t| t.fill(bf16::ZERO));
        }),
        _ => cpu::write(op, "t", t, |t: &mut [f32]| {
            t.par_chunks_mut(BLOCK).for_each(|t| t.fill(0.0));
        }),
    }
}

// Launches for many tensors at once: lists of them are arguments of the kernels.

/// Elements of a block, as in `adamw.cu`.
const CHUNK: usize = 1 << 16;
/// Tensors of one launch, as in `adamw.cu`.
const MOST_TENSORS: usize = 160;
const MOST_UPDATES: usize = 56;
/// As in `adamw_8bit.cu`.
const MOST_8BIT_UPDATES: usize = 20;

fn num_chunks(t: &Tensor) -> usize {
    t.elem_count().div_ceil(CHUNK)
}

/// A `Tensors` of `adamw.cu`, and the chunks in it.
fn tensor_list(op: &str, tensors: &[&Tensor]) -> Result<(Words, usize)> {
    let mut words = Arrays::new(MOST_TENSORS);
    words.longs(tensors.iter().map(|t| address(op, "t", t).map(|at| at.0)))?;
    words.longs(tensors.iter().map(|t| Ok(t.elem_count() as u64)))?;
    Ok(words.with_blocks(tensors.iter().map(|t| num_chunks(t))))
}

/// `[num tensors]` in `f64`: the sum of the squares of each.
fn sums_of_squares_on_gpu(tensors: &[&Tensor]) -> Result<Tensor> {
    let op = "sums_of_squares";
    let first = tensors[0];
    let squares = empty(tensors.len(), DType::F64, first)?;
    for (start, tensors) in (0..).step_by(MOST_TENSORS).zip(tensors.chunks(MOST_TENSORS)) {
        let (list, chunks) = tensor_list(op, tensors)?;
        let partials = empty(chunks, DType::F64, first)?;
        let kernel = |name, blocks| Launch::new(name, DType::F32).grid(blocks).threads(THREADS);
        let (n, squares) = (tensors.len(), squares.narrow(0, start, tensors.len())?);
        launch!(op, kernel("squares_of_chunks", chunks).on(first); list, n, partials)?;
        launch!(op, kernel("squares_of_tensors", n).on(first); list, partials, squares)?;
    }
    Ok(squares)
}

fn fill_zero_all_on_gpu(tensors: &[&Tensor]) -> Result<()> {
    for tensors in tensors.chunks(MOST_TENSORS) {
        let (op, n) = ("fill_zero_all", tensors.len());
        let (list, chunks) = tensor_list(op, tensors)?;
        let launch = Launch::new("zero_tensors", DType::F32).grid(chunks).threads(THREADS);
        launch!(op, launch.on(tensors[0]); list, n)?;
    }
    Ok(())
}

/// Updates of all parameters with a gradient scale that stays on the device.
fn clipped_update_on_gpu<'a>(
    updates: &[AdamWUpdate<'a>],
    scalars: &[Scalars],
    seed: u32,
    squares: &Tensor,
    max_grad_norm: f64,
) -> Result<()> {
    let op = "clipped_update";
    let grad_scale = empty(1, DType::F32, squares)?;
    let launch = Launch::new("clip", DType::F32).threads(THREADS);
    let most = Words(vec![max_grad_norm.to_bits()]);
    launch!(op, launch; squares, squares.elem_count(), most, grad_scale)?;
    let part = |(update, scalars): (&AdamWUpdate<'a>, &Scalars)| ParameterPart {
        tensors: update.tensors,
        scalars: *scalars,
        seed: tensor_seed(seed, update.index),
        first: update.first,
    };
    let parts: Vec<ParameterPart<'_>> = updates.iter().zip(scalars).map(part).collect();
    update_on_gpu(&parts, &grad_scale)
}

/// A parameter or a part of one.
struct ParameterPart<'a> {
    tensors: AdamWTensors<'a>,
    scalars: Scalars,
    seed: u32,
    /// Index of the first element in the parameter.
    first: usize,
}

/// Updates parts; the moments may have any dtype.
fn update_on_gpu(parts: &[ParameterPart<'_>], grad_scale: &Tensor) -> Result<()> {
    let dtype_of = |part: &&ParameterPart<'_>| part.tensors.exp_avg.dtype();
    for (dtype, name, most) in [
        (DType::F32, "adamw", MOST_UPDATES),
        (DType::BF16, "adamw", MOST_UPDATES),
        (DType::U8, "adamw_8bit", MOST_8BIT_UPDATES),
    ] {
        let parts: Vec<&ParameterPart<'_>> =
            parts.iter().filter(|part| dtype_of(part) == dtype).collect();
        for parts in parts.chunks(most) {
            let (list, chunks) = update_list(most, parts)?;
            let Scalars { lerp, beta2, one_minus_beta2, sqrt_correction2, eps, .. } =
                parts[0].scalars;
            let launch = Launch::new(name, dtype).grid(chunks).threads(THREADS);
            let (n, correction) = (parts.len(), 1.0 / sqrt_correction2);
            launch!(
                name, launch.on(grad_scale);
                list, n, grad_scale, lerp, beta2, one_minus_beta2, correction, eps
            )?;
        }
    }
    Ok(())
}

/// The `Updates` of `adamw.cu`, or those of `adamw_8bit.cu` if the moments are codes, for at most
/// `most` parts; and the chunks in it.
fn update_list(most: usize, parts: &[&ParameterPart<'_>]) -> Result<(Words, usize)> {
    let op = "adamw_step";
    let each = |name, tensor: for<'a> fn(&AdamWTensors<'a>) -> Option<&'a Tensor>| {
        parts.iter().map(move |part| match tensor(&part.tensors) {
            Some(tensor) => address(op, name, tensor).map(|at| at.0),
            None => Ok(0),
        })
    };
    let mut words = Arrays::new(most);
    let has_codes = parts[0].tensors.absmax.is_some();
    if has_codes {
        for map in [&*SIGNED, &*UNSIGNED] {
            words.halves(map.values.len(), map.values.iter().map(|value| value.to_bits()));
        }
    }
    words.longs(each("weight", |of| of.master.or(of_dtype(of.weight, DType::F32))))?;
    words.longs(each("weight", |of| of_dtype(of.weight, DType::BF16)))?;
    words.longs(each("exp_avg", |of| Some(of.exp_avg)))?;
    words.longs(each("exp_avg_sq", |of| Some(of.exp_avg_sq)))?;
    if has_codes {
        words.longs(each("absmax", |of| of.absmax.map(|absmax| absmax[0])))?;
        words.longs(each("absmax", |of| of.absmax.map(|absmax| absmax[1])))?;
    }
    words.longs(each("grad", |of| Some(of.grad)))?;
    words.longs(parts.iter().map(|part| Ok(part.tensors.weight.elem_count() as u64)))?;
    let mut halves = |half: fn(&ParameterPart<'_>) -> u32| {
        words.halves(most, parts.iter().map(|part| half(part)));
    };
    halves(|part| part.scalars.keep.to_bits());
    halves(|part| part.scalars.step_size.to_bits());
    halves(|part| part.seed);
    halves(|part| part.first as u32); // the random numbers depend on these 32 bits only
    Ok(words.with_blocks(parts.iter().map(|part| num_chunks(part.tensors.weight))))
}

/// The tensor, if it has this dtype.
fn of_dtype(tensor: &Tensor, dtype: DType) -> Option<&Tensor> {
    (tensor.dtype() == dtype).then_some(tensor)
}

#[cfg(test)]
mod tests;
