//! Losses and gradients of a layout, and their differences from those of the reference.

use super::layouts::{LaidOut, Place};
use super::subject::{Pipeline, RowLosses};
use crate::batch::VarlenBatch;
use crate::run::RunError;
use crate::train::StepRunner;
use candle_core::{DType, Device, Result, Tensor};

#[derive(Debug, Clone)]
pub(super) struct LayoutLosses {
    pub(super) loss: f64,
    pub(super) samples: Vec<SampleLosses>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct SampleLosses {
    pub(super) nll: Vec<f32>,
    pub(super) weight: f64,
    pub(super) sum: f64,
}

impl SampleLosses {
    /// The weighted mean; 0 without targets.
    pub(super) fn mean(&self) -> f64 {
        if self.weight > 0.0 { self.sum / self.weight } else { 0.0 }
    }
}

/// Forward and backward of all micro-batches as one step. The gradients are in
/// [`StepRunner::grads`].
pub(super) fn measure(
    pipeline: &dyn Pipeline,
    runner: &StepRunner,
    laid_out: &[LaidOut],
    num_samples: usize,
) -> std::result::Result<LayoutLosses, RunError> {
    let batches: Vec<VarlenBatch> = laid_out.iter().map(|of| of.batch.clone()).collect();
    let step = pipeline.step(runner, batches)?;
    let mut samples = vec![SampleLosses::default(); num_samples];
    for (laid_out, losses) in laid_out.iter().zip(&step.micro_batches) {
        add(&mut samples, &laid_out.places, losses);
    }
    Ok(LayoutLosses { loss: step.loss, samples })
}

/// As [`measure`], but computes the forward pass only.
pub(super) fn forward(
    pipeline: &dyn Pipeline,
    runner: &StepRunner,
    laid_out: &[LaidOut],
    num_samples: usize,
) -> std::result::Result<LayoutLosses, RunError> {
    let mut samples = vec![SampleLosses::default(); num_samples];
    for LaidOut { batch, places } in laid_out {
        add(&mut samples, places, &pipeline.losses(runner, batch.clone())?);
    }
    let weight: f64 = samples.iter().map(|sample| sample.weight).sum();
    let sum: f64 = samples.iter().map(|sample| sample.sum).sum();
    Ok(LayoutLosses { loss: sum / weight, samples })
}

/// Adds the losses of a micro-batch to their samples. A target outside of all samples is of the one
/// before it.
fn add(samples: &mut [SampleLosses], places: &[Place], losses: &RowLosses) {
    for (row, (nll, weight)) in losses.rows.iter().zip(losses.losses.pairs()) {
        let next = places.partition_point(|place| place.tokens.start <= *row as usize);
        let Some(place) = places.get(next.saturating_sub(1)) else { continue };
        let sample = &mut samples[place.sample];
        sample.nll.push(nll as f32);
        sample.weight += weight;
        sample.sum += nll * weight;
    }
}

/// Copies of the gradients; `None` for frozen parameters.
pub(super) fn copy_gradients(runner: &StepRunner) -> Result<Vec<Option<Tensor>>> {
    runner.grads().iter().map(|grad| grad.map(Tensor::copy).transpose()).collect()
}

/// Sums over the elements of a gradient: of the squares of the reference, of the other gradient,
/// and of their difference, and of their products.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sums {
    pub(super) reference: f64,
    pub(super) found: f64,
    pub(super) difference: f64,
    pub(super) product: f64,
}

impl std::ops::AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.reference += other.reference;
        self.found += other.found;
        self.difference += other.difference;
        self.product += other.product;
    }
}

impl Sums {
    /// Norm of the difference, relative to the reference; infinite if a value is not finite.
    pub(super) fn relative(&self) -> f64 {
        if self.difference == 0.0 {
            return 0.0;
        }
        let relative = (self.difference / self.reference).sqrt();
        if relative.is_nan() { f64::INFINITY } else { relative }
    }

    /// 1 minus the cosine of the angle between the gradients; 0 if both are 0.
    pub(super) fn one_minus_cosine(&self) -> f64 {
        let norms = (self.reference * self.found).sqrt();
        if norms == 0.0 { 0.0 } else { (1.0 - self.product / norms).max(0.0) }
    }
}

/// The sums of each parameter; `None` for frozen ones.
pub(super) fn differences(
    reference: &[Option<Tensor>],
    runner: &StepRunner,
) -> Result<Vec<Option<Sums>>> {
    let pairs = reference.iter().zip(runner.grads().iter());
    pairs
        .map(|pair| match pair {
            (Some(reference), Some(found)) => {
                let (reference, found) = (host(reference)?, host(found)?);
                let mut sums = Sums::default();
                for (x, y) in reference.into_iter().zip(found) {
                    let (x, y) = (f64::from(x), f64::from(y));
                    sums += Sums {
                        reference: x * x,
                        found: y * y,
                        difference: (x - y) * (x - y),
                        product: x * y,
                    };
                }
                Ok(Some(sums))
            }
            _ => Ok(None),
        })
        .collect()
}

fn host(tensor: &Tensor) -> Result<Vec<f32>> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    tensor.flatten_all()?.to_vec1()
}

/// Root mean square of the differences of all targets' losses.
pub(super) fn rms(one: &LayoutLosses, other: &LayoutLosses) -> f64 {
    let all = |of: &LayoutLosses| -> Vec<f32> {
        of.samples.iter().flat_map(|sample| sample.nll.clone()).collect()
    };
    let (one, other) = (all(one), all(other));
    let squares = one.iter().zip(&other).map(|(x, y)| f64::from(x - y).powi(2));
    (squares.sum::<f64>() / one.len().max(1) as f64).sqrt()
}
