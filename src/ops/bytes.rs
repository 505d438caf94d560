//! The bytes of tensors in host memory, for the exchange between ranks.

use super::cpu;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use std::cell::RefCell;
use std::ops::Range;

/// Calls `f` with the elements of `x`, an `f32` tensor in host memory, to change them in place.
pub(crate) fn change_f32<R>(x: &Tensor, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    cpu::write("change_f32", "x", x, f)
}

/// Calls `f` with the bytes of `x`, a contiguous `f32`, `bf16` or `u8` tensor in host memory.
pub(crate) fn with_bytes<R>(x: &Tensor, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let range = contiguous(layout)?;
    let bytes = match &*storage {
        Storage::Cpu(CpuStorage::F32(all)) => bytemuck::cast_slice(&all[range]),
        Storage::Cpu(CpuStorage::BF16(all)) => bytemuck::cast_slice(&all[range]),
        Storage::Cpu(CpuStorage::U8(all)) => &all[range],
        _ => bail!("with_bytes: `x` is {:?} on {:?}", x.dtype(), x.device()),
    };
    Ok(f(bytes))
}

/// Calls `f` with the bytes of `x`, as [`with_bytes`], to change them in place. The caller must not
/// hold a lock on them.
pub(crate) fn change_bytes<R>(x: &Tensor, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    struct Change<F, R>(RefCell<(Option<F>, Option<R>)>);

    impl<F: FnOnce(&mut [u8]) -> R, R> InplaceOp1 for Change<F, R> {
        fn name(&self) -> &'static str {
            "change_bytes"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let range = contiguous(layout)?;
            let bytes = match storage {
                CpuStorage::F32(all) => bytemuck::cast_slice_mut(&mut all[range]),
                CpuStorage::BF16(all) => bytemuck::cast_slice_mut(&mut all[range]),
                CpuStorage::U8(all) => &mut all[range],
                _ => bail!("change_bytes: `x` is not f32, bf16 or u8"),
            };
            let mut call = self.0.borrow_mut();
            if let Some(f) = call.0.take() {
                call.1 = Some(f(bytes));
            }
            Ok(())
        }
    }

    let change = Change(RefCell::new((Some(f), None)));
    x.inplace_op1(&change)?;
    match change.0.into_inner().1 {
        Some(result) => Ok(result),
        None => bail!("change_bytes: `x` was not changed"),
    }
}

fn contiguous(layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("the bytes of {:?} are not contiguous", layout.shape()),
    }
}
