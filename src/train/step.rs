//! One optimizer step: forward and backward of its micro-batches, clipping, update.

use crate::batch::VarlenBatch;
use crate::loss::{Targets, loss_and_gradient};
use crate::models::{Model, ModelInput, RecomputePolicy, report_without_backward};
use crate::ops;
use crate::optim::{AdamW, OptimError, Update};
use crate::tape::{Gradients, Param};
use candle_core::{DType, Device, Tensor};

/// Results of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean over the step's supervised targets.
    pub loss: f64,
    /// L2 norm over all trained parameters, before clipping.
    pub grad_norm: f64,
    /// Number of supervised targets of the step.
    pub num_targets: u64,
    /// Negative log likelihood of each target, one list per micro-batch that has targets.
    pub nll: Vec<Vec<f32>>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepCounts {
    /// Number of supervised targets: the divisor of loss and gradients.
    pub num_targets: u64,
}

impl StepCounts {
    fn of(targets: &[Targets]) -> Self {
        Self { num_targets: targets.iter().map(|targets| targets.len() as u64).sum() }
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
    nll: Vec<Tensor>, // [S] each, in the order of the micro-batches
    /// Number of supervised targets of the step.
    pub num_targets: u64,
}

impl Losses {
    /// Sum over all targets. Waits for a GPU.
    pub fn sum(&self) -> candle_core::Result<f64> {
        Ok(sum(&self.read()?))
    }

    /// The loss of each target. Waits for a GPU.
    fn read(&self) -> candle_core::Result<Vec<Vec<f32>>> {
        self.nll.iter().map(Tensor::to_vec1).collect()
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

    /// Adds up the gradients of all micro-batches in place, divided by the step's target count. The
    /// division into micro-batches changes neither gradients nor losses.
    pub fn accumulate(&self, step: PreparedStep) -> candle_core::Result<Losses> {
        let buffers: Vec<&Tensor> = self.grads.iter().flatten().collect();
        ops::fill_zero_all(&buffers)?;
        let PreparedStep { counts: StepCounts { num_targets }, targets, first, rest } = step;
        let mut losses = Losses { nll: Vec::with_capacity(targets.len()), num_targets };
        let inputs = first.map(Ok).into_iter().chain(rest.map(|batch| self.upload(batch)));
        for (input, targets) in inputs.zip(targets) {
            let input = input?;
            let (hidden, tape) = self.model.forward(&input, self.recompute, &self.grads)?;
            let head = self.model.lm_head();
            let loss = loss_and_gradient(&hidden, head, &targets, num_targets, &self.grads)?;
            drop(hidden);
            match loss {
                Some(loss) => {
                    losses.nll.push(loss.nll);
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
            mean_loss(&losses.read()?, losses.num_targets, number)?; // no wait: check it at once
        }
        let norm = self.optimizer.norm(&self.grads)?;
        let update = self.optimizer.update(&self.grads, norm, lr, number)?;
        Ok(LaunchedStep { step: number, losses, update })
    }

    /// Waits for a step and returns its results.
    pub fn finish(&self, launched: &LaunchedStep) -> Result<StepOutcome, StepError> {
        let LaunchedStep { step, losses, update } = launched;
        let nll = losses.read()?;
        let loss = mean_loss(&nll, losses.num_targets, *step)?;
        let grad_norm = self.optimizer.finish(update).map_err(|source| match source {
            OptimError::Candle(error) => StepError::Candle(error),
            source @ OptimError::NonFinite { .. } => {
                StepError::NonFiniteGradient { step: *step, source }
            }
        })?;
        Ok(StepOutcome { loss, grad_norm, num_targets: losses.num_targets, nll })
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

/// Sum over all targets. Each micro-batch is summed first.
fn sum(nll: &[Vec<f32>]) -> f64 {
    nll.iter().map(|nll| nll.iter().map(|nll| f64::from(*nll)).sum::<f64>()).sum()
}

fn mean_loss(nll: &[Vec<f32>], num_targets: u64, step: u64) -> Result<f64, StepError> {
    let loss = sum(nll) / num_targets.max(1) as f64;
    if loss.is_finite() { Ok(loss) } else { Err(StepError::NonFiniteLoss { step, loss }) }
}
