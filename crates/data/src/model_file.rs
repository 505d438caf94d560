//! Files of a model folder.

use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

/// The reason why a file of a model folder cannot be used.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum ModelFileError {
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
        key: &'static str,
        /// Found value, or `missing`.
        found: String,
        expected: String,
    },
}

impl ModelFileError {
    /// [`Self::Value`], as the error of the settings that the file holds.
    pub(crate) fn value<E: From<Self>>(
        path: &Path,
        key: &'static str,
        found: String,
        expected: impl Into<String>,
    ) -> E {
        Self::Value { path: path.to_owned(), key, found, expected: expected.into() }.into()
    }

    pub(crate) fn parse(path: &Path) -> impl FnOnce(serde_json::Error) -> Self {
        |cause| {
            let path = path.to_owned();
            if cause.is_data() { Self::Type { path, cause } } else { Self::Json { path, cause } }
        }
    }
}

/// The bytes of a regular file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, ModelFileError> {
    files::read(path).map_err(|cause| ModelFileError::Read { path: path.to_owned(), cause })
}

/// A parsed JSON file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelFileError> {
    serde_json::from_slice(&read(path)?).map_err(ModelFileError::parse(path))
}

/// [`read_json`]; `None` if the file does not exist.
pub(crate) fn read_json_if_there<T: DeserializeOwned>(
    path: &Path,
) -> Result<Option<T>, ModelFileError> {
    match read_json(path) {
        Ok(value) => Ok(Some(value)),
        Err(ModelFileError::Read { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
