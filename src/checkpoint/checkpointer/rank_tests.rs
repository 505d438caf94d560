#![expect(
    clippy::single_range_in_vec_init,
    clippy::unnecessary_wraps,
    reason = "functions of one type, most of which return one range"
)]

use super::super::manifest::{MANIFEST, Manifest};
use super::super::ranks::on_ranks;
use super::super::{Alone, CarriedFiles, CheckpointConfig, FolderLayout, ModelFolder, SavedTensor};
use super::*;
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::ops::Range;

/// Name, number of elements and dtype of each tensor: more tensors than ranks, one of them smaller
/// than the number of ranks, one larger than a buffer.
const WEIGHTS: [(&str, usize, DType); 4] = [
    ("norm", 3, DType::BF16),
    ("wide", 1001, DType::F32),
    ("narrow", 777, DType::BF16),
    ("large", 600_001, DType::F16),
];

fn values(name: &str, count: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..count).map(|i| ((i + name.len()) as f32).sin()).collect();
    Tensor::new(values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// How ranks hold a tensor: its parts on rank `rank` of `world`.
type Division =
    fn(name: &str, count: usize, rank: usize, world: usize) -> Option<Vec<Range<usize>>>;

fn everywhere(_: &str, _: usize, _: usize, _: usize) -> Option<Vec<Range<usize>>> {
    None
}

/// Each rank has an equal part.
fn equal(_: &str, count: usize, rank: usize, world: usize) -> Option<Vec<Range<usize>>> {
    Some(vec![count * rank / world..count * (rank + 1) / world])
}

/// One rank has all elements except for the last one, which the last rank has.
fn owner(name: &str, count: usize, rank: usize, world: usize) -> Option<Vec<Range<usize>>> {
    let mut parts = Vec::new();
    if rank + 1 == world {
        parts.push(count - 1..count);
    }
    if name.len() % world == rank {
        parts.push(0..count - 1);
    }
    Some(parts)
}

fn tensors(prefix: &str, division: Division, rank: usize, world: usize) -> Vec<SavedTensor> {
    let tensor = |(name, count, dtype): (&str, usize, DType)| {
        let (name, whole) = (format!("{prefix}{name}"), values(name, count, dtype));
        let Some(parts) = division(&name, count, rank, world) else {
            return SavedTensor::whole(name, whole);
        };
        let part = |range: Range<usize>| {
            let values = whole.narrow(0, range.start, range.len()).unwrap();
            (range, values)
        };
        SavedTensor::parts(name, &[count], dtype, parts.into_iter().map(part).collect())
    };
    WEIGHTS.into_iter().map(tensor).collect()
}

fn checkpointer(output_dir: &Path) -> Checkpointer {
    Checkpointer::new(output_dir, &CheckpointConfig::default())
}

fn save<T: Together>(
    output_dir: &Path,
    step: u64,
    model: Division,
    optimizer: Division,
    ranks: &T,
) -> Result<PathBuf, T::Error> {
    let (rank, world) = (ranks.rank(), ranks.world());
    let contents = Contents {
        model: ModelFolder {
            layout: FolderLayout::Model,
            weights: &tensors("", model, rank, world),
            config_json: &json!({"model_type": "tiny"}),
            carried: &CarriedFiles::default(),
            max_shard_bytes: 5_000,
        },
        optimizer: Some(&tensors("exp_avg.", optimizer, rank, world)),
        state: &json!({"step": step}),
    };
    checkpointer(output_dir).save(step, &contents, ranks)
}

/// Saves step 7 on `world` ranks.
fn saved(world: usize, model: Division, optimizer: Division) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let all = on_ranks(world, |rank| save(folder.path(), 7, model, optimizer, rank));
    let all: Vec<PathBuf> = all.into_iter().map(Result::unwrap).collect();
    assert!(all.iter().all(|dir| *dir == all[0]));
    (folder, all[0].clone())
}

/// The files but the manifest, and their contents.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())
    };
    entries.map(read).filter(|(name, _)| name != MANIFEST).collect()
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).map_or_else(
        |_| Vec::new(),
        |entries| entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect(),
    )
}

