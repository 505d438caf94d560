//! Backward pass of the gated delta rule: computes the states again, then visits the chunks of a
//! segment from last to first.

#![expect(unsafe_code, reason = "tasks write disjoint strided parts of the same buffer")]

use super::delta_rule::{
    CHUNK, Chunk, DeltaRuleSizes, Inputs, Place, Rows, dot_row, places, scale, scaled, solve_upper,
    tasks,
};
use super::products::{Matrix, Store, Threads, multiply};
use super::simd::{dot, kernels};
use super::{self as cpu, Shared};
use std::ops::Range;

pub(crate) struct Grads {
    pub(crate) qkv: Vec<f32>,
    pub(crate) g: Vec<f32>,
    pub(crate) beta: Vec<f32>,
}

/// Row `i` of the products and decays of a head.
struct TileRow<'a> {
    /// Products of keys.
    keys: &'a [f32],
    decays: &'a [f32],
    p: &'a [f32],
    a: &'a [f32],
    /// Gradient of `p`.
    dp: &'a [f32],
    /// Gradient of `a`, negated.
    da: &'a [f32],
    beta: f32,
}

kernels! {
    // Adds the gradients of the products of row `i` to `dqk` and `dkk`, and the gradient of each
    // decay to `columns`. Returns the sum of the latter, and the gradient of `beta`.
    fn tile_grad_row(i: usize, row: &TileRow<'_>, dqk: &mut [f32], dkk: &mut [f32], columns: &mut [f32]) -> [f32; 2] {
        let n = i + 1;
        let (keys, decays, dqk, dkk) = (&row.keys[..n], &row.decays[..n], &mut dqk[..n], &mut dkk[..n]);
        let (p, a, dp, da) = (&row.p[..n], &row.a[..n], &row.dp[..n], &row.da[..n]);
        let columns = &mut columns[..n];
        for j in 0..n {
            dqk[j] = dp[j].mul_add(decays[j], dqk[j]);
        }
        let (mut sum, mut dbeta) = (0f32, 0f32);
        for j in 0..n {
            let of_decay = dp[j].mul_add(p[j], -da[j] * a[j]);
            columns[j] += of_decay;
            sum += of_decay;
        }
        for j in 0..i {
            let d = -da[j] * decays[j];
            dkk[j] = row.beta.mul_add(d, dkk[j]);
            dbeta = d.mul_add(keys[j], dbeta);
        }
        [sum, dbeta]
    }

    // Gradient of `x` from that of `u = x / |x|`, scaled by `factor`.
    fn unit_grad_row(x: &[f32], inverse: f32, du: &[f32], factor: f32, dx: &mut [f32]) {
        let n = dx.len();
        let (x, du) = (&x[..n], &du[..n]);
        let along = dot(x, du) * inverse * inverse;
        for i in 0..n {
            dx[i] = factor * inverse * (-along).mul_add(x[i], du[i]);
        }
    }
}

/// Buffers of one thread.
struct Backward {
    chunk: Chunk,
    /// States that enter each chunk of the segment.
    states: Vec<f32>,
    /// Gradient of the states that leave the chunk, `[dk, group * dv]`.
    dstate: Vec<f32>,
    /// Gradients of the outputs, and of what the tokens write before the triangular system,
    /// `[2 c, group * dv]`.
    grads: Vec<f32>,
    /// Keys times `dstate`, `[c, group * dv]`.
    kds: Vec<f32>,
    /// Gradients of `p` and of `a` negated, of one head, `[2 c, CHUNK]`.
    tile: Vec<f32>,
    /// Gradients of the products, summed over heads, `[2 c, CHUNK]`.
    dproducts: Vec<f32>,
    /// Gradients of the unit queries and keys, `[2 c, dk]`.
    dunits: Vec<f32>,
    /// Gradient of the sum of `g` up to each token, for each head `[CHUNK]`.
    dy: Vec<f64>,
    /// Gradient of `beta`, for each head `[CHUNK]`.
    dbeta: Vec<f32>,
}

/// Pointers to the gradients.
#[derive(Clone, Copy)]
struct Out {
    qkv: Shared<f32>,
    g: Shared<f32>,
    beta: Shared<f32>,
}

