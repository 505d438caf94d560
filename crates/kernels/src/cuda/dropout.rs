use super::launch::{Launch, address, empty, vectors};
use super::pointwise::THREADS;
use crate::DropoutMask;
use candle_core::{D, DType, Result, Tensor};

/// Launches `kernel` with `x [N, K]` and the destination `y`.
fn run(kernel: &str, x: &Tensor, mask: DropoutMask, y: &Tensor) -> Result<()> {
    let (n, width) = (x.elem_count(), x.dim(D::Minus1)?);
    if n == 0 {
        return Ok(());
    }
    let (name, elements) = match (vectors(width, &[x, y])?, x.dtype()) {
        (false, _) => (format!("{kernel}_single"), 1),
        (true, DType::BF16) => (kernel.to_owned(), 8),
        (true, _) => (kernel.to_owned(), 4),
    };
    Launch::new(&name, x.dtype())
        .grid(n.div_ceil(elements * THREADS as usize))
        .threads(THREADS)
        .address(address(kernel, "x", x)?)
        .address(address(kernel, "y", y)?)
        .int(width)
        .long(n)
        .long(mask.seed as usize)
        .long(mask.first_row as usize)
        .long(mask.threshold() as usize)
        .float(mask.scale())
        .run(x)
}

pub(crate) fn dropout(x: &Tensor, mask: DropoutMask) -> Result<Tensor> {
    let y = empty(x.shape(), x.dtype(), x)?;
    run("dropout", x, mask, &y)?;
    Ok(y)
}

pub(crate) fn dropout_add(x: &Tensor, mask: DropoutMask, y: &Tensor) -> Result<()> {
    run("dropout_add", x, mask, y)
}
