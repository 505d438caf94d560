//! The forms of rows, which keys of a row are read, and what happens to the others.
//!
//! A key is *known* if the parser reads it, *refused* if it should affect training but is not
//! supported, *metadata* if it is a usual name for something that does not affect training, and
//! *unknown* otherwise. Null values count as missing keys.

use std::fmt;

use serde_json::{Map, Value};
use strsim::jaro_winkler;

use super::super::raw_row::is_blob;
use super::super::sample_error::SampleFault;
use super::values::data_uri;
pub(super) use super::values::is_given;

/// Layout of a row, determined by its keys. `docs/data-format.md` describes each form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowForm {
    /// Key `messages` with `role` and `content`; images and videos are parts of the content.
    Messages,
    /// Key `messages`, and `images` or `videos` for the placeholders `<image>` and `<video>` in the
    /// texts.
    MessagesWithImages,
    /// Key `conversations` with `from` and `value`.
    Conversations,
    /// Keys `prompt` and `completion`: texts, or lists of messages.
    PromptCompletion,
    /// Keys `query` and `response`.
    QueryResponse,
    /// Keys `instruction`, `input` and `output`.
    Alpaca,
    /// Images or videos, and one of the usual sets of columns: the question, if there is one, and
    /// the answer.
    BesideMedia(&'static [&'static str]),
    /// Key `text`: a document of a corpus.
    Text,
}

const MEDIA: [&str; 4] = ["images", "image", "videos", "video"];
/// The columns of [`RowForm::BesideMedia`]; of several sets, the first is used.
const BESIDE_MEDIA: [&[&str]; 8] = [
    &["texts"],
    &["question", "answer"],
    &["query", "answer"],
    &["prompt", "response"],
    &["prompt", "answer"],
    &["problem", "solution"],
    &["text"],
    &["caption"],
];
/// Other names of columns with images or videos.
const LIKE_MEDIA: [&str; 13] = [
    "img",
    "imgs",
    "picture",
    "pictures",
    "photo",
    "photos",
    "image_path",
    "image_paths",
    "image_file",
    "image_url",
    "image_bytes",
    "video_path",
    "video_file",
];

/// Whether an object next to a caption is a row, and not metadata of its image. A key is enough: a
/// row that lacks another one is rejected with its keys.
pub(in crate::source) fn is_row(object: &Map<String, Value>) -> bool {
    let beside_media = BESIDE_MEDIA.iter().map(|columns| columns[0]);
    // a data set of images and captions has these in its metadata
    let keys = beside_media.filter(|key| !["text", "caption"].contains(key));
    let mut keys = ["messages", "conversations", "instruction"].into_iter().chain(keys);
    keys.any(|key| object.contains_key(key))
}

/// Whether a key has the name of a column with images or videos.
fn is_like_media(key: &str) -> bool {
    let key = key.to_lowercase();
    MEDIA.iter().chain(&LIKE_MEDIA).any(|name| *name == key)
}

/// A column of a row that has images or videos, by its name, or because its value has their bytes.
pub(in crate::source) fn media_column(row: &Map<String, Value>) -> Option<&str> {
    let is_media = |key: &str, value: &Value| {
        let is_uri = || key != "text" && value.as_str().is_some_and(|of| data_uri(of).is_some());
        is_like_media(key) || is_blob(value) || is_uri()
    };
    let mut columns = row.iter().filter(|(_, value)| is_given(value));
    columns.find(|(key, value)| is_media(key, value)).map(|(key, _)| key.as_str())
}

impl fmt::Display for RowForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messages => "messages",
            Self::MessagesWithImages => "messages with a list of media",
            Self::Conversations => "conversations",
            Self::PromptCompletion => "prompt and completion",
            Self::QueryResponse => "query and response",
            Self::Alpaca => "alpaca",
            Self::BesideMedia(columns) => return write!(f, "media with {}", columns.join(" and ")),
            Self::Text => "plain text",
        })
    }
}

impl RowForm {
    /// Whether every row of this form has images or videos.
    pub(in crate::source) fn has_media(self) -> bool {
        matches!(self, Self::MessagesWithImages | Self::BesideMedia(_))
    }

