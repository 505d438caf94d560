//! Sums over ranks on the device of the tests: `scripts/cuda/gpu_test.sh` runs them on a GPU.

use super::harness::device;
use super::ranks;
use candle_core::{Device, Tensor};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;
use trainer::dist::{Collective as _, Group, Nccl, NcclOptions, threads};

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| (at * 7919 + rank * 104_729) as f32 % 1013.0 / 997.0 - 0.5).collect()
}

fn tensor(rank: usize, len: usize, device: &Device) -> Tensor {
    Tensor::from_vec(values(rank, len), len, device).unwrap()
}

#[test]
fn ranks_that_share_a_device_have_the_sums_of_the_tree() {
    let sum = |mut group: Group| {
        let device = device();
        let rank = group.rank.rank;
        let sums: Vec<Tensor> = [1, 1001, 300_000].map(|len| tensor(rank, len, &device)).into();
        group.sums.start_sum(sums.clone()).unwrap();
        group.sums.wait().unwrap();
        group.step.all_gather(Vec::new()).unwrap();
        sums.iter().map(|sum| sum.to_vec1().unwrap()).collect::<Vec<Vec<f32>>>()
    };
    let sums = thread::scope(|scope| {
        let sum = &sum;
        let groups = threads(4).unwrap().into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(move || sum(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    for sums in sums {
        for (sum, len) in sums.into_iter().zip([1, 1001, 300_000]) {
            let all: Vec<Vec<f32>> = (0..4).map(|rank| values(rank, len)).collect();
            let expected = |at: usize| (all[0][at] + all[1][at]) + (all[2][at] + all[3][at]);
            assert!(sum.into_iter().enumerate().all(|(at, sum)| sum == expected(at)), "{len}");
        }
    }
}

#[test]
fn ranks_that_share_a_device_train_the_same_weights_with_every_division() {
    let place = ranks::place();
    let settings = ["model.precision=bf16", "train.epochs=null", "train.max_steps=2"];
    let train = |name: &str, world: usize, shard: &str| {
        let shard = format!("distributed.shard={shard}");
        let settings = [&settings[..], &[shard.as_str()]].concat();
        ranks::train(&ranks::config(&place, name, &settings), world, None);
    };
    train("alone", 1, "none");
    for (world, shard) in
        [(2, "none"), (2, "optimizer"), (2, "gradients"), (2, "full"), (4, "full")]
    {
        let name = format!("{shard}-{world}");
        train(&name, world, shard);
        ranks::assert_same(&place, &name, "alone");
    }
}

/// NCCL refuses two ranks on one GPU, so this checks the library, the streams and the copies.
#[test]
fn nccl_with_one_rank_keeps_the_values_and_needs_a_gpu() {
    let device = device();
    for exact in [true, false] {
        let mut group = threads(1).unwrap().remove(0);
        let options = NcclOptions {
            shard_group: 1,
            library: PathBuf::from(Nccl::LIBRARY),
            exact,
            timeout: Duration::from_secs(90),
        };
        let nccl = Nccl::connect(group.rank, &mut *group.step, &device, &options);
        if device.is_cpu() {
            let error = nccl.err().unwrap().to_string();
            assert!(error.starts_with("creating a stream for NCCL failed: "), "{error}");
            continue;
        }
        let nccl = nccl.unwrap();
        for _ in 0..3 {
            // small ones, which are copied, and large ones
            let lens = [1, 1001, 300_000, 3 << 20, (1 << 24) + 5];
            let tensors: Vec<Tensor> = lens.map(|len| tensor(0, len, &device)).into();
            let doubled: Vec<Tensor> = tensors.iter().map(|t| (t + t).unwrap()).collect();
            nccl.start_sum(doubled.clone()).unwrap();
            nccl.wait().unwrap();
            for (tensor, doubled) in tensors.iter().zip(&doubled) {
                let halves = (doubled * 0.5).unwrap().to_vec1::<f32>().unwrap();
                assert!(halves == tensor.to_vec1::<f32>().unwrap(), "{:?}", tensor.dims());
            }
        }
        nccl.check().unwrap();
    }
}
