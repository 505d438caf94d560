//! How long a run is, and when it saves, evaluates and logs.

use crate::conversion::Conversion;
use crate::line::quoted;
use crate::tables::Role;
use crate::trainer::Trainer;
use crate::value::{Setting, Value};

/// The most checkpoints to keep where the other trainer keeps all.
const KEEP_ALL: &str = "1000000";

/// Writes the length of the run, checkpoints, evaluation and log. `epoch` is the steps of an epoch,
/// if known.
pub(super) fn steps(conversion: &mut Conversion, epoch: Option<u64>) {
    length(conversion);
    let saved = every(
        conversion,
        Role::SaveStrategy,
        Role::SaveSteps,
        "checkpoint.every_steps",
        epoch,
        None,
    );
    keep(conversion);
    let expected = "a whole number of steps of 1 or more, not a share of the run";
    let log = conversion
        .consume_as(Role::LogSteps, expected, |value| value.count().filter(|steps| *steps > 0));
    if let Some((steps, setting)) = &log {
        conversion.write_setting("log.every_steps", &steps.to_string(), setting);
    }
    trackers(conversion);
    early_stopping(conversion);
    // what `eval_steps` follows if it is left out
    let followed = if conversion.trainer == Trainer::MsSwift { saved } else { log };
    if conversion.has_eval() {
        every(conversion, Role::EvalStrategy, Role::EvalSteps, "eval.every_steps", epoch, followed);
    } else {
        let roles = [Role::EvalStrategy, Role::EvalSteps];
        conversion.drop_roles(roles, "there is no evaluation data");
    }
}

/// Writes `log.trackers`, and the names of project and run.
fn trackers(conversion: &mut Conversion) {
    let listed = conversion.consume(Role::Trackers);
    let items = listed.iter().flat_map(|setting| setting.value.items());
    let mut names: Vec<&str> = items.filter_map(Value::text).collect();
    names.retain(|name| !["none", ""].contains(name));
    for name in &mut names {
        if *name == "all" {
            *name = "tensorboard"; // needs no package
        }
    }
    let swanlab = conversion.consume(Role::UseSwanlab);
    let uses_swanlab = |setting: &Setting| setting.value.boolean() == Some(true);
    if swanlab.as_ref().is_some_and(uses_swanlab) && !names.contains(&"swanlab") {
        names.push("swanlab");
    }
    if let Some(setting) = listed.as_ref().or(swanlab.as_ref()) {
        if let Some(unknown) = names.iter().find(|name| !TRACKERS.contains(name)) {
            let reason = format!("there is no tracker `{unknown}`, only {}", TRACKERS.join(", "));
            conversion.refuse(setting, &reason);
        } else if names.is_empty() {
            conversion.drop(setting, "no tracker is the default here too");
        } else {
            let value = format!("[{}]", names.join(", "));
            conversion.write("log.trackers", &value, &conversion.origin(setting));
        }
    }
    for (role, key) in [(Role::Project, "log.project"), (Role::RunName, "log.run_name")] {
        let Some(setting) = conversion.consume(role) else { continue };
        match setting.value.text() {
            Some(text) => conversion.write_setting(key, &quoted(text), &setting),
            None => conversion.write_setting(key, &quoted(&setting.value.to_string()), &setting),
        }
    }
}

const TRACKERS: [&str; 4] = ["tensorboard", "wandb", "mlflow", "swanlab"];

/// Writes `eval.early_stopping`; the metric is `eval.loss`, the same as in LLaMA-Factory.
fn early_stopping(conversion: &mut Conversion) {
    let Some(setting) = conversion.consume(Role::EarlyStopping) else { return };
    match setting.value.count() {
        Some(count) if count > 0 && !conversion.has_eval() => {
            conversion.drop(&setting, "there is no evaluation data");
        }
        Some(count) if count > 0 => {
            let value = format!("{{patience: {count}}}");
            conversion.write("eval.early_stopping", &value, &conversion.origin(&setting));
        }
        _ => {
            conversion
                .refuse_unless_off(&setting, "expected a whole number of evaluations of 1 or more");
        }
    }
}

