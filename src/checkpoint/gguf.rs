//! GGUF files, the format of llama.cpp: a header, metadata, the list of tensors, and their values.
//!
//! Little-endian, version 3. The values of each tensor begin at a multiple of [`ALIGNMENT`]. A file
//! lists the sizes of a tensor from the innermost dimension.

use super::CheckpointError;
use super::atomic::build_folder;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

const MAGIC: &[u8] = b"GGUF";
const VERSION: u32 = 3;
/// Alignment of the values in bytes, the default of the format.
const ALIGNMENT: usize = 32;
/// Number of elements that are converted at once.
const CHUNK_ELEMENTS: usize = 1 << 22;
/// The largest value of f16.
const MAX_F16: f32 = 65504.0;
/// The largest value of bf16.
const MAX_BF16: f32 = f32::from_bits(0x7f7f_0000);

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
}

/// The dtype of a tensor in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufDtype {
    F32,
    F16,
    Bf16,
    /// Blocks of 32 values in 8 bits with one scale.
    Q8_0,
    /// Blocks of 32 values in 4 bits with one scale.
    Q4_0,
}

/// A file to be written.
#[derive(Debug)]
pub struct GgufFile {
    pub name: String,
    pub metadata: Vec<(String, GgufValue)>,
    pub tensors: Vec<GgufTensor>,
}

/// A tensor of a file, whose values are computed when it is written.
pub struct GgufTensor {
    pub name: String,
    /// Sizes from the outermost dimension; the last one is a multiple of the block of `dtype`.
    pub shape: Vec<usize>,
    pub dtype: GgufDtype,
    /// Computes the values in `f32`.
    pub make: Box<dyn Fn() -> Result<Tensor, CheckpointError>>,
}

impl fmt::Debug for GgufTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.name, self.dtype, self.shape)
    }
}

impl GgufDtype {
    /// Number of values that have one scale.
    pub fn block(self) -> usize {
        self.in_candle().block_size()
    }

    /// The name as in the names of files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    fn in_candle(self) -> GgmlDType {
        match self {
            Self::F32 => GgmlDType::F32,
            Self::F16 => GgmlDType::F16,
            Self::Bf16 => GgmlDType::BF16,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q4_0 => GgmlDType::Q4_0,
        }
    }

    /// The number of the dtype in a file.
    fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    /// The largest absolute value; the scale of a block is in f16.
    fn largest(self) -> f32 {
        match self {
            Self::F16 => MAX_F16,
            Self::Q8_0 => MAX_F16 * 127.0,
            Self::Q4_0 => MAX_F16 * 8.0,
            Self::Bf16 => MAX_BF16,
            Self::F32 => f32::MAX,
        }
    }
}

impl GgufFile {
    /// Writes the new folder `target` with these files. If this fails, there is no folder `target`.
    pub fn write_new(files: &[Self], target: &Path) -> Result<(), CheckpointError> {
        build_folder(target, |folder| files.iter().try_for_each(|file| file.write(folder)))
    }

    fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join(&self.name);
        let file = File::create(&path).map_err(CheckpointError::write(&path))?;
        let mut file = BufWriter::new(file);
        file.write_all(&self.head()).map_err(CheckpointError::write(&path))?;
        for tensor in &self.tensors {
            tensor.write(&path, &mut file)?;
        }
        let synced = file.into_inner().map_err(io::IntoInnerError::into_error);
        synced.and_then(|file| file.sync_all()).map_err(CheckpointError::write(&path))
    }

    /// All bytes before those of the tensors.
    fn head(&self) -> Vec<u8> {
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        for count in [self.tensors.len(), self.metadata.len()] {
            put_count(&mut head, count);
        }
        for (key, value) in &self.metadata {
            put_text(&mut head, key);
            value.put(&mut head);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            put_text(&mut head, &tensor.name);
            head.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|size| put_count(&mut head, *size));
            head.extend(tensor.dtype.code().to_le_bytes());
            put_count(&mut head, offset);
            offset += tensor.num_bytes().next_multiple_of(ALIGNMENT);
        }
        head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
        head
    }
}

impl GgufTensor {
    fn num_bytes(&self) -> usize {
        let (count, dtype) = (self.shape.iter().product::<usize>(), self.dtype.in_candle());
        count / dtype.block_size() * dtype.type_size()
    }

    fn write(&self, path: &Path, file: &mut impl Write) -> Result<(), CheckpointError> {
        let values = (self.make)()?;
        if values.dims() != self.shape {
            let problem = format!("is {:?}, but was made as {:?}", self.shape, values.dims());
            return Err(CheckpointError::Parts { tensor: self.name.clone(), problem });
        }
        let rows = self.shape.first().copied().unwrap_or(1);
        let of_row = values.elem_count() / rows.max(1);
        let step = (CHUNK_ELEMENTS / of_row.max(1)).max(1);
        let mut written = 0;
        for start in (0..rows).step_by(step) {
            let bytes = self.convert(&values, start..rows.min(start + step), start * of_row)?;
            file.write_all(&bytes).map_err(CheckpointError::write(path))?;
            written += bytes.len();
        }
        let padding = [0; ALIGNMENT];
        let padding = &padding[..written.next_multiple_of(ALIGNMENT) - written];
        file.write_all(padding).map_err(CheckpointError::write(path))
    }

