//! The place that a launcher gives to a process.

use ranks::Launcher;

/// A process that a launcher started as a rank, and what is known about the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// The program that started the ranks.
    pub launcher: Launcher,
    /// Number of this rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Number of this rank on its machine. If unknown, the ranks agree on it when they connect.
    pub local_rank: Option<usize>,
    /// Number of ranks on this machine. If unknown, the ranks agree on it when they connect.
    pub local_world: Option<usize>,
    /// Host name or IP address of rank 0.
    pub host: Option<String>,
    /// TCP port of rank 0.
    pub port: Option<u16>,
    /// Name of the job, the same for all of its ranks; empty if the launcher gives it none.
    pub job: String,
}

impl Launched {
    /// A rank of a job of tests, without the address of rank 0.
    #[cfg(test)]
    pub(crate) fn of_test(rank: usize, world: usize) -> Self {
        Self {
            launcher: Launcher::Explicit,
            rank,
            world,
            local_rank: None,
            local_world: None,
            host: None,
            port: None,
            job: "test".to_owned(),
        }
    }

    /// Whether the launcher has started all ranks on one machine.
    pub(crate) fn is_one_machine(&self) -> bool {
        self.local_world == Some(self.world)
    }
}
