//! Tests of shares and of waits by ticket with the stand-in for NCCL, on streams in host memory.

use super::super::super::{Collective, Exchange, Gather, Reduce, Then, Ticket};
use super::{Member, Setup, tree, values};
use candle_core::{DType, Device, Tensor};
use kernels::with_bytes;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Numbers of ranks, and of ranks of a shard group.
const WORLDS: [(usize, usize); 8] =
    [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (6, 2), (3, 1)];
/// Lengths of shares: less than a vector, odd, and of several steps.
const SHARES: [usize; 4] = [0, 1, 77, 2503];

fn setup(world: usize, shard_group: usize, exact: bool) -> Setup {
    let mut setup = Setup::new(world);
    (setup.options.shard_group, setup.options.exact) = (shard_group, exact);
    setup
}

/// The sums over all ranks: within each of `groups`, then over these.
fn sums(groups: Range<usize>, shard_group: usize, len: usize) -> Vec<f32> {
    if groups.len() == 1 {
        let first = groups.start * shard_group;
        return tree(first..first + shard_group, &[len]).remove(0);
    }
    let middle = groups.start + groups.len() / 2;
    let left = sums(groups.start..middle, shard_group, len);
    let right = sums(middle..groups.end, shard_group, len);
    left.iter().zip(right).map(|(left, right)| left + right).collect()
}

/// The share of this rank of the expected sums.
fn own_sums(member: &Member, shard_group: usize, share: usize) -> Vec<f32> {
    let all = sums(0..member.rank.world / shard_group, shard_group, share * shard_group);
    let place = member.rank.rank % shard_group;
    all[place * share..(place + 1) * share].to_vec()
}

/// The values of this rank in a call for shares of length `share`.
fn start(member: &Member, shard_group: usize, share: usize, then: Then) -> (Tensor, Ticket) {
    let own = values(member.rank.rank, &[share * shard_group]);
    let values = member.computed(&own).remove(0);
    let reduce = Reduce { values: values.clone(), then };
    (values, member.nccl.start_reduce(reduce).unwrap())
}

#[test]
fn each_rank_receives_its_share_of_the_sum_with_the_bits_of_the_tree() {
    for (world, shard_group) in WORLDS {
        setup(world, shard_group, true).on_members(|member| {
            for share in SHARES {
                let (values, ticket) = start(&member, shard_group, share, Then::Keep);
                member.nccl.wait_for(ticket).unwrap();
                let place = member.rank.rank % shard_group;
                let own = values.narrow(0, place * share, share).unwrap();
                let expected = own_sums(&member, shard_group, share);
                assert!(member.read(&[own])[0] == expected, "{world} / {shard_group}, {share}");
            }
            member.nccl.finish().unwrap();
        });
    }
}

#[test]
fn a_share_is_copied_or_added_to_other_sums() {
    let (world, shard_group, share) = (4, 2, 77);
    setup(world, shard_group, true).on_members(|member| {
        let targets = member.computed(&values(9, &[share, share, share]));
        let [copy, first, second] = [0, 1, 2].map(|at: usize| targets[at].clone());
        // kept: in host memory, nothing orders the end of a tensor after the work of a stream
        let _values = [Then::CopyTo(copy), Then::AddTo(vec![first, second])]
            .map(|then| start(&member, shard_group, share, then));
        member.nccl.wait().unwrap();
        let before = values(9, &[share, share, share]);
        let sums = own_sums(&member, shard_group, share);
        let add = |left: &[f32], right: &[f32]| -> Vec<f32> {
            left.iter().zip(right).map(|(left, right)| left + right).collect()
        };
        let first = add(&before[1], &sums);
        let second = add(&before[2], &first);
        assert!(member.read(&targets) == [sums, first, second]);
        member.nccl.finish().unwrap();
    });
}

#[test]
fn neighbouring_ranks_exchange_tensors_of_different_sizes() {
    for (world, size) in [(2, 2), (4, 2), (3, 3)] {
        setup(world, world, true).on_members(|member| {
            let rank = member.rank.rank;
            let (first, own) = (rank / size * size, rank % size);
            // A message from place `from` to place `to` has this length, and values of its own.
            let len = |from: usize, to: usize| 5 + 3 * from + to;
            let message =
                |from: usize, to: usize| values(10 * (first + from) + to, &[len(from, to)]);
            let send: Vec<Tensor> =
                (0..size).map(|to| member.computed(&message(own, to)).remove(0)).collect();
            let receive: Vec<Tensor> = (0..size)
                .map(|from| member.computed(&values(99, &[len(from, own)])).remove(0))
                .collect();
            let exchange = Exchange { send: send.clone(), receive: receive.clone() };
            let ticket = member.nccl.start_exchange(exchange).unwrap();
            member.nccl.wait_for(ticket).unwrap();
            let expected: Vec<Vec<f32>> =
                (0..size).map(|from| message(from, own).remove(0)).collect();
            assert!(member.read(&receive) == expected, "{world} ranks in groups of {size}");
            member.nccl.finish().unwrap();
        });
    }
}

