//! What a pass over a model needs besides its input.

use super::{GradSink, Param};
use candle_core::{Result, Tensor};
use kernels::{HeadExchange, Store};
use std::cell::RefCell;
use std::sync::Arc;

/// One run through the stages of a model, forward or backward, with all that they need besides
/// their input. The default is inference with weights that are in memory.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    /// Provides the weights.
    pub weights: &'a dyn Weights,
    /// Receives the gradients, and says which parameters are trained. Forward keeps what their
    /// backward needs.
    pub grads: &'a dyn GradSink,
    /// The place of the micro-batch in the run, for the dropout of adapters; `None`: no dropout.
    pub dropout: Option<&'a DropoutPlace>,
    /// Exchanges tokens for heads with the ranks that have the other tokens of the micro-batch;
    /// `None`: this rank has all of them.
    pub exchange: Option<&'a dyn HeadExchange>,
    /// Forward records here what the routers choose.
    pub router_log: Option<&'a RouterLog>,
    /// Slopes `[E]` of the auxiliary loss: backward adds the gradient of the sum over all layers,
    /// tokens and experts of the slope times the probability of the expert.
    pub router_slopes: Option<&'a Tensor>,
}

/// Provides the weights of a model, which may be divided among ranks, in host memory, or quantised.
pub trait Weights {
    /// The weight of `param`; that of a matrix may be narrower than the activations. It may be
    /// replaced as soon as a weight of another stage is read, so it must not be read after that.
    fn weight(&self, param: &Param) -> Result<Tensor>;
}

/// Weights that are always in memory.
#[derive(Debug, Clone, Copy)]
pub struct Resident;

impl Weights for Resident {
    fn weight(&self, param: &Param) -> Result<Tensor> {
        param.tensor()
    }
}

/// The place of a micro-batch in the run, which decides what the dropout of adapters drops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropoutPlace {
    /// Optimizer step, from 1.
    pub step: u64,
    /// Where each run of tokens without padding between them begins: its first row, ascending from
    /// 0, and the number of that token in the step, which counts no padding.
    pub runs: Arc<[(usize, u64)]>,
    /// Number of the first patch in the step, and number of patches of the micro-batch.
    pub patches: (u64, u64),
}

/// What the routers of a micro-batch choose, recorded during its forward pass.
#[derive(Debug)]
pub struct RouterLog {
    pub recorded: Recorded,
    choices: RefCell<Vec<RouterChoices>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// Which experts were chosen.
    Choices,
    /// The same, and the probabilities of all experts.
    Probabilities,
}

/// What the router of a layer chose for the tokens of a micro-batch.
#[derive(Debug, Clone)]
pub struct RouterChoices {
    /// Number of the layer among those with experts.
    pub layer: usize,
    /// `[E + 1]`, `u32`: the number of choices of the experts before each one.
    pub offsets: Tensor,
    /// `[E]`: sums of the probabilities of each expert, if they were recorded.
    pub probabilities: Option<Tensor>,
}

impl RouterLog {
    pub fn new(recorded: Recorded) -> Self {
        Self { recorded, choices: RefCell::default() }
    }

    pub fn record(&self, choices: RouterChoices) {
        self.choices.borrow_mut().push(choices);
    }

    /// What was recorded, in the order of the layers.
    pub fn into_choices(self) -> Vec<RouterChoices> {
        self.choices.into_inner()
    }
}

/// No parameter is trained.
#[derive(Debug, Clone, Copy)]
pub struct Untrained;

impl GradSink for Untrained {
    fn buffer(&self, _: &Param) -> Option<&Tensor> {
        None
    }

    fn product_buffer(&self, _: &Param) -> Option<(&Tensor, Store)> {
        None
    }
}

impl Default for Pass<'_> {
    fn default() -> Self {
        Self::inference(&Resident)
    }
}

impl<'a> Pass<'a> {
    /// A pass without gradients.
    pub fn inference(weights: &'a dyn Weights) -> Self {
        Self {
            weights,
            grads: &Untrained,
            dropout: None,
            exchange: None,
            router_log: None,
            router_slopes: None,
        }
    }

    /// A pass with weights in memory that adds gradients to `grads`.
    pub fn training(grads: &'a dyn GradSink) -> Self {
        Self { grads, ..Self::default() }
    }

    /// The weight of `param`, in its published shape.
    pub fn weight(&self, param: &Param) -> Result<Tensor> {
        self.weights.weight(param)
    }

    /// The buffer for the gradient of `param`; `None` if it is frozen.
    pub fn grad(&self, param: &Param) -> Option<&'a Tensor> {
        self.grads.buffer(param)
    }
}
