//! Parses the contents of turns and their images and videos, in the order of their appearance.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::error::SampleError;
use super::raw_row::blob;
use crate::batch::{Content, MediaRef, MediaSource, Medium, MediumKind, Part, SampleId, VideoRef};
use crate::net::is_web_address;

/// Placeholders in a text for the next image or video that the row lists.
const PLACEHOLDERS: [(MediumKind, &str); 2] =
    [(MediumKind::Image, "<image>"), (MediumKind::Video, "<video>")];
/// Keys of rows and parts for media that are not supported.
const OTHER_MEDIA: [&str; 2] = ["audio", "audios"];
/// Keys for the image of a part or of a list entry.
const SOURCE_KEYS: [&str; 4] = ["image", "image_url", "url", "path"];
/// Keys for the video of a part or of a list entry.
const VIDEO_KEYS: [&str; 4] = ["video", "video_url", "url", "path"];
/// Keys for the frames per second of a video.
const RATE_KEYS: [&str; 3] = ["fps", "sample_fps", "raw_fps"];
/// Keys of a video that select frames or sizes; they are not supported and must not be ignored.
const UNREAD_VIDEO_KEYS: [&str; 11] = [
    "nframes",
    "num_frames",
    "min_frames",
    "max_frames",
    "video_start",
    "video_end",
    "min_pixels",
    "max_pixels",
    "total_pixels",
    "resized_height",
    "resized_width",
];

/// Collects the images and videos of one row while its turns are parsed.
pub(super) struct RowMedia<'a> {
    id: &'a SampleId,
    image_root: &'a Arc<Path>,
    blobs: &'a [Arc<[u8]>],
    images: List,
    videos: List,
    media: Vec<Medium>,
}

/// Images or videos that a row lists outside of its turns. Placeholders in texts are replaced only
/// if the row has such a list.
enum List {
    Absent,
    Present { rest: std::vec::IntoIter<Medium>, listed: usize, placeholders: usize },
}

impl List {
    fn new(media: Option<Vec<Medium>>) -> Self {
        media.map_or(Self::Absent, |media| Self::Present {
            listed: media.len(),
            rest: media.into_iter(),
            placeholders: 0,
        })
    }

    /// Takes the next entry of the list and counts a placeholder. `None` if the list is used up;
    /// [`Self::difference`] reports that at the end.
    fn next(&mut self) -> Option<Medium> {
        match self {
            Self::Absent => {
                *self = Self::new(Some(Vec::new())); // a part without a source needs a list
                self.next()
            }
            Self::Present { rest, placeholders, .. } => {
                *placeholders += 1;
                rest.next()
            }
        }
    }

    /// Returns the numbers of placeholders and of list entries if they differ.
    fn difference(&self) -> Option<(usize, usize)> {
        match self {
            Self::Present { listed, placeholders, .. } if placeholders != listed => {
                Some((*placeholders, *listed))
            }
            _ => None,
        }
    }
}

impl<'a> RowMedia<'a> {
    /// Takes the lists of images and videos from `row`.
    pub(super) fn of_row(
        id: &'a SampleId,
        image_root: &'a Arc<Path>,
        row: &mut Map<String, Value>,
        blobs: &'a [Arc<[u8]>],
    ) -> Result<Self, SampleError> {
        refuse_other_media(id, "", row)?;
        let (images, videos) = (List::Absent, List::Absent);
        let mut this = Self { id, image_root, blobs, images, videos, media: Vec::new() };
        let images = this.listed(row, ["images", "image"], "`image` together with `images` is")?;
        let images = images.map(|(key, value)| {
            let values = one_or_more(value).into_iter().enumerate();
            let image = |(index, value)| this.image(&format!("{key}[{index}]"), value);
            values.map(|entry| image(entry).map(Medium::Image)).collect::<Result<_, _>>()
        });
        let videos = this.listed(row, ["videos", "video"], "`video` together with `videos` is")?;
        let fps = if videos.is_some() { this.rate("", row)? } else { None };
        let videos = videos.map(|(key, value)| {
            // A flat list under the singular key `video` is the frames of one video, as in a part.
            let is_flat = |list: &[Value]| list.iter().all(|entry| !entry.is_array());
            let values = match value {
                Value::Array(list) if key == "video" && is_flat(&list) => vec![Value::Array(list)],
                value => one_or_more(value),
            };
            let values = values.into_iter().enumerate();
            let video = |(index, value)| this.video(&format!("{key}[{index}]"), value, fps);
            values.map(|entry| video(entry).map(Medium::Video)).collect::<Result<_, _>>()
        });
        let (images, videos) = (images.transpose()?, videos.transpose()?);
        (this.images, this.videos) = (List::new(images), List::new(videos));
        Ok(this)
    }

