//! The rank of a training loop, and its exchanges with the other ranks.

use super::error::TrainError;
use crate::dist::{Collective, DistError, Lane, Monitor, Rank, during, fail, gather};
use serde::{Serialize, de::DeserializeOwned};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The connections of a training loop to the other ranks.
pub struct Ranks {
    /// The place of this rank.
    pub rank: Rank,
    /// Adds up gradients.
    pub sums: Arc<dyn Collective>,
    monitor: Arc<dyn Monitor>,
    step: AtomicU64,
    lane: Mutex<Box<dyn Lane>>,
}

impl Ranks {
    /// `lane` is used by the training loop alone.
    pub fn new(
        rank: Rank,
        lane: Box<dyn Lane>,
        sums: Arc<dyn Collective>,
        monitor: Arc<dyn Monitor>,
    ) -> Self {
        Self { rank, sums, monitor, step: AtomicU64::new(0), lane: Mutex::new(lane) }
    }

    /// Reports the work of step `step` to the monitor.
    pub(super) fn begin_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        self.report("reading data");
    }

    /// Reports work of the current step to the monitor.
    pub(super) fn report(&self, work: &str) {
        self.monitor.report(&self.work(work));
    }

    /// Reports that this rank waits for the others.
    pub(super) fn wait(&self, work: &str) {
        self.monitor.wait(&self.work(work));
    }

    /// Ends the other ranks because of an error of this one.
    pub(super) fn fail(&self, error: &TrainError) {
        fail(&*self.monitor, error, error.lost());
    }

    /// Calls `f`, which writes files and may take long.
    pub(super) fn during<T>(&self, work: &str, f: impl FnOnce() -> T) -> T {
        during(&*self.monitor, &self.work(work), f)
    }

    fn work(&self, work: &str) -> String {
        format!("step {}: {work}", self.step.load(Ordering::Relaxed))
    }

    /// The values of all ranks, in their order. All ranks make the same calls.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, DistError> {
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        gather(&mut **lane, value)
    }

    /// Waits until all ranks have come to this point.
    pub fn wait_for_all(&self) -> Result<(), DistError> {
        self.gather(&()).map(|_| ())
    }
}

/// A float as its bits: JSON has no infinity, and its readers may round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
pub(super) struct Bits(u64);

impl From<f64> for Bits {
    fn from(value: f64) -> Self {
        Self(value.to_bits())
    }
}

impl From<Bits> for f64 {
    fn from(Bits(bits): Bits) -> Self {
        Self::from_bits(bits)
    }
}
