//! Launches of kernels that process many tensors at once: lists of them travel as arguments.

use super::{AdamWTensors, AdamWUpdate, Scalars};
use crate::eight_bit::{SIGNED, UNSIGNED};
use crate::launch::{Launch, THREADS, Words, address, empty, launch};
use crate::moments::tensor_seed;
use candle_core::{DType, Result, Tensor};

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

/// The memory of a struct of arrays, each `most` long; the arrays are in the order of the calls.
struct Arrays {
    most: usize,
    words: Vec<u64>,
}

impl Arrays {
    fn new(most: usize) -> Self {
        Self { most, words: Vec::new() }
    }

    fn longs(&mut self, values: impl Iterator<Item = Result<u64>>) -> Result<()> {
        let end = self.words.len() + self.most;
        for value in values {
            self.words.push(value?);
        }
        self.words.resize(end, 0);
        Ok(())
    }

    /// Two to a word; `length` is even, or this is the last array.
    fn halves(&mut self, length: usize, values: impl Iterator<Item = u32>) {
        let end = self.words.len() + length.div_ceil(2);
        let values: Vec<u32> = values.collect();
        let pairs = values.chunks(2);
        self.words.extend(
            pairs.map(|pair| {
                u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32
            }),
        );
        self.words.resize(end, 0);
    }

    /// First chunk of each tensor, and their number; the last array.
    fn chunks<'a>(mut self, tensors: impl Iterator<Item = &'a Tensor>) -> (Words, usize) {
        let mut firsts = vec![0u32];
        let mut next = 0;
        for tensor in tensors {
            next += num_chunks(tensor);
            firsts.push(u32::try_from(next).expect("a launch has less than 2^31 chunks"));
        }
        self.halves(self.most + 1, firsts.into_iter());
        (Words(self.words), next)
    }
}

/// A `Tensors` of `adamw.cu`, and the chunks in it.
fn list(op: &str, tensors: &[&Tensor]) -> Result<(Words, usize)> {
    let mut words = Arrays::new(MOST_TENSORS);
    words.longs(tensors.iter().map(|t| address(op, "t", t).map(|at| at.0)))?;
    words.longs(tensors.iter().map(|t| Ok(t.elem_count() as u64)))?;
    Ok(words.chunks(tensors.iter().copied()))
}

/// `[num tensors]` in `f64`: the sum of the squares of each.
pub(super) fn sums_of_squares(tensors: &[&Tensor]) -> Result<Tensor> {
    let op = "sums_of_squares";
    let first = tensors[0];
    let squares = empty(tensors.len(), DType::F64, first)?;
    for (start, tensors) in (0..).step_by(MOST_TENSORS).zip(tensors.chunks(MOST_TENSORS)) {
        let (list, chunks) = list(op, tensors)?;
        let partials = empty(chunks, DType::F64, first)?;
        let kernel = |name, blocks| Launch::new(name, DType::F32).grid(blocks).threads(THREADS);
        let (n, squares) = (tensors.len(), squares.narrow(0, start, tensors.len())?);
        launch!(op, kernel("squares_of_chunks", chunks).on(first); list, n, partials)?;
        launch!(op, kernel("squares_of_tensors", n).on(first); list, partials, squares)?;
    }
    Ok(squares)
}

pub(super) fn fill_zero_all(tensors: &[&Tensor]) -> Result<()> {
    for tensors in tensors.chunks(MOST_TENSORS) {
        let (op, n) = ("fill_zero_all", tensors.len());
        let (list, chunks) = list(op, tensors)?;
        let launch = Launch::new("zero_tensors", DType::F32).grid(chunks).threads(THREADS);
        launch!(op, launch.on(tensors[0]); list, n)?;
    }
    Ok(())
}

/// Updates of all parameters with a gradient scale that stays on the device.
pub(super) fn clipped_update<'a>(
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
    update(&parts, &grad_scale)
}

/// A parameter or a part of one.
pub(super) struct ParameterPart<'a> {
    pub(super) tensors: AdamWTensors<'a>,
    pub(super) scalars: Scalars,
    pub(super) seed: u32,
    /// Index of the first element in the parameter.
    pub(super) first: usize,
}

/// Updates parts; the moments may have any dtype.
pub(super) fn update(parts: &[ParameterPart<'_>], grad_scale: &Tensor) -> Result<()> {
    let dtype_of = |part: &&ParameterPart<'_>| part.tensors.exp_avg.dtype();
    for (dtype, name, most) in [
        (DType::F32, "adamw", MOST_UPDATES),
        (DType::BF16, "adamw", MOST_UPDATES),
        (DType::U8, "adamw_8bit", MOST_8BIT_UPDATES),
    ] {
        let parts: Vec<&ParameterPart<'_>> =
            parts.iter().filter(|part| dtype_of(part) == dtype).collect();
        for parts in parts.chunks(most) {
            let (list, chunks) = updates(most, parts)?;
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
fn updates(most: usize, parts: &[&ParameterPart<'_>]) -> Result<(Words, usize)> {
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
    Ok(words.chunks(parts.iter().map(|part| part.tensors.weight)))
}

/// The tensor, if it has this dtype.
fn of_dtype(tensor: &Tensor, dtype: DType) -> Option<&Tensor> {
    (tensor.dtype() == dtype).then_some(tensor)
}
