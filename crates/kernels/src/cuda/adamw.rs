//! Launches of `adamw.cu` and `adamw_8bit.cu`: lists of tensors travel as arguments of the kernels.

use super::launch::{Launch, address, empty};
use crate::adamw::{AdamWTensors, AdamWUpdate, SQUARES_BLOCK, Scalars};
use crate::eight_bit::{SIGNED, UNSIGNED};
use crate::moments::tensor_seed;
use candle_core::{DType, Result, Tensor};

/// Elements of a block, as in `adamw.cu`.
const CHUNK: usize = 1 << 16;
const THREADS: u32 = 256;
/// Tensors of one launch, as in `adamw.cu`.
const MOST_TENSORS: usize = 160;
const MOST_UPDATES: usize = 56;
/// As in `adamw_8bit.cu`.
const MOST_8BIT_UPDATES: usize = 20;

fn num_chunks(t: &Tensor) -> usize {
    t.elem_count().div_ceil(CHUNK)
}

/// The memory of a struct of arrays, each `most` long; the arrays are in the order of the calls.
struct Words {
    most: usize,
    words: Vec<u64>,
}

impl Words {
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
    fn chunks<'a>(mut self, tensors: impl Iterator<Item = &'a Tensor>) -> (Vec<u64>, usize) {
        let mut firsts = vec![0u32];
        let mut next = 0;
        for tensor in tensors {
            next += num_chunks(tensor);
            firsts.push(u32::try_from(next).expect("a launch has less than 2^31 chunks"));
        }
        self.halves(self.most + 1, firsts.into_iter());
        (self.words, next)
    }
}

/// A `Tensors` of `adamw.cu`, and the chunks in it.
fn list(op: &str, tensors: &[&Tensor]) -> Result<(Vec<u64>, usize)> {
    let mut words = Words::new(MOST_TENSORS);
    words.longs(tensors.iter().map(|t| address(op, "t", t).map(|at| at.0)))?;
    words.longs(tensors.iter().map(|t| Ok(t.elem_count() as u64)))?;
    Ok(words.chunks(tensors.iter().copied()))
}

/// `[num tensors]` in `f64`: the sum of the squares of each.
pub(crate) fn sums_of_squares(tensors: &[&Tensor]) -> Result<Tensor> {
    let op = "sums_of_squares";
    let on = tensors[0];
    let squares = empty(tensors.len(), DType::F64, on)?;
    for (start, tensors) in (0..).step_by(MOST_TENSORS).zip(tensors.chunks(MOST_TENSORS)) {
        let (list, chunks) = list(op, tensors)?;
        let partials = empty(chunks, DType::F64, on)?;
        Launch::new("squares_of_chunks", DType::F32)
            .grid(chunks)
            .threads(THREADS)
            .words(list.clone())
            .int(tensors.len())
            .address(address(op, "partials", &partials)?)
            .run(on)?;
        Launch::new("squares_of_tensors", DType::F32)
            .grid(tensors.len())
            .threads(THREADS)
            .words(list)
            .address(address(op, "partials", &partials)?)
            .address(address(op, "squares", &squares.narrow(0, start, tensors.len())?)?)
            .run(on)?;
    }
    Ok(squares)
}

/// `[ceil(elements / SQUARES_BLOCK)]` in `f64`: the sum of the squares of each block.
pub(crate) fn squares_of_blocks(t: &Tensor) -> Result<Tensor> {
    let op = "squares_of_blocks";
    let blocks = t.elem_count().div_ceil(SQUARES_BLOCK);
    let squares = empty(blocks, DType::F64, t)?;
    Launch::new(op, DType::F32)
        .grid(blocks)
        .threads(THREADS)
        .address(address(op, "t", t)?)
        .long(t.elem_count())
        .address(address(op, "squares", &squares)?)
        .run(t)?;
    Ok(squares)
}

/// Waits for the device.
pub(crate) fn sum_of_squares(t: &Tensor) -> Result<f64> {
    Ok(sums_of_squares(&[t])?.to_vec1::<f64>()?[0])
}

pub(crate) fn fill_zero_all(tensors: &[&Tensor]) -> Result<()> {
    for tensors in tensors.chunks(MOST_TENSORS) {
        let (list, chunks) = list("fill_zero_all", tensors)?;
        Launch::new("zero_tensors", DType::F32)
            .grid(chunks)
            .threads(THREADS)
            .words(list)
            .int(tensors.len())
            .run(tensors[0])?;
    }
    Ok(())
}

/// Update of one parameter with a gradient scale that is computed on the host.
pub(crate) fn adamw_step(
    tensors: &AdamWTensors<'_>,
    scalars: &Scalars,
    seed: u32,
    grad_scale: f32,
) -> Result<()> {
    let grad_scale = Tensor::new(&[grad_scale], tensors.weight.device())?;
    let part = ParameterPart {
        tensors: *tensors,
        scalars: *scalars,
        seed: tensor_seed(seed, 0),
        first: 0,
    };
    update(&[part], &grad_scale)
}

/// Updates of all parameters with a gradient scale that stays on the device.
pub(crate) fn clipped_update<'a>(
    updates: &[AdamWUpdate<'a>],
    scalars: &[Scalars],
    seed: u32,
    squares: &Tensor,
    max_grad_norm: f64,
) -> Result<()> {
    let op = "clipped_update";
    let grad_scale = empty(1, DType::F32, squares)?;
    Launch::new("clip", DType::F32)
        .threads(THREADS)
        .address(address(op, "squares", squares)?)
        .int(squares.elem_count())
        .words(vec![max_grad_norm.to_bits()])
        .address(address(op, "grad_scale", &grad_scale)?)
        .run(squares)?;
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
struct ParameterPart<'a> {
    tensors: AdamWTensors<'a>,
    scalars: Scalars,
    seed: u32,
    /// Index of the first element in the parameter.
    first: usize,
}

/// Updates parts; the moments may have any dtype.
fn update(parts: &[ParameterPart<'_>], grad_scale: &Tensor) -> Result<()> {
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
            let scalars = parts[0].scalars;
            Launch::new(name, dtype)
                .grid(chunks)
                .threads(THREADS)
                .words(list)
                .int(parts.len())
                .address(address(name, "grad_scale", grad_scale)?)
                .float(scalars.lerp)
                .float(scalars.beta2)
                .float(scalars.one_minus_beta2)
                .float(1.0 / scalars.sqrt_correction2)
                .float(scalars.eps)
                .run(grad_scale)?;
        }
    }
    Ok(())
}

/// The `Updates` of `adamw.cu`, or those of `adamw_8bit.cu` if the moments are codes, for at most
/// `most` parts; and the chunks in it.
fn updates(most: usize, parts: &[&ParameterPart<'_>]) -> Result<(Vec<u64>, usize)> {
    let op = "adamw_step";
    let each = |name, tensor: for<'a> fn(&AdamWTensors<'a>) -> Option<&'a Tensor>| {
        parts.iter().map(move |part| match tensor(&part.tensors) {
            Some(tensor) => address(op, name, tensor).map(|at| at.0),
            None => Ok(0),
        })
    };
    let mut words = Words::new(most);
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
