//! Adapters that start from a part of the weights: PiSSA and OLoRA.
//!
//! A layer computes with the rest `W - scale B0 A0` of its weight, and its adapter starts from
//! `A0 [r, K]` and `B0 [M, r]`. Checkpoints contain an adapter of `W` itself, of twice the rank:
//! `A` above `A0`, and `B` next to `-B0`. So they need no other model, and a resumed run reads `A0`
//! and `B0` there.

use super::super::SetupError;
use super::super::load_model::OpenModel;
use super::error::AdapterError;
use super::{OpenAdapter, Source};
use crate::checkpoint::{CheckpointError, WeightFiles};
use crate::nn::{AdapterModule, AdapterTensor, ParamSpec, WeightError, WeightPart, weight_factors};
use crate::train::{AdapterConfig, AdapterInit, JoinedConstants};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// The parts of the weights that an adapter starts from.
pub(super) struct Split {
    part: WeightPart,
    /// By the name of the layer; empty before [`OpenModel::split_weights`].
    factors: HashMap<String, InitialFactors>,
}

/// `A0` and `B0` of a layer, with values of the compute dtype.
struct InitialFactors {
    scale: f32,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Split {
    /// What a new adapter of `config` starts from; `None`: from values that leave the weights as
    /// they are.
    pub(super) fn of(config: &AdapterConfig) -> Option<Self> {
        let part = match config.init {
            AdapterInit::Default | AdapterInit::Gaussian => return None,
            AdapterInit::Pissa => WeightPart::Principal,
            AdapterInit::Olora => WeightPart::Orthonormal,
        };
        config.start_from.is_none().then(|| Self { part, factors: HashMap::new() })
    }

    /// Fails if a layer has fewer inputs or outputs than the rank.
    pub(super) fn check(
        modules: &[AdapterModule],
        specs: &[ParamSpec],
    ) -> std::result::Result<(), AdapterError> {
        for module in modules {
            let weight = specs.iter().find(|spec| spec.linear_layer() == Some(&module.name));
            let limit = weight.and_then(|spec| spec.shape.iter().min().copied());
            if let Some(limit) = limit.filter(|limit| module.rank > *limit) {
                return Err(AdapterError::Rank {
                    layer: module.name.clone(),
                    rank: module.rank,
                    limit,
                });
            }
        }
        Ok(())
    }

    /// Elements of `A0` or `B0`.
    pub(super) fn values(&self, tensor: AdapterTensor, module: &str) -> Option<&[f32]> {
        let factors = self.factors.get(module)?;
        match tensor {
            AdapterTensor::A => Some(&factors.a),
            AdapterTensor::B => Some(&factors.b),
            AdapterTensor::Magnitude => None,
        }
    }

    /// Subtracts `scale B0 A0` from `values`, the elements from `start` of the flat weight of
    /// `layer`.
    pub(super) fn subtract(&self, layer: &str, start: usize, values: &mut [f32], columns: usize) {
        let Some(InitialFactors { scale, a, b }) = self.factors.get(layer) else { return };
        let rank = a.len() / columns;
        let (mut row, mut column, mut rest) = (start / columns, start % columns, values);
        while !rest.is_empty() {
            let (values, after) = rest.split_at_mut(rest.len().min(columns - column));
            let mut sums = vec![0f32; values.len()];
            for (a, b) in a.chunks(columns).zip(&b[row * rank..]) {
                for (sum, a) in sums.iter_mut().zip(&a[column..]) {
                    *sum += b * a;
                }
            }
            values.iter_mut().zip(sums).for_each(|(value, sum)| *value -= scale * sum);
            (row, column, rest) = (row + 1, 0, after);
        }
    }
}

/// The width of the rows to which checkpoints append constants: all of `A`, and each row of `B`.
fn width(shape: &[usize], tensor: AdapterTensor) -> usize {
    if tensor == AdapterTensor::A { shape.iter().product() } else { shape[1] }
}

/// The halves of a tensor in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    Trained,
    Constant,
}

/// Elements of one half of the tensor `spec`.
pub(super) fn load_half(
    files: &WeightFiles,
    spec: &ParamSpec,
    half: Half,
    elements: &Range<usize>,
    (dtype, device): (DType, &Device),
) -> std::result::Result<Tensor, CheckpointError> {
    let tensor = AdapterTensor::of(&spec.name).map_or(AdapterTensor::A, |(tensor, _)| tensor);
    let width = width(&spec.shape, tensor);
    let (first, last) = (elements.start / width, elements.end.div_ceil(width));
    let rows = 2 * first * width..2 * last * width;
    let rows = files.load_part(&spec.name, rows, dtype, &Device::Cpu)?;
    let load = || {
        let rows = rows.reshape((last - first, 2 * width))?;
        let half = rows.narrow(1, if half == Half::Constant { width } else { 0 }, width)?;
        let half = half.flatten_all()?.narrow(0, elements.start - first * width, elements.len())?;
        half.copy()?.to_device(device)
    };
    load().map_err(|source| CheckpointError::Tensor { tensor: spec.name.clone(), source })
}

