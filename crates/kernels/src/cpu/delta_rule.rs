//! The gated delta rule in chunks: all work between two states is matrix products.
//!
//! A task is one key head of one segment with its *group*, the value heads that share the key head.
//! The states of a group are one matrix `[dk, group * dv]`, so that one product reads or writes all
//! of them. A task iterates over the chunks of its segment and shares no result with other tasks:
//! results do not depend on other segments or on the number of threads.

#![expect(unsafe_code, reason = "tasks write disjoint strided parts of the same buffer")]

use super::products::{Matrix, Raw, Store, Threads, multiply, product};
use super::simd::{dot, exp, kernels};
use super::{self as cpu, Shared};
use std::ops::Range;

/// Number of tokens in a chunk.
pub(crate) const CHUNK: usize = 64;
/// Number of columns of a triangular system that are solved at a time, in registers.
const COLUMNS: usize = 64;
/// Added to the squared length of queries and keys.
const EPS: f32 = 1e-6;

/// Numbers of heads and their sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeltaRuleSizes {
    pub(crate) key_heads: usize,
    /// Number of value heads that share a key head.
    pub(crate) group: usize,
    pub(crate) dk: usize,
    pub(crate) dv: usize,
}

impl DeltaRuleSizes {
    pub(crate) fn value_heads(self) -> usize {
        self.key_heads * self.group
    }

    /// Number of values of a token in a group.
    pub(super) fn group_width(self) -> usize {
        self.group * self.dv
    }

    /// Number of values of a token.
    pub(crate) fn width(self) -> usize {
        self.key_heads * self.group_width()
    }

    /// Number of queries, keys and values of a token.
    pub(crate) fn qkv_width(self) -> usize {
        2 * self.key_heads * self.dk + self.width()
    }

    /// First elements of the query, the key and the values of a key head in the row of `token`.
    pub(super) fn starts(self, token: usize, key_head: usize) -> [usize; 3] {
        let (row, keys) = (token * self.qkv_width(), self.key_heads * self.dk);
        let q = row + key_head * self.dk;
        [q, q + keys, row + 2 * keys + key_head * self.group_width()]
    }

    pub(super) fn scale(self) -> f32 {
        1.0 / (self.dk as f32).sqrt()
    }
}

/// Operands, in `f32`.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) qkv: &'a [f32],
    pub(crate) g: &'a [f32],
    pub(crate) beta: &'a [f32],
}

/// A piece of a segment, for one key head.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) first: usize,
    /// Number of tokens.
    pub(super) c: usize,
    pub(super) key_head: usize,
}

/// Which rows of a chunk are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    /// What the next state needs.
    Keys,
    /// The outputs too.
    All,
}

