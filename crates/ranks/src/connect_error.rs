//! Reasons why the ranks of a job cannot connect.

use super::Launcher;

/// The reason why a rank cannot connect to the others.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The launcher has started another number of ranks than the config requires.
    #[error("`distributed.processes` is `{expected}`, but {launcher} has started {world}")]
    Processes {
        /// The value of the config.
        expected: usize,
        /// The launcher.
        launcher: Launcher,
        /// Number of ranks that it has started.
        world: usize,
    },
    /// The host of rank 0 is unknown.
    #[error("{launcher} sets no address of rank 0, and the ranks may be on several machines")]
    NoHost {
        /// The launcher.
        launcher: Launcher,
    },
    /// The port of rank 0 is unknown.
    #[error("{launcher} sets neither a port of rank 0 nor a name of the job")]
    NoPort {
        /// The launcher.
        launcher: Launcher,
    },
    /// `distributed.interface` is not an interface of this machine.
    #[error("`distributed.interface` is `{interface}`, but this machine has {found}")]
    Interface {
        /// The value of the config.
        interface: String,
        /// Names and addresses of the interfaces.
        found: String,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {address}: {problem}")]
    Listen {
        /// The address.
        address: String,
        /// The error of the system.
        problem: String,
    },
    /// Rank 0 does not answer.
    #[error("rank 0 was not found at {address} within {seconds} s: {problem}")]
    Unreachable {
        /// The address.
        address: String,
        /// The time-out.
        seconds: u64,
        /// What happened last.
        problem: String,
    },
    /// Rank 0 has refused this process.
    #[error("rank 0 at {address} has refused this process: {reason}")]
    Refused {
        /// The address.
        address: String,
        /// The reason that rank 0 gives.
        reason: String,
    },
    /// Some ranks did not connect.
    #[error("{} of {world} ranks did not connect within {seconds} s: {ranks:?}", .ranks.len())]
    Missing {
        /// The missing ranks.
        ranks: Vec<usize>,
        /// Number of all ranks.
        world: usize,
        /// The time-out.
        seconds: u64,
    },
}

impl ConnectError {
    /// Whether the config or the launcher has to be changed before another attempt.
    pub fn is_usage(&self) -> bool {
        !matches!(self, Self::Unreachable { .. } | Self::Missing { .. })
    }

    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Processes { .. } => "set it to `auto`, or start that number of processes",
            Self::NoHost { .. } => {
                "set `MASTER_ADDR` for all ranks to the host name of rank 0 (mpirun: `-x`)"
            }
            Self::NoPort { .. } => "set `distributed.port`, or `MASTER_PORT` for all ranks",
            Self::Interface { .. } => "give the name or the IP address of one of them",
            Self::Listen { .. } => {
                "another program may use the port: set `distributed.port` to a free one"
            }
            Self::Unreachable { .. } => {
                "check that rank 0 runs, and that its machine can be \
                                         reached at this address and port; \
                                         `distributed.interface` and `distributed.port` change them"
            }
            Self::Refused { .. } => {
                "end the processes of earlier runs, or set another `distributed.port`"
            }
            Self::Missing { .. } => {
                "the log of each missing rank has its error; to wait longer, raise \
                 `distributed.timeout_s`"
            }
        }
    }
}
