//! Reading the files of a model folder, and their errors.

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::template::TemplateError;
use tokenizer::TokenizerError;

/// The reason why a model folder cannot be used for encoding.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum ModelFolderError {
    #[error("cannot read `{}`: {cause}", .path.display())]
    #[fault(
        hint = "`model.path` must be a model folder with config.json, tokenizer.json, tokenizer_config.json and preprocessor_config.json"
    )]
    Read { path: PathBuf, cause: io::Error },
    #[error("`{}` is not JSON: {cause}", .path.display())]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    Json { path: PathBuf, cause: serde_json::Error },
    #[error("cannot parse `{}`: {cause}", .path.display())]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    Type { path: PathBuf, cause: serde_json::Error },
    #[error("`{}`: `{key}` is `{found}`, expected {expected}", .path.display())]
    #[fault(hint = "copy the file from the published model again")]
    Value {
        path: PathBuf,
        key: String,
        /// Found value, or `missing`.
        found: String,
        expected: String,
    },
    #[error("`{}`: `{key}` is missing or is not a {expected}", .path.display())]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    Key { path: PathBuf, key: &'static str, expected: &'static str },
    #[error("`{}`: `{key}` is `{token}`, which is not in `tokenizer.json`", .path.display())]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    UnknownToken { path: PathBuf, key: &'static str, token: String },
    #[error("`{}`: `{key}` is {found}, but the token {token:?} is {expected} in `tokenizer.json`", .path.display())]
    #[fault(hint = "copy config.json and tokenizer.json from the same model")]
    TokenId { path: PathBuf, key: &'static str, found: u32, token: &'static str, expected: u32 },
    #[error("`tokenizer.json` has no token `{}`, which the model writes next to images", .token.escape_debug())]
    #[fault(hint = "copy tokenizer.json from the published model again")]
    NoToken { token: &'static str },
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
    #[error(
        "`{}` has neither `preprocessor_config.json` nor a `processor_config.json` with an \
         `image_processor`", .folder.display()
    )]
    #[fault(hint = "copy `preprocessor_config.json` from the published model")]
    NoImageSettings { folder: PathBuf },
    /// The limits come from the config, or from the model folder if the config has none.
    #[error(
        "`min_pixels` is `{min_pixels}` and `max_pixels` is `{max_pixels}`, expected \
         1 <= `min_pixels` <= `max_pixels` and `min_pixels` <= {limit}"
    )]
    #[fault(hint = "set both `data.image.min_pixels` and `data.image.max_pixels`, or neither")]
    ImagePixels { min_pixels: u64, max_pixels: u64, limit: u64 },
    #[error("`data.image.{key}` is `{found}`, expected {expected}")]
    #[fault(hint = "remove the key")]
    ImageSetting { key: &'static str, found: String, expected: &'static str },
    #[error(
        "`{}`: `{key}` is `{found}`, which contradicts {settings}; the processor of transformers \
         would take it", .path.display()
    )]
    #[fault(hint = "remove the key from this file, or write its value into the settings, too")]
    TokenizerKey { path: PathBuf, key: Box<str>, found: Box<str>, settings: Box<str> },
    /// The value comes from the config, the model folder or the default.
    #[error("`data.video.{key}` is `{found}`, expected {expected}")]
    #[fault(
        hint = "change the value, or set it to `null` to use the model folder's; docs/video.md explains each key"
    )]
    VideoSetting { key: &'static str, found: String, expected: &'static str },
}

impl ModelFolderError {
    pub(crate) fn value(
        path: &Path,
        key: &str,
        found: String,
        expected: impl Into<String>,
    ) -> Self {
        let (path, key, expected) = (path.to_owned(), key.to_owned(), expected.into());
        Self::Value { path, key, found, expected }
    }

    /// Names the section of the file that the wrong key is in.
    fn in_section(mut self, section: Option<&str>) -> Self {
        if let (Self::Value { key, .. }, Some(section)) = (&mut self, section) {
            *key = format!("{section}.{key}");
        }
        self
    }

    pub(crate) fn parse(path: &Path) -> impl FnOnce(serde_json::Error) -> Self {
        |cause| {
            let path = path.to_owned();
            if cause.is_data() { Self::Type { path, cause } } else { Self::Json { path, cause } }
        }
    }
}