#[test]
fn any_number_of_ranks_and_any_division_write_the_same_files() {
    let (_folder, one) = saved(1, everywhere, everywhere);
    let expected = files(&one);
    assert_eq!(expected.len(), 7, "config, state, optimizer, three shards and their index");
    let divisions: [(Division, Division); 5] = [
        (everywhere, everywhere),
        (everywhere, equal),
        (everywhere, owner),
        (equal, equal),
        (owner, owner),
    ];
    for world in [1, 2, 4] {
        for (index, (model, optimizer)) in divisions.into_iter().enumerate() {
            let (_folder, dir) = saved(world, model, optimizer);
            assert!(files(&dir) == expected, "{world} ranks, division {index}");
        }
    }
}

#[test]
fn a_checkpoint_of_any_number_of_ranks_is_found_by_any_other() {
    for world in [1, 2, 4] {
        let (folder, dir) = saved(world, everywhere, owner);
        for readers in [1, 2, 3] {
            let found = on_ranks(readers, |rank| {
                checkpointer(folder.path()).newest_good(|state| state["step"] == 7, rank)
            });
            for found in found {
                assert_eq!(found.unwrap().unwrap().dir, dir);
            }
        }
    }
}

#[test]
fn one_process_records_one_checksum_of_a_file_and_several_ranks_one_of_each_piece() {
    for world in [1, 4] {
        let (_folder, dir) = saved(world, everywhere, everywhere);
        let manifest: Value =
            serde_json::from_slice(&fs::read(dir.join(MANIFEST)).unwrap()).unwrap();
        let entry = &manifest["files"][OPTIMIZER];
        match world {
            1 => assert!(entry["sha256"].is_string() && entry["pieces"].is_null(), "{entry}"),
            _ => assert_eq!(entry["pieces"].as_array().unwrap().len(), world, "{entry}"),
        }
        assert!(manifest["files"]["config.json"]["sha256"].is_string());
    }
}

#[test]
fn elements_that_no_rank_or_two_ranks_have_are_refused_by_name() {
    let hole: Division = |name, count, rank, world| match (name, rank) {
        ("exp_avg.narrow", 1) => Some(vec![count / 2 + 1..count]),
        _ => equal(name, count, rank, world),
    };
    let overlap: Division = |name, count, rank, world| match (name, rank) {
        ("exp_avg.narrow", 1) => Some(vec![count / 2 - 1..count]),
        _ => equal(name, count, rank, world),
    };
    let end: Division = |name, count, rank, world| match (name, rank) {
        ("exp_avg.narrow", 1) => Some(vec![]),
        _ => equal(name, count, rank, world),
    };
    for (division, problem) in [
        (hole, "its element 388 is in no part"),
        (overlap, "its element 387 is in more than one part"),
        (end, "its element 388 is in no part"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let errors = on_ranks(2, |rank| save(folder.path(), 1, everywhere, division, rank));
        for error in errors {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("`exp_avg.narrow`") && error.contains(problem), "{error}");
        }
        assert_eq!(names(&folder.path().join(FOLDER)), [""; 0]);
    }
}

#[test]
fn parts_that_do_not_fit_to_their_tensor_are_refused() {
    let part = |range: Range<usize>, values: Tensor| {
        let parts = vec![(range, values)];
        let tensor = SavedTensor::parts("w", &[2, 2], DType::F32, parts);
        TensorFile::new("file", &[&tensor], &BTreeMap::new()).err().unwrap().to_string()
    };
    let f32s = |count| values("w", count, DType::F32);
    assert_eq!(part(2..5, f32s(3)), "tensor `w` has 4 elements, but a part is 2..5");
    assert_eq!(part(2..4, f32s(3)), "tensor `w` has a part 2..4 with 3 values");
    let narrow = values("w", 2, DType::BF16);
    assert_eq!(part(2..4, narrow), "tensor `w` is F32, but its part 2..4 is BF16");
}

#[test]
fn ranks_that_save_other_tensors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let errors = on_ranks(2, |rank| {
        let name = ["a", "b"][rank.rank()];
        let weights = [SavedTensor::whole(name, values("w", 4, DType::F32))];
        let contents = Contents {
            model: ModelFolder {
                layout: FolderLayout::Model,
                weights: &weights,
                config_json: &json!({}),
                carried: &CarriedFiles::default(),
                max_shard_bytes: u64::MAX,
            },
            optimizer: None,
            state: &json!({}),
        };
        checkpointer(folder.path()).save(1, &contents, rank)
    });
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("rank 1 saves other tensors in `model.safetensors`"), "{error}");
    }
}

