//! Ranks as threads of one process, for tests.

use super::{Channel, DistError, Group, HostCollective, Rank, Transport};
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Creates the groups of `world` ranks that run as threads of this process, in one shard group.
pub fn threads(world: usize) -> Result<Vec<Group>, DistError> {
    threads_in_groups(world, world)
}

/// As [`threads`], in shard groups of `shard_group` ranks.
pub fn threads_in_groups(world: usize, shard_group: usize) -> Result<Vec<Group>, DistError> {
    slow_threads(world, shard_group, Duration::ZERO)
}

/// As [`threads_in_groups`]. Each exchange of tensors begins after `delay`: a rank that uses a
/// tensor without waiting for it reads wrong values.
pub fn slow_threads(
    world: usize,
    shard_group: usize,
    delay: Duration,
) -> Result<Vec<Group>, DistError> {
    let (data, step) = (Arc::new(Meeting::new(world)), Arc::new(Meeting::new(world)));
    let group = |(rank, transport): (usize, Channels)| {
        let rank = Rank { rank, world, local_rank: rank, local_world: world };
        let channel = |meeting: &Arc<Meeting>| {
            Box::new(ThreadChannel { rank: rank.rank, calls: 0, meeting: Arc::clone(meeting) })
        };
        let sums = HostCollective::start(rank, shard_group, move || Ok(Box::new(transport)))?;
        let (data, step) = (channel(&data), channel(&step));
        let (sums, monitor) = (Arc::new(sums), Arc::new(()));
        Ok(Group { rank, data, step, shard_group, sums, device: None, monitor })
    };
    channels(world, delay).into_iter().enumerate().map(group).collect()
}

/// The place where the ranks leave their messages.
struct Meeting {
    world: usize,
    state: Mutex<MeetingState>,
    changed: Condvar,
}

#[derive(Default)]
struct MeetingState {
    /// Messages by number of the call, and by rank.
    calls: BTreeMap<u64, Vec<Option<Vec<u8>>>>,
    /// Number of ranks that have read the messages of a call.
    readers: BTreeMap<u64, usize>,
    closed: Vec<usize>,
}

