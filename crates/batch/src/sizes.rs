//! Sizes in `config.json` that decide how an image is cut. The vision encoder and the processor of
//! images have to agree on them.

use serde_json::Value;

/// Maximum side of a tile or patch in pixels.
const MAX_SIDE: u64 = 4096;

/// A value of `config.json` that cannot be used.
#[derive(Debug)]
pub struct WrongSize {
    /// Dotted key.
    pub key: &'static str,
    pub found: Value,
    pub expected: String,
}

/// Sizes of a patch that covers several frames, and of the blocks that are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatchSizes {
    /// Side of a patch in pixels.
    pub patch: u32,
    /// Number of frames of a patch.
    pub temporal: u32,
    /// Side of a merge block in patches.
    pub merge: u32,
}

impl PatchSizes {
    /// Those of Qwen2-VL and Qwen2.5-VL if `config.json` lacks them: the defaults of transformers.
    pub const QWEN2: Self = Self { patch: 14, temporal: 2, merge: 2 };
}

/// Sizes of square tiles, which the vision encoder reads like frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileSizes {
    /// Side of a tile in pixels; a multiple of the other two sizes.
    pub side: u32,
    /// Side of a patch in pixels.
    pub patch: u32,
    /// Side of a merge block in patches.
    pub merge: u32,
}

/// Sizes of an image with slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceSizes {
    /// Side of a patch in pixels.
    pub patch: u32,
    /// Side of a merge block in patches.
    pub merge: u32,
    /// `downsample_mode`, which decides the merge block.
    pub mode: &'static str,
}

impl TileSizes {
    /// The sizes in `config`. Those that it lacks are the defaults of transformers.
    pub fn read(config: &Value) -> Result<Self, WrongSize> {
        let side = read_side(config, "vision_config.image_size", 448)?;
        let patch = read_side(config, "vision_config.patch_size", 14)?;
        // Patches are merged by a pixel shuffle, which is a square of patches only for the inverse of
        // a whole number.
        let (key, ratio) = ("downsample_ratio", value_or(config, "downsample_ratio", 0.5));
        let merge = ratio.as_f64().map_or(0.0, |ratio| (1.0 / ratio).round());
        let is_exact = ratio.as_f64().is_some_and(|ratio| (ratio * merge - 1.0).abs() < 1e-6);
        if !(is_exact && (1.0..=8.0).contains(&merge)) {
            let expected = "1 divided by a whole number from 1 to 8".to_owned();
            return Err(WrongSize { key, found: ratio, expected });
        }
        let merge = merge as u32;
        if !side.is_multiple_of(patch * merge) {
            let expected = format!("a multiple of {merge} patches of {patch} pixels");
            return Err(WrongSize {
                key: "vision_config.image_size",
                found: side.into(),
                expected,
            });
        }
        Ok(Self { side, patch, merge })
    }
}

impl SliceSizes {
    pub const DEFAULT_MODE: &'static str = "16x";
    /// Side of the blocks that are merged first, in patches.
    pub const INNER: u32 = 2;

    /// The sizes in `config`. Those that it lacks are the defaults of transformers.
    pub fn read(config: &Value) -> Result<Self, WrongSize> {
        let patch = read_side(config, "vision_config.patch_size", 16)?;
        let (key, found) =
            ("downsample_mode", value_or(config, "downsample_mode", Self::DEFAULT_MODE));
        // Patches are merged in blocks of 2 x 2, in the vision encoder and after it, or only after it.
        match found.as_str() {
            Some(Self::DEFAULT_MODE) => Ok(Self { patch, merge: 4, mode: Self::DEFAULT_MODE }),
            Some("4x") => Ok(Self { patch, merge: Self::INNER, mode: "4x" }),
            _ => Err(WrongSize { key, found, expected: "`16x` or `4x`".to_owned() }),
        }
    }
}

/// Pixels on a side, from a number or a list of two equal numbers; `default` without the dotted `key`.
pub fn read_side(config: &Value, key: &'static str, default: u32) -> Result<u32, WrongSize> {
    let found = value_or(config, key, default);
    let side = match found.as_array().map(Vec::as_slice) {
        Some([height, width]) if height == width => height.as_u64(),
        Some(_) => None,
        None => found.as_u64(),
    };
    let side = side.filter(|side| (1..=MAX_SIDE).contains(side));
    let expected = format!("a whole number from 1 to {MAX_SIDE}, or a list of two such");
    side.map(|side| side as u32).ok_or(WrongSize { key, found, expected })
}

/// The value of a dotted key, or `default` if the file lacks it.
fn value_or(config: &Value, key: &str, default: impl Into<Value>) -> Value {
    let found = key.split('.').fold(config, |section, key| &section[key]);
    if found.is_null() { default.into() } else { found.clone() }
}
