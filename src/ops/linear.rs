//! Linear layer `y = x W^T + b`, and its gradients.
//!
//! Shapes: `x [N, K]`, `w [M, K]` (a weight with more dims is read as `[M, K]`), `b [M]`,
//! `y [N, M]`. `N` may stand for several dims: all dims of `x` but the last. Gradient buffers are
//! `f32`.

use super::cpu::blocks::{filled, pieces, span};
use super::cpu::gemm::Into;
use super::cpu::panels::{add_tn, by_rows, f32_slice, new_nn, new_nt, nn, nt};
use super::cpu::{self, Operand, ROWS, compute_dtype, expect_f32, expect_shape, read};
use candle_core::{DType, Result, Tensor, bail};

/// Returns `(N, last)`: the product of all dims but the last, and the last.
fn rows_of(op: &str, name: &str, t: &Tensor) -> Result<(usize, usize)> {
    match t.dims() {
        [] => bail!("{op}: `{name}` is a scalar, expected at least one dim"),
        [rows @ .., last] => Ok((rows.iter().product(), *last)),
    }
}

/// Returns `(M, K)` of a weight: its first dim, and the product of the others.
fn matrix_of(op: &str, w: &Tensor) -> Result<(usize, usize)> {
    match w.dims() {
        [m, k @ ..] if !k.is_empty() => Ok((*m, k.iter().product())),
        dims => bail!("{op}: `w` is {dims:?}, expected [M, K]"),
    }
}

fn with_last(t: &Tensor, last: usize) -> Vec<usize> {
    let mut dims = t.dims().to_vec();
    if let Some(end) = dims.last_mut() {
        *end = last;
    }
    dims
}

/// Returns `x W^T + bias`, `[N, M]`. Fails if the shapes do not match.
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    forward("linear", x, w, bias, None)
}

/// Returns `x W^T + bias + residual`, `[N, M]`, with `residual: [N, M]`.
pub fn linear_add(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
) -> Result<Tensor> {
    forward("linear_add", x, w, bias, Some(residual))
}

fn forward(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let ((n, k), (m, w_k)) = (rows_of(op, "x", x)?, matrix_of(op, w)?);
    if k != w_k {
        bail!(
            "{op}: `x` is {:?} and `w` is {:?}: found {k} inputs, expected {w_k}",
            x.dims(),
            w.dims()
        );
    }
    let dtype = compute_dtype(op, &[("x", x), ("w", w)])?;
    let shape = with_last(x, m);
    if let Some(residual) = residual {
        compute_dtype(op, &[("x", x), ("residual", residual)])?;
        expect_shape(op, "residual", residual, &shape)?;
    }
    if let Some(bias) = bias {
        compute_dtype(op, &[("x", x), ("bias", bias)])?;
        expect_shape(op, "bias", bias, &[m])?;
    }
    return_if_on_gpu!(x => linear(op, x, w, bias, residual, (n, m, k), shape));
    let residual = residual.map(|residual| read(op, "residual", residual)).transpose()?;
    let residual = residual.as_ref().map(Operand::values).transpose()?;
    let bias = bias.map(|bias| read(op, "bias", bias)).transpose()?;
    let bias = bias.as_ref().map(Operand::f32).transpose()?;
    let (x, w) = (read(op, "x", x)?, read(op, "w", w)?);
    let (x, w) = (x.values()?, w.values()?);
    by_rows((n, m, k.max(m)), shape, dtype, |rows| {
        let x = f32_slice(x, span(&rows, k));
        if residual.is_none() && bias.is_none() {
            return new_nt((rows.len(), m, k), &x, w);
        }
        let [y] = filled(rows.len(), ROWS, [(m, DType::F32)], |at, [y]| {
            if let Some(residual) = residual {
                let at = rows.start + at.start..rows.start + at.end;
                y.copy_from_slice(&residual.view(span(&at, m)));
            }
            if let Some(bias) = &bias {
                y.chunks_mut(m).for_each(|row| cpu::add(bias, row));
            }
        });
        let mut y = y.into_f32();
        nt((rows.len(), m, k), &mut y, Into::Add, &x, w);
        y
    })
}

/// Checks `dy [N, M]` against `w [M, K]` and returns `(N, M, K)`.
fn backward_shape(op: &str, dy: &Tensor, w: &Tensor) -> Result<(usize, usize, usize)> {
    let ((n, m), (w_m, k)) = (rows_of(op, "dy", dy)?, matrix_of(op, w)?);
    if m != w_m {
        bail!(
            "{op}: `dy` is {:?} and `w` is {:?}: found {m} outputs, expected {w_m}",
            dy.dims(),
            w.dims()
        );
    }
    Ok((n, m, k))
}