    /// Detects the form of a row from its keys.
    pub(in crate::source) fn of(row: &Map<String, Value>) -> Result<Self, SampleFault> {
        let has = |key| row.get(key).is_some_and(|value: &Value| !value.is_null());
        if has("messages") {
            let listed = MEDIA.into_iter().any(has);
            Ok(if listed { Self::MessagesWithImages } else { Self::Messages })
        } else if has("conversations") {
            Ok(Self::Conversations)
        } else if has("prompt") && has("completion") {
            Ok(Self::PromptCompletion)
        } else if has("query") && has("response") {
            Ok(Self::QueryResponse)
        } else if has("instruction") && has("output") {
            Ok(Self::Alpaca)
        } else if MEDIA.into_iter().any(has)
            && let Some(columns) = BESIDE_MEDIA.iter().find(|of| of.iter().all(|key| has(key)))
        {
            Ok(Self::BesideMedia(columns))
        } else if has("text") && media_column(row).is_none() {
            Ok(Self::Text)
        } else {
            let named = |(key, value): (&String, &Value)| {
                format!("`{key}`{}", if value.is_null() { " (null)" } else { "" })
            };
            let keys: Vec<_> = row.iter().take(8).map(named).collect();
            let keys = if keys.is_empty() { "no keys".to_owned() } else { keys.join(", ") };
            Err(SampleFault::UnknownForm { keys })
        }
    }

    /// The keys that only this form has.
    pub(super) fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Messages | Self::MessagesWithImages => &["messages"],
            Self::Conversations => &["conversations"],
            Self::PromptCompletion => &["prompt", "completion"],
            Self::QueryResponse => &["query", "response", "history"],
            Self::Alpaca => &["instruction", "input", "output", "history"],
            Self::BesideMedia(columns) => columns,
            Self::Text => &["text"],
        }
    }
}

/// Minimum similarity of a misspelt key and its suggestion, from 0 to 1.
const SIMILAR: f64 = 0.8;

/// Usual keys of rows, turns and images that do not affect training.
const METADATA: [&str; 44] = [
    "annotations",
    "author",
    "cache_control",
    "category",
    "channel",
    "conversation_id",
    "created",
    "created_at",
    "data_source",
    "dataset",
    "dataset_name",
    "date",
    "difficulty",
    "domain",
    "format",
    "height",
    "id",
    "idx",
    "image_id",
    "index",
    "lang",
    "language",
    "license",
    "meta",
    "metadata",
    "mode",
    "name",
    "num_turns",
    "origin",
    "prompt_id",
    "question_id",
    "score",
    "source",
    "split",
    "subset",
    "tags",
    "task",
    "timestamp",
    "tool_call_id",
    "topic",
    "type",
    "uid",
    "uuid",
    "width",
];

/// Keys of every row form. Suggestions for a misspelt key come from here.
const ROW: [&str; 8] =
    ["system", "tools", "images", "videos", "train", "weight", "fps", "rejected_response"];
/// Other spellings and refused keys of every row form.
const ROW_TOO: [&str; 13] = [
    "id",
    "image",
    "video",
    "audio",
    "audios",
    "objects",
    "sample_fps",
    "raw_fps",
    "loss",
    "loss_scale",
    "trainable",
    "rejected_messages",
    "rejected_images",
];
const TURN: [&str; 8] =
    ["role", "content", "from", "value", "tool_calls", "train", "weight", "reasoning_content"];
const TURN_TOO: [&str; 6] =
    ["loss", "loss_scale", "trainable", "reasoning", "thinking", "function_call"];
const PART: [&str; 6] = ["type", "text", "image", "video", "image_url", "video_url"];
const PART_TOO: [&str; 6] = ["url", "path", "base64", "bytes", "source", "fps"];
const IMAGE: [&str; 5] = ["image", "url", "path", "bytes", "base64"];
const IMAGE_TOO: [&str; 12] = [
    "type",
    "image_url",
    "source",
    "data",
    "index",
    "media_type",
    "text",
    "detail",
    "min_pixels",
    "max_pixels",
    "resized_height",
    "resized_width",
];
const VIDEO: [&str; 4] = ["video", "url", "path", "fps"];
const VIDEO_TOO: [&str; 20] = [
    "type",
    "index",
    "text",
    "video_url",
    "sample_fps",
    "raw_fps",
    "bytes",
    "image",
    "image_url",
    "nframes",
    "num_frames",
    "min_frames",
    "max_frames",
    "min_pixels",
    "max_pixels",
    "total_pixels",
    "resized_height",
    "resized_width",
    "video_start",
    "video_end",
];

