//! An entry of `data.train` or `data.eval`.

use std::path::PathBuf;

use settings::{above, section};

use super::path::DataPath;
use crate::dataset::corpus::config::CorpusConfig;
use crate::source::ColumnNames;

/// A data set and how it is used.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetConfig {
    /// Data files ([formats](data-format.md#files)): a file, a folder, a pattern, an `hf://` address
    /// of the [Hub](hub.md), or a list of these; with `corpus` also a `.txt` file.
    /// Required without `dataset_info`
    #[key(default)]
    #[serde(skip_serializing_if = "DataPath::is_empty")]
    pub path: DataPath,
    /// Instead of `path`: `FILE#NAME`, an entry of LLaMA-Factory's
    /// [`dataset_info.json`](data-format.md#dataset_infojson-llama-factory)
    pub dataset_info: Option<PathBuf>,
    /// Names of the columns of rows that have [another form](data-format.md#media-with-columns-of-texts)
    pub columns: Option<ColumnNames>,
    /// Unique name in metrics and logs; `null`: the name of the first file without extension, of the
    /// folder, or of the entry of `dataset_info`
    pub name: Option<String>,
    /// Folder that image paths are relative to and must not leave; `null`: the folder of the files
    pub image_root: Option<PathBuf>,
    /// How often the data set is used; with `mixture: share`, its share of the rows
    #[key(default = 1.0)]
    #[valid(
        range = above(0.0),
        expected = "a finite number above 0",
        hint = "to leave a data set out, remove its entry"
    )]
    pub weight: f64,
    /// `true`: `<image>`, `<video>`, `<bbox>` and `<ref-object>` are plain text in rows that list no
    /// images, videos or `objects`
    #[key(default)]
    pub literal_placeholders: bool,
    /// Reads the file as plain text ([corpora](corpora.md)); `null`: chats
    pub corpus: Option<CorpusConfig>,
}

impl DatasetConfig {
    /// A data set of chats with default settings.
    pub fn new(path: impl Into<DataPath>) -> Self {
        Self { path: path.into(), ..Self::default() }
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
                return Some(("dataset_info", entry.display().to_string(), expected));
            }
            (Some(entry), true) => entry.display().to_string(),
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
            let entry = set.dataset_info.as_ref().and_then(|info| info.to_str()?.rsplit_once('#'));
            let stem = entry.map_or_else(|| set.path.name(), |(_, name)| name.to_owned());
            let mut numbered = (2..).map(|number| format!("{stem}-{number}"));
            let first = Some(stem.clone()).filter(|stem| !taken(stem));
            first.or_else(|| numbered.find(|name| !taken(name))).unwrap_or(stem)
        });
        names.push(name);
    }
    names
}
