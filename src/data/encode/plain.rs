//! The encoder for plain text: no chat, no template, no images.

use super::Encoder;
use crate::batch::SampleId;
use crate::data::source::SampleError;
use crate::data::template::tokenizer::Tokens;

/// What most byte-level tokenizers end a document with.
const END_OF_TEXT: &str = "<|endoftext|>";

impl Encoder {
    /// Ids and offsets of a text; `id` names it in errors.
    pub(in crate::data) fn encode_text(
        &self,
        id: &SampleId,
        text: &str,
    ) -> Result<Tokens, SampleError> {
        if let Some(token) = self.text.media.pads().find(|token| text.contains(token)) {
            let token = token.to_owned();
            return Err(SampleError::ReservedInText { id: id.clone(), token });
        }
        self.text
            .tokenizer
            .encode(text)
            .map_err(|error| SampleError::Tokenizer { id: id.clone(), problem: error.to_string() })
    }

    /// Id of a token by its text.
    pub(in crate::data) fn token_id(&self, token: &str) -> Option<u32> {
        self.text.tokenizer.id(token)
    }

    /// The token that ends a document unless the config names one: `<|endoftext|>` where the
    /// tokenizer has it, else the first that ends a generated text.
    pub(in crate::data) fn end_of_document(&self) -> u32 {
        self.token_id(END_OF_TEXT).unwrap_or(self.text.stop_ids[0])
    }

    /// Hash of the tokenizer's file: the same text has the same ids where it is the same.
    pub(in crate::data) fn tokenizer_fingerprint(&self) -> [u8; 32] {
        self.text.tokenizer_fingerprint
    }
}
