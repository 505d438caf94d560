//! `trainer why`: the rows of a step, with their losses.

use super::failure::{Exit, Failure};
use super::terminal::stdout;
use crate::train::StepSamples;
use clap::Args;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// Arguments of `why`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer why runs/quickstart --step 20")]
pub(super) struct WhyArgs {
    /// Folder of a run: its `output_dir`
    run: PathBuf,
    /// Optimizer step, from 1
    #[arg(long)]
    step: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Prints the rows of a step, those with the highest losses first.
pub(super) fn run(args: &WhyArgs) -> anyhow::Result<()> {
    let step = args.step;
    let found = find(&args.run.join("samples.jsonl"), |line| {
        serde_json::from_str::<StepSamples>(line).ok().filter(|samples| samples.step == step)
    })?;
    let Some(samples) = found else {
        let message = format!("`{}` has no step {step}", args.run.join("samples.jsonl").display());
        let hint = "the steps of a run are counted from 1; metrics.jsonl has the last one";
        return Err(Failure::new(Exit::Usage, message).hint(hint).into());
    };
    let metrics = find(&args.run.join("metrics.jsonl"), |line| {
        let row: Value = serde_json::from_str(line).ok()?;
        (row["step"] == step).then_some(row)
    })?;
    let mut out = stdout();
    if args.json {
        let both = serde_json::json!({ "step": step, "metrics": metrics, "samples": samples });
        writeln!(out, "{both}")?;
        return Ok(());
    }
    let number = |key: &str| {
        let value = metrics.as_ref().and_then(|row| row[key].as_f64());
        value.map_or_else(|| "not finite".to_owned(), |value| format!("{value:.4}"))
    };
    let skipped = metrics.as_ref().is_some_and(|row| row["skipped"] == true);
    writeln!(
        out,
        "step {step}: loss {}, grad_norm {}, {} samples{}\n",
        number("loss"),
        number("grad_norm"),
        samples.rows.len(),
        if skipped { ", skipped" } else { "" }
    )?;
    show_samples(&samples, &mut out)?;
    Ok(())
}

/// Prints the rows of a step, those with the highest losses first.
pub(super) fn show_samples(samples: &StepSamples, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{:>12}  {:>7}  row", "loss", "targets")?;
    let order = samples.worst(usize::MAX);
    let without = (0..samples.rows.len()).filter(|index| samples.num_target_tokens[*index] == 0);
    for index in order.into_iter().chain(without) {
        let targets = samples.num_target_tokens[index];
        let loss = match samples.loss[index] {
            Some(loss) => format!("{loss:.4}"),
            None if targets == 0 => "-".to_owned(),
            None => "not finite".to_owned(),
        };
        writeln!(out, "{loss:>12}  {targets:>7}  {}", samples.rows[index])?;
    }
    Ok(())
}

/// The first line of a file for which `wanted` returns a value.
fn find<T>(path: &Path, wanted: impl Fn(&str) -> Option<T>) -> anyhow::Result<Option<T>> {
    let unreadable = |error: io::Error| {
        let hint = "pass the `output_dir` of a run; with `log.samples: false` a run does not write \
                    samples.jsonl";
        Failure::new(Exit::Usage, format!("cannot read `{}`: {error}", path.display())).hint(hint)
    };
    for line in BufReader::new(crate::files::open(path).map_err(unreadable)?).lines() {
        if let Some(found) = wanted(&line.map_err(unreadable)?) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}
