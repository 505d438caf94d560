//! Learning rates, schedule and warm-up.

use super::adapter::Tuning;
use crate::conversion::Conversion;
use crate::tables::{Role, row_of};
use crate::trainer::Trainer;
use crate::value::{Setting, Value};

/// Writes the keys of `optim` that need several settings.
pub(super) fn optimizer(conversion: &mut Conversion, tuning: Tuning) {
    let mut lr = conversion.consume_number(Role::Lr);
    if let (Some((lr, setting)), Trainer::MsSwift, Tuning::Adapter { .. }) =
        (&mut lr, conversion.trainer, tuning)
        && !setting.is_written()
    {
        (*lr, setting.value) = (1e-4, Value::Text("1e-4".to_owned()));
    }
    if let Some((_, setting)) = &lr {
        let text = setting.value.text().unwrap_or_default().to_owned();
        conversion.write_setting("optim.lr", &text, setting);
    }
    multipliers(conversion, lr.as_ref().map(|(lr, _)| *lr));
    let (first, second) =
        (conversion.consume_number(Role::Beta1), conversion.consume_number(Role::Beta2));
    if let (Some((first, a)), Some((second, b))) = (first, second)
        && (a.is_written() || b.is_written() || (first, second) != (0.9, 0.999))
    {
        let comment = format!("{}, {}", conversion.origin(&a), conversion.origin(&b));
        conversion.write("optim.betas", &format!("[{first}, {second}]"), &comment);
    }
    let is_8bit = kind(conversion);
    shard(conversion, is_8bit);
    let is_constant = schedule(conversion, lr.map(|(lr, _)| lr));
    warm_up(conversion, is_constant);
}

/// Writes `optim.kind`. Returns whether the moments have 8 bits.
fn kind(conversion: &mut Conversion) -> bool {
    let Some(setting) = conversion.consume(Role::Optimizer) else { return false };
    match setting.value.text().unwrap_or_default() {
        "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit" => {
            conversion.write_setting("optim.kind", "adamw_8bit", &setting);
            return true;
        }
        "adamw" | "adamw_torch" | "adamw_torch_fused" | "adamw_torch_xla" | "adamw_hf"
        | "adamw_apex_fused" | "adamw_anyprecision" => {
            conversion.drop(&setting, "AdamW with moments in f32 is the default here");
        }
        _ => conversion
            .refuse(&setting, "set `optim.kind` to `adamw`, `adamw_8bit`, `muon` or `adafactor`"),
    }
    false
}

/// Writes `distributed.shard` from a stage of ZeRO or FSDP.
fn shard(conversion: &mut Conversion, is_8bit: bool) {
    let Some(setting) = conversion.consume(Role::Shard) else { return };
    let text = setting.value.to_string().to_ascii_lowercase();
    let stages: [(&str, &[&str]); 3] = [
        ("full", &["zero3", "z3", "full_shard"]),
        ("gradients", &["zero2", "z2", "shard_grad_op"]),
        ("optimizer", &["zero1", "z1"]),
    ];
    let ours = match &setting.value {
        Value::Text(_) if setting.value.boolean() == Some(true) => Some("full"),
        Value::Text(_) => stages
            .iter()
            .find(|(_, names)| names.iter().any(|name| text.contains(name)))
            .map(|(ours, _)| *ours),
        _ => (1..=3).find(|n| text.contains(&format!("stage: {n}"))).map(|n| stages[3 - n].0),
    };
    match ours {
        Some(ours) if !is_8bit => conversion.write_setting("distributed.shard", ours, &setting),
        _ => {
            let row = row_of(conversion.trainer, &setting.key).expect("a row has its role");
            conversion.drop(&setting, row.reason);
        }
    }
}

fn multipliers(conversion: &mut Conversion, lr: Option<f64>) {
    let (mut entries, mut from) = (Vec::new(), Vec::new());
    for (role, part) in [(Role::VisionLr, "vision"), (Role::AlignerLr, "merger")] {
        let Some((rate, setting)) = conversion.consume_number(role) else { continue };
        if conversion.lists("model.freeze", part) == Some(true)
            || conversion.lists("adapter.parts", part) == Some(false)
        {
            conversion.drop(&setting, &format!("nothing of `{part}` is trained"));
            continue;
        }
        let Some(lr) = lr.filter(|lr| *lr > 0.0) else {
            conversion.refuse(&setting, "it needs a `learning_rate` above 0");
            continue;
        };
        // 12 digits hide the rounding of the division
        entries.push(format!(
            "{part}: {}",
            format!("{:.12}", rate / lr).trim_end_matches('0').trim_end_matches('.')
        ));
        from.push(format!("{} / learning_rate", conversion.origin(&setting)));
    }
    if let Some((ratio, setting)) = conversion.consume_number(Role::LoraPlus) {
        if entries.is_empty() {
            entries.push(format!("\"*lora_B*\": {ratio}"));
            from.push(conversion.origin(&setting));
        } else {
            conversion.refuse(&setting, "it cannot be combined with rates of the vision encoder");
        }
    }
    if !entries.is_empty() {
        let value = format!("{{{}}}", entries.join(", "));
        conversion.write("optim.lr_multipliers", &value, &from.join(", "));
    }
}

