//! Timing on a CPU and on a GPU.

use candle_core::{DType, Device, Result, Tensor};
use std::time::Instant;

/// Duration of a run, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seconds {
    /// The fastest run: the one that other processes disturbed least.
    pub(super) best: f64,
    pub(super) median: f64,
}

/// Times runs on one device.
///
/// On a GPU, runs are timed in batches: a call returns before its kernels have run, and
/// synchronising after each run would dominate the time of short kernels.
#[derive(Debug, Clone)]
pub(super) struct Clock {
    pub(super) device: Device,
    /// Duration of a batch of runs, in seconds; 0: one run per batch.
    batch_s: f64,
    min_rounds: usize,
    min_s: f64,
    /// Seconds after which timing stops, if at least three batches were timed.
    max_s: f64,
}

/// Maximum number of runs in a batch whose operands are prepared per run: all of them are in memory
/// at the same time.
const MAX_PREPARED: usize = 8;
/// Maximum number of runs in any batch.
const MAX_RUNS: usize = 500;

impl Clock {
    pub(super) fn new(device: &Device) -> Self {
        let device = device.clone();
        if device.is_cpu() {
            Self { device, batch_s: 0.0, min_rounds: 5, min_s: 0.6, max_s: f64::INFINITY }
        } else {
            Self { device, batch_s: 0.02, min_rounds: 10, min_s: 0.2, max_s: 2.0 }
        }
    }

    /// A clock for tests, which runs each op a few times only. Its times are not meaningful.
    pub(super) fn hasty(device: &Device) -> Self {
        let device = device.clone();
        Self { device, batch_s: 1e-9, min_rounds: 1, min_s: 0.0, max_s: 0.0 }
    }

    /// Times `run`, which is called many times.
    pub(super) fn time(&self, mut run: impl FnMut() -> Result<()>) -> Result<Seconds> {
        self.rounds(MAX_RUNS, || Ok(()), |()| run())
    }

    /// Times a run that consumes what `prepare` returns; the time of `prepare` is not counted.
    pub(super) fn time_after<T>(
        &self,
        prepare: impl FnMut() -> Result<T>,
        run: impl FnMut(T) -> Result<()>,
    ) -> Result<Seconds> {
        self.rounds(MAX_PREPARED, prepare, run)
    }

    fn rounds<T>(
        &self,
        max_runs: usize,
        mut prepare: impl FnMut() -> Result<T>,
        mut run: impl FnMut(T) -> Result<()>,
    ) -> Result<Seconds> {
        let mut batch = |runs: usize| -> Result<f64> {
            let prepared = (0..runs).map(|_| prepare()).collect::<Result<Vec<_>>>()?;
            self.device.synchronize()?;
            let begin = Instant::now();
            for one in prepared {
                run(one)?;
            }
            self.device.synchronize()?;
            Ok(begin.elapsed().as_secs_f64() / runs as f64)
        };
        batch(1)?; // warms up memory and caches, and loads kernels
        let mut runs = 1;
        if self.batch_s > 0.0 {
            runs = ((self.batch_s / batch(1)?).ceil() as usize).clamp(1, max_runs);
            batch(runs)?; // the clock rate of a GPU rises under load
        }
        let start = Instant::now();
        let mut rounds = Vec::new();
        loop {
            rounds.push(batch(runs)?);
            let (count, elapsed) = (rounds.len(), start.elapsed().as_secs_f64());
            let is_slow = count >= 3 && elapsed > self.max_s;
            if is_slow || (count >= self.min_rounds && elapsed >= self.min_s) {
                break;
            }
        }
        rounds.sort_by(f64::total_cmp);
        Ok(Seconds { best: rounds[0], median: rounds[rounds.len() / 2] })
    }

    /// Operations per second of a product of two square matrices. They are random, because a GPU is
    /// faster on zeros.
    pub(super) fn matmul_flops(&self, side: usize, dtype: DType) -> Result<f64> {
        let square = || random(&[side, side], dtype, &self.device);
        let (x, w) = (square()?, square()?);
        let seconds = self.time(|| crate::ops::linear(&x, &w, None).map(drop))?;
        Ok(2.0 * (side as f64).powi(3) / seconds.best)
    }

    /// Bytes read and written per second by a copy of `count` floats.
    pub(super) fn copy_bytes(&self, count: usize) -> Result<f64> {
        let seconds = if self.device.is_cpu() {
            use rayon::prelude::*;
            let (source, mut target) = (vec![1f32; count], vec![0f32; count]);
            self.time(|| {
                let chunks = target.par_chunks_mut(1 << 16).zip(source.par_chunks(1 << 16));
                chunks.for_each(|(target, source)| target.copy_from_slice(source));
                Ok(())
            })?
        } else {
            let source = Tensor::zeros(count, DType::F32, &self.device)?;
            self.time(|| source.copy().map(drop))?
        };
        Ok(2.0 * (4 * count) as f64 / seconds.best)
    }
}

/// A tensor of normally distributed numbers.
pub(super) fn random(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn each_prepared_value_is_used_once_and_the_best_is_not_above_the_median() {
        let (prepared, used) = (Cell::new(0), Cell::new(0));
        let count = |cell: &Cell<usize>| cell.set(cell.get() + 1);
        let clock = Clock { batch_s: 1.0, ..Clock::hasty(&Device::Cpu) };
        let prepare = || {
            count(&prepared);
            Ok(())
        };
        let run = |()| {
            count(&used);
            Ok(())
        };
        let seconds = clock.time_after(prepare, run).unwrap();
        assert_eq!(prepared.get(), used.get());
        assert_eq!(used.get(), 1 + 1 + 2 * MAX_PREPARED); // first, length, warm-up, one round
        assert!(seconds.best <= seconds.median);
    }
}
