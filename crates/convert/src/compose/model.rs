//! The model, its precision, its frozen parts and recomputation.

use super::adapter::Tuning;
use crate::conversion::Conversion;
use crate::line::quoted;
use crate::tables::Role;
use crate::trainer::Trainer;
use crate::value::{Setting, Value};

/// Kind of a model, judged by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    /// With the mergers of deepstack: Qwen3-VL.
    Deepstack,
    /// Qwen3.5.
    VisionLanguage,
    /// Qwen2.5-VL and Qwen2-VL.
    Qwen2Vl,
    /// With images as tiles, and frames of a fixed size: InternVL3.5.
    Tiles,
    /// With a whole image and slices of it: MiniCPM-V 4.6 and 4.7.
    Slices,
    Text,
}

impl Family {
    /// Pixels of an image per visual token.
    pub(super) fn pixels_per_token(self) -> u64 {
        if [Self::Qwen2Vl, Self::Tiles].contains(&self) { 28 * 28 } else { 32 * 32 }
    }

    /// Whether the merger is not a part of `visual`, and a component of its own.
    pub(super) fn has_own_merger(self) -> bool {
        matches!(self, Self::Tiles | Self::Slices)
    }

    /// The merger without those of deepstack, as `model.freeze` lists it.
    fn merger(self) -> &'static str {
        if self.has_own_merger() { "merger" } else { "*.visual.merger.*" }
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

/// Parts of names of supported models that have one of [`OTHERS`] too, without `-`, `_` and `.`.
const NOT_OTHERS: [(&str, Family); 5] = [
    ("qwen25vl", Family::Qwen2Vl),
    ("qwen2vl", Family::Qwen2Vl),
    ("internvl35", Family::Tiles),
    ("minicpmv46", Family::Slices),
    ("minicpmv47", Family::Slices),
];

/// Writes `model.path`, `model.weights`, `model.precision` and `output_dir`.
pub(super) fn model(conversion: &mut Conversion) -> Family {
    let random = conversion.consume_boolean(Role::RandomWeights).filter(|(random, _)| *random);
    let random = random
        .map(|(_, setting)| setting)
        .or_else(|| conversion.consume_written(Role::RandomConfig));
    let path = conversion.consume_as(Role::Model, "a folder or a hub id", |value| {
        value.text().filter(|text| !text.is_empty()).map(str::to_owned)
    });
    let mut family = Family::Deepstack;
    if let Some((path, setting)) = &path {
        match family_of(path) {
            Ok(found) => family = found,
            Err(reason) => conversion.refuse(setting, reason),
        }
        conversion.write_setting("model.path", &quoted(path), setting);
        template(conversion, path);
    } else if let Some(setting) = &random {
        conversion
            .refuse(setting, "also give the folder with the config and the tokenizer as the model");
    } else {
        conversion.refuse_missing("model", "the files name no model");
    }
    if let Some(setting) = &random {
        conversion.write_setting("model.weights", "random", setting);
    }
    precision(conversion);
    if let Some(setting) = conversion.consume_written(Role::Attention) {
        conversion.drop(&setting, "`model.attention: auto` takes the fastest exact kernel");
    }
    output_dir(conversion, path.as_ref().map(|(path, _)| path.as_str()));
    family
}

fn family_of(path: &str) -> Result<Family, &'static str> {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or(path);
    let name = name.to_lowercase().replace('_', "-");
    let is_moe = name.split('-').any(|part| {
        part.strip_prefix('a').and_then(|rest| rest.strip_suffix('b')).is_some_and(|size| {
            !size.is_empty() && size.chars().all(|c| c.is_ascii_digit() || c == '.')
        })
    });
    let letters = name.replace(['-', '.'], "");
    let known = NOT_OTHERS.iter().find(|(part, _)| letters.contains(part));
    let known = known.map(|of| of.1).filter(|of| *of != Family::Tiles || !name.contains("gpt-oss"));
    let is_other = known.is_none() && OTHERS.iter().any(|other| name.contains(other));
    if is_other || is_moe && !name.starts_with("qwen3") && known != Some(Family::Tiles) {
        return Err(
            "only models of Qwen3-VL, Qwen2.5-VL, Qwen2-VL, Qwen3, Qwen3.5, InternVL3.5 and \
             MiniCPM-V 4.6 and 4.7 are supported",
        );
    }
    let newer = ["qwen3.5", "qwen3.6", "qwen3.8"];
    Ok(match known {
        Some(family) => family,
        None if name.starts_with("qwen3-") && !name.contains("vl") => Family::Text,
        None if newer.iter().any(|of| name.starts_with(of)) => Family::VisionLanguage,
        None => Family::Deepstack,
    })
}

