//! `trainer plan`: predicts memory and speed of a config on several GPUs.

use super::args::ConfigArgs;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::stdout::stdout;
use crate::dist::Shard;
use crate::metrics::Cluster;
use crate::optim::Kind;
use crate::run::{Estimate, ModelShape, check_world};
use crate::train::DeviceChoice;
use clap::Args;
use std::io::Write as _;
use std::num::NonZeroUsize;

const GIB: f64 = 1_073_741_824.0;
/// Memory of a GPU that CUDA, the libraries and NCCL use: an assumption.
const RESERVED: f64 = GIB;

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    trainer plan --config configs/qwen3_vl_8b.yaml --gpus 8 --memory 80GiB\n\n\
    The predictions assume full packs, collectives that overlap with the computation, and the rates \
    of the options. docs/distributed.md compares them with measured runs.")]
pub(super) struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of GPUs of a node; on the CPU, of processes
    #[arg(long, default_value = "1")]
    gpus: NonZeroUsize,
    /// Number of nodes
    #[arg(long, default_value = "1")]
    nodes: NonZeroUsize,
    /// Memory of a GPU, for example 80GiB or 80GB
    #[arg(long, default_value = "80GiB", value_parser = bytes)]
    memory: f64,
    /// Rate of a GPU to the others of its node, in Gbit/s
    #[arg(long, default_value_t = 2800.0)]
    link_gbps: f64,
    /// Rate of a GPU to other nodes, in Gbit/s
    #[arg(long, default_value_t = 360.0)]
    network_gbps: f64,
    /// Peak rate of a GPU on matrix products, in TFLOP/s
    #[arg(long, default_value_t = 989.0)]
    tflops: f64,
    /// Fraction of that rate which the model reaches
    #[arg(long, default_value_t = 0.45)]
    mfu: f64,
    /// Fraction of the tokens that are of images
    #[arg(long, default_value_t = 0.5)]
    images: f64,
    /// Fraction of the tokens that are supervised
    #[arg(long, default_value_t = 0.25)]
    targets: f64,
    /// Print one JSON object per line instead of a table
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

/// Prints the prediction for each `distributed.shard`, and that with the least exchange
/// among those that fit.
pub(super) fn run(args: &PlanArgs, logging: &Logging) -> anyhow::Result<()> {
    let mut files =
        ConfigArgs { config: args.config.config.clone(), overrides: args.config.overrides.clone() };
    files.overrides.push("model.weights=random".to_owned()); // of the model, `config.json` suffices
    let config = files.load(logging)?;
    check(args)?;
    check_world(&config, args.gpus.get() * args.nodes.get())
        .map_err(|error| args.config.located(error))?;
    let shape = ModelShape::read(&config).map_err(|error| args.config.located(error))?;
    let cluster = Cluster {
        gpus: args.gpus.get(),
        nodes: args.nodes.get(),
        link: args.link_gbps * 1e9 / 8.0,
        network: args.network_gbps * 1e9 / 8.0,
        flops: args.tflops * 1e12 * args.mfu,
    };
    let on_cpu = config.device == DeviceChoice::Cpu;
    let exact = config.distributed.exact.holds(on_cpu);
    let world = cluster.world();
    let estimates = choices(&cluster, config.optim.kind)
        .into_iter()
        .map(|choice| shape.estimate(&config, &cluster, choice, (args.images, args.targets), exact))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let needs = |estimate: &Estimate| {
        if on_cpu { estimate.process_bytes } else { estimate.device_bytes + RESERVED }
    };
    let fits = |estimate: &&Estimate| needs(estimate) <= args.memory;
    let cost = |estimate: &Estimate| estimate.collectives.total();
    let best = estimates.iter().filter(fits).min_by(|one, other| cost(one).total_cmp(&cost(other)));
    if args.json {
        return print_json(&estimates, needs, args.memory, best);
    }
    let mut out = stdout();
    let [parameters, trained] = shape.num_parameters().map(|count| count / 1e9);
    writeln!(
        out,
        "{parameters:.3} B parameters, {trained:.3} B trained, {}, micro-batches of {} tokens",
        config.model.precision.hf_name(),
        config.data.packing_length.get() as usize * config.train.batch_size.get(),
    )?;
    writeln!(
        out,
        "{:10} {:>6} {:>11} {:>5} {:>10} {:>13} {:>9} {:>11} {:>10}",
        "shard",
        "group",
        "memory GiB",
        "fits",
        "compute s",
        "collectives s",
        "step s",
        "efficiency",
        "tokens/s"
    )?;
    for estimate in &estimates {
        writeln!(
            out,
            "{:10} {:>6} {:>11.2} {:>5} {:>10.3} {:>13.3} {:>9.3} {:>10.1}% {:>10.0}",
            estimate.shard.name(),
            estimate.group,
            needs(estimate) / GIB,
            if fits(&estimate) { "yes" } else { "no" },
            estimate.compute,
            estimate.collectives.total(),
            estimate.step(),
            100.0 * estimate.efficiency(),
            estimate.tokens_per_s,
        )?;
    }
    write_copy(&mut out, if world == 1 { shape.copy_bytes(&config) } else { 0.0 })?;
    let advice = match best {
        Some(best) => format!("least exchange among those that fit: {}", setting(best, world)),
        None => "nothing fits: use more GPUs, `optim.kind: adamw_8bit`, `optim.master: none`, \
                 `model.recompute: full`, or a smaller `data.packing_length`"
            .to_owned(),
    };
    writeln!(out, "\n{advice}")?;
    Ok(())
}

