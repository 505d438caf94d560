//! Products of a matrix of many columns, of which some elements may be dropped, with a matrix of
//! few columns, as in an adapter. A pass reads the wide matrix once, in tiles; a tile without its
//! dropped elements exists only in the L1 cache. The `gemm` crate would copy the whole matrix for
//! the few operations on each element.
//!
//! Shapes: wide `x [N, K]`, narrow `w [K, R]`, `u [N, R]`. Sums are in the same order at every SIMD
//! level and for any number of threads.

use super::blocks::Scratch;
use super::simd::kernels;
use crate::dropout::{Drops, HALF, SHARED};
use crate::moments::mix;
use rayon::prelude::*;
use std::array::from_fn;
use std::ops::Range;

/// Number of columns of a narrow matrix that are computed together.
pub(crate) const LANES: usize = 8;
/// Numbers of rows and of columns of the wide matrix whose sums are held in registers.
const ROWS: usize = 12;
const COLUMNS: usize = 16;
/// Numbers of rows and of columns of a tile. It starts with the first element of a random number.
const TILE_ROWS: usize = 2 * ROWS;
const TILE: usize = 8 * SHARED;
/// Number of rows of a task. Each task has a partial sum of a sum over rows.
const TASK_ROWS: usize = 4 * TILE_ROWS;
/// Number of rows that [`expand`] computes together.
const EXPANDED: usize = 4;

/// The elements of a row in [`LANES`] columns.
type Lanes = [f32; LANES];

/// A narrow matrix in groups of [`LANES`] columns. The last group is filled up with zeros.
pub(crate) struct Narrow {
    groups: Vec<Vec<Lanes>>,
    rank: usize,
}

impl Narrow {
    fn new(len: usize, rank: usize, value: impl Fn(usize, usize) -> f32) -> Self {
        let group = |first: usize| {
            let end = rank.min(first + LANES);
            let lane = |row, column| if column < end { value(row, column) } else { 0.0 };
            (0..len).map(|row| from_fn(|lane_of| lane(row, first + lane_of))).collect()
        };
        Self { groups: (0..rank).step_by(LANES).map(group).collect(), rank }
    }

    fn zeros(len: usize, rank: usize) -> Self {
        Self { groups: vec![vec![[0.0; LANES]; len]; rank.div_ceil(LANES)], rank }
    }

    /// The matrix `data [_, rank]`.
    pub(crate) fn rows(data: &[f32], rank: usize) -> Self {
        Self::new(data.len() / rank, rank, |row, column| data[row * rank + column])
    }

    fn flat(&self) -> Vec<f32> {
        let mut flat = vec![0.0; self.groups[0].len() * self.rank];
        for (row, y) in flat.chunks_exact_mut(self.rank).enumerate() {
            for (group, y) in self.groups.iter().zip(y.chunks_mut(LANES)) {
                y.copy_from_slice(&group[row][..y.len()]);
            }
        }
        flat
    }

    /// The transposed matrix of `data [rank, _]`.
    pub(crate) fn columns(data: &[f32], rank: usize) -> Self {
        let len = data.len() / rank;
        Self::new(len, rank, |row, column| data[column * len + row])
    }
}

/// A narrow matrix `[K, R]` in blocks of [`COLUMNS`] rows of a group, which are transposed.
pub(crate) struct Sums {
    groups: Vec<Vec<[[f32; COLUMNS]; LANES]>>,
    rank: usize,
}

impl Sums {
    fn zeros(len: usize, rank: usize) -> Self {
        let group = vec![[[0.0; COLUMNS]; LANES]; len.div_ceil(COLUMNS)];
        Self { groups: vec![group; rank.div_ceil(LANES)], rank }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.groups[column / LANES][row / COLUMNS][column % LANES][row % COLUMNS]
    }

