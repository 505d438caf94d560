//! The model of a verification: that of the config, without optimizer state; and the parts of a run
//! that are tested with it.

use super::super::adapter::open_run_model;
use super::super::inputs::param_groups;
use super::super::load_model::trainable;
use super::super::runner::{rank_model, stages, step_runner};
use super::layouts::Layout;
use crate::batch::VarlenBatch;
use crate::config::RunConfig;
use crate::loss::{TargetLosses, Targets, scores};
use crate::models::Model;
use crate::nn::{AdapterTensor, Inputs, ParamSpec, random_part};
use crate::run::RunError;
use crate::tape::{Param, Trainable};
use crate::train::{AttentionChoice, MicroBatches, Ranks, StepRunner};
use candle_core::{DType, Device};

/// Standard deviation of the values of an adapter's `B`, which is zero at the start of training.
const ADAPTER_DEVIATION: f64 = 0.02;

/// A model that can compute steps, and the same weights with another attention kernel.
pub(super) struct Subject {
    pub(super) runner: StepRunner,
    /// The model with the attention of [`Self::other_attention`]; `None` on a GPU.
    other: Option<Model>,
    pub(super) other_attention: &'static str,
    pub(super) specs: Vec<ParamSpec>,
    pub(super) trainable: Vec<Trainable>,
}

impl Subject {
    /// Loads the model. The `B` of a new adapter gets random values: with zeros, `A` would have no
    /// gradient.
    pub(super) fn load(
        config: &RunConfig,
        device: &Device,
        pipeline: &dyn Pipeline,
    ) -> Result<Self, RunError> {
        let (open, _) = open_run_model(config, None, device)?;
        let groups = param_groups(config, &open)?;
        let trainable = trainable(&groups);
        let mut model = rank_model(config, open, &groups, &Ranks::alone(), device)?;
        model.owned = Some(Vec::new()); // no update: no state
        let specs = model.loaded.open.specs.clone();
        for (param, spec) in model.loaded.params.iter().zip(&specs) {
            if matches!(AdapterTensor::of(&spec.name), Some((AdapterTensor::B, _))) {
                fill(param, spec, config.seed)?;
            }
        }
        let (choice, other_attention) = match config.model.attention {
            AttentionChoice::Masked => (AttentionChoice::Flash, "flash"),
            _ => (AttentionChoice::Masked, "masked"),
        };
        let params = model.loaded.params.clone();
        let other = device
            .is_cpu()
            .then(|| model.loaded.open.build(&params, &choice.backend()))
            .transpose()?
            .map(|other| pipeline.model(other, &params));
        let mut runner = step_runner(config, model, &groups, None, device)?;
        runner.model = pipeline.model(runner.model, &params);
        Ok(Self { runner, other, other_attention, specs, trainable })
    }

    /// Exchanges the model and that with the other attention. Returns false if there is no other.
    pub(super) fn exchange(&mut self) -> bool {
        let Some(other) = &mut self.other else { return false };
        std::mem::swap(&mut self.runner.model, other);
        true
    }

    pub(super) fn is_trained(&self, index: usize) -> bool {
        self.trainable[index] == Trainable::Yes
    }

    /// Whether only rows with images or videos give the parameter a gradient.
    pub(super) fn needs_media(&self, index: usize) -> bool {
        self.specs[index].component.inputs == Inputs::Media
    }

    /// The parameters of each stage in the order of forward, with a name.
    pub(super) fn stages(&self) -> Vec<(String, Vec<usize>)> {
        stages(&self.runner.model)
    }
}

/// Sets an adapter's `B` to random values, unless it has been trained.
fn fill(param: &Param, spec: &ParamSpec, seed: u64) -> candle_core::Result<()> {
    let tensor = param.tensor()?;
    let sum = tensor.to_dtype(DType::F32)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
    if sum > 0.0 {
        return Ok(());
    }
    let all = 0..tensor.elem_count();
    let values = random_part(spec, ADAPTER_DEVIATION, seed, all, tensor.device())?;
    param.set_tensor(values.to_dtype(tensor.dtype())?.reshape(tensor.shape())?)
}

/// The parts of a run that [`verify`](super::verify) tests. The methods are those of a run; an
/// implementation with another method shows whether a verification notices the difference.
pub trait Pipeline {
    /// The model that computes; `params` are its parameters.
    fn model(&self, model: Model, _params: &[Param]) -> Model {
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

#[derive(Debug, Clone, PartialEq)]
pub struct StepLosses {
    /// Mean over all targets, weighted by the weights of the rows.
    pub loss: f64,
    pub micro_batches: Vec<RowLosses>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RowLosses {
    /// The row of the token stream that predicts each target, ascending.
    pub rows: Vec<u32>,
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
    let nll = runner.inference(|pass| {
        let (hidden, _) = runner.model.forward(&input, runner.recompute, pass)?;
        Ok(scores(&hidden, runner.model.lm_head(), &targets, pass)?.nll)
    })?;
    Ok(RowLosses { rows: targets.rows, losses: TargetLosses { nll, weights: targets.weights } })
}
