//! Tokenizer of a model folder: text to ids with byte offsets, and ids to text.
//!
//! A `tokenizer.json` with the rules of the published Qwen tokenizers is run by `engine`, any
//! other by the `tokenizers` crate. Tests check that both return the same results.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod added;
mod classes;
mod cuts;
mod engine;
mod file;
mod merges;
mod new_tokens;
mod normalise;
mod split;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use engine::Engine;
pub use engine::Tokens;
pub use new_tokens::{GrownTokenizer, NewToken, NewTokenProblem, with_new_tokens};
use tokenizers::{ModelWrapper, PostProcessorWrapper, Tokenizer};

/// Maximum length of a text for our engine, in bytes: about 1 million tokens. A tokenizer takes many
/// bytes of memory for each byte of a word.
pub const MAX_TEXT_BYTES: usize = 4 << 20;
/// Maximum length of a text for the `tokenizers` crate, in bytes. It takes up to 600 bytes of
/// memory for each byte of a text.
const MAX_REFERENCE_BYTES: usize = 1 << 19;

/// A tokenizer. Special tokens that occur in a text are encoded as their ids.
pub struct TextTokenizer {
    inner: Inner,
}

enum Inner {
    Ours(Box<Engine>),
    Reference(Box<Tokenizer>),
}

/// The reason why a tokenizer cannot be loaded or used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Data, hint = None)]
pub enum TokenizerError {
    #[error("cannot load tokenizer `{}`: {problem}", .path.display())]
    #[fault(hint = "copy tokenizer.json from the published model again")]
    Load { path: PathBuf, problem: String },
    #[error(
        "`{}`: `model.dropout` is {dropout}: byte pair encoding with dropout is not supported",
        .path.display()
    )]
    Dropout {
        path: PathBuf,
        /// The probability, as text.
        dropout: String,
    },
    #[error("cannot tokenise the text: {problem}")]
    Encode { problem: String },
    #[error("cannot decode the token ids: {problem}")]
    Decode { problem: String },
}

impl TextTokenizer {
    /// Parses the `bytes` of a `tokenizer.json`. `path` appears in messages only.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, TokenizerError> {
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
            "the tokenizer differs from Qwen's: the `tokenizers` crate runs it, which is slower"
        );
        Ok(tokenizer)
    }

    /// Tokenises `text` as a whole: tokens may cross any boundary except special tokens.
    pub fn encode(&self, text: &str) -> Result<Tokens, TokenizerError> {
        self.encode_up_to(text, usize::MAX)
    }

    /// Maximum length of a text in bytes, so that a row takes less than 512 MiB of memory.
    pub fn max_bytes(&self) -> usize {
        match &self.inner {
            Inner::Ours(_) => MAX_TEXT_BYTES,
            Inner::Reference(_) => MAX_REFERENCE_BYTES,
        }
    }

    /// [`Self::encode`] that may stop after more than `most` tokens. Its result is incomplete then.
    pub fn encode_up_to(&self, text: &str, most: usize) -> Result<Tokens, TokenizerError> {
        match &self.inner {
            Inner::Ours(engine) => Ok(engine.encode(text, most)),
            Inner::Reference(tokenizer) => {
                let encoding = tokenizer
                    .encode(text, false)
                    .map_err(|error| TokenizerError::Encode { problem: error.to_string() })?;
                let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
                Ok(Tokens { ids: ids.to_vec(), offsets: offsets.to_vec() })
            }
        }
    }

    /// Converts ids to text, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decoded(ids, true)
    }

    /// Converts ids to text, including special tokens.
    pub fn decode_with_specials(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decoded(ids, false)
    }

    /// Returns the text of a token as `tokenizer.json` writes it.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.inner {
            Inner::Ours(engine) => engine.token(id).map(str::to_owned),
            Inner::Reference(tokenizer) => tokenizer.id_to_token(id),
        }
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        match &self.inner {
            Inner::Ours(engine) => engine.id(token),
            Inner::Reference(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    /// Returns the largest token id.
    pub fn max_id(&self) -> u32 {
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

/// Loads the file with the `tokenizers` crate.
fn reference(path: &Path, bytes: &[u8]) -> Result<Tokenizer, TokenizerError> {
    let load_error = |problem: String| TokenizerError::Load { path: path.to_owned(), problem };
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|e| load_error(e.to_string()))?;
    if let ModelWrapper::BPE(model) = tokenizer.get_model()
        && let Some(dropout) = model.dropout.filter(|share| *share != 0.0)
    {
        // each epoch would have other tokens, and the cached lengths would be wrong
        let dropout = dropout.to_string();
        return Err(TokenizerError::Dropout { path: path.to_owned(), dropout });
    }
    // Truncation and padding happen elsewhere, and the chat template writes all special tokens.
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
