//! Parses the contents of turns, and the sources of images and videos.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::super::error::SampleFault;
use super::super::raw_row::blob;
use super::context::At;
use super::keys::{Place, is_given};
use super::limits::{image_limits, rate, refuse_frame_limits, video_limits};
use super::media::RowMedia;
use super::values::{first_of, join, missing, not_supported, take, wrong_type};
use batch::{
    Content, FrameRate, MediaRef, MediaSource, Medium, MediumKind, Part, VideoLimits, VideoRef,
};
use net::is_web_address;

/// Keys for the image of a part or of a list entry.
const IMAGE_KEYS: [&str; 8] =
    ["bytes", "image", "image_url", "url", "path", "base64", "data", "source"];
/// Keys that a part with a text must not have.
const NOT_IN_TEXTS: [&str; 9] =
    ["image", "image_url", "video", "video_url", "url", "path", "base64", "bytes", "source"];
/// Keys for the video of a part or of a list entry.
const VIDEO_KEYS: [&str; 4] = ["video", "video_url", "url", "path"];
/// The first characters of the base64 text of a JPEG, PNG, GIF, WebP, BMP and TIFF file.
const BASE64_STARTS: [&str; 7] = ["/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkqA", "TU0AK"];
/// Minimum length of an image in base64; shorter texts are paths.
const BASE64_LENGTH: usize = 64;

impl RowMedia<'_> {
    /// Parses the content of a turn: a text or a list of parts.
    pub(super) fn content(&mut self, at: &str, value: Value) -> Result<Content, SampleFault> {
        match value {
            Value::String(text) => Ok(self.text(text)),
            Value::Array(values) => {
                let mut parts = Vec::with_capacity(values.len());
                for (index, value) in values.into_iter().enumerate() {
                    self.part(&format!("{at}[{index}]"), value, &mut parts)?;
                }
                Ok(Content::Parts(parts))
            }
            other => Err(wrong_type(at, &other, "text or a list of parts")),
        }
    }

    fn part(&mut self, at: &str, value: Value, parts: &mut Vec<Part>) -> Result<(), SampleFault> {
        let mut part = match value {
            Value::Object(part) => part,
            other => return Err(wrong_type(at, &other, "an object with `type`")),
        };
        match self.kind(at, &mut part)?.as_str() {
            "text" => {
                self.at.check_keys(Place::Part, at, &part)?;
                refuse_second(at, &part, &NOT_IN_TEXTS)?;
                match take(&mut part, "text") {
                    Value::String(text) => match self.text(text) {
                        Content::Text(text) => parts.push(Part::Text(text)),
                        Content::Parts(split) => parts.extend(split),
                    },
                    Value::Null => {
                        return Err(missing(&join(at, "text"), "a string"));
                    }
                    other => {
                        return Err(wrong_type(&join(at, "text"), &other, "a string"));
                    }
                }
            }
            "image" | "image_url" => {
                refuse_second(at, &part, &["text", "video", "video_url"])?;
                match part.get_mut("image").map(Value::take) {
                    // Qwen's format: several images in one part
                    Some(Value::Array(images)) if images.is_empty() => {
                        return Err(missing(&join(at, "image"), "a list of images"));
                    }
                    Some(Value::Array(images)) => {
                        refuse_second(at, &part, &IMAGE_KEYS)?;
                        self.at.check_keys(Place::Image, at, &part)?;
                        let limits = image_limits(at, &part)?;
                        for (index, image) in images.into_iter().enumerate() {
                            let mut image =
                                self.at.image(&format!("{at}.image[{index}]"), image)?;
                            image.limits = limits.unwrap_or(image.limits);
                            parts.push(self.add(Medium::Image(image)));
                        }
                    }
                    image => {
                        part.extend(image.map(|image| ("image".to_owned(), image)));
                        let limits = image_limits(at, &part)?;
                        let index = part.get("index").cloned();
                        parts.push(match self.at.image_of_object(at, part)? {
                            Some(image) => self.add(Medium::Image(image)),
                            None => self.listed(MediumKind::Image, at, index.as_ref())?,
                        });
                        if let (Some(limits), Some(Medium::Image(image))) = (limits, self.last()) {
                            image.limits = limits;
                        }
                    }
                }
            }
            "video" | "video_url" => {
                refuse_second(at, &part, &["text", "image", "image_url"])?;
                let is_given = |key: &&str| part.get(*key).is_some_and(|value| !value.is_null());
                parts.push(if VIDEO_KEYS.iter().any(is_given) {
                    let video = self.at.video(at, Value::Object(part), self.fps)?;
                    self.add(Medium::Video(video))
                } else {
                    self.at.check_keys(Place::Video, at, &part)?;
                    let given = video_limits(at, &part)?;
                    let rate = rate(at, &part)?;
                    let part = self.listed(MediumKind::Video, at, part.get("index"))?;
                    if let Some(Medium::Video(video)) = self.last() {
                        *video.limits_mut() = given.unwrap_or(*video.limits_mut());
                        *video.fps_mut() = rate.or(*video.fps_mut());
                    }
                    part
                });
            }
            _ => {
                self.at.check_keys(Place::Part, at, &part)?;
                let what = "parts of types other than text, image and video are";
                return Err(not_supported(&join(at, "type"), what));
            }
        }
        Ok(())
    }

    /// The part for the next listed image or video; `index` is its position in the list, if given.
    fn listed(
        &mut self,
        kind: MediumKind,
        at: &str,
        index: Option<&Value>,
    ) -> Result<Part, SampleFault> {
        let position = Value::from(self.position(kind));
        if index.is_some_and(|index| !index.is_null() && *index != position) {
            let what = "images or videos in another order than that of the list are";
            return Err(not_supported(&join(at, "index"), what));
        }
        Ok(self.next_of(kind))
    }

    /// The type of a part. Qwen's format omits `type`; the key implies it.
    fn kind(&self, at: &str, part: &mut Map<String, Value>) -> Result<String, SampleFault> {
        match take(part, "type") {
            Value::String(kind) => Ok(kind),
            Value::Null => {
                let has = |key: &&&str| part.get(**key).is_some_and(|value| !value.is_null());
                let mut kinds = ["text", "image", "image_url", "video", "video_url"].iter();
                if let Some(kind) = kinds.find(has) {
                    return Ok((*kind).to_owned());
                }
                self.at.check_keys(Place::Part, at, part)?;
                Err(missing(&join(at, "type"), "`text`, `image` or `video`"))
            }
            other => Err(wrong_type(&join(at, "type"), &other, "a string")),
        }
    }
}