/// Prints the memory of the copy from which a checkpoint is written, if there is one.
fn write_copy(out: &mut impl std::io::Write, bytes: f64) -> std::io::Result<()> {
    if bytes > 0.0 {
        let copy = bytes / GIB;
        writeln!(
            out,
            "\nwhile a checkpoint is written: {copy:.2} GiB more of host memory for a copy"
        )?;
    }
    Ok(())
}

/// Every `distributed.shard` that the optimizer supports, and the size of its groups.
fn choices(cluster: &Cluster, kind: Kind) -> Vec<(Shard, usize)> {
    let world = cluster.world();
    let mut choices = vec![(Shard::None, world)];
    let groups = if cluster.nodes > 1 { vec![cluster.gpus, world] } else { vec![world] };
    for group in groups.into_iter().filter(|_| world > 1 && kind.divides_state()) {
        for shard in [Shard::Optimizer, Shard::Gradients, Shard::Full] {
            choices.push((shard, group));
        }
    }
    choices
}

fn check(args: &PlanArgs) -> anyhow::Result<()> {
    let positive = [args.link_gbps, args.network_gbps, args.tflops, args.mfu];
    let fractions = [args.images, args.targets, args.mfu];
    let valid = positive.iter().all(|rate| *rate > 0.0 && rate.is_finite())
        && fractions.iter().all(|fraction| (0.0..=1.0).contains(fraction));
    if valid {
        return Ok(());
    }
    let message = "a rate is not positive, or a fraction is not between 0 and 1";
    let hint = "`--link-gbps`, `--network-gbps` and `--tflops` are rates; `--mfu`, `--images` and `--targets` are fractions";
    Err(Failure::new(Exit::Usage, message).hint(hint).into())
}

/// The keys of the config.
fn setting(estimate: &Estimate, world: usize) -> String {
    let group = if estimate.group < world { ", shard_group: node" } else { "" };
    format!("distributed: {{shard: {}{group}}}", estimate.shard.name())
}

fn print_json(
    estimates: &[Estimate],
    needs: impl Fn(&Estimate) -> f64,
    memory: f64,
    best: Option<&Estimate>,
) -> anyhow::Result<()> {
    let mut out = stdout();
    for estimate in estimates {
        let bytes = needs(estimate);
        let row = serde_json::json!({
            "shard": estimate.shard.name(),
            "group": estimate.group,
            "memory_bytes": bytes.round(),
            "fits": bytes <= memory,
            "compute_s": estimate.compute,
            "collectives_s": estimate.collectives.total(),
            "step_s": estimate.step(),
            "efficiency": estimate.efficiency(),
            "tokens_per_s": estimate.tokens_per_s,
            "best": best.is_some_and(|best| best == estimate),
        });
        writeln!(out, "{row}")?;
    }
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
}
