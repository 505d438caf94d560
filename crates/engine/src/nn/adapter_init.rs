//! Two factors of a part of a weight: the initial values of PiSSA (Meng et al. 2024) and OLoRA
//! (Buyukakyuz 2024).
//!
//! Shapes: `W [M, K]`, `A [r, K]`, `B [M, r]`.
//!
//! ```text
//! PiSSA: W = U S V^T, A = sqrt(S / scale) V^T and B = U sqrt(S / scale) for the largest r values of S
//! OLoRA: W = Q R, A = the first r rows of R, B = the first r columns of Q
//! ```
//!
//! The results do not depend on the number of threads: sums over long vectors are computed by one
//! thread, in `f64`.

use super::init::{AdapterDraw, random_adapter_part};
use candle_core::{DType, Device, Result, Tensor};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightPart {
    /// The part of the largest singular values.
    Principal,
    /// The part of the first columns of an orthonormal basis.
    Orthonormal,
}

/// Vectors of one length.
type Vectors = Vec<Vec<f64>>;

/// Number of vectors of the subspace that is searched for the largest singular values. For a weight
/// with at most this many rows or columns, the singular values are exact.
const SUBSPACE: usize = 256;
/// Number of products with `W W^T` that turn the subspace to the largest singular values.
const PASSES: usize = 8;
/// Two rows whose cosine is at most this are orthogonal.
const ORTHOGONAL: f64 = 1e-10;
/// Maximum number of rotations of each pair of rows.
const SWEEPS: usize = 40;

/// `A [r, K]` and `B [M, r]` of a part of `weight`, which is `f32` on the CPU; `scale B A` is the
/// part. `rank` must not exceed `M` or `K`.
pub fn weight_factors(
    part: WeightPart,
    weight: &Tensor,
    rank: usize,
    scale: f64,
) -> Result<[Tensor; 2]> {
    match part {
        WeightPart::Principal => principal(weight, rank, scale, SUBSPACE),
        WeightPart::Orthonormal => {
            let columns = weight.narrow(1, 0, rank)?.t()?; // [r, M]
            let mut q = rows(&columns)?;
            orthonormalise(&mut q);
            let q = tensor(&q)?; // [r, M]
            let a = kernels::linear_backward_input(&q, weight)?; // [r, K]
            Ok([a, q.t()?.contiguous()?])
        }
    }
}

/// `subspace` is the least number of vectors of the subspace.
fn principal(weight: &Tensor, rank: usize, scale: f64, subspace: usize) -> Result<[Tensor; 2]> {
    let (outputs, inputs) = weight.dims2()?;
    let is_tall = outputs > inputs;
    let wide = if is_tall { weight.t()?.contiguous()? } else { weight.clone() }; // [n, len]
    let n = wide.dim(0)?;
    let width = subspace.max(2 * rank).min(n);
    let small = if width == n { wide.clone() } else { left_vectors(&wide, width)? }; // [width, len]
    let mut vectors = right_vectors(&rows(&small)?); // each times its singular value
    vectors.truncate(rank);
    let values: Vec<f64> = vectors.iter().map(|row| norm(row)).collect();
    for (row, value) in vectors.iter_mut().zip(&values) {
        for x in row.iter_mut() {
            *x /= value.max(f64::MIN_POSITIVE);
        }
    }
    let right = tensor(&vectors)?; // [r, len]
    let left = kernels::linear(&right, &wide, None)?; // [r, n], each times its singular value
    let factors = |power: fn(f64) -> f64| {
        let values = values.iter().map(|value| power(*value / scale) as f32).collect::<Vec<_>>();
        Tensor::from_vec(values, (rank, 1), &Device::Cpu)
    };
    let right = right.broadcast_mul(&factors(f64::sqrt)?)?;
    let inverse = |value: f64| if value > 0.0 { value.sqrt().recip() } else { 0.0 };
    let left = (left.broadcast_mul(&factors(inverse)?)? / scale)?;
    let (a, b) = if is_tall { (left, right) } else { (right, left) };
    Ok([a, b.t()?.contiguous()?])
}

/// `Q^T W` for `W [n, len]` and a `Q [n, width]` whose columns are near the left singular vectors
/// of the largest singular values, `[width, len]`.
fn left_vectors(wide: &Tensor, width: usize) -> Result<Tensor> {
    let n = wide.dim(0)?;
    let (all, cpu) = (0..width * n, &Device::Cpu);
    let start = random_adapter_part(AdapterDraw::Normal, ("", [width, n]), 0, all, cpu)?;
    let mut q = start.reshape((width, n))?;
    for _ in 0..PASSES {
        q = kernels::linear(&kernels::linear_backward_input(&q, wide)?, wide, None)?; // [width, n]
        let mut vectors = rows(&q)?;
        orthonormalise(&mut vectors);
        q = tensor(&vectors)?;
    }
    kernels::linear_backward_input(&q, wide)
}

