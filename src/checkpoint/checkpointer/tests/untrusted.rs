//! Values that are not finite, and files that another program has put in the place of ours.

use super::*;

fn contents_of(run: &TestRun, weights: &[(String, Tensor)]) -> Result<PathBuf, CheckpointError> {
    let contents = Contents {
        model: ModelFolder {
            layout: FolderLayout::Model,
            weights: &saved(weights),
            config_json: &json!({"model_type": "tiny"}),
            carried: &CarriedFiles::default(),
            max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
        },
        optimizer: Some(&saved(&moments(2))),
        state: &json!({"step": 2, "fingerprint": "abc"}),
    };
    run.checkpointer().save(2, &contents, &Alone)
}

#[test]
fn a_tensor_that_is_not_finite_is_named_and_never_saved() {
    let run = TestRun::new(3);
    run.save(1);
    let len = CHUNKS + 7;
    for (dtype, bad) in
        [(DType::F32, f32::NAN), (DType::BF16, f32::INFINITY), (DType::F16, f32::NAN)]
    {
        for at in [0, len - 1] {
            let mut values = vec![1f32; len];
            values[at] = bad;
            let tensor = Tensor::from_vec(values, len, &Device::Cpu).unwrap();
            let mut weights = weights(2);
            weights.push(("untouched".to_owned(), tensor.to_dtype(dtype).unwrap()));
            let error = contents_of(&run, &weights).unwrap_err();
            let expected = format!(
                "tensor `untouched` is not finite: its element {at} is {bad}; `model.safetensors` \
                 was not saved"
            );
            assert_eq!(error.to_string(), expected);
            assert!(!error.is_write(), "the disk has no fault");
            assert_eq!(run.names("checkpoints"), ["step-00000001"]);
            assert_eq!(run.newest(), Some(1));
        }
    }
}

/// More values than are checked at once.
const CHUNKS: usize = 3 << 16;

#[test]
fn a_tensor_of_a_file_that_is_not_finite_is_named_when_it_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let mut values = vec![1f32; CHUNKS];
    values[CHUNKS - 2] = f32::NEG_INFINITY;
    values[7] = 3.4e38; // finite, but not in bf16
    let tensor = Tensor::from_vec(values, CHUNKS, &Device::Cpu).unwrap();
    let tensors = std::collections::HashMap::from([("w", tensor)]);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let files = WeightFiles::open_file(&path).unwrap();
    let load = |range, dtype| files.load_part("w", range, dtype, &Device::Cpu);
    load(0..CHUNKS - 2, DType::F32).unwrap();
    for (range, dtype, found) in [
        (0..CHUNKS, DType::F32, format!("its element {} is -inf", CHUNKS - 2)),
        (CHUNKS - 3..CHUNKS, DType::F32, format!("its element {} is -inf", CHUNKS - 2)),
        (5..20, DType::BF16, "its element 7 is 340000".to_owned()),
    ] {
        let error = load(range, dtype).unwrap_err().to_string();
        let start = format!("tensor `w` in `{}` is not finite: {found}", path.display());
        assert!(error.starts_with(&start), "{error}");
    }
}

fn change_manifest(checkpoint: &Path, change: impl Fn(&mut Value)) {
    let path = checkpoint.join(MANIFEST);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest["files"]);
    overwrite(&path, manifest.to_string().as_bytes());
}

#[test]
fn files_that_the_manifest_does_not_list_are_not_used() {
    let run = TestRun::new(3);
    run.save(1);
    let newest = run.save(2);
    for file in [OPTIMIZER, SINGLE] {
        let whole = fs::read(newest.join(MANIFEST)).unwrap();
        change_manifest(&newest, |files| drop(files.as_object_mut().unwrap().remove(file)));
        assert_eq!(run.newest(), Some(1), "{file}");
        overwrite(&newest.join(MANIFEST), &whole);
    }
    assert_eq!(run.newest(), Some(2));
    // an index that is not listed does not redirect a tensor
    let other = run.save(3);
    fs::copy(other.join(SINGLE), newest.join("model-evil.safetensors")).unwrap();
    let index = json!({"weight_map": {"wide": "model-evil.safetensors"}});
    overwrite(&newest.join(INDEX), index.to_string().as_bytes());
    assert_same_bits(&WeightFiles::open(&newest).unwrap(), &weights(2));
    // nor does a listed index name a file that is not listed, where it is used
    fs::remove_file(newest.join(SINGLE)).unwrap();
    change_manifest(&newest, |files| files[INDEX] = files[STATE].clone());
    let error = WeightFiles::open(&newest).unwrap_err().to_string();
    assert!(
        error.ends_with("`model-evil.safetensors` is not listed in `manifest.json`"),
        "{error}"
    );
}

#[test]
fn an_explicit_checkpoint_without_a_listed_optimizer_is_refused() {
    let run = TestRun::new(3);
    let checkpoint = run.save(1);
    change_manifest(&checkpoint, |files| drop(files.as_object_mut().unwrap().remove(OPTIMIZER)));
    let found = Checkpointer::open(&checkpoint, &Alone).unwrap();
    let error = found.optimizer().unwrap_err().to_string();
    assert!(error.ends_with("`optimizer.safetensors` is not listed in `manifest.json`"), "{error}");
}

#[test]
fn pipes_in_place_of_files_are_damage_and_not_a_wait() {
    for file in [MANIFEST, STATE, SINGLE, OPTIMIZER, "tokenizer.json"] {
        let run = TestRun::new(3);
        run.save(1);
        let newest = run.save(2);
        fs::remove_file(newest.join(file)).unwrap();
        crate::checkpoint::make_pipe(&newest.join(file));
        assert_eq!(run.newest(), Some(1), "{file}");
        let error = Checkpointer::open(&newest, &Alone).unwrap_err().to_string();
        assert!(error.ends_with(&format!("`{file}` is not a regular file")), "{error}");
    }
}

#[test]
fn the_next_start_removes_checkpoints_beyond_keep() {
    let more = TestRun::new(5);
    (1..=5).for_each(|step| drop(more.save(step)));
    let run = TestRun { keep: 2, ..more };
    run.checkpointer().remove_old(4);
    let left = ["step-00000003", "step-00000004", "step-00000005"];
    assert_eq!(run.names("checkpoints"), left, "later steps are those of another run");
}
