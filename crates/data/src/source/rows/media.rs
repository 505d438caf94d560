//! The contents of turns: texts with placeholders, images and videos in the order of their
//! appearance, and boxes and names of objects with the keys of ms-swift.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::super::raw_row::blob;
use super::super::sample_error::{GroundingError, SampleFault};
use super::context::RowContext;
use super::keys::{ObjectKind, is_given};
use super::values::{
    first_of, image_limits, join, list_in_text, missing, not_supported, one_or_more, rate,
    refuse_frame_limits, take, text, video_limits, wrong_type,
};
use batch::{
    BoxRef, BoxUnit, Content, FrameRate, MediaRef, MediaSource, Medium, MediumKind, Message,
    Objects, Part, VideoLimits, VideoRef,
};
use net::is_web_address;

/// Placeholders in a text for the next image or video that the row lists.
const PLACEHOLDERS: [(MediumKind, &str); 2] =
    [(MediumKind::Image, "<image>"), (MediumKind::Video, "<video>")];

/// Tags around the path of an image or a sound in a text, as in the formats of Qwen-VL and
/// Qwen-Audio.
const NAMED: [[&str; 2]; 2] = [["<img>", "</img>"], ["<audio>", "</audio>"]];

/// Collects the images and videos of one row while its turns are parsed.
pub(super) struct RowMedia<'a> {
    pub(super) at: &'a RowContext<'a>,
    images: List,
    videos: List,
    media: Vec<Medium>,
    /// Frames per second of videos that give no rate themselves.
    pub(super) fps: Option<FrameRate>,
}

/// Images or videos that a row lists outside of its turns, and their placeholders.
struct List {
    kind: MediumKind,
    /// Entries without a placeholder so far.
    rest: std::vec::IntoIter<Medium>,
    /// Number of entries.
    listed: usize,
    /// Number of placeholders so far: `<image>` or `<video>` in texts, and parts without a source.
    placeholders: usize,
    /// Whether `<image>` or `<video>` is plain text.
    is_literal: bool,
}

impl List {
    /// `literal`: whether placeholders are plain text if the row lists nothing.
    fn new(kind: MediumKind, media: Option<Vec<Medium>>, literal: bool) -> Self {
        let media = media.unwrap_or_default();
        let is_literal = media.is_empty() && literal;
        let rest = media.into_iter();
        Self { kind, listed: rest.len(), rest, placeholders: 0, is_literal }
    }

    /// Takes the entry of the next placeholder; `None` if the list is used up, which is an error at
    /// the end of the row.
    fn next(&mut self) -> Option<Medium> {
        self.placeholders += 1;
        self.rest.next()
    }
}

impl<'a> RowMedia<'a> {
    /// Takes the lists of images and videos from `row`.
    pub(super) fn of_row(
        at: &'a RowContext<'a>,
        row: &mut Map<String, Value>,
    ) -> Result<Self, SampleFault> {
        let images = listed(row, ["images", "image"], "`image` together with `images` is")?;
        let images = images.map(|(key, value)| {
            let values = one_or_more(value).into_iter().enumerate();
            let image = |(index, value)| at.image(&format!("{key}[{index}]"), value);
            values.map(|entry| image(entry).map(Medium::Image)).collect::<Result<_, _>>()
        });
        let videos = listed(row, ["videos", "video"], "`video` together with `videos` is")?;
        let fps = rate("", row)?;
        let videos = videos.map(|(key, value)| {
            // A flat list under the singular key `video` is the frames of one video, as in a part.
            let is_flat = |list: &[Value]| list.iter().all(|entry| !entry.is_array());
            let values = match value {
                Value::Array(list) if key == "video" && is_flat(&list) => vec![Value::Array(list)],
                value => one_or_more(value),
            };
            let values = values.into_iter().enumerate();
            let video = |(index, value)| at.video(&format!("{key}[{index}]"), value, fps);
            values.map(|entry| video(entry).map(Medium::Video)).collect::<Result<_, _>>()
        });
        let literal = at.parser.rules.literal_placeholders;
        Ok(Self {
            at,
            images: List::new(MediumKind::Image, images.transpose()?, literal),
            videos: List::new(MediumKind::Video, videos.transpose()?, literal),
            media: Vec::new(),
            fps,
        })
    }

