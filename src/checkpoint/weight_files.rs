//! The tensors of a model folder or of one safetensors file, read on demand: in shards with an
//! index, or in pieces, such as one tensor of each expert; and the digest of them all.
//!
//! Files are memory-mapped, so that a folder larger than memory opens at once.

use super::CheckpointError;
use super::bitsandbytes::{ABSMAX, FP4_STATE, MAP, NESTED_ABSMAX, NESTED_MAP, QuantState, STATE};
use super::hf::{INDEX, SINGLE};
use super::manifest::{MANIFEST, Manifest, not_listed};
use super::shard::{Shard, Values};
use crate::files;
use crate::ops::{Nf4, Nf4Parts, is_nf4_map, nf4_places, nf4_span};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorInfo};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Tensors in one or more safetensors files, read on demand.
///
/// The files must not be changed in place while this value exists: if a mapped file shrinks, an
/// access ends the process with SIGBUS. Replacing or deleting the files is harmless.
#[derive(Debug)]
pub struct WeightFiles {
    place: PathBuf,
    shards: Vec<Shard>,
    /// For each name, the shard and the name in its file.
    by_name: BTreeMap<String, (usize, String)>,
    /// Matrices that bitsandbytes has stored in NF4, by name.
    quantized: BTreeMap<String, QuantState>,
    /// Tensors that the files have in pieces, by name.
    joined: BTreeMap<String, JoinedTensor>,
    /// Names of the pieces.
    in_pieces: HashSet<String>,
}

