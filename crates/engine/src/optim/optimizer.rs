//! The optimizer of all trained parameters: state, gradient norm, and the clipped update.

use super::state::{MASTER, Rule, kinds};
use super::{
    AdafactorConfig, Moments, OptimConfig, OwnedPart, ParamGroup, ParamGroups, ParamState,
    StateKind,
};
use crate::tape::Param;
use candle_core::{DType, Device, Result, Shape, Tensor};
use rayon::prelude::*;
use std::ops::Range;

#[derive(Debug)]
pub struct Optimizer {
    hyper: kernels::AdamW,
    adafactor: kernels::Adafactor,
    max_grad_norm: f64,
    place: Place,
    trained: Vec<Param>,
    /// Kinds of the state tensors of each trained parameter.
    kinds: Vec<Vec<StateKind>>,
    states: Vec<ParamState>,
}

/// The device on which the state is stored and updates run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// On the device of the parameters.
    Device,
    /// On the host. Gradients are copied there, and weights are copied back.
    Host,
}

/// The values from which the gradient norm of a step is computed.
#[derive(Debug)]
pub struct GradNorm {
    /// Sum of the squares of each trained gradient, `f64`, in the order of the parameters.
    squares: Tensor,
    /// The flat gradients, in the order of [`Optimizer::states`], on the device of the states.
    grads: Vec<Tensor>,
}

#[derive(Debug, Clone)]
pub struct Norms {
    /// L2 norm over all trained gradients before clipping.
    pub total: f64,
    /// Sum of the squares of each trained gradient, in the order of the parameters.
    pub squares: Vec<f64>,
}

#[derive(Debug)]
pub struct Update {
    squares: Tensor,
}

/// The reason why an update changes nothing.
#[derive(Debug, thiserror::Error, fault::Fault)]
pub enum OptimError {
    #[error("the gradient of {count} of {total} parameters is not finite, the first is `{first}`")]
    #[fault(exit = Data, hint = None)]
    NonFinite { count: usize, total: usize, first: String },
    #[error(transparent)]
    #[fault(exit = None, hint = None)]
    Candle(#[from] candle_core::Error),
}

impl Optimizer {
    /// Creates zero state for the trained parameters, or for their parts in `owned`. `master`
    /// returns elements of the flat `f32` weight of a parameter of lower precision, on the given
    /// device. All threads call it, because reading and drawing weights takes long.
    pub fn new(
        config: &OptimConfig,
        max_grad_norm: f64,
        params: &[Param],
        groups: &ParamGroups,
        owned: Option<Vec<OwnedPart>>,
        master: impl Fn(&Param, Range<usize>, &Device) -> Result<Tensor> + Sync,
        device: &Device,
    ) -> Result<Self> {
        let on_gpu = !matches!(device, Device::Cpu);
        let place = match config.moments {
            Moments::Host if on_gpu => Place::Host,
            _ => Place::Device,
        };
        let owned = owned.unwrap_or_else(|| whole(params, groups));
        Self::at(place, config, max_grad_norm, (params, groups), owned, master, device)
    }

    fn at(
        place: Place,
        config: &OptimConfig,
        max_grad_norm: f64,
        (params, groups): (&[Param], &ParamGroups),
        owned: Vec<OwnedPart>,
        master: impl Fn(&Param, Range<usize>, &Device) -> Result<Tensor> + Sync,
        device: &Device,
    ) -> Result<Self> {
        let device = if place == Place::Host { &Device::Cpu } else { device };
        let groups: Vec<&ParamGroup> = groups.iter().collect();
        let trained: Vec<usize> =
            (0..params.len()).filter(|index| !groups[*index].frozen).collect();
        let states = owned.into_par_iter().map(|OwnedPart { param, elements, weight }| {
            let (group, param) = (groups[param], &params[param]);
            let index = trained.binary_search(&param.index()).map_err(|_| {
                candle_core::Error::msg(format!("`{}` is frozen", param.name())).bt()
            })?;
            let master = |elements| master(param, elements, device);
            let part = (elements, weight);
            ParamState::new(config, (param, group, index), part, master, device)
        });
        let mut states = states.collect::<Result<Vec<_>>>()?;
        if place == Place::Host {
            for state in &mut states {
                state.host_weight = Some(kernels::copy_to_host(&state.weight()?)?);
            }
        }
        let [beta1, beta2] = config.betas;
        let hyper = kernels::AdamW { beta1, beta2, eps: config.eps };
        let AdafactorConfig { beta2_decay, eps, d } = config.adafactor;
        let adafactor = kernels::Adafactor { beta2_decay, eps, d };
        let trained: Vec<Param> = trained.into_iter().map(|index| params[index].clone()).collect();
        let kinds_of = |param: &Param| kinds(config, param, groups[param.index()]);
        let kinds = trained.iter().map(kinds_of).collect();
        Ok(Self { hyper, adafactor, max_grad_norm, place, trained, kinds, states })
    }