impl Backward {
    fn new(sizes: DeltaRuleSizes, num_chunks: usize) -> Self {
        let width = sizes.group * sizes.dv;
        let zeros = |len: usize| vec![0f32; len];
        Self {
            chunk: Chunk::new(sizes),
            states: zeros(num_chunks * sizes.dk * width),
            dstate: zeros(sizes.dk * width),
            grads: zeros(2 * CHUNK * width),
            kds: zeros(CHUNK * width),
            tile: zeros(2 * CHUNK * CHUNK),
            dproducts: zeros(2 * CHUNK * CHUNK),
            dunits: zeros(2 * CHUNK * sizes.dk),
            dy: vec![0f64; sizes.group * CHUNK],
            dbeta: zeros(sizes.group * CHUNK),
        }
    }

    /// Computes the states that enter each chunk.
    fn states(&mut self, inputs: Inputs<'_>, segment: &Range<usize>, key_head: usize) {
        let size = self.dstate.len();
        self.states[..size].fill(0.0);
        let last = segment.len().div_ceil(CHUNK) - 1;
        for (index, at) in places(segment, key_head).take(last).enumerate() {
            let (before, after) = self.states.split_at_mut((index + 1) * size);
            let (before, after) = (&before[index * size..], &mut after[..size]);
            self.chunk.prepare(inputs, at, before, Rows::Keys);
            after.copy_from_slice(before);
            self.chunk.advance(at, after);
        }
    }

    /// Gradients of a chunk, and of the states that enter it, which are in `states` at `index`.
    fn step(&mut self, inputs: Inputs<'_>, d_o: &[f32], at: Place, index: usize, out: Out) {
        let size = self.dstate.len();
        let state = index * size..(index + 1) * size;
        self.chunk.prepare(inputs, at, &self.states[state.clone()], Rows::All);
        self.written(d_o, at);
        let c = at.c;
        self.dproducts[..2 * c * CHUNK].fill(0.0);
        for head in 0..self.chunk.sizes.group {
            self.tiles(inputs, at, head);
            self.scale_grads(inputs, at, head, out);
            self.decays(at, head, state.start);
        }
        self.units(at, state.start);
        self.write(inputs, at, out);
        let (DeltaRuleSizes { dk, .. }, width) = (self.chunk.sizes, self.kds.len() / CHUNK);
        self.chunk.decay_columns(c, &mut self.dstate);
        let units = Matrix::rows(&self.chunk.units, dk).t();
        let grads = Matrix::rows(&self.grads, width);
        multiply(
            (dk, width, 2 * c),
            (&mut self.dstate, width),
            Store::Add,
            units,
            grads,
            Threads::One,
        );
    }

    /// Fills `grads`.
    fn written(&mut self, d_o: &[f32], at: Place) {
        let (sizes, c) = (self.chunk.sizes, at.c);
        let DeltaRuleSizes { dk, dv, group, .. } = sizes;
        let width = group * dv;
        for i in 0..c {
            let row = (at.first + i) * sizes.width() + at.key_head * width;
            self.grads[i * width..(i + 1) * width].copy_from_slice(&d_o[row..row + width]);
        }
        let keys = Matrix::rows(&self.chunk.units[c * dk..], dk);
        let dstate = Matrix::rows(&self.dstate, width);
        multiply(
            (c, width, dk),
            (&mut self.kds, width),
            Store::Overwrite,
            keys,
            dstate,
            Threads::One,
        );
        let (d_o, dn) = self.grads.split_at_mut(c * width);
        for head in 0..group {
            for i in 0..c {
                let row = i * width + head * dv..i * width + (head + 1) * dv;
                scaled(&self.kds[row.clone()], self.chunk.tails[head * CHUNK + i], &mut dn[row]);
            }
            let p = Matrix::rows(&self.chunk.p[head * CHUNK * CHUNK..], CHUNK).t();
            let d_o = Matrix::rows(&d_o[head * dv..], width);
            let dn = &mut dn[head * dv..];
            multiply((c, dv, c), (&mut *dn, width), Store::Add, p, d_o, Threads::One);
            solve_upper(&self.chunk.a[head * CHUNK * CHUNK..], c, dn, width, dv);
        }
    }

