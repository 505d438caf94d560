//! Attention in tiles: no full score matrix, no mask tensor, no repeated key-value heads.
//!
//! A tile stacks the rows of all query heads that share a key-value head, so that one matrix
//! product reads each key once for the whole group. A forward task is one block of queries of one
//! key-value head; it iterates over the keys in tiles with a running maximum and sum. A backward
//! task is one key-value head of one segment; only this task writes the corresponding part of `dk`
//! and `dv`, so there is no sum across tasks. Keys that no query of a block attends to are skipped.

#![expect(unsafe_code, reason = "tasks write disjoint strided parts of the same buffer")]

use super::products::{Raw, Store, Threads, product};
use super::simd::{dot, exp, exp_in_place, kernels, max};
use super::{self as cpu, Shared};
use crate::{Masking, Scores};
use std::ops::Range;

/// Target number of rows in a tile: queries times the heads of a group. More rows amortize the cost
/// of reading the keys.
const ROWS: usize = 256;
/// Minimum number of queries of a head in a tile, for groups of any size.
const MIN_QUERIES: usize = 32;
/// Maximum number of keys in a tile.
const KEYS: usize = 512;

/// Queries and the keys they attend to. The queries are the last `queries.len()` positions of the
/// keys.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub(crate) queries: Range<usize>,
    pub(crate) keys: Range<usize>,
}

impl Span {
    /// The keys that any of the queries `rows` (counted from the first query) attends to.
    fn visible(&self, rows: Range<usize>, masking: Masking) -> Range<usize> {
        let of_row = |row: usize| {
            masking.visible_keys(self.keys.len() - self.queries.len() + row, self.keys.len())
        };
        of_row(rows.start).start..of_row(rows.end - 1).end
    }
}

/// One tile of scores: the `rows` queries from `first_row` of a span, for each head of a group,
/// against `num_keys` keys from `first_key`.
struct ScoreTile<'a> {
    span: &'a Span,
    masking: Masking,
    first_row: usize,
    rows: usize,
    first_key: usize,
    num_keys: usize,
}

impl ScoreTile<'_> {
    /// The keys of the tile that row `i` of the tile attends to.
    fn visible(&self, i: usize) -> Range<usize> {
        let row = self.first_row + i % self.rows;
        let visible = self.span.visible(row..row + 1, self.masking);
        let in_tile = |key: usize| key.saturating_sub(self.first_key).min(self.num_keys);
        in_tile(visible.start)..in_tile(visible.end)
    }
}

/// Rows of the queries `first_query..first_query + rows` in the heads of a group, within a tensor
/// `[T, H, Dh]`.
#[derive(Clone, Copy)]
struct Block {
    first_query: usize,
    rows: usize,
    first_head: usize,
    group: usize,
    h: usize,
    dh: usize,
}

impl Block {
    fn num_rows(self) -> usize {
        self.rows * self.group
    }

    /// Head and query index of row `i`.
    fn head_and_query(self, i: usize) -> (usize, usize) {
        (self.first_head + i / self.rows, self.first_query + i % self.rows)
    }

    /// Element range of row `i` in the tensor.
    fn range(self, i: usize) -> Range<usize> {
        let (head, query) = self.head_and_query(i);
        let start = (query * self.h + head) * self.dh;
        start..start + self.dh
    }

    /// Copies the rows from the tensor `all` into consecutive rows.
    fn gather(self, all: &[f32], rows: &mut [f32]) {
        for (i, row) in rows.chunks_mut(self.dh).take(self.num_rows()).enumerate() {
            row.copy_from_slice(&all[self.range(i)]);
        }
    }
}

kernels! {
    // Replaces a row of scores by exponentials. Returns the updated running maximum and sum, and
    // the factor that rescales the previous partial result.
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

    fn scaled_row(x: &[f32], factor: f32, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x * factor;
        }
    }

    // Replaces the scores `s` by probabilities, and their gradient `dp` by the gradient of the
    // scores.
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

/// Numbers of heads, head dim and scores of a call.
pub(crate) struct Heads {
    pub(crate) h: usize,
    pub(crate) hkv: usize,
    pub(crate) dh: usize,
    pub(crate) scores: Scores,
}

