//! Layer norm over the last axis, with bias: `y = w * (x - mean) * rstd + b`.
//!
//! Shapes: `x`, `y`, `dy`, `dx`: `[N, D]`; `w`, `b`: `[D]`; `stats: [N, 2]` (`f32`) holds `mean`
//! and `rstd` of each row. Arithmetic is in `f32`.

use super::column_shares::ColumnShares;
use super::cpu::blocks::{filled, span};
use super::cpu::column_sums::{add_by_columns, add_rows};
use super::cpu::simd::{dot, dot3, kernels, sum, sum_of_squared_differences};
use super::cpu::{self, Operand, ROWS, compute_dtype, expect_f32, expect_shape, read};
use super::launch::{empty, launch, on_gpu};
use super::norm_geometry::{Geometry, Pass};
use candle_core::{DType, Result, Tensor};

kernels! {
    fn stats_row(x: &[f32], eps: f32) -> [f32; 2] {
        let n = x.len() as f32;
        let mean = sum(x) / n;
        let variance = sum_of_squared_differences(x, mean) / n;
        [mean, 1.0 / (variance + eps).sqrt()]
    }

    fn apply_row(x: &[f32], mean: f32, rstd: f32, w: &[f32], b: &[f32], y: &mut [f32]) {
        let n = y.len();
        let (x, w, b) = (&x[..n], &w[..n], &b[..n]);
        for i in 0..n {
            y[i] = ((x[i] - mean) * rstd).mul_add(w[i], b[i]);
        }
    }

    fn input_grad_row(x: &[f32], mean: f32, rstd: f32, w: &[f32], dy: &[f32], dx: &mut [f32]) {
        let n = dx.len();
        let (x, w, dy) = (&x[..n], &w[..n], &dy[..n]);
        // With g = w * dy and h the normalized row: dx = rstd * (g - mean(g) - h * mean(g * h)).
        let g_mean = dot(dy, w) / n as f32;
        let gh_mean = (dot3(dy, w, x) / n as f32 - mean * g_mean) * rstd;
        for i in 0..n {
            let h = (x[i] - mean) * rstd;
            dx[i] += rstd * (dy[i] * w[i] - g_mean - h * gh_mean);
        }
    }

    fn weight_grad_row(x: &[f32], mean: f32, rstd: f32, dy: &[f32], dw: &mut [f32]) {
        let n = dw.len();
        let (x, dy) = (&x[..n], &dy[..n]);
        for i in 0..n {
            dw[i] = ((x[i] - mean) * rstd).mul_add(dy[i], dw[i]);
        }
    }
}

/// Returns the normalized rows `[N, D]` and `stats [N, 2]`, which the backward needs.
pub fn layer_norm(x: &Tensor, w: &Tensor, b: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let op = "layer_norm";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w), ("b", b)])?;
    expect_shape(op, "w", w, &[d])?;
    expect_shape(op, "b", b, &[d])?;
    if on_gpu(x) {
        let (y, stats) = (empty((n, d), dtype, x)?, empty((n, 2), DType::F32, x)?);
        let geometry = Geometry::of_any_width(Pass::Forward, n, d, &[x, w, b, &y])?;
        let launch = geometry.launch(op, dtype);
        launch!(op, launch; x, w, b, y, stats, n, d, geometry.warps(), eps as f32)?;
        return Ok((y, stats));
    }
    let (x, w, b) = (read(op, "x", x)?, read(op, "w", w)?, read(op, "b", b)?);
    let (x, w, b) = (x.values()?, w.f32()?, b.f32()?);
    let [y, stats] = filled(n, ROWS, [(d, dtype), (2, DType::F32)], |rows, [y, stats]| {
        let x = x.view(span(&rows, d));
        for ((y, x), stats) in y.chunks_mut(d).zip(x.chunks(d)).zip(stats.chunks_mut(2)) {
            stats.copy_from_slice(&stats_row(x, eps as f32));
            apply_row(x, stats[0], stats[1], &w, &b, y);
        }
    });
    Ok((y.tensor((n, d))?, stats.tensor((n, 2))?))
}

/// Recomputes the normalized rows `[N, D]` of [`layer_norm`] from its `stats`.
pub fn layer_norm_apply(x: &Tensor, stats: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    let op = "layer_norm";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w), ("b", b)])?;
    expect_shape(op, "w", w, &[d])?;
    expect_shape(op, "b", b, &[d])?;
    expect_f32(op, "stats", stats, &[n, 2])?;
    if on_gpu(x) {
        let y = empty((n, d), dtype, x)?;
        let geometry = Geometry::of_any_width(Pass::Forward, n, d, &[x, w, b, &y])?;
        let launch = geometry.launch("layer_norm_apply", dtype);
        launch!(op, launch; x, stats, w, b, y, n, d, geometry.warps())?;
        return Ok(y);
    }
    let (x, stats) = (read(op, "x", x)?, read(op, "stats", stats)?);
    let (w, b) = (read(op, "w", w)?, read(op, "b", b)?);
    let (x, stats, w, b) = (x.values()?, stats.slice::<f32>()?, w.f32()?, b.f32()?);
    let [y] = filled(n, ROWS, [(d, dtype)], |rows, [y]| {
        let x = x.view(span(&rows, d));
        for ((i, y), x) in rows.zip(y.chunks_mut(d)).zip(x.chunks(d)) {
            apply_row(x, stats[2 * i], stats[2 * i + 1], &w, &b, y);
        }
    });
    y.tensor((n, d))
}

