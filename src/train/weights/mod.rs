//! The weights of a rank: whole, or a share of each stage; and frozen weights that are stored
//! elsewhere.

mod prefetch;
mod sharded;
mod stored;

use sharded::GatherPass;
pub(super) use sharded::{PassKind, slot_elements};
pub use sharded::{ShardTensors, ShardedWeights};
pub use stored::{StoredMemory, StoredWeight, StoredWeights, WeightStorage, stored_memory};

use super::error::TrainError;
use super::ranks::Ranks;
use crate::dist::{Collective, DistError, Gather};
use crate::ops::HeadExchange;
use crate::tape::{Param, Pass, Weights};
use candle_core::Tensor;
use std::sync::Arc;

/// The weights of a rank. The default are whole weights in memory.
#[derive(Default)]
pub struct RankWeights {
    pub division: WeightDivision,
    /// Frozen weights that are stored elsewhere.
    pub stored: Option<StoredWeights>,
}

/// How the ranks divide the weights that are not stored elsewhere.
#[derive(Default)]
pub enum WeightDivision {
    /// This rank updates all of them.
    #[default]
    Whole,
    /// This rank updates its share of these flat tensors, and receives the other shares.
    Gathered(Vec<Tensor>, Arc<dyn Collective>),
    /// This rank has its share only. The weights of a stage are gathered when they are used.
    Sharded(ShardedWeights),
}

impl RankWeights {
    /// Whether this rank has all weights between the passes.
    pub fn are_whole(&self) -> bool {
        !matches!(self.division, WeightDivision::Sharded(_))
    }

    /// Makes an update by all ranks visible.
    pub(super) fn updated(&self) -> Result<(), DistError> {
        match &self.division {
            WeightDivision::Gathered(flat, collective) => {
                for all in flat {
                    collective.start_gather(Gather { own: None, all: all.clone() })?;
                }
                collective.wait()
            }
            WeightDivision::Sharded(slots) => {
                slots.invalidate();
                Ok(())
            }
            WeightDivision::Whole => Ok(()),
        }
    }

    /// The weights for a pass over the model. All ranks make the same passes.
    pub(super) fn for_pass<'a>(&'a self, kind: PassKind, ranks: &'a Ranks) -> PassWeights<'a> {
        let gathers = match &self.division {
            WeightDivision::Sharded(slots) => Some(slots.pass(kind)),
            _ => None,
        };
        PassWeights { stored: self.stored.as_ref(), gathers, exchange: ranks.exchange() }
    }

    /// Whether there is a pass without gradients: this rank has work or, if each rank has a share of
    /// the weights only, any rank has, and the others take part in its gathers.
    pub(super) fn any_has_work(&self, ranks: &Ranks, has_work: bool) -> Result<bool, DistError> {
        if self.are_whole() {
            return Ok(has_work);
        }
        Ok(ranks.gather(has_work)?.contains(&true))
    }

    /// Calls `f` with a pass that computes no gradients, after [`Self::any_has_work`].
    pub(super) fn forward_pass<T>(
        &self,
        ranks: &Ranks,
        f: impl FnOnce(&Pass<'_>) -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        let weights = self.for_pass(PassKind::Forward, ranks);
        let result = f(&weights.pass()).map_err(|error| ranks.cause(error));
        if matches!(result, Err(TrainError::Ranks(_))) {
            return result;
        }
        let ended = weights.end(); // other ranks wait for the gathers of this pass
        let value = result?;
        ended?;
        Ok(value)
    }

    /// Calls `f` with a pass that computes no gradients. The other ranks make passes too, or
    /// [take part](Self::take_part).
    pub(super) fn inference<T>(
        &self,
        ranks: &Ranks,
        f: impl FnOnce(&Pass<'_>) -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        self.any_has_work(ranks, true)?;
        self.forward_pass(ranks, f)
    }

    /// Takes part in the passes of other ranks, until no rank has work.
    pub(super) fn take_part(&self, ranks: &Ranks) -> Result<(), TrainError> {
        while self.any_has_work(ranks, false)? {
            self.forward_pass(ranks, |_| Ok(()))?;
        }
        Ok(())
    }

    /// The weight of `param` for a checkpoint, read from where it is kept.
    pub fn saved(&self, param: &Param) -> candle_core::Result<Tensor> {
        let stored = self.stored.as_ref().map(|stored| stored.saved(param)).transpose()?;
        stored.flatten().map_or_else(|| param.tensor(), Ok)
    }
}

/// The weights of a rank during one pass over the model.
pub(super) struct PassWeights<'a> {
    stored: Option<&'a StoredWeights>,
    gathers: Option<GatherPass<'a>>,
    exchange: Option<&'a dyn HeadExchange>,
}

impl PassWeights<'_> {
    /// A pass with these weights, which trains nothing.
    pub(super) fn pass(&self) -> Pass<'_> {
        Pass { exchange: self.exchange, ..Pass::inference(self) }
    }

    /// Reports that backward has finished a stage.
    pub(super) fn stage_done(&self, stage: usize) -> Result<(), DistError> {
        self.gathers.as_ref().map_or(Ok(()), |gathers| gathers.stage_done(stage))
    }

    /// Ends the pass, also if this rank has not read all weights.
    pub(super) fn end(self) -> Result<(), DistError> {
        self.gathers.map_or(Ok(()), GatherPass::end)
    }
}

impl Weights for PassWeights<'_> {
    fn weight(&self, param: &Param) -> candle_core::Result<Tensor> {
        if let Some(stored) = self.stored.filter(|stored| stored.has(param)) {
            return stored.weight(param);
        }
        match &self.gathers {
            Some(gathers) => gathers.weight(param),
            None => param.tensor(),
        }
    }
}
