//! AdamW over all trained parameters: moments, gradient norm, and the clipped update.

use super::{Moments, OptimConfig, ParamGroups};
use crate::ops;
use crate::tape::{Gradients, Param};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// The state of one trained parameter.
#[derive(Debug)]
pub struct ParamState {
    /// The parameter. If it is not `f32`, it is a rounded copy of `master`.
    pub param: Param,
    /// The weight in `f32`; `None` if the parameter itself is `f32`.
    pub master: Option<Tensor>,
    /// First moment, `f32` or `bf16`.
    pub exp_avg: Tensor,
    /// Second moment, in the same dtype.
    pub exp_avg_sq: Tensor,
    /// The parameter's value on the host, if the update runs there and the parameter is on a GPU.
    host_weight: Option<Tensor>,
    lr_multiplier: f64,
    weight_decay: f64,
}

/// The optimizer and its state.
#[derive(Debug)]
pub struct AdamW {
    hyper: ops::AdamW,
    max_grad_norm: f64,
    place: Place,
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
    /// Sum of the squares of each trained gradient, `f64`, in the order of [`AdamW::states`].
    squares: Tensor,
    /// The gradients, if the update runs on the host.
    host_grads: Vec<Tensor>,
}

/// An update that was queued.
#[derive(Debug)]
pub struct Update {
    squares: Tensor,
}

/// The reason why an update changes nothing.
#[derive(Debug, thiserror::Error)]
pub enum OptimError {
    /// Gradients are infinite or not a number.
    #[error("the gradient of {count} of {total} parameters is not finite, the first is `{first}`")]
    NonFinite {
        /// Number of parameters concerned.
        count: usize,
        /// Number of trained parameters.
        total: usize,
        /// Name of the first parameter concerned.
        first: String,
    },
    /// An op failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl AdamW {
    /// Zero moments for the trained ones of `params`. `master` returns the `f32` weight of a
    /// parameter of lower precision, on the given device. All threads call it, because reading and
    /// drawing weights takes long.
    pub fn new(
        config: &OptimConfig,
        max_grad_norm: f64,
        params: &[Param],
        groups: &ParamGroups,
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
        groups: &ParamGroups,
        master: impl Fn(&Param, &Device) -> Result<Tensor> + Sync,
        device: &Device,
    ) -> Result<Self> {
        let device = if place == Place::Host { &Device::Cpu } else { device };
        let dtype = if config.moments == Moments::Bf16 { DType::BF16 } else { DType::F32 };
        let trained: Vec<_> =
            params.iter().zip(groups.iter()).filter(|(_, group)| !group.frozen).collect();
        let states = trained.into_par_iter().map(|(param, group)| {
            let weight = param.tensor();
            let shape = weight.shape();
            Ok(ParamState {
                param: param.clone(),
                master: match weight.dtype() {
                    DType::F32 => None,
                    _ => Some(master(param, device)?),
                },
                exp_avg: Tensor::zeros(shape, dtype, device)?,
                exp_avg_sq: Tensor::zeros(shape, dtype, device)?,
                host_weight: match place {
                    Place::Device => None,
                    Place::Host => Some(on_host(&weight)?),
                },
                lr_multiplier: group.lr_multiplier,
                weight_decay: if group.decay { config.weight_decay } else { 0.0 },
            })
        });
        let states = states.collect::<Result<_>>()?;
        let [beta1, beta2] = config.betas;
        let hyper = ops::AdamW { beta1, beta2, eps: config.eps };
        Ok(Self { hyper, max_grad_norm, place, states })
    }

    /// State of each trained parameter.
    pub fn states(&self) -> &[ParamState] {
        &self.states
    }

    /// State of each trained parameter, to restore a checkpoint.
    pub fn states_mut(&mut self) -> &mut [ParamState] {
        &mut self.states
    }

    /// Starts a step: computes the sums for the gradient norm. Does not wait for a GPU, unless the
    /// state is on the host. Ranks that share the optimizer state add up the result before the
    /// update.
    pub fn norm(&self, grads: &Gradients) -> Result<GradNorm> {
        let on_device = self.states.iter().map(|state| gradient(grads, state));
        let on_device: Vec<&Tensor> = on_device.collect::<Result<_>>()?;
        let host_grads: Vec<Tensor> = match self.place {
            Place::Device => Vec::new(),
            Place::Host => on_device.iter().map(|grad| on_host(grad)).collect::<Result<_>>()?,
        };
        let squares = match self.place {
            Place::Device => ops::sums_of_squares(&on_device)?,
            Place::Host => ops::sums_of_squares(&host_grads.iter().collect::<Vec<_>>())?,
        };
        Ok(GradNorm { squares, host_grads })
    }

