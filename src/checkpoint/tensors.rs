//! Safetensors files whose tensors are written in parts, by one process or by several ranks at
//! once.
//!
//! The header, and so the place of each element, follows from the names, shapes and dtypes of all
//! tensors, which are the same on every rank. Each rank writes its parts at their offsets, without
//! a second copy of the model in memory.
//!
//! Training changes tensors while a thread writes a checkpoint: it writes copies of them.

use super::CheckpointError;
use super::manifest::{Piece, PieceWriter};
use super::shard::{FloatValue, first_non_finite};
use crate::ops::copy_to_host;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, WithDType};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Alignment of the tensor data in bytes, so that a memory map can be read as any dtype.
const ALIGNMENT: usize = 8;
/// Maximum number of elements that are checked and converted to bytes at once.
const CHUNK_ELEMENTS: usize = 1 << 16;
/// Maximum number of elements that are copied from a device at once.
const HOST_ELEMENTS: usize = 1 << 22;

/// A tensor of a file, with the parts of it that this rank holds.
///
/// All ranks pass the same tensors in the same order, with parts that cover each element once.
#[derive(Debug, Clone)]
pub struct SavedTensor {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    held: Held,
    is_fixed: bool,
}

type Make = dyn Fn() -> Result<Tensor, CheckpointError> + Send + Sync;

/// What a rank holds of a tensor.
#[derive(Clone)]
enum Held {
    /// Every rank holds the whole tensor: the ranks divide the work.
    Whole(Tensor),
    /// This rank holds these ranges of elements, and other ranks the rest.
    Parts(Vec<(Range<usize>, Tensor)>),
    /// Rank 0 computes the whole tensor when it is written.
    Made(Arc<Make>),
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(tensor) => f.debug_tuple("Whole").field(tensor).finish(),
            Self::Parts(parts) => f.debug_tuple("Parts").field(parts).finish(),
            Self::Made(_) => f.write_str("Made"),
        }
    }
}

impl SavedTensor {
    /// A tensor that every rank holds completely. Each rank writes a part of it.
    pub fn whole(name: impl Into<String>, tensor: Tensor) -> Self {
        let (shape, dtype) = (tensor.dims().to_vec(), tensor.dtype());
        Self { name: name.into(), shape, dtype, held: Held::Whole(tensor), is_fixed: false }
    }

    /// A tensor of which this rank holds `parts`: ranges of elements in row-major order, and their
    /// values in a tensor of `dtype` with as many elements, on any device. The other ranks hold the
    /// other elements. A rank that holds none passes an empty list.
    pub fn parts(
        name: impl Into<String>,
        shape: &[usize],
        dtype: DType,
        parts: Vec<(Range<usize>, Tensor)>,
    ) -> Self {
        let (shape, held) = (shape.to_vec(), Held::Parts(parts));
        Self { name: name.into(), shape, dtype, held, is_fixed: false }
    }

