//! Rotary tables, computed on the host for one micro-batch.
//!
//! Angles are computed in `f32` like in transformers (frequency times position), so that long
//! positions are rounded in the same way.

use candle_core::{Device, Result};
use kernels::RopeTable;

/// Cosine and sine of `[T, Dh / 2]` angles, row-major.
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
            cos: kernels::upload(self.cos, (num_rows, half), device)?, // [T, Dh / 2]
            sin: kernels::upload(self.sin, (num_rows, half), device)?,
        })
    }
}

/// `1 / theta^(2k / dim)` for `k < dim / 2`.
pub(crate) fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f32> {
    let exponent = |k: usize| (2 * k) as f32 / dim as f32;
    (0..dim / 2).map(|k| (1.0 / theta.powf(f64::from(exponent(k)))) as f32).collect()
}
