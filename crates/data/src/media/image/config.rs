//! Image settings from the config and from the model folder, and the target size of an image: both
//! sides are multiples of a factor and the area is within limits. The limits of a row precede those
//! of the config. The arithmetic and its rounding equal those of the transformers processor.

use std::num::NonZeroU32;
use std::path::Path;

use serde::Deserialize;
use settings::section;

use super::ImageCut;
use super::header::MAX_PIXELS;
use super::slices::Slices;
use super::tiles::Tiles;
use crate::media::{ImageForm, MediaFamily};
use crate::model_folder::{ModelFolderError, ProcessorFile};
use batch::{AreaLimits, ImageLimits, SliceSizes, TileSizes};

/// The section `data.image` of the config: limits on the size of one image after resizing.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageConfig {
    /// Smaller images are enlarged to this area in pixels; `null`: from the model folder
    pub min_pixels: Option<u64>,
    /// Larger images are reduced to this area in pixels; `null`: from the model folder
    pub max_pixels: Option<u64>,
    /// Maximum visual tokens of one image; `null`: no limit besides `max_pixels`
    pub max_tokens: Option<NonZeroU32>,
}

/// The keys of `preprocessor_config.json` that are used; others are ignored.
#[derive(Debug, Deserialize)]
struct PreprocessorFile {
    size: Option<Size>,
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    patch_size: Option<u32>,
    temporal_patch_size: Option<u32>,
    merge_size: Option<u32>,
    min_patches: Option<u32>,
    max_patches: Option<u32>,
    use_image_id: Option<bool>,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
    rescale_factor: Option<f64>,
    #[serde(flatten)]
    slices: SliceKeys,
    #[serde(flatten)]
    steps: PixelSteps,
}

/// Keys of the steps from pixels to values, of images and of videos.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct PixelSteps {
    resample: Option<u32>,
    do_resize: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
    do_convert_rgb: Option<bool>,
}

impl PixelSteps {
    /// Fails if the file at `path` leaves out a step, or resizes in another way.
    pub(crate) fn check(&self, path: &Path) -> Result<(), ModelFolderError> {
        for (key, value) in [
            ("do_resize", self.do_resize),
            ("do_rescale", self.do_rescale),
            ("do_normalize", self.do_normalize),
            ("do_convert_rgb", self.do_convert_rgb),
        ] {
            if value == Some(false) {
                return Err(bad(path, key, Some("false".into()), "`true`"));
            }
        }
        match self.resample.filter(|resample| *resample != 3) {
            Some(other) => Err(bad(path, "resample", Some(other.to_string()), "3 (bicubic)")),
            None => Ok(()),
        }
    }
}

/// Limits on the pixels of an image, or of all frames of a video together. Despite their names,
/// the keys are areas; some files use the aliases.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(crate) struct Size {
    #[serde(alias = "min_pixels")]
    pub(crate) shortest_edge: Option<u64>,
    #[serde(alias = "max_pixels")]
    pub(crate) longest_edge: Option<u64>,
    /// Sides of a tile; other images have no fixed sides.
    pub(crate) height: Option<u32>,
    pub(crate) width: Option<u32>,
}

/// Values of `rescale_factor`; 1/255 in published files.
pub(crate) const RESCALE_FACTORS: std::ops::RangeInclusive<f64> = 1e-5..=1.0;
/// Values of `min_patches` and `max_patches` if the folder has none, as in transformers.
const TILES: [u32; 2] = [1, 12];
/// Values of `max_slice_nums`, `scale_resolution` and `patch_size` of a model with slices if the
/// folder has none, as in transformers.
const SLICES: [u32; 3] = [9, 448, 14];
const MEAN: &str = "three numbers, one per channel, each from 0 to 255 * `rescale_factor`";
const STD: &str = "three numbers, one per channel, each above 0 and at most 255 * `rescale_factor`";

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ImageSettings {
    pub(super) patch_size: u32,
    pub(super) temporal_patch_size: u32,
    pub(super) merge_size: u32,
    pub(super) inner_size: u32,
    pub(super) min_pixels: u64,
    pub(super) max_pixels: u64,
    pub(super) cut: ImageCut,
    pub(super) mean: [f32; 3],
    pub(super) std: [f32; 3],
    /// Largest pixel value, `1 / rescale_factor`.
    pub(super) scale: f32,
}