/// Returns `dx [N, D]`, with `residual [N, D]` added if given. Adds the weight gradient to `dw [D]`
/// and the bias gradient to `db [D]` (both `f32`) unless they are `None`.
pub fn layer_norm_backward(
    x: &Tensor,
    stats: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dw: Option<&Tensor>,
    db: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "layer_norm_backward";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w), ("dy", dy)])?;
    expect_shape(op, "w", w, &[d])?;
    expect_shape(op, "dy", dy, &[n, d])?;
    expect_f32(op, "stats", stats, &[n, 2])?;
    if let Some(residual) = residual {
        compute_dtype(op, &[("x", x), ("residual", residual)])?;
        expect_shape(op, "residual", residual, &[n, d])?;
    }
    for (name, sums) in [("dw", dw), ("db", db)] {
        let Some(sums) = sums else { continue };
        expect_f32(op, name, sums, &[d])?;
        let residual = residual.unwrap_or(x);
        let sources = [("x", x), ("stats", stats), ("w", w), ("dy", dy), ("residual", residual)];
        cpu::distinct(op, name, sums, &sources)?;
    }
    if on_gpu(x) {
        let dx = empty((n, d), dtype, x)?;
        let mut rows = vec![x, w, dy, &dx];
        rows.extend(residual);
        let geometry = Geometry::of_any_width(Pass::Backward { resident: 768 }, n, d, &rows)?;
        let shares = |sums| ColumnShares::new(sums, geometry.shares(), d);
        let (dw, db) = (shares(dw)?, shares(db)?);
        let (launch, warps) = (geometry.launch(op, dtype), geometry.warps());
        launch!(op, launch; x, stats, w, dy, residual, dx, dw, db, n, d, warps)?;
        dw.add(op)?;
        db.add(op)?;
        return Ok(dx);
    }
    let residual = residual.map(|residual| read(op, "residual", residual)).transpose()?;
    let residual = residual.as_ref().map(Operand::values).transpose()?;
    let (x, stats) = (read(op, "x", x)?, read(op, "stats", stats)?);
    let (w, dy) = (read(op, "w", w)?, read(op, "dy", dy)?);
    let (x, stats, w, dy) = (x.values()?, stats.slice::<f32>()?, w.f32()?, dy.values()?);
    let [dx] = filled(n, ROWS, [(d, dtype)], |rows, [dx]| {
        if let Some(residual) = residual {
            dx.copy_from_slice(&residual.view(span(&rows, d)));
        }
        let (x, dy) = (x.view(span(&rows, d)), dy.view(span(&rows, d)));
        let stats = stats[span(&rows, 2)].chunks(2);
        let each = x.chunks(d).zip(dy.chunks(d)).zip(stats);
        for (dx, ((x, dy), stats)) in dx.chunks_mut(d).zip(each) {
            input_grad_row(x, stats[0], stats[1], &w, dy, dx);
        }
    });
    add_by_columns(op, "dw", dw, n, |row, at, dw| {
        let stats = &stats[2 * row..2 * row + 2];
        weight_grad_row(&x.view(at.clone()), stats[0], stats[1], &dy.view(at), dw);
    })?;
    add_rows(op, "db", db, dy)?;
    dx.tensor((n, d))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{added, check, gradient_buffer, random};
    use super::*;
    use candle_core::D;

    fn plain(t: &[Tensor]) -> Result<Tensor> {
        let centred = t[0].broadcast_sub(&t[0].mean_keepdim(D::Minus1)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
        centred.broadcast_div(&deviation)?.broadcast_mul(&t[1])?.broadcast_add(&t[2])
    }

    #[test]
    fn the_norm_and_its_gradients_match_the_reference() {
        // the last two are wider than the registers of a block hold
        let sizes =
            [(1, 5), (1, 64), (31, 63), (32, 65), (33, 128), (70, 200), (3, 8194), (140, 12800)];
        for (n, d) in sizes {
            let inputs = [random(1, &[n, d]), random(2, &[d]), random(3, &[d])];
            check(&format!("layer_norm {n} {d}"), &inputs, plain, |t, dy| {
                let (y, stats) = layer_norm(&t[0], &t[1], &t[2], 1e-6)?;
                let (dw, db) = (gradient_buffer(&[d]), gradient_buffer(&[d]));
                let dx = layer_norm_backward(&t[0], &stats, &t[1], dy, None, Some(&dw), Some(&db))?;
                Ok((y, vec![dx, added(&dw), added(&db)]))
            });
        }
    }

    #[test]
    fn the_residual_gradient_is_added_and_frozen_weights_need_no_buffer() {
        let inputs = [random(1, &[40, 96])];
        let (w, b) = (random(2, &[96]), random(3, &[96]));
        let both = |t: &[Tensor]| {
            let t = [t[0].clone(), w.to_dtype(t[0].dtype())?, b.to_dtype(t[0].dtype())?];
            plain(&t)? + &t[0]
        };
        check("layer_norm with residual", &inputs, both, |t, dy| {
            let (w, b) = (w.to_dtype(dy.dtype())?, b.to_dtype(dy.dtype())?);
            let (y, stats) = layer_norm(&t[0], &w, &b, 1e-6)?;
            let dx = layer_norm_backward(&t[0], &stats, &w, dy, Some(dy), None, None)?;
            Ok(((y + &t[0])?, vec![dx]))
        });
    }

    #[test]
    fn the_variance_is_accurate_when_the_mean_is_large() {
        let x = (random(1, &[4, 256]) + 1000.0).unwrap();
        let (one, zero) = (x.ones_like().unwrap(), x.zeros_like().unwrap());
        let (w, b) = (one.get(0).unwrap(), zero.get(0).unwrap().contiguous().unwrap());
        let (y, _) = layer_norm(&x, &w, &b, 1e-6).unwrap();
        let squares = y.sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
        assert!((squares - 1.0).abs() < 1e-3, "{squares}");
    }
}
