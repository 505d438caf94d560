//! The collective for tensors in host memory. It sums by a binary tree over
//! the ranks.

use super::collective::{Collective, Exchange, Gather, Reduce, Then, Ticket};
use super::{DistError, Rank};
use candle_core::Tensor;
use kernels::Progress;
use ranks::own_part;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Exchanges tensors in host memory over a [`Transport`], on a thread of its own.
///
/// The ranks are added by a binary tree: the sum of the first half of them plus the sum of the
/// second half, each computed in the same way. So the sum of `2^n` ranks that each hold the sum of
/// an aligned part of a larger tree has the bits of that tree.
pub struct HostCollective {
    /// The thread ends when this is dropped. No thread waits for its end: it may be waiting for a
    /// rank that is lost.
    jobs: Mutex<(u64, SyncSender<Job>)>, // with the number of jobs so far
    progress: Arc<Progress<DistError>>,
}

enum Job {
    Sum(Vec<Tensor>),
    Reduce(Reduce),
    Gather(Gather),
    Exchange(Exchange),
    Finish,
}

fn not_started(error: impl std::error::Error) -> DistError {
    DistError::Collective { operation: "starting a thread", problem: error.to_string() }
}

/// Makes parallel ops of this thread run on this thread. The workers of the usual pool may all wait
/// for the result of this one.
fn own_pool() -> Result<rayon::ThreadPool, DistError> {
    rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().map_err(not_started)
}

impl HostCollective {
    /// Starts the thread. It calls `connect` first and returns its error. `shard_group` is the
    /// number of ranks of a shard group, which divides the number of ranks.
    pub fn start<F>(rank: Rank, shard_group: usize, connect: F) -> Result<Self, DistError>
    where
        F: FnOnce() -> Result<Box<dyn Transport>, DistError> + Send + 'static,
    {
        let (jobs, received) = sync_channel(1024);
        let (answer, connected) = sync_channel(1);
        let progress = Arc::new(Progress::default());
        let shared = Arc::clone(&progress);
        let work = move || match own_pool().and_then(|pool| Ok((pool, connect()?))) {
            Ok((_pool, transport)) => {
                let _ = answer.send(Ok(())); // fails only if `start` has ended
                let mut sums = TreeSum::new(rank, shard_group, transport);
                let _end = shared.fail_at_end(DistError::Closed);
                if let Err(error) = run(&received, &mut sums, &shared) {
                    shared.fail(error);
                }
            }
            Err(error) => drop(answer.send(Err(error))),
        };
        let thread = thread::Builder::new().name("rank-sums".to_owned()).spawn(work);
        thread.map_err(not_started)?;
        connected.recv().unwrap_or(Err(DistError::Closed))?;
        Ok(Self { jobs: Mutex::new((0, jobs)), progress })
    }

    fn send(&self, job: Job) -> Result<Ticket, DistError> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.1.send(job).map_err(|_| self.progress.error().unwrap_or(DistError::Closed))?;
        jobs.0 += 1;
        Ok(Ticket(jobs.0))
    }
}

impl Collective for HostCollective {
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<Ticket, DistError> {
        self.send(Job::Sum(tensors))
    }

    fn start_reduce(&self, reduce: Reduce) -> Result<Ticket, DistError> {
        self.send(Job::Reduce(reduce))
    }

    fn start_gather(&self, gather: Gather) -> Result<Ticket, DistError> {
        self.send(Job::Gather(gather))
    }

    fn start_exchange(&self, exchange: Exchange) -> Result<Ticket, DistError> {
        self.send(Job::Exchange(exchange))
    }

    fn error(&self) -> Option<DistError> {
        self.progress.error()
    }

    fn wait_for(&self, Ticket(ticket): Ticket) -> Result<(), DistError> {
        self.progress.wait_for(ticket)
    }

    fn wait(&self) -> Result<(), DistError> {
        let last = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).0;
        self.wait_for(Ticket(last))
    }

    fn finish(&self) -> Result<(), DistError> {
        self.send(Job::Finish).and_then(|ticket| self.wait_for(ticket))
    }
}

