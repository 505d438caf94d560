//! Errors of ranks and of the connections between them.

use super::ConnectError;

/// The reason why ranks cannot work together, or no longer can.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DistError {
    /// A rank ended or cannot be reached.
    #[error("rank {rank} was lost: {problem}")]
    Lost {
        /// The rank.
        rank: usize,
        /// What happened.
        problem: String,
    },
    /// A rank failed and reported why.
    #[error("rank {rank} failed: {message}")]
    Failed {
        /// The rank.
        rank: usize,
        /// Its error message.
        message: String,
    },
    /// Ranks make no progress, and others wait for them.
    #[error("no progress for {seconds} s in `{work}` on {}", ranks_text(.ranks))]
    Hung {
        /// The ranks.
        ranks: Vec<usize>,
        /// The current work of the first of them.
        work: String,
        /// The time-out.
        seconds: u64,
    },
    /// The ranks could not connect to each other.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// This rank closed the connection itself, because it needs it no longer.
    #[error("the connection between the ranks is closed")]
    Closed,
    /// A rank does not fit to the others, or sent a message that cannot be read.
    #[error("rank {rank} cannot take part: {problem}")]
    Message {
        /// The rank.
        rank: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A library cannot be loaded, or lacks a function.
    #[error("cannot load NCCL from `{path}`: {problem}")]
    Library {
        /// The library.
        path: String,
        /// What the system's loader reports.
        problem: String,
    },
    /// A collective operation failed.
    #[error("{operation} failed: {problem}")]
    Collective {
        /// Name of the operation.
        operation: &'static str,
        /// What happened.
        problem: String,
    },
}

impl DistError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Connect(error) => error.hint(),
            Self::Failed { .. } => {
                "fix the error that this rank reported, and run the same command again"
            }
            Self::Lost { .. } | Self::Hung { .. } | Self::Closed | Self::Collective { .. } => {
                "run the same command again to resume from the last checkpoint; if it happens again, `trainer selftest --distributed` tests the ranks"
            }
            Self::Message { .. } => {
                "start the same binary with the same config and the same files on all ranks"
            }
            Self::Library { .. } => {
                "install NCCL 2.14 or later on all nodes (package `libnccl2` of NVIDIA, or `nvidia-nccl-cu13` of pip), and add its folder to LD_LIBRARY_PATH"
            }
        }
    }

    /// Whether the config or the launcher has to be changed before another attempt.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Connect(error) if error.is_usage())
    }
}

fn ranks_text(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, names.join(", "))
}
