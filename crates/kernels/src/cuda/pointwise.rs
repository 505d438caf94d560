use super::launch::{Launch, address, empty, first_address, vectors};
use super::route::{weighted_swiglu, weighted_swiglu_backward};
use crate::adjacent::are_columns;
use crate::cpu::compute_dtype;
use crate::{Gelu, RecomputeInput};
use candle_core::{Result, Tensor};

pub(super) const THREADS: u32 = 256;
/// Number of elements per block: 8 per thread, `SHARE` of the kernels.
pub(super) const ELEMENTS: usize = 8 * THREADS as usize;

/// Launches kernel `op` on all elements of `tensors`, which are its arguments and have the same
/// shape and dtype.
fn run(op: &str, tensors: &[(&str, &Tensor)]) -> Result<()> {
    let first = tensors[0].1;
    compute_dtype(op, tensors)?;
    let rows: Vec<&Tensor> = tensors.iter().map(|(_, tensor)| *tensor).collect();
    let kernel = if vectors(0, &rows)? { op.to_owned() } else { format!("{op}_single") };
    let n = first.elem_count();
    let mut launch =
        Launch::new(&kernel, first.dtype()).grid(n.div_ceil(ELEMENTS)).threads(THREADS);
    for (name, tensor) in tensors {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch.long(n).run(first)
}

fn empty_like(x: &Tensor) -> Result<Tensor> {
    empty(x.shape(), x.dtype(), x)
}

pub(crate) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if are_columns(&[gate, up]) {
        let first = (gate, first_address("swiglu", "gate", gate)?);
        return weighted_swiglu("swiglu", first, gate.dim(1)?, None);
    }
    let y = empty_like(gate)?;
    run("swiglu", &[("gate", gate), ("up", up), ("y", &y)])?;
    Ok(y)
}

pub(crate) fn swiglu_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    recompute: RecomputeInput,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    if are_columns(&[&gate, &up]) {
        let op = "swiglu_backward";
        let first = (&gate, first_address(op, "gate", &gate)?);
        weighted_swiglu_backward(op, first, &dy, recompute, None)?;
    } else {
        run(&backward("swiglu", recompute), &[("gate", &gate), ("up", &up), ("dy", &dy)])?;
    }
    Ok((gate, up, (recompute == RecomputeInput::Yes).then_some(dy)))
}

pub(crate) fn sigmoid_gate(gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    let y = empty_like(gate)?;
    run("sigmoid_gate", &[("gate", gate), ("x", x), ("y", &y)])?;
    Ok(y)
}

pub(crate) fn sigmoid_gate_backward(
    gate: Tensor,
    x: Tensor,
    dy: Tensor,
    recompute: RecomputeInput,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    run(&backward("sigmoid_gate", recompute), &[("gate", &gate), ("x", &x), ("dy", &dy)])?;
    Ok((gate, x, (recompute == RecomputeInput::Yes).then_some(dy)))
}

fn backward(op: &str, recompute: RecomputeInput) -> String {
    match recompute {
        RecomputeInput::Yes => format!("{op}_backward_recompute"),
        RecomputeInput::No => format!("{op}_backward"),
    }
}

fn name(kind: Gelu) -> &'static str {
    match kind {
        Gelu::Tanh => "gelu_tanh",
        Gelu::Erf => "gelu_erf",
    }
}

pub(crate) fn gelu(x: &Tensor, kind: Gelu) -> Result<Tensor> {
    let y = empty_like(x)?;
    run(name(kind), &[("x", x), ("y", &y)])?;
    Ok(y)
}

pub(crate) fn gelu_backward(
    x: Tensor,
    dy: Tensor,
    kind: Gelu,
    recompute: RecomputeInput,
) -> Result<(Tensor, Option<Tensor>)> {
    run(&backward(name(kind), recompute), &[("x", &x), ("dy", &dy)])?;
    Ok((x, (recompute == RecomputeInput::Yes).then_some(dy)))
}

pub(crate) fn add_in_place(x: &Tensor, y: &Tensor) -> Result<()> {
    run("add_in_place", &[("x", x), ("y", y)])
}

pub(crate) fn fill_zero(t: &Tensor) -> Result<()> {
    run("fill_zero", &[("t", t)])
}
