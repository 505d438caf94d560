//! Adds an adapter to the weights of its model.

use super::super::export::Change;
use super::experts::Factors;
use super::{OpenAdapter, Source, norms};
use crate::checkpoint::CheckpointError;
use crate::nn::{AdapterModule, AdapterTensor, peft_name};
use crate::ops::ExpertLayout;
use candle_core::{DType, Tensor};

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
        self.modules.iter().find(|module| module.weight == weight)
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor, CheckpointError> {
        let Source::Files { files, exchanged, .. } = &self.source else {
            return Err(CheckpointError::NoTensor {
                place: "memory".into(),
                tensor: name.to_owned(),
            });
        };
        exchanged.load(files, name, dtype)
    }

    /// The value of a parameter of the model that was trained besides the adapter.
    pub(in crate::run) fn replacement(
        &self,
        name: &str,
        dtype: DType,
    ) -> Result<Tensor, CheckpointError> {
        self.load(&peft_name(name), dtype)
    }

    /// `W + scale B A`, with the row norms of DoRA's magnitude, in `f32`. `weight` is `W [M, K]`, or
    /// has such a matrix for each expert.
    pub(in crate::run) fn merged(
        &self,
        name: &str,
        weight: &Tensor,
    ) -> Result<Tensor, CheckpointError> {
        let Some(module) = self.module(name) else { return Ok(weight.clone()) };
        let fault = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        if let Some(layout) = module.experts {
            return self.factors(module, layout)?.add_to(weight).map_err(fault);
        }
        let tensor = |tensor: AdapterTensor| self.load(&tensor.name(&module.name), DType::F32);
        let (a, b) = (tensor(AdapterTensor::A)?, tensor(AdapterTensor::B)?);
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

    /// The same for `rows`, rows of the matrix of one expert of the weight `name`. `start` is the
    /// position of their first element in the weight.
    pub(in crate::run) fn merged_rows(
        &self,
        name: &str,
        start: usize,
        rows: &Tensor,
    ) -> Result<Tensor, CheckpointError> {
        let Some((module, layout)) = self.module(name).and_then(|of| Some((of, of.experts?)))
        else {
            return Ok(rows.clone());
        };
        let factors = self.factors(module, layout)?;
        let sum = || {
            let (count, columns) = rows.dims2()?;
            let (expert, first) = factors.place(start / columns)?;
            rows + factors.rows(expert, first..first + count)?
        };
        sum().map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    fn factors(
        &self,
        module: &AdapterModule,
        layout: ExpertLayout,
    ) -> Result<Factors, CheckpointError> {
        let tensor = |of: AdapterTensor| self.load(&of.name(&module.name), DType::F32);
        let [a, b] = [tensor(AdapterTensor::A)?, tensor(AdapterTensor::B)?];
        Ok(Factors { a, b, rank: module.rank, scale: module.scale, layout })
    }
}
