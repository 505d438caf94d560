//! Attention in tiles: no score matrix, no mask, no repeated key-value heads.
//!
//! A forward task is one block of queries of one head: it walks the keys in tiles with a running maximum and sum.
//! A backward task is one key-value head of one segment: it owns those columns of `dk` and `dv`, so that nothing
//! is added across tasks and the sum over the heads of a group costs nothing. Tiles above the diagonal are skipped.

#![expect(unsafe_code, reason = "tasks write disjoint strided parts of one buffer")]

use super::super::cpu::{self, Shared, read};
use super::super::matmul::{Into, Raw, product};
use super::super::simd::{dot, exp, exp_in_place, kernels, max};
use super::{AttentionBackend, Masking, Qkv, QkvGrad, Segments, Sizes, ranges};
use candle_core::{DType, Result, Tensor};
use gemm::Parallelism;
use std::ops::Range;

/// Attention in tiles, with memory in the size of a tile.
#[derive(Debug, Clone, Copy, Default)]
pub struct Flash;

/// Queries in a tile.
const QUERIES: usize = 128;
/// Keys in a tile.
const KEYS: usize = 512;

/// Queries and keys that see each other: the queries are the last `queries.len()` positions of the keys.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Span {
    /// How many keys the query at `row` (counted from the first query) sees.
    fn seen(&self, row: usize, masking: Masking) -> usize {
        match masking {
            Masking::Causal => self.keys.len() - self.queries.len() + row + 1,
            Masking::Full => self.keys.len(),
        }
    }
}

/// One tile of scores: rows of queries from `first_row` of a span against keys from `first_key`.
struct Tile<'a> {
    span: &'a Span,
    masking: Masking,
    first_row: usize,
    first_key: usize,
    num_keys: usize,
}

impl Tile<'_> {
    /// How many of the tile's keys row `i` of the tile sees.
    fn seen(&self, i: usize) -> usize {
        let seen = self.span.seen(self.first_row + i, self.masking);
        seen.saturating_sub(self.first_key).min(self.num_keys)
    }
}

