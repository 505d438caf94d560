//! One micro-batch of tokens on the device.

use super::rope::HostTable;
use batch::VarlenBatch;
use candle_core::{Device, Result, Tensor, bail};
use kernels::{RopeTable, Segments};

/// Inputs of the decoder layers without a gradient.
pub(crate) struct DecoderContext {
    pub(crate) rope: RopeTable,
    pub(super) segments: Segments,
}

impl DecoderContext {
    /// Uploads the ids and the rotary table of `batch`. Fails if an id is not below `vocab_size`:
    /// ids on a GPU are not read back.
    pub(crate) fn upload(
        batch: &mut VarlenBatch,
        rope: HostTable,
        vocab_size: usize,
        device: &Device,
    ) -> Result<(Tensor, Self)> {
        let num_rows = batch.input_ids.len();
        let mut ids = batch.input_ids.iter().enumerate();
        if let Some((at, id)) = ids.find(|(_, id)| **id as usize >= vocab_size) {
            bail!("token id `{id}` at position {at} is not below the vocabulary size {vocab_size}");
        }
        let context = Self {
            rope: rope.upload(num_rows, device)?,
            segments: Segments::new(batch.cu_seqlens.clone(), batch.mask_boundaries.clone())?,
        };
        let ids = std::mem::take(&mut batch.input_ids);
        Ok((kernels::upload(ids, num_rows, device)?, context)) // [T]
    }
}
