//! Copies of tensors that training changes while a thread writes a checkpoint.

use super::{Held, SavedTensor, Span, TensorFile};
use crate::checkpoint::CheckpointError;
use crate::ops::copy_to_host;
use candle_core::{CpuStorage, Device, Result, Storage, Tensor, WithDType};
use rayon::prelude::*;
use std::collections::HashMap;
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

    /// Copies what rank `rank` of `world` ranks writes of `files` to host memory, except for fixed
    /// tensors. `None` if memory does not suffice.
    pub(in crate::checkpoint) fn copies(
        files: &[TensorFile<'_>],
        rank: usize,
        world: usize,
    ) -> std::result::Result<Option<Copies>, CheckpointError> {
        let mut parts = Vec::new();
        for file in files {
            for span in file.changing(rank, world) {
                let tensor = span.tensor;
                let fault =
                    |source| CheckpointError::Tensor { tensor: tensor.name.clone(), source };
                parts.extend(divided(&span).map_err(fault)?);
            }
        }
        let copy = |part: &Part<'_>| {
            let fault = |source| {
                let tensor = part.tensor.name.clone();
                CheckpointError::Tensor { tensor, source }
            };
            let end = part.first + part.range.len();
            let values = part.copy().map_err(fault)?;
            Ok(values.map(|values| (place(part.tensor), (part.first..end, values))))
        };
        let is_on_cpu = parts.iter().all(|part| part.values.device().is_cpu());
        let copied: std::result::Result<Vec<_>, CheckpointError> = if is_on_cpu {
            parts.par_iter().map(copy).collect()
        } else {
            parts.iter().map(copy).collect() // one stream of the GPU
        };
        let Some(copied) = copied?.into_iter().collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let mut copies = Copies::default();
        for (tensor, part) in copied {
            copies.0.entry(tensor).or_default().push(part);
        }
        Ok(Some(copies))
    }
}

/// Copied parts of tensors, by the place of the tensor in memory.
#[derive(Debug, Default)]
pub(in crate::checkpoint) struct Copies(HashMap<usize, Vec<(Range<usize>, Tensor)>>);

impl Copies {
    /// The copy of `tensor`: its copied parts, or a fixed tensor itself.
    pub(in crate::checkpoint) fn take(&mut self, tensor: &SavedTensor) -> SavedTensor {
        if tensor.is_fixed {
            return tensor.clone();
        }
        let own = self.0.remove(&place(tensor)).unwrap_or_default();
        SavedTensor { held: Held::Parts(own), is_fixed: true, ..tensor.clone() }
    }
}

fn place(tensor: &SavedTensor) -> usize {
    std::ptr::from_ref(tensor).addr()
}

impl TensorFile<'_> {
    /// Bytes that [`SavedTensor::copies`] needs.
    pub(in crate::checkpoint) fn changing_bytes(&self, rank: usize, world: usize) -> u64 {
        let bytes = |span: &Span<'_>| span.range.len() * span.tensor.dtype.size_in_bytes();
        self.changing(rank, world).map(|span| bytes(&span) as u64).sum()
    }

    /// What a rank writes of tensors that are not fixed.
    fn changing(&self, rank: usize, world: usize) -> impl Iterator<Item = Span<'_>> {
        self.spans(rank, world).into_iter().filter(|span| !span.tensor.is_fixed)
    }
}

/// Divides a span into parts that several threads can copy.
fn divided<'a>(span: &Span<'a>) -> Result<Vec<Part<'a>>> {
    let Some(values) = span.values else { return Ok(Vec::new()) };
    let values = values.flatten_all()?;
    let Range { start, end } = span.range;
    let part = |at: usize| Part {
        tensor: span.tensor,
        values: values.clone(),
        range: at..end.min(at + PART_ELEMENTS),
        first: span.first + at - start,
    };
    Ok((start..end).step_by(PART_ELEMENTS).map(part).collect())
}

impl Part<'_> {
    /// A flat copy on the host; `None` if memory does not suffice.
    fn copy(&self) -> Result<Option<Tensor>> {
        let Range { start, end } = self.range;
        if !self.values.device().is_cpu() {
            return copy_to_host(&self.values.narrow(0, start, end - start)?).map(Some);
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
