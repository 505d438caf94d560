//! The trait [`Stage`], and the tensors that are kept between its forward and its backward.

use super::{Param, Pass};
use candle_core::{Error, Result, Tensor};

/// A part of a model, such as a decoder layer or one of its halves, with an explicit backward.
pub trait Stage: Send + Sync {
    /// Inputs without a gradient, such as positions and segment boundaries.
    type Context;

    fn params(&self) -> Vec<&Param>;

    /// Returns the output, and the tensors that backward needs. With [`Recompute::Nothing`] these
    /// include what is cheap to compute again.
    fn forward(
        &self,
        x: &Tensor,
        context: &Self::Context,
        recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)>;

    /// Adds the gradients of the stage's parameters to those of `pass` and returns the input's
    /// gradient. With [`InputGrad::Skip`] a stage may skip the work for the latter and return
    /// `None`. Consumes `saved`, so that memory is freed stage by stage.
    fn backward(
        &self,
        saved: Saved,
        dy: Tensor,
        context: &Self::Context,
        input_grad: InputGrad,
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>>;

    /// Whether `pass` has a gradient buffer for one of the parameters.
    fn is_trained(&self, pass: &Pass<'_>) -> bool {
        self.params().into_iter().any(|param| pass.grads.buffer(param).is_some())
    }
}

/// The tensors that a backward needs, as `saved_tensors` in PyTorch. Backward takes them in the
/// order in which forward has listed them.
#[derive(Debug, Default)]
pub struct Saved {
    tensors: Vec<Tensor>,
    optional: Vec<Option<Tensor>>,
    parts: Vec<Saved>,
}

impl Saved {
    pub fn new<const N: usize>(tensors: [Tensor; N]) -> Self {
        Self { tensors: tensors.into(), ..Self::default() }
    }

    /// Also keeps these, some of which may be missing.
    #[must_use]
    pub fn with_optional<const N: usize>(self, optional: [Option<Tensor>; N]) -> Self {
        Self { optional: optional.into(), ..self }
    }

    /// Also keeps what the parts of a stage have saved.
    #[must_use]
    pub fn with_parts<const N: usize>(self, parts: [Self; N]) -> Self {
        Self { parts: parts.into(), ..self }
    }

    /// Bytes of all tensors.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        let own = self.tensors.iter().chain(self.optional.iter().flatten());
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        own.map(bytes).sum::<usize>() + self.parts.iter().map(Self::bytes).sum::<usize>()
    }

    /// Takes the tensors of [`Self::new`]. Fails if their number is not `N`.
    pub fn tensors<const N: usize>(&mut self) -> Result<[Tensor; N]> {
        std::mem::take(&mut self.tensors).try_into().map_err(|_| other_stage())
    }

    /// Takes the tensors of [`Self::with_optional`]. Fails if their number is not `N`.
    pub fn optional<const N: usize>(&mut self) -> Result<[Option<Tensor>; N]> {
        std::mem::take(&mut self.optional).try_into().map_err(|_| other_stage())
    }

    /// Takes the parts of [`Self::with_parts`]. Fails if their number is not `N`.
    pub fn parts<const N: usize>(&mut self) -> Result<[Self; N]> {
        std::mem::take(&mut self.parts).try_into().map_err(|_| other_stage())
    }
}

fn other_stage() -> Error {
    Error::msg("the saved tensors belong to another stage")
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

/// What backward computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing: the forward pass keeps all tensors that backward needs.
    Nothing,
    /// Norms, rotations and activations, which cost one pass over their operands. The forward pass
    /// keeps the results of matrix products.
    Cheap,
    /// The whole stage, before its backward: the forward pass keeps the input only. This needs less
    /// memory and one more forward.
    Stage,
}

/// A stage between its forward and its backward.
pub enum SavedStage {
    /// All tensors that backward needs.
    Activations(Saved),
    /// The input only. Backward runs the stage forward again first.
    Input(Tensor),
}

impl SavedStage {
    /// Runs `stage` forward, and keeps its activations or its input, depending on `recompute`.
    pub fn forward<S: Stage>(
        stage: &S,
        x: Tensor,
        context: &S::Context,
        recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Self)> {
        let (y, saved) = stage.forward(&x, context, recompute, pass)?;
        Ok(match recompute {
            Recompute::Nothing | Recompute::Cheap => (y, Self::Activations(saved)),
            Recompute::Stage => (y, Self::Input(x)),
        })
    }

    /// Runs `stage` backward, after its forward if its activations were not kept, and reports its
    /// parameters as finished.
    pub fn backward<S: Stage>(
        self,
        stage: &S,
        dy: Tensor,
        context: &S::Context,
        input_grad: InputGrad,
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let saved = match self {
            Self::Activations(saved) => saved,
            Self::Input(x) => stage.forward(&x, context, Recompute::Cheap, pass)?.1,
        };
        let params = stage.params();
        let grads: Vec<&Tensor> = params.iter().filter_map(|param| pass.grad(param)).collect();
        let backward = || stage.backward(saved, dy, context, input_grad, pass);
        let dx = kernels::join_column_sums(&grads, backward)?;
        pass.grads.finished(&params)?;
        Ok(dx)
    }
}
