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
}

/// The names of modules, and their spellings in files.
const FLAT: [(&str, &str); 2] = [("model.visual.", "visual."), ("model.language_model.", "model.")];

impl TensorNames {
    /// The name in a file that is written.
    pub fn in_file(self, name: &str) -> String {
        let rename =
            |(module, file): &(&str, &str)| Some(format!("{file}{}", name.strip_prefix(module)?));
        let flat = FLAT.iter().filter(|_| self == Self::Flat).find_map(rename);
        flat.unwrap_or_else(|| name.to_owned())
    }

    /// The name of a tensor of a file that was read, in either spelling.
    pub fn of_file(self, name: &str) -> String {
        let is_module = FLAT.iter().any(|(module, _)| name.starts_with(module));
        let rename =
            |(module, file): &(&str, &str)| Some(format!("{module}{}", name.strip_prefix(file)?));
        let flat = FLAT.iter().filter(|_| self == Self::Flat && !is_module).find_map(rename);
        flat.unwrap_or_else(|| name.to_owned())
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
    }
}