/// Fails if the part has a second text, image or video, under one of the keys `others`.
fn refuse_second(at: &str, part: &Map<String, Value>, others: &[&str]) -> Result<(), SampleFault> {
    // a text in `source` names the origin of a part
    let is_second = |key: &&&str| match part.get(**key) {
        Some(Value::String(_)) if **key == "source" => false,
        value => value.is_some_and(is_given),
    };
    match others.iter().find(is_second) {
        Some(key) => {
            let what = "a part with two texts, images or videos (write one part for each) is";
            Err(not_supported(&join(at, key), what))
        }
        None => Ok(()),
    }
}

impl At<'_> {
    /// Parses an image: a path, a data URI, base64 text, or an object with one of them.
    pub(super) fn image(&self, at: &str, value: Value) -> Result<MediaRef, SampleFault> {
        const EXPECTED: &str = "a path or a data URI";
        if let Some(bytes) = blob(self.blobs, &value) {
            return Ok(MediaSource::Bytes(bytes.clone()).into());
        }
        match value {
            Value::String(text) if text.is_empty() => Err(missing(at, EXPECTED)),
            Value::String(text) => self.image_of_text(at, text),
            Value::Object(object) => {
                self.image_of_object(at, object)?.ok_or_else(|| missing(&join(at, "url"), EXPECTED))
            }
            other => Err(wrong_type(at, &other, EXPECTED)),
        }
    }

    /// Parses an image with the keys of a part or of a list entry; `None` if no key names a source.
    fn image_of_object(
        &self,
        at: &str,
        mut object: Map<String, Value>,
    ) -> Result<Option<MediaRef>, SampleFault> {
        const BASE64: &str = "base64 text";
        self.check_keys(Place::Image, at, &object)?;
        match take(&mut object, "detail") {
            Value::Null => {}
            Value::String(detail) if ["auto", "high"].contains(&detail.as_str()) => {}
            _ => {
                let what = "images of lower detail (use `data.image.max_pixels` of the config) are";
                return Err(not_supported(&join(at, "detail"), what));
            }
        }
        let Some((key, value)) = first_of(&mut object, &IMAGE_KEYS) else { return Ok(None) };
        let limits = image_limits(at, &object)?;
        let is_second = |other: &&&str| match object.get(**other) {
            Some(second) if *second == value => false,
            // the form of `datasets`, and the origin of an image
            Some(Value::String(_)) => !matches!((key, **other), ("bytes", "path") | (_, "source")),
            second => second.is_some_and(is_given),
        };
        if let Some(other) = IMAGE_KEYS.iter().find(is_second) {
            return Err(not_supported(&join(at, other), "a second source of an image is"));
        }
        let at = join(at, key);
        let is_blob = blob(self.blobs, &value).is_some();
        let mut image = match (key, value) {
            ("bytes" | "base64" | "data", Value::String(text))
                if !starts_with_ignoring_case(&text, "data:") =>
            {
                Ok(MediaRef::from(base64(&text)))
            }
            ("bytes" | "base64" | "data", value) if !is_blob && !value.is_string() => {
                Err(wrong_type(&at, &value, BASE64))
            }
            (_, value) => self.image(&at, value),
        }?;
        image.limits = limits.unwrap_or(image.limits);
        Ok(Some(image))
    }

    fn image_of_text(&self, at: &str, text: String) -> Result<MediaRef, SampleFault> {
        let source = if starts_with_ignoring_case(&text, "data:") {
            MediaSource::DataUri(text)
        } else if is_base64_image(&text) {
            base64(&text)
        } else if is_web_address(&text) {
            MediaSource::Url(text.into())
        } else {
            let path = path(at, &text, "addresses other than `http` and `https` are")?;
            MediaSource::File { root: self.parser.image_root.clone(), path }
        };
        Ok(source.into())
    }

    /// Parses a video: a path, a list of frames, or an object with one of them. `fps` is the frame
    /// rate given by the enclosing object.
    pub(super) fn video(
        &self,
        at: &str,
        value: Value,
        fps: Option<FrameRate>,
    ) -> Result<VideoRef, SampleFault> {
        const EXPECTED: &str = "a path or a list of frames";
        if blob(self.blobs, &value).is_some() {
            return Err(not_supported(at, "the bytes of a video in a row are"));
        }
        match value {
            Value::String(text) if text.is_empty() => Err(missing(at, EXPECTED)),
            Value::String(text) if starts_with_ignoring_case(&text, "data:") => {
                Err(not_supported(at, "videos as data URIs are"))
            }
            Value::String(text) => {
                let path = path(at, &text, "videos by URL are")?;
                let (root, limits) = (self.parser.image_root.clone(), VideoLimits::default());
                Ok(VideoRef::File { root, path, fps, limits })
            }
            Value::Array(frames) if frames.is_empty() => Err(missing(at, EXPECTED)),
            Value::Array(frames) => {
                let frames = frames.into_iter().enumerate();
                let frame = |(index, value)| self.image(&format!("{at}[{index}]"), value);
                let frames = frames.map(frame).collect::<Result<Vec<_>, _>>()?;
                refuse_frame_limits(at, &frames)?;
                Ok(VideoRef::Frames { frames, fps, limits: VideoLimits::default() })
            }
            Value::Object(mut object) => {
                self.check_keys(Place::Video, at, &object)?;
                let fps = rate(at, &object)?.or(fps);
                if is_given(&take(&mut object, "bytes")) {
                    let what = "the bytes of a video in a row are";
                    return Err(not_supported(&join(at, "bytes"), what));
                }
                let given = video_limits(at, &object)?;
                let Some((key, value)) = first_of(&mut object, &VIDEO_KEYS) else {
                    return Err(missing(&join(at, "video"), EXPECTED));
                };
                let mut video = self.video(&join(at, key), value, fps)?;
                let limits = video.limits_mut();
                *limits = given.unwrap_or(*limits);
                Ok(video)
            }
            other => Err(wrong_type(at, &other, EXPECTED)),
        }
    }
}

/// The path of an image or a video. URLs are refused; `by_url` is the text for the message.
fn path(at: &str, text: &str, by_url: &'static str) -> Result<PathBuf, SampleFault> {
    let path = text.strip_prefix("file://").unwrap_or(text);
    if path.contains("://") {
        return Err(not_supported(at, by_url));
    }
    Ok(PathBuf::from(path))
}

/// The source of an image whose file is `text` in base64. It is decoded when it is read.
fn base64(text: &str) -> MediaSource {
    MediaSource::DataUri(format!("data:;base64,{text}"))
}

/// Returns whether `text` is the file of an image in base64. A path of this length without a dot,
/// which starts like an image file in base64, is not expected.
fn is_base64_image(text: &str) -> bool {
    let is_base64 = |byte: u8| {
        byte.is_ascii_alphanumeric() || b"+/=".contains(&byte) || byte.is_ascii_whitespace()
    };
    text.len() >= BASE64_LENGTH
        && BASE64_STARTS.iter().any(|start| text.starts_with(start))
        && text.bytes().all(is_base64)
}

fn starts_with_ignoring_case(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}
