//! Packing and the lengths of samples.

use crate::conversion::Conversion;
use crate::tables::Role;
use crate::trainer::Trainer;
use crate::value::Setting;

/// Writes the packing keys, `data.max_length` and `data.truncation`. Returns whether it packs.
pub(super) fn lengths(conversion: &mut Conversion) -> bool {
    let neat = conversion.consume_boolean(Role::NeatPacking);
    let packing = conversion.consume_boolean(Role::Packing);
    let on = [neat.clone(), packing.clone()].into_iter().flatten().find(|(on, _)| *on);
    let is_packing = on.is_some();
    if let Some((_, setting)) = on.clone().or(packing) {
        conversion.write_setting("data.packing", &is_packing.to_string(), &setting);
    }
    if is_packing && conversion.trainer == Trainer::LlamaFactory && !neat.is_some_and(|(on, _)| on)
    {
        conversion.note("LLaMA-Factory's `packing` without `neat_packing` lets the samples of a pack attend to each other; here they never do");
    }
    let cutoff = conversion.consume_count(Role::CutoffLen);
    if let Some((length, setting)) = &cutoff {
        conversion.write_setting("data.max_length", &length.to_string(), setting);
        let comment = format!("cuts long samples: {}", conversion.origin(setting));
        conversion.write("data.truncation", "right", &comment);
        conversion.note("LLaMA-Factory cuts prompt and answer of a long sample in proportion; `truncation: right` cuts its end");
    }
    let max_length = conversion.consume_count(Role::MaxLength);
    if let Some((length, setting)) = &max_length {
        conversion.write_setting("data.max_length", &length.to_string(), setting);
    }
    truncation(conversion, max_length.is_some());
    if is_packing {
        pack(conversion, cutoff.or(max_length));
    }
    is_packing
}

/// Writes the keys of packs; `longest` is the maximum length of a sample.
fn pack(conversion: &mut Conversion, longest: Option<(u64, Setting)>) {
    match conversion.consume_count(Role::PackingLength).or(longest) {
        Some((length, setting)) => {
            conversion.write_setting("data.packing_length", &length.to_string(), &setting);
        }
        None => conversion.refuse_missing(
            "max_length",
            "`packing` needs the length of a pack: add `packing_length` or `max_length`",
        ),
    }
    let Some(setting) = conversion.consume(Role::PackingStrategy) else { return };
    let ours = match setting.value.text().unwrap_or_default() {
        "binpack" | "knapsack" | "best_fit" | "balanced" => "best_fit",
        // lmms-engine's first_fit only fills the newest pack
        "sequential" | "first_fit" => "sequential",
        _ => return conversion.refuse(
            &setting,
            "expected `binpack`, `knapsack`, `best_fit`, `balanced`, `sequential` or `first_fit`",
        ),
    };
    conversion.write_setting("data.packing_strategy", ours, &setting);
}

fn truncation(conversion: &mut Conversion, has_length: bool) {
    let Some(setting) = conversion.consume(Role::Truncation) else { return };
    let ours = match setting.value.text().unwrap_or_default() {
        "delete" => "delete",
        "left" => "left",
        "right" => "right",
        "raise" | "error" => "error",
        _ => return conversion.refuse(&setting, "expected `delete`, `left`, `right` or `raise`"),
    };
    if matches!(ours, "left" | "right") && !has_length {
        return conversion.refuse(&setting, "it needs `max_length`");
    }
    conversion.write_setting("data.truncation", ours, &setting);
}
