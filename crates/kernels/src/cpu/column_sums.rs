//! Sums over the rows of a matrix. Each column is one chain: its elements are added in the order of
//! the rows, starting from the previous sum. So the bits depend neither on the number of threads nor
//! on whether the rows come in one call or in several.

use super as cpu;
use super::blocks::Values;
use candle_core::{Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Minimum number of columns of a task: a cache line.
const MIN_COLUMNS: usize = 16;

/// Adds `num_rows` rows to `sums [D]` (`f32`), unless that is `None`. Calls `add(row, elements, part)`
/// on all threads for parts of the columns: `part` holds their sums, and `elements` are those of the
/// row in these columns, in a matrix `[num_rows, D]`. The rows of a part come in order.
pub(crate) fn add_by_columns(
    op: &'static str,
    name: &'static str,
    sums: Option<&Tensor>,
    num_rows: usize,
    add: impl Fn(usize, Range<usize>, &mut [f32]) + Sync,
) -> Result<()> {
    let Some(sums) = sums else { return Ok(()) };
    cpu::write(op, name, sums, |sums: &mut [f32]| {
        let d = sums.len();
        let width = d.div_ceil(rayon::current_num_threads()).max(1);
        let width = width.next_multiple_of(MIN_COLUMNS);
        sums.par_chunks_mut(width).enumerate().for_each(|(index, part)| {
            for row in 0..num_rows {
                let start = row * d + index * width;
                add(row, start..start + part.len(), part);
            }
        });
    })
}

/// Adds the rows of a matrix, `[N, D]`, to `sums [D]` unless that is `None`.
pub(crate) fn add_rows(
    op: &'static str,
    name: &'static str,
    sums: Option<&Tensor>,
    rows: Values<'_>,
) -> Result<()> {
    let num_rows = rows.len().checked_div(sums.map_or(0, Tensor::elem_count)).unwrap_or(0);
    add_by_columns(op, name, sums, num_rows, |_, elements, sums| {
        cpu::add(&rows.view(elements), sums);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random;
    use candle_core::{DType, Device};

    #[test]
    fn sums_are_one_chain_in_one_call_and_in_several() -> Result<()> {
        for (n, d) in [(0, 3), (2, 0), (1, 1), (40, 15), (70, 16), (33, 200)] {
            for dtype in [DType::F32, DType::BF16] {
                let x = random(1, &[n.max(1), d]).to_device(&Device::Cpu)?.to_dtype(dtype)?;
                let x = x.narrow(0, 0, n)?.contiguous()?;
                let mut chain = vec![0.5f32; d];
                for row in x.to_dtype(DType::F32)?.to_vec2::<f32>()? {
                    row.iter().zip(&mut chain).for_each(|(x, sum)| *sum += x);
                }
                for parts in [vec![n], vec![n / 3, n - n / 3]] {
                    let sums = Tensor::full(0.5f32, d, &Device::Cpu)?;
                    let mut first = 0;
                    for rows in parts {
                        let part = x.narrow(0, first, rows)?;
                        first += rows;
                        let part = cpu::read("test", "x", &part)?;
                        add_rows("test", "sums", Some(&sums), part.values()?)?;
                    }
                    assert_eq!(sums.to_vec1::<f32>()?, chain, "{n} {d} {dtype:?}");
                }
            }
        }
        Ok(())
    }
}
