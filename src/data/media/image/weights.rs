//! Weights of a bicubic resize along one side, as Pillow computes them.

use std::ops::Range;

/// Fraction bits of a weight.
pub(super) const PRECISION_BITS: u32 = 22;
/// Reach of the cubic kernel, in source pixels when not shrinking.
const SUPPORT: f64 = 2.0;

/// For each output position a window of the input, and a weight for each position in it.
#[derive(Debug)]
pub(super) struct Weights {
    /// Input positions of each window; starts and ends do not descend.
    windows: Vec<Range<usize>>,
    /// Where the quads of each window begin; one more for the end of the last.
    firsts: Vec<usize>,
    /// Weights, four by four; those past the end of a window are 0.
    quads: Vec<[i32; 4]>,
}

impl Weights {
    /// For `output` positions from `input`; both at least 1.
    pub(super) fn new(input: usize, output: usize) -> Self {
        let scale = input as f64 / output as f64;
        let stretch = scale.max(1.0);
        let support = SUPPORT * stretch;
        let mut weights =
            Self { windows: Vec::with_capacity(output), firsts: vec![0], quads: Vec::new() };
        let mut taps = Vec::new();
        for position in 0..output {
            let center = (position as f64 + 0.5) * scale;
            let start = (center - support + 0.5).max(0.0) as usize;
            let end = ((center + support + 0.5) as usize).min(input);
            let weight = |x| cubic((x as f64 - center + 0.5) * (1.0 / stretch));
            taps.clear();
            taps.extend((start..end).map(weight));
            let sum: f64 = taps.iter().sum();
            let quad = |taps: &[f64]| {
                let tap = |i| taps.get(i).map_or(0, |weight| fixed_point(weight / sum));
                std::array::from_fn(tap)
            };
            weights.quads.extend(taps.chunks(4).map(quad));
            weights.windows.push(start..end);
            weights.firsts.push(weights.quads.len());
        }
        weights
    }

    /// Input positions that an output position is made of.
    pub(super) fn window(&self, position: usize) -> Range<usize> {
        self.windows[position].clone()
    }

    /// The weights of [`Self::window`], filled up to fours with 0.
    pub(super) fn quads(&self, position: usize) -> &[[i32; 4]] {
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
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// Rounds half away from zero.
fn fixed_point(weight: f64) -> i32 {
    (weight * f64::from(1 << PRECISION_BITS) + 0.5_f64.copysign(weight)) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the passes rely on when they walk from one end to the other.
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
                let off = quads.iter().sum::<i32>() - (1 << PRECISION_BITS);
                assert!(off.unsigned_abs() as usize <= window.len(), "off by {off}");
                last = window;
            }
            assert_eq!(last.end, input);
        }
    }
}
