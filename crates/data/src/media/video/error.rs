//! Errors of videos and of their settings.

#[cfg(feature = "video")]
use std::path::Path;
use std::path::PathBuf;

use crate::media::image::{ImageError, MAX_PIXELS};
use crate::model_file::ModelFileError;

/// The reason why the video settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VideoConfigError {
    /// The file cannot be read or parsed.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// A setting is out of range. Its value comes from the config, the model folder or the default.
    #[error("`data.video.{key}` is `{found}`, expected {expected}")]
    Setting {
        /// Key in `data.video`.
        key: &'static str,
        /// Found value.
        found: String,
        /// Supported values.
        expected: &'static str,
    },
}

impl VideoConfigError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::File(error) => error.hint(),
            Self::Setting { .. } => {
                "change the value, or set it to `null` to use the model folder's; docs/video.md explains each key"
            }
        }
    }
}

/// The reason why a video cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum VideoError {
    /// The row names a video file, and the program was built without the feature `video`.
    #[error("video `{}` is a file, but this build only reads lists of frames", .path.display())]
    NotBuilt {
        /// Path as written in the row.
        path: PathBuf,
    },
    /// The file does not exist.
    #[error("video `{}` does not exist in `{}`", .path.display(), .root.display())]
    Missing {
        /// Path as written in the row.
        path: PathBuf,
        /// Folder that the path is relative to.
        root: PathBuf,
    },
    /// The path points outside of its root folder, directly or through a symbolic link.
    #[error("video `{}` is outside of `image_root` `{}`", .path.display(), .root.display())]
    EscapesRoot {
        /// Path as written in the row.
        path: PathBuf,
        /// Folder that must contain the video.
        root: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read video `{}`: {cause}", .path.display())]
    Read {
        /// Path as written in the row.
        path: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// The file is damaged, or is not a video.
    #[error("video `{}` is damaged or not a video: {problem}", .path.display())]
    Broken {
        /// Path as written in the row.
        path: PathBuf,
        /// Description of the defect.
        problem: String,
    },
    /// Reading and decoding the file takes too long.
    #[error("video `{}` takes longer to load than {seconds} s", .path.display())]
    Timeout {
        /// Path as written in the row.
        path: PathBuf,
        /// `data.video.timeout_s`.
        seconds: f64,
    },
    /// The file has too many frames.
    #[error("video `{}` has {frames} frames, expected at most {limit}", .path.display())]
    TooLong {
        /// Path as written in the row.
        path: PathBuf,
        /// Number of frames that the header declares.
        frames: usize,
        /// `data.video.max_source_frames`.
        limit: usize,
    },
    /// The frames have no pixels, or more pixels than the decoder accepts.
    #[error(
        "video `{}` has frames of {width} x {height}, expected 1 to {limit} pixels per frame",
        .path.display(),
        limit = MAX_PIXELS
    )]
    TooLarge {
        /// Path as written in the row.
        path: PathBuf,
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// The model does not support videos.
    #[error("the model folder has no video token (`video_token_id` in config.json)")]
    NoToken,
    /// A frame of a list cannot be loaded.
    #[error("frame {frame}: {cause}")]
    Frame {
        /// Position in the list, starting at 1.
        frame: usize,
        /// Error of the frame.
        cause: ImageError,
    },
    /// A frame differs in size from the first frame.
    #[error(
        "frame {frame} is {width} x {height}, expected {expected_width} x {expected_height} like the first frame"
    )]
    FrameSize {
        /// Position in the video, starting at 1.
        frame: usize,
        /// Upright width in pixels.
        width: u32,
        /// Upright height in pixels.
        height: u32,
        /// Upright width of the first frame in pixels.
        expected_width: u32,
        /// Upright height of the first frame in pixels.
        expected_height: u32,
    },
    /// The video has fewer sampled frames than a patch.
    #[error("too few frames: {frames}, expected at least 2 (a patch spans 2 frames)")]
    TooShort {
        /// Number of sampled frames.
        frames: usize,
    },
    /// The video has no frames between `video_start` and `video_end`.
    #[error(
        "no frames from {} to {} s: the video takes {seconds:.1} s",
        .start.unwrap_or(0.0),
        .end.unwrap_or(*.seconds)
    )]
    EmptyRange {
        /// `video_start` of the row, in seconds.
        start: Option<f64>,
        /// `video_end` of the row, in seconds.
        end: Option<f64>,
        /// Duration of the video in seconds.
        seconds: f64,
    },
    /// The time between the frames is too long for the positions of the model.
    #[error("the video takes {seconds:.0} s, expected at most {limit:.0} s")]
    Duration {
        /// Duration of the video in seconds.
        seconds: f64,
        /// Time of the last position.
        limit: f32,
    },
    /// The aspect ratio of the frames is too large for the model.
    #[error("frames are {width} x {height} pixels, expected an aspect ratio of at most 200")]
    AspectRatio {
        /// Upright width in pixels.
        width: u32,
        /// Upright height in pixels.
        height: u32,
    },
}

