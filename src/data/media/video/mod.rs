//! Videos to patches: choose frames, decode, resize, normalise, cut.
//!
//! ```text
//! VideoRef -> number, rate and size of its frames -> indices -> RGB -> smart_resize -> patches
//! ```
//!
//! Shapes: `t` groups of `tp` frames, `gh`, `gw` patches a side, `p` patch size in pixels;
//! `pixel_values` are `[t * gh * gw, 3 * tp * p * p]`.
//! Choices: a list of frames without a rate is taken to be sampled already; its frames have one
//! size; an odd last frame is repeated. What the text shows of a video is [`Clip`], which is known
//! from headers alone.

mod config;
#[cfg(feature = "video")]
mod file;
mod sampling;
mod smart_resize;

use std::path::{Path, PathBuf};

#[cfg(feature = "video")]
use config::Limits;
use config::Settings;
pub use config::{VideoConfig, VideoConfigError, VideoMarks};
#[cfg(feature = "video")]
use file::VideoFile;
use smart_resize::smart_resize;

use crate::batch::{MediaRef, Patches, VideoRef};
use crate::data::media::image::{
    ImageError, ImageProcessor, Pixels, Rgb, patchify, resize, unpatchify, upright_pixels,
    upright_size,
};

/// Turns references to videos into patches, with the settings of one model. Shared by all loader
/// workers; each call runs on the calling thread.
#[derive(Debug, Clone)]
pub struct VideoProcessor {
    settings: Settings,
    images: ImageProcessor,
}

/// What the text shows of a video, known before its pixels are.
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    /// Groups of frames, and patches a side.
    pub grid_thw: [u32; 3],
    /// Seconds from the start of the video, one a group of frames.
    pub timestamps: Vec<f64>,
}

/// Which frames are taken, and to which size they are brought.
struct Plan {
    indices: Vec<usize>,
    clip: Clip,
    /// `[height, width]` of the frames, before and after.
    source: [u32; 2],
    target: [u32; 2],
}

impl VideoProcessor {
    /// Reads the settings of a model folder, whose images `images` reads; `config` wins.
    pub fn from_folder(
        folder: &Path,
        config: &VideoConfig,
        images: &ImageProcessor,
    ) -> Result<Self, VideoConfigError> {
        let settings = Settings::read(folder, config, images)?;
        Ok(Self { settings, images: images.clone() })
    }

    /// What [`Self::load`] will show, from headers alone: of a list, the first frame's.
    pub fn clip(&self, video: &VideoRef) -> Result<Clip, VideoError> {
        match video {
            VideoRef::Frames { frames, fps } => Ok(self.plan_list(frames, *fps)?.clip),
            #[cfg(feature = "video")]
            VideoRef::File { root, path, fps } => {
                let file = VideoFile::open(root, path, self.settings.limits)?;
                Ok(self.plan_file(&file, *fps)?.clip)
            }
            #[cfg(not(feature = "video"))]
            VideoRef::File { path, .. } => Err(VideoError::NotBuilt { path: path.clone() }),
        }
    }

