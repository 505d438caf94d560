//! The model, its precision, its frozen parts and recomputation.

use super::adapter::Tuning;
use crate::convert::output::quoted;
use crate::convert::rule::Role;
use crate::convert::trainer::Trainer;
use crate::convert::value::{Setting, Value};
use crate::convert::work::Work;

/// Kind of a model, judged by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    /// With the mergers of deepstack: Qwen3-VL.
    Deepstack,
    /// Qwen3.5.
    VisionLanguage,
    Qwen25Vl,
    Text,
}

impl Family {
    /// Pixels of an image per visual token.
    pub(super) fn pixels_per_token(self) -> u64 {
        if self == Self::Qwen25Vl { 28 * 28 } else { 32 * 32 }
    }
}

/// Parts of names of models that are not supported.
const OTHERS: &[&str] = &[
    "qwen1",
    "qwen2",
    "qwen3-next",
    "qwen3-omni",
    "qwen-vl",
    "qwq",
    "qvq",
    "llava",
    "internvl",
    "internlm",
    "gemma",
    "minicpm",
    "glm",
    "deepseek",
    "phi-",
    "mistral",
    "pixtral",
    "llama-",
    "ovis",
    "kimi",
    "molmo",
    "smolvlm",
    "idefics",
    "bagel",
    "mimo",
    "keye",
    "baichuan",
];

/// Writes `model.path`, `model.weights`, `model.precision` and `output_dir`.
pub(super) fn model(work: &mut Work) -> Family {
    let random = work.flag(Role::RandomWeights).filter(|(random, _)| *random);
    let random = random.map(|(_, setting)| setting).or_else(|| work.given(Role::RandomConfig));
    let path = work.read(Role::Model, "a folder or a hub id", |value| {
        value.text().filter(|text| !text.is_empty()).map(str::to_owned)
    });
    let mut family = Family::Deepstack;
    if let Some((path, setting)) = &path {
        match family_of(path) {
            Ok(found) => family = found,
            Err(reason) => work.refuse(setting, reason),
        }
        work.write_from("model.path", &quoted(path), setting);
        template(work, path);
    } else if let Some(setting) = &random {
        work.refuse(setting, "also give the folder with the config and the tokenizer as the model");
    } else {
        work.need("model", "the files name no model");
    }
    if let Some(setting) = &random {
        work.write_from("model.weights", "random", setting);
    }
    precision(work);
    if let Some(setting) = work.given(Role::Attention) {
        work.drop(&setting, "`model.attention: auto` takes the fastest exact kernel");
    }
    output_dir(work, path.as_ref().map(|(path, _)| path.as_str()));
    family
}

fn family_of(path: &str) -> Result<Family, &'static str> {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or(path).to_lowercase();
    let is_moe = name.split('-').any(|part| {
        part.strip_prefix('a').and_then(|rest| rest.strip_suffix('b')).is_some_and(|size| {
            !size.is_empty() && size.chars().all(|c| c.is_ascii_digit() || c == '.')
        })
    });
    let is_qwen25_vl = name.starts_with("qwen2.5-vl-");
    let is_other = !is_qwen25_vl && OTHERS.iter().any(|other| name.contains(other));
    if is_other || is_moe && !name.starts_with("qwen3") {
        return Err("only models of Qwen3-VL, Qwen2.5-VL, Qwen3 and Qwen3.5 are supported");
    }
    Ok(if name.starts_with("qwen3-") && !name.contains("vl") {
        Family::Text
    } else if is_qwen25_vl {
        Family::Qwen25Vl
    } else if name.starts_with("qwen3.5") {
        Family::VisionLanguage
    } else {
        Family::Deepstack
    })
}

/// Templates of LLaMA-Factory that render what the chat template of a Qwen3-VL, Qwen3 or Qwen2.5-VL
/// folder renders.
const TEMPLATES: [&str; 5] = ["qwen3_vl", "qwen3_vl_nothink", "qwen3", "qwen3_nothink", "qwen2_vl"];

/// The template, and the thoughts that it renders.
fn template(work: &mut Work, path: &str) {
    let is_instruct = path.to_lowercase().contains("instruct");
    let mut without_thoughts = false;
    while let Some(setting) = work.take(Role::Thinking) {
        let decides = setting.name() == "enable_thinking";
        without_thoughts |= decides && setting.value.flag() == Some(false);
        if is_instruct {
            work.drop(&setting, "it has no effect on a model without thoughts");
        } else if decides && without_thoughts {
            work.note(format!(
                "`{}: false`: {} removes thoughts from the rows; here they are trained on, so remove them from the rows",
                setting.key,
                work.trainer.title()
            ));
            work.drop(&setting, "the rows decide, see the note");
        } else {
            work.refuse(
                &setting,
                "the chat template of the model folder decides; write the thoughts into the rows",
            );
        }
    }
    let Some(setting) = work.take(Role::Template) else { return };
    let name = setting.value.to_string().to_lowercase();
    if !TEMPLATES.contains(&name.as_str()) {
        return work.refuse(&setting, "the chat template of the model folder is used");
    }
    if matches!(name.as_str(), "qwen3_vl" | "qwen3") && !without_thoughts {
        work.write("data.train_empty_think", "true", &work.from(&setting));
        work.note(format!(
            "`template: {name}`: {} writes an empty `<think>` block in front of each answer without thoughts and trains \
             on it; here only a block that the chat template of the model folder writes is trained on",
            work.trainer.title()
        ));
    }
    work.drop(&setting, "the chat template of the model folder is used");
}

