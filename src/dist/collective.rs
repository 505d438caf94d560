//! Sums over ranks: the trait, and its implementation for tensors in host memory.

use super::tree::TreeSum;
use super::{DistError, Rank, Transport};
use crate::ops;
use candle_core::{Device, Tensor};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Adds up tensors over all ranks, in the background.
///
/// All ranks make the same calls with the same shapes in the same order.
pub trait Collective: Send + Sync {
    /// Starts to replace each of `tensors` (`f32`, contiguous) by its sum over all ranks, with the
    /// same bits on every rank. Returns at once; nothing may use the tensors before [`Self::wait`].
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<(), DistError>;

    /// Waits until all started sums are complete. On a GPU, later work on the tensors' device waits.
    fn wait(&self) -> Result<(), DistError>;

    /// Ends the connections to the other ranks. Every rank calls this as its last call if the run
    /// succeeds. A rank that fails drops the collective instead, which waits for no other rank.
    fn finish(&self) -> Result<(), DistError> {
        self.wait()
    }
}

/// Sums tensors in host memory over a [`Transport`], on a thread of its own.
///
/// The ranks are added by a binary tree: the sum of the first half of them plus the sum of the
/// second half, each computed in the same way. So the sum of `2^n` ranks that each hold the sum of
/// an aligned part of a larger tree has the bits of that tree.
pub struct HostCollective {
    /// The thread ends when this is dropped. No thread waits for its end: it may be waiting for a
    /// rank that is lost.
    jobs: SyncSender<Job>,
    error: Arc<Mutex<Option<DistError>>>,
}

enum Job {
    Sum(Vec<Tensor>),
    /// Answers when all earlier jobs are done.
    Answer(SyncSender<()>),
    /// Ends the connections and answers.
    Finish(SyncSender<()>),
}

impl HostCollective {
    /// Starts the thread. It calls `connect` first and returns its error.
    pub fn start<F>(rank: Rank, connect: F) -> Result<Self, DistError>
    where
        F: FnOnce() -> Result<Box<dyn Transport>, DistError> + Send + 'static,
    {
        let (jobs, received) = sync_channel(1024);
        let (answer, connected) = sync_channel(1);
        let error = Arc::new(Mutex::new(None));
        let shared = Arc::clone(&error);
        let work = move || match connect() {
            Ok(transport) => {
                let _ = answer.send(Ok(())); // fails only if `start` has ended
                sum_jobs(&received, &mut TreeSum::new(rank, transport), &shared);
            }
            Err(error) => drop(answer.send(Err(error))),
        };
        let thread = thread::Builder::new().name("rank-sums".to_owned()).spawn(work);
        let failed = |error: std::io::Error| DistError::Collective {
            operation: "starting a thread",
            problem: error.to_string(),
        };
        thread.map_err(failed)?;
        connected.recv().unwrap_or(Err(DistError::Closed))?;
        Ok(Self { jobs, error })
    }

    fn send(&self, job: Job) -> Result<(), DistError> {
        self.jobs.send(job).map_err(|_| self.ended())
    }

    /// Sends a job and waits for its answer.
    fn answered(&self, job: fn(SyncSender<()>) -> Job) -> Result<(), DistError> {
        let (answer, answered) = sync_channel(1);
        self.send(job(answer))?;
        answered.recv().map_err(|_| self.ended())
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
        self.answered(Job::Answer)
    }

    fn finish(&self) -> Result<(), DistError> {
        self.answered(Job::Finish)
    }
}

fn sum_jobs(jobs: &Receiver<Job>, sums: &mut TreeSum, error: &Mutex<Option<DistError>>) {
    for job in jobs {
        let done = match job {
            Job::Sum(tensors) => sum_all(sums, &tensors),
            Job::Answer(answer) => {
                let _ = answer.send(()); // fails if the waiting rank has ended
                Ok(())
            }
            Job::Finish(answer) => sums.finish().map(|()| {
                let _ = answer.send(());
            }),
        };
        if let Err(problem) = done {
            *error.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
            return;
        }
    }
}

fn sum_all(sums: &mut TreeSum, tensors: &[Tensor]) -> Result<(), DistError> {
    let failed = |error: candle_core::Error| DistError::Collective {
        operation: "a sum over ranks",
        problem: error.to_string(),
    };
    for tensor in tensors {
        if tensor.device().is_cpu() {
            sum_on_host(sums, tensor).map_err(failed)??;
            continue;
        }
        // through the host, so that several ranks can share a GPU
        let host = tensor.to_device(&Device::Cpu).map_err(failed)?;
        sum_on_host(sums, &host).map_err(failed)??;
        let put_back = || {
            let summed = host.to_device(tensor.device())?.flatten_all()?;
            tensor.flatten_all()?.slice_set(&summed, 0, 0)
        };
        put_back().map_err(failed)?;
    }
    Ok(())
}

fn sum_on_host(sums: &mut TreeSum, tensor: &Tensor) -> candle_core::Result<Result<(), DistError>> {
    let mut result = Ok(());
    ops::change_f32(tensor, |values| result = sums.sum(values))?;
    Ok(result)
}
