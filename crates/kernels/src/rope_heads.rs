//! Rotary embedding of queries and keys without a norm; [`super::rope`] describes the rotation.
//!
//! Shapes: `T` tokens, `H` heads, `Dh` head dim, `R <= Dh` rotated dims; `x`, `dx`: `[T, H*Dh]`,
//! the output of the projection; `y`, `dy`: `[T, H, Dh]`.

use super::RopeTable;
use super::cpu::blocks::{filled, span};
use super::cpu::{ROWS, compute_dtype, read};
use super::launch::{empty, on_gpu};
use super::rope::{launch_rope, launch_rope_backward, rotate, rotate_back};
use candle_core::{Result, Tensor, bail};

/// Which way a head is turned.
#[derive(Clone, Copy)]
enum Turn {
    Forward,
    Back,
}

/// Returns `y [T, H, Dh]`, the heads of `x` rotated by the angles of their tokens. Fails if `x` is
/// not `[T, H*Dh]`.
pub fn rope_heads(x: &Tensor, head_dim: usize, table: &RopeTable) -> Result<Tensor> {
    let (t, width) = x.dims2()?;
    let h = width.checked_div(head_dim).unwrap_or(0);
    check("rope_heads", x, (t, h, head_dim), table)?;
    if on_gpu(x) {
        let y = empty((t, h, head_dim), x.dtype(), x)?;
        launch_rope("rope_heads", x, None, 0.0, table, &y)?;
        return Ok(y);
    }
    turned("rope_heads", x, (t, h, head_dim), table, Turn::Forward)?.reshape((t, h, head_dim))
}

/// Returns `dx [T, H*Dh]` from `dy [T, H, Dh]`.
pub fn rope_heads_backward(dy: &Tensor, table: &RopeTable) -> Result<Tensor> {
    let op = "rope_heads_backward";
    let shape @ (t, h, dh) = dy.dims3()?;
    check(op, dy, shape, table)?;
    if on_gpu(dy) {
        let dx = empty((t, h * dh), dy.dtype(), dy)?;
        // The kernel also loads `x`, whose values it does not use without a norm.
        let x = dy.reshape((t, h * dh))?;
        launch_rope_backward(op, &x, None, table, dy, &dx, None)?;
        return Ok(dx);
    }
    turned(op, dy, shape, table, Turn::Back)
}

fn check(op: &str, x: &Tensor, (t, h, dh): (usize, usize, usize), table: &RopeTable) -> Result<()> {
    let (table_t, half) = table.shape(op)?;
    if dh == 0 || dh % 2 != 0 || dh < 2 * half || table_t != t || x.elem_count() != t * h * dh {
        bail!(
            "{op}: `x` is {:?} with heads of {dh} and the table {:?}, expected [T, H*Dh] and [T, R/2] with R <= Dh",
            x.dims(),
            table.cos.dims()
        );
    }
    Ok(())
}

/// The heads turned, `[T, H*Dh]`.
fn turned(
    op: &'static str,
    x: &Tensor,
    (t, h, dh): (usize, usize, usize),
    table: &RopeTable,
    turn: Turn,
) -> Result<Tensor> {
    let dtype = compute_dtype(op, &[("x", x)])?;
    let (width, half) = (h * dh, table.cos.dim(1)?);
    let x = read(op, "x", x)?;
    let (cos, sin) = (read(op, "cos", &table.cos)?, read(op, "sin", &table.sin)?);
    let (x, cos, sin) = (x.values()?, cos.slice::<f32>()?, sin.slice::<f32>()?);
    let [y] = filled(t, ROWS, [(width, dtype)], |tokens, [y]| {
        y.copy_from_slice(&x.view(span(&tokens, width)));
        for (token, row) in tokens.zip(y.chunks_mut(width)) {
            let angles = token * half..(token + 1) * half;
            let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
            for head in row.chunks_mut(dh) {
                match turn {
                    Turn::Forward => rotate(head, cos, sin),
                    Turn::Back => rotate_back(head, cos, sin),
                }
            }
        }
    });
    y.tensor((t, width))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, message, random, rope_table, rotate_half};
    use super::*;

    #[test]
    fn the_rotation_and_its_gradient_match_the_reference() {
        for (t, h, dh) in [(1, 1, 4), (3, 2, 32), (31, 4, 64), (33, 1, 72), (65, 3, 128)] {
            let table = rope_table(t, dh / 2);
            let plain = |i: &[Tensor]| rotate_half(&i[0].reshape((t, h, dh))?, &table);
            let inputs = [random(1, &[t, h * dh])];
            check(&format!("rope_heads {t} {h} {dh}"), &inputs, plain, |i, dy| {
                let y = rope_heads(&i[0], dh, &table)?;
                Ok((y, vec![rope_heads_backward(dy, &table)?]))
            });
        }
    }

    #[test]
    fn a_width_other_than_that_of_whole_heads_is_rejected() {
        let error = message(rope_heads(&random(1, &[3, 10]), 4, &rope_table(3, 2)));
        assert!(error.contains("heads of 4"), "{error}");
        let error = message(rope_heads(&random(1, &[3, 8]), 0, &rope_table(3, 2)));
        assert!(error.contains("heads of 0"), "{error}");
        let error = message(rope_heads(&random(1, &[3, 8]), 4, &rope_table(2, 2)));
        assert!(error.contains("[T, R/2]"), "{error}");
    }
}
