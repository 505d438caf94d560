//! The report as text.

use super::report::{Outcome, Report};
use std::fmt;

impl fmt::Display for Report {
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
                Outcome::Passed => "ok",
                Outcome::Failed => "FAILED",
                Outcome::Skipped => "skipped",
            };
            writeln!(f, "{outcome:8}{}: {}", check.name, check.detail)?;
        }
        let [passed, failed] = [Outcome::Passed, Outcome::Failed].map(|of| self.count(of));
        match failed {
            0 => write!(f, "\npassed: {passed} checks"),
            _ => write!(f, "\nfailed: {failed} of {} checks", passed + failed),
        }
    }
}

impl Report {
    fn losses(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:12}{:>14}{:>9}{:>12}{:>10}{:>10}{:>10}  {}",
            "layout", "micro-batches", "tokens", "loss", "off by", "row", "bound", "worst row"
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
        writeln!(f, "{:>10}{:>10}  {}", "bound", "1-cos", "worst tensor")?;
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
