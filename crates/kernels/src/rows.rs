//! Reading and writing selected rows of a matrix, and adding whole tensors in place.
//!
//! Shapes: `x: [T, D]`, `rows: [M]` (`u32`), `src: [M, D]` in the dtype of `x`. Rows that are
//! written must be distinct.

use super::cpu::{self, BLOCK, Element, ROWS, Shared, compute_dtype, expect_shape, read};
use super::launch::{Launch, can_be_checked, empty, launch, launch_elementwise, on_gpu};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

/// Whether the same row may occur more than once in `rows`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowIndices {
    Any,
    Distinct,
}

/// Fails if a row is out of range, or occurs twice although `which` is `Distinct`. Does nothing on
/// a GPU, where reading `rows` would wait for the device: those were built on the host in ascending
/// order.
fn check_rows(op: &'static str, rows: &Tensor, num_rows: usize, which: RowIndices) -> Result<()> {
    if !can_be_checked(rows) {
        return Ok(());
    }
    let rows = read(op, "rows", rows)?;
    let rows = rows.slice::<u32>()?;
    if let Some((at, row)) = rows.iter().enumerate().find(|(_, row)| **row as usize >= num_rows) {
        bail!("{op}: row `{row}` at position {at} is out of range for {num_rows} rows");
    }
    if which == RowIndices::Distinct && !rows.windows(2).all(|pair| pair[0] < pair[1]) {
        let mut sorted = rows.to_vec();
        sorted.sort_unstable();
        if let Some([row, ..]) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("{op}: row `{row}` occurs twice, expected distinct rows");
        }
    }
    Ok(())
}

/// Fails unless `ids` is `u32`.
pub(super) fn expect_u32(op: &str, name: &str, ids: &Tensor) -> Result<()> {
    match ids.dtype() {
        DType::U32 => Ok(()),
        dtype => bail!("{op}: `{name}` is {dtype:?}, expected U32"),
    }
}

/// Calls `f(i, x[rows[i]])` for each `i`, in parallel. The caller has checked that `rows` are
/// distinct rows of `x [_, d]`.
#[expect(unsafe_code, reason = "tasks write disjoint rows, which the type system cannot see")]
fn for_each_row<T: Send>(rows: &[u32], d: usize, x: &mut [T], f: impl Fn(usize, &mut [T]) + Sync) {
    let num_rows = x.len() / d.max(1);
    let x = Shared::of(x);
    rows.par_iter().enumerate().with_min_len(ROWS).for_each(|(i, row)| {
        let row = *row as usize;
        assert!(row < num_rows || d == 0, "rows were checked");
        // SAFETY: the row is inside `x`, and rows are distinct.
        f(i, unsafe { x.slice(row * d..(row + 1) * d) });
    });
}

/// Runs `$f::<T>($args)` with the element type of `$x`.
macro_rules! by_dtype {
    ($x:expr, $f:ident($($arg:expr),*)) => {
        match $x.dtype() {
            DType::BF16 => $f::<bf16>($($arg),*),
            _ => $f::<f32>($($arg),*),
        }
    };
}

/// Returns `x[rows]`, `[M, D]`. `rows` may contain duplicates. Fails on the CPU if a row is not
/// below `T`.
pub fn gather_rows(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    compute_dtype("gather_rows", &[("x", x)])?;
    by_dtype!(x, gather(x, rows))
}

fn gather<T: Element>(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let op = "gather_rows";
    let ((t, d), m) = (x.dims2()?, rows.dims1()?);
    check_rows(op, rows, t, RowIndices::Any)?;
    if on_gpu(x) {
        expect_u32(op, "rows", rows)?;
        let y = empty((m, d), x.dtype(), x)?;
        launch!(op, Launch::for_rows(op, (m, d), &[x, &y])?; x, rows, y, t, m, d)?;
        return Ok(y);
    }
    let (x, rows) = (read(op, "x", x)?, read(op, "rows", rows)?);
    let (x, rows) = (x.slice::<T>()?, rows.slice::<u32>()?);
    let mut y = vec![T::zero(); m * d];
    y.par_chunks_mut(ROWS * d.max(1)).zip(rows.par_chunks(ROWS)).for_each(|(y, rows)| {
        for (y, row) in y.chunks_mut(d).zip(rows) {
            let start = *row as usize * d;
            y.copy_from_slice(&x[start..start + d]);
        }
    });
    Tensor::from_vec(y, (m, d), &Device::Cpu)
}

