//! The ranks that write or read a checkpoint together.

use super::CheckpointError;
use serde::{Serialize, de::DeserializeOwned};
use std::convert::identity;
use std::error::Error;

/// The ranks that write or read a checkpoint together. All of them make the same calls.
pub trait Together {
    /// The reason why a checkpoint cannot be written or read, or ranks cannot work together.
    type Error: From<CheckpointError>;

    /// Number of this rank, from 0 to `world - 1`.
    fn rank(&self) -> usize;

    fn world(&self) -> usize;

    /// Returns the messages of all ranks, in the order of the ranks, after all have sent theirs.
    fn gather(&self, message: String) -> Result<Vec<String>, Self::Error>;

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

    fn gather(&self, message: String) -> Result<Vec<String>, CheckpointError> {
        Ok(vec![message])
    }
}

/// Returns the values of all ranks if all have one. Otherwise each rank returns its own error, or
/// else that of the first rank that has one. Thus no rank waits for one that has failed.
pub(super) fn exchange<T: Together, V: Serialize + DeserializeOwned>(
    together: &T,
    own: Result<V, CheckpointError>,
) -> Result<Vec<V>, T::Error> {
    let message = own.as_ref().map_err(causes);
    let message = serde_json::to_string(&message).expect("messages are plain values");
    let all = together.gather(message)?;
    own?;
    let value = |(rank, message): (usize, String)| {
        let read = serde_json::from_str::<Result<V, String>>(&message);
        let read = read.map_err(|error| format!("sent a message that cannot be read: {error}"));
        read.and_then(identity).map_err(|message| together.failed(rank, message))
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
    use std::sync::{Barrier, Mutex};
    use std::thread;

    /// One of several ranks that are threads.
    pub(in crate::checkpoint) struct ThreadRank<'a> {
        rank: usize,
        messages: &'a Mutex<Vec<String>>,
        barrier: &'a Barrier,
    }

    impl Together for ThreadRank<'_> {
        type Error = CheckpointError;

        fn rank(&self) -> usize {
            self.rank
        }

        fn world(&self) -> usize {
            self.messages.lock().unwrap().len()
        }

        fn gather(&self, message: String) -> Result<Vec<String>, CheckpointError> {
            self.messages.lock().unwrap()[self.rank] = message;
            self.barrier.wait();
            let all = self.messages.lock().unwrap().clone();
            self.barrier.wait();
            Ok(all)
        }
    }

    /// Calls `f` on each of `world` ranks and returns the results in their order.
    pub(in crate::checkpoint) fn on_ranks<V: Send>(
        world: usize,
        f: impl Fn(&ThreadRank<'_>) -> V + Sync,
    ) -> Vec<V> {
        let (messages, barrier) = (Mutex::new(vec![String::new(); world]), Barrier::new(world));
        let (messages, barrier, f) = (&messages, &barrier, &f);
        thread::scope(|scope| {
            let rank = |rank| scope.spawn(move || f(&ThreadRank { rank, messages, barrier }));
            let ranks: Vec<_> = (0..world).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}
