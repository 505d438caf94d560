//! Reasons why the ranks of a job cannot connect.

use super::Launcher;

/// The reason why a rank cannot connect to the others.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum ConnectError {
    #[error("`distributed.processes` is `{expected}`, but {launcher} has started {world}")]
    #[fault(hint = "set it to `auto`, or start that number of processes")]
    Processes { expected: usize, launcher: Launcher, world: usize },
    #[error("{launcher} sets no address of rank 0, and the ranks may be on several machines")]
    #[fault(hint = "set `MASTER_ADDR` for all ranks to the host name of rank 0 (mpirun: `-x`)")]
    NoHost { launcher: Launcher },
    #[error("{launcher} sets neither a port of rank 0 nor a name of the job")]
    #[fault(hint = "set `distributed.port`, or `MASTER_PORT` for all ranks")]
    NoPort { launcher: Launcher },
    #[error("`distributed.interface` is `{interface}`, but this machine has {found}")]
    #[fault(hint = "give the name or the IP address of one of them")]
    Interface { interface: String, found: String },
    #[error("rank 0 cannot listen on {address}: {problem}")]
    #[fault(hint = "another program may use the port: set `distributed.port` to a free one")]
    Listen { address: String, problem: String },
    #[error("rank 0 was not found at {address} within {seconds} s: {problem}")]
    #[fault(
        exit = Ranks,
        hint = "check that rank 0 runs, and that its machine can be reached at this address and port; `distributed.interface` and `distributed.port` change them"
    )]
    Unreachable { address: String, seconds: u64, problem: String },
    #[error("rank 0 at {address} has refused this process: {reason}")]
    #[fault(hint = "end the processes of earlier runs, or set another `distributed.port`")]
    Refused { address: String, reason: String },
    #[error("{} of {world} ranks did not connect within {seconds} s: {ranks:?}", .ranks.len())]
    #[fault(
        exit = Ranks,
        hint = "the log of each missing rank has its error; to wait longer, raise `distributed.timeout_s`"
    )]
    Missing { ranks: Vec<usize>, world: usize, seconds: u64 },
}
