//! Errors of reading a model folder for encoding.

use std::path::PathBuf;

use crate::media::image::ImageConfigError;
use crate::media::video::VideoConfigError;
use crate::model_file::ModelFileError;
use crate::template::TemplateError;
use tokenizer::TokenizerError;

/// The reason why a model folder cannot be used for encoding.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum EncoderError {
    #[error(transparent)]
    #[fault(from)]
    File(#[from] ModelFileError),
    #[error("`{}`: `{key}` is missing or is not a {expected}", .path.display())]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    Key { path: PathBuf, key: &'static str, expected: &'static str },
    #[error("`{}`: `{key}` is `{token}`, which is not in `tokenizer.json`", .path.display())]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    UnknownToken { path: PathBuf, key: &'static str, token: String },
    #[error("`tokenizer.json` has ids up to {max_id}, but `vocab_size` in `{}` is {vocab_size}", .path.display())]
    #[fault(hint = "copy tokenizer.json and config.json from the same model")]
    VocabSize { path: PathBuf, max_id: u32, vocab_size: usize },
    #[error(
        "`vision_config.{key}` in `{}` is {expected}, but `{name}` in `preprocessor_config.json` \
         (or `processor_config.json`) is {found}", .path.display()
    )]
    #[fault(hint = "copy config.json and preprocessor_config.json from the same model")]
    Patches { path: PathBuf, key: &'static str, expected: u64, name: &'static str, found: u32 },
    #[error("`{}` has no end-of-text token", .folder.display())]
    #[fault(hint = "write `eos_token_id` into generation_config.json")]
    NoStopToken { folder: PathBuf },
    #[error("`{}` has no chat template", .folder.display())]
    #[fault(
        hint = "copy `chat_template.jinja` from the instruct version of the model; base models have none"
    )]
    NoChatTemplate { folder: PathBuf },
    #[error("`{}`: {cause}", .path.display())]
    #[fault(from = cause)]
    Template { path: PathBuf, cause: TemplateError },
    #[error(transparent)]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    #[fault(from)]
    Image(#[from] ImageConfigError),
    #[error(transparent)]
    #[fault(from)]
    Video(#[from] VideoConfigError),
}
