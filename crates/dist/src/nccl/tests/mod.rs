//! Tests of sums with the stand-in for NCCL, on streams in host memory.

mod host_streams;
mod shares;

use super::*;
use crate::{Group, threads};
use candle_core::DType;
use host_streams::{HostStream, HostStreams, StandIn};
use kernels::change_f32;
use std::ops::Range;
use std::sync::mpsc::channel;

/// Small, so that a few thousand elements are cut into several parts.
const SIZES: Sizes = Sizes { small: 100, buffer: 256, part: 1000 };
const LENS: [usize; 12] = [0, 1, 7, 99, 100, 101, 2500, 3, 64, 50, 90, 1000];

struct Setup {
    world: usize,
    local_world: usize,
    options: NcclOptions,
    stand_in: Arc<StandIn>,
}

/// One rank, connected.
struct Member {
    rank: Rank,
    nccl: Nccl,
    compute: Arc<HostStream>,
}

impl Setup {
    fn new(world: usize) -> Self {
        let stand_in = StandIn::compile();
        let timeout = Duration::from_secs(20);
        let library = stand_in.path().to_owned();
        let options = NcclOptions { library, shard_group: 1, exact: true, timeout };
        Self { world, local_world: world, options, stand_in }
    }

    /// Calls `f` on a thread for each rank.
    fn on_ranks<T: Send>(&self, f: impl Fn(Rank, &mut dyn Channel) -> T + Sync) -> Vec<T> {
        let (world, local_world) = (self.world, self.local_world);
        thread::scope(|scope| {
            let start = |mut group: Group| {
                let rank = group.rank.rank;
                let rank = Rank { rank, world, local_rank: rank % local_world, local_world };
                let f = &f;
                scope.spawn(move || f(rank, &mut *group.step))
            };
            let ranks: Vec<_> = threads(world).unwrap().into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn connect(&self, rank: Rank, channel: &mut dyn Channel) -> Result<Member, DistError> {
        let compute = Arc::new(HostStream::new(0));
        let streams = HostStreams {
            rank: rank.rank,
            compute: Arc::clone(&compute),
            communication: HostStream::new(1),
            stand_in: Arc::clone(&self.stand_in),
            marks: std::sync::Mutex::default(),
        };
        let library = Library::load(&self.options.library);
        let opened = library.map(|library| (Box::new(streams) as Box<dyn Streams>, library));
        let nccl = Nccl::join(rank, channel, &Device::Cpu, &self.options, SIZES, opened)?;
        Ok(Member { rank, nccl, compute })
    }

    /// Calls `f` on a thread for each rank, after all have connected.
    fn on_members<T: Send>(&self, f: impl Fn(Member) -> T + Sync) -> Vec<T> {
        self.on_ranks(|rank, channel| f(self.connect(rank, channel).unwrap()))
    }
}

impl Member {
    /// Returns tensors that the compute stream fills after a while. Until then they are NaN.
    fn computed(&self, values: &[Vec<f32>]) -> Vec<Tensor> {
        let empty = |values: &Vec<f32>| Tensor::full(f32::NAN, values.len(), &Device::Cpu).unwrap();
        let tensors: Vec<Tensor> = values.iter().map(empty).collect();
        let (filled, values) = (tensors.clone(), values.to_vec());
        self.compute.add(move || {
            thread::sleep(Duration::from_millis(5));
            for (tensor, values) in filled.iter().zip(values) {
                change_f32(tensor, |to| to.copy_from_slice(&values)).unwrap();
            }
        });
        tensors
    }

    /// The values of tensors when the compute stream reads them.
    fn read(&self, tensors: &[Tensor]) -> Vec<Vec<f32>> {
        let (send, values) = channel();
        let tensors = tensors.to_vec();
        self.compute.add(move || {
            let read = |tensor: &Tensor| tensor.to_vec1::<f32>().unwrap();
            send.send(tensors.iter().map(read).collect()).unwrap();
        });
        values.recv().unwrap()
    }

    fn sum(&self, values: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let tensors = self.computed(values);
        self.nccl.start_sum(tensors.clone()).unwrap();
        self.nccl.wait().unwrap();
        self.read(&tensors)
    }

    /// [`Self::sum`] as the last call.
    fn last_sum(&self, values: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let sums = self.sum(values);
        self.nccl.finish().unwrap();
        sums
    }
}

fn values(rank: usize, lens: &[usize]) -> Vec<Vec<f32>> {
    let value =
        |at: usize| (((at * 2_654_435_761) ^ (rank * 40_503)) % 10_007) as f32 / 7919.0 - 0.63;
    lens.iter().map(|len| (0..*len).map(|at| value(at + len)).collect()).collect()
}

fn tree(ranks: Range<usize>, lens: &[usize]) -> Vec<Vec<f32>> {
    if ranks.len() == 1 {
        return values(ranks.start, lens);
    }
    let middle = ranks.start + ranks.len() / 2;
    let (left, right) = (tree(ranks.start..middle, lens), tree(middle..ranks.end, lens));
    let add = |(left, right): (Vec<f32>, Vec<f32>)| {
        left.into_iter().zip(right).map(|(left, right)| left + right).collect()
    };
    left.into_iter().zip(right).map(add).collect()
}

#[test]
fn exact_sums_have_the_bits_of_the_tree_over_the_ranks() {
    for (world, local_world) in [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (6, 3)] {
        let setup = Setup { local_world, ..Setup::new(world) };
        let sums = setup.on_members(|member| {
            let own = values(member.rank.rank, &LENS);
            [member.sum(&own), member.sum(&own)]
        });
        let expected = tree(0..world, &LENS);
        for sums in sums.iter().flatten() {
            assert!(*sums == expected, "{world} ranks, {local_world} per node");
        }
    }
}

#[test]
fn a_large_tensor_is_summed_in_parts_with_the_bits_of_the_tree() {
    let lens = [300 * SIZES.part + 5];
    for world in [2, 4] {
        let sums =
            Setup::new(world).on_members(|member| member.sum(&values(member.rank.rank, &lens)));
        assert!(sums.iter().all(|sum| *sum == tree(0..world, &lens)), "{world} ranks");
    }
}

#[test]
fn sums_that_are_not_exact_are_left_to_nccl() {
    let mut setup = Setup::new(4);
    setup.options.exact = false;
    let sums = setup.on_members(|member| member.sum(&values(member.rank.rank, &LENS)));
    // the stand-in begins with the last rank
    let last: Vec<Vec<f32>> = (0..3).rev().fold(values(3, &LENS), |sums, rank| {
        let add = |(sum, value): (f32, f32)| sum + value;
        let all = sums.into_iter().zip(values(rank, &LENS));
        all.map(|(sum, value)| sum.into_iter().zip(value).map(add).collect()).collect()
    });
    assert!(sums.iter().all(|sum| *sum == last));
    assert!(sums[0] != tree(0..4, &LENS), "both orders give the same sums");
    let calls = setup.stand_in.log(0);
    let reductions: Vec<&String> =
        calls.iter().filter(|call| call.starts_with("all-reduce")).collect();
    // large tensors at once, and small ones in the buffer
    let expected = ["100", "101", "2500", "1000", "224", "90"];
    assert_eq!(reductions.len(), expected.len(), "{calls:?}");
    for len in expected {
        assert!(
            reductions.iter().any(|call| call.contains(&format!("all-reduce {len},"))),
            "{len}"
        );
    }
}

#[test]
fn nccl_uses_the_communication_stream_between_the_events_of_both_streams() {
    let setup = Setup::new(2);
    setup.on_members(|member| {
        member.last_sum(&values(member.rank.rank, &[128, 10]));
    });
    let large = [
        "send 64 to 1, stream 1",
        "recv 64 from 1, stream 1",
        "group of 2",
        "copy 64",
        "add 64",
        "copy 64",
        "send 64 to 1, stream 1",
        "recv 64 from 1, stream 1",
        "group of 2",
    ];
    // 10 elements are one share, that of rank 0
    let small = [
        "copy 10",
        "recv 10 from 1, stream 1",
        "group of 1",
        "copy 10",
        "add 10",
        "copy 10",
        "send 10 to 1, stream 1",
        "group of 1",
        "copy 10",
    ];
    let first = ["init 0 of 2", "communication waits for compute"];
    let last = ["record 0", "compute waits for communication", "finalize", "destroy"];
    assert_eq!(setup.stand_in.log(0), [&first[..], &large, &small, &last].concat());
}

#[test]
fn all_ranks_make_matching_calls_in_the_same_order() {
    for (world, local_world) in [(4, 4), (8, 2)] {
        let setup = Setup { local_world, ..Setup::new(world) };
        setup.on_members(|member| {
            member.sum(&values(member.rank.rank, &LENS));
        });
        let logs: Vec<Vec<String>> = (0..world).map(|rank| setup.stand_in.log(rank)).collect();
        let messages = |of: usize, call: &str, peer: usize| -> Vec<String> {
            let ending = format!("{peer}, stream 1");
            let matching = |line: &&String| line.starts_with(call) && line.ends_with(&ending);
            let len = |line: &String| line.split(' ').nth(1).unwrap().to_owned();
            logs[of].iter().filter(matching).map(len).collect()
        };
        for (from, to) in (0..world * world).map(|pair| (pair / world, pair % world)) {
            assert_eq!(messages(from, "send ", to), messages(to, "recv ", from), "{from} to {to}");
        }
        // With shares of the same size, only the numbers of the other ranks differ.
        let equal = Setup { local_world, ..Setup::new(world) };
        let each = 64 * world;
        equal.on_members(|member| {
            member.sum(&values(member.rank.rank, &[each, each]));
        });
        let calls = |rank: usize| -> Vec<String> {
            let without_peer = |line: String| match line.split_once(['t', 'f']) {
                Some((call, _)) if line.contains("stream 1") => call.to_owned(),
                _ => line.replace(&format!("init {rank}"), "init"),
            };
            equal.stand_in.log(rank).into_iter().map(without_peer).collect()
        };
        for rank in 1..world {
            assert_eq!(calls(rank), calls(0), "rank {rank}");
        }
    }
}

#[test]
fn a_failed_call_names_the_rank_and_the_operation_and_aborts() {
    for (call, operation) in [
        ("ncclSend", "a sum over ranks (ncclSend)"),
        ("ncclRecv", "a sum over ranks (ncclRecv)"),
        ("ncclGroupEnd", "ncclGroupEnd"),
    ] {
        let setup = Setup::new(2);
        let errors = setup.on_members(|member| {
            if member.rank.rank == 0 {
                return None;
            }
            setup.stand_in.fail(call, 1, 2);
            let tensors = member.computed(&values(1, &LENS));
            let first = member.nccl.start_sum(tensors).unwrap_err();
            assert_eq!(
                member.nccl.wait(),
                Err(first.clone()),
                "later calls return the first error"
            );
            Some(first.to_string())
        });
        let expected = format!(
            "{operation} failed: rank 1 of 2: unhandled system error: planned failure of {call}"
        );
        assert_eq!(errors[1], Some(expected));
        assert_eq!(setup.stand_in.log(1).last().unwrap(), "compute waits for communication");
        assert_eq!(setup.stand_in.log(1).iter().filter(|line| *line == "abort").count(), 1);
    }
}

#[test]
fn a_sum_that_fails_on_the_gpu_is_reported_by_the_next_call() {
    let setup = Setup::new(2);
    let errors = setup.on_members(|member| {
        let tensors = member.computed(&values(member.rank.rank, &LENS));
        if member.rank.rank == 1 {
            member.nccl.start_sum(tensors).unwrap();
            setup.stand_in.fail_async(1, 6);
            return Some(member.nccl.check().unwrap_err().to_string());
        }
        None
    });
    let expected = "an exchange between ranks (ncclCommGetAsyncError) failed: rank 1 of 2: remote process \
                    exited";
    assert_eq!(errors[1].as_deref(), Some(expected));
    assert_eq!(setup.stand_in.log(1).last().unwrap(), "abort");
}

/// The step finds the reason of an op that failed with it (`StepRunner::launch`).
#[test]
fn the_error_of_an_exchange_in_an_op_is_known_as_one_of_the_ranks() {
    let setup = Setup::new(2);
    setup.on_members(|member| {
        let rank = member.rank.rank;
        assert_eq!(member.nccl.error(), None);
        if rank == 0 {
            return;
        }
        setup.stand_in.fail("ncclSend", 1, 2);
        let [first, second] = [64, 64].map(|len| Tensor::zeros(len, DType::F32, &Device::Cpu));
        let (send, receive) = (first.unwrap(), second.unwrap());
        let exchange =
            Exchange { send: vec![send.clone(), send], receive: vec![receive.clone(), receive] };
        let failed = member.nccl.start_exchange(exchange).unwrap_err();
        assert!(failed.to_string().contains("rank 1 of 2"), "{failed}");
        assert_eq!(member.nccl.error(), Some(failed));
    });
    let setup = Setup::new(2);
    setup.on_members(|member| {
        if member.rank.rank == 1 {
            setup.stand_in.fail_async(1, 6);
            let error = member.nccl.error().unwrap().to_string();
            assert!(error.ends_with("remote process exited"), "{error}");
        }
    });
}

#[test]
fn a_rank_that_does_not_join_ends_the_wait_for_it() {
    let mut setup = Setup::new(2);
    setup.options.timeout = Duration::from_millis(30);
    let errors = setup.on_ranks(|rank, channel| {
        if rank.is_first() {
            return setup.connect(rank, channel).err();
        }
        let hello = NcclHello { place: [1, 2, 1, 2], version: Ok(22703), id: Vec::new() };
        gather(channel, &hello).unwrap();
        None
    });
    let error = errors[0].as_ref().unwrap().to_string();
    let expected = "ncclCommInitRankConfig failed: rank 0 of 2: not complete after 0.03 s: \
                    another rank ended or cannot be reached";
    assert!(error.starts_with(expected), "{error}");
    assert_eq!(setup.stand_in.log(0), ["init 0 of 2", "abort"]);
}

#[test]
fn an_abort_from_another_thread_ends_sums_that_wait_for_a_lost_rank() {
    let setup = Setup::new(2);
    setup.on_members(|member| {
        if member.rank.rank == 1 {
            return member.nccl.finish().unwrap();
        }
        let tensors = member.computed(&values(0, &LENS));
        member.nccl.start_sum(tensors.clone()).unwrap();
        assert!(!member.nccl.sums().are_complete().unwrap());
        thread::scope(|scope| {
            scope.spawn(|| member.nccl.abort());
        });
        assert_eq!(
            until_complete(&member.nccl.sums(), Duration::from_secs(20), || Ok(())),
            Ok(true)
        );
        assert_eq!(member.nccl.wait(), Err(DistError::Closed));
        assert_eq!(member.nccl.start_sum(tensors), Err(DistError::Closed));
    });
    assert_eq!(setup.stand_in.log(0).iter().filter(|line| *line == "abort").count(), 1);
    assert_eq!(setup.stand_in.log(1), ["init 1 of 2", "finalize", "destroy"]);
}

#[test]
fn a_rank_that_fails_ends_its_sums() {
    let setup = Setup::new(2);
    setup.on_members(|member| {
        if member.rank.rank == 0 {
            member.nccl.start_sum(member.computed(&values(0, &LENS))).unwrap();
        }
    });
    assert_eq!(setup.stand_in.log(0).last().unwrap(), "abort");
}

#[test]
fn a_rank_without_nccl_ends_the_attempt_of_all() {
    let setup = Setup::new(2);
    let without = Setup { options: setup.options.clone(), ..Setup::new(2) };
    let without = Setup {
        options: NcclOptions { library: "libnccl-is-missing.so.2".into(), ..without.options },
        ..without
    };
    let errors = setup.on_ranks(|rank, channel| {
        let setup = if rank.is_first() { &setup } else { &without };
        setup.connect(rank, channel).err().unwrap().to_string()
    });
    let missing = "cannot load NCCL from `libnccl-is-missing.so.2`: ";
    assert!(errors[1].starts_with(missing), "{}", errors[1]);
    assert_eq!(errors[0], format!("rank 1 failed: {}", errors[1]));
    assert_eq!(setup.stand_in.log(0), [""; 0]);
}

#[test]
fn a_library_without_one_of_the_functions_is_refused_with_its_name() {
    let stand_in = StandIn::compile_with(&["-DWITHOUT_SEND"]);
    let error = Library::load(stand_in.path()).err().unwrap().to_string();
    assert!(error.contains("ncclSend"), "{error}");
}

#[test]
fn ranks_with_different_versions_of_nccl_are_refused() {
    let hello = |rank, version| NcclHello { place: [rank, 2, rank, 2], version, id: vec![1; 128] };
    assert!(agree(&[hello(0, Ok(22703)), hello(1, Ok(22703))]).is_ok());
    let error = agree(&[hello(0, Ok(22703)), hello(1, Ok(23007))]).unwrap_err().to_string();
    assert!(error.contains("rank 0 has NCCL 22703, rank 1 has NCCL 23007"), "{error}");
}

#[test]
fn tensors_that_are_not_contiguous_f32_are_refused() {
    let setup = Setup::new(1);
    setup.on_members(|member| {
        let tensor = Tensor::zeros(4, DType::BF16, &Device::Cpu).unwrap();
        let error = member.nccl.start_sum(vec![tensor]).unwrap_err().to_string();
        assert!(error.starts_with("a sum over ranks failed: rank 0 of 1: found BF16"), "{error}");
    });
}