/// Returns a tensor `[num_rows, D]` with `src [M, D]` at `rows` and zeros elsewhere.
pub fn scatter_rows(src: &Tensor, rows: &Tensor, num_rows: usize) -> Result<Tensor> {
    let (_, d) = src.dims2()?;
    compute_dtype("scatter_rows", &[("src", src)])?;
    let y = Tensor::zeros((num_rows, d), src.dtype(), src.device())?;
    index_copy(&y, rows, src)?;
    Ok(y)
}

/// Assigns `x[rows] = src` in place.
pub fn index_copy(x: &Tensor, rows: &Tensor, src: &Tensor) -> Result<()> {
    by_dtype!(x, update("index_copy", x, rows, src, |x, src| *x = src))
}

/// Adds `src` to `x[rows]` in place.
pub fn index_add(x: &Tensor, rows: &Tensor, src: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::BF16 => update::<bf16>("index_add", x, rows, src, add_element),
        _ => update::<f32>("index_add", x, rows, src, add_element),
    }
}

fn add_element<T: Element>(x: &mut T, y: T) {
    *x = T::narrow(x.widen() + y.widen());
}

fn update<T: Element>(
    op: &'static str,
    x: &Tensor,
    rows: &Tensor,
    src: &Tensor,
    f: impl Fn(&mut T, T) + Sync,
) -> Result<()> {
    let ((t, d), m) = (x.dims2()?, rows.dims1()?);
    compute_dtype(op, &[("x", x), ("src", src)])?;
    expect_shape(op, "src", src, &[m, d])?;
    cpu::distinct(op, "x", x, &[("rows", rows), ("src", src)])?;
    check_rows(op, rows, t, RowIndices::Distinct)?;
    if on_gpu(x) {
        expect_u32(op, "rows", rows)?;
        return launch!(op, Launch::for_rows(op, (m, d), &[x, src])?; x, rows, src, t, m, d);
    }
    let (rows, src) = (read(op, "rows", rows)?, read(op, "src", src)?);
    let (rows, src) = (rows.slice::<u32>()?, src.slice::<T>()?);
    cpu::write(op, "x", x, |x| {
        for_each_row(rows, d, x, |i, row| {
            for (x, src) in row.iter_mut().zip(&src[i * d..(i + 1) * d]) {
                f(x, *src);
            }
        });
    })
}

/// Sets `x[rows]` to zero in place.
pub fn zero_rows(x: &Tensor, rows: &Tensor) -> Result<()> {
    compute_dtype("zero_rows", &[("x", x)])?;
    by_dtype!(x, zero(x, rows))
}

fn zero<T: Element>(x: &Tensor, rows: &Tensor) -> Result<()> {
    let op = "zero_rows";
    let (t, d) = x.dims2()?;
    let m = rows.dims1()?;
    cpu::distinct(op, "x", x, &[("rows", rows)])?;
    check_rows(op, rows, t, RowIndices::Distinct)?;
    if on_gpu(x) {
        expect_u32(op, "rows", rows)?;
        return launch!(op, Launch::for_rows(op, (m, d), &[x])?; x, rows, t, m, d);
    }
    let rows = read(op, "rows", rows)?;
    let rows = rows.slice::<u32>()?;
    cpu::write(op, "x", x, |x| for_each_row(rows, d, x, |_, row| row.fill(T::zero())))
}

/// Adds `y` to `x` in place. Both have the same shape and dtype.
pub fn add_in_place(x: &Tensor, y: &Tensor) -> Result<()> {
    compute_dtype("add_in_place", &[("x", x), ("y", y)])?;
    by_dtype!(x, add_all(x, y))
}

