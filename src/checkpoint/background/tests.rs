use super::*;
use crate::checkpoint::CheckpointConfig;
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::channel;

pub(super) fn tensors() -> Vec<Tensor> {
    let large: Vec<f32> = (0..5000).map(|i| (i as f32).sin()).collect();
    let len = large.len();
    let large = Tensor::from_vec(large, len, &Device::Cpu).unwrap();
    let cast = |dtype| large.narrow(0, 5, 300).unwrap().to_dtype(dtype).unwrap();
    let codes = Tensor::from_vec((0..250u8).collect::<Vec<_>>(), 250, &Device::Cpu).unwrap();
    // a view that does not begin at the first element
    let view = large.narrow(0, 1000, 600).unwrap().reshape((20, 30)).unwrap();
    vec![large.copy().unwrap(), cast(DType::BF16), cast(DType::F16), codes, view]
}

pub(super) fn contents(tensors: &[Tensor]) -> OwnedContents {
    let name = |(index, tensor): (usize, &Tensor)| {
        SavedTensor::whole(format!("tensor{index}"), tensor.clone())
    };
    let all: Vec<_> = tensors.iter().enumerate().map(name).collect();
    OwnedContents {
        layout: FolderLayout::Model,
        weights: all[..2].to_vec(),
        config_json: json!({"model_type": "tiny"}),
        carried: CarriedFiles::default(),
        optimizer: all[2..].to_vec(),
        state: json!({"step": 1}),
    }
}

pub(super) fn checkpointer(folder: &Path) -> Checkpointer {
    Checkpointer::new(folder, &CheckpointConfig::default())
}

pub(super) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let file = |path: std::path::PathBuf| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap())
    };
    entries.map(file).collect()
}

/// Overwrites the values of a tensor in place, as an update does.
pub(super) fn overwrite(tensor: &Tensor) {
    let flat = tensor.flatten_all().unwrap();
    let ones = flat.ones_like().unwrap();
    flat.slice_set(&ones, 0, 0).unwrap();
    assert_eq!(
        flat.narrow(0, 9, 1).unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(),
        [1.0]
    );
}

#[test]
fn steps_during_a_save_do_not_change_a_byte_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let (own, tensors) = (tensors(), tensors());
    let expected = folder.path().join("expected");
    fs::create_dir(&expected).unwrap();
    let expected = checkpointer(&expected).save(1, &contents(&own).contents(), &Alone).unwrap();

    // the first tensor is written when the test allows it: after all others were overwritten
    let mut copy = contents(&tensors).copy(0, 1).unwrap().unwrap();
    let (allow, wait) = channel::<()>();
    let (wait, value) = (Mutex::new(wait), own[0].clone());
    let make = move || {
        wait.lock().unwrap().recv().unwrap();
        Ok(value.clone())
    };
    copy.weights[0] = SavedTensor::made("tensor0", own[0].dims(), DType::F32, make);
    let save = BackgroundSave::start(checkpointer(folder.path()), 1, copy, &Alone).unwrap();
    tensors.iter().for_each(overwrite);
    assert!(!save.is_done());
    allow.send(()).unwrap();
    assert!(save.wait(&Alone).unwrap() > Duration::ZERO);
    let found = files(&checkpointer(folder.path()).step_folder(1));
    for (name, bytes) in files(&expected) {
        assert!(found[&name] == bytes, "{name}");
    }
}

#[test]
fn a_copy_of_every_tensor_is_written_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let all = || {
        // larger than a part that one thread copies
        let large = Tensor::arange(0f32, (1 << 22) as f32 + 77.0, &Device::Cpu).unwrap();
        [&[large][..], &tensors()].concat()
    };
    let tensors = all();
    let copy = contents(&tensors).copy(0, 1).unwrap().unwrap();
    tensors.iter().for_each(overwrite);
    let original = contents(&all());
    let written = [("a", &original), ("b", &copy)].map(|(name, contents)| {
        let output = folder.path().join(name);
        fs::create_dir(&output).unwrap();
        files(&checkpointer(&output).save(1, &contents.contents(), &Alone).unwrap())
    });
    assert!(written[0] == written[1]);
}

#[test]
fn a_fixed_tensor_needs_no_copy() {
    let tensors = tensors();
    let mut contents = contents(&tensors);
    let all = contents.changing_bytes(0, 1).unwrap();
    contents.weights[0] = contents.weights[0].clone().fixed();
    assert_eq!(all - contents.changing_bytes(0, 1).unwrap(), 4 * tensors[0].elem_count() as u64);
    let copy = contents.copy(0, 1).unwrap().unwrap();
    assert_eq!(copy.changing_bytes(0, 1).unwrap(), 0);
    overwrite(&tensors[0]);
    let folder = tempfile::tempdir().unwrap();
    let saved = checkpointer(folder.path()).save(1, &copy.contents(), &Alone).unwrap();
    let files = crate::checkpoint::WeightFiles::open(&saved).unwrap();
    let shared = files.load("tensor0", DType::F32, &Device::Cpu).unwrap();
    assert_eq!(shared.to_vec1::<f32>().unwrap()[3], 1.0, "the values are shared");
}

#[test]
fn an_error_of_the_thread_is_returned_and_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    fs::File::create(folder.path().join("checkpoints")).unwrap();
    let start = || {
        let copy = contents(&tensors()).copy(0, 1).unwrap().unwrap();
        BackgroundSave::start(checkpointer(folder.path()), 1, copy, &Alone).unwrap()
    };
    assert!(start().wait(&Alone).unwrap_err().is_write());
    fs::remove_file(folder.path().join("checkpoints")).unwrap();
    start().wait(&Alone).unwrap();
    assert_eq!(checkpointer(folder.path()).steps().unwrap(), [1]);
}

#[test]
fn a_value_that_is_not_finite_is_found_in_the_copy() {
    let folder = tempfile::tempdir().unwrap();
    for bad in [
        Tensor::new(&[1f32, f32::NAN], &Device::Cpu).unwrap(),
        Tensor::new(&[bf16::ONE, bf16::INFINITY], &Device::Cpu).unwrap(),
        Tensor::new(&[f16::ONE, f16::INFINITY], &Device::Cpu).unwrap(),
    ] {
        let mut contents = contents(&tensors());
        contents.optimizer.push(SavedTensor::whole("bad", bad));
        let copy = contents.copy(0, 1).unwrap().unwrap();
        let save = BackgroundSave::start(checkpointer(folder.path()), 1, copy, &Alone).unwrap();
        let error = save.wait(&Alone).unwrap_err().to_string();
        assert!(error.starts_with("tensor `bad` is not finite: its element 1"), "{error}");
    }
    assert!(checkpointer(folder.path()).steps().unwrap().is_empty());
}

#[test]
fn a_panic_of_the_thread_continues_in_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut contents = contents(&tensors());
    let make = || -> Result<Tensor, CheckpointError> { panic!("planted") };
    contents.optimizer.push(SavedTensor::made("planted", &[1], DType::F32, make));
    let copy = contents.copy(0, 1).unwrap().unwrap();
    let save = BackgroundSave::start(checkpointer(folder.path()), 1, copy, &Alone).unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| save.wait(&Alone))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"planted"));
    assert!(checkpointer(folder.path()).steps().unwrap().is_empty());
}
