//! `trainer plan`: predicts the memory and the size of a run, on the CPU and on GPUs, and computes its
//! time from a measured speed. It has no list of GPUs: `--memory` is the memory of one.

use super::args::ConfigArgs;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::stdout;
use crate::config::RunConfig;
use crate::dist::Shard;
use crate::metrics::{MemoryParts, memory_text};
use crate::optim::Kind;
use crate::run::{
    Calibration, DataPlan, Estimate, FRACTIONS, Fit, Load, ModelShape, RESERVED, RunMemory,
    calibrate, check_world, plan_data, search,
};
use crate::train::DeviceChoice;
use clap::Args;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};

const GIB: f64 = 1_073_741_824.0;
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

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| "expected a number above 0".to_owned())
}

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
    let least = estimates.iter().find(|estimate| place.bytes_of(&estimate.parts) <= memory);
    let fits = match args.memory {
        Some(memory) => search(place, memory, world)?,
        None => Vec::new(),
    };
    let speed = match given {
        Some(speed) => Some(speed),
        None => calibrated(args, &config, world, logging)?,
    };
    let report = PlanReport {
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
        least,
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

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Speed {
    /// The command line.
    Given,
    /// A few steps of one process.
    Measured(Calibration),
    /// The steps of the run in a folder.
    OfRun(PathBuf),
}

pub(super) struct PlanReport<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) shape: &'a ModelShape,
    pub(super) data: Option<&'a DataPlan>,
    /// Tokens per second of all ranks.
    speed: Option<(f64, Speed)>,
    /// On the CPU and on a GPU.
    pub(super) parts: [MemoryParts; 2],
    pub(super) load: &'a Load,
    /// The device of the config.
    pub(super) place: &'a RunMemory,
    pub(super) world: usize,
    estimates: &'a [Estimate],
    pub(super) memory: f64,
    /// The first of `estimates` that fits, which divides the least.
    pub(super) least: Option<&'a Estimate>,
    pub(super) fits: &'a [Fit],
    is_searched: bool,
}

impl PlanReport<'_> {
    /// Seconds of the whole run.
    fn seconds(&self) -> Option<f64> {
        let ((rate, _), data) = self.speed.as_ref().zip(self.data)?;
        Some(data.tokens() / rate)
    }
}

pub(super) fn print(report: &PlanReport<'_>) -> anyhow::Result<()> {
    let out = &mut stdout();
    print_run(report, out)?;
    print_parts(report, out)?;
    if report.world > 1 {
        print_shards(report, out)?;
    }
    if report.is_searched {
        print_fits(report, out)?;
    }
    Ok(())
}

fn print_run(report: &PlanReport<'_>, out: &mut impl Write) -> io::Result<()> {
    let [parameters, trained] = report.shape.num_parameters().map(millions);
    let precision = report.config.model.precision.hf_name();
    let active = report.shape.num_active().map(millions);
    let active = active.map_or_else(String::new, |active| format!(", {active} for each token"));
    writeln!(out, "model   {parameters} parameters, {trained} trained{active}, {precision}")?;
    let tokens = report.load.tokens();
    match report.data {
        None => {
            writeln!(
                out,
                "data    not read: full micro-batches of {tokens:.0} tokens are assumed"
            )?;
        }
        Some(data) => {
            let plan = &data.plan;
            let (rows, epochs, packs) = (data.rows, data.epochs, plan.packs);
            let fill = 100.0 * plan.fill;
            writeln!(
                out,
                "data    {rows} rows; {packs} packs and {} tokens in {epochs} epoch(s), fill {fill:.1} %",
                plan.tokens
            )?;
            let patches = match report.load.patches() {
                0.0 => String::new(),
                patches => format!(", at most {patches:.0} patches"),
            };
            writeln!(out, "        micro-batches of at most {tokens:.0} tokens{patches}")?;
            writeln!(out, "run     {} steps, {:.0} tokens", data.steps, data.tokens())?;
        }
    }
    let Some((rate, speed)) = &report.speed else {
        return writeln!(out, "time    unknown: `--calibrate` measures a few steps");
    };
    let source = match speed {
        Speed::Given => "given".to_owned(),
        Speed::Measured(Calibration { steps, peak_bytes, .. }) => {
            let peak = memory_text(*peak_bytes);
            let ranks = match report.world {
                1 => String::new(),
                world => {
                    format!(", for {world} ranks: without the time that they wait for each other")
                }
            };
            format!("{steps} steps of one process with a peak of {peak}{ranks}")
        }
        Speed::OfRun(folder) => format!("as the run in `{}`", folder.display()),
    };
    match report.seconds() {
        Some(seconds) => {
            writeln!(out, "time    {} at {rate:.0} tokens/s ({source})", time(seconds))
        }
        None => writeln!(out, "speed   {rate:.0} tokens/s ({source})"),
    }
}

