//! Images to patches: decode, orient, resize, normalise, cut.
//!
//! ```text
//! MediaRef -> bytes -> RGB, upright -> smart_resize, bicubic in bands of rows -> rows of patches
//! ```
//!
//! Shapes: `gh`, `gw` patches a side, `p` patch size in pixels, `tp` temporal patch size;
//! `pixel_values` are `[gh * gw, 3 * tp * p * p]`.
//! Choices where libraries differ: EXIF orientation is applied, transparency is composited on
//! white, 16-bit values are divided by 257, an animation gives its first frame, and the resize is
//! Pillow's, bit for bit. An incomplete file is an error, not a half-grey image.

mod config;
mod decode;
mod header;
mod patchify;
mod resize;
mod simd;
mod smart_resize;
mod source;
mod transpose;
mod weights;

use std::error::Error;
use std::fmt;
use std::io::{Cursor, Read};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use config::Settings;
pub(in crate::data) use config::Size;
pub use config::{ImageConfig, ImageConfigError};
pub(in crate::data) use decode::Rgb;
use decode::{DecodeError, decode};
#[cfg(feature = "video")]
pub(in crate::data) use decode::{MAX_PIXELS, upright};
use header::Header;
#[cfg(feature = "video")]
pub(in crate::data) use header::swaps_sides;
use patchify::resize_and_patchify;
pub(in crate::data) use patchify::{Normalise, PatchShape, patchify, unpatchify};
pub(in crate::data) use resize::resize;
pub use smart_resize::smart_resize;
pub(in crate::data) use smart_resize::{Frames, fit};
use source::open;
#[cfg(feature = "video")]
pub(in crate::data) use source::resolve;

use crate::batch::{MediaRef, MediaSource, Patches};

/// Turns references to images into patches, with the settings of one model. Shared by all
/// loader workers; each call runs on the calling thread alone.
#[derive(Debug, Clone)]
pub struct ImageProcessor {
    patch_size: u32,
    temporal_patch_size: u32,
    merge_size: u32,
    min_pixels: u64,
    max_pixels: u64,
    normalise: Normalise,
}

impl ImageProcessor {
    /// Reads the settings of a model folder; the budget in `config` wins over the folder's.
    pub fn from_folder(folder: &Path, config: &ImageConfig) -> Result<Self, ImageConfigError> {
        let Settings {
            patch_size,
            temporal_patch_size,
            merge_size,
            min_pixels,
            max_pixels,
            mean,
            std,
            scale,
        } = Settings::read(folder, config)?;
        let normalise = Normalise::new(mean, std, scale);
        Ok(Self { patch_size, temporal_patch_size, merge_size, min_pixels, max_pixels, normalise })
    }

    /// The grid `[t, gh, gw]` that [`Self::load`] will give, from the header alone: no pixel is
    /// decoded, so damage behind the header goes unnoticed.
    pub fn grid(&self, media: &MediaRef) -> Result<[u32; 3], ImageError> {
        Ok(self.grid_of(self.target(media, upright_size(media)?)?))
    }

    /// Upright `[height, width]` in pixels as the header says, of an image that has a grid.
    pub fn size(&self, media: &MediaRef) -> Result<[u32; 2], ImageError> {
        let size = upright_size(media)?;
        self.target(media, size).map(|_| size)
    }