fn precision(work: &mut Work) {
    if let Some((true, setting)) = work.flag(Role::Fp16) {
        work.refuse(&setting, "f16 is not supported: use bf16");
    }
    let pure = work.flag(Role::PureBf16);
    if pure.as_ref().is_some_and(|(pure, _)| *pure) || work.trainer == Trainer::MsSwift {
        work.note(
            "master weights and moments are f32 here, also with bf16: more exact, and more memory",
        );
    }
    let bf16 = work.flag(Role::Bf16);
    let on = [pure, bf16].into_iter().flatten().find(|(on, _)| *on);
    let dtype = work.take(Role::TorchDtype);
    let (precision, setting) = match (on, dtype) {
        (Some((_, setting)), _) => ("bf16", setting),
        (None, Some(setting)) => match setting.value.text().map(str::to_ascii_lowercase).as_deref()
        {
            Some("bfloat16" | "bf16" | "auto") => ("bf16", setting),
            Some("float32" | "fp32") => ("f32", setting),
            _ => return work.refuse(&setting, "expected `bfloat16` or `float32`"),
        },
        (None, None) => return,
    };
    work.write_from("model.precision", precision, &setting);
}

fn output_dir(work: &mut Work, model: Option<&str>) {
    if let Some(setting) = work.take(Role::OutputDir) {
        let path = setting.value.text().unwrap_or_default().to_owned();
        work.write("output_dir", &quoted(&path), &work.from(&setting));
    } else {
        let name = model.map_or("model", |path| path.rsplit('/').next().unwrap_or(path));
        let comment = format!("default of {}", work.trainer.title());
        work.write("output_dir", &quoted(&format!("output/{name}")), &comment);
    }
    if work.trainer == Trainer::MsSwift {
        work.note("ms-swift adds a folder with version and date to `output_dir`; here it is used as it is, and continued by the next run");
    }
}

/// Writes `model.freeze` and `model.recompute`.
pub(super) fn freeze(work: &mut Work, family: Family, tuning: Tuning) {
    if let Tuning::Adapter { vision } = tuning {
        return recompute(work, !vision);
    }
    let mut frozen: Vec<(String, Setting)> = Vec::new();
    let covers_deepstack = work.trainer == Trainer::LlamaFactory && family == Family::Deepstack;
    for (role, name) in [
        (Role::FreezeVision, "vision"),
        (Role::FreezeMerger, "merger"),
        (Role::Deepstack, "*.visual.merger.*"),
        (Role::FreezeLlm, "llm"),
    ] {
        let Some((on, setting)) = work.flag(role) else { continue };
        if family == Family::Text && name != "llm" {
            work.drop(&setting, "the model has no vision encoder");
        } else if on {
            frozen.push((name.to_owned(), setting.clone()));
            if name == "vision" && covers_deepstack {
                frozen.push(("*.deepstack_merger_list.*".to_owned(), setting));
            }
        } else {
            work.drop(&setting, "nothing is frozen unless `model.freeze` lists it");
        }
    }
    for role in [Role::FreezeModules, Role::FreezePrefixes] {
        let Some(setting) = work.given(role) else { continue };
        for item in setting.value.items() {
            match frozen_names(role, item) {
                Some(names) => frozen.extend(names.into_iter().map(|name| (name, setting.clone()))),
                None => {
                    work.refuse(&setting, "expected names such as `visual` or `language_model`");
                }
            }
        }
    }
    let vision_is_frozen = frozen.iter().any(|(name, _)| name == "vision");
    if !frozen.is_empty() {
        let names: Vec<String> = frozen.iter().map(|(name, _)| quoted(name)).collect();
        let mut from: Vec<String> = frozen.iter().map(|(_, setting)| work.from(setting)).collect();
        from.dedup();
        work.write("model.freeze", &format!("[{}]", names.join(", ")), &from.join(", "));
    }
    recompute(work, vision_is_frozen || family == Family::Text);
}

/// Our names of a frozen module, or of the parameters with a prefix.
fn frozen_names(role: Role, item: &Value) -> Option<Vec<String>> {
    let text = item.text()?;
    let ours: &[&str] = match text.trim_start_matches("model.") {
        "visual" => &["vision", "merger"],
        "visual.merger" | "merger" => &["*.visual.merger.*"],
        "language_model" => &["llm"],
        _ if role == Role::FreezePrefixes => return Some(vec![format!("{text}*")]),
        _ => return None,
    };
    Some(ours.iter().map(|&name| name.to_owned()).collect())
}

fn recompute(work: &mut Work, vision_is_frozen: bool) {
    let on = match work.flag(Role::NoRecompute) {
        Some((off, setting)) => Some((!off, setting)),
        None => work.flag(Role::Recompute),
    };
    let vision = work.flag(Role::RecomputeVision);
    let Some((llm, setting)) = on else { return };
    let encoder = vision.as_ref().map_or(llm && !vision_is_frozen, |(on, _)| *on);
    let choice = match (llm, encoder) {
        (true, true) => "full",
        (true, false) => "llm",
        (false, true) => "vision",
        (false, false) => "none",
    };
    let decisive = vision.map(|(_, setting)| setting).filter(Setting::is_given).unwrap_or(setting);
    work.write_from("model.recompute", choice, &decisive);
}
