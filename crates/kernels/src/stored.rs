//! Weights and moments in the form in which they are stored. An update loads a block of them to
//! `f32`, and stores the results.

use super::cpu::blocks::{to_bf16_block, to_f32_block};
use super::cpu::{BLOCK, write};
use super::eight_bit::{DynamicMap, EIGHT_BIT_BLOCK, SIGNED, UNSIGNED};
use super::stochastic_rounding::{Draw, round_block};
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;
use std::ops::Range;

/// A tensor of a parameter's state that an update overwrites.
#[derive(Clone, Copy)]
pub(super) struct State<'a> {
    pub(super) name: &'static str,
    pub(super) tensor: &'a Tensor,
    /// The scales of a tensor of 8-bit codes.
    pub(super) absmax: Option<&'a Tensor>,
    /// The random numbers that round it, if it is `bf16`; `None`: to nearest.
    pub(super) draw: Option<Draw>,
}

/// Elements in the memory of a tensor.
pub(super) enum StoredElements<'a> {
    F32(&'a mut [f32]),
    /// Rounded at random, or to nearest.
    Bf16(&'a mut [bf16], Option<Draw>),
    /// Codes, scales, and the map of the codes.
    Codes(&'a mut [u8], &'a mut [f32], &'static DynamicMap),
}

/// Identifies the random numbers of a parameter's elements in a step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seed {
    pub(super) seed: u32,
    /// Index of the first element in the parameter.
    pub(super) first: u32,
}

impl State<'_> {
    /// Calls `f` with all elements, locked for writing.
    pub(super) fn write<R>(
        self,
        op: &'static str,
        f: impl FnOnce(StoredElements<'_>) -> Result<R>,
    ) -> Result<R> {
        let Self { name, tensor, absmax, draw } = self;
        match (tensor.dtype(), absmax) {
            (DType::BF16, _) => {
                write(op, name, tensor, |x: &mut [bf16]| f(StoredElements::Bf16(x, draw)))?
            }
            (DType::U8, Some(absmax)) => write(op, name, tensor, |codes: &mut [u8]| {
                let map = if draw == Some(Draw::Second) { &UNSIGNED } else { &SIGNED };
                write(op, "absmax", absmax, |absmax| f(StoredElements::Codes(codes, absmax, map)))?
            })?,
            (DType::U8, None) => bail!("{op}: `{name}` is U8, but has no scales"),
            _ => write(op, name, tensor, |x: &mut [f32]| f(StoredElements::F32(x)))?,
        }
    }
}

impl StoredElements<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x, _) => x.len(),
            Self::Codes(codes, ..) => codes.len(),
        }
    }

    /// Parts of [`BLOCK`] elements.
    pub(super) fn blocks(self) -> Vec<Self> {
        match self {
            Self::F32(x) => x.chunks_mut(BLOCK).map(StoredElements::F32).collect(),
            Self::Bf16(x, draw) => {
                x.chunks_mut(BLOCK).map(|x| StoredElements::Bf16(x, draw)).collect()
            }
            Self::Codes(codes, absmax, map) => codes
                .chunks_mut(BLOCK)
                .zip(absmax.chunks_mut(BLOCK / EIGHT_BIT_BLOCK))
                .map(|(codes, absmax)| StoredElements::Codes(codes, absmax, map))
                .collect(),
        }
    }

    /// Reads elements. Those of codes begin at the start of a block of scales.
    pub(super) fn load(&self, range: Range<usize>, to: &mut [f32]) {
        match self {
            Self::F32(x) => to.copy_from_slice(&x[range]),
            Self::Bf16(x, _) => to_f32_block(&x[range], to),
            Self::Codes(codes, absmax, map) => {
                let scales = &absmax[range.start / EIGHT_BIT_BLOCK..];
                map.decode(&codes[range], scales, to);
            }
        }
    }

    /// Overwrites elements. `seed` is that of the first element.
    pub(super) fn store(&mut self, range: Range<usize>, from: &[f32], seed: Seed) {
        match self {
            Self::F32(x) => x[range].copy_from_slice(from),
            Self::Bf16(x, Some(draw)) => round_block(seed, *draw, from, &mut x[range]),
            Self::Bf16(x, None) => to_bf16_block(from, &mut x[range]),
            Self::Codes(codes, absmax, map) => {
                let scales = &mut absmax[range.start / EIGHT_BIT_BLOCK..];
                map.encode(from, &mut codes[range], scales);
            }
        }
    }
}
