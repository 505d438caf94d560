//! The checks that need more than a comparison of gradients.

use super::derivative::{Derivative, MIN_LOSS, derivatives};
use super::difference::{Measured, differences};
use super::layouts::{LaidOut, Layout, misplaced};
use super::report::{Check, LayoutReport};
use super::subject::Subject;
use super::verification::{Reference, Verification};
use crate::nn::{AdapterTensor, ParamSpec};
use crate::run::RunError;
use candle_core::Tensor;

/// Bound of the difference of a slope of the loss from the gradient, relative.
const SLOPE_BOUND: f64 = 0.01;

impl Verification<'_> {
    pub(super) fn check_losses(
        &mut self,
        name: &str,
        laid_out: &[LaidOut],
        measured: &Measured,
        reference: &Reference,
    ) {
        let relative = |found: f64, expected: f64| {
            let difference = (found - expected).abs() / expected.abs().max(1.0);
            if difference.is_nan() { f64::INFINITY } else { difference }
        };
        let pairs = measured.samples.iter().zip(&reference.measured.samples);
        let of_rows = pairs.map(|(found, expected)| relative(found.mean(), expected.mean()));
        let worst = of_rows.enumerate().max_by(|x, y| x.1.total_cmp(&y.1));
        let (row, row_difference) = worst.unwrap_or_default();
        let line = LayoutReport {
            name: name.to_owned(),
            micro_batches: laid_out.len(),
            tokens: laid_out.iter().map(|of| of.batch.input_ids.len()).sum(),
            loss: measured.loss,
            difference: relative(measured.loss, reference.measured.loss),
            row_difference,
            row: if row_difference > 0.0 { self.rows.labels[row].clone() } else { String::new() },
            bound: reference.loss_bound,
        };
        let counts = self.rows.samples.iter().zip(&measured.samples).zip(&self.rows.labels);
        let miscounted = counts.into_iter().find_map(|((sample, found), label)| {
            let (found, expected) = (found.nll.len(), sample.num_targets());
            (found != expected).then(|| format!("{label}: {found} targets, expected {expected}"))
        });
        let (bound, difference) = (line.bound, line.difference);
        let problem = miscounted.or_else(|| {
            let text =
                |what: &str, off: f64| format!("{what}: off by {off:.1e}, bound {bound:.1e}");
            if difference > bound {
                let what = format!("{:.6} instead of {:.6}", line.loss, reference.measured.loss);
                Some(text(&what, difference))
            } else {
                (row_difference > bound).then(|| text(&line.row, row_difference))
            }
        });
        let targets = self.report.targets;
        let check = format!("{name}: the loss, and that of every row");
        self.report.checks.push(Check::of(check, problem, || format!("{targets} targets")));
        self.report.layouts.push(line);
    }

    pub(super) fn check_places(&mut self, layout: Layout, laid_out: &[LaidOut]) {
        let problem = misplaced(laid_out, &self.rows.samples);
        let problem =
            problem.map(|(sample, problem)| format!("{}: {problem}", self.rows.labels[sample]));
        let check =
            format!("{}: tokens, labels, positions and segments of every row", layout.name());
        let rows = self.rows.samples.len();
        self.report.checks.push(Check::of(check, problem, || format!("{rows} rows")));
    }

    /// Every trained tensor received a finite gradient, and no frozen one has one.
    pub(super) fn check_gradients(
        &mut self,
        subject: &Subject,
        reference: &Reference,
    ) -> Result<(), RunError> {
        let sums = differences(&reference.gradients, &subject.runner)?;
        let (mut trained, mut without, mut unexpected, mut unchecked) = (0, vec![], vec![], 0);
        for (index, spec) in subject.specs.iter().enumerate() {
            let norm = sums[index].map(|sums| sums.reference);
            match (subject.is_trained(index), norm) {
                (true, _) if subject.needs_media(index) && self.report.media == 0 => unchecked += 1,
                (true, Some(norm)) if norm > 0.0 && norm.is_finite() => trained += 1,
                (true, _) => without.push(spec.name.as_str()),
                (false, Some(_)) => unexpected.push(spec.name.as_str()),
                (false, None) => {}
            }
        }
        let list = |what: &str, names: &[&str]| {
            let more = if names.len() > 3 { ", .." } else { "" };
            let first = names.iter().take(3).copied().collect::<Vec<_>>().join(", ");
            (!names.is_empty()).then(|| format!("{} {what}: {first}{more}", names.len()))
        };
        let problem = list("trained tensors without a finite gradient", &without)
            .or_else(|| list("frozen tensors with a gradient", &unexpected));
        let frozen = subject.specs.len() - trained - unchecked;
        let name = "every trained tensor has a gradient, and no frozen one";
        self.report.checks.push(Check::of(name, problem, || {
            let images = if unchecked > 0 {
                format!(", {unchecked} not checked: no row has images")
            } else {
                String::new()
            };
            format!("{trained} trained, {frozen} frozen{images}")
        }));
        Ok(())
    }

    /// The loss changes along the gradient of each component as the gradient says.
    pub(super) fn check_slopes(
        &mut self,
        subject: &Subject,
        gradients: &[Option<Tensor>],
        loss: f64,
    ) -> Result<(), RunError> {
        let name = "gradients are derivatives of the loss, in f32";
        let is_dora = |spec: &ParamSpec| {
            matches!(AdapterTensor::of(&spec.name), Some((AdapterTensor::Magnitude, _)))
        };
        let reason = if subject.specs.iter().any(is_dora) {
            Some("DoRA takes row norms as constants")
        } else if subject.specs.iter().any(ParamSpec::is_experts) {
            Some("the loss jumps where a token changes its experts")
        } else {
            (loss < MIN_LOSS).then_some("the loss is too small for differences in f32")
        };
        if let Some(reason) = reason {
            self.report.checks.push(Check::skipped(name, reason));
            return Ok(());
        }
        tracing::info!("changing the weights along the gradient");
        let num_samples = self.rows.samples.len();
        let (_, laid_out) = &self.others[0];
        let found = derivatives(self.pipeline, subject, gradients, laid_out, (num_samples, loss))?;
        let off = |of: &Derivative| {
            let off = (of.slope / of.norm - 1.0).abs();
            if off.is_nan() { f64::INFINITY } else { off }
        };
        let text = |of: &Derivative| format!("{} off by {:.1e}", of.component, off(of));
        let wrong = found.iter().find(|of| off(of) > SLOPE_BOUND).map(text);
        let problem = wrong.map(|wrong| format!("{wrong}, bound {SLOPE_BOUND}"));
        self.report.checks.push(Check::of(name, problem, || {
            found.iter().map(text).collect::<Vec<_>>().join(", ")
        }));
        Ok(())
    }
}
