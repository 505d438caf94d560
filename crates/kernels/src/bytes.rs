//! The bytes of tensors in host memory, for the exchange between ranks.

use super::cpu;
use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{DType, Result, Tensor};
use half::bf16;

/// Calls `f` with the elements of `x`, an `f32` tensor in host memory, to change them in place.
pub fn change_f32<R>(x: &Tensor, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    cpu::write("change_f32", "x", x, f)
}

/// Calls `f` with the bytes of `x`, a contiguous `f32`, `bf16` or `u8` tensor in host memory.
pub fn with_bytes<R>(x: &Tensor, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let data = cpu::read("with_bytes", "x", x)?;
    Ok(match x.dtype() {
        DType::U8 => f(data.slice::<u8>()?),
        DType::BF16 => f(cast_slice(data.slice::<bf16>()?)),
        _ => f(cast_slice(data.slice::<f32>()?)),
    })
}

/// Calls `f` with the bytes of `x`, as [`with_bytes`], to change them in place. The caller must not
/// hold a lock on them.
pub fn change_bytes<R>(x: &Tensor, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    let op = "change_bytes";
    match x.dtype() {
        DType::U8 => cpu::write(op, "x", x, f),
        DType::BF16 => cpu::write(op, "x", x, |x: &mut [bf16]| f(cast_slice_mut(x))),
        _ => cpu::write(op, "x", x, |x: &mut [f32]| f(cast_slice_mut(x))),
    }
}