    /// Adds the transposed matrix, times `factor`, to `dst [R, K]`.
    pub(crate) fn add_columns(&self, factor: f32, dst: &mut [f32]) {
        let len = dst.len() / self.rank;
        for (column, dst) in dst.chunks_exact_mut(len).enumerate() {
            dst.iter_mut().enumerate().for_each(|(row, y)| *y += factor * self.at(row, column));
        }
    }

    fn add(&mut self, other: &Self) {
        for (group, other) in self.groups.iter_mut().zip(&other.groups) {
            let other = other.as_flattened().as_flattened();
            super::add(other, group.as_flattened_mut().as_flattened_mut());
        }
    }
}

/// A matrix `[N, width]`. Elements that are dropped count as 0.
#[derive(Clone, Copy)]
pub(crate) struct Wide<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) width: usize,
    pub(crate) drops: Option<Drops>,
}

impl Wide<'_> {
    /// Returns `x w`, `[N, R]`, and `x^T d`, `[K, R]`, for `w [K, R]` and `d [N, R]` of rank `R`,
    /// if they are given, computed on all threads in one pass over `x`.
    pub(crate) fn products(
        self,
        rank: usize,
        w: Option<&Narrow>,
        d: Option<&Narrow>,
    ) -> (Vec<f32>, Sums) {
        let num_rows = self.x.len() / self.width;
        let task = |first: usize| {
            let rows = first..num_rows.min(first + TASK_ROWS);
            self.products_of(rows, rank, w, d)
        };
        let tasks = (0..num_rows).into_par_iter().step_by(TASK_ROWS).map(task);
        let mut u = Vec::with_capacity(num_rows * rank);
        let mut sum = Sums::zeros(if d.is_some() { self.width } else { 0 }, rank);
        for (part, partial) in tasks.collect::<Vec<_>>() {
            u.extend(part);
            sum.add(&partial);
        }
        (u, sum)
    }

    fn products_of(
        self,
        rows: Range<usize>,
        rank: usize,
        w: Option<&Narrow>,
        d: Option<&Narrow>,
    ) -> (Vec<f32>, Sums) {
        let mut u = Narrow::zeros(if w.is_some() { rows.len() } else { 0 }, rank);
        let mut dw = Sums::zeros(if d.is_some() { self.width } else { 0 }, rank);
        let mut kept = Scratch::of(TILE_ROWS * TILE);
        for first in rows.clone().step_by(TILE_ROWS) {
            let of_tile = first..rows.end.min(first + TILE_ROWS);
            let of_task = first - rows.start..of_tile.end - rows.start;
            for column in (0..self.width).step_by(TILE) {
                let columns = column..self.width.min(column + TILE);
                let x = &self.x[first * self.width + column..of_tile.end * self.width];
                let (x, stride) = match self.drops {
                    Some(drops) => {
                        let kept = &mut kept.all()[..of_tile.len() * columns.len()];
                        keep(drops, (first, column), x, self.width, kept, columns.len());
                        (&*kept, columns.len())
                    }
                    None => (x, self.width),
                };
                for group in 0..rank.div_ceil(LANES) {
                    if let Some(w) = w {
                        let u = &mut u.groups[group][of_task.clone()];
                        times(x, stride, &w.groups[group][columns.clone()], u);
                    }
                    if let Some(d) = d {
                        let blocks = column / COLUMNS..columns.end.div_ceil(COLUMNS);
                        let dw = &mut dw.groups[group][blocks];
                        outer(x, stride, &d.groups[group][of_tile.clone()], dw, columns.len());
                    }
                }
            }
        }
        (u.flat(), dw)
    }
}

