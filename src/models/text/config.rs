//! Sizes of a text-only model, and its parameters.

use crate::nn::{Component, DecoderConfig, Init, Inputs, ParamSpec, decoder_specs};

/// All parameters of the model.
pub const LLM: Component = Component { name: "llm", inputs: Inputs::All };

/// Name of the decoder's module.
pub(super) const DECODER: &str = "model";
/// Name of an untied head.
pub(super) const LM_HEAD: &str = "lm_head.weight";

/// Sizes of the whole model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The decoder.
    pub text: DecoderConfig,
    /// Whether head and embedding are one tensor.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
}

impl Config {
    /// Every tensor of the model in a fixed order. A tied head is not listed.
    pub(super) fn specs(&self) -> Vec<ParamSpec> {
        let mut specs = decoder_specs(&self.text, DECODER);
        if !self.tie_word_embeddings {
            let shape = vec![self.text.vocab_size, self.text.hidden_size];
            specs.push((LM_HEAD.to_owned(), shape, Init::Normal));
        }
        let spec = |(name, shape, init)| ParamSpec { name, shape, component: LLM, init };
        specs.into_iter().map(spec).collect()
    }
}
