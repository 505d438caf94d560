//! The files of a data set: from the paths, folders and patterns of the config.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::sniff::without_compression;
use crate::source::source_error::SourceError;

/// Extensions of the data files of a folder, without that of the compression.
const EXTENSIONS: [&str; 8] = ["jsonl", "ndjson", "json", "parquet", "arrow", "csv", "tsv", "tar"];
/// Files next to data files that describe them.
const METADATA: [&str; 4] =
    ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// Returns the files of all `paths` in their order; those of a folder or pattern in natural order,
/// in which `part-2` is before `part-10`.
pub(crate) fn data_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, SourceError> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(of_folder(path)?);
        } else if !path.exists() && is_pattern(path) {
            files.extend(of_pattern(path)?);
        } else {
            files.push(path.clone());
        }
    }
    let mut seen = BTreeSet::new();
    let is_second = |file: &&PathBuf| file.canonicalize().is_ok_and(|real| !seen.insert(real));
    if let Some(file) = files.iter().find(is_second) {
        tracing::warn!(
            "`{}` is twice in a data set, which uses its rows twice; `weight` does this for all rows",
            file.display()
        );
    }
    Ok(files)
}

/// The folder that relative paths of images start from, unless the config has one: a folder of the
/// config itself, or the innermost folder that has all files.
pub(crate) fn image_root(paths: &[PathBuf], files: &[PathBuf]) -> PathBuf {
    let root = match paths {
        [path] if path.is_dir() => path.clone(),
        _ => {
            let mut folders = files.iter().filter_map(|file| file.parent());
            let first = folders.next().unwrap_or(Path::new(""));
            folders.fold(first.to_owned(), |common, folder| {
                let pairs = common.components().zip(folder.components());
                pairs.take_while(|(one, other)| one == other).map(|(one, _)| one).collect()
            })
        }
    };
    if root == Path::new("") { PathBuf::from(".") } else { root }
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

fn of_pattern(path: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let none = |searched: String| SourceError::NoFiles { path: path.to_owned(), searched };
    let pattern = path.to_string_lossy();
    let found =
        glob::glob(&pattern).map_err(|error| none(format!("the pattern is invalid: {error}")))?;
    let mut files = Vec::new();
    for entry in found {
        let file = entry.map_err(|error| SourceError::Read {
            path: error.path().to_owned(),
            cause: error.into(),
        })?;
        if file.is_file() {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(none("the pattern matches no file".to_owned()));
    }
    files.sort_by(|one, other| natural_order(one, other));
    Ok(files)
}

fn of_folder(folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    if let Some(files) = of_saved_dataset(folder)? {
        return Ok(files);
    }
    let unreadable = |cause| SourceError::Read { path: folder.to_owned(), cause };
    let (mut files, mut extensions) = (Vec::new(), BTreeSet::new());
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or(".");
        if name.starts_with(['.', '_']) || METADATA.contains(&name) || !path.is_file() {
            continue;
        }
        if let Some(extension) = EXTENSIONS.iter().find(|of| **of == data_extension(name)) {
            extensions.insert(*extension);
            files.push(path);
        }
    }
    let path = folder.to_owned();
    if files.is_empty() {
        let searched = format!("its files do not end in .{}", EXTENSIONS.join(", ."));
        return Err(SourceError::NoFiles { path, searched });
    }
    if extensions.len() > 1 {
        let found: Vec<String> = extensions.iter().map(|of| format!(".{of}")).collect();
        return Err(SourceError::Mixed { path, found: found.join(", ") });
    }
    let splits: BTreeSet<String> = files.iter().filter_map(|file| split_of(file)).collect();
    if splits.len() > 1 {
        let splits = splits.into_iter().collect::<Vec<_>>().join(", ");
        return Err(SourceError::Splits { path, splits });
    }
    files.sort_by(|one, other| natural_order(one, other));
    Ok(files)
}

/// The split that a file name such as `train-00000-of-00002.parquet` begins with.
fn split_of(file: &Path) -> Option<String> {
    const SPLITS: [&str; 7] = ["train", "validation", "valid", "val", "dev", "test", "eval"];
    let name = file.file_name()?.to_str()?.to_ascii_lowercase();
    let word = name.split(['-', '_', '.']).next()?;
    SPLITS.contains(&word).then(|| word.to_owned())
}

/// The extension of a file name in lower case, without that of a compression.
fn data_extension(name: &str) -> String {
    let name = without_compression(Path::new(name));
    name.extension().and_then(OsStr::to_str).unwrap_or_default().to_ascii_lowercase()
}

/// The files of a folder that `datasets` wrote with `save_to_disk`. `None` for another folder.
fn of_saved_dataset(folder: &Path) -> Result<Option<Vec<PathBuf>>, SourceError> {
    if let Some(dict) = json(&folder.join("dataset_dict.json"))? {
        let splits = dict["splits"].as_array().cloned().unwrap_or_default();
        let splits: Vec<&str> = splits.iter().filter_map(Value::as_str).collect();
        if let [split] = splits[..] {
            return of_saved_dataset(&folder.join(split));
        }
        let splits = splits.join(", ");
        return Err(SourceError::Splits { path: folder.to_owned(), splits });
    }
    let Some(state) = json(&folder.join("state.json"))? else { return Ok(None) };
    let Some(files) = state["_data_files"].as_array() else { return Ok(None) };
    let files = files.iter().filter_map(|file| Some(folder.join(file["filename"].as_str()?)));
    let files: Vec<PathBuf> = files.collect();
    if files.is_empty() {
        let searched = "`_data_files` of its state.json is empty".to_owned();
        return Err(SourceError::NoFiles { path: folder.to_owned(), searched });
    }
    if state["_indices_data_files"].as_array().is_some_and(|files| !files.is_empty()) {
        let problem =
            "its rows are selected by an index file: call `flatten_indices` before `save_to_disk`";
        return Err(SourceError::broken(folder, "a folder written by `datasets`", problem));
    }
    Ok(Some(files))
}

/// The content of a JSON file; `None` if there is no such file.
fn json(path: &Path) -> Result<Option<Value>, SourceError> {
    let file = match files::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|cause| SourceError::Read { path: path.to_owned(), cause })?,
    };
    let value = serde_json::from_reader(io::BufReader::new(file));
    let value = value.map_err(|error| SourceError::broken(path, "JSON metadata", &error))?;
    Ok(Some(value))
}

