//! Samples the frames of a video, and computes their timestamps and their target size. The
//! arithmetic and its rounding equal those of the transformers processors.
//!
//! `Qwen3VLVideoProcessor` spreads the indices evenly from the first to the last frame;
//! `Qwen2VLVideoProcessor` takes the first frame of equal shares of the video, and
//! `InternVLVideoProcessor` the middle one. `MiniCPMV4_6VideoProcessor` takes the frame at each
//! second, or at the maximum number of times, spread evenly over the video. There is one
//! difference: for some videos `Qwen2VLVideoProcessor` returns one index too many, past the last
//! frame, because it rounds the step between frames. This code does not return it. Presentation
//! times in the file are not used.
//!
//! Limits on the size apply to the pixels of all frames together, and with Qwen2.5-VL also to the
//! pixels of each frame. `Qwen2VLVideoProcessor` has only the limits on each frame.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::media::VideoForm;
use crate::media::image::{Frames, fit, smart_resize as smart_resize_image};
use batch::VideoLimits;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct FrameSampling {
    /// Number of frames to sample per second of video.
    pub(super) fps: f64,
    /// Minimum number of sampled frames, if the video has as many.
    pub(super) min_frames: usize,
    pub(super) max_frames: usize,
}

/// What decides the number of frames.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Wanted {
    /// This number of frames, or all if the video has fewer. The limits on it do not apply.
    Count(usize),
    /// The time that the video takes at this number of frames per second.
    Rate(f64),
    /// All frames of a list that is sampled already, up to the maximum.
    All,
}

/// Returns the frames of a video of `total` frames at `rate` frames per second that lie between the
/// `start` and the `end` of `limits`; the last one is at `end` or before it. Empty if there are
/// none.
///
/// The rounding equals that of `calculate_video_frame_range` in qwen-vl-utils.
pub(super) fn frames_between(total: usize, rate: f64, limits: &VideoLimits) -> Range<usize> {
    let first = limits.start.map_or(0, |seconds| (seconds * rate).ceil() as usize);
    let past = limits.end.map_or(total, |seconds| (seconds * rate).floor() as usize + 1);
    first..past.min(total).max(first)
}

impl FrameSampling {
    /// The sampling of a video with settings of its own; `count` is its number of frames, if given.
    pub(super) fn of_video(self, fps: Option<f64>, limits: &VideoLimits) -> (Self, Option<usize>) {
        let number = |limit: Option<NonZeroU32>| limit.map(|limit| limit.get() as usize);
        let (min_frames, max_frames) = (number(limits.min_frames), number(limits.max_frames));
        let sampling = Self {
            fps: fps.unwrap_or(self.fps),
            min_frames: min_frames.unwrap_or(self.min_frames),
            max_frames: max_frames.unwrap_or(self.max_frames.max(min_frames.unwrap_or(0))),
        };
        (sampling, number(limits.num_frames))
    }

    /// Returns the indices of the frames to sample from `total` frames. A patch has `temporal`
    /// frames.
    pub(super) fn indices(
        &self,
        total: usize,
        wanted: Wanted,
        form: VideoForm,
        temporal: usize,
    ) -> Vec<usize> {
        let unlimited = Self { fps: self.fps, min_frames: 0, max_frames: usize::MAX };
        let of_rate = |rate: f64| total as f64 / rate * self.fps;
        match (form, wanted) {
            (VideoForm::Timestamps, Wanted::Count(count)) => unlimited.spread(total, count),
            (VideoForm::Timestamps, Wanted::Rate(rate)) => {
                self.spread(total, of_rate(rate) as usize)
            }
            (VideoForm::Timestamps, Wanted::All) => self.spread(total, total),
            (VideoForm::SlicedFrames { .. }, Wanted::Count(count)) => {
                steps(total, count.min(total))
            }
            (VideoForm::SlicedFrames { .. }, Wanted::Rate(rate)) => self.at_times(total, rate),
            (VideoForm::SlicedFrames { .. }, Wanted::All) => {
                steps(total, total.min(self.max_frames))
            }
            (VideoForm::NumberedFrames { .. }, Wanted::Count(count)) => {
                unlimited.middles(total, count)
            }
            (VideoForm::NumberedFrames { .. }, Wanted::Rate(rate)) => {
                self.middles(total, of_rate(rate) as usize)
            }
            (VideoForm::NumberedFrames { .. }, Wanted::All) => self.middles(total, total),
            (VideoForm::OneRun { .. }, Wanted::Count(count)) => {
                let groups = (count as f64 / temporal as f64).round_ties_even();
                unlimited.shares(total, groups * temporal as f64, temporal)
            }
            (VideoForm::OneRun { .. }, Wanted::Rate(rate)) => {
                self.shares(total, of_rate(rate), temporal)
            }
            (VideoForm::OneRun { .. }, Wanted::All) if total <= self.max_frames => {
                (0..total).collect()
            }
            (VideoForm::OneRun { .. }, Wanted::All) => self.shares(total, total as f64, temporal),
        }
    }

