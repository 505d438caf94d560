#[cfg(feature = "video")]
use std::path::Path;
use std::path::PathBuf;

use crate::media::image::{ImageError, MAX_PIXELS};

/// The reason why a video cannot be loaded.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum VideoError {
    #[error("video `{}` is a file, but this build only reads lists of frames", .path.display())]
    #[fault(
        hint = "build with `--features video` (needs FFmpeg's development files, see docs/video.md), or list the frames as images",
        reason = "video_not_built"
    )]
    NotBuilt { path: PathBuf },
    #[error("video `{}` does not exist in `{}`", .path.display(), .root.display())]
    #[fault(
        hint = "paths are relative to `image_root` of the data set, which is the folder of the data file by default",
        reason = "video_missing"
    )]
    Missing { path: PathBuf, root: PathBuf },
    #[error("video `{}` is outside of `image_root` `{}`", .path.display(), .root.display())]
    #[fault(
        hint = "move the video into `image_root`, or set `image_root` to a folder that contains it",
        reason = "video_path_escapes_root"
    )]
    EscapesRoot { path: PathBuf, root: PathBuf },
    #[error("cannot read video `{}`: {cause}", .path.display())]
    #[fault(
        hint = "the path must point to a regular file with read permission",
        reason = "video_unreadable"
    )]
    Read { path: PathBuf, cause: std::io::Error },
    #[error("video `{}` is damaged or not a video: {problem}", .path.display())]
    #[fault(hint = "copy or convert the video again", reason = "video_broken")]
    Broken { path: PathBuf, problem: String },
    #[error("video `{}` takes longer to load than {seconds} s", .path.display())]
    #[fault(
        hint = "shorten the video, scale it down, or raise `data.video.timeout_s`",
        reason = "video_timeout"
    )]
    Timeout { path: PathBuf, seconds: f64 },
    #[error("video `{}` has {frames} frames, expected at most {limit}", .path.display())]
    #[fault(
        hint = "shorten the video, or raise `data.video.max_source_frames`",
        reason = "video_too_long"
    )]
    TooLong {
        path: PathBuf,
        /// Number of frames that the header declares.
        frames: usize,
        limit: usize,
    },
    #[error(
        "video `{}` has frames of {width} x {height}, expected 1 to {limit} pixels per frame",
        .path.display(),
        limit = MAX_PIXELS
    )]
    #[fault(hint = "scale the video to a supported size", reason = "video_too_large")]
    TooLarge { path: PathBuf, width: u32, height: u32 },
    #[error("the model folder has no video token (`video_token_id` in config.json)")]
    #[fault(hint = "use a model that supports videos, or remove the row", reason = "video_token")]
    NoToken,
    #[error("frame {frame}: {cause}")]
    #[fault(from = cause, reason = "video_frame")]
    Frame {
        /// Position in the list, starting at 1.
        frame: usize,
        cause: ImageError,
    },
    #[error(
        "frame {frame} is {width} x {height}, expected {expected_width} x {expected_height} like the first frame"
    )]
    #[fault(hint = "resize all frames of the list to one size", reason = "video_frame_size")]
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
    #[error("too few frames: {frames}, expected at least 2 (a patch spans 2 frames)")]
    #[fault(
        hint = "list more frames, raise `nframes` or `max_frames`, or use an image instead of a video",
        reason = "video_too_short"
    )]
    TooShort { frames: usize },
    #[error(
        "no frames from {} to {} s: the video takes {seconds:.1} s",
        .start.unwrap_or(0.0),
        .end.unwrap_or(*.seconds)
    )]
    #[fault(
        hint = "correct `video_start` and `video_end`, in seconds",
        reason = "video_empty_range"
    )]
    EmptyRange {
        /// `video_start` of the row, in seconds.
        start: Option<f64>,
        /// `video_end` of the row, in seconds.
        end: Option<f64>,
        /// Duration of the video in seconds.
        seconds: f64,
    },
    #[error("the video takes {seconds:.0} s, expected at most {limit:.0} s")]
    #[fault(hint = "correct `fps`, the frames per second of the video", reason = "video_duration")]
    Duration {
        /// Duration of the video in seconds.
        seconds: f64,
        limit: f32,
    },
    #[error("the video has {limit}, but the model scales every frame to a fixed area")]
    #[fault(hint = "remove the limits from the row", reason = "video_pixels")]
    Pixels { limit: &'static str },
    #[error("frames are {width} x {height} pixels, expected an aspect ratio of at most 200")]
    #[fault(hint = "crop or pad the video", reason = "video_aspect_ratio")]
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
}
