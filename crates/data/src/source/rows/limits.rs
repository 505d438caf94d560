//! Frame rate of a video, and limits on the size of one image or video, with the keys of
//! qwen-vl-utils.

use std::num::NonZeroU32;

use serde_json::{Map, Value};

use super::super::error::SampleFault;
use super::values::{join, missing, not_supported, wrong_type};
use crate::media::image::MAX_PIXELS;
use batch::{AreaLimits, FrameRate, ImageLimits, MediaRef, VideoLimits};

/// The limits that an object gives for its image; `None` if it gives none.
pub(super) fn image_limits(
    at: &str,
    object: &Map<String, Value>,
) -> Result<Option<ImageLimits>, SampleFault> {
    let keys = Keys { at, object };
    let limits = ImageLimits { resized: keys.resized()?, area: keys.area()? };
    Ok(Some(limits).filter(|limits| *limits != ImageLimits::default()))
}

/// Parses the frames per second of a video, if the object has a key for it. The keys are those
/// of qwen-vl-utils, where `sample_fps` is the rate at which a list was sampled.
pub(super) fn rate(
    at: &str,
    object: &Map<String, Value>,
) -> Result<Option<FrameRate>, SampleFault> {
    let number = |key: &str| {
        let Some(value) = object.get(key).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let number = match value {
            Value::String(text) => text.trim().parse().ok(), // as in some of Qwen's examples
            value => value.as_f64(),
        };
        if number.is_some_and(|rate: f64| rate.is_finite() && rate > 0.0) {
            return Ok(number);
        }
        let expected = "a number of frames per second above 0";
        Err(wrong_type(&join(at, key), value, expected))
    };
    let [fps, sampled, raw] = [number("fps")?, number("sample_fps")?, number("raw_fps")?];
    if sampled.is_some() && fps.is_some_and(|fps| Some(fps) != sampled) {
        let what = "`fps` together with another `sample_fps` is";
        return Err(not_supported(&join(at, "fps"), what));
    }
    Ok(sampled.map(FrameRate::Sampled).or(fps.or(raw).map(FrameRate::Video)))
}

/// The settings that an object gives for its video; `None` if it gives none.
pub(super) fn video_limits(
    at: &str,
    object: &Map<String, Value>,
) -> Result<Option<VideoLimits>, SampleFault> {
    let keys = Keys { at, object };
    let num_frames = keys.count("nframes")?.or(keys.count("num_frames")?);
    for key in ["fps", "sample_fps"] {
        if num_frames.is_some() && !keys.value(key).is_null() {
            let what = "`nframes` together with a number of frames per second is";
            return Err(not_supported(&join(at, key), what));
        }
    }
    let limits = VideoLimits {
        start: keys.seconds("video_start")?,
        end: keys.seconds("video_end")?,
        resized: keys.resized()?,
        num_frames,
        min_frames: keys.count("min_frames")?,
        max_frames: keys.count("max_frames")?,
        frame: keys.area()?,
        total_pixels: keys.count("total_pixels")?,
    };
    keys.check_order("min_frames", limits.min_frames, limits.max_frames)?;
    if limits.start.zip(limits.end).is_some_and(|(start, end)| start >= end) {
        return Err(keys.expected("video_start", "a time before `video_end`"));
    }
    Ok(Some(limits).filter(|limits| *limits != VideoLimits::default()))
}

/// Rejects limits on single frames of a list: all frames of a video have one size.
pub(super) fn refuse_frame_limits(at: &str, frames: &[MediaRef]) -> Result<(), SampleFault> {
    match frames.iter().position(|frame| frame.limits != ImageLimits::default()) {
        None => Ok(()),
        Some(frame) => {
            let what = "limits on the size of a single frame are";
            Err(not_supported(&format!("{at}[{frame}]"), what))
        }
    }
}

/// The keys of an object at a JSON path.
struct Keys<'a> {
    at: &'a str,
    object: &'a Map<String, Value>,
}

impl Keys<'_> {
    fn value(&self, key: &str) -> &Value {
        self.object.get(key).unwrap_or(&Value::Null)
    }

    /// A whole number above 0. A float or a text with such a number is accepted.
    fn count(&self, key: &str) -> Result<Option<NonZeroU32>, SampleFault> {
        let value = self.value(key);
        let number = match value {
            Value::Null => return Ok(None),
            Value::String(text) => text.trim().parse().ok(),
            value => value.as_f64(),
        };
        // `as` clamps to `u32::MAX`, which no image exceeds
        let whole = number.filter(|number| *number >= 1.0 && number.fract() == 0.0);
        match whole.and_then(|number: f64| NonZeroU32::new(number as u32)) {
            Some(count) => Ok(Some(count)),
            None => Err(self.expected(key, "a whole number above 0")),
        }
    }

    /// A time in seconds from the start of the video. A text with such a number is accepted.
    fn seconds(&self, key: &str) -> Result<Option<f64>, SampleFault> {
        let number = match self.value(key) {
            Value::Null => return Ok(None),
            Value::String(text) => text.trim().parse().ok(),
            value => value.as_f64(),
        };
        match number.filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0) {
            Some(seconds) => Ok(Some(seconds)),
            None => Err(self.expected(key, "a number of seconds, at least 0")),
        }
    }

    /// The size `[height, width]` to use in place of that of the image or the frames.
    fn resized(&self) -> Result<Option<[NonZeroU32; 2]>, SampleFault> {
        let [height, width] = ["resized_height", "resized_width"].map(|key| self.count(key));
        match (height?, width?) {
            (Some(height), Some(width)) => Ok(Some([height, width])),
            (None, None) => Ok(None),
            (height, _) => {
                let key = if height.is_some() { "resized_width" } else { "resized_height" };
                Err(missing(&join(self.at, key), "the other side too"))
            }
        }
    }

    fn area(&self) -> Result<AreaLimits, SampleFault> {
        let [min_pixels, max_pixels] = ["min_pixels", "max_pixels"].map(|key| self.count(key));
        let limits = AreaLimits { min_pixels: min_pixels?, max_pixels: max_pixels? };
        if limits.min_pixels.is_some_and(|min| u64::from(min.get()) > MAX_PIXELS) {
            return Err(self.expected("min_pixels", "at most 2^27 pixels"));
        }
        self.check_order("min_pixels", limits.min_pixels, limits.max_pixels)?;
        Ok(limits)
    }

    fn check_order(
        &self,
        key: &str,
        min: Option<NonZeroU32>,
        max: Option<NonZeroU32>,
    ) -> Result<(), SampleFault> {
        match min.zip(max) {
            Some((min, max)) if min > max => Err(self.expected(key, "at most the maximum")),
            _ => Ok(()),
        }
    }

    fn expected(&self, key: &str, expected: &'static str) -> SampleFault {
        wrong_type(&join(self.at, key), self.value(key), expected)
    }
}
