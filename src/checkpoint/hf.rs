//! Model folders in the Hugging Face layout: weights in one file or in shards with an index.
//!
//! Weights are memory-mapped, so that a folder larger than memory opens at once and each tensor is
//! read on demand.
#![expect(unsafe_code, reason = "memory maps")]

use super::manifest::{Manifest, is_plain_name};
use super::tensors::{num_bytes, write_tensors};
use super::{CarriedFiles, CheckpointError};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors, TensorInfo};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// The content of a model folder to be written.
#[derive(Debug, Clone, Copy)]
pub struct ModelFiles<'a> {
    /// Tensors with their published names, in model order; a tied weight appears once.
    pub weights: &'a [(String, Tensor)],
    /// Content of `config.json`.
    pub config_json: &'a Value,
    /// Tokenizer, template and processor files of the model folder that training started from.
    pub carried: &'a CarriedFiles,
    /// Maximum size of one weight file, in bytes of tensor data; a larger tensor gets its own file.
    pub max_shard_bytes: u64,
}

impl<'a> ModelFiles<'a> {
    /// Maximum size of a shard in bytes: 5 GB, the default of transformers.
    pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

    /// Writes and syncs all files into the existing folder `folder`, without a manifest. If
    /// `weights` is empty, writes only the config and the copied files.
    pub fn write_into(&self, folder: &Path) -> Result<(), CheckpointError> {
        self.write(folder, &mut Manifest::new(0))
    }

    /// Writes and syncs all files into `folder` and adds each to `manifest`.
    pub(super) fn write(
        &self,
        folder: &Path,
        manifest: &mut Manifest,
    ) -> Result<(), CheckpointError> {
        let config = pretty(self.config_json);
        manifest.write_file(folder, CONFIG, |out| Ok(out.write_all(&config)?))?;
        for (name, bytes) in self.carried.files() {
            manifest.write_file(folder, name, |out| Ok(out.write_all(bytes)?))?;
        }
        if self.weights.is_empty() {
            return Ok(());
        }
        self.write_weights(folder, manifest)
    }

    fn write_weights(&self, folder: &Path, manifest: &mut Manifest) -> Result<(), CheckpointError> {
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let shards = self.shards();
        let names: Vec<_> = match shards.len() {
            1 => vec![SINGLE.to_owned()],
            count => {
                (1..=count).map(|i| format!("model-{i:05}-of-{count:05}.safetensors")).collect()
            }
        };
        let mut weight_map = BTreeMap::new();
        for (name, shard) in names.iter().zip(&shards) {
            for (tensor, _) in shard {
                if weight_map.insert(tensor, name).is_some() {
                    return Err(CheckpointError::SameName { tensor: tensor.clone() });
                }
            }
            manifest.write_file(folder, name, |out| write_tensors(out, shard, &metadata))?;
        }
        if shards.len() > 1 {
            let total_size: u64 = self.weights.iter().map(|(_, tensor)| num_bytes(tensor)).sum();
            let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
            let index = pretty(&index);
            manifest.write_file(folder, INDEX, |out| Ok(out.write_all(&index)?))?;
        }
        Ok(())
    }

