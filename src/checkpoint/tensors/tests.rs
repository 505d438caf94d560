use super::*;
use candle_core::Device;
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
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().tensor("long").unwrap().data(), expected);
}

#[test]
fn two_tensors_of_the_same_name_are_rejected() {
    let tensor = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
    let twin = SavedTensor::whole("w", tensor);
    let result = TensorFile::new("file", &[&twin, &twin], &BTreeMap::new());
    assert!(matches!(result, Err(CheckpointError::SameName { .. })));
}
