//! Reads format, size and orientation of an image from its headers.
//!
//! `ImageProcessor::grid` and `ImageProcessor::load` both use this module, so they return the same
//! grid. The format is detected from the first bytes, not from the file name. JPEG segments and
//! PNG chunks are parsed here because the decoders would read the whole file, or miss an `eXIf`
//! chunk after the pixels.

mod gif;
mod jpeg;
mod png;
mod tags;
mod tiff;

use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Seek};

use image::codecs::{bmp::BmpDecoder, gif::GifDecoder, tiff::TiffDecoder, webp::WebPDecoder};
use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageFormat};

pub(super) use gif::FirstFrame;
pub(super) use tags::Directory;
pub(super) use tiff::Indexed;

/// Maximum number of pixels of an image. Larger ones are rejected from the header, before memory
/// is allocated for them.
pub(crate) const MAX_PIXELS: u64 = 1 << 27;
/// Maximum memory for decoding an image and for converting its pixels: 8-bit RGB of
/// [`MAX_PIXELS`].
pub(super) const MAX_DECODED_BYTES: u64 = MAX_PIXELS * 3;

/// The reason why bytes cannot be decoded, without the name of the image.
#[derive(Debug)]
pub(super) enum DecodeError {
    /// The format is not supported.
    UnknownFormat,
    /// The header declares more pixels than `limit`: [`MAX_PIXELS`], or those whose decoding takes
    /// [`MAX_DECODED_BYTES`].
    TooLarge { width: u32, height: u32, limit: u64 },
    /// The format is supported, but not this kind of it.
    NotSupported(String),
    /// The image is damaged or incomplete.
    Broken(Box<dyn Error + Send + Sync>),
}

impl From<image::ImageError> for DecodeError {
    fn from(error: image::ImageError) -> Self {
        match error {
            image::ImageError::Unsupported(error) => Self::NotSupported(error.to_string()),
            error => Self::Broken(error.into()),
        }
    }
}

impl DecodeError {
    /// Names the kind of a TIFF file that is not supported.
    pub(super) fn of_tiff(self, directory: Option<&Directory>, reader: &mut impl Image) -> Self {
        match (self, directory) {
            (Self::NotSupported(_), Some(tags)) => Self::NotSupported(tiff::kind(tags, reader)),
            (error, _) => error,
        }
    }
}

impl From<std::io::Error> for DecodeError {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::UnexpectedEof {
            return Self::Broken("the file is truncated".into());
        }
        Self::Broken(error.into())
    }
}

/// Properties of an image that are known before its pixels are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) format: ImageFormat,
    /// Width in pixels, before orientation.
    pub(super) width: u32,
    /// Height in pixels, before orientation.
    pub(super) height: u32,
    /// Orientation of EXIF or XMP to apply to the stored pixels.
    pub(super) orientation: Orientation,
    /// Whether the file has another page or frame.
    pub(super) is_of_several: bool,
    /// Number of scans of a JPEG: the decoder goes through the pixels once for each. 1 for other
    /// formats.
    pub(super) num_scans: u32,
}

/// A source of image bytes.
pub(super) trait Image: BufRead + Seek {
    /// Enables read-ahead. Called before a part of the file of which every page is read.
    fn all_pages(&self) {}
}

impl<T: AsRef<[u8]>> Image for Cursor<T> {}

impl Image for BufReader<File> {
    #[cfg(not(target_vendor = "apple"))]
    fn all_pages(&self) {
        let _ = rustix::fs::fadvise(self.get_ref(), 0, None, rustix::fs::Advice::Normal);
    }
}

/// Prepares a file for reading its headers only.
///
/// Disables the read-ahead of the operating system until [`Image::all_pages`] is called. For files
/// that are not in the page cache, read-ahead takes most of the time of reading a header.
pub(super) fn for_headers(file: BufReader<File>) -> BufReader<File> {
    let file = file.into_inner(); // the buffer is still empty
    // an error only means that reading is slower
    #[cfg(not(target_vendor = "apple"))]
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    BufReader::with_capacity(BUFFER, file)
}

/// Number of bytes read at a time. It is below a page because most reads of a PNG only fetch the
/// start of a chunk.
const BUFFER: usize = 1 << 10;

/// Maximum size of an `eXIf` chunk of a PNG, in bytes; a larger chunk is ignored. A JPEG limits
/// EXIF to 64 KiB.
const MAX_EXIF_BYTES: u32 = 1 << 20;