fn run(
    jobs: &Receiver<Job>,
    sums: &mut TreeSum,
    progress: &Progress<DistError>,
) -> Result<(), DistError> {
    for job in jobs {
        match job {
            Job::Sum(tensors) => {
                tensors.iter().try_for_each(|tensor| on_host(tensor, |host| sum(sums, host)))?;
            }
            Job::Reduce(Reduce { values, then }) => {
                on_host(&values, |host| reduce(sums, host))?;
                let share = sums.own_share(values.elem_count());
                finish_reduce(&values, share, &then).map_err(failed("a sum over ranks"))?;
            }
            Job::Gather(Gather { own, all }) => {
                on_host(&all, |host| gather(sums, own.as_ref(), host))?;
            }
            Job::Exchange(parts) => exchange(sums, &parts)?,
            Job::Finish => sums.finish()?,
        }
        progress.job_done();
    }
    Ok(())
}

fn failed(operation: &'static str) -> impl Fn(candle_core::Error) -> DistError {
    move |error| DistError::Collective { operation, problem: error.to_string() }
}

/// Calls `f` with `tensor`, or with a copy in host memory that is copied back: so several ranks can
/// share a GPU.
fn on_host(
    tensor: &Tensor,
    f: impl FnOnce(&Tensor) -> candle_core::Result<Result<(), DistError>>,
) -> Result<(), DistError> {
    let failed = failed("an exchange between ranks");
    if tensor.device().is_cpu() {
        return f(tensor).map_err(failed)?;
    }
    let host = kernels::copy_to_host(tensor).map_err(&failed)?;
    f(&host).map_err(&failed)??;
    let put_back = || {
        let changed = host.to_device(tensor.device())?.flatten_all()?;
        tensor.flatten_all()?.slice_set(&changed, 0, 0)
    };
    put_back().map_err(failed)
}

/// The tensor, or a copy of it if it is on a GPU.
fn in_host_memory(tensor: &Tensor) -> candle_core::Result<Tensor> {
    if tensor.device().is_cpu() { Ok(tensor.clone()) } else { kernels::copy_to_host(tensor) }
}

type Done = candle_core::Result<Result<(), DistError>>;

fn sum(sums: &mut TreeSum, tensor: &Tensor) -> Done {
    kernels::change_f32(tensor, |values| sums.sum(values))
}

fn reduce(sums: &mut TreeSum, tensor: &Tensor) -> Done {
    kernels::change_f32(tensor, |values| sums.reduce(values))
}

fn gather(sums: &mut TreeSum, own: Option<&Tensor>, all: &Tensor) -> Done {
    let Some(own) = own else {
        return kernels::change_bytes(all, |all| sums.gather(None, all));
    };
    let own = in_host_memory(own)?;
    kernels::with_bytes(&own, |own| kernels::change_bytes(all, |all| sums.gather(Some(own), all)))?
}

/// Sends the tensors of `exchange`, and receives those of the other ranks of the sequence group.
fn exchange(sums: &mut TreeSum, Exchange { send, receive }: &Exchange) -> Result<(), DistError> {
    let group = send.len();
    for (to, from) in sums.partners_in_group(group) {
        let sent = in_host_memory(&send[to]).map_err(failed("an exchange between ranks"))?;
        on_host(&receive[from], |received| {
            kernels::with_bytes(&sent, |sent| {
                kernels::change_bytes(received, |received| {
                    sums.exchange(group, (to, sent), (from, received))
                })
            })?
        })?;
    }
    Ok(())
}

/// Uses the share `share` of `values`, which is summed.
fn finish_reduce(
    values: &Tensor,
    share: std::ops::Range<usize>,
    then: &Then,
) -> candle_core::Result<()> {
    let mut sum = values.flatten_all()?.narrow(0, share.start, share.len())?;
    match then {
        Then::Keep => Ok(()),
        Then::CopyTo(copy) => copy.slice_set(&sum, 0, 0),
        Then::AddTo(sums) => {
            for earlier in sums {
                kernels::add_in_place(earlier, &sum)?;
                sum = earlier.clone();
            }
            Ok(())
        }
    }
}

