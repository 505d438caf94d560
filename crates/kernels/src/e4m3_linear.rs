//! Linear layer with operands in FP8 (e4m3), and its gradients.
//!
//! Shapes: `x [N, K]`, `w [M, K]`, `b [M]`, `y [N, M]`; `N` may be several dims. Each operand has a
//! scale for each row, or for each column, along the dim that the product sums over. The product
//! adds in `f32`; bias and residual are not rounded to e4m3. A GPU multiplies codes of e4m3, and the
//! CPU the rounded values: the results differ by the order of additions.
//!
//! The gradients are those of a layer without rounding, computed from rounded operands: rounding
//! counts as the identity in backward.

use super::cpu::{self, compute_dtype, expect_shape};
use super::cuda::gemm::{Gemm, Transpose};
use super::e4m3::{e4m3_columns, e4m3_rows};
use super::launch::{Launch, THREADS, empty, launch, on_gpu, vectors};
use super::linear::{
    backward_shape, forward_shape, linear, linear_add, linear_backward_input,
    linear_backward_input_add, linear_backward_weight, rows_of, weight_shape, with_last,
};
use candle_core::{DType, Device, Result, Tensor};

/// Format of the operands of the linear layers of the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Matmul {
    /// The dtype of the computation.
    #[default]
    Native,
    /// e4m3 in forward and for input gradients.
    Fp8,
    /// e4m3 in forward, for input gradients and for weight gradients.
    Fp8All,
    /// As `Fp8`, with [`E4m3Sums::Fast`] in forward.
    Fp8Fast,
}

/// How the tensor cores of a GPU add products of e4m3. The CPU adds in `f32` in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum E4m3Sums {
    /// Sums of a few products are added in `f32`.
    F32,
    /// All products of a sum are added in the registers of the tensor cores, which keep about 14 bits.
    Fast,
}

impl Matmul {
    /// How forward adds products of e4m3.
    pub fn forward_sums(self) -> E4m3Sums {
        if self == Self::Fp8Fast { E4m3Sums::Fast } else { E4m3Sums::F32 }
    }
}

/// The compute capability of a GPU that cannot multiply in FP8. `None`: `device` can.
#[cfg(feature = "cuda")]
pub fn gpu_without_e4m3(device: &Device) -> Result<Option<(u32, u32)>> {
    if device.is_cuda() { super::cuda::gpu_without_e4m3(device) } else { Ok(None) }
}

/// Returns `None`, because the CPU multiplies in every format.
#[cfg(not(feature = "cuda"))]
pub fn gpu_without_e4m3(_: &Device) -> Result<Option<(u32, u32)>> {
    Ok(None)
}

/// Returns `x w^T + bias + residual`, `[N, M]`, of `x` and `w` with a scale for each row.
pub fn e4m3_linear(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    sums: E4m3Sums,
) -> Result<Tensor> {
    let op = "e4m3_linear";
    w.dims2()?;
    let ((n, m, k), shape) = forward_shape(op, x, w, bias, residual)?;
    if on_gpu(x) {
        let y = empty(shape, x.dtype(), x)?;
        let w = round_rows(op, ("w", w), (m, k), m.next_multiple_of(ALIGNED))?;
        let x = round_rows(op, ("x", x), (n, k), n)?;
        multiply(op, ([&x, &w], sums), (n, m), (bias, residual), &y, SUMS_BYTES)?;
        return Ok(y);
    }
    let (x, w) = (e4m3_rows(x)?, e4m3_rows(w)?);
    match residual {
        Some(residual) => linear_add(&x, &w, bias, residual),
        None => linear(&x, &w, bias),
    }
}

/// Returns `dy w`, `[N, K]`, of `dy` with a scale for each row and `w` with a scale for each column.
/// Adds it to `dx` if given, whose memory it may reuse, so `dx` and its clones must not be used
/// afterwards.
pub fn e4m3_linear_backward_input(dy: &Tensor, w: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
    let op = "e4m3_linear_backward_input";
    w.dims2()?;
    let (n, m, k) = backward_shape(op, dy, w)?;
    compute_dtype(op, &[("dy", dy), ("w", w)])?;
    if let Some(dx) = &dx {
        compute_dtype(op, &[("dy", dy), ("dx", dx)])?;
        expect_shape(op, "dx", dx, &with_last(dy, k))?;
        cpu::distinct(op, "dx", dx, &[("dy", dy), ("w", w)])?;
    }
    if on_gpu(dy) {
        let w = round_columns(op, ("w", w), (m, k), k.next_multiple_of(ALIGNED))?;
        let rounded = round_rows(op, ("dy", dy), (n, m), n)?;
        let addend = dx.clone();
        let dx = dx.map_or_else(|| empty(with_last(dy, k), dy.dtype(), dy), Ok)?;
        let operands = ([&rounded, &w], E4m3Sums::F32);
        multiply(op, operands, (n, k), (None, addend.as_ref()), &dx, SUMS_BYTES)?;
        return Ok(dx);
    }
    let (dy, w) = (e4m3_rows(dy)?, e4m3_columns(w)?);
    match dx {
        Some(dx) => linear_backward_input_add(&dy, &w, dx),
        None => linear_backward_input(&dy, &w),
    }
}