    /// Clips and updates; `step` counts from 1. Changes nothing if a gradient is not finite. The
    /// gradients stay as they are. Does not wait for a GPU, unless state is on the host.
    pub fn update(&self, grads: &Gradients, norm: GradNorm, lr: f64, step: u64) -> Result<Update> {
        let GradNorm { squares, host_grads } = norm;
        let weights: Vec<Tensor> = self.states.iter().map(|state| state.param.tensor()).collect();
        let updates =
            self.states.iter().zip(&weights).enumerate().map(|(index, (state, weight))| {
                Ok(ops::AdamWUpdate {
                    index,
                    first: 0,
                    tensors: ops::AdamWTensors {
                        weight: state.host_weight.as_ref().unwrap_or(weight),
                        master: state.master.as_ref(),
                        exp_avg: &state.exp_avg,
                        exp_avg_sq: &state.exp_avg_sq,
                        grad: match host_grads.get(index) {
                            Some(grad) => grad,
                            None => gradient(grads, state)?,
                        },
                    },
                    lr: lr * state.lr_multiplier,
                    weight_decay: state.weight_decay,
                })
            });
        let updates = updates.collect::<Result<Vec<_>>>()?;
        ops::clipped_update(&self.hyper, &updates, step, &squares, self.max_grad_norm)?;
        for (state, weight) in self.states.iter().zip(&weights) {
            let Some(host_weight) = &state.host_weight else { continue };
            if weight.elem_count() > 0 {
                let updated = host_weight.to_device(weight.device())?;
                weight.flatten_all()?.slice_set(&updated.flatten_all()?, 0, 0)?;
            }
        }
        Ok(Update { squares })
    }

    /// L2 norm over all trained gradients before clipping. Waits for a GPU. Fails if a gradient was
    /// not finite; the update then changed nothing.
    pub fn finish(&self, update: &Update) -> std::result::Result<f64, OptimError> {
        let squares = update.squares.to_vec1::<f64>()?;
        let grad_norm = squares.iter().sum::<f64>().sqrt();
        if !grad_norm.is_finite() {
            let bad: Vec<&ParamState> = squares
                .iter()
                .zip(&self.states)
                .filter_map(|(square, state)| (!square.is_finite()).then_some(state))
                .collect();
            return Err(OptimError::NonFinite {
                count: bad.len(),
                total: self.states.len(),
                first: bad.first().map_or_else(String::new, |state| state.param.name().to_owned()),
            });
        }
        Ok(grad_norm)
    }

    /// Norm, update and the wait for both; returns the gradient norm before clipping.
    pub fn step(
        &self,
        grads: &Gradients,
        lr: f64,
        step: u64,
    ) -> std::result::Result<f64, OptimError> {
        self.finish(&self.update(grads, self.norm(grads)?, lr, step)?)
    }
}

/// A copy in host memory.
fn on_host(t: &Tensor) -> Result<Tensor> {
    match t.device() {
        Device::Cpu => t.copy(),
        _ => t.to_device(&Device::Cpu),
    }
}

fn gradient<'a>(grads: &'a Gradients, state: &ParamState) -> Result<&'a Tensor> {
    grads.get(state.param.index()).ok_or_else(|| {
        candle_core::Error::msg(format!("no gradient buffer for `{}`", state.param.name()))
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

    /// Weights and moments after some steps.
    fn trained(place: Place, dtype: DType, moments: Moments) -> Vec<Vec<f32>> {
        let params: Vec<Param> = (0..)
            .zip(SHAPES)
            .map(|(i, shape)| Param::new(format!("p{i}"), i, random(i as u64, shape, dtype)))
            .collect();
        let named: Vec<_> =
            params.iter().map(|p| Named { name: p.name(), component: "llm", rank: 2 }).collect();
        let groups = ParamGroups::new(&named, &[], []).unwrap();
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
        let state = adamw.states().iter().flat_map(|state| {
            [&state.param.tensor(), &state.exp_avg, &state.exp_avg_sq].map(|t| {
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
