//! Converts configs of ms-swift, LLaMA-Factory and lmms-engine to ours.
//!
//! The files are read into a list of settings (`input`, `shell`). The tables of `tables` give each
//! setting a rule (`rule`): copied under another name, dropped, refused, or part of a decision that
//! `compose` makes from several settings. A setting that is left out has the default of the other
//! trainer, and is written out where that differs from ours.

mod compose;
mod error;
mod input;
mod output;
mod rule;
mod shell;
mod tables;
mod trainer;
mod value;
mod work;

pub use error::{ConvertError, Refusal};
pub use trainer::Trainer;

use crate::config::{RunConfig, load_text};
use input::Input;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use work::Work;

/// A converted config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// The config as YAML. A comment on each line says where its value came from; comments at the
    /// end list the dropped settings and the differences.
    pub yaml: String,
    /// Settings without an effect here, each with the reason.
    pub dropped: Vec<String>,
    /// What differs from the other trainer although every setting is converted.
    pub notes: Vec<String>,
}

/// Converts the settings in `files`, of which later ones win.
///
/// `world_size` is the number of processes that the other trainer ran; it is needed if the files do
/// not contain it.
pub fn convert(
    trainer: Trainer,
    files: &[PathBuf],
    world_size: Option<NonZeroU64>,
) -> Result<Converted, ConvertError> {
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    convert_input(trainer, input::read(trainer, files)?, &names.join(", "), world_size)
}

fn convert_input(
    trainer: Trainer,
    input: Input,
    files: &str,
    world_size: Option<NonZeroU64>,
) -> Result<Converted, ConvertError> {
    let mut work = Work::new(trainer, input)?;
    compose::all(&mut work, world_size);
    work.drop_unused();
    let Work { out, dropped, notes, refused, .. } = work;
    if !refused.is_empty() {
        return Err(ConvertError::Refused { trainer: trainer.title(), refusals: refused });
    }
    let mut yaml = format!("# Converted from {}: {files}\n", trainer.title());
    yaml += &out.yaml();
    for (title, lines) in [("Dropped", &dropped), ("Notes", &notes)] {
        if !lines.is_empty() {
            yaml.extend(["\n# ", title, ":\n"]);
        }
        for line in lines {
            yaml.extend(["# - ", line, "\n"]);
        }
    }
    check(&yaml)?;
    Ok(Converted { yaml, dropped, notes })
}

/// Reads the result as `trainer sft` will.
fn check(yaml: &str) -> Result<(), ConvertError> {
    let config: RunConfig = load_text(Path::new("config.yaml"), yaml)
        .map_err(|error| ConvertError::Bug { problem: error.to_string() })?;
    let invalid = |problem: String| ConvertError::Invalid { problem };
    config.check().map_err(|error| invalid(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use value::{Origin, Setting, Value};

    /// A config that converts, with one more setting.
    fn with(trainer: Trainer, key: &str, value: &str) -> Result<Converted, ConvertError> {
        let [model, data, tuner] = match trainer {
            Trainer::MsSwift => ["model", "dataset", "tuner_type"],
            Trainer::LlamaFactory => ["model_name_or_path", "dataset", "finetuning_type"],
            Trainer::LmmsEngine => [
                "model_config.load_from_pretrained_path",
                "dataset_config.dataset_path",
                "dataset_config.dataset_format",
            ],
        };
        let mut settings =
            vec![(model, "Qwen/Qwen3-VL-2B-Instruct"), (data, "a.jsonl"), (tuner, "full")];
        settings.retain(|(base, _)| *base != key);
        settings.push((key, value));
        let setting = |(key, value): (&str, &str)| Setting {
            key: key.to_owned(),
            value: Value::Text(value.to_owned()),
            origin: Origin::File("their.yaml".into(), 1),
        };
        let settings = settings.into_iter().map(setting).collect();
        let input = Input { settings, ..Input::default() };
        convert_input(trainer, input, "their.yaml", NonZeroU64::new(2))
    }

    #[test]
    fn every_known_setting_is_mapped_dropped_or_refused_by_its_name() {
        let mut lost = Vec::new();
        for trainer in Trainer::ALL {
            for (key, _) in tables::rows(trainer) {
                for value in ["1", "something"] {
                    let answer = match with(trainer, &key, value) {
                        Ok(converted) => converted.yaml,
                        Err(
                            error @ (ConvertError::Refused { .. } | ConvertError::Invalid { .. }),
                        ) => error.to_string(),
                        Err(error) => panic!("{}: `{key}: {value}`: {error}", trainer.name()),
                    };
                    let name = key.rsplit('.').next().unwrap();
                    if !answer.contains(name) && !answer.contains("is not valid") {
                        lost.push(format!("{}: {key}: {value}", trainer.name()));
                    }
                }
            }
        }
        assert!(lost.is_empty(), "{}", lost.join("\n"));
    }
}