    /// A tensor that `make` computes when it is written, so that a model that is larger than memory
    /// can be written.
    pub fn made(
        name: impl Into<String>,
        shape: &[usize],
        dtype: DType,
        make: impl Fn() -> Result<Tensor, CheckpointError> + Send + Sync + 'static,
    ) -> Self {
        let (shape, held) = (shape.to_vec(), Held::Made(Arc::new(make)));
        Self { name: name.into(), shape, dtype, held, is_fixed: true }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same tensor with another name.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    pub fn elem_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size on disk, in bytes.
    pub(super) fn num_bytes(&self) -> u64 {
        (self.elem_count() * self.dtype.size_in_bytes()) as u64
    }

    fn check_made(&self, made: Tensor) -> Result<Tensor, CheckpointError> {
        if made.dims() == self.shape && made.dtype() == self.dtype {
            return Ok(made);
        }
        let (dims, dtype) = (made.dims(), made.dtype());
        let problem =
            format!("is {:?} {:?}, but was made as {dtype:?} {dims:?}", self.dtype, self.shape);
        Err(CheckpointError::Parts { tensor: self.name.clone(), problem })
    }

    fn check_parts(&self) -> Result<(), CheckpointError> {
        let Held::Parts(parts) = &self.held else { return Ok(()) };
        let wrong =
            |problem: String| Err(CheckpointError::Parts { tensor: self.name.clone(), problem });
        for (range, values) in parts {
            let Range { start, end } = range;
            let (count, found) = (self.elem_count(), values.elem_count());
            if start > end || *end > count {
                return wrong(format!("has {count} elements, but a part is {start}..{end}"));
            }
            if range.len() != found {
                return wrong(format!("has a part {start}..{end} with {found} values"));
            }
            if values.dtype() != self.dtype {
                let (dtype, found) = (self.dtype, values.dtype());
                return wrong(format!("is {dtype:?}, but its part {start}..{end} is {found:?}"));
            }
        }
        Ok(())
    }
}

pub(super) struct TensorFile<'a> {
    /// Name in the folder.
    pub(super) name: String,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// Length and content of the header.
    header: Vec<u8>,
    /// Each tensor with its offset in the file.
    tensors: Vec<(u64, &'a SavedTensor)>,
}

/// Values that this rank writes at an offset of a file.
struct Span<'a> {
    at: u64,
    tensor: &'a SavedTensor,
    /// `None`: they must be computed.
    values: Option<&'a Tensor>,
    /// Elements of `values`.
    range: Range<usize>,
    /// Number of the first of them in the tensor.
    first: usize,
}

