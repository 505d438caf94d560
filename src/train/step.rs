//! One optimizer step: forward and backward of its micro-batches, clipping, update.

use crate::batch::VarlenBatch;
use crate::loss::{TargetLosses, Targets, loss_and_gradient};
use crate::models::{Model, ModelInput, RecomputePolicy, report_without_backward};
use crate::ops;
use crate::optim::{AdamW, OptimError, Update};
use crate::tape::{Gradients, Param};
use candle_core::{DType, Device, Tensor};

/// Results of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean over the step's supervised targets, weighted by the weights of the rows.
    pub loss: f64,
    /// L2 norm over all trained parameters, before clipping.
    pub grad_norm: f64,
    /// Number and weight of the supervised targets of the step.
    pub counts: StepCounts,
    /// Losses of the targets of each micro-batch that has targets.
    pub losses: Vec<TargetLosses>,
}

/// The reason why a step does not update the weights.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The loss is infinite or not a number.
    #[error("step {step}: the loss is {loss}; no weight was changed")]
    NonFiniteLoss {
        /// Optimizer step, from 1.
        step: u64,
        /// The value.
        loss: f64,
    },
    /// A gradient is infinite or not a number.
    #[error("step {step}: {source}; no weight was changed")]
    NonFiniteGradient {
        /// Optimizer step, from 1.
        step: u64,
        /// Number of parameters concerned, and the name of the first one.
        source: OptimError,
    },
    /// An op failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl StepError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NonFiniteLoss { step: 1, .. } => Some(
                "no step was trained yet: the weights of the model folder have values that are not \
                 finite; copy them from the published model again",
            ),
            Self::NonFiniteLoss { .. } | Self::NonFiniteGradient { .. } => Some(
                "lower `optim.lr` or raise `optim.warmup_steps`; metrics.jsonl has the earlier steps, \
                 and their checkpoints are intact",
            ),
            Self::Candle(_) => None,
        }
    }
}

/// A model in training.
pub struct StepRunner {
    /// The model.
    pub model: Box<dyn Model>,
    /// All parameters, in order.
    pub params: Vec<Param>,
    /// Moments and update.
    pub optimizer: AdamW,
    /// Sum of the gradients of the step's micro-batches so far.
    pub grads: Gradients,
    /// The stages whose activations backward recomputes.
    pub recompute: RecomputePolicy,
    /// Compute dtype.
    pub dtype: DType,
    /// The device of model and gradients.
    pub device: Device,
}

/// Counts of a whole step, known before its first forward pass.
///
/// [`StepRunner::prepare`] counts the local micro-batches. If ranks share a step, the sum over all
/// ranks replaces the local counts before [`StepRunner::accumulate`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCounts {
    /// Number of supervised targets.
    pub num_targets: u64,
    /// Sum of their weights: the divisor of loss and gradients. Equals `num_targets` if no row of the
    /// step has a weight.
    pub target_weight: f64,
}

impl StepCounts {
    fn of(targets: &[Targets]) -> Self {
        Self {
            num_targets: targets.iter().map(|targets| targets.len() as u64).sum(),
            target_weight: targets.iter().map(Targets::weight).sum(),
        }
    }
}

/// The micro-batches of a step. The upload of the first one has started.
pub struct PreparedStep {
    /// Counts of the step.
    pub counts: StepCounts,
    targets: Vec<Targets>,
    first: Option<ModelInput>,
    rest: std::vec::IntoIter<VarlenBatch>,
}

/// Losses of a step on the device.
pub struct Losses {
    nll: Vec<(Tensor, Option<Vec<f32>>)>, // nll and weights, [S], in the order of the micro-batches
    /// Number and weight of the supervised targets of the step.
    pub counts: StepCounts,
}

impl Losses {
    /// Weighted sum over all targets. Waits for a GPU.
    pub fn sum(&self) -> candle_core::Result<f64> {
        Ok(sum(&self.read()?))
    }

    /// The loss of each target. Waits for a GPU.
    fn read(&self) -> candle_core::Result<Vec<TargetLosses>> {
        let read = |(nll, weights): &(Tensor, Option<Vec<f32>>)| {
            Ok(TargetLosses { nll: nll.to_vec1()?, weights: weights.clone() })
        };
        self.nll.iter().map(read).collect()
    }
}

/// A step whose work is queued on the device.
pub struct LaunchedStep {
    step: u64,
    losses: Losses,
    update: Update,
}