impl Heads {
    /// Number of query heads that share a key-value head.
    fn group(&self) -> usize {
        self.h / self.hkv
    }

    /// Number of queries of a head in a tile.
    fn queries(&self) -> usize {
        (ROWS / self.group()).max(MIN_QUERIES)
    }

    /// Number of rows of the largest tile over `spans`.
    fn max_rows(&self, spans: &[Span]) -> usize {
        let longest = spans.iter().map(|span| span.queries.len()).max().unwrap_or(0);
        self.group() * self.queries().min(longest)
    }

    /// The tasks of the forward pass, most expensive first: span, key-value head, first row.
    fn forward_tasks(&self, spans: &[Span]) -> Vec<(usize, usize, usize)> {
        let mut tasks = Vec::new();
        for (index, span) in spans.iter().enumerate() {
            for kv in 0..self.hkv {
                for first_row in (0..span.queries.len()).step_by(self.queries()) {
                    let rows = self.queries().min(span.queries.len() - first_row);
                    let cost =
                        rows * span.visible(first_row..first_row + rows, self.scores.masking).len();
                    tasks.push((cost, (index, kv, first_row)));
                }
            }
        }
        tasks.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
        tasks.into_iter().map(|(_, task)| task).collect()
    }

    fn block(&self, span: &Span, kv: usize, first_row: usize) -> Block {
        Block {
            first_query: span.queries.start + first_row,
            rows: self.queries().min(span.queries.len() - first_row),
            first_head: kv * self.group(),
            group: self.group(),
            h: self.h,
            dh: self.dh,
        }
    }
}

/// Number of keys of the largest tile over `spans`.
fn max_keys(spans: &[Span]) -> usize {
    KEYS.min(spans.iter().map(|span| span.keys.len()).max().unwrap_or(0))
}

/// Returns `o [T, H, Dh]` and `lse [H, T]` for the queries of `spans`, which tile the `T` queries.
pub(crate) fn forward(
    heads: &Heads,
    (q, k, v): (&[f32], &[f32], &[f32]),
    spans: &[Span],
) -> (Vec<f32>, Vec<f32>) {
    let &Heads { h, hkv, dh, scores: Scores { masking, scale } } = heads;
    let k_stride = hkv * dh;
    let t = q.len() / (h * dh).max(1);
    let (mut o, mut lse) = (vec![0f32; q.len()], vec![0f32; h * t]);
    let tasks = heads.forward_tasks(spans);
    let (o_part, lse_part) = (Shared::of(&mut o), Shared::of(&mut lse));
    let max_rows = heads.max_rows(spans);
    let scratch = || {
        let rows = || vec![0f32; max_rows * dh];
        (vec![0f32; max_rows * max_keys(spans)], rows(), rows())
    };
    cpu::for_each_task(tasks.len(), scratch, |(scores, q_rows, o_rows), task| {
        let (index, kv, first_row) = tasks[task];
        let span = &spans[index];
        let block = heads.block(span, kv, first_row);
        let (rows, num_rows) = (block.rows, block.num_rows());
        block.gather(q, q_rows);
        let mut running = vec![(f32::NEG_INFINITY, 0f32); num_rows];
        let of_block = span.visible(first_row..first_row + rows, masking);
        for first_key in of_block.clone().step_by(KEYS) {
            let num_keys = KEYS.min(of_block.end - first_key);
            let tile = ScoreTile { span, masking, first_row, rows, first_key, num_keys };
            let at = (span.keys.start + first_key) * k_stride + kv * dh;
            let is_first = first_key == of_block.start;
            let scores = &mut scores[..num_rows * num_keys];
            // SAFETY: the keys are inside the tensor, and this task owns the scratch.
            unsafe {
                product(
                    (num_rows, num_keys, dh),
                    Raw::rows(scores.as_mut_ptr(), num_keys),
                    Store::Overwrite,
                    Raw::rows(q_rows.as_ptr(), dh),
                    Raw::rows(k[at..].as_ptr(), k_stride).t(),
                    Threads::One,
                );
            }
            for (i, scores) in scores.chunks_mut(num_keys).enumerate() {
                let visible = tile.visible(i);
                scores[..visible.start].fill(0.0);
                scores[visible.end..].fill(0.0);
                if visible.is_empty() {
                    continue; // the query attends to no key of the tile
                }
                let (old_max, old_sum) = running[i];
                let [max, sum, factor] = softmax_row(&mut scores[visible], scale, old_max, old_sum);
                running[i] = (max, sum);
                if !is_first {
                    scale_row(&mut o_rows[i * dh..(i + 1) * dh], factor);
                }
            }
            // SAFETY: as above.
            unsafe {
                product(
                    (num_rows, dh, num_keys),
                    Raw::rows(o_rows.as_mut_ptr(), dh),
                    if is_first { Store::Overwrite } else { Store::Add },
                    Raw::rows(scores.as_ptr(), num_keys),
                    Raw::rows(v[at..].as_ptr(), k_stride),
                    Threads::One,
                );
            }
        }
        for (i, (o_row, (max, sum))) in o_rows.chunks(dh).zip(running).enumerate() {
            let (head, query) = block.head_and_query(i);
            let lse_at = head * t + query;
            // SAFETY: only this task writes these rows of these heads.
            let (o, lse) =
                unsafe { (o_part.slice(block.range(i)), lse_part.slice(lse_at..lse_at + 1)) };
            scaled_row(o_row, 1.0 / sum, o);
            lse[0] = max + sum.ln();
        }
    });
    (o, lse)
}

