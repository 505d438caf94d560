//! Splits the fused query-key-value projection of the vision encoder and applies rotary embedding
//! to queries and keys.
//!
//! Shapes: `P` patches, `H` heads, `Dh` head dim; `qkv`, `dqkv`: `[P, 3*H*Dh]`; `q`, `k`, `v` and
//! their gradients: `[P, H, Dh]`; tables: `[P, Dh/2]`.

use super::RopeTable;
use super::cpu::blocks::{filled, span};
use super::cpu::{ROWS, compute_dtype, expect_shape, read};
use super::launch::{Launch, THREADS, empty, launch, on_gpu, vectors};
use super::rope::{rotate, rotate_back};
use candle_core::{DType, Result, Tensor, bail};

/// Launch of a kernel for `num_heads` heads of `half` pairs of dims, in the version for the
/// alignment of `parts` and the table.
fn launch_of_heads(
    kernel: &str,
    (num_heads, half): (usize, usize),
    parts: &[&Tensor],
    table: &RopeTable,
) -> Result<Launch> {
    let dtype = parts[0].dtype();
    let mut all = parts.to_vec();
    all.extend([&table.cos, &table.sin]);
    let (elements, suffix) = if vectors(half, &all)? {
        (16 / dtype.size_in_bytes(), "")
    } else if dtype == DType::BF16 && half.is_multiple_of(4) && vectors(0, &all)? {
        (4, "_half") // heads of dim 72 in bf16: the halves are aligned to 8 bytes
    } else {
        (1, "_single")
    };
    let blocks = (num_heads * (half / elements)).div_ceil(THREADS as usize);
    Ok(Launch::new(&format!("{kernel}{suffix}"), dtype).grid(blocks).threads(THREADS))
}

/// Returns rotated `q`, rotated `k` and unchanged `v`, each `[P, H, Dh]`. Fails if `qkv` is not
/// `[P, 3*H*Dh]`.
pub fn vision_rope_split(
    qkv: &Tensor,
    num_heads: usize,
    table: &RopeTable,
) -> Result<(Tensor, Tensor, Tensor)> {
    let op = "vision_rope_split";
    let ((p, width), (table_p, half)) = (qkv.dims2()?, table.shape(op)?);
    let dh = 2 * half;
    if table_p != p || width != 3 * num_heads * dh || width == 0 {
        bail!(
            "{op}: `qkv` is {:?} with {num_heads} heads and the table {:?}, expected [P, 3*H*Dh] and [P, Dh/2]",
            qkv.dims(),
            table.cos.dims()
        );
    }
    let dtype = compute_dtype(op, &[("qkv", qkv)])?;
    if on_gpu(qkv) {
        let part = || empty((p, num_heads, dh), dtype, qkv);
        let (q, k, v) = (part()?, part()?, part()?);
        let heads = (p * num_heads, half);
        let launch = launch_of_heads(op, heads, &[qkv, &q, &k, &v], table)?;
        launch!(op, launch; qkv, table.cos, table.sin, q, k, v, p, num_heads, half)?;
        return Ok((q, k, v));
    }
    let part = num_heads * dh;
    let qkv = read(op, "qkv", qkv)?;
    let (cos, sin) = (read(op, "cos", &table.cos)?, read(op, "sin", &table.sin)?);
    let (qkv, cos, sin) = (qkv.values()?, cos.slice::<f32>()?, sin.slice::<f32>()?);
    let [q, k, v] = filled(p, ROWS, [(part, dtype); 3], |patches, [q, k, v]| {
        let rows = q.chunks_mut(part).zip(k.chunks_mut(part)).zip(v.chunks_mut(part));
        let qkv = qkv.view(span(&patches, width));
        for ((i, ((q, k), v)), source) in patches.zip(rows).zip(qkv.chunks(width)) {
            q.copy_from_slice(&source[..part]);
            k.copy_from_slice(&source[part..2 * part]);
            v.copy_from_slice(&source[2 * part..]);
            let (cos, sin) = (&cos[i * half..(i + 1) * half], &sin[i * half..(i + 1) * half]);
            for head in q.chunks_mut(dh).chain(k.chunks_mut(dh)) {
                rotate(head, cos, sin);
            }
        }
    });
    let shape = (p, num_heads, dh);
    Ok((q.tensor(shape)?, k.tensor(shape)?, v.tensor(shape)?))
}