/// Adds `dy^T x` to `dw [M, K]` (`f32`), of `x` and `dy` with a scale for each column.
pub fn e4m3_linear_backward_weight(x: &Tensor, dy: &Tensor, dw: &Tensor) -> Result<()> {
    let op = "e4m3_linear_backward_weight";
    let (n, m, k) = weight_shape(op, x, dy, dw)?;
    if on_gpu(x) {
        if n == 0 {
            return Ok(());
        }
        let dy = round_columns(op, ("dy", dy), (n, m), m)?;
        let x = round_columns(op, ("x", x), (n, k), k.next_multiple_of(ALIGNED))?;
        let operands = ([&dy, &x], E4m3Sums::F32);
        return multiply(op, operands, (m, k), (None, Some(dw)), dw, SUMS_BYTES);
    }
    let columns = |name, x: &Tensor| e4m3_columns(&x.reshape(rows_of(op, name, x)?)?);
    linear_backward_weight(&columns("x", x)?, &columns("dy", dy)?, dw)
}

// On a GPU: cublasLt multiplies e4m3 operands that both have the dim of the sums as their rows, with
// sizes that are multiples of 16. So an operand whose columns are summed over is transposed when it is
// rounded, and codes are padded with zeros. The product is computed with scales of 1 into `f32`, and
// `e4m3_scale` multiplies by the scales of rows and columns, adds bias and addend, and rounds once.
// That needs nothing of cublasLt that CUDA 12.4 does not have. The sums are computed for as many rows
// at a time as fit in the L2 cache of a Hopper GPU.

/// Sizes of codes are multiples of this.
const ALIGNED: usize = 16;
/// Number of rows with one maximum of a column, as in `e4m3.cu`.
const SHARE: usize = 64;
/// Rows and columns of a block that transposes, as in `e4m3.cu`.
const TILE: usize = 64;
/// Maximum number of bytes of the sums of a product.
const SUMS_BYTES: usize = 32 << 20;
/// The sums have a multiple of this number of rows, which tensor cores compute at once.
const SUMS_ROWS: usize = 128;
/// Maximum number of rows of sums: the size of a grid.
const MAX_SUMS_ROWS: usize = (1 << 16) - SUMS_ROWS;

/// A matrix in e4m3.
pub(crate) struct Rounded {
    /// `[rows, columns]`, `u8`. The sums of a product run over the columns.
    pub(crate) codes: Tensor,
    /// `[rows]`, `f32`.
    pub(crate) scales: Tensor,
}