    /// The trained parameters, in order.
    pub fn trained(&self) -> &[Param] {
        &self.trained
    }

    /// The trained parameters, in order, with the kinds of their state tensors.
    pub fn kinds(&self) -> impl Iterator<Item = (&Param, &[StateKind])> {
        self.trained.iter().zip(self.kinds.iter().map(Vec::as_slice))
    }

    /// State of each trained parameter, or of the parts of them that this rank updates.
    pub fn states(&self) -> &[ParamState] {
        &self.states
    }

    /// As [`Self::states`], to restore a checkpoint.
    pub fn states_mut(&mut self) -> &mut [ParamState] {
        &mut self.states
    }

    /// Starts a step with the flat gradients of [`Self::states`]: computes the sums for the
    /// gradient norm. Does not wait for a GPU, unless the state is on the host. The states must be
    /// those of whole parameters.
    pub fn norm(&self, grads: Vec<Tensor>) -> Result<GradNorm> {
        let grads = self.placed(grads)?;
        let squares = kernels::sums_of_squares(&grads.iter().collect::<Vec<_>>())?;
        Ok(GradNorm { squares, grads })
    }

    /// As [`Self::norm`], for states of parts: `squares` are the sums for [`Self::trained`] over
    /// all ranks.
    pub fn norm_of_parts(&self, grads: Vec<Tensor>, squares: Vec<f64>) -> Result<GradNorm> {
        let grads = self.placed(grads)?;
        let device = grads.first().map_or(&Device::Cpu, Tensor::device);
        let len = squares.len();
        Ok(GradNorm { squares: Tensor::from_vec(squares, len, device)?, grads })
    }

    fn placed(&self, grads: Vec<Tensor>) -> Result<Vec<Tensor>> {
        match self.place {
            Place::Device => Ok(grads),
            Place::Host => grads.iter().map(kernels::copy_to_host).collect(),
        }
    }

    /// Clips and updates; `step` counts from 1. Changes nothing if a gradient is not finite. The
    /// gradients stay as they are. Does not wait for a GPU, unless state is on the host.
    pub fn update(&self, norm: GradNorm, lr: f64, step: u64) -> Result<Update> {
        let GradNorm { squares, grads } = norm;
        let weights: Vec<Tensor> =
            self.states.iter().map(ParamState::weight).collect::<Result<_>>()?;
        let updates = || self.states.iter().zip(&weights).zip(&grads);
        let is_adamw = |state: &ParamState| matches!(state.rule, Rule::AdamW(_));
        let adamw = updates().filter(|((state, _), _)| is_adamw(state));
        let adamw = adamw.map(|((state, weight), grad)| adamw_update(state, weight, grad, lr));
        let adamw: Vec<_> = adamw.collect();
        kernels::clipped_update(&self.hyper, &adamw, step, &squares, self.max_grad_norm)?;
        let mut others = updates().filter(|((state, _), _)| !is_adamw(state)).peekable();
        let scale = match others.peek() {
            Some(_) => kernels::clip_scale(&squares, self.max_grad_norm)?,
            None => None,
        };
        if let Some(scale) = scale {
            others.try_for_each(|((state, weight), grad)| match state.rule {
                Rule::Adafactor => self.adafactor_update(state, weight, grad, lr, (step, scale)),
                _ => muon_update(state, weight, grad, lr, (step, scale)),
            })?;
        }
        for (state, weight) in self.states.iter().zip(&weights) {
            let Some(host_weight) = &state.host_weight else { continue };
            if weight.elem_count() > 0 {
                kernels::copy_from_host(host_weight, weight)?;
            }
        }
        Ok(Update { squares })
    }

