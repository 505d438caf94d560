//! One optimizer step: forward and backward of its micro-batches, clipping, update.

use super::gradient_tree::{GradientTree, LastMicroBatch, zero};
use super::ranks::{Bits, Ranks};
use crate::batch::VarlenBatch;
use crate::dist::{Collective, DistError};
use crate::loss::{TargetLosses, Targets, loss_and_gradient};
use crate::models::{Model, ModelInput, RecomputePolicy, report_without_backward};
use crate::ops;
use crate::optim::{AdamW, OptimError, Update};
use crate::tape::{GradSink, Gradients, Param};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

/// Results of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean over the step's supervised targets, weighted by the weights of the rows.
    pub loss: f64,
    /// L2 norm over all trained parameters, before clipping.
    pub grad_norm: f64,
    /// Number and weight of the supervised targets of the step.
    pub counts: StepCounts,
    /// Losses of the targets of each micro-batch of this rank that has targets.
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
    /// The ranks can no longer work together.
    #[error(transparent)]
    Ranks(#[from] DistError),
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
            Self::Ranks(_) | Self::Candle(_) => None,
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
    /// Buffers for gradients; the first receives the sum of a step. With one buffer, the gradients of
    /// all micro-batches are added in place. With [`buffers_of_tree`](super::buffers_of_tree) of
    /// them, the sum has the same bits for 1, 2, 4 .. ranks.
    pub buffers: Vec<Gradients>,
    /// The stages whose activations backward recomputes.
    pub recompute: RecomputePolicy,
    /// Compute dtype.
    pub dtype: DType,
    /// The device of model and gradients.
    pub device: Device,
    /// The other ranks of the run.
    pub ranks: Ranks,
}

/// Counts of a whole step, over all micro-batches and ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepCounts {
    /// Number of supervised targets.
    pub num_targets: u64,
    /// Sum of their weights: the divisor of loss and gradients. Equals `num_targets` if no row of the
    /// step has a weight.
    pub target_weight: f64,
}

/// Number and weight of the targets of one micro-batch.
#[derive(Serialize, Deserialize)]
struct SlotCounts(u64, Bits);

/// The micro-batches of this rank in a step, and their slots among those of the whole step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MicroBatches {
    /// Number of slots of the step, over all ranks: `gradient_accumulation_steps`.
    pub num_slots: usize,
    /// Slot and token stream of each micro-batch, in the order of the slots.
    pub batches: Vec<(usize, VarlenBatch)>,
}

impl From<Vec<VarlenBatch>> for MicroBatches {
    /// All micro-batches of a step of one process.
    fn from(batches: Vec<VarlenBatch>) -> Self {
        Self { num_slots: batches.len(), batches: batches.into_iter().enumerate().collect() }
    }
}

/// The micro-batches of a step. The upload of the first one has started.
pub struct PreparedStep {
    num_slots: usize,
    targets: Vec<(usize, Targets)>, // with their slots
    first: Option<ModelInput>,
    rest: std::vec::IntoIter<(usize, VarlenBatch)>,
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
        Ok(self.read()?.iter().map(TargetLosses::sum).sum())
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
    /// The loss of the step, if it is known already.
    loss: Option<f64>,
}

impl StepRunner {
    /// The sum of the gradients of the last step.
    pub fn grads(&self) -> &Gradients {
        &self.buffers[0]
    }

    /// Finds the targets of a step's micro-batches and begins to upload the first.
    pub fn prepare(
        &self,
        micro_batches: impl Into<MicroBatches>,
    ) -> candle_core::Result<PreparedStep> {
        let MicroBatches { num_slots, batches } = micro_batches.into();
        let targets = batches.iter().map(|(slot, batch)| (*slot, Targets::of(batch))).collect();
        let mut rest = batches.into_iter();
        let first = rest.next().map(|(_, batch)| self.upload(batch)).transpose()?;
        Ok(PreparedStep { num_slots, targets, first, rest })
    }

    /// Counts the targets of all ranks.
    fn count(&self, targets: &[(usize, Targets)]) -> Result<StepCounts, DistError> {
        let own = targets.iter();
        let own = own.map(|(_, targets)| SlotCounts(targets.len() as u64, targets.weight().into()));
        let all = self.ranks.gather(own.collect::<Vec<_>>())?;
        let mut counts = StepCounts::default();
        for SlotCounts(num_targets, weight) in all.into_iter().flatten() {
            counts.num_targets += num_targets;
            counts.target_weight += f64::from(weight);
        }
        Ok(counts)
    }

    fn upload(&self, batch: VarlenBatch) -> candle_core::Result<ModelInput> {
        self.model.upload(batch, self.dtype, &self.device)
    }

