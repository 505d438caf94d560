//! Sums of the probabilities that a router gives to its experts, for its auxiliary loss, and their
//! gradient.
//!
//! Shapes: `T` tokens, `E` experts. All tensors are `f32`, except for the sums of the CPU.
//!
//! ```text
//! p[t] = softmax(logits[t])                                                [T, E]
//! sums = sum over t of p[t]                                                [E]
//! gradient of sum over e of slopes[e] sums[e]: p[t, e] (slopes[e] - sum over f of slopes[f] p[t, f])
//! ```

use super::column_shares::ColumnShares;
use super::cpu::{ROWS, expect_f32, read, write};
use super::launch::{Launch, launch, on_gpu};
use super::route::TOKENS;
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// The probabilities of a token.
fn softmax(logits: &[f32]) -> impl Iterator<Item = f64> + Clone + '_ {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp = move |x: &f32| f64::from(*x - largest).exp();
    let sum: f64 = logits.iter().map(exp).sum();
    logits.iter().map(move |x| exp(x) / sum)
}

/// Sums over the tokens of the probabilities of each expert, `[E]`, for `logits: [T, E]`. The CPU adds
/// in `f64`, a GPU in `f32`; the order of the additions depends on `T` only.
pub fn router_probabilities(logits: &Tensor) -> Result<Tensor> {
    let op = "router_probabilities";
    let (t, e) = logits.dims2()?;
    expect_f32(op, "logits", logits, &[t, e])?;
    if on_gpu(logits) {
        let sums = Tensor::zeros(e, DType::F32, logits.device())?;
        let probabilities = ColumnShares::new(Some(&sums), t, e)?;
        launch!(op, for_tokens(op, t); logits, probabilities, t, e)?;
        probabilities.add(op)?;
        return Ok(sums);
    }
    let logits = read(op, "logits", logits)?;
    let of_rows = |rows: &[f32]| {
        let mut sums = vec![0.0; e];
        for row in rows.chunks(e) {
            sums.iter_mut().zip(softmax(row)).for_each(|(sum, p)| *sum += p);
        }
        sums
    };
    let parts: Vec<Vec<f64>> = logits.slice::<f32>()?.par_chunks(ROWS * e).map(of_rows).collect();
    let mut sums = vec![0.0; e];
    for part in parts {
        sums.iter_mut().zip(part).for_each(|(sum, p)| *sum += p);
    }
    Tensor::from_vec(sums, e, &Device::Cpu)
}

/// Adds the gradient of the sum of `slopes: [E]` times the probabilities to `d_logits: [T, E]`.
pub fn router_probabilities_backward(
    logits: &Tensor,
    slopes: &Tensor,
    d_logits: &Tensor,
) -> Result<()> {
    let op = "router_probabilities_backward";
    let (t, e) = logits.dims2()?;
    for (name, tensor, shape) in
        [("logits", logits, &[t, e][..]), ("slopes", slopes, &[e]), ("d_logits", d_logits, &[t, e])]
    {
        expect_f32(op, name, tensor, shape)?;
    }
    if on_gpu(logits) {
        return launch!(op, for_tokens(op, t); logits, slopes, d_logits, t, e);
    }
    let (logits, slopes) = (read(op, "logits", logits)?, read(op, "slopes", slopes)?);
    let (logits, slopes) = (logits.slice::<f32>()?, slopes.slice::<f32>()?);
    write(op, "d_logits", d_logits, |d_logits: &mut [f32]| {
        let rows = d_logits.par_chunks_mut(e).zip(logits.par_chunks(e));
        rows.with_min_len(ROWS).for_each(|(d_logits, logits)| {
            let p = softmax(logits);
            let mean: f64 = p.clone().zip(slopes).map(|(p, slope)| p * f64::from(*slope)).sum();
            for ((d, p), slope) in d_logits.iter_mut().zip(p).zip(slopes) {
                *d += (p * (f64::from(*slope) - mean)) as f32;
            }
        });
    })
}

/// A launch with a warp for each of `t` tokens.
fn for_tokens(kernel: &'static str, t: usize) -> Launch {
    Launch::new(kernel, DType::F32).grid(t.div_ceil(TOKENS)).threads(32 * TOKENS as u32)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, random};
    use super::*;

    const SLOPES: [f32; 5] = [0.5, -1.0, 0.25, 2.0, 0.0];

    /// The sums, and the gradient.
    fn computed(logits: &Tensor) -> (Vec<f64>, Vec<f32>) {
        let slopes = Tensor::new(&SLOPES, logits.device()).unwrap();
        let d_logits = testing::gradient_buffer(logits.dims());
        router_probabilities_backward(logits, &slopes, &d_logits).unwrap();
        let sums = router_probabilities(logits).unwrap().to_dtype(DType::F64).unwrap();
        let gradient = testing::added(&d_logits).flatten_all().unwrap().to_vec1().unwrap();
        (sums.to_vec1().unwrap(), gradient)
    }

    fn value(logits: &[f64]) -> f64 {
        let sum = |row: &[f64]| {
            let all: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().zip(SLOPES).map(|(x, slope)| x.exp() / all * f64::from(slope)).sum::<f64>()
        };
        logits.chunks(5).map(sum).sum()
    }

    #[test]
    fn the_gradient_is_the_difference_of_the_sum() {
        // A kernel adds in f32.
        let exact = !testing::kernels_are_tested();
        for t in [1, 3, 200] {
            let (of_sums, of_all) = if exact { (1e-9, 1e-6) } else { (1e-6, 1e-4) };
            let logits = random(7, &[t, 5]);
            let (sums, gradient) = computed(&logits);
            assert!((sums.iter().sum::<f64>() - t as f64).abs() < of_sums * t as f64);
            let values: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let found: f64 = sums.iter().zip(SLOPES).map(|(sum, s)| sum * f64::from(s)).sum();
            assert!((found - value(&values)).abs() < of_all);
            for at in [0, 4, values.len() / 2, values.len() - 1] {
                let moved = |step: f64| {
                    let mut moved = values.clone();
                    moved[at] += step;
                    value(&moved)
                };
                let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((f64::from(gradient[at]) - slope).abs() < 1e-6, "{t}, {at}");
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let logits = random(8, &[1000, 5]);
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| computed(&logits))
        };
        assert!(run(1) == run(3));
    }

    #[test]
    fn the_number_of_slopes_is_that_of_the_experts() {
        let logits = random(9, &[2, 5]);
        let slopes = random(10, &[1]);
        let error = router_probabilities_backward(&logits, &slopes, &logits).unwrap_err();
        assert!(error.to_string().contains("`slopes`"), "{error}");
    }
}
