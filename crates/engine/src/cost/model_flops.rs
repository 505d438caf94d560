//! Floating-point operations of a step, by two conventions.
//!
//! *Model flops*: the operations of the step's matmuls, forward and backward. This is six
//! operations per weight and row, four where a part is frozen but passes a gradient on, two where
//! it and everything before it are frozen. The head counts for supervised rows only, attention is
//! causal inside each sample and counts its windows, the vision encoder counts per patch.
//! Recomputation does not count.
//!
//! *lmms-engine's*: `6 * (dense + 2 V D)` per token. The embedding look-up thus counts as a matmul,
//! the head counts for every token, attention counts as a full square, and the vision encoder does
//! not count.

use kernels::Masking;
use std::num::NonZeroUsize;

/// The rows that a part of a model computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// Patches; attention inside each frame.
    Patches,
    /// Merged vision tokens, without attention.
    VisionTokens,
    /// Tokens; causal attention inside each sample.
    Tokens,
    /// Supervised targets, without attention.
    Targets,
}

/// Sizes of one part of a model that decide its operations.
#[derive(Debug, Clone, PartialEq)]
pub struct PartWork {
    /// Indexes of its parameters.
    pub params: Vec<usize>,
    /// Number of weights that a row is multiplied with.
    pub weights: f64,
    /// `layers * H * Dh` of layers without a window, twice that where attention is not causal.
    pub attention: f64,
    /// For each layer with a window: its tokens, and `H * Dh`.
    pub windows: Vec<(NonZeroUsize, f64)>,
    pub rows: RowKind,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepSizes {
    /// Tokens without padding.
    pub tokens: f64,
    /// Supervised targets.
    pub targets: f64,
    pub patches: f64,
    /// Merged vision tokens.
    pub merged: f64,
    /// Length of each sample.
    pub samples: Vec<usize>,
    /// Sum of the squared patch counts of the frames.
    pub patch_squares: f64,
}

impl StepSizes {
    fn token_squares(&self) -> f64 {
        self.samples.iter().map(|length| (*length as f64).powi(2)).sum()
    }

    /// Number of scores of a head in a layer with a window.
    fn scores_of(&self, window: NonZeroUsize) -> f64 {
        self.samples.iter().map(|length| Masking::Window(window).num_scores(*length)).sum()
    }

    /// Number of rows, and the sum of the squares of their segments.
    fn rows(&self, rows: RowKind) -> (f64, f64) {
        match rows {
            RowKind::Patches => (self.patches, self.patch_squares),
            RowKind::VisionTokens => (self.merged, 0.0),
            RowKind::Tokens => (self.tokens, self.token_squares()),
            RowKind::Targets => (self.targets, 0.0),
        }
    }
}

/// The parts of a model in the order of the forward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelWork(pub Vec<PartWork>);

impl ModelWork {
    /// Operations per weight and row of each part: 6 trained, 4 frozen with a trained part before
    /// it, 2 forward only.
    pub fn passes(&self, is_trained: impl Fn(usize) -> bool) -> Vec<f64> {
        let mut below = false;
        let passes = self.0.iter().map(|part| {
            let trained = part.params.iter().any(|index| is_trained(*index));
            let passes = match (trained, below) {
                (true, _) => 6.0,
                (false, true) => 4.0,
                (false, false) => 2.0,
            };
            below |= trained;
            passes
        });
        passes.collect()
    }

    /// Model flops of a step, with the [`Self::passes`] of each part.
    pub fn model_flops(&self, sizes: &StepSizes, passes: &[f64]) -> f64 {
        let part = |(part, passes): (&PartWork, &f64)| {
            let (rows, squares) = sizes.rows(part.rows);
            // Causal scores and values: 2 * 2 * L^2 / 2 per head dimension forward, twice that
            // backward.
            let of_window = |(window, width): &(_, f64)| 2.0 * width * sizes.scores_of(*window);
            let windows: f64 = part.windows.iter().map(of_window).sum();
            passes * (part.weights * rows + part.attention * squares + windows)
        };
        self.0.iter().zip(passes).map(part).sum()
    }

    /// Operations of a step by lmms-engine's convention.
    pub fn lmms_engine(&self, sizes: &StepSizes) -> f64 {
        let part = |part: &PartWork| match part.rows {
            RowKind::Tokens => {
                let windows: f64 = part.windows.iter().map(|(_, width)| width).sum();
                let attention = part.attention + windows;
                6.0 * part.weights * sizes.tokens + 12.0 * attention * sizes.token_squares()
            }
            RowKind::Targets => 12.0 * part.weights * sizes.tokens,
            RowKind::Patches | RowKind::VisionTokens => 0.0,
        };
        self.0.iter().map(part).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_counts_supervised_rows_and_the_vision_encoder_its_patches() {
        let part = |index, weights, attention, rows| PartWork {
            params: vec![index],
            weights,
            attention,
            windows: Vec::new(),
            rows,
        };
        let work = ModelWork(vec![
            part(0, 50.0, 2.0, RowKind::Patches),
            part(1, 20.0, 0.0, RowKind::VisionTokens),
            part(2, 100.0, 2.0, RowKind::Tokens),
            part(3, 10.0, 0.0, RowKind::Targets),
        ]);
        let sizes = StepSizes {
            tokens: 8.0,
            targets: 3.0,
            patches: 16.0,
            merged: 4.0,
            samples: vec![4, 4],
            patch_squares: 256.0,
        };
        let text = 100.0 * 8.0 + 10.0 * 3.0 + 2.0 * 32.0;
        let vision = 50.0 * 16.0 + 2.0 * 256.0;
        let flops = |trained: &[usize]| {
            work.model_flops(&sizes, &work.passes(|index| trained.contains(&index)))
        };
        let all = flops(&[0, 1, 2, 3]);
        assert_eq!(all, 6.0 * (text + vision + 20.0 * 4.0));
        assert_eq!(all - flops(&[1, 2, 3]), 4.0 * vision);
        assert_eq!(all - flops(&[0, 1, 2]), 2.0 * 10.0 * 3.0);
        assert_eq!(work.lmms_engine(&sizes), 6.0 * 120.0 * 8.0 + 12.0 * 2.0 * 32.0);
        // A window of four tokens is causal in these samples. One of a single token leaves 3.5
        // scores of each.
        let mut windows = work.clone();
        windows.0[2].attention = 0.0;
        for (window, text) in [(4, text), (1, text - 2.0 * 32.0 + 2.0 * 2.0 * 7.0)] {
            windows.0[2].windows = vec![(NonZeroUsize::new(window).unwrap(), 2.0)];
            let flops = windows.model_flops(&sizes, &windows.passes(|_| true));
            assert_eq!(flops, 6.0 * (text + vision + 20.0 * 4.0));
            assert_eq!(windows.lmms_engine(&sizes), work.lmms_engine(&sizes));
        }
    }
}
