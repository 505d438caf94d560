//! Sums of the probabilities that a router gives to its experts, for its auxiliary loss, and their
//! gradient. On the CPU.
//!
//! Shapes: `T` tokens, `E` experts.
//!
//! ```text
//! p[t] = softmax(logits[t])                                                [T, E]
//! sums = sum over t of p[t]                                                [E]
//! gradient of sum over e of slopes[e] sums[e]: p[t, e] (slopes[e] - sum over f of slopes[f] p[t, f])
//! ```

use super::cpu::{ROWS, expect_f32, read};
use candle_core::{Device, Result, Tensor, bail};
use rayon::prelude::*;

/// The probabilities of a token.
fn softmax(logits: &[f32]) -> impl Iterator<Item = f64> + Clone + '_ {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp = move |x: &f32| f64::from(*x - largest).exp();
    let sum: f64 = logits.iter().map(exp).sum();
    logits.iter().map(move |x| exp(x) / sum)
}

/// Sums over the tokens of the probabilities of each expert, for `logits: [T, E]` (`f32`). Sums are
/// computed in `f64`, in an order that does not depend on the number of threads.
pub fn router_probabilities(logits: &Tensor) -> Result<Vec<f64>> {
    let op = "router_probabilities";
    let (t, e) = logits.dims2()?;
    expect_f32(op, "logits", logits, &[t, e])?;
    expect_cpu(op, logits)?;
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
    Ok(sums)
}

/// The gradient of `logits: [T, E]` of the sum of `slopes [E]` times the probabilities.
pub fn router_probabilities_backward(logits: &Tensor, slopes: &[f32]) -> Result<Tensor> {
    let op = "router_probabilities_backward";
    let (t, e) = logits.dims2()?;
    expect_f32(op, "logits", logits, &[t, e])?;
    expect_cpu(op, logits)?;
    if slopes.len() != e {
        bail!("{op}: found {} slopes for {e} experts", slopes.len());
    }
    let logits = read(op, "logits", logits)?;
    let mut d_logits = vec![0f32; t * e];
    let rows = d_logits.par_chunks_mut(e).zip(logits.slice::<f32>()?.par_chunks(e));
    rows.with_min_len(ROWS).for_each(|(d_logits, logits)| {
        let p = softmax(logits);
        let mean: f64 = p.clone().zip(slopes).map(|(p, slope)| p * f64::from(*slope)).sum();
        for ((d, p), slope) in d_logits.iter_mut().zip(p).zip(slopes) {
            *d = (p * (f64::from(*slope) - mean)) as f32;
        }
    });
    Tensor::from_vec(d_logits, (t, e), &Device::Cpu)
}

fn expect_cpu(op: &str, tensor: &Tensor) -> Result<()> {
    if !tensor.device().is_cpu() {
        bail!("{op}: computes on the CPU only");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    fn random(seed: u64, dims: &[usize]) -> Tensor {
        testing::random(seed, dims).to_device(&Device::Cpu).unwrap()
    }

    const SLOPES: [f32; 5] = [0.5, -1.0, 0.25, 2.0, 0.0];

    fn value(logits: &[f64]) -> f64 {
        let sum = |row: &[f64]| {
            let all: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().zip(SLOPES).map(|(x, slope)| x.exp() / all * f64::from(slope)).sum::<f64>()
        };
        logits.chunks(5).map(sum).sum()
    }

    #[test]
    fn the_gradient_is_the_difference_of_the_sum() {
        for t in [1, 3, 200] {
            let logits = random(7, &[t, 5]);
            let sums = router_probabilities(&logits).unwrap();
            assert!((sums.iter().sum::<f64>() - t as f64).abs() < 1e-9 * t as f64);
            let values: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let found: f64 = sums.iter().zip(SLOPES).map(|(sum, s)| sum * f64::from(s)).sum();
            assert!((found - value(&values)).abs() < 1e-6);
            let gradient = router_probabilities_backward(&logits, &SLOPES).unwrap();
            let gradient: Vec<f32> = gradient.flatten_all().unwrap().to_vec1().unwrap();
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
            pool.install(|| {
                let gradient = router_probabilities_backward(&logits, &SLOPES).unwrap();
                let sums = router_probabilities(&logits).unwrap();
                (sums, gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap())
            })
        };
        assert!(run(1) == run(3));
    }

    #[test]
    fn the_number_of_slopes_is_that_of_the_experts() {
        let error = router_probabilities_backward(&random(9, &[2, 5]), &[1.0]).unwrap_err();
        assert!(error.to_string().contains("1 slopes for 5 experts"), "{error}");
    }
}
