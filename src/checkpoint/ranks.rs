//! The ranks that write or read a checkpoint together.

use super::CheckpointError;
use serde::{Serialize, de::DeserializeOwned};
use std::error::Error;

/// The ranks that write or read a checkpoint together. All of them make the same calls.
pub trait Together {
    /// The reason why a checkpoint cannot be written or read, or ranks cannot work together.
    type Error: From<CheckpointError>;

    /// Number of this rank, from 0 to `world - 1`.
    fn rank(&self) -> usize;

    fn world(&self) -> usize;

    /// Returns the values of all ranks, in the order of the ranks, after all have sent theirs.
    fn gather<V: Serialize + DeserializeOwned>(&self, value: V) -> Result<Vec<V>, Self::Error>;

    /// The error of this rank if `rank` has failed with `message`.
    fn failed(&self, rank: usize, message: String) -> Self::Error {
        CheckpointError::OtherRank { rank, message }.into()
    }
}

/// A run in a single process.
#[derive(Debug, Clone, Copy)]
pub struct Alone;

impl Together for Alone {
    type Error = CheckpointError;

    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn gather<V>(&self, value: V) -> Result<Vec<V>, CheckpointError> {
        Ok(vec![value])
    }
}

/// Returns the values of all ranks if all have one. Otherwise each rank returns its own error, or
/// else that of the first rank that has one. Thus no rank waits for one that has failed.
pub(super) fn exchange<T: Together, V: Serialize + DeserializeOwned>(
    together: &T,
    own: Result<V, CheckpointError>,
) -> Result<Vec<V>, T::Error> {
    let (value, error) = match own {
        Ok(value) => (Ok(value), None),
        Err(error) => (Err(causes(&error)), Some(error)),
    };
    let all = together.gather(value)?;
    if let Some(error) = error {
        return Err(error.into());
    }
    let value = |(rank, value): (usize, Result<V, String>)| {
        value.map_err(|message| together.failed(rank, message))
    };
    all.into_iter().enumerate().map(value).collect()
}

/// Returns the value of this rank if all ranks have one, and otherwise an error as [`exchange`]
/// does.
pub(super) fn agree<T: Together, V>(
    together: &T,
    own: Result<V, CheckpointError>,
) -> Result<V, T::Error> {
    let (value, result) = match own {
        Ok(value) => (Some(value), Ok(())),
        Err(error) => (None, Err(error)),
    };
    exchange(together, result)?;
    Ok(value.expect("`exchange` returns the error of this rank"))
}

/// The message of an error, followed by those of its causes.
pub(super) fn causes(error: &CheckpointError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

#[cfg(test)]
pub(super) use thread_ranks::on_ranks;

#[cfg(test)]
mod thread_ranks {
    use super::{CheckpointError, Together};
    use crate::dist::{Channel, Group, Rank, gather, threads};
    use serde::{Serialize, de::DeserializeOwned};
    use std::cell::RefCell;
    use std::thread;

    /// One of several ranks that are threads.
    pub(in crate::checkpoint) struct ThreadRank {
        rank: Rank,
        channel: RefCell<Box<dyn Channel>>,
    }

    impl Together for ThreadRank {
        type Error = CheckpointError;

        fn rank(&self) -> usize {
            self.rank.rank
        }

        fn world(&self) -> usize {
            self.rank.world
        }

        fn gather<V: Serialize + DeserializeOwned>(
            &self,
            value: V,
        ) -> Result<Vec<V>, CheckpointError> {
            Ok(gather(&mut **self.channel.borrow_mut(), &value).unwrap())
        }
    }

    /// Calls `f` on each of `world` ranks and returns the results in their order.
    pub(in crate::checkpoint) fn on_ranks<V: Send>(
        world: usize,
        f: impl Fn(&ThreadRank) -> V + Sync,
    ) -> Vec<V> {
        let f = &f;
        let call = |Group { rank, step, .. }: Group| f(&ThreadRank { rank, channel: step.into() });
        thread::scope(|scope| {
            let ranks = threads(world).unwrap().into_iter();
            let ranks: Vec<_> = ranks.map(|group| scope.spawn(move || call(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}