/// Inputs of the backward pass, in `f32`.
pub(crate) struct BackwardInputs<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) o: &'a [f32],
    pub(crate) lse: &'a [f32],
    pub(crate) d_o: &'a [f32],
}

/// Buffers of one thread in the backward pass.
struct BackwardBuffers {
    scores: Vec<f32>,
    grads: Vec<f32>,
    q: Vec<f32>,
    d_o: Vec<f32>,
    dq: Vec<f32>,
}

pub(crate) fn backward(
    heads: &Heads,
    inputs: &BackwardInputs<'_>,
    spans: &[Span],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let &Heads { h, hkv, dh, .. } = heads;
    let t = inputs.q.len() / (h * dh);
    let mut dq = vec![0f32; inputs.q.len()];
    let (mut dk, mut dv) = (vec![0f32; t * hkv * dh], vec![0f32; t * hkv * dh]);
    let mut tasks: Vec<(usize, usize)> =
        (0..spans.len()).flat_map(|span| (0..hkv).map(move |kv| (span, kv))).collect();
    tasks.sort_by_key(|(span, _)| std::cmp::Reverse(spans[*span].keys.len())); // longest first
    let parts = (Shared::of(&mut dq), Shared::of(&mut dk), Shared::of(&mut dv));
    let max_rows = heads.max_rows(spans);
    let scratch = || {
        let tile = || vec![0f32; max_rows * max_keys(spans)];
        let rows = || vec![0f32; max_rows * dh];
        BackwardBuffers { scores: tile(), grads: tile(), q: rows(), d_o: rows(), dq: rows() }
    };
    cpu::for_each_task(tasks.len(), scratch, |scratch, task| {
        let (index, kv) = tasks[task];
        for first_row in (0..spans[index].queries.len()).step_by(heads.queries()) {
            backward_block(heads, inputs, (&spans[index], kv, first_row), scratch, parts);
        }
    });
    (dq, dk, dv)
}

