//! Tensors that follow one another in one storage, without a gap.
//!
//! An op of a GPU accepts columns of a wider matrix only if its documentation says so.

use super::cpu::{compute_dtype, expect_shape};
use candle_core::{Device, Layout, Result, Tensor};

/// Whether ops on `device` compute linear layers of one input as one product if their weights
/// follow one another.
pub fn joins_products(device: &Device) -> bool {
    #[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
    return super::cuda::supports_device(device);
    #[cfg(not(any(feature = "cuda", feature = "cuda-emulation")))]
    {
        let _ = device;
        false
    }
}

/// Number of products that ops of GPUs have started on this thread; 0 without them.
#[cfg(test)]
pub(crate) fn products_of_this_thread() -> usize {
    #[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
    return super::cuda::products_of_this_thread();
    #[cfg(not(any(feature = "cuda", feature = "cuda-emulation")))]
    0
}

/// Whether `parts` are contiguous and each begins where the one before it ends: the rows of one
/// matrix.
#[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
pub(super) fn are_rows(parts: &[&Tensor]) -> bool {
    follow(parts, |layout| layout.contiguous_offsets().map(|(start, end)| end - start))
}

/// Whether `parts` are all columns of one contiguous matrix, from left to right.
pub(super) fn are_columns(parts: &[&Tensor]) -> bool {
    let width: usize = parts.iter().map(|part| part.dims().last().copied().unwrap_or(0)).sum();
    let rows = parts.first().map_or(0, |part| part.dims()[0]);
    follow(parts, |layout| match (layout.dims(), layout.stride()) {
        (&[n, columns], &[row, 1]) if n == rows && row == width => Some(columns),
        _ => None,
    })
}

/// Whether `parts` share a storage, and each begins `length` of the one before it later. `None`: no
/// part may have this layout.
fn follow(parts: &[&Tensor], length: impl Fn(&Layout) -> Option<usize>) -> bool {
    let mut expected = None;
    parts.iter().all(|part| {
        let (storage, layout) = part.storage_and_layout();
        let (at, start) = (&raw const *storage, layout.start_offset());
        let is_next = expected.is_none_or(|next| next == (at, start));
        let length = length(layout);
        expected = length.map(|length| (at, start + length));
        is_next && length.is_some()
    })
}

/// Returns `x [N, M]`, or a copy of it if it is columns of a wider matrix.
pub fn own_columns(x: &Tensor) -> Result<Tensor> {
    if x.is_contiguous() {
        return Ok(x.clone());
    }
    compute_dtype("own_columns", &[("x", x)])?;
    return_if_on_gpu!(x => own_columns(x));
    x.contiguous()
}

/// Returns `y`, which takes the place of `x` if that is columns of a wider matrix on a GPU. Both
/// are `[N, M]`.
pub fn replace_columns(x: &Tensor, y: Tensor) -> Result<Tensor> {
    let op = "replace_columns";
    expect_shape(op, "y", &y, x.dims())?;
    compute_dtype(op, &[("x", x), ("y", &y)])?;
    #[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
    if !x.is_contiguous() && joins_products(x.device()) {
        super::cpu::distinct(op, "x", x, &[("y", &y)])?;
        super::cuda::copy_columns(&y, x)?;
        return Ok(x.clone());
    }
    Ok(y)
}
