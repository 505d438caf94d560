//! Image processing: decode, orient, resize, normalise and cut into patches.
//!
//! ```text
//! MediaRef -> bytes -> upright RGB -> bicubic resize to the size of smart_resize -> patches
//! ```
//!
//! Shapes: `gh`, `gw` number of patches along the height and width, `p` patch size in pixels, `tp`
//! temporal patch size; `pixel_values` are `[gh * gw, 3 * tp * p * p]`. Some models take an image as
//! tiles of equal size: `t` tiles have the grid `[t, gh, gw]` and the patches of `t` frames. Others
//! take the whole image, and slices of it in the same way.
//!
//! Libraries differ in some choices. Here the EXIF orientation is applied, transparency is
//! composited on white, 16-bit values are divided by 257, only the first frame of an animation is
//! used, and the resize equals torchvision's bit for bit. An incomplete file is an error; missing
//! pixels are never filled with grey.

mod config;
mod decode;
mod header;
mod patchify;
mod resize;
mod slices;
mod source;
mod tiles;

use std::io::{Cursor, Read};
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::{Arc, Once};

use config::ImageSettings;
pub(crate) use config::{Frames, PixelSteps, RESCALE_FACTORS, Size, SliceKeys, fit, is_elongated};
pub use config::{ImageConfig, ImageSize, smart_resize};
pub(crate) use decode::Rgb;
use decode::decode;
#[cfg(feature = "video")]
pub(crate) use decode::upright;
pub(crate) use header::MAX_PIXELS;
#[cfg(feature = "video")]
pub(crate) use header::swaps_sides;
use header::{DecodeError, Header};
use patchify::resize_and_patchify;
pub(crate) use patchify::{Normalise, PatchShape, patchify, unpatchify};
pub(crate) use resize::resize;
pub use slices::SliceGrid;
pub(crate) use slices::Slices;
pub(crate) use source::resolve;
pub use source::{ImageError, ImageName, UrlConfig};
use source::{Urls, open};
use tiles::Tiles;

use crate::model_folder::ModelFolderError;
use batch::{MediaRef, MediaSource, MediumKind, Patches};
use net::UrlImages;

/// Loads images as normalised patches, with the settings of one model folder.
///
/// All loader workers share one processor. Each call does its work on the calling thread.
#[derive(Debug, Clone)]
pub struct ImageProcessor {
    settings: ImageSettings,
    normalise: Normalise,
    urls: Urls,
}

/// How an image is cut before its patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ImageCut {
    /// Not at all.
    OneGrid,
    Tiles(Tiles),
    Slices(Slices),
}

/// The size of an image after resizing.
pub(crate) struct TargetSize {
    /// `[height, width]` in pixels: of the whole image, or of its tiles without a thumbnail.
    pub(crate) whole: [u32; 2],
    pub(crate) slices: Option<SliceGrid>,
}

impl TargetSize {
    pub(crate) fn unsliced(whole: [u32; 2]) -> Self {
        Self { whole, slices: None }
    }
}

/// The patches of an image after resizing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGrid {
    /// Number of patches per axis: `[1, gh, gw]`, or `[t, gh, gw]` for `t` tiles.
    pub whole: [u32; 3],
    /// The slices that follow the whole image.
    pub slices: Option<SliceGrid>,
}

impl ImageGrid {
    /// Number of patches, those of slices included.
    pub fn num_patches(&self) -> usize {
        let slices = self.slices.map(SliceGrid::grid);
        let grids = [self.whole].into_iter().chain(slices);
        grids.map(|grid| grid.map(|n| n as usize).iter().product::<usize>()).sum()
    }
}

impl ImageProcessor {
    /// Reads the settings of a model folder. Limits on pixels in `config` override the folder's.
    pub fn from_folder(folder: &Path, config: &ImageConfig) -> Result<Self, ModelFolderError> {
        ImageSettings::read(folder, config).map(Self::new)
    }

    fn new(settings: ImageSettings) -> Self {
        let normalise = Normalise::new(settings.mean, settings.std, settings.scale);
        Self { settings, normalise, urls: Urls::Refused }
    }

