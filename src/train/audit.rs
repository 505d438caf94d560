//! Checks that all trained parameters receive a gradient.

use super::step::StepRunner;
use crate::nn::Inputs;

/// The next audit of the gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Audit {
    Due,
    DueWithImages,
    Done,
}

impl Audit {
    /// Returns whether this step must be audited, and records the audit.
    pub(super) fn is_due(&mut self, has_images: bool) -> bool {
        let before = *self;
        if has_images {
            *self = Self::Done;
        } else if before == Self::Due {
            *self = Self::DueWithImages;
        }
        *self != before
    }
}

/// Checks that every trained tensor received a gradient; names those that did not. Runs after the
/// first backward, and again after the first with images.
pub(super) fn audit(runner: &StepRunner, step: u64, has_images: bool) -> candle_core::Result<()> {
    let specs = runner.model.param_specs();
    let needs_media = |index: usize| specs[index].component.inputs == Inputs::Media;
    let without = runner.without_gradient()?;
    let missing: Vec<&str> = without
        .iter()
        .filter(|param| has_images || !needs_media(param.index()))
        .map(|param| param.name())
        .collect();
    let trained = runner.grads().iter().flatten().count();
    if missing.is_empty() {
        let received = trained - without.len();
        tracing::info!(step, "audit: {received} of {trained} trained tensors received a gradient");
    } else {
        tracing::warn!(
            step,
            tensors = ?missing,
            "audit: {} of {trained} trained tensors received no gradient",
            missing.len()
        );
    }
    if without.len() > missing.len() {
        tracing::info!(step, "audit: vision gradients are checked at the first step with images");
    }
    Ok(())
}
