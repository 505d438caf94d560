//! The files of a model folder that checkpoints copy unchanged: tokenizer, template, processor.

use super::CheckpointError;
use crate::files;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Names of the files that are copied unchanged from the model folder into each checkpoint.
pub const COPIED_FILES: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
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
pub struct CarriedFiles(Arc<Vec<(&'static str, Vec<u8>)>>);

impl CarriedFiles {
    /// Reads the files, a few megabytes in total. Files that do not exist are left out; one that
    /// cannot be read is an error.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let mut files = Vec::new();
        for name in COPIED_FILES {
            let path = folder.join(name);
            match files::read(&path) {
                Ok(bytes) => {
                    check_inside(folder, &path)?;
                    files.push((name, bytes));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(CheckpointError::read(&path)(error)),
            }
        }
        Ok(Self(Arc::new(files)))
    }

    pub(super) fn files(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, bytes)| (*name, bytes.as_slice()))
    }
}

/// Fails if a file that would be copied is a link to a place outside of the model folder.
///
/// Publishing `final/` would publish that file, and a model folder that comes from others may
/// name any file of this machine. Links to `blobs` of the same repository are how the cache of the
/// Hugging Face Hub stores all files: `models--ORG--NAME/snapshots/COMMIT/FILE`.
fn check_inside(folder: &Path, path: &Path) -> Result<(), CheckpointError> {
    let real = |path: &Path| path.canonicalize().map_err(CheckpointError::read(path));
    let (folder, target) = (real(folder)?, real(path)?);
    let of_cache = || {
        let snapshots = folder.parent()?;
        let is_snapshot = snapshots.file_name()? == "snapshots";
        is_snapshot.then(|| snapshots.parent().map(|repository| repository.join("blobs")))?
    };
    if target.starts_with(&folder) || of_cache().is_some_and(|blobs| target.starts_with(blobs)) {
        return Ok(());
    }
    Err(CheckpointError::OutsideLink { path: path.to_owned(), target })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::make_pipe;
    use crate::checkpoint::{FolderLayout, ModelFiles, write_atomically};
    use std::fs;
    use std::os::unix::fs::symlink;

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
    fn links_are_copied_within_the_folder_and_the_hub_cache_only() {
        let place = tempfile::tempdir().unwrap();
        let repository = place.path().join("models--a--b");
        let snapshot = repository.join("snapshots/c0ffee");
        for folder in [snapshot.join("sub"), repository.join("blobs")] {
            fs::create_dir_all(folder).unwrap();
        }
        for name in ["secret", "models--a--b/blobs/b10b", "models--a--b/snapshots/c0ffee/sub/f"] {
            write_atomically(&place.path().join(name), name.as_bytes()).unwrap();
        }
        let vocab = snapshot.join("vocab.json");
        let read = |target: &str| {
            let _ = fs::remove_file(&vocab);
            symlink(target, &vocab).unwrap();
            CarriedFiles::read(&snapshot)
        };
        for (target, content) in [("../../blobs/b10b", "blobs/b10b"), ("sub/f", "sub/f")] {
            let files = read(target).unwrap();
            let bytes = files.files().next().unwrap().1;
            assert!(bytes.ends_with(content.as_bytes()), "{target}");
        }
        for target in ["../../../secret", place.path().join("secret").to_str().unwrap()] {
            let error = read(target).unwrap_err();
            assert!(error.to_string().contains("secret`, outside of its folder"), "{error}");
        }
        // a link to the whole folder is no link out of it
        read("sub/f").unwrap();
        let alias = place.path().join("alias");
        symlink(&snapshot, &alias).unwrap();
        CarriedFiles::read(&alias).unwrap();
    }

    #[test]
    fn a_pipe_is_an_error_and_not_a_wait() {
        let folder = tempfile::tempdir().unwrap();
        make_pipe(&folder.path().join("tokenizer.json"));
        let error = CarriedFiles::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
        let error = CarriedFiles::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}
