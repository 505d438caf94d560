//! One optimizer step: forward and backward of its micro-batches, clipping, update.

use super::experts::StepRouters;
use super::gradients::{GradientSums, squares};
use super::ranks::Ranks;
use super::saved_tensors::SavedAs;
use super::sequence::{OwnTargets, own_part};
use super::step_result::{StepResult, by_sample};
use super::weights::{PassKind, RankWeights};
use crate::batch::VarlenBatch;
use crate::checkpoint::SavedTensor;
use crate::data::SampleCounts;
use crate::dist::DistError;
use crate::loss::{TargetLosses, loss_and_gradient};
use crate::models::{Model, ModelInput, RecomputePolicy};
use crate::ops;
use crate::optim::{Norms, Optimizer, Update};
use crate::tape::{Gradients, Param, Pass};
use crate::train::TrainError;
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub struct StepRunner {
    pub model: Model,
    pub params: Vec<Param>,
    /// How checkpoints contain them; `None` for those that they do not contain.
    pub saved_as: Vec<Option<SavedAs>>,
    /// Tensors of the model folder that the model does not use. Checkpoints contain them unchanged.
    pub kept: Vec<SavedTensor>,
    pub optimizer: Optimizer,
    /// Gradients, and their sums over micro-batches and ranks.
    pub gradients: GradientSums,
    /// How the weights are divided among the ranks.
    pub weights: RankWeights,
    /// The stages whose activations backward recomputes.
    pub recompute: RecomputePolicy,
    /// Factor of the auxiliary loss of the routers.
    pub aux_loss: f64,
    pub dtype: DType,
    pub device: Device,
    /// The other ranks of the run.
    pub ranks: Ranks,
}

/// Counts of a whole step, over all micro-batches and ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepCounts {
    pub num_targets: u64,
    /// Sum of their weights: the divisor of loss and gradients. Equals `num_targets` if no row of
    /// the step has a weight.
    pub target_weight: f64,
    /// Number of rounds: micro-batches that the ranks compute at the same time.
    rounds: usize,
}

/// Counts of a micro-batch.
#[derive(Serialize, Deserialize)]
struct SlotCounts {
    slot: usize,
    num_targets: u64,
    target_weight: f64,
    /// Number of tokens and of patches.
    rows: [u64; 2],
}

/// Number of tokens and patches of a step before each slot.
type FirstRows = BTreeMap<usize, [u64; 2]>;

/// The micro-batches of this rank in a step, with their slots among those of the whole step: the
/// slots `rank`, `rank + world` and so on. A slot may be empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MicroBatches(pub Vec<(usize, VarlenBatch)>);

impl From<Vec<VarlenBatch>> for MicroBatches {
    /// All micro-batches of a step of one process.
    fn from(batches: Vec<VarlenBatch>) -> Self {
        Self(batches.into_iter().enumerate().collect())
    }
}

/// The micro-batches of a step. The upload of the first one has started.
pub struct PreparedStep {
    targets: Vec<(usize, OwnTargets)>, // with their slots
    first: Option<ModelInput>,
    rest: std::vec::IntoIter<(usize, VarlenBatch)>,
}

pub struct Losses {
    /// Slot, nll `[S]` and targets of each micro-batch with targets. No nll: other ranks have all
    /// targets.
    nll: Vec<(usize, Option<Tensor>, OwnTargets)>,
    /// The gradients for the states of the optimizer.
    gradients: Vec<Tensor>,
    routers: StepRouters,
    /// Number and weight of the supervised targets of the step.
    pub counts: StepCounts,
}

impl Losses {
    /// Weighted sum over all targets. Waits for a GPU.
    pub fn sum(&self) -> candle_core::Result<f64> {
        Ok(self.read()?.iter().map(|(_, losses)| losses.sum()).sum())
    }