impl VideoError {
    #[cfg(feature = "video")]
    pub(super) fn of_path(path: &Path, cause: ImageError) -> Self {
        let path = path.to_owned();
        match cause {
            ImageError::Missing { root, .. } => Self::Missing { path, root },
            ImageError::EscapesRoot { root, .. } => Self::EscapesRoot { path, root },
            ImageError::Read { source: cause, .. } => Self::Read { path, cause },
            other => Self::Read { path, cause: std::io::Error::other(other.to_string()) },
        }
    }

    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotBuilt { .. } => {
                "build with `--features video` (needs FFmpeg's development files, see docs/video.md), or list the frames as images"
            }
            Self::Missing { .. } => {
                "paths are relative to `image_root` of the data set, which is the folder of the data file by default"
            }
            Self::EscapesRoot { .. } => {
                "move the video into `image_root`, or set `image_root` to a folder that contains it"
            }
            Self::Read { .. } => "the path must point to a regular file with read permission",
            Self::Broken { .. } => "copy or convert the video again",
            Self::Timeout { .. } => {
                "shorten the video, scale it down, or raise `data.video.timeout_s`"
            }
            Self::TooLong { .. } => "shorten the video, or raise `data.video.max_source_frames`",
            Self::TooLarge { .. } => "scale the video to a supported size",
            Self::NoToken => "use a model that supports videos, or remove the row",
            Self::Frame { cause, .. } => cause.hint(),
            Self::FrameSize { .. } => "resize all frames of the list to one size",
            Self::TooShort { .. } => {
                "list more frames, raise `nframes` or `max_frames`, or use an image instead of a video"
            }
            Self::EmptyRange { .. } => "correct `video_start` and `video_end`, in seconds",
            Self::Duration { .. } => "correct `fps`, the frames per second of the video",
            Self::AspectRatio { .. } => "crop or pad the video",
        }
    }

    /// Returns the key under which rejected samples are counted, such as `video_missing`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotBuilt { .. } => "video_not_built",
            Self::Missing { .. } => "video_missing",
            Self::EscapesRoot { .. } => "video_path_escapes_root",
            Self::Read { .. } => "video_unreadable",
            Self::Broken { .. } => "video_broken",
            Self::Timeout { .. } => "video_timeout",
            Self::TooLong { .. } => "video_too_long",
            Self::TooLarge { .. } => "video_too_large",
            Self::NoToken => "video_token",
            Self::Frame { .. } => "video_frame",
            Self::FrameSize { .. } => "video_frame_size",
            Self::TooShort { .. } => "video_too_short",
            Self::EmptyRange { .. } => "video_empty_range",
            Self::Duration { .. } => "video_duration",
            Self::AspectRatio { .. } => "video_aspect_ratio",
        }
    }
}
