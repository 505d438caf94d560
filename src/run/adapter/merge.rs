//! Adds an adapter to the weights of its model.

use super::super::export::Change;
use super::{OpenAdapter, Source, norms};
use crate::checkpoint::CheckpointError;
use crate::nn::{AdapterModule, AdapterTensor, peft_name};
use candle_core::{DType, Device, Tensor};

impl OpenAdapter {
    /// What the adapter does to the parameter `name` of the model.
    pub(in crate::run) fn change(&self, name: &str) -> Option<Change> {
        if self.module(name).is_some() {
            return Some(Change::Merge);
        }
        let Source::Files { files, .. } = &self.source else { return None };
        files.shape(&peft_name(name)).map(|_| Change::Replace)
    }

    fn module(&self, weight: &str) -> Option<&AdapterModule> {
        let layer = weight.strip_suffix(".weight")?;
        self.modules.iter().find(|module| module.name == layer)
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor, CheckpointError> {
        let Source::Files { files, .. } = &self.source else {
            return Err(CheckpointError::NoTensor {
                place: "memory".into(),
                tensor: name.to_owned(),
            });
        };
        files.load(name, dtype, &Device::Cpu)
    }

    /// The value of a parameter of the model that was trained besides the adapter.
    pub(in crate::run) fn replacement(
        &self,
        name: &str,
        dtype: DType,
    ) -> Result<Tensor, CheckpointError> {
        self.load(&peft_name(name), dtype)
    }

    /// `W + scale B A`, with the row norms of DoRA's magnitude, in `f32`. `weight` is `W [M, K]`.
    pub(in crate::run) fn merged(
        &self,
        name: &str,
        weight: &Tensor,
    ) -> Result<Tensor, CheckpointError> {
        let Some(module) = self.module(name) else { return Ok(weight.clone()) };
        let tensor = |tensor: AdapterTensor| self.load(&tensor.name(&module.name), DType::F32);
        let (a, b) = (tensor(AdapterTensor::A)?, tensor(AdapterTensor::B)?);
        let fault = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        let sum = || weight + (b.matmul(&a)? * module.scale)?;
        let sum = sum().map_err(fault)?;
        if !module.is_dora {
            return Ok(sum);
        }
        let magnitude = tensor(AdapterTensor::Magnitude)?;
        let scaled =
            || sum.broadcast_mul(&(magnitude / norms(&sum)?.maximum(1e-15f32)?)?.unsqueeze(1)?);
        scaled().map_err(fault)
    }
}