/// Computes `dq` of one block of queries and adds the contribution of the block to `dk` and `dv`.
fn backward_block(
    heads: &Heads,
    inputs: &BackwardInputs<'_>,
    (span, kv, first_row): (&Span, usize, usize),
    scratch: &mut BackwardBuffers,
    (dq_part, dk_part, dv_part): (Shared<f32>, Shared<f32>, Shared<f32>),
) {
    let &Heads { h, hkv, dh, scores: Scores { masking, scale } } = heads;
    let (k_stride, t) = (hkv * dh, inputs.q.len() / (h * dh));
    let block = heads.block(span, kv, first_row);
    let (rows, num_rows) = (block.rows, block.num_rows());
    block.gather(inputs.q, &mut scratch.q);
    block.gather(inputs.d_o, &mut scratch.d_o);
    // `lse` of a row, and delta: the dot product of the row's output and output gradient.
    let of_row = |i: usize| {
        let (head, query) = block.head_and_query(i);
        let delta = dot_row(&inputs.o[block.range(i)], &inputs.d_o[block.range(i)]);
        (inputs.lse[head * t + query], delta)
    };
    let of_rows: Vec<(f32, f32)> = (0..num_rows).map(of_row).collect();
    let of_block = span.visible(first_row..first_row + rows, masking);
    let none = Threads::One;
    for first_key in of_block.clone().step_by(KEYS) {
        let num_keys = KEYS.min(of_block.end - first_key);
        let tile = ScoreTile { span, masking, first_row, rows, first_key, num_keys };
        let at = (span.keys.start + first_key) * k_stride + kv * dh;
        let s = &mut scratch.scores[..num_rows * num_keys];
        let ds = &mut scratch.grads[..num_rows * num_keys];
        let k_rows = Raw::rows(inputs.k[at..].as_ptr(), k_stride);
        let v_rows = Raw::rows(inputs.v[at..].as_ptr(), k_stride);
        let q_rows = Raw::rows(scratch.q.as_ptr(), dh);
        let do_rows = Raw::rows(scratch.d_o.as_ptr(), dh);
        let (s_out, ds_out) =
            (Raw::rows(s.as_mut_ptr(), num_keys), Raw::rows(ds.as_mut_ptr(), num_keys));
        // SAFETY: the keys are inside the tensors, and this task owns the scratch.
        unsafe {
            let size = (num_rows, num_keys, dh);
            product(size, s_out, Store::Overwrite, q_rows, k_rows.t(), none);
            product(size, ds_out, Store::Overwrite, do_rows, v_rows.t(), none);
        }
        let row_pairs = s.chunks_mut(num_keys).zip(ds.chunks_mut(num_keys));
        for (i, ((s, ds), (lse, delta))) in row_pairs.zip(&of_rows).enumerate() {
            let visible = tile.visible(i);
            score_grad_row(&mut s[visible.clone()], &mut ds[visible.clone()], scale, *lse, *delta);
            for hidden in [0..visible.start, visible.end..num_keys] {
                s[hidden.clone()].fill(0.0);
                ds[hidden].fill(0.0);
            }
        }
        let (p, ds) = (Raw::rows(s.as_ptr(), num_keys), Raw::rows(ds.as_ptr(), num_keys));
        let into = if first_key == of_block.start { Store::Overwrite } else { Store::Add };
        // SAFETY: only this task writes these keys of this key-value head, and it owns the scratch.
        unsafe {
            let dv = Raw::rows(dv_part.at(at), k_stride);
            product((num_keys, dh, num_rows), dv, Store::Add, p.t(), do_rows, none);
            let dk = Raw::rows(dk_part.at(at), k_stride);
            product((num_keys, dh, num_rows), dk, Store::Add, ds.t(), q_rows, none);
            let dq = Raw::rows(scratch.dq.as_mut_ptr(), dh);
            product((num_rows, dh, num_keys), dq, into, ds, k_rows, none);
        }
    }
    for (i, row) in scratch.dq.chunks(dh).take(num_rows).enumerate() {
        // SAFETY: only this task writes these rows of these heads.
        unsafe { dq_part.slice(block.range(i)) }.copy_from_slice(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    #[test]
    fn a_block_of_queries_reads_the_keys_of_its_window_only() {
        let window = Masking::Window(NonZeroUsize::new(10).unwrap());
        let span = Span { queries: 40..100, keys: 0..100 }; // 40 keys before the first query
        assert_eq!(span.visible(0..8, window), 31..48);
        assert_eq!(span.visible(52..60, window), 83..100);
        assert_eq!(span.visible(0..8, Masking::Causal), 0..48);
        let heads = Heads { h: 1, hkv: 1, dh: 8, scores: Scores::new(window, 8) };
        let whole = Span { queries: 0..600, keys: 0..600 };
        let keys = |(_, _, first): (usize, usize, usize)| {
            whole.visible(first..(first + heads.queries()).min(600), window).len()
        };
        let read: usize =
            heads.forward_tasks(std::slice::from_ref(&whole)).into_iter().map(keys).sum();
        assert_eq!(read, 600 + 9 + 9); // three blocks of queries, each with nine keys before it
    }
}
