//! Launches of the kernels in `combine.cu`.

use super::launch::{Launch, address};
use super::pointwise::{ELEMENTS, THREADS};
use crate::stored::Seed;
use candle_core::{DType, Result, Tensor};

pub(crate) fn combine(
    op: &str,
    (a, x): (f32, &Tensor),
    (b, y): (f32, &Tensor),
    seed: Option<Seed>,
) -> Result<()> {
    let kernel = if x.dtype() == DType::BF16 { "combine_bf16" } else { "combine_f32" };
    let Seed { seed: number, first } = seed.unwrap_or_default();
    Launch::new(kernel, y.dtype())
        .grid(y.elem_count().div_ceil(ELEMENTS))
        .threads(THREADS)
        .float(a)
        .address(address(op, "x", x)?)
        .float(b)
        .address(address(op, "y", y)?)
        .long(y.elem_count())
        .flag(seed.is_some())
        .words(vec![u64::from(number) | u64::from(first) << 32])
        .run(y)
}
