//! Stages with a hand-written backward, the sinks that collect their gradients, and recomputation.
//!
//! A model is a list of stages. The step runs them forward, keeping what the recompute policy says,
//! then backward from the last to the first, freeing as it goes. Nothing here knows a model.

mod param;
mod stage;

pub use param::{GradSink, Gradients, Param, Trainable};
pub use stage::{InputGrad, Kept, Recompute, Stage};