fn print_parts(report: &PlanReport<'_>, out: &mut impl Write) -> io::Result<()> {
    let ranks = match report.world {
        1 => String::new(),
        world => format!(" of each of {world} ranks"),
    };
    writeln!(out, "\n{:24} {:>12} {:>12}", format!("peak memory{ranks}"), "CPU", "GPU")?;
    let [cpu, gpu] = report.parts;
    for ((name, on_cpu), (_, on_gpu)) in cpu.named().into_iter().zip(gpu.named()) {
        let on_gpu = match name {
            "loader" => "on the host".to_owned(),
            "process" => memory_text(RESERVED),
            _ => memory_text(on_gpu),
        };
        writeln!(out, "{name:24} {:>12} {on_gpu:>12}", memory_text(on_cpu))?;
    }
    let all = [cpu.process(), gpu.device() + RESERVED].map(memory_text);
    writeln!(out, "{:24} {:>12} {:>12}", "all", all[0], all[1])?;
    let copy = copy_bytes(report);
    if copy > 0.0 {
        let [copy, all] = [copy, cpu.process() + copy].map(memory_text);
        writeln!(
            out,
            "\nwhile a checkpoint is written: {copy} more of host memory for a copy, if it is free\n\
             (on the CPU {all} in total)"
        )?;
    }
    Ok(())
}

/// Bytes of the copy from which a rank writes a checkpoint. Each rank copies what it writes.
fn copy_bytes(report: &PlanReport<'_>) -> f64 {
    report.shape.copy_bytes(report.config) / report.world as f64
}

fn print_shards(report: &PlanReport<'_>, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "\n{:10} {:>6} {:>11} {:>5}", "shard", "group", "memory GiB", "fits")?;
    for estimate in report.estimates {
        let bytes = report.place.bytes_of(&estimate.parts);
        writeln!(
            out,
            "{:10} {:>6} {:>11.2} {:>5}",
            estimate.shard.name(),
            estimate.group,
            bytes / GIB,
            if bytes <= report.memory { "yes" } else { "no" },
        )?;
    }
    let advice = match report.least {
        Some(least) => format!("the least sharding that fits: {}", setting(least, report.world)),
        None => format!("none of them fits into {}", memory_text(report.memory)),
    };
    writeln!(out, "{advice}")
}

fn print_fits(report: &PlanReport<'_>, out: &mut impl Write) -> io::Result<()> {
    let device = if report.place.config.device == DeviceChoice::Cpu { "process" } else { "GPU" };
    let title = format!("in {} of a {device}", memory_text(report.memory));
    writeln!(out, "\n{title:24} {:>12}", "memory")?;
    for Fit { name, found } in report.fits {
        match found {
            Some((settings, bytes)) if settings.is_empty() => {
                writeln!(out, "{name:24} {:>12}  as it is", memory_text(*bytes))?;
            }
            Some((settings, bytes)) => {
                let set: Vec<String> = settings.iter().map(|of| format!("--set {of}")).collect();
                writeln!(out, "{name:24} {:>12}  {}", memory_text(*bytes), set.join(" "))?;
            }
            None => writeln!(out, "{name:24} {:>12}  nothing fits", "")?,
        }
    }
    Ok(())
}

/// The keys of the config.
fn setting(estimate: &Estimate, world: usize) -> String {
    let group = if estimate.group < world { ", shard_group: node" } else { "" };
    format!("distributed: {{shard: {}{group}}}", estimate.shard.name())
}

fn millions(count: f64) -> String {
    if count < 1e9 { format!("{:.1} M", count / 1e6) } else { format!("{:.2} B", count / 1e9) }
}

/// Seconds as hours and minutes.
fn time(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round();
    match seconds {
        _ if seconds < 90.0 => format!("{seconds:.0} s"),
        _ if minutes < 90.0 => format!("{minutes:.0} min"),
        _ => format!("{:.0} h {:.0} min", (minutes / 60.0).floor(), minutes % 60.0),
    }
}

/// Prints one object for each `distributed.shard`, then one for the run.
fn print_json(report: &PlanReport<'_>) -> anyhow::Result<()> {
    let mut out = stdout();
    for estimate in report.estimates {
        let bytes = report.place.bytes_of(&estimate.parts);
        let row = json!({
            "shard": estimate.shard.name(),
            "group": estimate.group,
            "memory_bytes": bytes.round(),
            "fits": bytes <= report.memory,
            "least": report.least.is_some_and(|least| least == estimate),
        });
        writeln!(out, "{row}")?;
    }
    let named = |parts: &MemoryParts, all: f64| -> Value {
        let parts = parts.named().into_iter().chain([("all", all)]);
        parts.map(|(name, bytes)| (name.to_owned(), json!(bytes.round()))).collect()
    };
    let [cpu, gpu] = report.parts;
    let fits = report.fits.iter().map(|Fit { name, found }| {
        let (settings, bytes) = found.clone().unzip();
        json!({"search": name, "settings": settings, "memory_bytes": bytes})
    });
    let row = json!({
        "rows": report.data.map(|data| data.rows),
        "epochs": report.data.map(|data| data.epochs),
        "packs": report.data.map(|data| data.plan.packs),
        "fill": report.data.map(|data| data.plan.fill),
        "steps": report.data.map(|data| data.steps),
        "tokens": report.data.map(DataPlan::tokens),
        "tokens_per_s": report.speed.as_ref().map(|(rate, _)| rate),
        "seconds": report.seconds(),
        "cpu_bytes": named(&cpu, cpu.process()),
        "checkpoint_copy_bytes": copy_bytes(report).round(),
        "gpu_bytes": named(&gpu, gpu.device() + RESERVED),
        "fits": fits.collect::<Vec<_>>(),
    });
    writeln!(out, "{row}")?;
    Ok(())
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

    #[test]
    fn times_are_in_seconds_minutes_or_hours() {
        assert_eq!([61.0, 600.0, 5400.0].map(time), ["61 s", "10 min", "1 h 30 min"]);
    }
}
