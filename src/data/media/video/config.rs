//! Video settings from the config and from the model folder.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::VideoConfigError;
use super::sampling::Sampling;
use super::smart_resize::{Budget, PixelLimits};
use crate::data::media::family::MediaFamily;
use crate::data::media::image::{ImageProcessor, Normalise, RESCALE_FACTORS, Size};
use crate::data::model_file::{ModelFileError, read_json_if_there};

/// The section `data.video` of the config.
///
/// A key that is `None` uses the value of the model folder, or of the published one if the folder has
/// none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VideoConfig {
    /// Number of frames to sample per second of video.
    pub fps: Option<f64>,
    /// Minimum number of sampled frames, if the video has as many.
    pub min_frames: Option<u32>,
    /// Maximum number of sampled frames; they are spread over the whole video.
    pub max_frames: Option<u32>,
    /// Minimum number of pixels of all sampled frames together; smaller videos are enlarged.
    pub min_pixels: Option<u64>,
    /// Maximum number of pixels of all sampled frames together; larger videos are reduced.
    pub max_pixels: Option<u64>,
    /// Placement of the vision start and end tokens around the frames.
    pub marks: VideoMarks,
    /// Maximum time to load one file, in seconds; a file that needs longer is rejected.
    pub timeout_s: f64,
    /// Maximum number of frames in one file, sampled or not; a longer file is rejected.
    pub max_source_frames: u32,
}

impl Default for VideoConfig {
    fn default() -> Self {
        Self {
            fps: None,
            min_frames: None,
            max_frames: None,
            min_pixels: None,
            max_pixels: None,
            marks: VideoMarks::default(),
            timeout_s: 60.0,
            max_source_frames: 36_000,
        }
    }
}

/// Limits on one video file.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "video"), expect(dead_code, reason = "limits apply to video files only"))]
pub(super) struct Limits {
    pub(super) timeout_s: f64,
    pub(super) max_source_frames: usize,
}

/// Placement of the vision start and end tokens of a video. Each frame group always has its own
/// pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VideoMarks {
    /// Keeps the chat template's pair around all frame groups, as in transformers 5.
    #[default]
    Nested,
    /// Removes the chat template's pair, which saves two tokens, as in transformers 4.57.
    Flat,
}

const PUBLISHED_FPS: f64 = 2.0;
const PUBLISHED_FRAMES: [u32; 2] = [4, 768]; // minimum, maximum

/// Values of a folder that has none.
struct Published {
    /// Minimum and maximum, of all frames together or of each frame.
    pixels: [u64; 2],
    mean: [f32; 3],
    std: [f32; 3],
}

impl Published {
    fn of(family: MediaFamily) -> Self {
        match family {
            // of the published `video_preprocessor_config.json`
            MediaFamily::Qwen3Vl => {
                Self { pixels: [4096, 25_165_824], mean: [0.5; 3], std: [0.5; 3] }
            }
            // of `Qwen2VLVideoProcessor` in transformers
            MediaFamily::Qwen25Vl { .. } => Self {
                pixels: [128 * 28 * 28, 768 * 28 * 28],
                mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
                std: [0.268_629_54, 0.261_302_58, 0.275_777_11],
            },
        }
    }
}

/// Validated video settings.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) sampling: Sampling,
    pub(super) family: MediaFamily,
    pub(super) pixels: PixelLimits,
    pub(super) normalise: Normalise,
    pub(super) marks: VideoMarks,
    #[cfg_attr(not(feature = "video"), expect(dead_code, reason = "used for video files only"))]
    pub(super) limits: Limits,
}

impl Settings {
    /// The settings that decide the frames and patches of a video.
    pub(super) fn key(&self) -> String {
        let Self { sampling, family: _, pixels, normalise, marks, limits: _ } = self;
        format!("{sampling:?} {:?} {normalise:?} {marks:?}{}", pixels.all, self.family_key())
    }

    /// The settings that decide the frames of a video and their size.
    pub(super) fn sizes_key(&self) -> String {
        let Self { sampling, pixels, marks, .. } = self;
        format!("{sampling:?} {:?} {marks:?}{}", pixels.all, self.family_key())
    }