/// Writes the schedule. Returns whether the rate is constant without warm-up.
fn schedule(conversion: &mut Conversion, lr: Option<f64>) -> bool {
    let arguments = conversion.consume_written(Role::ScheduleArgs);
    let Some(setting) = conversion.consume(Role::Schedule) else { return false };
    let name = setting.value.text().unwrap_or_default().to_owned();
    let ours = match name.as_str() {
        "cosine" | "cosine_with_min_lr" => "cosine",
        "linear" => "linear",
        "constant" | "constant_with_warmup" => "constant",
        _ => {
            conversion.refuse(
                &setting,
                "convert with `cosine`, `linear` or `constant`; `optim.schedule` also has `wsd`",
            );
            return false;
        }
    };
    conversion.write_setting("optim.schedule", ours, &setting);
    if name == "cosine_with_min_lr" {
        min_lr(conversion, &setting, arguments, lr);
    } else if let Some(arguments) = arguments {
        if arguments.value.is_off() {
            conversion.drop(&arguments, "it is empty");
        } else {
            conversion
                .refuse(&arguments, "the schedules cosine, linear and constant have no arguments");
        }
    }
    name == "constant"
}

fn min_lr(
    conversion: &mut Conversion,
    schedule: &Setting,
    arguments: Option<Setting>,
    lr: Option<f64>,
) {
    let Some(arguments) = arguments else {
        return conversion
            .refuse(schedule, "it needs `lr_scheduler_kwargs` with `min_lr` or `min_lr_rate`");
    };
    let Value::Map(entries) = &arguments.value else {
        return conversion.refuse(&arguments, "expected a mapping with `min_lr` or `min_lr_rate`");
    };
    let comment = conversion.origin(&arguments);
    match entries.as_slice() {
        [(key, value)] if key == "min_lr" && value.number().is_some() => {
            conversion.write("optim.min_lr", value.text().unwrap_or_default(), &comment);
        }
        [(key, value)] if key == "min_lr_rate" && value.number().is_some() => {
            let rate = value.number().unwrap_or_default() * lr.unwrap_or_default();
            conversion.write(
                "optim.min_lr",
                &format!("{rate:e}"),
                &format!("rate x learning_rate: {comment}"),
            );
        }
        _ => conversion.refuse(&arguments, "expected only `min_lr` or `min_lr_rate`, a number"),
    }
}

fn warm_up(conversion: &mut Conversion, is_constant: bool) {
    let (ratio, steps) = (
        conversion.consume_number(Role::WarmupRatio),
        conversion.consume_number(Role::WarmupSteps),
    );
    let is_on = |found: &(f64, Setting)| found.0 > 0.0;
    let chosen = steps.clone().filter(is_on).or_else(|| ratio.clone().filter(is_on));
    for (value, setting) in [ratio, steps].into_iter().flatten() {
        let is_chosen = chosen.as_ref().is_some_and(|(_, chosen)| *chosen == setting);
        if is_chosen && is_constant {
            conversion.drop(
                &setting,
                "transformers' schedule `constant` has no warm-up; use `constant_with_warmup`",
            );
        } else if is_chosen && (value < 1.0 || setting.name() == "warmup_ratio") {
            // transformers 5 reads `warmup_steps` below 1 as a ratio
            let text = setting.value.text().unwrap_or_default().to_owned();
            conversion.write("optim.warmup_ratio", &text, &conversion.origin(&setting));
        } else if is_chosen && setting.value.count().is_none() {
            conversion.refuse(&setting, "expected a whole number of steps");
        } else if is_chosen {
            conversion.write(
                "optim.warmup_steps",
                &(value as u64).to_string(),
                &conversion.origin(&setting),
            );
        } else if value == 0.0 {
            conversion.drop(&setting, "no warm-up, as here");
        } else {
            conversion.drop(&setting, "`warmup_steps` decides");
        }
    }
    if chosen.is_some() && !is_constant {
        conversion.note("the first step of a warm-up has the rate 0 in transformers, and lr / warm-up steps here");
    }
}