#[test]
fn a_rank_that_cannot_write_ends_the_save_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let dir = save(folder.path(), 1, everywhere, everywhere, &Alone).unwrap();
    // Rank 1 looks for the files in another folder.
    let errors = on_ranks(3, |rank| {
        let output_dir = folder.path().join(if rank.rank() == 1 { "elsewhere" } else { "" });
        save(&output_dir, 2, everywhere, equal, rank)
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let error = error.unwrap_err();
        assert_eq!(error.is_write(), rank == 1, "{error}");
        assert!(error.to_string().contains("cannot write"), "{error}");
        assert_eq!(error.to_string().contains("rank 1 failed"), rank != 1, "{error}");
    }
    assert_eq!(names(&folder.path().join(FOLDER)), ["step-00000001"]);
    assert!(dir.exists());
}

#[test]
fn a_first_rank_that_cannot_create_the_files_ends_the_save_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("run")).unwrap();
    File::create(folder.path().join("run").join(FOLDER)).unwrap(); // a file, not a folder
    let run = folder.path().join("run");
    for error in on_ranks(2, |rank| save(&run, 1, everywhere, equal, rank)) {
        assert!(error.unwrap_err().to_string().contains("cannot write"));
    }
    assert_eq!(names(&run), [FOLDER]);
}

#[test]
fn a_changed_byte_in_any_piece_is_found_and_all_ranks_take_the_older_checkpoint() {
    let (folder, dir) = saved(2, everywhere, owner);
    let older = save(folder.path(), 3, everywhere, everywhere, &Alone).unwrap();
    let manifest = Manifest::read(&dir).unwrap();
    for (name, entry) in &manifest.files {
        let path = dir.join(name);
        let whole = fs::read(&path).unwrap();
        for piece in entry.pieces() {
            let mut changed = whole.clone();
            changed[(piece.offset + piece.bytes - 1) as usize] ^= 1;
            fs::File::create(&path).unwrap().write_all(&changed).unwrap();
            let found = on_ranks(3, |rank| checkpointer(folder.path()).newest_good(|_| true, rank));
            for found in found {
                assert_eq!(found.unwrap().unwrap().dir, older, "{name} {}", piece.offset);
            }
            for opened in on_ranks(3, |rank| Checkpointer::open(&dir, rank)) {
                let error = opened.unwrap_err().to_string();
                assert!(error.contains(&format!("`{name}` does not match")), "{error}");
            }
        }
        fs::File::create(&path).unwrap().write_all(&whole).unwrap();
    }
    assert_eq!(
        checkpointer(folder.path()).newest_good(|_| true, &Alone).unwrap().unwrap().dir,
        dir
    );
}

#[test]
fn the_ranks_together_check_each_piece_once() {
    let (_folder, dir) = saved(4, everywhere, owner);
    let manifest = Manifest::read(&dir).unwrap();
    let name = OPTIMIZER;
    let mut bytes = fs::read(dir.join(name)).unwrap();
    bytes[20] ^= 1;
    fs::File::create(dir.join(name)).unwrap().write_all(&bytes).unwrap();
    for world in [1, 2, 3] {
        let finders = (0..world).filter(|rank| manifest.check_share(&dir, *rank, world).is_err());
        assert_eq!(finders.count(), 1, "{world} ranks");
    }
}

#[test]
fn a_rank_that_does_not_share_the_folder_is_refused() {
    let (folder, dir) = saved(2, everywhere, equal);
    let elsewhere = folder.path().join("elsewhere");
    let output_dir = |rank: usize| if rank == 1 { elsewhere.as_path() } else { folder.path() };
    let find = || {
        let found = on_ranks(2, |rank| {
            checkpointer(output_dir(rank.rank()))
                .newest_good(|_| true, rank)
                .unwrap_err()
                .to_string()
        });
        assert!(found[0].starts_with("rank 1 failed: checkpoint"), "{}", found[0]);
        assert!(found[1].ends_with("is missing or differs from that on rank 0"), "{}", found[1]);
    };
    find();
    // The same step of another run.
    let other: Division = |_, count, _, _| Some(vec![0..count]);
    save(&elsewhere, 7, everywhere, other, &Alone).unwrap();
    find();
    assert!(dir.exists());
}
