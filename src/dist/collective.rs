//! Sums over ranks: the trait, and its implementation for tensors in host memory.

use super::{DistError, Rank};
use crate::ops;
use candle_core::{Device, Tensor};
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Adds up tensors over all ranks, in the background.
///
/// All ranks make the same calls with the same shapes in the same order.
pub trait Collective: Send + Sync {
    /// Starts to replace each of `tensors` (`f32`, contiguous) by its sum over all ranks, with the
    /// same bits on every rank. Returns at once; nothing may use the tensors before [`Self::wait`].
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<(), DistError>;

    /// Waits until all started sums are complete. On a GPU, later work on the tensors' device waits.
    fn wait(&self) -> Result<(), DistError>;
}

/// Sends and receives bytes between two ranks.
pub trait Transport: Send {
    /// Sends `send` to rank `to` and receives `receive` from rank `from`, both at the same time.
    /// Either may be empty.
    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
    ) -> Result<(), DistError>;
}

/// Maximum number of elements that are exchanged at a time; limits the memory for received parts.
const PART: usize = 1 << 22;

/// Sums tensors in host memory over a [`Transport`], on a thread of its own.
///
/// Each rank receives one share of every tensor from all ranks, adds the shares by the binary tree
/// that [`tree_sum`] describes, and sends the result to all. So the sum of `2^n` ranks that each
/// hold the sum of an aligned part of a larger tree has the bits of that tree.
pub struct HostCollective {
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    error: std::sync::Arc<Mutex<Option<DistError>>>,
}

enum Job {
    Sum(Vec<Tensor>),
    /// Answers when all earlier jobs are done.
    Answer(SyncSender<()>),
}

impl HostCollective {
    /// Starts the thread.
    pub fn start(rank: Rank, transport: Box<dyn Transport>) -> Result<Self, DistError> {
        let (jobs, received) = sync_channel(1024);
        let error = std::sync::Arc::new(Mutex::new(None));
        let shared = std::sync::Arc::clone(&error);
        let work = move || sum_jobs(&received, &mut Sums { rank, transport }, &shared);
        let thread = thread::Builder::new().name("rank-sums".to_owned()).spawn(work);
        let failed = |error: std::io::Error| DistError::Collective {
            operation: "starting a thread",
            problem: error.to_string(),
        };
        Ok(Self { jobs: Some(jobs), thread: Some(thread.map_err(failed)?), error })
    }

    fn send(&self, job: Job) -> Result<(), DistError> {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent { Ok(()) } else { Err(self.ended()) }
    }

    fn ended(&self) -> DistError {
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        error.unwrap_or(DistError::Closed)
    }
}

impl Collective for HostCollective {
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<(), DistError> {
        self.send(Job::Sum(tensors))
    }

    fn wait(&self) -> Result<(), DistError> {
        let (answer, answered) = sync_channel(1);
        self.send(Job::Answer(answer))?;
        answered.recv().map_err(|_| self.ended())
    }
}

impl Drop for HostCollective {
    fn drop(&mut self) {
        self.jobs = None; // ends the thread
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn sum_jobs(jobs: &Receiver<Job>, sums: &mut Sums, error: &Mutex<Option<DistError>>) {
    for job in jobs {
        let tensors = match job {
            Job::Sum(tensors) => tensors,
            Job::Answer(answer) => {
                let _ = answer.send(()); // fails if the waiting rank has ended
                continue;
            }
        };
        if let Err(problem) = sums.sum_all(&tensors) {
            *error.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
            return;
        }
    }
}

struct Sums {
    rank: Rank,
    transport: Box<dyn Transport>,
}

impl Sums {
    fn sum_all(&mut self, tensors: &[Tensor]) -> Result<(), DistError> {
        let failed = |error: candle_core::Error| DistError::Collective {
            operation: "a sum over ranks",
            problem: error.to_string(),
        };
        for tensor in tensors {
            if tensor.device().is_cpu() {
                self.sum_on_host(tensor).map_err(failed)??;
                continue;
            }
            // through the host, so that several ranks can share a GPU
            let host = tensor.to_device(&Device::Cpu).map_err(failed)?;
            self.sum_on_host(&host).map_err(failed)??;
            let put_back = || {
                let summed = host.to_device(tensor.device())?.flatten_all()?;
                tensor.flatten_all()?.slice_set(&summed, 0, 0)
            };
            put_back().map_err(failed)?;
        }
        Ok(())
    }

    fn sum_on_host(&mut self, tensor: &Tensor) -> candle_core::Result<Result<(), DistError>> {
        let mut result = Ok(());
        ops::change_f32(tensor, |values| {
            result = values.chunks_mut(PART).try_for_each(|part| self.sum(part));
        })?;
        Ok(result)
    }

    fn sum(&mut self, values: &mut [f32]) -> Result<(), DistError> {
        let Rank { rank, world, .. } = self.rank;
        let len = values.len();
        let share = |of: usize| len * of / world..len * (of + 1) / world;
        // Rank `rank` adds up its share: it receives that share from all others.
        let own = share(rank);
        let mut shares: Vec<Vec<f32>> = vec![Vec::new(); world];
        shares[rank] = values[own.clone()].to_vec();
        for distance in 1..world {
            let (to, from) = ((rank + distance) % world, (rank + world - distance) % world);
            let mut received = vec![0f32; own.len()];
            let send = bytes(&values[share(to)]);
            self.transport.exchange(to, send, from, bytes_mut(&mut received))?;
            shares[from] = received;
        }
        tree_sum(&mut shares, 0..world);
        values[own.clone()].copy_from_slice(&shares[0]);
        let summed = std::mem::take(&mut shares[0]);
        for distance in 1..world {
            let (to, from) = ((rank + distance) % world, (rank + world - distance) % world);
            let receive = bytes_mut(&mut values[share(from)]);
            self.transport.exchange(to, bytes(&summed), from, receive)?;
        }
        Ok(())
    }
}

/// Adds up `parts[range]` into the first of them: the sum of the first half plus the sum of the
/// second half, each computed in the same way.
fn tree_sum(parts: &mut [Vec<f32>], range: Range<usize>) {
    if range.len() < 2 {
        return;
    }
    let middle = range.start + range.len() / 2;
    tree_sum(parts, range.start..middle);
    tree_sum(parts, middle..range.end);
    let (left, right) = parts.split_at_mut(middle);
    for (sum, value) in left[range.start].iter_mut().zip(&right[0]) {
        *sum += *value;
    }
}

fn bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}