/// Sends and receives bytes between two ranks.
pub trait Transport {
    /// Sends `send` to rank `to` and receives `receive` from rank `from`, both at the same time.
    /// Either may be empty; the other rank then passes an empty slice too.
    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
    ) -> Result<(), DistError>;

    /// Ends the connections. All ranks call this at the end of a run that succeeds.
    fn finish(&mut self) -> Result<(), DistError> {
        Ok(())
    }
}

/// Maximum number of elements that are summed at a time. Larger parts leave the processor's cache
/// between their exchange and their addition; smaller parts are exchanged more often.
pub(super) const PART: usize = 1 << 19;

/// Ranks that exchange shares of a slice. Each of them sums one share.
struct Members {
    ranks: Vec<usize>,
    /// Index of this rank in `ranks`.
    own: usize,
}

impl Members {
    fn new(ranks: impl Iterator<Item = usize>, rank: usize) -> Self {
        let ranks: Vec<usize> = ranks.collect();
        let own = ranks.iter().position(|of| *of == rank);
        Self { ranks, own: own.expect("this rank is a member") }
    }

    fn len(&self) -> usize {
        self.ranks.len()
    }

    /// At each distance, a member sends to one member and receives from another.
    fn partners(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (own, len) = (self.own, self.len());
        (1..len).map(move |distance| ((own + distance) % len, (own + len - distance) % len))
    }
}

/// Sums slices over ranks.
///
/// Each rank receives one share of every part from all ranks, adds the shares by the tree that
/// [`tree_sum`] describes, and sends the result to all. So the sum of `2^n` ranks that each hold
/// the sum of an aligned part of a larger tree has the bits of that tree.
pub(super) struct TreeSum {
    all: Members,
    /// The ranks of the own shard group.
    group: Members,
    /// The ranks at the same place of all shard groups.
    across: Members,
    transport: Box<dyn Transport>,
    /// The shares of the other ranks.
    received: Vec<f32>,
}

impl TreeSum {
    /// `shard_group` divides the number of ranks.
    pub(super) fn new(rank: Rank, shard_group: usize, transport: Box<dyn Transport>) -> Self {
        let Rank { rank, world, .. } = rank;
        Self {
            all: Members::new(0..world, rank),
            group: Members::new(group_of(rank, shard_group), rank),
            across: Members::new((rank % shard_group..world).step_by(shard_group), rank),
            transport,
            received: Vec::new(),
        }
    }

    /// Replaces `values` by their sums over all ranks.
    pub(super) fn sum(&mut self, values: &mut [f32]) -> Result<(), DistError> {
        let Self { all, transport, received, .. } = self;
        values.chunks_mut(PART).try_for_each(|part| sum_part(all, transport, received, part))
    }

    /// Replaces the share of this rank by its sum over all ranks. The ranks of a shard group have
    /// shares of the same size. The other shares stay as they are.
    pub(super) fn reduce(&mut self, values: &mut [f32]) -> Result<(), DistError> {
        let Self { group, across, transport, received, .. } = self;
        let share = values.len() / group.len();
        let step = (PART / group.len()).max(1);
        for start in (0..share).step_by(step) {
            let end = share.min(start + step);
            let part = |of: usize| of * share + start..of * share + end;
            sum_shares(group, transport, received, values, part)?;
            if across.len() > 1 {
                sum_part(across, transport, received, &mut values[part(group.own)])?;
            }
        }
        Ok(())
    }

    /// Copies the share of each rank of the shard group to all of them. `own` is the share of this
    /// rank; `None`: it is in `all`.
    pub(super) fn gather(&mut self, own: Option<&[u8]>, all: &mut [u8]) -> Result<(), DistError> {
        let share = all.len() / self.group.len();
        let part = |of: usize| of * share..(of + 1) * share;
        if let Some(own) = own {
            all[part(self.group.own)].copy_from_slice(own);
        }
        gather_shares(&self.group, &mut self.transport, all, part)
    }

    /// The share of this rank in `len` elements, as [`Self::reduce`] and [`Self::gather`] divide
    /// them.
    fn own_share(&self, len: usize) -> Range<usize> {
        let share = len / self.group.len();
        self.group.own * share..(self.group.own + 1) * share
    }

