//! Messages of the monitors.

use crate::DistError;
use crate::frame;
use serde::{Deserialize, Serialize};
use std::net::TcpStream;

/// Maximum number of bytes of a message.
pub(super) const MAX: usize = 1 << 20;
/// Maximum number of characters of a report or error message; more are cut off.
const MAX_TEXT: usize = 1 << 14;

/// A message between the monitors of rank 0 and another rank.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// Sent at a fixed interval: the current work of the sender.
    Heartbeat {
        work: String,
        waits: bool,
        /// The loader of the sender waits for the loaders of other ranks.
        loader_waits: bool,
        /// Time since the sender last made progress.
        age_ms: u64,
        /// A request to stop has reached the sender.
        stop: bool,
    },
    /// To rank 0: the sender fails with an error.
    Fail(String),
    /// To rank 0: the sender has finished its work.
    Finish,
    /// From rank 0: all ranks have finished.
    AllFinished,
    /// From rank 0: all ranks end with an error.
    End(End),
}

/// An error that ends all ranks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum End {
    Lost { rank: usize, problem: String },
    Failed { rank: usize, message: String },
    Hung { ranks: Vec<usize>, work: String, seconds: u64 },
}

impl Message {
    /// A connection that cannot be written is found when it is read.
    pub(super) fn send(&self, stream: &TcpStream) {
        let bytes = serde_json::to_vec(self).expect("plain values");
        let _ = frame::send(stream, &bytes);
    }
}

/// The beginning of a text.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

impl From<End> for DistError {
    fn from(end: End) -> Self {
        match end {
            End::Lost { rank, problem } => Self::Lost { rank, problem },
            End::Failed { rank, message } => Self::Failed { rank, message },
            End::Hung { ranks, work, seconds } => Self::Hung { ranks, work, seconds },
        }
    }
}
