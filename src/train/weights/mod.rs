//! The weights of a rank: whole, or a share of each stage; and frozen weights that are stored
//! elsewhere.

mod slots;
mod visiting;

pub(super) use slots::{Pass, slot_elements};
pub use slots::{SlotTensors, WeightSlots};
pub use visiting::{StoredWeight, VisitingMemory, VisitingWeights, WeightStorage, visiting_memory};

use crate::dist::{Collective, DistError, Gather};
use candle_core::Tensor;
use std::sync::Arc;

/// The weights of a rank.
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
