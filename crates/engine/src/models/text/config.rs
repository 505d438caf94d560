use crate::nn::{Component, DecoderConfig, Inputs, ParamSpec, decoder_specs};

/// All parameters of the model.
pub const LLM: Component = Component { name: "llm", inputs: Inputs::All };

/// Name of the decoder's module.
pub(super) const DECODER: &str = "model";

#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    pub text: DecoderConfig,
}

impl TextConfig {
    /// Every tensor of the model in a fixed order. A tied head is not listed.
    pub(super) fn specs(&self) -> Vec<ParamSpec> {
        decoder_specs(&self.text, DECODER, LLM)
    }
}
