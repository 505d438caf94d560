//! Loads frozen weights that are stored in host memory or in NF4.

use super::error::RunError;
use super::load_model::{LoadedModel, OpenModel};
use super::load_shares::{RankPlace, without_weights};
use crate::config::RunConfig;
use crate::ops::Nf4;
use crate::tape::{Param, Trainable};
use crate::train::{Offload, Quantize, StoredWeight, StoredWeights, WeightStorage};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

/// Where the weights of frozen linear layers and experts are kept. On the CPU the tensors that the
/// model reads are in host memory already.
pub(crate) fn weight_storage(config: &RunConfig, device: &Device) -> WeightStorage {
    match storage_on_gpu(config) {
        WeightStorage::Host if device.is_cpu() => WeightStorage::Device,
        storage => storage,
    }
}

/// As [`weight_storage`], for a GPU.
pub(super) fn storage_on_gpu(config: &RunConfig) -> WeightStorage {
    match (&config.adapter, config.model.offload) {
        (Some(adapter), _) if adapter.quantize == Quantize::Nf4 => WeightStorage::Nf4,
        (_, Offload::Frozen) => WeightStorage::Host,
        (_, Offload::None) => WeightStorage::Device,
    }
}

/// Whether each parameter is stored elsewhere, as `storage` says: the weights of frozen linear
/// layers and experts.
pub(super) fn stored_elsewhere(
    open: &OpenModel,
    trainable: &[Trainable],
    storage: WeightStorage,
) -> Vec<bool> {
    let stores = storage != WeightStorage::Device;
    let frozen = |kind: &Trainable| stores && *kind == Trainable::Frozen;
    let specs = open.specs.iter().zip(trainable);
    specs.map(|(spec, kind)| frozen(kind) && spec.can_be_stored_elsewhere()).collect()
}

/// Loads a model in a single process, with the weights of `is_stored` stored elsewhere.
pub(super) fn load_stored(
    open: OpenModel,
    is_stored: &[bool],
    storage: WeightStorage,
    device: &Device,
) -> Result<(LoadedModel, Option<StoredWeights>), RunError> {
    if !is_stored.contains(&true) {
        return Ok((open.load(device)?, None));
    }
    let loaded = without_weights(open, device)?;
    let kept = loaded.params.par_iter().filter(|param| !is_stored[param.index()]);
    kept.try_for_each(|param| {
        let all = 0..param.shape().elem_count();
        let tensor = loaded.open.load_part(param.index(), all, param.dtype(), device)?;
        param.set_tensor(tensor.reshape(param.shape())?)?;
        Ok::<(), RunError>(())
    })?;
    let stored = install(&loaded, is_stored, storage, None, device)?;
    Ok((loaded, stored))
}

/// Loads the weights of `is_stored`, one after the other, and stores them elsewhere. Ranks read each
/// weight together, except those that are stored in NF4.
pub(super) fn install(
    loaded: &LoadedModel,
    is_stored: &[bool],
    storage: WeightStorage,
    place: Option<&RankPlace>,
    device: &Device,
) -> Result<Option<StoredWeights>, RunError> {
    let mut stored = HashMap::new();
    for param in loaded.params.iter().filter(|param| is_stored[param.index()]) {
        let (index, open) = (param.index(), &loaded.open);
        let on_host = || host_weight(open, param, place, device);
        let weight = match storage {
            WeightStorage::Nf4 => {
                let nf4 = if place.is_none() {
                    open.nf4(index)?
                } else if let Some(stored) = open.stored_nf4(index)? {
                    stored
                } else {
                    // A weight that this rank alone has quantised (`nf4_again`) must not decide
                    // which exchanges it takes part in.
                    open.quantized().remove(&index);
                    quantized(param, &on_host()?)?
                };
                StoredWeight::Nf4(nf4.to_device(device)?)
            }
            WeightStorage::Host | WeightStorage::Device => {
                StoredWeight::Host(on_host()?.reshape(param.shape())?)
            }
        };
        stored.insert(index, weight);
    }
    let count = stored.len();
    if count == 0 {
        return Ok(None);
    }
    let (stages, dtype) = (loaded.model.stages(), loaded.open.dtype());
    let weights = StoredWeights::install(&stages, &loaded.params, stored, dtype, device)?;
    tracing::info!(weights = count, storage = ?storage, "frozen weights are copied to two buffers when they are used");
    Ok(Some(weights))
}

/// A weight in the compute dtype, flat, in host memory.
fn host_weight(
    open: &OpenModel,
    param: &Param,
    place: Option<&RankPlace>,
    device: &Device,
) -> Result<Tensor, RunError> {
    let (len, dtype) = (param.shape().elem_count(), param.dtype());
    let read = |part, device| open.load_part(param.index(), part, dtype, device);
    let Some(place) = place.filter(|_| !open.is_drawn(param.index())) else {
        return Ok(read(0..len, &Device::Cpu)?);
    };
    let weight = Tensor::zeros(len, dtype, &Device::Cpu)?;
    place.read_together(&weight, device, |part| Ok(read(part, device)?))?;
    Ok(weight)
}

fn quantized(param: &Param, flat: &Tensor) -> candle_core::Result<Nf4> {
    Nf4::quantize(param.shape().dims(), |range| {
        flat.narrow(0, range.start, range.len())?.to_dtype(DType::F32)
    })
}

impl OpenModel {
    /// The weight `index` in NF4, on the CPU: the stored codes, or else quantised from the compute
    /// dtype.
    pub(super) fn nf4(&self, index: usize) -> Result<Nf4, super::SetupError> {
        if let Some(kept) = self.quantized().remove(&index) {
            return Ok(kept);
        }
        if let Some(stored) = self.stored_nf4(index)? {
            return Ok(stored);
        }
        let dtype = self.dtype();
        Nf4::quantize(&self.specs[index].shape, |range| {
            let part = self.load_part(index, range, dtype, &Device::Cpu)?;
            Ok(part.to_dtype(DType::F32)?)
        })
    }

    /// As [`Self::nf4`], which is called once more later: it is not quantised again then.
    pub(super) fn nf4_again(&self, index: usize) -> Result<Nf4, super::SetupError> {
        let nf4 = self.nf4(index)?;
        self.quantized().insert(index, nf4.clone());
        Ok(nf4)
    }

    /// The weight `index` with the values that it has in NF4.
    pub(super) fn rounded(
        &self,
        index: usize,
        device: &Device,
    ) -> Result<Tensor, super::SetupError> {
        let weight = Tensor::zeros(self.specs[index].shape.as_slice(), self.dtype(), device)?;
        self.nf4(index)?.to_device(device)?.dequantize_into(&weight)?;
        Ok(weight)
    }

    fn quantized(&self) -> MutexGuard<'_, HashMap<usize, Nf4>> {
        self.quantized.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
