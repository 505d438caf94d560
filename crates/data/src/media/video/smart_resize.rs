//! Target size of the frames of a video: limits apply to the pixels of all frames together, and
//! with Qwen2.5-VL also to the pixels of each frame.
//!
//! The arithmetic and its rounding equal those of the transformers processors.
//! `Qwen2VLVideoProcessor` has only the limits on each frame.

use std::num::NonZeroU32;

use crate::media::image::{Frames, fit, smart_resize as smart_resize_image};
use batch::VideoLimits;

/// Maximum ratio of the longer to the shorter side, as in the transformers processor.
const MAX_ASPECT_RATIO: f64 = 200.0;

/// Limits on the pixels of all frames of a video together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    pub(super) min_pixels: u64,
    pub(super) max_pixels: u64,
}

impl Budget {
    pub(super) fn is_valid(self) -> bool {
        (1..=self.max_pixels).contains(&self.min_pixels)
    }

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

    /// These limits and those of a `frame`, for all of `num_frames` frames.
    fn with_frame(self, num_frames: usize, frame: Self) -> Self {
        let frames = num_frames as u64;
        let max_pixels = self.max_pixels.min(frame.max_pixels.saturating_mul(frames));
        let min = self.min_pixels.max(frame.min_pixels.saturating_mul(frames));
        Self { min_pixels: min.min(max_pixels), max_pixels }
    }
}

/// Limits on the pixels of a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PixelLimits {
    /// Of all frames together.
    pub(super) all: Budget,
    /// Of each frame, if the family has such limits.
    pub(super) frame: Option<Budget>,
}

impl PixelLimits {
    /// Returns the target `[height, width]` in pixels of the frames of a video with limits of its
    /// own. See [`smart_resize`].
    pub(super) fn target(
        self,
        num_frames: usize,
        size: [u32; 2],
        temporal: usize,
        factor: u32,
        row: &VideoLimits,
    ) -> Option<[u32; 2]> {
        let Some(frame) = self.frame else {
            let budget = self.all.of_video(num_frames, row);
            return smart_resize(num_frames, size, temporal, factor, budget);
        };
        let Budget { min_pixels, max_pixels } =
            self.all.with_frame(num_frames, frame).of_video(num_frames, row);
        let frames = num_frames as u64;
        let max_pixels = frame.max_pixels.min(max_pixels / frames); // also of a row's `total_pixels`
        let min_pixels = min_pixels.div_ceil(frames).min(max_pixels);
        smart_resize_image(size[0], size[1], factor, min_pixels, max_pixels)
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
            serde_json::from_str(include_str!("../../../../../tests/golden/video.json")).unwrap();
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
            serde_json::from_str(include_str!("../../../../../tests/golden/smart_resize.json"))
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

    /// The limits on a frame apply as to an image, and the limits on all frames in shares.
    #[test]
    fn limits_on_a_frame_and_on_all_frames_both_apply() {
        let target = |all: [u64; 2], row: VideoLimits| {
            let budget = |[min_pixels, max_pixels]: [u64; 2]| Budget { min_pixels, max_pixels };
            let limits = PixelLimits { all: budget(all), frame: Some(budget([3136, 50_000])) };
            limits.target(6, [280, 420], 2, 28, &row).unwrap()
        };
        let none = [1, u64::MAX];
        let by_frame = smart_resize_image(280, 420, 28, 3136, 50_000).unwrap();
        assert_eq!(target(none, VideoLimits::default()), by_frame);
        let by_all = smart_resize_image(280, 420, 28, 3136, 20_000).unwrap();
        assert_eq!(target([1, 6 * 20_000], VideoLimits::default()), by_all);
        assert!(by_all[0] < by_frame[0]);
        // the folder's maximum also limits what the config enlarges
        let enlarged = smart_resize_image(280, 420, 28, 50_000, 50_000).unwrap();
        assert_eq!(target([6 * 90_000, 6 * 100_000], VideoLimits::default()), enlarged);
        let total = VideoLimits { total_pixels: NonZeroU32::new(60_000), ..VideoLimits::default() };
        let by_row = smart_resize_image(280, 420, 28, 3136, 10_000).unwrap();
        assert_eq!(target(none, total), by_row);
        // no setting of a row lifts the folder's maximum
        for total in [6 * 60_000, 1 << 30] {
            let total_pixels = NonZeroU32::new(total);
            let mut row = VideoLimits { total_pixels, ..VideoLimits::default() };
            assert_eq!(target(none, row), by_frame);
            row.frame.min_pixels = NonZeroU32::new(100_000);
            assert_eq!(target(none, row), enlarged);
        }
    }
}
