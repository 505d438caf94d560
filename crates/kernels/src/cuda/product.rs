//! Launches of `product.cu`: matrix products without a library, of any size and alignment.

use super::gemm::{Addend, Gemm, GemmOperand, Transpose};
use crate::launch::{Address, Launch, Long, THREADS, address, launch};
use candle_core::{DType, Result, bail};

/// Number of rows and of columns of a block.
const TILE: usize = 64;

/// Returns the address and the row stride, in elements of the dtype of the matrix.
pub(super) fn address_and_stride(
    op: &str,
    matrix: GemmOperand<'_>,
    columns: usize,
) -> Result<(u64, usize)> {
    let start = address(op, matrix.name(), matrix.tensor())?.0;
    Ok(match matrix {
        GemmOperand::SecondHalves(..) => (start + 2 * columns as u64, 2 * columns),
        GemmOperand::Whole(..) => (start, columns),
    })
}

/// Computes `dst = factor op(a) op(b) + addend + bias`. The caller has checked sizes.
pub(super) fn run(op: &'static str, gemm: &Gemm<'_>, dst: GemmOperand<'_>) -> Result<()> {
    let (m, n, k) = gemm.shape;
    let name = match (gemm.a.dtype(), dst.dtype()) {
        (DType::F32, DType::F32) | (DType::BF16, DType::BF16) => "product",
        (DType::BF16, DType::F32) => "product_into_f32",
        (DType::U8, DType::F32) => "product_e4m3",
        (operands, result) => bail!("{op}: products of {operands:?} into {result:?} do not exist"),
    };
    let (a_columns, b_columns) = match gemm.transpose {
        Transpose::Nt => (k, k),
        Transpose::Nn => (k, n),
        Transpose::Tn => (m, n),
    };
    let (a, a_stride) = address_and_stride(op, gemm.a, a_columns)?;
    let (b, b_stride) = address_and_stride(op, gemm.b, b_columns)?;
    let (to, _) = address_and_stride(op, dst, n)?;
    let addend = match gemm.addend {
        Addend::Nothing => 0,
        Addend::Destination => to,
        Addend::Residual(addend) => address(op, "residual", addend)?.0,
    };
    let bias = gemm.bias.map_or(Ok(0), |bias| address(op, "bias", bias).map(|at| at.0))?;
    let (a, b, to) = (Address(a), Address(b), Address(to));
    let (addend, bias) = (Address(addend), Address(bias));
    let [a_stride, b_stride] = [a_stride, b_stride].map(Long);
    let (a_rows, b_rows) = (gemm.transpose == Transpose::Tn, gemm.transpose != Transpose::Nt);
    let launch = Launch::new(name, gemm.a.dtype()).threads(THREADS).on(dst.tensor());
    let launch = launch.grid(m.div_ceil(TILE) * n.div_ceil(TILE));
    launch!(op, launch; a, b, addend, bias, to, a_stride, b_stride, a_rows, b_rows, m, n, k, gemm.factor)
}

#[cfg(test)]
mod tests {
    use super::super::gemm::Gemm;
    use super::*;
    use crate::testing::{Tolerance, assert_close, random};
    use candle_core::Tensor;

    const TRANSPOSES: [Transpose; 3] = [Transpose::Nt, Transpose::Nn, Transpose::Tn];
    const SHAPES: [(usize, usize, usize); 6] =
        [(1, 1, 1), (3, 5, 7), (64, 64, 16), (65, 130, 33), (200, 63, 100), (2, 70, 0)];

    /// Rows of `f32` whose second halves are `x [rows, columns]` in `bf16`; the first are NaN.
    fn second_halves(x: &Tensor) -> Result<Tensor> {
        let (rows, columns) = x.dims2()?;
        let mut words = Vec::new();
        for row in x.to_dtype(DType::BF16)?.to_vec2::<half::bf16>()? {
            words.extend(vec![f32::NAN; columns - columns / 2]);
            let pair = |pair: &[half::bf16]| {
                f32::from_bits(u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16)
            };
            words.extend(row.chunks_exact(2).map(pair));
        }
        Tensor::from_vec(words, (rows, columns), x.device())
    }

