//! `trainer verify`: computes rows of `data.train` in every layout and compares losses and
//! gradients.

use super::args::ConfigArgs;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::stdout;
use crate::run::verify::{CheckOutcome, RunPipeline, VerifyOptions, VerifyReport, verify};
use clap::Args;
use std::io::Write as _;
use std::num::NonZeroUsize;

/// Arguments of `verify`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer verify --config config.yaml\n  \
    trainer verify --config config.yaml --rows 4 --set model.precision=bf16\n\n\
    The exit code is 0 if all checks pass, and 65 if one fails. docs/verify.md explains the checks.")]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of rows: the first ones in the order of training that are not rejected
    #[arg(long, default_value = "16")]
    rows: NonZeroUsize,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// Prints the report. A failed check is an error.
pub(super) fn run(args: &VerifyArgs, logging: &Logging) -> anyhow::Result<()> {
    let config = args.config.load(logging)?;
    let output_dir = Some(&config.output_dir).filter(|folder| folder.is_dir());
    let options = VerifyOptions {
        rows: args.rows,
        folder: output_dir.cloned().unwrap_or_else(std::env::temp_dir),
        observer: &SetupBars(logging),
    };
    let report =
        verify(&config, &options, &RunPipeline).map_err(|error| args.config.located(error))?;
    if args.json {
        writeln!(stdout(), "{}", serde_json::to_string(&report)?)?;
    } else {
        writeln!(stdout(), "{report}")?;
    }
    verdict(&report)
}

fn verdict(report: &VerifyReport) -> anyhow::Result<()> {
    if report.passed {
        return Ok(());
    }
    let failed = report.count(CheckOutcome::Failed);
    let first = report.checks.iter().find(|check| check.outcome == CheckOutcome::Failed);
    let first = first.map_or("", |check| check.name.as_str());
    let message = format!("{failed} of {} checks failed, first: {first}", report.checks.len());
    Err(Failure::new(Exit::Data, message)
        .hint("docs/verify.md says what a failure of each check means; please report it with the config")
        .into())
}

#[cfg(test)]
mod tests {
    use super::super::error_report::{exit, text};
    use super::*;
    use crate::run::verify::Check;

    #[test]
    fn a_failed_check_ends_with_code_65_and_its_name() {
        let check =
            |name: &str, outcome| Check { name: name.to_owned(), outcome, detail: String::new() };
        let checks = vec![check("a", CheckOutcome::Passed), check("b", CheckOutcome::Failed)];
        let mut report = VerifyReport {
            passed: false,
            rows: 1,
            rejected: 0,
            tokens: 1,
            targets: 1,
            media: 0,
            precision: "f32",
            device: "cpu".to_owned(),
            layouts: Vec::new(),
            stages: Vec::new(),
            checks,
        };
        let error = verdict(&report).unwrap_err();
        assert_eq!(exit(&error), Exit::Data);
        assert!(text(&error).starts_with("error: 1 of 2 checks failed, first: b\nhint: "));
        report.passed = true;
        assert!(verdict(&report).is_ok());
    }
}
