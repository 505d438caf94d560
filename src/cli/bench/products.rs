//! `bench --ops`: linear layers, and the ops of mixtures of experts.

use super::ops::{Bench, Time, Work, case, case_in_place};
use crate::ops::{
    ExpertLayout, RecomputeInput, Routing, combine, expert_rows, expert_rows_backward,
    expert_swiglu, expert_swiglu_backward, grouped_linear, grouped_linear_backward_input,
    grouped_linear_backward_weight, linear, linear_backward_input, linear_backward_weight, route,
};
use candle_core::{DType, Result, Tensor};

impl Bench {
    pub(super) fn linears(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        self.sizes.linears.iter().try_for_each(|size| self.linear(*size, time))
    }

    fn linear(&self, [n, k, m]: [usize; 3], time: &mut Time<'_>) -> anyhow::Result<()> {
        let (x, w) = (self.random(&[n, k])?, self.random(&[m, k])?);
        let (dy, dw) = (self.random(&[n, m])?, self.zeros(&[m, k])?);
        let flops = 2.0 * (n * k * m) as f64;
        let size = format!("{n}x{k}x{m}");
        time(case(&format!("linear {size}"), Work::Flops(flops), || {
            linear(&x, &w, None).map(drop)
        }))?;
        time(case(&format!("linear dx {size}"), Work::Flops(flops), || {
            linear_backward_input(&dy, &w).map(drop)
        }))?;
        time(case(&format!("linear dw {size}"), Work::Flops(flops), || {
            linear_backward_weight(&x, &dy, &dw)
        }))
    }

    /// The first products of experts, and those of a linear layer with as many rows.
    pub(super) fn experts(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &[tokens, experts, k, hidden, intermediate] in self.sizes.experts {
            let logits = self.f32s(&[tokens, experts])?;
            let bytes = 4.0 * (tokens * experts) as f64;
            time(case(&format!("route {tokens}x{experts}x{k}"), Work::Bytes(bytes), || {
                route(&logits, k).map(drop)
            }))?;
            let routing = route(&logits, k)?;
            self.rows_of_experts(&routing, hidden, intermediate, time)?;
            self.linear([tokens * k, hidden, 2 * intermediate], time)?;
            self.grouped(&routing, experts, [hidden, 2 * intermediate], time)?;
        }
        Ok(())
    }

    fn rows_of_experts(
        &self,
        routing: &Routing,
        hidden: usize,
        intermediate: usize,
        time: &mut Time<'_>,
    ) -> anyhow::Result<()> {
        let (tokens, k) = routing.weights.dims2()?;
        let rows = tokens * k;
        let (x, y) = (self.random(&[tokens, hidden])?, self.random(&[rows, hidden])?);
        let (size, bytes) = (format!("{tokens}x{k}x{hidden}"), self.bytes(&[rows, hidden]));
        let moved = bytes + self.bytes(&[tokens, hidden]);
        time(case(&format!("expert_rows {size}"), Work::Bytes(2.0 * bytes), || {
            expert_rows(&x, routing).map(drop)
        }))?;
        time(case(&format!("expert_rows backward {size}"), Work::Bytes(moved), || {
            expert_rows_backward(&y, routing).map(drop)
        }))?;
        time(case(&format!("combine {size}"), Work::Bytes(moved), || {
            combine(&y, routing, None).map(drop)
        }))?;
        let gate_up = self.random(&[rows, 2 * intermediate])?;
        let d_activated = self.random(&[rows, intermediate])?;
        let (size, bytes) = (format!("{rows}x{intermediate}"), self.bytes(&[rows, intermediate]));
        time(case(&format!("expert_swiglu {size}"), Work::Bytes(3.0 * bytes), || {
            expert_swiglu(&gate_up, routing).map(drop)
        }))?;
        let name = format!("expert_swiglu backward {size}");
        let run = |[gate_up, d_activated]: [Tensor; 2]| {
            expert_swiglu_backward(gate_up, routing, d_activated, RecomputeInput::Yes).map(drop)
        };
        time(case_in_place(&name, Work::Bytes(6.0 * bytes), [&gate_up, &d_activated], run))
    }

    fn grouped(
        &self,
        routing: &Routing,
        experts: usize,
        [k, m]: [usize; 2],
        time: &mut Time<'_>,
    ) -> anyhow::Result<()> {
        let (rows, at) = (routing.order.elem_count(), &routing.offsets);
        let flops = 2.0 * (rows * k * m) as f64;
        let size = format!("{rows}x{k}x{m}");
        let (x, dy) = (self.random(&[rows, k])?, self.random(&[rows, m])?);
        for (layout, name) in [(ExpertLayout::OutIn, "out-in"), (ExpertLayout::InOut, "in-out")] {
            let dims = if layout == ExpertLayout::OutIn { [m, k] } else { [k, m] };
            // The same numbers for each expert take less time to prepare.
            let w = self.random(&dims)?.unsqueeze(0)?;
            let w = w.broadcast_as((experts, dims[0], dims[1]))?.contiguous()?;
            time(case(&format!("grouped_linear {name} {size}"), Work::Flops(flops), || {
                grouped_linear(&x, &w, layout, at).map(drop)
            }))?;
            time(case(&format!("grouped_linear dx {name} {size}"), Work::Flops(flops), || {
                grouped_linear_backward_input(&dy, &w, layout, at).map(drop)
            }))?;
        }
        let dw = self.written_zeros(&[experts, k, m])?;
        time(case(&format!("grouped_linear dw {size}"), Work::Flops(flops), || {
            grouped_linear_backward_weight(&x, &dy, ExpertLayout::InOut, at, &dw)
        }))
    }

    /// Zeros that are resident in memory.
    fn written_zeros(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::full(0f32, shape, &self.clock.device)?.to_dtype(DType::F32)?.contiguous()
    }
}
