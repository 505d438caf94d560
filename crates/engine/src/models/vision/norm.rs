use super::config::VisionKind;
use crate::nn::{Norm, ParamMap, WeightError};

/// Added to the variance or the mean square of every norm of a vision encoder.
pub(super) const EPS: f64 = 1e-6;

pub(super) fn norm(
    params: &ParamMap<'_>,
    name: &str,
    kind: &VisionKind,
) -> Result<Norm, WeightError> {
    match kind {
        VisionKind::Learned { .. } => Norm::layer(params, name, EPS),
        VisionKind::Windowed { .. } => Norm::rms(params, name, EPS),
    }
}