/// Refused keys of a row: the key, and the feature with `is` or `are`.
const REFUSED_IN_ROWS: [(&str, &str); 17] = [
    ("label", "labels of preferences or classes are"),
    ("chosen", "pairs of preferences are"),
    ("rejected", "pairs of preferences are"),
    ("kto_tag", "labels of preferences or classes are"),
    ("positive_messages", "training of embeddings is"),
    ("negative_messages", "training of embeddings is"),
    ("functions", "functions (use `tools`) are"),
    ("function_call", "function calls outside of turns are"),
    ("chat_template_kwargs", "variables of the chat template in a row are"),
    ("enable_thinking", "variables of the chat template in a row are"),
    ("audio", "audio is"),
    ("audios", "audio is"),
    ("loss_mask", MASK),
    ("mask", MASK),
    ("masked", MASK),
    ("train_on_input", MASK),
    ("train_on_prompt", MASK),
];
const REFUSED_IN_TURNS: [(&str, &str); 7] = [
    ("loss_mask", MASK),
    ("mask", MASK),
    ("masked", MASK),
    ("train_detail", MASK),
    ("prefix", "answers to be continued are"),
    ("audio", "audio is"),
    ("objects", "boxes of a turn are"),
];
const MASK: &str = "masks (use `\"train\": false` or `weight` of a turn) are";
/// Refused keys of a part, of an image and of a video.
const REFUSED_IN_MEDIA: [(&str, &str); 4] = [
    ("bbox", "boxes of an image are"),
    ("crop", "crops of an image are"),
    ("audio", "audio is"),
    ("audios", "audio is"),
];
/// The keys of a call and of its `function`.
const CALL: [&str; 6] = ["name", "arguments", "function", "id", "index", "type"];
/// Refused keys of a call: those of other formats for its arguments.
const REFUSED_IN_CALLS: [(&str, &str); 6] = [
    ("parameters", OTHER_ARGUMENTS),
    ("args", OTHER_ARGUMENTS),
    ("kwargs", OTHER_ARGUMENTS),
    ("argument", OTHER_ARGUMENTS),
    ("params", OTHER_ARGUMENTS),
    ("input", OTHER_ARGUMENTS),
];
pub(super) const OTHER_ARGUMENTS: &str =
    "other names for the arguments of a call (use `arguments`) are";
/// Refused keys of an image, besides [`REFUSED_IN_MEDIA`].
const REFUSED_IN_IMAGES: [(&str, &str); 1] =
    [("total_pixels", "limits for all images together (use `max_pixels`) are")];

/// What an object of a row describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ObjectKind {
    Row(RowForm),
    Turn,
    /// A part of the content of a turn, other than an image or a video.
    Part,
    /// An image: a part, or an entry of a list.
    Image,
    /// A video: a part, or an entry of a list.
    Video,
    /// A call of a tool, or its `function`.
    Call,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// The parser reads it, or the key is refused where it is read.
    Known,
    /// The row is rejected: it would affect training, and is not supported.
    Refused(&'static str),
    /// It does not affect training.
    Metadata,
    /// It may be a misspelt key.
    Unknown,
}

impl ObjectKind {
    /// The valid keys: those to suggest, then the others.
    fn names(self) -> [&'static [&'static str]; 3] {
        match self {
            Self::Row(form) => [form.keys(), &ROW, &ROW_TOO],
            Self::Turn => [&TURN, &[], &TURN_TOO],
            Self::Part => [&PART, &[], &PART_TOO],
            Self::Image => [&IMAGE, &[], &IMAGE_TOO],
            Self::Video => [&VIDEO, &[], &VIDEO_TOO],
            Self::Call => [&CALL, &[], &[]],
        }
    }

    fn refused(self) -> [&'static [(&'static str, &'static str)]; 2] {
        match self {
            Self::Row(_) => [&REFUSED_IN_ROWS, &[]],
            Self::Turn => [&REFUSED_IN_TURNS, &[]],
            Self::Part | Self::Video => [&REFUSED_IN_MEDIA, &[]],
            Self::Image => [&REFUSED_IN_MEDIA, &REFUSED_IN_IMAGES],
            Self::Call => [&REFUSED_IN_CALLS, &[]],
        }
    }

    /// Returns what happens to `key`.
    pub(super) fn use_of(self, key: &str) -> Use {
        if let Some((_, what)) = self.refused().iter().copied().flatten().find(|(k, _)| *k == key) {
            Use::Refused(what)
        } else if self.names().iter().any(|names| names.contains(&key)) {
            Use::Known
        } else if METADATA.contains(&key) {
            Use::Metadata
        } else {
            Use::Unknown
        }
    }

    /// The valid key that `key` most likely means.
    pub(super) fn nearest(self, key: &str) -> Option<&'static str> {
        let key = key.to_lowercase().replace('-', "_");
        let [first, second, _] = self.names();
        let scored = first.iter().chain(second).map(|name| (jaro_winkler(&key, name), *name));
        let best = scored.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
        Some(best).filter(|(similarity, _)| *similarity >= SIMILAR).map(|(_, name)| name)
    }

    /// The object in a message: nothing for a row, else such as ` of a turn`.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::Row(_) => "",
            Self::Turn => " of a turn",
            Self::Part => " of a part",
            Self::Image => " of an image",
            Self::Video => " of a video",
            Self::Call => " of a call",
        }
    }
}

