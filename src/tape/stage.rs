//! The stage, and what is kept of it between forward and backward.

use super::GradSink;
use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

/// One piece of the model: a function with an explicit backward.
pub trait Stage {
    /// What the stage reads besides its input and weights (positions, boundaries); no gradient flows into it.
    type Context;
    /// What backward needs of forward; consumed by it, so that memory goes stage by stage.
    type Saved;

    /// Output, and what backward needs.
    fn forward(&self, x: &Tensor, context: &Self::Context) -> Result<(Tensor, Self::Saved)>;

    /// Adds the gradients of the stage's parameters to `grads`, and returns that of its input.
    /// With [`InputGrad::Skip`] the result is `None` and the work for it is not done.
    fn backward(
        &self,
        saved: Self::Saved,
        dy: Tensor,
        context: &Self::Context,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>>;
}

/// Whether anything before a stage needs a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputGrad {
    /// Something earlier is trained.
    Needed,
    /// Nothing earlier is trained: backward ends here.
    Skip,
}

/// What the forward pass keeps of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recompute {
    /// Keep what backward needs.
    No,
    /// Keep the input only, and run the stage again before its backward: less memory, one more forward.
    Yes,
}

/// A stage between its forward and its backward.
pub enum Kept<S: Stage> {
    /// Backward can start.
    Saved(S::Saved),
    /// Forward runs again first.
    Input(Tensor),
}

impl<S: Stage> Kept<S> {
    /// Runs `stage` forward and keeps what `recompute` says.
    pub fn forward(
        stage: &S,
        x: Tensor,
        context: &S::Context,
        recompute: Recompute,
    ) -> Result<(Tensor, Self)> {
        let (y, saved) = stage.forward(&x, context)?;
        Ok(match recompute {
            Recompute::No => (y, Self::Saved(saved)),
            Recompute::Yes => (y, Self::Input(x)),
        })
    }

    /// Runs `stage` backward, after its forward if that was not kept.
    pub fn backward(
        self,
        stage: &S,
        dy: Tensor,
        context: &S::Context,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>> {
        let saved = match self {
            Self::Saved(saved) => saved,
            Self::Input(x) => stage.forward(&x, context)?.1,
        };
        stage.backward(saved, dy, context, grads, input_grad)
    }
}
