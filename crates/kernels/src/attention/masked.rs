//! Reference attention: a dense score matrix for each row and head, with a block-diagonal mask.
//!
//! Memory grows with the square of the row length. The code shares no kernel with [`super::Flash`].

use super::{AttentionBackend, Masking, Qkv, QkvGrad, Scores, Segments, Sizes};
use crate::cpu::products::{Store, nn, nt, tn};
use crate::cpu::{self, read};
use batch::CuSeqlens;
use candle_core::{DType, Device, Result, Tensor};
use std::ops::Range;

/// Attention with dense masks: `[L, L]` scores for each head of each row of length `L`. CPU only.
#[derive(Debug, Clone, Copy, Default)]
pub struct Masked;

/// Copies one head of the rows `tokens` of `x [T, heads, Dh]`: `[L, Dh]`.
fn head(x: &[f32], tokens: Range<usize>, heads: usize, head: usize, dh: usize) -> Vec<f32> {
    let mut rows = Vec::with_capacity(tokens.len() * dh);
    for token in tokens {
        let start = (token * heads + head) * dh;
        rows.extend_from_slice(&x[start..start + dh]);
    }
    rows
}

/// Adds `rows [L, Dh]` to one head of the rows `tokens` of `x [T, heads, Dh]`.
fn add_head(
    x: &mut [f32],
    tokens: Range<usize>,
    heads: usize,
    head: usize,
    dh: usize,
    rows: &[f32],
) {
    for (token, row) in tokens.zip(rows.chunks(dh)) {
        let start = (token * heads + head) * dh;
        for (x, add) in x[start..start + dh].iter_mut().zip(row) {
            *x += add;
        }
    }
}

/// The tokens of a row that each of its tokens attends to, both counted from the first of the row.
fn visible_tokens(
    cu_seqlens: &CuSeqlens,
    row: &Range<usize>,
    masking: Masking,
) -> Vec<Range<usize>> {
    let inside = |segment: &Range<usize>| row.start <= segment.start && segment.end <= row.end;
    let of_segment = |segment: Range<usize>| {
        let first = segment.start - row.start;
        (0..segment.len()).map(move |token| {
            let visible = masking.visible_keys(token, segment.len());
            first + visible.start..first + visible.end
        })
    };
    cu_seqlens.segments().filter(inside).flat_map(of_segment).collect()
}

/// Returns `scale * q k^T`, `[L, L]`, with negative infinity for masked pairs.
fn scaled_scores(
    q: &[f32],
    k: &[f32],
    dh: usize,
    scale: f32,
    visible: &[Range<usize>],
) -> Vec<f32> {
    let l = visible.len();
    let mut scores = vec![0f32; l * l];
    nt((l, l, dh), &mut scores, Store::Overwrite, q, k);
    for (row, visible) in scores.chunks_mut(l).zip(visible) {
        for (j, score) in row.iter_mut().enumerate() {
            *score = if visible.contains(&j) { *score * scale } else { f32::NEG_INFINITY };
        }
    }
    scores
}

