//! The Adafactor update of a parameter: a second moment of its rows and one of its columns in place
//! of one of its elements, and steps in proportion to the size of the weight.
//!
//! The order of operations is that of `torch.optim.Adafactor`. A parameter with less than two
//! dimensions has a second moment for each element. On a GPU the sums and the direction are
//! computed with ops of candle, which need memory for three copies of the parameter.
//!
//! Shapes: a parameter is `L` matrices of `R` rows and `C` columns, its last two dimensions.

use super::adamw::sum_of_squares;
use super::cpu::simd::kernels;
use super::cpu::{self, ROWS, compute_dtype, expect_f32, read};
use super::launch::on_gpu;
use super::muon::combine;
use super::stochastic_rounding::{step_seed, tensor_seed};
use super::stored::Seed;
use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;
use std::ops::Range;

/// Hyperparameters that stay constant during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// The second moments keep `1 - step^beta2_decay` of their value.
    pub beta2_decay: f64,
    /// Minimum root of the second moment, and minimum root mean square of a weight that its step is
    /// in proportion to.
    pub eps: [f64; 2],
    /// Maximum root mean square of a direction.
    pub d: f64,
}

/// The second moment of a parameter, `f32`; overwritten.
#[derive(Clone, Copy)]
pub enum SecondMoment<'a> {
    /// Means over the columns, `[L R]`, and means over the rows, `[L C]`.
    Factored([&'a Tensor; 2]),
    /// One for each element.
    Full(&'a Tensor),
}

/// The update of a parameter.
#[derive(Clone, Copy)]
pub struct AdafactorUpdate<'a> {
    /// The weight in the shape of the parameter, `f32` or `bf16`; overwritten.
    pub weight: &'a Tensor,
    /// The master weight in `f32`, overwritten. Without one, a `bf16` weight is rounded at random.
    pub master: Option<&'a Tensor>,
    /// The second moment; overwritten.
    pub second: SecondMoment<'a>,
    /// Gradient, `f32`, of any shape with the elements of the weight; only read.
    pub grad: &'a Tensor,
    /// Number of the parameter among the trained ones. Random rounding depends on it.
    pub index: usize,
    /// Learning rate of this parameter: the maximum step in relation to the size of the weight.
    pub lr: f64,
    /// Weight decay of this parameter; multiplied by `lr`.
    pub weight_decay: f64,
}

/// Update number `step` (from 1) of a parameter with the gradient `grad_scale * grad`. Waits for a
/// GPU.
pub fn adafactor_step(
    hyper: &Adafactor,
    update: &AdafactorUpdate<'_>,
    step: u64,
    grad_scale: f32,
) -> Result<()> {
    let &AdafactorUpdate { weight, master, second, grad, index, lr, weight_decay } = update;
    let op = "adafactor_step";
    check(op, update, step)?;
    let count = weight.elem_count();
    if count == 0 {
        return Ok(());
    }
    let exact = master.unwrap_or(weight);
    let size = rms(&exact.to_dtype(DType::F32)?)?;
    let new = (step as f64).powf(hyper.beta2_decay);
    let [eps1, eps2] = hyper.eps;
    let direction = match second {
        SecondMoment::Factored(moments) => {
            let grad = grad.reshape(&matrices(weight))?;
            factored_direction(&grad, grad_scale, moments, new, eps1)?
        }
        SecondMoment::Full(moment) => {
            let grad = (grad.flatten_all()? * f64::from(grad_scale))?;
            lerp(&moment.flatten_all()?, &grad.sqr()?, new)?;
            (&grad / moment.flatten_all()?.maximum(eps1 * eps1)?.sqrt()?)?
        }
    };
    let too_long = (rms(&direction)? / hyper.d).max(1.0);
    let alpha = size.max(eps2) * lr.min(1.0 / (step as f64).sqrt());
    let seed = Seed { seed: tensor_seed(step_seed(step), index), first: 0 };
    let keep = (1.0 - lr * weight_decay) as f32;
    combine(op, ((-alpha / too_long) as f32, &direction), (keep, exact), Some(seed))?;
    match master {
        Some(master) => combine(op, (1.0, master), (0.0, weight), None),
        None => Ok(()),
    }
}

/// Fails unless the tensors have the shapes and dtypes that an update needs, and separate memory.
fn check(op: &str, update: &AdafactorUpdate<'_>, step: u64) -> Result<()> {
    let &AdafactorUpdate { weight, master, second, grad, .. } = update;
    let count = weight.elem_count();
    compute_dtype(op, &[("weight", weight)])?;
    expect_f32(op, "grad", &grad.flatten_all()?, &[count])?;
    let mut all = vec![("weight", weight)];
    if let Some(master) = master {
        expect_f32(op, "master", &master.flatten_all()?, &[count])?;
        all.push(("master", master));
    }
    match second {
        SecondMoment::Factored(moments) if weight.rank() > 1 => {
            let [matrices, rows, columns] = matrices(weight);
            for ((name, moment), of_matrix) in
                [("row_var", moments[0]), ("col_var", moments[1])].into_iter().zip([rows, columns])
            {
                expect_f32(op, name, &moment.flatten_all()?, &[matrices * of_matrix])?;
                all.push((name, moment));
            }
        }
        SecondMoment::Factored(_) => bail!("{op}: `weight` {:?} is no matrix", weight.dims()),
        SecondMoment::Full(moment) => {
            expect_f32(op, "variance", &moment.flatten_all()?, &[count])?;
            all.push(("variance", moment));
        }
    }
    if step == 0 {
        bail!("{op}: steps count from 1");
    }
    for (i, (name, tensor)) in all.iter().enumerate() {
        cpu::distinct(op, name, tensor, &all[i + 1..])?;
        cpu::distinct(op, name, tensor, &[("grad", grad)])?;
    }
    Ok(())
}

/// Number of matrices, and of the rows and columns of each.
fn matrices(weight: &Tensor) -> [usize; 3] {
    let dims = weight.dims();
    let (rows, columns) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    [dims[..dims.len() - 2].iter().product(), rows, columns]
}

/// Root mean square of an `f32` tensor.
fn rms(t: &Tensor) -> Result<f64> {
    Ok((sum_of_squares(t)? / t.elem_count() as f64).sqrt())
}

/// Moves `moment` to `target` by the share `new` of the distance.
fn lerp(moment: &Tensor, target: &Tensor, new: f64) -> Result<()> {
    let target = (moment + ((target - moment)? * new)?)?;
    moment.slice_set(&target, 0, 0)
}

/// Updates the second moments and returns the gradient divided by the root of their product.
fn factored_direction(
    grad: &Tensor,
    grad_scale: f32,
    moments: [&Tensor; 2],
    new: f64,
    eps: f64,
) -> Result<Tensor> {
    let (matrices, rows, columns) = grad.dims3()?;
    let [row_moment, column_moment] = moments;
    let means = mean_squares(grad, grad_scale)?;
    for (moment, mean) in moments.into_iter().zip(&means) {
        lerp(&moment.flatten_all()?, mean, new)?;
    }
    let of_rows = row_moment.reshape((matrices, rows))?;
    let mean = of_rows.mean_keepdim(1)?.maximum(eps)?; // [L, 1]
    direction(grad, grad_scale, &of_rows.broadcast_div(&mean)?, column_moment, eps)
        .and_then(|direction| direction.reshape((matrices * rows, columns)))
}

/// Returns column sums over blocks of rows. `block(rows, partial)` adds its rows to a zeroed
/// `[width]` buffer, and the partial sums are added in the order of the blocks.
fn column_sums(
    num_rows: usize,
    width: usize,
    block: impl Fn(Range<usize>, &mut [f32]) + Sync,
) -> Vec<f32> {
    let num_blocks = num_rows.div_ceil(ROWS);
    let mut partials = vec![0f32; num_blocks * width];
    if width > 0 {
        partials.par_chunks_mut(width).enumerate().for_each(|(index, partial)| {
            let start = index * ROWS;
            block(start..(start + ROWS).min(num_rows), partial);
        });
    }
    let mut sums = vec![0f32; width];
    for partial in partials.chunks(width.max(1)) {
        cpu::add(partial, &mut sums);
    }
    sums
}

/// Means of the squares of `scale * grad [L, R, C]` over the columns, `[L R]`, and over the rows,
/// `[L C]`.
fn mean_squares(grad: &Tensor, scale: f32) -> Result<[Tensor; 2]> {
    if on_gpu(grad) {
        let squares = (grad * f64::from(scale))?.sqr()?;
        return Ok([squares.mean(2)?.flatten_all()?, squares.mean(1)?.flatten_all()?]);
    }
    let (matrices, rows, columns) = grad.dims3()?;
    let values = read("adafactor_step", "grad", grad)?;
    let values = values.slice::<f32>()?;
    let of_row = |row: &[f32]| (squares_of_row(scale, row) / columns as f64) as f32;
    let of_rows: Vec<f32> = values.par_chunks(columns).map(of_row).collect();
    let of_columns = |matrix: &[f32]| {
        let mut sums = column_sums(rows, columns, |rows, sums| {
            for row in matrix[rows.start * columns..rows.end * columns].chunks(columns) {
                add_squares(scale, row, sums);
            }
        });
        for sum in &mut sums {
            *sum /= rows as f32;
        }
        sums
    };
    let of_columns: Vec<Vec<f32>> = values.par_chunks(rows * columns).map(of_columns).collect();
    let of_columns = Tensor::from_vec(of_columns.concat(), matrices * columns, grad.device())?;
    Ok([Tensor::from_vec(of_rows, matrices * rows, grad.device())?, of_columns])
}

/// `scale * grad [L, R, C]` divided by the roots of `of_rows [L, R]` times `of_columns [L C]`,
/// which are at least `eps`.
fn direction(
    grad: &Tensor,
    scale: f32,
    of_rows: &Tensor,
    of_columns: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let op = "adafactor_step";
    let (matrices, rows, columns) = grad.dims3()?;
    if on_gpu(grad) {
        let of_rows = of_rows.reshape((matrices, rows, 1))?;
        let of_columns = of_columns.reshape((matrices, 1, columns))?;
        let root = of_rows.broadcast_mul(&of_columns)?.maximum(eps * eps)?.sqrt()?;
        return (grad * f64::from(scale))? / root;
    }
    let (of_rows, of_columns) = (read(op, "row_var", of_rows)?, read(op, "col_var", of_columns)?);
    let (of_rows, of_columns) = (of_rows.slice::<f32>()?, of_columns.slice::<f32>()?);
    let from = read(op, "grad", grad)?;
    let from = from.slice::<f32>()?;
    let smallest = (eps * eps) as f32;
    let mut out = vec![0f32; from.len()];
    out.par_chunks_mut(columns).zip(from.par_chunks(columns)).enumerate().for_each(
        |(row, (out, grad))| {
            let start = row / rows * columns;
            let of_columns = &of_columns[start..start + columns];
            direction_of_row(scale, grad, (of_rows[row], smallest), of_columns, out);
        },
    );
    Tensor::from_vec(out, grad.shape().clone(), grad.device())
}

kernels! {
    fn squares_of_row(scale: f32, x: &[f32]) -> f64 {
        let mut lanes = [0f64; 32];
        let whole = x.len() / 32 * 32;
        let mut at = 0;
        while at < whole {
            let a = &x[at..at + 32];
            for i in 0..32 {
                let v = (a[i] * scale) as f64;
                lanes[i] = v.mul_add(v, lanes[i]);
            }
            at += 32;
        }
        let mut sum = 0.0;
        for lane in lanes {
            sum += lane;
        }
        for &v in &x[whole..] {
            let v = (v * scale) as f64;
            sum += v * v;
        }
        sum
    }

    fn add_squares(scale: f32, x: &[f32], sums: &mut [f32]) {
        for (sum, x) in sums.iter_mut().zip(x) {
            let x = x * scale;
            *sum = x.mul_add(x, *sum);
        }
    }

    fn direction_of_row(scale: f32, x: &[f32], limits: (f32, f32), of_columns: &[f32], y: &mut [f32]) {
        let (of_row, smallest) = limits;
        let n = y.len();
        let (x, of_columns) = (&x[..n], &of_columns[..n]);
        for i in 0..n {
            let square = of_row * of_columns[i];
            let square = if square < smallest { smallest } else { square };
            y[i] = x[i] * scale / square.sqrt();
        }
    }
}

#[cfg(test)]
mod tests;
