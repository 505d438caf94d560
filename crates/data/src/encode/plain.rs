//! Encoding of plain text, without template and images.

use super::Encoder;
use crate::encode::truncate::{MAX_TOKENS, check_tokens};
use crate::source::SampleFault;
use tokenizer::Tokens;

/// The end-of-document token of most byte-level tokenizers.
const END_OF_TEXT: &str = "<|endoftext|>";

impl Encoder {
    /// Ids and offsets of a text.
    pub(crate) fn encode_text(&self, text: &str) -> Result<Tokens, SampleFault> {
        if let Some(token) = self.text.media.pads().find(|token| text.contains(token)) {
            let token = token.to_owned();
            return Err(SampleFault::ReservedInText { token });
        }
        self.check_bytes(text)?;
        self.tokens(text)
    }

    /// Checks that a text is short enough for the tokenizer.
    pub(super) fn check_bytes(&self, text: &str) -> Result<(), SampleFault> {
        let (found, most) = (text.len(), self.text.tokenizer.max_bytes());
        if found > most {
            let what = "bytes of text for the tokenizer";
            return Err(SampleFault::TooLarge { what, found, most });
        }
        Ok(())
    }

    /// The tokens of a text; an error if they are more than one row may have.
    pub(super) fn tokens(&self, text: &str) -> Result<Tokens, SampleFault> {
        let tokens = self.text.tokenizer.encode_up_to(text, MAX_TOKENS);
        let tokens =
            tokens.map_err(|error| SampleFault::Tokenizer { problem: error.to_string() })?;
        check_tokens(tokens.ids.len())?;
        Ok(tokens)
    }

    /// Id of the token with this text.
    pub(crate) fn token_id(&self, token: &str) -> Option<u32> {
        self.text.tokenizer.id(token)
    }

    /// The default token at the end of a document: `<|endoftext|>` if the tokenizer has it, else
    /// the first stop token.
    pub(crate) fn end_of_document(&self) -> u32 {
        self.token_id(END_OF_TEXT).unwrap_or(self.text.stop_ids[0])
    }

    /// Hash of the tokenizer's file. If it is equal, equal texts have equal ids.
    pub(crate) fn tokenizer_fingerprint(&self) -> [u8; 32] {
        self.text.tokenizer_fingerprint
    }
}
