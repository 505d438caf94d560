//! Gates of the gated delta rule: `g = -exp(a_log) softplus(a + dt_bias)`, the logarithm of the
//! decay, and `beta = sigmoid(b)`, the strength of the write.
//!
//! Shapes: `T` tokens, `Hv` value heads; `a`, `b`: `[T, Hv]`; `a_log`, `dt_bias`: `[Hv]` (`f32`);
//! `g`, `beta`, `dg`, `dbeta`: `[T, Hv]` (`f32`). Arithmetic is in `f32`.

use super::column_shares::ColumnShares;
use super::cpu::blocks::{Values, filled, span};
use super::cpu::column_sums::add_rows;
use super::cpu::{self, ROWS, compute_dtype, expect_f32, expect_shape, read};
use super::launch::{Launch, Long, THREADS, empty, launch, on_gpu};
use super::norm_geometry::WARP;
use candle_core::{DType, Result, Tensor};

/// Gradients of the operands of [`delta_gates`] that depend on the token.
#[derive(Debug)]
pub struct DeltaGatesGrad {
    /// Gradient of `a`, `[T, Hv]`.
    pub da: Tensor,
    /// Gradient of `b`, `[T, Hv]`.
    pub db: Tensor,
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Computes `ln(1 + e^x)` without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Validates the operands and returns `(T, Hv)` and the compute dtype.
fn check(op: &str, [a, b, a_log, dt_bias]: [&Tensor; 4]) -> Result<(usize, usize, DType)> {
    let (t, h) = a.dims2()?;
    let dtype = compute_dtype(op, &[("a", a), ("b", b)])?;
    expect_shape(op, "b", b, &[t, h])?;
    expect_f32(op, "a_log", a_log, &[h])?;
    expect_f32(op, "dt_bias", dt_bias, &[h])?;
    Ok((t, h, dtype))
}

/// Number of tokens of a block of the backward pass on a GPU.
const TOKENS: usize = 64;

/// Returns `g` and `beta`, both `[T, Hv]` in `f32`.
pub fn delta_gates(
    a: &Tensor,
    b: &Tensor,
    a_log: &Tensor,
    dt_bias: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let op = "delta_gates";
    let (t, h, dtype) = check(op, [a, b, a_log, dt_bias])?;
    if on_gpu(a) {
        let (g, beta) = (empty((t, h), DType::F32, a)?, empty((t, h), DType::F32, a)?);
        let launch = Launch::new(op, dtype).grid((t * h).div_ceil(THREADS as usize));
        launch!(op, launch.threads(THREADS); a, b, a_log, dt_bias, g, beta, Long(t * h), h)?;
        return Ok((g, beta));
    }
    let (a, b) = (read(op, "a", a)?, read(op, "b", b)?);
    let (a_log, dt_bias) = (read(op, "a_log", a_log)?, read(op, "dt_bias", dt_bias)?);
    let (a, b) = (a.values()?, b.values()?);
    let (a_log, dt_bias) = (a_log.slice::<f32>()?, dt_bias.slice::<f32>()?);
    let [g, beta] = filled(t, ROWS, [(h, DType::F32); 2], |rows, [g, beta]| {
        let (a, b) = (a.view(span(&rows, h)), b.view(span(&rows, h)));
        for i in 0..g.len() {
            g[i] = -a_log[i % h].exp() * softplus(a[i] + dt_bias[i % h]);
            beta[i] = sigmoid(b[i]);
        }
    });
    Ok((g.tensor((t, h))?, beta.tensor((t, h))?))
}

/// Returns the gradients of `a` and `b`. Adds those of `a_log` and `dt_bias` to `da_log [Hv]` and
/// `ddt_bias [Hv]` (both `f32`) unless they are `None`.
pub fn delta_gates_backward(
    [a, b, a_log, dt_bias]: [&Tensor; 4],
    dg: &Tensor,
    dbeta: &Tensor,
    da_log: Option<&Tensor>,
    ddt_bias: Option<&Tensor>,
) -> Result<DeltaGatesGrad> {
    let op = "delta_gates_backward";
    let (t, h, dtype) = check(op, [a, b, a_log, dt_bias])?;
    expect_f32(op, "dg", dg, &[t, h])?;
    expect_f32(op, "dbeta", dbeta, &[t, h])?;
    for (name, sums) in [("da_log", da_log), ("ddt_bias", ddt_bias)] {
        let Some(sums) = sums else { continue };
        expect_f32(op, name, sums, &[h])?;
        let gates = [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)];
        cpu::distinct(op, name, sums, &gates)?;
        cpu::distinct(op, name, sums, &[("dg", dg), ("dbeta", dbeta)])?;
    }
    if on_gpu(a) {
        let (da, db) = (empty((t, h), dtype, a)?, empty((t, h), dtype, a)?);
        let blocks = t.div_ceil(TOKENS);
        let shares = |sums| ColumnShares::new(sums, blocks * THREADS as usize / WARP, h);
        let (da_log, ddt_bias) = (shares(da_log)?, shares(ddt_bias)?);
        let launch = Launch::new(op, dtype).grid(blocks).threads(THREADS);
        launch!(op, launch; a, b, a_log, dt_bias, dg, dbeta, da, db, da_log, ddt_bias, t, h, TOKENS)?;
        da_log.add(op)?;
        ddt_bias.add(op)?;
        return Ok(DeltaGatesGrad { da, db });
    }
    let (a, b) = (read(op, "a", a)?, read(op, "b", b)?);
    let (a_log, dt_bias) = (read(op, "a_log", a_log)?, read(op, "dt_bias", dt_bias)?);
    let (dg, dbeta) = (read(op, "dg", dg)?, read(op, "dbeta", dbeta)?);
    let (a, b, dg, dbeta) = (a.values()?, b.values()?, dg.slice::<f32>()?, dbeta.slice::<f32>()?);
    let (a_log, dt_bias) = (a_log.slice::<f32>()?, dt_bias.slice::<f32>()?);
    // `dlog` and `dbias` are what each token adds to the gradients of `a_log` and `dt_bias`.
    let outputs = [(h, dtype), (h, dtype), (h, DType::F32), (h, DType::F32)];
    let [da, db, dlog, dbias] = filled(t, ROWS, outputs, |rows, [da, db, dlog, dbias]| {
        let at = span(&rows, h);
        let (a, b) = (a.view(at.clone()), b.view(at.clone()));
        let (dg, dbeta) = (&dg[at.clone()], &dbeta[at]);
        for i in 0..da.len() {
            let (rate, x) = (-a_log[i % h].exp(), a[i] + dt_bias[i % h]);
            dlog[i] = dg[i] * rate * softplus(x);
            dbias[i] = dg[i] * rate * sigmoid(x);
            da[i] = dbias[i];
            let beta = sigmoid(b[i]);
            db[i] = dbeta[i] * beta * (1.0 - beta);
        }
    });
    add_rows(op, "da_log", da_log, Values::from(&dlog.into_f32()))?;
    add_rows(op, "ddt_bias", ddt_bias, Values::from(&dbias.into_f32()))?;
    Ok(DeltaGatesGrad { da: da.tensor((t, h))?, db: db.tensor((t, h))? })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{added, check, device, gradient_buffer, random};
    use super::*;

