//! The files of a model folder that training does not change: tokenizer, template, processor.

use super::CheckpointError;
use std::fs;
use std::io;
use std::path::Path;

/// Files of a model folder that training does not change.
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

/// Those of [`COPIED_FILES`] that a folder has, read when a run begins: what becomes of the folder later, a checkpoint
/// is complete.
#[derive(Debug, Clone, Default)]
pub struct CarriedFiles(Vec<(&'static str, Vec<u8>)>);

impl CarriedFiles {
    /// Reads them, a few megabytes. A folder need not have all of them.
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

    /// Names and contents.
    pub(super) fn files(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, bytes)| (*name, bytes.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{ModelFiles, write_atomically};

    #[test]
    fn files_that_vanish_after_the_start_are_written_all_the_same() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["tokenizer.json", "merges.txt", "model.safetensors"] {
            write_atomically(&from.path().join(name), name.as_bytes()).unwrap();
        }
        let carried = CarriedFiles::read(from.path()).unwrap();
        drop(from);
        let config_json = &serde_json::json!({});
        let files =
            ModelFiles { weights: &[], config_json, carried: &carried, max_shard_bytes: u64::MAX };
        files.write_into(to.path()).unwrap();
        assert_eq!(fs::read(to.path().join("tokenizer.json")).unwrap(), b"tokenizer.json");
        assert!(to.path().join("merges.txt").exists());
        assert!(!to.path().join("model.safetensors").exists(), "weights are not carried");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_told_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
        let error = CarriedFiles::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}
