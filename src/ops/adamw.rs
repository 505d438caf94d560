//! The AdamW update in one pass over weight, gradient and moments, and what clipping needs.
//!
//! Arithmetic order is that of `torch.optim.AdamW`; everything is `f32`, scalars are computed in `f64`. The moments may be
//! stored in `bf16`: see `moments.rs`.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::cpu::blocks::to_bf16_block;
use super::cpu::simd::kernels;
use super::cpu::{self, BLOCK, Element, compute_dtype, expect_f32, expect_shape, read};
use super::moments::{self, step_seed, tensor_seed};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

/// Constants of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
}

/// A parameter and its state; all in one shape.
#[derive(Clone, Copy)]
pub struct AdamWTensors<'a> {
    /// In the compute dtype; rewritten.
    pub weight: &'a Tensor,
    /// The weight in `f32`, rewritten; `None` if `weight` itself is `f32`.
    pub master: Option<&'a Tensor>,
    /// First moment, `f32` or `bf16`, rewritten.
    pub exp_avg: &'a Tensor,
    /// Second moment, in the dtype of the first, rewritten.
    pub exp_avg_sq: &'a Tensor,
    /// Gradient, `f32`, only read.
    pub grad: &'a Tensor,
}

/// The update of one parameter, among all of a step.
#[derive(Clone, Copy)]
pub struct AdamWUpdate<'a> {
    /// What is rewritten, and the gradient.
    pub tensors: AdamWTensors<'a>,
    /// Learning rate of this parameter.
    pub lr: f64,
    /// Decay of this weight, times `lr`.
    pub weight_decay: f64,
}

/// One step's scalars for one parameter, as `f32` arithmetic sees them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalars {
    pub(super) keep: f32,
    pub(super) lerp: f32,
    pub(super) beta2: f32,
    pub(super) one_minus_beta2: f32,
    pub(super) sqrt_correction2: f32,
    pub(super) eps: f32,
    pub(super) step_size: f32,
}

impl Scalars {
    fn new(hyper: &AdamW, lr: f64, weight_decay: f64, step: u64) -> Self {
        let correction1 = 1.0 - hyper.beta1.powf(step as f64);
        let correction2 = 1.0 - hyper.beta2.powf(step as f64);
        Self {
            keep: (1.0 - lr * weight_decay) as f32,
            lerp: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            sqrt_correction2: correction2.sqrt() as f32,
            eps: hyper.eps as f32,
            step_size: (lr / correction1) as f32,
        }
    }
}

#[inline(always)]
pub(super) fn update_element(s: Scalars, g: f32, p: &mut f32, m: &mut f32, v: &mut f32) {
    let decayed = *p * s.keep;
    *m = s.lerp.mul_add(g - *m, *m);
    *v = *v * s.beta2 + s.one_minus_beta2 * g * g;
    let denominator = v.sqrt() / s.sqrt_correction2 + s.eps;
    *p = decayed - s.step_size * *m / denominator;
}

kernels! {
    fn update(s: Scalars, grad_scale: f32, grad: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        let n = p.len();
        let (grad, m, v) = (&grad[..n], &mut m[..n], &mut v[..n]);
        for i in 0..n {
            update_element(s, grad[i] * grad_scale, &mut p[i], &mut m[i], &mut v[i]);
        }
    }

    fn sum_of_squares_block(x: &[f32]) -> f64 {
        let mut lanes = [0f64; 32];
        let whole = x.len() / 32 * 32;
        let mut at = 0;
        while at < whole {
            let a = &x[at..at + 32];
            for i in 0..32 {
                let v = a[i] as f64;
                lanes[i] = v.mul_add(v, lanes[i]);
            }
            at += 32;
        }
        let mut sum = 0.0;
        for lane in lanes {
            sum += lane;
        }
        for &v in &x[whole..] {
            sum += v as f64 * v as f64;
        }
        sum
    }
}