/// Templates of LLaMA-Factory that render what the chat template of a folder of Qwen3-VL, Qwen3,
/// Qwen3.5, Qwen2.5-VL or Qwen2-VL renders.
const TEMPLATES: [&str; 8] = [
    "qwen3_vl",
    "qwen3_vl_nothink",
    "qwen3",
    "qwen3_nothink",
    "qwen3_5",
    "qwen3_5_nothink",
    "qwen3_6",
    "qwen2_vl",
];
/// Those of [`TEMPLATES`] that write an empty block in front of an answer without thoughts.
const WITH_EMPTY_THOUGHTS: [&str; 4] = ["qwen3_vl", "qwen3", "qwen3_5", "qwen3_6"];

/// The template, and the thoughts that it renders.
fn template(conversion: &mut Conversion, path: &str) {
    let is_instruct = path.to_lowercase().contains("instruct");
    let mut without_thoughts = false;
    if let Some(setting) = conversion.consume(Role::Thinking) {
        let decides = setting.name() == "enable_thinking";
        without_thoughts |= decides && setting.value.boolean() == Some(false);
        if is_instruct {
            conversion.drop(&setting, "it has no effect on a model without thoughts");
        } else if decides && without_thoughts {
            conversion.note(format!(
                "`{}: false`: {} removes thoughts from the rows; here they are trained on, so remove them from the rows",
                setting.key,
                conversion.trainer.title()
            ));
            conversion.drop(&setting, "the rows decide, see the note");
        } else {
            conversion.refuse(
                &setting,
                "the chat template of the model folder decides; write the thoughts into the rows",
            );
        }
    }
    let Some(setting) = conversion.consume(Role::Template) else { return };
    let name = setting.value.to_string().to_lowercase();
    if !TEMPLATES.contains(&name.as_str()) {
        return conversion.refuse(&setting, "the chat template of the model folder is used");
    }
    if WITH_EMPTY_THOUGHTS.contains(&name.as_str()) && !without_thoughts {
        conversion.write("data.train_empty_think", "true", &conversion.origin(&setting));
        conversion.note(format!(
            "`template: {name}`: {} writes an empty `<think>` block in front of each answer without thoughts and trains \
             on it; here only a block that the chat template of the model folder writes is trained on",
            conversion.trainer.title()
        ));
    }
    conversion.drop(&setting, "the chat template of the model folder is used");
}

fn precision(conversion: &mut Conversion) {
    if let Some((true, setting)) = conversion.consume_boolean(Role::Fp16) {
        conversion.refuse(&setting, "f16 is not supported: use bf16");
    }
    let pure = conversion.consume_boolean(Role::PureBf16);
    if pure.as_ref().is_some_and(|(pure, _)| *pure) || conversion.trainer == Trainer::MsSwift {
        conversion.note(
            "master weights and moments are f32 here, also with bf16: more exact, and more memory",
        );
    }
    let bf16 = conversion.consume_boolean(Role::Bf16);
    let on = [pure, bf16].into_iter().flatten().find(|(on, _)| *on);
    let dtype = conversion.consume(Role::TorchDtype);
    let (precision, setting) = match (on, dtype) {
        (Some((_, setting)), _) => ("bf16", setting),
        (None, Some(setting)) => match setting.value.text().map(str::to_ascii_lowercase).as_deref()
        {
            Some("bfloat16" | "bf16" | "auto") => ("bf16", setting),
            Some("float32" | "fp32") => ("f32", setting),
            _ => return conversion.refuse(&setting, "expected `bfloat16` or `float32`"),
        },
        (None, None) => return,
    };
    conversion.write_setting("model.precision", precision, &setting);
}

