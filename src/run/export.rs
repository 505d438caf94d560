//! Writes a model folder from a model and an adapter, or a clean folder from a checkpoint.

use super::adapter::{AdapterError, read_adapter};
use super::error::RunError;
use super::inputs::open_for_run;
use super::load_model::SetupError;
use crate::checkpoint::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, CarriedFiles, CheckpointError, FolderLayout, ModelFiles,
    SavedTensor, WeightFiles,
};
use crate::train::{ModelSection, Precision};
use candle_core::{DType, Device};
use std::path::Path;
use std::sync::Arc;

/// Numbers of tensors of a folder that was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exported {
    /// All tensors.
    pub tensors: usize,
    /// Weights to which the adapter was added.
    pub merged: usize,
    /// Weights that were trained besides the adapter.
    pub replaced: usize,
}

/// Writes the model in `base`, with the adapter in `adapter` merged into its weights, to the new
/// folder `out`.
///
/// All tensors of `base` are written, also those that training does not use. They keep their dtype
/// unless `onto` has another one. Sums are computed in `f32`, one weight at a time, so the model need
/// not fit into memory.
pub fn export_model(
    base: &Path,
    adapter: Option<&Path>,
    onto: Option<Precision>,
    out: &Path,
) -> Result<Exported, RunError> {
    // checks that all tensors of the model are there
    let open = open_for_run(&ModelSection::new(base), 0, &Device::Cpu)?;
    let mut config_json = open.config_json.clone();
    let adapter = match adapter {
        Some(folder) => read_adapter(open, folder)?.adapter.map(Arc::new),
        None => None,
    };
    let fault = |source: CheckpointError| -> RunError {
        SetupError::Files { folder: base.to_owned(), source: Box::new(source) }.into()
    };
    let files = Arc::new(WeightFiles::open(base).map_err(fault)?);
    let mut counts = Exported::default();
    let names: Vec<String> = files.names().map(str::to_owned).collect();
    let mut weights = Vec::with_capacity(names.len());
    for name in &names {
        let shape = files.shape(name).unwrap_or_default();
        let Some(stored) = files.dtype(name) else {
            files.load(name, DType::F32, &Device::Cpu).map_err(fault)?; // the error names the dtype
            continue;
        };
        let dtype = onto.map_or(stored, Precision::dtype);
        counts.tensors += 1;
        let change = adapter.as_ref().and_then(|adapter| adapter.change(name));
        counts.merged += usize::from(change == Some(Change::Merge));
        counts.replaced += usize::from(change == Some(Change::Replace));
        let (files, adapter, of) = (Arc::clone(&files), adapter.clone(), name.clone());
        weights.push(SavedTensor::made(name.as_str(), &shape, dtype, move || {
            let fault = |source| CheckpointError::Tensor { tensor: of.clone(), source };
            match adapter.as_ref().zip(change) {
                Some((adapter, Change::Merge)) => {
                    let weight = files.load(&of, DType::F32, &Device::Cpu)?;
                    adapter.merged(&of, &weight)?.to_dtype(dtype).map_err(fault)
                }
                Some((adapter, Change::Replace)) => adapter.replacement(&of, dtype),
                None => files.load(&of, dtype, &Device::Cpu),
            }
        }));
    }
    if let Some(onto) = onto {
        config_json = onto.stamp(&config_json);
    }
    if files.is_quantized() {
        remove_quantization(&mut config_json);
    }
    let files = ModelFiles {
        layout: FolderLayout::Model,
        weights: &weights,
        config_json: &config_json,
        carried: &CarriedFiles::read(base).map_err(fault)?,
        max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
    };
    files.write_new(out).map_err(fault)?;
    Ok(counts)
}

/// Removes what says that the weights are in 4 bits.
fn remove_quantization(config_json: &mut serde_json::Value) {
    for pointer in ["", "/text_config", "/vision_config"] {
        let object = config_json.pointer_mut(pointer).and_then(serde_json::Value::as_object_mut);
        if let Some(object) = object {
            object.remove("quantization_config");
        }
    }
}

/// Copies the adapter in `adapter` to the new folder `out`, without the files of its training.
pub fn export_adapter(
    adapter: &Path,
    onto: Option<Precision>,
    out: &Path,
) -> Result<Exported, AdapterError> {
    let fault = |source: CheckpointError| AdapterError::Files {
        folder: adapter.to_owned(),
        source: Box::new(source),
    };
    let path = adapter.join(ADAPTER_CONFIG);
    let text = std::fs::read(&path);
    let text =
        text.map_err(|source| fault(CheckpointError::Read { path: path.clone(), source }))?;
    let config_json = serde_json::from_slice(&text)
        .map_err(|error| fault(CheckpointError::invalid(&path, &error)))?;
    let files = WeightFiles::open_file(&adapter.join(ADAPTER_WEIGHTS)).map_err(fault)?;
    let tensor = |name: &str| {
        let stored = files.dtype(name).unwrap_or(DType::F32);
        let tensor = files.load(name, onto.map_or(stored, Precision::dtype), &Device::Cpu)?;
        Ok(SavedTensor::whole(name, tensor))
    };
    let weights: Result<Vec<_>, _> = files.names().map(tensor).collect();
    let weights = weights.map_err(fault)?;
    let files = ModelFiles {
        layout: FolderLayout::Adapter,
        weights: &weights,
        config_json: &config_json,
        carried: &CarriedFiles::read(adapter).map_err(fault)?,
        max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
    };
    files.write_new(out).map_err(fault)?;
    Ok(Exported { tensors: weights.len(), ..Exported::default() })
}

/// What an adapter does to a weight of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// It is added.
    Merge,
    /// It has another value of the weight.
    Replace,
}
