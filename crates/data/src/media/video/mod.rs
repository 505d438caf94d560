//! Video processing: sample frames, decode, resize, normalise and cut into patches.
//!
//! ```text
//! VideoRef -> number, rate and size of frames -> sampled indices -> RGB -> resize -> patches
//! ```
//!
//! Shapes: `t` number of groups of `tp` frames, `gh`, `gw` number of patches along the height and
//! width, `p` patch size in pixels; `pixel_values` are `[t * gh * gw, 3 * tp * p * p]`.
//!
//! A list of frames without a frame rate, or with `sample_fps`, counts as sampled already. All frames of a video must
//! have the same size. The last frame is repeated to fill the last group. [`Clip`] holds what the
//! prompt needs of a video; it is read from headers only.

mod config;
mod error;
#[cfg(feature = "video")]
mod file;
mod sampling;

use std::num::NonZeroU32;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "video")]
use config::VideoFileLimits;
use config::VideoSettings;
pub use config::{VideoConfig, VideoMarks};
pub use error::VideoError;
#[cfg(feature = "video")]
use file::VideoFile;
use sampling::{FrameSampling, Wanted, frames_between};

use crate::media::image::{
    ImageGrid, ImageProcessor, Pixels, Rgb, SliceGrid, TargetSize, is_elongated, patchify, resize,
    unpatchify,
};
use crate::media::{ImageForm, MediaFamily, VideoForm};
use crate::model_folder::ModelFolderError;
use batch::{FrameRate, MediaRef, MediumKind, Patches, VideoLimits, VideoRef};
use net::UrlImages;

/// Loads videos as normalised patches, with the settings of one model folder. All loader workers
/// share one processor. Each call does its work on the calling thread.
#[derive(Debug, Clone)]
pub struct VideoProcessor {
    settings: VideoSettings,
    images: ImageProcessor,
}

/// Grid and times of a video, which determine its tokens in the prompt and their positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    /// Number of frame groups, and of patches along the height and width: `[t, gh, gw]`.
    pub grid_thw: [u32; 3],
    /// The slices that follow each frame.
    pub slices: Option<SliceGrid>,
    /// The times of the frame groups.
    pub times: GroupTimes,
    /// Number of pixels of the sampled frames, before resizing; once for each scan of the first
    /// frame.
    pub source_pixels: u64,
}

impl Clip {
    /// A frame group, with the slices that follow it.
    pub fn frame(&self) -> ImageGrid {
        let [_, height, width] = self.grid_thw;
        ImageGrid { whole: [1, height, width], slices: self.slices }
    }

    /// Number of patches, those of slices included.
    pub fn num_patches(&self) -> usize {
        self.grid_thw[0] as usize * self.frame().num_patches()
    }
}

/// The times of the frame groups of a video.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupTimes {
    /// The text has the time of each group in seconds from the start of the video, `[t]`.
    Text(Vec<f64>),
    /// The text has the number of each group, from 1.
    Numbers,
    /// The groups have no times, neither in the text nor as positions.
    Untimed,
    /// The groups have temporal positions at this distance.
    Positions(f32),
}

/// Largest temporal position of a video, from its start. Larger numbers have no exact position in
/// `f32`. A row has at most 2^20 tokens, and text and images advance the positions by one per token
/// at most, so only videos come near this limit. What follows such a video has rounded positions,
/// as in transformers.
const LAST_POSITION: f32 = 16_777_216.0; // 2^24

/// Number of scans that a JPEG among the frames may have in any case; encoders write about ten.
const USUAL_SCANS: u32 = 16;

/// Sampled frames of a video and their target size.
struct FramePlan {
    /// Indices of the sampled frames, ascending.
    indices: Vec<usize>,
    clip: Clip,
    /// `[height, width]` of the frames in pixels, before resizing.
    source: [u32; 2],
    /// `[height, width]` of the frames in pixels, after resizing.
    target: [u32; 2],
    /// Number of scans of the first frame, if it is a JPEG.
    num_scans: u32,
}

impl VideoProcessor {
    /// Reads the settings of a model folder; `config` overrides them. `images` must be the image
    /// processor of the same folder.
    pub fn from_folder(
        folder: &Path,
        config: &VideoConfig,
        images: &ImageProcessor,
    ) -> Result<Self, ModelFolderError> {
        let settings = VideoSettings::read(folder, config, images)?;
        Ok(Self { settings, images: images.clone() })
    }

    /// The settings that decide the frames and patches of a video.
    pub(crate) fn key(&self) -> String {
        self.settings.key()
    }