impl<'a> TensorFile<'a> {
    /// Places the tensors in the file. An error if a tensor or one of its parts cannot be written.
    pub(super) fn new(
        name: impl Into<String>,
        tensors: &[&'a SavedTensor],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, CheckpointError> {
        // Wide dtypes come first, because each tensor must start at a multiple of its element size.
        let mut tensors = tensors.to_vec();
        tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.size_in_bytes()));
        let header = header(&tensors, metadata)?;
        let mut bytes = header.len() as u64;
        let mut placed = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            tensor.check_parts()?;
            placed.push((bytes, tensor));
            bytes += tensor.num_bytes();
        }
        Ok(Self { name: name.into(), bytes, header, tensors: placed })
    }

    /// Creates the file at its full size, with the header.
    pub(super) fn create(&self, folder: &Path) -> Result<(), CheckpointError> {
        PieceWriter::create(&folder.join(&self.name), self.bytes)
    }

    /// Writes what rank `rank` of `world` ranks holds into the created file, and syncs it. Rank 0
    /// also writes the header.
    pub(super) fn write(
        &self,
        folder: &Path,
        rank: usize,
        world: usize,
    ) -> Result<Vec<Piece>, CheckpointError> {
        let path = folder.join(&self.name);
        let spans = self.spans(rank, world);
        if rank != 0 && spans.is_empty() {
            return Ok(Vec::new());
        }
        let mut out = PieceWriter::open(&path)?;
        if rank == 0 {
            out.write(&self.header).map_err(CheckpointError::write(&path))?;
        }
        for span in spans {
            out.seek(span.at).map_err(CheckpointError::write(&path))?;
            write_span(&mut out, &span, &path)?;
        }
        out.finish().map_err(CheckpointError::write(&path))
    }

    /// What a rank writes, in the order of the file.
    fn spans(&self, rank: usize, world: usize) -> Vec<Span<'_>> {
        let whole = |tensor: &SavedTensor| matches!(tensor.held, Held::Whole(_));
        let shared = self.tensors.iter().filter(|(_, tensor)| whole(tensor));
        let shared: u64 = shared.map(|(_, tensor)| tensor.num_bytes()).sum();
        // The ranks divide the bytes of all whole tensors of the file evenly, so that each rank
        // writes few pieces.
        let bound = |rank: usize| {
            u64::try_from(u128::from(shared) * rank as u128 / world as u128)
                .expect("at most `shared`")
        };
        let (first, last) = (bound(rank), bound(rank + 1));
        let (mut spans, mut passed) = (Vec::new(), 0);
        for &(at, tensor) in &self.tensors {
            let size = tensor.dtype.size_in_bytes();
            let mut push = |range: Range<usize>, values, own: Range<usize>| {
                if !range.is_empty() {
                    let (first, at) = (range.start, at + (range.start * size) as u64);
                    spans.push(Span { at, tensor, values, range: own, first });
                }
            };
            match &tensor.held {
                Held::Whole(values) => {
                    let element = |bound: u64| {
                        (bound.saturating_sub(passed).min(tensor.num_bytes()) / size as u64)
                            as usize
                    };
                    let range = element(first)..element(last);
                    push(range.clone(), Some(values), range);
                    passed += tensor.num_bytes();
                }
                Held::Parts(parts) => {
                    for (range, values) in parts {
                        push(range.clone(), Some(values), 0..range.len());
                    }
                }
                Held::Made(_) if rank == 0 => {
                    let all = 0..tensor.elem_count();
                    push(all.clone(), None, all);
                }
                Held::Made(_) => {}
            }
        }
        spans.sort_by_key(|span| span.at);
        spans
    }

    /// Sorts the pieces of all ranks and checks that they cover the file exactly once.
    pub(super) fn joined(&self, mut pieces: Vec<Piece>) -> Result<Vec<Piece>, CheckpointError> {
        pieces.sort_by_key(|piece| (piece.offset, piece.bytes));
        let mut end = 0;
        for piece in &pieces {
            if piece.offset > end {
                return Err(self.not_covered(end, "is in no part of a rank"));
            }
            if piece.offset < end {
                return Err(self.not_covered(piece.offset, "is in more than one part"));
            }
            end += piece.bytes;
        }
        if end < self.bytes {
            return Err(self.not_covered(end, "is in no part of a rank"));
        }
        Ok(pieces)
    }

    /// The error that names the tensor at an offset of the file, which is not in the header.
    fn not_covered(&self, offset: u64, problem: &str) -> CheckpointError {
        let ends = |(at, tensor): &&(u64, &SavedTensor)| offset < at + tensor.num_bytes();
        let found = self.tensors.iter().find(ends).map(|(at, tensor)| {
            let element = offset.saturating_sub(*at) / tensor.dtype.size_in_bytes() as u64;
            (tensor.name.clone(), element)
        });
        let (tensor, element) = found.unwrap_or_default();
        let problem = format!("cannot be saved: its element {element} {problem}");
        CheckpointError::Parts { tensor, problem }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(_, tensor)| tensor.name())
    }

    /// The header, which is equal on all ranks.
    pub(super) fn header(&self) -> &[u8] {
        &self.header
    }
}

/// The length of the header in 8 bytes, and the header.
fn header(
    tensors: &[&SavedTensor],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, CheckpointError> {
    let mut names = BTreeSet::new();
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!(metadata));
    let mut offset = 0;
    for tensor in tensors {
        if !names.insert(&tensor.name) {
            return Err(CheckpointError::SameName { tensor: tensor.name.clone() });
        }
        let end = offset + tensor.num_bytes();
        header.insert(
            tensor.name.clone(),
            json!({
                "dtype": dtype_name(&tensor.name, tensor.dtype)?,
                "shape": tensor.shape,
                "data_offsets": [offset, end],
            }),
        );
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header].concat())
}

fn dtype_name(name: &str, dtype: DType) -> Result<&'static str, CheckpointError> {
    match dtype {
        DType::F32 => Ok("F32"),
        DType::BF16 => Ok("BF16"),
        DType::F16 => Ok("F16"),
        DType::U8 => Ok("U8"),
        other => Err(CheckpointError::Dtype {
            place: "memory".into(),
            tensor: name.to_owned(),
            dtype: format!("{other:?}"),
        }),
    }
}

