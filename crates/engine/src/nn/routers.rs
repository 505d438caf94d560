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

use crate::tape::{Pass, Recorded, RouterChoices};
use candle_core::{Result, Tensor};
use kernels::Routing;

/// The routers of all layers with experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routers {
    /// Number of experts of a layer, `E`.
    pub num_experts: usize,
    /// Number of experts that compute a token, `k`.
    pub experts_per_token: usize,
    pub num_layers: usize,
}

/// Records the choices of a layer, number `layer` of those with experts, if `pass` has a log.
pub(super) fn record(
    layer: usize,
    logits: &Tensor,
    routing: &Routing,
    pass: &Pass<'_>,
) -> Result<()> {
    let Some(log) = pass.router_log else { return Ok(()) };
    let probabilities = match log.recorded {
        Recorded::Choices => None,
        Recorded::Probabilities => Some(kernels::router_probabilities(logits)?),
    };
    log.record(RouterChoices { layer, offsets: routing.offsets.clone(), probabilities });
    Ok(())
}

/// The gradient of `logits [T, E]`, given that of the other losses, whose memory it reuses.
pub(super) fn add_slopes(
    logits: impl Fn() -> Result<Tensor>,
    d_logits: Tensor,
    pass: &Pass<'_>,
) -> Result<Tensor> {
    if let Some(slopes) = pass.router_slopes {
        kernels::router_probabilities_backward(&logits()?, slopes, &d_logits)?;
    }
    Ok(d_logits)
}
