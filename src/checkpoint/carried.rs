//! The files of a model folder that checkpoints copy unchanged: tokenizer, template, processor.

use super::CheckpointError;
use std::fs;
use std::io;
use std::path::Path;

/// Names of the files that are copied unchanged from the model folder into each checkpoint.
pub const COPIED_FILES: [&str; 11] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
];

/// Whether a model folder uses a file of this name: its config, its weights, or one of
/// [`COPIED_FILES`].
pub fn is_model_file(name: &str) -> bool {
    let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
    let is_index = name == "model.safetensors.index.json";
    name == "config.json"
        || COPIED_FILES.contains(&name)
        || is_index
        || (is_weights && !name.contains('/'))
}

/// The contents of those [`COPIED_FILES`] that a folder has.
///
/// A run reads them once at its start, so that its checkpoints are complete even if the folder is
/// changed or deleted later.
#[derive(Debug, Clone, Default)]
pub struct CarriedFiles(Vec<(&'static str, Vec<u8>)>);

impl CarriedFiles {
    /// Reads the files, a few megabytes in total. Files that do not exist are left out; one that
    /// cannot be read is an error.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let mut files = Vec::new();
        for name in COPIED_FILES {
            let path = folder.join(name);
            match fs::read(&path) {
                Ok(bytes) => files.push((name, bytes)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(CheckpointError::read(&path)(error)),
            }
        }
        Ok(Self(files))
    }

    pub(super) fn files(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, bytes)| (*name, bytes.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{FolderLayout, ModelFiles, write_atomically};

    #[test]
    fn files_deleted_after_the_start_of_the_run_are_still_written() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["tokenizer.json", "merges.txt", "model.safetensors"] {
            write_atomically(&from.path().join(name), name.as_bytes()).unwrap();
        }
        let carried = CarriedFiles::read(from.path()).unwrap();
        drop(from);
        let config_json = &serde_json::json!({});
        let files = ModelFiles {
            layout: FolderLayout::Model,
            weights: &[],
            config_json,
            carried: &carried,
            max_shard_bytes: u64::MAX,
        };
        files.write_into(to.path()).unwrap();
        assert_eq!(fs::read(to.path().join("tokenizer.json")).unwrap(), b"tokenizer.json");
        assert!(to.path().join("merges.txt").exists());
        assert!(!to.path().join("model.safetensors").exists(), "weights are not copied");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
        let error = CarriedFiles::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}