kernels! {
    // Turns a row of scores into exponentials, given the running maximum and sum of the row; returns the new
    // ones and the factor for what was summed before.
    fn softmax_row(s: &mut [f32], scale: f32, old_max: f32, old_sum: f32) -> [f32; 3] {
        let tile_max = max(s) * scale;
        let new_max = if tile_max > old_max { tile_max } else { old_max };
        let factor = if old_max == f32::NEG_INFINITY { 0.0 } else { exp(old_max - new_max) };
        let sum = exp_in_place(s, scale, new_max);
        [new_max, old_sum.mul_add(factor, sum), factor]
    }

    fn scale_row(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    // Turns scores into probabilities, and the gradient of the probabilities into that of the scores.
    fn score_grad_row(s: &mut [f32], dp: &mut [f32], scale: f32, lse: f32, delta: f32) {
        let n = s.len();
        let dp = &mut dp[..n];
        for i in 0..n {
            let p = exp(s[i].mul_add(scale, -lse));
            s[i] = p;
            dp[i] = p * (dp[i] - delta) * scale;
        }
    }

    fn dot_row(x: &[f32], y: &[f32]) -> f32 {
        dot(x, y)
    }
}

/// Heads of a call, as the forward pass needs them.
pub(super) struct Heads {
    pub(super) h: usize,
    pub(super) hkv: usize,
    pub(super) dh: usize,
    pub(super) scale: f32,
}

/// `o` and `lse [H, T]` for the queries of `spans`, which tile the queries.
pub(super) fn forward(
    heads: &Heads,
    (q, k, v): (&[f32], &[f32], &[f32]),
    spans: &[Span],
    masking: Masking,
) -> (Vec<f32>, Vec<f32>) {
    let &Heads { h, hkv, dh, scale } = heads;
    let (q_stride, k_stride) = (h * dh, hkv * dh);
    let t = q.len() / q_stride.max(1);
    let (mut o, mut lse) = (vec![0f32; q.len()], vec![0f32; h * t]);
    // (cost, span, head, first row): longest first.
    let mut tasks = Vec::new();
    for (index, span) in spans.iter().enumerate() {
        for head in 0..h {
            for first_row in (0..span.queries.len()).step_by(QUERIES) {
                let rows = QUERIES.min(span.queries.len() - first_row);
                let cost = rows * span.seen(first_row + rows - 1, masking);
                tasks.push((cost, index, head, first_row));
            }
        }
    }
    tasks.sort_by_key(|task| std::cmp::Reverse(task.0));
    let (o_part, lse_part) = (Shared::of(&mut o), Shared::of(&mut lse));
    let longest = spans.iter().map(|span| span.keys.len()).max().unwrap_or(0);
    cpu::for_each_task(
        tasks.len(),
        || vec![0f32; QUERIES * KEYS.min(longest)],
        |scores, task| {
            let (_, index, head, first_row) = tasks[task];
            let span = &spans[index];
            let kv = head / (h / hkv);
            let rows = QUERIES.min(span.queries.len() - first_row);
            let first_query = span.queries.start + first_row;
            let q_rows = &q[first_query * q_stride + head * dh..];
            let (mut maxima, mut sums) = ([f32::NEG_INFINITY; QUERIES], [0f32; QUERIES]);
            let num_seen = span.seen(first_row + rows - 1, masking);
            for first_key in (0..num_seen).step_by(KEYS) {
                let num_keys = KEYS.min(num_seen - first_key);
                let tile = Tile { span, masking, first_row, first_key, num_keys };
                let at = (span.keys.start + first_key) * k_stride + kv * dh;
                let scores = &mut scores[..rows * num_keys];
                // SAFETY: rows and keys are inside the tensors, and the scores belong to this task.
                unsafe {
                    product(
                        (rows, num_keys, dh),
                        Raw::rows(scores.as_mut_ptr(), num_keys),
                        Into::Overwrite,
                        Raw::rows(q_rows.as_ptr(), q_stride),
                        Raw::rows(k[at..].as_ptr(), k_stride).t(),
                        Parallelism::None,
                    );
                }
                for (i, scores) in scores.chunks_mut(num_keys).enumerate() {
                    let (seen, unseen) = scores.split_at_mut(tile.seen(i));
                    unseen.fill(0.0);
                    if seen.is_empty() {
                        continue; // all of this tile is later than the query
                    }
                    let [max, sum, factor] = softmax_row(seen, scale, maxima[i], sums[i]);
                    (maxima[i], sums[i]) = (max, sum);
                    if first_key > 0 {
                        let start = (first_query + i) * q_stride + head * dh;
                        // SAFETY: this row of this head belongs to this task.
                        scale_row(unsafe { o_part.slice(start..start + dh) }, factor);
                    }
                }
                let into = if first_key == 0 { Into::Overwrite } else { Into::Add };
                // SAFETY: as above; these rows of this head of `o` belong to this task.
                unsafe {
                    product(
                        (rows, dh, num_keys),
                        Raw::rows(o_part.at(first_query * q_stride + head * dh), q_stride),
                        into,
                        Raw::rows(scores.as_ptr(), num_keys),
                        Raw::rows(v[at..].as_ptr(), k_stride),
                        Parallelism::None,
                    );
                }
            }
            for i in 0..rows {
                let start = (first_query + i) * q_stride + head * dh;
                let lse_at = head * t + first_query + i;
                // SAFETY: this row of this head belongs to this task.
                let (o, lse) = unsafe {
                    (o_part.slice(start..start + dh), lse_part.slice(lse_at..lse_at + 1))
                };
                scale_row(o, 1.0 / sums[i]);
                lse[0] = maxima[i] + sums[i].ln();
            }
        },
    );
    (o, lse)
}

/// What the backward pass reads, in `f32`.
struct Given<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
    d_o: &'a [f32],
}