/// The right singular vectors of a matrix, each times its singular value, from the largest on.
/// Rotates pairs of rows until all rows are orthogonal (one-sided Jacobi).
fn right_vectors(matrix: &[Vec<f64>]) -> Vectors {
    let mut basis = matrix.to_vec();
    orthonormalise(&mut basis);
    // The rows in the coordinates of the basis are shorter.
    let mut small: Vectors =
        matrix.iter().map(|row| basis.iter().map(|unit| dot(row, unit)).collect()).collect();
    for _ in 0..SWEEPS {
        let mut is_done = true;
        let mut squares: Vec<f64> = small.iter().map(|row| dot(row, row)).collect();
        for j in 1..small.len() {
            let (before, from) = small.split_at_mut(j);
            for (i, row) in before.iter_mut().enumerate() {
                let change = rotate(row, &mut from[0], [squares[i], squares[j]]);
                is_done &= change.is_none();
                let change = change.unwrap_or(0.0);
                squares[i] -= change;
                squares[j] += change;
            }
        }
        if is_done {
            break;
        }
    }
    small.sort_by(|a, b| norm(b).total_cmp(&norm(a)));
    let whole = |row: &Vec<f64>| {
        let mut sum = vec![0.0; basis.first().map_or(0, Vec::len)];
        row.iter().zip(&basis).for_each(|(x, unit)| add(&mut sum, *x, unit));
        sum
    };
    small.iter().map(whole).collect()
}

/// Makes two rows with these squares of their lengths orthogonal. Returns what moves from the first
/// square to the second; `None` if the rows were orthogonal.
fn rotate(x: &mut [f64], y: &mut [f64], [xx, yy]: [f64; 2]) -> Option<f64> {
    let xy = dot(x, y);
    if xy.abs() <= ORTHOGONAL * (xx * yy).max(0.0).sqrt() {
        return None;
    }
    let zeta = (yy - xx) / (2.0 * xy);
    let tangent = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
    let cosine = tangent.hypot(1.0).recip();
    let sine = cosine * tangent;
    for (x, y) in x.iter_mut().zip(y) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
    Some(tangent * xy)
}

