//! Root-mean-square norm over the last axis: `y = w * (x * rstd)` or `y = (1 + w) * (x * rstd)`
//! ([`NormScale`]) with `rstd = 1 / sqrt(mean(x^2) + eps)`.
//!
//! Shapes: `x`, `y`, `dy`, `dx`: `[N, D]`; `w: [D]`; `rstd: [N]` (`f32`). Arithmetic is in `f32`;
//! with `bf16` operands `x * rstd` is rounded to `bf16` before it is multiplied by `w`, but not
//! before it is multiplied by `1 + w`, as in transformers.

use super::column_shares::ColumnShares;
use super::cpu::blocks::{Values, filled, span};
use super::cpu::column_sums::add_by_columns;
use super::cpu::simd::{dot, dot3, kernels, round_to_bf16};
use super::cpu::{self, Operand, ROWS, compute_dtype, expect_f32, expect_shape, read};
use super::launch::{empty, launch, on_gpu};
use super::norm_geometry::{Geometry, Pass};
use candle_core::{DType, Result, Tensor};
use std::borrow::Cow;

/// The factor that a norm multiplies by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormScale {
    /// The weight, as in Qwen3.
    Weight,
    /// 1 + the weight, as in Qwen3.5.
    OnePlusWeight,
}

impl NormScale {
    /// The factors, from the weights.
    pub(super) fn factors(self, w: Cow<'_, [f32]>) -> Cow<'_, [f32]> {
        match self {
            Self::Weight => w,
            Self::OnePlusWeight => Cow::Owned(w.iter().map(|w| 1.0 + w).collect()),
        }
    }

    /// What the CUDA kernels add to each weight.
    pub(super) fn added(self) -> usize {
        usize::from(self == Self::OnePlusWeight)
    }

    /// Rounding for a compute dtype.
    pub(super) fn rounding(self, dtype: DType) -> Rounding {
        let rounds = dtype == DType::BF16 && self == Self::Weight;
        if rounds { Rounding::Bf16 } else { Rounding::None }
    }
}

/// Rounding of `x * rstd` before the multiplication by the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounding {
    None,
    /// Rounding to `bf16`.
    Bf16,
}

kernels! {
    fn rstd_row(x: &[f32], eps: f32) -> f32 {
        1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
    }

    fn apply_row(x: &[f32], rstd: f32, w: &[f32], rounding: Rounding, y: &mut [f32]) {
        let n = y.len();
        let (x, w) = (&x[..n], &w[..n]);
        if rounding == Rounding::Bf16 {
            for i in 0..n {
                y[i] = w[i] * round_to_bf16(x[i] * rstd);
            }
        } else {
            for i in 0..n {
                y[i] = w[i] * (x[i] * rstd);
            }
        }
    }

    fn input_grad_row(x: &[f32], rstd: f32, w: &[f32], dy: &[f32], dx: &mut [f32]) {
        let n = dx.len();
        let (x, w, dy) = (&x[..n], &w[..n], &dy[..n]);
        let c = dot3(dy, w, x) * rstd * rstd * rstd / n as f32;
        for i in 0..n {
            dx[i] += (dy[i] * w[i]).mul_add(rstd, -x[i] * c);
        }
    }

    fn weight_grad_row(x: &[f32], rstd: f32, dy: &[f32], dw: &mut [f32]) {
        let n = dw.len();
        let (x, dy) = (&x[..n], &dy[..n]);
        for i in 0..n {
            dw[i] = (dy[i] * x[i]).mul_add(rstd, dw[i]);
        }
    }
}

/// Returns `1 / sqrt(mean(x^2) + eps)`.
pub(super) fn row_rstd(x: &[f32], eps: f32) -> f32 {
    rstd_row(x, eps)
}

/// Computes `y = w * (x * rstd)` for one row.
pub(super) fn norm_row(x: &[f32], rstd: f32, w: &[f32], rounding: Rounding, y: &mut [f32]) {
    apply_row(x, rstd, w, rounding, y);
}

