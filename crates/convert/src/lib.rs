//! Settings of ms-swift, LLaMA-Factory and lmms-engine as keys and values of a config of this program.
//!
//! The files are read into a list of settings (`input`, `shell`). A table per trainer gives each
//! setting a rule (`tables`): copied under another name, dropped, refused, or part of a decision that
//! `compose` makes from several settings. A setting that is left out has the default of the other
//! trainer. The caller writes the config and checks it.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod compose;
mod conversion;
mod error;
mod input;
mod line;
mod shell;
mod tables;
mod trainer;
mod value;

pub use compose::ReadEntry;
pub use error::{ConvertError, Refusal};
pub use line::Line;
pub use tables::{advice, names, our_key, our_value};
pub use trainer::{Trainer, trainer_of};

use conversion::Conversion;
use input::Input;
use std::num::NonZeroU64;
use std::path::PathBuf;

/// Converted settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// One line per key, in no particular order, except that the lines of a list item are together.
    pub lines: Vec<Line>,
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
    read_entry: ReadEntry<'_>,
) -> Result<Converted, ConvertError> {
    convert_input(trainer, input::read(trainer, files)?, world_size, read_entry)
}

fn convert_input(
    trainer: Trainer,
    input: Input,
    world_size: Option<NonZeroU64>,
    read_entry: ReadEntry<'_>,
) -> Result<Converted, ConvertError> {
    let mut conversion = Conversion::new(trainer, input);
    compose::all(&mut conversion, world_size, read_entry);
    conversion.drop_unused();
    let Conversion { lines, dropped, notes, refused, .. } = conversion;
    if refused.is_empty() {
        Ok(Converted { lines, dropped, notes })
    } else {
        Err(ConvertError::Refused { trainer: trainer.title(), refusals: refused })
    }
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
        convert_input(trainer, input, NonZeroU64::new(2), &|_, _| Err("no file".to_owned()))
    }

    #[test]
    fn every_known_setting_is_mapped_dropped_or_refused_by_its_name() {
        let mut lost = Vec::new();
        for trainer in Trainer::ALL {
            for (key, _) in tables::rows(trainer) {
                for value in ["1", "something"] {
                    let answer = match with(trainer, &key, value) {
                        Ok(Converted { lines, dropped, notes }) => {
                            let origins: Vec<_> = lines.iter().map(|line| &*line.origin).collect();
                            [origins.concat(), dropped.concat(), notes.concat()].concat()
                        }
                        Err(error @ ConvertError::Refused { .. }) => error.to_string(),
                        Err(error) => panic!("{}: `{key}: {value}`: {error}", trainer.name()),
                    };
                    if !answer.contains(key.rsplit('.').next().unwrap()) {
                        lost.push(format!("{}: {key}: {value}", trainer.name()));
                    }
                }
            }
        }
        assert!(lost.is_empty(), "{}", lost.join("\n"));
    }
}
