//! The weight files of a model folder, under the names of the model's parameters.

use super::setup_error::SetupError;
use crate::checkpoint::{CheckpointError, WeightFiles};
use crate::models::ModelConfig;
use crate::nn::{ParamSpec, TensorNames};
use candle_core::{DType, Device};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

pub(super) fn files_error(folder: &Path, source: CheckpointError) -> SetupError {
    SetupError::Files { folder: folder.to_owned(), source: Box::new(source) }
}

/// Opens the weight files of a model folder under the names of the model's parameters.
pub(super) fn named_files(
    folder: &Path,
    names: TensorNames,
) -> Result<WeightFiles, CheckpointError> {
    WeightFiles::open(folder).and_then(|of| of.renamed(|name| names.of_file(name)))
}

/// Name and shape of each tensor that files have for a parameter.
fn in_files(spec: &ParamSpec) -> Vec<(String, Vec<usize>)> {
    let pieces = spec.pieces();
    if pieces.is_empty() { vec![(spec.name.clone(), spec.shape.clone())] } else { pieces }
}

/// Joins the pieces that the files have in place of a parameter.
pub(super) fn with_pieces(files: WeightFiles, specs: &[ParamSpec]) -> WeightFiles {
    specs.iter().fold(files, |files, spec| match spec.pieces() {
        pieces if pieces.is_empty() => files,
        pieces => files.joined(&spec.name, &spec.shape, &pieces),
    })
}

/// Opens the weight files and compares their names and shapes with the config. Returns the config
/// of a model as the files have it.
pub(super) fn open_files(
    folder: &Path,
    config: Arc<dyn ModelConfig>,
) -> Result<(Arc<dyn ModelConfig>, WeightFiles), SetupError> {
    let files = named_files(folder, config.tensor_names());
    let files = files.map_err(|source| files_error(folder, source))?;
    let config = config.of_files(&|name| files.shape(name)).unwrap_or(config);
    let specs = config.param_specs();
    let needed: Vec<(String, Vec<usize>)> = specs.iter().flat_map(in_files).collect();
    let missing = || needed.iter().filter(|(name, _)| files.shape(name).is_none());
    if let Some((first, _)) = missing().next() {
        return Err(SetupError::MissingTensors {
            folder: folder.to_owned(),
            count: missing().count(),
            total: needed.len(),
            first: first.clone(),
            instead: instead(files.names(), &needed),
        });
    }
    for (name, expected) in needed {
        let found = files.shape(&name).unwrap_or_default();
        if found != expected {
            return Err(SetupError::Shape { folder: folder.to_owned(), name, found, expected });
        }
        if files.dtype(&name).is_none() {
            // Reading no element of it returns the error.
            let read = files.load_part(&name, 0..0, DType::F32, &Device::Cpu);
            read.map_err(|source| files_error(folder, source))?;
        }
    }
    let files = with_pieces(files, &specs);
    Ok((config, files))
}

/// Names of the tensors that the model does not use, such as those of multi-token prediction. Some
/// folders contain a tied head, which equals the embedding and is not listed.
pub(super) fn unused<'a>(files: &'a WeightFiles, specs: &[ParamSpec]) -> Vec<&'a str> {
    let known: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    let names = files.names().filter(|name| *name != "lm_head.weight");
    names.filter(|name| !known.contains(name)).collect()
}

/// What weight files have in place of the tensors of a model.
fn instead<'a>(
    names: impl Iterator<Item = &'a str>,
    needed: &[(String, Vec<usize>)],
) -> Option<String> {
    let known: HashSet<&str> = needed.iter().map(|(name, _)| name.as_str()).collect();
    let unused: Vec<&str> = names.filter(|name| !known.contains(name)).collect();
    let first = unused.first()?;
    let all = |prefix: &str| unused.iter().all(|name| name.starts_with(prefix));
    let meaning = if all("base_model.model.") {
        ": this is a PEFT adapter; set `model.path` to its base, and `adapter.start_from` to this folder"
    } else if all("module.") {
        ": a wrapper for several GPUs has saved them with the prefix `module.`; save the model without it"
    } else if all("_orig_mod.") {
        ": `torch.compile` has saved them with the prefix `_orig_mod.`; save the model without it"
    } else {
        ""
    };
    Some(format!(
        "; the files have {} other tensors, the first is `{first}`{meaning}",
        unused.len()
    ))
}
