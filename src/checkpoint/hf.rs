//! Model folders in the Hugging Face layout: weights in one file or in shards with an index, and
//! the files that checkpoints copy unchanged: tokenizer, template, processor.

use super::CheckpointError;
use super::atomic::build_folder;
use super::manifest::Manifest;
use super::peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use super::tensors::{SavedTensor, TensorFile};
use crate::files;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FolderLayout {
    /// A model folder in the layout of transformers.
    Model,
    /// An adapter in the layout of PEFT.
    Adapter,
}

/// The content of a model folder, or of the folder of an adapter, to be written.
#[derive(Debug, Clone, Copy)]
pub struct ModelFolder<'a> {
    pub layout: FolderLayout,
    /// Tensors with their published names, in model order; a tied weight appears once.
    pub weights: &'a [SavedTensor],
    /// Content of `config.json`, or of `adapter_config.json`.
    pub config_json: &'a Value,
    /// Tokenizer, template and processor files of the model folder that training started from.
    pub carried: &'a CarriedFiles,
    /// Maximum size of one weight file, in bytes of tensor data; a larger tensor gets its own file.
    pub max_shard_bytes: u64,
}

impl<'a> ModelFolder<'a> {
    /// Maximum size of a shard in bytes: 5 GB, the default of transformers.
    pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

    /// Writes and syncs all files into the existing folder `folder`, without a manifest. If
    /// `weights` is empty, writes only the config and the copied files.
    pub fn write_into(&self, folder: &Path) -> Result<(), CheckpointError> {
        self.write_small(folder, &mut Manifest::new(0))?;
        for file in self.weight_files()? {
            file.create(folder)?;
            file.write(folder, 0, 1)?;
        }
        Ok(())
    }

    /// Writes the new folder `target`. If this fails, there is no folder `target`.
    pub fn write_new(&self, target: &Path) -> Result<(), CheckpointError> {
        build_folder(target, |folder| self.write_into(folder))
    }

    /// Writes and syncs all files but those of weights into `folder` and adds each to `manifest`.
    pub(super) fn write_small(
        &self,
        folder: &Path,
        manifest: &mut Manifest,
    ) -> Result<(), CheckpointError> {
        let config = match self.layout {
            FolderLayout::Model => CONFIG,
            FolderLayout::Adapter => ADAPTER_CONFIG,
        };
        manifest.write_file(folder, config, &pretty(self.config_json))?;
        for (name, bytes) in self.carried.files() {
            manifest.write_file(folder, name, bytes)?;
        }
        let files = self.weight_files()?;
        if files.len() > 1 {
            let total_size: u64 = self.weights.iter().map(SavedTensor::num_bytes).sum();
            let weight_map: BTreeMap<_, _> =
                files.iter().flat_map(|file| file.names().map(|name| (name, &file.name))).collect();
            let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
            manifest.write_file(folder, INDEX, &pretty(&index))?;
        }
        Ok(())
    }

    /// The weight files: one, or several shards; none if there are no weights.
    pub(super) fn weight_files(&self) -> Result<Vec<TensorFile<'a>>, CheckpointError> {
        let mut names = BTreeSet::new();
        if let Some(twin) = self.weights.iter().find(|weight| !names.insert(weight.name())) {
            return Err(CheckpointError::SameName { tensor: twin.name().to_owned() });
        }
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        if self.layout == FolderLayout::Adapter {
            let tensors: Vec<_> = self.weights.iter().collect();
            return Ok(vec![TensorFile::new(ADAPTER_WEIGHTS, &tensors, &metadata)?]);
        }
        let shards = self.shards();
        let count = shards.len();
        let file = |(index, shard): (usize, &Vec<&'a SavedTensor>)| {
            let name = match count {
                1 => SINGLE.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            TensorFile::new(name, shard, &metadata)
        };
        shards.iter().enumerate().map(file).collect()
    }

