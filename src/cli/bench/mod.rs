//! `trainer bench`: speed of the ops, of a training step, of the data loader, and of the algorithms
//! of products.

mod clock;
mod data;
mod ops;
mod products;
mod sizes;
mod step;
mod table;
mod tune;

use super::args::ConfigArgs;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use crate::ops::simd_level;
use crate::run::device_name;
use crate::train::{DeviceChoice, Precision};
use candle_core::DType;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clock::Clock;
use sizes::SizeChoice;
use std::path::PathBuf;
use table::Table;

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
#[command(after_help = "Example:\n  trainer bench --ops\n  \
    trainer bench --ops --device cuda:0\n  \
    trainer bench --step --config config.yaml --steps 20\n  \
    trainer bench --data --config config.yaml --json\n  \
    trainer bench --tune algorithms.json --config config.yaml")]
pub(super) struct BenchArgs {
    /// Time each op at a few sizes, relative to the measured peaks of this machine (the default)
    #[arg(long)]
    ops: bool,
    /// Time whole optimizer steps of a config: tokens/s, MFU, data wait, memory
    #[arg(long)]
    step: bool,
    /// Time reading, encoding and packing the rows of a config: rows/s, MPix/s, tokens/s
    #[arg(long)]
    data: bool,
    /// Measure the algorithms of cuBLASLt for the products of a config's steps, and add the fastest
    /// to FILE, which the config key `model.algorithms` reads; GPU only
    #[arg(long, value_name = "FILE")]
    tune: Option<PathBuf>,
    /// YAML config, for `--step`, `--data` and `--tune`
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Change a key, for example `--set data.packing=false`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Number of steps to time, after a first step that is not timed; with `--tune`, number of steps
    /// whose products are measured
    #[arg(long, default_value_t = 10)]
    steps: u64,
    /// Device of `--ops`: `cpu`, `cuda:N` or `auto`; the others use that of the config
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Dtype of the operands of `--ops`; by default `f32` on a CPU and `bf16` on a GPU
    #[arg(long, value_parser = precision())]
    precision: Option<Precision>,
    /// Sizes of `--ops`; by default those of the device
    #[arg(long, value_enum)]
    sizes: Option<SizeChoice>,
    /// Run only ops whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the benchmarks and prints their tables to stdout.
pub(super) fn run(args: &BenchArgs, logging: &Logging) -> anyhow::Result<()> {
    let config = || -> anyhow::Result<_> {
        let file = args.config.clone().ok_or_else(|| {
            Failure::new(Exit::Usage, "`--step`, `--data` and `--tune` need a config")
                .hint("add `--config config.yaml`, or use `--ops`")
        })?;
        ConfigArgs { config: file, overrides: args.overrides.clone() }.load(logging)
    };
    let mut table = Table { json: args.json };
    if args.ops || !(args.step || args.data || args.tune.is_some()) {
        run_ops(args, &mut table)?;
    }
    if args.step {
        step::run(&config()?, args.steps, &mut table)?;
    }
    if args.data {
        data::run(&config()?, &mut table)?;
    }
    if let Some(file) = &args.tune {
        tune::run(&config()?, args.steps, file, &mut table)?;
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
    let device = args.device.open()?;
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