impl Meeting {
    fn new(world: usize) -> Self {
        Self { world, state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct ThreadChannel {
    rank: usize,
    calls: u64,
    meeting: Arc<Meeting>,
}

impl Channel for ThreadChannel {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError> {
        let Meeting { world, changed, .. } = &*self.meeting;
        let call = self.calls;
        self.calls += 1;
        let mut state = self.meeting.state();
        state.calls.entry(call).or_insert_with(|| vec![None; *world])[self.rank] = Some(message);
        changed.notify_all();
        loop {
            let messages: Option<Vec<Vec<u8>>> = state.calls[&call].iter().cloned().collect();
            if let Some(messages) = messages {
                let readers = state.readers.entry(call).or_default();
                *readers += 1;
                if *readers == *world {
                    state.readers.remove(&call);
                    state.calls.remove(&call);
                }
                return Ok(messages);
            }
            if state.closed.contains(&self.rank) {
                return Err(DistError::Closed);
            }
            let missing = |rank: &usize| state.calls[&call][*rank].is_none();
            if let Some(rank) = state.closed.iter().copied().find(missing) {
                return Err(DistError::Lost { rank, problem: "it has ended".to_owned() });
            }
            state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn closer(&self) -> Box<dyn Fn() + Send + Sync> {
        let (rank, meeting) = (self.rank, Arc::clone(&self.meeting));
        Box::new(move || close(rank, &meeting))
    }
}

impl Drop for ThreadChannel {
    fn drop(&mut self) {
        close(self.rank, &self.meeting);
    }
}

fn close(rank: usize, meeting: &Meeting) {
    meeting.state().closed.push(rank);
    meeting.changed.notify_all();
}

/// One channel to and from each rank.
struct Channels {
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
    delay: Duration,
}

fn channels(world: usize, delay: Duration) -> Vec<Channels> {
    let mut all: Vec<Channels> =
        (0..world).map(|_| Channels { to: Vec::new(), from: Vec::new(), delay }).collect();
    for sender in 0..world {
        for receiver in 0..world {
            let (to, from) = channel();
            all[sender].to.push(to);
            all[receiver].from.push(from);
        }
    }
    all
}

impl Transport for Channels {
    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
    ) -> Result<(), DistError> {
        let lost = |rank| DistError::Lost { rank, problem: "it has ended".to_owned() };
        if !self.delay.is_zero() {
            thread::sleep(self.delay);
        }
        self.to[to].send(send.to_vec()).map_err(|_| lost(to))?;
        let received = self.from[from].recv().map_err(|_| lost(from))?;
        if received.len() != receive.len() {
            let problem = format!("{} bytes, expected {}", received.len(), receive.len());
            return Err(DistError::Message { rank: from, problem });
        }
        receive.copy_from_slice(&received);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Reduce, Then};
    use candle_core::{DType, Device, Tensor};

    /// Calls `f` on a thread for each rank.
    fn on_ranks<T: Send>(world: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
        let groups = threads(world).unwrap();
        thread::scope(|scope| {
            let f = &f;
            let ranks: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn leaf(leaf: usize, index: usize) -> f32 {
        (((index * 2_654_435_761) ^ (leaf * 40_503)) % 10_007) as f32 / 7919.0 - 0.63
    }

    #[test]
    fn sums_have_the_bits_of_one_tree_for_every_number_of_ranks() {
        for len in [0, 1, 3, 1000, (1 << 22) + 5] {
            let expected: Vec<f32> =
                (0..len).map(|i| (leaf(0, i) + leaf(1, i)) + (leaf(2, i) + leaf(3, i))).collect();
            for world in [1, 2, 4] {
                let sums = on_ranks(world, |group| {
                    let own = group.rank.own_part(4);
                    let own: Vec<f32> = (0..len)
                        .map(|i| {
                            let leaves: Vec<f32> = own.clone().map(|k| leaf(k, i)).collect();
                            match leaves[..] {
                                [a] => a,
                                [a, b] => a + b,
                                [a, b, c, d] => (a + b) + (c + d),
                                _ => unreachable!("a rank has 1, 2 or 4 of 4 leaves"),
                            }
                        })
                        .collect();
                    let tensor = Tensor::from_vec(own, len, &Device::Cpu).unwrap();
                    group.sums.start_sum(vec![tensor.clone()]).unwrap();
                    group.sums.wait().unwrap();
                    tensor.to_vec1::<f32>().unwrap()
                });
                assert!(sums.iter().all(|sum| *sum == expected), "{len} elements, {world} ranks");
            }
        }
    }

    #[test]
    fn a_sum_is_complete_although_the_only_worker_of_the_pool_waits_for_it() {
        let sums = on_ranks(2, |group| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            pool.install(|| {
                let tensor = |len| Tensor::ones(len, DType::F32, &Device::Cpu).unwrap();
                let (values, sum) = (tensor(200_000), tensor(100_000));
                let reduce = Reduce { values, then: Then::AddTo(vec![sum.clone()]) };
                let ticket = group.sums.start_reduce(reduce).unwrap();
                group.sums.wait_for(ticket).unwrap();
                sum.to_vec1::<f32>().unwrap()
            })
        });
        assert_eq!(sums, vec![vec![3.0; 100_000]; 2]);
    }

    #[test]
    fn every_rank_receives_the_messages_of_all_in_their_order() {
        let messages = on_ranks(3, |mut group| {
            (0..50u8)
                .map(|call| group.step.all_gather(vec![group.rank.rank as u8, call]).unwrap())
                .collect::<Vec<_>>()
        });
        for of_rank in messages {
            for (call, messages) in (0u8..).zip(of_rank) {
                assert_eq!(messages, [vec![0, call], vec![1, call], vec![2, call]]);
            }
        }
    }

    #[test]
    fn a_rank_that_ends_is_named_and_a_closed_channel_returns_at_once() {
        let errors = on_ranks(2, |mut group| match group.rank.rank {
            0 => {
                let error = group.step.all_gather(Vec::new()).unwrap_err();
                let close = group.data.closer();
                let waiting = thread::spawn(move || group.data.all_gather(Vec::new()));
                close();
                let closed = waiting.join().unwrap().unwrap_err();
                Some((error, closed))
            }
            _ => None,
        });
        let (lost, closed) = errors[0].clone().unwrap();
        assert_eq!(lost.to_string(), "rank 1 was lost: it has ended");
        assert!(matches!(closed, DistError::Closed | DistError::Lost { rank: 1, .. }));
    }
}
