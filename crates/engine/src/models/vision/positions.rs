//! The rotary table and the interpolated positions of the vision encoder, computed on the host for
//! one micro-batch.

use super::config::{ROPE_BASE, TableReading, VisionConfig};
use crate::nn::{HostTable, inverse_frequencies};
use batch::merge_block_order;

impl VisionConfig {
    /// Row and column of each patch of a frame of `h` by `w` patches.
    fn patches(&self, h: u32, w: u32) -> impl Iterator<Item = (u32, u32)> {
        merge_block_order([h, w], self.spatial_merge_size as u32, self.square() as u32)
    }
}

/// 2-D rotary angles of the vision encoder: `Dh / 4` for the row, then `Dh / 4` for the column;
/// positions restart in each frame.
pub(super) fn vision_table(config: &VisionConfig, grids: &[[u32; 3]]) -> HostTable {
    let head_dim = config.hidden_size / config.num_heads;
    let frequencies = inverse_frequencies(ROPE_BASE, head_dim / 2);
    let mut table = HostTable::with_capacity(0);
    for [t, h, w] in grids {
        for _ in 0..*t {
            for (row, column) in config.patches(*h, *w) {
                for position in [row, column] {
                    for frequency in &frequencies {
                        table.push(frequency * position as f32);
                    }
                }
            }
        }
    }
    table
}

/// The rows of the learned position table that each patch reads, and their weights: `[R, 4]` each,
/// those that surround it, or one row and zeros. The table has `num_rows` rows, the first of which
/// is that of the class token if there is one.
pub(super) fn interpolated_positions(
    config: &VisionConfig,
    num_rows: usize,
    grids: &[[u32; 3]],
) -> (Vec<u32>, Vec<f32>) {
    let class_token = config.parts.extra_rows();
    let side = (num_rows as u32 - class_token).isqrt();
    let nearest = config.parts.table_reading == TableReading::Nearest;
    let tap = |i: u32, n: u32| -> (u32, u32, f32) {
        if nearest {
            let row = (u64::from(i) * u64::from(side) / u64::from(n)) as u32;
            return (row, row, 0.0);
        }
        let at = if n > 1 { i as f32 * ((side - 1) as f32 / (n - 1) as f32) } else { 0.0 };
        let low = (at as u32).min(side - 1);
        (low, (low + 1).min(side - 1), at - low as f32)
    };
    let (mut index, mut weight) = (Vec::new(), Vec::new());
    for [t, h, w] in grids {
        for _ in 0..*t {
            if class_token > 0 {
                index.extend([0; 4]);
                weight.extend([1.0, 0.0, 0.0, 0.0]);
            }
            for (row, column) in config.patches(*h, *w) {
                let (top, bottom, down) = tap(row, *h);
                let (left, right, across) = tap(column, *w);
                let taps = [(top, left), (top, right), (bottom, left), (bottom, right)];
                index.extend(taps.map(|(row, column)| class_token + row * side + column));
                weight.extend([
                    (1.0 - down) * (1.0 - across),
                    (1.0 - down) * across,
                    down * (1.0 - across),
                    down * across,
                ]);
            }
        }
    }
    (index, weight)
}

#[cfg(test)]
mod tests {
    use super::super::config::VisionParts;
    use super::*;

    #[test]
    fn patches_come_in_blocks_that_merge_into_one_token() {
        let order: Vec<_> = merge_block_order([4, 4], 2, 2).collect();
        assert_eq!(order[..4], [(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!(order[4], (0, 2));
        assert_eq!(order[8], (2, 0));
        let rows: Vec<_> = merge_block_order([4, 8], 4, 4).collect();
        assert_eq!(rows[..5], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]);
        let squares: Vec<_> = merge_block_order([4, 8], 4, 2).collect();
        assert_eq!(squares[..16], order);
        assert_eq!(squares[16], (0, 4));
    }

    #[test]
    fn the_nearest_row_of_the_table_is_the_share_of_the_grid_rounded_down() {
        let mut config = vision();
        config.parts.table_reading = TableReading::Nearest;
        let (index, weight) = interpolated_positions(&config, 9, &[[1, 2, 4]]);
        let rows: Vec<u32> = index.chunks(4).map(|taps| taps[0]).collect();
        // columns 0, 0, 1, 2 of 3, rows 0 and 1
        assert_eq!(rows, [0, 0, 3, 3, 1, 2, 4, 5]);
        assert!(weight.chunks(4).all(|taps| taps == [1.0, 0.0, 0.0, 0.0]));
    }

    fn vision() -> VisionConfig {
        VisionConfig {
            depth: 1,
            hidden_size: 16,
            intermediate_size: 1,
            num_heads: 2,
            in_channels: 3,
            patch_size: 16,
            temporal_patch_size: 2,
            spatial_merge_size: 2,
            out_hidden_size: 1,
            image_token_id: 0,
            parts: VisionParts::QWEN,
        }
    }

    #[test]
    fn a_grid_of_the_tables_own_size_reads_the_table_itself() {
        let (index, weight) = interpolated_positions(&vision(), 2304, &[[1, 48, 48]]);
        for (patch, (row, column)) in merge_block_order([48, 48], 2, 2).enumerate() {
            let value: f32 =
                (0..4).map(|tap| index[patch * 4 + tap] as f32 * weight[patch * 4 + tap]).sum();
            assert!((value - (row * 48 + column) as f32).abs() < 1e-2, "{row} {column} {value}");
        }
    }

    #[test]
    fn weights_sum_to_one_and_frames_repeat() {
        let (index, weight) = interpolated_positions(&vision(), 2304, &[[2, 4, 6]]);
        assert!(weight.chunks(4).all(|taps| (taps.iter().sum::<f32>() - 1.0).abs() < 1e-6));
        assert_eq!(index[..4 * 24], index[4 * 24..]);
        let table = vision_table(&vision(), &[[2, 4, 6]]);
        assert_eq!(table.cos.len(), 48 * 4);
        assert_eq!(table.cos[..24 * 4], table.cos[24 * 4..]);
    }
}
