//! The parts of a run that a verification tests.

use super::layouts::Layout;
use crate::batch::VarlenBatch;
use crate::loss::{TargetLosses, Targets, scores};
use crate::models::Model;
use crate::ops::GradWrite;
use crate::run::RunError;
use crate::tape::{GradSink, Param};
use crate::train::{MicroBatches, StepRunner};
use candle_core::Tensor;

/// The parts of a run that [`verify`](super::verify) tests. The methods are those of a run; an
/// implementation with another method shows whether a verification notices the difference.
pub trait Pipeline {
    /// The model that computes; `params` are its parameters.
    fn model(&self, model: Box<dyn Model>, _params: &[Param]) -> Box<dyn Model> {
        model
    }

    /// The micro-batches of all rows in a layout.
    fn batches(&self, _layout: Layout, batches: Vec<VarlenBatch>) -> Vec<VarlenBatch> {
        batches
    }

    /// The losses of a step. Its gradients are in [`StepRunner::grads`] afterwards.
    fn step(&self, runner: &StepRunner, batches: Vec<VarlenBatch>) -> Result<StepLosses, RunError> {
        run_step(runner, batches)
    }

    /// The losses of a micro-batch, from the forward pass alone.
    fn losses(&self, runner: &StepRunner, batch: VarlenBatch) -> Result<RowLosses, RunError> {
        run_forward(runner, batch)
    }
}

/// The parts of a run without a change.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunPipeline;

impl Pipeline for RunPipeline {}

/// Losses of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepLosses {
    /// Mean over all targets, weighted by the weights of the rows.
    pub loss: f64,
    /// Losses of each micro-batch.
    pub micro_batches: Vec<RowLosses>,
}

/// Losses of the targets of a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct RowLosses {
    /// The row of the token stream that predicts each target, ascending.
    pub rows: Vec<u32>,
    /// The losses.
    pub losses: TargetLosses,
}

/// A step as in training, without an update.
pub fn run_step(runner: &StepRunner, batches: Vec<VarlenBatch>) -> Result<StepLosses, RunError> {
    let targets: Vec<Targets> = batches.iter().map(Targets::of).collect();
    let losses = runner.accumulate(runner.prepare(MicroBatches::from(batches))?, 1)?;
    let loss = losses.sum()? / losses.counts.target_weight;
    let mut read = losses.read()?.into_iter().peekable();
    let micro_batch = |(slot, targets): (usize, Targets)| {
        let without = || TargetLosses { nll: Vec::new(), weights: None };
        let losses = read.next_if(|(of, _)| *of == slot).map_or_else(without, |(_, losses)| losses);
        RowLosses { rows: targets.rows, losses }
    };
    let micro_batches = targets.into_iter().enumerate().map(micro_batch).collect();
    Ok(StepLosses { loss, micro_batches })
}

/// The forward pass of training.
fn run_forward(runner: &StepRunner, batch: VarlenBatch) -> Result<RowLosses, RunError> {
    let targets = Targets::of(&batch);
    let input = runner.model.upload(batch, runner.dtype, &runner.device)?;
    let (hidden, _) = runner.model.forward(&input, runner.recompute, &Untrained)?;
    let nll = scores(&hidden, runner.model.lm_head(), &targets)?.nll;
    Ok(RowLosses { rows: targets.rows, losses: TargetLosses { nll, weights: targets.weights } })
}

/// Nothing is trained.
struct Untrained;

impl GradSink for Untrained {
    fn buffer(&self, _: &Param) -> Option<&Tensor> {
        None
    }

    fn product_buffer(&self, _: &Param) -> Option<(&Tensor, GradWrite)> {
        None
    }
}
