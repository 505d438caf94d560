//! Writes tensors into a safetensors file one at a time, without a second copy of the model in
//! memory.

use super::CheckpointError;
use super::manifest::WriteFault;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

/// Alignment of the tensor data in bytes, so that a memory map can be read as any dtype.
const ALIGNMENT: usize = 8;
const CHUNK_ELEMENTS: usize = 1 << 16;

/// Writes a complete safetensors file: the header, then the data without conversion.
pub(super) fn write_tensors(
    out: &mut dyn Write,
    tensors: &[&(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<(), WriteFault> {
    // Wide dtypes come first, because each tensor must start at a multiple of its element size.
    let mut tensors = tensors.to_vec();
    tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype().size_in_bytes()));
    let header = header(&tensors, metadata).map_err(WriteFault::Other)?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (name, tensor) in tensors {
        write_tensor(out, name, tensor)?;
    }
    Ok(out.flush()?)
}

/// Size of `tensor` on disk, in bytes.
pub(super) fn num_bytes(tensor: &Tensor) -> u64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
}

fn header(
    tensors: &[&(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, CheckpointError> {
    let mut names = BTreeSet::new();
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!(metadata));
    let mut offset = 0;
    for (name, tensor) in tensors {
        if !names.insert(name) {
            return Err(CheckpointError::SameName { tensor: name.clone() });
        }
        let end = offset + num_bytes(tensor);
        header.insert(
            name.clone(),
            json!({
                "dtype": dtype_name(name, tensor.dtype())?,
                "shape": tensor.dims(),
                "data_offsets": [offset, end],
            }),
        );
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    Ok(header)
}

fn dtype_name(name: &str, dtype: DType) -> Result<&'static str, CheckpointError> {
    match dtype {
        DType::F32 => Ok("F32"),
        DType::BF16 => Ok("BF16"),
        DType::F16 => Ok("F16"),
        other => Err(CheckpointError::Dtype {
            place: "memory".into(),
            tensor: name.to_owned(),
            dtype: format!("{other:?}"),
        }),
    }
}

fn write_tensor(out: &mut dyn Write, name: &str, tensor: &Tensor) -> Result<(), WriteFault> {
    let fault =
        |source| WriteFault::Other(CheckpointError::Tensor { tensor: name.to_owned(), source });
    let tensor =
        tensor.to_device(&Device::Cpu).and_then(|tensor| tensor.contiguous()).map_err(fault)?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + tensor.elem_count();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            write_values(out, &values[range], f32::to_le_bytes)?;
        }
        Storage::Cpu(CpuStorage::BF16(values)) => {
            write_values(out, &values[range], half::bf16::to_le_bytes)?;
        }
        Storage::Cpu(CpuStorage::F16(values)) => {
            write_values(out, &values[range], half::f16::to_le_bytes)?;
        }
        _ => unreachable!("the header accepts three dtypes, and the tensor is on the CPU"),
    }
    Ok(())
}

fn write_values<T: Copy, const N: usize>(
    out: &mut dyn Write,
    values: &[T],
    bytes: impl Fn(T) -> [u8; N],
) -> io::Result<()> {
    let mut buffer = vec![0; N * CHUNK_ELEMENTS.min(values.len())];
    for chunk in values.chunks(CHUNK_ELEMENTS) {
        let filled = &mut buffer[..N * chunk.len()];
        for (slot, &value) in filled.chunks_exact_mut(N).zip(chunk) {
            slot.copy_from_slice(&bytes(value));
        }
        out.write_all(filled)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use safetensors::{Dtype, SafeTensors};

    fn written(tensors: &[(String, Tensor)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let tensors: Vec<_> = tensors.iter().collect();
        assert!(write_tensors(&mut bytes, &tensors, &metadata).is_ok());
        bytes
    }

    #[test]
    fn the_safetensors_crate_reads_back_every_bit() {
        let wide: Vec<f32> = [0.1, -0.0, f32::MIN_POSITIVE, f32::INFINITY, 1e-45, -3.5].into();
        let narrow: Vec<bf16> = [0x7fc1_u16, 0x8000, 0x0001].map(bf16::from_bits).into();
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
        assert_eq!(read.tensor("narrow").unwrap().data(), [0xc1, 0x7f, 0x00, 0x80, 0x01, 0x00]);
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
        let twin = ("w".to_owned(), tensor);
        let result = write_tensors(&mut Vec::new(), &[&twin, &twin], &BTreeMap::new());
        assert!(matches!(result, Err(WriteFault::Other(CheckpointError::SameName { .. }))));
    }
}