/// Writes the values of a span, with at most one chunk of them in host memory if they are on
/// another device.
fn write_span(out: &mut PieceWriter, span: &Span<'_>, path: &Path) -> Result<(), CheckpointError> {
    let fault = |source| CheckpointError::Tensor { tensor: span.tensor.name.clone(), source };
    let made = match &span.tensor.held {
        Held::Made(make) => Some(span.tensor.check_made(make()?)?),
        _ => None,
    };
    let Some(values) = span.values.or(made.as_ref()) else { return Ok(()) };
    let flat = values.flatten_all().map_err(fault)?;
    let step = if flat.device().is_cpu() { span.range.len() } else { HOST_ELEMENTS };
    for start in span.range.clone().step_by(step) {
        let len = step.min(span.range.end - start);
        let chunk = flat.narrow(0, start, len).and_then(|chunk| {
            if chunk.device().is_cpu() { Ok(chunk) } else { copy_to_host(&chunk) }
        });
        let first = span.first + start - span.range.start;
        write_values(out, &chunk.map_err(fault)?, path, |at, value| {
            CheckpointError::NonFiniteSaved {
                file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                tensor: span.tensor.name.clone(),
                element: first + at,
                value,
            }
        })?;
    }
    Ok(())
}

/// Writes the values of a flat tensor on the CPU. The place and value of one that is not finite
/// become an error by `non_finite`.
fn write_values(
    out: &mut PieceWriter,
    flat: &Tensor,
    path: &Path,
    non_finite: impl Fn(usize, f32) -> CheckpointError,
) -> Result<(), CheckpointError> {
    let (storage, layout) = flat.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + flat.elem_count();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            convert(out, &values[range], f32::to_le_bytes, path, non_finite)
        }
        Storage::Cpu(CpuStorage::BF16(values)) => {
            convert(out, &values[range], half::bf16::to_le_bytes, path, non_finite)
        }
        Storage::Cpu(CpuStorage::F16(values)) => {
            convert(out, &values[range], half::f16::to_le_bytes, path, non_finite)
        }
        Storage::Cpu(CpuStorage::U8(codes)) => {
            out.write(&codes[range]).map_err(CheckpointError::write(path))
        }
        _ => unreachable!("the header accepts four dtypes, and the tensor is on the CPU"),
    }
}

/// Checks, hashes and writes a chunk of values after the other, each while it is in the cache.
fn convert<T: FloatValue + WithDType, const N: usize>(
    out: &mut PieceWriter,
    values: &[T],
    bytes: impl Fn(T) -> [u8; N],
    path: &Path,
    non_finite: impl Fn(usize, f32) -> CheckpointError,
) -> Result<(), CheckpointError> {
    let mut buffer = vec![0; N * CHUNK_ELEMENTS.min(values.len())];
    for (start, chunk) in (0..).step_by(CHUNK_ELEMENTS).zip(values.chunks(CHUNK_ELEMENTS)) {
        if let Some((at, value)) = first_non_finite(chunk, T::DTYPE) {
            return Err(non_finite(start + at, value));
        }
        let filled = &mut buffer[..N * chunk.len()];
        for (slot, &value) in filled.chunks_exact_mut(N).zip(chunk) {
            slot.copy_from_slice(&bytes(value));
        }
        out.write(filled).map_err(CheckpointError::write(path))?;
    }
    Ok(())
}

impl SavedTensor {
    /// The tensors of these names and shapes, which have the elements of this one, one after the
    /// other. They share its memory.
    pub fn split(self, pieces: &[(String, Vec<usize>)]) -> candle_core::Result<Vec<Self>> {
        let mut end = 0;
        let piece = |(name, shape): &(String, Vec<usize>)| {
            let start = end;
            end += shape.iter().product::<usize>();
            let held = self.held.piece(name, &(start..end), shape)?;
            let (name, shape) = (name.clone(), shape.clone());
            Ok(Self { name, shape, held, dtype: self.dtype, is_fixed: self.is_fixed })
        };
        pieces.iter().map(piece).collect()
    }
}