/// Adds the elements of `u a` that are not dropped to `y [N, K]`, on all threads, for `u [N, R]`
/// and `a [R, K]`.
pub(crate) fn add_kept_product(u: &[f32], a: &[f32], drops: Drops, y: &mut [f32], rank: usize) {
    let width = a.len() / rank;
    let tile = |column: usize| {
        let value = |row: usize, c: usize| {
            if column + c < width { a[row * width + column + c] } else { 0.0 }
        };
        (0..rank).map(move |row| from_fn(|c| value(row, c))).collect::<Vec<[f32; SHARED]>>()
    };
    let tiles: Vec<_> = (0..width).step_by(SHARED).map(tile).collect();
    let rows = TASK_ROWS * width;
    y.par_chunks_mut(rows).zip(u.par_chunks(TASK_ROWS * rank)).enumerate().for_each(
        |(task, (y, u))| {
            let mut product = [0f32; EXPANDED * TILE];
            let blocks = y.chunks_mut(EXPANDED * width).zip(u.chunks(EXPANDED * rank));
            for (block, (y, u)) in blocks.enumerate() {
                let num_rows = y.len() / width;
                let value = |i: usize, j: usize| if i < num_rows { u[i * rank + j] } else { 0.0 };
                let u: Vec<[f32; EXPANDED]> = (0..rank).map(|j| from_fn(|i| value(i, j))).collect();
                let row = task * TASK_ROWS + block * EXPANDED;
                for column in (0..width).step_by(TILE) {
                    let columns = TILE.min(width - column);
                    for (at, a) in tiles[column / SHARED..].iter().take(TILE / SHARED).enumerate() {
                        expand(&u, a, at * SHARED, &mut product);
                    }
                    let product = &product[..(num_rows - 1) * TILE + columns];
                    keep_add(drops, (row, column), product, &mut y[column..], width, columns);
                }
            }
        },
    );
}

