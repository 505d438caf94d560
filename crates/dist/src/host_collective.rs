//! The collective for tensors in host memory.

use super::collective::{Collective, Exchange, Gather, Reduce, Then, Ticket};
use super::tree::TreeSum;
use super::{DistError, Rank, Transport};
use candle_core::Tensor;
use kernels::Progress;
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
