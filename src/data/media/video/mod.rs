//! Video processing: sample frames, decode, resize, normalise and cut into patches.
//!
//! ```text
//! VideoRef -> number, rate and size of frames -> sampled indices -> RGB -> resize -> patches
//! ```
//!
//! Shapes: `t` number of groups of `tp` frames, `gh`, `gw` number of patches along the height and
//! width, `p` patch size in pixels; `pixel_values` are `[t * gh * gw, 3 * tp * p * p]`.
//!
//! A list of frames without a frame rate counts as sampled already. All frames of a video must
//! have the same size. The last frame is repeated to fill the last group. [`Clip`] holds what the
//! prompt needs of a video; it is read from headers only.

mod config;
#[cfg(feature = "video")]
mod file;
mod sampling;
mod smart_resize;

use std::num::NonZeroU32;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(feature = "video")]
use config::Limits;
use config::Settings;
pub use config::{VideoConfig, VideoConfigError, VideoMarks};
#[cfg(feature = "video")]
use file::VideoFile;
use sampling::{Sampling, frames_between};
use smart_resize::smart_resize;

use crate::batch::{MediaRef, MediumKind, Patches, VideoLimits, VideoRef};
use crate::data::media::image::{
    ImageError, ImageProcessor, MAX_PIXELS, Pixels, Rgb, patchify, resize, unpatchify,
};
use crate::net::UrlImages;

/// Loads videos as normalised patches, with the settings of one model folder. All loader workers
/// share one processor. Each call does its work on the calling thread.
#[derive(Debug, Clone)]
pub struct VideoProcessor {
    settings: Settings,
    images: ImageProcessor,
}

/// Grid and timestamps of a video, which determine its tokens in the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    /// Number of frame groups, and of patches along the height and width: `[t, gh, gw]`.
    pub grid_thw: [u32; 3],
    /// Time of each frame group in seconds from the start of the video, `[t]`.
    pub timestamps: Vec<f64>,
}

/// Sampled frames of a video and their target size.
struct Plan {
    /// Indices of the sampled frames, ascending.
    indices: Vec<usize>,
    clip: Clip,
    /// `[height, width]` of the frames in pixels, before resizing.
    source: [u32; 2],
    /// `[height, width]` of the frames in pixels, after resizing.
    target: [u32; 2],
}

impl VideoProcessor {
    /// Reads the settings of a model folder; `config` overrides them. `images` must be the image
    /// processor of the same folder.
    pub fn from_folder(
        folder: &Path,
        config: &VideoConfig,
        images: &ImageProcessor,
    ) -> Result<Self, VideoConfigError> {
        let settings = Settings::read(folder, config, images)?;
        Ok(Self { settings, images: images.clone() })
    }

    /// The settings that decide the frames and patches of a video.
    pub(in crate::data) fn key(&self) -> String {
        self.settings.key()
    }

    /// Downloads frames by URL, which are refused otherwise.
    pub(in crate::data) fn set_urls(&mut self, images: Arc<UrlImages>) {
        self.images.set_urls(images);
    }

    /// Returns the clip that [`Self::load`] would return. Reads only the header of the file, or of
    /// the first frame of a list.
    pub fn clip(&self, video: &VideoRef) -> Result<Clip, VideoError> {
        match video {
            VideoRef::Frames { frames, fps, limits } => {
                Ok(self.plan_list(frames, *fps, limits)?.clip)
            }
            #[cfg(feature = "video")]
            VideoRef::File { root, path, fps, limits } => {
                let file = VideoFile::open(root, path, self.settings.limits)?;
                Ok(self.plan_file(&file, *fps, limits)?.clip)
            }
            #[cfg(not(feature = "video"))]
            VideoRef::File { path, .. } => Err(VideoError::NotBuilt { path: path.clone() }),
        }
    }

    /// Decodes the sampled frames into normalised patches.
    pub fn load(&self, video: &VideoRef) -> Result<(Clip, Patches), VideoError> {
        match video {
            VideoRef::Frames { frames, fps, limits } => {
                let plan = self.plan_list(frames, *fps, limits)?;
                let read = |index: &usize| {
                    let frame = index + 1;
                    let pixels = self
                        .images
                        .upright_pixels(&frames[*index])
                        .map_err(|cause| VideoError::Frame { frame, cause })?;
                    plan.resized(pixels, frame)
                };
                let pixels = plan.indices.iter().map(read).collect::<Result<Vec<_>, _>>()?;
                Ok(self.patches(plan, &pixels))
            }
            #[cfg(feature = "video")]
            VideoRef::File { root, path, fps, limits } => {
                let file = VideoFile::open(root, path, self.settings.limits)?;
                let plan = self.plan_file(&file, *fps, limits)?;
                let mut pixels = Vec::with_capacity(plan.indices.len());
                file.decode(&plan.indices, |frame, index| {
                    pixels.push(plan.resized(frame, index + 1)?);
                    Ok(())
                })?;
                Ok(self.patches(plan, &pixels))
            }
            #[cfg(not(feature = "video"))]
            VideoRef::File { path, .. } => Err(VideoError::NotBuilt { path: path.clone() }),
        }
    }

