//! Linear layers of one input, computed as one product if their weights follow one another.
//!
//! Shapes: `x [N, K]`, weights `[M, K]` with an own `M` each, outputs `y [N, M]`. The outputs are
//! columns of one matrix `[N, sum of M]`, and so must be their gradients, or else each layer has a
//! product of its own. On the CPU there are always several products.

use super::adjacent::{are_columns, are_rows};
use super::cpu::compute_dtype;
use super::cuda::gemm::{Addend, Gemm, GemmOperand, Transpose};
use super::launch::{empty, on_gpu};
use super::linear::{backward_shape, forward_shape, weight_shape};
use super::{GradWrite, linear_backward_weight_into, own_columns};
use candle_core::{Result, Tensor};

/// Returns `x W^T` for each of `weights`, as columns of one matrix; `None` if the weights do not
/// follow one another.
pub fn joined_linear<const N: usize>(
    x: &Tensor,
    weights: [&Tensor; N],
) -> Result<Option<[Tensor; N]>> {
    for weight in weights {
        forward_shape("joined_linear", x, weight, None, None)?;
    }
    if !on_gpu(x) || !are_rows(&weights) {
        return Ok(None);
    }
    let ((n, k), m) = (x.dims2()?, total(&weights, 0)?);
    let y = empty((n, m), x.dtype(), x)?;
    let (transpose, a, b) = (Transpose::Nt, GemmOperand::Whole("x", x), block("w", &weights));
    let gemm = Gemm { transpose, shape: (n, m, k), a, b, addend: Addend::Nothing, bias: None };
    gemm.into("joined_linear", "y", &y)?;
    let mut first = 0;
    let columns = weights.iter().map(|w| {
        let width = w.dim(0)?;
        first += width;
        y.narrow(1, first - width, width)
    });
    let columns = columns.collect::<Result<Vec<_>>>()?;
    Ok(Some(columns.try_into().expect("columns for each weight")))
}

/// Returns the sum of the input gradients `dy W`, `[N, K]`; `None` if the weights do not follow one
/// another, or the gradients are not columns of one matrix.
pub fn joined_linear_backward_input<const N: usize>(
    dys: [&Tensor; N],
    weights: [&Tensor; N],
) -> Result<Option<Tensor>> {
    let op = "joined_linear_backward_input";
    for (dy, weight) in dys.into_iter().zip(weights) {
        backward_shape(op, dy, weight)?;
        compute_dtype(op, &[("dy", dy), ("w", weight)])?;
    }
    if !(on_gpu(dys[0]) && are_columns(&dys) && are_rows(&weights)) {
        return Ok(None);
    }
    let (n, m, k) = (dys[0].dim(0)?, total(&dys, 1)?, weights[0].dim(1)?);
    let dx = empty((n, k), dys[0].dtype(), dys[0])?;
    let (transpose, a, b) = (Transpose::Nn, block("dy", &dys), block("w", &weights));
    let gemm = Gemm { transpose, shape: (n, k, m), a, b, addend: Addend::Nothing, bias: None };
    gemm.into(op, "dx", &dx)?;
    Ok(Some(dx))
}

/// Adds the weight gradient `dy^T x` of each layer that has a buffer in `dws` to this buffer, or
/// replaces its contents. If all buffers follow one another, there is one product.
pub fn joined_linear_backward_weight<const N: usize>(
    x: &Tensor,
    dys: [&Tensor; N],
    dws: [Option<(&Tensor, GradWrite)>; N],
) -> Result<()> {
    let op = "joined_linear_backward_weight";
    for (dy, dw) in dys.into_iter().zip(dws) {
        if let Some((dw, _)) = dw {
            weight_shape(op, x, dy, dw)?;
        }
    }
    let (n, k) = x.dims2()?;
    if on_gpu(x)
        && n > 0
        && let Some((dws, write)) = written_alike(dws)
        && are_columns(&dys)
        && are_rows(&dws)
    {
        let (a, b) = (block("dy", &dys), GemmOperand::Whole("x", x));
        let addend = match write {
            GradWrite::Add => Addend::Destination,
            GradWrite::Replace => Addend::Nothing,
        };
        let (transpose, shape) = (Transpose::Tn, (total(&dys, 1)?, k, n));
        let gemm = Gemm { transpose, shape, a, b, addend, bias: None };
        return gemm.into_matrix(op, block("dw", &dws));
    }
    for (dy, dw) in dys.into_iter().zip(dws) {
        if let Some((dw, write)) = dw {
            linear_backward_weight_into(x, &own_columns(dy)?, dw, write)?;
        }
    }
    Ok(())
}

