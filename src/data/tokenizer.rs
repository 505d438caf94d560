//! The published `tokenizer.json`: text to ids with byte offsets, and back.

use std::fmt;
use std::path::{Path, PathBuf};

use tokenizers::{PostProcessorWrapper, Tokenizer};

/// A byte-level tokenizer; special tokens in the text become their ids.
pub(super) struct TextTokenizer {
    inner: Tokenizer,
}

/// A tokenised text; both lists are `[T]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Bytes of the text, before normalisation, that a token stands for. The tokens that share a
    /// character all span that whole character.
    pub offsets: Vec<(usize, usize)>,
}

/// What the tokenizer refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// Not a tokenizer.
    #[error("`{}` is not a tokenizer: {problem}", .path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        problem: String,
    },
    /// A text that cannot be tokenised.
    #[error("cannot tokenise: {problem}")]
    Encode {
        /// What the tokenizer says.
        problem: String,
    },
    /// Ids that cannot be turned into text.
    #[error("cannot decode: {problem}")]
    Decode {
        /// What the tokenizer says.
        problem: String,
    },
}

impl TextTokenizer {
    /// Parses a `tokenizer.json`; `path` is for messages.
    pub(super) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let load_error = |problem: String| TokenizerError::Load { path: path.to_owned(), problem };
        let mut inner = Tokenizer::from_bytes(bytes).map_err(|e| load_error(e.to_string()))?;
        // A sample is never cut or padded here, and the template writes every special token.
        inner.with_truncation(None).map_err(|e| load_error(e.to_string()))?;
        inner.with_padding(None);
        inner.with_post_processor(None::<PostProcessorWrapper>);
        Ok(Self { inner })
    }

    /// Ids and offsets of `text`, in one call: tokens may span anything but special tokens.
    pub(super) fn encode(&self, text: &str) -> Result<Tokens, TokenizerError> {
        let encoding = self
            .inner
            .encode(text, false)
            .map_err(|error| TokenizerError::Encode { problem: error.to_string() })?;
        Ok(Tokens { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// Text of `ids` without special tokens.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decoded(ids, true)
    }

    /// Text of `ids` with special tokens.
    pub(super) fn decode_with_specials(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decoded(ids, false)
    }

    /// Text of one token.
    pub(super) fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Id of one token.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The largest id that a text can contain.
    pub(super) fn max_id(&self) -> u32 {
        self.inner.get_vocab(true).into_values().max().unwrap_or(0)
    }

    fn decoded(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(|error| TokenizerError::Decode { problem: error.to_string() })
    }
}

impl fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextTokenizer").finish_non_exhaustive()
    }
}
