//! Compares gradients with the change of the loss, in f32.
//!
//! Along the gradient `g` of a component, `loss(w + h g) - loss(w - h g) = 2 h |g|^2` up to terms
//! of third order in `h`. Two values of `h` cancel these.

use super::difference::forward;
use super::layouts::LaidOut;
use super::pipeline::Pipeline;
use super::subject::Subject;
use crate::run::RunError;
use candle_core::{Result, Tensor};

/// The change of the loss that the smaller of the two steps aims at; at most a tenth of the loss.
const CHANGE: f64 = 0.01;
/// The minimum loss: the rounding of smaller ones in f32 hides the change.
pub(super) const MIN_LOSS: f64 = 1e-3;

/// The derivative of the loss along the gradient of a component.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Derivative {
    pub(super) component: &'static str,
    /// The norm of the gradient.
    pub(super) norm: f64,
    /// The slope of the loss; the norm, if the gradient is right.
    pub(super) slope: f64,
}

/// The derivatives of all components with a gradient in `gradients`.
pub(super) fn derivatives(
    pipeline: &dyn Pipeline,
    subject: &Subject,
    gradients: &[Option<Tensor>],
    laid_out: &[LaidOut],
    (num_samples, loss): (usize, f64),
) -> std::result::Result<Vec<Derivative>, RunError> {
    let mut components: Vec<&'static str> = Vec::new();
    for spec in &subject.specs {
        if !components.contains(&spec.component.name) {
            components.push(spec.component.name);
        }
    }
    let mut found = Vec::new();
    for component in components {
        let of = |index: &usize| subject.specs[*index].component.name == component;
        let trained: Vec<usize> =
            (0..gradients.len()).filter(of).filter(|index| gradients[*index].is_some()).collect();
        let norm = norm(&trained, gradients)?;
        if norm == 0.0 || !norm.is_finite() {
            continue; // another check reports it
        }
        let step = CHANGE.min(0.1 * loss) / (2.0 * norm);
        let slope = |distance: f64| {
            let at = |distance: f64| -> std::result::Result<f64, RunError> {
                let moved = Moved::along(subject, &trained, gradients, distance / norm)?;
                let losses = forward(pipeline, &subject.runner, laid_out, num_samples);
                moved.back()?;
                Ok(losses?.loss)
            };
            Ok::<_, RunError>((at(distance)? - at(-distance)?) / (2.0 * distance))
        };
        let (wide, narrow) = (slope(2.0 * step)?, slope(step)?);
        found.push(Derivative { component, norm, slope: (4.0 * narrow - wide) / 3.0 });
    }
    Ok(found)
}

fn norm(indexes: &[usize], gradients: &[Option<Tensor>]) -> Result<f64> {
    let mut squares = 0.0;
    for gradient in indexes.iter().filter_map(|index| gradients[*index].as_ref()) {
        squares += crate::ops::sum_of_squares(&gradient.flatten_all()?)?;
    }
    Ok(squares.sqrt())
}

/// Parameters with other values.
struct Moved<'a> {
    subject: &'a Subject,
    before: Vec<(usize, Tensor)>,
}

impl<'a> Moved<'a> {
    /// Adds the gradients, times a factor.
    fn along(
        subject: &'a Subject,
        indexes: &[usize],
        gradients: &[Option<Tensor>],
        factor: f64,
    ) -> Result<Self> {
        let mut before = Vec::new();
        for index in indexes {
            let param = &subject.runner.params[*index];
            let (Some(gradient), tensor) = (&gradients[*index], param.tensor()) else { continue };
            param.set_tensor((&tensor + (gradient * factor)?)?)?;
            before.push((*index, tensor));
        }
        Ok(Self { subject, before })
    }

    fn back(self) -> Result<()> {
        let params = &self.subject.runner.params;
        self.before.into_iter().try_for_each(|(index, tensor)| params[index].set_tensor(tensor))
    }
}
