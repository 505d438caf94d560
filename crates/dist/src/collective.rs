//! Sums and copies between ranks: the trait, and what it works on.

use super::DistError;
use candle_core::Tensor;

/// Number of an operation of a [`Collective`], to wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// A sum over all ranks of which each rank receives one share ("reduce-scatter").
#[derive(Debug, Clone)]
pub struct Reduce {
    /// `[M * S]`, `f32`, contiguous: one share of `S` elements for each of the `M` ranks of a shard
    /// group. The share of this rank is replaced by its sum over all ranks of the run. The other
    /// shares are undefined afterwards.
    pub values: Tensor,
    /// What happens with the sum.
    pub then: Then,
}

/// What happens with the share that a rank has summed. The tensors have `S` elements, in `f32`, and
/// do not share memory with the values.
#[derive(Debug, Clone)]
pub enum Then {
    /// It stays in the values.
    Keep,
    /// It is copied here.
    CopyTo(Tensor),
    /// It is added to the first of these; that sum is added to the second; and so on.
    AddTo(Vec<Tensor>),
}

/// A copy of the share of each rank of a shard group to all of them ("all-gather").
#[derive(Debug, Clone)]
pub struct Gather {
    /// `[S]`, the share of this rank; `None` if it is in `all`.
    pub own: Option<Tensor>,
    /// `[M * S]`, contiguous, in `f32`, `bf16` or `u8`: receives the shares of all `M` ranks.
    pub all: Tensor,
}

/// An exchange between the ranks of a sequence group ("all-to-all"): the `N` neighbouring ranks
/// `rank / N * N ..`, where `N` is the number of tensors. The tensors are contiguous, in `f32`,
/// `bf16` or `u8`.
#[derive(Debug, Clone)]
pub struct Exchange {
    /// What each rank of the group receives from this rank.
    pub send: Vec<Tensor>,
    /// Receives what each rank of the group sends to this rank. No memory is shared with `send`.
    pub receive: Vec<Tensor>,
}

/// Exchanges tensors between ranks, in the background.
///
/// All ranks make the same calls with the same shapes in the same order. They are executed in that
/// order. Nothing may use the tensors of a call before a wait for it.
pub trait Collective: Send + Sync {
    /// Starts to replace each of `tensors` (`f32`, contiguous) by its sum over all ranks, with the
    /// same bits on every rank.
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<Ticket, DistError>;

    /// Starts a sum of which each rank receives a share. Ranks at the same place of their shard
    /// groups receive the same bits.
    fn start_reduce(&self, reduce: Reduce) -> Result<Ticket, DistError>;

    /// Starts to copy shares within the shard group.
    fn start_gather(&self, gather: Gather) -> Result<Ticket, DistError>;

    /// Starts an exchange within the sequence group. The other groups need not make this call.
    fn start_exchange(&self, exchange: Exchange) -> Result<Ticket, DistError>;

    /// Waits until this call and all earlier ones are complete. On a GPU, later work on the
    /// tensors' device waits.
    fn wait_for(&self, ticket: Ticket) -> Result<(), DistError>;

    /// Waits until all calls are complete, as [`Self::wait_for`].
    fn wait(&self) -> Result<(), DistError>;

    /// The error that ended the work in the background, if there is one. Does not wait.
    fn error(&self) -> Option<DistError> {
        None
    }

    /// Ends the connections to the other ranks. Every rank calls this as its last call if the run
    /// succeeds. A rank that fails drops the collective instead, which waits for no other rank.
    fn finish(&self) -> Result<(), DistError> {
        self.wait()
    }
}

/// Wraps an error of the ranks as an error of an op. [`rank_error`] returns it again.
pub fn into_op_error(error: DistError) -> candle_core::Error {
    let context = "an exchange between ranks".to_owned();
    candle_core::Error::WrappedContext { wrapped: Box::new(error), context }
}

/// The error of the ranks that made an op fail.
pub fn rank_error(error: &candle_core::Error) -> Option<&DistError> {
    match error {
        candle_core::Error::WrappedContext { wrapped, .. } => wrapped.downcast_ref(),
        candle_core::Error::WithBacktrace { inner, .. }
        | candle_core::Error::Context { inner, .. }
        | candle_core::Error::WithPath { inner, .. } => rank_error(inner),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_ranks_is_found_again_behind_a_context() {
        let lost = DistError::Lost { rank: 2, problem: "gone".to_owned() };
        let error = into_op_error(lost.clone()).bt().context("a layer").with_path("file");
        assert_eq!(rank_error(&error), Some(&lost));
        assert_eq!(rank_error(&candle_core::Error::msg("an op failed")), None);
    }
}