/// The key of a row that its author probably meant as `images` or `videos`.
pub(super) fn misnamed_media(
    form: RowForm,
    row: &Map<String, Value>,
) -> Option<(String, &'static str)> {
    let place = ObjectKind::Row(form);
    let unknown = row.iter().filter(|(key, value)| {
        is_given(value) && matches!(place.use_of(key), Use::Unknown | Use::Metadata)
    });
    unknown
        .filter_map(|(key, _)| Some((key.clone(), place.nearest(key)?)))
        .find(|(_, meant)| ["images", "videos"].contains(meant))
}

/// `images` or `videos` if a key that is not read has one of them. A name of a file counts if the key
/// is named like one of them, or if the file is `there`.
pub(super) fn unread_media(
    place: ObjectKind,
    key: &str,
    value: &Value,
    there: &dyn Fn(&str) -> bool,
) -> Option<&'static str> {
    // first, because names of keys are compared with all others
    let meant = media_of(value, &|_| true)?;
    let is_named = place.nearest(key).is_some_and(|meant| ["images", "videos"].contains(&meant));
    if is_named || is_like_media(key) {
        return Some(meant);
    }
    // `source` and the like may name where a text is from
    let is_metadata = place.use_of(key) == Use::Metadata;
    media_of(value, &|name| !is_metadata && there(name))
}

/// `images` or `videos` if a value has the bytes of one, or a name that counts, or if a list or
/// object has it.
fn media_of(value: &Value, counts: &dyn Fn(&str) -> bool) -> Option<&'static str> {
    match value {
        Value::String(text) => {
            let is_name = text.len() <= MAX_NAME && !text.contains('\n');
            data_uri(text).or_else(|| {
                let ending = text.rsplit_once('.').filter(|_| is_name)?.1.to_lowercase();
                let is_one_of = |endings: &[&str]| endings.contains(&&ending[..]);
                let kind = if is_one_of(&IMAGE_ENDINGS) { "images" } else { "videos" };
                let is_media = kind == "images" || is_one_of(&VIDEO_ENDINGS);
                (is_media && counts(text)).then_some(kind)
            })
        }
        Value::Array(values) => values.iter().find_map(|value| media_of(value, counts)),
        Value::Object(_) if is_blob(value) => Some("images"),
        Value::Object(values) => values.values().find_map(|value| media_of(value, counts)),
        _ => None,
    }
}

/// Maximum number of bytes of a path or an address.
const MAX_NAME: usize = 4096;
/// Endings of the names of images, in lower case.
pub(in crate::source) const IMAGE_ENDINGS: [&str; 8] =
    ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"];
/// Endings of the names of videos, in lower case.
pub(in crate::source) const VIDEO_ENDINGS: [&str; 12] =
    ["mp4", "mkv", "webm", "mov", "avi", "m4v", "mpg", "mpeg", "flv", "wmv", "ogv", "3gp"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_misspelt_key_finds_the_one_that_its_author_meant() {
        let row = ObjectKind::Row(RowForm::Messages);
        for (key, meant) in [
            ("image_path", Some("images")),
            ("Images", Some("images")),
            ("img", Some("images")),
            ("video_paths", Some("videos")),
            ("sytem", Some("system")),
            ("mesages", Some("messages")),
            ("zebra", None),
        ] {
            assert_eq!(row.nearest(key), meant, "{key}");
            assert_eq!(row.use_of(key), Use::Unknown, "{key}");
        }
        assert_eq!(ObjectKind::Turn.nearest("contents"), Some("content"));
    }

    #[test]
    fn a_key_that_names_media_and_is_not_read_is_found() {
        for (key, value, meant) in [
            ("image_paths", json!(["a/0.png"]), Some("images")),
            ("Photo", json!("a.JPG"), Some("images")),
            ("img", json!([{"url": "data:image/png;base64,AA"}]), Some("images")),
            ("video_file", json!("a.mp4"), Some("videos")),
            ("screenshot", json!({"path": "there.webp"}), Some("images")),
            ("screens", json!(["gone.png", "there.mpg"]), Some("videos")),
            ("page", json!({"logo": "a.png"}), None),
            ("source", json!("there.png"), None),
            ("source", json!("data:image/png;base64,AA"), Some("images")),
            ("url", json!("https://a.org/File:Cat.jpg"), None),
            ("page", json!("DATA:image/png;base64,AA"), Some("images")),
            ("image_id", json!("a.png"), Some("images")),
            ("image_id", json!(17), None),
            ("image_name", json!("a gradient"), None),
            ("source", json!("scan.png"), None),
        ] {
            let there = |name: &str| name.starts_with("there");
            let found = unread_media(ObjectKind::Row(RowForm::Messages), key, &value, &there);
            assert_eq!(found, meant, "{key}");
        }
    }

    #[test]
    fn a_key_of_another_row_form_is_unknown() {
        assert_eq!(ObjectKind::Row(RowForm::Messages).use_of("output"), Use::Unknown);
        assert_eq!(ObjectKind::Row(RowForm::Alpaca).use_of("output"), Use::Known);
    }
}
