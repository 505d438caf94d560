//! What the config and the model folder say about videos.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::sampling::Sampling;
use super::smart_resize::Budget;
use crate::data::media::image::{ImageProcessor, Normalise, Size};
use crate::data::model_file::{ModelFileError, read_json_if_there};

/// `data.video` of the config; `null` is what the model folder's `video_preprocessor_config.json`
/// says, else what the published one does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VideoConfig {
    /// Frames to take of a second.
    pub fps: Option<f64>,
    /// No fewer frames, as far as there are as many.
    pub min_frames: Option<u32>,
    /// No more frames; they are spread over the whole video.
    pub max_frames: Option<u32>,
    /// Smaller videos are enlarged to this many pixels, all frames together.
    pub min_pixels: Option<u64>,
    /// Larger videos are reduced to this many pixels, all frames together.
    pub max_pixels: Option<u64>,
    /// What stands around the frames in the text.
    pub marks: VideoMarks,
    /// Seconds that the work on one file may take; a file that needs more is rejected.
    pub timeout_s: f64,
    /// Frames that one file may have, taken or not; a longer file is rejected.
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

/// What one file may cost.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "video"), expect(dead_code, reason = "lists of frames need no limits"))]
pub(super) struct Limits {
    pub(super) timeout_s: f64,
    pub(super) max_source_frames: usize,
}

/// What stands around the frames of a video, each of which has its own pair of vision marks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VideoMarks {
    /// The pair that the chat template writes stays around them, as in transformers 5.
    #[default]
    Nested,
    /// It goes: two tokens fewer, as in transformers 4.57.
    Flat,
}

/// Why the video processor of a model folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VideoConfigError {
    /// The file cannot be read or parsed.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// A value of the folder that this processor cannot work with.
    #[error("`{}`: `{key}` is `{found}`, expected {expected}", .path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What would work.
        expected: String,
    },
    /// A value, from the config or the folder, that no video can be read with.
    #[error("`data.video.{key}` is `{found}`, expected {expected}")]
    Setting {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What would work.
        expected: &'static str,
    },
}

impl VideoConfigError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::File(error) => error.hint(),
            Self::Value { .. } => "copy the file from the published model again",
            Self::Setting { .. } => {
                "`null` takes what the model folder says; docs/video.md has what each key does"
            }
        }
    }
}

/// The published `video_preprocessor_config.json`.
const PUBLISHED_FPS: f64 = 2.0;
const PUBLISHED_FRAMES: [u32; 2] = [4, 768];
const PUBLISHED_PIXELS: [u64; 2] = [4096, 25_165_824];

/// Checked settings.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) sampling: Sampling,
    pub(super) budget: Budget,
    pub(super) normalise: Normalise,
    pub(super) marks: VideoMarks,
    #[cfg_attr(not(feature = "video"), expect(dead_code, reason = "read with files"))]
    pub(super) limits: Limits,
}