kernels! {
    // Writes `scale * x / |x|` to `y` and returns `1 / |x|`.
    fn unit_row(x: &[f32], scale: f32, y: &mut [f32]) -> f32 {
        let inverse = 1.0 / (dot(x, x) + EPS).sqrt();
        for (y, x) in y.iter_mut().zip(x) {
            *y = x * inverse * scale;
        }
        inverse
    }

    // Decay from each token of the chunk to token `at`. The difference is taken in `f64`: in `f32`,
    // a decay over the chunk of `e^-500` would leave only four digits of the decays behind it.
    fn decay_row(y: &[f64], at: usize, d: &mut [f32]) {
        for j in 0..=at {
            d[j] = exp((y[at] - y[j]) as f32);
        }
        d[at + 1..].fill(0.0);
    }

    fn product_row(x: &[f32], d: &[f32], factor: f32, y: &mut [f32]) {
        for ((y, x), d) in y.iter_mut().zip(x).zip(d) {
            *y = factor * x * d;
        }
    }

    fn error_row(v: &[f32], read: &[f32], e: f32, beta: f32, z: &mut [f32], n: &mut [f32]) {
        let width = z.len();
        let (v, read, n) = (&v[..width], &read[..width], &mut n[..width]);
        for i in 0..width {
            z[i] = (-e).mul_add(read[i], v[i]);
            n[i] = beta * z[i];
        }
    }

    pub(super) fn scaled(x: &[f32], factor: f32, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x * factor;
        }
    }

    pub(super) fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    pub(super) fn dot_row(x: &[f32], y: &[f32]) -> f32 {
        dot(x, y)
    }

    // Solves `(I + A) X = B` for `width` columns of `x`, which holds `B`; `a [_, CHUNK]` is
    // strictly lower triangular.
    fn solve_lower(a: &[f32], c: usize, x: &mut [f32], stride: usize, width: usize) {
        let whole = width / COLUMNS * COLUMNS;
        for start in (0..whole).step_by(COLUMNS) {
            for i in 0..c {
                let mut row = [0f32; COLUMNS];
                row.copy_from_slice(&x[i * stride + start..i * stride + start + COLUMNS]);
                for j in 0..i {
                    let (factor, other) = (-a[i * CHUNK + j], j * stride + start);
                    let other = &x[other..other + COLUMNS];
                    for k in 0..COLUMNS {
                        row[k] = factor.mul_add(other[k], row[k]);
                    }
                }
                x[i * stride + start..i * stride + start + COLUMNS].copy_from_slice(&row);
            }
        }
        for i in 0..c {
            for j in 0..i {
                let factor = -a[i * CHUNK + j];
                for k in whole..width {
                    x[i * stride + k] = factor.mul_add(x[j * stride + k], x[i * stride + k]);
                }
            }
        }
    }

    // Solves `(I + A)^T X = B` like `solve_lower`.
    pub(super) fn solve_upper(a: &[f32], c: usize, x: &mut [f32], stride: usize, width: usize) {
        let whole = width / COLUMNS * COLUMNS;
        for start in (0..whole).step_by(COLUMNS) {
            for back in 0..c {
                let i = c - 1 - back;
                let mut row = [0f32; COLUMNS];
                row.copy_from_slice(&x[i * stride + start..i * stride + start + COLUMNS]);
                for j in i + 1..c {
                    let (factor, other) = (-a[j * CHUNK + i], j * stride + start);
                    let other = &x[other..other + COLUMNS];
                    for k in 0..COLUMNS {
                        row[k] = factor.mul_add(other[k], row[k]);
                    }
                }
                x[i * stride + start..i * stride + start + COLUMNS].copy_from_slice(&row);
            }
        }
        for back in 0..c {
            let i = c - 1 - back;
            for j in i + 1..c {
                let factor = -a[j * CHUNK + i];
                for k in whole..width {
                    x[i * stride + k] = factor.mul_add(x[j * stride + k], x[i * stride + k]);
                }
            }
        }
    }
}

/// What a chunk computes from its operands and the states that enter it. The rows of the queries
/// come first in matrices with `2 c` rows, and those of the keys follow.
pub(super) struct Chunk {
    pub(super) sizes: DeltaRuleSizes,
    /// Scaled unit queries and unit keys, `[2 c, dk]`.
    pub(super) units: Vec<f32>,
    /// `1 / |x|` of the rows of queries and keys.
    pub(super) inverses: Vec<f32>,
    /// Products of the rows of `units` with the keys, `[2 c, CHUNK]`.
    pub(super) products: Vec<f32>,
    /// Rows of `units` times the states, `[2 c, group * dv]`.
    pub(super) reads: Vec<f32>,
    /// Decay from token `j` to token `i`, for each head `[CHUNK, CHUNK]`.
    pub(super) decays: Vec<f32>,
    /// Decayed products of queries and keys, for each head `[CHUNK, CHUNK]`.
    pub(super) p: Vec<f32>,
    /// Decayed products of keys times `beta`, below the diagonal, for each head `[CHUNK, CHUNK]`.
    pub(super) a: Vec<f32>,
    /// Values minus what the states hold for the keys, `[c, group * dv]`.
    pub(super) z: Vec<f32>,
    /// What the tokens write, `[c, group * dv]`.
    pub(super) n: Vec<f32>,
    /// The same, decayed to the end of the chunk.
    pub(super) tail_n: Vec<f32>,
    /// Decay from the start of the chunk to each token, for each head `[CHUNK]`.
    pub(super) heads: Vec<f32>,
    /// Decay from each token to the end of the chunk, for each head `[CHUNK]`.
    pub(super) tails: Vec<f32>,
}

impl Chunk {
    pub(super) fn new(sizes: DeltaRuleSizes) -> Self {
        let (width, group) = (sizes.group_width(), sizes.group);
        let zeros = |len: usize| vec![0f32; len];
        Self {
            sizes,
            units: zeros(2 * CHUNK * sizes.dk),
            inverses: zeros(2 * CHUNK),
            products: zeros(2 * CHUNK * CHUNK),
            reads: zeros(2 * CHUNK * width),
            decays: zeros(group * CHUNK * CHUNK),
            p: zeros(group * CHUNK * CHUNK),
            a: zeros(group * CHUNK * CHUNK),
            z: zeros(CHUNK * width),
            n: zeros(CHUNK * width),
            tail_n: zeros(CHUNK * width),
            heads: zeros(group * CHUNK),
            tails: zeros(group * CHUNK),
        }
    }

