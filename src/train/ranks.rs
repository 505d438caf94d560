//! The rank of a training loop, and its exchanges with the other ranks.

use super::error::TrainError;
use crate::checkpoint::Together;
use crate::dist::{
    Channel, Collective, DistError, Monitor, Rank, SequenceExchange, SequencePlace, during, fail,
    gather,
};
use crate::ops::HeadExchange;
use serde::{Serialize, de::DeserializeOwned};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The place of a process among the ranks of a run, and its connections to the others. A process
/// that is alone exchanges values with itself.
pub struct Ranks {
    rank: Rank,
    shard_group: usize,
    sequence: usize,
    /// `None`: each rank has all tokens of its micro-batches.
    exchange: Option<SequenceExchange>,
    step: AtomicU64,
    others: Option<Others>,
    monitor: Option<Arc<dyn Monitor>>,
}

struct Others {
    channel: Mutex<Box<dyn Channel>>,
    sums: Arc<dyn Collective>,
}

impl Ranks {
    /// A run in a single process.
    pub fn alone() -> Self {
        Self {
            rank: Rank::ALONE,
            shard_group: 1,
            sequence: 1,
            exchange: None,
            step: AtomicU64::new(0),
            others: None,
            monitor: None,
        }
    }

    /// `channel` is used by nothing else.
    pub fn new(
        rank: Rank,
        channel: Box<dyn Channel>,
        shard_group: usize,
        sums: Arc<dyn Collective>,
        monitor: Arc<dyn Monitor>,
    ) -> Self {
        let others = Some(Others { channel: Mutex::new(channel), sums });
        let (step, monitor) = (AtomicU64::new(0), Some(monitor));
        Self { rank, shard_group, sequence: 1, exchange: None, step, others, monitor }
    }

    /// `monitor` receives the reports if it has no other receiver.
    #[must_use]
    pub fn watched_by(self, monitor: &Arc<dyn Monitor>) -> Self {
        let monitor = self.monitor.or_else(|| Some(Arc::clone(monitor)));
        Self { monitor, ..self }
    }

    /// `size` neighbouring ranks compute the same micro-batches, each a part of the tokens.
    #[must_use]
    pub fn in_sequence_groups(self, size: usize) -> Self {
        let place = self.rank.in_sequence(size);
        let collective = self.collective().filter(|_| size > 1);
        let exchange = collective.map(|collective| SequenceExchange::new(collective, place));
        Self { sequence: size, exchange, ..self }
    }

    /// The place of this rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The place of this rank in its sequence group.
    pub fn sequence(&self) -> SequencePlace {
        self.rank.in_sequence(self.sequence)
    }

    /// The exchange with the ranks that have the other tokens of a micro-batch, if there are any.
    pub(super) fn exchange(&self) -> Option<&dyn HeadExchange> {
        self.exchange.as_ref().map(|exchange| exchange as &dyn HeadExchange)
    }

    /// The place of the sequence group of this rank among those that share the micro-batches.
    pub fn sequence_group(&self) -> Rank {
        self.rank.sequence_group(self.sequence)
    }

    /// The place of this rank in its shard group, and the number of ranks of the group.
    pub fn shard(&self) -> (usize, usize) {
        (self.rank.rank % self.shard_group, self.shard_group)
    }

    /// The shard group of this rank, and the number of groups.
    pub fn group(&self) -> (usize, usize) {
        (self.rank.rank / self.shard_group, self.rank.world / self.shard_group)
    }

    /// Adds up gradients; `None` if there is no other rank.
    pub fn sums(&self) -> Option<&dyn Collective> {
        self.others.as_ref().map(|others| &*others.sums)
    }

    /// As [`Self::sums`], for another owner.
    pub fn collective(&self) -> Option<Arc<dyn Collective>> {
        self.others.as_ref().map(|others| Arc::clone(&others.sums))
    }

    /// The values of all ranks, in their order. All ranks make the same calls.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<Vec<T>, DistError> {
        let Some(others) = &self.others else { return Ok(vec![value]) };
        let mut channel = others.channel.lock().unwrap_or_else(PoisonError::into_inner);
        gather(&mut **channel, &value)
    }

    /// An op on a GPU that exchanges tensors fails without a reason if another rank was lost.
    pub(super) fn cause(&self, error: TrainError) -> TrainError {
        let lost = match &error {
            TrainError::Candle(_) => self.sums().and_then(Collective::error),
            _ => None,
        };
        lost.map_or(error, TrainError::Ranks)
    }

    pub fn wait_for_all(&self) -> Result<(), DistError> {
        self.gather(()).map(|_| ())
    }

    /// Reports to the monitor that step `step` begins.
    pub(super) fn begin_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        self.report("reading data");
    }

    pub(super) fn report(&self, work: &str) {
        if let Some(monitor) = &self.monitor {
            monitor.report(&self.work(work));
        }
    }

    /// When `stop` is set, the request reaches the other ranks.
    pub(super) fn pass_on(&self, stop: &Arc<AtomicBool>) {
        if let Some(monitor) = &self.monitor {
            monitor.pass_on(Arc::clone(stop));
        }
    }

    /// Whether a request to stop has reached this rank.
    pub(super) fn is_stop_requested(&self) -> bool {
        self.monitor.as_ref().is_some_and(|monitor| monitor.is_stop_requested())
    }

    pub(super) fn wait(&self, work: &str) {
        if let Some(monitor) = &self.monitor {
            monitor.wait(&self.work(work));
        }
    }

    /// Calls `f`, which reads or writes files and may take longer than `distributed.timeout_s`.
    pub fn during<T>(&self, work: &str, f: impl FnOnce() -> T) -> T {
        match &self.monitor {
            Some(monitor) => during(&**monitor, &self.work(work), f),
            None => f(),
        }
    }

    /// Ends the other ranks because of an error of this one.
    pub(super) fn fail(&self, error: &TrainError) {
        if let Some(monitor) = &self.monitor {
            fail(&**monitor, error, error.lost());
        }
    }

    fn work(&self, work: &str) -> String {
        match self.step.load(Ordering::Relaxed) {
            0 => work.to_owned(), // before training
            step => format!("step {step}: {work}"),
        }
    }
}

impl Together for Ranks {
    type Error = TrainError;

    fn rank(&self) -> usize {
        self.rank.rank
    }

    fn world(&self) -> usize {
        self.rank.world
    }

    fn gather<V: Serialize + DeserializeOwned>(&self, value: V) -> Result<Vec<V>, TrainError> {
        Ok(Self::gather(self, value)?)
    }

    fn failed(&self, rank: usize, message: String) -> TrainError {
        DistError::Failed { rank, message }.into()
    }
}
