//! The published `tokenizer.json`: text to ids with byte offsets, and back.
//!
//! Files of the published Qwen kind are read by our own [`engine`], others by the `tokenizers` crate.
//! Both give the same; tests hold them together.

mod added;
mod classes;
mod cuts;
mod engine;
mod file;
mod merges;
mod normalise;
mod split;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use engine::Engine;
use tokenizers::{PostProcessorWrapper, Tokenizer};

/// A byte-level tokenizer; special tokens in the text become their ids.
pub(in crate::data) struct TextTokenizer {
    inner: Inner,
}

enum Inner {
    Ours(Box<Engine>),
    Reference(Box<Tokenizer>),
}

/// A tokenised text; both lists are `[T]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) struct Tokens {
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
    pub(in crate::data) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let difference = match file::read(bytes) {
            Ok(vocabulary) => {
                return Ok(Self { inner: Inner::Ours(Box::new(Engine::new(vocabulary))) });
            }
            Err(difference) => difference,
        };
        let tokenizer = Self { inner: Inner::Reference(Box::new(reference(path, bytes)?)) };
        tracing::info!(
            path = %path.display(),
            difference,
            "a tokenizer of another kind than Qwen's: the `tokenizers` crate runs it, more slowly"
        );
        Ok(tokenizer)
    }

    /// Ids and offsets of `text`, in one call: tokens may span anything but special tokens.
    pub(in crate::data) fn encode(&self, text: &str) -> Result<Tokens, TokenizerError> {
        match &self.inner {
            Inner::Ours(engine) => Ok(engine.encode(text)),
            Inner::Reference(tokenizer) => {
                let encoding = tokenizer
                    .encode(text, false)
                    .map_err(|error| TokenizerError::Encode { problem: error.to_string() })?;
                let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
                Ok(Tokens { ids: ids.to_vec(), offsets: offsets.to_vec() })
            }
        }
    }

    /// Text of `ids` without special tokens.
    pub(in crate::data) fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decoded(ids, true)
    }

    /// Text of `ids` with special tokens.
    pub(in crate::data) fn decode_with_specials(
        &self,
        ids: &[u32],
    ) -> Result<String, TokenizerError> {
        self.decoded(ids, false)
    }

    /// Text of one token.
    pub(in crate::data) fn token(&self, id: u32) -> Option<String> {
        match &self.inner {
            Inner::Ours(engine) => engine.token(id).map(str::to_owned),
            Inner::Reference(tokenizer) => tokenizer.id_to_token(id),
        }
    }

    /// Id of one token.
    pub(in crate::data) fn id(&self, token: &str) -> Option<u32> {
        match &self.inner {
            Inner::Ours(engine) => engine.id(token),
            Inner::Reference(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    /// The largest id that a text can contain.
    pub(in crate::data) fn max_id(&self) -> u32 {
        match &self.inner {
            Inner::Ours(engine) => engine.max_id(),
            Inner::Reference(tokenizer) => {
                tokenizer.get_vocab(true).into_values().max().unwrap_or(0)
            }
        }
    }

    fn decoded(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        match &self.inner {
            Inner::Ours(engine) => Ok(engine.decode(ids, skip_special_tokens)),
            Inner::Reference(tokenizer) => tokenizer
                .decode(ids, skip_special_tokens)
                .map_err(|error| TokenizerError::Decode { problem: error.to_string() }),
        }
    }
}

/// The file as the `tokenizers` crate reads it.
fn reference(path: &Path, bytes: &[u8]) -> Result<Tokenizer, TokenizerError> {
    let load_error = |problem: String| TokenizerError::Load { path: path.to_owned(), problem };
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|e| load_error(e.to_string()))?;
    // A sample is never cut or padded here, and the template writes every special token.
    tokenizer.with_truncation(None).map_err(|e| load_error(e.to_string()))?;
    tokenizer.with_padding(None);
    tokenizer.with_post_processor(None::<PostProcessorWrapper>);
    Ok(tokenizer)
}

impl fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextTokenizer").finish_non_exhaustive()
    }
}