fn add_all<T: Element>(x: &Tensor, y: &Tensor) -> Result<()> {
    let op = "add_in_place";
    expect_shape(op, "y", y, x.dims())?;
    cpu::distinct(op, "x", x, &[("y", y)])?;
    if on_gpu(x) {
        return launch_elementwise!(op; x, y);
    }
    let y = read(op, "y", y)?;
    let y = y.slice::<T>()?;
    cpu::write(op, "x", x, |x| {
        x.par_chunks_mut(BLOCK).zip(y.par_chunks(BLOCK)).for_each(|(x, y): (&mut [T], &[T])| {
            for (x, y) in x.iter_mut().zip(y) {
                add_element(x, *y);
            }
        });
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        device, ids, ids_are_checked, message, random, values, with_threads,
    };
    use super::*;

    /// A matrix whose first column is the row number, which identifies the row.
    fn numbered(t: usize, d: usize, dtype: DType) -> Tensor {
        let x: Vec<f32> = (0..t * d).map(|i| (i / d) as f32).collect();
        Tensor::from_vec(x, (t, d), &device()).unwrap().to_dtype(dtype).unwrap()
    }

    fn first_column(x: &Tensor) -> Vec<f64> {
        values(&x.narrow(1, 0, 1).unwrap())
    }

    #[test]
    fn rows_are_gathered_scattered_copied_added_and_zeroed() {
        for dtype in [DType::F32, DType::BF16] {
            let (x, rows) = (numbered(5, 3, dtype), ids(&[3, 0]));
            let two = gather_rows(&x, &rows).unwrap();
            assert_eq!(first_column(&two), [3.0, 0.0]);
            assert_eq!(
                first_column(&scatter_rows(&two, &ids(&[1, 2]), 4).unwrap()),
                [0., 3., 0., 0.]
            );
            index_copy(&x, &ids(&[4, 1]), &two).unwrap();
            assert_eq!(first_column(&x), [0., 0., 2., 3., 3.]);
            index_add(&x, &ids(&[2, 3]), &two).unwrap();
            assert_eq!(first_column(&x), [0., 0., 5., 3., 3.]);
            zero_rows(&x, &ids(&[4, 2])).unwrap();
            assert_eq!(first_column(&x), [0., 0., 0., 3., 0.]);
            add_in_place(&x, &numbered(5, 3, dtype)).unwrap();
            assert_eq!(first_column(&x), [0., 1., 2., 6., 4.]);
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let x = random(1, &[500, 7]);
        let chosen: Vec<u32> = (0..300).map(|i| i * 7 % 500).collect();
        let moved = |num_threads| {
            with_threads(num_threads, || {
                let y = Tensor::zeros((500, 7), DType::F32, &device()).unwrap();
                index_copy(&y, &ids(&chosen), &gather_rows(&x, &ids(&chosen)).unwrap()).unwrap();
                add_in_place(&y, &x).unwrap();
                y.to_vec2::<f32>().unwrap()
            })
        };
        let (one, two) = (moved(1), moved(2));
        assert_eq!(one, two);
        let x = x.to_vec2::<f32>().unwrap();
        for (row, (x, y)) in x.iter().zip(&one).enumerate() {
            let times = if chosen.contains(&(row as u32)) { 2.0 } else { 1.0 };
            assert_eq!(y[3], times * x[3]);
        }
    }

    #[test]
    fn writing_a_narrowed_tensor_leaves_the_rest_of_its_storage_unchanged() {
        let whole = numbered(6, 2, DType::F32);
        let part = whole.narrow(0, 2, 3).unwrap();
        zero_rows(&part, &ids(&[1])).unwrap();
        assert_eq!(first_column(&whole), [0., 1., 2., 0., 4., 5.]);
    }

    #[test]
    fn rows_that_are_out_of_range_or_duplicated_are_rejected() {
        let x = numbered(3, 2, DType::F32);
        let src = numbered(2, 2, DType::F32);
        let error = message(add_in_place(&x, &x));
        assert!(error.contains("shares memory with `y`"), "{error}");
        if !ids_are_checked() {
            return;
        }
        let error = message(gather_rows(&x, &ids(&[0, 3])));
        assert!(error.contains("row `3` at position 1"), "{error}");
        let error = message(index_copy(&x, &ids(&[1, 1]), &src));
        assert!(error.contains("row `1` occurs twice"), "{error}");
    }
}
