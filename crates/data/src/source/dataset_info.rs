//! `dataset_info.json` of LLaMA-Factory: where the rows of a data set are, and what it calls the
//! keys and the roles of a row.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::raw_row::RawRow;

/// Keys that name the columns of a row, and our names. `messages` is not one of them: it depends on
/// the tags.
const COLUMNS: [(&str, &str); 9] = [
    ("prompt", "instruction"),
    ("query", "input"),
    ("response", "output"),
    ("history", "history"),
    ("system", "system"),
    ("tools", "tools"),
    ("images", "images"),
    ("videos", "videos"),
    ("audios", "audios"),
];
/// Columns that have a name although an entry does not give it.
const DEFAULT_COLUMNS: [(&str, &str); 4] = [
    ("prompt", "instruction"),
    ("query", "input"),
    ("response", "output"),
    ("messages", "conversations"),
];
/// Tags of roles: their keys, their defaults and our names.
const ROLES: [(&str, &str, &str); 5] = [
    ("user_tag", "human", "human"),
    ("assistant_tag", "gpt", "gpt"),
    ("observation_tag", "observation", "observation"),
    ("function_tag", "function_call", "function_call"),
    ("system_tag", "system", "system"),
];
/// Keys of an entry that lead to data elsewhere, or to something other than fine-tuning.
const REFUSED: [(&str, &str); 10] = [
    ("hf_hub_url", "download the data set and name its file as `file_name`"),
    ("ms_hub_url", "download the data set and name its file as `file_name`"),
    ("om_hub_url", "download the data set and name its file as `file_name`"),
    ("cloud_file_name", "download the file and name it as `file_name`"),
    ("script_url", "run the script and write its rows to a file"),
    ("ranking", "preference data is not supported"),
    ("subset", "name the file of the subset as `file_name`"),
    ("folder", "name the file in the folder as `file_name`"),
    ("load_from", "name a file as `file_name`"),
    ("kto_tag", "preference data is not supported"),
];
/// Keys of an entry that are read, and one that has no effect on training.
const READ: [&str; 7] =
    ["file_name", "formatting", "columns", "tags", "split", "num_samples", "file_sha1"];

/// The reason why an entry of `dataset_info.json` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DatasetInfoError {
    #[error("`{found}` has no `#`, expected `FILE#NAME`")]
    NoName { found: String },
    #[error("cannot read `{}`: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("`{}` is not JSON: {problem}", .path.display())]
    Json { path: PathBuf, problem: String },
    #[error("`{}` has no entry `{name}`; it has {known}", .path.display())]
    NoEntry { path: PathBuf, name: String, known: String },
    #[error("`{key}` of `{name}` in `{}` is `{found}`: {hint}", .path.display())]
    Key {
        path: PathBuf,
        name: String,
        /// The key, with dots.
        key: String,
        found: String,
        hint: String,
    },
}

/// An entry of `dataset_info.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetInfo {
    path: PathBuf,
    folder: PathBuf,
    num_samples: Option<u64>,
    mapping: Mapping,
}

/// Their names of the keys and roles of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Their key and ours.
    columns: Vec<(String, &'static str)>,
    /// The key of the turns, and how they are written; `None` for alpaca rows.
    turns: Option<(String, TurnKeys)>,
}

/// The keys of a turn and the names of roles.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TurnKeys {
    role: String,
    content: String,
    roles: Vec<(String, &'static str)>,
}

impl DatasetInfo {
    /// Reads the entry that `FILE#NAME` names.
    pub fn of(text: &str) -> Result<Self, DatasetInfoError> {
        let (file, name) = text
            .rsplit_once('#')
            .ok_or_else(|| DatasetInfoError::NoName { found: text.to_owned() })?;
        Self::read(Path::new(file), name)
    }

    /// Reads the entry `name` of the file at `path`.
    pub fn read(path: &Path, name: &str) -> Result<Self, DatasetInfoError> {
        let owned = || path.to_owned();
        let text =
            files::read(path).map_err(|source| DatasetInfoError::Read { path: owned(), source })?;
        let root: Value = serde_json::from_slice(&text).map_err(|error| {
            DatasetInfoError::Json { path: owned(), problem: error.to_string() }
        })?;
        let Some(Value::Object(entry)) = root.get(name) else {
            let names = root.as_object().into_iter().flat_map(Map::keys);
            let known: Vec<String> = names.take(20).map(|name| format!("`{name}`")).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(DatasetInfoError::NoEntry { path: owned(), name: name.to_owned(), known });
        };
        InfoEntry { path, name, keys: entry }.info()
    }

