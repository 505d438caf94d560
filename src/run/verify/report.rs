//! The result of a verification, also as text.

use serde::Serialize;
use std::fmt;

/// The result of [`verify`](super::verify).
#[derive(Debug, Clone, Serialize)]
pub struct VerifyReport {
    pub passed: bool,
    pub rows: usize,
    /// Number of rejected rows before the last one.
    pub rejected: usize,
    pub tokens: usize,
    /// Number of supervised targets of the rows.
    pub targets: usize,
    /// Number of images and videos of the rows.
    pub media: usize,
    pub precision: &'static str,
    pub device: String,
    /// Layouts; the first one is the reference.
    pub layouts: Vec<LayoutReport>,
    /// Stages of the model, in the order of forward.
    pub stages: Vec<StageReport>,
    /// Checks, in the order in which they ran.
    pub checks: Vec<Check>,
}

#[derive(Debug, Clone, Serialize)]
pub struct LayoutReport {
    pub name: String,
    pub micro_batches: usize,
    /// Number of tokens that the model computes, padding included.
    pub tokens: usize,
    /// Mean loss.
    pub loss: f64,
    /// Difference from the loss of the reference, relative to it, or to 1 if it is below 1.
    pub difference: f64,
    /// The largest difference of the mean loss of a row, relative in the same way.
    pub row_difference: f64,
    /// The row with this difference.
    pub row: String,
    /// Bound of both differences.
    pub bound: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct StageReport {
    pub name: String,
    /// Component that the stage belongs to.
    pub component: &'static str,
    /// Number of trained tensors.
    pub trained: usize,
    /// Number of frozen tensors.
    pub frozen: usize,
    /// Norm of the gradient in the reference.
    pub norm: f64,
    /// Differences in each layout but the reference.
    pub differences: Vec<Difference>,
    pub bound: f64,
    /// The tensor with the largest difference relative to its norm.
    pub worst_tensor: String,
    pub worst_difference: f64,
}

/// The difference of the gradient of a stage from that of the reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Difference {
    /// Norm of the difference, relative to the norm of the reference.
    pub relative: f64,
    /// 1 minus the cosine of the angle between the two.
    pub one_minus_cosine: f64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: String,
    /// Whether it holds.
    pub outcome: CheckOutcome,
    /// What was compared, the first problem, or the reason why it was skipped.
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckOutcome {
    Passed,
    Failed,
    /// The rows or the config do not have what the check needs.
    Skipped,
}

impl Check {
    /// Creates a failed check if `problem` is set, otherwise a passed one.
    pub(super) fn of(
        name: impl Into<String>,
        problem: Option<String>,
        detail: impl FnOnce() -> String,
    ) -> Self {
        let name = name.into();
        match problem {
            Some(detail) => Self { name, outcome: CheckOutcome::Failed, detail },
            None => Self { name, outcome: CheckOutcome::Passed, detail: detail() },
        }
    }

    /// A check that cannot be made.
    pub(super) fn skipped(name: &str, reason: &str) -> Self {
        Self { name: name.to_owned(), outcome: CheckOutcome::Skipped, detail: reason.to_owned() }
    }
}

impl VerifyReport {
    /// Number of checks with this outcome.
    pub fn count(&self, outcome: CheckOutcome) -> usize {
        self.checks.iter().filter(|check| check.outcome == outcome).count()
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, rejected, tokens, targets, media, precision, device, .. } = self;
        writeln!(
            f,
            "{rows} rows ({rejected} rejected), {tokens} tokens, {targets} targets, {media} images \
             and videos; {precision} on {device}\n"
        )?;
        self.losses(f)?;
        self.gradients(f)?;
        for check in &self.checks {
            let outcome = match check.outcome {
                CheckOutcome::Passed => "ok",
                CheckOutcome::Failed => "FAILED",
                CheckOutcome::Skipped => "skipped",
            };
            writeln!(f, "{outcome:8}{}: {}", check.name, check.detail)?;
        }
        let [passed, failed] =
            [CheckOutcome::Passed, CheckOutcome::Failed].map(|of| self.count(of));
        match failed {
            0 => write!(f, "\npassed: {passed} checks"),
            _ => write!(f, "\nfailed: {failed} of {} checks", passed + failed),
        }
    }
}

impl VerifyReport {
    fn losses(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:12}{:>14}{:>9}{:>12}{:>10}{:>10}{:>10}  worst row",
            "layout", "micro-batches", "tokens", "loss", "off by", "row", "bound"
        )?;
        for layout in &self.layouts {
            write!(
                f,
                "{:12}{:>14}{:>9}{:>12.6}{:>10.1e}{:>10.1e}{:>10.1e}",
                layout.name,
                layout.micro_batches,
                layout.tokens,
                layout.loss,
                layout.difference,
                layout.row_difference,
                layout.bound
            )?;
            match layout.row.as_str() {
                "" => writeln!(f)?,
                row => writeln!(f, "  {row}")?,
            }
        }
        writeln!(f)
    }

    /// One line a stage: the difference of its gradient in each layout.
    fn gradients(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.stages.iter().map(|stage| stage.name.len()).max().unwrap_or(0).max(8) + 1;
        write!(f, "{:width$}{:>10}", "gradient", "norm")?;
        for layout in self.layouts.iter().skip(1) {
            write!(f, "{:>11}", layout.name)?;
        }
        writeln!(f, "{:>10}{:>10}  worst tensor", "bound", "1-cos")?;
        for stage in &self.stages {
            if stage.trained == 0 {
                writeln!(f, "{:width$}{:>10}", stage.name, "frozen")?;
                continue;
            }
            write!(f, "{:width$}{:>10.2e}", stage.name, stage.norm)?;
            for difference in &stage.differences {
                write!(f, "{:>11.1e}", difference.relative)?;
            }
            let cosines = stage.differences.iter().map(|difference| difference.one_minus_cosine);
            let cosine = cosines.fold(0.0, f64::max);
            // without the name of the stage, and PEFT's prefix before it
            let tensor = stage.worst_tensor.split_once(&stage.name).map(|(_, tensor)| tensor);
            let tensor = tensor.unwrap_or(&stage.worst_tensor).trim_start_matches('.');
            let worst = stage.worst_difference;
            writeln!(f, "{:>10.1e}{cosine:>10.1e}  {tensor} {worst:.1e}", stage.bound)?;
        }
        writeln!(f)
    }
}
