use super::launch::{Launch, address, vectors};
use crate::nf4::{CODES, MAP};
use candle_core::{Result, Tensor};

const THREADS: u32 = 256;
/// Number of elements of a thread, as in `nf4.cu`.
const SHARE: usize = 8;

/// The `Tables` of `nf4.cu`.
fn tables() -> Vec<u64> {
    let values: Vec<u32> = MAP.iter().chain(&CODES).map(|value| value.to_bits()).collect();
    values.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32).collect()
}

/// Writes the elements of `parts`, which are codes, scales and ranges, to `y`.
pub(crate) fn nf4_dequantize(parts: [&Tensor; 3], offset: f32, y: &Tensor) -> Result<()> {
    let op = "nf4_dequantize";
    let n = y.elem_count();
    let aligned = vectors(0, &[parts[0], y])?;
    let kernel = if aligned { op } else { "nf4_dequantize_single" };
    let mut launch = Launch::new(kernel, y.dtype())
        .grid(n.div_ceil(SHARE * THREADS as usize))
        .threads(THREADS)
        .words(tables());
    for (name, part) in ["codes", "scales", "ranges"].into_iter().zip(parts) {
        launch = launch.address(address(op, name, part)?);
    }
    launch.float(offset).address(address(op, "y", y)?).long(n).run(y)
}
