//! `trainer sft --replay-step`: trains one step of a run again.

use super::args::ConfigArgs;
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::stdout;
use super::why::show_samples;
use crate::config::RunConfig;
use crate::run::{Replay, StageNorm, replay};
use std::io::Write as _;

/// Prints loss and gradient norm of the step, of its stages, and the losses of its rows.
pub(super) fn run(
    args: &ConfigArgs,
    config: &RunConfig,
    step: u64,
    logging: &Logging,
) -> anyhow::Result<()> {
    let done = replay(config, step, &SetupBars(logging)).map_err(|error| args.located(error))?;
    let Replay { from_step, metrics, samples, stages } = done;
    let out = &mut stdout();
    let skipped = if metrics.skipped { ", not finite" } else { "" };
    writeln!(
        out,
        "step {step}, from the checkpoint of step {from_step}: loss {}, grad_norm {}, lr {:.3e}{skipped}\n",
        metrics.loss, metrics.grad_norm, metrics.lr
    )?;
    writeln!(out, "{:>12}  stage", "grad_norm")?;
    for StageNorm { name, grad_norm } in stages {
        writeln!(out, "{grad_norm:>12.4e}  {name}")?;
    }
    writeln!(out)?;
    show_samples(&samples, out)?;
    Ok(())
}