    /// Mean and standard deviation of each channel, which normalise bytes.
    pub fn mean_and_std(&self) -> [[f32; 3]; 2] {
        self.normalise.mean_and_std()
    }

    /// The processor of a text-only model, which rejects rows with images.
    pub(crate) fn unused() -> Self {
        Self::new(ImageSettings {
            patch_size: 1,
            temporal_patch_size: 1,
            merge_size: 1,
            inner_size: 1,
            min_pixels: 1,
            max_pixels: 1,
            cut: ImageCut::OneGrid,
            mean: [0.0; 3],
            std: [1.0; 3],
            scale: 1.0,
        })
    }

    /// The settings that decide the patches of an image.
    pub(crate) fn key(&self) -> String {
        let sizes = [self.patch_size(), self.temporal_patch_size(), self.merge_size()];
        let pixels = [self.settings.min_pixels, self.settings.max_pixels];
        format!("{sizes:?} {pixels:?} {:?}{}", self.normalise, self.cut_key())
    }

    fn cut_key(&self) -> String {
        match self.settings.cut {
            ImageCut::OneGrid => String::new(),
            ImageCut::Tiles(tiles) => format!(" {tiles:?}"),
            ImageCut::Slices(slices) => format!(" {slices:?}"),
        }
    }

    /// Downloads images by URL, which are refused otherwise.
    pub(crate) fn set_urls(&mut self, images: Arc<UrlImages>) {
        self.urls = Urls::Fetched(images);
    }

    /// Returns the grid that [`Self::load`] would return. It reads only the header, so damage after
    /// the header is not detected.
    pub fn grid(&self, media: &MediaRef) -> Result<ImageGrid, ImageError> {
        Ok(self.grid_of(&self.target(media, self.size(media)?.0)?))
    }

    /// Returns the upright size in pixels, read from the header, with the limits of the row, and
    /// the number of pixels to decode, which count once for each scan of a JPEG. Fails like
    /// [`Self::grid`] if the aspect ratio is too large.
    pub fn size(&self, media: &MediaRef) -> Result<(ImageSize, u64), ImageError> {
        let header = self.header(media)?;
        let upright = header.upright_size();
        let size = ImageSize::new(upright, media.limits);
        let pixels: u64 = upright.map(u64::from).iter().product();
        self.target(media, size).map(|_| (size, pixels * u64::from(header.num_scans)))
    }

    /// Returns the grid of an image of this size, as [`Self::grid`]; `None` if the aspect ratio is
    /// above 200 and the image is not cut into tiles.
    pub fn grid_of_size(&self, size: ImageSize) -> Option<ImageGrid> {
        self.target_of_size(size).map(|target| self.grid_of(&target))
    }

    /// Settings that determine the grid of an image of a given size, as text. The length cache
    /// hashes it to detect changed settings.
    pub(crate) fn limits(&self) -> String {
        let ImageSettings { patch_size, merge_size, min_pixels, max_pixels, .. } = self.settings;
        let cut = self.cut_key();
        format!("patch {patch_size}, merge {merge_size}, pixels {min_pixels} to {max_pixels}{cut}")
    }

    /// Decodes an image into normalised patches. Those of slices follow those of the whole image.
    pub fn load(&self, media: &MediaRef) -> Result<(ImageGrid, Vec<Patches>), ImageError> {
        let image = self.upright_pixels(media, u32::MAX)?;
        let size = [image.height as u32, image.width as u32];
        let target = self.target(media, ImageSize::new(size, media.limits))?;
        let (shape, normalise) = (self.patch_shape(), &self.normalise);
        let grid = self.grid_of(&target);
        let patches = |pixel_values, grid_thw, continues_medium| {
            let kind = MediumKind::Image;
            Patches { pixel_values, grid_thw, kind, continues_medium }
        };
        if let ImageCut::Tiles(tiles) = self.settings.cut {
            let values = tiles.patches(image, target.whole, shape, normalise); // [t * gh * gw, ..]
            return Ok((grid, vec![patches(values, grid.whole, false)]));
        }
        let whole = resize_and_patchify(&image, target.whole, shape, normalise); // [gh * gw, 3 * tp * p * p]
        let mut all = vec![patches(whole, grid.whole, false)];
        if let Some(slices) = grid.slices {
            let values = slices.pixel_values(image, shape, normalise);
            all.push(patches(values, slices.grid(), true));
        }
        Ok((grid, all))
    }

