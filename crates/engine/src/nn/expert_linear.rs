//! A linear layer of all experts of a layer, with or without an adapter (LoRA).
//!
//! Shapes: `E` experts; `N` rows in the order of their experts, `x [N, K]`, `y [N, M]`; `A [E r, K]`
//! and `B [M, E r]`, as PEFT stores them. The rows of `A` are ordered by expert, then by rank; the
//! columns of `B` by rank, then by expert. For a row of expert `e`:
//!
//! ```text
//! y = x W_e^T + scale x A_e^T B_e^T
//! ```

use super::adapter::{AdapterTensor, Adapters};
use super::params::{ParamMap, WeightError};
use crate::tape::{Param, Pass};
use candle_core::{DType, Result, Tensor};
use kernels::{ExpertLayout, RecomputeInput};

/// The products of rows with the weights of their experts.
pub(super) struct ExpertLinear {
    weight: Param, // [E, K, M] or [E, M, K]
    layout: ExpertLayout,
    adapter: Option<ExpertAdapter>,
}

struct ExpertAdapter {
    a: Param,
    b: Param,
    scale: f64,
    rank: usize,
}

/// The gradient of `x A^T` of each row, `[N, r]`; `None` without an adapter.
pub(super) struct RankGrad(Option<Tensor>);

impl ExpertLinear {
    /// The layer with the parameter `name`.
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        layout: ExpertLayout,
    ) -> std::result::Result<Self, WeightError> {
        let of = |adapters: &Adapters| ExpertAdapter::find(params, adapters, name);
        let adapter = params.adapters().map(of).transpose()?.flatten();
        Ok(Self { weight: params.get(name)?, layout, adapter })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        let adapter = self.adapter.iter().flat_map(|adapter| [&adapter.a, &adapter.b]);
        std::iter::once(&self.weight).chain(adapter)
    }

    /// Returns `y [N, M]`.
    pub(super) fn forward(&self, x: &Tensor, offsets: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let weight = pass.weight(&self.weight)?;
        let y = kernels::grouped_linear(x, &weight, self.layout, offsets)?;
        if let Some(adapter) = &self.adapter {
            let u = adapter.down(x, offsets, pass)?;
            let b = adapter.b_by_expert(pass)?;
            kernels::add_in_place(
                &y,
                &kernels::grouped_linear(&u, &b, ExpertLayout::OutIn, offsets)?,
            )?;
        }
        Ok(y)
    }

    /// Whether the backward needs `x`.
    pub(super) fn recompute_input(&self, pass: &Pass<'_>) -> RecomputeInput {
        let trains = self.params().any(|param| pass.grad(param).is_some());
        if trains { RecomputeInput::Yes } else { RecomputeInput::No }
    }

    /// What both halves of the backward need of `dy [N, M]`.
    pub(super) fn rank_grad(
        &self,
        dy: &Tensor,
        offsets: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<RankGrad> {
        let Some(adapter) = &self.adapter else { return Ok(RankGrad(None)) };
        let (b, layout) = (adapter.b_by_expert(pass)?, ExpertLayout::OutIn);
        let du = kernels::grouped_linear_backward_input(dy, &b, layout, offsets)?;
        Ok(RankGrad(Some((du * adapter.scale)?)))
    }

    /// Returns `dx [N, K]`.
    pub(super) fn backward_input(
        &self,
        dy: &Tensor,
        du: &RankGrad,
        offsets: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let weight = pass.weight(&self.weight)?;
        let dx = kernels::grouped_linear_backward_input(dy, &weight, self.layout, offsets)?;
        if let (Some(adapter), RankGrad(Some(du))) = (&self.adapter, du) {
            let (a, layout) = (adapter.a_by_expert(pass)?, ExpertLayout::OutIn);
            let more = kernels::grouped_linear_backward_input(du, &a, layout, offsets)?;
            kernels::add_in_place(&dx, &more)?;
        }
        Ok(dx)
    }

    pub(super) fn backward_params(
        &self,
        x: &Tensor,
        dy: &Tensor,
        du: &RankGrad,
        offsets: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<()> {
        if let Some(dw) = pass.grad(&self.weight) {
            kernels::grouped_linear_backward_weight(x, dy, self.layout, offsets, dw)?;
        }
        match (&self.adapter, du) {
            (Some(adapter), RankGrad(Some(du))) => adapter.backward(x, dy, du, offsets, pass),
            _ => Ok(()),
        }
    }
}

impl ExpertAdapter {
    /// The adapter of the parameter `name`; `None` if it has none.
    fn find(
        params: &ParamMap<'_>,
        adapters: &Adapters,
        name: &str,
    ) -> std::result::Result<Option<Self>, WeightError> {
        let Some((module, scale, rank)) = adapters.of_experts(name) else { return Ok(None) };
        let [a, b] = [AdapterTensor::A, AdapterTensor::B].map(|of| params.get(&of.name(module)));
        Ok(Some(Self { a: a?, b: b?, scale, rank }))
    }

    /// `[E, r, K]`, without a copy.
    fn a_by_expert(&self, pass: &Pass<'_>) -> Result<Tensor> {
        by_expert(&pass.weight(&self.a)?, self.rank)
    }

    /// A copy, `[E, M, r]`.
    fn b_by_expert(&self, pass: &Pass<'_>) -> Result<Tensor> {
        let b = pass.weight(&self.b)?;
        let (outputs, all) = b.dims2()?;
        b.reshape((outputs, self.rank, all / self.rank))?.permute((2, 0, 1))?.contiguous()
    }

    /// `scale x A^T`, `[N, r]`.
    fn down(&self, x: &Tensor, offsets: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let a = self.a_by_expert(pass)?;
        kernels::grouped_linear(x, &a, ExpertLayout::OutIn, offsets)? * self.scale
    }

    fn backward(
        &self,
        x: &Tensor,
        dy: &Tensor,
        du: &Tensor,
        offsets: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<()> {
        let layout = ExpertLayout::OutIn;
        if let Some(da) = pass.grad(&self.a) {
            let da = by_expert(da, self.rank)?; // the same memory
            kernels::grouped_linear_backward_weight(x, du, layout, offsets, &da)?;
        }
        if let Some(db) = pass.grad(&self.b) {
            let u = self.down(x, offsets, pass)?;
            let (outputs, all) = db.dims2()?;
            let shape = (all / self.rank, outputs, self.rank);
            let by_expert = Tensor::zeros(shape, DType::F32, db.device())?;
            kernels::grouped_linear_backward_weight(&u, dy, layout, offsets, &by_expert)?;
            let columns = by_expert.permute((1, 2, 0))?.contiguous()?.reshape((outputs, all))?;
            kernels::add_in_place(db, &columns)?;
        }
        Ok(())
    }
}

/// `[E r, K]` as `[E, r, K]`, of the same memory.
fn by_expert(a: &Tensor, rank: usize) -> Result<Tensor> {
    let (all, inputs) = a.dims2()?;
    a.reshape((all / rank, rank, inputs))
}

#[cfg(test)]
mod tests;
