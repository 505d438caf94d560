//! `trainer plan`: predicts memory and size of a run, on the CPU and on GPUs, and its time from a
//! measured speed.

use super::args::ConfigArgs;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::plan_report::{Report, Speed, print, print_json};
use super::progress::SetupBars;
use crate::config::RunConfig;
use crate::dist::Shard;
use crate::optim::Kind;
use crate::run::{
    Estimate, Load, ModelShape, RunMemory, calibrate, check_world, plan_data, search,
};
use crate::train::DeviceChoice;
use clap::Args;
use serde_json::Value;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};

pub(super) const GIB: f64 = 1_073_741_824.0;
/// Fractions of tokens of images and of supervised tokens without data: an assumption.
const FRACTIONS: (f64, f64) = (0.5, 0.25);
/// Memory of a GPU, unless `--memory` is given.
const MEMORY: f64 = 80.0 * GIB;

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    trainer plan --config config.yaml --calibrate\n  \
    trainer plan --config config.yaml --gpus 8 --memory 80GiB\n\n\
    The packs are those of `data.train`; without data, with `--images` or `--targets`, full packs are \
    assumed. docs/memory.md compares predicted memory with measured runs.")]
pub(super) struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of GPUs of a node; on the CPU, of processes
    #[arg(long, default_value = "1")]
    gpus: NonZeroUsize,
    /// Number of nodes
    #[arg(long, default_value = "1")]
    nodes: NonZeroUsize,
    /// Search the settings with which the run fits into this memory of a GPU, or of the process on
    /// the CPU, for example 80GiB or 80GB; without it, `fits` is for 80GiB
    #[arg(long, value_parser = bytes)]
    memory: Option<f64>,
    /// Compute the time of the run from this total speed of all ranks, in tokens per second
    #[arg(long, value_name = "X", conflicts_with = "calibrate", value_parser = positive)]
    tokens_per_second: Option<f64>,
    /// Compute the time from the speed of an earlier run, whose `output_dir` this is; it must have had
    /// as many ranks
    #[arg(long, value_name = "DIR", conflicts_with_all = ["calibrate", "tokens_per_second"])]
    as_fast_as: Option<PathBuf>,
    /// Train a few steps in a temporary folder, and compute the time of the run from their speed
    #[arg(long, value_name = "STEPS", num_args = 0..=1, default_missing_value = "5")]
    calibrate: Option<NonZeroU64>,
    /// Plan full packs instead of the data, with this fraction of image tokens; default: 0.5
    #[arg(long)]
    images: Option<f64>,
    /// Plan full packs instead of the data, with this fraction of supervised tokens; default: 0.25
    #[arg(long)]
    targets: Option<f64>,
    /// Print JSON objects, one per line, instead of tables: one for each `shard`, then one for the
    /// run
    #[arg(long)]
    json: bool,
}

/// Reads a number of bytes with a unit.
fn bytes(text: &str) -> Result<f64, String> {
    const UNITS: [(&str, f64); 6] = [
        ("TiB", 1024.0 * GIB),
        ("GiB", GIB),
        ("MiB", GIB / 1024.0),
        ("TB", 1e12),
        ("GB", 1e9),
        ("MB", 1e6),
    ];
    let parsed = UNITS.iter().find_map(|(unit, bytes)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        (number > 0.0 && number.is_finite()).then_some(number * bytes)
    });
    parsed.ok_or_else(|| "expected a number with a unit, such as 80GiB, 80GB or 512MiB".to_owned())
}

/// Reads a positive number.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| "expected a number above 0".to_owned())
}

/// Prints the predictions.
pub(super) fn run(args: &PlanArgs, logging: &Logging) -> anyhow::Result<()> {
    let mut files =
        ConfigArgs { config: args.config.config.clone(), overrides: args.config.overrides.clone() };
    files.overrides.push("model.weights=random".to_owned()); // of the model, `config.json` suffices
    let config = files.load(logging)?;
    check(args)?;
    let given = given_speed(args)?;
    let world = args.gpus.get() * args.nodes.get();
    check_world(&config, world).map_err(|error| args.config.located(error))?;
    let shape = ModelShape::read(&config).map_err(|error| args.config.located(error))?;
    let data = if args.images.or(args.targets).is_some() {
        None
    } else {
        let planned = plan_data(&config, &SetupBars(logging));
        let assumed = |error: &crate::run::RunError| {
            tracing::warn!("the data cannot be planned, full packs are assumed: {error}");
        };
        planned.inspect_err(assumed).ok()
    };
    let load = if let Some(data) = &data {
        Load::of(&shape, &data.plan, data.targets)?
    } else {
        let (images, targets) = FRACTIONS;
        let fractions = (args.images.unwrap_or(images), args.targets.unwrap_or(targets));
        Load::full(&shape, &config, fractions)
    };
    let on = |device| {
        let mut config = config.clone();
        config.device = device;
        RunMemory { config, load: load.clone(), world }
    };
    let gpu = match config.device {
        DeviceChoice::Cuda(index) => DeviceChoice::Cuda(index),
        DeviceChoice::Auto | DeviceChoice::Cpu => DeviceChoice::Cuda(0),
    };
    let places = [on(DeviceChoice::Cpu), on(gpu)];
    // `auto` is planned for a GPU
    let place = &places[usize::from(config.device != DeviceChoice::Cpu)];
    let estimates = estimates(args, &shape, place)?;
    let memory = args.memory.unwrap_or(MEMORY);
    let first = estimates.iter().find(|estimate| place.bytes_of(&estimate.parts) <= memory);
    let fits = match args.memory {
        Some(memory) => search(place, memory, world)?,
        None => Vec::new(),
    };
    let speed = match given {
        Some(speed) => Some(speed),
        None => calibrated(args, &config, world, logging)?,
    };
    let report = Report {
        config: &config,
        shape: &shape,
        data: data.as_ref(),
        speed,
        parts: [places[0].parts(&shape)?, places[1].parts(&shape)?],
        load: &load,
        place,
        world,
        estimates: &estimates,
        memory,
        first,
        fits: &fits,
        is_searched: args.memory.is_some(),
    };
    if args.json { print_json(&report) } else { print(&report) }
}