    /// Splits a text at its placeholders, in one pass: the time is linear in the length of the
    /// text.
    pub(super) fn text(&mut self, text: String) -> Content {
        let (mut parts, mut end) = (Vec::new(), 0);
        for (at, _) in text.match_indices('<') {
            let Some((kind, placeholder)) = self.placeholder_at(&text[at..]) else { continue };
            if at > end {
                parts.push(Part::Text(text[end..at].to_owned()));
            }
            parts.push(self.next_of(kind));
            end = at + placeholder.len();
        }
        if parts.is_empty() {
            return Content::Text(text);
        }
        if end < text.len() {
            parts.push(Part::Text(text[end..].to_owned()));
        }
        Content::Parts(parts)
    }

    /// The placeholder at the start of `text`, unless its kind is plain text.
    fn placeholder_at(&self, text: &str) -> Option<(MediumKind, &'static str)> {
        let is_literal = |kind| match kind {
            MediumKind::Image => self.images.is_literal,
            MediumKind::Video => self.videos.is_literal,
        };
        let is_here =
            |(kind, name): &(MediumKind, &str)| text.starts_with(name) && !is_literal(*kind);
        PLACEHOLDERS.into_iter().find(is_here)
    }

    /// Returns the part for the next listed image or video.
    fn next_of(&mut self, kind: MediumKind) -> Part {
        let list = match kind {
            MediumKind::Image => &mut self.images,
            MediumKind::Video => &mut self.videos,
        };
        self.media.extend(list.next());
        part_of(kind)
    }

    /// The position in its list of the image or video of the next placeholder.
    pub(super) fn position(&self, kind: MediumKind) -> usize {
        match kind {
            MediumKind::Image => self.images.placeholders,
            MediumKind::Video => self.videos.placeholders,
        }
    }

    /// The image or video of the last placeholder.
    pub(super) fn last(&mut self) -> Option<&mut Medium> {
        self.media.last_mut()
    }

    /// Adds a medium that a part names itself.
    pub(super) fn add(&mut self, medium: Medium) -> Part {
        let part = part_of(medium.kind());
        self.media.push(medium);
        part
    }

    /// Returns all images and videos in the order of the text. Media of a row without placeholders
    /// are put in front of the first user turn of `messages`. Fails if the numbers of placeholders
    /// and of listed media differ otherwise.
    pub(super) fn finish(self, messages: &mut [Message]) -> Result<Vec<Medium>, SampleFault> {
        let Self { at, images, videos, mut media, fps: _ } = self;
        let names_file = |[open, close]: &&[&str; 2]| {
            let mut rests = texts(messages).filter_map(|text| text.split_once(*open));
            rests.any(|(_, rest)| rest.contains(*close))
        };
        if !at.parser.rules.literal_placeholders
            && let Some([tag, _]) = NAMED.iter().find(names_file)
        {
            let what =
                "a file between tags in a text (write `<image>`, and list it in `images`) is";
            return Err(not_supported(tag, what));
        }
        // as in ms-swift, videos are put before images
        for list in [images, videos] {
            let List { kind, rest, listed, placeholders, .. } = list;
            if placeholders > listed {
                let misnamed = None;
                return Err(SampleFault::MediaMissing {
                    kind,
                    placeholders,
                    media: listed,
                    misnamed,
                });
            }
            if placeholders == listed {
                continue;
            }
            // a list next to parts with sources could be the same media again
            let has_others = media.iter().any(|medium: &Medium| medium.kind() == kind);
            if placeholders > 0 || has_others || !put_in_front(messages, &mut media, kind, rest) {
                return Err(match kind {
                    MediumKind::Image => SampleFault::ImageCount { placeholders, images: listed },
                    MediumKind::Video => SampleFault::VideoCount { placeholders, videos: listed },
                });
            }
            at.note(
                "the images or videos of a row without placeholders are put in front of its first user turn",
            );
        }
        Ok(media)
    }
}