    /// The slot of each micro-batch with targets, and the loss of each target. Waits for a GPU.
    pub fn read(&self) -> candle_core::Result<Vec<(usize, TargetLosses)>> {
        let read = |(slot, nll, targets): &(usize, Option<Tensor>, OwnTargets)| {
            let nll = nll.as_ref().map_or(Ok(Vec::new()), Tensor::to_vec1)?;
            Ok((*slot, targets.losses(nll)))
        };
        self.nll.iter().map(read).collect()
    }
}

enum Queued {
    Update(Update),
    /// The loss is not finite: there is none. The sum of the squares of each gradient.
    None(Vec<f64>),
}

/// A step whose work is queued on the device.
pub struct LaunchedStep {
    step: u64,
    losses: Losses,
    update: Queued,
    /// The loss of the step, if it is known already.
    loss: Option<f64>,
}

impl StepRunner {
    /// The gradients of the last step, or of the last micro-batch if ranks share the gradients.
    pub fn grads(&self) -> &Gradients {
        self.gradients.buffers()
    }

    /// Finds the targets of a step's micro-batches and begins to upload the first.
    pub fn prepare(
        &self,
        micro_batches: impl Into<MicroBatches>,
    ) -> candle_core::Result<PreparedStep> {
        let MicroBatches(batches) = micro_batches.into();
        let (sequence, merge_size) = (self.ranks.sequence(), self.model.merge_size());
        let parts = batches.into_iter().map(|(slot, batch)| {
            let (batch, targets) = own_part(batch, sequence, merge_size);
            ((slot, batch), (slot, targets))
        });
        let (batches, targets): (Vec<_>, _) = parts.unzip();
        let mut rest = batches.into_iter();
        let first = rest.next().map(|(_, batch)| self.upload(batch)).transpose()?;
        Ok(PreparedStep { targets, first, rest })
    }

    /// Counts the targets of all ranks.
    fn count(&self, targets: &[(usize, OwnTargets)]) -> Result<(StepCounts, FirstRows), DistError> {
        let own = targets.iter().map(|(slot, OwnTargets { targets, rows, .. })| SlotCounts {
            slot: *slot,
            num_targets: targets.len() as u64,
            target_weight: targets.weight(),
            rows: *rows,
        });
        let all = self.ranks.gather(own.collect::<Vec<_>>())?;
        let mut all: Vec<SlotCounts> = all.into_iter().flatten().collect();
        all.sort_by_key(|counts| counts.slot);
        let world = self.ranks.sequence_group().world;
        let mut counts = StepCounts { rounds: 1, ..StepCounts::default() };
        let (mut first_rows, mut end) = (FirstRows::new(), [0; 2]);
        for SlotCounts { slot, num_targets, target_weight, rows } in all {
            counts.num_targets += num_targets;
            counts.target_weight += target_weight;
            counts.rounds = slot / world + 1;
            // the ranks of a sequence group report the same rows
            first_rows.entry(slot).or_insert_with(|| {
                let first = end;
                end = [first[0] + rows[0], first[1] + rows[1]];
                first
            });
        }
        Ok((counts, first_rows))
    }

