//! How long a run is, and when it saves, evaluates and logs.

use crate::convert::rule::Role;
use crate::convert::trainer::Trainer;
use crate::convert::value::Setting;
use crate::convert::work::Work;

/// The most checkpoints to keep where the other trainer keeps all.
const KEEP_ALL: &str = "1000000";

/// Writes the length of the run, checkpoints, evaluation and log. `epoch` is the steps of an epoch,
/// if known.
pub(super) fn steps(work: &mut Work, epoch: Option<u64>) {
    length(work);
    let saved =
        every(work, Role::SaveStrategy, Role::SaveSteps, "checkpoint.every_steps", epoch, None);
    keep(work);
    let expected = "a whole number of steps of 1 or more, not a share of the run";
    let log = work.read(Role::LogSteps, expected, |value| value.count().filter(|steps| *steps > 0));
    if let Some((steps, setting)) = &log {
        work.write_from("log.every_steps", &steps.to_string(), setting);
    }
    trackers(work);
    early_stopping(work);
    // what `eval_steps` follows if it is left out
    let followed = if work.trainer == Trainer::MsSwift { saved } else { log };
    if work.out.eval.is_empty() {
        for role in [Role::EvalStrategy, Role::EvalSteps] {
            while let Some(setting) = work.take(role) {
                work.drop(&setting, "there is no evaluation data");
            }
        }
    } else {
        every(work, Role::EvalStrategy, Role::EvalSteps, "eval.every_steps", epoch, followed);
    }
}

/// Writes `log.trackers`.
fn trackers(work: &mut Work) {
    let Some(setting) = work.take(Role::Trackers) else { return };
    let names: Vec<&str> = setting.value.items().iter().filter_map(|name| name.text()).collect();
    if names.iter().any(|name| ["tensorboard", "all"].contains(name)) {
        work.write("log.trackers", "[tensorboard]", &work.from(&setting));
    } else if names.contains(&"wandb") {
        work.drop(&setting, "scripts/trackers/to_wandb.py sends the logs of a finished run");
    } else if names.iter().all(|name| *name == "none") {
        work.drop(&setting, "no tracker is the default here too");
    } else {
        work.drop(&setting, "every step is in `metrics.jsonl`; the only tracker is `tensorboard`");
    }
}

/// Writes `eval.early_stopping`; the metric is `eval.loss`, the same as in LLaMA-Factory.
fn early_stopping(work: &mut Work) {
    let Some(setting) = work.take(Role::EarlyStopping) else { return };
    match setting.value.count() {
        Some(count) if count > 0 && work.out.eval.is_empty() => {
            work.drop(&setting, "there is no evaluation data");
        }
        Some(count) if count > 0 => {
            let value = format!("{{patience: {count}}}");
            work.write("eval.early_stopping", &value, &work.from(&setting));
        }
        _ => {
            work.refuse_unless_off(&setting, "expected a whole number of evaluations of 1 or more");
        }
    }
}

fn length(work: &mut Work) {
    let (epochs, max_steps) = (work.number(Role::Epochs), work.number(Role::MaxSteps));
    if let Some((steps, setting)) = max_steps {
        if steps > 0.0 && setting.value.count().is_some() {
            work.write("train.max_steps", &(steps as u64).to_string(), &work.from(&setting));
            if let Some((_, epochs)) = epochs {
                work.drop(&epochs, "`max_steps` overrides it");
            }
            return;
        }
        work.drop(&setting, "no limit");
    }
    if let Some((count, setting)) = epochs {
        if setting.value.count().is_some_and(|epochs| epochs > 0) {
            work.write_from("train.epochs", &(count as u64).to_string(), &setting);
        } else {
            work.refuse(
                &setting,
                "expected a whole number of epochs; for a part of an epoch use `max_steps`",
            );
        }
    }
}

/// Writes how often something happens, from a strategy and a number of steps; the same number as
/// `fallback` if none is given. Returns the number.
fn every(
    work: &mut Work,
    strategy: Role,
    steps: Role,
    key: &str,
    epoch: Option<u64>,
    fallback: Option<(u64, Setting)>,
) -> Option<(u64, Setting)> {
    let strategy = work.take(strategy);
    let steps = work.take(steps);
    let name = strategy.as_ref().and_then(|setting| setting.value.text()).unwrap_or("steps");
    match (name.to_ascii_lowercase().as_str(), &strategy) {
        ("steps", _) | (_, None) => {}
        ("no" | "false", Some(setting)) => {
            work.write_from(key, "0", setting);
            if let Some(steps) = steps {
                work.drop(&steps, &format!("`{}: no` decides", setting.key));
            }
            return None;
        }
        ("epoch", Some(setting)) => {
            if let Some(steps) = steps {
                work.drop(&steps, &format!("`{}: epoch` decides", setting.key));
            }
            match epoch {
                Some(epoch) => {
                    let comment = format!("steps of an epoch: {}", work.from(setting));
                    work.write(key, &epoch.to_string(), &comment);
                }
                None => work.refuse(setting, "the steps of an epoch are not known here: write `steps`, with a number of steps"),
            }
            return None;
        }
        (_, Some(setting)) => {
            work.refuse(setting, "expected `steps`, `epoch` or `no`");
            return None;
        }
    }
    let found = match steps {
        None => fallback,
        Some(setting) => match setting.value.count() {
            Some(count) if count > 0 => Some((count, setting)),
            _ => {
                work.refuse(&setting, "expected a whole number of steps, not a share of the run");
                None
            }
        },
    };
    let (count, setting) = found?;
    work.write_from(key, &count.to_string(), &setting);
    if let Some(strategy) = &strategy {
        work.drop(strategy, &format!("`{key}` counts steps"));
    }
    Some((count, setting))
}

fn keep(work: &mut Work) {
    let Some(setting) = work.take(Role::Keep) else { return };
    match setting.value.count() {
        Some(count) if count > 0 => {
            work.write_from("checkpoint.keep", &count.to_string(), &setting);
        }
        _ if setting.value.is_off() => {
            work.write("checkpoint.keep", KEEP_ALL, &work.from(&setting));
            work.note(format!("{} keeps every checkpoint unless `save_total_limit` is set: check the space on the disk", work.trainer.title()));
        }
        _ => work.refuse(&setting, "expected a whole number of 1 or more"),
    }
}