    /// Converts patches back to the resized frames.
    pub fn pixels(&self, patches: &Patches) -> Vec<Pixels> {
        let frames = unpatchify(patches, self.images.patch_shape(), &self.settings.normalise);
        frames.into_iter().map(Pixels::from).collect()
    }

    /// Settings that determine the clip of a video, as text. The length cache hashes it to detect
    /// changed settings.
    pub(in crate::data) fn limits(&self) -> String {
        let Settings { sampling, budget, marks, .. } = &self.settings;
        format!("{sampling:?} {budget:?} {marks:?}")
    }

    /// Placement of the vision start and end tokens around the frames.
    pub(in crate::data) fn marks(&self) -> VideoMarks {
        self.settings.marks
    }

    fn plan_list(
        &self,
        frames: &[MediaRef],
        fps: Option<f64>,
        limits: &VideoLimits,
    ) -> Result<Plan, VideoError> {
        let first = frames.first().ok_or(VideoError::TooShort { frames: 0 })?;
        let (sampling, count) = self.settings.sampling.of_video(None, limits);
        let rate = fps.unwrap_or(sampling.fps);
        let among = between(frames.len(), rate, limits)?;
        let indices = match (count, fps) {
            (Some(count), _) => Sampling::of_count(among.len(), count),
            (None, Some(rate)) => sampling.of_clip(among.len(), rate),
            (None, None) => sampling.of_sampled(among.len()),
        };
        let size = self.images.upright_size(first);
        let size = size.map_err(|cause| VideoError::Frame { frame: 1, cause })?;
        self.plan(shifted(indices, among.start), rate, size, limits)
    }

    #[cfg(feature = "video")]
    fn plan_file(
        &self,
        file: &VideoFile,
        fps: Option<f64>,
        limits: &VideoLimits,
    ) -> Result<Plan, VideoError> {
        let (sampling, count) = self.settings.sampling.of_video(fps, limits);
        let among = between(file.total(), file.rate(), limits)?;
        let indices = match count {
            Some(count) => Sampling::of_count(among.len(), count),
            None => sampling.of_clip(among.len(), file.rate()),
        };
        self.plan(shifted(indices, among.start), file.rate(), file.size(), limits)
    }

    /// `rate` is in frames per second; `source` is `[height, width]` in pixels.
    fn plan(
        &self,
        indices: Vec<usize>,
        rate: f64,
        source: [u32; 2],
        limits: &VideoLimits,
    ) -> Result<Plan, VideoError> {
        let temporal = self.images.temporal_patch_size() as usize;
        let frames = indices.len();
        if frames < temporal {
            return Err(VideoError::TooShort { frames });
        }
        let factor = self.images.patch_size() * self.images.merge_size();
        let shape = limits.resized.map_or(source, |sides| sides.map(NonZeroU32::get));
        let [height, width] = shape;
        let budget = self.settings.budget.of_video(frames, limits);
        let target = smart_resize(frames, shape, temporal, factor, budget)
            .ok_or(VideoError::AspectRatio { width, height })?;
        let [rows, columns] = target.map(|side| side / self.images.patch_size());
        let grid_thw = [frames.div_ceil(temporal) as u32, rows, columns];
        let timestamps = sampling::timestamps(&indices, rate, temporal);
        Ok(Plan { indices, clip: Clip { grid_thw, timestamps }, source, target })
    }

    fn patches(&self, plan: Plan, frames: &[Rgb]) -> (Clip, Patches) {
        let shape = self.images.patch_shape();
        let pixel_values = patchify(frames, shape, &self.settings.normalise); // [t * gh * gw, 3 * tp * p * p]
        let grid_thw = plan.clip.grid_thw;
        (plan.clip, Patches { pixel_values, grid_thw, kind: MediumKind::Video })
    }
}

/// Returns the frames between `video_start` and `video_end`.
fn between(total: usize, rate: f64, limits: &VideoLimits) -> Result<Range<usize>, VideoError> {
    let among = frames_between(total, rate, limits);
    if among.is_empty() && total > 0 {
        let seconds = total as f64 / rate;
        return Err(VideoError::EmptyRange { start: limits.start, end: limits.end, seconds });
    }
    Ok(among)
}

/// Adds the index of the first frame of a range to indices within the range.
fn shifted(indices: Vec<usize>, first: usize) -> Vec<usize> {
    indices.into_iter().map(|index| index + first).collect()
}

impl Plan {
    /// Resizes a frame to the target size. `frame` is its number in the video, starting at 1.
    fn resized(&self, pixels: Rgb, frame: usize) -> Result<Rgb, VideoError> {
        let found = [pixels.height as u32, pixels.width as u32];
        if found != self.source {
            let [expected_height, expected_width] = self.source;
            let [height, width] = found;
            return Err(VideoError::FrameSize {
                frame,
                width,
                height,
                expected_width,
                expected_height,
            });
        }
        let [height, width] = self.target;
        Ok(resize(pixels, height, width))
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
    fn of_path(path: &Path, cause: ImageError) -> Self {
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
            Self::TooShort { .. } => "list more frames, or use an image instead of a video",
            Self::EmptyRange { .. } => "correct `video_start` and `video_end`, in seconds",
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
            Self::AspectRatio { .. } => "video_aspect_ratio",
        }
    }
}