impl WeightFiles {
    /// Opens the weights of a model folder: `model.safetensors` if it exists, as transformers does,
    /// otherwise the shards of `model.safetensors.index.json`. Checks headers and file sizes.
    ///
    /// In a folder with a manifest of this program, the manifest decides: an index that it does not
    /// list is ignored with a warning, and a file of weights that it does not list is an error.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::of_folder(folder);
        let is_listed =
            |name: &str| manifest.as_ref().is_none_or(|manifest| manifest.files.contains_key(name));
        let [single, index] = [SINGLE, INDEX].map(|name| folder.join(name));
        if single.exists() {
            if !is_listed(SINGLE) {
                return Err(not_listed(folder, SINGLE));
            }
            if index.exists() && !names_only_single(&index) {
                let path = index.display().to_string();
                tracing::warn!(path, "ignored an index of weights, because {SINGLE} is next to it");
            }
            return Self::open_file(&single);
        }
        if index.exists() {
            if is_listed(INDEX) {
                return Self::open_index(folder, is_listed);
            }
            let path = index.display().to_string();
            tracing::warn!(path, "ignored an index of weights that {MANIFEST} does not list");
        }
        fs::read_dir(folder).map_err(CheckpointError::read(folder))?;
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        let pickled = pickled.map(|name| folder.join(name)).into_iter().find(|path| path.exists());
        if let Some(path) = pickled {
            return Err(CheckpointError::Pickled { path, expected: SINGLE });
        }
        Err(CheckpointError::NoWeights { folder: folder.to_owned() })
    }

    /// Opens one safetensors file and checks its header and size.
    pub fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        let shard = Shard::open(path)?;
        let by_name = shard.tensors.keys().map(|name| (name.clone(), (0, name.clone()))).collect();
        Self::new(path, vec![shard], by_name)
    }

    fn open_index(
        folder: &Path,
        is_listed: impl Fn(&str) -> bool,
    ) -> Result<Self, CheckpointError> {
        let path = folder.join(INDEX);
        let Index { weight_map } = Index::read(&path)?;
        let shards = weight_map.values().map(String::as_str).collect::<BTreeSet<_>>();
        if let Some(other) = other_shard(folder, &shards) {
            let path = path.display().to_string();
            tracing::warn!(path, "ignored `{other}`, which the index does not name");
        }

        let mut opened = BTreeMap::new();
        let (mut shards, mut by_name) = (Vec::new(), BTreeMap::new());
        for (tensor, name) in weight_map {
            let index = if let Some(&index) = opened.get(&name) {
                index
            } else {
                let shard = Shard::open_named(folder, &path, &name)?;
                if !is_listed(&name) {
                    return Err(not_listed(folder, &name));
                }
                shards.push(shard);
                opened.insert(name.clone(), shards.len() - 1);
                shards.len() - 1
            };
            if !shards[index].tensors.contains_key(&tensor) {
                return Err(CheckpointError::NotInShard { index: path, shard: name, tensor });
            }
            by_name.insert(tensor.clone(), (index, tensor));
        }
        Self::new(folder, shards, by_name)
    }

    /// Finds the matrices in NF4.
    fn new(
        place: &Path,
        shards: Vec<Shard>,
        by_name: BTreeMap<String, (usize, String)>,
    ) -> Result<Self, CheckpointError> {
        let place = place.to_owned();
        let mut files = Self {
            place,
            shards,
            by_name,
            quantized: BTreeMap::new(),
            joined: BTreeMap::new(),
            in_pieces: HashSet::new(),
        };
        let states = files.by_name.keys();
        if let Some(fp4) = states.clone().find_map(|name| name.strip_suffix(FP4_STATE)) {
            let problem = "is stored in FP4, expected NF4, or the original weights".to_owned();
            return Err(CheckpointError::Quantised { tensor: fp4.to_owned(), problem });
        }
        let names = states.filter_map(|name| name.strip_suffix(STATE));
        for name in names.map(str::to_owned).collect::<Vec<_>>() {
            let state = QuantState::read(&name, files.bytes(&name, STATE)?)?;
            state.check(&name, |end| files.find(&format!("{name}{end}")).map(|(_, info)| info))?;
            let maps = [MAP, NESTED_MAP].map(|map| {
                let bytes = files.bytes(&name, map)?;
                Ok::<_, CheckpointError>(decode(bytes, &(0..bytes.len() / 4), f32::from_le_bytes))
            });
            let [map, nested] = maps;
            if !is_nf4_map(&map?, &nested?) {
                let problem = "is quantised with maps other than those of NF4 in bitsandbytes";
                return Err(CheckpointError::Quantised {
                    tensor: name,
                    problem: problem.to_owned(),
                });
            }
            files.quantized.insert(name, state);
        }
        Ok(files)
    }

    /// The tensors under the names that `rename` makes of those in the files. Fails if the files
    /// have two tensors for one name.
    pub fn renamed(self, rename: impl Fn(&str) -> String) -> Result<Self, CheckpointError> {
        let mut by_name = BTreeMap::new();
        for (name, place) in self.by_name {
            let renamed = rename(&name);
            let second = place.1.clone();
            if let Some((_, first)) = by_name.insert(renamed.clone(), place) {
                let spellings = [first, second];
                let place = self.place;
                return Err(CheckpointError::TwoSpellings { place, tensor: renamed, spellings });
            }
        }
        let quantized = self.quantized.into_iter().map(|(name, state)| (rename(&name), state));
        Ok(Self { by_name, quantized: quantized.collect(), ..self })
    }

    /// Names of all tensors, sorted, followed by those of [`Self::joined`] tensors. The parts of a
    /// matrix in NF4 and the pieces of a joined tensor are not listed.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let is_part = |name: &str| {
            let ends = [STATE, NESTED_ABSMAX, ABSMAX, NESTED_MAP, MAP];
            let matrix = ends.into_iter().find_map(|end| name.strip_suffix(end));
            matrix.is_some_and(|matrix| self.quantized.contains_key(matrix))
        };
        let listed = move |name: &&str| !is_part(name) && !self.in_pieces.contains(*name);
        let stored = self.by_name.keys().map(String::as_str).filter(listed);
        stored.chain(self.joined.keys().map(String::as_str))
    }

    pub fn is_quantized(&self) -> bool {
        !self.quantized.is_empty()
    }

    /// Shape of the tensor `name`, or `None` if it does not exist.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        if let Some(state) = self.quantized.get(name) {
            return Some(state.shape.clone());
        }
        if let Some(joined) = self.joined.get(name) {
            return Some(joined.shape.clone());
        }
        Some(self.find(name)?.1.shape.clone())
    }

    /// Dtype of the tensor `name` on disk: `F32`, `BF16` or `F16`; `None` if the tensor does not
    /// exist or has another dtype. That of a matrix in NF4 is its dtype before it was quantised.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        if let Some(state) = self.quantized.get(name) {
            return Some(state.dtype);
        }
        if let Some(joined) = self.joined.get(name) {
            return self.dtype_of_pieces(joined);
        }
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
        let shape = self.shape(name).unwrap_or_default();
        let tensor = self.load_part(name, 0..shape.iter().product(), dtype, device)?;
        tensor
            .reshape(shape)
            .map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    /// As [`Self::load`], for the elements `range` of the tensor in row-major order. Returns a
    /// tensor with one dimension and reads no other part of the file.
    pub fn load_part(
        &self,
        name: &str,
        range: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, CheckpointError> {
        let no_tensor =
            || CheckpointError::NoTensor { place: self.place.clone(), tensor: name.to_owned() };
        let len = self.shape(name).ok_or_else(no_tensor)?.iter().product();
        if range.start > range.end || range.end > len {
            let Range { start, end } = range;
            let problem = format!("has {len} elements, but the elements {start}..{end} are needed");
            return Err(CheckpointError::Parts { tensor: name.to_owned(), problem });
        }
        if let Some(joined) = self.joined.get(name) {
            return self.load_pieces(name, joined, &range, dtype, device);
        }
        let copied = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        if let Some(state) = self.quantized.get(name) {
            let span = nf4_span(&range, len);
            let part = range.start - span.start..range.end - span.start;
            let values = self.nf4_of(name, &span, vec![span.len()], state)?.part(part);
            let values = values.and_then(|values| values.to_dtype(dtype)?.to_device(device));
            return values.map_err(copied);
        }
        let (shard, info) = self.find(name).ok_or_else(no_tensor)?;
        shard
            .elements(name, info, &range, dtype)?
            .to_dtype(dtype)
            .and_then(|tensor| tensor.to_device(device))
            .map_err(copied)
    }

    /// The matrix `name`, on the CPU, if it is stored in NF4.
    pub fn nf4(&self, name: &str) -> Result<Option<Nf4>, CheckpointError> {
        let Some(state) = self.quantized.get(name) else { return Ok(None) };
        let all = 0..state.shape.iter().product();
        self.nf4_of(name, &all, state.shape.clone(), state).map(Some)
    }

    /// A span of a matrix in NF4 that begins and ends with a range of scales.
    fn nf4_of(
        &self,
        name: &str,
        span: &Range<usize>,
        shape: Vec<usize>,
        state: &QuantState,
    ) -> Result<Nf4, CheckpointError> {
        let [codes, scales, ranges] = nf4_places(span);
        let part = |end: &str, of: &Range<usize>, size: usize| {
            Ok::<_, CheckpointError>(&self.bytes(name, end)?[of.start * size..of.end * size])
        };
        let parts = Nf4Parts {
            shape,
            codes: part("", &codes, 1)?.to_vec(),
            scales: part(ABSMAX, &scales, 1)?.to_vec(),
            ranges: decode(
                part(NESTED_ABSMAX, &ranges, 4)?,
                &(0..ranges.len()),
                f32::from_le_bytes,
            ),
            offset: state.offset,
        };
        let state_is_finite = state.offset.is_finite();
        if !state_is_finite || parts.ranges.iter().any(|range| !range.is_finite()) {
            let problem = "has scales that are not finite".to_owned();
            return Err(CheckpointError::Quantised { tensor: name.to_owned(), problem });
        }
        Nf4::new(parts)
            .map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    /// The bytes of the tensor `name` with `end`.
    fn bytes(&self, name: &str, end: &str) -> Result<&[u8], CheckpointError> {
        let tensor = format!("{name}{end}");
        match self.find(&tensor) {
            Some((shard, info)) => Ok(shard.data(info)),
            None => Err(CheckpointError::NoTensor { place: self.place.clone(), tensor }),
        }
    }

    fn find(&self, name: &str) -> Option<(&Shard, &TensorInfo)> {
        let (shard, in_file) = self.by_name.get(name)?;
        let shard = &self.shards[*shard];
        Some((shard, shard.tensors.get(in_file)?))
    }
}

fn decode<T, const N: usize>(
    bytes: &[u8],
    range: &Range<usize>,
    value: impl Fn([u8; N]) -> T,
) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks[range.clone()].iter().map(|&chunk| value(chunk)).collect()
}

