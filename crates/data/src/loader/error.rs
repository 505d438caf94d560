use std::collections::BTreeMap;
use std::fmt;

use crate::row::{Rejection, TransientRowError};
use batch::BatchError;
use ranks::DistError;

/// The reason why a loader stops before the end of its data.
#[derive(Debug, Clone, PartialEq, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum LoaderError {
    #[error("{rejection}")]
    #[fault(hint = length_hint(&rejection.reason).unwrap_or(REPAIR))]
    Rejected { rejection: Rejection },
    #[error(transparent)]
    Transient(#[from] TransientRowError),
    #[error("{} of {rows_read} rows rejected ({}), the limit `data.max_rejected` is {max_rejected}{}",
        rejected.values().sum::<u64>(), RejectedCounts(rejected), Examples(first))]
    #[fault(hint = rejected_hint(rejected, RAISE))]
    TooManyRejected {
        /// Number of rows read since the run began.
        rows_read: u64,
        rejected: BTreeMap<String, u64>,
        max_rejected: f64,
        /// The first few rejections since the loader started.
        first: Vec<Rejection>,
        /// Rejections that no step has reported.
        unreported: Vec<Rejection>,
    },
    #[error(
        "epoch {epoch} has no usable sample: it has {rows} rows, rejected so far: {}{}",
        RejectedCounts(rejected),
        Examples(first)
    )]
    #[fault(
        hint = rejected_hint(rejected, "check that the data files have rows and that the length limits fit them")
    )]
    EmptyEpoch {
        epoch: u64,
        rows: u64,
        /// Number of rows rejected since the run began, by reason.
        rejected: BTreeMap<String, u64>,
        /// The first few rejections since the loader started.
        first: Vec<Rejection>,
        /// Rejections that no step has reported.
        unreported: Vec<Rejection>,
    },
    #[error("the saved position does not fit the data: {problem}")]
    #[fault(hint = "resume with the data and `data` config of the run that wrote the checkpoint")]
    State { problem: String },
    #[error("a row of the checkpoint is no longer usable: {rejection}")]
    #[fault(hint = "resume with the data and `data` config of the run that wrote the checkpoint")]
    Changed { rejection: Rejection },
    #[error("{file}:{row}: reading the row panicked: {message}")]
    #[fault(hint = "this is a bug in trainer: please report it with the row")]
    Panicked {
        file: String,
        /// Line in that file, starting at 1.
        row: u64,
        message: String,
    },
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    Ranks(#[from] DistError),
    #[error("cannot start a loader thread: {message}")]
    #[fault(
        exit = Resources,
        hint = "lower `data.workers`, or raise the limits (`ulimit -u`, `ulimit -v`)"
    )]
    Spawn { message: String },
    #[error("the thread that assembles batches panicked: {message}")]
    #[fault(hint = "this is a bug in trainer: please report it with the row")]
    Crashed { message: String },
}

impl LoaderError {
    /// Returns the result of reading a row, unless the process or a disk failed.
    pub(crate) fn unless_transient<T>(
        read: Result<T, Rejection>,
    ) -> Result<Result<T, Rejection>, Self> {
        match read {
            Err(rejection) => Ok(Err(TransientRowError::check(rejection)?)),
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

const REPAIR: &str = "repair the row, or skip such rows with `data.on_error: skip`";
const RAISE: &str = "repair the rows (`rejects.jsonl` lists all of them) for a new run, or raise `data.max_rejected`, which also continues this one";
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

/// The fix of rejected rows; `other` if most of them are not too long for a pack.
fn rejected_hint(rejected: &BTreeMap<String, u64>, other: &'static str) -> &'static str {
    match rejected.iter().max_by_key(|(_, count)| **count) {
        Some((reason, _)) if reason == "overlong" => OVERLONG,
        _ => other,
    }
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