    /// Splits the weights, in order, where the next tensor would exceed the maximum shard size.
    fn shards(&self) -> Vec<Vec<&'a SavedTensor>> {
        let mut shards: Vec<Vec<_>> = Vec::new();
        let mut used = 0;
        for weight in self.weights {
            let size = weight.num_bytes();
            match shards.last_mut() {
                Some(shard) if used == 0 || used + size <= self.max_shard_bytes => {
                    shard.push(weight);
                    used += size;
                }
                _ => {
                    shards.push(vec![weight]);
                    used = size;
                }
            }
        }
        shards
    }
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

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

    /// The same files with other contents of some of them, or with files that were not there.
    #[must_use]
    pub fn with(self, changed: Vec<(&'static str, Vec<u8>)>) -> Self {
        let is_kept = |(name, _): &&(&str, _)| changed.iter().all(|(other, _)| other != name);
        let kept: Vec<_> = self.0.iter().filter(is_kept).cloned().collect();
        Self(Arc::new(kept.into_iter().chain(changed).collect()))
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
    use super::super::atomic::write_synced;
    use super::super::{FolderLayout, ModelFolder, WeightFiles, make_pipe, write_atomically};
    use super::*;
    use candle_core::{DType, Device, Tensor};
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    fn weights() -> Vec<(String, Tensor)> {
        let tensor = |offset: f32, count: usize| {
            let values: Vec<f32> = (0..count).map(|i| (i as f32 + offset).sin()).collect();
            Tensor::from_vec(values, (count / 2, 2), &Device::Cpu).unwrap()
        };
        vec![
            ("z.first".to_owned(), tensor(0.1, 4)),
            ("a.second".to_owned(), tensor(0.2, 8).to_dtype(DType::BF16).unwrap()),
            ("m.third".to_owned(), tensor(0.3, 64)),
            ("last".to_owned(), tensor(0.4, 6)),
        ]
    }

    fn written(max_shard_bytes: u64) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let weights: Vec<_> =
            weights().into_iter().map(|(name, tensor)| SavedTensor::whole(name, tensor)).collect();
        let files = ModelFolder {
            layout: FolderLayout::Model,
            weights: &weights,
            config_json: &json!({"model_type": "tiny"}),
            carried: &CarriedFiles::default(),
            max_shard_bytes,
        };
        files.write_into(folder.path()).unwrap();
        folder
    }

    fn bits(tensor: &Tensor) -> Vec<u32> {
        // bf16 converts to f32 exactly, so equal f32 bits mean equal bf16 bits.
        let values: Vec<f32> =
            tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn sharded_and_unsharded_weights_load_bit_equal() {
        // 16, 16, 256 and 24 bytes: with 32 bytes a shard, the third tensor gets its own file.
        for (limit, num_files) in [(u64::MAX, 1), (32, 3), (1, 4)] {
            let folder = written(limit);
            let entries = fs::read_dir(folder.path()).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            assert_eq!(names.filter(|name| name.ends_with(".safetensors")).count(), num_files);
            let files = WeightFiles::open(folder.path()).unwrap();
            assert_eq!(
                files.names().collect::<Vec<_>>(),
                ["a.second", "last", "m.third", "z.first"]
            );
            for (name, tensor) in weights() {
                assert_eq!(files.shape(&name).unwrap(), tensor.dims());
                assert_eq!(files.dtype(&name), Some(tensor.dtype()));
                let loaded = files.load(&name, tensor.dtype(), &Device::Cpu).unwrap();
                assert_eq!(loaded.dtype(), tensor.dtype());
                assert_eq!(bits(&loaded), bits(&tensor), "{name}");
            }
        }
    }

    #[test]
    fn a_tensor_is_converted_to_the_requested_dtype() {
        let folder = written(u64::MAX);
        let files = WeightFiles::open(folder.path()).unwrap();
        let wide = &weights()[0].1;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let loaded = files.load("z.first", dtype, &Device::Cpu).unwrap();
            assert_eq!(loaded.dtype(), dtype);
            assert_eq!(bits(&loaded), bits(&wide.to_dtype(dtype).unwrap()));
        }
    }

    #[test]
    fn the_index_counts_all_bytes_and_maps_every_tensor() {
        let folder = written(32);
        let index: Value =
            serde_json::from_slice(&fs::read(folder.path().join(INDEX)).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 16 + 16 + 256 + 24);
        assert_eq!(index["weight_map"].as_object().unwrap().len(), 4);
        assert_eq!(index["weight_map"]["m.third"], "model-00002-of-00003.safetensors");
    }

    #[test]
    fn each_way_a_model_folder_can_be_incomplete_is_named() {
        let shard = "model-00002-of-00003.safetensors";
        let error = |break_it: &dyn Fn(&Path)| {
            let folder = written(32);
            break_it(folder.path());
            WeightFiles::open(folder.path()).unwrap_err()
        };
        let missing = error(&|folder| fs::remove_file(folder.join(shard)).unwrap());
        assert!(matches!(missing, CheckpointError::ShardMissing { .. }), "{missing}");
        let truncated = error(&|folder| {
            let file = File::options().write(true).open(folder.join(shard)).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        });
        assert!(matches!(truncated, CheckpointError::Invalid { .. }), "{truncated}");
        assert!(truncated.to_string().contains(shard), "{truncated}");
        let exchanged = error(&|folder| {
            fs::copy(folder.join("model-00001-of-00003.safetensors"), folder.join(shard)).unwrap();
        });
        assert!(matches!(exchanged, CheckpointError::NotInShard { .. }), "{exchanged}");
        let escaping = error(&|folder| {
            write_synced(&folder.join(INDEX), br#"{"weight_map": {"w": "../w"}}"#).unwrap();
        });
        assert!(escaping.to_string().contains("plain file name"), "{escaping}");
        let pickled = error(&|folder| {
            write_synced(&folder.join(INDEX), br#"{"weight_map": {"w": "pytorch_model.bin"}}"#)
                .unwrap();
        });
        assert!(matches!(pickled, CheckpointError::NotSafetensors { .. }), "{pickled}");
        let none = error(&|folder| fs::remove_file(folder.join(INDEX)).unwrap());
        assert!(matches!(none, CheckpointError::NoWeights { .. }), "{none}");
        let no_folder = WeightFiles::open(Path::new("/no/such/folder")).unwrap_err();
        assert!(matches!(no_folder, CheckpointError::Read { .. }), "{no_folder}");
    }

    #[test]
    fn a_file_truncated_at_any_byte_is_rejected_without_a_panic() {
        let folder = written(u64::MAX);
        let path = folder.path().join(SINGLE);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            write_synced(&path, &whole[..length]).unwrap();
            assert!(WeightFiles::open(folder.path()).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn other_dtypes_and_unknown_names_are_errors() {
        let folder = written(u64::MAX);
        let files = WeightFiles::open(folder.path()).unwrap();
        let error = files.load("absent", DType::F32, &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("tensor `absent` is missing"), "{error}");

        let path = folder.path().join("ids.safetensors");
        let header = br#"{"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(&[0; 8]);
        write_synced(&path, &bytes).unwrap();
        let files = WeightFiles::open_file(&path).unwrap();
        assert_eq!(files.dtype("ids"), None);
        let error = files.load("ids", DType::F32, &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("dtype `I64`"), "{error}");
    }

    #[test]
    fn files_deleted_after_the_start_of_the_run_are_still_written() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["tokenizer.json", "merges.txt", "model.safetensors"] {
            write_atomically(&from.path().join(name), name.as_bytes()).unwrap();
        }
        let carried = CarriedFiles::read(from.path()).unwrap();
        drop(from);
        let config_json = &serde_json::json!({});
        let files = ModelFolder {
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
