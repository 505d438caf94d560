//! What is trained: the whole model, or the adapter of the config section `adapter`.

use super::model::Family;
use crate::convert::output::quoted;
use crate::convert::rule::Role;
use crate::convert::trainer::Trainer;
use crate::convert::value::{Setting, Value};
use crate::convert::work::{OFF, Work};

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tuning {
    Full,
    /// An adapter; `vision`: whether the vision encoder has one.
    Adapter {
        vision: bool,
    },
}

/// Settings of an adapter.
const ROLES: &[Role] = &[
    Role::Dora,
    Role::LoraAlpha,
    Role::LoraDropout,
    Role::LoraInit,
    Role::LoraPlus,
    Role::LoraRank,
    Role::LoraTarget,
    Role::ModulesToSave,
    Role::Rslora,
];

/// The parts of a model with a vision encoder.
const PARTS: [&str; 3] = ["llm", "vision", "merger"];

/// Writes the section `adapter`, unless the whole model is trained.
pub(super) fn tuning(work: &mut Work, family: Family) -> Tuning {
    let Some(tuner) = work.take(Role::Tuner) else { return Tuning::Full };
    let (start, special) = (work.given(Role::AdapterFrom), work.adapters());
    let is_lora = tuner.value.text() == Some("lora");
    if let Some((bits, setting)) = work.count(Role::QuantBits) {
        match bits {
            0 => work.drop(&setting, OFF),
            4 if is_lora => work.write_from("adapter.quantize", "nf4", &setting),
            _ if is_lora => work.refuse(&setting, "weights are quantised to 4 bits only"),
            _ => work.refuse(&setting, "quantised weights are not trained: use an adapter"),
        }
    }
    match tuner.value.text() {
        Some("lora") => {}
        Some("full") => {
            work.drop(&tuner, "all parameters that are not frozen are trained");
            for setting in ROLES.iter().filter_map(|role| work.take(*role)).collect::<Vec<_>>() {
                work.drop(&setting, "has no effect with full tuning");
            }
            for (setting, _) in special {
                work.drop(&setting, "has no effect with full tuning");
            }
            if let Some(setting) = start.filter(|setting| !setting.value.is_off()) {
                work.refuse(
                    &setting,
                    "merge the adapter into the model first: `trainer export --adapter DIR --merge`",
                );
            }
            return Tuning::Full;
        }
        _ => {
            work.refuse(&tuner, "only `lora` and `full` are supported");
            return Tuning::Full;
        }
    }
    for (setting, reason) in special {
        work.refuse_unless_off(&setting, reason);
    }
    let vision = match start.filter(|setting| !setting.value.is_off()) {
        Some(start) => start_from(work, &tuner, &start),
        None => new_adapter(work, &tuner, family),
    };
    work.note(
        "checkpoints and `final` contain the adapter only; `trainer export --adapter DIR --merge` writes a model with it",
    );
    Tuning::Adapter { vision }
}

/// Continues an adapter, which decides on all its properties.
fn start_from(work: &mut Work, tuner: &Setting, start: &Setting) -> bool {
    let names = names(&start.value).unwrap_or_default();
    let [folder] = &names[..] else {
        work.refuse(start, "expected the folder of one adapter; merge the others into the model");
        return false;
    };
    work.drop(tuner, "`adapter.start_from` decides");
    work.write("adapter.start_from", &quoted(folder), &work.from(start));
    if let Some((dropout, setting)) = work.number(Role::LoraDropout) {
        if setting.is_given() {
            work.write("adapter.dropout", &dropout.to_string(), &work.from(&setting));
        } else {
            work.note("`adapter.dropout` is the default; the other trainer takes the dropout that the adapter was trained with");
        }
    }
    let decided = ROLES.iter().filter(|role| **role != Role::LoraPlus);
    for setting in decided.filter_map(|role| work.take(*role)).collect::<Vec<_>>() {
        work.drop(&setting, "the adapter in `adapter.start_from` decides");
    }
    for role in [Role::FreezeVision, Role::FreezeMerger, Role::Deepstack, Role::FreezeLlm] {
        if let Some(setting) = work.take(role) {
            work.drop(&setting, "the adapter in `adapter.start_from` decides");
        }
    }
    true // unknown
}

fn new_adapter(work: &mut Work, tuner: &Setting, family: Family) -> bool {
    let (kind, from) = match work.flag(Role::Dora) {
        Some((true, setting)) => ("dora", setting),
        other => {
            if let Some((_, setting)) = other {
                work.drop(&setting, OFF);
            }
            ("lora", tuner.clone())
        }
    };
    work.write("adapter.kind", kind, &work.from(&from));
    let rank = work.count(Role::LoraRank);
    match &rank {
        Some((0, setting)) => work.refuse(setting, "expected a whole number of 1 or more"),
        Some((rank, setting)) => work.write_from("adapter.rank", &rank.to_string(), setting),
        None => {}
    }
    match (work.number(Role::LoraAlpha), rank) {
        (Some((alpha, setting)), _) => {
            work.write_from("adapter.alpha", &alpha.to_string(), &setting);
        }
        (None, Some((rank, setting))) if work.trainer == Trainer::LlamaFactory => {
            let from = format!("2 x {}: default of LLaMA-Factory", work.from(&setting));
            work.write("adapter.alpha", &(2 * rank).to_string(), &from);
        }
        (None, _) => {}
    }
    if let Some((dropout, setting)) = work.number(Role::LoraDropout) {
        work.write_from("adapter.dropout", &dropout.to_string(), &setting);
    }
    if let Some((rslora, setting)) = work.flag(Role::Rslora) {
        work.write_from("adapter.rslora", &rslora.to_string(), &setting);
    }
    init(work);
    modules_to_save(work);
    target(work, family)
}