#[derive(serde::Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl Index {
    fn read(path: &Path) -> Result<Self, CheckpointError> {
        let text = files::read(path).map_err(CheckpointError::read(path))?;
        serde_json::from_slice(&text).map_err(|error| CheckpointError::invalid(path, &error))
    }
}

/// Whether an index says only that the tensors are in [`SINGLE`].
fn names_only_single(path: &Path) -> bool {
    Index::read(path).is_ok_and(|index| index.weight_map.values().all(|name| name == SINGLE))
}

/// A file in the folder that is named like a shard and is none of `shards`.
fn other_shard(folder: &Path, shards: &BTreeSet<&str>) -> Option<String> {
    let entries = fs::read_dir(folder).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_shard = |name: &String| name.starts_with("model-") && name.ends_with(".safetensors");
    names.filter(|name| is_shard(name) && !shards.contains(name.as_str())).min()
}

/// A tensor whose elements are those of its pieces, one after the other.
#[derive(Debug)]
struct JoinedTensor {
    shape: Vec<usize>,
    /// Name and elements of each piece.
    pieces: Vec<(String, Range<usize>)>,
}

impl WeightFiles {
    /// From now on, the files have the tensor `name` of `shape`. Its elements in row-major order
    /// are those of `pieces`, one after the other, which are not listed any more. The files have
    /// the pieces, with as many elements.
    #[must_use]
    pub fn joined(mut self, name: &str, shape: &[usize], pieces: &[(String, Vec<usize>)]) -> Self {
        let mut end = 0;
        let piece = |(name, shape): &(String, Vec<usize>)| {
            let start = end;
            end += shape.iter().product::<usize>();
            (name.clone(), start..end)
        };
        let pieces = pieces.iter().map(piece).collect::<Vec<_>>();
        self.in_pieces.extend(pieces.iter().map(|(name, _)| name.clone()));
        self.joined.insert(name.to_owned(), JoinedTensor { shape: shape.to_vec(), pieces });
        self
    }

