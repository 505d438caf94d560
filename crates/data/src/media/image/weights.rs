//! Weights of an antialiased bicubic resize along one axis, computed as torchvision does.

use std::ops::Range;

/// Maximum number of fractional bits of a fixed-point weight.
const MAX_PRECISION: u32 = 22;
/// Half the width of the cubic kernel, in source pixels when the image is not reduced.
const SUPPORT: f64 = 2.0;

/// For each output position, a window of input positions and a weight for each of them.
#[derive(Debug)]
pub(super) struct Weights {
    /// Windows `[output]` of input positions. Neither their starts nor their ends decrease.
    windows: Vec<Range<usize>>,
    /// Boundaries `[output + 1]` of the windows in `quads`.
    firsts: Vec<usize>,
    /// Weights in groups of four, padded with 0 after the end of a window.
    quads: Vec<[i16; 4]>,
    /// Number of fractional bits of the weights: as many as the largest one leaves in 16 bits.
    precision: u32,
}

impl Weights {
    /// Computes the weights that resize `input` positions to `output`; both are at least 1.
    pub(super) fn new(input: usize, output: usize) -> Self {
        let scale = input as f64 / output as f64;
        let stretch = scale.max(1.0);
        let support = SUPPORT * stretch;
        let most = 2 * support.ceil() as usize + 1;
        let (mut windows, mut taps) = (Vec::with_capacity(output), Vec::new());
        let mut largest = 0.0_f64;
        for position in 0..output {
            let center = scale * (position as f64 + 0.5);
            let start = (center - support + 0.5).max(0.0) as usize;
            let end = ((center + support + 0.5) as usize).min(input).min(start + most);
            let first = taps.len();
            let weight = |x| cubic((x as f64 - center + 0.5) * (1.0 / stretch));
            taps.extend((start..end).map(weight));
            let sum: f64 = taps[first..].iter().sum();
            for weight in &mut taps[first..] {
                *weight /= sum;
                largest = largest.max(*weight);
            }
            windows.push(start..end);
        }
        let is_last =
            |bits: &u32| (0.5 + largest * f64::from(2 << bits)) as i32 > i32::from(i16::MAX);
        let precision = (0..MAX_PRECISION).find(is_last).unwrap_or(MAX_PRECISION);
        let (mut firsts, mut quads, mut taps) = (vec![0], Vec::new(), &taps[..]);
        for window in &windows {
            let (own, rest) = taps.split_at(window.len());
            let tap = |weight: Option<&f64>| weight.map_or(0, |w| fixed_point(*w, precision));
            quads.extend(own.chunks(4).map(|own| std::array::from_fn(|i| tap(own.get(i)))));
            firsts.push(quads.len());
            taps = rest;
        }
        Self { windows, firsts, quads, precision }
    }

    /// Returns the number of fractional bits of the weights, at least 1.
    pub(super) fn precision(&self) -> u32 {
        self.precision
    }

    /// Returns the input positions that contribute to an output position.
    pub(super) fn window(&self, position: usize) -> Range<usize> {
        self.windows[position].clone()
    }

    /// Returns the weights of [`Self::window`], padded with 0 to a multiple of four.
    pub(super) fn quads(&self, position: usize) -> &[[i16; 4]] {
        &self.quads[self.firsts[position]..self.firsts[position + 1]]
    }
}

/// Keys' cubic kernel with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    } else {
        0.0
    }
}

/// Converts a weight to fixed point; halves round away from zero.
fn fixed_point(weight: f64, precision: u32) -> i16 {
    (weight * f64::from(1 << precision) + 0.5_f64.copysign(weight)) as i16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The resize passes rely on this when they move from one end of the axis to the other.
    #[test]
    fn windows_advance_and_their_weights_add_up_to_one() {
        for (input, output) in [(1, 1), (1, 7), (5, 3), (1000, 992), (992, 1000), (4000, 31)] {
            let weights = Weights::new(input, output);
            let mut last = 0..0;
            for position in 0..output {
                let window = weights.window(position);
                assert!(window.start >= last.start && window.end >= last.end, "{window:?}");
                assert!(window.start <= last.end && window.start < window.end, "{window:?}");
                assert!(window.end <= input);
                let quads = weights.quads(position).as_flattened();
                assert_eq!(quads.len(), window.len().next_multiple_of(4));
                assert!(quads[window.len()..].iter().all(|weight| *weight == 0));
                let sum: i32 = quads.iter().map(|weight| i32::from(*weight)).sum();
                let off = sum - (1 << weights.precision());
                assert!(off.unsigned_abs() as usize <= window.len(), "off by {off}");
                last = window;
            }
            assert_eq!(last.end, input);
        }
    }
}
