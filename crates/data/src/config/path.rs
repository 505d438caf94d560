//! The `path` of a data set: one text or a list of texts.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use settings::{Kind, Setting};

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