/// Returns the input gradient `dy W`, `[N, K]`.
pub fn linear_backward_input(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    let op = "linear_backward_input";
    let (n, m, k) = backward_shape(op, dy, w)?;
    let dtype = compute_dtype(op, &[("dy", dy), ("w", w)])?;
    let shape = with_last(dy, k);
    return_if_on_gpu!(dy => linear_backward_input(op, dy, w, (n, k, m), shape));
    let (dy, w) = (read(op, "dy", dy)?, read(op, "w", w)?);
    let (dy, w) = (dy.values()?, w.values()?);
    by_rows((n, k, k.max(m)), shape, dtype, |rows| {
        new_nn((rows.len(), k, m), &f32_slice(dy, span(&rows, m)), w)
    })
}

/// Returns `dx + dy W`, `[N, K]`. It may reuse the memory of `dx`, so `dx` and its clones must not
/// be used afterwards.
pub fn linear_backward_input_add(dy: &Tensor, w: &Tensor, dx: Tensor) -> Result<Tensor> {
    let op = "linear_backward_input_add";
    let (n, m, k) = backward_shape(op, dy, w)?;
    compute_dtype(op, &[("dy", dy), ("w", w), ("dx", &dx)])?;
    expect_shape(op, "dx", &dx, &with_last(dy, k))?;
    cpu::distinct(op, "dx", &dx, &[("dy", dy), ("w", w)])?;
    return_if_on_gpu!(dy => linear_backward_input_add(op, dy, w, (n, k, m), dx));
    let (dy, w) = (read(op, "dy", dy)?, read(op, "w", w)?);
    let (dy, w) = (dy.values()?, w.values()?);
    if dx.dtype() == DType::F32 {
        let dy = f32_slice(dy, 0..n * m);
        cpu::write(op, "dx", &dx, |dx| nn((n, k, m), dx, Into::Add, &dy, w))?;
        return Ok(dx);
    }
    let dx_read = read(op, "dx", &dx)?;
    let old = dx_read.values()?;
    by_rows((n, k, k.max(m)), dx.dims(), dx.dtype(), |rows| {
        let mut sum = f32_slice(old, span(&rows, k)).into_owned();
        nn((rows.len(), k, m), &mut sum, Into::Add, &f32_slice(dy, span(&rows, m)), w);
        sum
    })
}

/// Adds the weight gradient `dy^T x` to `dw` (`f32`), which has the shape of the weight.
pub fn linear_backward_weight(x: &Tensor, dy: &Tensor, dw: &Tensor) -> Result<()> {
    let op = "linear_backward_weight";
    let ((n, k), (dy_n, m)) = (rows_of(op, "x", x)?, rows_of(op, "dy", dy)?);
    if n != dy_n {
        bail!(
            "{op}: `x` is {:?} and `dy` is {:?}: found {dy_n} rows in `dy`, expected {n}",
            x.dims(),
            dy.dims()
        );
    }
    compute_dtype(op, &[("x", x), ("dy", dy)])?;
    expect_f32(op, "dw", dw, dw.dims())?;
    if matrix_of(op, dw)? != (m, k) {
        bail!("{op}: `dw` is {:?}, expected [{m}, {k}]", dw.dims());
    }
    cpu::distinct(op, "dw", dw, &[("x", x), ("dy", dy)])?;
    return_if_on_gpu!(x => linear_backward_weight(op, x, dy, dw, (m, k, n)));
    let (x, dy) = (read(op, "x", x)?, read(op, "dy", dy)?);
    let (x, dy) = (x.values()?, dy.values()?);
    cpu::write(op, "dw", dw, |dw| add_tn((m, k, n), dw, dy, x))
}