/// Adds the input gradient of one row to `dx`.
pub(super) fn add_input_grad(x: &[f32], rstd: f32, w: &[f32], dy: &[f32], dx: &mut [f32]) {
    input_grad_row(x, rstd, w, dy, dx);
}

/// Adds the weight gradient of the rows `x` and `dy`, both `[N, D]`, to `dw [D]` unless that is
/// `None`.
pub(super) fn add_weight_grad(
    op: &'static str,
    x: Values<'_>,
    rstd: &[f32],
    dy: Values<'_>,
    dw: Option<&Tensor>,
) -> Result<()> {
    add_by_columns(op, "dw", dw, rstd.len(), |row, at, dw| {
        weight_grad_row(&x.view(at.clone()), rstd[row], &dy.view(at), dw);
    })
}

/// Returns the normalized rows `[N, D]` and `rstd [N]`, which the backward needs.
pub fn rms_norm(x: &Tensor, w: &Tensor, scale: NormScale, eps: f64) -> Result<(Tensor, Tensor)> {
    let op = "rms_norm";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w)])?;
    expect_shape(op, "w", w, &[d])?;
    if on_gpu(x) {
        let (y, rstd) = (empty((n, d), dtype, x)?, empty(n, DType::F32, x)?);
        let geometry = Geometry::new(op, Pass::Forward, n, d, &[x, w, &y])?;
        let (warps, eps) = (geometry.warps(), eps as f32);
        launch!(op, geometry.launch(op, dtype); x, w, y, rstd, n, d, warps, scale.added(), eps)?;
        return Ok((y, rstd));
    }
    let rounding = scale.rounding(dtype);
    let (x, w) = (read(op, "x", x)?, read(op, "w", w)?);
    let (x, w) = (x.values()?, scale.factors(w.f32()?));
    let [y, rstd] = filled(n, ROWS, [(d, dtype), (1, DType::F32)], |rows, [y, rstd]| {
        let x = x.view(span(&rows, d));
        for ((y, x), rstd) in y.chunks_mut(d).zip(x.chunks(d)).zip(rstd) {
            *rstd = rstd_row(x, eps as f32);
            apply_row(x, *rstd, &w, rounding, y);
        }
    });
    Ok((y.tensor((n, d))?, rstd.tensor(n)?))
}

/// Recomputes the normalized rows `[N, D]` of [`rms_norm`] from its `rstd`.
pub fn rms_norm_apply(x: &Tensor, rstd: &Tensor, w: &Tensor, scale: NormScale) -> Result<Tensor> {
    let op = "rms_norm";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w)])?;
    expect_shape(op, "w", w, &[d])?;
    expect_f32(op, "rstd", rstd, &[n])?;
    if on_gpu(x) {
        let y = empty((n, d), dtype, x)?;
        let geometry = Geometry::new(op, Pass::Forward, n, d, &[x, w, &y])?;
        let launch = geometry.launch("rms_norm_apply", dtype);
        launch!(op, launch; x, rstd, w, y, n, d, geometry.warps(), scale.added())?;
        return Ok(y);
    }
    let rounding = scale.rounding(dtype);
    let (x, w, rstd) = (read(op, "x", x)?, read(op, "w", w)?, read(op, "rstd", rstd)?);
    let (x, w, rstd) = (x.values()?, scale.factors(w.f32()?), rstd.slice::<f32>()?);
    let [y] = filled(n, ROWS, [(d, dtype)], |rows, [y]| {
        let x = x.view(span(&rows, d));
        for ((y, x), rstd) in y.chunks_mut(d).zip(x.chunks(d)).zip(&rstd[rows]) {
            apply_row(x, *rstd, &w, rounding, y);
        }
    });
    y.tensor((n, d))
}

