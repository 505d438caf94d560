//! An entry of `data.train` or `data.eval`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::path::DataPath;
use crate::dataset::corpus::config::CorpusConfig;
use crate::source::ColumnNames;

/// A data set and how it is used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetConfig {
    /// A data file, a folder of data files, a pattern such as `data/*.parquet`, or a list of these;
    /// with `corpus` also a `.txt` file. Empty if `dataset_info` is given.
    #[serde(default, skip_serializing_if = "DataPath::is_empty")]
    pub path: DataPath,
    /// `FILE#NAME`: the entry NAME of a `dataset_info.json` of LLaMA-Factory, instead of `path`.
    #[serde(default)]
    pub dataset_info: Option<String>,
    /// Names of the columns, if the rows have another form. Null (the default): they have one of the
    /// known forms.
    #[serde(default)]
    pub columns: Option<ColumnNames>,
    /// Name of the data set in the metrics; null (the default): the name of the first file without
    /// extension, or of the folder, or of the entry.
    #[serde(default)]
    pub name: Option<String>,
    /// Folder of the images. Relative image paths start from it and must not leave it. Null (the
    /// default): the folder of the files.
    #[serde(default)]
    pub image_root: Option<PathBuf>,
    /// How often an epoch uses each row; 1.0 by default. 2.5 uses each row twice and half of the
    /// rows a third time. With `mixture: share`, the data set's share of the rows, relative to the
    /// sum of all weights.
    #[serde(default = "default_weight")]
    pub weight: f64,
    /// Whether `<image>`, `<video>`, `<bbox>` and `<ref-object>` are plain text in rows that list
    /// no images, videos or `objects`; false (the default): such rows are rejected.
    #[serde(default)]
    pub literal_placeholders: bool,
    /// Settings for plain text; null: the rows are chats.
    #[serde(default)]
    pub corpus: Option<CorpusConfig>,
}

impl DatasetConfig {
    /// A data set of chats with default settings.
    pub fn new(path: impl Into<DataPath>) -> Self {
        Self {
            path: path.into(),
            dataset_info: None,
            columns: None,
            name: None,
            image_root: None,
            weight: default_weight(),
            literal_placeholders: false,
            corpus: None,
        }
    }
}

impl DatasetConfig {
    /// The key that names no data or contradicts another key, its value, and the values that are
    /// valid.
    pub(super) fn source_fault(&self) -> Option<(&'static str, String, &'static str)> {
        if let Some(columns) = &self.columns {
            let fault = |expected| Some(("columns", "given".to_owned(), expected));
            let fault = match (&self.dataset_info, &self.corpus) {
                (Some(_), _) => fault("no `columns` in addition: the entry names the columns"),
                (_, Some(_)) => fault("no `corpus` in addition: its rows have the column `text`"),
                _ => columns.fault(),
            };
            if fault.is_some() {
                return fault;
            }
        }
        let entry = match (&self.dataset_info, self.path.is_empty()) {
            (None, true) => {
                return Some(("path", "missing".to_owned(), "a path, or else `dataset_info`"));
            }
            (None, false) => return None,
            (Some(entry), false) => {
                let expected = "no `path` in addition: the entry names the file";
                return Some(("dataset_info", entry.clone(), expected));
            }
            (Some(entry), true) => entry.clone(),
        };
        let expected = "no `corpus` in addition: the entry describes chats";
        self.corpus.as_ref().map(|_| ("dataset_info", entry, expected))
    }
}

/// Returns the name of each data set: `name`, or the file name without extension. Later data sets
/// with the same name get a number.
pub fn dataset_names(datasets: &[DatasetConfig]) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(datasets.len());
    for set in datasets {
        let given = datasets.iter().filter_map(|set| set.name.as_ref());
        let taken = |name: &String| names.contains(name) || given.clone().any(|n| n == name);
        let name = set.name.clone().unwrap_or_else(|| {
            let entry = set.dataset_info.as_ref().and_then(|info| info.rsplit_once('#'));
            let stem = entry.map_or_else(|| set.path.name(), |(_, name)| name.to_owned());
            let mut numbered = (2..).map(|number| format!("{stem}-{number}"));
            let first = Some(stem.clone()).filter(|stem| !taken(stem));
            first.or_else(|| numbered.find(|name| !taken(name))).unwrap_or(stem)
        });
        names.push(name);
    }
    names
}

fn default_weight() -> f64 {
    1.0
}
