//! What the routers of a model choose, and the gradient that keeps their choices even.
//!
//! The auxiliary loss is that of transformers. Over all tokens of a step and all layers with
//! experts, `N` choices of `k` experts together:
//!
//! ```text
//! E * sum over e of (choices of e / N) * (sum of the probabilities of e / N)
//! ```
//!
//! The probabilities are a softmax over all `E` experts, and the choices carry no gradient. If all
//! experts are chosen equally often, the loss is `k`.

use candle_core::{Result, Tensor};
use kernels::Routing;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The routers of all layers with experts.
#[derive(Debug)]
pub struct Routers {
    /// Number of experts of a layer, `E`.
    pub num_experts: usize,
    /// Number of experts that compute a token, `k`.
    pub experts_per_token: usize,
    pub num_layers: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    recording: Recording,
    choices: Vec<Choices>,
    slopes: Option<Vec<f32>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Recording {
    /// Nothing.
    #[default]
    Off,
    /// Which experts were chosen.
    Choices,
    /// The same, and the probabilities of all experts.
    Probabilities,
}

/// What the router of a layer chose for the tokens of a micro-batch.
#[derive(Debug, Clone)]
pub struct Choices {
    /// Number of the layer among those with experts.
    pub layer: usize,
    /// `[E + 1]`, `u32`: the number of choices of the experts before each one.
    pub offsets: Tensor,
    /// Sums of the probabilities of each expert; empty if they were not recorded.
    pub probabilities: Vec<f64>,
}

impl Routers {
    pub(super) fn new(num_experts: usize, experts_per_token: usize, num_layers: usize) -> Self {
        Self { num_experts, experts_per_token, num_layers, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on, forward passes record this. Backward runs layers forward again, so nothing may
    /// be recorded then.
    pub fn set_recording(&self, recording: Recording) {
        self.state().recording = recording;
    }

    /// What was recorded since the last call.
    pub fn take(&self) -> Vec<Choices> {
        std::mem::take(&mut self.state().choices)
    }

    /// From now on, backward adds the gradient of the sum over all layers, tokens and experts of
    /// `slopes [E]` times the probability; `None`: nothing.
    pub fn set_slopes(&self, slopes: Option<Vec<f32>>) {
        self.state().slopes = slopes;
    }

    /// Records the choices of a layer, if they are to be recorded.
    pub(super) fn record(&self, layer: usize, logits: &Tensor, routing: &Routing) -> Result<()> {
        let recording = self.state().recording;
        let probabilities = match recording {
            Recording::Off => return Ok(()),
            Recording::Choices => Vec::new(),
            Recording::Probabilities => kernels::router_probabilities(logits)?,
        };
        let offsets = routing.offsets.clone();
        self.state().choices.push(Choices { layer, offsets, probabilities });
        Ok(())
    }

    /// The gradient of `logits [T, E]`, given that of the other losses.
    pub(super) fn add_slopes(
        &self,
        logits: impl Fn() -> Result<Tensor>,
        d_logits: Tensor,
    ) -> Result<Tensor> {
        let slopes = self.state().slopes.clone();
        match slopes {
            Some(slopes) => d_logits + kernels::router_probabilities_backward(&logits()?, &slopes)?,
            None => Ok(d_logits),
        }
    }
}