    /// Converts patches back to resized images: to one, that of an image with several tiles is the
    /// thumbnail, or to all slices.
    pub fn pixels(&self, patches: &Patches) -> Vec<Pixels> {
        let mut frames = unpatchify(patches, self.patch_shape(), &self.normalise);
        if !patches.continues_medium {
            // The frames of a temporal patch are copies, and the thumbnail is the last tile.
            frames.drain(..frames.len().saturating_sub(1));
        }
        frames.into_iter().map(Pixels::from).collect()
    }

    /// Whether the text has the number of each image in front of it.
    pub(crate) fn numbers_images(&self) -> bool {
        matches!(self.settings.cut, ImageCut::Slices(Slices { is_numbered: true, .. }))
    }

    /// Side of the square of patches that is merged into one token, in patches.
    pub fn merge_size(&self) -> u32 {
        self.settings.merge_size
    }

    /// Side of a patch, in pixels.
    pub fn patch_size(&self) -> u32 {
        self.settings.patch_size
    }

    /// Number of frames in a patch.
    pub fn temporal_patch_size(&self) -> u32 {
        self.settings.temporal_patch_size
    }

    /// Number of values in a flattened patch: `3 * temporal_patch_size * patch_size^2`.
    pub fn patch_values(&self) -> usize {
        3 * (self.temporal_patch_size() * self.patch_size().pow(2)) as usize
    }

    /// Size of a flattened patch of `f32` values, in bytes.
    pub fn patch_bytes(&self) -> NonZeroU64 {
        let bytes = self.patch_values() * size_of::<f32>();
        NonZeroU64::new(bytes as u64).unwrap_or(NonZeroU64::MIN)
    }

    /// Number of tokens of a grid of patches after merging: `t * gh * gw / merge_size^2`.
    pub fn num_tokens(&self, grid_thw: [u32; 3]) -> usize {
        let patches: usize = grid_thw.iter().map(|n| *n as usize).product();
        patches / (self.merge_size() as usize).pow(2)
    }

    pub(crate) fn patch_shape(&self) -> PatchShape {
        PatchShape {
            patch: self.patch_size() as usize,
            temporal: self.temporal_patch_size() as usize,
            merge: self.merge_size() as usize,
            inner: self.settings.inner_size as usize,
        }
    }

    fn target(&self, media: &MediaRef, size: ImageSize) -> Result<TargetSize, ImageError> {
        let [height, width] = size.pixels;
        if matches!(self.settings.cut, ImageCut::Slices(_)) && size.limits.min_pixels.is_some() {
            return Err(ImageError::Minimum { image: ImageName::of(media) });
        }
        self.target_of_size(size).ok_or_else(|| ImageError::AspectRatio {
            image: ImageName::of(media),
            width,
            height,
        })
    }

    fn target_of_size(&self, ImageSize { pixels, limits }: ImageSize) -> Option<TargetSize> {
        let ([height, width], factor) = (pixels, self.patch_size() * self.merge_size());
        let [min, max] = config::over(limits, [self.settings.min_pixels, self.settings.max_pixels]);
        match self.settings.cut {
            ImageCut::OneGrid => {
                smart_resize(height, width, factor, min, max).map(TargetSize::unsliced)
            }
            ImageCut::Tiles(tiles) => Some(TargetSize::unsliced(tiles.target(pixels, [min, max]))),
            // The reference has no limit; a long image would be one segment of many patches.
            ImageCut::Slices(slices) => (!is_elongated(pixels)).then(|| slices.target(pixels, max)),
        }
    }

