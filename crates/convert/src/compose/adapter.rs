//! What is trained: the whole model, or the adapter of the config section `adapter`.

use super::model::Family;
use crate::conversion::{Conversion, OFF};
use crate::line::quoted;
use crate::tables::Role;
use crate::trainer::Trainer;
use crate::value::{Setting, Value};

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
const ROLES: [Role; 9] = [
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
pub(super) fn tuning(conversion: &mut Conversion, family: Family) -> Tuning {
    let Some(tuner) = conversion.consume(Role::Tuner) else { return Tuning::Full };
    let (start, special) =
        (conversion.consume_written(Role::AdapterFrom), conversion.consume_adapters());
    let is_lora = tuner.value.text() == Some("lora");
    if let Some((bits, setting)) = conversion.consume_count(Role::QuantBits) {
        match bits {
            0 => conversion.drop(&setting, OFF),
            4 if is_lora => conversion.write_setting("adapter.quantize", "nf4", &setting),
            _ if is_lora => conversion.refuse(&setting, "weights are quantised to 4 bits only"),
            _ => conversion.refuse(&setting, "quantised weights are not trained: use an adapter"),
        }
    }
    match tuner.value.text() {
        Some("lora") => {}
        Some("full") => {
            conversion.drop(&tuner, "all parameters that are not frozen are trained");
            conversion.drop_roles(ROLES, "has no effect with full tuning");
            for (setting, _) in special {
                conversion.drop(&setting, "has no effect with full tuning");
            }
            if let Some(setting) = start.filter(|setting| !setting.value.is_off()) {
                conversion.refuse(
                    &setting,
                    "merge the adapter into the model first: `trainer export --adapter DIR --merge`",
                );
            }
            return Tuning::Full;
        }
        _ => {
            conversion.refuse(&tuner, "only `lora` and `full` are supported");
            return Tuning::Full;
        }
    }
    for (setting, reason) in special {
        conversion.refuse_unless_off(&setting, reason);
    }
    let vision = match start.filter(|setting| !setting.value.is_off()) {
        Some(start) => start_from(conversion, &tuner, &start),
        None => new_adapter(conversion, &tuner, family),
    };
    conversion.note(
        "checkpoints and `final` contain the adapter only; `trainer export --adapter DIR --merge` writes a model with it",
    );
    Tuning::Adapter { vision }
}

/// Continues an adapter, which decides on all its properties.
fn start_from(conversion: &mut Conversion, tuner: &Setting, start: &Setting) -> bool {
    let names = names(&start.value).unwrap_or_default();
    let [folder] = &names[..] else {
        conversion
            .refuse(start, "expected the folder of one adapter; merge the others into the model");
        return false;
    };
    conversion.drop(tuner, "`adapter.start_from` decides");
    conversion.write("adapter.start_from", &quoted(folder), &conversion.origin(start));
    if let Some((dropout, setting)) = conversion.consume_number(Role::LoraDropout) {
        if setting.is_written() {
            conversion.write("adapter.dropout", &dropout.to_string(), &conversion.origin(&setting));
        } else {
            conversion.note("`adapter.dropout` is the default; the other trainer takes the dropout that the adapter was trained with");
        }
    }
    let decided = ROLES.into_iter().filter(|role| *role != Role::LoraPlus);
    let frozen = [Role::FreezeVision, Role::FreezeMerger, Role::Deepstack, Role::FreezeLlm];
    conversion.drop_roles(decided.chain(frozen), "the adapter in `adapter.start_from` decides");
    true // unknown
}

fn new_adapter(conversion: &mut Conversion, tuner: &Setting, family: Family) -> bool {
    let (kind, from) = match conversion.consume_boolean(Role::Dora) {
        Some((true, setting)) => ("dora", setting),
        other => {
            if let Some((_, setting)) = other {
                conversion.drop(&setting, OFF);
            }
            ("lora", tuner.clone())
        }
    };
    conversion.write("adapter.kind", kind, &conversion.origin(&from));
    let rank = conversion.consume_count(Role::LoraRank);
    match &rank {
        Some((0, setting)) => conversion.refuse(setting, "expected a whole number of 1 or more"),
        Some((rank, setting)) => {
            conversion.write_setting("adapter.rank", &rank.to_string(), setting);
        }
        None => {}
    }
    match (conversion.consume_number(Role::LoraAlpha), rank) {
        (Some((alpha, setting)), _) => {
            conversion.write_setting("adapter.alpha", &alpha.to_string(), &setting);
        }
        (None, Some((rank, setting))) if conversion.trainer == Trainer::LlamaFactory => {
            let from = format!("2 x {}: default of LLaMA-Factory", conversion.origin(&setting));
            conversion.write("adapter.alpha", &(2 * rank).to_string(), &from);
        }
        (None, _) => {}
    }
    if let Some((dropout, setting)) = conversion.consume_number(Role::LoraDropout) {
        conversion.write_setting("adapter.dropout", &dropout.to_string(), &setting);
    }
    if let Some((rslora, setting)) = conversion.consume_boolean(Role::Rslora) {
        conversion.write_setting("adapter.rslora", &rslora.to_string(), &setting);
    }
    init(conversion);
    modules_to_save(conversion);
    target(conversion, family)
}

fn init(conversion: &mut Conversion) {
    let Some(setting) = conversion.consume(Role::LoraInit) else { return };
    if conversion.trainer == Trainer::LlamaFactory {
        return match setting.value.boolean() {
            Some(true) => conversion.write_setting("adapter.init", "pissa", &setting),
            Some(false) => conversion.drop(&setting, OFF),
            None => conversion.refuse(&setting, "expected true or false"),
        };
    }
    match setting.value.text().map(str::to_ascii_lowercase).as_deref() {
        Some("true" | "default") => conversion.write_setting("adapter.init", "default", &setting),
        Some("gaussian") => conversion.write_setting("adapter.init", "gaussian", &setting),
        Some(init @ ("pissa" | "olora")) => {
            conversion.write_setting("adapter.init", init, &setting);
        }
        _ => conversion.refuse(&setting, "expected `true`, `gaussian`, `pissa` or `olora`"),
    }
}

fn modules_to_save(conversion: &mut Conversion) {
    let Some(setting) = conversion.consume(Role::ModulesToSave) else { return };
    if setting.value.is_off() {
        return conversion.drop(&setting, "it is empty");
    }
    let Some(names) = names(&setting.value) else {
        return conversion.refuse(&setting, "expected names of modules");
    };
    // PEFT takes the modules whose names end with this text.
    let globs: Vec<String> = names.iter().map(|name| quoted(&format!("*{name}.*"))).collect();
    conversion.write(
        "adapter.train_also",
        &format!("[{}]", globs.join(", ")),
        &conversion.origin(&setting),
    );
}

/// The items of a list, or of a text with commas; `None` if they are no names.
fn names(value: &Value) -> Option<Vec<String>> {
    let texts: Option<Vec<&str>> = value.items().iter().map(Value::text).collect();
    let names = texts?.into_iter().flat_map(|text| text.split(',')).map(str::trim);
    let names: Vec<String> = names.filter(|name| !name.is_empty()).map(str::to_owned).collect();
    (!names.is_empty()).then_some(names)
}

/// Writes `adapter.target` and `adapter.parts`. Returns whether the vision encoder has an adapter.
fn target(conversion: &mut Conversion, family: Family) -> bool {
    let mut from = Vec::new();
    let mut is_on = |conversion: &mut Conversion, role| {
        let Some((frozen, setting)) = conversion.consume_boolean(role) else { return false };
        if family == Family::Text && role != Role::FreezeLlm {
            conversion.drop(&setting, "the model has no vision encoder");
            return false;
        }
        from.push(conversion.origin(&setting));
        !frozen
    };
    let llm = is_on(conversion, Role::FreezeLlm);
    let vision = is_on(conversion, Role::FreezeVision);
    let is_factory = conversion.trainer == Trainer::LlamaFactory;
    let merger = is_on(conversion, if is_factory { Role::Deepstack } else { Role::FreezeMerger });
    let from = from.join(", ");
    let targets = conversion.consume(Role::LoraTarget);
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
            _ => {
                conversion
                    .refuse(&setting, "expected all linear layers, or names such as `q_proj`");
            }
        }
    }
    if let Some((value, setting)) = &globs {
        conversion.write("adapter.target", value, &conversion.origin(setting));
        if !is_factory {
            // PEFT selects by name in the whole model.
            let parts = if family == Family::Text { &PARTS[..1] } else { &PARTS[..] };
            let parts = format!("[{}]", parts.join(", "));
            conversion.write("adapter.parts", &parts, &conversion.origin(setting));
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
        conversion.refuse_missing("a trained part", "all parts of the model are frozen");
        return false;
    }
    if is_factory && vision != merger && !family.has_own_merger() {
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
            conversion.write("adapter.target", &format!("[{}]", layers.join(", ")), &from);
            if family == Family::Deepstack {
                parts.push("merger");
            }
        }
    }
    conversion.write("adapter.parts", &format!("[{}]", parts.join(", ")), &from);
    vision
}
