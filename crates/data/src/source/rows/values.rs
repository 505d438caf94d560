//! Reads values of a row: JSON of any type, weights in the loss, frame rates, and limits on the
//! size of one image or video with the keys of qwen-vl-utils. Each error names the JSON path.

use std::num::NonZeroU32;

use serde_json::{Map, Value, json};

use super::super::sample_error::SampleFault;
use crate::json::{self, long_integer};
use crate::media::image::MAX_PIXELS;
use batch::{AreaLimits, FrameRate, ImageLimits, MediaRef, VideoLimits};

/// Takes a value from an object; null if the key is missing.
pub(super) fn take(object: &mut Map<String, Value>, key: &str) -> Value {
    object.get_mut(key).map_or(Value::Null, Value::take)
}

pub(super) fn wrong_type(at: &str, value: &Value, expected: &'static str) -> SampleFault {
    SampleFault::WrongType { at: at.to_owned(), found: type_name(value), expected }
}

pub(super) fn missing(at: &str, expected: &'static str) -> SampleFault {
    SampleFault::Missing { at: at.to_owned(), expected }
}

pub(super) fn not_supported(at: &str, what: &'static str) -> SampleFault {
    SampleFault::NotSupported { at: at.to_owned(), what }
}

/// Returns the JSON type of a value with its article, such as `a number`.
pub(in crate::source) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) if long_integer(value).is_some() => "a number",
        Value::Object(_) => "an object",
    }
}

pub(super) fn text(at: &str, value: Value) -> Result<String, SampleFault> {
    match value {
        Value::String(text) => Ok(text),
        Value::Null => Err(missing(at, "a string")),
        other => Err(wrong_type(at, &other, "a string")),
    }
}

/// Parses a string; `None` if it is missing, null or empty.
pub(super) fn optional_text(at: &str, value: Value) -> Result<Option<String>, SampleFault> {
    match value {
        Value::Null => Ok(None),
        value => Ok(Some(text(at, value)?).filter(|text| !text.is_empty())),
    }
}

/// `images` or `videos` if a text has the data of one.
pub(super) fn data_uri(text: &str) -> Option<&'static str> {
    let start = text.get(..11)?;
    let kinds = [("data:image/", "images"), ("data:video/", "videos")];
    kinds.into_iter().find(|(data, _)| start.eq_ignore_ascii_case(data)).map(|(_, kind)| kind)
}

/// Returns whether a value is neither null nor an empty text, list or object.
pub(super) fn is_given(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(object) => !object.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    }
}

/// The value of the first of `keys` that is not null.
pub(super) fn first_of(
    object: &mut Map<String, Value>,
    keys: &[&'static str],
) -> Option<(&'static str, Value)> {
    keys.iter().map(|key| (*key, take(object, key))).find(|(_, value)| !value.is_null())
}

pub(super) fn one_or_more(value: Value) -> Vec<Value> {
    match value {
        Value::Array(values) => values,
        one => vec![one],
    }
}

/// The list in a JSON text; every other value unchanged. Files without nested columns store lists
/// as text.
pub(super) fn list_in_text(value: Value) -> Value {
    in_text(value, '[')
}

/// The object in a JSON text; every other value unchanged.
pub(super) fn object_in_text(value: Value) -> Value {
    in_text(value, '{')
}

fn in_text(value: Value, first: char) -> Value {
    match value {
        Value::String(text) if text.trim_start().starts_with(first) => {
            json::parse(text.as_bytes()).unwrap_or(Value::String(text))
        }
        other => other,
    }
}

/// A tool or a call in OpenAI's form `{"type": "function", "function": {..}}`: a bare function, as
/// LLaMA-Factory and OpenAI's newer format write it, gets this wrapper. Others are unchanged.
pub(super) fn as_function(value: Value) -> Value {
    match value {
        Value::Object(mut bare) if !bare.contains_key("function") && bare.contains_key("name") => {
            if bare.get("type").is_some_and(|kind| kind != "function") {
                return Value::Object(bare); // a tool of another kind
            }
            bare.shift_remove("type");
            json!({"type": "function", "function": bare})
        }
        other => other,
    }
}

/// The JSON path of a key of the object at `at`, which is empty for the row itself.
pub(super) fn join(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}

/// Keys that say whether to train.
const TRAIN_KEYS: [&str; 3] = ["train", "loss", "trainable"];
/// Keys with a factor of the loss.
const WEIGHT_KEYS: [&str; 2] = ["weight", "loss_scale"];

/// The factor of the loss that the keys of a row or of an assistant turn give: their product, 1
/// without such a key.
pub(super) fn weight(at: &str, object: &mut Map<String, Value>) -> Result<f32, SampleFault> {
    let mut weight = 1.0;
    for key in TRAIN_KEYS {
        match take(object, key) {
            Value::Null | Value::Bool(true) => {}
            Value::Bool(false) => weight = 0.0,
            other => return Err(wrong_type(&join(at, key), &other, "a boolean")),
        }
    }
    for key in WEIGHT_KEYS {
        weight *= match take(object, key) {
            Value::Null => 1.0,
            value => factor(&join(at, key), &value)?,
        };
    }
    Ok(weight)
}

/// The factor of the loss of a turn of another role, which only `loss_scale: all` trains on: 0
/// if a key excludes the turn, else 1. The keys must not request training.
pub(super) fn other_weight(at: &str, object: &mut Map<String, Value>) -> Result<f32, SampleFault> {
    const WHAT: &str = "training on a turn other than the assistant's is";
    let mut weight = 1.0;
    for key in TRAIN_KEYS {
        match take(object, key) {
            Value::Null => {}
            Value::Bool(false) => weight = 0.0,
            Value::Bool(true) => return Err(not_supported(&join(at, key), WHAT)),
            other => return Err(wrong_type(&join(at, key), &other, "a boolean")),
        }
    }
    for key in WEIGHT_KEYS {
        let (value, at) = (take(object, key), join(at, key));
        if value.is_null() {
            continue;
        }
        match factor(&at, &value)? {
            0.0 => weight = 0.0,
            1.0 => {} // the usual default
            _ => return Err(not_supported(&at, WHAT)),
        }
    }
    Ok(weight)
}

fn factor(at: &str, value: &Value) -> Result<f32, SampleFault> {
    let factor = value.as_f64().map(|factor| factor as f32);
    factor
        .filter(|factor| factor.is_finite() && *factor >= 0.0)
        .ok_or_else(|| wrong_type(at, value, "a number of 0 or more"))
}

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