    fn grid_of(&self, target: &TargetSize) -> ImageGrid {
        let ([height, width], num_grids) = match self.settings.cut {
            ImageCut::Tiles(tiles) => ([tiles.side; 2], tiles.count(target.whole)),
            ImageCut::OneGrid | ImageCut::Slices(_) => (target.whole, 1),
        };
        let whole = [num_grids, height / self.patch_size(), width / self.patch_size()];
        ImageGrid { whole, slices: target.slices }
    }

    /// Reads `[height, width]` in pixels, after EXIF orientation, and the number of scans from the
    /// header of an image.
    pub(crate) fn upright_size(&self, media: &MediaRef) -> Result<([u32; 2], u32), ImageError> {
        self.header(media).map(|header| (header.upright_size(), header.num_scans))
    }

    fn header(&self, media: &MediaRef) -> Result<Header, ImageError> {
        let header = match &media.source {
            MediaSource::File { root, path } => {
                Header::read(&mut header::for_headers(open(root, path)?))
            }
            MediaSource::DataUri(uri) => {
                Header::read(&mut Cursor::new(source::decode_data_uri(uri)?))
            }
            MediaSource::Url(url) => Header::read(&mut header::for_headers(self.urls.open(url)?)),
            MediaSource::Bytes(bytes) => Header::read(&mut Cursor::new(&**bytes)),
        };
        let header = header.map_err(|error| self.error_of(media, error))?;
        if header.is_of_several {
            note_first(media);
        }
        Ok(header)
    }

    /// Decodes an image of at most this number of scans and applies its orientation.
    pub(crate) fn upright_pixels(
        &self,
        media: &MediaRef,
        most_scans: u32,
    ) -> Result<Rgb, ImageError> {
        let mut bytes = Vec::new();
        let bytes = match &media.source {
            MediaSource::File { root, path } => {
                open(root, path)?
                    .read_to_end(&mut bytes)
                    .map_err(|source| ImageError::Read { path: path.clone(), source })?;
                &bytes
            }
            MediaSource::DataUri(uri) => {
                bytes = source::decode_data_uri(uri)?;
                &bytes
            }
            MediaSource::Url(url) => {
                bytes = self.urls.read(url)?;
                &bytes
            }
            MediaSource::Bytes(bytes) => &**bytes,
        };
        let (pixels, is_of_several) =
            decode(bytes, most_scans).map_err(|error| self.error_of(media, error))?;
        if is_of_several {
            note_first(media);
        }
        Ok(pixels)
    }

    fn error_of(&self, media: &MediaRef, error: DecodeError) -> ImageError {
        if let MediaSource::Url(url) = &media.source {
            self.urls.forget(url);
        }
        ImageError::of(media, error)
    }
}

/// Says once that images with several pages or frames are used in part.
fn note_first(media: &MediaRef) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            "image {} has several pages or frames, of which only the first one is used; this is \
             said for one image only",
            ImageName::of(media)
        );
    });
}

/// An image in 8-bit RGB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pixels {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Values of shape `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

impl From<Rgb> for Pixels {
    fn from(Rgb { width, height, data }: Rgb) -> Self {
        Self { width: width as u32, height: height as u32, rgb: data }
    }
}

/// Image fixtures and their expected values, written by `scripts/golden/image_fixtures.py`.
#[cfg(test)]
mod golden {
    use safetensors::SafeTensors;

    use super::decode::Rgb;

    const TENSORS: &[u8] = include_bytes!("../../../../../tests/golden/images.safetensors");

    pub(super) fn fixture(name: &str) -> Vec<u8> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/images/");
        std::fs::read(format!("{folder}{name}")).unwrap()
    }

    /// Returns the tensors whose names start with `prefix` as images, sorted by the rest of the
    /// name.
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
        serde_json::from_str(include_str!("../../../../../tests/golden/images.json")).unwrap()
    }

    pub(super) fn sha256(bytes: &[u8]) -> String {
        use sha2::{Digest as _, Sha256};
        format!("{:x}", Sha256::digest(bytes))
    }
}
