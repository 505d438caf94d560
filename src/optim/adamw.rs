//! AdamW over all trained parameters: the moments, and one update with clipping folded in.

use super::{Groups, OptimConfig};
use crate::ops;
use crate::tape::{Gradients, Param};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// What AdamW keeps of one trained parameter, in `f32`.
#[derive(Debug)]
pub struct Slot {
    /// The parameter; in a lower precision, a copy of `master`.
    pub param: Param,
    /// The weight that is updated; absent when the parameter itself is `f32`.
    pub master: Option<Tensor>,
    /// First moment.
    pub exp_avg: Tensor,
    /// Second moment.
    pub exp_avg_sq: Tensor,
    lr_multiplier: f64,
    weight_decay: f64,
}

/// The optimizer and its state.
#[derive(Debug)]
pub struct AdamW {
    hyper: ops::AdamW,
    max_grad_norm: f64,
    slots: Vec<Slot>,
}

/// An update that was begun.
#[derive(Debug)]
pub struct Update {
    /// Sum of squares of each gradient, `f64`, where the gradients are.
    squares: Tensor,
}

/// What clipping saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepNorm {
    /// L2 norm over all trained parameters, before clipping.
    pub grad_norm: f64,
}

/// Gradients that must not become an update.
#[derive(Debug, thiserror::Error)]
pub enum OptimError {
    /// Infinite or not a number.
    #[error("the gradient of {count} of {total} parameters is not finite, the first is `{first}`")]
    NonFinite {
        /// Parameters concerned.
        count: usize,
        /// Trained parameters.
        total: usize,
        /// Name of the first.
        first: String,
    },
    /// An op failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl AdamW {
    /// Zero moments for the trained ones of `params`. `master` gives the `f32` weight of a
    /// parameter that is kept in a lower precision; it is asked by all threads, as reading takes long.
    pub fn new(
        config: &OptimConfig,
        max_grad_norm: f64,
        params: &[Param],
        groups: &Groups,
        master: impl Fn(&Param) -> Result<Tensor> + Sync,
        device: &Device,
    ) -> Result<Self> {
        let trained: Vec<_> =
            params.iter().zip(groups.iter()).filter(|(_, setting)| !setting.frozen).collect();
        let slots = trained.into_par_iter().map(|(param, setting)| {
            let shape = param.tensor().shape();
            Ok(Slot {
                param: param.clone(),
                master: match param.tensor().dtype() {
                    DType::F32 => None,
                    _ => Some(master(param)?),
                },
                exp_avg: Tensor::zeros(shape, DType::F32, device)?,
                exp_avg_sq: Tensor::zeros(shape, DType::F32, device)?,
                lr_multiplier: setting.lr_multiplier,
                weight_decay: if setting.decay { config.weight_decay } else { 0.0 },
            })
        });
        let slots = slots.collect::<Result<_>>()?;
        let [beta1, beta2] = config.betas;
        Ok(Self { hyper: ops::AdamW { beta1, beta2, eps: config.eps }, max_grad_norm, slots })
    }

    /// State of each trained parameter.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The same, to restore a checkpoint.
    pub fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.slots
    }

    /// Clips and updates; `step` counts from 1. Gradients are left as they are.
    /// Nothing is changed when a gradient is not finite. On a GPU nothing is waited for.
    pub fn launch(&self, grads: &Gradients, lr: f64, step: u64) -> Result<Update> {
        let updates = self.slots.iter().map(|slot| {
            Ok(ops::AdamWUpdate {
                tensors: ops::AdamWTensors {
                    weight: slot.param.tensor(),
                    master: slot.master.as_ref(),
                    exp_avg: &slot.exp_avg,
                    exp_avg_sq: &slot.exp_avg_sq,
                    grad: gradient(grads, slot)?,
                },
                lr: lr * slot.lr_multiplier,
                weight_decay: slot.weight_decay,
            })
        });
        let updates = updates.collect::<Result<Vec<_>>>()?;
        let squares = ops::clip_and_update(&self.hyper, &updates, step, self.max_grad_norm)?;
        Ok(Update { squares })
    }

    /// What an update saw; on a GPU this waits for it.
    pub fn finish(&self, update: &Update) -> std::result::Result<StepNorm, OptimError> {
        let squares = update.squares.to_vec1::<f64>()?;
        let grad_norm = squares.iter().sum::<f64>().sqrt();
        if !grad_norm.is_finite() {
            let bad: Vec<&Slot> = squares
                .iter()
                .zip(&self.slots)
                .filter_map(|(square, slot)| (!square.is_finite()).then_some(slot))
                .collect();
            return Err(OptimError::NonFinite {
                count: bad.len(),
                total: self.slots.len(),
                first: bad.first().map_or_else(String::new, |slot| slot.param.name().to_owned()),
            });
        }
        Ok(StepNorm { grad_norm })
    }

    /// Both: updates, and says what it saw.
    pub fn step(
        &self,
        grads: &Gradients,
        lr: f64,
        step: u64,
    ) -> std::result::Result<StepNorm, OptimError> {
        self.finish(&self.launch(grads, lr, step)?)
    }
}

fn gradient<'a>(grads: &'a Gradients, slot: &Slot) -> Result<&'a Tensor> {
    grads.get(slot.param.index()).ok_or_else(|| {
        candle_core::Error::msg(format!("no gradient buffer for `{}`", slot.param.name()))
    })
}
