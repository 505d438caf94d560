//! AdamW over all trained parameters: the moments, and one update with clipping folded in.

use super::{Groups, Moments, OptimConfig};
use crate::ops;
use crate::tape::{Gradients, Param};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// What AdamW keeps of one trained parameter.
#[derive(Debug)]
pub struct ParamState {
    /// The parameter; in a lower precision, a copy of `master`.
    pub param: Param,
    /// The weight that is updated, `f32`; absent when the parameter itself is `f32`.
    pub master: Option<Tensor>,
    /// First moment, `f32` or `bf16`.
    pub exp_avg: Tensor,
    /// Second moment, in the same dtype.
    pub exp_avg_sq: Tensor,
    /// On the host, where the update runs there: what the parameter becomes.
    image: Option<Tensor>,
    lr_multiplier: f64,
    weight_decay: f64,
}

/// The optimizer and its state.
#[derive(Debug)]
pub struct AdamW {
    hyper: ops::AdamW,
    max_grad_norm: f64,
    place: Place,
    slots: Vec<ParamState>,
}

/// Where state is kept and updates run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// With the parameters.
    Device,
    /// On the host, with gradients and weights going to and fro.
    Host,
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
    /// parameter that is kept in a lower precision, on the device that it is told; all threads ask it, as reading and
    /// drawing weights takes long.
    pub fn new(
        config: &OptimConfig,
        max_grad_norm: f64,
        params: &[Param],
        groups: &Groups,
        master: impl Fn(&Param, &Device) -> Result<Tensor> + Sync,
        device: &Device,
    ) -> Result<Self> {
        let on_gpu = !matches!(device, Device::Cpu);
        let place = match config.moments {
            Moments::Host if on_gpu => Place::Host,
            _ => Place::Device,
        };
        Self::at(place, config, max_grad_norm, params, groups, master, device)
    }

    fn at(
        place: Place,
        config: &OptimConfig,
        max_grad_norm: f64,
        params: &[Param],
        groups: &Groups,
        master: impl Fn(&Param, &Device) -> Result<Tensor> + Sync,
        device: &Device,
    ) -> Result<Self> {
        let device = if place == Place::Host { &Device::Cpu } else { device };
        let dtype = if config.moments == Moments::Bf16 { DType::BF16 } else { DType::F32 };
        let trained: Vec<_> =
            params.iter().zip(groups.iter()).filter(|(_, setting)| !setting.frozen).collect();
        let slots = trained.into_par_iter().map(|(param, setting)| {
            let shape = param.tensor().shape();
            Ok(ParamState {
                param: param.clone(),
                master: match param.tensor().dtype() {
                    DType::F32 => None,
                    _ => Some(master(param, device)?),
                },
                exp_avg: Tensor::zeros(shape, dtype, device)?,
                exp_avg_sq: Tensor::zeros(shape, dtype, device)?,
                image: match place {
                    Place::Device => None,
                    Place::Host => Some(on_host(param.tensor())?),
                },
                lr_multiplier: setting.lr_multiplier,
                weight_decay: if setting.decay { config.weight_decay } else { 0.0 },
            })
        });
        let slots = slots.collect::<Result<_>>()?;
        let [beta1, beta2] = config.betas;
        let hyper = ops::AdamW { beta1, beta2, eps: config.eps };
        Ok(Self { hyper, max_grad_norm, place, slots })
    }

    /// State of each trained parameter.
    pub fn slots(&self) -> &[ParamState] {
        &self.slots
    }

    /// The same, to restore a checkpoint.
    pub fn slots_mut(&mut self) -> &mut [ParamState] {
        &mut self.slots
    }

    /// Clips and updates; `step` counts from 1. Gradients are left as they are.
    /// Nothing is changed when a gradient is not finite. On a GPU nothing is waited for, unless state is on the host.
    pub fn launch(&self, grads: &Gradients, lr: f64, step: u64) -> Result<Update> {
        let host_grads = match self.place {
            Place::Device => Vec::new(),
            Place::Host => self
                .slots
                .iter()
                .map(|slot| on_host(gradient(grads, slot)?))
                .collect::<Result<Vec<_>>>()?,
        };
        let updates = self.slots.iter().enumerate().map(|(index, slot)| {
            Ok(ops::AdamWUpdate {
                tensors: ops::AdamWTensors {
                    weight: slot.image.as_ref().unwrap_or(slot.param.tensor()),
                    master: slot.master.as_ref(),
                    exp_avg: &slot.exp_avg,
                    exp_avg_sq: &slot.exp_avg_sq,
                    grad: match host_grads.get(index) {
                        Some(grad) => grad,
                        None => gradient(grads, slot)?,
                    },
                },
                lr: lr * slot.lr_multiplier,
                weight_decay: slot.weight_decay,
            })
        });
        let updates = updates.collect::<Result<Vec<_>>>()?;
        let squares = ops::clip_and_update(&self.hyper, &updates, step, self.max_grad_norm)?;
        for slot in &self.slots {
            let Some(image) = &slot.image else { continue };
            let weight = slot.param.tensor();
            if weight.elem_count() > 0 {
                let image = image.to_device(weight.device())?;
                weight.flatten_all()?.slice_set(&image.flatten_all()?, 0, 0)?;
            }
        }
        Ok(Update { squares })
    }

    /// What an update saw; on a GPU this waits for it.
    pub fn finish(&self, update: &Update) -> std::result::Result<StepNorm, OptimError> {
        let squares = update.squares.to_vec1::<f64>()?;
        let grad_norm = squares.iter().sum::<f64>().sqrt();
        if !grad_norm.is_finite() {
            let bad: Vec<&ParamState> = squares
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

/// A copy in the memory of the host.
fn on_host(t: &Tensor) -> Result<Tensor> {
    match t.device() {
        Device::Cpu => t.copy(),
        _ => t.to_device(&Device::Cpu),
    }
}

fn gradient<'a>(grads: &'a Gradients, slot: &ParamState) -> Result<&'a Tensor> {
    grads.get(slot.param.index()).ok_or_else(|| {
        candle_core::Error::msg(format!("no gradient buffer for `{}`", slot.param.name()))
    })
}

