//! Errors of reading a model folder for encoding.

use std::path::PathBuf;

use crate::media::image::ImageConfigError;
use crate::media::video::VideoConfigError;
use crate::model_file::ModelFileError;
use crate::template::TemplateError;
use tokenizer::TokenizerError;

/// The reason why a model folder cannot be used for encoding.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// A file is missing or is not JSON.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// A key is missing or has another type.
    #[error("`{}`: `{key}` is missing or is not a {expected}", .path.display())]
    Key {
        /// Path of the file.
        path: PathBuf,
        /// The key, with dots.
        key: &'static str,
        /// The expected type.
        expected: &'static str,
    },
    /// A token is not in the vocabulary of the tokenizer.
    #[error("`{}`: `{key}` is `{token}`, which is not in `tokenizer.json`", .path.display())]
    UnknownToken {
        /// Path of the file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value.
        token: String,
    },
    /// The tokenizer has more ids than the embedding has rows.
    #[error("`tokenizer.json` has ids up to {max_id}, but `vocab_size` in `{}` is {vocab_size}", .path.display())]
    VocabSize {
        /// Path of `config.json`.
        path: PathBuf,
        /// Largest id of the tokenizer.
        max_id: u32,
        /// Number of rows of the embedding.
        vocab_size: usize,
    },
    /// The image processor cuts other patches than the vision encoder expects.
    #[error(
        "`vision_config.{key}` in `{}` is {expected}, but `{name}` in `preprocessor_config.json` \
         (or `processor_config.json`) is {found}", .path.display()
    )]
    Patches {
        /// Path of `config.json`.
        path: PathBuf,
        /// Key of `config.json`.
        key: &'static str,
        /// Its value.
        expected: u64,
        /// Key of the image processor.
        name: &'static str,
        /// Its value.
        found: u32,
    },
    /// No file defines an end-of-text token.
    #[error("`{}` has no end-of-text token", .folder.display())]
    NoStopToken {
        /// The model folder.
        folder: PathBuf,
    },
    /// None of the three files has a chat template.
    #[error("`{}` has no chat template", .folder.display())]
    NoChatTemplate {
        /// The model folder.
        folder: PathBuf,
    },
    /// The chat template cannot be used.
    #[error("`{}`: {cause}", .path.display())]
    Template {
        /// Path of the file with the template.
        path: PathBuf,
        /// The reason.
        cause: TemplateError,
    },
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The image settings cannot be used.
    #[error(transparent)]
    Image(#[from] ImageConfigError),
    /// The video settings cannot be used.
    #[error(transparent)]
    Video(#[from] VideoConfigError),
}

impl EncoderError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::File(error) => error.hint(),
            Self::NoChatTemplate { .. } => {
                "copy `chat_template.jinja` from the instruct version of the model; base models have none"
            }
            Self::NoStopToken { .. } => "write `eos_token_id` into generation_config.json",
            Self::Patches { .. } => {
                "copy config.json and preprocessor_config.json from the same model"
            }
            Self::VocabSize { .. } => "copy tokenizer.json and config.json from the same model",
            Self::Template { cause, .. } => cause.hint(),
            Self::Image(error) => error.hint(),
            Self::Video(error) => error.hint(),
            Self::Key { .. } | Self::UnknownToken { .. } | Self::Tokenizer(_) => {
                "the file is damaged: copy it from the published model again"
            }
        };
        Some(hint.to_owned())
    }
}
