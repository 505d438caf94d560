//! Errors of ranks and of the connections between them.

use super::ConnectError;

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
    #[error(transparent)]
    Connect(#[from] ConnectError),
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
