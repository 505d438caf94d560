//! The copy of the images of a micro-batch to the device.

use super::config::VisionConfig;
use super::positions;
use super::windows::Windows;
use batch::{CuSeqlens, Patches, VarlenBatch};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use kernels::{RopeTable, Segments};
use std::ops::Range;

/// Inputs of the vision blocks without a gradient.
pub(super) struct VisionContext {
    pub(super) rope: RopeTable,
    pub(super) positions: Option<TablePositions>, // None: the encoder has no position table
    pub(super) frames: Segments,
    pub(super) windows: Option<WindowContext>, // None: all blocks attend inside frames
}

/// The rows of the position table that surround each patch.
pub(super) struct TablePositions {
    pub(super) index: Tensor,  // [P, 4]
    pub(super) weight: Tensor, // [P, 4]
}

/// Windows of the frames. The patches of a window follow each other; the features of the merged
/// tokens are put into the order of the tokens afterwards.
pub(super) struct WindowContext {
    pub(super) segments: Segments,
    windowed: Tensor, // [M] for each merged token of the windows, its place in the token order
    ordered: Tensor,  // [M] the inverse
}

/// The images of a micro-batch.
pub(in crate::models) struct VisionInput {
    pub(super) pixel_values: Tensor, // [P, C*tp*p*p]
    pub(super) context: VisionContext,
    pub(in crate::models) rows: Tensor, // [M] rows of the token stream that the features replace
    own: OwnFeatures,
}

/// The features that the tokens of this rank receive. A part of a micro-batch computes whole
/// frames.
struct OwnFeatures {
    num_features: usize,
    own: Range<usize>,
}

impl VisionInput {
    /// The features of the own tokens, `[M, D]`, among all computed ones.
    pub(in crate::models) fn own(&self, features: &Tensor) -> Result<Tensor> {
        features.narrow(0, self.own.own.start, self.own.own.len())
    }

    /// The gradient of all computed features from that of the own ones, `[M, D]`.
    pub(in crate::models) fn all(&self, d_own: Tensor) -> Result<Tensor> {
        let OwnFeatures { num_features, own } = &self.own;
        if own.len() == *num_features {
            return Ok(d_own);
        }
        d_own.pad_with_zeros(0, own.start, num_features - own.end)?.contiguous()
    }

    /// The features of all merged tokens in the order of the tokens, `[M, D]`.
    pub(super) fn ordered(&self, features: Tensor) -> Result<Tensor> {
        match &self.context.windows {
            Some(windows) => kernels::gather_rows(&features, &windows.ordered),
            None => Ok(features),
        }
    }

    /// The transpose of [`Self::ordered`].
    pub(super) fn windowed(&self, d_features: Tensor) -> Result<Tensor> {
        match &self.context.windows {
            Some(windows) => kernels::gather_rows(&d_features, &windows.windowed),
            None => Ok(d_features),
        }
    }

    pub(in crate::models) fn upload(
        batch: VarlenBatch,
        vision: &VisionConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let grids: Vec<[u32; 3]> = batch.media.iter().map(|patches| patches.grid_thw).collect();
        let num_patches = batch.media.iter().map(Patches::num_patches).sum();
        let merged = num_patches / vision.patches_per_token();
        let own = OwnFeatures {
            num_features: merged,
            own: batch.part.as_ref().map_or(0..merged, |part| part.features.clone()),
        };
        if own.own.len() != batch.vision_rows.len() || own.own.end > merged {
            bail!("{merged} visual features for {} vision tokens", batch.vision_rows.len());
        }
        let windows = vision.parts.windows.as_ref();
        let windows = windows.map(|of| Windows::new(&grids, vision.spatial_merge_size, of.side));
        let mut pixels = Vec::with_capacity(num_patches * vision.patch_values());
        for patches in batch.media {
            pixels.extend_from_slice(&patches.pixel_values); // frees each image after its copy
        }
        let per_token = vision.patches_per_token();
        if let Some(windows) = &windows {
            pixels = windows.arranged(&pixels, per_token * vision.patch_values());
        }
        let shape = (num_patches, vision.patch_values());
        let pixel_values = kernels::upload_rounded(pixels, shape, dtype, device)?; // [P, C*tp*p*p]
        let frames: Vec<u32> =
            grids.iter().flat_map(|[t, h, w]| std::iter::repeat_n(h * w, *t as usize)).collect();
        let frames = CuSeqlens::from_lengths(&frames).map_err(Error::wrap)?;
        let all = CuSeqlens::from_lengths(&[num_patches as u32]).map_err(Error::wrap)?;
        let mut rope = positions::vision_table(vision, &grids);
        if let Some(windows) = &windows {
            for angles in [&mut rope.cos, &mut rope.sin] {
                *angles = windows.arranged(angles, angles.len() / merged);
            }
        }
        let context = VisionContext {
            rope: rope.upload(num_patches, device)?,
            positions: TablePositions::upload(vision, &grids, num_patches, device)?,
            windows: windows.map(|of| WindowContext::upload(of, &all, device)).transpose()?,
            frames: Segments::new(frames, all)?,
        };
        let num_rows = own.own.len();
        let rows = kernels::upload(batch.vision_rows, num_rows, device)?; // [M]
        Ok(Self { pixel_values, context, rows, own })
    }
}

impl TablePositions {
    fn upload(
        vision: &VisionConfig,
        grids: &[[u32; 3]],
        num_patches: usize,
        device: &Device,
    ) -> Result<Option<Self>> {
        let Some(num_position_embeddings) = vision.parts.num_position_embeddings else {
            return Ok(None);
        };
        let (index, weight) =
            positions::interpolated_positions(vision, num_position_embeddings, grids);
        Ok(Some(Self {
            index: kernels::upload(index, (num_patches, 4), device)?,
            weight: kernels::upload(weight, (num_patches, 4), device)?,
        }))
    }
}

impl WindowContext {
    fn upload(windows: Windows, all: &CuSeqlens, device: &Device) -> Result<Self> {
        let lengths = CuSeqlens::from_lengths(&windows.lengths).map_err(Error::wrap)?;
        let merged = windows.order.len();
        Ok(Self {
            segments: Segments::new(lengths, all.clone())?,
            ordered: kernels::upload(windows.places(), merged, device)?,
            windowed: kernels::upload(windows.order, merged, device)?,
        })
    }
}