    /// Downloads frames by URL, which are refused otherwise.
    pub(crate) fn set_urls(&mut self, images: Arc<UrlImages>) {
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

    /// Decodes the sampled frames into normalised patches. If frames have slices, each frame has
    /// patches of its own, and those of its slices follow.
    pub fn load(&self, video: &VideoRef) -> Result<(Clip, Vec<Patches>), VideoError> {
        match video {
            VideoRef::Frames { frames, fps, limits } => {
                let plan = self.plan_list(frames, *fps, limits)?;
                let read = |index: &usize| {
                    let frame = index + 1;
                    let most = plan.num_scans.max(USUAL_SCANS);
                    let pixels = self.images.upright_pixels(&frames[*index], most);
                    let pixels = pixels.map_err(|cause| VideoError::Frame { frame, cause })?;
                    plan.resized(pixels, frame)
                };
                let pixels = plan.indices.iter().map(read).collect::<Result<Vec<_>, _>>()?;
                let pixels: Vec<Rgb> = pixels.into_iter().flatten().collect();
                Ok(self.patches(plan.clip, &pixels))
            }
            #[cfg(feature = "video")]
            VideoRef::File { root, path, fps, limits } => {
                let file = VideoFile::open(root, path, self.settings.limits)?;
                let plan = self.plan_file(&file, *fps, limits)?;
                let mut pixels = Vec::with_capacity(plan.indices.len());
                file.decode(&plan.indices, |frame, index| {
                    pixels.extend(plan.resized(frame, index + 1)?);
                    Ok(())
                })?;
                Ok(self.patches(plan.clip, &pixels))
            }
            #[cfg(not(feature = "video"))]
            VideoRef::File { path, .. } => Err(VideoError::NotBuilt { path: path.clone() }),
        }
    }

    /// Converts patches back to the resized frames or slices.
    pub fn pixels(&self, patches: &Patches) -> Vec<Pixels> {
        let frames = unpatchify(patches, self.images.patch_shape(), &self.settings.normalise);
        frames.into_iter().map(Pixels::from).collect()
    }

    /// Settings that determine the clip of a video, as text. The length cache hashes it to detect
    /// changed settings.
    pub(crate) fn limits(&self) -> String {
        self.settings.sizes_key()
    }

    pub(crate) fn family(&self) -> MediaFamily {
        self.settings.family
    }

    /// Placement of the vision start and end tokens around the frames.
    pub(crate) fn marks(&self) -> VideoMarks {
        self.settings.marks
    }

    fn plan_list(
        &self,
        frames: &[MediaRef],
        fps: Option<FrameRate>,
        limits: &VideoLimits,
    ) -> Result<FramePlan, VideoError> {
        let first = frames.first().ok_or(VideoError::TooShort { frames: 0 })?;
        let (sampling, count) = self.settings.sampling.of_video(None, limits);
        let rate = fps.map_or(sampling.fps, FrameRate::per_second);
        let among = between(frames.len(), rate, limits)?;
        let wanted = match (count, fps) {
            (Some(count), _) => Wanted::Count(count),
            (None, Some(FrameRate::Video(rate))) => Wanted::Rate(rate),
            (None, Some(FrameRate::Sampled(_)) | None) => Wanted::All,
        };
        let size = self.images.upright_size(first);
        let (size, num_scans) = size.map_err(|cause| VideoError::Frame { frame: 1, cause })?;
        let mut plan = self.plan((sampling, wanted), &among, rate, size, limits)?;
        plan.clip.source_pixels = plan.clip.source_pixels.saturating_mul(num_scans.into());
        Ok(FramePlan { num_scans, ..plan })
    }

    #[cfg(feature = "video")]
    fn plan_file(
        &self,
        file: &VideoFile,
        fps: Option<FrameRate>,
        limits: &VideoLimits,
    ) -> Result<FramePlan, VideoError> {
        let fps = fps.map(FrameRate::per_second);
        let (sampling, count) = self.settings.sampling.of_video(fps, limits);
        let among = between(file.total(), file.rate(), limits)?;
        let wanted = count.map_or(Wanted::Rate(file.rate()), Wanted::Count);
        self.plan((sampling, wanted), &among, file.rate(), file.size(), limits)
    }

    /// Samples the frames `among`. `rate` is in frames per second; `source` is `[height, width]` in
    /// pixels.
    fn plan(
        &self,
        (sampling, wanted): (FrameSampling, Wanted),
        among: &Range<usize>,
        rate: f64,
        source: [u32; 2],
        limits: &VideoLimits,
    ) -> Result<FramePlan, VideoError> {
        let temporal = self.images.temporal_patch_size() as usize;
        let family = &self.settings.family;
        let [min, max] = [limits.frame.min_pixels, limits.frame.max_pixels];
        let limit = match family.videos {
            VideoForm::NumberedFrames { .. } => {
                min.or(max).or(limits.total_pixels).and(Some("limits on pixels"))
            }
            VideoForm::SlicedFrames { .. } => min.and(Some("`min_pixels`")),
            VideoForm::Timestamps | VideoForm::OneRun { .. } => None,
        };
        // As for images, a size of the row precedes its limits.
        if let (Some(limit), None) = (limit, limits.resized) {
            return Err(VideoError::Pixels { limit });
        }
        let indices = sampling.indices(among.len(), wanted, family.videos, temporal);
        let frames = indices.len();
        if frames < temporal {
            return Err(VideoError::TooShort { frames });
        }
        let shape = limits.resized.map_or(source, |sides| sides.map(NonZeroU32::get));
        let [height, width] = shape;
        let target = self.target(frames, shape, limits);
        let TargetSize { whole: target, slices } =
            target.ok_or(VideoError::AspectRatio { width, height })?;
        let [rows, columns] = target.map(|side| side / self.images.patch_size());
        let grid_thw = [frames.div_ceil(temporal) as u32, rows, columns];
        let indices: Vec<usize> = indices.into_iter().map(|index| index + among.start).collect();
        let times = match family.videos {
            VideoForm::Timestamps => {
                GroupTimes::Text(sampling::timestamps(&indices, rate, temporal))
            }
            VideoForm::NumberedFrames { .. } => GroupTimes::Numbers,
            VideoForm::SlicedFrames { .. } => GroupTimes::Untimed,
            VideoForm::OneRun { tokens_per_second: None } => GroupTimes::Positions(1.0),
            // rounded to `f32` as in transformers
            VideoForm::OneRun { tokens_per_second: Some(tokens_per_second) } => {
                let rate = sampling::sampled_rate(frames, among.len(), rate);
                let step = tokens_per_second * (temporal as f64 / rate) as f32;
                let last = (grid_thw[0] - 1) as f32 * step;
                if last.is_nan() || last > LAST_POSITION {
                    let seconds = frames as f64 / rate;
                    let limit = LAST_POSITION / tokens_per_second;
                    return Err(VideoError::Duration { seconds, limit });
                }
                GroupTimes::Positions(step)
            }
        };
        let source_pixels = frames as u64 * source.map(u64::from).iter().product::<u64>();
        let clip = Clip { grid_thw, slices, times, source_pixels };
        Ok(FramePlan { indices, clip, source, target, num_scans: 1 })
    }

    /// The size of `num_frames` frames of `shape`, which is `[height, width]` in pixels, after
    /// resizing; `None` if they are too elongated.
    fn target(
        &self,
        num_frames: usize,
        shape: [u32; 2],
        limits: &VideoLimits,
    ) -> Option<TargetSize> {
        let VideoSettings { family, pixels, slices, .. } = &self.settings;
        if let ImageForm::Tiles(tile) = family.images {
            return Some(TargetSize::unsliced([tile.side; 2]));
        }
        if let Some(slices) = slices {
            let max_pixels = pixels.all.of_video(num_frames, limits).max_pixels; // of all frames
            let target = || slices.target(shape, max_pixels / num_frames as u64);
            return (!is_elongated(shape)).then(target);
        }
        let temporal = self.images.temporal_patch_size() as usize;
        let factor = self.images.patch_size() * self.images.merge_size();
        pixels.target(num_frames, shape, temporal, factor, limits).map(TargetSize::unsliced)
    }

    /// The patches of resized frames, each with its slices behind it.
    fn patches(&self, clip: Clip, frames: &[Rgb]) -> (Clip, Vec<Patches>) {
        let patches = |frames: &[Rgb], grid_thw, continues_medium| {
            let (shape, normalise) = (self.images.patch_shape(), &self.settings.normalise);
            let pixel_values = patchify(frames, shape, normalise); // [t * gh * gw, 3 * tp * p * p]
            Patches { pixel_values, grid_thw, kind: MediumKind::Video, continues_medium }
        };
        let Some(slices) = clip.slices.map(SliceGrid::grid) else {
            let all = patches(frames, clip.grid_thw, false);
            return (clip, vec![all]);
        };
        let [_, height, width] = clip.grid_thw;
        let both = |(at, images): (usize, &[Rgb])| {
            let (whole, cut) = images.split_at(1);
            [patches(whole, [1, height, width], at > 0), patches(cut, slices, true)]
        };
        let frames = frames.chunks(1 + slices[0] as usize).enumerate();
        let all = frames.flat_map(both).collect();
        (clip, all)
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

impl FramePlan {
    /// Resizes a frame to the target size, and cuts its slices. `frame` is its number in the video,
    /// starting at 1.
    fn resized(&self, pixels: Rgb, frame: usize) -> Result<Vec<Rgb>, VideoError> {
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
        let Some(slices) = self.clip.slices else {
            return Ok(vec![resize(pixels, height, width)]);
        };
        let mut all = vec![resize(pixels.clone(), height, width)];
        all.extend(slices.cut(pixels, height / self.clip.grid_thw[1]));
        Ok(all)
    }
}