    /// Computes the sum of the gradients of all micro-batches of all ranks, divided by the weight of
    /// the step's targets. The division into micro-batches changes neither gradients nor losses,
    /// except by rounding.
    pub fn accumulate(&self, step: PreparedStep) -> Result<Losses, StepError> {
        let counts = self.count(&step.targets)?;
        let PreparedStep { num_slots, targets, first, rest } = step;
        let slots = self.ranks.rank().own_part(num_slots);
        let sums = self.ranks.sums();
        let mut losses = Losses { nll: Vec::with_capacity(targets.len()), counts };
        let mut tree = GradientTree::new(&self.buffers, slots.len());
        let mut next_slot = slots.start;
        let num_batches = targets.len();
        let inputs = first.map(Ok).into_iter().chain(rest.map(|(_, batch)| self.upload(batch)));
        for (index, (input, (slot, targets))) in inputs.zip(targets).enumerate() {
            for empty in next_slot..slot {
                tree.complete(empty - slots.start, false)?;
            }
            self.ranks.report(&format!("micro-batch {slot}"));
            let grads = tree.next_buffer()?;
            let is_last = index + 1 == num_batches;
            if is_last {
                let sink = LastMicroBatch::new(grads, tree.open_sums(), sums);
                losses.nll.extend(self.forward_backward(&input?, targets, counts, &sink)?);
                sink.result()?;
            } else {
                losses.nll.extend(self.forward_backward(&input?, targets, counts, grads)?);
                tree.complete(slot - slots.start, true)?;
            }
            next_slot = slot + 1;
        }
        if num_batches == 0 {
            zero(self.grads())?;
            let sink = LastMicroBatch::new(self.grads(), Vec::new(), sums);
            report_without_backward(&*self.model, &sink);
            sink.result()?;
        }
        sums.map_or(Ok(()), Collective::wait)?;
        Ok(losses)
    }

    /// Adds the gradients of one micro-batch to `grads`. Returns the losses and weights of its targets,
    /// `None` if it has none.
    fn forward_backward(
        &self,
        input: &ModelInput,
        targets: Targets,
        counts: StepCounts,
        grads: &dyn GradSink,
    ) -> candle_core::Result<Option<(Tensor, Option<Vec<f32>>)>> {
        let (hidden, tape) = self.model.forward(input, self.recompute, grads)?;
        let (head, weight) = (self.model.lm_head(), counts.target_weight);
        let loss = loss_and_gradient(&hidden, head, &targets, weight, grads)?;
        drop(hidden);
        let Some(loss) = loss else {
            report_without_backward(&*self.model, grads);
            return Ok(None);
        };
        self.model.backward(tape, loss.d_hidden, input, grads)?;
        Ok(Some((loss.nll, targets.weights)))
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
        let loss = match &self.device {
            // without waiting, so it is checked before the update
            Device::Cpu => Some(self.mean_loss(&losses.read()?, losses.counts, number)?),
            _ => None,
        };
        let norm = self.optimizer.norm(self.grads())?;
        let update = self.optimizer.update(self.grads(), norm, lr, number)?;
        Ok(LaunchedStep { step: number, losses, update, loss })
    }

    /// Waits for a step and returns its results.
    pub fn finish(&self, launched: &LaunchedStep) -> Result<StepOutcome, StepError> {
        let LaunchedStep { step, losses, update, loss } = launched;
        self.ranks.wait("sums of the ranks"); // on a GPU they are complete when losses are read
        let counts = losses.counts;
        let losses = losses.read()?;
        let loss = loss.map_or_else(|| self.mean_loss(&losses, counts, *step), Ok)?;
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
        micro_batches: impl Into<MicroBatches>,
        lr: f64,
        step: u64,
    ) -> Result<StepOutcome, StepError> {
        let prepared = self.prepare(micro_batches)?;
        self.finish(&self.launch(prepared, lr, step)?)
    }

    /// The mean loss of a step over all ranks, from the losses of this rank.
    fn mean_loss(
        &self,
        losses: &[TargetLosses],
        counts: StepCounts,
        step: u64,
    ) -> Result<f64, StepError> {
        let own: Vec<Bits> = losses.iter().map(|losses| losses.sum().into()).collect();
        let sums = self.ranks.gather(own)?.into_iter().flatten();
        // a step without targets has the loss 0
        let divisor = if counts.num_targets == 0 { 1.0 } else { counts.target_weight };
        let loss = sums.map(f64::from).sum::<f64>() / divisor;
        if loss.is_finite() { Ok(loss) } else { Err(StepError::NonFiniteLoss { step, loss }) }
    }

    /// Trained parameters whose gradient is all zeros after a backward.
    pub fn without_gradient(&self) -> candle_core::Result<Vec<&Param>> {
        let mut found = Vec::new();
        for (param, buffer) in self.params.iter().zip(self.grads().iter()) {
            if let Some(buffer) = buffer
                && ops::sum_of_squares(buffer)? == 0.0
            {
                found.push(param);
            }
        }
        Ok(found)
    }
}
