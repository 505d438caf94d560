//! Rotary tables, computed on the host for one micro-batch.
//!
//! Angles are computed in `f32` like in transformers (frequency times position), so that long
//! positions are rounded in the same way.

use super::config::DecoderConfig;
use candle_core::{Device, Result};
use kernels::RopeTable;

/// Cosine and sine of `[T, R / 2]` angles, row-major; `R` dimensions of a head are rotated.
pub(crate) struct HostTable {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
}

impl HostTable {
    pub(crate) fn with_capacity(angles: usize) -> Self {
        Self { cos: Vec::with_capacity(angles), sin: Vec::with_capacity(angles) }
    }

    pub(crate) fn push(&mut self, angle: f32) {
        let angle = f64::from(angle);
        self.cos.push(angle.cos() as f32);
        self.sin.push(angle.sin() as f32);
    }

    pub(crate) fn upload(self, num_rows: usize, device: &Device) -> Result<RopeTable> {
        let half = self.cos.len() / num_rows.max(1);
        Ok(RopeTable {
            cos: kernels::upload(self.cos, (num_rows, half), device)?, // [T, R / 2]
            sin: kernels::upload(self.sin, (num_rows, half), device)?,
        })
    }
}

/// `1 / theta^(2k / dim)` for `k < dim / 2`.
pub(crate) fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f32> {
    let exponent = |k: usize| (2 * k) as f32 / dim as f32;
    (0..dim / 2).map(|k| (1.0 / theta.powf(f64::from(exponent(k)))) as f32).collect()
}

/// Rotary angles of the decoder for the positions on the axes time, height and width.
pub(crate) fn rope_table(config: &DecoderConfig, position_ids: &[[u32; 3]]) -> HostTable {
    let frequencies = inverse_frequencies(config.rope_theta, config.rotary_dim);
    let axis = |k| config.mrope.map_or(0, |mrope| mrope.axis_of(k));
    let axes: Vec<usize> = (0..frequencies.len()).map(axis).collect();
    let mut table = HostTable::with_capacity(position_ids.len() * frequencies.len());
    for position in position_ids {
        for (frequency, axis) in frequencies.iter().zip(&axes) {
            table.push(frequency * position[*axis] as f32);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::config::{Mrope, MropeLayout};

    #[test]
    fn interleaved_sections_give_time_every_third_frequency_and_the_last_four() {
        let mrope = Mrope { section: [24, 20, 20], layout: MropeLayout::Interleaved };
        let time: Vec<usize> = (0..64).filter(|k| mrope.axis_of(*k) == 0).collect();
        let expected: Vec<usize> = (0..60).step_by(3).chain(60..64).collect();
        assert_eq!(time, expected);
    }

    #[test]
    fn sections_in_blocks_follow_one_another() {
        let mrope = Mrope { section: [16, 24, 24], layout: MropeLayout::Blocks };
        let expected = [vec![0; 16], vec![1; 24], vec![2; 24]].concat();
        assert_eq!((0..64).map(|k| mrope.axis_of(k)).collect::<Vec<_>>(), expected);
    }
}
