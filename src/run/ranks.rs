//! The ranks of a run while it is assembled: rank 0 creates and moves files, and the others wait.

use super::device::DeviceError;
use super::error::RunError;
use super::resume::{Resume, find_checkpoint};
use crate::checkpoint::{Checkpointer, Found};
use crate::config::RunConfig;
use crate::data::LoaderShare;
use crate::dist::{DistError, Group, Rank, during, gather};
use crate::train::{DeviceChoice, Ranks};
use candle_core::Device;
use std::path::PathBuf;

/// The ranks of a run while it is assembled.
pub(super) struct SetupRanks {
    group: Option<Group>,
}

impl SetupRanks {
    /// `None`: a run in one process.
    pub(super) fn new(group: Option<Group>) -> Self {
        Self { group }
    }

    /// The place of this rank.
    pub(super) fn rank(&self) -> Rank {
        self.group.as_ref().map_or(Rank::ALONE, |group| group.rank)
    }

    /// Whether this process writes the files of the run.
    pub(super) fn is_first(&self) -> bool {
        self.rank().is_first()
    }

    /// The device that the sums over ranks need, or else that of `choice`.
    pub(super) fn device(&self, choice: DeviceChoice) -> Result<Device, DeviceError> {
        let of_group = self.group.as_ref().and_then(|group| group.device.clone());
        of_group.map_or_else(|| choice.open_for(self.rank()), Ok)
    }

    /// Waits until all ranks have come to this point.
    pub(super) fn wait_for_all(&mut self) -> Result<(), DistError> {
        match &mut self.group {
            Some(group) => gather(&mut *group.step, &()).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Calls `f`, which may take long.
    pub(super) fn during<T>(&self, work: &str, f: impl FnOnce() -> T) -> T {
        match &self.group {
            Some(group) => during(&*group.monitor, work, f),
            None => f(),
        }
    }

    /// Calls `f`, which may take long, on rank 0, and then on the other ranks, which find the files that rank 0 wrote.
    pub(super) fn first_then_others<T>(
        &mut self,
        work: &str,
        f: impl FnOnce() -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        if !self.is_first() {
            self.wait_for_all()?;
        }
        let result = self.during(work, f)?;
        if self.is_first() {
            self.wait_for_all()?;
        }
        Ok(result)
    }

    /// Checks that `value`, a digest of `what`, is the same on all ranks.
    pub(super) fn compare(&mut self, what: &str, value: &str) -> Result<(), RunError> {
        let Some(group) = &mut self.group else { return Ok(()) };
        let all = gather(&mut *group.step, &value.to_owned())?;
        match all.iter().position(|of_rank| *of_rank != all[0]) {
            None => Ok(()),
            Some(rank) => {
                let problem = format!("its {what} differs from that of rank 0");
                Err(DistError::Message { rank, problem }.into())
            }
        }
    }

    /// The checkpoint that all ranks resume from, which rank 0 finds.
    pub(super) fn find_checkpoint(
        &mut self,
        config: &RunConfig,
        resume: &Resume,
        checkpointer: &Checkpointer,
    ) -> Result<Option<Found>, RunError> {
        let mut found = None;
        if self.is_first() {
            found = self.during("looking for a checkpoint", || {
                checkpointer.recover()?;
                find_checkpoint(config, resume, checkpointer)
            })?;
        }
        let Some(group) = &mut self.group else { return Ok(found) };
        let own: Option<PathBuf> = found.as_ref().map(|found| found.dir.clone());
        let of_first = gather(&mut *group.step, &own)?.swap_remove(0);
        if group.rank.is_first() {
            return Ok(found);
        }
        let Some(folder) = of_first else { return Ok(None) };
        Ok(Some(self.during("reading the checkpoint", || Checkpointer::open(&folder))?))
    }

    /// The connections of the loader and of the training loop.
    pub(super) fn split(self) -> (Option<LoaderShare>, Option<Ranks>) {
        let Some(Group { rank, data, step, sums, monitor, .. }) = self.group else {
            return (None, None);
        };
        (Some(LoaderShare { rank, lane: data }), Some(Ranks::new(rank, step, sums, monitor)))
    }
}

/// Checks that the micro-batches of a step can be divided evenly among `world` ranks.
pub(crate) fn check_world(config: &RunConfig, world: usize) -> Result<(), RunError> {
    let slots = config.train.gradient_accumulation_steps.get();
    if slots.is_multiple_of(world) {
        return Ok(());
    }
    let fits = |world: &usize| slots.is_multiple_of(*world);
    let below = (1..world).rev().find(fits);
    let above = (world + 1..=slots).find(fits);
    Err(RunError::World { world, slots, below, above })
}