    /// Takes the value of one of two keys. It is an error if the row has both; `both` is the text
    /// for its message.
    fn listed(
        &self,
        row: &mut Map<String, Value>,
        keys: [&'static str; 2],
        both: &'static str,
    ) -> Result<Option<(&'static str, Value)>, SampleError> {
        let mut values = keys.map(|key| (key, take(row, key))).into_iter();
        let mut given = values.by_ref().filter(|(_, value)| !value.is_null());
        match (given.next(), given.next()) {
            (Some(_), Some(_)) => Err(self.not_supported(keys[1], both)),
            (first, _) => Ok(first),
        }
    }

    /// Parses the content of a turn: a text or a list of parts.
    pub(super) fn content(&mut self, at: &str, value: Value) -> Result<Content, SampleError> {
        match value {
            Value::String(text) => Ok(self.text(text)),
            Value::Array(parts) => {
                let parts = parts.into_iter().enumerate();
                let parts = parts.map(|(index, part)| self.part(&format!("{at}[{index}]"), part));
                Ok(Content::Parts(parts.collect::<Result<_, _>>()?))
            }
            other => Err(wrong_type(self.id, at, &other, "text or a list of parts")),
        }
    }

    /// Splits a text at the placeholders of the images and videos that the row lists.
    pub(super) fn text(&mut self, text: String) -> Content {
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        while let Some((at, kind, placeholder)) = self.next_placeholder(rest) {
            if at > 0 {
                parts.push(Part::Text(rest[..at].to_owned()));
            }
            parts.push(self.next_of(kind));
            rest = &rest[at + placeholder.len()..];
        }
        if parts.is_empty() {
            return Content::Text(text);
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        Content::Parts(parts)
    }

    /// Finds the first placeholder in `text` of a kind that the row lists.
    fn next_placeholder(&self, text: &str) -> Option<(usize, MediumKind, &'static str)> {
        let is_listed = |kind| match kind {
            MediumKind::Image => !matches!(self.images, List::Absent),
            MediumKind::Video => !matches!(self.videos, List::Absent),
        };
        let found = PLACEHOLDERS.into_iter().filter(|(kind, _)| is_listed(*kind));
        found
            .filter_map(|(kind, text_of)| Some((text.find(text_of)?, kind, text_of)))
            .min_by_key(|(at, ..)| *at)
    }

    /// Returns all images and videos in the order of the text. Fails if the numbers of placeholders
    /// and of listed media differ.
    pub(super) fn finish(self) -> Result<Vec<Medium>, SampleError> {
        let id = || self.id.clone();
        if let Some((placeholders, images)) = self.images.difference() {
            return Err(SampleError::ImageCount { id: id(), placeholders, images });
        }
        if let Some((placeholders, videos)) = self.videos.difference() {
            return Err(SampleError::VideoCount { id: id(), placeholders, videos });
        }
        Ok(self.media)
    }

    /// Returns the part for the next listed image or video.
    fn next_of(&mut self, kind: MediumKind) -> Part {
        let (list, part) = match kind {
            MediumKind::Image => (&mut self.images, Part::Image),
            MediumKind::Video => (&mut self.videos, Part::Video),
        };
        self.media.extend(list.next());
        part
    }

    fn part(&mut self, at: &str, value: Value) -> Result<Part, SampleError> {
        let mut part = match value {
            Value::Object(part) => part,
            other => return Err(wrong_type(self.id, at, &other, "an object with `type`")),
        };
        refuse_other_media(self.id, at, &part)?;
        let kind = match take(&mut part, "type") {
            Value::String(kind) => kind,
            // Qwen's format omits `type`; the key implies it.
            Value::Null if part.contains_key("text") => "text".to_owned(),
            Value::Null if part.contains_key("image") => "image".to_owned(),
            Value::Null if part.contains_key("video") => "video".to_owned(),
            Value::Null => {
                let expected = "`text`, `image` or `video`";
                return Err(missing(self.id, &format!("{at}.type"), expected));
            }
            other => return Err(wrong_type(self.id, &format!("{at}.type"), &other, "a string")),
        };
        match kind.as_str() {
            "text" => match take(&mut part, "text") {
                Value::String(text) => Ok(Part::Text(text)),
                Value::Null => Err(missing(self.id, &format!("{at}.text"), "a string")),
                other => Err(wrong_type(self.id, &format!("{at}.text"), &other, "a string")),
            },
            "image" | "image_url" => {
                let Some((key, value)) = first_of(&mut part, SOURCE_KEYS) else {
                    return Ok(self.next_of(MediumKind::Image));
                };
                let image = self.image(&format!("{at}.{key}"), value)?;
                self.media.push(Medium::Image(image));
                Ok(Part::Image)
            }
            "video" | "video_url" => {
                if VIDEO_KEYS.iter().all(|key| part.get(*key).is_none_or(Value::is_null)) {
                    return Ok(self.next_of(MediumKind::Video));
                }
                let video = self.video(at, Value::Object(part), None)?;
                self.media.push(Medium::Video(video));
                Ok(Part::Video)
            }
            _ => {
                let what = "parts of types other than text, image and video are";
                Err(self.not_supported(&format!("{at}.type"), what))
            }
        }
    }

    /// Parses an image: a path, a data URI, or an object with one of them.
    fn image(&self, at: &str, value: Value) -> Result<MediaRef, SampleError> {
        const EXPECTED: &str = "a path or a data URI";
        if let Some(bytes) = blob(self.blobs, &value) {
            return Ok(MediaRef { source: MediaSource::Bytes(bytes.clone()) });
        }
        let text = match value {
            Value::String(text) => text,
            Value::Object(mut object) => match first_of(&mut object, SOURCE_KEYS) {
                Some((key, value @ Value::String(_))) => {
                    return self.image(&format!("{at}.{key}"), value);
                }
                Some((key, other)) => {
                    return Err(wrong_type(self.id, &format!("{at}.{key}"), &other, EXPECTED));
                }
                None => return Err(missing(self.id, &format!("{at}.url"), EXPECTED)),
            },
            other => return Err(wrong_type(self.id, at, &other, EXPECTED)),
        };
        if text.is_empty() {
            return Err(missing(self.id, at, EXPECTED));
        }
        let source = if starts_with_ignoring_case(&text, "data:") {
            MediaSource::DataUri(text)
        } else if is_web_address(&text) {
            MediaSource::Url(text.into())
        } else {
            let path = self.path(at, &text, "addresses other than `http` and `https` are")?;
            MediaSource::File { root: self.image_root.clone(), path }
        };
        Ok(MediaRef { source })
    }

    /// Parses a video: a path, a list of frames, or an object with one of them. `fps` is the frame
    /// rate given by the enclosing object.
    fn video(&self, at: &str, value: Value, fps: Option<f64>) -> Result<VideoRef, SampleError> {
        const EXPECTED: &str = "a path or a list of frames";
        match value {
            Value::String(text) if text.is_empty() => Err(missing(self.id, at, EXPECTED)),
            Value::String(text) if starts_with_ignoring_case(&text, "data:") => {
                Err(self.not_supported(at, "videos as data URIs are"))
            }
            Value::String(text) => {
                let path = self.path(at, &text, "videos by URL are")?;
                Ok(VideoRef::File { root: self.image_root.clone(), path, fps })
            }
            Value::Array(frames) if frames.is_empty() => Err(missing(self.id, at, EXPECTED)),
            Value::Array(frames) => {
                let frames = frames.into_iter().enumerate();
                let frame = |(index, value)| self.image(&format!("{at}[{index}]"), value);
                let frames = frames.map(frame).collect::<Result<_, _>>()?;
                Ok(VideoRef::Frames { frames, fps })
            }
            Value::Object(mut object) => {
                let unread = UNREAD_VIDEO_KEYS
                    .iter()
                    .find(|key| object.get(**key).is_some_and(|value| !value.is_null()));
                if let Some(key) = unread {
                    let what = "settings of a single video (use `data.video` of the config) are";
                    return Err(self.not_supported(&format!("{at}.{key}"), what));
                }
                let fps = self.rate(at, &object)?.or(fps);
                match first_of(&mut object, VIDEO_KEYS) {
                    Some((key, value)) => self.video(&format!("{at}.{key}"), value, fps),
                    None => Err(missing(self.id, &format!("{at}.video"), EXPECTED)),
                }
            }
            other => Err(wrong_type(self.id, at, &other, EXPECTED)),
        }
    }

    /// Parses the frames per second of a video, if the object has a key for it.
    fn rate(&self, at: &str, object: &Map<String, Value>) -> Result<Option<f64>, SampleError> {
        let given = RATE_KEYS.iter().find_map(|key| Some((*key, object.get(*key)?)));
        let Some((key, value)) = given.filter(|(_, value)| !value.is_null()) else {
            return Ok(None);
        };
        let number = match value {
            Value::String(text) => text.trim().parse().ok(), // as in some of Qwen's examples
            value => value.as_f64(),
        };
        if number.is_some_and(|rate: f64| rate.is_finite() && rate > 0.0) {
            return Ok(number);
        }
        let at = if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
        Err(wrong_type(self.id, &at, value, "a number of frames per second above 0"))
    }

    fn path(&self, at: &str, text: &str, by_url: &'static str) -> Result<PathBuf, SampleError> {
        let path = text.strip_prefix("file://").unwrap_or(text);
        if path.contains("://") {
            return Err(self.not_supported(at, by_url));
        }
        Ok(PathBuf::from(path))
    }

    fn not_supported(&self, at: &str, what: &'static str) -> SampleError {
        SampleError::NotSupported { id: self.id.clone(), at: at.to_owned(), what }
    }
}

/// Takes a value from an object; null if the key is missing.
pub(super) fn take(object: &mut Map<String, Value>, key: &str) -> Value {
    object.get_mut(key).map_or(Value::Null, Value::take)
}

pub(super) fn wrong_type(
    id: &SampleId,
    at: &str,
    value: &Value,
    expected: &'static str,
) -> SampleError {
    SampleError::WrongType { id: id.clone(), at: at.to_owned(), found: type_name(value), expected }
}

pub(super) fn missing(id: &SampleId, at: &str, expected: &'static str) -> SampleError {
    SampleError::Missing { id: id.clone(), at: at.to_owned(), expected }
}

/// Returns the JSON type of a value with its article, such as `a number`.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn first_of(
    object: &mut Map<String, Value>,
    keys: [&'static str; 4],
) -> Option<(&'static str, Value)> {
    keys.into_iter().map(|key| (key, take(object, key))).find(|(_, value)| !value.is_null())
}

fn one_or_more(value: Value) -> Vec<Value> {
    match value {
        Value::Array(values) => values,
        one => vec![one],
    }
}

fn refuse_other_media(
    id: &SampleId,
    at: &str,
    object: &Map<String, Value>,
) -> Result<(), SampleError> {
    for key in OTHER_MEDIA {
        let is_given = match object.get(key) {
            None | Some(Value::Null) => false,
            Some(Value::Array(values)) => !values.is_empty(),
            Some(_) => true,
        };
        if is_given {
            let at = if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
            let what = "audio is";
            return Err(SampleError::NotSupported { id: id.clone(), at, what });
        }
    }
    Ok(())
}

fn starts_with_ignoring_case(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}