kernels! {
    /// Copies rows of `x`, which are `stride` apart, to `y [_, columns]`; dropped elements
    /// become 0.
    fn keep(
        drops: Drops,
        at: (usize, usize),
        x: &[f32],
        stride: usize,
        y: &mut [f32],
        columns: usize,
    ) {
        let (row, column) = at;
        for (i, y) in y.chunks_exact_mut(columns).enumerate() {
            let seed = drops.row_seed(row + i);
            let (x, rest_of_x) = x[i * stride..i * stride + columns].as_chunks::<SHARED>();
            let (y, rest_of_y) = y.as_chunks_mut::<SHARED>();
            let whole = column + x.len() * SHARED;
            for (block, (x, y)) in x.iter().zip(y).enumerate() {
                let first = (column + block * SHARED) as u32 / 2;
                for c in 0..HALF {
                    let random = mix(seed ^ (first + c as u32));
                    y[c] = if drops.drops_low(random) { 0.0 } else { x[c] };
                    y[c + HALF] = if drops.drops_high(random) { 0.0 } else { x[c + HALF] };
                }
            }
            for (c, (x, y)) in rest_of_x.iter().zip(rest_of_y).enumerate() {
                *y = if drops.drops(seed, whole + c) { 0.0 } else { *x };
            }
        }
    }

    /// Adds the elements of rows of `x`, which are [`TILE`] apart, that are not dropped to rows of
    /// `y`, which are `stride` apart.
    fn keep_add(
        drops: Drops,
        at: (usize, usize),
        x: &[f32],
        y: &mut [f32],
        stride: usize,
        columns: usize,
    ) {
        let (row, column) = at;
        for (i, x) in x.chunks(TILE).enumerate() {
            let seed = drops.row_seed(row + i);
            let (x, rest_of_x) = x[..columns].as_chunks::<SHARED>();
            let (y, rest_of_y) = y[i * stride..i * stride + columns].as_chunks_mut::<SHARED>();
            let whole = column + x.len() * SHARED;
            for (block, (x, y)) in x.iter().zip(y).enumerate() {
                let first = (column + block * SHARED) as u32 / 2;
                for c in 0..HALF {
                    let random = mix(seed ^ (first + c as u32));
                    y[c] += if drops.drops_low(random) { 0.0 } else { x[c] };
                    y[c + HALF] += if drops.drops_high(random) { 0.0 } else { x[c + HALF] };
                }
            }
            for (c, (x, y)) in rest_of_x.iter().zip(rest_of_y).enumerate() {
                *y += if drops.drops(seed, whole + c) { 0.0 } else { *x };
            }
        }
    }

    /// Adds the product of rows of `x`, which are `stride` apart, and `w` to `u`.
    fn times(x: &[f32], stride: usize, w: &[Lanes], u: &mut [Lanes]) {
        let k = w.len();
        let (blocks, rest) = u.as_chunks_mut::<ROWS>();
        let first = blocks.len() * ROWS;
        for (block, u) in blocks.iter_mut().enumerate() {
            let start = block * ROWS * stride;
            let mut rows = [x; ROWS];
            for i in 0..ROWS {
                rows[i] = &x[start + i * stride..start + i * stride + k];
            }
            let mut sums = *u;
            for (at, w) in w.iter().enumerate() {
                for i in 0..ROWS {
                    for j in 0..LANES {
                        sums[i][j] = rows[i][at].mul_add(w[j], sums[i][j]);
                    }
                }
            }
            *u = sums;
        }
        for (i, u) in rest.iter_mut().enumerate() {
            let x = &x[(first + i) * stride..(first + i) * stride + k];
            for (x, w) in x.iter().zip(w) {
                for j in 0..LANES {
                    u[j] = x.mul_add(w[j], u[j]);
                }
            }
        }
    }

    /// Adds the sum of the outer products of the rows of `x` and of `d` to `dw`.
    fn outer(
        x: &[f32],
        stride: usize,
        d: &[Lanes],
        dw: &mut [[[f32; COLUMNS]; LANES]],
        columns: usize,
    ) {
        for (block, dw) in dw.iter_mut().enumerate() {
            let first = block * COLUMNS;
            if first + COLUMNS > columns {
                for (i, d) in d.iter().enumerate() {
                    for c in first..columns {
                        for j in 0..LANES {
                            dw[j][c - first] = x[i * stride + c].mul_add(d[j], dw[j][c - first]);
                        }
                    }
                }
                return;
            }
            // Two halves of the sums, because the compiler keeps larger arrays in memory.
            let mut low = [[0f32; COLUMNS]; LANES / 2];
            let mut high = [[0f32; COLUMNS]; LANES / 2];
            for (i, d) in d.iter().enumerate() {
                let x = &x[i * stride + first..i * stride + first + COLUMNS];
                for j in 0..LANES / 2 {
                    for c in 0..COLUMNS {
                        low[j][c] = x[c].mul_add(d[j], low[j][c]);
                    }
                }
                for j in 0..LANES / 2 {
                    for c in 0..COLUMNS {
                        high[j][c] = x[c].mul_add(d[j + LANES / 2], high[j][c]);
                    }
                }
            }
            for j in 0..LANES / 2 {
                for c in 0..COLUMNS {
                    dw[j][c] += low[j][c];
                    dw[j + LANES / 2][c] += high[j][c];
                }
            }
        }
    }

    /// Computes `u a` in columns of `y`, whose rows are [`TILE`] apart.
    fn expand(u: &[[f32; EXPANDED]], a: &[[f32; SHARED]], column: usize, y: &mut [f32]) {
        let mut low = [[0f32; HALF]; EXPANDED];
        let mut high = [[0f32; HALF]; EXPANDED];
        for (u, a) in u.iter().zip(a) {
            let ([left, right], _) = a.as_chunks::<HALF>() else { return };
            for i in 0..EXPANDED {
                for c in 0..HALF {
                    low[i][c] = u[i].mul_add(left[c], low[i][c]);
                }
            }
            for i in 0..EXPANDED {
                for c in 0..HALF {
                    high[i][c] = u[i].mul_add(right[c], high[i][c]);
                }
            }
        }
        for (i, y) in y.chunks_exact_mut(TILE).enumerate() {
            let (left, right) = y[column..column + SHARED].split_at_mut(HALF);
            left.copy_from_slice(&low[i]);
            right.copy_from_slice(&high[i]);
        }
    }
}

#[cfg(test)]
mod tests;
