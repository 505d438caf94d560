//! Parsed rows of a data file: messages, and references to images and videos.

use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Source of a sample. It stays with the sample so that later errors can report it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId {
    /// Path of the data file, as written in the config.
    pub file: Arc<Path>,
    /// Line in that file, starting at 1.
    pub line: u64,
}

impl fmt::Display for SampleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A parsed row. All supported row formats are converted to this type.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Source of the row.
    pub id: SampleId,
    /// Messages in order.
    pub messages: Vec<Message>,
    /// Images and videos in order of appearance in the messages.
    pub media: Vec<Medium>,
    /// Tool definitions for the chat template.
    pub tools: Option<serde_json::Value>,
    /// Objects that the texts name by placeholders.
    pub objects: Objects,
}

/// Objects in the images of a row. If there are any, the texts of the messages have the placeholder
/// `<ref-object>` for each name and `<bbox>` for each box.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Objects {
    /// Names in the order of their placeholders.
    pub names: Vec<String>,
    /// Boxes in the order of their placeholders.
    pub boxes: Vec<BoxRef>,
}

/// A box, or a point.
#[derive(Debug, Clone, PartialEq)]
pub struct BoxRef {
    /// `x1, y1, x2, y2` of a box, or `x, y` of a point, in the upright image.
    pub coordinates: Vec<f64>,
    /// Unit of the coordinates.
    pub unit: BoxUnit,
    /// Index of the image among the images of the row, from 0; videos do not count.
    pub image: usize,
}

/// Unit of the coordinates of a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoxUnit {
    /// A pixel of the image before any resize.
    Pixel,
    /// A side of the image.
    One,
    /// A thousandth of a side of the image.
    Thousandth,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Text and media of the message.
    pub content: Content,
    /// Tool calls of an assistant message, in the form that the chat template expects.
    pub tool_calls: Option<serde_json::Value>,
    /// The thoughts before the content of an assistant message, for templates that render them.
    pub reasoning_content: Option<String>,
    /// Factor of the loss of the message, at least 0; 0 excludes it. Only assistant messages
    /// contribute to the loss.
    pub weight: f32,
}

impl Message {
    /// A message of weight 1 without tool calls and thoughts.
    pub fn new(role: &str, content: Content) -> Self {
        Self {
            role: role.to_owned(),
            content,
            tool_calls: None,
            reasoning_content: None,
            weight: 1.0,
        }
    }
}

/// Content of a message: plain text, or a list of parts. Chat templates may render the two
/// differently.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Text and media parts, in order.
    Parts(Vec<Part>),
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text of the part.
    Text(String),
    /// An image: the next entry of [`Sample::media`].
    Image,
    /// A video: the next entry of [`Sample::media`].
    Video,
}

/// A reference to an image or a video.
#[derive(Debug, Clone, PartialEq)]
pub enum Medium {
    /// A single image.
    Image(MediaRef),
    /// A sequence of frames.
    Video(VideoRef),
}

impl Medium {
    /// Whether this is an image or a video.
    pub fn kind(&self) -> MediumKind {
        match self {
            Self::Image(_) => MediumKind::Image,
            Self::Video(_) => MediumKind::Video,
        }
    }
}

/// Kind of a [`Medium`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediumKind {
    /// A single image.
    Image,
    /// A sequence of frames.
    Video,
}

/// A number of frames per second that a row gives for a video.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FrameRate {
    /// The rate of a list, which is then sampled; the rate at which to sample a file.
    Video(f64),
    /// The rate at which a list was sampled already, so that all of its frames are used; for a
    /// file as [`Self::Video`].
    Sampled(f64),
}

impl FrameRate {
    /// The number of frames per second.
    pub fn per_second(self) -> f64 {
        match self {
            Self::Video(rate) | Self::Sampled(rate) => rate,
        }
    }
}

/// A reference to a video. Parsing a row does not open it.
#[derive(Debug, Clone, PartialEq)]
pub enum VideoRef {
    /// A list of frames, one image each.
    Frames {
        /// Frames in temporal order.
        frames: Vec<MediaRef>,
        /// Frames per second of the list. `None` counts as sampled at the rate of the config.
        fps: Option<FrameRate>,
        /// Settings of this video.
        limits: VideoLimits,
    },
    /// A video file.
    File {
        /// `image_root` of the data set.
        root: Arc<Path>,
        /// Path as written in the row.
        path: PathBuf,
        /// Frames per second to sample. `None` uses the rate of the config.
        fps: Option<FrameRate>,
        /// Settings of this video.
        limits: VideoLimits,
    },
}

impl VideoRef {
    /// Frames per second of this video.
    pub fn fps_mut(&mut self) -> &mut Option<FrameRate> {
        match self {
            Self::Frames { fps, .. } | Self::File { fps, .. } => fps,
        }
    }

    /// The settings of this video.
    pub fn limits_mut(&mut self) -> &mut VideoLimits {
        match self {
            Self::Frames { limits, .. } | Self::File { limits, .. } => limits,
        }
    }
}

/// A reference to an image. Parsing a row does not open it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaRef {
    /// Location of the encoded image bytes.
    pub source: MediaSource,
    /// Limits on its size that the row gives.
    pub limits: ImageLimits,
}

/// Limits on the size of one image. The default has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageLimits {
    /// `[height, width]` in pixels to use in place of the size of the image.
    pub resized: Option<[NonZeroU32; 2]>,
    /// Limits on its area.
    pub area: AreaLimits,
}

/// Limits on the area of an image in pixels, after resizing. They precede those of the config.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AreaLimits {
    /// Minimum area; a smaller image is enlarged.
    pub min_pixels: Option<NonZeroU32>,
    /// Maximum area; a larger image is reduced. At least `min_pixels`.
    pub max_pixels: Option<NonZeroU32>,
}

/// Settings of one video that the row gives. They precede those of the config.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct VideoLimits {
    /// Time in seconds of the first frame that may be sampled. `None` starts with the first frame.
    pub start: Option<f64>,
    /// Time in seconds of the last frame that may be sampled. `None` ends with the last frame.
    pub end: Option<f64>,
    /// `[height, width]` in pixels to use in place of the size of the frames.
    pub resized: Option<[NonZeroU32; 2]>,
    /// Number of frames to sample, whatever the frame rate.
    pub num_frames: Option<NonZeroU32>,
    /// Minimum number of frames to sample.
    pub min_frames: Option<NonZeroU32>,
    /// Maximum number of frames to sample. At least `min_frames`.
    pub max_frames: Option<NonZeroU32>,
    /// Limits on the area of one frame.
    pub frame: AreaLimits,
    /// Maximum number of pixels of all sampled frames together.
    pub total_pixels: Option<NonZeroU32>,
}

/// Location of the encoded bytes of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediaSource {
    /// A file, which must be inside `root`.
    File {
        /// `image_root` of the data set.
        root: Arc<Path>,
        /// Path as written in the row.
        path: PathBuf,
    },
    /// A complete `data:` URI.
    DataUri(String),
    /// An `http` or `https` address.
    Url(Arc<str>),
    /// The bytes of the image file, stored in the row.
    Bytes(Arc<[u8]>),
}

impl From<MediaSource> for MediaRef {
    /// An image without limits of its own.
    fn from(source: MediaSource) -> Self {
        Self { source, limits: ImageLimits::default() }
    }
}
