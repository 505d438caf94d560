//! Files of a model folder.

use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::encode::EncoderError;

/// The bytes of a regular file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, EncoderError> {
    files::read(path).map_err(|cause| EncoderError::Read { path: path.to_owned(), cause })
}

/// A parsed JSON file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, EncoderError> {
    serde_json::from_slice(&read(path)?).map_err(EncoderError::parse(path))
}

/// [`read_json`]; `None` if the file does not exist.
pub(crate) fn read_json_if_there<T: DeserializeOwned>(
    path: &Path,
) -> Result<Option<T>, EncoderError> {
    match read_json(path) {
        Ok(value) => Ok(Some(value)),
        Err(EncoderError::Read { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
