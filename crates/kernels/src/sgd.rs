//! The update of stochastic gradient descent with momentum, in the order of `torch.optim.SGD`.

use super::muon::{MuonUpdate, combine};
use super::stochastic_rounding::{step_seed, tensor_seed};
use super::stored::Seed;
use candle_core::Result;

const OP: &str = "sgd_step";

/// Update number `step` (from 1) of a parameter with the gradient `grad_scale * grad`. The momentum
/// becomes `factor` of the previous one plus the gradient. Weight decay is decoupled.
pub fn sgd_step(update: &MuonUpdate<'_>, factor: f64, step: u64, grad_scale: f32) -> Result<()> {
    let &MuonUpdate { weight, master, momentum, grad, index, lr, weight_decay } = update;
    combine(OP, (grad_scale, grad), (factor as f32, momentum), None)?;
    let seed = Seed { seed: tensor_seed(step_seed(step), index), first: 0 };
    let keep = (1.0 - lr * weight_decay) as f32;
    combine(OP, (-lr as f32, momentum), (keep, master.unwrap_or(weight)), Some(seed))?;
    match master {
        Some(master) => combine(OP, (1.0, master), (0.0, weight), None),
        None => Ok(()),
    }
}