    /// The bytes of some rows; `first` is the number of elements before them.
    fn convert(
        &self,
        values: &Tensor,
        rows: std::ops::Range<usize>,
        first: usize,
    ) -> Result<Vec<u8>, CheckpointError> {
        let fault = |source| CheckpointError::Tensor { tensor: self.name.clone(), source };
        let part = values.narrow(0, rows.start, rows.len()).map_err(fault)?;
        let found: Vec<f32> = part.flatten_all().and_then(|part| part.to_vec1()).map_err(fault)?;
        let is_outside = |value: &f32| value.is_nan() || value.abs() > self.dtype.largest();
        if let Some(at) = found.iter().position(is_outside) {
            return Err(CheckpointError::TooLarge {
                tensor: self.name.clone(),
                element: first + at,
                value: found[at],
                dtype: self.dtype.name(),
            });
        }
        // not `part`: candle would read the values of the whole tensor
        let found = Tensor::from_vec(found, part.dims(), &Device::Cpu).map_err(fault)?;
        let converted = QTensor::quantize(&found, self.dtype.in_candle()).map_err(fault)?;
        Ok(converted.data().map_err(fault)?.into_owned())
    }
}

impl GgufValue {
    fn put(&self, head: &mut Vec<u8>) {
        head.extend(self.code().to_le_bytes());
        match self {
            Self::U32(value) => head.extend(value.to_le_bytes()),
            Self::F32(value) => head.extend(value.to_le_bytes()),
            Self::Bool(value) => head.push(u8::from(*value)),
            Self::Text(text) => put_text(head, text),
            Self::I32s(list) => {
                put_list(head, 5, list, |head, value| head.extend(value.to_le_bytes()));
            }
            Self::F32s(list) => {
                put_list(head, 6, list, |head, value| head.extend(value.to_le_bytes()));
            }
            Self::Bools(list) => put_list(head, 7, list, |head, value| head.push(u8::from(*value))),
            Self::Texts(list) => put_list(head, 8, list, |head, text| put_text(head, text)),
        }
    }

    /// The number of the type in a file.
    fn code(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::I32s(_) | Self::F32s(_) | Self::Bools(_) | Self::Texts(_) => 9,
        }
    }
}

fn put_list<T>(head: &mut Vec<u8>, code: u32, list: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    head.extend(code.to_le_bytes());
    put_count(head, list.len());
    for value in list {
        put(head, value);
    }
}

fn put_text(head: &mut Vec<u8>, text: &str) {
    put_count(head, text.len());
    head.extend(text.as_bytes());
}

fn put_count(head: &mut Vec<u8>, count: usize) {
    head.extend((count as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::gguf_file::Content;

    #[test]
    fn a_tensor_of_several_chunks_has_all_values_in_order() {
        let shape = vec![(CHUNK_ELEMENTS / 32) + 5, 32];
        let count: usize = shape.iter().product();
        let value = |k: usize| (k % 1999) as f32;
        let name_of = |dtype: GgufDtype| format!("of_{}", dtype.name());
        let of_file = |dtype| {
            let shape_of = shape.clone();
            let make = move || {
                let values: Vec<f32> = (0..count).map(value).collect();
                Ok(Tensor::from_vec(values, shape_of.clone(), &Device::Cpu).unwrap())
            };
            let name = name_of(dtype);
            GgufTensor { name, shape: shape.clone(), dtype, make: Box::new(make) }
        };
        let dtypes = [GgufDtype::F16, GgufDtype::Q8_0, GgufDtype::F32];
        let file = GgufFile {
            name: "a.gguf".to_owned(),
            metadata: vec![("general.architecture".to_owned(), GgufValue::Text("a".to_owned()))],
            tensors: dtypes.map(of_file).into(),
        };
        let place = tempfile::tempdir().unwrap();
        GgufFile::write_new(&[file], &place.path().join("new")).unwrap();
        let mut file = File::open(place.path().join("new/a.gguf")).unwrap();
        let content = Content::read(&mut file).unwrap();
        for dtype in dtypes {
            let found = content.tensor(&mut file, &name_of(dtype), &Device::Cpu).unwrap();
            let found = found.dequantize(&Device::Cpu).unwrap();
            assert_eq!(found.dims(), shape);
            let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
            // half of a step of 8 bits, and the rounding of its scale
            let distance = if dtype == GgufDtype::Q8_0 { 8.9 } else { 0.0 };
            let at = found.iter().enumerate().find(|(k, x)| (*x - value(*k)).abs() > distance);
            assert_eq!(at, None, "{dtype:?}");
        }
    }
}
