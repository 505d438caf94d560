//! Adds up the gradients of the micro-batches of a step, on one or several ranks.

mod norm;
mod rounds;
mod shared_sums;
mod tree;

pub(super) use norm::squares;
pub use shared_sums::SharedSums;
pub(super) use shared_sums::{Buffers, kept_sums};
pub use tree::buffers_of_tree;

use super::error::Result;
use super::weights::PassWeights;
use crate::ops::Store;
use crate::tape::{GradSink, Gradients, Param};
use candle_core::Tensor;
use shared_sums::SharedRound;
use tree::Tree;

/// The buffers of gradients, and how micro-batches and ranks are added up.
pub enum GradientSums {
    /// One process. With one buffer, the gradients of all micro-batches are added in place. With
    /// [`buffers_of_tree`] of them, the sum has the bits of a run on `2^n` ranks. The first one
    /// receives the sum.
    Alone(Vec<Gradients>),
    Shared(SharedSums),
}

impl GradientSums {
    pub fn buffers(&self) -> &Gradients {
        match self {
            Self::Alone(buffers) => &buffers[0],
            Self::Shared(sums) => sums.buffers(),
        }
    }

    /// Whether the sums have the same bits for every number of ranks. A step of one micro-batch,
    /// which only one process can compute, is `false`.
    pub(super) fn are_exact(&self) -> bool {
        match self {
            Self::Alone(buffers) => buffers.len() > 1,
            Self::Shared(sums) => sums.is_exact(),
        }
    }

    /// Number of buffers of the size of the model.
    pub fn num_buffers(&self) -> usize {
        match self {
            Self::Alone(buffers) => buffers.len(),
            Self::Shared(_) => 1,
        }
    }

    /// Starts the sums of a step of `rounds` rounds: micro-batches that the ranks compute at the
    /// same time.
    pub(super) fn begin_step<'a>(&'a self, rounds: usize, params: &'a [Param]) -> StepSums<'a> {
        match self {
            Self::Alone(buffers) => StepSums::Alone(Tree::new(buffers, params)),
            Self::Shared(sums) => StepSums::Shared { sums, params, rounds },
        }
    }
}

pub(super) enum StepSums<'a> {
    Alone(Tree<'a>),
    Shared { sums: &'a SharedSums, params: &'a [Param], rounds: usize },
}

impl StepSums<'_> {
    /// Receives the gradients of the micro-batch of a round, a pass with `weights`.
    pub(super) fn round<'r>(
        &'r self,
        round: usize,
        weights: &'r PassWeights<'_>,
    ) -> Result<Round<'r>> {
        match self {
            Self::Alone(tree) => Ok(Round { buffers: tree.next_buffer()?, shared: None }),
            Self::Shared { sums, params, rounds } => Ok(Round {
                buffers: sums.buffers(),
                shared: Some(SharedRound::new(sums, (params, weights), round, *rounds)),
            }),
        }
    }

    /// Records that the micro-batch of a round is complete, or that this rank has none.
    pub(super) fn complete(&mut self, round: usize, has_batch: bool) -> Result<()> {
        match self {
            Self::Alone(tree) => tree.complete(round, has_batch),
            Self::Shared { .. } => Ok(()),
        }
    }

    /// Returns the flat gradients of this rank, in the order of the optimizer's states.
    pub(super) fn finish(self, gradients: &GradientSums) -> Result<Vec<Tensor>> {
        match self {
            Self::Alone(tree) => {
                tree.finish()?;
                let buffers = gradients.buffers().iter().flatten();
                Ok(buffers.map(Tensor::flatten_all).collect::<candle_core::Result<_>>()?)
            }
            Self::Shared { sums, rounds, .. } => {
                sums.collective().wait()?;
                sums.sums(rounds)
            }
        }
    }
}

pub(super) struct Round<'a> {
    buffers: &'a Gradients,
    shared: Option<SharedRound<'a>>,
}

impl Round<'_> {
    /// Prepares the buffers. Called after the forward pass of the micro-batch, which runs while the
    /// sums of the round before are computed.
    pub(super) fn begin_backward(&self) -> Result<()> {
        self.shared.as_ref().map_or(Ok(()), SharedRound::begin)
    }
}

impl GradSink for Round<'_> {
    fn buffer(&self, param: &Param) -> Option<&Tensor> {
        self.buffers.buffer(param)
    }

    fn product_buffer(&self, param: &Param) -> Option<(&Tensor, Store)> {
        self.buffers.product_buffer(param)
    }

    fn finished(&self, params: &[&Param]) -> candle_core::Result<()> {
        self.shared.as_ref().map_or(Ok(()), |shared| shared.finished(params))
    }
}