    /// Empty for Qwen3-VL, so that older length caches and runs stay valid.
    fn family_key(&self) -> String {
        match self.family {
            MediaFamily::Qwen3Vl => String::new(),
            family @ MediaFamily::Qwen25Vl { .. } => format!(" {family:?} {:?}", self.pixels.frame),
        }
    }
}

/// The keys of the model folder's file that are used; others are ignored.
#[derive(Debug, Default, Deserialize)]
struct File {
    size: Option<Size>,
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    fps: Option<f64>,
    min_frames: Option<u32>,
    max_frames: Option<u32>,
    patch_size: Option<u32>,
    temporal_patch_size: Option<u32>,
    merge_size: Option<u32>,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
    rescale_factor: Option<f64>,
    cap_pixels_per_frame: Option<bool>,
}

impl Settings {
    /// Reads the settings of the model folder; `config` overrides them.
    ///
    /// `images` must be the image processor of the same folder. Patch sizes must agree, because
    /// one vision encoder processes the patches of videos and of images.
    pub(super) fn read(
        folder: &Path,
        config: &VideoConfig,
        images: &ImageProcessor,
    ) -> Result<Self, VideoConfigError> {
        let family = MediaFamily::of_folder(folder)?;
        let (path, file) = read_file(folder, family)?;
        let published = Published::of(family);
        let normalise = check_file(&path, &file, images, &published)?;
        let File { size, min_pixels, max_pixels, fps, min_frames, max_frames, .. } = file;
        let size = size.unwrap_or_default();
        let VideoConfig {
            fps: config_fps,
            min_frames: config_min_frames,
            max_frames: config_max_frames,
            min_pixels: config_min_pixels,
            max_pixels: config_max_pixels,
            marks,
            timeout_s,
            max_source_frames,
        } = *config;
        let of_folder = Budget {
            min_pixels: min_pixels.or(size.shortest_edge).unwrap_or(published.pixels[0]),
            max_pixels: max_pixels.or(size.longest_edge).unwrap_or(published.pixels[1]),
        };
        let over = |otherwise: Budget| Budget {
            min_pixels: config_min_pixels.unwrap_or(otherwise.min_pixels),
            max_pixels: config_max_pixels.unwrap_or(otherwise.max_pixels),
        };
        let pixels = match family {
            MediaFamily::Qwen3Vl => PixelLimits { all: over(of_folder), frame: None },
            MediaFamily::Qwen25Vl { .. } => PixelLimits {
                all: over(Budget { min_pixels: 1, max_pixels: u64::MAX }),
                frame: Some(of_folder),
            },
        };
        let min_frames = config_min_frames.or(min_frames).unwrap_or(PUBLISHED_FRAMES[0]);
        let max_frames = config_max_frames.or(max_frames).unwrap_or(PUBLISHED_FRAMES[1]);
        let fps = config_fps.or(fps).unwrap_or(PUBLISHED_FPS);
        let setting =
            |key, found: String, expected| Err(VideoConfigError::Setting { key, found, expected });
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
        if let Some(frame) = pixels.frame.filter(|frame| !frame.is_valid()) {
            let is_nested = min_pixels.is_none() && size.shortest_edge.is_some();
            let key = if is_nested { "size.shortest_edge" } else { "min_pixels" };
            let found = frame.min_pixels.to_string();
            let expected = format!("at least 1 and at most the maximum of {}", frame.max_pixels);
            return Err(ModelFileError::value(&path, key, found, expected));
        }
        if !pixels.all.is_valid() {
            let expected = "at least 1 and at most `max_pixels`";
            return setting("min_pixels", pixels.all.min_pixels.to_string(), expected);
        }
        if marks == VideoMarks::Flat && family != MediaFamily::Qwen3Vl {
            let expected = "`nested`: a video of Qwen2.5-VL has one pair of tokens around it";
            return setting("marks", "flat".to_owned(), expected);
        }
        let (min_frames, max_frames) = (min_frames as usize, max_frames as usize);
        let sampling = Sampling { fps, min_frames, max_frames };
        let limits = Limits { timeout_s, max_source_frames: max_source_frames as usize };
        Ok(Self { sampling, family, pixels, normalise, marks, limits })
    }
}

