//! What `trainer plan` prints.

use super::plan::GIB;
use super::stdout::stdout;
use crate::config::RunConfig;
use crate::metrics::{MemoryParts, memory_text};
use crate::run::{Calibration, DataPlan, Estimate, Fit, Load, ModelShape, RESERVED, RunMemory};
use crate::train::DeviceChoice;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::path::PathBuf;

/// Where the speed of a run comes from.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Speed {
    /// The command line.
    Given,
    /// A few steps of one process.
    Measured(Calibration),
    /// The steps of the run in a folder.
    OfRun(PathBuf),
}

/// Everything that is predicted.
pub(super) struct Report<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) shape: &'a ModelShape,
    pub(super) data: Option<&'a DataPlan>,
    /// Tokens per second of all ranks.
    pub(super) speed: Option<(f64, Speed)>,
    /// On the CPU and on a GPU.
    pub(super) parts: [MemoryParts; 2],
    pub(super) load: &'a Load,
    /// The device of the config.
    pub(super) place: &'a RunMemory,
    pub(super) world: usize,
    pub(super) estimates: &'a [Estimate],
    pub(super) memory: f64,
    /// The first of `estimates` that fits, which divides the least.
    pub(super) first: Option<&'a Estimate>,
    pub(super) fits: &'a [Fit],
    pub(super) is_searched: bool,
}

impl Report<'_> {
    /// Seconds of the whole run.
    fn seconds(&self) -> Option<f64> {
        let ((rate, _), data) = self.speed.as_ref().zip(self.data)?;
        Some(data.tokens() / rate)
    }
}

/// Prints tables.
pub(super) fn print(report: &Report<'_>) -> anyhow::Result<()> {
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

fn print_run(report: &Report<'_>, out: &mut impl Write) -> io::Result<()> {
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
                world => format!(" times {world}; ranks also wait for each other: it takes longer"),
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

fn print_parts(report: &Report<'_>, out: &mut impl Write) -> io::Result<()> {
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
fn copy_bytes(report: &Report<'_>) -> f64 {
    report.shape.copy_bytes(report.config) / report.world as f64
}

fn print_shards(report: &Report<'_>, out: &mut impl Write) -> io::Result<()> {
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
    let advice = match report.first {
        Some(first) => format!("the least sharding that fits: {}", setting(first, report.world)),
        None => format!("none of them fits into {}", memory_text(report.memory)),
    };
    writeln!(out, "{advice}")
}

fn print_fits(report: &Report<'_>, out: &mut impl Write) -> io::Result<()> {
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
pub(super) fn print_json(report: &Report<'_>) -> anyhow::Result<()> {
    let mut out = stdout();
    for estimate in report.estimates {
        let bytes = report.place.bytes_of(&estimate.parts);
        let row = json!({
            "shard": estimate.shard.name(),
            "group": estimate.group,
            "memory_bytes": bytes.round(),
            "fits": bytes <= report.memory,
            "least": report.first.is_some_and(|first| first == estimate),
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
    fn times_are_in_seconds_minutes_or_hours() {
        assert_eq!([61.0, 600.0, 5400.0].map(time), ["61 s", "10 min", "1 h 30 min"]);
    }
}
