//! What users should know about the rows of a file: keys that are not read, and how the parser
//! understood rows that may mean several things. Each finding is reported once per data
//! set.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::{PoisonError, RwLock};

use super::keys::Place;
use batch::SampleId;

/// Maximum number of findings of a file. Rows whose keys are data could have one key each.
const MAX_FINDINGS: usize = 100;

/// A property of rows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Finding {
    /// A key that may be misspelt.
    Unknown(Place, String),
    /// A key that does not affect training.
    Metadata(Place, String),
    /// How rows were understood.
    Note(&'static str),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(place, key) => {
                write!(f, "unknown key `{key}`{} is ignored", place.describe())?;
                match place.nearest(key) {
                    Some(nearest) => write!(f, ", did you mean `{nearest}`?"),
                    None => Ok(()),
                }
            }
            Self::Metadata(place, key) => {
                write!(f, "key `{key}`{} is not used", place.describe())
            }
            Self::Note(note) => f.write_str(note),
        }
    }
}

/// The findings of a data set so far. Threads that parse rows share it.
#[derive(Debug, Default)]
pub(super) struct Findings {
    seen: RwLock<BTreeSet<Finding>>,
    is_silent: bool,
}

impl Findings {
    /// Findings that are collected and not logged.
    pub(super) fn silent() -> Self {
        Self { is_silent: true, ..Self::default() }
    }

    /// Adds a finding. Returns whether it is new and should be reported.
    pub(super) fn add(&self, finding: Finding) -> bool {
        let seen = self.seen.read().unwrap_or_else(PoisonError::into_inner);
        if seen.contains(&finding) || seen.len() >= MAX_FINDINGS {
            return false;
        }
        drop(seen);
        let mut seen = self.seen.write().unwrap_or_else(PoisonError::into_inner);
        seen.len() < MAX_FINDINGS && seen.insert(finding)
    }

    /// Removes and returns all findings.
    pub(super) fn take(&self) -> BTreeSet<Finding> {
        std::mem::take(&mut self.seen.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a finding of the row `id`, and logs it if it is new.
    pub(super) fn report(&self, id: &SampleId, finding: &Finding) {
        if !self.add(finding.clone()) || self.is_silent {
            return;
        }
        match finding {
            Finding::Unknown(..) => tracing::warn!(row = %id, "{finding}; reported once"),
            Finding::Metadata(..) | Finding::Note(_) => {
                tracing::info!(row = %id, "{finding}; reported once");
            }
        }
    }
}

/// The findings in the first rows of a file, with the number of rows that have each.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Number of rows that were checked.
    pub(super) rows: usize,
    pub(super) counts: BTreeMap<Finding, usize>,
}

impl Survey {
    /// Adds the findings of one row.
    pub(super) fn add(&mut self, findings: BTreeSet<Finding>) {
        self.rows += 1;
        for finding in findings {
            *self.counts.entry(finding).or_default() += 1;
        }
    }

    /// One line for each finding.
    pub(super) fn lines(&self) -> impl Iterator<Item = (&Finding, String)> {
        let of = |(finding, count): (_, &usize)| {
            let of = if *count == self.rows { String::new() } else { format!("{count} of ") };
            let line = format!("{finding} ({of}the first {} rows)", self.rows);
            (finding, line)
        };
        self.counts.iter().map(of)
    }

    /// Logs each finding and marks it as reported.
    pub(super) fn log(&self, file: &Path, findings: &Findings) {
        for (finding, line) in self.lines() {
            findings.add(finding.clone());
            match finding {
                Finding::Unknown(..) => tracing::warn!(file = %file.display(), "{line}"),
                Finding::Metadata(..) | Finding::Note(_) => {
                    tracing::info!(file = %file.display(), "{line}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_new_once_and_there_are_at_most_100() {
        let findings = Findings::default();
        assert!(findings.add(Finding::Unknown(Place::Turn, "a".to_owned())));
        assert!(!findings.add(Finding::Unknown(Place::Turn, "a".to_owned())));
        let new = (0..200).filter(|n| findings.add(Finding::Unknown(Place::Part, n.to_string())));
        assert_eq!(new.count(), 99);
    }
}