impl Held {
    /// What the rank holds of the elements `of`, the tensor `name` of `shape`.
    fn piece(&self, name: &str, of: &Range<usize>, shape: &[usize]) -> candle_core::Result<Self> {
        let narrow = |tensor: &Tensor, start, len| tensor.flatten_all()?.narrow(0, start, len);
        Ok(match self {
            Self::Whole(tensor) => Self::Whole(narrow(tensor, of.start, of.len())?.reshape(shape)?),
            Self::Parts(parts) => {
                let inside = |(range, values): &(Range<usize>, Tensor)| {
                    let (start, end) = (range.start.max(of.start), range.end.min(of.end));
                    let part = || {
                        let values = narrow(values, start - range.start, end - start)?;
                        Ok((start - of.start..end - of.start, values))
                    };
                    (start < end).then(part)
                };
                Self::Parts(parts.iter().filter_map(inside).collect::<candle_core::Result<_>>()?)
            }
            Self::Made(make) => {
                let (make, of, shape) = (Arc::clone(make), of.clone(), shape.to_vec());
                let name = name.to_owned();
                let made = move || {
                    let tensor = make()?;
                    let piece = tensor.flatten_all().and_then(|flat| {
                        flat.narrow(0, of.start, of.len())?.reshape(shape.as_slice())
                    });
                    let tensor = name.clone();
                    piece.map_err(|source| CheckpointError::Tensor { tensor, source })
                };
                Self::Made(Arc::new(made))
            }
        })
    }
}

/// Maximum number of elements that one thread copies at once.
const PART_ELEMENTS: usize = 1 << 22;

struct Part<'a> {
    tensor: &'a SavedTensor,
    /// Flat.
    values: Tensor,
    /// Elements of `values`.
    range: Range<usize>,
    /// Number of the first of them in the tensor.
    first: usize,
}

impl SavedTensor {
    /// Its values do not change while it is written, also not in the background: it needs no copy.
    #[must_use]
    pub fn fixed(self) -> Self {
        Self { is_fixed: true, ..self }
    }

    /// Copies what rank `rank` of `world` ranks writes of `files` to host memory, except for fixed
    /// tensors. `None` if memory does not suffice.
    pub(super) fn copies(
        files: &[TensorFile<'_>],
        rank: usize,
        world: usize,
    ) -> std::result::Result<Option<Copies>, CheckpointError> {
        let mut parts = Vec::new();
        for file in files {
            for span in file.changing(rank, world) {
                let tensor = span.tensor;
                let fault =
                    |source| CheckpointError::Tensor { tensor: tensor.name.clone(), source };
                parts.extend(divided(&span).map_err(fault)?);
            }
        }
        let copy = |part: &Part<'_>| {
            let fault = |source| {
                let tensor = part.tensor.name.clone();
                CheckpointError::Tensor { tensor, source }
            };
            let end = part.first + part.range.len();
            let values = part.copy().map_err(fault)?;
            Ok(values.map(|values| (place(part.tensor), (part.first..end, values))))
        };
        let is_on_cpu = parts.iter().all(|part| part.values.device().is_cpu());
        let copied: std::result::Result<Vec<_>, CheckpointError> = if is_on_cpu {
            parts.par_iter().map(copy).collect()
        } else {
            parts.iter().map(copy).collect() // one stream of the GPU
        };
        let Some(copied) = copied?.into_iter().collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let mut copies = Copies::default();
        for (tensor, part) in copied {
            copies.0.entry(tensor).or_default().push(part);
        }
        Ok(Some(copies))
    }
}

/// Copied parts of tensors, by the place of the tensor in memory.
#[derive(Debug, Default)]
pub(super) struct Copies(HashMap<usize, Vec<(Range<usize>, Tensor)>>);

