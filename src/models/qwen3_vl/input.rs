//! The one host-to-device copy: a token stream becomes tensors, and leaves the host.

use super::{ModelConfig, rope};
use crate::batch::{CuSeqlens, VarlenBatch};
use crate::ops::{self, RopeTable, Segments};
use candle_core::{DType, Device, Error, Result, Tensor};

/// What the decoder layers read besides their input.
pub(super) struct TextContext {
    pub(super) rope: RopeTable,
    pub(super) segments: Segments,
}

/// What the vision blocks read besides their input.
pub(super) struct VisionContext {
    pub(super) rope: RopeTable,
    /// `[P, 4]` rows of the position table.
    pub(super) position_index: Tensor,
    /// `[P, 4]`.
    pub(super) position_weight: Tensor,
    /// Frame boundaries: attention is full inside one frame.
    pub(super) segments: Segments,
}

/// The images of a micro-batch.
pub(super) struct VisionInput {
    /// `[P, patch_values]`.
    pub(super) pixel_values: Tensor,
    pub(super) context: VisionContext,
    /// `[M]` rows of the stream that the features fill.
    pub(super) rows: Tensor,
}

/// One micro-batch on the device.
pub struct ModelInput {
    pub(super) input_ids: Tensor, // [T] u32
    pub(super) text: TextContext,
    pub(super) vision: Option<VisionInput>, // None: a batch without images
}

impl ModelInput {
    /// Consumes the host batch; `dtype` is the compute dtype of the pixels.
    pub fn upload(
        batch: VarlenBatch,
        config: &ModelConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let num_rows = batch.input_ids.len();
        // The last moment to refuse an id: once on a GPU it is not read back.
        let vocab_size = config.text.vocab_size;
        if let Some((at, id)) =
            batch.input_ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size)
        {
            candle_core::bail!("id `{id}` at {at} is outside of the table of {vocab_size} rows");
        }
        let rope =
            upload_table(rope::mrope_table(&config.text, &batch.position_ids), num_rows, device)?;
        let segments = Segments::new(batch.cu_seqlens, batch.mask_boundaries)?;
        let text = TextContext { rope, segments };
        let input_ids = ops::upload(batch.input_ids, num_rows, device)?; // [T]
        if batch.media.is_empty() {
            return Ok(Self { input_ids, text, vision: None });
        }
        let grids: Vec<[u32; 3]> = batch.media.iter().map(|patches| patches.grid_thw).collect();
        let num_patches = batch.media.iter().map(crate::batch::Patches::num_patches).sum();
        let merged = config.merged(num_patches);
        if merged != batch.vision_rows.len() {
            candle_core::bail!(
                "{merged} visual features for {} vision tokens",
                batch.vision_rows.len()
            );
        }
        let mut pixels = Vec::with_capacity(num_patches * config.vision.patch_values());
        for patches in batch.media {
            pixels.extend_from_slice(&patches.pixel_values); // each image is freed as it is copied
        }
        let shape = (num_patches, config.vision.patch_values());
        let pixel_values = ops::upload(pixels, shape, device)?.to_dtype(dtype)?; // [P, C*tp*p*p]
        let frames: Vec<u32> =
            grids.iter().flat_map(|[t, h, w]| std::iter::repeat_n(h * w, *t as usize)).collect();
        let frames = CuSeqlens::from_lengths(&frames).map_err(Error::wrap)?;
        let all = CuSeqlens::from_lengths(&[num_patches as u32]).map_err(Error::wrap)?;
        let (index, weight) = rope::interpolated_positions(&config.vision, &grids);
        let context = VisionContext {
            rope: upload_table(rope::vision_table(&config.vision, &grids), num_patches, device)?,
            position_index: ops::upload(index, (num_patches, 4), device)?,
            position_weight: ops::upload(weight, (num_patches, 4), device)?,
            segments: Segments::new(frames, all)?,
        };
        let rows = ops::upload(batch.vision_rows, merged, device)?; // [M]
        Ok(Self { input_ids, text, vision: Some(VisionInput { pixel_values, context, rows }) })
    }
}

fn upload_table(table: rope::HostTable, num_rows: usize, device: &Device) -> Result<RopeTable> {
    let half = table.cos.len() / num_rows.max(1);
    Ok(RopeTable {
        cos: ops::upload(table.cos, (num_rows, half), device)?, // [T, Dh / 2]
        sin: ops::upload(table.sin, (num_rows, half), device)?,
    })
}