/// Checks the keys of the file that `data.video` does not override, and returns the normalisation.
fn check_file(
    path: &Path,
    file: &File,
    images: &ImageProcessor,
    published: &Published,
) -> Result<Normalise, VideoConfigError> {
    let File {
        patch_size,
        temporal_patch_size,
        merge_size,
        image_mean,
        image_std,
        rescale_factor,
        cap_pixels_per_frame,
        ..
    } = *file;
    let bad = |key, found: String, expected: String| {
        Err(ModelFileError::value(path, key, found, expected))
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

/// Reads the video settings and returns them with the path of their file.
///
/// As in transformers, `processor_config.json` takes precedence over
/// `video_preprocessor_config.json`. The settings are empty if neither file has any. Published folders
/// of Qwen2.5-VL have neither, and the settings of images apply to each frame.
fn read_file(folder: &Path, family: MediaFamily) -> Result<(PathBuf, File), VideoConfigError> {
    let combined = folder.join("processor_config.json");
    let published = folder.join("video_preprocessor_config.json");
    let nested = read_json_if_there::<Value>(&combined)?.and_then(|mut value| {
        value.get_mut("video_processor").map(Value::take).filter(Value::is_object)
    });
    let (path, value) = match nested {
        Some(value) => (combined, Some(value)),
        None => match read_json_if_there(&published)? {
            None if family != MediaFamily::Qwen3Vl => {
                let of_images = folder.join("preprocessor_config.json");
                (of_images.clone(), read_json_if_there(&of_images)?)
            }
            found => (published, found),
        },
    };
    let file = value.map_or(Ok(File::default()), serde_json::from_value);
    let file = file.map_err(ModelFileError::parse(&path))?;
    Ok((path, file))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use serde_json::json;

    use super::*;
    use crate::data::ImageConfig;

    fn settings(files: &[(&str, Value)], config: &VideoConfig) -> Result<Settings, String> {
        let folder = tempfile::tempdir().unwrap();
        let image = json!({
            "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
            "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        });
        let image = ("preprocessor_config.json", image);
        for (name, value) in files.iter().chain([&image]) {
            let mut file = std::fs::File::create(folder.path().join(name)).unwrap();
            file.write_all(value.to_string().as_bytes()).unwrap();
        }
        let images = ImageProcessor::from_folder(folder.path(), &ImageConfig::default()).unwrap();
        Settings::read(folder.path(), config, &images).map_err(|error| error.to_string())
    }

    #[test]
    fn a_folder_without_video_settings_uses_the_published_values() {
        let found = settings(&[], &VideoConfig::default()).unwrap();
        assert_eq!(found.sampling, Sampling { fps: 2.0, min_frames: 4, max_frames: 768 });
        let all = Budget { min_pixels: 4096, max_pixels: 25_165_824 };
        assert_eq!(found.pixels, PixelLimits { all, frame: None });
        assert_eq!(found.marks, VideoMarks::Nested);
    }

    #[test]
    fn the_config_overrides_the_combined_file_and_that_overrides_the_published_one() {
        let published = ("video_preprocessor_config.json", json!({"fps": 3, "max_frames": 5}));
        let combined = json!({"video_processor": {"fps": 4, "min_frames": 2}});
        let combined = ("processor_config.json", combined);
        let none = VideoConfig::default();
        let fps = |files: &[_], config: &_| settings(files, config).unwrap().sampling.fps;
        assert_eq!(fps(std::slice::from_ref(&published), &none), 3.0);
        assert_eq!(fps(&[published.clone(), combined.clone()], &none), 4.0);
        let config = VideoConfig { fps: Some(0.5), max_pixels: Some(70_000), ..none };
        let found = settings(&[published, combined], &config).unwrap();
        assert_eq!(found.sampling, Sampling { fps: 0.5, min_frames: 2, max_frames: 768 });
        assert_eq!(found.pixels.all, Budget { min_pixels: 4096, max_pixels: 70_000 });
    }

    /// The helper's image settings have limits of 65,536 to 16,777,216 pixels and a mean of 0.5.
    #[test]
    fn the_limits_of_a_qwen25_vl_folder_are_those_of_a_frame_and_the_config_limits_all_frames() {
        let model = |tokens: Value| {
            let vision = json!({"tokens_per_second": tokens});
            ("config.json", json!({"model_type": "qwen2_5_vl", "vision_config": vision}))
        };
        let none = VideoConfig::default();
        let found = settings(&[model(json!(2))], &none).unwrap();
        assert_eq!(found.family, MediaFamily::Qwen25Vl { tokens_per_second: 2.0 });
        let frame = Budget { min_pixels: 65_536, max_pixels: 16_777_216 };
        let all = Budget { min_pixels: 1, max_pixels: u64::MAX };
        assert_eq!(found.pixels, PixelLimits { all, frame: Some(frame) });
        let config = VideoConfig { max_pixels: Some(70_000), ..none.clone() };
        let found = settings(&[model(Value::Null)], &config).unwrap();
        assert_eq!(found.family, MediaFamily::Qwen25Vl { tokens_per_second: 4.0 });
        let all = Budget { min_pixels: 1, max_pixels: 70_000 };
        assert_eq!(found.pixels, PixelLimits { all, frame: Some(frame) });
        let own = ("video_preprocessor_config.json", json!({"min_pixels": 784}));
        let found = settings(&[model(json!(2)), own], &none).unwrap();
        let frame = Budget { min_pixels: 784, max_pixels: 602_112 };
        assert_eq!(found.pixels.frame, Some(frame));
        for (file, key) in [
            (json!({"min_pixels": 5000, "max_pixels": 4000}), "min_pixels` is `5000`"),
            (
                json!({"size": {"shortest_edge": 5000, "longest_edge": 4000}}),
                "size.shortest_edge` is `5000`",
            ),
        ] {
            let own = ("video_preprocessor_config.json", file);
            let error = settings(&[model(json!(2)), own], &config).unwrap_err();
            assert!(error.contains(&format!("video_preprocessor_config.json`: `{key}")), "{error}");
        }

        let error = settings(&[model(json!(0))], &none).unwrap_err();
        assert!(error.contains("`vision_config.tokens_per_second` is `0`"), "{error}");
        let config = VideoConfig { marks: VideoMarks::Flat, ..none };
        let error = settings(&[model(json!(2))], &config).unwrap_err();
        assert!(error.contains("`data.video.marks` is `flat`"), "{error}");
    }

    #[test]
    fn the_error_for_an_invalid_value_names_its_key_and_value() {
        let none = VideoConfig::default();
        for (config, message) in [
            (VideoConfig { fps: Some(0.0), ..none.clone() }, "`data.video.fps` is `0`"),
            (VideoConfig { max_frames: Some(1), ..none.clone() }, "`data.video.max_frames` is `1`"),
            (VideoConfig { min_frames: Some(769), ..none.clone() }, "`data.video.min_frames`"),
            (VideoConfig { max_pixels: Some(9), ..none.clone() }, "`data.video.min_pixels` is"),
            (VideoConfig { timeout_s: 0.0, ..none.clone() }, "`data.video.timeout_s` is `0`"),
        ] {
            let error = settings(&[], &config).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        for (file, message) in [
            (json!({"patch_size": 14}), "`patch_size` is `14`, expected `16` as for images"),
            (json!({"cap_pixels_per_frame": true}), "`cap_pixels_per_frame` is `true`"),
            (json!({"image_std": [0.5, 0.0, 0.5]}), "above 0 for `image_std`"),
            (json!({"image_std": [0.5, 1024.0, 0.5]}), "up to 255 * `rescale_factor`"),
            (json!({"fps": "2"}), "cannot parse"),
        ] {
            let error = settings(&[("video_preprocessor_config.json", file)], &none).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
