//! Batch size and accumulation: a step here is that of the whole run, on any number of ranks.

use crate::conversion::Conversion;
use crate::tables::Role;
use crate::trainer::Trainer;
use std::num::NonZeroU64;

/// The samples of an optimizer step that ms-swift reaches at least if it chooses the accumulation.
const SWIFT_STEP: u64 = 16;

/// Writes `train.gradient_accumulation_steps`. Returns the samples (or packs) of an optimizer step.
pub(super) fn batch(conversion: &mut Conversion, world_size: Option<NonZeroU64>) -> Option<u64> {
    let world = world(conversion, world_size);
    let mut split = 1;
    for (role, reason) in [
        (
            Role::SequenceParallel,
            "the batch is computed without it; set `distributed.sequence` if several ranks train",
        ),
        (
            Role::TensorParallel,
            "the batch is computed without it; `distributed.shard: full` divides the weights",
        ),
    ] {
        if let Some((degree, setting)) = conversion.consume_count(role) {
            split *= degree.max(1);
            conversion.drop(&setting, reason);
        }
    }
    let batch =
        conversion.line("train.batch_size").and_then(|line| line.value.parse().ok()).unwrap_or(1);
    let accumulation = conversion.consume(Role::Accumulation);
    let world = world?;
    if world % split != 0 {
        conversion.refuse_missing(
            "--world-size",
            &format!("{world} processes cannot be divided into groups of {split}"),
        );
        return None;
    }
    let replicas = world / split;
    let accumulation = accumulation?;
    let theirs = match (accumulation.value.count(), conversion.trainer) {
        (Some(steps), _) if steps > 0 => steps,
        (None, Trainer::MsSwift) if accumulation.value.text() == Some("auto") => {
            SWIFT_STEP.div_ceil(batch * replicas)
        }
        _ => {
            conversion.refuse(&accumulation, "expected a whole number of 1 or more");
            return None;
        }
    };
    let ours = theirs * replicas;
    let noun = if replicas == 1 { "process" } else { "processes" };
    let comment = format!("{theirs} x {replicas} {noun}: {}", conversion.origin(&accumulation));
    conversion.write("train.gradient_accumulation_steps", &ours.to_string(), &comment);
    Some(batch * ours)
}

/// Number of processes of the other trainer.
fn world(conversion: &mut Conversion, given: Option<NonZeroU64>) -> Option<u64> {
    let (processes, nodes) =
        (conversion.consume_written(Role::Processes), conversion.consume_written(Role::Nodes));
    let devices = conversion.consume_written(Role::VisibleDevices);
    for setting in [&processes, &nodes, &devices].into_iter().flatten() {
        conversion.drop(
            setting,
            "a step has the same samples on any number of GPUs, so the accumulation includes their number",
        );
    }
    if let Some(given) = given {
        return Some(given.get());
    }
    let nodes = nodes.map_or(Some(1), |setting| setting.value.count());
    let processes = match (processes, devices) {
        (Some(setting), _) => setting.value.count(),
        // swift starts one process unless NPROC_PER_NODE is set
        (None, _) if conversion.trainer == Trainer::MsSwift && conversion.has_script => Some(1),
        (None, Some(setting)) if conversion.trainer == Trainer::LlamaFactory => {
            let devices = setting.value.to_string();
            Some(devices.split(',').filter(|device| !device.trim().is_empty()).count() as u64)
        }
        (None, _) => None,
    };
    let world = processes.zip(nodes).map(|(processes, nodes)| processes * nodes);
    if world.is_none_or(|world| world == 0) {
        conversion.refuse_missing(
            "--world-size",
            "the files do not contain the number of processes (GPUs) of the run: pass `--world-size N`, 1 for one GPU",
        );
        return None;
    }
    world
}