    /// Calls `f` with a pass that computes no gradients, as [`RankWeights::inference`].
    pub(crate) fn inference<T>(
        &self,
        f: impl FnOnce(&Pass<'_>) -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        self.weights.inference(&self.ranks, f)
    }

    pub(super) fn upload(&self, batch: VarlenBatch) -> candle_core::Result<ModelInput> {
        self.model.upload(batch, self.dtype, &self.device)
    }

    /// Computes the sum of the gradients of all micro-batches of all ranks, divided by the weight
    /// of the step's targets; `number` is that of the step, from 1. The division into micro-batches
    /// changes neither gradients nor losses, except by rounding.
    pub fn accumulate(&self, step: PreparedStep, number: u64) -> Result<Losses, TrainError> {
        let (counts, first_rows) = self.count(&step.targets)?;
        let PreparedStep { targets, first, rest } = step;
        let mut nll = Vec::with_capacity(targets.len());
        let groups = self.ranks.sequence_group().world;
        let place = |slot: &usize, targets: &OwnTargets| {
            first_rows.get(slot).map(|rows| targets.dropout_place(number, *rows))
        };
        let inputs = (first.as_ref(), rest.as_slice());
        let mut routers = self.begin_routers(&targets, inputs, counts.rounds, &place)?;
        let mut sums = self.gradients.begin_step(counts.rounds, &self.params);
        let inputs = first.map(Ok).into_iter().chain(rest.map(|(_, batch)| self.upload(batch)));
        let mut batches = targets.into_iter().zip(inputs).peekable();
        for round in 0..counts.rounds {
            self.ranks.report(&format!("micro-batch {}", round + 1));
            let batch = batches.next_if(|((slot, _), _)| slot / groups == round);
            let has_batch = batch.is_some();
            if has_batch || self.ranks.sums().is_some() {
                let weights = self.weights.for_pass(PassKind::Train, &self.ranks);
                let grads = sums.round(round, &weights)?;
                let begin = || grads.begin_backward();
                let pass = Pass { grads: &grads, ..weights.pass() };
                if let Some(((slot, targets), input)) = batch {
                    let dropout = place(&slot, &targets);
                    let pass = Pass { dropout: dropout.as_ref(), ..pass };
                    let targets = (slot, targets);
                    let losses = self.forward_backward(
                        &input?,
                        targets,
                        counts,
                        (&pass, &begin),
                        &mut routers,
                    )?;
                    nll.extend(losses.map(|(nll, targets)| (slot, nll, targets)));
                } else {
                    begin()?;
                    self.model.finish_without_backward(&pass)?;
                }
                drop(grads);
                weights.end()?;
            }
            sums.complete(round, has_batch)?;
        }
        let gradients = sums.finish(&self.gradients)?;
        Ok(Losses { nll, gradients, routers, counts })
    }

    /// Adds the gradients of one micro-batch to those of `pass`, for which `begin` prepares the
    /// buffers after the forward pass. Returns its targets and their losses; `None` if the
    /// micro-batch has no targets on any rank.
    fn forward_backward(
        &self,
        input: &ModelInput,
        (slot, targets): (usize, OwnTargets),
        counts: StepCounts,
        (pass, begin): (&Pass<'_>, &dyn Fn() -> Result<(), TrainError>),
        routers: &mut StepRouters,
    ) -> Result<Option<(Option<Tensor>, OwnTargets)>, TrainError> {
        let log = self.router_log(routers);
        let forward = Pass { router_log: log.as_ref(), ..*pass };
        let (hidden, tape) = self.model.forward(input, self.recompute, &forward)?;
        if let Some(log) = log {
            self.add_choices(slot, log, routers)?;
        }
        let slopes = self.router_slopes(routers)?;
        let pass = &Pass { router_slopes: slopes.as_ref(), ..*pass };
        begin()?;
        let (head, weight) = (self.model.lm_head(), counts.target_weight);
        let loss = loss_and_gradient(&hidden, head, &targets.targets, weight, pass)?;
        if targets.is_without_any() && !self.has_aux_loss() {
            self.model.finish_without_backward(pass)?;
            return Ok(None);
        }
        let (nll, d_hidden) = match loss {
            Some(loss) => (Some(loss.nll), loss.d_hidden),
            None => (None, hidden.zeros_like()?), // other ranks have targets that see these tokens
        };
        drop(hidden);
        self.model.backward(tape, d_hidden, input, pass)?;
        Ok(Some((nll, targets)))
    }

    /// Accumulates the gradients, clips them and updates the weights. An error leaves weights and
    /// moments unchanged.
    ///
    /// On a GPU the work is queued, and [`Self::finish`] waits for it. An update with gradients
    /// that are not finite changes nothing there either.
    pub fn launch(
        &self,
        step: PreparedStep,
        lr: f64,
        number: u64,
    ) -> Result<LaunchedStep, TrainError> {
        let mut losses = self.accumulate(step, number).map_err(|error| self.ranks.cause(error))?;
        let loss = match &self.device {
            // without waiting, so it is checked before the update
            Device::Cpu => Some(self.mean_loss(&losses.read()?, losses.counts)?),
            _ => None,
        };
        let gradients = std::mem::take(&mut losses.gradients);
        let norm = match &self.gradients {
            GradientSums::Shared(sums) if sums.is_sharded() => {
                let squares = squares(sums, &gradients, self.optimizer.trained())?;
                self.optimizer.norm_of_parts(gradients, squares)?
            }
            // in the order of ranks that divide the gradients; on the CPU `norm` has this order
            sums if sums.are_exact() && !self.device.is_cpu() => {
                let squares = ops::sums_of_squares_in_order(&gradients)?;
                self.optimizer.norm_of_parts(gradients, squares)?
            }
            _ => self.optimizer.norm(gradients)?,
        };
        if loss.is_some_and(|loss| !loss.is_finite()) {
            let update = Queued::None(norm.squares()?);
            return Ok(LaunchedStep { step: number, losses, update, loss });
        }
        let update = Queued::Update(self.optimizer.update(norm, lr, number)?);
        self.weights.updated()?;
        Ok(LaunchedStep { step: number, losses, update, loss })
    }

    /// Waits for a step and returns its result. If its loss or a gradient is not finite, it has
    /// changed no weight, and [`StepResult::problem`] has the reason. `samples` are those of its
    /// micro-batches; the result has none if the list is empty.
    pub fn finish(
        &self,
        launched: &LaunchedStep,
        samples: &[SampleCounts],
    ) -> Result<StepResult, TrainError> {
        let LaunchedStep { step, losses, update, loss } = launched;
        self.ranks.wait("sums of the ranks"); // on a GPU they are complete when losses are read
        let counts = losses.counts;
        let choices = self.choices(&losses.routers)?;
        let losses = losses.read()?;
        let loss = loss.map_or_else(|| self.mean_loss(&losses, counts), Ok)?;
        let step = *step;
        let (norms, problem) = match update {
            Queued::None(squares) => (Norms::of(squares.clone()), None),
            Queued::Update(update) => self.optimizer.finish(update)?,
        };
        let non_finite = |source| TrainError::NonFiniteGradient { step, source };
        let problem = if loss.is_finite() {
            problem.map(non_finite)
        } else {
            Some(TrainError::NonFiniteLoss { step, loss })
        };
        let Norms { total: grad_norm, squares } = norms;
        let losses: Vec<TargetLosses> = losses.into_iter().map(|(_, losses)| losses).collect();
        let samples = by_sample(samples, &losses);
        Ok(StepResult { loss, grad_norm, counts, samples, squares, choices, problem })
    }

    /// Runs a whole step and waits for it. A loss or gradient that is not finite is an error.
    pub fn run(
        &self,
        micro_batches: impl Into<MicroBatches>,
        lr: f64,
        step: u64,
    ) -> Result<StepResult, TrainError> {
        let prepared = self.prepare(micro_batches)?;
        let result = self.finish(&self.launch(prepared, lr, step)?, &[])?;
        match result.problem {
            None => Ok(result),
            Some(problem) => Err(problem),
        }
    }

    /// The mean loss of a step over all ranks, from the losses of this rank.
    fn mean_loss(
        &self,
        losses: &[(usize, TargetLosses)],
        counts: StepCounts,
    ) -> Result<f64, TrainError> {
        let own = losses.iter().map(|(slot, losses)| (*slot, losses.sum()));
        let all = self.ranks.gather(own.collect::<Vec<_>>())?;
        let mut sums: Vec<(usize, f64)> = all.into_iter().flatten().collect();
        sums.sort_by_key(|(slot, _)| *slot);
        // a step without targets has the loss 0
        let divisor = if counts.num_targets == 0 { 1.0 } else { counts.target_weight };
        Ok(sums.into_iter().map(|(_, sum)| sum).sum::<f64>() / divisor)
    }
}
