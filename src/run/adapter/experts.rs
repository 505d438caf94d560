//! Adapters of experts in files. PEFT has one `A [E r, K]` and one `B [M, E r]` for all experts of a
//! parameter.
//!
//! PEFT takes the last dim of a parameter as its inputs. That is so with transformers 5, where a
//! parameter is `[E, M, K]`. With transformers 4.57, the experts of Qwen3-VL are `[E, K, M]`, so an
//! adapter of them has the sides exchanged: its `A` has the values of each `B_e^T`, and its `B` those
//! of each `A_e^T`. Both are read.

use super::error::AdapterError;
use crate::checkpoint::{CheckpointError, PeftConfig, WeightFiles};
use crate::nn::{AdapterModule, AdapterTensor, ParamSpec};
use crate::ops::ExpertLayout;
use candle_core::{DType, Device, Result, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The tensors of a file whose sides are exchanged.
#[derive(Debug, Default)]
pub(in crate::run) struct Exchanged {
    /// Name of the tensor with the values, and rank, by name.
    tensors: BTreeMap<String, (String, usize)>,
}

impl Exchanged {
    /// Finds them by their shapes; `adapter` has the tensors of `modules`. If a parameter has as many
    /// inputs as outputs, both layouts have the same shapes, and the file is read as one of
    /// transformers 5.
    pub(super) fn find(
        files: &WeightFiles,
        modules: &[AdapterModule],
        adapter: &[ParamSpec],
    ) -> Self {
        let mut tensors = BTreeMap::new();
        for module in modules.iter().filter(|module| module.experts.is_some()) {
            let names = [AdapterTensor::A, AdapterTensor::B].map(|of| of.name(&module.name));
            let spec = |name: &String| adapter.iter().find(|spec| spec.name == *name);
            let [Some(a), Some(b)] = names.each_ref().map(spec) else { continue };
            let [[ranks, inputs], [outputs, _]] = [&a.shape, &b.shape].map(|of| [of[0], of[1]]);
            let exchanged = [[ranks, outputs], [inputs, ranks]];
            let found = names.each_ref().map(|name| files.shape(name).unwrap_or_default());
            if inputs != outputs && found == exchanged.map(|shape| shape.to_vec()) {
                let [a, b] = names;
                tensors.insert(a.clone(), (b.clone(), module.rank));
                tensors.insert(b, (a, module.rank));
            }
        }
        Self { tensors }
    }

    /// Shape in the file of a tensor with the shape `shape`.
    pub(super) fn shape(&self, files: &WeightFiles, spec: &ParamSpec) -> Vec<usize> {
        let is_exchanged = self.tensors.contains_key(&spec.name);
        let found = || files.shape(&spec.name).unwrap_or_default();
        if is_exchanged { found() } else { spec.shape.clone() }
    }

    /// Elements of the flat tensor `name`.
    pub(super) fn load_part(
        &self,
        files: &WeightFiles,
        name: &str,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> std::result::Result<Tensor, CheckpointError> {
        if !self.tensors.contains_key(name) {
            return files.load_part(name, elements, dtype, device);
        }
        let whole = self.load(files, name, dtype)?;
        let part = || {
            let part = whole.flatten_all()?.narrow(0, elements.start, elements.len())?;
            part.copy()?.to_device(device)
        };
        part().map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    /// The tensor `name`.
    pub(in crate::run) fn load(
        &self,
        files: &WeightFiles,
        name: &str,
        dtype: DType,
    ) -> std::result::Result<Tensor, CheckpointError> {
        let Some((other, rank)) = self.tensors.get(name) else {
            return files.load(name, dtype, &Device::Cpu);
        };
        let other = files.load(other, dtype, &Device::Cpu)?;
        let is_a = matches!(AdapterTensor::of(name), Some((AdapterTensor::A, _)));
        let exchanged = exchange(&other, *rank, is_a);
        exchanged.map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }
}

/// The adapters of experts in a folder, with their sides exchanged.
pub(in crate::run) fn exchange_experts(
    folder: &Path,
    files: &WeightFiles,
) -> std::result::Result<Exchanged, AdapterError> {
    let error = |source: CheckpointError| AdapterError::Files {
        folder: folder.to_owned(),
        source: Box::new(source),
    };
    let peft = PeftConfig::read(folder).map_err(error)?;
    let mut tensors = BTreeMap::new();
    for name in files.names() {
        let Some((AdapterTensor::A, module)) = AdapterTensor::of(name) else { continue };
        if !module.trim_end_matches(".base_layer").ends_with(".mlp.experts") {
            continue;
        }
        // the experts of text-only models are modules of their own there
        if !module.contains(".language_model.") || !peft.rank_pattern.is_empty() {
            return Err(AdapterError::NoExchange { folder: folder.to_owned() });
        }
        let (a, b) = (name.to_owned(), AdapterTensor::B.name(module));
        tensors.insert(a.clone(), (b.clone(), peft.r));
        tensors.insert(b, (a, peft.r));
    }
    if tensors.is_empty() {
        return Err(AdapterError::NoExchange { folder: folder.to_owned() });
    }
    Ok(Exchanged { tensors })
}

/// The tensor that has the values of `other` if the sides are exchanged: `A` if `is_a`, of `B`, or
/// the reverse.
fn exchange(other: &Tensor, rank: usize, is_a: bool) -> Result<Tensor> {
    let (rows, columns) = other.dims2()?;
    if is_a {
        let ranks = columns;
        let of_b = other.reshape((rows, rank, ranks / rank))?; // [K, r, E]
        of_b.permute((2, 1, 0))?.contiguous()?.reshape((ranks, rows))
    } else {
        let ranks = rows;
        let of_a = other.reshape((ranks / rank, rank, columns))?; // [E, r, M]
        of_a.permute((2, 1, 0))?.contiguous()?.reshape((columns, ranks))
    }
}

/// `A` and `B` of the experts of a parameter, in `f32`.
pub(super) struct Factors {
    pub(super) a: Tensor, // [E r, K]
    pub(super) b: Tensor, // [M, E r]
    pub(super) rank: usize,
    pub(super) scale: f64,
    pub(super) layout: ExpertLayout,
}

impl Factors {
    /// Adds `scale B_e A_e` to the weight of each expert.
    pub(super) fn add_to(&self, weight: &Tensor) -> Result<Tensor> {
        let experts = weight.dim(0)?;
        let sum = |expert: usize| {
            let rows = 0..weight.dim(1)?;
            weight.get(expert)? + self.rows(expert, rows)?
        };
        Tensor::stack(&(0..experts).map(sum).collect::<Result<Vec<_>>>()?, 0)
    }

    /// The expert and the row of its matrix that row `row` of the matrices below each other is.
    pub(super) fn place(&self, row: usize) -> Result<(usize, usize)> {
        let rows = match self.layout {
            ExpertLayout::OutIn => self.b.dim(0)?,
            ExpertLayout::InOut => self.a.dim(1)?,
        };
        Ok((row / rows, row % rows))
    }

    /// Rows of `scale B_e A_e`, in the layout of the weight.
    pub(super) fn rows(&self, expert: usize, rows: Range<usize>) -> Result<Tensor> {
        let (rank, experts) = (self.rank, self.a.dim(0)? / self.rank);
        let a = self.a.narrow(0, expert * rank, rank)?; // [r, K]
        let outputs = self.b.dim(0)?;
        let b = self.b.reshape((outputs, rank, experts))?;
        let b = b.narrow(2, expert, 1)?.squeeze(2)?.contiguous()?; // [M, r]
        let (left, right) = match self.layout {
            ExpertLayout::OutIn => (b, a),
            ExpertLayout::InOut => (a.t()?.contiguous()?, b.t()?.contiguous()?),
        };
        left.narrow(0, rows.start, rows.len())?.matmul(&right)? * self.scale
    }
}