#[test]
fn nccl_sums_the_shares_of_one_group_if_the_order_is_left_to_it() {
    for (world, shard_group, call) in [(3, 3, "reduce-scatter 77"), (3, 1, "all-reduce 77")] {
        let setup = setup(world, shard_group, false);
        setup.on_members(|member| {
            let (values, _) = start(&member, shard_group, 77, Then::Keep);
            member.nccl.wait().unwrap();
            let place = member.rank.rank % shard_group;
            let own = values.narrow(0, place * 77, 77).unwrap();
            let expected = own_sums(&member, shard_group, 77);
            let close = |(sum, expected): (&f32, &f32)| (sum - expected).abs() < 1e-5;
            assert!(member.read(&[own])[0].iter().zip(&expected).all(close));
            member.nccl.finish().unwrap();
        });
        let calls = setup.stand_in.log(0);
        assert!(calls.contains(&format!("{call}, stream 1")), "{calls:?}");
        assert!(!calls.iter().any(|call| call.starts_with("send")), "{calls:?}");
    }
}

#[test]
fn several_groups_sum_shares_in_the_order_of_the_tree_also_if_it_is_left_to_nccl() {
    setup(6, 3, false).on_members(|member| {
        let (values, _) = start(&member, 3, 2503, Then::Keep);
        member.nccl.wait().unwrap();
        let own = values.narrow(0, member.rank.rank % 3 * 2503, 2503).unwrap();
        assert!(member.read(&[own])[0] == own_sums(&member, 3, 2503));
        member.nccl.finish().unwrap();
    });
}

fn share_of(rank: usize, share: usize, dtype: DType) -> Tensor {
    let values: Vec<u32> = (0..share).map(|at| ((at * 7 + rank * 31) % 251) as u32).collect();
    Tensor::new(values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn the_ranks_of_a_group_receive_the_shares_of_all_in_every_dtype() {
    for (world, shard_group) in WORLDS {
        setup(world, shard_group, true).on_members(|member| {
            let (rank, place) = (member.rank.rank, member.rank.rank % shard_group);
            let cases = [DType::F32, DType::BF16, DType::U8]
                .map(|dtype| [1, 77, 2503].map(|of| (dtype, of)));
            for ((dtype, share), in_place) in
                cases.into_iter().flatten().flat_map(|case| [(case, false), (case, true)])
            {
                let own = share_of(rank, share, dtype);
                let all = Tensor::zeros(shard_group * share, dtype, &Device::Cpu).unwrap();
                if in_place {
                    all.slice_set(&own, 0, place * share).unwrap();
                }
                let given = (!in_place).then(|| own.clone()); // `own` is kept, as above
                let ticket =
                    member.nccl.start_gather(Gather { own: given, all: all.clone() }).unwrap();
                member.nccl.wait_for(ticket).unwrap();
                let shares: Vec<Tensor> = (rank - place..rank - place + shard_group)
                    .map(|rank| share_of(rank, share, dtype))
                    .collect();
                let expected = Tensor::cat(&shares, 0).unwrap();
                let (send, received) = channel();
                member.compute.add(move || {
                    send.send(with_bytes(&all, <[u8]>::to_vec).unwrap()).unwrap();
                });
                let expected = with_bytes(&expected, <[u8]>::to_vec).unwrap();
                assert!(received.recv().unwrap() == expected, "{world} / {shard_group}, {dtype:?}");
                drop(own);
            }
            member.nccl.finish().unwrap();
        });
    }
}

#[test]
fn a_wait_by_ticket_does_not_wait_for_later_operations() {
    let setup = setup(2, 2, true);
    let (send, read) = channel();
    let read = Mutex::new(read);
    setup.on_members(|member| {
        let (first, ticket) = start(&member, 2, 77, Then::Keep);
        if member.rank.rank == 1 {
            read.lock().unwrap().recv_timeout(Duration::from_secs(20)).unwrap();
        }
        let (second, later) = start(&member, 2, 200, Then::Keep);
        member.nccl.wait_for(ticket).unwrap();
        let place = member.rank.rank;
        let own = first.narrow(0, place * 77, 77).unwrap();
        assert!(member.read(&[own])[0] == own_sums(&member, 2, 77));
        send.send(()).unwrap();
        let (third, last) = start(&member, 2, 1, Then::Keep);
        member.nccl.wait_for(last).unwrap();
        member.nccl.wait_for(later).unwrap(); // covered already
        let own = [second.narrow(0, place * 200, 200), third.narrow(0, place, 1)];
        let sums = member.read(&own.map(Result::unwrap));
        assert!(sums == [own_sums(&member, 2, 200), own_sums(&member, 2, 1)]);
        member.nccl.finish().unwrap();
    });
    let marks = |line: &String| line.starts_with("record") || line.starts_with("compute waits");
    let marks: Vec<String> = setup.stand_in.log(0).into_iter().filter(marks).collect();
    let expected =
        ["record 0", "record 1", "compute waits for 0", "record 0", "compute waits for 0"];
    assert_eq!(marks, expected, "numbers are used again");
}

#[test]
fn shares_of_another_length_than_the_others_expect_are_refused() {
    setup(2, 2, true).on_members(|member| {
        let values = member.computed(&values(0, &[7])).remove(0);
        let reduce = Reduce { values, then: Then::Keep };
        let error = member.nccl.start_reduce(reduce).unwrap_err().to_string();
        let expected = format!(
            "a sum over ranks failed: rank {} of 2: found a tensor of length 7, expected 6",
            member.rank.rank
        );
        assert_eq!(error, expected);
    });
}