    /// Decay over the whole chunk of a head.
    pub(super) fn decay(&self, head: usize, c: usize) -> f32 {
        self.heads[head * CHUNK + c - 1]
    }

    /// Computes everything from the states that enter the chunk.
    pub(super) fn prepare(&mut self, inputs: Inputs<'_>, at: Place, state: &[f32], rows: Rows) {
        let (DeltaRuleSizes { dk, dv, group, .. }, c) = (self.sizes, at.c);
        let width = self.sizes.group_width();
        let from = if rows == Rows::All { 0 } else { c };
        for i in 0..c {
            let [q, k, _] = self.sizes.starts(at.first + i, at.key_head);
            if rows == Rows::All {
                let unit = &mut self.units[i * dk..(i + 1) * dk];
                self.inverses[i] = unit_row(&inputs.qkv[q..q + dk], self.sizes.scale(), unit);
            }
            let unit = &mut self.units[(c + i) * dk..(c + i + 1) * dk];
            self.inverses[c + i] = unit_row(&inputs.qkv[k..k + dk], 1.0, unit);
        }
        let (own, keys) = (&self.units[from * dk..], &self.units[c * dk..]);
        let products = (&mut self.products[from * CHUNK..], CHUNK);
        let (own, keys) = (Matrix::rows(own, dk), Matrix::rows(keys, dk).t());
        multiply((2 * c - from, c, dk), products, Store::Overwrite, own, keys, Threads::One);
        let reads = (&mut self.reads[from * width..], width);
        let state = Matrix::rows(state, width);
        multiply((2 * c - from, width, dk), reads, Store::Overwrite, own, state, Threads::One);
        for head in 0..group {
            self.tiles(inputs, at, head, rows);
            let columns = head * dv..(head + 1) * dv;
            for i in 0..c {
                let [_, _, v] = self.sizes.starts(at.first + i, at.key_head);
                let row = i * width + columns.start..i * width + columns.end;
                let read = (c + i) * width + columns.start;
                let e = self.heads[head * CHUNK + i];
                error_row(
                    &inputs.qkv[v + columns.start..v + columns.end],
                    &self.reads[read..read + dv],
                    e,
                    inputs.beta[self.gate(at, head, i)],
                    &mut self.z[row.clone()],
                    &mut self.n[row],
                );
            }
            let a = &self.a[head * CHUNK * CHUNK..];
            solve_lower(a, c, &mut self.n[columns.start..], width, dv);
            for i in 0..c {
                let row = i * width + columns.start..i * width + columns.end;
                scaled(&self.n[row.clone()], self.tails[head * CHUNK + i], &mut self.tail_n[row]);
            }
        }
    }

    /// Index of the gates of token `i` of the chunk.
    pub(super) fn gate(&self, at: Place, head: usize, i: usize) -> usize {
        (at.first + i) * self.sizes.value_heads() + at.key_head * self.sizes.group + head
    }

    /// Computes the decays of a head, and its matrices `p` and `a`.
    fn tiles(&mut self, inputs: Inputs<'_>, at: Place, head: usize, rows: Rows) {
        let c = at.c;
        let mut y = [0f64; CHUNK];
        let mut sum = 0f64;
        for (i, y) in y[..c].iter_mut().enumerate() {
            sum += f64::from(inputs.g[self.gate(at, head, i)]);
            *y = sum;
        }
        for i in 0..c {
            self.heads[head * CHUNK + i] = (y[i] as f32).exp();
            self.tails[head * CHUNK + i] = ((sum - y[i]) as f32).exp();
            let beta = inputs.beta[self.gate(at, head, i)];
            let row = (head * CHUNK + i) * CHUNK..(head * CHUNK + i) * CHUNK + c;
            decay_row(&y[..c], i, &mut self.decays[row.clone()]);
            let d = &self.decays[row.clone()];
            if rows == Rows::All {
                let products = &self.products[i * CHUNK..i * CHUNK + c];
                product_row(products, d, 1.0, &mut self.p[row.clone()]);
            }
            let products = &self.products[(c + i) * CHUNK..(c + i) * CHUNK + c];
            product_row(products, d, beta, &mut self.a[row.clone()]);
            self.a[row.start + i] = 0.0;
        }
    }

    /// Replaces the states that entered the chunk by those that leave it.
    pub(super) fn advance(&self, at: Place, state: &mut [f32]) {
        let (DeltaRuleSizes { dk, .. }, c, width) = (self.sizes, at.c, self.sizes.group_width());
        self.decay_columns(c, state);
        let (keys, n) = (&self.units[c * dk..], &self.tail_n);
        let (keys, n) = (Matrix::rows(keys, dk).t(), Matrix::rows(n, width));
        multiply((dk, width, c), (state, width), Store::Add, keys, n, Threads::One);
    }

