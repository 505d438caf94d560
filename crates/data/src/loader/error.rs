//! Errors of the loader.

use std::collections::BTreeMap;
use std::fmt;

use crate::loader::collate::CollateError;
use crate::row::{Rejection, RowTrouble};
use batch::UnpadError;
use ranks::DistError;

/// The reason why a loader stops before the end of its data.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LoaderError {
    /// A row is rejected, and `data.on_error` or `data.truncation` stops the run.
    #[error("{rejection}")]
    Rejected {
        /// The row and the reason.
        rejection: Rejection,
    },
    /// The process or a disk failed while a row was read, also when it was read again.
    #[error(transparent)]
    Trouble(#[from] RowTrouble),
    /// More rows were rejected than the config allows.
    #[error("{} of {rows_read} rows rejected ({}), the limit `data.max_rejected` is {max_rejected}{}",
        rejected.values().sum::<u64>(), RejectedCounts(rejected), Examples(first))]
    TooManyRejected {
        /// Number of rows read since the run began.
        rows_read: u64,
        /// Number of rejected rows, by reason.
        rejected: BTreeMap<String, u64>,
        /// Maximum share of rejected rows.
        max_rejected: f64,
        /// The first few rejections since the loader started.
        first: Vec<Rejection>,
        /// Rejections that no step has reported.
        unreported: Vec<Rejection>,
    },
    /// No row of an epoch is usable.
    #[error(
        "epoch {epoch} has no usable sample: it has {rows} rows, rejected so far: {}{}",
        RejectedCounts(rejected),
        Examples(first)
    )]
    EmptyEpoch {
        /// Index of the epoch.
        epoch: u64,
        /// Number of rows of the epoch.
        rows: u64,
        /// Number of rows rejected since the run began, by reason.
        rejected: BTreeMap<String, u64>,
        /// The first few rejections since the loader started.
        first: Vec<Rejection>,
        /// Rejections that no step has reported.
        unreported: Vec<Rejection>,
    },
    /// A saved state does not fit the data.
    #[error("the saved position does not fit the data: {problem}")]
    State {
        /// The contradiction.
        problem: String,
    },
    /// A row of a saved state cannot be read any more.
    #[error("a row of the checkpoint is no longer usable: {rejection}")]
    Changed {
        /// The row and the reason.
        rejection: Rejection,
    },
    /// Reading a row panicked.
    #[error("{file}:{row}: reading the row panicked: {message}")]
    Panicked {
        /// The data file.
        file: String,
        /// Line in that file, starting at 1.
        row: u64,
        /// Message of the panic.
        message: String,
    },
    /// Samples cannot be collated.
    #[error(transparent)]
    Collate(#[from] CollateError),
    /// A batch cannot be unpadded.
    #[error(transparent)]
    Unpad(#[from] UnpadError),
    /// The ranks can no longer work together.
    #[error(transparent)]
    Ranks(#[from] DistError),
    /// A thread cannot be started.
    #[error("cannot start a loader thread: {message}")]
    Spawn {
        /// Error of the operating system.
        message: String,
    },
    /// The assembler panicked.
    #[error("the thread that assembles batches panicked: {message}")]
    Crashed {
        /// Message of the panic.
        message: String,
    },
}

impl LoaderError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Rejected { rejection } => length_hint(&rejection.reason)
                .unwrap_or("repair the row, or skip such rows with `data.on_error: skip`"),
            Self::TooManyRejected { rejected, .. } | Self::EmptyEpoch { rejected, .. }
                if mostly(rejected) == Some("overlong") =>
            {
                OVERLONG
            }
            Self::TooManyRejected { .. } => {
                "repair the rows (`rejects.jsonl` lists all of them) for a new run, or raise `data.max_rejected`, which also continues this one"
            }
            Self::EmptyEpoch { .. } => {
                "check that the data files have rows and that the length limits fit them"
            }
            Self::State { .. } | Self::Changed { .. } => {
                "resume with the data and `data` config of the run that wrote the checkpoint"
            }
            Self::Trouble(RowTrouble { trouble, .. }) => trouble.hint(),
            Self::Ranks(error) => error.hint(),
            Self::Spawn { .. } => {
                "lower `data.workers`, or raise the limits (`ulimit -u`, `ulimit -v`)"
            }
            Self::Panicked { .. } | Self::Collate(_) | Self::Unpad(_) | Self::Crashed { .. } => {
                "this is a bug in trainer: please report it with the row"
            }
        }
    }

    /// Returns the result of reading a row, unless the process or a disk failed.
    pub(crate) fn unless_trouble<T>(
        read: Result<T, Rejection>,
    ) -> Result<Result<T, Rejection>, Self> {
        match read {
            Err(rejection) => Ok(Err(RowTrouble::check(rejection)?)),
            read => Ok(read),
        }
    }

    /// Rejections that no step has reported, for `rejects.jsonl`.
    pub fn unreported(&self) -> &[Rejection] {
        match self {
            Self::TooManyRejected { unreported, .. } | Self::EmptyEpoch { unreported, .. } => {
                unreported
            }
            Self::Rejected { rejection } => std::slice::from_ref(rejection),
            _ => &[],
        }
    }

    /// Adds `rejections`, which no step has reported either, before the others.
    #[must_use]
    pub(crate) fn after(mut self, mut rejections: Vec<Rejection>) -> Self {
        if let Self::TooManyRejected { unreported, .. } | Self::EmptyEpoch { unreported, .. } =
            &mut self
        {
            rejections.append(unreported);
            *unreported = rejections;
        }
        self
    }
}

