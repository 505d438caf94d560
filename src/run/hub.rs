//! Replaces hub ids in a config by folders and files in the hub's cache.

use super::error::RunError;
use super::observer::{SetupObserver, SetupWork};
use crate::checkpoint::is_model_file;
use crate::config::RunConfig;
use crate::files;
use crate::net::hub::{Hub, HubError, Repo, Selection};
use crate::train::Weights;
use std::path::{Path, PathBuf};

/// Returns the config with local paths. Downloads the model if `model.path` is a hub id, and data
/// files whose path starts with `hf://`, unless they are in the hub's cache.
///
/// [`Run`](super::Run) calls this itself; a config with local paths is unchanged.
pub fn download(config: &RunConfig, observer: &dyn SetupObserver) -> Result<RunConfig, RunError> {
    let mut config = config.clone();
    let model = &mut config.model;
    model.path = model_folder(&model.path, model.weights, observer).map_err(|problem| {
        RunError::Hub { key: "model.path".to_owned(), problem: Box::new(problem) }
    })?;
    let data = &mut config.data;
    for (list, sets) in [("train", &mut data.train), ("eval", &mut data.eval)] {
        for (index, set) in sets.iter_mut().enumerate() {
            for path in set.path.paths_mut() {
                *path = data_path(path, observer).map_err(|problem| RunError::Hub {
                    key: format!("data.{list}.{index}.path"),
                    problem: Box::new(problem),
                })?;
            }
        }
    }
    Ok(config)
}

/// Returns `path` if it is a folder. Otherwise takes it for a hub id, downloads what the hub's
/// cache lacks, and returns the folder in the cache.
pub fn model_folder(
    path: &Path,
    weights: Weights,
    observer: &dyn SetupObserver,
) -> Result<PathBuf, HubError> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    let text = path.to_string_lossy();
    let not_an_id = |found| HubError::NotAnId { text: text.clone().into_owned(), found };
    if path.exists() {
        return Err(not_an_id("a file"));
    }
    let repo = Repo::model(&text).ok_or_else(|| not_an_id("nothing"))?;
    tracing::info!("there is no folder `{text}`: it is taken for an id of the Hugging Face Hub");
    let begin = |total| observer.begin(SetupWork::DownloadBytes, total);
    Hub::from_env()?.fetch(&repo, &ModelFiles(weights), &begin)
}

/// Returns `path`, or the path in the cache of what `hf://datasets/owner/name/path` names: a file,
/// a folder or a pattern.
fn data_path(path: &Path, observer: &dyn SetupObserver) -> Result<PathBuf, HubError> {
    let Some(text) = path.to_str().filter(|text| text.starts_with("hf://")) else {
        return Ok(path.to_owned());
    };
    let (repo, inside) =
        Repo::dataset_file(text).ok_or_else(|| HubError::NotADataFile { text: text.to_owned() })?;
    let begin = |total| observer.begin(SetupWork::DownloadBytes, total);
    let folder = Hub::from_env()?.fetch(&repo, &DataFiles { path: inside.clone() }, &begin)?;
    Ok(folder.join(inside))
}

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The files of a model folder.
struct ModelFiles(Weights);

impl Selection for ModelFiles {
    fn choose(&self, repo: &Repo, all: &[String]) -> Result<Vec<String>, HubError> {
        let with_weights = self.0 == Weights::Pretrained;
        let has_weights = all.iter().any(|name| name == SINGLE || name == INDEX);
        if !all.iter().any(|name| name == "config.json") || (with_weights && !has_weights) {
            let what = "`config.json` with `model.safetensors` or `model.safetensors.index.json`";
            return Err(HubError::NoFiles { repo: repo.clone(), what });
        }
        let is_needed = |name: &&String| {
            is_model_file(name) && (with_weights || !name.contains(".safetensors"))
        };
        Ok(all.iter().filter(is_needed).cloned().collect())
    }

    fn lacks(&self, folder: &Path) -> Option<String> {
        let is_there = |name: &str| folder.join(name).exists();
        let lacking = |name: &str| Some(format!("`{name}`"));
        if !is_there("config.json") {
            return lacking("config.json");
        }
        if self.0 == Weights::Random || is_there(SINGLE) {
            return None;
        }
        let Ok(index) = files::read(folder.join(INDEX)) else { return lacking(SINGLE) };
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
        let mut shards = index["weight_map"].as_object().into_iter().flat_map(|map| map.values());
        let missing = shards.find_map(|shard| shard.as_str().filter(|name| !is_there(name)))?;
        lacking(missing)
    }
}