    /// The dtype of all pieces, or `F32` if they differ; `None` if one has a dtype that is not
    /// read.
    fn dtype_of_pieces(&self, joined: &JoinedTensor) -> Option<DType> {
        let mut dtypes = joined.pieces.iter().map(|(name, _)| self.dtype(name));
        let first = dtypes.next()??;
        dtypes.try_fold(first, |common, dtype| {
            Some(if dtype? == common { common } else { DType::F32 })
        })
    }

    /// Elements of a joined tensor, in one dimension. Pieces of one dtype are copied once.
    fn load_pieces(
        &self,
        name: &str,
        joined: &JoinedTensor,
        range: &Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, CheckpointError> {
        let failed = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        let inside = |(piece, elements): &'_ (String, Range<usize>)| {
            let (start, end) = (range.start.max(elements.start), range.end.min(elements.end));
            (start < end).then(|| (piece.clone(), start - elements.start..end - elements.start))
        };
        let parts: Vec<_> = joined.pieces.iter().filter_map(inside).collect();
        let stored = self.dtype_of_pieces(joined).and_then(Values::of);
        let is_plain = |piece: &str| {
            let values = stored.as_ref().map(Values::dtype);
            !self.quantized.contains_key(piece) && self.dtype(piece) == values
        };
        if let Some(mut values) =
            stored.clone().filter(|_| parts.iter().all(|(of, _)| is_plain(of)))
        {
            values.reserve(range.len());
            for (piece, elements) in &parts {
                let Some((shard, info)) = self.find(piece) else { continue };
                shard.append(piece, info, elements, dtype, &mut values)?;
            }
            let tensor = values.into_tensor().and_then(|tensor| tensor.to_dtype(dtype));
            return tensor.and_then(|tensor| tensor.to_device(device)).map_err(failed);
        }
        let load = |(piece, elements): &(String, Range<usize>)| {
            self.load_part(piece, elements.clone(), dtype, device)
        };
        let tensors = parts.iter().map(load).collect::<Result<Vec<_>, _>>()?;
        if tensors.is_empty() {
            return Tensor::zeros(0, dtype, device).map_err(failed);
        }
        Tensor::cat(&tensors, 0).map_err(failed)
    }
}