/// All elements of `parts`, which follow one another.
fn block<'a>(name: &'static str, parts: &[&'a Tensor]) -> GemmOperand<'a> {
    GemmOperand::Block(name, parts[0], parts.iter().map(|part| part.elem_count()).sum())
}

/// The sum of the numbers of rows or columns of `parts`.
fn total(parts: &[&Tensor], dim: usize) -> Result<usize> {
    parts.iter().map(|part| part.dim(dim)).sum()
}

/// Returns the buffers if every layer has one and all have the same [`GradWrite`].
fn written_alike<const N: usize>(
    dws: [Option<(&Tensor, GradWrite)>; N],
) -> Option<(Vec<&Tensor>, GradWrite)> {
    let all = dws.into_iter().collect::<Option<Vec<_>>>()?;
    let (_, write) = *all.first()?;
    let is_alike = all.iter().all(|(_, other)| *other == write);
    is_alike.then(|| (all.into_iter().map(|(dw, _)| dw).collect(), write))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Tolerance, assert_close, bits, kernels_are_tested, message, random,
    };
    use super::super::{
        RecomputeInput, linear, linear_backward_input, linear_backward_input_add,
        linear_backward_weight_into, swiglu, swiglu_backward,
    };
    use super::*;
    use candle_core::DType;

    const WIDTHS: [usize; 3] = [24, 8, 40];
    const K: usize = 33;

    /// Matrices `[width, K]` that follow one another, after other elements.
    fn rows(seed: u64, dtype: DType) -> [Tensor; 3] {
        let before = 3;
        let total: usize = WIDTHS.iter().sum();
        let flat = random(seed, &[before + total * K]).to_dtype(dtype).unwrap();
        let mut first = before;
        WIDTHS.map(|width| {
            first += width * K;
            flat.narrow(0, first - width * K, width * K).unwrap().reshape((width, K)).unwrap()
        })
    }

    /// The columns of a matrix `[n, sum of M]`.
    fn columns(seed: u64, n: usize, dtype: DType) -> [Tensor; 3] {
        let all = random(seed, &[n, WIDTHS.iter().sum()]).to_dtype(dtype).unwrap();
        let mut first = 0;
        WIDTHS.map(|width| {
            first += width;
            all.narrow(1, first - width, width).unwrap()
        })
    }

    fn own(tensors: &[Tensor; 3]) -> [Tensor; 3] {
        tensors.each_ref().map(|t| t.force_contiguous().unwrap())
    }

    #[test]
    fn one_product_has_the_outputs_and_gradients_of_several() {
        for (dtype, tolerance) in [(DType::F32, Tolerance::F32), (DType::BF16, Tolerance::BF16)] {
            for n in [1, 7, 130] {
                let x = random(1, &[n, K]).to_dtype(dtype).unwrap();
                let (weights, dys) = (rows(2, dtype), columns(3, n, dtype));
                let Some(ys) = joined_linear(&x, weights.each_ref()).unwrap() else {
                    assert!(!kernels_are_tested());
                    return;
                };
                for (y, w) in ys.iter().zip(&weights) {
                    let want = linear(&x, w, None).unwrap();
                    assert_close(&format!("y in {dtype:?}, {n}"), y, &want, tolerance);
                }
                let dx = joined_linear_backward_input(dys.each_ref(), weights.each_ref()).unwrap();
                let alone = own(&dys);
                let mut want = linear_backward_input(&alone[0], &weights[0]).unwrap();
                for (dy, w) in alone.iter().zip(&weights).skip(1) {
                    want = linear_backward_input_add(dy, w, want).unwrap();
                }
                assert_close(&format!("dx in {dtype:?}, {n}"), &dx.unwrap(), &want, tolerance);
                for write in [GradWrite::Add, GradWrite::Replace] {
                    let (found, want) = (rows(4, DType::F32), own(&rows(4, DType::F32)));
                    let dws = found.each_ref().map(|dw| Some((dw, write)));
                    joined_linear_backward_weight(&x, dys.each_ref(), dws).unwrap();
                    for ((dy, found), want) in alone.iter().zip(&found).zip(&want) {
                        linear_backward_weight_into(&x, dy, want, write).unwrap();
                        let what = format!("dw in {dtype:?}, {n}, {write:?}");
                        assert_close(&what, found, want, Tolerance::F32);
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_that_do_not_follow_one_another_have_a_product_each() {
        let (n, dtype) = (9, DType::F32);
        let (x, dys, alone) =
            (random(1, &[n, K]), columns(3, n, dtype), own(&columns(3, n, dtype)));
        let (found, want) = (rows(4, dtype), own(&rows(4, dtype)));
        let (add, replace) = (GradWrite::Add, GradWrite::Replace);
        for writes in [[Some(add), None, Some(add)], [Some(add), Some(replace), Some(add)]] {
            for dys in [&dys, &alone] {
                if !kernels_are_tested() && !dys[0].is_contiguous() {
                    continue; // only ops of a GPU read columns
                }
                let of = |all: &[Tensor; 3]| {
                    let all = all.iter().zip(writes).zip(&alone);
                    all.for_each(|((dw, write), dy)| {
                        if let Some(write) = write {
                            linear_backward_weight_into(&x, dy, dw, write).unwrap();
                        }
                    });
                };
                let dws = [0, 1, 2].map(|i| writes[i].map(|write| (&found[i], write)));
                joined_linear_backward_weight(&x, dys.each_ref(), dws).unwrap();
                of(&want);
                for (found, want) in found.iter().zip(&want) {
                    assert_eq!(bits(found), bits(want), "{writes:?}");
                }
            }
        }
    }

    #[test]
    fn weights_with_a_gap_or_in_another_order_are_not_joined() {
        let x = random(1, &[5, K]);
        let [first, second, third] = rows(2, DType::F32);
        let (others, dys) = (own(&rows(2, DType::F32)), columns(3, 5, DType::F32));
        let alone = own(&dys);
        for weights in [[&first, &third], [&second, &first], [&first, &others[1]]] {
            assert!(joined_linear(&x, weights).unwrap().is_none());
        }
        let weights = [&first, &second, &third];
        assert!(joined_linear_backward_input(alone.each_ref(), weights).unwrap().is_none());
        // not all columns
        let some = joined_linear_backward_input([&dys[0], &dys[1]], [&first, &second]);
        assert!(some.unwrap().is_none());
        let error = message(joined_linear(&random(1, &[5, K + 1]), [&first, &second]));
        assert!(error.contains("found 34 inputs, expected 33"), "{error}");
    }

    #[test]
    fn swiglu_of_columns_is_that_of_two_tensors() {
        if !kernels_are_tested() {
            return;
        }
        for dtype in [DType::F32, DType::BF16] {
            for (n, width) in [(1, 8), (9, 64), (33, 13)] {
                let both = || {
                    let both = random(5, &[n, 2 * width]).to_dtype(dtype).unwrap();
                    [0, width].map(|first| both.narrow(1, first, width).unwrap())
                };
                let alone = || both().map(|part| part.force_contiguous().unwrap());
                let dy = || random(6, &[n, width]).to_dtype(dtype).unwrap();
                let ([gate, up], [gate_alone, up_alone]) = (both(), alone());
                let want = swiglu(&gate_alone, &up_alone).unwrap();
                assert_eq!(bits(&swiglu(&gate, &up).unwrap()), bits(&want));
                for recompute in [RecomputeInput::Yes, RecomputeInput::No] {
                    let run = |[gate, up]: [Tensor; 2]| {
                        let (d_gate, d_up, y) = swiglu_backward(gate, up, dy(), recompute).unwrap();
                        (bits(&d_gate), bits(&d_up), y.map(|y| bits(&y)))
                    };
                    assert!(run(both()) == run(alone()), "{dtype:?} {n} {width}");
                }
            }
        }
    }
}