    /// The grid of an image of this upright `[height, width]`; `None` if it is too elongated.
    pub fn grid_of_size(&self, [height, width]: [u32; 2]) -> Option<[u32; 3]> {
        let factor = self.patch_size * self.merge_size;
        let target = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)?;
        Some(self.grid_of(target))
    }

    /// Whatever decides the grid of an image of a given size, in words.
    pub(in crate::data) fn limits(&self) -> String {
        let Self { patch_size, merge_size, min_pixels, max_pixels, .. } = self;
        format!("patch {patch_size}, merge {merge_size}, pixels {min_pixels} to {max_pixels}")
    }

    /// Decodes an image into normalised patches.
    pub fn load(&self, media: &MediaRef) -> Result<Patches, ImageError> {
        let image = upright_pixels(media)?;
        let target = self.target(media, [image.height as u32, image.width as u32])?;
        let pixel_values = resize_and_patchify(&image, target, self.patch_shape(), &self.normalise); // [gh * gw, 3 * tp * p * p]
        Ok(Patches { pixel_values, grid_thw: self.grid_of(target) })
    }

    /// The pixels that an image's patches were made of: what the model sees, as a person can.
    pub fn pixels(&self, patches: &Patches) -> Vec<Pixels> {
        let mut frames = unpatchify(patches, self.patch_shape(), &self.normalise);
        frames.truncate(1); // the others are repeated
        frames.into_iter().map(Pixels::from).collect()
    }

    /// Patches a side of the square that merges into one token.
    pub fn merge_size(&self) -> u32 {
        self.merge_size
    }

    /// Pixels a side of a patch.
    pub fn patch_size(&self) -> u32 {
        self.patch_size
    }

    /// Frames in a patch.
    pub fn temporal_patch_size(&self) -> u32 {
        self.temporal_patch_size
    }

    /// Values of one flattened patch: `channels * temporal_patch_size * patch_size^2`.
    pub fn patch_values(&self) -> usize {
        3 * (self.temporal_patch_size * self.patch_size * self.patch_size) as usize
    }

    /// Bytes of one flattened patch.
    pub fn patch_bytes(&self) -> NonZeroU64 {
        let bytes = self.patch_values() * size_of::<f32>();
        NonZeroU64::new(bytes as u64).unwrap_or(NonZeroU64::MIN)
    }

    /// Tokens that a grid of patches fills after merging: `t * h * w / merge_size^2`.
    pub fn num_tokens(&self, grid_thw: [u32; 3]) -> usize {
        let patches: usize = grid_thw.iter().map(|n| *n as usize).product();
        patches / (self.merge_size as usize).pow(2)
    }

    pub(in crate::data) fn patch_shape(&self) -> PatchShape {
        PatchShape {
            patch: self.patch_size as usize,
            temporal: self.temporal_patch_size as usize,
            merge: self.merge_size as usize,
        }
    }

    fn target(&self, media: &MediaRef, [height, width]: [u32; 2]) -> Result<[u32; 2], ImageError> {
        let factor = self.patch_size * self.merge_size;
        smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
            .ok_or_else(|| ImageError::AspectRatio { image: ImageName::of(media), width, height })
    }

    fn grid_of(&self, [height, width]: [u32; 2]) -> [u32; 3] {
        [1, height / self.patch_size, width / self.patch_size]
    }
}

/// `[height, width]` of an image after orientation, from its header.
pub(in crate::data) fn upright_size(media: &MediaRef) -> Result<[u32; 2], ImageError> {
    let header = match &media.source {
        MediaSource::File { root, path } => {
            Header::read(&mut header::for_headers(open(root, path)?))
        }
        MediaSource::DataUri(uri) => Header::read(&mut Cursor::new(source::decode_data_uri(uri)?)),
    };
    Ok(header.map_err(|error| ImageError::of(media, error))?.upright_size())
}

/// An image, decoded and turned upright.
pub(in crate::data) fn upright_pixels(media: &MediaRef) -> Result<Rgb, ImageError> {
    let bytes = match &media.source {
        MediaSource::File { root, path } => {
            let mut bytes = Vec::new();
            open(root, path)?
                .read_to_end(&mut bytes)
                .map_err(|source| ImageError::Read { path: path.clone(), source })?;
            bytes
        }
        MediaSource::DataUri(uri) => source::decode_data_uri(uri)?,
    };
    decode(&bytes).map_err(|error| ImageError::of(media, error))
}

/// An image in 8-bit RGB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pixels {
    /// In pixels.
    pub width: u32,
    /// In pixels.
    pub height: u32,
    /// `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

impl From<Rgb> for Pixels {
    fn from(Rgb { width, height, data }: Rgb) -> Self {
        Self { width: width as u32, height: height as u32, rgb: data }
    }
}

/// What to call an image in a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageName {
    /// As the row writes it.
    Path(PathBuf),
    /// A data URI, which is too long to show.
    DataUri,
}