impl Copies {
    /// The copy of `tensor`: its copied parts, or a fixed tensor itself.
    pub(super) fn take(&mut self, tensor: &SavedTensor) -> SavedTensor {
        if tensor.is_fixed {
            return tensor.clone();
        }
        let own = self.0.remove(&place(tensor)).unwrap_or_default();
        SavedTensor { held: Held::Parts(own), is_fixed: true, ..tensor.clone() }
    }
}

fn place(tensor: &SavedTensor) -> usize {
    std::ptr::from_ref(tensor).addr()
}

impl TensorFile<'_> {
    /// Bytes that [`SavedTensor::copies`] needs.
    pub(super) fn changing_bytes(&self, rank: usize, world: usize) -> u64 {
        let bytes = |span: &Span<'_>| span.range.len() * span.tensor.dtype.size_in_bytes();
        self.changing(rank, world).map(|span| bytes(&span) as u64).sum()
    }

    /// What a rank writes of tensors that are not fixed.
    fn changing(&self, rank: usize, world: usize) -> impl Iterator<Item = Span<'_>> {
        self.spans(rank, world).into_iter().filter(|span| !span.tensor.is_fixed)
    }
}

/// Divides a span into parts that several threads can copy.
fn divided<'a>(span: &Span<'a>) -> candle_core::Result<Vec<Part<'a>>> {
    let Some(values) = span.values else { return Ok(Vec::new()) };
    let values = values.flatten_all()?;
    let Range { start, end } = span.range;
    let part = |at: usize| Part {
        tensor: span.tensor,
        values: values.clone(),
        range: at..end.min(at + PART_ELEMENTS),
        first: span.first + at - start,
    };
    Ok((start..end).step_by(PART_ELEMENTS).map(part).collect())
}

impl Part<'_> {
    /// A flat copy on the host; `None` if memory does not suffice.
    fn copy(&self) -> candle_core::Result<Option<Tensor>> {
        let Range { start, end } = self.range;
        if !self.values.device().is_cpu() {
            return copy_to_host(&self.values.narrow(0, start, end - start)?).map(Some);
        }
        let (storage, layout) = self.values.storage_and_layout();
        let range = layout.start_offset() + start..layout.start_offset() + end;
        match &*storage {
            Storage::Cpu(CpuStorage::F32(values)) => owned(&values[range]),
            Storage::Cpu(CpuStorage::BF16(values)) => owned(&values[range]),
            Storage::Cpu(CpuStorage::F16(values)) => owned(&values[range]),
            Storage::Cpu(CpuStorage::U8(values)) => owned(&values[range]),
            _ => self.values.narrow(0, start, end - start).map(Some), // refused when it is written
        }
    }
}

