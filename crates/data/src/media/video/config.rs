//! Video settings from the config and from the model folder.

use std::path::Path;

use serde::{Deserialize, Serialize};
use settings::{Choice, section};

use super::sampling::{Budget, FrameSampling, PixelLimits};
use crate::media::image::{
    ImageProcessor, Normalise, PixelSteps, RESCALE_FACTORS, Size, SliceKeys, Slices,
};
use crate::media::{ImageForm, MediaFamily, VideoForm};
use crate::model_folder::{ModelFolderError, ProcessorFile};

/// The section `data.video` of the config.
///
/// A key that is `None` uses the value of the model folder, or of the published one if the folder
/// has none.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct VideoConfig {
    /// Frames to take per second of [video](video.md) (published value: 2)
    pub fps: Option<f64>,
    /// Minimum frames, if the video has that many (published value: 4)
    pub min_frames: Option<u32>,
    /// Maximum frames, spread over the whole video (published value: 768)
    pub max_frames: Option<u32>,
    /// Minimum pixels of all frames together (published value of Qwen3-VL: 4,096)
    pub min_pixels: Option<u64>,
    /// Maximum pixels of all frames together (published value of Qwen3-VL: 25,165,824)
    pub max_pixels: Option<u64>,
    /// Whether the vision start and end tokens around a whole video are kept (`nested`) or removed
    /// (`flat`)
    #[key(default)]
    pub marks: VideoMarks,
    /// Maximum seconds for one video file; a slower one is rejected (`video_timeout`)
    #[key(default = 60.0)]
    pub timeout_s: f64,
    /// Maximum frames in a video file; a longer one is rejected (`video_too_long`)
    #[key(default = 36_000)]
    pub max_source_frames: u32,
}

#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "video"), expect(dead_code, reason = "limits apply to video files only"))]
pub(super) struct VideoFileLimits {
    pub(super) timeout_s: f64,
    pub(super) max_source_frames: usize,
}

/// Placement of the vision start and end tokens of a video. Each frame group always has its own
/// pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum VideoMarks {
    /// Keeps the chat template's pair around all frame groups, as in transformers 5.
    #[default]
    Nested,
    /// Removes the chat template's pair, which saves two tokens, as in transformers 4.57.
    Flat,
}