fn output_dir(conversion: &mut Conversion, model: Option<&str>) {
    if let Some(setting) = conversion.consume(Role::OutputDir) {
        let path = setting.value.text().unwrap_or_default().to_owned();
        conversion.write("output_dir", &quoted(&path), &conversion.origin(&setting));
    } else {
        let name = model.map_or("model", |path| path.rsplit('/').next().unwrap_or(path));
        let comment = format!("default of {}", conversion.trainer.title());
        conversion.write("output_dir", &quoted(&format!("output/{name}")), &comment);
    }
    if conversion.trainer == Trainer::MsSwift {
        conversion.note("ms-swift adds a folder with version and date to `output_dir`; here it is used as it is, and continued by the next run");
    }
}

/// Writes `model.freeze` and `model.recompute`.
pub(super) fn freeze(conversion: &mut Conversion, family: Family, tuning: Tuning) {
    if let Tuning::Adapter { vision } = tuning {
        return recompute(conversion, !vision);
    }
    let mut frozen: Vec<(String, Setting)> = Vec::new();
    let covers_deepstack =
        conversion.trainer == Trainer::LlamaFactory && family == Family::Deepstack;
    for (role, name) in [
        (Role::FreezeVision, "vision"),
        (Role::FreezeMerger, "merger"),
        (Role::Deepstack, family.merger()),
        (Role::FreezeLlm, "llm"),
    ] {
        let Some((on, setting)) = conversion.consume_boolean(role) else { continue };
        if family == Family::Text && name != "llm" {
            conversion.drop(&setting, "the model has no vision encoder");
        } else if on {
            frozen.push((name.to_owned(), setting.clone()));
            if name == "vision" && covers_deepstack {
                frozen.push(("*.deepstack_merger_list.*".to_owned(), setting));
            }
        } else {
            conversion.drop(&setting, "nothing is frozen unless `model.freeze` lists it");
        }
    }
    for role in [Role::FreezeModules, Role::FreezePrefixes] {
        let Some(setting) = conversion.consume_written(role) else { continue };
        for item in setting.value.items() {
            match frozen_names(role, item, family) {
                Some(names) => frozen.extend(names.into_iter().map(|name| (name, setting.clone()))),
                None => {
                    conversion
                        .refuse(&setting, "expected names such as `visual` or `language_model`");
                }
            }
        }
    }
    let vision_is_frozen = frozen.iter().any(|(name, _)| name == "vision");
    if !frozen.is_empty() {
        let names: Vec<String> = frozen.iter().map(|(name, _)| quoted(name)).collect();
        let mut from: Vec<String> =
            frozen.iter().map(|(_, setting)| conversion.origin(setting)).collect();
        from.dedup();
        conversion.write("model.freeze", &format!("[{}]", names.join(", ")), &from.join(", "));
    }
    recompute(conversion, vision_is_frozen || family == Family::Text);
}

/// Our names of a frozen module, or of the parameters with a prefix.
fn frozen_names(role: Role, item: &Value, family: Family) -> Option<Vec<String>> {
    let text = item.text()?;
    let ours: &[&str] = match text.trim_start_matches("model.") {
        "visual" => &["vision", "merger"],
        "visual.merger" | "merger" => &[family.merger()],
        "language_model" => &["llm"],
        "vision_tower" => &["vision"],
        "multi_modal_projector" => &["merger"],
        _ if role == Role::FreezePrefixes => return Some(vec![format!("{text}*")]),
        _ => return None,
    };
    Some(ours.iter().map(|&name| name.to_owned()).collect())
}

fn recompute(conversion: &mut Conversion, vision_is_frozen: bool) {
    let on = match conversion.consume_boolean(Role::NoRecompute) {
        Some((off, setting)) => Some((!off, setting)),
        None => conversion.consume_boolean(Role::Recompute),
    };
    let vision = conversion.consume_boolean(Role::RecomputeVision);
    let Some((llm, setting)) = on else { return };
    let encoder = vision.as_ref().map_or(llm && !vision_is_frozen, |(on, _)| *on);
    let choice = match (llm, encoder) {
        (true, true) => "full",
        (true, false) => "llm",
        (false, true) => "vision",
        (false, false) => "none",
    };
    let decisive =
        vision.map(|(_, setting)| setting).filter(Setting::is_written).unwrap_or(setting);
    conversion.write_setting("model.recompute", choice, &decisive);
}
