//! Root-mean-square norm over the last axis, with an output gate:
//! `y = w * (x * rstd) * silu(z)` with `rstd = 1 / sqrt(mean(x^2) + eps)`.
//!
//! Shapes: `x`, `z`, `y` and their gradients: `[N, D]`; `w: [D]`; `rstd: [N]` (`f32`). Arithmetic
//! is in `f32`; with `bf16` operands `x * rstd` is rounded to `bf16` before it is multiplied by
//! `w`, as in transformers.

use super::column_shares::ColumnShares;
use super::cpu::blocks::{Scratch, Values, filled, span};
use super::cpu::simd::{kernels, sigmoid};
use super::cpu::{self, ROWS, compute_dtype, expect_f32, expect_shape, read};
use super::launch::{empty, launch, on_gpu};
use super::norm_geometry::{Geometry, Pass};
use super::rms_norm::{NormScale, add_input_grad, add_weight_grad, norm_row, row_rstd};
use candle_core::{DType, Result, Tensor};

kernels! {
    fn gate_row(z: &[f32], y: &mut [f32]) {
        for (y, z) in y.iter_mut().zip(z) {
            *y *= z * sigmoid(*z);
        }
    }

    // Writes the gradient of the gate to `dz`, which holds the norm, and the gradient of the norm
    // to `dn`.
    fn gate_grad_row(z: &[f32], dy: &[f32], dn: &mut [f32], dz: &mut [f32]) {
        let n = dz.len();
        let (z, dy, dn) = (&z[..n], &dy[..n], &mut dn[..n]);
        for i in 0..n {
            let s = sigmoid(z[i]);
            let silu = z[i] * s;
            dn[i] = dy[i] * silu;
            dz[i] *= dy[i] * (s + silu * (1.0 - s));
        }
    }
}

/// Returns the gated rows `[N, D]` and `rstd [N]`, which the backward needs.
pub fn gated_rms_norm(x: &Tensor, z: &Tensor, w: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let op = "gated_rms_norm";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("z", z), ("w", w)])?;
    expect_shape(op, "z", z, &[n, d])?;
    expect_shape(op, "w", w, &[d])?;
    if on_gpu(x) {
        let (y, rstd) = (empty((n, d), dtype, x)?, empty(n, DType::F32, x)?);
        let geometry = Geometry::new(op, Pass::Forward, n, d, &[x, z, w, &y])?;
        let launch = geometry.launch(op, dtype);
        launch!(op, launch; x, z, w, y, rstd, n, d, geometry.warps(), eps as f32)?;
        return Ok((y, rstd));
    }
    let rounding = NormScale::Weight.rounding(dtype);
    let (x, z, w) = (read(op, "x", x)?, read(op, "z", z)?, read(op, "w", w)?);
    let (x, z, w) = (x.values()?, z.values()?, w.f32()?);
    let [y, rstd] = filled(n, ROWS, [(d, dtype), (1, DType::F32)], |rows, [y, rstd]| {
        let (x, z) = (x.view(span(&rows, d)), z.view(span(&rows, d)));
        let each = x.chunks(d).zip(z.chunks(d)).zip(rstd);
        for (y, ((x, z), rstd)) in y.chunks_mut(d).zip(each) {
            *rstd = row_rstd(x, eps as f32);
            norm_row(x, *rstd, &w, rounding, y);
            gate_row(z, y);
        }
    });
    Ok((y.tensor((n, d))?, rstd.tensor(n)?))
}