/// Compares paths by their parts; digits compare as numbers.
fn natural_order(one: &Path, other: &Path) -> Ordering {
    let key = |path: &Path| -> Vec<Vec<NamePart>> {
        path.components()
            .map(|part: Component<'_>| pieces(&part.as_os_str().to_string_lossy()))
            .collect()
    };
    key(one).cmp(&key(other)).then_with(|| one.cmp(other))
}

/// A part of a name: numbers are before texts.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NamePart {
    /// Number of digits without leading zeros, and the digits.
    Number(usize, String),
    Text(String),
}

fn pieces(name: &str) -> Vec<NamePart> {
    let mut pieces = Vec::new();
    let mut rest = name;
    while let Some(first) = rest.chars().next() {
        let is_number = first.is_ascii_digit();
        let end = rest.find(|c: char| c.is_ascii_digit() != is_number).unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        let digits = piece.trim_start_matches('0');
        pieces.push(if is_number {
            NamePart::Number(digits.len(), digits.to_owned())
        } else {
            NamePart::Text(piece.to_owned())
        });
        rest = after;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(folder: &Path, names: &[&str]) {
        for name in names {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::File::create(path).unwrap();
        }
    }

    fn names(folder: &Path, path: &str) -> Result<Vec<String>, String> {
        let files = data_files(&[folder.join(path)]).map_err(|error| error.to_string())?;
        let name = |file: &PathBuf| file.strip_prefix(folder).unwrap().display().to_string();
        Ok(files.iter().map(name).collect())
    }

    #[test]
    fn shards_are_in_natural_order_and_other_files_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        touch(folder, &["a/p-10.parquet", "a/p-9.parquet", "a/p-009b.parquet", "a/README.md"]);
        touch(
            folder,
            &["a/.p.parquet", "a/dataset_info.json", "a/0.png", "b/x.jsonl.gz", "b/c.csv"],
        );
        let sorted = ["a/p-9.parquet", "a/p-009b.parquet", "a/p-10.parquet"].map(str::to_owned);
        assert_eq!(names(folder, "a").unwrap(), sorted);
        assert_eq!(names(folder, "*/p-*.parquet").unwrap(), sorted);
        assert_eq!(names(folder, "b/x.jsonl.gz").unwrap(), ["b/x.jsonl.gz"]);
        assert_eq!(names(folder, "none.jsonl").unwrap(), ["none.jsonl"], "opening it is an error");
        for (path, problem) in [
            ("b", "several formats: .csv, .jsonl"),
            ("*.parquet", "matches no file"),
            (".", "do not end in .jsonl"),
        ] {
            let error = names(folder, path).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn a_folder_with_several_splits_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        touch(folder, &["train-00000-of-00001.jsonl", "Test.jsonl"]);
        let error = of_folder(folder).unwrap_err();
        assert!(error.to_string().ends_with("has the splits test, train"), "{error}");
        fs::remove_file(folder.join("Test.jsonl")).unwrap();
        assert_eq!(of_folder(folder).unwrap().len(), 1);
    }

    #[test]
    fn a_folder_of_datasets_has_the_files_of_its_state_and_one_split() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        touch(folder, &["d/train/data-0.arrow", "d/train/cache-1.arrow"]);
        let write = |path: &str, text: &str| {
            fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
            io::Write::write_all(&mut fs::File::create(folder.join(path)).unwrap(), text.as_bytes())
        };
        write("d/train/state.json", r#"{"_data_files": [{"filename": "data-0.arrow"}]}"#).unwrap();
        write("d/dataset_dict.json", r#"{"splits": ["train"]}"#).unwrap();
        assert_eq!(names(folder, "d").unwrap(), ["d/train/data-0.arrow"]);
        write("d/dataset_dict.json", r#"{"splits": ["train", "test"]}"#).unwrap();
        assert!(names(folder, "d").unwrap_err().contains("has the splits train, test"));
    }

    #[test]
    fn images_are_relative_to_the_folder_that_has_all_files() {
        let root = |files: &[&str]| {
            let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
            image_root(&files, &files).display().to_string()
        };
        assert_eq!(root(&["a.jsonl"]), ".");
        assert_eq!(root(&["a/b.jsonl"]), "a");
        assert_eq!(root(&["a/b/x.jsonl", "a/c/x.jsonl"]), "a");
        assert_eq!(root(&["a/x.jsonl", "b/x.jsonl"]), ".");
    }
}