/// Inserts media at the start of the first user turn. Returns false if there is none.
fn put_in_front(
    messages: &mut [Message],
    media: &mut Vec<Medium>,
    kind: MediumKind,
    listed: std::vec::IntoIter<Medium>,
) -> bool {
    let Some(user) = messages.iter().position(|message| message.role == "user") else {
        return false;
    };
    let is_medium = |part: &&Part| !matches!(part, Part::Text(_));
    let earlier = messages[..user].iter().map(|message| match &message.content {
        Content::Text(_) => 0,
        Content::Parts(parts) => parts.iter().filter(is_medium).count(),
    });
    let first: usize = earlier.sum();
    let mut parts = vec![part_of(kind); listed.len()];
    media.splice(first..first, listed);
    let content = &mut messages[user].content;
    match std::mem::replace(content, Content::Parts(Vec::new())) {
        Content::Text(text) if text.is_empty() => {}
        Content::Text(text) => parts.push(Part::Text(text)),
        Content::Parts(rest) => parts.extend(rest),
    }
    *content = Content::Parts(parts);
    true
}

fn part_of(kind: MediumKind) -> Part {
    match kind {
        MediumKind::Image => Part::Image,
        MediumKind::Video => Part::Video,
    }
}

/// Takes the value of one of two keys. It is an error if the row has both; `both` is the text for
/// its message.
fn listed(
    row: &mut Map<String, Value>,
    keys: [&'static str; 2],
    both: &'static str,
) -> Result<Option<(&'static str, Value)>, SampleFault> {
    let mut values = keys.map(|key| (key, list_in_text(take(row, key)))).into_iter();
    let mut given = values.by_ref().filter(|(_, value)| !value.is_null());
    match (given.next(), given.next()) {
        (Some(_), Some(_)) => Err(not_supported(keys[1], both)),
        (first, _) => Ok(first),
    }
}

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
                self.at.check_keys(ObjectKind::Part, at, &part)?;
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
                        self.at.check_keys(ObjectKind::Image, at, &part)?;
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
                    self.at.check_keys(ObjectKind::Video, at, &part)?;
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
                self.at.check_keys(ObjectKind::Part, at, &part)?;
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
                self.at.check_keys(ObjectKind::Part, at, part)?;
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

impl RowContext<'_> {
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
        self.check_keys(ObjectKind::Image, at, &object)?;
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
                self.check_keys(ObjectKind::Video, at, &object)?;
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

const COORDINATES: &str = "a list of four numbers (a box) or two (a point)";

impl RowContext<'_> {
    /// Takes the objects of a row, and checks that `messages` have one placeholder for each.
    pub(super) fn objects(
        &self,
        row: &mut Map<String, Value>,
        messages: &[Message],
    ) -> Result<Objects, SampleFault> {
        let objects = match take(row, "objects") {
            value if !is_given(&value) => {
                if self.parser.rules.literal_placeholders {
                    return Ok(Objects::default());
                }
                Objects::default()
            }
            Value::Object(object) => listed_objects(object)?,
            other => return Err(wrong_type("objects", &other, "an object with `bbox`")),
        };
        let count = |placeholder: &str| -> usize {
            texts(messages).map(|text| text.matches(placeholder).count()).sum()
        };
        for (placeholder, key, listed) in [
            (BOX_PLACEHOLDER, "bbox", objects.boxes.len()),
            (NAME_PLACEHOLDER, "ref", objects.names.len()),
        ] {
            let placeholders = count(placeholder);
            if placeholders != listed {
                return Err(GroundingError::Count { placeholder, placeholders, key, listed }.into());
            }
        }
        Ok(objects)
    }
}