const OVERLONG: &str = "raise `data.packing_length`, or put each long sample in a pack of its own with `data.filter_overlong: false`";

/// Returns the fix of rows that are rejected because of their length: `reason` is `empty`, `overlong` or
/// `too_long`. The messages of other reasons contain their fix.
pub fn length_hint(reason: &str) -> Option<&'static str> {
    match reason {
        "empty" => {
            Some("remove the rows that have no tokens, or skip them with `data.on_error: skip`")
        }
        "overlong" => Some(OVERLONG),
        "too_long" => {
            Some("raise `data.max_length`, or cut such rows with `data.truncation: right`")
        }
        _ => None,
    }
}

/// The most frequent reason.
fn mostly(rejected: &BTreeMap<String, u64>) -> Option<&str> {
    rejected.iter().max_by_key(|(_, count)| **count).map(|(reason, _)| reason.as_str())
}

/// Displays numbers of rejected rows by reason as `2 overlong, 1 json`.
pub struct RejectedCounts<'a>(pub &'a BTreeMap<String, u64>);

impl fmt::Display for RejectedCounts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (index, (reason, count)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {reason}")?;
        }
        Ok(())
    }
}

/// Displays one line per rejected row.
struct Examples<'a>(&'a [Rejection]);

impl fmt::Display for Examples<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|rejection| write!(f, "\n  {rejection}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_rejected_rows_are_counted_by_reason_and_the_first_are_named() {
        let rejection = |row, message: &str| Rejection {
            file: "a.jsonl".to_owned(),
            row,
            reason: "json".to_owned(),
            message: message.to_owned(),
        };
        let error = LoaderError::TooManyRejected {
            rows_read: 100,
            rejected: [("json".to_owned(), 2), ("overlong".to_owned(), 1)].into(),
            max_rejected: 0.01,
            first: vec![rejection(3, "bad brace"), rejection(9, "a.jsonl:9: no colon")],
            unreported: Vec::new(),
        };
        assert_eq!(
            error.to_string(),
            "3 of 100 rows rejected (2 json, 1 overlong), the limit `data.max_rejected` is 0.01\n  \
             a.jsonl:3: bad brace\n  a.jsonl:9: no colon"
        );
    }
}