/// The bytes of a regular file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, ModelFolderError> {
    files::read(path).map_err(|cause| ModelFolderError::Read { path: path.to_owned(), cause })
}

/// The settings of images or videos in a model folder.
pub(crate) struct ProcessorFile {
    path: PathBuf,
    /// The part of the file that has them, if it is not all of it.
    section: Option<&'static str>,
    value: Value,
}

impl ProcessorFile {
    /// Reads this section of `processor_config.json`, or else the first file of these names, as
    /// transformers 5 does.
    pub(crate) fn read(
        folder: &Path,
        section: &'static str,
        names: &[&str],
    ) -> Result<Option<Self>, ModelFolderError> {
        let path = folder.join("processor_config.json");
        let mut combined = read_json_if_there::<Value>(&path)?.unwrap_or_default();
        let value = combined.get_mut(section).map(Value::take).filter(|value| !value.is_null());
        if let Some(value) = value {
            return Ok(Some(Self { path, section: Some(section), value }));
        }
        for path in names.iter().map(|name| folder.join(name)) {
            if let Some(value) = read_json_if_there(&path)? {
                return Ok(Some(Self { path, section: None, value }));
            }
        }
        Ok(None)
    }

    /// Settings that are all left out, of the file at `path`, which does not exist.
    pub(crate) fn empty(path: PathBuf) -> Self {
        Self { path, section: None, value: Map::new().into() }
    }

    /// The settings that `parse` makes of the file.
    ///
    /// The processors of transformers take every key of `tokenizer_config.json` that they know in
    /// place of that of their own file. One that would change the settings is an error, except for
    /// those that the processor of the family does not know.
    pub(crate) fn settings<T: DeserializeOwned, S: Debug>(
        self,
        folder: &Path,
        unknown: &[&str],
        parse: impl Fn(&Path, T) -> Result<S, ModelFolderError>,
    ) -> Result<S, ModelFolderError> {
        let Self { path, section, value } = self;
        let of_value = |value: Value| {
            let file = serde_json::from_value(value).map_err(ModelFolderError::parse(&path))?;
            parse(&path, file).map_err(|error| error.in_section(section))
        };
        if section.is_none() {
            read_json_if_there::<T>(&path)?; // this error has the line
        }
        let settings = of_value(value.clone())?;
        let tokenizer = folder.join("tokenizer_config.json");
        let keys = read_json_if_there::<Map<String, Value>>(&tokenizer)?.unwrap_or_default();
        let can_count =
            |(key, found): &(String, Value)| !found.is_null() && !unknown.contains(&key.as_str());
        for (key, found) in keys.into_iter().filter(can_count) {
            let mut changed = value.clone();
            if key == "size" {
                // It also takes the place of limits that precede the size in a file.
                changed["min_pixels"].take();
                changed["max_pixels"].take();
            }
            changed[&key] = found.clone();
            let is_same = |of: S| format!("{of:?}") == format!("{settings:?}");
            if !of_value(changed).is_ok_and(is_same) {
                return Err(ModelFolderError::TokenizerKey {
                    path: tokenizer,
                    key: key.into(),
                    found: found.to_string().into(),
                    settings: described(&path, section).into(),
                });
            }
        }
        Ok(settings)
    }
}

/// The settings of a processor, for an error.
fn described(path: &Path, section: Option<&str>) -> String {
    let file = path.display();
    match section {
        Some(section) => format!("`{section}` in `{file}`"),
        None if path.exists() => format!("the settings in `{file}`"),
        None => format!("the defaults of videos (there is no `{file}`)"),
    }
}

/// A parsed JSON file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelFolderError> {
    serde_json::from_slice(&read(path)?).map_err(ModelFolderError::parse(path))
}

/// [`read_json`]; `None` if the file does not exist.
pub(crate) fn read_json_if_there<T: DeserializeOwned>(
    path: &Path,
) -> Result<Option<T>, ModelFolderError> {
    match read_json(path) {
        Ok(value) => Ok(Some(value)),
        Err(ModelFolderError::Read { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
