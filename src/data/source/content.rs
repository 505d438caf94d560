//! Contents of turns and the images they stand for, in the order of their appearance.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::SampleError;
use crate::batch::{Content, MediaRef, MediaSource, Part, SampleId};

/// Stands for the next listed image inside a text.
const PLACEHOLDER: &str = "<image>";
/// Keys of rows and parts whose media are not read.
const OTHER_MEDIA: [&str; 5] = ["video", "videos", "video_url", "audio", "audios"];
/// Keys under which a part or an entry of a list gives its image.
const SOURCE_KEYS: [&str; 4] = ["image", "image_url", "url", "path"];

/// Collects the media of one row while its turns are read.
pub(super) struct RowMedia<'a> {
    id: &'a SampleId,
    image_root: &'a Arc<Path>,
    listed: std::vec::IntoIter<MediaRef>,
    list: List,
    num_placeholders: usize,
    media: Vec<MediaRef>,
}

/// Whether the row lists images apart from its turns: only then does `<image>` mean anything.
enum List {
    Absent,
    Present { num_images: usize },
}

impl<'a> RowMedia<'a> {
    /// Takes the lists of images out of `row`.
    pub(super) fn of_row(
        id: &'a SampleId,
        image_root: &'a Arc<Path>,
        row: &mut Map<String, Value>,
    ) -> Result<Self, SampleError> {
        refuse_other_media(id, "", row)?;
        let mut this = Self {
            id,
            image_root,
            listed: Vec::new().into_iter(),
            list: List::Absent,
            num_placeholders: 0,
            media: Vec::new(),
        };
        let lists = ["images", "image"].map(|key| (key, take(row, key)));
        let both = lists.iter().all(|(_, value)| !value.is_null());
        if both {
            return Err(this.not_supported("image", "`image` beside `images` is"));
        }
        for (key, value) in lists {
            let values = match value {
                Value::Null => continue,
                Value::Array(values) => values,
                one => vec![one],
            };
            let images = values
                .into_iter()
                .enumerate()
                .map(|(index, value)| this.image(&format!("{key}[{index}]"), value))
                .collect::<Result<Vec<_>, _>>()?;
            this.list = List::Present { num_images: images.len() };
            this.listed = images.into_iter();
        }
        Ok(this)
    }

    /// Content of a turn: a text, or a list of parts.
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

    /// A text, cut at its `<image>` placeholders if the row lists images.
    pub(super) fn text(&mut self, text: String) -> Content {
        if matches!(self.list, List::Absent) || !text.contains(PLACEHOLDER) {
            return Content::Text(text);
        }
        let mut parts = Vec::new();
        for (index, piece) in text.split(PLACEHOLDER).enumerate() {
            if index > 0 {
                self.next_listed();
                parts.push(Part::Image);
            }
            if !piece.is_empty() {
                parts.push(Part::Text(piece.to_owned()));
            }
        }
        Content::Parts(parts)
    }

    /// All media in order; an error if placeholders and listed images differ in number.
    pub(super) fn finish(self) -> Result<Vec<MediaRef>, SampleError> {
        let images = match self.list {
            List::Absent => 0,
            List::Present { num_images } => num_images,
        };
        if self.num_placeholders == images {
            return Ok(self.media);
        }
        let placeholders = self.num_placeholders;
        Err(SampleError::ImageCount { id: self.id.clone(), placeholders, images })
    }

    /// One image fewer on the list; `finish` compares the totals.
    fn next_listed(&mut self) {
        self.num_placeholders += 1;
        self.media.extend(self.listed.next());
    }

    fn part(&mut self, at: &str, value: Value) -> Result<Part, SampleError> {
        let mut part = match value {
            Value::Object(part) => part,
            other => return Err(wrong_type(self.id, at, &other, "an object with `type`")),
        };
        refuse_other_media(self.id, at, &part)?;
        let kind = match take(&mut part, "type") {
            Value::String(kind) => kind,
            // Qwen's own form says the type by the key.
            Value::Null if part.contains_key("text") => "text".to_owned(),
            Value::Null if part.contains_key("image") => "image".to_owned(),
            Value::Null => {
                return Err(missing(self.id, &format!("{at}.type"), "`text` or `image`"));
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
                match first_source(&mut part) {
                    Some((key, value)) => {
                        let image = self.image(&format!("{at}.{key}"), value)?;
                        self.media.push(image);
                    }
                    None => self.next_listed(),
                }
                Ok(Part::Image)
            }
            _ => {
                Err(self
                    .not_supported(&format!("{at}.type"), "parts other than text and image are"))
            }
        }
    }

    /// A path, a data URI, or an object that holds one.
    fn image(&self, at: &str, value: Value) -> Result<MediaRef, SampleError> {
        const EXPECTED: &str = "a path or a data URI";
        let text = match value {
            Value::String(text) => text,
            Value::Object(mut object) => match first_source(&mut object) {
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
        } else {
            let path = text.strip_prefix("file://").unwrap_or(&text);
            if path.contains("://") {
                return Err(self.not_supported(at, "images by URL are"));
            }
            MediaSource::File { root: self.image_root.clone(), path: PathBuf::from(path) }
        };
        Ok(MediaRef { source })
    }

    fn not_supported(&self, at: &str, what: &'static str) -> SampleError {
        SampleError::NotSupported { id: self.id.clone(), at: at.to_owned(), what }
    }
}

/// Takes a value out; null where there is none.
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

/// `a number`, `an array`, ..
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

fn first_source(object: &mut Map<String, Value>) -> Option<(&'static str, Value)> {
    SOURCE_KEYS.iter().map(|key| (*key, take(object, key))).find(|(_, value)| !value.is_null())
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
            let what = "videos and audio are";
            return Err(SampleError::NotSupported { id: id.clone(), at, what });
        }
    }
    Ok(())
}

fn starts_with_ignoring_case(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}