/// Adds the sum of the rows of `dy [N, M]` to `db [M]` (`f32`).
pub fn bias_backward(dy: &Tensor, db: &Tensor) -> Result<()> {
    let op = "bias_backward";
    let (n, m) = rows_of(op, "dy", dy)?;
    compute_dtype(op, &[("dy", dy)])?;
    expect_f32(op, "db", db, &[m])?;
    cpu::distinct(op, "db", db, &[("dy", dy)])?;
    return_if_on_gpu!(dy => bias_backward(op, dy, db, (n, m)));
    let dy = read(op, "dy", dy)?;
    let dy = dy.values()?;
    let sums = cpu::column_sums(n, m, |rows, partial| {
        for rows in pieces(rows, m) {
            dy.view(span(&rows, m)).chunks(m).for_each(|row| cpu::add(row, partial));
        }
    });
    cpu::write(op, "db", db, |db| cpu::add(&sums, db))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Tolerance, added, assert_close, check, device, gradient_buffer, message, random,
    };
    use super::*;
    use candle_core::DType;

    fn plain(t: &[Tensor]) -> Result<Tensor> {
        t[0].matmul(&t[1].t()?)?.broadcast_add(&t[2])
    }

    #[test]
    fn linear_and_its_gradients_match_the_reference() {
        for (n, k, m) in
            [(1, 1, 1), (1, 33, 65), (3, 17, 5), (31, 64, 33), (65, 40, 1), (130, 70, 96)]
        {
            let inputs = [random(1, &[n, k]), random(2, &[m, k]), random(3, &[m])];
            check(&format!("linear {n} {k} {m}"), &inputs, plain, |t, dy| {
                let y = linear(&t[0], &t[1], Some(&t[2]))?;
                let (dw, db) = (gradient_buffer(&[m, k]), gradient_buffer(&[m]));
                linear_backward_weight(&t[0], dy, &dw)?;
                bias_backward(dy, &db)?;
                Ok((y, vec![linear_backward_input(dy, &t[1])?, added(&dw), added(&db)]))
            });
        }
    }

    #[test]
    fn the_bias_gradient_is_the_sum_of_all_rows_at_any_storage_offset() {
        for (n, m) in [(1, 8), (63, 300), (600, 520), (4_200, 3)] {
            for dtype in [DType::F32, DType::BF16] {
                let aligned = random(1, &[n + 1, m]).to_dtype(dtype).unwrap();
                for start in [0, 1] {
                    let dy = aligned.narrow(0, start, n).unwrap();
                    let db = gradient_buffer(&[m]);
                    bias_backward(&dy, &db).unwrap();
                    let want = dy.to_dtype(DType::F64).unwrap().sum(0).unwrap();
                    assert_close(&format!("bias {n} {m}"), &added(&db), &want, Tolerance::F32);
                }
            }
        }
    }

    #[test]
    fn residuals_are_added_in_forward_and_backward() {
        let inputs =
            [random(1, &[33, 20]), random(2, &[40, 20]), random(3, &[40]), random(4, &[33, 40])];
        let plain = |t: &[Tensor]| plain(t)? + &t[3];
        check("linear_add", &inputs, plain, |t, dy| {
            let y = linear_add(&t[0], &t[1], Some(&t[2]), &t[3])?;
            let (dw, db) = (gradient_buffer(&[40, 20]), gradient_buffer(&[40]));
            linear_backward_weight(&t[0], dy, &dw)?;
            bias_backward(dy, &db)?;
            let dx = Tensor::ones((33, 20), dy.dtype(), &device())?;
            let dx = (linear_backward_input_add(dy, &t[1], dx)? - 1.0)?;
            Ok((y, vec![dx, added(&dw), added(&db), dy.clone()]))
        });
    }

    #[test]
    fn a_weight_with_more_than_two_dims_is_read_as_a_matrix() {
        let (x, w) = (random(1, &[5, 12]), random(2, &[7, 3, 2, 2]));
        let y = linear(&x, &w, None).unwrap();
        let flat = linear(&x, &w.reshape((7, 12)).unwrap(), None).unwrap();
        assert_eq!(y.to_vec2::<f32>().unwrap(), flat.to_vec2::<f32>().unwrap());
        let dw = Tensor::zeros((7, 3, 2, 2), DType::F32, &device()).unwrap();
        linear_backward_weight(&x, &y, &dw).unwrap();
        assert!(dw.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap() > 0.0);
    }

    #[test]
    fn errors_name_the_operand_with_the_wrong_shape() {
        let (x, w) = (random(1, &[5, 12]), random(2, &[7, 11]));
        let error = message(linear(&x, &w, None));
        assert!(error.contains("found 12 inputs, expected 11"), "{error}");
        let error = message(linear(&x.t().unwrap(), &random(2, &[7, 5]), None));
        assert!(error.contains("`x`") && error.contains("contiguous"), "{error}");
        let error = message(bias_backward(&x, &x));
        assert!(error.contains("`db`"), "{error}");
        let square = random(1, &[12, 12]);
        let error = message(linear_backward_weight(&square, &square, &square));
        assert!(error.contains("shares memory"), "{error}");
        let dw = square.to_dtype(DType::BF16).unwrap();
        let error = message(linear_backward_weight(&square, &square, &dw));
        assert!(error.contains("`dw` is BF16, expected F32"), "{error}");
    }
}