    /// The places in a group of `group` neighbouring ranks that this rank sends to and receives
    /// from, one pair after the other.
    fn partners_in_group(&self, group: usize) -> Vec<(usize, usize)> {
        let members = Members::new(group_of(self.all.own, group), self.all.own);
        [(members.own, members.own)].into_iter().chain(members.partners()).collect()
    }

    /// Sends and receives within a group of `group` neighbouring ranks, with places in the group.
    pub(super) fn exchange(
        &mut self,
        group: usize,
        (to, send): (usize, &[u8]),
        (from, receive): (usize, &mut [u8]),
    ) -> Result<(), DistError> {
        let ranks = group_of(self.all.own, group);
        if ranks.start + to == self.all.own {
            receive.copy_from_slice(send);
            return Ok(());
        }
        self.transport.exchange(ranks.start + to, send, ranks.start + from, receive)
    }

    pub(super) fn finish(&mut self) -> Result<(), DistError> {
        self.transport.finish()
    }
}

/// The ranks of the group of `rank`, if `size` neighbouring ranks are a group.
fn group_of(rank: usize, size: usize) -> Range<usize> {
    let first = rank / size * size;
    first..first + size
}

fn sum_part(
    members: &Members,
    transport: &mut Box<dyn Transport>,
    received: &mut Vec<f32>,
    values: &mut [f32],
) -> Result<(), DistError> {
    let (len, parts) = (values.len(), members.len());
    let share = |of: usize| own_part(of, parts, len);
    sum_shares(members, transport, received, values, share)?;
    let bytes = |range: Range<usize>| 4 * range.start..4 * range.end;
    gather_shares(members, transport, bytemuck::cast_slice_mut(values), |of| bytes(share(of)))
}

/// Replaces the share of this rank by its sum over the members.
fn sum_shares(
    members: &Members,
    transport: &mut Box<dyn Transport>,
    received: &mut Vec<f32>,
    values: &mut [f32],
    share: impl Fn(usize) -> Range<usize>,
) -> Result<(), DistError> {
    let own = share(members.own);
    received.resize(own.len() * (members.len() - 1), 0.0);
    let mut shares: Vec<&mut [f32]> = members.ranks.iter().map(|_| &mut [][..]).collect();
    let mut free = &mut received[..];
    for (to, from) in members.partners() {
        let (receive, rest) = free.split_at_mut(own.len());
        free = rest;
        let send = bytemuck::cast_slice(&values[share(to)]);
        let (to, from_rank) = (members.ranks[to], members.ranks[from]);
        transport.exchange(to, send, from_rank, bytemuck::cast_slice_mut(receive))?;
        shares[from] = receive;
    }
    shares[members.own] = &mut values[own];
    tree_sum(&mut shares);
    if members.own > 0 {
        let (sum, others) = shares.split_at_mut(1);
        others[members.own - 1].copy_from_slice(sum[0]);
    }
    Ok(())
}

/// Sends the share of this rank to all members, and receives theirs.
fn gather_shares(
    members: &Members,
    transport: &mut Box<dyn Transport>,
    values: &mut [u8],
    share: impl Fn(usize) -> Range<usize>,
) -> Result<(), DistError> {
    for (to, from) in members.partners() {
        let (own, receive) = two(values, share(members.own), share(from));
        transport.exchange(members.ranks[to], own, members.ranks[from], receive)?;
    }
    Ok(())
}

/// Adds up `parts` into the first of them: the sum of the first half plus the sum of the second
/// half, each computed in the same way.
fn tree_sum(parts: &mut [&mut [f32]]) {
    if parts.len() < 2 {
        return;
    }
    let (left, right) = parts.split_at_mut(parts.len() / 2);
    tree_sum(left);
    tree_sum(right);
    for (sum, value) in left[0].iter_mut().zip(&*right[0]) {
        *sum += *value;
    }
}

/// Two disjoint ranges of `values`: the first to read, the second to write.
fn two(values: &mut [u8], read: Range<usize>, write: Range<usize>) -> (&[u8], &mut [u8]) {
    if read.end <= write.start {
        let (low, high) = values.split_at_mut(write.start);
        (&low[read], &mut high[..write.len()])
    } else {
        let (low, high) = values.split_at_mut(read.start);
        (&high[..read.len()], &mut low[write])
    }
}
