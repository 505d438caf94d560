//! The second half of a decoder layer with experts: RMS norm, router, experts, residual.
//!
//! Shapes: `T` tokens, `D` hidden size, `E` experts, `k` of them for each token, `I` their width,
//! `R = T k` rows, which are sorted by expert.
//!
//! ```text
//! h = norm(x)                                            [T, D]
//! w, e = the k largest of softmax(h W_router^T), in f32  [T, k]
//! y = x + sum over j of down_e(w silu(gate_e h) up_e h)  [T, D]
//! ```
//!
//! A shared expert adds its output for every token.
//!
//! The router computes in `f32` whatever the compute dtype is.

use super::config::DecoderConfig;
use super::expert_linear::ExpertLinear;
use super::experts::{EXPERTS, MoeConfig, ROUTER, SHARED, SHARED_GATE};
use super::norm::RmsNorm;
use super::params::{ParamMap, WeightError};
use super::routers::Routers;
use super::shared_expert::{SavedShared, SharedExpert};
use crate::tape::{GradSink, Param};
use candle_core::{DType, Result, Tensor};
use kernels::{RecomputeInput, Routing};
use std::sync::Arc;

/// The second half of a decoder layer with experts.
pub(super) struct MoeBlock {
    norm: RmsNorm,
    router: Param, // [E, D]
    gate_up: ExpertLinear,
    down: ExpertLinear,
    experts_per_token: usize,
    shared: Option<SharedExpert>,
    routers: Arc<Routers>,
    /// Number of the layer among those with experts.
    place: usize,
}

/// The tensors that backward needs.
pub(super) struct SavedMoe {
    x: Tensor,    // [T, D]
    rstd: Tensor, // [T]
    routing: Routing,
    gate_up: Tensor, // [R, 2I]
    shared: Option<SavedShared>,
}

impl MoeBlock {
    /// The block of the layer with the name `layer`, which is number `place` of those with experts.
    pub(super) fn new(
        params: &ParamMap<'_>,
        layer: &str,
        (config, moe): (&DecoderConfig, &MoeConfig),
        (routers, place): (&Arc<Routers>, usize),
    ) -> std::result::Result<Self, WeightError> {
        let norm = format!("{layer}.post_attention_layernorm");
        let experts = |part: &str| {
            ExpertLinear::new(params, &format!("{layer}.{EXPERTS}.{part}"), moe.layout())
        };
        let shared = moe.shared_size.map(|_| {
            let [shared, gate] = [SHARED, SHARED_GATE].map(|part| format!("{layer}.{part}"));
            SharedExpert::new(params, &shared, &gate)
        });
        Ok(Self {
            norm: RmsNorm::of_decoder(params, &norm, config)?,
            router: params.get(&format!("{layer}.{ROUTER}"))?,
            gate_up: experts("gate_up_proj")?,
            down: experts("down_proj")?,
            experts_per_token: moe.experts_per_token,
            shared: shared.transpose()?,
            routers: Arc::clone(routers),
            place,
        })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        let experts = self.gate_up.params().chain(self.down.params());
        let shared = self.shared.iter().flat_map(SharedExpert::params);
        [self.norm.param(), &self.router].into_iter().chain(experts).chain(shared)
    }

    /// `x: [T, D]` to `[T, D]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<(Tensor, SavedMoe)> {
        let (normed, rstd) = self.norm.normed(x)?;
        let logits = self.logits(&normed)?; // [T, E]
        let routing = kernels::route(&logits, self.experts_per_token)?;
        self.routers.record(self.place, &logits, &routing)?;
        drop(logits);
        let rows = kernels::expert_rows(&normed, &routing)?; // [R, D]
        let gate_up = self.gate_up.forward(&rows, &routing.offsets)?; // [R, 2I]
        drop(rows);
        let activated = kernels::expert_swiglu(&gate_up, &routing)?; // [R, I]
        let rows = self.down.forward(&activated, &routing.offsets)?; // [R, D]
        drop(activated);
        let mut y = kernels::combine(&rows, &routing, Some(x))?; // [T, D]
        drop(rows);
        let mut saved_shared = None;
        if let Some(shared) = &self.shared {
            let saved;
            (y, saved) = shared.forward_add(&normed, &y)?;
            saved_shared = Some(saved);
        }
        Ok((y, SavedMoe { x: x.clone(), rstd, routing, gate_up, shared: saved_shared }))
    }

    /// `[T, E]`, in `f32`.
    fn logits(&self, normed: &Tensor) -> Result<Tensor> {
        kernels::linear(&wide(normed)?, &wide(&self.router.tensor())?, None)
    }

    /// Returns `dx: [T, D]`. Each buffer is dropped after its last use, to lower peak memory.
    pub(super) fn backward(
        &self,
        SavedMoe { x, rstd, routing, gate_up, shared }: SavedMoe,
        dy: &Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let offsets = &routing.offsets;
        let d_rows = kernels::expert_rows(dy, &routing)?; // [R, D]
        let du = self.down.rank_grad(&d_rows, offsets)?;
        let d_activated = self.down.backward_input(&d_rows, &du, offsets)?; // [R, I]
        let recompute = self.down.recompute_input(grads);
        let (d_gate_up, d_weights, activated) =
            kernels::expert_swiglu_backward(gate_up, &routing, d_activated, recompute)?; // [R, 2I], [T, k], [R, I]
        if let Some(activated) = activated {
            self.down.backward_params(&activated, &d_rows, &du, offsets, grads)?;
        }
        drop(d_rows);
        let normed = self.norm.apply(&x, &rstd)?; // [T, D]
        let du = self.gate_up.rank_grad(&d_gate_up, offsets)?;
        if self.gate_up.recompute_input(grads) == RecomputeInput::Yes {
            let rows = kernels::expert_rows(&normed, &routing)?; // [R, D]
            self.gate_up.backward_params(&rows, &d_gate_up, &du, offsets, grads)?;
        }
        let d_rows = self.gate_up.backward_input(&d_gate_up, &du, offsets)?; // [R, D]
        drop(d_gate_up);
        let d_normed = kernels::expert_rows_backward(&d_rows, &routing)?; // [T, D]
        drop(d_rows);
        let d_normed = wide(&d_normed)?;
        let d_normed = self.router_backward(&normed, &routing, &d_weights, d_normed, grads)?;
        let mut d_normed = d_normed.to_dtype(x.dtype())?;
        if let (Some(block), Some(saved)) = (&self.shared, shared) {
            d_normed = block.backward_add(saved, &normed, dy, d_normed, grads)?;
        }
        drop(normed);
        self.norm.backward_add(&x, &rstd, &d_normed, Some(dy), grads) // [T, D]
    }

    /// Adds the gradient of the router, and adds that of its input to `d_normed: [T, D]`, in `f32`.
    fn router_backward(
        &self,
        normed: &Tensor,
        routing: &Routing,
        d_weights: &Tensor,
        d_normed: Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let weight = wide(&self.router.tensor())?; // [E, D]
        let d_logits = kernels::route_backward(routing, d_weights, weight.dim(0)?)?; // [T, E]
        let d_logits = self.routers.add_slopes(|| self.logits(normed), d_logits)?;
        if let Some(dw) = grads.buffer(&self.router) {
            kernels::linear_backward_weight(&wide(normed)?, &d_logits, dw)?;
        }
        kernels::linear_backward_input_add(&d_logits, &weight, d_normed)
    }
}

fn wide(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32)
}