    /// Decodes the chosen frames into normalised patches.
    pub fn load(&self, video: &VideoRef) -> Result<(Clip, Patches), VideoError> {
        match video {
            VideoRef::Frames { frames, fps } => {
                let plan = self.plan_list(frames, *fps)?;
                let read = |index: &usize| {
                    let frame = index + 1;
                    let pixels = upright_pixels(&frames[*index])
                        .map_err(|cause| VideoError::Frame { frame, cause })?;
                    plan.resized(pixels, frame)
                };
                let pixels = plan.indices.iter().map(read).collect::<Result<Vec<_>, _>>()?;
                Ok(self.patches(plan, &pixels))
            }
            #[cfg(feature = "video")]
            VideoRef::File { root, path, fps } => {
                let file = VideoFile::open(root, path, self.settings.limits)?;
                let plan = self.plan_file(&file, *fps)?;
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

    /// The pixels that a video's patches were made of, frame by frame.
    pub fn pixels(&self, patches: &Patches) -> Vec<Pixels> {
        let frames = unpatchify(patches, self.images.patch_shape(), &self.settings.normalise);
        frames.into_iter().map(Pixels::from).collect()
    }

    /// Whatever decides the clip of a video, in words.
    pub(in crate::data) fn limits(&self) -> String {
        let Settings { sampling, budget, marks, .. } = &self.settings;
        format!("{sampling:?} {budget:?} {marks:?}")
    }

    /// What stands around the frames.
    pub(in crate::data) fn marks(&self) -> VideoMarks {
        self.settings.marks
    }

    fn plan_list(&self, frames: &[MediaRef], fps: Option<f64>) -> Result<Plan, VideoError> {
        let first = frames.first().ok_or(VideoError::TooShort { frames: 0 })?;
        let sampling = self.settings.sampling;
        let indices = match fps {
            Some(rate) => sampling.of_clip(frames.len(), rate),
            None => sampling.of_sampled(frames.len()),
        };
        let size = upright_size(first).map_err(|cause| VideoError::Frame { frame: 1, cause })?;
        self.plan(indices, fps.unwrap_or(sampling.fps), size)
    }

    #[cfg(feature = "video")]
    fn plan_file(&self, file: &VideoFile, fps: Option<f64>) -> Result<Plan, VideoError> {
        let sampling = self.settings.sampling;
        let sampling = sampling::Sampling { fps: fps.unwrap_or(sampling.fps), ..sampling };
        let indices = sampling.of_clip(file.total(), file.rate());
        self.plan(indices, file.rate(), file.size())
    }

    /// `rate` frames make a second; `source` is `[height, width]`.
    fn plan(&self, indices: Vec<usize>, rate: f64, source: [u32; 2]) -> Result<Plan, VideoError> {
        let temporal = self.images.temporal_patch_size() as usize;
        let frames = indices.len();
        if frames < temporal {
            return Err(VideoError::TooShort { frames });
        }
        let factor = self.images.patch_size() * self.images.merge_size();
        let [height, width] = source;
        let target = smart_resize(frames, source, temporal, factor, self.settings.budget)
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
        (plan.clip, Patches { pixel_values, grid_thw })
    }
}

impl Plan {
    /// A frame at its final size; `frame` counts from 1.
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

/// Why a video cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VideoError {
    /// Files are read by a feature of the build.
    #[error("video `{}` is a file, and this build reads lists of frames only", .path.display())]
    NotBuilt {
        /// As the row writes it.
        path: PathBuf,
    },
    /// There is no such file.
    #[error("video `{}` does not exist in `{}`", .path.display(), .root.display())]
    Missing {
        /// As the row writes it.
        path: PathBuf,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// The path leads out of its root, by itself or by a link.
    #[error("video `{}` is outside of `image_root` `{}`", .path.display(), .root.display())]
    EscapesRoot {
        /// As the row writes it.
        path: PathBuf,
        /// The folder that it must stay in.
        root: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read video `{}`: {problem}", .path.display())]
    Read {
        /// As the row writes it.
        path: PathBuf,
        /// What the system says.
        problem: String,
    },
    /// The file is damaged, or no video.
    #[error("video `{}` is broken: {problem}", .path.display())]
    Broken {
        /// As the row writes it.
        path: PathBuf,
        /// What was found.
        problem: String,
    },
    /// The work on it has to end some time.
    #[error("video `{}` takes longer than {seconds} s", .path.display())]
    Timeout {
        /// As the row writes it.
        path: PathBuf,
        /// `data.video.timeout_s`.
        seconds: f64,
    },
    /// More frames than are worth decoding.
    #[error("video `{}` has {frames} frames, expected at most {limit}", .path.display())]
    TooLong {
        /// As the row writes it.
        path: PathBuf,
        /// As its header says.
        frames: usize,
        /// `data.video.max_source_frames`.
        limit: usize,
    },
    /// Frames of more pixels than are worth decoding, or of none.
    #[error("video `{}` has frames of {width} x {height}", .path.display())]
    TooLarge {
        /// As the row writes it.
        path: PathBuf,
        /// In pixels.
        width: u32,
        /// In pixels.
        height: u32,
    },
    /// The model knows no videos.
    #[error("the model folder names no token for videos (`video_token_id` in config.json)")]
    NoToken,
    /// A frame that cannot be used.
    #[error("frame {frame}: {cause}")]
    Frame {
        /// Which of the list, starting at 1.
        frame: usize,
        /// Why.
        cause: ImageError,
    },
    /// Frames of a video are one tensor.
    #[error(
        "frame {frame} is {width} x {height}, expected {expected_width} x {expected_height} as the first"
    )]
    FrameSize {
        /// Which of the video, starting at 1.
        frame: usize,
        /// In pixels, upright.
        width: u32,
        /// In pixels, upright.
        height: u32,
        /// Of the first frame.
        expected_width: u32,
        /// Of the first frame.
        expected_height: u32,
    },
    /// Not enough to fill one patch in time.
    #[error("too few frames: {frames}, expected at least 2 (one patch in time)")]
    TooShort {
        /// Frames that could be taken.
        frames: usize,
    },
    /// Too elongated for the model.
    #[error("frames are {width} x {height}, expected sides of a ratio of at most 200")]
    AspectRatio {
        /// In pixels, upright.
        width: u32,
        /// In pixels, upright.
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
            ImageError::Read { source, .. } => Self::Read { path, problem: source.to_string() },
            other => Self::Read { path, problem: other.to_string() },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotBuilt { .. } => {
                "build with `--features video` (needs FFmpeg's development files, see docs/video.md), or list its frames as images"
            }
            Self::Missing { .. } => {
                "paths are relative to `image_root` of the data set, by default the folder of its file"
            }
            Self::EscapesRoot { .. } => "move the video, or set `image_root` to a folder above it",
            Self::Read { .. } => "the path must lead to a file that you may read",
            Self::Broken { .. } => "copy or convert the video again",
            Self::Timeout { .. } => "shorten or scale the video, or raise `data.video.timeout_s`",
            Self::TooLong { .. } => "cut the video, or raise `data.video.max_source_frames`",
            Self::TooLarge { .. } => "scale the video",
            Self::NoToken => "use a model folder that knows videos, or remove the row",
            Self::Frame { cause, .. } => cause.hint(),
            Self::FrameSize { .. } => "bring all frames of the list to one size",
            Self::TooShort { .. } => "give more frames, or use an image",
            Self::AspectRatio { .. } => "cut or scale the video",
        }
    }

    /// A short key to count rejected samples by.
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
            Self::AspectRatio { .. } => "video_aspect_ratio",
        }
    }
}