/// Number of bytes that a thread reads at a time.
const CHUNK: usize = 16 << 20;

impl WeightFiles {
    /// SHA-256 of the names, dtypes, shapes and bytes of all tensors, including tensors that the model
    /// does not use. It does not depend on how the tensors are divided among files.
    pub fn digest(&self) -> String {
        let found = self.by_name.keys().filter_map(|name| Some((name, self.find(name)?)));
        let tensors: Vec<(&String, (&Shard, &TensorInfo))> = found.collect();
        let of_chunk = |shard: &Shard, chunk: &[u8]| {
            let digest = Sha256::digest(chunk);
            shard.release(chunk);
            digest
        };
        let chunks = tensors.par_iter().map(|(_, (shard, info))| {
            let chunks = shard.data(info).par_chunks(CHUNK);
            chunks.map(|chunk| of_chunk(shard, chunk)).collect::<Vec<_>>()
        });
        let chunks: Vec<_> = chunks.collect();
        let mut digest = Sha256::new();
        for ((name, (_, info)), chunks) in tensors.iter().zip(chunks) {
            digest.update(format!("{name} {:?} {:?} ", info.dtype, info.shape));
            for chunk in chunks {
                digest.update(chunk);
            }
        }
        format!("{:x}", digest.finalize())
    }

