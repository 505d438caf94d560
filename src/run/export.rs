//! Writes a model folder from a model and an adapter, or a clean folder from a checkpoint.

use super::adapter::{
    AdapterError, Exchanged, OpenAdapter, exchange_experts, read_adapter, trained_on,
};
use super::error::{RunError, SetupError};
use super::inputs::open_for_run;
use super::load_model::OpenModel;
use super::model_files::{
    HEAD, check_model_folder, files_error, is_tied, named_files, with_pieces,
};
use super::new_tokens::with_tokens_of;
use crate::checkpoint::{
    ADAPTER_CONFIG, CarriedFiles, CheckpointError, FolderLayout, ModelFolder, SavedTensor,
    WeightFiles, adapter_weights, nf4_tensors, quantization_config,
};
use crate::nn::ParamSpec;
use crate::ops::{Nf4, Nf4Parts};
use crate::train::{ModelSection, Precision, Quantize};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Numbers of tensors of a folder that was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exported {
    /// All tensors; a matrix in NF4 is one.
    pub tensors: usize,
    /// Weights to which the adapter was added.
    pub merged: usize,
    /// Weights that were trained besides the adapter.
    pub replaced: usize,
    /// Matrices in NF4.
    pub quantized: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportDtype {
    Dtype(Precision),
    /// The weights of linear layers in 4 bits, the others in the dtype of the files.
    Nf4,
}

/// Writes the model in `base`, with the adapter in `adapter` merged into its weights, to the new
/// folder `out`.
///
/// All tensors of `base` are written, also those that training does not use. They keep their dtype
/// unless `dtype` has another one. Sums are computed in `f32`, one weight at a time, so the model
/// need not fit into memory.
pub fn export_model(
    base: &Path,
    adapter: Option<&Path>,
    dtype: Option<ExportDtype>,
    out: &Path,
) -> Result<Exported, RunError> {
    let open = open_to_export(base, adapter)?;
    let mut config_json = open.config_json.clone();
    let names = open.tensor_names();
    let linear =
        open.specs.iter().filter(|spec| dtype == Some(ExportDtype::Nf4) && is_linear(spec));
    let linear: HashSet<String> = linear.map(|spec| spec.name.clone()).collect();
    let specs = open.specs.clone();
    if dtype == Some(ExportDtype::Nf4) && specs.iter().any(ParamSpec::is_experts) {
        tracing::info!("the experts keep their dtype: only linear layers are written in 4 bits");
    }
    let pieces_of: HashMap<String, _> =
        specs.iter().map(|spec| (spec.name.clone(), spec.pieces())).collect();
    let fault = |source| RunError::from(files_error(base, source));
    let weights = ExportedWeights::open(base, open, adapter)?;
    let changed = weights.open.vocabulary.as_ref().map_or_else(Vec::new, |of| of.files.clone());
    let (mut counts, mut saved, mut quantized) = (Exported::default(), Vec::new(), None);
    for name in weights.files.names() {
        // some folders store the head also where it is the embedding, which may have changed
        if name == HEAD && is_tied(&specs) {
            continue;
        }
        let Some(stored) = weights.files.dtype(name) else {
            // the error names the dtype
            weights.files.load(name, DType::F32, &Device::Cpu).map_err(fault)?;
            continue;
        };
        weights.count(name, &mut counts);
        let (of, name) = (Arc::clone(&weights), name.to_owned());
        if linear.contains(&name) {
            counts.tensors += 1;
            counts.quantized += 1;
            quantized.get_or_insert(stored);
            let parts = weights.quantized(&name, stored).map_err(fault)?;
            let of_matrix = names.in_file(&name);
            let codes = move || Ok(of.quantized(&name, stored)?.codes);
            saved.extend(nf4_tensors(&of_matrix, stored, &parts, codes).map_err(fault)?);
            continue;
        }
        let target = match dtype {
            Some(ExportDtype::Dtype(precision)) => precision.dtype(),
            _ => stored,
        };
        let pieces = pieces_of.get(&name).map(Vec::as_slice).unwrap_or_default();
        counts.tensors += pieces.len().max(1);
        saved.extend(of.saved(&name, pieces, target, &|name| names.in_file(name)));
    }
    if let Some(ExportDtype::Dtype(precision)) = dtype {
        config_json = precision.stamp(&config_json);
    }
    set_quantization(&mut config_json, quantized);
    let files = ModelFolder {
        layout: FolderLayout::Model,
        weights: &saved,
        config_json: &config_json,
        carried: &CarriedFiles::read(base).map_err(fault)?.with(changed),
        max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
    };
    files.write_new(out).map_err(fault)?;
    Ok(counts)
}

/// Opens the model in `base`, with the tokens of the adapter in `adapter`, and checks that all of
/// its tensors are there.
pub(super) fn open_to_export(base: &Path, adapter: Option<&Path>) -> Result<OpenModel, RunError> {
    check_model_folder(base)?;
    let section = ModelSection::new(base);
    let section = adapter.map_or_else(|| section.clone(), |of| with_tokens_of(&section, of));
    open_for_run(&section, 0, &Device::Cpu)
}

/// The weights of a model folder, with an adapter merged into them.
pub(super) struct ExportedWeights {
    files: WeightFiles,
    adapter: Option<OpenAdapter>,
    /// The model without the adapter.
    open: OpenModel,
}

impl ExportedWeights {
    /// `open` is the model in `base`, and `adapter` the folder of the adapter.
    pub(super) fn open(
        base: &Path,
        mut open: OpenModel,
        adapter: Option<&Path>,
    ) -> Result<Arc<Self>, RunError> {
        let files = named_files(base, open.tensor_names());
        let files = files.map_err(|source| files_error(base, source))?;
        let files = with_pieces(files, &open.specs);
        if let Some(folder) = adapter {
            open = read_adapter(open, folder)?;
        }
        Ok(Arc::new(Self { files, adapter: open.adapter.take(), open }))
    }

    pub(super) fn files(&self) -> &WeightFiles {
        &self.files
    }

    /// Counts what the adapter changes of the weight `name`.
    pub(super) fn count(&self, name: &str, counts: &mut Exported) {
        let change = self.change(name);
        counts.merged += usize::from(change == Some(WeightChange::Merge));
        counts.replaced += usize::from(change == Some(WeightChange::Replace));
    }

    fn change(&self, name: &str) -> Option<WeightChange> {
        self.adapter.as_ref()?.change(name)
    }

    /// The tensors of the weight `name`, in the pieces that the files have.
    fn saved(
        self: &Arc<Self>,
        name: &str,
        pieces: &[(String, Vec<usize>)],
        dtype: DType,
        in_file: &dyn Fn(&str) -> String,
    ) -> Vec<SavedTensor> {
        if pieces.is_empty() {
            let grown =
                self.open.with_new_rows(name).map(|index| self.open.specs[index].shape.clone());
            let shape = grown.or_else(|| self.files.shape(name)).unwrap_or_default();
            let of = Arc::clone(self);
            let (in_file, name) = (in_file(name), name.to_owned());
            return vec![SavedTensor::made(in_file, &shape, dtype, move || of.load(&name, dtype))];
        }
        let mut end = 0;
        let piece = |(piece, shape): &(String, Vec<usize>)| {
            let start = end;
            end += shape.iter().product::<usize>();
            let (elements, of, name) = (start..end, Arc::clone(self), name.to_owned());
            let own_shape = shape.clone();
            let make = move || of.load_piece(&name, elements.clone(), &own_shape, dtype);
            SavedTensor::made(in_file(piece), shape, dtype, make)
        };
        pieces.iter().map(piece).collect()
    }

    /// Elements of the weights of experts, rows of the matrix of one of them.
    fn load_piece(
        &self,
        name: &str,
        elements: Range<usize>,
        shape: &[usize],
        dtype: DType,
    ) -> Result<Tensor, CheckpointError> {
        let (start, change) = (elements.start, self.change(name));
        let merges = self.adapter.as_ref().filter(|_| change == Some(WeightChange::Merge));
        let stored = if merges.is_some() { DType::F32 } else { dtype };
        let part = self.files.load_part(name, elements, stored, &Device::Cpu)?;
        let part = part.reshape(shape).map_err(fault(name))?;
        let Some(adapter) = merges else { return Ok(part) };
        adapter.merged_rows(name, start, &part)?.to_dtype(dtype).map_err(fault(name))
    }

    pub(super) fn load(&self, name: &str, dtype: DType) -> Result<Tensor, CheckpointError> {
        match self.adapter.as_ref().zip(self.change(name)) {
            Some((adapter, WeightChange::Merge)) => {
                let weight = self.files.load(name, DType::F32, &Device::Cpu)?;
                adapter.merged(name, &weight)?.to_dtype(dtype).map_err(fault(name))
            }
            Some((adapter, WeightChange::Replace)) => adapter.replacement(name, dtype),
            None => match self.open.with_new_rows(name) {
                Some(index) => self.open.grown(index, dtype).map_err(fault(name)),
                None => self.files.load(name, dtype, &Device::Cpu),
            },
        }
    }

    /// A matrix in NF4: with the codes of the files if it does not change, otherwise quantised from
    /// `dtype`.
    fn quantized(&self, name: &str, dtype: DType) -> Result<Nf4Parts, CheckpointError> {
        let stored = if self.change(name).is_none() { self.files.nf4(name)? } else { None };
        let quantize = || {
            let weight = self.load(name, dtype)?.to_dtype(DType::F32).map_err(fault(name))?;
            let flat = weight.flatten_all().map_err(fault(name))?;
            let part = |range: Range<usize>| flat.narrow(0, range.start, range.len());
            Nf4::quantize(weight.dims(), part).map_err(fault(name))
        };
        stored.map_or_else(quantize, Ok)?.parts().map_err(fault(name))
    }
}

fn fault(tensor: &str) -> impl Fn(candle_core::Error) -> CheckpointError {
    move |source| CheckpointError::Tensor { tensor: tensor.to_owned(), source }
}

fn is_linear(spec: &ParamSpec) -> bool {
    spec.linear_layer().is_some()
}

/// Replaces what `config.json` says about weights in 4 bits. `quantized` is the dtype of the
/// weights before they were quantised.
fn set_quantization(config_json: &mut Value, quantized: Option<DType>) {
    for pointer in ["", "/text_config", "/vision_config"] {
        let object = config_json.pointer_mut(pointer).and_then(Value::as_object_mut);
        if let Some(object) = object {
            object.remove("quantization_config");
        }
    }
    if let (Some(dtype), Some(object)) = (quantized, config_json.as_object_mut()) {
        object.insert("quantization_config".to_owned(), quantization_config(dtype));
    }
}

impl Precision {
    /// `config.json` with the dtype of the saved weights.
    pub fn stamp(self, config_json: &serde_json::Value) -> serde_json::Value {
        let mut json = config_json.clone();
        let name = serde_json::Value::from(self.hf_name());
        for key in ["dtype", "torch_dtype"] {
            for pointer in ["", "/text_config", "/vision_config"] {
                let object = json.pointer_mut(pointer).and_then(serde_json::Value::as_object_mut);
                if let Some(value) = object.and_then(|object| object.get_mut(key)) {
                    *value = name.clone();
                }
            }
        }
        json
    }
}

/// Copies the adapter in `adapter` to the new folder `out`, without the files of its training. With
/// `exchange`, the sides of adapters of experts are exchanged, as PEFT has them for Qwen3-VL with
/// transformers 4.
pub fn export_adapter(
    adapter: &Path,
    dtype: Option<Precision>,
    exchange: bool,
    out: &Path,
) -> Result<Exported, RunError> {
    let fault = |source: CheckpointError| -> RunError {
        let fault = AdapterError::Files { folder: adapter.to_owned(), source: Box::new(source) };
        SetupError::from(fault).into()
    };
    if trained_on(adapter)?.is_some_and(|base| base.quantize != Quantize::None) {
        tracing::warn!(
            "this adapter was trained on a model in 4 bits, which the folder will not say: \
             load the model in 4 bits with it"
        );
    }
    let path = adapter.join(ADAPTER_CONFIG);
    let text = crate::files::read(&path);
    let text =
        text.map_err(|source| fault(CheckpointError::Read { path: path.clone(), source }))?;
    let config_json = serde_json::from_slice(&text)
        .map_err(|error| fault(CheckpointError::invalid(&path, &error)))?;
    let files = adapter_weights(adapter).map_err(fault)?;
    let exchanged = if exchange {
        exchange_experts(adapter, &files).map_err(SetupError::from)?
    } else {
        Exchanged::default()
    };
    let tensor = |name: &str| {
        let stored = files.dtype(name).unwrap_or(DType::F32);
        let tensor = exchanged.load(&files, name, dtype.map_or(stored, Precision::dtype))?;
        Ok(SavedTensor::whole(name, tensor))
    };
    let weights: Result<Vec<_>, _> = files.names().map(tensor).collect();
    let weights = weights.map_err(fault)?;
    let files = ModelFolder {
        layout: FolderLayout::Adapter,
        weights: &weights,
        config_json: &config_json,
        carried: &CarriedFiles::read(adapter).map_err(fault)?,
        max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
    };
    files.write_new(out).map_err(fault)?;
    Ok(Exported { tensors: weights.len(), ..Exported::default() })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WeightChange {
    /// It is added.
    Merge,
    /// It has another value of the weight.
    Replace,
}
