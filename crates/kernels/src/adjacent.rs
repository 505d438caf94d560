//! Tensors that follow one another in one storage, without a gap.
//!
//! An op of a GPU accepts columns of a wider matrix only if its documentation says so.

use super::cpu::{compute_dtype, expect_shape};
use super::launch::{
    Launch, ROWS, THREADS, empty, launch, on_gpu, rows_at, supports_device, vectors,
};
use candle_core::{Device, Layout, Result, Tensor};

/// Whether ops on `device` compute linear layers of one input as one product if their weights
/// follow one another.
pub fn joins_products(device: &Device) -> bool {
    supports_device(device)
}

/// Number of products that ops of GPUs have started on this thread, for tests; 0 without them.
pub fn products_of_this_thread() -> usize {
    super::cuda::gemm::products_of_this_thread()
}

/// Whether `parts` are contiguous and each begins where the one before it ends: the rows of one
/// matrix.
pub(super) fn are_rows(parts: &[&Tensor]) -> bool {
    follow(parts, |layout| layout.contiguous_offsets().map(|(start, end)| end - start))
}

/// Whether `parts` are all columns of one contiguous matrix, from left to right.
pub(super) fn are_columns(parts: &[&Tensor]) -> bool {
    let width: usize = parts.iter().map(|part| part.dims().last().copied().unwrap_or(0)).sum();
    let rows = parts.first().map_or(0, |part| part.dims().first().copied().unwrap_or(0));
    follow(parts, |layout| match (layout.dims(), layout.stride()) {
        (&[n, columns], &[row, 1]) if n == rows && row == width => Some(columns),
        _ => None,
    })
}

/// Whether `parts` share a storage, and each begins `length` elements after the one before it.
/// `length` returns `None` for a layout that is not accepted.
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
    if on_gpu(x) {
        let y = empty(x.shape(), x.dtype(), x)?;
        copy_columns("own_columns", x, &y)?;
        return Ok(y);
    }
    x.contiguous()
}

/// Copies the rows of `from [N, M]` to those of `to` on a GPU. Both may be columns of a wider matrix.
fn copy_columns(op: &str, from: &Tensor, to: &Tensor) -> Result<()> {
    let (n, d) = from.dims2()?;
    let ((x, x_stride), (y, y_stride)) = (rows_at(op, "from", from)?, rows_at(op, "to", to)?);
    let mut wide = true;
    for elements in [d, x_stride, y_stride] {
        wide &= vectors(elements, &[from, to])?;
    }
    let kernel = if wide { "copy_columns" } else { "copy_columns_single" };
    let launch = Launch::new(kernel, from.dtype()).grid(n.div_ceil(ROWS)).threads(THREADS);
    launch!(op, launch.on(from); x, y, n, d, x_stride, y_stride)
}

/// Returns `y`, which takes the place of `x` if that is columns of a wider matrix on a GPU. Both
/// are `[N, M]`.
pub fn replace_columns(x: &Tensor, y: Tensor) -> Result<Tensor> {
    let op = "replace_columns";
    expect_shape(op, "y", &y, x.dims())?;
    compute_dtype(op, &[("x", x), ("y", &y)])?;
    if !x.is_contiguous() && joins_products(x.device()) {
        super::cpu::distinct(op, "x", x, &[("y", &y)])?;
        copy_columns(op, &y, x)?;
        return Ok(x.clone());
    }
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Tolerance, assert_close, bits, gradient_buffer, kernels_are_tested, random, rope_table,
    };
    use super::super::{NormScale, qk_norm_rope, qk_norm_rope_backward};
    use super::*;
    use candle_core::DType;

    /// Columns after those of [`columns`]: rows are aligned to 16 bytes if the first ones allow it.
    const AFTER: usize = 8;

    /// A matrix, and its columns after the first `first` and before the last [`AFTER`].
    fn columns(n: usize, first: usize, width: usize, dtype: DType) -> (Tensor, Tensor) {
        let all = random(1, &[n, first + width + AFTER]).to_dtype(dtype).unwrap();
        let columns = all.narrow(1, first, width).unwrap();
        (all, columns)
    }

    /// The columns of `all` before and after those of [`columns`].
    fn neighbours(all: &Tensor, first: usize, width: usize) -> [Vec<u32>; 2] {
        [(0, first), (first + width, AFTER)]
            .map(|(start, len)| bits(&all.narrow(1, start, len).unwrap().contiguous().unwrap()))
    }

    #[test]
    fn copies_of_columns_have_their_values_and_leave_their_neighbours() {
        for dtype in [DType::F32, DType::BF16] {
            for (n, first, width) in
                [(1, 8, 16), (7, 8, 64), (7, 5, 64), (130, 8, 13), (2, 8, 1160), (2, 5, 333)]
            {
                let (all, columns) = columns(n, first, width, dtype);
                let want = bits(&columns.force_contiguous().unwrap());
                let around = neighbours(&all, first, width);
                let own = own_columns(&columns).unwrap();
                assert!(own.is_contiguous());
                assert_eq!(bits(&own), want, "{dtype:?} {n} {width}");
                let y = random(2, &[n, width]).to_dtype(dtype).unwrap();
                let replaced = replace_columns(&columns, y.clone()).unwrap();
                assert_eq!(bits(&own_columns(&replaced).unwrap()), bits(&y));
                assert_eq!(neighbours(&all, first, width), around);
                if kernels_are_tested() && n > 1 {
                    assert_eq!(bits(&own_columns(&columns).unwrap()), bits(&y), "in its place");
                }
            }
        }
    }

    #[test]
    fn norm_and_rotation_of_columns_are_those_of_a_copy() {
        if !kernels_are_tested() {
            return;
        }
        let scale = NormScale::Weight;
        for (dtype, tolerance) in [(DType::F32, Tolerance::F32), (DType::BF16, Tolerance::BF16)] {
            for (n, first, heads, dh) in
                [(1, 8, 2, 32), (7, 8, 2, 64), (7, 5, 3, 72), (130, 16, 4, 128), (3, 5, 1, 256)]
            {
                let (table, width) = (rope_table(n, dh / 2), heads * dh);
                let w = random(3, &[dh]).to_dtype(dtype).unwrap();
                let dy = random(4, &[n, heads, dh]).to_dtype(dtype).unwrap();
                let (all, columns) = columns(n, first, width, dtype);
                let around = neighbours(&all, first, width);
                let run = |x: &Tensor| {
                    let (y, rstd) = qk_norm_rope(x, &w, scale, 1e-6, &table).unwrap();
                    let dw = gradient_buffer(&[dh]);
                    let dx =
                        qk_norm_rope_backward(x, &rstd, &w, scale, &table, &dy, Some(&dw)).unwrap();
                    [y, own_columns(&dx).unwrap(), rstd, dw]
                };
                let want = run(&columns.force_contiguous().unwrap());
                let found = run(&columns);
                // Columns that vectors do not fit are read one by one, so sums have another order.
                let tolerances = [tolerance, tolerance, Tolerance::F32, Tolerance::F32];
                for ((found, want), tolerance) in found.iter().zip(&want).zip(tolerances) {
                    let what = format!("{dtype:?} {n} {first} {heads} {dh}");
                    assert_close(&what, found, want, tolerance);
                }
                if n > 1 {
                    let place = own_columns(&columns).unwrap();
                    assert_eq!(
                        bits(&place),
                        bits(&found[1]),
                        "the gradient is in the place of `x`"
                    );
                }
                assert_eq!(neighbours(&all, first, width), around);
            }
        }
    }
}
