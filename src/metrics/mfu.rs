//! Floating-point operations of a step, by two conventions.
//!
//! *Honest*: what the step's matmuls need, forward and backward: six operations a weight and row
//! (four where a part is frozen but passed through, two where nothing below it is trained), the head
//! for supervised rows only, attention causal inside each sample, the vision tower by its patches.
//! Recomputation does not count. *lmms-engine's*: `6 * (dense + 2 V D)` a token, so that the
//! embedding look-up counts as a matmul, the head for every token, attention as a full square, the
//! vision tower not at all.

/// Sizes that decide the work of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelWork {
    /// Weights of the decoder's projections.
    pub text_params: f64,
    /// `V * D`.
    pub head_params: f64,
    /// Weights of the tower's projections, per patch.
    pub vision_params: f64,
    /// Weights of all mergers, per merged token.
    pub merger_params: f64,
    /// `layers * H * Dh` of the decoder.
    pub text_attention: f64,
    /// `blocks * H * Dh` of the tower.
    pub vision_attention: f64,
}

/// What a step computed on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepSizes {
    /// Real tokens.
    pub tokens: f64,
    /// Supervised targets.
    pub targets: f64,
    /// Patches.
    pub patches: f64,
    /// Merged vision tokens.
    pub merged: f64,
    /// Sum of the squared lengths of the samples.
    pub token_squares: f64,
    /// Sum of the squared patch counts of the frames.
    pub patch_squares: f64,
}

/// Operations a weight and row: 6 trained, 4 frozen but passed through, 2 forward only.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Passes {
    /// Decoder.
    pub text: f64,
    /// Head.
    pub head: f64,
    /// Tower.
    pub vision: f64,
    /// Mergers.
    pub merger: f64,
}

impl ModelWork {
    /// Operations by the honest convention.
    pub fn honest(&self, sizes: &StepSizes, passes: Passes) -> f64 {
        let text = self.text_params * sizes.tokens;
        // Scores and values: 2 * 2 * L^2 / 2 a head dimension forward, twice that backward.
        let attention = self.text_attention * sizes.token_squares;
        let vision =
            self.vision_params * sizes.patches + 2.0 * self.vision_attention * sizes.patch_squares;
        passes.text * (text + attention)
            + passes.head * self.head_params * sizes.targets
            + passes.vision * vision
            + passes.merger * self.merger_params * sizes.merged
    }

    /// Operations by lmms-engine's convention.
    pub fn lmms_engine(&self, sizes: &StepSizes) -> f64 {
        6.0 * (self.text_params + 2.0 * self.head_params) * sizes.tokens
            + 12.0 * self.text_attention * sizes.token_squares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: ModelWork = ModelWork {
        text_params: 100.0,
        head_params: 10.0,
        vision_params: 50.0,
        merger_params: 20.0,
        text_attention: 2.0,
        vision_attention: 1.0,
    };

    #[test]
    fn the_head_counts_supervised_rows_and_the_tower_its_patches() {
        let sizes = StepSizes {
            tokens: 8.0,
            targets: 3.0,
            patches: 16.0,
            merged: 4.0,
            token_squares: 32.0,
            patch_squares: 256.0,
        };
        let all = Passes { text: 6.0, head: 6.0, vision: 6.0, merger: 6.0 };
        let text = 100.0 * 8.0 + 10.0 * 3.0 + 2.0 * 32.0;
        let vision = 50.0 * 16.0 + 2.0 * 256.0;
        assert_eq!(WORK.honest(&sizes, all), 6.0 * (text + vision + 20.0 * 4.0));
        let saved = |frozen| WORK.honest(&sizes, all) - WORK.honest(&sizes, frozen);
        assert_eq!(saved(Passes { vision: 2.0, ..all }), 4.0 * vision);
        assert_eq!(saved(Passes { head: 4.0, ..all }), 2.0 * 10.0 * 3.0);
        assert_eq!(WORK.lmms_engine(&sizes), 6.0 * 120.0 * 8.0 + 12.0 * 2.0 * 32.0);
    }
}