    /// Scales the columns of each head by the decay over the chunk.
    pub(super) fn decay_columns(&self, c: usize, state: &mut [f32]) {
        let dv = self.sizes.dv;
        for row in state.chunks_mut(self.sizes.group_width()) {
            for (head, part) in row.chunks_mut(dv).enumerate() {
                scale(part, self.decay(head, c));
            }
        }
    }

    /// Writes the outputs of the chunk to `o [T, Hv * dv]`.
    fn write(&self, at: Place, o: Shared<f32>) {
        let (DeltaRuleSizes { dv, group, .. }, c) = (self.sizes, at.c);
        let (width, stride) = (self.sizes.group_width(), self.sizes.width());
        for head in 0..group {
            let start = at.first * stride + at.key_head * width + head * dv;
            for i in 0..c {
                let read = &self.reads[i * width + head * dv..i * width + (head + 1) * dv];
                let row = start + i * stride;
                // SAFETY: only this task writes these tokens of this head.
                let row = unsafe { o.slice(row..row + dv) };
                scaled(read, self.heads[head * CHUNK + i], row);
            }
            let p = Raw::rows(self.p[head * CHUNK * CHUNK..].as_ptr(), CHUNK);
            let n = Raw::rows(self.n[head * dv..].as_ptr(), width);
            // SAFETY: as above; `p` and `n` have `c` rows.
            unsafe {
                let rows = Raw::rows(o.at(start), stride);
                product((c, dv, c), rows, Store::Add, p, n, Threads::One);
            }
        }
    }
}

/// Pieces of a segment, for one key head.
pub(super) fn places(
    segment: &Range<usize>,
    key_head: usize,
) -> impl DoubleEndedIterator<Item = Place> {
    let (start, end) = (segment.start, segment.end);
    (0..segment.len().div_ceil(CHUNK)).map(move |index| {
        let first = start + index * CHUNK;
        Place { first, c: CHUNK.min(end - first), key_head }
    })
}

/// Index of the segment and key head of each task, longest segments first.
pub(super) fn tasks(sizes: DeltaRuleSizes, segments: &[Range<usize>]) -> Vec<(usize, usize)> {
    let heads = |segment| (0..sizes.key_heads).map(move |head| (segment, head));
    let mut tasks: Vec<_> = (0..segments.len()).flat_map(heads).collect();
    tasks.sort_by_key(|(segment, _)| std::cmp::Reverse(segments[*segment].len()));
    tasks
}

/// Returns `o [T, Hv * dv]`. `states [segments, Hv, dk, dv]`, if given, holds the states that enter
/// the segments, and receives those that leave them.
pub(crate) fn forward(
    sizes: DeltaRuleSizes,
    inputs: Inputs<'_>,
    segments: &[Range<usize>],
    states: Option<&mut [f32]>,
) -> Vec<f32> {
    let DeltaRuleSizes { group, dk, dv, .. } = sizes;
    let num_tokens = inputs.qkv.len() / sizes.qkv_width();
    let mut o = vec![0f32; num_tokens * sizes.width()];
    let (out, tasks) = (Shared::of(&mut o), tasks(sizes, segments));
    let states = states.map(Shared::of);
    let width = sizes.group_width();
    let scratch = || (Chunk::new(sizes), vec![0f32; dk * width]);
    cpu::for_each_task(tasks.len(), scratch, |(chunk, state), task| {
        let (segment, key_head) = tasks[task];
        // Rows of `state` and of the tensor that holds it between calls.
        let rows = |head: usize, row: usize| {
            let head_at = (segment * sizes.key_heads + key_head) * group + head;
            let at = (head_at * dk + row) * dv;
            (row * width + head * dv..row * width + (head + 1) * dv, at..at + dv)
        };
        let each = || (0..group).flat_map(|head| (0..dk).map(move |row| rows(head, row)));
        state.fill(0.0);
        if let Some(states) = states {
            // SAFETY: only this task accesses the states of these heads of this segment.
            each().for_each(|(own, at)| state[own].copy_from_slice(unsafe { states.slice(at) }));
        }
        for at in places(&segments[segment], key_head) {
            chunk.prepare(inputs, at, state, Rows::All);
            chunk.write(at, out);
            chunk.advance(at, state);
        }
        if let Some(states) = states {
            // SAFETY: as above.
            each().for_each(|(own, at)| unsafe { states.slice(at) }.copy_from_slice(&state[own]));
        }
    });
    o
}
