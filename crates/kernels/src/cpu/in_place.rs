//! Elementwise backward functions that write gradients into the memory of their operands. This
//! avoids new allocations and reduces memory traffic and the peak memory of a stage.

#![expect(unsafe_code, reason = "tasks change disjoint parts of several tensors")]

use super::blocks::{ON_STACK, to_bf16_block, to_f32_block};
use super::{self as cpu, BLOCK, Element, Shared};
use candle_core::{DType, Result, Tensor};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Whether an elementwise backward also recomputes the output of the op. That output is the input
/// of the next linear layer, whose weight gradient needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputeInput {
    /// Recompute the output, in the memory of its gradient.
    Yes,
    /// Compute gradients only.
    No,
}

impl RecomputeInput {
    /// The CUDA kernel of the backward function `op`.
    pub(crate) fn kernel(self, op: &str) -> String {
        match self {
            Self::Yes => format!("{op}_recompute"),
            Self::No => op.to_owned(),
        }
    }
}

/// Calls `f(span, parts)` on all threads to change `tensors` in place: `parts` holds the elements
/// `span` of each. The tensors must have the same shape and dtype, and must not share memory.
pub(crate) fn change<const N: usize>(
    op: &'static str,
    tensors: [(&'static str, &Tensor); N],
    f: impl Fn(Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    for (index, (name, tensor)) in tensors.iter().enumerate() {
        cpu::distinct(op, name, tensor, &tensors[..index])?;
    }
    match tensors[0].1.dtype() {
        DType::BF16 => lock::<bf16>(op, &tensors, Vec::new(), &mut |all| blocks_bf16(all, &f)),
        _ => lock::<f32>(op, &tensors, Vec::new(), &mut |all| blocks_f32(all, &f)),
    }
}

/// Calls `f` with the elements of `held` and of `rest`, all locked for writing.
fn lock<T: Element>(
    op: &'static str,
    rest: &[(&'static str, &Tensor)],
    held: Vec<&mut [T]>,
    f: &mut dyn FnMut(Vec<&mut [T]>),
) -> Result<()> {
    let Some(((name, tensor), rest)) = rest.split_first() else {
        f(held);
        return Ok(());
    };
    cpu::write(op, name, tensor, |all| {
        let mut held: Vec<&mut [T]> = held; // shortens the lifetime to that of `all`
        held.push(all);
        lock(op, rest, held, f)
    })?
}

/// Calls `f` in parallel for blocks of `N` slices of the same length.
fn blocks<T: Send, const N: usize>(
    mut all: Vec<&mut [T]>,
    f: impl Fn(Range<usize>, [&mut [T]; N]) + Sync,
) {
    let len = all[0].len();
    let shared: [Shared<T>; N] = std::array::from_fn(|index| Shared::of(all[index]));
    (0..len.div_ceil(BLOCK)).into_par_iter().for_each(|index| {
        let span = index * BLOCK..((index + 1) * BLOCK).min(len);
        // SAFETY: the blocks tile the slices, which are disjoint, of the same length and borrowed
        // by `all`.
        f(span.clone(), shared.map(|shared| unsafe { shared.slice(span.clone()) }));
    });
}

fn blocks_f32<const N: usize>(
    all: Vec<&mut [f32]>,
    f: &(impl Fn(Range<usize>, [&mut [f32]; N]) + Sync),
) {
    blocks(all, f);
}

fn blocks_bf16<const N: usize>(
    all: Vec<&mut [bf16]>,
    f: &(impl Fn(Range<usize>, [&mut [f32]; N]) + Sync),
) {
    blocks(all, |span, mut parts: [&mut [bf16]; N]| {
        let mut wide = [[0f32; ON_STACK]; N];
        for start in (0..span.len()).step_by(ON_STACK) {
            let end = (start + ON_STACK).min(span.len());
            for (wide, part) in wide.iter_mut().zip(&parts) {
                to_f32_block(&part[start..end], &mut wide[..end - start]);
            }
            let views = wide.each_mut().map(|wide| &mut wide[..end - start]);
            f(span.start + start..span.start + end, views);
            for (wide, part) in wide.iter().zip(&mut parts) {
                to_bf16_block(&wide[..end - start], &mut part[start..end]);
            }
        }
    });
}
