//! Reads format, size and orientation of an image from its headers.
//!
//! `ImageProcessor::grid` and `ImageProcessor::load` both use this module, so they return the same
//! grid. The format is detected from the first bytes, not from the file name. JPEG segments and
//! PNG chunks are parsed here because the decoders would read the whole file, or miss an `eXIf`
//! chunk after the pixels.

use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Seek, SeekFrom};

use image::codecs::{bmp::BmpDecoder, gif::GifDecoder, tiff::TiffDecoder, webp::WebPDecoder};
use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageFormat};

/// Maximum number of pixels of an image. Larger ones are rejected from the header, before memory
/// is allocated for them.
pub(in crate::data) const MAX_PIXELS: u64 = 1 << 27;
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
    /// The image is damaged or incomplete.
    Broken(Box<dyn Error + Send + Sync>),
}

impl From<image::ImageError> for DecodeError {
    fn from(error: image::ImageError) -> Self {
        Self::Broken(error.into())
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
    /// EXIF orientation to apply to the stored pixels.
    pub(super) orientation: Orientation,
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

/// Maximum number of bytes between two segments of a JPEG. Encoders write a few at most; the
/// decoder accepts any number.
const MAX_FILLER_BYTES: usize = 1 << 20;

/// Maximum size of an `eXIf` chunk of a PNG, in bytes; a larger chunk is ignored. A JPEG limits
/// EXIF to 64 KiB.
const MAX_EXIF_BYTES: u32 = 1 << 20;

/// Minimum length of a PNG chunk, in bytes, for which read-ahead stays disabled. Shorter chunks
/// start on every page of the file.
const LARGE_CHUNK: u32 = 1 << 15;

impl Header {
    /// Reads the headers from the start of `reader`.
    pub(super) fn read(reader: &mut impl Image) -> Result<Self, DecodeError> {
        let start = reader.fill_buf()?;
        if start.is_empty() {
            return Err(DecodeError::Broken("the file is empty".into()));
        }
        let format = image::guess_format(start).map_err(|_| DecodeError::UnknownFormat)?;
        let mut pixel_bytes = 3; // 8-bit RGB
        let (width, height, orientation) = match format {
            ImageFormat::Jpeg => jpeg(reader)?,
            ImageFormat::Png => {
                let (header, color) = png(reader)?;
                pixel_bytes = decoded_bytes(color);
                header
            }
            ImageFormat::WebP => {
                let mut decoder = WebPDecoder::new(reader)?;
                let orientation = orientation(&decoder.exif_metadata()?.unwrap_or_default());
                let (width, height) = decoder.dimensions();
                pixel_bytes = 4 + 3; // the decoder copies RGB from a buffer of RGBA
                (width, height, orientation)
            }
            ImageFormat::Gif => {
                pixel_bytes = 4 + 4; // a frame, and the image that it is copied to
                without_exif(&GifDecoder::new(reader)?)
            }
            ImageFormat::Bmp => {
                let decoder = BmpDecoder::new(reader)?;
                pixel_bytes = decoded_bytes(decoder.color_type());
                without_exif(&decoder)
            }
            ImageFormat::Tiff => {
                let mut decoder = TiffDecoder::new(reader)?;
                let (width, height) = decoder.dimensions();
                pixel_bytes = decoded_bytes(decoder.color_type());
                (width, height, decoder.orientation()?)
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
        Ok(Self { format, width, height, orientation })
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
pub(in crate::data) fn swaps_sides(orientation: Orientation) -> bool {
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

/// Reads the orientation from an EXIF block. Some encoders write JPEG's prefix `Exif\0\0` in other
/// formats too, so it is removed if present.
fn orientation(exif: &[u8]) -> Orientation {
    let exif = exif.strip_prefix(EXIF_PREFIX).unwrap_or(exif);
    Orientation::from_exif_chunk(exif).unwrap_or(Orientation::NoTransforms)
}

const EXIF_PREFIX: &[u8] = b"Exif\0\0";

fn bytes<const N: usize>(reader: &mut impl BufRead) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes).map(|()| bytes)
}

fn next_byte(reader: &mut impl BufRead, filler: &mut usize) -> Result<u8, DecodeError> {
    *filler += 1;
    if *filler > MAX_FILLER_BYTES {
        return Err(DecodeError::Broken("1 MiB of the JPEG contains no segment".into()));
    }
    let [byte] = bytes(reader)?;
    Ok(byte)
}

/// Reads width, height and orientation from the segments before the first scan.
fn jpeg(reader: &mut (impl BufRead + Seek)) -> Result<(u32, u32, Orientation), DecodeError> {
    let mut exif = None;
    let mut size = None;
    bytes::<2>(reader)?; // start of image
    let mut filler = 0; // bytes since the last segment
    loop {
        while next_byte(reader, &mut filler)? != 0xff {} // skip bytes between segments
        let marker = loop {
            match next_byte(reader, &mut filler)? {
                0xff => {}
                marker => break marker,
            }
        };
        if matches!(marker, 0x00 | 0x01 | 0xd0..=0xd8) {
            continue; // has no length
        }
        if matches!(marker, 0xd9 | 0xda) {
            break; // end of image, start of scan
        }
        filler = 0;
        let length = u16::from_be_bytes(bytes(reader)?).saturating_sub(2);
        match marker {
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) && length >= 5 => {
                let [_precision, h0, h1, w0, w1] = bytes(reader)?;
                size = size.or(Some([[w0, w1], [h0, h1]].map(u16::from_be_bytes)));
                reader.seek_relative(i64::from(length) - 5)?;
            }
            0xe1 if exif.is_none() => {
                let mut block = vec![0; usize::from(length)];
                reader.read_exact(&mut block)?;
                exif = Some(block).filter(|block| block.starts_with(EXIF_PREFIX));
            }
            _ => reader.seek_relative(i64::from(length))?,
        }
    }
    let Some([width, height]) = size else {
        return Err(DecodeError::Broken("it has no frame header before the first scan".into()));
    };
    Ok((width.into(), height.into(), orientation(&exif.unwrap_or_default())))
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

/// Reads the size, and the colour type to which the decoder expands the pixels. The `eXIf` chunk may
/// follow the pixels; `tRNS` must precede them.
fn png(reader: &mut impl Image) -> Result<(Size, ColorType), DecodeError> {
    let [_signature, [_, _, _, _, b'I', b'H', b'D', b'R']] = [bytes::<8>(reader)?, bytes(reader)?]
    else {
        return Err(DecodeError::Broken("its first chunk is not `IHDR`".into()));
    };
    let [width, height] = [u32::from_be_bytes(bytes(reader)?), u32::from_be_bytes(bytes(reader)?)];
    let [depth, kind] = bytes(reader)?;
    let color = |has_alpha: bool| match (depth == 16, kind, has_alpha) {
        (false, 0, false) => ColorType::L8,
        (true, 0, false) => ColorType::L16,
        (false, 0 | 4, _) => ColorType::La8,
        (true, 0 | 4, _) => ColorType::La16,
        (false, 2 | 3, false) => ColorType::Rgb8,
        (true, 2 | 3, false) => ColorType::Rgb16,
        (false, ..) => ColorType::Rgba8,
        (true, ..) => ColorType::Rgba16,
    };
    let (mut has_alpha, mut has_pixels) = (false, false);
    let end = reader.seek(SeekFrom::End(0))?;
    let mut at = 8 + 12 + 13;
    let mut has_read_ahead = false;
    reader.seek(SeekFrom::Start(at))?;
    while at + 12 <= end {
        let length = u32::from_be_bytes(bytes(reader)?);
        let kind: [u8; 4] = bytes(reader)?;
        // stop at bytes that are not a chunk: parsed as chunks, they could be millions
        if !kind.iter().all(u8::is_ascii_alphabetic) || &kind == b"IEND" {
            break;
        }
        if &kind == b"IDAT" && length < LARGE_CHUNK && !has_read_ahead {
            reader.all_pages();
            has_read_ahead = true;
        }
        has_alpha |= &kind == b"tRNS";
        has_pixels |= &kind == b"IDAT";
        if &kind == b"eXIf" && length <= MAX_EXIF_BYTES && at + 12 + u64::from(length) <= end {
            let mut exif = vec![0; length as usize];
            reader.read_exact(&mut exif)?;
            // `tRNS` may be between this chunk and the pixels
            let has_alpha = has_alpha || !has_pixels;
            return Ok(((width, height, orientation(&exif)), color(has_alpha)));
        }
        at += 12 + u64::from(length);
        reader.seek_relative(i64::from(length) + 4)?; // keeps the buffer across small chunks
    }
    Ok(((width, height, Orientation::NoTransforms), color(has_alpha)))
}

#[cfg(test)]
mod tests;
