//! `trainer bench`: how fast this machine runs the ops, a step, and the data side.

mod data;
mod ops;
mod step;

use super::ConfigArgs;
use super::report::{Exit, Failure};
use super::stdout::stdout;
use crate::ops::simd_level;
use clap::Args;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
#[command(after_help = "Example:\n  trainer bench --ops\n  \
    trainer bench --step --config configs/quickstart.yaml --steps 20\n  \
    trainer bench --data --config configs/quickstart.yaml --json")]
pub(super) struct BenchArgs {
    /// Each op at a few sizes, against this machine's measured peaks (the default)
    #[arg(long)]
    ops: bool,
    /// Whole optimizer steps of a config: tokens/s, MFU, data wait, memory
    #[arg(long)]
    step: bool,
    /// Reading, encoding and packing the rows of a config: rows/s, MPix/s, tokens/s
    #[arg(long)]
    data: bool,
    /// YAML config, for `--step` and `--data`
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Change a key, for example `--set data.packing=false`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Steps to time, after one that is not
    #[arg(long, default_value_t = 10)]
    steps: u64,
    /// Only ops whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// One JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

/// Prints tables to stdout.
pub(super) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let config = || -> anyhow::Result<_> {
        let file = args.config.clone().ok_or_else(|| {
            Failure::new(Exit::Usage, "`--step` and `--data` need a config")
                .hint("add `--config configs/quickstart.yaml`, or use `--ops`")
        })?;
        ConfigArgs { config: file, overrides: args.overrides.clone() }.load()
    };
    let mut table = Table { json: args.json };
    if args.ops || !(args.step || args.data) {
        table.text("simd", "level", &simd_level()?.to_string())?;
        ops::run(&args.filter, &mut table)?;
    }
    if args.step {
        step::run(&config()?, args.steps, &mut table)?;
    }
    if args.data {
        data::run(&config()?, &mut table)?;
    }
    Ok(())
}

/// Rows of named figures, aligned for people or as JSON.
struct Table {
    json: bool,
}

impl Table {
    fn text(&mut self, name: &str, key: &str, value: &str) -> anyhow::Result<()> {
        let mut out = stdout();
        if self.json {
            writeln!(out, "{}", serde_json::json!({ "name": name, key: value }))?;
        } else {
            writeln!(out, "{name:44}  {key} {value}")?;
        }
        Ok(())
    }

    fn row(&mut self, name: &str, figures: &[(&str, f64)]) -> anyhow::Result<()> {
        let mut out = stdout();
        if self.json {
            let mut object = serde_json::Map::new();
            object.insert("name".to_owned(), name.into());
            for (key, value) in figures {
                object.insert((*key).to_owned(), (*value).into());
            }
            writeln!(out, "{}", serde_json::Value::Object(object))?;
        } else {
            write!(out, "{name:44}")?;
            for (key, value) in figures {
                let digits = if value.abs() >= 1000.0 { 0 } else { 3 };
                write!(out, "  {key} {value:>9.digits$}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

/// Seconds of the fastest of several runs: what the code can do when nothing disturbs it.
fn fastest(mut run: impl FnMut() -> candle_core::Result<()>) -> candle_core::Result<f64> {
    fastest_after(|| Ok(()), |()| run())
}

/// The same for a run that uses up what is prepared for it; preparing takes none of its time.
fn fastest_after<T>(
    mut prepare: impl FnMut() -> candle_core::Result<T>,
    mut run: impl FnMut(T) -> candle_core::Result<()>,
) -> candle_core::Result<f64> {
    run(prepare()?)?; // memory and caches
    let start = Instant::now();
    let mut best = f64::INFINITY;
    for round in 0.. {
        let prepared = prepare()?;
        let begin = Instant::now();
        run(prepared)?;
        best = best.min(begin.elapsed().as_secs_f64());
        if round >= 4 && start.elapsed() > Duration::from_millis(600) {
            break;
        }
    }
    Ok(best)
}
