use super::super::{Alone, CarriedFiles, FolderLayout, write_atomically};
use super::*;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use serde_json::json;
use std::fs::File;
use std::io::Write;

mod untrusted;

/// An output folder, and a model folder to copy the tokenizer from.
struct TestRun {
    folder: tempfile::TempDir,
    keep: usize,
}

impl TestRun {
    fn new(keep: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("model")).unwrap();
        write_atomically(&folder.path().join("model/tokenizer.json"), b"{}").unwrap();
        write_atomically(&folder.path().join("model/pytorch_model.bin"), b"no").unwrap();
        fs::create_dir_all(folder.path().join("run")).unwrap();
        Self { folder, keep }
    }

    fn checkpointer(&self) -> Checkpointer {
        let keep = NonZeroUsize::new(self.keep).unwrap();
        let config = CheckpointConfig { every_steps: 1, keep, background: false, best: None };
        Checkpointer::new(&self.output_dir(), &config)
    }

    fn output_dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn save(&self, step: u64) -> PathBuf {
        self.try_save(step).unwrap()
    }

    fn try_save(&self, step: u64) -> Result<PathBuf, CheckpointError> {
        let contents = Contents {
            model: ModelFolder {
                layout: FolderLayout::Model,
                weights: &saved(&weights(step)),
                config_json: &json!({"model_type": "tiny"}),
                carried: &CarriedFiles::read(&self.folder.path().join("model")).unwrap(),
                max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
            },
            optimizer: Some(&saved(&moments(step))),
            state: &json!({"step": step, "fingerprint": "abc"}),
        };
        self.checkpointer().save(step, &contents, &Alone)
    }

    fn newest(&self) -> Option<u64> {
        self.checkpointer().newest_good(|_| true, &Alone).unwrap().map(|found| found.step)
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.output_dir().join(folder)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn weights(step: u64) -> Vec<(String, Tensor)> {
    let wide: Vec<f32> = (0..300).map(|i| ((i + step) as f32).sin()).collect();
    let narrow: Vec<bf16> =
        (0..100).map(|i| bf16::from_bits((i * 601 + step as u16) & 0xbfff)).collect();
    vec![
        ("wide".to_owned(), Tensor::from_vec(wide, (30, 10), &Device::Cpu).unwrap()),
        ("narrow".to_owned(), Tensor::from_vec(narrow, 100, &Device::Cpu).unwrap()),
    ]
}

fn moments(step: u64) -> Vec<(String, Tensor)> {
    let values: Vec<f32> = (0..300).map(|i| 1.0 / (i + step + 1) as f32).collect();
    vec![("wide.exp_avg".to_owned(), Tensor::new(values, &Device::Cpu).unwrap())]
}

fn saved(tensors: &[(String, Tensor)]) -> Vec<SavedTensor> {
    tensors.iter().map(|(name, tensor)| SavedTensor::whole(name, tensor.clone())).collect()
}

fn assert_same_bits(files: &WeightFiles, expected: &[(String, Tensor)]) {
    for (name, tensor) in expected {
        let loaded = files.load(name, tensor.dtype(), &Device::Cpu).unwrap();
        assert_eq!(loaded.dims(), tensor.dims());
        let bits = |tensor: &Tensor| -> Vec<u64> {
            let tensor = tensor.flatten_all().unwrap();
            if tensor.dtype() == DType::BF16 {
                let values: Vec<bf16> = tensor.to_vec1().unwrap();
                values.into_iter().map(|value| value.to_bits().into()).collect()
            } else {
                let values: Vec<f32> = tensor.to_vec1().unwrap();
                values.into_iter().map(|value| value.to_bits().into()).collect()
            }
        };
        assert_eq!(bits(&loaded), bits(tensor), "{name}");
    }
}

/// Writes in place and without a sync, as a faulty disk or another program would.
fn overwrite(path: &Path, bytes: &[u8]) {
    File::create(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn a_saved_checkpoint_is_found_and_loads_bit_equal() {
    let run = TestRun::new(3);
    let dir = run.save(200);
    assert_eq!(dir, run.output_dir().join("checkpoints/step-00000200"));
    let found = run.checkpointer().newest_good(|_| true, &Alone).unwrap().unwrap();
    assert_eq!((found.dir.clone(), found.step), (dir.clone(), 200));
    assert_eq!(found.state, json!({"step": 200, "fingerprint": "abc"}));
    assert_same_bits(&found.weights().unwrap(), &weights(200));
    let optimizer = found.optimizer().unwrap();
    assert_same_bits(&optimizer, &moments(200));
    assert_eq!(Checkpointer::open(&dir, &Alone).unwrap(), found);
    assert_eq!(
        run.names("checkpoints/step-00000200"),
        [
            "config.json",
            "manifest.json",
            "model.safetensors",
            "optimizer.safetensors",
            "tokenizer.json",
            "trainer_state.json"
        ]
    );
}

#[test]
fn saving_twice_gives_the_same_bytes() {
    let (one, two) = (TestRun::new(1), TestRun::new(1));
    // The manifest contains a checksum of every other file.
    let manifest = |run: &TestRun, step| fs::read(run.save(step).join(MANIFEST)).unwrap();
    assert_eq!(manifest(&one, 5), manifest(&two, 5));
    assert_ne!(manifest(&one, 6), manifest(&two, 5));
}

#[test]
fn every_kind_of_damage_to_every_file_is_found_and_the_older_one_is_used() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("deleted", |path| fs::remove_file(path).unwrap()),
        ("emptied", |path| drop(File::create(path).unwrap())),
        ("cut short", |path| {
            let file = File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
        ("one bit flipped", |path| {
            let mut bytes = fs::read(path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            overwrite(path, &bytes);
        }),
    ];
    let run = TestRun::new(3);
    run.save(1);
    let newest = run.save(2);
    for file in run.names("checkpoints/step-00000002") {
        let path = newest.join(&file);
        let whole = fs::read(&path).unwrap();
        for (name, damage) in damages {
            damage(&path);
            assert_eq!(run.newest(), Some(1), "{file} {name}");
            assert!(Checkpointer::open(&newest, &Alone).is_err(), "{file} {name}");
            overwrite(&path, &whole);
            assert_eq!(run.newest(), Some(2));
        }
    }
}

#[test]
fn a_kill_at_any_point_of_a_save_loses_no_older_checkpoint() {
    let run = TestRun::new(3);
    let complete = run.save(1);
    let folder = run.output_dir().join("checkpoints");
    // An incomplete folder, one being deleted, an empty one, and a file in place of a folder.
    fs::create_dir_all(folder.join(".tmp-step-00000002")).unwrap();
    write_atomically(&folder.join(".tmp-step-00000002/model.safetensors"), b"half").unwrap();
    fs::create_dir_all(folder.join(".delete-step-00000000")).unwrap();
    fs::create_dir_all(folder.join("step-00000003")).unwrap();
    write_atomically(&folder.join("step-00000004"), b"").unwrap();
    assert_eq!(run.newest(), Some(1));
    run.checkpointer().recover().unwrap();
    assert_eq!(run.names("checkpoints"), ["step-00000001", "step-00000003", "step-00000004"],);
    assert_eq!(run.newest(), Some(1));
    assert_eq!(run.save(3), folder.join("step-00000003"));
    assert_eq!(run.newest(), Some(3));
    assert!(complete.exists());
}

#[test]
fn only_the_newest_checkpoints_are_kept() {
    let run = TestRun::new(2);
    for step in [1, 2, 3, 10] {
        run.save(step);
    }
    assert_eq!(run.names("checkpoints"), ["step-00000003", "step-00000010"]);
    assert_eq!(run.checkpointer().steps().unwrap(), [3, 10]);
}

#[test]
fn a_new_run_in_a_used_folder_does_not_delete_what_it_just_saved() {
    let run = TestRun::new(1);
    run.save(1000);
    run.save(1);
    run.save(2);
    assert_eq!(run.checkpointer().steps().unwrap(), [2, 1000]);
}

#[test]
fn a_checkpoint_of_another_config_is_not_used() {
    let run = TestRun::new(3);
    run.save(1);
    run.save(2);
    let checkpointer = run.checkpointer();
    let found = checkpointer.newest_good(|state| state["step"] == 1, &Alone).unwrap();
    assert_eq!(found.unwrap().step, 1);
    assert_eq!(checkpointer.newest_good(|_| false, &Alone).unwrap(), None);
}

#[test]
fn a_folder_without_checkpoints_has_none() {
    let run = TestRun::new(1);
    assert_eq!(run.newest(), None);
    let error = Checkpointer::open(&run.output_dir().join("nothing"), &Alone).unwrap_err();
    assert!(error.to_string().contains("nothing"), "{error}");
    let error = Checkpointer::open(&run.output_dir(), &Alone).unwrap_err();
    assert!(error.to_string().contains("`manifest.json` is missing"), "{error}");
}

#[test]
fn a_save_that_cannot_be_written_names_the_path_and_leaves_nothing() {
    let run = TestRun::new(1);
    write_atomically(&run.output_dir().join("checkpoints"), b"a file, not a folder").unwrap();
    let error = run.try_save(1).unwrap_err();
    assert!(error.is_write() && error.to_string().contains("checkpoints"), "{error}");
    assert_eq!(run.names(""), ["checkpoints"]);
}

#[test]
fn a_tensor_that_cannot_be_saved_leaves_the_older_checkpoint_alone() {
    let run = TestRun::new(1);
    run.save(1);
    let ids = [SavedTensor::whole("ids", Tensor::new(&[1_u32], &Device::Cpu).unwrap())];
    let contents = Contents {
        model: ModelFolder {
            layout: FolderLayout::Model,
            weights: &ids,
            config_json: &json!({}),
            carried: &CarriedFiles::default(),
            max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
        },
        optimizer: None,
        state: &json!({}),
    };
    let error = run.checkpointer().save(2, &contents, &Alone).unwrap_err();
    assert!(matches!(error, CheckpointError::Dtype { .. }), "{error}");
    assert_eq!(run.names("checkpoints"), ["step-00000001"]);
}

#[test]
fn a_renamed_checkpoint_is_not_taken_for_a_newer_one() {
    let run = TestRun::new(3);
    let older = run.save(1);
    fs::rename(older, run.output_dir().join("checkpoints/step-00000009")).unwrap();
    run.save(2);
    assert_eq!(run.newest(), Some(2));
}

#[test]
fn final_is_the_checkpoint_without_optimizer_state_and_replaces_an_older_one() {
    let run = TestRun::new(3);
    for step in [1, 2] {
        let checkpoint = run.save(step);
        let dir = run.checkpointer().save_final(&checkpoint).unwrap();
        assert_eq!(dir, run.output_dir().join("final"));
        let found = Checkpointer::open(&dir, &Alone).unwrap();
        assert_eq!(found.step, step);
        assert_same_bits(&found.weights().unwrap(), &weights(step));
    }
    assert_eq!(
        run.names("final"),
        [
            "config.json",
            "manifest.json",
            "model.safetensors",
            "tokenizer.json",
            "trainer_state.json"
        ]
    );
    assert_eq!(run.names(""), ["checkpoints", "final"]);
}

#[test]
fn editing_a_text_file_of_final_does_not_damage_the_checkpoint() {
    let run = TestRun::new(3);
    let checkpoint = run.save(1);
    let dir = run.checkpointer().save_final(&checkpoint).unwrap();
    let mut file = File::options().append(true).open(dir.join("config.json")).unwrap();
    file.write_all(b" ").unwrap();
    assert_eq!(run.newest(), Some(1));
}

#[test]
fn final_is_not_written_from_a_file_of_the_wrong_size() {
    let run = TestRun::new(3);
    let checkpoint = run.save(1);
    File::create(checkpoint.join("model.safetensors")).unwrap();
    assert!(run.checkpointer().save_final(&checkpoint).is_err());
    assert_eq!(run.names(""), ["checkpoints"]);
}
