//! The place of a process among the ranks of a run, small messages between the ranks, and their errors.

mod channel;
mod error;
mod launcher;
mod rank;

pub use channel::{Channel, gather};
pub use error::DistError;
pub use launcher::Launcher;
pub use rank::{Rank, SequencePlace, own_part};