    /// The product by the library, or by the CPU in emulation, and by the kernel.
    fn both(
        transpose: Transpose,
        (m, n, k): (usize, usize, usize),
        (operands, result): (DType, DType),
        halves: bool,
        cases: usize,
    ) -> Result<Vec<[Tensor; 2]>> {
        let (a_dims, b_dims) = match transpose {
            Transpose::Nt => ([m, k], [n, k]),
            Transpose::Nn => ([m, k], [k, n]),
            Transpose::Tn => ([k, m], [k, n]),
        };
        let operand = |seed, dims: [usize; 2]| {
            let x = random(seed, &dims);
            // Codes of e4m3: numbers from 2^-9 to 240.
            let x = if operands == DType::U8 { ((x * 14.0)? + 60.0)? } else { x };
            x.to_dtype(operands)
        };
        let (a, b) = (operand(1, a_dims)?, operand(2, b_dims)?);
        let wide = second_halves(&random(1, &a_dims))?;
        let a = if halves {
            GemmOperand::SecondHalves("a", &wide)
        } else {
            GemmOperand::Whole("a", &a)
        };
        let addend = random(3, &[m, n]).to_dtype(result)?;
        let bias = random(4, &[n]).to_dtype(result)?;
        let all = [
            (Addend::Nothing, None),
            (Addend::Destination, None),
            (Addend::Residual(&addend), Some(&bias)),
            (Addend::Nothing, Some(&bias)),
        ];
        let both = all.into_iter().take(cases).map(|(addend, bias)| {
            let products = [super::super::gemm::run, run].map(|run| -> Result<Tensor> {
                let dst = random(5, &[m, n]).to_dtype(result)?;
                let b = GemmOperand::Whole("b", &b);
                let (shape, factor, fast_sums) = ((m, n, k), 0.75, false);
                let gemm = Gemm { transpose, shape, a, b, factor, addend, bias, fast_sums };
                run("test", &gemm, GemmOperand::Whole("dst", &dst))?;
                Ok(dst)
            });
            let [library, kernel] = products;
            Ok::<_, candle_core::Error>([library?, kernel?])
        });
        both.collect()
    }

    #[test]
    fn products_without_a_library_are_those_of_the_library() -> Result<()> {
        let dtypes = [
            (DType::F32, DType::F32, Tolerance::F32),
            (DType::BF16, DType::BF16, Tolerance::BF16),
            (DType::BF16, DType::F32, Tolerance::F32),
            (DType::U8, DType::F32, Tolerance::E4M3_SUMS),
        ];
        for transpose in TRANSPOSES {
            for shape in SHAPES {
                if cfg!(feature = "cuda") && shape.2 == 0 {
                    continue; // cublasLt refuses it
                }
                for (operands, result, tolerance) in dtypes {
                    let is_e4m3 = operands == DType::U8;
                    if is_e4m3 && cfg!(feature = "cuda") && transpose != Transpose::Nt {
                        continue; // cublasLt refuses it
                    }
                    // The library has products of codes without addend and bias only, which is
                    // how they are used.
                    let cases = if is_e4m3 && cfg!(feature = "cuda") { 1 } else { 4 };
                    let found = both(transpose, shape, (operands, result), false, cases)?;
                    for [library, kernel] in found {
                        let what = format!("{transpose:?} {shape:?} {operands:?} {result:?}");
                        assert_close(&what, &kernel, &library, tolerance);
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn an_operand_may_be_the_second_halves_of_rows() -> Result<()> {
        for transpose in TRANSPOSES {
            let dtypes = (DType::BF16, DType::F32);
            for [library, kernel] in both(transpose, (34, 66, 20), dtypes, true, 4)? {
                assert_close(&format!("{transpose:?}"), &kernel, &library, Tolerance::F32);
            }
        }
        Ok(())
    }
}
