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
use super::norm::Norm;
use super::params::{ParamMap, WeightError};
use super::routers::{add_slopes, record};
use super::shared_expert::SharedExpert;
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{DType, Result, Tensor};
use kernels::{RecomputeInput, Routing};

/// The second half of a decoder layer with experts.
pub(super) struct MoeBlock {
    norm: Norm,
    router: Param, // [E, D]
    gate_up: ExpertLinear,
    down: ExpertLinear,
    experts_per_token: usize,
    shared: Option<SharedExpert>,
    /// Number of the layer among those with experts.
    moe_index: usize,
}

impl MoeBlock {
    /// The block of the layer with the name `layer`, which is number `moe_index` of those with
    /// experts.
    pub(super) fn new(
        params: &ParamMap<'_>,
        layer: &str,
        (config, moe): (&DecoderConfig, &MoeConfig),
        moe_index: usize,
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
            norm: Norm::of_decoder(params, &norm, config)?,
            router: params.get(&format!("{layer}.{ROUTER}"))?,
            gate_up: experts("gate_up_proj")?,
            down: experts("down_proj")?,
            experts_per_token: moe.experts_per_token,
            shared: shared.transpose()?,
            moe_index,
        })
    }

    /// `[T, E]`, in `f32`.
    fn logits(&self, normed: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        kernels::linear(&wide(normed)?, &wide(&pass.weight(&self.router)?)?, None)
    }

    /// Adds the gradient of the router, and adds that of its input to `d_normed: [T, D]`, in `f32`.
    fn router_backward(
        &self,
        normed: &Tensor,
        routing: &Routing,
        d_weights: &Tensor,
        d_normed: Tensor,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let weight = wide(&pass.weight(&self.router)?)?; // [E, D]
        let d_logits = kernels::route_backward(routing, d_weights, weight.dim(0)?)?; // [T, E]
        let d_logits = add_slopes(|| self.logits(normed, pass), d_logits, pass)?;
        if let Some(dw) = pass.grad(&self.router) {
            kernels::linear_backward_weight(&wide(normed)?, &d_logits, dw)?;
        }
        kernels::linear_backward_input_add(&d_logits, &weight, d_normed)
    }
}

/// Bytes that backward needs of a token.
pub(super) fn saved_bytes(config: &DecoderConfig, moe: &MoeConfig, element: f64) -> f64 {
    let k = moe.experts_per_token;
    let shared = moe.shared_size.unwrap_or(0);
    let wide = config.hidden_size + 2 * k * moe.intermediate_size + 2 * shared;
    // weights, experts, and both orders of the rows; `rstd`, and the share of the shared expert
    let floats = 4 * k + 1 + usize::from(shared > 0);
    element * wide as f64 + 4.0 * floats as f64
}

impl Stage for MoeBlock {
    type Context = ();

    fn params(&self) -> Vec<&Param> {
        let experts = self.gate_up.params().chain(self.down.params());
        let shared = self.shared.iter().flat_map(SharedExpert::params);
        self.norm.params().chain([&self.router]).chain(experts).chain(shared).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [T, D]
        (): &(),
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (normed, rstd) = self.norm.normed(x, pass)?;
        let logits = self.logits(&normed, pass)?; // [T, E]
        let routing = kernels::route(&logits, self.experts_per_token)?;
        record(self.moe_index, &logits, &routing, pass)?;
        drop(logits);
        let rows = kernels::expert_rows(&normed, &routing)?; // [R, D]
        let gate_up = self.gate_up.forward(&rows, &routing.offsets, pass)?; // [R, 2I]
        drop(rows);
        let activated = kernels::expert_swiglu(&gate_up, &routing)?; // [R, I]
        let rows = self.down.forward(&activated, &routing.offsets, pass)?; // [R, D]
        drop(activated);
        let mut y = kernels::combine(&rows, &routing, Some(x))?; // [T, D]
        drop(rows);
        let mut shared = Saved::default();
        if let Some(block) = &self.shared {
            (y, shared) = block.forward_add(&normed, &y, pass)?;
        }
        let Routing { weights, experts, order, places, offsets } = routing;
        let saved = [x.clone(), rstd, gate_up, weights, experts, order, places, offsets];
        Ok((y, Saved::new(saved).with_parts([shared])))
    }

    /// Each buffer is dropped after its last use, to lower peak memory.
    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [T, D]
        (): &(),
        _input_grad: InputGrad, // always computed: the residual needs it
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, rstd, gate_up, weights, experts, order, places, offsets] = saved.tensors()?;
        let [shared] = saved.parts()?;
        let routing = Routing { weights, experts, order, places, offsets };
        let offsets = &routing.offsets;
        let d_rows = kernels::expert_rows(&dy, &routing)?; // [R, D]
        let du = self.down.rank_grad(&d_rows, offsets, pass)?;
        let d_activated = self.down.backward_input(&d_rows, &du, offsets, pass)?; // [R, I]
        let recompute = self.down.recompute_input(pass);
        let (d_gate_up, d_weights, activated) =
            kernels::expert_swiglu_backward(gate_up, &routing, d_activated, recompute)?; // [R, 2I], [T, k], [R, I]
        if let Some(activated) = activated {
            self.down.backward_params(&activated, &d_rows, &du, offsets, pass)?;
        }
        drop(d_rows);
        let normed = self.norm.apply(&x, &rstd, pass)?; // [T, D]
        let du = self.gate_up.rank_grad(&d_gate_up, offsets, pass)?;
        if self.gate_up.recompute_input(pass) == RecomputeInput::Yes {
            let rows = kernels::expert_rows(&normed, &routing)?; // [R, D]
            self.gate_up.backward_params(&rows, &d_gate_up, &du, offsets, pass)?;
        }
        let d_rows = self.gate_up.backward_input(&d_gate_up, &du, offsets, pass)?; // [R, D]
        drop(d_gate_up);
        let d_normed = kernels::expert_rows_backward(&d_rows, &routing)?; // [T, D]
        drop(d_rows);
        let d_normed = wide(&d_normed)?;
        let d_normed = self.router_backward(&normed, &routing, &d_weights, d_normed, pass)?;
        let mut d_normed = d_normed.to_dtype(x.dtype())?;
        if let Some(block) = &self.shared {
            d_normed = block.backward_add(shared, &normed, &dy, d_normed, pass)?;
        }
        drop(normed);
        self.norm.backward_add(&x, &rstd, &d_normed, Some(&dy), pass).map(Some) // [T, D]
    }
}

fn wide(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32)
}
