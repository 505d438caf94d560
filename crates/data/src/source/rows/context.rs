//! What is given besides the value that is parsed: the rules of the data set, the findings of the
//! file and the row.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use settings::Choice;

use super::super::column_names::ColumnNames;
use super::super::dataset_info::DatasetInfo;
use super::super::error::SampleFault;
use super::keys::{Place, Use, is_given, unread_media};
use super::report::{Finding, Findings};
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
}

impl RowRules {
    /// A text that differs between rules that accept different rows.
    pub(crate) fn key(&self) -> String {
        let Self { literal_placeholders, unknown_keys, info, columns } = self;
        let info = info.as_ref().map(|info| info.digest());
        let strict = *unknown_keys == UnknownKeys::Error;
        let columns = columns.as_ref().map_or_else(String::new, |names| format!(", {names:?}"));
        let ignored = if *unknown_keys == UnknownKeys::Ignore { ", ignored" } else { "" };
        format!("literal {literal_placeholders}, strict {strict}{ignored}, info {info:?}{columns}")
    }
}

/// Parses the rows of one data file.
#[derive(Debug)]
pub(crate) struct RowParser {
    /// Folder that relative paths of images and videos start from.
    pub(crate) image_root: Arc<Path>,
    /// How rows are understood.
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
pub(super) struct At<'a> {
    pub(super) parser: &'a RowParser,
    pub(super) id: &'a SampleId,
    pub(super) blobs: &'a [Arc<[u8]>],
    /// A key that is not read and has images or videos, and the key that was meant.
    pub(super) unread: RefCell<Option<(String, &'static str)>>,
}

impl At<'_> {
    /// Refuses and reports keys of the object at JSON path `at` that are not read.
    pub(super) fn check_keys(
        &self,
        place: Place,
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
