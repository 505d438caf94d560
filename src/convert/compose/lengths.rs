//! Packing and the lengths of samples.

use crate::convert::rule::Role;
use crate::convert::trainer::Trainer;
use crate::convert::value::Setting;
use crate::convert::work::Work;

/// Writes the packing keys, `data.max_length` and `data.truncation`. Returns whether it packs.
pub(super) fn lengths(work: &mut Work) -> bool {
    let neat = work.flag(Role::NeatPacking);
    let packing = work.flag(Role::Packing);
    let on = [neat.clone(), packing.clone()].into_iter().flatten().find(|(on, _)| *on);
    let is_packing = on.is_some();
    if let Some((_, setting)) = on.clone().or(packing) {
        work.write_from("data.packing", &is_packing.to_string(), &setting);
    }
    if is_packing && work.trainer == Trainer::LlamaFactory && !neat.is_some_and(|(on, _)| on) {
        work.note("LLaMA-Factory's `packing` without `neat_packing` lets the samples of a pack attend to each other; here they never do");
    }
    let cutoff = work.count(Role::CutoffLen);
    if let Some((length, setting)) = &cutoff {
        work.write_from("data.max_length", &length.to_string(), setting);
        let comment = format!("cuts long samples: {}", work.from(setting));
        work.write("data.truncation", "right", &comment);
        work.note("LLaMA-Factory cuts prompt and answer of a long sample in proportion; `truncation: right` cuts its end");
    }
    let max_length = work.count(Role::MaxLength);
    if let Some((length, setting)) = &max_length {
        work.write_from("data.max_length", &length.to_string(), setting);
    }
    truncation(work, max_length.is_some());
    if is_packing {
        pack(work, cutoff.or(max_length));
    }
    is_packing
}

/// Writes the keys of packs; `longest` is the maximum length of a sample.
fn pack(work: &mut Work, longest: Option<(u64, Setting)>) {
    match work.count(Role::PackingLength).or(longest) {
        Some((length, setting)) => {
            work.write_from("data.packing_length", &length.to_string(), &setting);
        }
        None => work.need(
            "max_length",
            "`packing` needs the length of a pack: add `packing_length` or `max_length`",
        ),
    }
    let Some(setting) = work.take(Role::PackingStrategy) else { return };
    let ours = match setting.value.text().unwrap_or_default() {
        "binpack" | "knapsack" | "best_fit" | "balanced" => "best_fit",
        // lmms-engine's first_fit only fills the newest pack
        "sequential" | "first_fit" => "sequential",
        _ => return work.refuse(
            &setting,
            "expected `binpack`, `knapsack`, `best_fit`, `balanced`, `sequential` or `first_fit`",
        ),
    };
    work.write_from("data.packing_strategy", ours, &setting);
}

fn truncation(work: &mut Work, has_length: bool) {
    let Some(setting) = work.take(Role::Truncation) else { return };
    let ours = match setting.value.text().unwrap_or_default() {
        "delete" => "delete",
        "left" => "left",
        "right" => "right",
        "raise" | "error" => "error",
        _ => return work.refuse(&setting, "expected `delete`, `left`, `right` or `raise`"),
    };
    if matches!(ours, "left" | "right") && !has_length {
        return work.refuse(&setting, "it needs `max_length`");
    }
    work.write_from("data.truncation", ours, &setting);
}