/// The data files that a path inside a repository names.
struct DataFiles {
    /// A file, a folder, or a pattern with `*`.
    path: String,
}

impl DataFiles {
    fn names(&self, name: &str) -> bool {
        let path = self.path.as_str();
        if path.contains(['*', '?', '[']) {
            let separate =
                glob::MatchOptions { require_literal_separator: true, ..Default::default() };
            return glob::Pattern::new(path).is_ok_and(|it| it.matches_with(name, separate));
        }
        let in_folder = match path {
            "" => Some(name),
            _ => name.strip_prefix(path).and_then(|rest| rest.strip_prefix('/')),
        };
        // A folder has no hidden files, no files in folders, and not the page of the data set.
        let is_data =
            |name: &str| !name.contains('/') && !name.starts_with('.') && name != "README.md";
        name == path || in_folder.is_some_and(is_data)
    }
}

impl Selection for DataFiles {
    fn choose(&self, repo: &Repo, all: &[String]) -> Result<Vec<String>, HubError> {
        let found: Vec<String> = all.iter().filter(|name| self.names(name)).cloned().collect();
        if !found.is_empty() {
            return Ok(found);
        }
        let mut others: Vec<&String> = all.iter().collect();
        let distance = |name: &&String| strsim::damerau_levenshtein(name, &self.path);
        others.sort_by_key(distance);
        others.truncate(3);
        let others: Vec<String> = others.into_iter().map(|name| format!("`{name}`")).collect();
        Err(HubError::NotFound {
            what: format!("file `{}` in `{repo}`", self.path),
            others: Some(others.join(", ")).filter(|others| !others.is_empty()),
        })
    }

    /// Without the list of files, only a single file is known to be complete.
    fn lacks(&self, folder: &Path) -> Option<String> {
        let is_file = folder.join(&self.path).is_file();
        (!is_file).then(|| format!("`{}`", self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(path: &str, all: &[&str]) -> Vec<String> {
        let all: Vec<String> = all.iter().copied().map(str::to_owned).collect();
        let repo = Repo::model("o/n").unwrap();
        DataFiles { path: path.to_owned() }.choose(&repo, &all).unwrap_or_default()
    }

    #[test]
    fn a_path_in_a_repository_names_a_file_a_folder_or_files_by_pattern() {
        let all = [
            ".gitattributes",
            "README.md",
            "a.jsonl",
            "d/t-0.parquet",
            "d/t-1.parquet",
            "d/e/v.parquet",
        ];
        assert_eq!(chosen("a.jsonl", &all), ["a.jsonl"]);
        assert_eq!(chosen("", &all), ["a.jsonl"]);
        assert_eq!(chosen("d", &all), ["d/t-0.parquet", "d/t-1.parquet"]);
        assert_eq!(chosen("d/t-*.parquet", &all), ["d/t-0.parquet", "d/t-1.parquet"]);
        assert_eq!(chosen("d/*.parquet", &all), ["d/t-0.parquet", "d/t-1.parquet"]);
        assert_eq!(
            chosen("**/*.parquet", &all),
            ["d/t-0.parquet", "d/t-1.parquet", "d/e/v.parquet"]
        );
        assert_eq!(chosen("d/t", &all), [""; 0]);
    }

    #[test]
    fn a_model_needs_its_weights_only_if_they_are_used() {
        let all = [
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "README.md",
            "onnx/model.onnx",
            "original/model.safetensors",
            "pytorch_model.bin",
        ]
        .map(str::to_owned);
        let repo = Repo::model("o/n").unwrap();
        let choose = |weights, all: &[String]| ModelFiles(weights).choose(&repo, all);
        let used = ["config.json", "tokenizer.json", "model.safetensors"];
        assert_eq!(choose(Weights::Pretrained, &all).unwrap(), used);
        assert_eq!(choose(Weights::Random, &all).unwrap(), used[..2]);
        assert!(choose(Weights::Pretrained, &all[..2]).is_err());
    }
}
