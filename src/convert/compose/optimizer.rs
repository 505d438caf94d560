//! Learning rates, schedule and warm-up.

use super::adapter::Tuning;
use crate::convert::rule::Role;
use crate::convert::tables::transformers::SHARD;
use crate::convert::trainer::Trainer;
use crate::convert::value::{Setting, Value};
use crate::convert::work::Work;

/// Writes the keys of `optim` that need several settings.
pub(super) fn optimizer(work: &mut Work, tuning: Tuning) {
    let mut lr = work.number(Role::Lr);
    if let (Some((lr, setting)), Trainer::MsSwift, Tuning::Adapter { .. }) =
        (&mut lr, work.trainer, tuning)
        && !setting.is_given()
    {
        (*lr, setting.value) = (1e-4, Value::Text("1e-4".to_owned()));
    }
    if let Some((_, setting)) = &lr {
        let text = setting.value.text().unwrap_or_default().to_owned();
        work.write_from("optim.lr", &text, setting);
    }
    multipliers(work, lr.as_ref().map(|(lr, _)| *lr));
    let (first, second) = (work.number(Role::Beta1), work.number(Role::Beta2));
    if let (Some((first, a)), Some((second, b))) = (first, second)
        && (a.is_given() || b.is_given() || (first, second) != (0.9, 0.999))
    {
        let comment = format!("{}, {}", work.from(&a), work.from(&b));
        work.write("optim.betas", &format!("[{first}, {second}]"), &comment);
    }
    let is_8bit = kind(work);
    shard(work, is_8bit);
    let is_constant = schedule(work, lr.map(|(lr, _)| lr));
    warm_up(work, is_constant);
}

/// Writes `optim.kind`. Returns whether the moments have 8 bits.
fn kind(work: &mut Work) -> bool {
    let Some(setting) = work.take(Role::Optimizer) else { return false };
    match setting.value.text().unwrap_or_default() {
        "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit" => {
            work.write_from("optim.kind", "adamw_8bit", &setting);
            return true;
        }
        "adamw" | "adamw_torch" | "adamw_torch_fused" | "adamw_torch_xla" | "adamw_hf"
        | "adamw_apex_fused" | "adamw_anyprecision" => {
            work.drop(&setting, "AdamW with moments in f32 is the default here");
        }
        _ => work
            .refuse(&setting, "set `optim.kind` to `adamw`, `adamw_8bit`, `muon` or `adafactor`"),
    }
    false
}

/// Writes `distributed.shard` from a stage of ZeRO or FSDP.
fn shard(work: &mut Work, is_8bit: bool) {
    let Some(setting) = work.take(Role::Shard) else { return };
    let text = setting.value.to_string().to_ascii_lowercase();
    let stages: [(&str, &[&str]); 3] = [
        ("full", &["zero3", "z3", "full_shard"]),
        ("gradients", &["zero2", "z2", "shard_grad_op"]),
        ("optimizer", &["zero1", "z1"]),
    ];
    let ours = match &setting.value {
        Value::Text(_) if setting.value.flag() == Some(true) => Some("full"),
        Value::Text(_) => stages
            .iter()
            .find(|(_, names)| names.iter().any(|name| text.contains(name)))
            .map(|(ours, _)| *ours),
        _ => (1..=3).find(|n| text.contains(&format!("stage: {n}"))).map(|n| stages[3 - n].0),
    };
    match ours {
        Some(ours) if !is_8bit => work.write_from("distributed.shard", ours, &setting),
        _ => work.drop(&setting, SHARD),
    }
}

fn multipliers(work: &mut Work, lr: Option<f64>) {
    let (mut entries, mut from) = (Vec::new(), Vec::new());
    for (role, part) in [(Role::VisionLr, "vision"), (Role::AlignerLr, "merger")] {
        let Some((rate, setting)) = work.number(role) else { continue };
        if work.out.lists("model.freeze", part) == Some(true)
            || work.out.lists("adapter.parts", part) == Some(false)
        {
            work.drop(&setting, &format!("nothing of `{part}` is trained"));
            continue;
        }
        let Some(lr) = lr.filter(|lr| *lr > 0.0) else {
            work.refuse(&setting, "it needs a `learning_rate` above 0");
            continue;
        };
        // 12 digits hide the rounding of the division
        entries.push(format!(
            "{part}: {}",
            format!("{:.12}", rate / lr).trim_end_matches('0').trim_end_matches('.')
        ));
        from.push(format!("{} / learning_rate", work.from(&setting)));
    }
    if let Some((ratio, setting)) = work.number(Role::LoraPlus) {
        if entries.is_empty() {
            entries.push(format!("\"*lora_B*\": {ratio}"));
            from.push(work.from(&setting));
        } else {
            work.refuse(&setting, "it cannot be combined with rates of the vision encoder");
        }
    }
    if !entries.is_empty() {
        let value = format!("{{{}}}", entries.join(", "));
        work.write("optim.lr_multipliers", &value, &from.join(", "));
    }
}