    /// The file or folder with the rows.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of `dataset_info.json`: image paths start there.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Number of rows that an epoch uses; `None`: each row once.
    pub fn num_samples(&self) -> Option<u64> {
        self.num_samples
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Hash of what decides which samples the rows become.
    pub(crate) fn digest(&self) -> [u8; 32] {
        let Self { path: _, folder: _, num_samples, mapping } = self;
        Sha256::digest(format!("{num_samples:?} {mapping:?}").as_bytes()).into()
    }
}

struct InfoEntry<'a> {
    path: &'a Path,
    name: &'a str,
    keys: &'a Map<String, Value>,
}

impl InfoEntry<'_> {
    fn info(&self) -> Result<DatasetInfo, DatasetInfoError> {
        for (key, value) in self.keys {
            let is_off = matches!(value, Value::Null | Value::Bool(false)) || value == "";
            let refused = REFUSED.iter().find(|(refused, _)| refused == key);
            match refused {
                _ if is_off => {}
                Some((_, hint)) => return Err(self.fault(key, value, hint)),
                None if READ.contains(&key.as_str()) => {}
                None => return Err(self.fault(key, value, "this key is unknown")),
            }
        }
        let text = |key: &str| self.keys.get(key).and_then(Value::as_str);
        match text("split") {
            None | Some("train") => {}
            Some(split) => {
                let hint = "a file has no splits: name the file of this split as `file_name`";
                return Err(self.fault("split", &Value::from(split), hint));
            }
        }
        let Some(file) = text("file_name").filter(|file| !file.is_empty()) else {
            return Err(self.fault("file_name", &Value::Null, "expected the name of a file"));
        };
        let num_samples = match self.keys.get("num_samples") {
            None | Some(Value::Null) => None,
            Some(value) => match value.as_u64().filter(|samples| *samples > 0) {
                Some(samples) => Some(samples),
                None => {
                    return Err(self.fault(
                        "num_samples",
                        value,
                        "expected a whole number above 0",
                    ));
                }
            },
        };
        let folder = self.path.parent().unwrap_or(Path::new("")).to_owned();
        let mapping = self.mapping(text("formatting").unwrap_or("alpaca"))?;
        Ok(DatasetInfo { path: folder.join(file), folder, num_samples, mapping })
    }

    fn mapping(&self, formatting: &str) -> Result<Mapping, DatasetInfoError> {
        let is_alpaca = match formatting {
            "alpaca" => true,
            "sharegpt" => false,
            _ => {
                let found = Value::from(formatting);
                return Err(self.fault("formatting", &found, "expected `alpaca` or `sharegpt`"));
            }
        };
        let (given, tags) = (self.texts("columns")?, self.texts("tags")?);
        let known = |key: &str| key == "messages" || COLUMNS.iter().any(|(known, _)| *known == key);
        if let Some((key, name)) = given.iter().find(|(key, _)| !known(key)) {
            let hint = "this column is not supported";
            return Err(self.fault(&format!("columns.{key}"), &Value::from(name.as_str()), hint));
        }
        let column = |key: &str| {
            let named =
                given.iter().find(|(column, _)| column == key).map(|(_, name)| name.as_str());
            // `columns` replaces all defaults, as in LLaMA-Factory
            let default = DEFAULT_COLUMNS.iter().find(|(column, _)| *column == key);
            let default = default.filter(|_| given.is_empty());
            named.or(default.map(|(_, name)| *name)).map(str::to_owned)
        };
        let is_text = |ours: &str| matches!(ours, "instruction" | "input" | "output" | "history");
        let columns = COLUMNS.iter().filter(|(_, ours)| is_alpaca || !is_text(ours));
        let columns = columns.filter_map(|(key, ours)| column(key).map(|name| (name, *ours)));
        let columns = columns.collect();
        let turns = if is_alpaca { None } else { column("messages").zip(Some(self.turns(&tags)?)) };
        Ok(Mapping { columns, turns })
    }

    fn turns(&self, tags: &[(String, String)]) -> Result<TurnKeys, DatasetInfoError> {
        let known = |tag: &str| {
            matches!(tag, "role_tag" | "content_tag")
                || ROLES.iter().any(|(known, ..)| *known == tag)
        };
        if let Some((tag, name)) = tags.iter().find(|(tag, _)| !known(tag)) {
            let found = Value::from(name.as_str());
            return Err(self.fault(&format!("tags.{tag}"), &found, "this tag is not supported"));
        }
        let tag = |key: &str, default: &str| {
            let named = tags.iter().find(|(tag, _)| tag == key).map(|(_, name)| name.clone());
            named.unwrap_or_else(|| default.to_owned())
        };
        let roles = ROLES.iter().map(|(key, default, ours)| (tag(key, default), *ours)).collect();
        Ok(TurnKeys { role: tag("role_tag", "from"), content: tag("content_tag", "value"), roles })
    }

    fn texts(&self, section: &str) -> Result<Vec<(String, String)>, DatasetInfoError> {
        let mut texts = Vec::new();
        match self.keys.get(section) {
            None | Some(Value::Null) => {}
            Some(Value::Object(entries)) => {
                for (key, value) in entries.iter().filter(|(_, value)| !value.is_null()) {
                    let Some(text) = value.as_str() else {
                        let key = format!("{section}.{key}");
                        return Err(self.fault(&key, value, "expected a text"));
                    };
                    texts.push((key.clone(), text.to_owned()));
                }
            }
            Some(other) => return Err(self.fault(section, other, "expected an object")),
        }
        Ok(texts)
    }

    fn fault(&self, key: &str, found: &Value, hint: &str) -> DatasetInfoError {
        DatasetInfoError::Key {
            path: self.path.to_owned(),
            name: self.name.to_owned(),
            key: key.to_owned(),
            found: found.to_string().trim_matches('"').to_owned(),
            hint: hint.to_owned(),
        }
    }
}