    /// `g` and `beta` side by side.
    fn plain(t: &[Tensor]) -> Result<Tensor> {
        let sum = t[0].broadcast_add(&t[3])?;
        let softplus = (sum.exp()? + 1.0)?.log()?;
        let g = softplus.broadcast_mul(&t[2].exp()?.neg()?)?;
        let beta = (t[1].neg()?.exp()? + 1.0)?.recip()?;
        Tensor::cat(&[g, beta], 1)
    }

    #[test]
    fn the_gates_and_their_gradients_match_the_reference() {
        for (t, h) in [(1, 1), (5, 3), (33, 16), (70, 48)] {
            let inputs = [random(1, &[t, h]), random(2, &[t, h]), random(3, &[h]), random(4, &[h])];
            check(&format!("delta_gates {t} {h}"), &inputs, plain, |i, dy| {
                let (a_log, dt_bias) = (i[2].to_dtype(DType::F32)?, i[3].to_dtype(DType::F32)?);
                let (g, beta) = delta_gates(&i[0], &i[1], &a_log, &dt_bias)?;
                let part = |at| dy.narrow(1, at, h)?.to_dtype(DType::F32)?.contiguous();
                let (da_log, ddt_bias) = (gradient_buffer(&[h]), gradient_buffer(&[h]));
                let operands = [&i[0], &i[1], &a_log, &dt_bias];
                let sums = (Some(&da_log), Some(&ddt_bias));
                let grad = delta_gates_backward(operands, &part(0)?, &part(h)?, sums.0, sums.1)?;
                let y = Tensor::cat(&[g, beta], 1)?.to_dtype(dy.dtype())?;
                Ok((y, vec![grad.da, grad.db, added(&da_log), added(&ddt_bias)]))
            });
        }
    }

    #[test]
    fn large_inputs_saturate() -> Result<()> {
        let a = Tensor::new(&[[200f32], [-200.0]], &device())?;
        let zero = Tensor::new(&[0f32], &device())?;
        let (g, beta) = delta_gates(&a, &a, &zero, &zero)?;
        assert_eq!(g.to_vec2::<f32>()?, [[-200.0], [-0.0]]);
        assert_eq!(beta.to_vec2::<f32>()?, [[1.0], [0.0]]);
        Ok(())
    }
}