impl StepRunner {
    /// Counts the targets of a step's micro-batches and begins to upload the first.
    pub fn prepare(&self, micro_batches: Vec<VarlenBatch>) -> candle_core::Result<PreparedStep> {
        let targets: Vec<Targets> = micro_batches.iter().map(Targets::of).collect();
        let counts = StepCounts::of(&targets);
        let mut rest = micro_batches.into_iter();
        let first = rest.next().map(|batch| self.upload(batch)).transpose()?;
        Ok(PreparedStep { counts, targets, first, rest })
    }

    fn upload(&self, batch: VarlenBatch) -> candle_core::Result<ModelInput> {
        self.model.upload(batch, self.dtype, &self.device)
    }

    /// Adds up the gradients of all micro-batches in place, divided by the weight of the step's targets. The
    /// division into micro-batches changes neither gradients nor losses.
    pub fn accumulate(&self, step: PreparedStep) -> candle_core::Result<Losses> {
        let buffers: Vec<&Tensor> = self.grads.iter().flatten().collect();
        ops::fill_zero_all(&buffers)?;
        let PreparedStep { counts, targets, first, rest } = step;
        let mut losses = Losses { nll: Vec::with_capacity(targets.len()), counts };
        let weight = counts.target_weight;
        let inputs = first.map(Ok).into_iter().chain(rest.map(|batch| self.upload(batch)));
        for (input, targets) in inputs.zip(targets) {
            let input = input?;
            let (hidden, tape) = self.model.forward(&input, self.recompute, &self.grads)?;
            let head = self.model.lm_head();
            let loss = loss_and_gradient(&hidden, head, &targets, weight, &self.grads)?;
            drop(hidden);
            match loss {
                Some(loss) => {
                    losses.nll.push((loss.nll, targets.weights));
                    self.model.backward(tape, loss.d_hidden, &input, &self.grads)?;
                }
                None => report_without_backward(&*self.model, &self.grads),
            }
        }
        Ok(losses)
    }

    /// Accumulates the gradients, clips them and updates the weights. An error leaves weights and
    /// moments unchanged.
    ///
    /// On a GPU the work is queued, and [`Self::finish`] waits for it. An update with gradients that
    /// are not finite changes nothing there either.
    pub fn launch(
        &self,
        step: PreparedStep,
        lr: f64,
        number: u64,
    ) -> Result<LaunchedStep, StepError> {
        let losses = self.accumulate(step)?;
        if self.device.is_cpu() {
            mean_loss(&losses.read()?, losses.counts, number)?; // no wait: check it at once
        }
        let norm = self.optimizer.norm(&self.grads)?;
        let update = self.optimizer.update(&self.grads, norm, lr, number)?;
        Ok(LaunchedStep { step: number, losses, update })
    }

    /// Waits for a step and returns its results.
    pub fn finish(&self, launched: &LaunchedStep) -> Result<StepOutcome, StepError> {
        let LaunchedStep { step, losses, update } = launched;
        let counts = losses.counts;
        let losses = losses.read()?;
        let loss = mean_loss(&losses, counts, *step)?;
        let grad_norm = self.optimizer.finish(update).map_err(|source| match source {
            OptimError::Candle(error) => StepError::Candle(error),
            source @ OptimError::NonFinite { .. } => {
                StepError::NonFiniteGradient { step: *step, source }
            }
        })?;
        Ok(StepOutcome { loss, grad_norm, counts, losses })
    }

    /// Runs a whole step and waits for it.
    pub fn run(
        &self,
        micro_batches: Vec<VarlenBatch>,
        lr: f64,
        step: u64,
    ) -> Result<StepOutcome, StepError> {
        let prepared = self.prepare(micro_batches)?;
        self.finish(&self.launch(prepared, lr, step)?)
    }

    /// Trained parameters whose gradient is all zeros after a backward.
    pub fn without_gradient(&self) -> candle_core::Result<Vec<&Param>> {
        let mut found = Vec::new();
        for (param, buffer) in self.params.iter().zip(self.grads.iter()) {
            if let Some(buffer) = buffer
                && ops::sum_of_squares(buffer)? == 0.0
            {
                found.push(param);
            }
        }
        Ok(found)
    }
}

/// Weighted sum over all targets. Each micro-batch is summed first.
fn sum(losses: &[TargetLosses]) -> f64 {
    losses.iter().map(TargetLosses::sum).sum()
}

fn mean_loss(losses: &[TargetLosses], counts: StepCounts, step: u64) -> Result<f64, StepError> {
    // a step without targets has the loss 0
    let divisor = if counts.num_targets == 0 { 1.0 } else { counts.target_weight };
    let loss = sum(losses) / divisor;
    if loss.is_finite() { Ok(loss) } else { Err(StepError::NonFiniteLoss { step, loss }) }
}