/// The keys of the folder's file that matter; others are left alone.
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
    /// Reads the model folder; `config` wins over it. `images` is of the same folder: patches of
    /// videos and images go through one tower.
    pub(super) fn read(
        folder: &Path,
        config: &VideoConfig,
        images: &ImageProcessor,
    ) -> Result<Self, VideoConfigError> {
        let (path, file) = read_file(folder)?;
        let File {
            size,
            min_pixels,
            max_pixels,
            fps,
            min_frames,
            max_frames,
            patch_size,
            temporal_patch_size,
            merge_size,
            image_mean,
            image_std,
            rescale_factor,
            cap_pixels_per_frame,
        } = file;
        let bad = |key, found: String, expected: String| {
            Err(VideoConfigError::Value { path: path.clone(), key, found, expected })
        };
        for (key, found, expected) in [
            ("patch_size", patch_size, images.patch_size()),
            ("temporal_patch_size", temporal_patch_size, images.temporal_patch_size()),
            ("merge_size", merge_size, images.merge_size()),
        ] {
            if let Some(found) = found.filter(|found| *found != expected) {
                return bad(key, found.to_string(), format!("{expected}, as for images"));
            }
        }
        if cap_pixels_per_frame == Some(true) {
            let expected = "`false`: lower `data.video.max_pixels` instead".to_owned();
            return bad("cap_pixels_per_frame", "true".to_owned(), expected);
        }
        let rescale = rescale_factor.unwrap_or(1.0 / 255.0);
        if !(rescale.is_finite() && rescale > 0.0) {
            return bad("rescale_factor", rescale.to_string(), "a number above 0".to_owned());
        }
        let (mean, std) = (image_mean.unwrap_or([0.5; 3]), image_std.unwrap_or([0.5; 3]));
        if !mean.iter().chain(&std).all(|value| value.is_finite()) || std.iter().any(|v| *v <= 0.0)
        {
            let expected = "numbers, and a spread above 0".to_owned();
            return bad("image_mean` or `image_std", format!("{mean:?}, {std:?}"), expected);
        }
        let size = size.unwrap_or_default();
        let VideoConfig {
            fps: asked_fps,
            min_frames: asked_min_frames,
            max_frames: asked_max_frames,
            min_pixels: asked_min_pixels,
            max_pixels: asked_max_pixels,
            marks,
            timeout_s,
            max_source_frames,
        } = *config;
        let [published_min, published_max] = PUBLISHED_PIXELS;
        let min_pixels = asked_min_pixels.or(min_pixels).or(size.shortest_edge);
        let max_pixels = asked_max_pixels.or(max_pixels).or(size.longest_edge);
        let budget = Budget {
            min_pixels: min_pixels.unwrap_or(published_min),
            max_pixels: max_pixels.unwrap_or(published_max),
        };
        let min_frames = asked_min_frames.or(min_frames).unwrap_or(PUBLISHED_FRAMES[0]);
        let max_frames = asked_max_frames.or(max_frames).unwrap_or(PUBLISHED_FRAMES[1]);
        let fps = asked_fps.or(fps).unwrap_or(PUBLISHED_FPS);
        let setting =
            |key, found: String, expected| Err(VideoConfigError::Setting { key, found, expected });
        if !(fps.is_finite() && fps > 0.0) {
            return setting("fps", fps.to_string(), "a number of frames a second above 0");
        }
        if max_frames < images.temporal_patch_size() {
            let expected = "at least the frames of one patch (`temporal_patch_size`)";
            return setting("max_frames", max_frames.to_string(), expected);
        }
        if !(timeout_s > 0.0 && timeout_s <= 86_400.0) {
            return setting("timeout_s", timeout_s.to_string(), "seconds above 0, up to a day");
        }
        if min_frames > max_frames {
            return setting("min_frames", min_frames.to_string(), "at most `max_frames`");
        }
        if budget.min_pixels == 0 || budget.min_pixels > budget.max_pixels {
            let expected = "1 or more, and at most `max_pixels`";
            return setting("min_pixels", budget.min_pixels.to_string(), expected);
        }
        let (min_frames, max_frames) = (min_frames as usize, max_frames as usize);
        let sampling = Sampling { fps, min_frames, max_frames };
        let normalise = Normalise::new(mean, std, (1.0 / rescale) as f32);
        let limits = Limits { timeout_s, max_source_frames: max_source_frames as usize };
        Ok(Self { sampling, budget, normalise, marks, limits })
    }
}

/// The settings and the file that they stand in; in transformers' order: the combined file, the
/// published one, none.
fn read_file(folder: &Path) -> Result<(PathBuf, File), VideoConfigError> {
    let combined = folder.join("processor_config.json");
    let published = folder.join("video_preprocessor_config.json");
    let nested = read_json_if_there::<Value>(&combined)?.and_then(|mut value| {
        value.get_mut("video_processor").map(Value::take).filter(Value::is_object)
    });
    let (path, value) = match nested {
        Some(value) => (combined, Some(value)),
        None => (published.clone(), read_json_if_there(&published)?),
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
    fn without_a_file_the_published_values_hold() {
        let found = settings(&[], &VideoConfig::default()).unwrap();
        assert_eq!(found.sampling, Sampling { fps: 2.0, min_frames: 4, max_frames: 768 });
        assert_eq!(found.budget, Budget { min_pixels: 4096, max_pixels: 25_165_824 });
        assert_eq!(found.marks, VideoMarks::Nested);
    }

    #[test]
    fn the_config_wins_over_the_combined_file_and_that_over_the_published_one() {
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
        assert_eq!(found.budget, Budget { min_pixels: 4096, max_pixels: 70_000 });
    }

    #[test]
    fn each_impossible_value_is_named() {
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
            (json!({"patch_size": 14}), "`patch_size` is `14`, expected 16, as for images"),
            (json!({"cap_pixels_per_frame": true}), "`cap_pixels_per_frame` is `true`"),
            (json!({"image_std": [0.5, 0.0, 0.5]}), "a spread above 0"),
            (json!({"fps": "2"}), "cannot parse"),
        ] {
            let error = settings(&[("video_preprocessor_config.json", file)], &none).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