impl ImageSettings {
    /// Reads the settings of the model folder. Limits on pixels in `config` override the folder's.
    pub(super) fn read(folder: &Path, config: &ImageConfig) -> Result<Self, ModelFolderError> {
        let file = ProcessorFile::read(folder, "image_processor", &["preprocessor_config.json"])?;
        let missing = || ModelFolderError::NoImageSettings { folder: folder.to_owned() };
        let file = file.ok_or_else(missing)?;
        let form = MediaFamily::of_folder(folder)?.images;
        file.settings(folder, &[], |path, file| Self::of_file(path, &file, form, config))
    }

    fn of_file(
        path: &Path,
        file: &PreprocessorFile,
        form: ImageForm,
        config: &ImageConfig,
    ) -> Result<Self, ModelFolderError> {
        let sizes = Sizes::read(path, file, form, config)?;
        let PreprocessorFile { image_mean, image_std, rescale_factor, ref steps, .. } = *file;
        steps.check(path)?;
        let bad = |key, found, expected: &str| bad(path, key, found, expected);
        let rescale = rescale_factor.unwrap_or(1.0 / 255.0);
        if !RESCALE_FACTORS.contains(&rescale) {
            let expected = "a number from 1e-5 to 1";
            return Err(bad("rescale_factor", Some(rescale.to_string()), expected));
        }
        // The mean of values lies between the smallest and the largest one, and the distance of
        // both limits their deviation.
        let white = 255.0 * rescale as f32 * 1.001;
        let triple = |key, value: Option<[f32; 3]>, low: f32, expected| match value {
            Some(value) if value.iter().all(|v| (low..=white).contains(v)) => Ok(value),
            other => Err(bad(key, other.map(|v| format!("{v:?}")), expected)),
        };
        let Sizes { patch_size, temporal_patch_size, merge_size, inner_size, cut, pixels } = sizes;
        // Folders of such a model need not have them, as in transformers.
        let half = matches!(cut, ImageCut::Slices(_)).then_some([0.5; 3]);
        let [min_pixels, max_pixels] = pixels;
        let token_pixels = u64::from(patch_size * merge_size).pow(2); // of one visual token
        let max_pixels = config
            .max_tokens
            .map_or(max_pixels, |tokens| max_pixels.min(u64::from(tokens.get()) * token_pixels));
        if min_pixels == 0 || min_pixels > max_pixels || min_pixels > MAX_PIXELS {
            let limit = MAX_PIXELS;
            return Err(ModelFolderError::ImagePixels { min_pixels, max_pixels, limit });
        }
        Ok(Self {
            patch_size,
            temporal_patch_size,
            merge_size,
            inner_size,
            min_pixels,
            max_pixels,
            cut,
            mean: triple("image_mean", image_mean.or(half), 0.0, MEAN)?,
            std: triple("image_std", image_std.or(half), white / 1000.0, STD)?,
            scale: (1.0 / rescale) as f32,
        })
    }
}

fn bad(path: &Path, key: &'static str, found: Option<String>, expected: &str) -> ModelFolderError {
    let found = found.unwrap_or_else(|| "missing".into());
    ModelFolderError::value(path, key, found, expected)
}

/// A whole number of the file at `path` that has a size.
fn count(path: &Path, key: &'static str, value: Option<u32>) -> Result<u32, ModelFolderError> {
    match value {
        Some(value @ 1..=1024) => Ok(value),
        other => {
            let found = other.map(|n| n.to_string());
            Err(bad(path, key, found, "a whole number from 1 to 1024"))
        }
    }
}

/// Sizes of patches and of what an image is cut into, and the limits on the pixels of an image: those
/// of the config, else those of the folder.
struct Sizes {
    patch_size: u32,
    temporal_patch_size: u32,
    merge_size: u32,
    inner_size: u32,
    cut: ImageCut,
    pixels: [u64; 2],
}