/// Writes the schedule. Returns whether the rate is constant without warm-up.
fn schedule(work: &mut Work, lr: Option<f64>) -> bool {
    let arguments = work.given(Role::ScheduleArgs);
    let Some(setting) = work.take(Role::Schedule) else { return false };
    let name = setting.value.text().unwrap_or_default().to_owned();
    let ours = match name.as_str() {
        "cosine" | "cosine_with_min_lr" => "cosine",
        "linear" => "linear",
        "constant" | "constant_with_warmup" => "constant",
        _ => {
            work.refuse(
                &setting,
                "convert with `cosine`, `linear` or `constant`; `optim.schedule` also has `wsd`",
            );
            return false;
        }
    };
    work.write_from("optim.schedule", ours, &setting);
    if name == "cosine_with_min_lr" {
        min_lr(work, &setting, arguments, lr);
    } else if let Some(arguments) = arguments {
        if arguments.value.is_off() {
            work.drop(&arguments, "it is empty");
        } else {
            work.refuse(&arguments, "the schedules cosine, linear and constant have no arguments");
        }
    }
    name == "constant"
}

fn min_lr(work: &mut Work, schedule: &Setting, arguments: Option<Setting>, lr: Option<f64>) {
    let Some(arguments) = arguments else {
        return work
            .refuse(schedule, "it needs `lr_scheduler_kwargs` with `min_lr` or `min_lr_rate`");
    };
    let Value::Map(entries) = &arguments.value else {
        return work.refuse(&arguments, "expected a mapping with `min_lr` or `min_lr_rate`");
    };
    let comment = work.from(&arguments);
    match entries.as_slice() {
        [(key, value)] if key == "min_lr" && value.number().is_some() => {
            work.write("optim.min_lr", value.text().unwrap_or_default(), &comment);
        }
        [(key, value)] if key == "min_lr_rate" && value.number().is_some() => {
            let rate = value.number().unwrap_or_default() * lr.unwrap_or_default();
            work.write(
                "optim.min_lr",
                &format!("{rate:e}"),
                &format!("rate x learning_rate: {comment}"),
            );
        }
        _ => work.refuse(&arguments, "expected only `min_lr` or `min_lr_rate`, a number"),
    }
}

fn warm_up(work: &mut Work, is_constant: bool) {
    let (ratio, steps) = (work.number(Role::WarmupRatio), work.number(Role::WarmupSteps));
    let is_on = |found: &(f64, Setting)| found.0 > 0.0;
    let chosen = steps.clone().filter(is_on).or_else(|| ratio.clone().filter(is_on));
    for (value, setting) in [ratio, steps].into_iter().flatten() {
        let is_chosen = chosen.as_ref().is_some_and(|(_, chosen)| *chosen == setting);
        if is_chosen && is_constant {
            work.drop(
                &setting,
                "transformers' schedule `constant` has no warm-up; use `constant_with_warmup`",
            );
        } else if is_chosen && (value < 1.0 || setting.name() == "warmup_ratio") {
            // transformers 5 reads `warmup_steps` below 1 as a ratio
            let text = setting.value.text().unwrap_or_default().to_owned();
            work.write("optim.warmup_ratio", &text, &work.from(&setting));
        } else if is_chosen && setting.value.count().is_none() {
            work.refuse(&setting, "expected a whole number of steps");
        } else if is_chosen {
            work.write("optim.warmup_steps", &(value as u64).to_string(), &work.from(&setting));
        } else if value == 0.0 {
            work.drop(&setting, "no warm-up, as here");
        } else {
            work.drop(&setting, "`warmup_steps` decides");
        }
    }
    if chosen.is_some() && !is_constant {
        work.note("the first step of a warm-up has the rate 0 in transformers, and lr / warm-up steps here");
    }
}
