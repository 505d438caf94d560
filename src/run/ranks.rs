//! The ranks of a run while it is assembled: rank 0 creates and moves files, and the others wait.

use super::device::DeviceError;
use super::error::RunError;
use super::resume::{Resume, find_checkpoint};
use crate::checkpoint::{Checkpointer, Found, Together};
use crate::config::RunConfig;
use crate::data::LoaderShare;
use crate::dist::{DistError, Group, Rank};
use crate::train::{DeviceChoice, Ranks};
use candle_core::Device;

/// The ranks of a run while it is assembled.
pub(super) struct SetupRanks {
    ranks: Ranks,
    share: Option<LoaderShare>,
    device: Option<Device>,
}

impl SetupRanks {
    /// `None`: a run in one process. `sequence` is the number of ranks of a sequence group.
    pub(super) fn new(group: Option<Group>, sequence: usize) -> Self {
        let Some(Group { rank, data, step, shard_group, sums, device, monitor }) = group else {
            return Self { ranks: Ranks::alone(), share: None, device: None };
        };
        let ranks = Ranks::new(rank, step, shard_group, sums, monitor).in_sequence_groups(sequence);
        let share = LoaderShare { group: ranks.sequence_group(), sequence, lane: data };
        Self { ranks, share: Some(share), device }
    }

    /// The connections of the training loop.
    pub(super) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The place of this rank.
    pub(super) fn rank(&self) -> Rank {
        self.ranks.rank()
    }

    /// The device that the sums over ranks need, or else that of `choice`.
    pub(super) fn device(&self, choice: DeviceChoice) -> Result<Device, DeviceError> {
        self.device.clone().map_or_else(|| choice.open_for(self.rank()), Ok)
    }

    /// Waits until all ranks have come to this point.
    pub(super) fn wait_for_all(&self) -> Result<(), DistError> {
        self.ranks.wait_for_all()
    }

    /// Calls `f`, which may take long.
    pub(super) fn during<T>(&self, work: &str, f: impl FnOnce() -> T) -> T {
        self.ranks.during(work, f)
    }

    /// Calls `f`, which may take long, on rank 0, and then on the other ranks, which find the files
    /// that rank 0 wrote.
    pub(super) fn first_then_others<T>(
        &self,
        work: &str,
        f: impl FnOnce() -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        let is_first = self.rank().is_first();
        if !is_first {
            self.wait_for_all()?;
        }
        let result = self.during(work, f)?;
        if is_first {
            self.wait_for_all()?;
        }
        Ok(result)
    }

    /// Checks that `digest` of `what` is the same on all ranks. A single process does not compute
    /// it.
    pub(super) fn compare(
        &self,
        what: &str,
        digest: impl FnOnce() -> candle_core::Result<String>,
    ) -> Result<(), RunError> {
        if self.rank().world == 1 {
            return Ok(());
        }
        let all = self.ranks.gather(digest()?)?;
        match all.iter().position(|of_rank| *of_rank != all[0]) {
            None => Ok(()),
            Some(rank) => {
                let problem = format!("its {what} differs from that of rank 0");
                Err(DistError::Message { rank, problem }.into())
            }
        }
    }

    /// The checkpoint that all ranks resume from. They check its files together.
    pub(super) fn find_checkpoint(
        &self,
        config: &RunConfig,
        resume: &Resume,
        checkpointer: &Checkpointer,
    ) -> Result<Option<Found>, RunError> {
        self.during("looking for a checkpoint", || {
            if self.rank().is_first() {
                checkpointer.recover()?;
            }
            find_checkpoint(config, resume, checkpointer, self)
        })
    }

    /// The connections of the loader and of the training loop.
    pub(super) fn split(self) -> (Option<LoaderShare>, Ranks) {
        (self.share, self.ranks)
    }
}

impl Together for SetupRanks {
    type Error = RunError;

    fn rank(&self) -> usize {
        self.rank().rank
    }

    fn world(&self) -> usize {
        self.rank().world
    }

    fn gather(&self, message: String) -> Result<Vec<String>, RunError> {
        Ok(self.ranks.gather(message)?)
    }

    fn failed(&self, rank: usize, message: String) -> RunError {
        DistError::Failed { rank, message }.into()
    }
}