    /// Updates a parameter with `Adafactor`; `scale` is the factor of its gradient.
    fn adafactor_update(
        &self,
        state: &ParamState,
        weight: &Tensor,
        grad: &Tensor,
        lr: f64,
        (step, scale): (u64, f32),
    ) -> Result<()> {
        let shape = whole_shape(state, "Adafactor needs whole parameters")?;
        let second = match ["row_var", "col_var", "variance"].map(|name| state.tensor(name)) {
            [Some(rows), Some(columns), _] => kernels::SecondMoment::Factored([rows, columns]),
            [.., full] => kernels::SecondMoment::Full(full.expect("`Rule::kinds` has the kind")),
        };
        let update = kernels::AdafactorUpdate {
            weight: &weight.reshape(shape)?,
            master: state.tensor(MASTER),
            second,
            grad,
            index: state.index,
            lr: lr * state.lr_multiplier,
            weight_decay: state.weight_decay,
        };
        kernels::adafactor_step(&self.adafactor, &update, step, scale)
    }

    /// The gradient norm, and the reason why the update changed nothing, if a gradient was not
    /// finite. Waits for a GPU.
    pub fn finish(&self, update: &Update) -> Result<(Norms, Option<OptimError>)> {
        let norms = Norms::of(update.squares.to_vec1::<f64>()?);
        if norms.total.is_finite() {
            return Ok((norms, None));
        }
        let bad: Vec<&Param> = norms
            .squares
            .iter()
            .zip(&self.trained)
            .filter_map(|(square, param)| (!square.is_finite()).then_some(param))
            .collect();
        let problem = OptimError::NonFinite {
            count: bad.len(),
            total: self.trained.len(),
            first: bad.first().map_or_else(String::new, |param| param.name().to_owned()),
        };
        Ok((norms, Some(problem)))
    }
}

impl Norms {
    /// From the sum of the squares of each gradient.
    pub fn of(squares: Vec<f64>) -> Self {
        Self { total: squares.iter().sum::<f64>().sqrt(), squares }
    }
}

impl GradNorm {
    /// Sum of the squares of each gradient. Waits for a GPU.
    pub fn squares(&self) -> Result<Vec<f64>> {
        self.squares.to_vec1()
    }
}

fn adamw_update<'a>(
    state: &'a ParamState,
    weight: &'a Tensor,
    grad: &'a Tensor,
    lr: f64,
) -> kernels::AdamWUpdate<'a> {
    let tensor = |name| state.tensor(name).expect("`Rule::kinds` has the kind");
    let absmax = match state.rule {
        Rule::AdamW(DType::U8) => Some(["exp_avg_absmax", "exp_avg_sq_absmax"].map(tensor)),
        _ => None,
    };
    kernels::AdamWUpdate {
        tensors: kernels::AdamWTensors {
            weight: state.host_weight.as_ref().unwrap_or(weight),
            master: state.tensor(MASTER),
            exp_avg: tensor("exp_avg"),
            exp_avg_sq: tensor("exp_avg_sq"),
            absmax,
            grad,
        },
        index: state.index,
        first: state.elements.start,
        lr: lr * state.lr_multiplier,
        weight_decay: state.weight_decay,
    }
}

fn muon_update(
    state: &ParamState,
    weight: &Tensor,
    grad: &Tensor,
    lr: f64,
    (step, scale): (u64, f32),
) -> Result<()> {
    let shape = whole_shape(state, "Muon needs whole matrices")?;
    let update = kernels::MuonUpdate {
        weight: &weight.reshape(shape)?,
        master: state.tensor(MASTER),
        momentum: state.tensor("momentum_buffer").expect("`Rule::kinds` has the kind"),
        grad,
        index: state.index,
        lr: lr * state.lr_multiplier,
        weight_decay: state.weight_decay,
    };
    kernels::muon_step(&update, step, scale)
}

/// The shape of a parameter, which must not be divided.
fn whole_shape(state: &ParamState, needs: &str) -> Result<Shape> {
    let shape = state.param.shape();
    if state.elements.len() != shape.elem_count() {
        candle_core::bail!("`{}` is divided, but {needs}", state.param.name());
    }
    Ok(shape)
}

/// All elements of all trained parameters.
fn whole(params: &[Param], groups: &ParamGroups) -> Vec<OwnedPart> {
    let trained = params.iter().zip(groups.iter()).filter(|(_, group)| !group.frozen);
    let part = |(param, _): (&Param, &ParamGroup)| OwnedPart {
        param: param.index(),
        elements: 0..param.shape().elem_count(),
        weight: None,
    };
    trained.map(part).collect()
}

#[cfg(test)]
mod tests;
