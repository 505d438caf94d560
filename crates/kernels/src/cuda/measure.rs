//! Measures the algorithms of cublasLt for one product.

use super::blas_call::{Algorithm, Call, is_refusal};
use super::launch::address;
use super::stored_algorithms::settings;
use crate::{AlgorithmEntry, Product};
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::{CudaDevice, WrapErr as _};
use candle_core::{Error, Result, Tensor};

/// Number of measurements of each algorithm, of which the median counts.
const ROUNDS: usize = 5;
/// Minimum duration of a measurement, in microseconds, unless it has the maximum number of runs.
const ROUND_US: f64 = 4000.0;
const MAX_RUNS: usize = 200;

/// Measures `choices`, those of cublasLt in its order, and returns the entry of the product; `None`
/// if all of them fail.
///
/// The results are written to other memory on the device of `dst`, so that the product can still be
/// computed. Each round measures all algorithms in turn: the clock rate of a GPU changes over time.
pub(super) fn measure(
    product: &Product,
    call: &Call<'_>,
    choices: &[Algorithm],
    dst: &Tensor,
    device: &CudaDevice,
) -> Result<Option<AlgorithmEntry>> {
    // `dst` may be the first part only of the destination.
    let [m, n, _] = product.shape;
    let scratch = Tensor::zeros(m * n, dst.dtype(), dst.device())?;
    let d = address("measure", "scratch", &scratch)?.0;
    let call = Call { c: if product.in_place { d } else { call.c }, d, ..*call };
    let mut rounds = vec![Vec::new(); choices.len()];
    let mut runs = vec![1; choices.len()];
    // The first two rounds warm up and find the number of runs of each algorithm.
    for round in 0..2 + ROUNDS {
        for ((algorithm, times), runs) in choices.iter().zip(&mut rounds).zip(&mut runs) {
            let is_used = settings(algorithm).is_some_and(|settings| settings.is_deterministic());
            if !is_used {
                continue;
            }
            match time(&call, algorithm, *runs, device)? {
                Some(us) if round < 2 => {
                    *runs = ((ROUND_US / us).ceil() as usize).clamp(1, MAX_RUNS);
                }
                Some(us) => times.push(us),
                None => {}
            }
        }
    }
    let times: Vec<Option<f64>> = rounds.into_iter().map(median).collect();
    let Some(place) = AlgorithmEntry::fastest(&times) else { return Ok(None) };
    let (algorithm, best_us) = (choices[place], times[place].unwrap_or_default());
    let first_us = times[0].unwrap_or(best_us);
    Ok(settings(&algorithm).map(|settings| AlgorithmEntry {
        product: product.clone(),
        first_us,
        best_us,
        place,
        settings,
        data: algorithm.data,
    }))
}

/// Microseconds of a run, in tenths; `None` if cublasLt refuses the algorithm.
fn time(
    call: &Call<'_>,
    algorithm: &Algorithm,
    runs: usize,
    device: &CudaDevice,
) -> Result<Option<f64>> {
    let stream = device.cuda_stream();
    let now = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w();
    let begin = now()?;
    for _ in 0..runs {
        match call.start(algorithm) {
            Err(error) if is_refusal(error) => return Ok(None),
            Err(error) => return Err(Error::msg(format!("cublasLt failed: {error}"))),
            Ok(()) => {}
        }
    }
    let ms = f64::from(begin.elapsed_ms(&now()?).w()?);
    Ok(Some((1e4 * ms / runs as f64).round() / 10.0))
}

fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}
