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

/// Calls `add(columns, part)` on all threads for ranges that tile the columns of `sums`, `f32`;
/// `part` holds the sums of `columns`. Does nothing if `sums` is `None`.
pub(crate) fn add_by_columns(
    op: &'static str,
    name: &'static str,
    sums: Option<&Tensor>,
    add: impl Fn(Range<usize>, &mut [f32]) + Sync,
) -> Result<()> {
    let Some(sums) = sums else { return Ok(()) };
    cpu::write(op, name, sums, |sums: &mut [f32]| {
        let width = sums.len().div_ceil(rayon::current_num_threads()).max(1);
        let width = width.next_multiple_of(MIN_COLUMNS);
        sums.par_chunks_mut(width).enumerate().for_each(|(index, part)| {
            let start = index * width;
            add(start..start + part.len(), part);
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
    let d = sums.map_or(0, Tensor::elem_count);
    add_by_columns(op, name, sums, |columns, sums| {
        for at in (0..rows.len()).step_by(d) {
            cpu::add(&rows.view(at + columns.start..at + columns.end), sums);
        }
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