impl OpenAdapter {
    /// Reads the checkpoint of an adapter that has twice its rank there.
    pub(super) fn halve(
        &mut self,
        config: &AdapterConfig,
        specs: &[ParamSpec],
    ) -> std::result::Result<(), AdapterError> {
        let Some(split) = Split::of(config) else { return Ok(()) };
        for module in &mut self.modules {
            module.rank /= 2;
            module.scale = config.scale(); // to the bit
        }
        self.specs = super::targets::adapter_specs(&self.modules, specs);
        Split::check(&self.modules, specs)?;
        self.split = Some(split);
        Ok(())
    }

    /// `A0` and `B0` in a checkpoint.
    fn saved_factors(
        &self,
        files: &WeightFiles,
        module: &AdapterModule,
    ) -> std::result::Result<[Tensor; 2], CheckpointError> {
        let load = |tensor: AdapterTensor| {
            let name = tensor.name(&module.name);
            let Some(spec) = self.specs.iter().find(|spec| spec.name == name) else {
                return Err(CheckpointError::NoTensor { place: "memory".into(), tensor: name });
            };
            let all = 0..spec.shape.iter().product();
            load_half(files, spec, Half::Constant, &all, (DType::F32, &Device::Cpu))
        };
        let fault = |source| CheckpointError::Tensor { tensor: module.name.clone(), source };
        Ok([load(AdapterTensor::A)?, load(AdapterTensor::B)?.neg().map_err(fault)?])
    }

    /// What checkpoints append to the tensor `spec`.
    pub(super) fn joined(&self, spec: &ParamSpec, dtype: DType) -> Result<Option<JoinedConstants>> {
        let of = AdapterTensor::of(&spec.name);
        let Some((split, (tensor, module))) = self.split.as_ref().zip(of) else { return Ok(None) };
        let Some(values) = split.values(tensor, module) else { return Ok(None) };
        let sign = if tensor == AdapterTensor::B { -1.0 } else { 1.0 };
        let values: Vec<f32> = values.iter().map(|value| sign * value).collect();
        let width = width(&spec.shape, tensor);
        let mut shape = spec.shape.clone();
        shape[usize::from(tensor == AdapterTensor::B)] *= 2;
        let values = Tensor::from_vec(
            values,
            (spec.shape.iter().product::<usize>() / width, width),
            &Device::Cpu,
        )?;
        Ok(Some(JoinedConstants { values: values.to_dtype(dtype)?, shape }))
    }
}

impl OpenModel {
    /// Loads elements of the flat parameter `index`: of a weight that the adapter starts from a
    /// part of, the rest.
    pub(in crate::run) fn load_part(
        &self,
        index: usize,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> std::result::Result<Tensor, SetupError> {
        let start = elements.start;
        match &self.adapter {
            Some(adapter) if adapter.splits(&self.specs[index]) => {
                let part = self.original_part(index, elements, DType::F32, &Device::Cpu)?;
                let part = adapter.subtract_start(&self.specs[index], start, &part)?;
                Ok(part.to_dtype(dtype)?.to_device(device)?)
            }
            _ => self.original_part(index, elements, dtype, device),
        }
    }

    /// Computes the parts of the weights that the adapter starts from, or reads them from its
    /// checkpoint. Afterwards the weights are without these parts.
    pub(in crate::run) fn split_weights(mut self) -> std::result::Result<Self, SetupError> {
        let Some(mut adapter) = self.adapter.take() else { return Ok(self) };
        let split = adapter.split.take_if(|split| split.factors.is_empty());
        let Some(mut split) = split else {
            self.adapter = Some(adapter);
            return Ok(self);
        };
        let started = Instant::now();
        let factors = adapter.modules.par_iter().map(|module| {
            let factors = match &adapter.source {
                Source::Files { folder, files, .. } => {
                    adapter.saved_factors(files, module).map_err(|source| AdapterError::Files {
                        folder: folder.clone(),
                        source: Box::new(source),
                    })?
                }
                _ => self.factors_of(split.part, module)?,
            };
            let [a, b] = factors.map(|t| t.to_dtype(self.dtype())?.to_dtype(DType::F32));
            let [a, b] = [a?, b?].map(|t| t.flatten_all()?.to_vec1());
            let factors = InitialFactors { scale: module.scale as f32, a: a?, b: b? };
            Ok::<_, SetupError>((module.name.clone(), factors))
        });
        split.factors = factors.collect::<std::result::Result<_, _>>()?;
        let (layers, seconds) = (split.factors.len(), started.elapsed().as_secs_f64());
        tracing::info!(layers, part = ?split.part, seconds, "initialised the adapter from the weights");
        adapter.split = Some(split);
        self.adapter = Some(adapter);
        Ok(self)
    }

    fn factors_of(
        &self,
        part: WeightPart,
        module: &AdapterModule,
    ) -> std::result::Result<[Tensor; 2], SetupError> {
        let name = format!("{}.weight", module.name);
        let position = self.specs.iter().position(|spec| spec.name == name);
        let index = position.ok_or(WeightError::Missing { name })?;
        let shape = &self.specs[index].shape;
        let all = 0..shape.iter().product();
        let weight = self.original_part(index, all, DType::F32, &Device::Cpu)?;
        let weight = weight.reshape(shape.as_slice())?;
        Ok(weight_factors(part, &weight, module.rank, module.scale)?)
    }
}