    /// Gradients through `p` and `a` of a head: adds those of the products, and sets `dy` and
    /// `dbeta` to those of the decays and of `beta`.
    fn tiles(&mut self, inputs: Inputs<'_>, at: Place, head: usize) {
        let (dv, c, width) = (self.chunk.sizes.dv, at.c, self.kds.len() / CHUNK);
        let grads = Matrix::rows(&self.grads[head * dv..], width);
        let n = Matrix::rows(&self.chunk.n[head * dv..], width).t();
        multiply((2 * c, c, dv), (&mut self.tile, CHUNK), Store::Overwrite, grads, n, Threads::One);
        let mut columns = [0f32; CHUNK];
        let (dqk, dkk) = self.dproducts.split_at_mut(c * CHUNK);
        for i in 0..c {
            let (row, head_row) = (i * CHUNK, (head * CHUNK + i) * CHUNK);
            let tile = TileRow {
                keys: &self.chunk.products[c * CHUNK + row..],
                decays: &self.chunk.decays[head_row..],
                p: &self.chunk.p[head_row..],
                a: &self.chunk.a[head_row..],
                dp: &self.tile[row..],
                da: &self.tile[c * CHUNK + row..],
                beta: inputs.beta[self.chunk.gate(at, head, i)],
            };
            let [sum, dbeta] =
                tile_grad_row(i, &tile, &mut dqk[row..], &mut dkk[row..], &mut columns);
            self.dy[head * CHUNK + i] = f64::from(sum);
            self.dbeta[head * CHUNK + i] = dbeta;
        }
        for (dy, column) in self.dy[head * CHUNK..].iter_mut().zip(&columns[..c]) {
            *dy -= f64::from(*column);
        }
    }

    /// Multiplies `grads` by the decays from the start of the chunk, and those of the keys by
    /// `-beta`. Writes the gradients of the values.
    fn scale_grads(&mut self, inputs: Inputs<'_>, at: Place, head: usize, out: Out) {
        let (sizes, c, width) = (self.chunk.sizes, at.c, self.kds.len() / CHUNK);
        let dv = sizes.dv;
        for i in 0..c {
            let e = self.chunk.heads[head * CHUNK + i];
            let (row, key_row) = (i * width + head * dv, (c + i) * width + head * dv);
            scale(&mut self.grads[row..row + dv], e);
            let dr = &mut self.grads[key_row..key_row + dv];
            self.dbeta[head * CHUNK + i] += dot_row(dr, &self.chunk.z[row..row + dv]);
            let beta = inputs.beta[self.chunk.gate(at, head, i)];
            let [_, _, v] = sizes.starts(at.first + i, at.key_head);
            let v = v + head * dv;
            // SAFETY: only this task writes these tokens of this head.
            scaled(dr, beta, unsafe { out.qkv.slice(v..v + dv) });
            scale(dr, -e * beta);
        }
    }

    /// Adds the gradients through the reads and writes of the states to `dy` of a head. `state` is
    /// the start of the states that entered.
    fn decays(&mut self, at: Place, head: usize, state: usize) {
        let (DeltaRuleSizes { dk, dv, .. }, c, width) =
            (self.chunk.sizes, at.c, self.kds.len() / CHUNK);
        let mut written = 0f64;
        for i in 0..c {
            let row = |i: usize| i * width + head * dv..i * width + (head + 1) * dv;
            let along = |i: usize| dot_row(&self.grads[row(i)], &self.chunk.reads[row(i)]);
            let reads = f64::from(along(i)) + f64::from(along(c + i));
            let write = f64::from(dot_row(&self.kds[row(i)], &self.chunk.tail_n[row(i)]));
            self.dy[head * CHUNK + i] += reads - write;
            written += write;
        }
        let kept: f64 = (0..dk)
            .map(|row| {
                let start = row * width + head * dv;
                let state = &self.states[state + start..state + start + dv];
                f64::from(dot_row(&self.dstate[start..start + dv], state))
            })
            .sum();
        self.dy[head * CHUNK + c - 1] += f64::from(self.chunk.decay(head, c)) * kept + written;
    }

