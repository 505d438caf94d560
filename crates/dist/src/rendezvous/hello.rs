//! The first messages on a connection: the hello of a rank, and the answer of rank 0.

use crate::frame::{Arrival, Inbox};
use crate::launcher::Launched;
use ranks::ConnectError;
use serde::{Deserialize, Serialize};
use std::hash::{BuildHasher, RandomState};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// First bytes of every connection.
pub(super) const MAGIC: &[u8; 16] = b"trainer ranks 1\n";
/// Maximum number of bytes of a hello.
pub(super) const MAX_HELLO: usize = 4096;
/// Maximum number of bytes of an answer, which has the machine names of all ranks.
pub(super) const MAX_ANSWER: usize = 1 << 24;

/// What a connection is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Purpose {
    Data,
    Step,
    Monitor,
}

impl Purpose {
    pub(super) const ALL: [Self; 3] = [Self::Data, Self::Step, Self::Monitor];
}

/// The machine of a rank. Containers with different host names count as different machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// Its host name.
    pub(super) name: String,
    /// Distinguishes machines with the same host name.
    boot: String,
}

impl Machine {
    pub(super) fn this() -> Self {
        let read = |path: &str| files::read_to_string(path).unwrap_or_default().trim().to_owned();
        let name = read("/proc/sys/kernel/hostname");
        Self { name, boot: read("/proc/sys/kernel/random/boot_id") }
    }
}

/// What a rank sends first on each of its connections.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: String,
    pub(super) job: String,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) purpose: Purpose,
    /// Distinguishes two processes with the same rank.
    pub(super) process: u64,
    pub(super) machine: Machine,
}

impl Hello {
    pub(super) fn new(place: &Launched) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: place.job.clone(),
            rank: place.rank,
            world: place.world,
            purpose: Purpose::Data,
            process: RandomState::new().hash_one(std::process::id()),
            machine: Machine::this(),
        }
    }
}

/// The answer of rank 0 to a hello.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// All ranks are connected; their machines, in the order of the ranks.
    Welcome(Vec<Machine>),
    /// This process is not a rank of the job.
    Refused(String),
    /// Some ranks did not connect in time.
    Missing { ranks: Vec<usize>, seconds: u64 },
}

/// A connection ended before a message was complete.
pub(super) struct Incomplete(pub(super) String);

/// Receives a message until `deadline`.
pub(super) fn receive(
    stream: &TcpStream,
    inbox: &mut Inbox,
    deadline: Instant,
) -> Result<Vec<u8>, Incomplete> {
    loop {
        if let Some(message) = inbox.next().map_err(Incomplete)? {
            return Ok(message);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Incomplete("no answer".to_owned()));
        }
        let limit = left.min(Duration::from_millis(100)).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(limit)).map_err(|error| Incomplete(error.to_string()))?;
        if let Arrival::Closed(problem) = inbox.read(stream) {
            return Err(Incomplete(problem));
        }
    }
}

/// The number of a rank on its machine, and the number of ranks there.
pub(super) fn local_place(machines: &[Machine], rank: usize) -> (usize, usize) {
    let same = |other: &&Machine| **other == machines[rank];
    (machines[..rank].iter().filter(same).count(), machines.iter().filter(same).count())
}

/// The error of a missing rank.
pub(super) fn missing(ranks: Vec<usize>, world: usize, seconds: u64) -> ConnectError {
    ConnectError::Missing { ranks, world, seconds }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_from_0_on_each_machine() {
        let machine = |name: &str, boot: &str| Machine { name: name.into(), boot: boot.into() };
        let machines = [("a", "1"), ("b", "2"), ("a", "1"), ("a", "3")]
            .map(|(name, boot)| machine(name, boot));
        let places: Vec<_> = (0..4).map(|rank| local_place(&machines, rank)).collect();
        assert_eq!(places, [(0, 2), (0, 1), (1, 2), (0, 1)]);
    }
}
