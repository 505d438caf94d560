//! Ranks: processes that train one run together (data parallel).
//!
//! Every rank has the whole model. Each computes the gradients of its own micro-batches of a step;
//! a [`Collective`] adds them up, and every rank makes the same update. A [`Channel`] exchanges
//! small messages, such as counts of targets and rejected rows. A [`Monitor`] ends the whole job if
//! one rank fails.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod collective;
mod config;
mod control;
mod heartbeat;
mod host_collective;
mod launcher;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod rank_state;
mod rendezvous;
mod selftest;
mod sequence;
mod tcp;
mod threads;
mod watchdog;

pub use collective::{
    Collective, Exchange, Gather, Reduce, Then, Ticket, into_op_error, rank_error,
};
pub use config::{Distributed, Exact, Processes, Shard, ShardGroup};
pub use control::{Connections, connect};
pub use host_collective::{HostCollective, Transport};
pub use launcher::{LaunchError, Launched};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
pub use nccl::{Nccl, NcclOptions};
pub use ranks::{Channel, DistError, Launcher, Rank, SequencePlace, gather};
pub use rendezvous::interface_name;
pub use selftest::{CaseResult, NUM_CASES, agree, selftest};
pub use sequence::SequenceExchange;
pub use threads::{slow_threads, threads, threads_in_groups};
pub use watchdog::Watchdog;

use candle_core::Device;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// What a rank needs to take part in a run.
pub struct Group {
    /// The place of this rank.
    pub rank: Rank,
    /// Exchanges the rows that the loaders of all ranks have read.
    pub data: Box<dyn Channel>,
    /// Exchanges counts, losses and stop requests of steps.
    pub step: Box<dyn Channel>,
    /// Number of ranks of a shard group. Shard group `n` has the ranks `n * shard_group ..`.
    pub shard_group: usize,
    /// Adds up gradients, and exchanges weights.
    pub sums: Arc<dyn Collective>,
    /// The device whose tensors `sums` adds up; `None` if it adds up those of any device.
    pub device: Option<Device>,
    /// Learns what this rank is doing, and about its errors.
    pub monitor: Arc<dyn Monitor>,
}

/// Watches a rank. If it stops making progress or fails, all ranks end.
pub trait Monitor: Send + Sync {
    /// Reports the current work, such as `step 12`. A rank that reports nothing for `timeout_s`
    /// counts as hung.
    fn report(&self, work: &str);

    /// Reports that this rank waits for other ranks in `work`, such as `step 12: sums`. It does not
    /// count as hung while another rank makes progress. Ends with the next report.
    fn wait(&self, work: &str) {
        self.report(work);
    }

    /// When `stop` is set, because this rank has received a signal, the request reaches the other
    /// ranks within a few seconds.
    fn pass_on(&self, _stop: Arc<AtomicBool>) {}

    /// Whether a request to stop has reached this rank. It reaches ranks at different times.
    fn is_stop_requested(&self) -> bool {
        false
    }

    /// Reports an error that ends this rank, so that the other ranks end with its message.
    fn fail(&self, message: &str);

    /// Reports that this rank ends normally. Returns when all ranks have reported this.
    fn finish(&self);
}

/// Ignores all reports: for ranks in one process.
impl Monitor for () {
    fn report(&self, _: &str) {}
    fn fail(&self, _: &str) {}
    fn finish(&self) {}
}

/// Calls `f`, whose work may take longer than `timeout_s`, such as writing a checkpoint to a slow
/// disk. Until it returns, this rank does not count as hung; it still counts as lost if its process
/// is stopped or ends.
pub fn during<T>(monitor: &dyn Monitor, work: &str, f: impl FnOnce() -> T) -> T {
    const INTERVAL: Duration = Duration::from_millis(500);
    thread::scope(|scope| {
        let (done, ended) = channel::<()>();
        scope.spawn(move || {
            monitor.report(work);
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                monitor.report(work);
            }
        });
        let result = f();
        drop(done);
        result
    })
}

/// Ends the other ranks because of an error of this one, with the messages of its causes. `lost` is
/// the error of the connections that caused it, if any: the monitors know these errors.
pub fn fail(monitor: &dyn Monitor, error: &(dyn Error + 'static), lost: Option<&DistError>) {
    if lost.is_some_and(|lost| !matches!(lost, DistError::Message { .. })) {
        return;
    }
    let causes = std::iter::successors(Some(error), |error| {
        let error = *error;
        error.source()
    });
    let mut messages: Vec<String> = causes.map(ToString::to_string).collect();
    messages.dedup();
    monitor.fail(&messages.join(": "));
}