    /// Sizes and times of the files. If they are the same as before, so are the bytes.
    pub fn stamps(&self) -> Result<String, CheckpointError> {
        let mut digest = Sha256::new();
        for shard in &self.shards {
            let path = shard.path();
            let metadata = fs::metadata(path).map_err(CheckpointError::read(path))?;
            let times = (metadata.mtime(), metadata.mtime_nsec());
            let changed = (metadata.ctime(), metadata.ctime_nsec());
            let file = (path.file_name(), metadata.ino(), metadata.len());
            digest.update(format!("{file:?} {times:?} {changed:?} "));
        }
        Ok(format!("{:x}", digest.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CarriedFiles, FolderLayout, ModelFolder, SavedTensor};
    use super::*;
    use candle_core::{Device, Tensor};
    use std::collections::HashMap;
    use std::path::Path;

    const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

    /// A folder with a tensor of each dtype.
    fn opened() -> (tempfile::TempDir, WeightFiles) {
        let folder = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..35).map(|i| (i as f32).sin()).collect();
        let wide = Tensor::from_vec(values, (7, 5), &Device::Cpu).unwrap();
        let tensor =
            |dtype| SavedTensor::whole(format!("{dtype:?}"), wide.to_dtype(dtype).unwrap());
        let files = ModelFolder {
            layout: FolderLayout::Model,
            weights: &DTYPES.map(tensor),
            config_json: &serde_json::json!({}),
            carried: &CarriedFiles::default(),
            max_shard_bytes: 100,
        };
        files.write_into(folder.path()).unwrap();
        let files = WeightFiles::open(folder.path()).unwrap();
        (folder, files)
    }

    #[test]
    fn a_part_has_the_bits_of_the_whole_tensor() {
        let (_folder, files) = opened();
        for (from, to) in DTYPES.iter().flat_map(|from| DTYPES.map(|to| (format!("{from:?}"), to)))
        {
            let whole = files.load(&from, to, &Device::Cpu).unwrap();
            let bits = |tensor: &Tensor| -> Vec<u32> {
                let tensor = tensor.to_dtype(DType::F32).unwrap();
                tensor.to_vec1().unwrap().into_iter().map(f32::to_bits).collect()
            };
            let whole = bits(&whole.flatten_all().unwrap());
            for range in [0..35, 0..1, 3..11, 34..35, 5..5] {
                let part = files.load_part(&from, range.clone(), to, &Device::Cpu).unwrap();
                assert_eq!((part.dims(), part.dtype()), (&[range.len()][..], to));
                assert_eq!(bits(&part), whole[range.clone()], "{from} to {to:?}, {range:?}");
            }
        }
    }

    /// Made by `scripts/golden/nf4.py` with bitsandbytes.
    fn quantized() -> WeightFiles {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/nf4.safetensors");
        WeightFiles::open_file(Path::new(path)).unwrap()
    }

    #[test]
    fn a_matrix_of_bitsandbytes_reads_like_one_that_is_not_quantised() {
        let files = quantized();
        let weights: Vec<_> = files.names().filter(|name| name.contains(".weight")).collect();
        assert_eq!(weights.len(), 6, "{weights:?}");
        for name in weights {
            let of = |end: &str| name.replace(".weight", end);
            assert_eq!(files.shape(name), files.shape(&of(".original")), "{name}");
            assert_eq!(files.dtype(name), files.dtype(&of(".original")), "{name}");
            let dtype = files.dtype(name).unwrap();
            let load = |name: &str, range: Range<usize>| {
                let part = files.load_part(name, range, dtype, &Device::Cpu).unwrap();
                part.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
            };
            let len = files.shape(name).unwrap().iter().product();
            for range in [0..len, 3..len, 17..18, len - 1..len, len / 2..len / 2] {
                let expected = load(&of(".dequantized"), range.clone());
                assert_eq!(load(name, range), expected, "{name}");
            }
        }
    }

    #[test]
    fn the_codes_of_a_matrix_are_those_of_the_file() {
        let files = quantized();
        let matrix = files.nf4("random.weight").unwrap().unwrap().parts().unwrap();
        assert_eq!(matrix.shape, [60, 300]);
        assert_eq!(matrix.codes, files.bytes("random.weight", "").unwrap());
        assert_eq!(matrix.scales, files.bytes("random.weight", ABSMAX).unwrap());
        assert!(files.nf4("random.original").unwrap().is_none());
    }

    #[test]
    fn two_spellings_of_a_name_are_refused_with_both_of_them() {
        let (_folder, files) = opened();
        let error = files.renamed(|name| name.replace("BF16", "F16")).unwrap_err().to_string();
        assert!(error.contains("`BF16` and `F16`, which both are `F16`"), "{error}");
        let (_folder, files) = opened();
        let files = files.renamed(|name| name.replace("BF16", "wide")).unwrap();
        assert_eq!(files.names().collect::<Vec<_>>(), ["F16", "F32", "wide"]);
        assert_eq!(files.dtype("wide"), Some(DType::BF16));
    }

    #[test]
    fn a_part_outside_of_its_tensor_is_refused() {
        let (_folder, files) = opened();
        let (start, end) = (5, 4);
        for range in [0..36, 35..36, 40..41, start..end] {
            let part = files.load_part("F32", range.clone(), DType::F32, &Device::Cpu);
            let error = part.unwrap_err().to_string();
            let expected = format!(
                "tensor `F32` has 35 elements, but the elements {}..{} are needed",
                range.start, range.end
            );
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn the_elements_of_a_joined_tensor_are_those_of_its_pieces_in_order() {
        let values: Vec<f32> = (0..24).map(|i| (i as f32 * 0.37).sin()).collect();
        let whole = Tensor::from_vec(values, (2, 3, 4), &Device::Cpu).unwrap();
        let pieces: Vec<(String, Vec<usize>)> =
            (0..4).map(|piece| (format!("piece.{}", 3 - piece), vec![6])).collect();
        for (wide, all) in [(true, DType::F32), (false, DType::BF16)] {
            let saved = SavedTensor::whole("whole", whole.to_dtype(all).unwrap());
            let mut saved = saved.split(&pieces).unwrap();
            if wide {
                // pieces of several dtypes
                let narrow = whole.flatten_all().unwrap().narrow(0, 6, 6).unwrap();
                let narrow = narrow.to_dtype(DType::BF16).unwrap();
                saved[1] = SavedTensor::whole("piece.2", narrow);
            }
            saved.push(SavedTensor::whole("other", whole.clone()));
            let folder = tempfile::tempdir().unwrap();
            let files = ModelFolder {
                layout: FolderLayout::Model,
                weights: &saved,
                config_json: &serde_json::json!({}),
                carried: &CarriedFiles::default(),
                max_shard_bytes: 50,
            };
            files.write_into(folder.path()).unwrap();
            let files = WeightFiles::open(folder.path()).unwrap().joined("w", &[2, 3, 4], &pieces);
            assert_eq!(files.names().collect::<Vec<_>>(), ["other", "w"]);
            assert_eq!(files.shape("w").unwrap(), [2, 3, 4]);
            assert_eq!(files.dtype("w"), Some(all));
            let bits = |tensor: Tensor| -> Vec<u32> {
                let tensor = tensor.to_dtype(DType::F32).unwrap();
                tensor.to_vec1().unwrap().into_iter().map(f32::to_bits).collect()
            };
            let mut expected = bits(whole.to_dtype(all).unwrap().flatten_all().unwrap());
            if wide {
                let narrow = whole.flatten_all().unwrap().to_dtype(DType::BF16).unwrap();
                expected[6..12].copy_from_slice(&bits(narrow)[6..12]);
            }
            for range in [0..24, 0..1, 5..7, 6..12, 3..20, 23..24, 9..9] {
                let part = files.load_part("w", range.clone(), DType::F32, &Device::Cpu).unwrap();
                assert_eq!(bits(part), expected[range.clone()], "{range:?}");
            }
            let error = files.load_part("w", 0..25, DType::F32, &Device::Cpu).unwrap_err();
            assert!(error.to_string().contains("24 elements"), "{error}");
        }
    }

    fn saved(path: &Path, tensors: &[(&str, &[f32])]) -> WeightFiles {
        let tensor = |(name, values): &(&str, &[f32])| {
            ((*name).to_owned(), Tensor::new(*values, &Device::Cpu).unwrap())
        };
        let tensors: HashMap<String, Tensor> = tensors.iter().map(tensor).collect();
        candle_core::safetensors::save(&tensors, path).unwrap();
        WeightFiles::open_file(path).unwrap()
    }

    #[test]
    fn the_digest_sees_every_byte_name_and_shape_but_not_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let long = vec![0.5f32; 5 << 20]; // several chunks
        let before = saved(&path, &[("a", &long), ("b", &[1.0, 2.0])]).digest();
        assert_eq!(saved(&path, &[("b", &[1.0, 2.0]), ("a", &long)]).digest(), before);
        for at in [0, 1, (4 << 20) - 1, 4 << 20, (5 << 20) - 1] {
            let mut other = long.clone();
            other[at] = 0.25;
            let files = saved(&path, &[("a", &other), ("b", &[1.0, 2.0])]);
            assert_ne!(files.digest(), before, "{at}");
        }
        assert_ne!(saved(&path, &[("a", &long), ("c", &[1.0, 2.0])]).digest(), before);
        assert_ne!(saved(&path, &[("a", &long), ("b", &[1.0]), ("c", &[2.0])]).digest(), before);
    }

    #[test]
    fn a_file_that_is_written_again_has_other_stamps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let files = saved(&path, &[("a", &[1.0])]);
        let before = files.stamps().unwrap();
        assert_eq!(files.stamps().unwrap(), before);
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let files = saved(&path, &[("a", &[2.0])]);
        let file = fs::File::options().append(true).open(&path).unwrap();
        file.set_modified(modified).unwrap();
        assert_ne!(files.stamps().unwrap(), before);
    }
}