impl Sizes {
    /// The sizes in `file`, which is at `path`.
    fn read(
        path: &Path,
        file: &PreprocessorFile,
        form: ImageForm,
        config: &ImageConfig,
    ) -> Result<Self, ModelFolderError> {
        let count = |key, value| count(path, key, value);
        let Size { shortest_edge, longest_edge, height, width } = file.size.unwrap_or_default();
        match form {
            ImageForm::OneGrid => {
                let areas = "an area in pixels (or top-level keys `min_pixels` and `max_pixels`)";
                let min_pixels = config.min_pixels.or(file.min_pixels).or(shortest_edge);
                let max_pixels = config.max_pixels.or(file.max_pixels).or(longest_edge);
                let min = min_pixels.ok_or_else(|| bad(path, "size.shortest_edge", None, areas))?;
                let max = max_pixels.ok_or_else(|| bad(path, "size.longest_edge", None, areas))?;
                let merge_size = count("merge_size", file.merge_size)?;
                Ok(Self {
                    patch_size: count("patch_size", file.patch_size)?,
                    temporal_patch_size: count("temporal_patch_size", file.temporal_patch_size)?,
                    merge_size,
                    inner_size: merge_size,
                    cut: ImageCut::OneGrid,
                    pixels: [min, max],
                })
            }
            // `crop_to_patches` is not read: the processor of the model always sets it.
            ImageForm::Tiles(TileSizes { side, patch, merge }) => {
                for (key, found) in [("size.height", height), ("size.width", width)] {
                    if found != Some(side) {
                        let found = found.map(|found| found.to_string());
                        let expected =
                            format!("{side}, the `vision_config.image_size` of the model");
                        return Err(bad(path, key, found, &expected));
                    }
                }
                let [min, max] = TILES;
                let min = count("min_patches", Some(file.min_patches.unwrap_or(min)))?;
                let max = count("max_patches", Some(file.max_patches.unwrap_or(max)))?;
                if min > max {
                    let expected = format!("at most `max_patches`, which is {max}");
                    return Err(bad(path, "min_patches", Some(min.to_string()), &expected));
                }
                let pixels =
                    [config.min_pixels.unwrap_or(1), config.max_pixels.unwrap_or(u64::MAX)];
                Ok(Self {
                    patch_size: patch,
                    temporal_patch_size: 1,
                    merge_size: merge,
                    inner_size: merge,
                    cut: ImageCut::Tiles(Tiles { side, min, max }),
                    pixels,
                })
            }
            ImageForm::Slices(sizes) => Self::of_slices(path, file, sizes, config),
        }
    }

    /// The sizes of a model with slices, which must be those of `config.json`.
    fn of_slices(
        path: &Path,
        file: &PreprocessorFile,
        sizes: SliceSizes,
        config: &ImageConfig,
    ) -> Result<Self, ModelFolderError> {
        let is_numbered = file.use_image_id.unwrap_or(true);
        let slices = file.slices.read(path, file.patch_size, sizes, is_numbered)?;
        if let Some(found) = config.min_pixels {
            let (key, found) = ("min_pixels", found.to_string());
            let expected = "`null`: the model scales every image to a fixed area";
            return Err(ModelFolderError::ImageSetting { key, found, expected });
        }
        Ok(Self {
            patch_size: sizes.patch,
            temporal_patch_size: 1,
            merge_size: sizes.merge,
            inner_size: SliceSizes::INNER,
            cut: ImageCut::Slices(slices),
            pixels: [1, config.max_pixels.unwrap_or(u64::MAX)],
        })
    }
}

/// The settings of slices in a file, of images or of videos.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct SliceKeys {
    downsample_mode: Option<String>,
    max_slice_nums: Option<u32>,
    scale_resolution: Option<u32>,
    slice_mode: Option<bool>,
}

impl SliceKeys {
    /// The slices of a model with these sizes. The file is at `path`, and `patch_size` is another key
    /// of it.
    pub(crate) fn read(
        &self,
        path: &Path,
        patch_size: Option<u32>,
        SliceSizes { patch, merge, mode }: SliceSizes,
        is_numbered: bool,
    ) -> Result<Slices, ModelFolderError> {
        let [max, side, default_patch] = SLICES;
        let found = patch_size.unwrap_or(default_patch);
        if found != patch {
            let expected = format!("{patch}, the `vision_config.patch_size` in config.json");
            return Err(bad(path, "patch_size", Some(found.to_string()), &expected));
        }
        let found = self.downsample_mode.as_deref();
        if found.unwrap_or(SliceSizes::DEFAULT_MODE) != mode {
            let expected = format!(
                "`{mode}`, the `downsample_mode` in config.json, for images and for videos (`{}` \
                 without the key)",
                SliceSizes::DEFAULT_MODE
            );
            return Err(bad(path, "downsample_mode", found.map(str::to_owned), &expected));
        }
        let max = count(path, "max_slice_nums", Some(self.max_slice_nums.unwrap_or(max)))?;
        let side = count(path, "scale_resolution", Some(self.scale_resolution.unwrap_or(side)))?;
        let max = if self.slice_mode == Some(false) { 1 } else { max };
        Ok(Slices { side, patch, merge, max, is_numbered })
    }
}