    /// Splits the weights, in order, where the next tensor would exceed the maximum shard size.
    /// Returns at least one shard.
    fn shards(&self) -> Vec<Vec<&'a (String, Tensor)>> {
        let mut shards = vec![Vec::new()];
        let mut used = 0;
        for weight in self.weights {
            let size = num_bytes(&weight.1);
            if used > 0 && used + size > self.max_shard_bytes {
                shards.push(Vec::new());
                used = 0;
            }
            used += size;
            shards.last_mut().expect("starts with one shard").push(weight);
        }
        shards
    }
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Tensors in one or more safetensors files, read on demand.
///
/// The files must not be changed in place while this value exists: if a mapped file shrinks, an
/// access ends the process with SIGBUS. Replacing or deleting the files is harmless.
#[derive(Debug)]
pub struct WeightFiles {
    place: PathBuf,
    shards: Vec<Shard>,
    by_name: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct Shard {
    map: Mmap,
    data_start: usize,
    tensors: HashMap<String, TensorInfo>,
}

impl WeightFiles {
    /// Opens the weights of a model folder: the shards of `model.safetensors.index.json` if it
    /// exists, otherwise `model.safetensors`. Checks headers and file sizes.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        if folder.join(INDEX).exists() {
            return Self::open_index(folder);
        }
        let single = folder.join(SINGLE);
        if single.exists() {
            return Self::open_file(&single);
        }
        fs::read_dir(folder).map_err(CheckpointError::read(folder))?;
        Err(CheckpointError::NoWeights { folder: folder.to_owned() })
    }

    /// Opens one safetensors file and checks its header and size.
    pub fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        let shard = Shard::open(path)?;
        let by_name = shard.tensors.keys().map(|name| (name.clone(), 0)).collect();
        Ok(Self { place: path.to_owned(), shards: vec![shard], by_name })
    }

    fn open_index(folder: &Path) -> Result<Self, CheckpointError> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let path = folder.join(INDEX);
        let text = fs::read(&path).map_err(CheckpointError::read(&path))?;
        let Index { weight_map } = serde_json::from_slice(&text)
            .map_err(|error| CheckpointError::invalid(&path, &error))?;

        let mut opened = BTreeMap::new();
        let mut files =
            Self { place: folder.to_owned(), shards: Vec::new(), by_name: BTreeMap::new() };
        for (tensor, name) in weight_map {
            let index = if let Some(&index) = opened.get(&name) {
                index
            } else {
                files.shards.push(Shard::open_named(folder, &path, &name)?);
                opened.insert(name.clone(), files.shards.len() - 1);
                files.shards.len() - 1
            };
            if !files.shards[index].tensors.contains_key(&tensor) {
                return Err(CheckpointError::NotInShard { index: path, shard: name, tensor });
            }
            files.by_name.insert(tensor, index);
        }
        Ok(files)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Shape of the tensor `name`, or `None` if it does not exist.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.find(name)?.1.shape.clone())
    }

    /// Dtype of the tensor `name` on disk: `F32`, `BF16` or `F16`; `None` if the tensor does not
    /// exist or has another dtype.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        match self.find(name)?.1.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::BF16 => Some(DType::BF16),
            Dtype::F16 => Some(DType::F16),
            _ => None,
        }
    }

    /// Reads a tensor and converts it to `dtype` (`f32`, `bf16` or `f16`), rounding to nearest if
    /// `dtype` is narrower. If `dtype` is that of the file, the bits are unchanged.
    pub fn load(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, CheckpointError> {
        let (shard, info) = self.find(name).ok_or_else(|| CheckpointError::NoTensor {
            place: self.place.clone(),
            tensor: name.to_owned(),
        })?;
        let data = shard.data(info);
        let shape = info.shape.as_slice();
        let tensor = match info.dtype {
            Dtype::F32 => {
                let values = decode(data, f32::from_le_bytes);
                Tensor::from_vec(values, shape, &Device::Cpu)
            }
            Dtype::BF16 => {
                let values = decode(data, bf16::from_le_bytes);
                Tensor::from_vec(values, shape, &Device::Cpu)
            }
            Dtype::F16 => {
                let values = decode(data, f16::from_le_bytes);
                Tensor::from_vec(values, shape, &Device::Cpu)
            }
            other => {
                return Err(CheckpointError::Dtype {
                    place: self.place.clone(),
                    tensor: name.to_owned(),
                    dtype: format!("{other:?}"),
                });
            }
        };
        tensor
            .and_then(|tensor| tensor.to_dtype(dtype))
            .and_then(|tensor| tensor.to_device(device))
            .map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    /// Reads elements of a flat tensor.
    pub fn load_part(
        &self,
        name: &str,
        elements: std::ops::Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, CheckpointError> {
        let all = self.load(name, dtype, device)?;
        let part = || all.flatten_all()?.narrow(0, elements.start, elements.len())?.copy();
        part().map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    fn find(&self, name: &str) -> Option<(&Shard, &TensorInfo)> {
        let shard = &self.shards[*self.by_name.get(name)?];
        Some((shard, shard.tensors.get(name)?))
    }
}

impl Shard {
    fn open_named(folder: &Path, index: &Path, name: &str) -> Result<Self, CheckpointError> {
        if !is_plain_name(name) {
            let problem = format!("shard `{name}` is not a plain file name");
            return Err(CheckpointError::invalid(index, &problem));
        }
        match Self::open(&folder.join(name)) {
            Err(CheckpointError::Read { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                Err(CheckpointError::ShardMissing {
                    index: index.to_owned(),
                    shard: name.to_owned(),
                })
            }
            opened => opened,
        }
    }

    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(CheckpointError::read(path))?;
        // SAFETY: the map is read-only, and this program never changes a weight file in place: it
        // writes files under a temporary name and renames them. The doc comment of `WeightFiles`
        // requires the same of other programs.
        let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::read(path))?;
        let (header_bytes, header) =
            SafeTensors::read_metadata(&map).map_err(|error| match error {
                SafeTensorError::MetadataIncompleteBuffer => {
                    let problem = format!("its size of {} bytes contradicts its header", map.len());
                    CheckpointError::invalid(path, &problem)
                }
                error => CheckpointError::invalid(path, &error),
            })?;
        let data_start = 8 + header_bytes;
        // The check in `read_metadata` adds without a test for overflow, so that offsets near
        // `usize::MAX` would pass it.
        if data_start.checked_add(header.data_len()) != Some(map.len()) {
            return Err(CheckpointError::invalid(path, &"its size contradicts its header"));
        }
        let tensors =
            header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        Ok(Self { map, data_start, tensors })
    }

    /// The bytes of a tensor. In bounds, because `open` compared the header with the file size.
    fn data(&self, info: &TensorInfo) -> &[u8] {
        let (start, end) = info.data_offsets;
        &self.map[self.data_start + start..self.data_start + end]
    }
}

fn decode<T, const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|&chunk| value(chunk)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::atomic::write_synced;
    use super::*;

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

    fn written(max_shard_bytes: u64) -> (tempfile::TempDir, Manifest) {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::new(0);
        let files = ModelFiles {
            weights: &weights(),
            config_json: &json!({"model_type": "tiny"}),
            carried: &CarriedFiles::default(),
            max_shard_bytes,
        };
        files.write(folder.path(), &mut manifest).unwrap();
        (folder, manifest)
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
            let (folder, manifest) = written(limit);
            let shards = manifest.files.keys().filter(|name| name.ends_with(".safetensors"));
            assert_eq!(shards.count(), num_files);
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
        let (folder, _) = written(u64::MAX);
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
        let (folder, manifest) = written(32);
        let index: Value =
            serde_json::from_slice(&fs::read(folder.path().join(INDEX)).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 16 + 16 + 256 + 24);
        assert_eq!(index["weight_map"].as_object().unwrap().len(), 4);
        assert_eq!(index["weight_map"]["m.third"], "model-00002-of-00003.safetensors");
        assert!(manifest.files.contains_key(INDEX));
    }

    #[test]
    fn each_way_a_model_folder_can_be_incomplete_is_named() {
        let shard = "model-00002-of-00003.safetensors";
        let error = |break_it: &dyn Fn(&Path)| {
            let (folder, _) = written(32);
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
        let none = error(&|folder| fs::remove_file(folder.join(INDEX)).unwrap());
        assert!(matches!(none, CheckpointError::NoWeights { .. }), "{none}");
        let no_folder = WeightFiles::open(Path::new("/no/such/folder")).unwrap_err();
        assert!(matches!(no_folder, CheckpointError::Read { .. }), "{no_folder}");
    }

    #[test]
    fn a_file_truncated_at_any_byte_is_rejected_without_a_panic() {
        let (folder, _) = written(u64::MAX);
        let path = folder.path().join(SINGLE);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            write_synced(&path, &whole[..length]).unwrap();
            assert!(WeightFiles::open(folder.path()).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn other_dtypes_and_unknown_names_are_errors() {
        let (folder, _) = written(u64::MAX);
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
}