fn length(conversion: &mut Conversion) {
    let (epochs, max_steps) =
        (conversion.consume_number(Role::Epochs), conversion.consume_number(Role::MaxSteps));
    if let Some((steps, setting)) = max_steps {
        if steps > 0.0 && setting.value.count().is_some() {
            conversion.write(
                "train.max_steps",
                &(steps as u64).to_string(),
                &conversion.origin(&setting),
            );
            if let Some((_, epochs)) = epochs {
                conversion.drop(&epochs, "`max_steps` overrides it");
            }
            return;
        }
        conversion.drop(&setting, "no limit");
    }
    if let Some((count, setting)) = epochs {
        if setting.value.count().is_some_and(|epochs| epochs > 0) {
            conversion.write_setting("train.epochs", &(count as u64).to_string(), &setting);
        } else {
            conversion.refuse(
                &setting,
                "expected a whole number of epochs; for a part of an epoch use `max_steps`",
            );
        }
    }
}

/// Writes how often something happens, from a strategy and a number of steps; the same number as
/// `fallback` if none is given. Returns the number.
fn every(
    conversion: &mut Conversion,
    strategy: Role,
    steps: Role,
    key: &str,
    epoch: Option<u64>,
    fallback: Option<(u64, Setting)>,
) -> Option<(u64, Setting)> {
    let strategy = conversion.consume(strategy);
    let steps = conversion.consume(steps);
    let name = strategy.as_ref().and_then(|setting| setting.value.text()).unwrap_or("steps");
    match (name.to_ascii_lowercase().as_str(), &strategy) {
        ("steps", _) | (_, None) => {}
        ("no" | "false", Some(setting)) => {
            conversion.write_setting(key, "0", setting);
            if let Some(steps) = steps {
                conversion.drop(&steps, &format!("`{}: no` decides", setting.key));
            }
            return None;
        }
        ("epoch", Some(setting)) => {
            if let Some(steps) = steps {
                conversion.drop(&steps, &format!("`{}: epoch` decides", setting.key));
            }
            match epoch {
                Some(epoch) => {
                    let comment = format!("steps of an epoch: {}", conversion.origin(setting));
                    conversion.write(key, &epoch.to_string(), &comment);
                }
                None => conversion.refuse(setting, "the steps of an epoch are not known here: write `steps`, with a number of steps"),
            }
            return None;
        }
        (_, Some(setting)) => {
            conversion.refuse(setting, "expected `steps`, `epoch` or `no`");
            return None;
        }
    }
    let found = match steps {
        None => fallback,
        Some(setting) => match setting.value.count() {
            Some(count) if count > 0 => Some((count, setting)),
            _ => {
                conversion
                    .refuse(&setting, "expected a whole number of steps, not a share of the run");
                None
            }
        },
    };
    let (count, setting) = found?;
    conversion.write_setting(key, &count.to_string(), &setting);
    if let Some(strategy) = &strategy {
        conversion.drop(strategy, &format!("`{key}` counts steps"));
    }
    Some((count, setting))
}

fn keep(conversion: &mut Conversion) {
    let Some(setting) = conversion.consume(Role::Keep) else { return };
    match setting.value.count() {
        Some(count) if count > 0 => {
            conversion.write_setting("checkpoint.keep", &count.to_string(), &setting);
        }
        _ if setting.value.is_off() => {
            conversion.write("checkpoint.keep", KEEP_ALL, &conversion.origin(&setting));
            conversion.note(format!("{} keeps every checkpoint unless `save_total_limit` is set: check the space on the disk", conversion.trainer.title()));
        }
        _ => conversion.refuse(&setting, "expected a whole number of 1 or more"),
    }
}