/// The size of an image before the limits of the config apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageSize {
    /// Upright `[height, width]` in pixels, or the size that the row gives in its place.
    pub pixels: [u32; 2],
    /// Limits that the row gives.
    pub limits: AreaLimits,
}

impl ImageSize {
    /// `pixels` is the upright size of an image with these limits. As in qwen-vl-utils, limits on
    /// the area have no effect if the row also gives a size.
    pub(super) fn new(pixels: [u32; 2], ImageLimits { resized, area }: ImageLimits) -> Self {
        match resized {
            Some(resized) => {
                Self { pixels: resized.map(NonZeroU32::get), limits: AreaLimits::default() }
            }
            None => Self { pixels, limits: area },
        }
    }
}

/// Minimum and maximum area: `limits` where they are given, else those of the config. If one limit
/// of the row contradicts the other limit of the config, both have the value of the row.
pub(crate) fn over(limits: AreaLimits, config: [u64; 2]) -> [u64; 2] {
    let value = |limit: Option<NonZeroU32>| limit.map(|limit| u64::from(limit.get()));
    let (min, max) = (value(limits.min_pixels), value(limits.max_pixels));
    match (min, max) {
        (Some(min), Some(max)) => [min, max],
        (Some(min), None) => [min, config[1].max(min)],
        (None, Some(max)) => [config[0].min(max), max],
        (None, None) => config,
    }
}

/// Maximum ratio of the longer to the shorter side, as in the transformers processor.
const MAX_ASPECT_RATIO: u64 = 200;

/// Whether the aspect ratio is above 200.
pub(crate) fn is_elongated([height, width]: [u32; 2]) -> bool {
    u64::from(height.max(width)) > MAX_ASPECT_RATIO * u64::from(height.min(width))
}

/// Returns the target `[height, width]` in pixels of an image of `height` x `width` pixels.
///
/// Both are multiples of `factor` (`patch_size * merge_size`). The area is in
/// `min_pixels..=max_pixels` where the aspect ratio allows it. Returns `None` if the aspect ratio
/// is above 200.
///
/// Sides round half to even: a side of 80 with factor 32 becomes 64, not 96. A side of at most
/// half the factor rounds to 0; the image is then enlarged to `min_pixels`, whatever its area is.
///
/// # Panics
/// If a side or `factor` is 0.
pub fn smart_resize(
    height: u32,
    width: u32,
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
) -> Option<[u32; 2]> {
    assert!(height > 0 && width > 0 && factor > 0, "sides and factor must be at least 1");
    if is_elongated([height, width]) {
        return None;
    }
    let sides = [f64::from(height), f64::from(width)];
    Some(fit(sides, factor, Frames { shown: 1.0, counted: 1.0 }, min_pixels, max_pixels))
}

/// Number of frames of equal size whose pixels are limited together; 1 for an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frames {
    /// Number of frames, used to compute the scale.
    pub(crate) shown: f64,
    /// Number of frames that the transformers processor assumes when it compares the pixels with
    /// the limits.
    pub(crate) counted: f64,
}

/// Rounds `sides` to multiples of `factor`, and scales them if the pixels of all frames together
/// are outside of `min_pixels..=max_pixels`.
pub(crate) fn fit(
    sides: [f64; 2],
    factor: u32,
    frames: Frames,
    min_pixels: u64,
    max_pixels: u64,
) -> [u32; 2] {
    let ([h, w], f) = (sides, f64::from(factor));
    let rounded = sides.map(|side| (side / f).round_ties_even() * f);
    let pixels = frames.counted * rounded[0] * rounded[1];
    let resized = if pixels > max_pixels as f64 {
        let beta = (frames.shown * h * w / max_pixels as f64).sqrt();
        sides.map(|side| f.max((side / beta / f).floor() * f))
    } else if pixels < min_pixels as f64 {
        let beta = (min_pixels as f64 / (frames.shown * h * w)).sqrt();
        sides.map(|side| (side * beta / f).ceil() * f)
    } else {
        rounded
    };
    resized.map(|side| side as u32)
}

#[cfg(test)]
mod tests;
