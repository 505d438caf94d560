use super::launch::{Address, Launch, address, empty, vectors};
use crate::{RecomputeInput, Routing};
use candle_core::{DType, Result, Tensor, bail};

/// Number of tokens of a block of `choose_experts`, one per warp.
const TOKENS: usize = 4;
/// Number of choices that are sorted together, one per thread: `TILE` of the kernels.
const TILE: usize = 1024;
/// Number of threads per block, and of rows or tokens, one per warp.
const THREADS: u32 = 256;
const ROWS: usize = 8;
/// Maximum number of bytes of shared memory without a choice of the GPU.
const SHARED: usize = 48 << 10;

pub(crate) fn route(logits: &Tensor, k: usize) -> Result<Routing> {
    let op = "route";
    let (t, e) = logits.dims2()?;
    let rows = t * k;
    let shared = 4 * TOKENS * (e + 2 * k);
    if shared > SHARED || i32::try_from(rows).is_err() {
        bail!("{op}: {t} tokens with {k} of {e} experts are too many for the kernels");
    }
    let ids = |shape: &[usize]| empty(shape, DType::U32, logits);
    let weights = empty((t, k), DType::F32, logits)?;
    let (experts, order, places) = (ids(&[t, k])?, ids(&[rows])?, ids(&[rows])?);
    let tiles = rows.div_ceil(TILE);
    let (offsets, counts) = (ids(&[e + 1])?, ids(&[tiles, e])?);
    Launch::new("choose_experts", DType::F32)
        .grid(t.div_ceil(TOKENS))
        .threads(32 * TOKENS as u32)
        .shared(shared)
        .address(address(op, "logits", logits)?)
        .address(address(op, "weights", &weights)?)
        .address(address(op, "experts", &experts)?)
        .int(t)
        .int(e)
        .int(k)
        .run(logits)?;
    Launch::new("count_choices", DType::F32)
        .grid(tiles)
        .threads(THREADS)
        .address(address(op, "experts", &experts)?)
        .address(address(op, "counts", &counts)?)
        .int(rows)
        .int(e)
        .run(logits)?;
    Launch::new("start_experts", DType::F32)
        .grid(1)
        .threads(TILE as u32)
        .address(address(op, "counts", &counts)?)
        .address(address(op, "offsets", &offsets)?)
        .int(tiles)
        .int(e)
        .run(logits)?;
    Launch::new("place_choices", DType::F32)
        .grid(tiles)
        .threads(TILE as u32)
        .address(address(op, "experts", &experts)?)
        .address(address(op, "counts", &counts)?)
        .address(address(op, "order", &order)?)
        .address(address(op, "places", &places)?)
        .int(rows)
        .int(e)
        .run(logits)?;
    Ok(Routing { weights, experts, order, places, offsets })
}

pub(crate) fn route_backward(
    routing: &Routing,
    d_weights: &Tensor,
    experts: usize,
) -> Result<Tensor> {
    let op = "route_backward";
    let (t, k) = routing.choices()?;
    let d_logits = empty((t, experts), DType::F32, d_weights)?;
    Launch::new(op, DType::F32)
        .grid(t.div_ceil(ROWS))
        .threads(THREADS)
        .address(address(op, "weights", &routing.weights)?)
        .address(address(op, "experts", &routing.experts)?)
        .address(address(op, "d_weights", d_weights)?)
        .address(address(op, "d_logits", &d_logits)?)
        .int(t)
        .int(experts)
        .int(k)
        .run(d_weights)?;
    Ok(d_logits)
}

/// Name of the version of a kernel for rows of `d` elements of these tensors.
fn kernel(name: &str, d: usize, rows: &[&Tensor]) -> Result<String> {
    Ok(if vectors(d, rows)? { name.to_owned() } else { format!("{name}_single") })
}