    /// Fills `dunits`.
    fn units(&mut self, at: Place, state: usize) {
        let (DeltaRuleSizes { dk, .. }, c, width) =
            (self.chunk.sizes, at.c, self.kds.len() / CHUNK);
        // The product of keys `i` and `j` depends on both.
        let dkk = &mut self.dproducts[c * CHUNK..];
        for i in 0..c {
            for j in 0..i {
                dkk[j * CHUNK + i] = dkk[i * CHUNK + j];
            }
        }
        let (queries, keys) = self.chunk.units.split_at(c * dk);
        let grads = Matrix::rows(&self.grads, width);
        let state = Matrix::rows(&self.states[state..], width).t();
        let dunits = &mut self.dunits;
        multiply(
            (2 * c, dk, width),
            (&mut *dunits, dk),
            Store::Overwrite,
            grads,
            state,
            Threads::One,
        );
        let dproducts = Matrix::rows(&self.dproducts, CHUNK);
        let keys = Matrix::rows(keys, dk);
        multiply((2 * c, dk, c), (&mut *dunits, dk), Store::Add, dproducts, keys, Threads::One);
        let dkeys = &mut dunits[c * dk..];
        let (dqk, queries) = (Matrix::rows(&self.dproducts, CHUNK).t(), Matrix::rows(queries, dk));
        multiply((c, dk, c), (&mut *dkeys, dk), Store::Add, dqk, queries, Threads::One);
        let n = Matrix::rows(&self.chunk.tail_n, width);
        let dstate = Matrix::rows(&self.dstate, width).t();
        multiply((c, dk, width), (dkeys, dk), Store::Add, n, dstate, Threads::One);
    }

    /// Writes the gradients of the queries, keys and gates.
    fn write(&self, inputs: Inputs<'_>, at: Place, out: Out) {
        let (sizes, c) = (self.chunk.sizes, at.c);
        let dk = sizes.dk;
        for i in 0..c {
            let [q, k, _] = sizes.starts(at.first + i, at.key_head);
            for (x, row, factor) in [(q, i, sizes.scale()), (k, c + i, 1.0)] {
                let du = &self.dunits[row * dk..(row + 1) * dk];
                // SAFETY: only this task writes these tokens of this head.
                let dx = unsafe { out.qkv.slice(x..x + dk) };
                unit_grad_row(&inputs.qkv[x..x + dk], self.chunk.inverses[row], du, factor, dx);
            }
        }
        for head in 0..sizes.group {
            let mut dg = 0f64;
            for i in (0..c).rev() {
                dg += self.dy[head * CHUNK + i];
                let gate = self.chunk.gate(at, head, i);
                // SAFETY: as above.
                unsafe {
                    *out.g.at(gate) = dg as f32;
                    *out.beta.at(gate) = self.dbeta[head * CHUNK + i];
                }
            }
        }
    }
}

/// Returns the gradients for the output gradient `d_o [T, Hv * dv]`.
pub(crate) fn backward(
    sizes: DeltaRuleSizes,
    inputs: Inputs<'_>,
    segments: &[Range<usize>],
    d_o: &[f32],
) -> Grads {
    let zeros = |like: &[f32]| vec![0f32; like.len()];
    let mut grads = Grads { qkv: zeros(inputs.qkv), g: zeros(inputs.g), beta: zeros(inputs.beta) };
    let out = Out {
        qkv: Shared::of(&mut grads.qkv),
        g: Shared::of(&mut grads.g),
        beta: Shared::of(&mut grads.beta),
    };
    let tasks = tasks(sizes, segments);
    let longest = segments.iter().map(Range::len).max().unwrap_or(0);
    let scratch = || Backward::new(sizes, longest.div_ceil(CHUNK));
    cpu::for_each_task(tasks.len(), scratch, |backward, task| {
        let (segment, key_head) = tasks[task];
        let segment = &segments[segment];
        backward.states(inputs, segment, key_head);
        backward.dstate.fill(0.0);
        let last = segment.len().div_ceil(CHUNK);
        for (back, at) in places(segment, key_head).rev().enumerate() {
            backward.step(inputs, d_o, at, last - 1 - back, out);
        }
    });
    grads
}
