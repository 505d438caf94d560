//! One optimizer step: forward and backward of its micro-batches, clipping, update.

use crate::batch::VarlenBatch;
use crate::loss::{Targets, loss_and_gradient};
use crate::model::{Model, ModelInput, RecomputePolicy};
use crate::ops;
use crate::optim::{AdamW, OptimError};
use crate::tape::{Gradients, Param};
use candle_core::{DType, Device, Tensor};

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOutcome {
    /// Mean over the step's supervised targets.
    pub loss: f64,
    /// L2 norm over all trained parameters, before clipping.
    pub grad_norm: f64,
    /// Supervised targets of the step.
    pub num_targets: u64,
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

impl StepRunner {
    /// Gradients of all micro-batches, summed in place and divided by the step's target count;
    /// returns the summed loss and that count. Splitting a step changes neither.
    pub fn accumulate(&self, micro_batches: Vec<VarlenBatch>) -> candle_core::Result<(f64, u64)> {
        let buffers: Vec<&Tensor> = self.grads.iter().flatten().collect();
        ops::fill_zero_all(&buffers)?;
        let targets: Vec<Targets> = micro_batches.iter().map(Targets::of).collect();
        // The divisor is known before the first forward.
        let num_targets: u64 = targets.iter().map(|targets| targets.len() as u64).sum();
        let mut loss_sum = 0.0;
        for (batch, targets) in micro_batches.into_iter().zip(targets) {
            let input = ModelInput::upload(batch, self.model.config(), self.dtype, &self.device)?;
            let (hidden, tape) = self.model.forward(&input, self.recompute, &self.grads)?;
            let head = self.model.lm_head();
            let loss = loss_and_gradient(&hidden, head, &targets, num_targets, &self.grads)?;
            drop(hidden);
            if let Some(loss) = loss {
                loss_sum +=
                    loss.nll.to_vec1::<f32>()?.iter().map(|nll| f64::from(*nll)).sum::<f64>();
                self.model.backward(tape, loss.d_hidden, &input, &self.grads)?;
            }
        }
        Ok((loss_sum, num_targets))
    }

    /// Accumulates, clips, updates. An error leaves weights and moments as they were.
    pub fn run(
        &self,
        micro_batches: Vec<VarlenBatch>,
        lr: f64,
        step: u64,
    ) -> Result<StepOutcome, StepError> {
        let (loss_sum, num_targets) = self.accumulate(micro_batches)?;
        let loss = loss_sum / num_targets.max(1) as f64;
        if !loss.is_finite() {
            return Err(StepError::NonFiniteLoss { step, loss });
        }
        let norm = self.optimizer.step(&self.grads, lr, step).map_err(|source| match source {
            OptimError::Candle(error) => StepError::Candle(error),
            source @ OptimError::NonFinite { .. } => StepError::NonFiniteGradient { step, source },
        })?;
        Ok(StepOutcome { loss, grad_norm: norm.grad_norm, num_targets })
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