fn init(work: &mut Work) {
    let Some(setting) = work.take(Role::LoraInit) else { return };
    if work.trainer == Trainer::LlamaFactory {
        return match setting.value.flag() {
            Some(true) => work.write_from("adapter.init", "pissa", &setting),
            Some(false) => work.drop(&setting, OFF),
            None => work.refuse(&setting, "expected true or false"),
        };
    }
    match setting.value.text().map(str::to_ascii_lowercase).as_deref() {
        Some("true" | "default") => work.write_from("adapter.init", "default", &setting),
        Some("gaussian") => work.write_from("adapter.init", "gaussian", &setting),
        Some(init @ ("pissa" | "olora")) => work.write_from("adapter.init", init, &setting),
        _ => work.refuse(&setting, "expected `true`, `gaussian`, `pissa` or `olora`"),
    }
}

fn modules_to_save(work: &mut Work) {
    let Some(setting) = work.take(Role::ModulesToSave) else { return };
    if setting.value.is_off() {
        return work.drop(&setting, "it is empty");
    }
    let Some(names) = names(&setting.value) else {
        return work.refuse(&setting, "expected names of modules");
    };
    // PEFT takes the modules whose names end with this text.
    let globs: Vec<String> = names.iter().map(|name| quoted(&format!("*{name}.*"))).collect();
    work.write("adapter.train_also", &format!("[{}]", globs.join(", ")), &work.from(&setting));
}

/// The items of a list, or of a text with commas; `None` if they are no names.
fn names(value: &Value) -> Option<Vec<String>> {
    let texts: Option<Vec<&str>> = value.items().iter().map(Value::text).collect();
    let names = texts?.into_iter().flat_map(|text| text.split(',')).map(str::trim);
    let names: Vec<String> = names.filter(|name| !name.is_empty()).map(str::to_owned).collect();
    (!names.is_empty()).then_some(names)
}

/// Writes `adapter.target` and `adapter.parts`. Returns whether the vision encoder has an adapter.
fn target(work: &mut Work, family: Family) -> bool {
    let mut from = Vec::new();
    let mut is_on = |work: &mut Work, role| {
        let Some((frozen, setting)) = work.flag(role) else { return false };
        if family == Family::Text && role != Role::FreezeLlm {
            work.drop(&setting, "the model has no vision encoder");
            return false;
        }
        from.push(work.from(&setting));
        !frozen
    };
    let llm = is_on(work, Role::FreezeLlm);
    let vision = is_on(work, Role::FreezeVision);
    let is_factory = work.trainer == Trainer::LlamaFactory;
    let merger = is_on(work, if is_factory { Role::Deepstack } else { Role::FreezeMerger });
    let from = from.join(", ");
    let targets = work.take(Role::LoraTarget);
    let is_name = |name: &String| {
        !name.starts_with("all-")
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    let mut globs = None;
    if let Some(setting) = targets {
        let names = names(&setting.value).unwrap_or_default();
        match &names[..] {
            [all] if all == "all-linear" || (is_factory && all == "all") => {}
            names if !names.is_empty() && names.iter().all(is_name) => {
                let value = names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ");
                globs = Some((format!("[{value}]"), setting));
            }
            _ => work.refuse(&setting, "expected all linear layers, or names such as `q_proj`"),
        }
    }
    if let Some((value, setting)) = &globs {
        work.write("adapter.target", value, &work.from(setting));
        if !is_factory {
            // PEFT selects by name in the whole model.
            let parts = if family == Family::Text { &PARTS[..1] } else { &PARTS[..] };
            let parts = format!("[{}]", parts.join(", "));
            work.write("adapter.parts", &parts, &work.from(setting));
            return family != Family::Text;
        }
    }
    let mut parts: Vec<&str> = PARTS
        .into_iter()
        .zip([llm, vision, merger])
        .filter(|(_, on)| *on)
        .map(|(p, _)| p)
        .collect();
    if parts.is_empty() {
        work.need("a trained part", "all parts of the model are frozen");
        return false;
    }
    if is_factory && vision != merger {
        // LLaMA-Factory counts the mergers of deepstack to the vision encoder.
        parts.retain(|part| *part != "merger");
        if vision && globs.is_none() {
            let mut layers = vec!["\"*.visual.blocks.*\""];
            if family == Family::Deepstack {
                layers.push("\"*.deepstack_merger_list.*\"");
            }
            if llm {
                layers.insert(0, "\"*.language_model.*\"");
            }
            work.write("adapter.target", &format!("[{}]", layers.join(", ")), &from);
            if family == Family::Deepstack {
                parts.push("merger");
            }
        }
    }
    work.write("adapter.parts", &format!("[{}]", parts.join(", ")), &from);
    vision
}