#[cfg(test)]
mod tests {
    use super::super::Named;
    use super::*;
    use crate::tape::{GradSink, Trainable};

    const SHAPES: [[usize; 2]; 3] = [[3, 5], [1, 7], [64, 9]];

    fn random(seed: u64, shape: [usize; 2], dtype: DType) -> Tensor {
        let count = shape[0] * shape[1];
        let values =
            (0..count as u64).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0);
        let t = Tensor::from_vec(values.collect::<Vec<f32>>(), &shape, &Device::Cpu).unwrap();
        t.to_dtype(dtype).unwrap()
    }

    /// Weights and moments, as bytes, after some steps.
    fn trained(place: Place, dtype: DType, moments: Moments) -> Vec<Vec<f32>> {
        let params: Vec<Param> = (0..)
            .zip(SHAPES)
            .map(|(i, shape)| Param::new(format!("p{i}"), i, random(i as u64, shape, dtype)))
            .collect();
        let named: Vec<_> =
            params.iter().map(|p| Named { name: p.name(), part: "llm", rank: 2 }).collect();
        let groups = Groups::new(&named, &[], []).unwrap();
        let config = OptimConfig { weight_decay: 0.1, moments, ..OptimConfig::default() };
        let master = |param: &Param, _: &Device| param.tensor().to_dtype(DType::F32);
        let adamw = AdamW::at(place, &config, 1.0, &params, &groups, master, &Device::Cpu).unwrap();
        let grads = Gradients::zeros(&params, &[Trainable::Yes; 3], &Device::Cpu).unwrap();
        for step in 1..=5 {
            for (param, shape) in params.iter().zip(SHAPES) {
                let grad = random(100 * step + param.index() as u64, shape, DType::F32);
                grads.buffer(param).unwrap().slice_set(&grad, 0, 0).unwrap();
            }
            adamw.step(&grads, 1e-2, step).unwrap();
        }
        let state = adamw.slots().iter().flat_map(|slot| {
            [slot.param.tensor(), &slot.exp_avg, &slot.exp_avg_sq].map(|t| {
                let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
                t.to_vec1::<f32>().unwrap()
            })
        });
        state.collect()
    }

    #[test]
    fn state_on_the_host_gives_the_same_bits() {
        for dtype in [DType::F32, DType::BF16] {
            let device = trained(Place::Device, dtype, Moments::F32);
            assert_eq!(trained(Place::Host, dtype, Moments::Host), device);
            assert_eq!(trained(Place::Device, dtype, Moments::Host), device);
            let before = random(0, SHAPES[0], dtype).to_dtype(DType::F32).unwrap();
            assert_ne!(device[0], before.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
    }

    #[test]
    fn moments_in_bf16_follow_those_in_f32() {
        let (wide, narrow) = (
            trained(Place::Device, DType::F32, Moments::F32),
            trained(Place::Device, DType::F32, Moments::Bf16),
        );
        assert_ne!(wide[1], narrow[1]);
        for (wide, narrow) in wide.iter().zip(&narrow) {
            for (wide, narrow) in wide.iter().zip(narrow) {
                assert!((wide - narrow).abs() < 0.02 * (0.1 + wide.abs()), "{wide} {narrow}");
            }
        }
    }
}