    /// The first frame of each of equal shares of the video. Their number is a multiple of
    /// `temporal`.
    fn shares(&self, total: usize, wanted: f64, temporal: usize) -> Vec<usize> {
        let whole = |frames: usize| frames / temporal * temporal;
        let most = whole(self.max_frames.min(total));
        let count = whole(wanted.max(self.min_frames as f64).min(most as f64) as usize);
        (0..count).map(|k| k * total / count).collect()
    }

    /// The frame in the middle of each of equal shares of the video.
    fn middles(&self, total: usize, wanted: usize) -> Vec<usize> {
        let count = wanted.max(self.min_frames).min(self.max_frames).min(total);
        let step = total as f64 / count as f64;
        // rounded to `f32` as in transformers
        (0..count).map(|k| (step / 2.0 + k as f64 * step) as f32 as usize).collect()
    }

    fn spread(&self, total: usize, wanted: usize) -> Vec<usize> {
        let count = wanted.max(self.min_frames).min(self.max_frames).min(total);
        equal_steps(total, count).map(|at| at.round_ties_even() as usize).collect()
    }

    /// The frame at each multiple of `1 / fps` seconds. A low `rate` repeats frames. If they are more
    /// than the maximum, their tenths are the times to choose from.
    fn at_times(&self, total: usize, rate: f64) -> Vec<usize> {
        // At one frame per second, these are seconds and frames per second.
        let (duration, rate) = (total as f64 / rate * self.fps, rate / self.fps);
        let at = |time: f64| ((time * rate) as usize).min(total - 1);
        let most = self.max_frames.min(MOST_FRAMES);
        if duration > most as f64 {
            let tenths = steps((duration / 0.1) as usize, most);
            return tenths.into_iter().map(|tenth| at(tenth as f64 / 10.0)).collect();
        }
        let count = duration.ceil() as usize;
        if count < self.min_frames.min(total) {
            return steps(total, self.min_frames.min(total));
        }
        (0..count).map(|time| at(time as f64)).collect()
    }
}

/// Limit on the frames of a video whose low rate repeats them: the tokens of a row, of which a frame
/// has one at least.
const MOST_FRAMES: usize = 1 << 20;

/// `count` numbers at equal distances from 0 to `total - 1`; 0 if there is one.
fn equal_steps(total: usize, count: usize) -> impl Iterator<Item = f64> {
    let last = total.saturating_sub(1) as f64;
    let step = last / count.saturating_sub(1).max(1) as f64;
    (0..count).map(move |k| if k > 0 && k + 1 == count { last } else { k as f64 * step })
}

/// [`equal_steps`] rounded down.
fn steps(total: usize, count: usize) -> Vec<usize> {
    equal_steps(total, count).map(|at| at as usize).collect()
}

/// Returns the number of frames per second if `sampled` of `total` frames at `rate` are used.
pub(super) fn sampled_rate(sampled: usize, total: usize, rate: f64) -> f64 {
    sampled as f64 / total as f64 * rate
}

