//! Layer scale of a residual branch: `y = x + scale * f`, one factor per column.
//!
//! Shapes: `f`, `x`, `y`, `dy` and `df` are `[N, D]`, `scale` is `[D]`.

use super::column_shares::sum_columns_on_gpu;
use super::cpu::blocks::{filled, span};
use super::cpu::column_sums::add_by_columns;
use super::cpu::simd::kernels;
use super::cpu::{self, Operand, ROWS, compute_dtype, expect_f32, expect_shape, read};
use super::launch::{Launch, empty, launch, on_gpu};
use candle_core::{Result, Tensor};

kernels! {
    /// Adds to `y`, which has `x` or zeros.
    fn add_scaled_row(f: &[f32], scale: &[f32], y: &mut [f32]) {
        let n = y.len();
        let (f, scale) = (&f[..n], &scale[..n]);
        for i in 0..n {
            y[i] = scale[i].mul_add(f[i], y[i]);
        }
    }

    fn add_products(f: &[f32], dy: &[f32], sums: &mut [f32]) {
        let n = sums.len();
        let (f, dy) = (&f[..n], &dy[..n]);
        for i in 0..n {
            sums[i] = f[i].mul_add(dy[i], sums[i]);
        }
    }
}

/// Returns `x + scale * f`, `[N, D]`.
pub fn layer_scale_add(f: &Tensor, scale: &Tensor, x: &Tensor) -> Result<Tensor> {
    scaled("layer_scale_add", ("f", f), scale, Some(x))
}

/// Returns `df = scale * dy`, `[N, D]`. Adds the column sums of `f * dy` to `d_scale [D]` (`f32`), if
/// `f` and `d_scale` are given.
pub fn layer_scale_backward(
    scale: &Tensor,
    dy: &Tensor,
    f_and_d_scale: Option<(&Tensor, &Tensor)>,
) -> Result<Tensor> {
    let op = "layer_scale_backward";
    if let Some((f, d_scale)) = f_and_d_scale {
        let (n, d) = dy.dims2()?;
        compute_dtype(op, &[("f", f), ("dy", dy)])?;
        expect_shape(op, "f", f, &[n, d])?;
        expect_f32(op, "d_scale", d_scale, &[d])?;
        cpu::distinct(op, "d_scale", d_scale, &[("f", f), ("dy", dy), ("scale", scale)])?;
        if on_gpu(dy) {
            sum_columns_on_gpu(op, dy, Some(f), d_scale)?;
        } else {
            let (f, dy) = (read(op, "f", f)?, read(op, "dy", dy)?);
            let (f, dy) = (f.values()?, dy.values()?);
            add_by_columns(op, "d_scale", Some(d_scale), n, |_, at, sums| {
                add_products(&f.view(at.clone()), &dy.view(at), sums);
            })?;
        }
    }
    scaled(op, ("dy", dy), scale, None)
}

/// `x + scale * f`, or without `x`; `name` is that of `f` in errors.
fn scaled(
    op: &'static str,
    (name, f): (&'static str, &Tensor),
    scale: &Tensor,
    x: Option<&Tensor>,
) -> Result<Tensor> {
    let (n, d) = f.dims2()?;
    let dtype = compute_dtype(op, &[(name, f), ("scale", scale)])?;
    expect_shape(op, "scale", scale, &[d])?;
    if let Some(x) = x {
        compute_dtype(op, &[(name, f), ("x", x)])?;
        expect_shape(op, "x", x, &[n, d])?;
    }
    if on_gpu(f) {
        let y = empty((n, d), dtype, f)?;
        let mut rows = vec![f, scale, &y];
        rows.extend(x);
        let launch = Launch::for_rows("layer_scale", (n, d), &rows)?;
        launch!(op, launch; f, scale, x, y, n, d)?;
        return Ok(y);
    }
    let x = x.map(|x| read(op, "x", x)).transpose()?;
    let x = x.as_ref().map(Operand::values).transpose()?;
    let (f, scale) = (read(op, name, f)?, read(op, "scale", scale)?);
    let (f, scale) = (f.values()?, scale.f32()?);
    let [y] = filled(n, ROWS, [(d, dtype)], |rows, [y]| {
        if let Some(x) = x {
            y.copy_from_slice(&x.view(span(&rows, d)));
        }
        let f = f.view(span(&rows, d));
        for (y, f) in y.chunks_mut(d).zip(f.chunks(d)) {
            add_scaled_row(f, &scale, y);
        }
    });
    y.tensor((n, d))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{added, bits, check, gradient_buffer, message, random};
    use super::*;

    #[test]
    fn the_scaled_sum_and_its_gradients_match_the_reference() {
        for (n, d) in [(1, 1), (1, 64), (31, 63), (33, 128), (150, 260)] {
            let inputs = [random(1, &[n, d]), random(2, &[d]), random(3, &[n, d])];
            let plain = |t: &[Tensor]| t[0].broadcast_mul(&t[1])? + &t[2];
            check(&format!("layer_scale {n} {d}"), &inputs, plain, |t, dy| {
                let d_scale = gradient_buffer(&[d]);
                let df = layer_scale_backward(&t[1], dy, Some((&t[0], &d_scale)))?;
                let alone = layer_scale_backward(&t[1], dy, None)?;
                assert_eq!(bits(&df), bits(&alone));
                let y = layer_scale_add(&t[0], &t[1], &t[2])?;
                Ok((y, vec![df, added(&d_scale), dy.clone()]))
            });
        }
    }

    #[test]
    fn operands_of_other_shapes_are_rejected() {
        let (f, scale) = (random(1, &[4, 6]), random(2, &[6]));
        let error = message(layer_scale_add(&f, &random(2, &[5]), &f));
        assert!(error.contains("`scale`"), "{error}");
        let error = message(layer_scale_add(&f, &scale, &random(3, &[3, 6])));
        assert!(error.contains("`x`"), "{error}");
        let sums = gradient_buffer(&[5]);
        let error = message(layer_scale_backward(&scale, &f, Some((&f, &sums))));
        assert!(error.contains("`d_scale`"), "{error}");
    }
}
