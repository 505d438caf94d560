//! The shape of a model, read from `config.json`.

use super::config::ModelConfigError;
use super::vision::{self, VisionConfig};
use crate::nn::{Component, DecoderConfig, Inputs, ParamSpec, TensorNames, decoder_specs};
use std::num::NonZeroU32;

/// Embeddings, decoder layers, final norm, head.
pub const LLM: Component = Component { name: "llm", inputs: Inputs::All };

#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub text: DecoderConfig,
    /// The vision encoder; `None`: the model reads text only.
    pub vision: Option<VisionConfig>,
    /// How weight files name the tensors.
    pub tensor_names: TensorNames,
}

impl ModelConfig {
    /// A model that reads text only.
    pub(super) fn text_only(text: DecoderConfig) -> Self {
        Self { text, vision: None, tensor_names: TensorNames::Modules }
    }

    /// Fails if the sizes contradict each other.
    pub(super) fn check(&self) -> Result<(), ModelConfigError> {
        let (text, fail) = (&self.text, |what: String| Err(ModelConfigError::Shape { what }));
        if let Some(mrope) = &text.mrope
            && mrope.section.iter().sum::<usize>() != text.rotary_dim / 2
        {
            return fail(format!(
                "`mrope_section` {:?} does not sum to half of the {} rotated dimensions of a head",
                mrope.section, text.rotary_dim
            ));
        }
        self.vision.as_ref().map_or(Ok(()), |vision| vision.check(text))
    }

    /// Name of the decoder's module.
    pub(super) fn decoder_name(&self) -> &'static str {
        if self.vision.is_some() { "model.language_model" } else { "model" }
    }

    /// Every tensor of the model in a fixed order. A tied head is not listed.
    pub fn param_specs(&self) -> Vec<ParamSpec> {
        let mut specs = self.vision.as_ref().map_or_else(Vec::new, vision::param_specs);
        specs.extend(decoder_specs(&self.text, self.decoder_name(), LLM));
        specs
    }

    /// The same model as weight files have it: the layout of the experts differs between files.
    /// `shape_of` is the shape of a tensor in the files, and `None` of one that they do not have.
    #[must_use]
    pub fn of_files(&self, shape_of: &dyn Fn(&str) -> Option<Vec<usize>>) -> Self {
        Self { text: self.text.of_files(self.decoder_name(), shape_of), ..self.clone() }
    }

    /// Patches on a side of the square that becomes one vision token; 1 without a vision encoder.
    pub fn merge_size(&self) -> NonZeroU32 {
        let size = self.vision.as_ref().map_or(1, |vision| vision.spatial_merge_size);
        NonZeroU32::new(size as u32).unwrap_or(NonZeroU32::MIN)
    }
}
