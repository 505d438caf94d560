//! Exchange of small messages between all ranks.

use super::DistError;
use serde::{Serialize, de::DeserializeOwned};

/// Exchanges small messages between all ranks, for one purpose and from one thread.
///
/// All ranks make the same calls in the same order.
pub trait Channel: Send {
    /// Returns the messages of all ranks, in the order of the ranks, after all have sent theirs.
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError>;

    /// Returns the message of rank 0 on every rank, for example the id of a communicator. The
    /// messages of other ranks are not used.
    fn message_of_first(&mut self, message: Vec<u8>) -> Result<Vec<u8>, DistError> {
        self.all_gather(message).map(|mut messages| messages.swap_remove(0))
    }

    /// Returns a function that closes the channel from any thread. A waiting and every later
    /// [`Self::all_gather`] of this rank then returns [`DistError::Closed`].
    fn closer(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// [`Channel::all_gather`] for values. Floats must be finite: JSON cannot express others.
pub fn gather<T: Serialize + DeserializeOwned>(
    channel: &mut dyn Channel,
    value: &T,
) -> Result<Vec<T>, DistError> {
    let message = serde_json::to_vec(value).expect("messages are plain values");
    let messages = channel.all_gather(message)?;
    let read = |(rank, message): (usize, Vec<u8>)| {
        let broken = |error: serde_json::Error| {
            let problem = error.to_string();
            DistError::Message { rank, problem }
        };
        serde_json::from_slice(&message).map_err(broken)
    };
    messages.into_iter().enumerate().map(read).collect()
}