/// Returns `dqkv [P, 3*H*Dh]` from the gradients of `q`, `k` and `v`, each `[P, H, Dh]`.
pub fn vision_rope_merge_backward(
    dq: &Tensor,
    dk: &Tensor,
    dv: &Tensor,
    table: &RopeTable,
) -> Result<Tensor> {
    let op = "vision_rope_merge_backward";
    let ((p, h, dh), (table_p, half)) = (dq.dims3()?, table.shape(op)?);
    if table_p != p || dh != 2 * half {
        bail!(
            "{op}: `dq` is {:?} and the table {:?}, expected [P, H, Dh] and [P, Dh/2]",
            dq.dims(),
            table.cos.dims()
        );
    }
    let dtype = compute_dtype(op, &[("dq", dq), ("dk", dk), ("dv", dv)])?;
    expect_shape(op, "dk", dk, &[p, h, dh])?;
    expect_shape(op, "dv", dv, &[p, h, dh])?;
    if on_gpu(dq) {
        let dqkv = empty((p, 3 * h * dh), dtype, dq)?;
        let tensors = [dq, dk, dv, &dqkv];
        let launch = launch_of_heads("vision_rope_merge", (p * h, half), &tensors, table)?;
        launch!(op, launch; dq, dk, dv, table.cos, table.sin, dqkv, p, h, half)?;
        return Ok(dqkv);
    }
    let part = h * dh;
    let (dq, dk, dv) = (read(op, "dq", dq)?, read(op, "dk", dk)?, read(op, "dv", dv)?);
    let (cos, sin) = (read(op, "cos", &table.cos)?, read(op, "sin", &table.sin)?);
    let (dq, dk, dv) = (dq.values()?, dk.values()?, dv.values()?);
    let (cos, sin) = (cos.slice::<f32>()?, sin.slice::<f32>()?);
    let [dqkv] = filled(p, ROWS, [(3 * part, dtype)], |patches, [dqkv]| {
        for (i, row) in patches.zip(dqkv.chunks_mut(3 * part)) {
            let source = span(&(i..i + 1), part);
            row[..part].copy_from_slice(&dq.view(source.clone()));
            row[part..2 * part].copy_from_slice(&dk.view(source.clone()));
            row[2 * part..].copy_from_slice(&dv.view(source));
            let (cos, sin) = (&cos[i * half..(i + 1) * half], &sin[i * half..(i + 1) * half]);
            for head in row[..2 * part].chunks_mut(dh) {
                rotate_back(head, cos, sin);
            }
        }
    });
    dqkv.tensor((p, 3 * part))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, message, random, rope_table, rotate_half};
    use super::*;

    #[test]
    fn the_split_and_its_gradient_match_the_reference() {
        for (p, h, dh) in [(1, 1, 4), (31, 2, 64), (33, 3, 72), (64, 4, 32)] {
            let table = rope_table(p, dh / 2);
            let plain = |i: &[Tensor]| {
                let qkv = i[0].reshape((p, 3 * h, dh))?;
                let rotated = rotate_half(&qkv.narrow(1, 0, 2 * h)?, &table)?;
                let (q, k) = (rotated.narrow(1, 0, h)?, rotated.narrow(1, h, h)?);
                Tensor::cat(&[q, k, qkv.narrow(1, 2 * h, h)?], 0)
            };
            let inputs = [random(1, &[p, 3 * h * dh])];
            check(&format!("vision_rope {p} {h} {dh}"), &inputs, plain, |i, dy| {
                let (q, k, v) = vision_rope_split(&i[0], h, &table)?;
                let part = |n: usize| dy.narrow(0, n * p, p);
                let dqkv = vision_rope_merge_backward(&part(0)?, &part(1)?, &part(2)?, &table)?;
                Ok((Tensor::cat(&[q, k, v], 0)?, vec![dqkv]))
            });
        }
    }

    #[test]
    fn a_width_other_than_three_times_the_heads_is_rejected() {
        let error = message(vision_rope_split(&random(1, &[2, 32]), 2, &rope_table(2, 4)));
        assert!(error.contains("expected [P, 3*H*Dh]"), "{error}");
    }
}
