//! From hidden states to a sum of negative log likelihoods.

mod head;
mod shift;

pub use head::{LossOutput, Scores, TargetLosses, loss_and_gradient, scores};
pub use shift::{Targets, WEIGHT_UNIT};
