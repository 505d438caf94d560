//! An entry of `data.train` or `data.eval`, and its `path`: one text or a list of texts.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use settings::{Kind, Setting, above, section};

use crate::dataset::corpus::windows::CorpusConfig;
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

/// The files of a data set: paths of files, folders and patterns. It is empty if the config has
/// `dataset_info` instead.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataPath(Vec<PathBuf>);

impl DataPath {
    /// All paths, in the order of the config.
    pub fn paths(&self) -> &[PathBuf] {
        &self.0
    }

    /// All paths, to replace addresses of the hub by files.
    pub fn paths_mut(&mut self) -> &mut [PathBuf] {
        &mut self.0
    }

    /// The first path; an empty one if there is none.
    pub fn first(&self) -> &Path {
        self.0.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Whether the config has no path.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The default name of the data set: the first path without folders and extensions. For a
    /// pattern, the name of its folder.
    pub(crate) fn name(&self) -> String {
        let is_fixed = |path: &&Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            !name.is_empty() && !name.contains(['*', '?', '['])
        };
        let fixed = self.first().ancestors().find(is_fixed).unwrap_or(Path::new("data"));
        let stem = |path: &Path| PathBuf::from(path.file_stem().unwrap_or_default());
        let is_compressed = fixed.extension().is_some_and(|of| of == "gz" || of == "zst");
        let name = if is_compressed { stem(&stem(fixed)) } else { stem(fixed) };
        name.to_string_lossy().into_owned()
    }
}

impl<P: Into<PathBuf>> From<P> for DataPath {
    fn from(path: P) -> Self {
        Self(vec![path.into()])
    }
}

impl Setting for DataPath {
    fn kind() -> Kind {
        Kind::OneOf(vec![Kind::Path, Kind::List(Kind::Path.into())])
    }

    fn paths(&mut self, key: &str, visit: &mut dyn FnMut(&str, &mut PathBuf)) {
        self.0.iter_mut().for_each(|path| visit(key, path));
    }
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<String> = self.0.iter().map(|path| path.display().to_string()).collect();
        f.write_str(&paths.join(", "))
    }
}

impl Serialize for DataPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [path] => path.serialize(serializer),
            paths => paths.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for DataPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Paths;
        impl<'de> Visitor<'de> for Paths {
            type Value = DataPath;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or a list of paths that is not empty")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<DataPath, E> {
                Ok(text.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<DataPath, A::Error> {
                let mut paths = Vec::new();
                while let Some(path) = list.next_element()? {
                    paths.push(path);
                }
                if paths.is_empty() {
                    return Err(de::Error::invalid_length(0, &self));
                }
                Ok(DataPath(paths))
            }
        }
        deserializer.deserialize_any(Paths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_text_or_a_list_and_is_written_as_it_was_given() {
        for text in ["\"a.jsonl\"", "[\"a.jsonl\",\"b/*.parquet\"]"] {
            let path: DataPath = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&path).unwrap(), text);
        }
        assert!(serde_json::from_str::<DataPath>("[]").is_err());
        assert!(serde_json::from_str::<DataPath>("3").is_err());
    }

    #[test]
    fn a_data_set_is_named_after_its_file_or_folder() {
        for (path, name) in [
            ("a/train.jsonl", "train"),
            ("a/train.jsonl.gz", "train"),
            ("a/train.x.jsonl", "train.x"),
            ("a/b/", "b"),
            ("a/b/**/*.parquet", "b"),
            ("*.csv", "data"),
        ] {
            assert_eq!(DataPath::from(path).name(), name);
        }
    }
}
