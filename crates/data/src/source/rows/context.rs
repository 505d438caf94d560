//! What is given besides the value that is parsed: the rules of the data set, the row, and the
//! findings of the file. A finding is what users should know about the rows: keys that are not
//! read, and how the parser understood rows that may mean several things. Each is reported once per
//! data set.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use settings::Choice;

use super::super::dataset_info::DatasetInfo;
use super::super::raw_row::ColumnNames;
use super::super::sample_error::SampleFault;
use super::keys::{ObjectKind, Use, is_given, unread_media};
use super::values::{join, not_supported};
use batch::SampleId;

/// How an unknown key of a row is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum UnknownKeys {
    /// Each key is reported once per data set.
    #[default]
    Warn,
    /// The row is rejected.
    Error,
    /// The key is ignored.
    Ignore,
}

/// How the rows of a data set are understood.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowRules {
    /// Whether `<image>` and `<video>` are plain text in rows that list no images or no videos; by
    /// default such rows are rejected.
    pub literal_placeholders: bool,
    /// How unknown keys are handled.
    pub unknown_keys: UnknownKeys,
    /// The entry of `dataset_info.json` that names the keys and roles of the rows.
    pub info: Option<Arc<DatasetInfo>>,
    /// The names of the columns, if they are not ours.
    pub columns: Option<Arc<ColumnNames>>,
    /// The system turn of chats that have none.
    pub system: Option<Arc<str>>,
}

impl RowRules {
    /// A text that differs between rules that accept different rows.
    pub(crate) fn key(&self) -> String {
        let Self { literal_placeholders, unknown_keys, info, columns, system } = self;
        let info = info.as_ref().map(|info| info.digest());
        let strict = *unknown_keys == UnknownKeys::Error;
        let columns = columns.as_ref().map_or_else(String::new, |names| format!(", {names:?}"));
        let ignored = if *unknown_keys == UnknownKeys::Ignore { ", ignored" } else { "" };
        let system = system.as_ref().map_or_else(String::new, |text| format!(", system {text:?}"));
        format!(
            "literal {literal_placeholders}, strict {strict}{ignored}, info {info:?}{columns}{system}"
        )
    }
}

/// Parses the rows of one data file.
#[derive(Debug)]
pub(crate) struct RowParser {
    /// Folder that relative paths of images and videos start from.
    pub(crate) image_root: Arc<Path>,
    pub(crate) rules: RowRules,
    pub(super) findings: Findings,
}

impl RowParser {
    /// A parser without findings.
    pub(crate) fn new(image_root: &Path, rules: RowRules) -> Self {
        Self { image_root: image_root.into(), rules, findings: Findings::default() }
    }
}

/// The row that is being parsed.
pub(super) struct RowContext<'a> {
    pub(super) parser: &'a RowParser,
    pub(super) id: &'a SampleId,
    pub(super) blobs: &'a [Arc<[u8]>],
    /// A key that is not read and has images or videos, and the key that was meant.
    pub(super) unread: RefCell<Option<(String, &'static str)>>,
}

impl RowContext<'_> {
    /// Refuses and reports keys of the object at JSON path `at` that are not read.
    pub(super) fn check_keys(
        &self,
        place: ObjectKind,
        at: &str,
        object: &Map<String, Value>,
    ) -> Result<(), SampleFault> {
        let there = |name: &str| {
            let name = name.strip_prefix("file://").unwrap_or(name);
            self.parser.image_root.join(name).is_file()
        };
        for (key, value) in object.iter().filter(|(_, value)| !value.is_null()) {
            let finding = match place.use_of(key) {
                Use::Known => continue,
                Use::Refused(_) if !is_given(value) => continue,
                Use::Refused(what) => return Err(not_supported(&join(at, key), what)),
                _ if self.parser.rules.unknown_keys == UnknownKeys::Ignore => continue,
                Use::Metadata => Finding::Metadata(place, key.clone()),
                Use::Unknown if self.parser.rules.unknown_keys == UnknownKeys::Error => {
                    let (at, nearest) = (join(at, key), place.nearest(key));
                    return Err(SampleFault::UnknownKey { at, nearest });
                }
                Use::Unknown => Finding::Unknown(place, key.clone()),
            };
            self.parser.findings.report(self.id, &finding);
            let mut unread = self.unread.borrow_mut();
            if unread.is_none() {
                let meant = unread_media(place, key, value, &there);
                *unread = meant.map(|meant| (join(at, key), meant));
            }
        }
        Ok(())
    }

    /// Reports how the row was understood.
    pub(super) fn note(&self, note: &'static str) {
        self.parser.findings.report(self.id, &Finding::Note(note));
    }
}

/// Maximum number of findings of a file. Rows whose keys are data could have one key each.
const MAX_FINDINGS: usize = 100;

/// A property of rows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Finding {
    /// A key that may be misspelt.
    Unknown(ObjectKind, String),
    /// A key that does not affect training.
    Metadata(ObjectKind, String),
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
        assert!(findings.add(Finding::Unknown(ObjectKind::Turn, "a".to_owned())));
        assert!(!findings.add(Finding::Unknown(ObjectKind::Turn, "a".to_owned())));
        let new =
            (0..200).filter(|n| findings.add(Finding::Unknown(ObjectKind::Part, n.to_string())));
        assert_eq!(new.count(), 99);
    }
}
