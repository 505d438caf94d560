//! Checks that all trained parameters receive a gradient.

use super::step::StepRunner;
use crate::nn::{AdapterTensor, Inputs};
use crate::tape::Param;

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
/// first backward, and again after the first with images. `squares` are the sums of the squares of
/// each gradient.
pub(super) fn audit(runner: &StepRunner, squares: &[f64], step: u64, has_images: bool) {
    let specs = runner.model.param_specs();
    let needs_media = |param: &Param| {
        let layer = AdapterTensor::of(param.name()).map(|(_, module)| format!("{module}.weight"));
        let name = layer.as_deref().unwrap_or(param.name());
        let spec = specs.iter().find(|spec| spec.name == name);
        spec.is_some_and(|spec| spec.component.inputs == Inputs::Media)
    };
    let trained = runner.optimizer.trained();
    let without = trained.iter().zip(squares).filter(|(_, square)| **square == 0.0);
    let without: Vec<&Param> = without.map(|(param, _)| param).collect();
    let missing: Vec<&str> = without
        .iter()
        .filter(|param| has_images || !needs_media(param))
        .map(|param| param.name())
        .collect();
    let trained = trained.len();
    if missing.is_empty() {
        let received = trained - without.len();
        tracing::info!(step, "{received} of {trained} trained tensors received a gradient");
    } else {
        tracing::warn!(
            step,
            tensors = ?missing,
            "{} of {trained} trained tensors received no gradient",
            missing.len()
        );
    }
    if without.len() > missing.len() {
        tracing::info!(
            step,
            "the gradients of the vision encoder are checked at the first step with images"
        );
    }
}