/// Returns `dx` and `dz`, both `[N, D]`. Adds the weight gradient to `dw [D]` (`f32`) unless it is
/// `None`.
pub fn gated_rms_norm_backward(
    x: &Tensor,
    z: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    dw: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let op = "gated_rms_norm_backward";
    let (n, d) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("z", z), ("w", w), ("dy", dy)])?;
    expect_shape(op, "z", z, &[n, d])?;
    expect_shape(op, "w", w, &[d])?;
    expect_shape(op, "dy", dy, &[n, d])?;
    expect_f32(op, "rstd", rstd, &[n])?;
    if let Some(dw) = dw {
        expect_f32(op, "dw", dw, &[d])?;
        let sources = [("x", x), ("z", z), ("rstd", rstd), ("w", w), ("dy", dy)];
        cpu::distinct(op, "dw", dw, &sources)?;
    }
    if on_gpu(x) {
        let (dx, dz) = (empty((n, d), dtype, x)?, empty((n, d), dtype, x)?);
        let rows = [x, z, w, dy, &dx, &dz];
        let geometry = Geometry::new(op, Pass::Backward { resident: 768 }, n, d, &rows)?;
        let shares = ColumnShares::new(dw, geometry.shares(), d)?;
        let (launch, warps) = (geometry.launch(op, dtype), geometry.warps());
        launch!(op, launch; x, z, rstd, w, dy, dx, dz, shares, n, d, warps)?;
        shares.add(op)?;
        return Ok((dx, dz));
    }
    let rounding = NormScale::Weight.rounding(dtype);
    let (x, z, w) = (read(op, "x", x)?, read(op, "z", z)?, read(op, "w", w)?);
    let (rstd, dy) = (read(op, "rstd", rstd)?, read(op, "dy", dy)?);
    let (x, z, w, dy) = (x.values()?, z.values()?, w.f32()?, dy.values()?);
    let rstd = rstd.slice::<f32>()?;
    // `dn` is the gradient of the normalized rows. Only the weight gradient needs all of it.
    let outputs = [(d, dtype), (d, dtype), (dw.map_or(0, |_| d), DType::F32)];
    let [dx, dz, dn] = filled(n, ROWS, outputs, |rows, [dx, dz, dn]| {
        let mut scratch = dn.is_empty().then(|| Scratch::of(dx.len()));
        let dn = scratch.as_mut().map_or(dn, Scratch::all);
        let at = span(&rows, d);
        let (x, z, dy) = (x.view(at.clone()), z.view(at.clone()), dy.view(at.clone()));
        let grads = dx.chunks_mut(d).zip(dz.chunks_mut(d)).zip(dn.chunks_mut(d));
        let operands = x.chunks(d).zip(z.chunks(d)).zip(dy.chunks(d)).zip(&rstd[rows]);
        for (((dx, dz), dn), (((x, z), dy), rstd)) in grads.zip(operands) {
            norm_row(x, *rstd, &w, rounding, dz);
            gate_grad_row(z, dy, dn, dz);
            add_input_grad(x, *rstd, &w, dn, dx);
        }
    });
    add_weight_grad(op, x, rstd, Values::from(&dn.into_f32()), dw)?;
    Ok((dx.tensor((n, d))?, dz.tensor((n, d))?))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{added, check, gradient_buffer, random};
    use super::*;
    use candle_core::D;

    fn plain(t: &[Tensor]) -> Result<Tensor> {
        let rms = (t[0].sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
        let silu = (&t[1] * ((t[1].neg()?.exp()? + 1.0)?).recip()?)?;
        t[0].broadcast_div(&rms)?.broadcast_mul(&t[2])? * silu
    }

    #[test]
    fn the_gated_norm_and_its_gradients_match_the_reference() {
        for (n, d) in [(1, 3), (1, 64), (31, 63), (33, 128), (70, 200)] {
            let inputs = [random(1, &[n, d]), random(2, &[n, d]), random(3, &[d])];
            check(&format!("gated_rms_norm {n} {d}"), &inputs, plain, |t, dy| {
                let (y, rstd) = gated_rms_norm(&t[0], &t[1], &t[2], 1e-6)?;
                let dw = gradient_buffer(&[d]);
                let (dx, dz) = gated_rms_norm_backward(&t[0], &t[1], &rstd, &t[2], dy, Some(&dw))?;
                Ok((y, vec![dx, dz, added(&dw)]))
            });
        }
    }
}