/// Limits that the video processors of some families do not know.
const LIMITS: [&str; 4] = ["min_pixels", "max_pixels", "min_frames", "max_frames"];
const PUBLISHED_FRAMES: [u32; 2] = [4, 768]; // minimum, maximum
const CLIP_MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const CLIP_STD: [f32; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

/// Values of a folder that has none.
struct Published {
    /// Number of frames per second.
    fps: f64,
    /// Minimum and maximum number of frames.
    frames: [u32; 2],
    /// Minimum and maximum, of all frames together or of each frame.
    pixels: [u64; 2],
    mean: [f32; 3],
    std: [f32; 3],
}

impl Published {
    fn of(form: VideoForm) -> Self {
        match form {
            // of the published `video_preprocessor_config.json`
            VideoForm::Timestamps => Self {
                fps: 2.0,
                frames: PUBLISHED_FRAMES,
                pixels: [4096, 25_165_824],
                mean: [0.5; 3],
                std: [0.5; 3],
            },
            // of `Qwen2VLVideoProcessor` in transformers
            VideoForm::OneRun { .. } => Self {
                fps: 2.0,
                frames: PUBLISHED_FRAMES,
                pixels: [128 * 28 * 28, 768 * 28 * 28],
                mean: CLIP_MEAN,
                std: CLIP_STD,
            },
            // Numbers of frames with which InternVL was trained; the processor of transformers takes
            // all frames. Its size of a frame is fixed.
            VideoForm::NumberedFrames { .. } => Self {
                fps: 2.0,
                frames: [8, 32],
                pixels: [1, u64::MAX],
                mean: CLIP_MEAN,
                std: CLIP_STD,
            },
            // of `MiniCPMV4_6VideoProcessor` in transformers, which has no limits on pixels
            VideoForm::SlicedFrames { .. } => Self {
                fps: 1.0,
                frames: [1, 128],
                pixels: [1, u64::MAX],
                mean: [0.5; 3],
                std: [0.5; 3],
            },
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct VideoSettings {
    pub(super) sampling: FrameSampling,
    pub(super) family: MediaFamily,
    pub(super) pixels: PixelLimits,
    /// How frames are cut, if the family has [`VideoForm::SlicedFrames`].
    pub(super) slices: Option<Slices>,
    pub(super) normalise: Normalise,
    pub(super) marks: VideoMarks,
    #[cfg_attr(not(feature = "video"), expect(dead_code, reason = "used for video files only"))]
    pub(super) limits: VideoFileLimits,
}

impl VideoSettings {
    /// The settings that decide the frames and patches of a video.
    pub(super) fn key(&self) -> String {
        let Self { sampling, pixels, normalise, marks, .. } = self;
        format!("{sampling:?} {:?} {normalise:?} {marks:?}{}", pixels.all, self.form_key())
    }

    /// The settings that decide the frames of a video and their size.
    pub(super) fn sizes_key(&self) -> String {
        let Self { sampling, pixels, marks, .. } = self;
        format!("{sampling:?} {:?} {marks:?}{}", pixels.all, self.form_key())
    }

    fn form_key(&self) -> String {
        match self.family.videos {
            VideoForm::Timestamps => String::new(),
            VideoForm::SlicedFrames { .. } => format!(" {:?}", self.slices),
            form => format!(" {form:?} {:?}", self.pixels.frame),
        }
    }
}

/// The keys of the model folder's file that are used; others are ignored.
#[derive(Debug, Default, Deserialize)]
struct VideoPreprocessorFile {
    size: Option<Size>,
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    fps: Option<f64>,
    min_frames: Option<u32>,
    max_frames: Option<u32>,
    max_num_frames: Option<u32>,
    stack_frames: Option<u32>,
    patch_size: Option<u32>,
    temporal_patch_size: Option<u32>,
    merge_size: Option<u32>,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
    rescale_factor: Option<f64>,
    cap_pixels_per_frame: Option<bool>,
    #[serde(flatten)]
    slices: SliceKeys,
    #[serde(flatten)]
    steps: PixelSteps,
}

impl VideoPreprocessorFile {
    /// The keys that the processor of [`VideoForm::SlicedFrames`] reads; it ignores limits of other
    /// families.
    fn of_slices(self) -> Self {
        Self {
            size: None,
            min_pixels: None,
            max_pixels: None,
            fps: None,
            min_frames: None,
            max_frames: self.max_num_frames,
            temporal_patch_size: None,
            merge_size: None,
            cap_pixels_per_frame: None,
            ..self
        }
    }
}

impl VideoSettings {
    /// Reads the settings of the model folder; `config` overrides them.
    ///
    /// `images` must be the image processor of the same folder. Patch sizes must agree, because
    /// one vision encoder processes the patches of videos and of images.
    pub(super) fn read(
        folder: &Path,
        config: &VideoConfig,
        images: &ImageProcessor,
    ) -> Result<Self, ModelFolderError> {
        let family = MediaFamily::of_folder(folder)?;
        let published = "video_preprocessor_config.json";
        // Published folders of models with `VideoForm::OneRun` have neither this file nor a section,
        // and the settings of images apply to each frame.
        let names = [published, "preprocessor_config.json"];
        let names = if family.videos == VideoForm::Timestamps { &names[..1] } else { &names };
        let unknown = match family.videos {
            VideoForm::OneRun { .. } => &LIMITS[4..],
            VideoForm::Timestamps => &LIMITS[..2],
            VideoForm::NumberedFrames { .. } | VideoForm::SlicedFrames { .. } => &LIMITS[..],
        };
        ProcessorFile::read(folder, "video_processor", names)?
            .unwrap_or_else(|| ProcessorFile::empty(folder.join(published)))
            .settings(folder, unknown, |path, file| {
                Self::of_file(path, file, family, config, images)
            })
    }

    fn of_file(
        path: &Path,
        mut file: VideoPreprocessorFile,
        family: MediaFamily,
        config: &VideoConfig,
        images: &ImageProcessor,
    ) -> Result<Self, ModelFolderError> {
        if let VideoForm::SlicedFrames { .. } = family.videos {
            file = file.of_slices();
        }
        let published = Published::of(family.videos);
        let normalise = check_file(path, &file, images, &published)?;
        let slices = slices(path, &file, family.images, images)?;
        let VideoPreprocessorFile {
            size, min_pixels, max_pixels, fps, min_frames, max_frames, ..
        } = file;
        let size = size.unwrap_or_default();
        let VideoConfig { marks, timeout_s, max_source_frames, .. } = *config;
        let of_folder = Budget {
            min_pixels: min_pixels.or(size.shortest_edge).unwrap_or(published.pixels[0]),
            max_pixels: max_pixels.or(size.longest_edge).unwrap_or(published.pixels[1]),
        };
        let over = |otherwise: Budget| Budget {
            min_pixels: config.min_pixels.unwrap_or(otherwise.min_pixels),
            max_pixels: config.max_pixels.unwrap_or(otherwise.max_pixels),
        };
        let pixels = match family.videos {
            VideoForm::OneRun { .. } => PixelLimits {
                all: over(Budget { min_pixels: 1, max_pixels: u64::MAX }),
                frame: Some(of_folder),
            },
            // `check_limits` refuses those of the config that have no effect
            _ => PixelLimits { all: over(of_folder), frame: None },
        };
        let min_frames = config.min_frames.or(min_frames).unwrap_or(published.frames[0]);
        let max_frames = config.max_frames.or(max_frames).unwrap_or(published.frames[1]);
        let fps = config.fps.or(fps).unwrap_or(published.fps);
        let setting = |key, found: String, expected| {
            Err(ModelFolderError::VideoSetting { key, found, expected })
        };
        if !(fps.is_finite() && fps > 0.0) {
            return setting("fps", fps.to_string(), "a number of frames per second above 0");
        }
        if max_frames < images.temporal_patch_size() {
            let expected = "at least the number of frames in a patch (`temporal_patch_size`)";
            return setting("max_frames", max_frames.to_string(), expected);
        }
        if !(timeout_s > 0.0 && timeout_s <= 86_400.0) {
            return setting(
                "timeout_s",
                timeout_s.to_string(),
                "seconds above 0, at most 86400 (a day)",
            );
        }
        if min_frames > max_frames {
            return setting("min_frames", min_frames.to_string(), "at most `max_frames`");
        }
        check_limits(
            path,
            [min_pixels, size.shortest_edge, max_pixels],
            of_folder,
            config,
            (pixels, family.videos),
        )?;
        if marks == VideoMarks::Flat && family.videos != VideoForm::Timestamps {
            let expected = "`nested`: a video of this model has no pair of tokens to remove";
            return setting("marks", "flat".to_owned(), expected);
        }
        let (min_frames, max_frames) = (min_frames as usize, max_frames as usize);
        let sampling = FrameSampling { fps, min_frames, max_frames };
        let limits = VideoFileLimits { timeout_s, max_source_frames: max_source_frames as usize };
        Ok(Self { sampling, family, pixels, slices, normalise, marks, limits })
    }
}

/// Checks the limits on pixels. The error names the wrong value where it is written: in `config` or
/// in the file at `path`, which has `min_pixels`, `size.shortest_edge` and `max_pixels`.
fn check_limits(
    path: &Path,
    file: [Option<u64>; 3],
    of_folder: Budget,
    config: &VideoConfig,
    (pixels, form): (PixelLimits, VideoForm),
) -> Result<(), ModelFolderError> {
    let of_config = config.min_pixels.or(config.max_pixels);
    if let (VideoForm::NumberedFrames { .. }, Some(found)) = (form, of_config) {
        let key = if config.min_pixels.is_some() { "min_pixels" } else { "max_pixels" };
        let (found, expected) =
            (found.to_string(), "`null`: a frame of this model has a fixed size");
        return Err(ModelFolderError::VideoSetting { key, found, expected });
    }
    if let (VideoForm::SlicedFrames { .. }, Some(found)) = (form, config.min_pixels) {
        let (key, found) = ("min_pixels", found.to_string());
        let expected = "`null`: the model scales every frame to a fixed area";
        return Err(ModelFolderError::VideoSetting { key, found, expected });
    }
    if (pixels.frame.is_some() || of_config.is_none()) && !of_folder.is_valid() {
        let Budget { min_pixels: min, max_pixels: max } = of_folder;
        let of_min = || format!("at least 1 and at most the maximum of {max}");
        let of_max = || format!("at least the minimum of {min}");
        // The published value of a key that the file lacks is not the wrong one.
        let (key, found, expected) = match file {
            [Some(_), _, _] => ("min_pixels", min, of_min()),
            [None, Some(_), _] => ("size.shortest_edge", min, of_min()),
            [None, None, Some(_)] => ("max_pixels", max, of_max()),
            [None, None, None] => ("size.longest_edge", max, of_max()),
        };
        return Err(ModelFolderError::value(path, key, found.to_string(), expected));
    }
    if pixels.all.is_valid() {
        return Ok(());
    }
    let Budget { min_pixels: min, max_pixels: max } = pixels.all;
    let (key, found, expected) = match config.min_pixels {
        Some(_) => ("min_pixels", min, "at least 1 and at most `max_pixels`"),
        None => ("max_pixels", max, "at least the minimum, which the model folder sets"),
    };
    Err(ModelFolderError::VideoSetting { key, found: found.to_string(), expected })
}

/// The slices of frames of a model whose images have slices too.
fn slices(
    path: &Path,
    file: &VideoPreprocessorFile,
    form: ImageForm,
    images: &ImageProcessor,
) -> Result<Option<Slices>, ModelFolderError> {
    let ImageForm::Slices(sizes) = form else { return Ok(None) };
    if let Some(found) = file.stack_frames.filter(|frames| *frames > 1) {
        let expected = "1: composites of several frames are not supported".to_owned();
        return Err(ModelFolderError::value(path, "stack_frames", found.to_string(), expected));
    }
    // The processor numbers videos if it numbers images.
    let is_numbered = images.numbers_images();
    file.slices.read(path, file.patch_size, sizes, is_numbered).map(Some)
}

/// Checks the keys of the file that `data.video` does not override, and returns the normalisation.
fn check_file(
    path: &Path,
    file: &VideoPreprocessorFile,
    images: &ImageProcessor,
    published: &Published,
) -> Result<Normalise, ModelFolderError> {
    let VideoPreprocessorFile {
        patch_size,
        temporal_patch_size,
        merge_size,
        image_mean,
        image_std,
        rescale_factor,
        cap_pixels_per_frame,
        ..
    } = *file;
    file.steps.check(path)?;
    let bad = |key, found: String, expected: String| {
        Err(ModelFolderError::value(path, key, found, expected))
    };
    for (key, found, expected) in [
        ("patch_size", patch_size, images.patch_size()),
        ("temporal_patch_size", temporal_patch_size, images.temporal_patch_size()),
        ("merge_size", merge_size, images.merge_size()),
    ] {
        if let Some(found) = found.filter(|found| *found != expected) {
            return bad(key, found.to_string(), format!("`{expected}` as for images"));
        }
    }
    if cap_pixels_per_frame == Some(true) {
        let expected = "`false` (limit pixels by `data.video.max_pixels` instead)".to_owned();
        return bad("cap_pixels_per_frame", "true".to_owned(), expected);
    }
    let rescale = rescale_factor.unwrap_or(1.0 / 255.0);
    if !RESCALE_FACTORS.contains(&rescale) {
        return bad("rescale_factor", rescale.to_string(), "a number from 1e-5 to 1".to_owned());
    }
    let mean = image_mean.unwrap_or(published.mean);
    let std = image_std.unwrap_or(published.std);
    let white = 255.0 * rescale as f32 * 1.001; // as for images
    let in_range = |values: &[f32; 3], low| values.iter().all(|v| (low..=white).contains(v));
    if !in_range(&mean, 0.0) || !in_range(&std, white / 1000.0) {
        let expected = "numbers up to 255 * `rescale_factor`, above 0 for `image_std`".to_owned();
        return bad("image_mean`, `image_std", format!("{mean:?}, {std:?}"), expected);
    }
    Ok(Normalise::new(mean, std, (1.0 / rescale) as f32))
}

#[cfg(test)]
mod tests;