impl Mapping {
    /// The columns that the entry names. Those that have their default name may be missing.
    pub(crate) fn named_columns(&self) -> impl Iterator<Item = &str> {
        let is_default = |theirs: &str, ours: &str| {
            DEFAULT_COLUMNS.iter().any(|(_, name)| *name == theirs && *name == ours)
        };
        let named = self.columns.iter().filter(move |(theirs, ours)| !is_default(theirs, ours));
        named.map(|(theirs, _)| &theirs[..])
    }

    /// Renames the keys and roles of a row to ours. A key of ours that the entry does not name is
    /// removed, because LLaMA-Factory does not read it; keys without a meaning stay.
    pub(crate) fn apply(&self, row: &mut RawRow) {
        let object = &mut row.object;
        let renamed: Vec<(&str, Value)> = self
            .columns
            .iter()
            .filter_map(|(theirs, ours)| Some((*ours, object.get(theirs)?.clone())))
            .collect();
        let turns = self.turns.as_ref().and_then(|(key, turns)| {
            let values = object.get(key)?.clone();
            Some((turns, values))
        });
        let named = self.columns.iter().map(|(theirs, _)| theirs);
        for theirs in named.chain(self.turns.iter().map(|(key, _)| key)) {
            object.shift_remove(theirs);
        }
        for (_, ours) in COLUMNS {
            object.shift_remove(ours);
        }
        for ours in ["messages", "conversations", "image", "video", "text"] {
            object.shift_remove(ours);
        }
        for (ours, value) in renamed {
            object.insert(ours.to_owned(), value);
        }
        let Some((turns, mut values)) = turns else { return };
        if let Value::Array(values) = &mut values {
            let first = values.first().and_then(|turn| turns.role_of(turn));
            if first == Some("system") {
                object.shift_remove("system"); // the turn wins, as in LLaMA-Factory
            }
            for value in values {
                turns.apply(value);
            }
        }
        object.insert("conversations".to_owned(), values);
    }
}

impl TurnKeys {
    /// Our name of the role of a turn.
    fn role_of(&self, turn: &Value) -> Option<&'static str> {
        let role = turn.get(&self.role)?.as_str()?;
        self.roles.iter().find(|(theirs, _)| theirs == role).map(|(_, ours)| *ours)
    }

    fn apply(&self, turn: &mut Value) {
        let role = self.role_of(turn);
        let Value::Object(turn) = turn else { return };
        let (from, content) = (turn.shift_remove(&self.role), turn.shift_remove(&self.content));
        if let Some(from) = role.map(Value::from).or(from) {
            turn.insert("from".to_owned(), from);
        }
        if let Some(content) = content {
            turn.insert("value".to_owned(), content);
        }
    }
}

#[cfg(test)]
mod tests;
