//! Ranks: processes that train one run together (data parallel).
//!
//! Every rank has the whole model. Each computes the gradients of its own micro-batches of a step;
//! a [`Collective`] adds them up, and every rank makes the same update. A [`Lane`] exchanges small
//! messages, such as counts of targets and rejected rows. A [`Monitor`] ends the whole job if one
//! rank fails.

mod collective;
mod error;
mod lane;
mod nccl;
mod rank;
mod threads;

pub use collective::{Collective, HostCollective, Transport};
pub use error::DistError;
pub use lane::Lane;
pub(crate) use lane::gather;
pub use nccl::{Nccl, NcclOptions};
pub use rank::Rank;
pub use threads::threads;

use std::sync::Arc;

/// What a rank needs to take part in a run.
pub struct Group {
    /// The place of this rank.
    pub rank: Rank,
    /// Exchanges the rows that the loaders of all ranks have read.
    pub data: Box<dyn Lane>,
    /// Exchanges counts, losses and stop requests of steps.
    pub step: Box<dyn Lane>,
    /// Adds up gradients.
    pub sums: Arc<dyn Collective>,
    /// Learns what this rank is doing, and about its errors.
    pub monitor: Arc<dyn Monitor>,
}

/// Watches a rank. If it stops making progress or fails, all ranks end.
pub trait Monitor: Send + Sync {
    /// Reports the current work, such as `step 12`. A rank that reports nothing for `timeout_s`
    /// counts as hung.
    fn report(&self, work: &str);

    /// Reports an error that ends this rank, so that the other ranks end with its message.
    fn fail(&self, message: &str);

    /// Reports that this rank ends normally.
    fn finish(&self);
}

/// Ignores all reports: for ranks in one process.
impl Monitor for () {
    fn report(&self, _: &str) {}
    fn fail(&self, _: &str) {}
    fn finish(&self) {}
}