/// Returns the time in seconds of each group of `temporal` frames: the mean of the times of its
/// first and last frame. An incomplete last group is filled with its last frame.
pub(super) fn timestamps(indices: &[usize], rate: f64, temporal: usize) -> Vec<f64> {
    let second = |index: usize| index as f64 / rate;
    let groups = indices.chunks(temporal);
    groups.map(|group| f64::midpoint(second(group[0]), second(group[group.len() - 1]))).collect()
}

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
    use sha2::{Digest as _, Sha256};

    const SLICED: VideoForm = VideoForm::SlicedFrames { can_be_numbered: true };

    use super::*;

    fn golden() -> Value {
        serde_json::from_str(include_str!("../../../../../tests/golden/video.json")).unwrap()
    }

    #[test]
    fn indices_and_timestamps_equal_the_reference() {
        let golden = golden();
        let cases = golden["indices"].as_array().unwrap();
        assert!(cases.len() > 70);
        for case in cases {
            let number = |key: &str| case[key].as_u64().unwrap() as usize;
            let fps = case["fps"].as_f64().unwrap();
            let (min_frames, max_frames) = (number("min_frames"), number("max_frames"));
            let rate = case["rate"].as_f64().unwrap();
            let sampling = FrameSampling { fps, min_frames, max_frames };
            let form = VideoForm::Timestamps;
            let indices = sampling.indices(number("total"), Wanted::Rate(rate), form, 2);
            assert_eq!(indices.len(), number("count"), "{case}");
            if let Some(digest) = case["indices"].as_str() {
                let text: Vec<String> = indices.iter().map(ToString::to_string).collect();
                assert_eq!(format!("{:x}", Sha256::digest(text.join(","))), digest, "{case}");
            } else {
                assert_eq!(serde_json::json!(indices), case["indices"], "{case}");
            }
            let times = timestamps(&indices, rate, 2);
            let times: Vec<String> = times.iter().map(|time| format!("{time:.1}")).collect();
            let expected: Vec<&str> = case["times"]
                .as_array()
                .unwrap()
                .iter()
                .map(|time| time.as_str().unwrap())
                .collect();
            assert_eq!(times[..expected.len()], expected, "{case}");
        }
    }

    /// The results of `calculate_video_frame_range` in qwen-vl-utils 0.0.14.
    #[test]
    fn a_range_begins_at_the_frame_after_its_start_and_ends_at_the_frame_before_its_end() {
        let range = |start, end| {
            let limits = VideoLimits { start, end, ..VideoLimits::default() };
            frames_between(100, 25.0, &limits)
        };
        assert_eq!(range(None, None), 0..100);
        assert_eq!(range(Some(1.0), None), 25..100);
        assert_eq!(range(Some(1.01), Some(2.01)), 26..51);
        assert_eq!(range(Some(0.0), Some(4.0)), 0..100);
        assert_eq!(range(Some(3.99), Some(9.0)), 100..100);
        assert!(range(Some(7.0), None).is_empty());
        assert!(range(Some(0.01), Some(0.03)).is_empty());
    }

    #[test]
    fn a_sampled_list_keeps_all_frames_up_to_the_maximum() {
        let sampling = FrameSampling { fps: 1.7, min_frames: 4, max_frames: 6 };
        for (form, of_eleven) in
            [(VideoForm::Timestamps, [0, 2, 4, 6, 8, 10]), (ONE_RUN, [0, 1, 3, 5, 7, 9])]
        {
            let indices = |total| sampling.indices(total, Wanted::All, form, 2);
            for total in 1..=6 {
                assert_eq!(indices(total), (0..total).collect::<Vec<_>>());
            }
            assert_eq!(indices(11), of_eleven);
        }
    }

    const ONE_RUN: VideoForm = VideoForm::OneRun { tokens_per_second: None };

    /// The table was written by `scripts/golden/qwen2_video.py`.
    #[test]
    fn indices_of_qwen25_vl_equal_the_reference() {
        let golden = include_str!("../../../../../tests/golden/qwen25_video.json");
        let golden: Value = serde_json::from_str(golden).unwrap();
        let cases = golden["indices"].as_array().unwrap();
        assert!(cases.len() > 60);
        for case in cases {
            let number = |key: &str| case[key].as_u64().unwrap() as usize;
            let (fps, rate) = (case["fps"].as_f64().unwrap(), case["rate"].as_f64().unwrap());
            let (min_frames, max_frames) = (number("min_frames"), number("max_frames"));
            let sampling = FrameSampling { fps, min_frames, max_frames };
            let indices = sampling.indices(number("total"), Wanted::Rate(rate), ONE_RUN, 2);
            assert_eq!(indices.len(), number("count"), "{case}");
            let rate = sampled_rate(indices.len(), number("total"), rate);
            let expected = case["sampled_fps"].as_f64().unwrap(); // read up to its last bit
            assert!((rate - expected).abs() <= 1e-15 * expected, "{rate}: {case}");
            if let Some(digest) = case["indices"].as_str() {
                let text: Vec<String> = indices.iter().map(ToString::to_string).collect();
                assert_eq!(format!("{:x}", Sha256::digest(text.join(","))), digest, "{case}");
            } else {
                assert_eq!(serde_json::json!(indices), case["indices"], "{case}");
            }
        }
    }

    /// The table was written by `scripts/golden/internvl_video.py`.
    #[test]
    fn indices_of_internvl_equal_the_reference() {
        let golden = include_str!("../../../../../tests/golden/internvl_video.json");
        let golden: Value = serde_json::from_str(golden).unwrap();
        let form = VideoForm::NumberedFrames { placeholder: "<video>" };
        let cases = golden["indices"].as_array().unwrap();
        assert!(cases.len() > 100);
        for case in cases {
            let [total, count] = ["total", "count"].map(|key| case[key].as_u64().unwrap() as usize);
            let sampling = FrameSampling { fps: 2.0, min_frames: count, max_frames: count };
            for wanted in [Wanted::Count(count), Wanted::Rate(25.0)] {
                let indices = sampling.indices(total, wanted, form, 1);
                assert_eq!(serde_json::json!(indices), case["indices"], "{case}");
            }
        }
    }

    /// The table was written by `scripts/golden/minicpm_video.py`.
    #[test]
    fn indices_of_minicpm_equal_the_reference() {
        let golden = include_str!("../../../../../tests/golden/minicpm_video.json");
        let golden: Value = serde_json::from_str(golden).unwrap();
        let cases = golden["indices"].as_array().unwrap();
        assert!(cases.len() > 100);
        for case in cases {
            let number = |key: &str| case[key].as_u64().unwrap() as usize;
            let rate = Wanted::Rate(case["rate"].as_f64().unwrap());
            let sampling =
                FrameSampling { fps: 1.0, min_frames: 1, max_frames: number("max_frames") };
            let indices = sampling.indices(number("total"), rate, SLICED, 1);
            assert_eq!(serde_json::json!(indices), case["indices"], "{case}");
        }
    }

    #[test]
    fn a_given_number_of_frames_is_spread_from_the_first_to_the_last_one() {
        let sampling = FrameSampling { fps: 2.0, min_frames: 3, max_frames: 5 };
        let sample = |total, wanted| sampling.indices(total, wanted, SLICED, 1);
        assert_eq!(sample(10, Wanted::Count(4)), [0, 3, 6, 9]);
        assert_eq!(sample(10, Wanted::Count(1)), [0]);
        assert_eq!(sample(8, Wanted::Count(6)), [0, 1, 2, 4, 5, 7]); // the limits do not apply
        assert_eq!(sample(3, Wanted::Count(9)), [0, 1, 2]);
        assert_eq!(sample(10, Wanted::All), [0, 2, 4, 6, 9]);
        assert_eq!(sample(2, Wanted::All), [0, 1]);
        assert_eq!(sample(10, Wanted::Rate(5.0)), [0, 2, 5, 7]); // at each half second
        assert_eq!(sample(10, Wanted::Rate(25.0)), [0, 4, 9]); // the minimum
        assert_eq!(sample(1, Wanted::Rate(25.0)), [0]);
    }

    /// The indices are those of `InternVLVideoProcessor` in transformers 5.23.
    #[test]
    fn numbered_frames_are_the_middle_ones_of_equal_shares() {
        let form = VideoForm::NumberedFrames { placeholder: "<video>" };
        let sampling = FrameSampling { fps: 2.0, min_frames: 3, max_frames: 6 };
        let of = |total, wanted| sampling.indices(total, wanted, form, 1);
        assert_eq!(of(10, Wanted::Count(4)), [1, 3, 6, 8]);
        assert_eq!(of(20, Wanted::Rate(5.0)), [1, 5, 8, 11, 15, 18]); // 8 frames are too many
        assert_eq!(of(10, Wanted::Rate(5.0)), [1, 3, 6, 8]);
        assert_eq!(of(9, Wanted::Rate(90.0)), [1, 4, 7]); // the minimum
        assert_eq!(of(5, Wanted::All), [0, 1, 2, 3, 4]);
        assert_eq!(of(1, Wanted::Count(4)), [0]);
    }

    #[test]
    fn a_given_number_of_frames_is_rounded_to_whole_groups_for_qwen25_vl() {
        let sampling = FrameSampling { fps: 2.0, min_frames: 4, max_frames: 6 };
        let indices = |count| sampling.indices(9, Wanted::Count(count), ONE_RUN, 2);
        assert!(indices(1).is_empty()); // half a group and 1.5 groups are rounded to the even number
        assert_eq!(indices(3), [0, 2, 4, 6]);
        assert_eq!(indices(5), [0, 2, 4, 6]);
        assert_eq!(indices(8), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(indices(99), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn timestamps_are_formatted_with_halves_rounded_to_even() {
        assert_eq!(format!("{:.1} {:.1} {:.1}", 0.25, 0.75, 1.25), "0.2 0.8 1.2");
    }

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