impl ImageName {
    fn of(media: &MediaRef) -> Self {
        match &media.source {
            MediaSource::File { path, .. } => Self::Path(path.clone()),
            MediaSource::DataUri(_) => Self::DataUri,
        }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "`{}`", path.display()),
            Self::DataUri => f.write_str("in a data URI"),
        }
    }
}

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// There is no such file.
    #[error("image `{}` does not exist in `{}`", .path.display(), .root.display())]
    Missing {
        /// As the row writes it.
        path: PathBuf,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// The folder itself is not there.
    #[error("cannot open `image_root` `{}`: {source}", .root.display())]
    Root {
        /// The folder.
        root: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The path leads out of its root, by itself or by a link.
    #[error("image `{}` is outside of `image_root` `{}`", .path.display(), .root.display())]
    EscapesRoot {
        /// As the row writes it.
        path: PathBuf,
        /// The folder that it must stay in.
        root: PathBuf,
    },
    /// The file cannot be read, or is not a regular file.
    #[error("cannot read image `{}`: {source}", .path.display())]
    Read {
        /// As the row writes it.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The data URI itself is malformed.
    #[error("cannot read an image from a data URI: {problem}")]
    DataUri {
        /// What is wrong with it.
        problem: String,
    },
    /// The bytes are none of the formats that are decoded.
    #[error("image {image} is not a PNG, JPEG, WebP, GIF or BMP image")]
    UnknownFormat {
        /// Which image.
        image: ImageName,
    },
    /// The image is damaged or incomplete.
    #[error("image {image} is broken: {source}")]
    Broken {
        /// Which image.
        image: ImageName,
        /// What the decoder found.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Too elongated for the model.
    #[error("image {image} is {width} x {height}, expected sides of a ratio of at most 200")]
    AspectRatio {
        /// Which image.
        image: ImageName,
        /// In pixels, upright.
        width: u32,
        /// In pixels, upright.
        height: u32,
    },
    /// The header declares more pixels than are worth decoding.
    #[error(
        "image {image} is {width} x {height}, expected at most {limit} pixels",
        limit = decode::MAX_PIXELS
    )]
    TooLarge {
        /// Which image.
        image: ImageName,
        /// In pixels, as stored.
        width: u32,
        /// In pixels, as stored.
        height: u32,
    },
}

impl ImageError {
    fn of(media: &MediaRef, error: DecodeError) -> Self {
        let image = ImageName::of(media);
        match error {
            DecodeError::UnknownFormat => Self::UnknownFormat { image },
            DecodeError::TooLarge { width, height } => Self::TooLarge { image, width, height },
            DecodeError::Broken(source) => Self::Broken { image, source },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Missing { .. } => {
                "paths are relative to `image_root` of the data set, by default the folder of its file"
            }
            Self::Root { .. } => "check `image_root` of the data set",
            Self::EscapesRoot { .. } => "move the image, or set `image_root` to a folder above it",
            Self::Read { .. } => "the path must lead to a file that you may read",
            Self::DataUri { .. } => "write `data:image/png;base64,` and the encoded file",
            Self::UnknownFormat { .. } => "convert it to PNG or JPEG",
            Self::Broken { .. } => "copy or make the image again",
            Self::AspectRatio { .. } | Self::TooLarge { .. } => "cut or scale the image",
        }
    }

    /// A short key to count rejected samples by.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "image_missing",
            Self::Root { .. } => "image_root_missing",
            Self::EscapesRoot { .. } => "image_path_escapes_root",
            Self::Read { .. } => "image_unreadable",
            Self::DataUri { .. } => "image_data_uri",
            Self::UnknownFormat { .. } => "image_format",
            Self::Broken { .. } => "image_broken",
            Self::AspectRatio { .. } => "image_aspect_ratio",
            Self::TooLarge { .. } => "image_too_large",
        }
    }
}

/// The fixtures and their expected values, made by `scripts/golden/image_fixtures.py`.
#[cfg(test)]
mod golden {
    use safetensors::SafeTensors;

    use super::decode::Rgb;

    const TENSORS: &[u8] = include_bytes!("../../../../tests/golden/images.safetensors");

    pub(super) fn fixture(name: &str) -> Vec<u8> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/images/");
        std::fs::read(format!("{folder}{name}")).unwrap()
    }

    /// All tensors whose name starts with `prefix`, by the rest of their names, as images.
    pub(super) fn images(prefix: &str) -> Vec<(String, Rgb)> {
        let tensors = SafeTensors::deserialize(TENSORS).unwrap();
        let mut images: Vec<(String, Rgb)> = tensors
            .iter()
            .filter_map(|(name, view)| {
                let [height, width, 3] = *view.shape() else { return None };
                let image = Rgb { width, height, data: view.data().to_vec() };
                Some((name.strip_prefix(prefix)?.to_owned(), image))
            })
            .collect();
        images.sort_by(|a, b| a.0.cmp(&b.0));
        images
    }

    pub(super) fn json() -> serde_json::Value {
        serde_json::from_str(include_str!("../../../../tests/golden/images.json")).unwrap()
    }

    pub(super) fn sha256(bytes: &[u8]) -> String {
        use sha2::{Digest as _, Sha256};
        format!("{:x}", Sha256::digest(bytes))
    }
}