pub(crate) fn expert_rows(x: &Tensor, routing: &Routing) -> Result<Tensor> {
    let op = "expert_rows";
    let ((_, k), (_, d), n) = (routing.choices()?, x.dims2()?, routing.order.elem_count());
    let y = empty((n, d), x.dtype(), x)?;
    Launch::new(&kernel(op, d, &[x, &y])?, x.dtype())
        .grid(n.div_ceil(ROWS))
        .threads(THREADS)
        .address(address(op, "x", x)?)
        .address(address(op, "order", &routing.order)?)
        .address(address(op, "y", &y)?)
        .int(n)
        .int(k)
        .int(d)
        .run(x)?;
    Ok(y)
}

/// Returns the sums of `expert_rows_backward` and of `combine`.
pub(crate) fn combine_experts(
    op: &str,
    name: &str,
    rows: &Tensor,
    routing: &Routing,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let ((t, k), (_, d)) = (routing.choices()?, rows.dims2()?);
    let y = empty((t, d), rows.dtype(), rows)?;
    let mut accessed = vec![rows, &y];
    accessed.extend(residual);
    Launch::new(&kernel("combine_experts", d, &accessed)?, rows.dtype())
        .grid(t.div_ceil(ROWS))
        .threads(THREADS)
        .address(address(op, name, rows)?)
        .address(address(op, "places", &routing.places)?)
        .optional(op, "residual", residual)?
        .address(address(op, "y", &y)?)
        .int(t)
        .int(k)
        .int(d)
        .run(rows)?;
    Ok(y)
}

pub(crate) fn expert_swiglu(gate_up: &Tensor, routing: &Routing) -> Result<Tensor> {
    let (op, width) = ("expert_swiglu", gate_up.dim(1)? / 2);
    weighted_swiglu(op, (gate_up, address(op, "gate_up", gate_up)?), width, Some(routing))
}

/// SwiGLU of the rows of `gate`, which begin at `at`: each has `width` values of the gate, then as
/// many of `up`.
pub(super) fn weighted_swiglu(
    op: &str,
    (gate, at): (&Tensor, Address),
    width: usize,
    routing: Option<&Routing>,
) -> Result<Tensor> {
    let n = gate.dim(0)?;
    let y = empty((n, width), gate.dtype(), gate)?;
    Launch::new(&kernel("expert_swiglu", width, &[gate, &y])?, gate.dtype())
        .grid(n.div_ceil(ROWS))
        .threads(THREADS)
        .address(at)
        .optional(op, "weights", routing.map(|routing| &routing.weights))?
        .optional(op, "order", routing.map(|routing| &routing.order))?
        .address(address(op, "y", &y)?)
        .int(n)
        .int(width)
        .run(gate)?;
    Ok(y)
}

pub(crate) fn expert_swiglu_backward(
    gate_up: Tensor,
    routing: &Routing,
    d_activated: Tensor,
    recompute: RecomputeInput,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "expert_swiglu_backward";
    let d_weights = empty(routing.weights.shape(), DType::F32, &gate_up)?;
    let weights = Some((routing, &d_weights));
    let at = address(op, "gate_up", &gate_up)?;
    weighted_swiglu_backward(op, (&gate_up, at), &d_activated, recompute, weights)?;
    Ok((gate_up, d_weights, (recompute == RecomputeInput::Yes).then_some(d_activated)))
}

/// Backward of [`weighted_swiglu`] in place, with the weights and their gradient.
pub(super) fn weighted_swiglu_backward(
    op: &str,
    (gate, at): (&Tensor, Address),
    dy: &Tensor,
    recompute: RecomputeInput,
    weights: Option<(&Routing, &Tensor)>,
) -> Result<()> {
    let (n, width) = dy.dims2()?;
    Launch::new(&kernel("expert_swiglu_backward", width, &[gate, dy])?, gate.dtype())
        .grid(n.div_ceil(ROWS))
        .threads(THREADS)
        .address(at)
        .optional(op, "weights", weights.map(|(routing, _)| &routing.weights))?
        .optional(op, "order", weights.map(|(routing, _)| &routing.order))?
        .address(address(op, "dy", dy)?)
        .optional(op, "d_weights", weights.map(|(_, d_weights)| d_weights))?
        .int(n)
        .int(width)
        .flag(recompute == RecomputeInput::Yes)
        .run(gate)
}
