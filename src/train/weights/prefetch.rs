//! Copies weights from host memory to slots, on a thread of its own.

use crate::ops::{HostCopies, Progress};
use candle_core::{Device, Error, Result, Tensor};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Threads that fill the page-locked buffers of copies to a GPU.
const THREADS: usize = 4;

/// Copies weights to slots while the weights of the other slot are in use. Copies are done in the
/// order in which they were started.
pub(super) struct Prefetch {
    copies: Arc<HostCopies>,
    progress: Arc<Progress<String>>,
    started: Mutex<(u64, Option<Sender<Job>>)>, // number of jobs so far; None: it ends
    thread: Option<JoinHandle<()>>,
}

/// Copies to a slot: each weight and its place.
struct Job {
    slot: usize,
    weights: Vec<(Tensor, Tensor)>,
}

impl Prefetch {
    /// For two slots on `device`.
    pub(super) fn new(device: &Device) -> Result<Self> {
        let (copies, progress) = (Arc::new(HostCopies::new(device, 2)?), Arc::default());
        let (jobs, received) = channel();
        let threads = if device.is_cpu() { 1 } else { THREADS };
        let work = {
            let (copies, progress) = (Arc::clone(&copies), Arc::clone(&progress));
            move || run(threads, received, &copies, &progress)
        };
        let thread = thread::Builder::new().name("weights".to_owned()).spawn(work)?;
        let started = Mutex::new((0, Some(jobs)));
        Ok(Self { copies, progress, started, thread: Some(thread) })
    }

    /// Starts to copy weights to places in `slot`, once the earlier work on tensors is done.
    /// Returns the number of the job.
    pub(super) fn start(&self, slot: usize, weights: Vec<(Tensor, Tensor)>) -> Result<u64> {
        self.copies.begin()?;
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(jobs) = &started.1 {
            let _ = jobs.send(Job { slot, weights }); // `wait` reports the error that ended the thread
        }
        started.0 += 1;
        Ok(started.0)
    }

    /// Makes later work on tensors wait for job `number`, the last one to `slot`.
    pub(super) fn wait(&self, number: u64, slot: usize) -> Result<()> {
        self.progress.wait_for(number).map_err(Error::msg)?;
        self.copies.tensors_wait_for(slot)
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).1 = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // The memory of the slots is freed after the copies to it.
        let _ = self.copies.tensors_wait();
    }
}

/// Copies until there are no more jobs. Parallel work of the copies runs on threads of their own:
/// all of the usual pool may wait for a copy.
fn run(threads: usize, jobs: Receiver<Job>, copies: &HostCopies, progress: &Progress<String>) {
    let ended = "the thread that copies weights to the device has ended";
    let _end = progress.fail_at_end(ended.to_owned());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(Error::wrap);
    let copy_all = || {
        for Job { slot, weights } in jobs {
            weights.iter().try_for_each(|(from, to)| copies.copy(from, to))?;
            copies.record(slot)?;
            progress.job_done();
        }
        Ok(())
    };
    if let Err(error) = pool.and_then(|pool| pool.install(copy_all)) {
        progress.fail(error.to_string());
    }
}
