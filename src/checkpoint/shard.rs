//! A safetensors file that is mapped into memory, and the search for values that are infinite or
//! not a number: they never enter a checkpoint, and are not loaded.

#![expect(unsafe_code, reason = "memory maps")]

use super::CheckpointError;
use super::manifest::is_plain_name;
use crate::files;
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors, TensorInfo};
use simd::kernels;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Number of values that are decoded and checked at once; they stay in the cache meanwhile.
const CHUNK: usize = 1 << 14;

/// Minimum number of bytes of a part whose pages are released after they were copied.
const RELEASED: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    map: Mmap,
    data_start: usize,
    pub(super) tensors: HashMap<String, TensorInfo>,
}

#[derive(Debug, Clone)]
pub(super) enum Values {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Values {
    /// No elements of `dtype`; `None` if files do not have numbers of this dtype.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32(Vec::new())),
            DType::BF16 => Some(Self::BF16(Vec::new())),
            DType::F16 => Some(Self::F16(Vec::new())),
            _ => None,
        }
    }

    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::BF16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }

    pub(super) fn reserve(&mut self, count: usize) {
        match self {
            Self::F32(values) => values.reserve_exact(count),
            Self::BF16(values) => values.reserve_exact(count),
            Self::F16(values) => values.reserve_exact(count),
        }
    }

    /// A tensor with one dimension.
    pub(super) fn into_tensor(self) -> candle_core::Result<Tensor> {
        fn tensor<T: WithDType>(values: Vec<T>) -> candle_core::Result<Tensor> {
            let len = values.len();
            Tensor::from_vec(values, len, &Device::Cpu)
        }
        match self {
            Self::F32(values) => tensor(values),
            Self::BF16(values) => tensor(values),
            Self::F16(values) => tensor(values),
        }
    }
}

impl Shard {
    /// Opens a file that an index names.
    pub(super) fn open_named(
        folder: &Path,
        index: &Path,
        name: &str,
    ) -> Result<Self, CheckpointError> {
        if !is_plain_name(name) {
            let problem = format!("shard `{name}` is not a plain file name");
            return Err(CheckpointError::invalid(index, &problem));
        }
        if Path::new(name).extension().is_none_or(|ending| ending != "safetensors") {
            let (index, shard) = (index.to_owned(), name.to_owned());
            return Err(CheckpointError::NotSafetensors { index, shard });
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

    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = files::open(path).map_err(CheckpointError::read(path))?;
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
        Ok(Self { path: path.to_owned(), map, data_start, tensors })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of a tensor. In bounds, because `open` compared the header with the file size.
    pub(super) fn data(&self, info: &TensorInfo) -> &[u8] {
        let (start, end) = info.data_offsets;
        &self.map[self.data_start + start..self.data_start + end]
    }

    /// Elements of the tensor `name`, as the file has them. They must be finite as `dtype`.
    pub(super) fn elements(
        &self,
        name: &str,
        info: &TensorInfo,
        range: &Range<usize>,
        dtype: DType,
    ) -> Result<Tensor, CheckpointError> {
        let copied = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        if info.dtype == Dtype::U8 && dtype == DType::U8 {
            // codes, which have no meaning as numbers
            #[cfg(test)]
            self.record(info, range);
            let codes = self.data(info)[range.clone()].to_vec();
            return Tensor::from_vec(codes, range.len(), &Device::Cpu).map_err(copied);
        }
        let mut values = match info.dtype {
            Dtype::F32 => Values::F32(Vec::new()),
            Dtype::BF16 => Values::BF16(Vec::new()),
            _ => Values::F16(Vec::new()),
        };
        values.reserve(range.len());
        self.append(name, info, range, dtype, &mut values)?;
        values.into_tensor().map_err(copied)
    }

    /// Adds elements of the tensor `name` to `values`, which have its dtype. They must be finite as
    /// `dtype`.
    pub(super) fn append(
        &self,
        name: &str,
        info: &TensorInfo,
        range: &Range<usize>,
        dtype: DType,
        values: &mut Values,
    ) -> Result<(), CheckpointError> {
        let part = (self.data(info), range, dtype);
        #[cfg(test)]
        self.record(info, range);
        match (info.dtype, values) {
            (Dtype::F32, Values::F32(all)) => self.decode(name, part, f32::from_le_bytes, all),
            (Dtype::BF16, Values::BF16(all)) => self.decode(name, part, bf16::from_le_bytes, all),
            (Dtype::F16, Values::F16(all)) => self.decode(name, part, f16::from_le_bytes, all),
            (other, _) => Err(CheckpointError::Dtype {
                place: self.path.clone(),
                tensor: name.to_owned(),
                dtype: format!("{other:?}"),
            }),
        }
    }

    /// Records a read, for tests.
    #[cfg(test)]
    fn record(&self, info: &TensorInfo, range: &Range<usize>) {
        let (size, start) = (info.dtype.bitsize() / 8, self.data_start + info.data_offsets.0);
        let bytes = start + range.start * size..start + range.end * size;
        super::READS.lock().unwrap().push((self.path.clone(), bytes));
    }

    fn decode<T: FloatValue, const N: usize>(
        &self,
        name: &str,
        (data, range, dtype): (&[u8], &Range<usize>, DType),
        value: impl Fn([u8; N]) -> T,
        values: &mut Vec<T>,
    ) -> Result<(), CheckpointError> {
        let (elements, _) = data.as_chunks::<N>();
        let first = values.len();
        for chunk in elements[range.clone()].chunks(CHUNK) {
            let start = values.len();
            values.extend(chunk.iter().map(|&bytes| value(bytes)));
            if let Some((at, found)) = first_non_finite(&values[start..], dtype) {
                return Err(self.non_finite(name, range.start + start - first + at, found));
            }
        }
        self.release(elements[range.clone()].as_flattened());
        Ok(())
    }

    /// Removes the pages of a large part from the memory of the process, which has a copy now. They
    /// stay in the page cache, and a later access maps them again.
    pub(super) fn release(&self, part: &[u8]) {
        if part.len() < RELEASED {
            return;
        }
        #[cfg(unix)]
        {
            let start = part.as_ptr().addr() - self.map.as_ptr().addr();
            // SAFETY: the map is read-only and backed by a file, so no content is lost. If the call
            // fails, only memory is lost.
            let _ = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                self.map.unchecked_advise_range(advice, start, part.len())
            };
        }
    }

    pub(super) fn non_finite(&self, tensor: &str, element: usize, value: f32) -> CheckpointError {
        let (path, tensor) = (self.path.clone(), tensor.to_owned());
        CheckpointError::NonFinite { path, tensor, element, value }
    }
}

/// A type of values with an exponent.
pub(super) trait FloatValue: Copy {
    /// Bits of the smallest magnitude that is not finite as `dtype`. `f32` may be rounded to
    /// `bf16`.
    fn limit(dtype: DType) -> u32;
    /// The largest magnitude, as bits. Those of NaN are above those of infinity.
    fn largest(values: &[Self]) -> u32;
    fn to_f32(self) -> f32;
}

kernels! {
    fn largest_f32(values: &[f32]) -> u32 {
        let mut largest = 0;
        for value in values {
            let bits = value.to_bits() & 0x7fff_ffff;
            largest = if bits > largest { bits } else { largest };
        }
        largest
    }

    fn largest_bf16(values: &[bf16]) -> u16 {
        let mut largest = 0;
        for value in values {
            let bits = value.to_bits() & 0x7fff;
            largest = if bits > largest { bits } else { largest };
        }
        largest
    }

    fn largest_f16(values: &[f16]) -> u16 {
        let mut largest = 0;
        for value in values {
            let bits = value.to_bits() & 0x7fff;
            largest = if bits > largest { bits } else { largest };
        }
        largest
    }
}

impl FloatValue for f32 {
    fn limit(dtype: DType) -> u32 {
        // half way between the largest bf16 and the next power of two
        if dtype == DType::BF16 { 0x7f7f_8000 } else { 0x7f80_0000 }
    }

