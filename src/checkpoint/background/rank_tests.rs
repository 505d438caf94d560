//! Saves in the background on several ranks, which are threads.

use super::super::ranks::on_ranks;
use super::tests::{checkpointer, contents, files, overwrite, tensors};
use super::*;
use candle_core::Tensor;
use std::fs;
use std::path::Path;

/// Contents of which rank `rank` holds a part: the whole of `tensor0` and `tensor2`, which ranks
/// divide, a share of the others, and all of a fixed tensor.
fn divided(tensors: &[Tensor], rank: usize, world: usize) -> OwnedContents {
    let mut all = contents(tensors);
    for list in [&mut all.weights, &mut all.optimizer] {
        for saved in list.iter_mut() {
            let number: usize = saved.name()["tensor".len()..].parse().unwrap();
            let tensor = tensors[number].flatten_all().unwrap();
            let count = tensor.elem_count();
            let own = count * rank / world..count * (rank + 1) / world;
            let values = tensor.narrow(0, own.start, own.len()).unwrap();
            let dims = tensors[number].dims();
            match number {
                0 | 2 => {}
                3 => *saved = saved.clone().fixed(),
                _ => {
                    let parts = vec![(own, values)];
                    *saved = SavedTensor::parts(saved.name(), dims, tensor.dtype(), parts);
                }
            }
        }
    }
    all
}

fn start<T: Together<Error = CheckpointError>>(
    folder: &Path,
    step: u64,
    copy: OwnedContents,
    ranks: &T,
) -> Result<BackgroundSave, CheckpointError> {
    BackgroundSave::start(checkpointer(folder), step, copy, ranks)
}

#[test]
fn ranks_write_what_they_held_when_the_save_began() {
    let folder = tempfile::tempdir().unwrap();
    let expected = folder.path().join("expected");
    fs::create_dir(&expected).unwrap();
    let expected = checkpointer(&expected);
    let expected = expected.save(1, &contents(&tensors()).contents(), &Alone).unwrap();
    for world in [1, 2, 3] {
        let output = folder.path().join(world.to_string());
        fs::create_dir(&output).unwrap();
        let bytes = on_ranks(world, |ranks| {
            let tensors = tensors(); // a rank has its own memory
            let own = divided(&tensors, ranks.rank(), world);
            let copy = own.copy(ranks.rank(), world).unwrap().unwrap();
            let bytes = own.changing_bytes(ranks.rank(), world).unwrap();
            let save = start(&output, 1, copy, ranks).unwrap();
            for (index, tensor) in tensors.iter().enumerate() {
                if index != 3 {
                    overwrite(tensor);
                }
            }
            if world > 1 {
                assert!(checkpointer(&output).steps().unwrap().is_empty(), "not complete");
            }
            save.wait(ranks).unwrap();
            bytes
        });
        let (whole, fixed) = (contents(&tensors()), tensors()[3].elem_count() as u64);
        let whole = whole.changing_bytes(0, 1).unwrap() - fixed;
        assert_eq!(bytes.iter().sum::<u64>(), whole, "each value is copied on one rank");
        let found = files(&checkpointer(&output).step_folder(1));
        for (name, bytes) in files(&expected) {
            assert!(name == "manifest.json" || found[&name] == bytes, "{world} ranks: {name}");
        }
        let good = checkpointer(&output).newest_good(|_| true, &Alone).unwrap();
        assert_eq!(good.unwrap().step, 1);
    }
}

#[test]
fn a_rank_that_cannot_write_its_part_ends_the_save_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    checkpointer(folder.path()).save(1, &contents(&tensors()).contents(), &Alone).unwrap();
    let errors = on_ranks(3, |ranks| {
        let own = divided(&tensors(), ranks.rank(), 3);
        let copy = own.copy(ranks.rank(), 3).unwrap().unwrap();
        // rank 1 looks for the files in another folder
        let place =
            if ranks.rank() == 1 { folder.path().join("other") } else { folder.path().into() };
        start(&place, 2, copy, ranks).unwrap().wait(ranks).unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.is_write(), rank == 1, "{error}");
        assert_eq!(error.to_string().contains("rank 1 failed"), rank != 1, "{error}");
    }
    let left: Vec<String> =
        files(&folder.path().join("checkpoints/step-00000001")).into_keys().collect();
    assert!(left.contains(&"manifest.json".to_owned()));
    assert_eq!(fs::read_dir(folder.path().join("checkpoints")).unwrap().count(), 1);
    // the next save of the same ranks is complete
    on_ranks(3, |ranks| {
        let copy = divided(&tensors(), ranks.rank(), 3).copy(ranks.rank(), 3).unwrap().unwrap();
        start(folder.path(), 3, copy, ranks).unwrap().wait(ranks).unwrap()
    });
    assert_eq!(checkpointer(folder.path()).steps().unwrap(), [1, 3]);
}

#[test]
fn a_save_that_ranks_do_not_complete_leaves_the_older_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    checkpointer(folder.path()).save(1, &contents(&tensors()).contents(), &Alone).unwrap();
    on_ranks(2, |ranks| {
        let copy = divided(&tensors(), ranks.rank(), 2).copy(ranks.rank(), 2).unwrap().unwrap();
        drop(start(folder.path(), 2, copy, ranks).unwrap());
    });
    let left = checkpointer(folder.path());
    assert_eq!(left.steps().unwrap(), [1]);
    left.recover().unwrap();
    assert_eq!(fs::read_dir(folder.path().join("checkpoints")).unwrap().count(), 1);
    assert_eq!(left.newest_good(|_| true, &Alone).unwrap().unwrap().step, 1);
}
