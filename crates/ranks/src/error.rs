//! Errors of ranks and of the connections between them.

use super::Launcher;

/// The reason why ranks cannot work together, or no longer can.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Ranks)]
pub enum DistError {
    #[error("rank {rank} was lost: {problem}")]
    #[fault(
        hint = "run the same command again to resume from the last checkpoint; if it happens again, `trainer selftest --distributed` tests the ranks"
    )]
    Lost { rank: usize, problem: String },
    #[error("rank {rank} failed: {message}")]
    #[fault(hint = "fix the error that this rank reported, and run the same command again")]
    Failed { rank: usize, message: String },
    #[error("no progress for {seconds} s in `{work}` on {}", ranks_text(.ranks))]
    #[fault(
        hint = "run the same command again to resume from the last checkpoint; if it happens again, `trainer selftest --distributed` tests the ranks"
    )]
    Hung {
        ranks: Vec<usize>,
        /// The current work of the first of them.
        work: String,
        seconds: u64,
    },
    #[error("`distributed.processes` is `{expected}`, but {launcher} has started {world}")]
    #[fault(exit = Usage, hint = "set it to `auto`, or start that number of processes")]
    Processes { expected: usize, launcher: Launcher, world: usize },
    #[error("{launcher} sets no address of rank 0, and the ranks may be on several machines")]
    #[fault(exit = Usage, hint = "set `MASTER_ADDR` for all ranks to the host name of rank 0 (mpirun: `-x`)")]
    NoHost { launcher: Launcher },
    #[error("{launcher} sets neither a port of rank 0 nor a name of the job")]
    #[fault(exit = Usage, hint = "set `distributed.port`, or `MASTER_PORT` for all ranks")]
    NoPort { launcher: Launcher },
    #[error("`distributed.interface` is `{interface}`, but this machine has {found}")]
    #[fault(exit = Usage, hint = "give the name or the IP address of one of them")]
    Interface { interface: String, found: String },
    #[error("rank 0 cannot listen on {address}: {problem}")]
    #[fault(exit = Usage, hint = "another program may use the port: set `distributed.port` to a free one")]
    Listen { address: String, problem: String },
    #[error("rank 0 was not found at {address} within {seconds} s: {problem}")]
    #[fault(
        hint = "check that rank 0 runs, and that its machine can be reached at this address and port; `distributed.interface` and `distributed.port` change them"
    )]
    Unreachable { address: String, seconds: u64, problem: String },
    #[error("rank 0 at {address} has refused this process: {reason}")]
    #[fault(exit = Usage, hint = "end the processes of earlier runs, or set another `distributed.port`")]
    Refused { address: String, reason: String },
    #[error("{} of {world} ranks did not connect within {seconds} s: {ranks:?}", .ranks.len())]
    #[fault(
        hint = "the log of each missing rank has its error; to wait longer, raise `distributed.timeout_s`"
    )]
    Missing { ranks: Vec<usize>, world: usize, seconds: u64 },
    /// This rank closed the connection itself, because it needs it no longer.
    #[error("the connection between the ranks is closed")]
    #[fault(
        hint = "run the same command again to resume from the last checkpoint; if it happens again, `trainer selftest --distributed` tests the ranks"
    )]
    Closed,
    #[error("rank {rank} cannot take part: {problem}")]
    #[fault(hint = "start the same binary with the same config and the same files on all ranks")]
    Message { rank: usize, problem: String },
    #[error("cannot load NCCL from `{path}`: {problem}")]
    #[fault(
        hint = "install NCCL 2.14 or later on all nodes (package `libnccl2` of NVIDIA, or `nvidia-nccl-cu13` of pip), and add its folder to LD_LIBRARY_PATH"
    )]
    Library { path: String, problem: String },
    #[error("{operation} failed: {problem}")]
    #[fault(
        hint = "run the same command again to resume from the last checkpoint; if it happens again, `trainer selftest --distributed` tests the ranks"
    )]
    Collective { operation: &'static str, problem: String },
}

fn ranks_text(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, names.join(", "))
}