impl Header {
    /// Reads the headers from the start of `reader`.
    pub(super) fn read(reader: &mut impl Image) -> Result<Self, DecodeError> {
        let start = reader.fill_buf()?;
        if start.is_empty() {
            return Err(DecodeError::Broken("the file is empty".into()));
        }
        let format = image::guess_format(start).map_err(|_| DecodeError::UnknownFormat)?;
        let mut pixel_bytes = 3; // 8-bit RGB
        let (mut is_of_several, mut num_scans) = (false, 1);
        let (width, height, orientation) = match format {
            ImageFormat::Jpeg => {
                let (size, scans) = jpeg::read(reader)?;
                num_scans = scans;
                size
            }
            ImageFormat::Png => {
                let header = png::read(reader)?;
                pixel_bytes = decoded_bytes(header.color);
                is_of_several = header.is_animation;
                header.size
            }
            ImageFormat::WebP => {
                let mut decoder = WebPDecoder::new(reader)?;
                let (width, height) = decoder.dimensions();
                pixel_bytes = 4 + 3; // the decoder copies RGB from a buffer of RGBA
                is_of_several = decoder.has_animation();
                let exif = decoder.exif_metadata()?.unwrap_or_default();
                let xmp = || decoder.xmp_metadata().ok().flatten().unwrap_or_default();
                (width, height, tags::orientation(&exif, xmp))
            }
            ImageFormat::Gif => {
                pixel_bytes = 4 + 4; // a frame, and the image that it is copied to
                let size = without_exif(&GifDecoder::new(&mut *reader)?);
                is_of_several = FirstFrame::read(reader).is_some_and(|frame| frame.is_of_several);
                size
            }
            ImageFormat::Bmp => {
                let decoder = BmpDecoder::new(reader)?;
                pixel_bytes = decoded_bytes(decoder.color_type());
                without_exif(&decoder)
            }
            ImageFormat::Tiff => {
                let directory = Directory::read(reader);
                let tags = directory.as_ref();
                let indexed = tags.and_then(|tags| Indexed::read(tags, reader));
                let [width, height] = if let Some(indexed) = &indexed {
                    pixel_bytes = 4; // an index and its colour
                    [indexed.width, indexed.height]
                } else {
                    reader.rewind()?;
                    let size = TiffDecoder::new(&mut *reader).map(|decoder| {
                        pixel_bytes = decoded_bytes(decoder.color_type());
                        <[u32; 2]>::from(decoder.dimensions())
                    });
                    size.map_err(|error| DecodeError::from(error).of_tiff(tags, reader))?
                };
                is_of_several = tags.is_some_and(|tags| tags.next != 0);
                let orientation = tags.map(|tags| tags.orientation_of_file(reader));
                (width, height, orientation.unwrap_or(Orientation::NoTransforms))
            }
            _ => return Err(DecodeError::UnknownFormat),
        };
        if width == 0 || height == 0 {
            return Err(DecodeError::Broken("its width or height is 0".into()));
        }
        let limit = MAX_PIXELS.min(MAX_DECODED_BYTES / pixel_bytes);
        if u64::from(width) * u64::from(height) > limit {
            return Err(DecodeError::TooLarge { width, height, limit });
        }
        Ok(Self { format, width, height, orientation, is_of_several, num_scans })
    }

    /// `[height, width]` after orientation.
    pub(super) fn upright_size(&self) -> [u32; 2] {
        if swaps_sides(self.orientation) {
            [self.width, self.height]
        } else {
            [self.height, self.width]
        }
    }
}

/// Returns whether the orientation swaps width and height.
pub(crate) fn swaps_sides(orientation: Orientation) -> bool {
    matches!(
        orientation,
        Orientation::Rotate90
            | Orientation::Rotate270
            | Orientation::Rotate90FlipH
            | Orientation::Rotate270FlipH
    )
}

fn without_exif(decoder: &impl ImageDecoder) -> (u32, u32, Orientation) {
    let (width, height) = decoder.dimensions();
    (width, height, Orientation::NoTransforms)
}

fn bytes<const N: usize>(reader: &mut impl BufRead) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes).map(|()| bytes)
}

/// Largest number of bytes for each pixel that decoding to `color` and converting to 8-bit RGB take.
/// Values of 16 bits become 8 bits in a second buffer, and grey becomes RGB in another one. Alpha
/// is removed in place.
const fn decoded_bytes(color: ColorType) -> u64 {
    match color {
        ColorType::Rgb8 => 3,
        ColorType::L8 | ColorType::L16 | ColorType::Rgba8 => 4,
        ColorType::La8 => 5,
        ColorType::La16 => 6,
        ColorType::Rgb16 => 9,
        ColorType::Rgba16 => 12,
        _ => 16, // 32 bits, which are not supported
    }
}

/// Width, height, orientation.
type Size = (u32, u32, Orientation);

#[cfg(test)]
mod tests;
