//! `trainer bench`: how fast this machine runs the ops, a step, and the data side.

mod clock;
mod data;
mod ops;
mod sizes;
mod step;

use super::ConfigArgs;
use super::report::{Exit, Failure};
use super::stdout::stdout;
use crate::ops::simd_level;
use crate::train::{DeviceChoice, Precision, device_name};
use candle_core::DType;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clock::Clock;
use sizes::SizeChoice;
use std::io::Write as _;
use std::path::PathBuf;

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
#[command(after_help = "Example:\n  trainer bench --ops\n  \
    trainer bench --ops --device cuda:0\n  \
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
    /// Where `--ops` computes: `cpu`, `cuda:N`, or `auto`; `--step` goes by the config
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Operands of `--ops`: `f32` on a CPU and `bf16` on a GPU, if not given
    #[arg(long, value_parser = precision())]
    precision: Option<Precision>,
    /// Sizes of `--ops`; those of the device, if not given
    #[arg(long, value_enum)]
    sizes: Option<SizeChoice>,
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
        run_ops(args, &mut table)?;
    }
    if args.step {
        step::run(&config()?, args.steps, &mut table)?;
    }
    if args.data {
        data::run(&config()?, &mut table)?;
    }
    Ok(())
}

fn precision() -> impl clap::builder::TypedValueParser<Value = Precision> {
    PossibleValuesParser::new(["f32", "bf16"]).map(|name| match name.as_str() {
        "f32" => Precision::F32,
        _ => Precision::Bf16,
    })
}

fn run_ops(args: &BenchArgs, table: &mut Table) -> anyhow::Result<()> {
    let device = super::open_device(args.device)?;
    table.text("simd", "level", &simd_level()?.to_string())?;
    let (sizes, dtype) = if device.is_cpu() {
        (SizeChoice::Cpu, DType::F32)
    } else {
        (SizeChoice::Gpu, DType::BF16)
    };
    let (sizes, dtype) =
        (args.sizes.unwrap_or(sizes), args.precision.map_or(dtype, Precision::dtype));
    if sizes != SizeChoice::Cpu {
        table.text("device", "used", &device_name(&device))?;
        table.text("precision", "used", dtype.as_str())?;
    }
    let clock = match sizes {
        SizeChoice::Tiny => Clock::hasty(&device),
        SizeChoice::Cpu | SizeChoice::Gpu => Clock::new(&device),
    };
    ops::Bench { clock, dtype, sizes: sizes.sizes() }.run(&args.filter, table)
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