/// Fails unless the tensors have one shape, and the dtypes and the memory of their own that an update needs.
fn check(op: &str, tensors: &AdamWTensors<'_>, step: u64) -> Result<()> {
    let &AdamWTensors { weight, master, exp_avg, exp_avg_sq, grad } = tensors;
    let dims = weight.dims();
    compute_dtype(op, &[("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)])?;
    expect_shape(op, "exp_avg", exp_avg, dims)?;
    expect_shape(op, "exp_avg_sq", exp_avg_sq, dims)?;
    expect_f32(op, "grad", grad, dims)?;
    if step == 0 {
        bail!("{op}: steps count from 1");
    }
    let mut all = vec![("weight", weight), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    match (master, weight.dtype()) {
        (None, DType::F32) => {}
        (Some(master), DType::BF16) => {
            expect_f32(op, "master", master, dims)?;
            all.push(("master", master));
        }
        (_, dtype) => bail!(
            "{op}: `weight` is {dtype:?} and `master` is {}, expected F32 without or BF16 with one",
            if master.is_some() { "given" } else { "absent" }
        ),
    }
    for (i, (name, tensor)) in all.iter().enumerate() {
        cpu::distinct(op, name, tensor, &all[i + 1..])?;
        cpu::distinct(op, name, tensor, &[("grad", grad)])?;
    }
    Ok(())
}

/// Update number `step` (from 1) of all parameters, with the gradients scaled down to a joint L2 norm of
/// `max_grad_norm`; 0 switches that off. Returns the sum of the squares of each gradient as it was, `[updates]` in
/// `f64`, on the device: reading it is the only wait. Nothing is changed if their sum is not finite.
pub fn clip_and_update(
    hyper: &AdamW,
    updates: &[AdamWUpdate<'_>],
    step: u64,
    max_grad_norm: f64,
) -> Result<Tensor> {
    let op = "clip_and_update";
    let Some(first) = updates.first() else {
        return Tensor::from_vec(Vec::<f64>::new(), 0, &Device::Cpu);
    };
    for update in updates {
        check(op, &update.tensors, step)?;
    }
    let scalars: Vec<Scalars> = updates
        .iter()
        .map(|update| Scalars::new(hyper, update.lr, update.weight_decay, step))
        .collect();
    let seed = step_seed(step);
    return_if_on_gpu!(first.tensors.grad => clip_and_update(updates, &scalars, seed, max_grad_norm));
    let squares = updates.iter().map(|update| sum_of_squares(update.tensors.grad));
    let squares = squares.collect::<Result<Vec<f64>>>()?;
    let norm = squares.iter().sum::<f64>().sqrt();
    if norm.is_finite() {
        // As torch.nn.utils.clip_grad_norm_.
        let clip = max_grad_norm / (norm + 1e-6);
        let grad_scale = if max_grad_norm > 0.0 { clip.min(1.0) } else { 1.0 };
        for (index, (update, scalars)) in updates.iter().zip(scalars).enumerate() {
            let seed = tensor_seed(seed, index);
            update_on_cpu(op, &update.tensors, scalars, grad_scale as f32, seed)?;
        }
    }
    Tensor::from_vec(squares, updates.len(), first.tensors.grad.device())
}

/// Update number `step` (from 1): decays the weight by `lr * weight_decay`, then moves it by Adam with the gradient
/// `grad_scale * grad`.
pub fn adamw_step(
    hyper: &AdamW,
    tensors: &AdamWTensors<'_>,
    lr: f64,
    weight_decay: f64,
    step: u64,
    grad_scale: f32,
) -> Result<()> {
    let op = "adamw_step";
    check(op, tensors, step)?;
    let scalars = Scalars::new(hyper, lr, weight_decay, step);
    let seed = step_seed(step);
    return_if_on_gpu!(tensors.grad => adamw_step(tensors, &scalars, seed, grad_scale));
    update_on_cpu(op, tensors, scalars, grad_scale, tensor_seed(seed, 0))
}

fn update_on_cpu(
    op: &'static str,
    tensors: &AdamWTensors<'_>,
    s: Scalars,
    grad_scale: f32,
    seed: u32,
) -> Result<()> {
    if tensors.exp_avg.dtype() == DType::BF16 {
        return update_blocks::<bf16>(op, tensors, |first, grad, p, m, v| {
            moments::update(s, grad_scale, seed, first as u32, grad, p, m, v);
        });
    }
    update_blocks::<f32>(op, tensors, |_, grad, p, m, v| update(s, grad_scale, grad, p, m, v))
}

/// Calls `update(first element, grad, weight, moments)` for blocks, on all threads, and narrows the weight.
fn update_blocks<M: Element>(
    op: &'static str,
    tensors: &AdamWTensors<'_>,
    update: impl Fn(usize, &[f32], &mut [f32], &mut [M], &mut [M]) + Sync,
) -> Result<()> {
    let &AdamWTensors { weight, master, exp_avg, exp_avg_sq, grad } = tensors;
    let grad = read(op, "grad", grad)?;
    let grad = grad.slice::<f32>()?;
    let f32_weight = master.unwrap_or(weight);
    cpu::write(op, "weight", f32_weight, |p: &mut [f32]| {
        cpu::write(op, "exp_avg", exp_avg, |m: &mut [M]| {
            cpu::write(op, "exp_avg_sq", exp_avg_sq, |v: &mut [M]| {
                let blocks = p
                    .par_chunks_mut(BLOCK)
                    .zip(m.par_chunks_mut(BLOCK))
                    .zip(v.par_chunks_mut(BLOCK))
                    .zip(grad.par_chunks(BLOCK))
                    .enumerate();
                if master.is_none() {
                    blocks.for_each(|(index, (((p, m), v), grad))| {
                        update(index * BLOCK, grad, p, m, v);
                    });
                    return Ok(());
                }
                cpu::write(op, "weight", weight, |weight: &mut [bf16]| {
                    blocks.zip(weight.par_chunks_mut(BLOCK)).for_each(
                        |((index, (((p, m), v), grad)), weight)| {
                            update(index * BLOCK, grad, p, m, v);
                            to_bf16_block(p, weight);
                        },
                    );
                })
            })
        })
    })???
}

/// Sum of the squares of an `f32` tensor, in `f64`; the same bits for every thread count.
pub fn sum_of_squares(t: &Tensor) -> Result<f64> {
    expect_f32("sum_of_squares", "t", t, t.dims())?;
    return_if_on_gpu!(t => sum_of_squares(t));
    let t = read("sum_of_squares", "t", t)?;
    let t = t.slice::<f32>()?;
    let partials: Vec<f64> = t.par_chunks(BLOCK).map(sum_of_squares_block).collect();
    Ok(partials.iter().sum())
}

/// Sets all elements of `f32` tensors to zero, in place.
pub fn fill_zero_all(tensors: &[&Tensor]) -> Result<()> {
    let Some(first) = tensors.first() else { return Ok(()) };
    for tensor in tensors {
        expect_f32("fill_zero_all", "t", tensor, tensor.dims())?;
    }
    return_if_on_gpu!(first => fill_zero_all(tensors));
    tensors.iter().try_for_each(|tensor| fill_zero(tensor))
}

/// Sets all elements of an `f32` or `bf16` tensor to zero, in place.
pub fn fill_zero(t: &Tensor) -> Result<()> {
    let op = "fill_zero";
    expect_shape(op, "t", t, t.dims())?;
    return_if_on_gpu!(t => fill_zero(t));
    match t.dtype() {
        DType::BF16 => cpu::write(op, "t", t, |t: &mut [bf16]| {
            t.par_chunks_mut(BLOCK).for_each(|t| t.fill(bf16::ZERO));
        }),
        _ => cpu::write(op, "t", t, |t: &mut [f32]| {
            t.par_chunks_mut(BLOCK).for_each(|t| t.fill(0.0));
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, message, random, values, with_threads};
    use super::*;

    const HYPER: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

    /// The update in `f64`.
    fn plain(p: &mut f64, m: &mut f64, v: &mut f64, g: f64, lr: f64, decay: f64, step: i32) {
        *p *= 1.0 - lr * decay;
        *m += (1.0 - HYPER.beta1) * (g - *m);
        *v = HYPER.beta2 * *v + (1.0 - HYPER.beta2) * g * g;
        let denominator = v.sqrt() / (1.0 - HYPER.beta2.powi(step)).sqrt() + HYPER.eps;
        *p -= lr / (1.0 - HYPER.beta1.powi(step)) * *m / denominator;
    }

    fn zeros(dims: &[usize]) -> Tensor {
        Tensor::zeros(dims, DType::F32, &device()).unwrap()
    }

    #[test]
    fn five_steps_match_the_equations_in_f64() {
        for n in [1, 15, 16, 17, 70_000] {
            let weight = random(1, &[n]);
            let (exp_avg, exp_avg_sq) = (zeros(&[n]), zeros(&[n]));
            let mut want = values(&weight);
            let (mut m, mut v) = (vec![0f64; n], vec![0f64; n]);
            for step in 1..=5 {
                let grad = random(10 + step, &[n]);
                let lr = 1e-2 / step as f64;
                let tensors = AdamWTensors {
                    weight: &weight,
                    master: None,
                    exp_avg: &exp_avg,
                    exp_avg_sq: &exp_avg_sq,
                    grad: &grad,
                };
                adamw_step(&HYPER, &tensors, lr, 0.1, step, 0.5).unwrap();
                for (i, g) in values(&grad).iter().enumerate() {
                    plain(&mut want[i], &mut m[i], &mut v[i], 0.5 * g, lr, 0.1, step as i32);
                }
            }
            for (got, want) in values(&weight).iter().zip(&want) {
                assert!((got - want).abs() < 1e-6 * (1.0 + want.abs()), "{n}: {got} {want}");
            }
        }
    }

    #[test]
    fn a_bf16_weight_follows_its_master() {
        let master = random(1, &[33]);
        let alone = master.copy().unwrap();
        let weight = master.to_dtype(DType::BF16).unwrap();
        let state = [zeros(&[33]), zeros(&[33]), zeros(&[33]), zeros(&[33])];
        let grad = random(2, &[33]);
        for step in 1..=3 {
            let tensors = AdamWTensors {
                weight: &weight,
                master: Some(&master),
                exp_avg: &state[0],
                exp_avg_sq: &state[1],
                grad: &grad,
            };
            adamw_step(&HYPER, &tensors, 1e-4, 0.01, step, 1.0).unwrap();
            let tensors = AdamWTensors {
                weight: &alone,
                master: None,
                exp_avg: &state[2],
                exp_avg_sq: &state[3],
                grad: &grad,
            };
            adamw_step(&HYPER, &tensors, 1e-4, 0.01, step, 1.0).unwrap();
        }
        assert_eq!(values(&master), values(&alone));
        assert_eq!(values(&weight), values(&master.to_dtype(DType::BF16).unwrap()));
    }

    /// Weight, moments and gradient of one of many parameters; some start off a vector's boundary.
    struct State {
        tensors: [Tensor; 4],
    }

    impl State {
        /// More of them than one launch takes, of every size around a vector and a chunk.
        fn many() -> Vec<Self> {
            let sizes = [1, 3, 4, 5, 0, 1023, 2048, 65_535, 65_536, 65_540, 131_075, 2, 8, 7];
            let sizes = sizes.into_iter().chain((0..160).map(|i| i % 9));
            let tensor =
                |seed, n: usize, start| random(seed, &[n + start]).narrow(0, start, n).unwrap();
            let state = sizes.enumerate().map(|(i, n)| {
                let (seed, start) = (10 * i as u64, i % 3);
                // All of it, since candle starts no kernel on nothing: on a GPU that is an error.
                let exp_avg_sq = random(seed + 2, &[n + start]).sqr().unwrap();
                let exp_avg_sq = exp_avg_sq.narrow(0, start, n).unwrap();
                let tensors = [
                    tensor(seed, n, start),
                    tensor(seed + 1, n, start),
                    exp_avg_sq,
                    tensor(seed + 3, n, start),
                ];
                Self { tensors }
            });
            state.collect()
        }

        fn update(&self, i: usize) -> AdamWUpdate<'_> {
            let [weight, exp_avg, exp_avg_sq, grad] = &self.tensors;
            let tensors = AdamWTensors { weight, master: None, exp_avg, exp_avg_sq, grad };
            AdamWUpdate { tensors, lr: 1e-2 / (i + 1) as f64, weight_decay: (i % 2) as f64 }
        }
    }

    #[test]
    fn an_update_of_all_parameters_is_theirs_one_by_one_with_a_joint_norm() {
        for max_grad_norm in [0.0, 0.5, 1e9] {
            let (together, alone) = (State::many(), State::many());
            let updates: Vec<_> = together.iter().zip(0..).map(|(s, i)| s.update(i)).collect();
            let squares = clip_and_update(&HYPER, &updates, 3, max_grad_norm).unwrap();
            let squares = squares.to_vec1::<f64>().unwrap();
            let norm = squares.iter().sum::<f64>().sqrt();
            let scale = if max_grad_norm == 0.5 { 0.5 / (norm + 1e-6) } else { 1.0 };
            for (i, (together, alone)) in together.iter().zip(&alone).enumerate() {
                let want: f64 = values(&alone.tensors[3]).iter().map(|x| x * x).sum();
                assert!((squares[i] - want).abs() <= 1e-9 * want, "{i}: {} {want}", squares[i]);
                let AdamWUpdate { tensors, lr, weight_decay } = alone.update(i);
                adamw_step(&HYPER, &tensors, lr, weight_decay, 3, scale as f32).unwrap();
                for (together, alone) in together.tensors.iter().zip(&alone.tensors) {
                    assert_eq!(values(together), values(alone), "parameter {i}");
                }
            }
        }
    }

    #[test]
    fn gradients_that_are_not_finite_change_nothing() {
        for bad in [f32::NAN, f32::INFINITY] {
            let (mut changed, before) = (State::many(), State::many());
            changed[6].tensors[3] = Tensor::full(bad, 2048, &device()).unwrap();
            changed[6].tensors[3] = changed[6].tensors[3].contiguous().unwrap();
            let updates: Vec<_> = changed.iter().zip(0..).map(|(s, i)| s.update(i)).collect();
            let squares = clip_and_update(&HYPER, &updates, 1, 1.0).unwrap();
            let squares = squares.to_vec1::<f64>().unwrap();
            assert_eq!(squares.iter().position(|square| !square.is_finite()), Some(6));
            for (changed, before) in changed.iter().zip(&before) {
                for (changed, before) in changed.tensors[..3].iter().zip(&before.tensors) {
                    assert_eq!(values(changed), values(before));
                }
            }
        }
    }

    #[test]
    fn many_tensors_become_zero_and_their_neighbours_stay() {
        let whole: Vec<Tensor> = (0..170).map(|i| random(i, &[i as usize % 9 + 6])).collect();
        let inner: Vec<Tensor> =
            whole.iter().map(|t| t.narrow(0, 2, t.elem_count() - 4).unwrap()).collect();
        fill_zero_all(&inner.iter().collect::<Vec<_>>()).unwrap();
        for tensor in &whole {
            let x = values(tensor);
            let zeros = x.iter().map(|x| *x == 0.0);
            let want = (0..x.len()).map(|i| (2..x.len() - 2).contains(&i));
            assert!(zeros.eq(want), "{x:?}");
        }
    }

    #[test]
    fn state_of_the_wrong_kind_is_refused() {
        let (x, y, z) = (random(1, &[3]), zeros(&[3]), zeros(&[3]));
        let grad = random(2, &[3]);
        let tensors =
            AdamWTensors { weight: &x, master: None, exp_avg: &y, exp_avg_sq: &z, grad: &grad };
        assert!(message(adamw_step(&HYPER, &tensors, 0.1, 0.0, 0, 1.0)).contains("count from 1"));
        let twice = AdamWTensors { exp_avg_sq: &y, ..tensors };
        let said = message(adamw_step(&HYPER, &twice, 0.1, 0.0, 1, 1.0));
        assert!(said.contains("`exp_avg` is written in place"), "{said}");
        let weight = x.to_dtype(DType::BF16).unwrap();
        let bare = AdamWTensors { weight: &weight, ..tensors };
        let said = message(adamw_step(&HYPER, &bare, 0.1, 0.0, 1, 1.0));
        assert!(said.contains("`master` is absent"), "{said}");
    }

    #[test]
    fn the_norm_is_exact_and_the_same_on_any_number_of_threads() {
        let x = random(1, &[100_003]);
        let want: f64 = values(&x).iter().map(|x| x * x).sum();
        let one = with_threads(1, || sum_of_squares(&x)).unwrap();
        let two = with_threads(2, || sum_of_squares(&x)).unwrap();
        assert_eq!(one.to_bits(), two.to_bits());
        assert!((one - want).abs() < 1e-9 * want, "{one} {want}");
        fill_zero(&x).unwrap();
        assert_eq!(sum_of_squares(&x).unwrap(), 0.0);
    }
}
