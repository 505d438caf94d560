//! Writes a model for llama.cpp: a GGUF file of the decoder with tokenizer and chat template, and one
//! of the vision encoder (`mmproj`). Names, order and metadata are those that llama.cpp reads.
//! `scripts/gguf/test.sh` compares the answers of llama.cpp.

mod text;
mod tokenizer;
mod vision;

use super::error::{RunError, SetupError};
use super::export::{Exported, ExportedWeights, open_to_export};
use super::model_files::{files_error, unused};
use crate::checkpoint::{CheckpointError, GgufDtype, GgufFile, GgufTensor, GgufValue};
use crate::nn::ParamSpec;
use candle_core::{DType, Result as TensorResult, Tensor};
use std::path::Path;
use std::sync::Arc;

/// Families by `model_type`, with their name in llama.cpp.
const FAMILIES: [(&str, &str); 5] = [
    ("qwen3_vl", "qwen3vl"),
    ("qwen2_5_vl", "qwen2vl"),
    ("qwen3", "qwen3"),
    ("qwen3_5", "qwen35"),
    ("qwen3_5_text", "qwen35"),
];

/// A tensor of a file: its name, its shape, and how its values follow from those of the parameter.
struct TensorPart {
    name: String,
    shape: Vec<usize>,
    change: Change,
}

type Change = Box<dyn Fn(&Tensor) -> TensorResult<Tensor>>;

type Metadata = Vec<(String, GgufValue)>;

/// Writes the model in `base`, with the adapter in `adapter` merged into its weights, to the new
/// folder `out`, as `model-DTYPE.gguf` and, with a vision encoder, `mmproj-DTYPE.gguf`. Matrices of
/// the decoder become `dtype`; the vision encoder is not quantised.
///
/// Sums are computed in `f32`, one weight at a time, so the model need not fit into memory.
pub fn export_gguf(
    base: &Path,
    adapter: Option<&Path>,
    dtype: GgufDtype,
    out: &Path,
) -> Result<Exported, RunError> {
    let open = open_to_export(base, adapter)?;
    let (config, json, specs) =
        (open.config().clone(), open.config_json.clone(), open.specs.clone());
    let unsupported = |what| SetupError::NoGguf { folder: base.to_owned(), what };
    let family = family(&json).map_err(unsupported)?;
    text::check(&config.text).map_err(unsupported)?;
    let mut text = text::metadata(family, &config, &json).map_err(unsupported)?;
    let changed = open.vocabulary.as_ref().map_or(&[][..], |of| of.files.as_slice());
    text.extend(tokenizer::metadata((base, changed), &json, config.text.vocab_size)?);
    let vision = config.vision.as_ref();
    let vision = vision.map(|vision| vision::metadata(base, vision)).transpose()?;
    let weights = ExportedWeights::open(base, open, adapter)?;
    let (unused, mut counts) = (unused(weights.files(), &specs).len(), Exported::default());
    if unused > 0 {
        tracing::info!(tensors = unused, "left out tensors that the model does not use");
    }
    let (visual, decoder): (Vec<_>, Vec<_>) =
        specs.iter().partition(|spec| spec.name.starts_with(vision::PREFIX));
    let of_decoder = |spec: &ParamSpec| text::parts(&config.text, spec);
    let mut files = vec![file("model", dtype, text, &weights, &decoder, &of_decoder, &mut counts)];
    if let (Some(metadata), Some(vision)) = (vision, &config.vision) {
        let dtype = if dtype.block() > 1 { GgufDtype::F16 } else { dtype };
        let of_vision = |spec: &ParamSpec| vision::parts(vision, spec);
        files.push(file("mmproj", dtype, metadata, &weights, &visual, &of_vision, &mut counts));
    }
    GgufFile::write_new(&files, out).map_err(|source| files_error(base, source))?;
    Ok(counts)
}

