//! Target size of the frames of a video: limits apply to the pixels of all frames together.
//!
//! The arithmetic and its rounding equal those of the transformers processor.

use std::num::NonZeroU32;

use crate::batch::VideoLimits;
use crate::data::media::image::{Frames, fit};

/// Maximum ratio of the longer to the shorter side, as in the transformers processor.
const MAX_ASPECT_RATIO: f64 = 200.0;

/// Limits on the pixels of all frames of a video together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    pub(super) min_pixels: u64,
    pub(super) max_pixels: u64,
}

impl Budget {
    /// The limits of a video of `num_frames` frames with settings of its own. If a limit of the row
    /// contradicts another one, the maximum applies.
    pub(super) fn of_video(self, num_frames: usize, limits: &VideoLimits) -> Self {
        if limits.resized.is_some() {
            return self; // as for images, a size of the row precedes its limits
        }
        let frames = num_frames as u64;
        let all = |a_frame: Option<NonZeroU32>| a_frame.map(|area| u64::from(area.get()) * frames);
        let total = limits.total_pixels.map(|total| u64::from(total.get()));
        let (min, max) = (all(limits.frame.min_pixels), all(limits.frame.max_pixels));
        let most = total.unwrap_or(self.max_pixels);
        let max_pixels = max.map_or(most, |max| max.min(most));
        let min_pixels = min.unwrap_or(self.min_pixels).min(max_pixels).min(self.max_pixels);
        Self { min_pixels, max_pixels }
    }
}

/// Returns the target `[height, width]` in pixels of `num_frames` frames of `height` x `width`.
///
/// Both are multiples of `factor` (`patch_size * merge_size`). Returns `None` if the aspect ratio
/// is above 200.
///
/// A frame with a side below `factor` is first scaled up. To compare the pixels with the budget,
/// the number of frames is rounded half to even to a multiple of `temporal`; the scale is computed
/// from the actual number of frames.
pub(super) fn smart_resize(
    num_frames: usize,
    [height, width]: [u32; 2],
    temporal: usize,
    factor: u32,
    budget: Budget,
) -> Option<[u32; 2]> {
    let (f, shown) = (f64::from(factor), num_frames as f64);
    let mut sides = [height, width].map(f64::from);
    if height < factor || width < factor {
        let scale = (f / sides[0]).max(f / sides[1]);
        sides = sides.map(|side| (side * scale).trunc());
    }
    let [h, w] = sides;
    if h.max(w) / h.min(w) > MAX_ASPECT_RATIO {
        return None;
    }
    let counted = (shown / temporal as f64).round_ties_even() * temporal as f64;
    Some(fit(sides, factor, Frames { shown, counted }, budget.min_pixels, budget.max_pixels))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The table was written by `scripts/golden/video_cases.py`.
    #[test]
    fn all_sizes_of_the_reference_table_agree() {
        let golden: Value =
            serde_json::from_str(include_str!("../../../../tests/golden/video.json")).unwrap();
        let rows = golden["sizes"].as_array().unwrap();
        let mut refused = 0;
        for row in rows {
            let [frames, height, width, factor, min_pixels, max_pixels] =
                std::array::from_fn(|i| row[i].as_u64().unwrap());
            let budget = Budget { min_pixels, max_pixels };
            let expected: Option<[u32; 2]> = serde_json::from_value(row[6].clone()).unwrap();
            let size = [height as u32, width as u32];
            let found = smart_resize(frames as usize, size, 2, factor as u32, budget);
            assert_eq!(found, expected, "{row}");
            refused += usize::from(expected.is_none());
        }
        assert!(rows.len() == 300 && refused > 10, "{refused} of {}", rows.len());
    }

    #[test]
    fn the_published_sizes_agree() {
        let table: Value =
            serde_json::from_str(include_str!("../../../../tests/golden/smart_resize.json"))
                .unwrap();
        for row in table["video"].as_array().unwrap() {
            let [frames, height, width, temporal, factor, min_pixels, max_pixels] =
                std::array::from_fn(|i| row[i].as_u64().unwrap());
            let Ok(expected) = serde_json::from_value::<[u32; 2]>(row[7].clone()) else { continue };
            let budget = Budget { min_pixels, max_pixels };
            let size = [height as u32, width as u32];
            let found =
                smart_resize(frames as usize, size, temporal as usize, factor as u32, budget);
            assert_eq!(found, Some(expected), "{row}");
        }
    }
}
