//! Connects the ranks of a job: every rank opens its connections to rank 0.

mod address;
mod first;
mod hello;
mod other;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use address::Address;
pub use address::interface_name;
pub(super) use address::{listen, of_first, open_to_others};
pub(super) use first::first;
pub(super) use other::other;
pub(super) use ranks::ConnectError;

use super::Rank;
use std::net::TcpStream;

/// The connections of a rank to the others.
pub(super) struct Joined {
    /// The place of this rank.
    pub(super) rank: Rank,
    /// Names of the machines of all ranks.
    pub(super) hosts: Vec<String>,
    /// The connections for each purpose. Rank 0: one to each other rank, in their order. Others:
    /// one to rank 0.
    pub(super) data: Vec<TcpStream>,
    pub(super) step: Vec<TcpStream>,
    pub(super) monitor: Vec<TcpStream>,
}

impl Joined {
    /// The only rank of a run.
    pub(super) fn alone() -> Self {
        let (data, step, monitor) = (Vec::new(), Vec::new(), Vec::new());
        Self { rank: Rank::ALONE, hosts: vec![hello::Machine::this().name], data, step, monitor }
    }
}