fn owned<T: WithDType>(values: &[T]) -> candle_core::Result<Option<Tensor>> {
    let mut copy = Vec::new();
    if copy.try_reserve_exact(values.len()).is_err() {
        return Ok(None);
    }
    copy.extend_from_slice(values);
    Tensor::from_vec(copy, values.len(), &Device::Cpu).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use half::bf16;
    use safetensors::{Dtype, SafeTensors};

    fn written(tensors: &[(String, Tensor)]) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let whole = |(name, tensor): &(String, Tensor)| SavedTensor::whole(name, tensor.clone());
        let tensors: Vec<_> = tensors.iter().map(whole).collect();
        let tensors: Vec<_> = tensors.iter().collect();
        let file = TensorFile::new("file", &tensors, &metadata).unwrap();
        file.create(folder.path()).unwrap();
        file.write(folder.path(), 0, 1).unwrap();
        std::fs::read(folder.path().join("file")).unwrap()
    }

    #[test]
    fn the_safetensors_crate_reads_back_every_bit() {
        let wide: Vec<f32> = [0.1, -0.0, f32::MIN_POSITIVE, f32::MAX, 1e-45, -3.5].into();
        let narrow: Vec<bf16> = [0x7f7f_u16, 0x8000, 0x0001].map(bf16::from_bits).into();
        let tensors = [
            ("narrow".to_owned(), Tensor::from_vec(narrow, 3, &Device::Cpu).unwrap()),
            ("wide".to_owned(), Tensor::from_vec(wide.clone(), (2, 3), &Device::Cpu).unwrap()),
        ];
        let bytes = written(&tensors);
        let read = SafeTensors::deserialize(&bytes).unwrap();
        let found = read.tensor("wide").unwrap();
        assert_eq!((found.dtype(), found.shape()), (Dtype::F32, &[2, 3][..]));
        let expected: Vec<u8> = wide.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(found.data(), expected);
        assert_eq!(read.tensor("narrow").unwrap().data(), [0x7f, 0x7f, 0x00, 0x80, 0x01, 0x00]);
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    }

    #[test]
    fn a_view_is_written_with_its_own_elements_only() {
        let base = Tensor::from_vec((0..6_u8).map(f32::from).collect(), (2, 3), &Device::Cpu);
        let base = base.unwrap();
        let tensors = [
            ("column".to_owned(), base.narrow(1, 1, 1).unwrap()),
            ("row".to_owned(), base.narrow(0, 1, 1).unwrap()),
            ("turned".to_owned(), base.t().unwrap()),
        ];
        let bytes = written(&tensors);
        let read = SafeTensors::deserialize(&bytes).unwrap();
        let values = |name: &str| -> Vec<f32> {
            let tensor = read.tensor(name).unwrap();
            let values = tensor.data().chunks_exact(4);
            values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
        };
        assert_eq!(values("column"), [1., 4.]);
        assert_eq!(values("row"), [3., 4., 5.]);
        assert_eq!(values("turned"), [0., 3., 1., 4., 2., 5.]);
    }

    #[test]
    fn a_tensor_longer_than_one_chunk_is_written_completely() {
        let values: Vec<f32> = (0..=CHUNK_ELEMENTS).map(|i| i as f32).collect();
        let expected: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = Tensor::new(values, &Device::Cpu).unwrap();
        let bytes = written(&[("long".to_owned(), tensor)]);
        assert_eq!(
            SafeTensors::deserialize(&bytes).unwrap().tensor("long").unwrap().data(),
            expected
        );
    }

    #[test]
    fn two_tensors_of_the_same_name_are_rejected() {
        let tensor = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let twin = SavedTensor::whole("w", tensor);
        let result = TensorFile::new("file", &[&twin, &twin], &BTreeMap::new());
        assert!(matches!(result, Err(CheckpointError::SameName { .. })));
    }

    #[test]
    fn parts_of_ranks_are_in_the_pieces_that_have_their_elements() {
        let part = |range: Range<usize>| {
            let values: Vec<f32> = range.clone().map(|i| i as f32).collect();
            (range.clone(), Tensor::from_vec(values, range.len(), &Device::Cpu).unwrap())
        };
        let parts = vec![part(1..4), part(5..11)];
        let tensor = SavedTensor::parts("w", &[3, 4], DType::F32, parts);
        let pieces = [4, 2, 6].map(|len| (format!("{len}"), vec![len]));
        let found = tensor.split(&pieces).unwrap().into_iter().map(|piece| {
            let Held::Parts(parts) = &piece.held else { panic!("{piece:?}") };
            let values = |(range, values): &(Range<usize>, Tensor)| {
                (range.clone(), values.to_vec1::<f32>().unwrap())
            };
            parts.iter().map(values).collect::<Vec<_>>()
        });
        let expected: [Vec<(Range<usize>, Vec<f32>)>; 3] = [
            vec![(1..4, vec![1.0, 2.0, 3.0])],
            vec![(1..2, vec![5.0])],
            vec![(0..5, vec![6.0, 7.0, 8.0, 9.0, 10.0])],
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