/// Makes rows orthonormal, one after the other. A row that depends on earlier ones becomes 0.
fn orthonormalise(rows: &mut [Vec<f64>]) {
    for i in 0..rows.len() {
        let (before, from) = rows.split_at_mut(i);
        let row = &mut from[0];
        let length = norm(row);
        // once more, for what rounding has left
        for _ in 0..2 {
            for unit in before.iter() {
                let along = dot(row, unit);
                add(row, -along, unit);
            }
        }
        let rest = norm(row);
        let factor = if rest > 1e-10 * length { rest.recip() } else { 0.0 };
        for x in row.iter_mut() {
            *x *= factor;
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    dot(x, x).sqrt()
}

/// The inner product, in a fixed order of additions that the compiler can vectorise.
fn dot(x: &[f64], y: &[f64]) -> f64 {
    let (x, x_rest) = x.as_chunks::<8>();
    let (y, y_rest) = y.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (x, y) in x.iter().zip(y) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    let rest: f64 = x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f64>() + rest
}

fn add(y: &mut [f64], factor: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

fn rows(matrix: &Tensor) -> Result<Vectors> {
    matrix.to_dtype(DType::F64)?.to_vec2()
}

fn tensor(rows: &[Vec<f64>]) -> Result<Tensor> {
    let columns = rows.first().map_or(0, Vec::len);
    let values = rows.iter().flatten().map(|x| *x as f32).collect();
    Tensor::from_vec(values, (rows.len(), columns), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[m, k]` with the singular values `values`, between orthonormal vectors.
    fn matrix(m: usize, k: usize, values: &[f64]) -> [Vectors; 2] {
        let random = |seed, len| {
            let of = ("", [values.len(), len]);
            let all = 0..values.len() * len;
            let t = random_adapter_part(AdapterDraw::Normal, of, seed, all, &Device::Cpu);
            let mut vectors = rows(&t.unwrap().reshape((values.len(), len)).unwrap()).unwrap();
            orthonormalise(&mut vectors);
            vectors
        };
        let mut left = random(1, m);
        for (row, value) in left.iter_mut().zip(values) {
            for x in row.iter_mut() {
                *x *= value;
            }
        }
        [left, random(2, k)]
    }

    fn product(left: &[Vec<f64>], right: &[Vec<f64>]) -> Tensor {
        let (left, right) = (tensor(left).unwrap(), tensor(right).unwrap());
        left.t().unwrap().matmul(&right).unwrap()
    }

    fn largest_difference(a: &Tensor, b: &Tensor) -> f32 {
        let difference = (a - b).unwrap().abs().unwrap().flatten_all().unwrap();
        difference.max(0).unwrap().to_scalar::<f32>().unwrap()
    }

    #[test]
    fn the_principal_part_is_that_of_the_largest_singular_values_of_any_shape() {
        for (m, k, subspace) in
            [(40, 24, 99), (24, 40, 99), (33, 33, 33), (70, 60, 30), (50, 90, 30)]
        {
            let values: Vec<f64> = (0..m.min(k)).map(|i| 5.0 * 0.8f64.powi(i as i32)).collect();
            let [left, right] = matrix(m, k, &values);
            let weight = product(&left, &right);
            let [a, b] = principal(&weight, 7, 2.5, subspace).unwrap();
            let part = (b.matmul(&a).unwrap() * 2.5).unwrap();
            let want = product(&left[..7], &right[..7]);
            let error = largest_difference(&part, &want);
            assert!(error < 2e-5, "{m} x {k}: {error}");
            // A and B have equal lengths
            let lengths =
                |t: &Tensor| t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
            assert!((lengths(&a) / lengths(&b) - 1.0).abs() < 1e-4);
        }
    }

    /// Made by `scripts/golden/adapters.py` with PEFT.
    #[test]
    fn the_parts_are_those_that_peft_starts_from() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/adapters/start.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let parts = [("pissa", WeightPart::Principal), ("olora", WeightPart::Orthonormal)];
        for name in ["wide", "tall", "square"] {
            for (init, part) in parts {
                let [a, b] = weight_factors(part, &golden[name], 4, 1.5).unwrap();
                let found = (b.matmul(&a).unwrap() * 1.5).unwrap();
                let error = largest_difference(&found, &golden[&format!("{name}.{init}")]);
                assert!(error < 1e-5, "{name} {init}: {error}");
                let rest = (&golden[name] - found).unwrap();
                let error = largest_difference(&rest, &golden[&format!("{name}.{init}.rest")]);
                assert!(error < 1e-5, "{name} {init}, rest: {error}");
            }
        }
    }

    #[test]
    fn the_orthonormal_part_has_the_first_columns_and_an_orthonormal_factor() {
        let [left, right] = matrix(30, 50, &[4.0, 3.0, 2.0, 1.0, 0.5, 0.1]);
        let weight = product(&left, &right);
        let [a, b] = weight_factors(WeightPart::Orthonormal, &weight, 4, 2.5).unwrap();
        let part = b.matmul(&a).unwrap().narrow(1, 0, 4).unwrap();
        assert!(largest_difference(&part, &weight.narrow(1, 0, 4).unwrap()) < 1e-5);
        let gram = b.t().unwrap().matmul(&b).unwrap();
        assert!(
            largest_difference(&gram, &Tensor::eye(4, DType::F32, &Device::Cpu).unwrap()) < 1e-5
        );
    }

    #[test]
    fn the_factors_have_the_same_bits_on_any_number_of_threads() {
        let (m, k) = (300, 280);
        let weight =
            random_adapter_part(AdapterDraw::Normal, ("", [m, k]), 3, 0..m * k, &Device::Cpu);
        let weight = weight.unwrap().reshape((m, k)).unwrap();
        let run = |num_threads: usize| {
            let threads = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap();
            let factors = threads.install(|| {
                // in a subspace, as for a weight with more rows and columns than it has vectors
                let principal = principal(&weight, 4, 1.0, 32).unwrap();
                let first = weight_factors(WeightPart::Orthonormal, &weight, 4, 1.0).unwrap();
                [principal, first].concat()
            });
            let bits = |factor: &Tensor| -> Vec<u32> {
                let values = factor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                values.into_iter().map(f32::to_bits).collect()
            };
            factors.iter().map(bits).collect::<Vec<_>>()
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3));
    }

    #[test]
    fn a_weight_of_low_rank_has_finite_factors() {
        let [left, right] = matrix(20, 30, &[1.0, 0.5]);
        let weight = product(&left, &right);
        for part in [WeightPart::Principal, WeightPart::Orthonormal] {
            let [a, b] = weight_factors(part, &weight, 4, 1.0).unwrap();
            assert!(largest_difference(&b.matmul(&a).unwrap(), &weight) < 1e-5, "{part:?}");
        }
        let zeros = weight.zeros_like().unwrap();
        let [a, b] = weight_factors(WeightPart::Principal, &zeros, 4, 1.0).unwrap();
        assert_eq!(largest_difference(&b.matmul(&a).unwrap(), &zeros), 0.0);
    }
}