/// Returns `dx [N, D]`, with `residual [N, D]` added if given. Adds the weight gradient to `dw [D]`
/// (`f32`) unless it is `None`.
pub fn rms_norm_backward(
    x: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    scale: NormScale,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "rms_norm_backward";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w), ("dy", dy)])?;
    expect_shape(op, "w", w, &[d])?;
    expect_shape(op, "dy", dy, &[n, d])?;
    expect_f32(op, "rstd", rstd, &[n])?;
    if let Some(residual) = residual {
        compute_dtype(op, &[("x", x), ("residual", residual)])?;
        expect_shape(op, "residual", residual, &[n, d])?;
    }
    if let Some(dw) = dw {
        expect_f32(op, "dw", dw, &[d])?;
        let residual = residual.unwrap_or(x);
        let sources = [("x", x), ("rstd", rstd), ("w", w), ("dy", dy), ("residual", residual)];
        cpu::distinct(op, "dw", dw, &sources)?;
    }
    if on_gpu(x) {
        let dx = empty((n, d), dtype, x)?;
        let mut rows = vec![x, w, dy, &dx];
        rows.extend(residual);
        let geometry = Geometry::new(op, Pass::Backward { resident: 1024 }, n, d, &rows)?;
        let shares = ColumnShares::new(dw, geometry.shares(), d)?;
        let (launch, warps) = (geometry.launch(op, dtype), geometry.warps());
        launch!(op, launch; x, rstd, w, dy, residual, dx, shares, n, d, warps, scale.added())?;
        shares.add(op)?;
        return Ok(dx);
    }
    let residual = residual.map(|residual| read(op, "residual", residual)).transpose()?;
    let residual = residual.as_ref().map(Operand::values).transpose()?;
    let (x, w, rstd) = (read(op, "x", x)?, read(op, "w", w)?, read(op, "rstd", rstd)?);
    let (x, w, rstd) = (x.values()?, scale.factors(w.f32()?), rstd.slice::<f32>()?);
    let dy = read(op, "dy", dy)?;
    let dy = dy.values()?;
    let [dx] = filled(n, ROWS, [(d, dtype)], |rows, [dx]| {
        if let Some(residual) = residual {
            dx.copy_from_slice(&residual.view(span(&rows, d)));
        }
        let (x, dy) = (x.view(span(&rows, d)), dy.view(span(&rows, d)));
        let each = x.chunks(d).zip(dy.chunks(d)).zip(&rstd[rows]);
        for (dx, ((x, dy), rstd)) in dx.chunks_mut(d).zip(each) {
            input_grad_row(x, *rstd, &w, dy, dx);
        }
    });
    add_weight_grad(op, x, rstd, dy, dw)?;
    dx.tensor((n, d))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Tolerance, added, assert_close, check, gradient_buffer, random};
    use super::*;
    use candle_core::D;

    fn plain(x: &Tensor, w: &Tensor) -> Result<Tensor> {
        let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
        x.broadcast_div(&rms)?.broadcast_mul(w)
    }

    #[test]
    fn the_norm_and_its_gradients_match_the_reference() {
        for (n, d) in [(1, 3), (1, 64), (31, 63), (32, 65), (33, 128), (70, 200)] {
            let inputs = [random(1, &[n, d]), random(2, &[d])];
            check(
                &format!("rms_norm {n} {d}"),
                &inputs,
                |t| plain(&t[0], &t[1]),
                |t, dy| {
                    let (y, rstd) = rms_norm(&t[0], &t[1], NormScale::Weight, 1e-6)?;
                    let dw = gradient_buffer(&[d]);
                    let dx = rms_norm_backward(
                        &t[0],
                        &rstd,
                        &t[1],
                        NormScale::Weight,
                        dy,
                        None,
                        Some(&dw),
                    )?;
                    Ok((y, vec![dx, added(&dw)]))
                },
            );
        }
    }

    #[test]
    fn a_norm_of_one_plus_the_weight_and_its_gradients_match_the_reference() {
        let inputs = [random(1, &[31, 65]), random(2, &[65])];
        let scale = NormScale::OnePlusWeight;
        check(
            "rms_norm of 1 + w",
            &inputs,
            |t| plain(&t[0], &(&t[1] + 1.0)?),
            |t, dy| {
                let (y, rstd) = rms_norm(&t[0], &t[1], scale, 1e-6)?;
                let dw = gradient_buffer(&[65]);
                let dx = rms_norm_backward(&t[0], &rstd, &t[1], scale, dy, None, Some(&dw))?;
                Ok((y, vec![dx, added(&dw)]))
            },
        );
    }

    #[test]
    fn in_bf16_a_factor_of_one_plus_the_weight_is_applied_without_rounding_before() {
        let (x, w) = (random(1, &[9, 77]), random(2, &[77]));
        let (x, w) = (x.to_dtype(DType::BF16).unwrap(), w.to_dtype(DType::BF16).unwrap());
        let wide = w.to_dtype(DType::F64).unwrap();
        let want = plain(&x.to_dtype(DType::F64).unwrap(), &(wide + 1.0).unwrap()).unwrap();
        let want = want.to_dtype(DType::BF16).unwrap();
        let got = rms_norm(&x, &w, NormScale::OnePlusWeight, 1e-6).unwrap().0;
        let differing = (got.ne(&want).unwrap().to_dtype(DType::F32).unwrap()).sum_all().unwrap();
        assert!(differing.to_scalar::<f32>().unwrap() <= 3.0, "{differing}");
    }

    #[test]
    fn the_residual_gradient_is_added() {
        let inputs = [random(1, &[40, 96]), random(2, &[96])];
        let residual = |t: &[Tensor]| Tensor::cat(&[&plain(&t[0], &t[1])?, &t[0]], 0);
        check("rms_norm with residual", &inputs, residual, |t, dy| {
            let (y, rstd) = rms_norm(&t[0], &t[1], NormScale::Weight, 1e-6)?;
            let dw = gradient_buffer(&[96]);
            let (dy, after) = (dy.narrow(0, 0, 40)?, dy.narrow(0, 40, 40)?);
            let dx = rms_norm_backward(
                &t[0],
                &rstd,
                &t[1],
                NormScale::Weight,
                &dy,
                Some(&after),
                Some(&dw),
            )?;
            Ok((Tensor::cat(&[&y, &t[0]], 0)?, vec![dx, added(&dw)]))
        });
    }

    #[test]
    fn applying_a_known_rstd_gives_the_same_rows() {
        let (x, w) = (random(1, &[9, 77]), random(2, &[77]));
        let (y, rstd) = rms_norm(&x, &w, NormScale::Weight, 1e-6).unwrap();
        let again = rms_norm_apply(&x, &rstd, &w, NormScale::Weight).unwrap();
        assert_eq!(y.to_vec2::<f32>().unwrap(), again.to_vec2::<f32>().unwrap());
    }

    #[test]
    fn in_bf16_the_normalized_value_is_rounded_before_the_weight_is_applied() {
        let (x, w) = (random(1, &[9, 77]), random(2, &[77]));
        let (x, w) = (x.to_dtype(DType::BF16).unwrap(), w.to_dtype(DType::BF16).unwrap());
        let wide = x.to_dtype(DType::F64).unwrap();
        let ones = Tensor::ones(77, DType::F64, x.device()).unwrap();
        let h = plain(&wide, &ones).unwrap().to_dtype(DType::BF16).unwrap();
        let want = h.broadcast_mul(&w).unwrap();
        let got = rms_norm(&x, &w, NormScale::Weight, 1e-6).unwrap().0;
        let differing = (got.ne(&want).unwrap().to_dtype(DType::F32).unwrap()).sum_all().unwrap();
        // Ties may round differently in f32 and f64. Without the rounding, a fifth of the elements
        // differs.
        assert!(differing.to_scalar::<f32>().unwrap() <= 3.0, "{differing}");
        assert_close("rms_norm", &got, &want, Tolerance::BF16);
    }
}
