//! The host-to-device copy of a micro-batch.

use super::config::Config;
use super::positions;
use crate::batch::{CuSeqlens, Patches, VarlenBatch};
use crate::nn::DecoderContext;
use crate::ops::{self, RopeTable, Segments};
use candle_core::{DType, Device, Error, Result, Tensor, bail};

/// Inputs of the vision blocks without a gradient.
pub(super) struct VisionContext {
    pub(super) rope: RopeTable,
    pub(super) position_index: Tensor, // [P, 4] rows of the position table
    pub(super) position_weight: Tensor, // [P, 4]
    pub(super) segments: Segments,     // frames: attention is full inside a frame
}

/// The images of a micro-batch.
pub(super) struct VisionInput {
    pub(super) pixel_values: Tensor, // [P, C*tp*p*p]
    pub(super) context: VisionContext,
    pub(super) rows: Tensor, // [M] rows of the token stream that the features replace
}

/// One micro-batch on the device.
pub(super) struct Input {
    pub(super) ids: Tensor, // [T] u32
    pub(super) text: DecoderContext,
    pub(super) vision: Option<VisionInput>, // None: a batch without images
}

impl Input {
    pub(super) fn upload(
        mut batch: VarlenBatch,
        config: &Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let rope = positions::mrope_table(&config.text, config.mrope_section, &batch.position_ids);
        let vocab_size = config.text.vocab_size;
        let (ids, text) = DecoderContext::upload(&mut batch, rope, vocab_size, device)?;
        let vision = if batch.media.is_empty() {
            None
        } else {
            Some(VisionInput::upload(batch, config, dtype, device)?)
        };
        Ok(Self { ids, text, vision })
    }
}

impl VisionInput {
    fn upload(batch: VarlenBatch, config: &Config, dtype: DType, device: &Device) -> Result<Self> {
        let grids: Vec<[u32; 3]> = batch.media.iter().map(|patches| patches.grid_thw).collect();
        let num_patches = batch.media.iter().map(Patches::num_patches).sum();
        let merged = num_patches / config.patches_per_token();
        if merged != batch.vision_rows.len() {
            bail!("{merged} visual features for {} vision tokens", batch.vision_rows.len());
        }
        let mut pixels = Vec::with_capacity(num_patches * config.vision.patch_values());
        for patches in batch.media {
            pixels.extend_from_slice(&patches.pixel_values); // frees each image after its copy
        }
        let shape = (num_patches, config.vision.patch_values());
        let pixel_values = ops::upload(pixels, shape, device)?.to_dtype(dtype)?; // [P, C*tp*p*p]
        let frames: Vec<u32> =
            grids.iter().flat_map(|[t, h, w]| std::iter::repeat_n(h * w, *t as usize)).collect();
        let frames = CuSeqlens::from_lengths(&frames).map_err(Error::wrap)?;
        let all = CuSeqlens::from_lengths(&[num_patches as u32]).map_err(Error::wrap)?;
        let (index, weight) = positions::interpolated_positions(&config.vision, &grids);
        let context = VisionContext {
            rope: positions::vision_table(&config.vision, &grids).upload(num_patches, device)?,
            position_index: ops::upload(index, (num_patches, 4), device)?,
            position_weight: ops::upload(weight, (num_patches, 4), device)?,
            segments: Segments::new(frames, all)?,
        };
        let rows = ops::upload(batch.vision_rows, merged, device)?; // [M]
        Ok(Self { pixel_values, context, rows })
    }
}
