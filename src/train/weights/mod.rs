//! The weights of a rank: whole, or a share of each stage; and frozen weights that are stored
//! elsewhere.

mod prefetch;
mod slots;
mod visiting;

pub(super) use slots::{Pass, slot_elements};
pub use slots::{SlotTensors, WeightSlots};
pub use visiting::{StoredWeight, VisitingMemory, VisitingWeights, WeightStorage, visiting_memory};

use super::ranks::Ranks;
use crate::dist::{Collective, DistError, Gather};
use candle_core::Tensor;
use std::sync::Arc;

pub enum RankWeights {
    /// This rank updates all of them.
    Whole,
    /// This rank updates its share of these flat tensors, and receives the other shares.
    Gathered(Vec<Tensor>, Arc<dyn Collective>),
    /// This rank has its share only. The weights of a stage are gathered when they are used.
    Slots(Arc<WeightSlots>),
}

impl RankWeights {
    /// Whether this rank has all weights between the passes.
    pub fn are_whole(&self) -> bool {
        !matches!(self, Self::Slots(_))
    }

    /// Makes an update by all ranks visible.
    pub(super) fn updated(&self) -> Result<(), DistError> {
        match self {
            Self::Gathered(flat, collective) => {
                for all in flat {
                    collective.start_gather(Gather { own: None, all: all.clone() })?;
                }
                collective.wait()
            }
            Self::Slots(slots) => {
                slots.forget();
                Ok(())
            }
            Self::Whole => Ok(()),
        }
    }

    /// Starts a pass over the model. All ranks make the same passes.
    pub(super) fn begin(&self, pass: Pass) {
        if let Self::Slots(slots) = self {
            slots.begin(pass);
        }
    }

    /// Begins a pass that computes no gradients, to be ended by [`Self::end`]. If each rank has a
    /// share of the weights only, all ranks make the same number of passes: a rank that `has_work`
    /// makes one, and the others take part in its gathers. Returns whether there is a pass.
    pub(super) fn begin_forward(&self, ranks: &Ranks, has_work: bool) -> Result<bool, DistError> {
        if self.are_whole() {
            return Ok(has_work);
        }
        let any = ranks.gather(has_work)?.contains(&true);
        if any {
            self.begin(Pass::Forward);
        }
        Ok(any)
    }

    /// Takes part in the passes of other ranks, until no rank has work.
    pub(super) fn help(&self, ranks: &Ranks) -> Result<(), DistError> {
        while self.begin_forward(ranks, false)? {
            self.end()?;
        }
        Ok(())
    }

    /// Reports that backward has finished a stage.
    pub(super) fn pass(&self, stage: usize) {
        if let Self::Slots(slots) = self {
            slots.pass(stage);
        }
    }

    /// Ends a pass, also if this rank has not read all weights. Returns its first error.
    pub(super) fn end(&self) -> Result<(), DistError> {
        match self {
            Self::Slots(slots) => slots.end(),
            _ => Ok(()),
        }
    }
}
