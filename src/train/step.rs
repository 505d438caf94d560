//! One optimizer step: forward and backward of its micro-batches, clipping, update.

use crate::batch::VarlenBatch;
use crate::loss::{Targets, loss_and_gradient};
use crate::models::{Model, ModelInput, RecomputePolicy};
use crate::ops;
use crate::optim::{AdamW, OptimError, Update};
use crate::tape::{Gradients, Param};
use candle_core::{DType, Device, Tensor};

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean over the step's supervised targets.
    pub loss: f64,
    /// L2 norm over all trained parameters, before clipping.
    pub grad_norm: f64,
    /// Supervised targets of the step.
    pub num_targets: u64,
    /// Negative log likelihood of each of them, one list a micro-batch that has any.
    pub nll: Vec<Vec<f32>>,
}

/// A step that must not become an update.
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
    /// A gradient is.
    #[error("step {step}: {source}; no weight was changed")]
    NonFiniteGradient {
        /// Optimizer step, from 1.
        step: u64,
        /// Which parameters.
        source: OptimError,
    },
    /// An op failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl StepError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NonFiniteLoss { step: 1, .. } => Some(
                "nothing was trained yet: the weights of the model folder hold values that are not finite",
            ),
            Self::NonFiniteLoss { .. } | Self::NonFiniteGradient { .. } => Some(
                "lower `optim.lr`, use a longer `optim.warmup_steps`, and look at the steps before in metrics.jsonl; \
                 checkpoints of earlier steps are intact",
            ),
            Self::Candle(_) => None,
        }
    }
}

/// A model in training.
pub struct StepRunner {
    /// The stages.
    pub model: Model,
    /// All parameters, in order.
    pub params: Vec<Param>,
    /// Moments and update.
    pub optimizer: AdamW,
    /// Gradients of the step so far.
    pub grads: Gradients,
    /// What backward runs again.
    pub recompute: RecomputePolicy,
    /// Compute dtype.
    pub dtype: DType,
    /// Where everything lives.
    pub device: Device,
}

/// The micro-batches of a step, the first of them on its way to the device.
pub struct PreparedStep {
    targets: Vec<Targets>,
    first: Option<ModelInput>,
    rest: std::vec::IntoIter<VarlenBatch>,
}

/// Loss of a step before anybody has read it.
pub struct Losses {
    nll: Vec<Tensor>, // [S] each, in the order of the micro-batches
    /// Supervised targets of the step.
    pub num_targets: u64,
}

impl Losses {
    /// Sum over all targets; on a GPU this waits for it.
    pub fn sum(&self) -> candle_core::Result<f64> {
        Ok(sum(&self.read()?))
    }

    /// That of each target; on a GPU this waits for it.
    fn read(&self) -> candle_core::Result<Vec<Vec<f32>>> {
        self.nll.iter().map(Tensor::to_vec1).collect()
    }
}

/// A step whose work was given to the device.
pub struct LaunchedStep {
    step: u64,
    losses: Losses,
    update: Update,
}

impl StepRunner {
    /// Takes over a step's micro-batches and begins to upload the first.
    pub fn prepare(&self, micro_batches: Vec<VarlenBatch>) -> candle_core::Result<PreparedStep> {
        let targets = micro_batches.iter().map(Targets::of).collect();
        let mut rest = micro_batches.into_iter();
        let first = rest.next().map(|batch| self.upload(batch)).transpose()?;
        Ok(PreparedStep { targets, first, rest })
    }

    fn upload(&self, batch: VarlenBatch) -> candle_core::Result<ModelInput> {
        ModelInput::upload(batch, self.model.config(), self.dtype, &self.device)
    }

    /// Gradients of all micro-batches, summed in place and divided by the step's target count.
    /// Splitting a step changes neither them nor the losses.
    pub fn accumulate(&self, step: PreparedStep) -> candle_core::Result<Losses> {
        let buffers: Vec<&Tensor> = self.grads.iter().flatten().collect();
        ops::fill_zero_all(&buffers)?;
        let PreparedStep { targets, first, rest } = step;
        // The divisor is known before the first forward.
        let num_targets: u64 = targets.iter().map(|targets| targets.len() as u64).sum();
        let mut losses = Losses { nll: Vec::with_capacity(targets.len()), num_targets };
        let inputs = first.map(Ok).into_iter().chain(rest.map(|batch| self.upload(batch)));
        for (input, targets) in inputs.zip(targets) {
            let input = input?;
            let (hidden, tape) = self.model.forward(&input, self.recompute, &self.grads)?;
            let head = self.model.lm_head();
            let loss = loss_and_gradient(&hidden, head, &targets, num_targets, &self.grads)?;
            drop(hidden);
            if let Some(loss) = loss {
                losses.nll.push(loss.nll);
                self.model.backward(tape, loss.d_hidden, &input, &self.grads)?;
            }
        }
        Ok(losses)
    }

    /// Accumulates, clips, updates. An error leaves weights and moments as they were.
    ///
    /// On a GPU the work is queued, and [`Self::finish`] waits for it; an update whose gradients are not finite
    /// changes nothing there either.
    pub fn launch(
        &self,
        step: PreparedStep,
        lr: f64,
        number: u64,
    ) -> Result<LaunchedStep, StepError> {
        let losses = self.accumulate(step)?;
        if self.device.is_cpu() {
            mean_loss(&losses.read()?, losses.num_targets, number)?; // nothing to wait for, so the update need not be trusted
        }
        let update = self.optimizer.launch(&self.grads, lr, number)?;
        Ok(LaunchedStep { step: number, losses, update })
    }

    /// What the step did, once it is done.
    pub fn finish(&self, launched: &LaunchedStep) -> Result<StepOutcome, StepError> {
        let LaunchedStep { step, losses, update } = launched;
        let nll = losses.read()?;
        let loss = mean_loss(&nll, losses.num_targets, *step)?;
        let norm = self.optimizer.finish(update).map_err(|source| match source {
            OptimError::Candle(error) => StepError::Candle(error),
            source @ OptimError::NonFinite { .. } => {
                StepError::NonFiniteGradient { step: *step, source }
            }
        })?;
        Ok(StepOutcome { loss, grad_norm: norm.grad_norm, num_targets: losses.num_targets, nll })
    }

    /// A whole step.
    pub fn run(
        &self,
        micro_batches: Vec<VarlenBatch>,
        lr: f64,
        step: u64,
    ) -> Result<StepOutcome, StepError> {
        let prepared = self.prepare(micro_batches)?;
        self.finish(&self.launch(prepared, lr, step)?)
    }

    /// Names of trained parameters whose gradient is all zeros after a backward: nothing reached them.
    pub fn without_gradient(&self) -> candle_core::Result<Vec<&str>> {
        let mut silent = Vec::new();
        for (param, buffer) in self.params.iter().zip(self.grads.iter()) {
            if let Some(buffer) = buffer
                && ops::sum_of_squares(buffer)? == 0.0
            {
                silent.push(param.name());
            }
        }
        Ok(silent)
    }
}

/// Sum over all targets: micro-batches first.
fn sum(nll: &[Vec<f32>]) -> f64 {
    nll.iter().map(|nll| nll.iter().map(|nll| f64::from(*nll)).sum::<f64>()).sum()
}

fn mean_loss(nll: &[Vec<f32>], num_targets: u64, step: u64) -> Result<f64, StepError> {
    let loss = sum(nll) / num_targets.max(1) as f64;
    if loss.is_finite() { Ok(loss) } else { Err(StepError::NonFiniteLoss { step, loss }) }
}