    fn largest(values: &[Self]) -> u32 {
        largest_f32(values)
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl FloatValue for bf16 {
    fn limit(_: DType) -> u32 {
        0x7f80
    }

    fn largest(values: &[Self]) -> u32 {
        largest_bf16(values).into()
    }

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

impl FloatValue for f16 {
    fn limit(_: DType) -> u32 {
        0x7c00
    }

    fn largest(values: &[Self]) -> u32 {
        largest_f16(values).into()
    }

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

/// The first value that is not finite as `dtype`, and its place.
pub(super) fn first_non_finite<T: FloatValue>(values: &[T], dtype: DType) -> Option<(usize, f32)> {
    let limit = T::limit(dtype);
    if T::largest(values) < limit {
        return None;
    }
    let at = values.iter().position(|value| T::largest(&[*value]) >= limit)?;
    Some((at, values[at].to_f32()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_that_is_not_finite_is_found_anywhere() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 1, 31, 32, 63, 64, 70] {
                let mut values = vec![f32::MAX; 71];
                assert_eq!(first_non_finite(&values, DType::F32), None);
                values[at] = bad;
                values[70] = bad;
                let (found, value) = first_non_finite(&values, DType::F32).unwrap();
                assert_eq!((found, value.to_bits()), (at, bad.to_bits()));
                let narrow: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
                assert_eq!(first_non_finite(&narrow, DType::BF16).unwrap().0, 0, "of f32::MAX");
                let narrow: Vec<f16> = values.iter().map(|x| f16::from_f32(x / 1e38)).collect();
                assert_eq!(first_non_finite(&narrow, DType::F32).unwrap().0, at);
            }
        }
    }

    #[test]
    fn values_that_only_f32_can_represent_are_not_finite_as_bf16() {
        let limit = f32::from_bits(0x7f7f_8000);
        assert!(bf16::from_f32(limit).is_infinite());
        assert!(bf16::from_f32(limit.next_down()).is_finite());
        let values = [1.0, limit.next_down(), -limit];
        assert_eq!(first_non_finite(&values, DType::BF16), Some((2, -limit)));
        assert_eq!(first_non_finite(&values, DType::F32), None);
    }
}
