//! Splitting a fused query-key-value projection, with rotary embedding of queries and keys.
//!
//! Shapes: `P` patches, `H` heads, `Dh` head dim; `qkv: [P, 3*H*Dh]`; `q`, `k`, `v`: `[P, H, Dh]`.

use super::RopeTable;
use super::cpu::{self, ROWS, compute_dtype, expect_shape, read};
use super::rope::{rotate, rotate_back};
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

/// `q` and `k` rotated, `v` as it is; each `[P, H, Dh]`.
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
    let part = num_heads * dh;
    let (mut q, mut k) = (vec![0f32; p * part], vec![0f32; p * part]);
    let mut v = vec![0f32; p * part];
    let qkv = read(op, "qkv", qkv)?;
    let (cos, sin) = (read(op, "cos", &table.cos)?, read(op, "sin", &table.sin)?);
    let (qkv, cos, sin) = (qkv.f32()?, cos.f32()?, sin.f32()?);
    q.par_chunks_mut(ROWS * part)
        .zip(k.par_chunks_mut(ROWS * part))
        .zip(v.par_chunks_mut(ROWS * part))
        .enumerate()
        .for_each(|(block, ((q, k), v))| {
            let rows = q.chunks_mut(part).zip(k.chunks_mut(part)).zip(v.chunks_mut(part));
            for (i, ((q, k), v)) in (block * ROWS..).zip(rows) {
                let source = &qkv[i * width..(i + 1) * width];
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
    Ok((
        cpu::tensor(q, shape, dtype)?,
        cpu::tensor(k, shape, dtype)?,
        cpu::tensor(v, shape, dtype)?,
    ))
}

/// `dqkv [P, 3*H*Dh]` from the gradients of the three, each `[P, H, Dh]`.
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
    let part = h * dh;
    let mut dqkv = vec![0f32; p * 3 * part];
    let (dq, dk, dv) = (read(op, "dq", dq)?, read(op, "dk", dk)?, read(op, "dv", dv)?);
    let (cos, sin) = (read(op, "cos", &table.cos)?, read(op, "sin", &table.sin)?);
    let (dq, dk, dv, cos, sin) = (dq.f32()?, dk.f32()?, dv.f32()?, cos.f32()?, sin.f32()?);
    dqkv.par_chunks_mut(ROWS * 3 * part.max(1)).enumerate().for_each(|(block, rows)| {
        for (i, row) in (block * ROWS..).zip(rows.chunks_mut(3 * part)) {
            let source = i * part..(i + 1) * part;
            row[..part].copy_from_slice(&dq[source.clone()]);
            row[part..2 * part].copy_from_slice(&dk[source.clone()]);
            row[2 * part..].copy_from_slice(&dv[source]);
            let (cos, sin) = (&cos[i * half..(i + 1) * half], &sin[i * half..(i + 1) * half]);
            for head in row[..2 * part].chunks_mut(dh) {
                rotate_back(head, cos, sin);
            }
        }
    });
    cpu::tensor(dqkv, (p, 3 * part), dtype)
}
