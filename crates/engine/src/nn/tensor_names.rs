//! Names of tensors in weight files, where they differ from the names of the parameters.

/// How weight files name the tensors of a vision-language model. The parameters have the names of
/// the modules in transformers 5, such as `model.visual.merger.mlp.0.weight`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TensorNames {
    /// As the parameters.
    #[default]
    Modules,
    /// As transformers 4 named them, and transformers 5 saves them: `visual.` for `model.visual.`,
    /// and `model.` for `model.language_model.`.
    Flat,
    /// As if the decoder with its head were a model inside of the whole one: `language_model.model.`
    /// for `model.language_model.`, and `vision_tower.` for `model.vision_tower.`.
    Nested,
}

/// The names of modules, and their spellings in files.
type Spellings = &'static [(&'static str, &'static str)];
const FLAT: Spellings = &[("model.visual.", "visual."), ("model.language_model.", "model.")];
const NESTED: Spellings = &[
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
];

impl TensorNames {
    fn spellings(self) -> Spellings {
        match self {
            Self::Modules => &[],
            Self::Flat => FLAT,
            Self::Nested => NESTED,
        }
    }

    /// The name in a file that is written.
    pub fn in_file(self, name: &str) -> String {
        let rename =
            |(module, file): &(&str, &str)| Some(format!("{file}{}", name.strip_prefix(module)?));
        self.spellings().iter().find_map(rename).unwrap_or_else(|| name.to_owned())
    }

    /// The name of a tensor of a file that was read, in either spelling.
    pub fn of_file(self, name: &str) -> String {
        let spellings = self.spellings();
        let is_module = spellings.iter().any(|(module, _)| name.starts_with(module));
        let rename =
            |(module, file): &(&str, &str)| Some(format!("{module}{}", name.strip_prefix(file)?));
        let other = spellings.iter().filter(|_| !is_module).find_map(rename);
        other.unwrap_or_else(|| name.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_read_and_the_flat_one_is_written() {
        for (module, file) in [
            ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
            ("model.language_model.norm.weight", "model.norm.weight"),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(TensorNames::Flat.in_file(module), file);
            assert_eq!(TensorNames::Flat.of_file(file), module);
            assert_eq!(TensorNames::Flat.of_file(module), module);
            for name in [module, file] {
                assert_eq!(TensorNames::Modules.in_file(name), name);
                assert_eq!(TensorNames::Modules.of_file(name), name);
            }
        }
        for (module, file) in NESTED {
            let [module, file] = [module, file].map(|prefix| format!("{prefix}0.weight"));
            assert_eq!(TensorNames::Nested.in_file(&module), file);
            assert_eq!(TensorNames::Nested.of_file(&file), module);
            assert_eq!(TensorNames::Nested.of_file(&module), module);
        }
    }
}
