//! The trainers whose configs can be converted.

/// A trainer whose configs can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trainer {
    /// ms-swift.
    MsSwift,
    /// LLaMA-Factory.
    LlamaFactory,
    /// lmms-engine.
    LmmsEngine,
}

impl Trainer {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::MsSwift, Self::LlamaFactory, Self::LmmsEngine];

    /// Its name in `trainer convert --from`.
    pub fn name(self) -> &'static str {
        match self {
            Self::MsSwift => "ms-swift",
            Self::LlamaFactory => "llama-factory",
            Self::LmmsEngine => "lmms-engine",
        }
    }

    /// Its name in prose.
    pub fn title(self) -> &'static str {
        match self {
            Self::MsSwift => "ms-swift",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::LmmsEngine => "lmms-engine",
        }
    }

    /// Names that only its configs have at the top level.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::MsSwift => &[
                "tuner_type",
                "train_type",
                "torch_dtype",
                "split_dataset_ratio",
                "target_modules",
                "freeze_vit",
                "attn_impl",
                "val_dataset",
                "padding_free",
            ],
            Self::LlamaFactory => &[
                "model_name_or_path",
                "finetuning_type",
                "stage",
                "cutoff_len",
                "template",
                "dataset_dir",
                "lora_target",
                "image_max_pixels",
            ],
            Self::LmmsEngine => &[
                "trainer_type",
                "dataset_config",
                "model_config",
                "trainer_args",
                "trainer_args_type",
            ],
        }
    }

    /// The command that starts a training.
    pub(crate) fn command(self) -> &'static str {
        match self {
            Self::MsSwift => "swift sft",
            Self::LlamaFactory => "llamafactory-cli train",
            Self::LmmsEngine => "-m lmms_engine.launch.cli",
        }
    }
}

/// Names that only configs of Axolotl have at the top level.
const AXOLOTL: &[&str] = &[
    "base_model",
    "sequence_len",
    "sample_packing",
    "val_set_size",
    "lora_r",
    "pad_to_sequence_len",
];

/// Number of such names with which a config is taken for that of another trainer.
const MIN_NAMES: usize = 2;

/// The trainer whose config has these keys at the top level: its name, and the value of `trainer
/// convert --from` if its configs can be converted.
pub fn trainer_of(keys: &[&str]) -> Option<(&'static str, Option<&'static str>)> {
    let num_names = |names: &[&str]| names.iter().filter(|name| keys.contains(name)).count();
    // of trainers with the same number of names, the last one
    let all = [Trainer::LlamaFactory, Trainer::MsSwift, Trainer::LmmsEngine];
    let all = all.map(|trainer| (trainer.marks(), trainer.title(), Some(trainer.name())));
    let all = all.into_iter().chain([(AXOLOTL, "Axolotl", None)]);
    let (marks, title, from) = all.max_by_key(|(marks, ..)| num_names(marks))?;
    (num_names(marks) >= MIN_NAMES).then_some((title, from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_of_another_trainer_is_recognised_by_two_names() {
        let of = |keys: &[&str]| trainer_of(keys).map(|(name, _)| name);
        assert_eq!(of(&["stage", "do_train", "model_name_or_path"]), Some("LLaMA-Factory"));
        assert_eq!(of(&["model", "train_type", "torch_dtype"]), Some("ms-swift"));
        assert_eq!(of(&["base_model", "sequence_len"]), Some("Axolotl"));
        assert_eq!(of(&["model", "data", "template"]), None);
    }
}
