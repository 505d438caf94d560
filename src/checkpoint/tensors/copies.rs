//! Copies of tensors that training changes while a thread writes a checkpoint.

use super::{Held, SavedTensor};
use crate::checkpoint::CheckpointError;
use candle_core::{CpuStorage, Device, Result, Storage, Tensor, WithDType};
use rayon::prelude::*;
use std::ops::Range;

/// Maximum number of elements that one thread copies at once.
const PART_ELEMENTS: usize = 1 << 22;

/// A part of a tensor to be copied.
struct Part<'a> {
    tensor: &'a SavedTensor,
    /// Flat.
    values: Tensor,
    /// Elements of `values`.
    range: Range<usize>,
    /// Number of the first of them in the tensor.
    first: usize,
}

impl SavedTensor {
    /// Its values do not change while it is written, also not in the background: it needs no copy.
    #[must_use]
    pub fn fixed(self) -> Self {
        Self { is_fixed: true, ..self }
    }

    /// Bytes that its copy needs.
    pub(in crate::checkpoint) fn changing_bytes(&self) -> u64 {
        if self.is_fixed { 0 } else { self.num_bytes() }
    }

    /// Copies the values of `tensors` to host memory, except for fixed ones, for a process that holds
    /// all of them. The files of the copies have the same bytes. `None` if memory does not suffice.
    pub(in crate::checkpoint) fn copies(
        tensors: &[Self],
    ) -> std::result::Result<Option<Vec<Self>>, CheckpointError> {
        let mut parts = Vec::new();
        for tensor in tensors.iter().filter(|tensor| !tensor.is_fixed) {
            let fault = |source| CheckpointError::Tensor { tensor: tensor.name.clone(), source };
            tensor.push_parts(&mut parts).map_err(fault)?;
        }
        let copy = |part: &Part<'_>| {
            let fault = |source| {
                let tensor = part.tensor.name.clone();
                CheckpointError::Tensor { tensor, source }
            };
            let end = part.first + part.range.len();
            let values = part.copy().map_err(fault)?;
            Ok(values.map(|values| (part.first..end, values)))
        };
        let is_on_cpu = parts.iter().all(|part| part.values.device().is_cpu());
        let copied: std::result::Result<Vec<_>, _> = if is_on_cpu {
            parts.par_iter().map(copy).collect()
        } else {
            parts.iter().map(copy).collect() // one stream of the GPU
        };
        let Some(copied) = copied?.into_iter().collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let mut copies: Vec<Self> = Vec::with_capacity(tensors.len());
        let mut rest = parts.iter().zip(copied).peekable();
        for tensor in tensors {
            if tensor.is_fixed {
                copies.push(tensor.clone());
                continue;
            }
            let mut own = Vec::new();
            while let Some((_, part)) = rest.next_if(|(of, _)| std::ptr::eq(of.tensor, tensor)) {
                own.push(part);
            }
            copies.push(Self { held: Held::Parts(own), is_fixed: true, ..tensor.clone() });
        }
        Ok(Some(copies))
    }

    /// Divides what this rank holds into parts that several threads can copy.
    fn push_parts<'a>(&'a self, parts: &mut Vec<Part<'a>>) -> Result<()> {
        let held = match &self.held {
            Held::Whole(values) => vec![(0..values.elem_count(), values)],
            Held::Parts(held) => {
                held.iter().map(|(range, values)| (range.clone(), values)).collect()
            }
            Held::Made(_) => Vec::new(),
        };
        for (place, values) in held {
            let values = values.flatten_all()?;
            for start in (0..place.len()).step_by(PART_ELEMENTS) {
                let range = start..place.len().min(start + PART_ELEMENTS);
                let first = place.start + start;
                parts.push(Part { tensor: self, values: values.clone(), range, first });
            }
        }
        Ok(())
    }
}

impl Part<'_> {
    /// A flat copy on the host; `None` if memory does not suffice.
    fn copy(&self) -> Result<Option<Tensor>> {
        let Range { start, end } = self.range;
        if !self.values.device().is_cpu() {
            return self.values.narrow(0, start, end - start)?.to_device(&Device::Cpu).map(Some);
        }
        let (storage, layout) = self.values.storage_and_layout();
        let range = layout.start_offset() + start..layout.start_offset() + end;
        match &*storage {
            Storage::Cpu(CpuStorage::F32(values)) => owned(&values[range]),
            Storage::Cpu(CpuStorage::BF16(values)) => owned(&values[range]),
            Storage::Cpu(CpuStorage::F16(values)) => owned(&values[range]),
            Storage::Cpu(CpuStorage::U8(values)) => owned(&values[range]),
            _ => self.values.narrow(0, start, end - start).map(Some), // refused when it is written
        }
    }
}

fn owned<T: WithDType>(values: &[T]) -> Result<Option<Tensor>> {
    let mut copy = Vec::new();
    if copy.try_reserve_exact(values.len()).is_err() {
        return Ok(None);
    }
    copy.extend_from_slice(values);
    Tensor::from_vec(copy, values.len(), &Device::Cpu).map(Some)
}