/// Tokens per second of all ranks, if an argument gives it or names a run.
fn given_speed(args: &PlanArgs) -> anyhow::Result<Option<(f64, Speed)>> {
    if let Some(folder) = &args.as_fast_as {
        return Ok(Some((speed_of_run(folder)?, Speed::OfRun(folder.clone()))));
    }
    Ok(args.tokens_per_second.map(|rate| (rate, Speed::Given)))
}

/// Trains a few steps, if an argument says so, and returns the tokens per second of all ranks.
fn calibrated(
    args: &PlanArgs,
    config: &RunConfig,
    world: usize,
    logging: &Logging,
) -> anyhow::Result<Option<(f64, Speed)>> {
    let Some(steps) = args.calibrate else { return Ok(None) };
    let folder = std::env::temp_dir();
    let measured = calibrate(config, steps, &folder, &SetupBars(logging))
        .map_err(|error| args.config.located(error))?;
    Ok(Some((world as f64 * measured.tokens_per_s, Speed::Measured(measured))))
}

/// Tokens per second of the steps of a run, without the first one.
fn speed_of_run(folder: &Path) -> anyhow::Result<f64> {
    let path = folder.join("metrics.jsonl");
    let text = files::read_to_string(&path).map_err(|error| {
        Failure::new(Exit::Usage, format!("cannot read `{}`: {error}", path.display()))
            .hint("give the `output_dir` of a run")
    })?;
    let (mut tokens, mut seconds) = (0.0, 0.0);
    for line in text.lines().skip(1) {
        let row: Value = serde_json::from_str(line).unwrap_or_default();
        if let (Some(of_step), Some(time)) =
            (row["num_tokens"].as_f64(), row["step_time_s"].as_f64())
        {
            (tokens, seconds) = (tokens + of_step, seconds + time);
        }
    }
    if seconds > 0.0 {
        return Ok(tokens / seconds);
    }
    let message = format!("`{}` has fewer than two steps", path.display());
    Err(Failure::new(Exit::Usage, message).hint("give the folder of a longer run").into())
}

/// The prediction for every `distributed.shard`, for the micro-batch that needs the most memory.
fn estimates(
    args: &PlanArgs,
    shape: &ModelShape,
    place: &RunMemory,
) -> anyhow::Result<Vec<Estimate>> {
    let config = &place.config;
    let exact = config.distributed.exact.holds(config.device == DeviceChoice::Cpu);
    let bytes = |estimate: &Estimate| place.bytes_of(&estimate.parts);
    let largest = |choice| -> candle_core::Result<Option<Estimate>> {
        let sizes = place.load.sizes().iter();
        let all = sizes.map(|sizes| shape.estimate(config, place.world, choice, sizes, exact));
        let all: Vec<Estimate> = all.collect::<candle_core::Result<_>>()?;
        Ok(all.into_iter().max_by(|one, other| bytes(one).total_cmp(&bytes(other))))
    };
    let ranks = (args.gpus.get(), args.nodes.get());
    let choices = choices(ranks, config.optim.kind).into_iter();
    let found = choices.map(largest).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// Every `distributed.shard` that the optimizer supports, and the size of its groups; first those that
/// divide the least.
fn choices((gpus, nodes): (usize, usize), kind: Kind) -> Vec<(Shard, usize)> {
    let world = gpus * nodes;
    let mut choices = vec![(Shard::None, world)];
    if world > 1 && kind.divides_state() {
        let groups = if nodes > 1 { vec![gpus, world] } else { vec![world] };
        for shard in [Shard::Optimizer, Shard::Gradients, Shard::Full] {
            choices.extend(groups.iter().map(|group| (shard, *group)));
        }
    }
    choices
}

fn check(args: &PlanArgs) -> anyhow::Result<()> {
    let fractions = [args.images, args.targets];
    if fractions.iter().flatten().all(|fraction| (0.0..=1.0).contains(fraction)) {
        return Ok(());
    }
    let message = "`--images` and `--targets` are fractions, from 0 to 1";
    Err(Failure::new(Exit::Usage, message).hint("for example `--images 0.5`").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_decimal_or_binary_units() {
        assert_eq!(bytes("80GiB"), Ok(80.0 * 1024.0 * 1024.0 * 1024.0));
        assert_eq!(bytes("1.5 GB"), Ok(1.5e9));
        for wrong in ["80", "GiB", "-1GB", "80 gb", "infGB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