/// Rounds `x [n, k]` with a scale for each row. The result has `rows` rows; those beyond `n` are
/// zeros.
pub(crate) fn round_rows(
    op: &'static str,
    (name, x): (&'static str, &Tensor),
    (n, k): (usize, usize),
    rows: usize,
) -> Result<Rounded> {
    let columns = k.next_multiple_of(ALIGNED);
    let codes = empty((rows, columns), DType::U8, x)?;
    let scales = empty(rows, DType::F32, x)?;
    let whole = k == columns && vectors(k, &[x])?;
    let launch = Launch::new(if whole { "e4m3_rows" } else { "e4m3_rows_single" }, x.dtype());
    launch!(op, launch.grid(rows).threads(THREADS); (name, x), codes, scales, n, k, columns)?;
    Ok(Rounded { codes, scales })
}

/// Rounds `x [n, k]` with a scale for each column. The result is transposed and has `rows` rows;
/// those beyond `k` are zeros.
pub(crate) fn round_columns(
    op: &'static str,
    (name, x): (&'static str, &Tensor),
    (n, k): (usize, usize),
    rows: usize,
) -> Result<Rounded> {
    let (columns, shares) = (n.next_multiple_of(ALIGNED), n.div_ceil(SHARE));
    let maxima = empty((shares, k), DType::F32, x)?;
    let scales = empty(rows, DType::F32, x)?;
    let codes = empty((rows, columns), DType::U8, x)?;
    let threads = THREADS as usize;
    let kernel = |name, dtype, x, y| Launch::new(name, dtype).grid3([x, y, 1]).threads(THREADS);
    let find = kernel("e4m3_column_maxima", x.dtype(), k.div_ceil(threads), shares);
    launch!(op, find; (name, x), maxima, n, k)?;
    let scale = kernel("e4m3_scales", DType::F32, rows.div_ceil(threads), 1);
    launch!(op, scale; maxima, scales, shares, k, rows)?;
    let round = kernel("e4m3_columns", x.dtype(), rows.div_ceil(TILE), columns.div_ceil(TILE));
    launch!(op, round; (name, x), scales, codes, n, k, rows, columns)?;
    Ok(Rounded { codes, scales })
}

/// Number of rows of sums of `columns` columns in `bytes`.
fn rows_at_once(columns: usize, bytes: usize) -> usize {
    let rows = bytes / (size_of::<f32>() * columns) / SUMS_ROWS * SUMS_ROWS;
    rows.clamp(SUMS_ROWS, MAX_SUMS_ROWS)
}

/// Writes `a b^T + bias + addend` to `y [n, m]`, with at most `bytes` of sums or `SUMS_ROWS` rows.
/// `addend` may be `y`.
pub(crate) fn multiply(
    op: &'static str,
    ([a, b], how): ([&Rounded; 2], E4m3Sums),
    (n, m): (usize, usize),
    (bias, addend): (Option<&Tensor>, Option<&Tensor>),
    y: &Tensor,
    bytes: usize,
) -> Result<()> {
    if n == 0 || m == 0 {
        return Ok(());
    }
    let (columns, k) = b.codes.dims2()?;
    let rows = rows_at_once(columns, bytes).min(n);
    let buffer = empty((rows, columns), DType::F32, y)?;
    let y = y.reshape((n, m))?;
    let addend = addend.map(|addend| addend.reshape((n, m))).transpose()?;
    for first in (0..n).step_by(rows) {
        let rows = rows.min(n - first);
        let part = |t: &Tensor| t.narrow(0, first, rows);
        let (codes, scales, y) = (part(&a.codes)?, part(&a.scales)?, part(&y)?);
        let addend = addend.as_ref().map(part).transpose()?;
        let sums = buffer.narrow(0, 0, rows)?;
        let operands = [("a", &codes), ("b", &b.codes)];
        let gemm = Gemm::new(Transpose::Nt, (rows, columns, k), operands);
        let fast_sums = how == E4m3Sums::Fast;
        Gemm { fast_sums, ..gemm }.into(op, "sums", &sums)?;
        let mut whole = vectors(m, &[&y])?;
        for t in bias.into_iter().chain(&addend) {
            whole = whole && vectors(0, &[t])?;
        }
        let elements = if whole { 16 / y.dtype().size_in_bytes() } else { 1 };
        let kernel = if whole { "e4m3_scale" } else { "e4m3_scale_single" };
        let launch = Launch::new(kernel, y.dtype()).threads(THREADS);
        let launch = launch.grid3([m.div_ceil(THREADS as usize * elements), rows, 1]);
        launch!(op, launch; sums, scales, b.scales, bias, addend, y, m, columns)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Tolerance, added, assert_close, bits, gradient_buffer, operand, random, with_threads,
    };
    use super::*;
    use candle_core::DType;

    const SHAPES: [(usize, usize, usize); 6] =
        [(1, 1, 1), (1, 33, 65), (3, 17, 5), (31, 64, 33), (65, 40, 1), (130, 80, 96)];

    /// All results of a layer: `y`, `y` with bias and residual, `dx`, `dx` added to a tensor, `dw`.
    fn layer(n: usize, k: usize, m: usize, dtype: DType) -> Result<[Tensor; 5]> {
        let [x, w, dy, bias, residual] = operands(n, k, m, dtype)?;
        let dx = Tensor::ones((n, k), dtype, x.device())?;
        let dw = gradient_buffer(&[m, k]);
        e4m3_linear_backward_weight(&x, &dy, &dw)?;
        Ok([
            e4m3_linear(&x, &w, None, None, E4m3Sums::F32)?,
            e4m3_linear(&x, &w, Some(&bias), Some(&residual), E4m3Sums::F32)?,
            e4m3_linear_backward_input(&dy, &w, None)?,
            e4m3_linear_backward_input(&dy, &w, Some(dx))?,
            dw,
        ])
    }

    fn operands(n: usize, k: usize, m: usize, dtype: DType) -> Result<[Tensor; 5]> {
        Ok([
            operand(&random(1, &[n, k]), dtype)?,
            operand(&random(2, &[m, k]), dtype)?,
            operand(&random(3, &[n, m]), dtype)?,
            random(4, &[m]).to_dtype(dtype)?,
            operand(&random(5, &[n, m]), dtype)?,
        ])
    }

    /// The same results by `f64` products of rounded operands.
    fn oracle(n: usize, k: usize, m: usize, dtype: DType) -> Result<[Tensor; 5]> {
        let operands = operands(n, k, m, dtype)?.map(|t| t.to_device(&Device::Cpu));
        let [x, w, dy, bias, residual] = operands;
        let (x, w, dy, bias, residual) = (x?, w?, dy?, bias?, residual?);
        let wide = |t: &Tensor| t.to_dtype(DType::F64);
        let (rows, columns) =
            (|t: &Tensor| wide(&e4m3_rows(t)?), |t: &Tensor| wide(&e4m3_columns(t)?));
        let y = rows(&x)?.matmul(&rows(&w)?.t()?)?;
        let dx = rows(&dy)?.matmul(&columns(&w)?)?;
        let dw = columns(&dy)?.t()?.matmul(&columns(&x)?)?;
        let sum = y.broadcast_add(&wide(&bias)?)?.add(&wide(&residual)?)?;
        Ok([y, sum, dx.clone(), (dx + 1.0)?, dw])
    }

    #[test]
    fn products_are_those_of_rounded_operands() -> Result<()> {
        for (n, k, m) in SHAPES {
            let dtypes = [(DType::F32, Tolerance::E4M3_SUMS), (DType::BF16, Tolerance::BF16)];
            for (dtype, tolerance) in dtypes {
                let [y, sum, dx, dx_added, dw] = layer(n, k, m, dtype)?;
                let got = [y, sum, dx, dx_added, added(&dw)];
                for (at, (got, want)) in got.iter().zip(oracle(n, k, m, dtype)?).enumerate() {
                    let tolerance = if at == 4 { Tolerance::E4M3_SUMS } else { tolerance };
                    assert_close(&format!("{at} {n} {k} {m} {dtype:?}"), got, &want, tolerance);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn operands_in_fp8_change_a_product_by_a_few_percent() -> Result<()> {
        let [x, w, dy, ..] = operands(64, 128, 96, DType::F32)?;
        let error = |got: &Tensor, want: &Tensor| -> Result<f64> {
            let squares = |t: Tensor| t.sqr()?.sum_all()?.to_scalar::<f32>();
            Ok(f64::from(squares((got - want)?)? / squares(want.clone())?).sqrt())
        };
        let dw = gradient_buffer(&[96, 128]);
        e4m3_linear_backward_weight(&x, &dy, &dw)?;
        let pairs = [
            (e4m3_linear(&x, &w, None, None, E4m3Sums::F32)?, x.matmul(&w.t()?)?),
            (e4m3_linear_backward_input(&dy, &w, None)?, dy.matmul(&w)?),
            (added(&dw), dy.t()?.matmul(&x)?),
        ];
        for (got, want) in pairs {
            let error = error(&got, &want)?;
            assert!((0.01..0.05).contains(&error), "{error}");
        }
        Ok(())
    }

    #[test]
    fn a_power_of_two_as_factor_of_an_operand_is_a_factor_of_the_result() -> Result<()> {
        let [x, w, dy, ..] = operands(9, 40, 24, DType::BF16)?;
        let y = e4m3_linear(&x, &w, None, None, E4m3Sums::F32)?;
        let dx = e4m3_linear_backward_input(&dy, &w, None)?;
        for factor in [2f64.powi(-40), 0.5, 2f64.powi(40)] {
            let scaled = e4m3_linear(&(&x * factor)?, &w, None, None, E4m3Sums::F32)?;
            assert_eq!(bits(&scaled), bits(&(&y * factor)?), "{factor}");
            let scaled = e4m3_linear_backward_input(&(&dy * factor)?, &w, None)?;
            assert_eq!(bits(&scaled), bits(&(&dx * factor)?), "{factor}");
        }
        Ok(())
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let all = |threads| -> Result<Vec<Vec<u32>>> {
                let results = with_threads(threads, || layer(70, 80, 96, dtype))?;
                Ok(results.iter().map(bits).collect())
            };
            let want = all(1)?;
            for threads in [2, 5] {
                assert_eq!(all(threads)?, want, "{threads} {dtype:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_number_that_is_not_finite_makes_its_row_of_the_result_nan_and_no_other() -> Result<()> {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random(1, &[3, 16]).flatten_all()?.to_vec1::<f32>()?;
            let w = random(2, &[5, 16]);
            let clean = Tensor::from_vec(x.clone(), (3, 16), w.device())?;
            x[16 + 7] = bad;
            let x = Tensor::from_vec(x, (3, 16), w.device())?;
            let y = e4m3_linear(&x, &w, None, None, E4m3Sums::F32)?.to_vec2::<f32>()?;
            let want = e4m3_linear(&clean, &w, None, None, E4m3Sums::F32)?.to_vec2::<f32>()?;
            assert!(y[1].iter().all(|y| y.is_nan()), "{bad}");
            assert_eq!((&y[0], &y[2]), (&want[0], &want[2]), "{bad}");
        }
        Ok(())
    }
}
