//! `model.safetensors.index.json`: the shard of each tensor.

use super::super::CheckpointError;
use super::super::hf::SINGLE;
use crate::files;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// An index of shards.
#[derive(serde::Deserialize)]
pub(super) struct Index {
    /// The file of each tensor.
    pub(super) weight_map: BTreeMap<String, String>,
}

impl Index {
    pub(super) fn read(path: &Path) -> Result<Self, CheckpointError> {
        let text = files::read(path).map_err(CheckpointError::read(path))?;
        serde_json::from_slice(&text).map_err(|error| CheckpointError::invalid(path, &error))
    }
}

/// Whether an index says only that the tensors are in [`SINGLE`].
pub(super) fn names_only_single(path: &Path) -> bool {
    Index::read(path).is_ok_and(|index| index.weight_map.values().all(|name| name == SINGLE))
}

/// A file in the folder that is named like a shard and is none of `shards`.
pub(super) fn other_shard(folder: &Path, shards: &BTreeSet<&str>) -> Option<String> {
    let entries = fs::read_dir(folder).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_shard = |name: &String| name.starts_with("model-") && name.ends_with(".safetensors");
    names.filter(|name| is_shard(name) && !shards.contains(name.as_str())).min()
}