fn family(json: &serde_json::Value) -> Result<&'static str, String> {
    let model_type = json["model_type"].as_str().unwrap_or_default();
    let found = FAMILIES.iter().find(|(name, _)| *name == model_type);
    found.map(|(_, family)| *family).ok_or_else(|| {
        let known = FAMILIES.map(|(name, _)| format!("`{name}`")).join(", ");
        format!("`model_type` is `{model_type}`, expected one of {known}")
    })
}

fn file(
    kind: &str,
    dtype: GgufDtype,
    metadata: Metadata,
    weights: &Arc<ExportedWeights>,
    specs: &[&ParamSpec],
    parts: &dyn Fn(&ParamSpec) -> Vec<TensorPart>,
    counts: &mut Exported,
) -> GgufFile {
    let name = format!("{kind}-{}.gguf", dtype.name());
    let mut head: Metadata = vec![
        ("general.quantization_version".to_owned(), GgufValue::U32(2)),
        ("general.file_type".to_owned(), GgufValue::U32(file_type(dtype))),
    ];
    head.splice(0..0, metadata);
    let mut tensors = Vec::new();
    for spec in specs {
        weights.count(&spec.name, counts);
        tensors.extend(parts(spec).into_iter().map(|part| tensor(dtype, weights, spec, part)));
    }
    counts.tensors += tensors.len();
    counts.quantized += tensors.iter().filter(|tensor| tensor.dtype.block() > 1).count();
    GgufFile { name, metadata: head, tensors }
}

fn tensor(
    dtype: GgufDtype,
    weights: &Arc<ExportedWeights>,
    spec: &ParamSpec,
    part: TensorPart,
) -> GgufTensor {
    let TensorPart { name, shape, change } = part;
    let (weights, of) = (Arc::clone(weights), spec.name.clone());
    let make = move || {
        let fault = |source| CheckpointError::Tensor { tensor: of.clone(), source };
        let values = weights.load(&of, DType::F32)?;
        change(&values).and_then(|values| values.contiguous()).map_err(fault)
    };
    GgufTensor { dtype: dtype_of(&name, &shape, dtype), name, shape, make: Box::new(make) }
}

/// The dtype of a tensor in a file of `dtype`: that of the converter of llama.cpp, and for 4 bits
/// that of its quantiser, but embedding and head are in 8 bits.
fn dtype_of(name: &str, shape: &[usize], dtype: GgufDtype) -> GgufDtype {
    let always_f32 = ["_norm.weight", "ssm_conv1d.weight", "position_embd.weight"];
    if shape.len() < 2 || always_f32.iter().any(|end| name.ends_with(end)) {
        return GgufDtype::F32;
    }
    if name.starts_with("v.patch_embd.weight") && dtype != GgufDtype::F16 {
        return GgufDtype::F32;
    }
    let is_table = ["token_embd.weight", "output.weight"].contains(&name);
    let dtype = match dtype {
        GgufDtype::Q4_0 if is_table => GgufDtype::Q8_0,
        dtype => dtype,
    };
    let row = shape.last().copied().unwrap_or(1);
    if row.is_multiple_of(dtype.block()) { dtype } else { GgufDtype::F16 }
}

/// The number of the dtype of most tensors in the metadata.
fn file_type(dtype: GgufDtype) -> u32 {
    match dtype {
        GgufDtype::F32 => 0,
        GgufDtype::F16 => 1,
        GgufDtype::Q4_0 => 2,
        GgufDtype::Q8_0 => 7,
        GgufDtype::Bf16 => 32,
    }
}

/// A tensor of the same values.
fn same(name: String, shape: &[usize]) -> TensorPart {
    TensorPart { name, shape: shape.to_vec(), change: Box::new(|values| Ok(values.clone())) }
}

/// `key` with the prefix of a family and a number as its value.
fn count(prefix: &str, key: &str, value: usize) -> (String, GgufValue) {
    // sizes of a model are far below 2^32
    (format!("{prefix}.{key}"), GgufValue::U32(value as u32))
}