impl AttentionBackend for Masked {
    fn name(&self) -> &'static str {
        "masked"
    }

    fn kernel(&self, _: &Device, _: DType, _: usize) -> &'static str {
        "masked, cpu"
    }

    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: &Segments,
        scores: Scores,
    ) -> Result<(Tensor, Tensor)> {
        let op = "masked_attention";
        let sizes = Sizes::check(op, qkv, segments, scores)?;
        let Sizes { t, h, hkv, dh, dtype } = sizes;
        let (q, k, v) = (read(op, "q", qkv.q)?, read(op, "k", qkv.k)?, read(op, "v", qkv.v)?);
        let (q, k, v) = (q.f32()?, k.f32()?, v.f32()?);
        let (mut o, mut lse) = (vec![0f32; t * h * dh], vec![0f32; h * t]);
        for row in segments.mask_boundaries().segments() {
            let visible = visible_tokens(segments.cu_seqlens(), &row, scores.masking);
            let l = row.len();
            for index in 0..h {
                let kv = sizes.kv_head(index);
                let q = head(&q, row.clone(), h, index, dh);
                let k = head(&k, row.clone(), hkv, kv, dh);
                let v = head(&v, row.clone(), hkv, kv, dh);
                let mut p = scaled_scores(&q, &k, dh, scores.scale, &visible); // [L, L]
                for (i, p) in p.chunks_mut(l).enumerate() {
                    let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let sum: f32 = p.iter().map(|s| (s - max).exp()).sum();
                    for s in p {
                        *s = (*s - max).exp() / sum;
                    }
                    lse[index * t + row.start + i] = max + sum.ln();
                }
                let mut rows = vec![0f32; l * dh];
                nn((l, dh, l), &mut rows, Store::Overwrite, &p, &v);
                add_head(&mut o, row.clone(), h, index, dh, &rows);
            }
        }
        Ok((cpu::tensor(o, (t, h, dh), dtype)?, cpu::tensor(lse, (h, t), DType::F32)?))
    }

    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: &Segments,
        scores: Scores,
    ) -> Result<QkvGrad> {
        let op = "masked_attention_backward";
        let sizes = Sizes::check(op, qkv, segments, scores)?;
        sizes.check_backward(op, o, lse, d_o)?;
        let Sizes { t, h, hkv, dh, dtype } = sizes;
        let (q, k, v) = (read(op, "q", qkv.q)?, read(op, "k", qkv.k)?, read(op, "v", qkv.v)?);
        let (q, k, v) = (q.f32()?, k.f32()?, v.f32()?);
        let (o, lse, d_o) = (read(op, "o", o)?, read(op, "lse", lse)?, read(op, "d_o", d_o)?);
        let (o, lse, d_o) = (o.f32()?, lse.f32()?, d_o.f32()?);
        let mut dq = vec![0f32; t * h * dh];
        let (mut dk, mut dv) = (vec![0f32; t * hkv * dh], vec![0f32; t * hkv * dh]);
        for row in segments.mask_boundaries().segments() {
            let visible = visible_tokens(segments.cu_seqlens(), &row, scores.masking);
            let l = row.len();
            for index in 0..h {
                let kv = sizes.kv_head(index);
                let q = head(&q, row.clone(), h, index, dh);
                let k = head(&k, row.clone(), hkv, kv, dh);
                let v = head(&v, row.clone(), hkv, kv, dh);
                let o = head(&o, row.clone(), h, index, dh);
                let d_o = head(&d_o, row.clone(), h, index, dh);
                let mut p = scaled_scores(&q, &k, dh, scores.scale, &visible); // [L, L]
                for (i, p) in p.chunks_mut(l).enumerate() {
                    let lse = lse[index * t + row.start + i];
                    for s in p {
                        *s = (*s - lse).exp();
                    }
                }
                let mut rows = vec![0f32; l * dh];
                tn((l, dh, l), &mut rows, Store::Overwrite, &p, &d_o); // dv = p^T do
                add_head(&mut dv, row.clone(), hkv, kv, dh, &rows);
                let mut ds = vec![0f32; l * l];
                nt((l, l, dh), &mut ds, Store::Overwrite, &d_o, &v); // dp = do v^T
                for i in 0..l {
                    let products = o[i * dh..(i + 1) * dh].iter().zip(&d_o[i * dh..(i + 1) * dh]);
                    let delta: f32 = products.map(|(o, d_o)| o * d_o).sum();
                    for j in i * l..(i + 1) * l {
                        ds[j] = p[j] * (ds[j] - delta) * scores.scale;
                    }
                }
                nn((l, dh, l), &mut rows, Store::Overwrite, &ds, &k); // dq = ds k
                add_head(&mut dq, row.clone(), h, index, dh, &rows);
                tn((l, dh, l), &mut rows, Store::Overwrite, &ds, &q); // dk = ds^T q
                add_head(&mut dk, row.clone(), hkv, kv, dh, &rows);
            }
        }
        Ok(QkvGrad {
            dq: cpu::tensor(dq, (t, h, dh), dtype)?,
            dk: cpu::tensor(dk, (t, hkv, dh), dtype)?,
            dv: cpu::tensor(dv, (t, hkv, dh), dtype)?,
        })
    }
}
