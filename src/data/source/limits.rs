//! Limits on the size of one image or video, with the keys of qwen-vl-utils.

use std::num::NonZeroU32;

use serde_json::{Map, Value};

use super::content::wrong_type;
use super::error::SampleError;
use crate::batch::{AreaLimits, ImageLimits, MediaRef, SampleId, VideoLimits, VideoRef};
use crate::data::media::image::MAX_PIXELS;

/// Keys of a video that are not supported and must not be ignored.
const UNREAD_VIDEO_KEYS: [&str; 4] =
    ["video_start", "video_end", "resized_height", "resized_width"];

/// Sets the limits that an object gives for its image, if it gives any.
pub(super) fn limit_image(
    id: &SampleId,
    at: &str,
    object: &Map<String, Value>,
    image: &mut MediaRef,
) -> Result<(), SampleError> {
    let keys = Keys { id, at, object };
    let resized = match ["resized_height", "resized_width"].map(|key| keys.count(key)) {
        [height, width] => match (height?, width?) {
            (Some(height), Some(width)) => Some([height, width]),
            (None, None) => None,
            (height, _) => {
                let key = if height.is_some() { "resized_width" } else { "resized_height" };
                let (at, expected) = (format!("{at}.{key}"), "the other side of the image too");
                return Err(SampleError::Missing { id: id.clone(), at, expected });
            }
        },
    };
    let limits = ImageLimits { resized, area: keys.area()? };
    if limits != ImageLimits::default() {
        image.limits = limits;
    }
    Ok(())
}

/// Sets the limits that an object gives for its video, if it gives any.
pub(super) fn limit_video(
    id: &SampleId,
    at: &str,
    object: &Map<String, Value>,
    video: &mut VideoRef,
) -> Result<(), SampleError> {
    let keys = Keys { id, at, object };
    if let Some(key) = UNREAD_VIDEO_KEYS.iter().find(|key| !keys.value(key).is_null()) {
        let what =
            "parts and fixed sizes of a video (cut or scale the file, or use `max_pixels`) are";
        return Err(SampleError::NotSupported { id: id.clone(), at: format!("{at}.{key}"), what });
    }
    let num_frames = keys.count("nframes")?.or(keys.count("num_frames")?);
    if num_frames.is_some() && !keys.value("fps").is_null() {
        let what = "`nframes` together with `fps` is";
        return Err(SampleError::NotSupported { id: id.clone(), at: at.to_owned(), what });
    }
    let given = VideoLimits {
        num_frames,
        min_frames: keys.count("min_frames")?,
        max_frames: keys.count("max_frames")?,
        frame: keys.area()?,
        total_pixels: keys.count("total_pixels")?,
    };
    keys.check_order("min_frames", given.min_frames, given.max_frames)?;
    let (VideoRef::Frames { limits, .. } | VideoRef::File { limits, .. }) = video;
    if given != VideoLimits::default() {
        *limits = given;
    }
    Ok(())
}

/// Rejects limits on single frames of a list: all frames of a video have one size.
pub(super) fn refuse_limits(
    id: &SampleId,
    at: &str,
    frames: &[MediaRef],
) -> Result<(), SampleError> {
    match frames.iter().position(|frame| frame.limits != ImageLimits::default()) {
        None => Ok(()),
        Some(frame) => {
            let what = "limits on the size of a single frame are";
            let at = format!("{at}[{frame}]");
            Err(SampleError::NotSupported { id: id.clone(), at, what })
        }
    }
}

/// The keys of an object at a JSON path.
struct Keys<'a> {
    id: &'a SampleId,
    at: &'a str,
    object: &'a Map<String, Value>,
}

impl Keys<'_> {
    fn value(&self, key: &str) -> &Value {
        self.object.get(key).unwrap_or(&Value::Null)
    }

    /// A whole number above 0. A float or a text with such a number is accepted.
    fn count(&self, key: &str) -> Result<Option<NonZeroU32>, SampleError> {
        let value = self.value(key);
        let number = match value {
            Value::Null => return Ok(None),
            Value::String(text) => text.trim().parse().ok(),
            value => value.as_f64(),
        };
        // larger limits have the same effect
        let whole = number.filter(|number| *number >= 1.0 && number.fract() == 0.0);
        match whole.and_then(|number: f64| NonZeroU32::new(number as u32)) {
            Some(count) => Ok(Some(count)),
            None => Err(self.expected(key, "a whole number above 0")),
        }
    }

    fn area(&self) -> Result<AreaLimits, SampleError> {
        let [min_pixels, max_pixels] = ["min_pixels", "max_pixels"].map(|key| self.count(key));
        let limits = AreaLimits { min_pixels: min_pixels?, max_pixels: max_pixels? };
        if limits.min_pixels.is_some_and(|min| u64::from(min.get()) > MAX_PIXELS) {
            return Err(self.expected("min_pixels", "at most 2^28 pixels"));
        }
        self.check_order("min_pixels", limits.min_pixels, limits.max_pixels)?;
        Ok(limits)
    }

    fn check_order(
        &self,
        key: &str,
        min: Option<NonZeroU32>,
        max: Option<NonZeroU32>,
    ) -> Result<(), SampleError> {
        match min.zip(max) {
            Some((min, max)) if min > max => Err(self.expected(key, "at most the maximum")),
            _ => Ok(()),
        }
    }

    fn expected(&self, key: &str, expected: &'static str) -> SampleError {
        wrong_type(self.id, &format!("{}.{key}", self.at), self.value(key), expected)
    }
}
