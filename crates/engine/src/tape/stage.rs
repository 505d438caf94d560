//! The trait [`Stage`], and the tensors that are kept between its forward and its backward.

use super::{GradSink, Param};
use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

/// A part of a model, such as a decoder layer, with an explicit backward.
pub trait Stage {
    /// Inputs without a gradient, such as positions and segment boundaries.
    type Context;
    /// Tensors that backward needs. Backward consumes them, so that memory is freed stage by stage.
    type Saved;

    fn params(&self) -> Vec<&Param>;

    /// Returns the output, and the tensors that backward needs.
    fn forward(&self, x: &Tensor, context: &Self::Context) -> Result<(Tensor, Self::Saved)>;

    /// As [`Self::forward`], and also keeps what backward otherwise computes again with a pass over
    /// the memory, if the stage has such tensors.
    fn forward_keeping(
        &self,
        x: &Tensor,
        context: &Self::Context,
    ) -> Result<(Tensor, Self::Saved)> {
        self.forward(x, context)
    }

    /// Adds the gradients of the stage's parameters to `grads` and returns the input's gradient.
    /// With [`InputGrad::Skip`] a stage may skip the work for the latter and return `None`.
    fn backward(
        &self,
        saved: Self::Saved,
        dy: Tensor,
        context: &Self::Context,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>>;

    /// Whether `grads` has a buffer for one of the parameters.
    fn is_trained(&self, grads: &dyn GradSink) -> bool {
        self.params().into_iter().any(|param| grads.buffer(param).is_some())
    }
}

/// Whether backward must compute the gradient of a stage's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputGrad {
    /// A parameter of an earlier stage is trained.
    Needed,
    /// No earlier stage is trained: backward ends here.
    Skip,
}

impl InputGrad {
    /// Returns `Needed` if a parameter of an earlier stage is trained.
    pub fn needed_if(trained_below: bool) -> Self {
        if trained_below { Self::Needed } else { Self::Skip }
    }
}

/// Whether backward recomputes the activations of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recompute {
    /// The forward pass keeps all tensors that backward needs, also those that are cheap to compute
    /// again.
    Least,
    /// The forward pass keeps all tensors that backward needs, except for those that it computes
    /// again with a pass over the memory.
    No,
    /// The forward pass keeps the input only, and the stage runs forward again before its backward.
    /// This needs less memory and one more forward.
    Yes,
}

/// What a part of a stage does with tensors that are cheap to compute again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheapTensors {
    /// Keeps them for backward.
    Keep,
    /// Backward computes them again.
    Recompute,
}

/// A stage between its forward and its backward.
pub enum SavedStage<S: Stage> {
    /// All tensors that backward needs.
    Activations(S::Saved),
    /// The input only. Backward runs the stage forward again first.
    Input(Tensor),
}

impl<S: Stage> SavedStage<S> {
    /// Runs `stage` forward, and keeps its activations or its input, depending on `recompute`.
    pub fn forward(
        stage: &S,
        x: Tensor,
        context: &S::Context,
        recompute: Recompute,
    ) -> Result<(Tensor, Self)> {
        let (y, saved) = match recompute {
            Recompute::Least => stage.forward_keeping(&x, context)?,
            Recompute::No | Recompute::Yes => stage.forward(&x, context)?,
        };
        Ok(match recompute {
            Recompute::Least | Recompute::No => (y, Self::Activations(saved)),
            Recompute::Yes => (y, Self::Input(x)),
        })
    }

    /// Runs `stage` backward, after its forward if its activations were not kept, and reports its
    /// parameters as finished.
    pub fn backward(
        self,
        stage: &S,
        dy: Tensor,
        context: &S::Context,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>> {
        let saved = match self {
            Self::Activations(saved) => saved,
            Self::Input(x) => stage.forward(&x, context)?.1,
        };
        let dx = stage.backward(saved, dy, context, grads, input_grad)?;
        grads.finished(&stage.params());
        Ok(dx)
    }
}