fn backward(
    sizes: Sizes,
    given: &Given<'_>,
    spans: &[Span],
    masking: Masking,
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let Sizes { t, h, hkv, dh, .. } = sizes;
    let &Given { q, k, v, o, lse, d_o } = given;
    let (q_stride, k_stride, scale) = (h * dh, hkv * dh, sizes.scale());
    let mut dq = vec![0f32; t * q_stride];
    let (mut dk, mut dv) = (vec![0f32; t * k_stride], vec![0f32; t * k_stride]);
    let mut tasks: Vec<(usize, usize)> =
        (0..spans.len()).flat_map(|span| (0..hkv).map(move |kv| (span, kv))).collect();
    tasks.sort_by_key(|(span, _)| std::cmp::Reverse(spans[*span].keys.len())); // longest first
    let (dq_part, dk_part, dv_part) =
        (Shared::of(&mut dq), Shared::of(&mut dk), Shared::of(&mut dv));
    let longest = spans.iter().map(|span| span.keys.len()).max().unwrap_or(0);
    let tile_size = QUERIES * KEYS.min(longest);
    cpu::for_each_task(
        tasks.len(),
        || (vec![0f32; tile_size], vec![0f32; tile_size]),
        |(scores, grads), task| {
            let (index, kv) = tasks[task];
            let span = &spans[index];
            let group = h / hkv;
            for head in kv * group..(kv + 1) * group {
                for first_row in (0..span.queries.len()).step_by(QUERIES) {
                    let rows = QUERIES.min(span.queries.len() - first_row);
                    let first_query = span.queries.start + first_row;
                    let q_at = first_query * q_stride + head * dh;
                    let mut delta = [0f32; QUERIES];
                    for (i, delta) in delta[..rows].iter_mut().enumerate() {
                        let row = q_at + i * q_stride..q_at + i * q_stride + dh;
                        *delta = dot_row(&o[row.clone()], &d_o[row]);
                    }
                    let num_seen = span.seen(first_row + rows - 1, masking);
                    for first_key in (0..num_seen).step_by(KEYS) {
                        let num_keys = KEYS.min(num_seen - first_key);
                        let tile = Tile { span, masking, first_row, first_key, num_keys };
                        let k_at = (span.keys.start + first_key) * k_stride + kv * dh;
                        let s = &mut scores[..rows * num_keys];
                        let ds = &mut grads[..rows * num_keys];
                        let k_rows = Raw::rows(k[k_at..].as_ptr(), k_stride);
                        let v_rows = Raw::rows(v[k_at..].as_ptr(), k_stride);
                        let q_rows = Raw::rows(q[q_at..].as_ptr(), q_stride);
                        let do_rows = Raw::rows(d_o[q_at..].as_ptr(), q_stride);
                        let (s_out, ds_out) = (
                            Raw::rows(s.as_mut_ptr(), num_keys),
                            Raw::rows(ds.as_mut_ptr(), num_keys),
                        );
                        let none = Parallelism::None;
                        // SAFETY: rows and keys are inside the tensors; the tiles belong to this task.
                        unsafe {
                            let size = (rows, num_keys, dh);
                            product(size, s_out, Into::Overwrite, q_rows, k_rows.t(), none);
                            product(size, ds_out, Into::Overwrite, do_rows, v_rows.t(), none);
                        }
                        for (i, (s, ds)) in
                            s.chunks_mut(num_keys).zip(ds.chunks_mut(num_keys)).enumerate()
                        {
                            let seen = tile.seen(i);
                            let lse = lse[head * t + first_query + i];
                            score_grad_row(&mut s[..seen], &mut ds[..seen], scale, lse, delta[i]);
                            s[seen..].fill(0.0);
                            ds[seen..].fill(0.0);
                        }
                        let p = Raw::rows(s.as_ptr(), num_keys);
                        let ds = Raw::rows(ds.as_ptr(), num_keys);
                        // SAFETY: this key-value head of this segment, and its query heads, belong to this task.
                        unsafe {
                            let dv = Raw::rows(dv_part.at(k_at), k_stride);
                            product((num_keys, dh, rows), dv, Into::Add, p.t(), do_rows, none);
                            let dk = Raw::rows(dk_part.at(k_at), k_stride);
                            product((num_keys, dh, rows), dk, Into::Add, ds.t(), q_rows, none);
                            let dq = Raw::rows(dq_part.at(q_at), q_stride);
                            product((rows, dh, num_keys), dq, Into::Add, ds, k_rows, none);
                        }
                    }
                }
            }
        },
    );
    (dq, dk, dv)
}

fn spans(segments: Segments<'_>) -> Vec<Span> {
    ranges(segments.cu_seqlens).map(|range| Span { queries: range.clone(), keys: range }).collect()
}

impl AttentionBackend for Flash {
    fn name(&self) -> &'static str {
        "flash"
    }

    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: Segments<'_>,
        masking: Masking,
    ) -> Result<(Tensor, Tensor)> {
        let op = "flash_attention";
        let sizes = Sizes::check(op, qkv, segments)?;
        let Sizes { t, h, hkv, dh, dtype } = sizes;
        let (q, k, v) = (read(op, "q", qkv.q)?, read(op, "k", qkv.k)?, read(op, "v", qkv.v)?);
        let heads = Heads { h, hkv, dh, scale: sizes.scale() };
        let spans = spans(segments);
        let (o, lse) = forward(&heads, (&q.f32()?, &k.f32()?, &v.f32()?), &spans, masking);
        Ok((cpu::tensor(o, (t, h, dh), dtype)?, cpu::tensor(lse, (h, t), DType::F32)?))
    }

    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: Segments<'_>,
        masking: Masking,
    ) -> Result<QkvGrad> {
        let op = "flash_attention_backward";
        let sizes = Sizes::check(op, qkv, segments)?;
        sizes.check_backward(op, o, lse, d_o)?;
        let Sizes { t, h, hkv, dh, dtype } = sizes;
        let (q, k, v) = (read(op, "q", qkv.q)?, read(op, "k", qkv.k)?, read(op, "v", qkv.v)?);
        let (o, lse, d_o) = (read(op, "o", o)?, read(op, "lse", lse)?, read(op, "d_o", d_o)?);
        let (q, k, v) = (q.f32()?, k.f32()?, v.f32()?);
        let (o, lse, d_o) = (o.f32()?, lse.f32()?, d_o.f32()?);
        let given = Given { q: &q, k: &k, v: &v, o: &o, lse: &lse, d_o: &d_o };
        let (dq, dk, dv) = backward(sizes, &given, &spans(segments), masking);
        Ok(QkvGrad {
            dq: cpu::tensor(dq, (t, h, dh), dtype)?,
            dk: cpu::tensor(dk, (t, hkv, dh), dtype)?,
            dv: cpu::tensor(dv, (t, hkv, dh), dtype)?,
        })
    }
}
