//! The place of a process among the ranks of a run, small messages between the ranks, and their errors.

mod connect_error;
mod error;
mod lane;
mod launcher;
mod rank;

pub use connect_error::ConnectError;
pub use error::DistError;
pub use lane::{Lane, gather};
pub use launcher::Launcher;
pub use rank::{Rank, SequencePlace, own_part};
