//! One training conversation as the user wrote it: messages, and references to its media.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a sample came from; travels along so that every later error can name it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId {
    /// The data file, as the config names it.
    pub file: Arc<Path>,
    /// Line in that file, starting at 1.
    pub line: u64,
}

impl fmt::Display for SampleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A parsed row: every row form of the contract ends up as this.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Origin of the row.
    pub id: SampleId,
    /// The turns, in order.
    pub messages: Vec<Message>,
    /// The media that the parts of the messages stand for, in order of appearance.
    pub media: Vec<Medium>,
    /// Tool definitions that the chat template renders.
    pub tools: Option<serde_json::Value>,
}

/// One turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What the turn says.
    pub content: Content,
    /// Tool calls of an assistant turn, as the chat template expects them.
    pub tool_calls: Option<serde_json::Value>,
    /// `false` takes an assistant turn out of the loss.
    pub train: bool,
}

/// Content of a turn: text alone, or parts. Chat templates may render the two differently.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Text and media in order.
    Parts(Vec<Part>),
}

/// A piece of a turn.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text.
    Text(String),
    /// The next of [`Sample::media`], an image.
    Image,
    /// The next of [`Sample::media`], a video.
    Video,
}

/// What a part of a turn stands for.
#[derive(Debug, Clone, PartialEq)]
pub enum Medium {
    /// An image.
    Image(MediaRef),
    /// Images in time.
    Video(VideoRef),
}

impl Medium {
    /// Which of the two it is.
    pub fn kind(&self) -> MediumKind {
        match self {
            Self::Image(_) => MediumKind::Image,
            Self::Video(_) => MediumKind::Video,
        }
    }
}

/// Kind of a medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediumKind {
    /// An image.
    Image,
    /// Images in time.
    Video,
}

/// A reference to a video; nothing is read before encoding.
#[derive(Debug, Clone, PartialEq)]
pub enum VideoRef {
    /// Its frames, one image each, in order.
    Frames {
        /// All of them.
        frames: Vec<MediaRef>,
        /// Frames of the list in a second; none: the rate that the config samples at.
        fps: Option<f64>,
    },
    /// A file.
    File {
        /// `image_root` of the data set.
        root: Arc<Path>,
        /// The path in the row.
        path: PathBuf,
        /// Frames to take of a second, instead of what the config says.
        fps: Option<f64>,
    },
}

/// A reference to an image; nothing is read before encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaRef {
    /// Where the bytes are.
    pub source: MediaSource,
}

/// Where the bytes of an image are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediaSource {
    /// A file, as written in the row, and the folder that it must stay inside of.
    File {
        /// `image_root` of the data set.
        root: Arc<Path>,
        /// The path in the row.
        path: PathBuf,
    },
    /// A whole `data:` URI.
    DataUri(String),
}
