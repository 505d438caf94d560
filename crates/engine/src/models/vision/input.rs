//! The copy of the images of a micro-batch to the device.

use super::config::{EARLY_MERGE, VisionAttention, VisionConfig};
use super::merger::MeanOfFour;
use super::positions;
use super::windows::Windows;
use batch::{CuSeqlens, Patches, VarlenBatch};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use kernels::{RopeTable, Segments};
use std::ops::Range;

/// Inputs of the vision blocks without a gradient.
pub(super) struct VisionContext {
    pub(super) rope: Option<RopeTable>, // None: no rotary positions
    pub(super) positions: Option<TableRows>, // None: the encoder has no position table
    pub(super) class_tokens: Option<ClassTokens>, // None: the rows of the blocks are the patches
    pub(super) frames: Segments,
    pub(super) windows: Option<WindowContext>, // None: all blocks attend inside frames
    pub(super) merged: Option<MergedContext>,  // None: all blocks have the same rows
}

/// Rows of a table that are read and added up, and their weights.
pub(super) struct TableRows {
    pub(super) index: Tensor,  // [R, 4]
    pub(super) weight: Tensor, // [R, 4]
}

/// What an early merger and the blocks after it read.
pub(super) struct MergedContext {
    pub(super) squares: Segments, // of the rows before the merge
    pub(super) frames: Segments,  // of the rows after it
    pub(super) mean: MeanOfFour,
}

/// Rows of class tokens and of patches among the rows of the blocks.
pub(super) struct ClassTokens {
    pub(super) num_rows: usize, // R
    pub(super) patches: Tensor, // [P] rows of the patches
    pub(super) rows: Tensor,    // [F] rows of the class tokens, one for each frame
    pub(super) first: Tensor,   // [F] zeros: all frames have the same token
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

    /// The rows of the patches, `[P, Dv]`, among those of the blocks.
    pub(super) fn of_patches(&self, h: Tensor) -> Result<Tensor> {
        match &self.context.class_tokens {
            Some(of) => kernels::gather_rows(&h, &of.patches),
            None => Ok(h),
        }
    }

    /// The transpose of [`Self::of_patches`].
    pub(super) fn of_rows(&self, d_patches: Tensor) -> Result<Tensor> {
        match &self.context.class_tokens {
            Some(of) => kernels::scatter_rows(&d_patches, &of.patches, of.num_rows),
            None => Ok(d_patches),
        }
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
        let merge = vision.spatial_merge_size as u32;
        if let Some([_, h, w]) = grids.iter().find(|[_, h, w]| h % merge != 0 || w % merge != 0) {
            bail!("a frame has {h} x {w} patches, expected multiples of {merge}");
        }
        for patches in &batch.media {
            let (num_values, count) = (patches.pixel_values.len(), patches.num_patches());
            let values = vision.patch_values();
            if num_values != count * values {
                bail!("{count} patches have {num_values} values, expected {values} for each");
            }
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
        let class_token = vision.parts.extra_rows();
        let lengths = |[t, h, w]: &[u32; 3]| std::iter::repeat_n(h * w + class_token, *t as usize);
        let lengths: Vec<u32> = grids.iter().flat_map(lengths).collect();
        let num_rows = lengths.iter().sum::<u32>() as usize;
        let all = CuSeqlens::from_lengths(&[num_rows as u32]).map_err(Error::wrap)?;
        let rope = (vision.parts.attention == VisionAttention::Rotary).then(|| {
            let mut rope = positions::vision_table(vision, &grids);
            if let Some(windows) = &windows {
                for angles in [&mut rope.cos, &mut rope.sin] {
                    *angles = windows.arranged(angles, angles.len() / merged);
                }
            }
            rope.upload(num_patches, device)
        });
        let context = VisionContext {
            rope: rope.transpose()?,
            positions: table_positions(vision, &grids, num_rows, device)?,
            class_tokens: (class_token > 0)
                .then(|| ClassTokens::upload(&lengths, num_rows, device))
                .transpose()?,
            windows: windows.map(|of| WindowContext::upload(of, &all, device)).transpose()?,
            merged: (vision.parts.early_merger.is_some())
                .then(|| MergedContext::upload(&lengths, &all, device))
                .transpose()?,
            frames: segments(&lengths, &all)?,
        };
        let rows = kernels::upload(batch.vision_rows, own.own.len(), device)?; // [M]
        Ok(Self { pixel_values, context, rows, own })
    }
}

fn table_positions(
    vision: &VisionConfig,
    grids: &[[u32; 3]],
    num_rows: usize,
    device: &Device,
) -> Result<Option<TableRows>> {
    let Some(num_position_embeddings) = vision.parts.num_position_embeddings else {
        return Ok(None);
    };
    let (index, weight) = positions::interpolated_positions(vision, num_position_embeddings, grids);
    TableRows::upload(index, weight, num_rows, device).map(Some)
}

/// Segments of these lengths in one pack of rows.
fn segments(lengths: &[u32], all: &CuSeqlens) -> Result<Segments> {
    Segments::new(CuSeqlens::from_lengths(lengths).map_err(Error::wrap)?, all.clone())
}

impl TableRows {
    fn upload(index: Vec<u32>, weight: Vec<f32>, num_rows: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            index: kernels::upload(index, (num_rows, 4), device)?,
            weight: kernels::upload(weight, (num_rows, 4), device)?,
        })
    }
}

impl MergedContext {
    /// `frames` are the rows of each frame before the merge.
    fn upload(frames: &[u32], all: &CuSeqlens, device: &Device) -> Result<Self> {
        let square = EARLY_MERGE.pow(2) as u32;
        let frames: Vec<u32> = frames.iter().map(|rows| rows / square).collect();
        let merged = frames.iter().sum::<u32>();
        let squares = vec![square; merged as usize];
        let after = CuSeqlens::from_lengths(&[merged]).map_err(Error::wrap)?;
        let num_rows = merged as usize * EARLY_MERGE.pow(2);
        let (rows, quarters) = ((0..num_rows as u32).collect(), vec![0.25; num_rows]);
        let spread = (0..merged).flat_map(|row| [row; 16]).collect(); // four rows of four
        let first = [0.25, 0.0, 0.0, 0.0].repeat(num_rows);
        Ok(Self {
            squares: segments(&squares, all)?,
            frames: segments(&frames, &after)?,
            mean: MeanOfFour {
                rows: TableRows::upload(rows, quarters, merged as usize, device)?,
                spread: TableRows::upload(spread, first, num_rows, device)?,
            },
        })
    }
}

impl ClassTokens {
    /// `lengths` are the rows of each frame.
    fn upload(lengths: &[u32], num_rows: usize, device: &Device) -> Result<Self> {
        let (mut patches, mut rows, mut next) = (Vec::with_capacity(num_rows), Vec::new(), 0);
        for length in lengths {
            rows.push(next);
            patches.extend(next + 1..next + length);
            next += length;
        }
        let list = |list: Vec<u32>| {
            let len = list.len();
            kernels::upload(list, len, device)
        };
        let first = list(vec![0; rows.len()])?;
        Ok(Self { num_rows, patches: list(patches)?, rows: list(rows)?, first })
    }
}

impl WindowContext {
    fn upload(windows: Windows, all: &CuSeqlens, device: &Device) -> Result<Self> {
        let merged = windows.order.len();
        Ok(Self {
            segments: segments(&windows.lengths, all)?,
            ordered: kernels::upload(windows.places(), merged, device)?,
            windowed: kernels::upload(windows.order, merged, device)?,
        })
    }
}