fn listed_objects(mut object: Map<String, Value>) -> Result<Objects, SampleFault> {
    let known = ["ref", "bbox", "bbox_type", "image_id"];
    if let Some((key, _)) = object.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        let what = "keys of objects other than `ref`, `bbox`, `bbox_type` and `image_id` are";
        return Err(not_supported(&join("objects", key), what));
    }
    let name = |(index, value)| text(&format!("objects.ref[{index}]"), value);
    let names = list(take(&mut object, "ref")).into_iter().enumerate();
    let unit = take(&mut object, "bbox_type");
    let has_unit = !unit.is_null();
    let unit = match unit {
        Value::Null => BoxUnit::Pixel,
        value => match text("objects.bbox_type", value)?.as_str() {
            "real" => BoxUnit::Pixel,
            "norm1" => BoxUnit::One,
            "norm1000" => BoxUnit::Thousandth,
            other => {
                return Err(GroundingError::Unit { found: other.to_owned() }.into());
            }
        },
    };
    let images = list(take(&mut object, "image_id"));
    let boxes = match take(&mut object, "bbox") {
        Value::Null => Vec::new(),
        Value::Array(boxes) => boxes,
        other => return Err(wrong_type("objects.bbox", &other, "a list of boxes")),
    };
    if images.len() > boxes.len() {
        let at = format!("objects.bbox[{}]", boxes.len());
        return Err(missing(&at, "a box for each entry of `objects.image_id`"));
    }
    let of_box = |(index, value): (usize, &Value)| {
        let at = format!("objects.bbox[{index}]");
        let numbers = value.as_array().map(|list| list.iter().map(Value::as_f64).collect());
        let coordinates: Option<Vec<f64>> = numbers.flatten();
        let coordinates = coordinates.filter(|numbers| [2, 4].contains(&numbers.len()));
        let coordinates = coordinates.ok_or_else(|| wrong_type(&at, value, COORDINATES))?;
        // as in ms-swift, boxes without an entry are in the first image
        let image = images.get(index).map_or(Ok(0), |image| {
            let number = image.as_u64().and_then(|image| usize::try_from(image).ok());
            let at = format!("objects.image_id[{index}]");
            number.ok_or_else(|| wrong_type(&at, image, "the index of an image"))
        })?;
        Ok(BoxRef { coordinates, unit, image })
    };
    let boxes =
        boxes.iter().enumerate().map(of_box).collect::<Result<Vec<BoxRef>, SampleFault>>()?;
    let coordinates = || boxes.iter().flat_map(|of| &of.coordinates);
    let has_fraction = coordinates().any(|of| of.fract() != 0.0);
    let is_doubtful = !has_unit || (unit != BoxUnit::One && has_fraction);
    if is_doubtful && !boxes.is_empty() && coordinates().all(|of| (0.0..=1.0).contains(of)) {
        return Err(GroundingError::Fractions.into());
    }
    let has_no_area = |of: &BoxRef| match of.coordinates[..] {
        [x1, y1, x2, y2] => x1 == x2 || y1 == y2,
        _ => false,
    };
    if let Some(index) = boxes.iter().position(has_no_area) {
        let found = format!("{:?}", boxes[index].coordinates);
        return Err(GroundingError::NoArea { index, found }.into());
    }
    Ok(Objects { names: names.map(name).collect::<Result<_, _>>()?, boxes })
}

/// The entries of a list, or a single value; empty for null.
fn list(value: Value) -> Vec<Value> {
    if value.is_null() { Vec::new() } else { one_or_more(value) }
}

/// Placeholder in a text for the next box that the row lists.
pub(crate) const BOX_PLACEHOLDER: &str = "<bbox>";
/// Placeholder in a text for the next name of an object that the row lists.
pub(crate) const NAME_PLACEHOLDER: &str = "<ref-object>";

/// The thoughts and the contents of the messages, in order.
pub fn texts(messages: &[Message]) -> impl Iterator<Item = &String> {
    messages.iter().flat_map(|message| {
        let (whole, parts) = match &message.content {
            Content::Text(text) => (Some(text), [].as_slice()),
            Content::Parts(parts) => (None, parts.as_slice()),
        };
        let parts = parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text),
            Part::Image | Part::Video => None,
        });
        message.reasoning_content.iter().chain(whole).chain(parts)
    })
}

/// [`texts`], to be changed.
pub(crate) fn texts_mut(messages: &mut [Message]) -> impl Iterator<Item = &mut String> {
    messages.iter_mut().flat_map(|message| {
        let (whole, parts) = match &mut message.content {
            Content::Text(text) => (Some(text), [].as_mut_slice()),
            Content::Parts(parts) => (None, parts.as_mut_slice()),
        };
        let parts = parts.iter_mut().filter_map(|part| match part {
            Part::Text(text) => Some(text),
            Part::Image | Part::Video => None,
        });
        message.reasoning_content.iter_mut().chain(whole).chain(parts)
    })
}
