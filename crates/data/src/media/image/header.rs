//! Reads format, size and orientation of an image from its headers.
//!
//! `ImageProcessor::grid` and `ImageProcessor::load` both use this module, so they return the same
//! grid. The format is detected from the first bytes, not from the file name. JPEG segments and PNG
//! chunks are parsed here because the decoders would read the whole file, or miss an `eXIf` chunk
//! after the pixels.

#[cfg(test)]
mod tests;
mod tiff;

use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read as _, Seek, SeekFrom};

use image::codecs::bmp::BmpDecoder;
use image::codecs::gif::GifDecoder;
use image::codecs::tiff::TiffDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageFormat};

pub(super) use tiff::{Directory, Indexed};

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
                let (size, scans) = read_jpeg(reader)?;
                num_scans = scans;
                size
            }
            ImageFormat::Png => {
                let header = read_png(reader)?;
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
                (width, height, tiff::orientation(&exif, xmp))
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
type UprightSize = (u32, u32, Orientation);

/// Maximum number of bytes between two segments of a JPEG. Encoders write a few at most; the
/// decoder accepts any number.
const MAX_FILLER_BYTES: usize = 1 << 20;

fn next_byte(reader: &mut impl BufRead, filler: &mut usize) -> Result<u8, DecodeError> {
    *filler += 1;
    if *filler > MAX_FILLER_BYTES {
        return Err(DecodeError::Broken("1 MiB of the JPEG contains no segment".into()));
    }
    let [byte] = bytes(reader)?;
    Ok(byte)
}

/// Reads width, height and orientation from the segments before the first scan, and the number of
/// scans.
fn read_jpeg(reader: &mut impl Image) -> Result<(UprightSize, u32), DecodeError> {
    let (mut exif, mut xmp) = (Vec::new(), Vec::new());
    let (mut size, mut has_more_scans) = (None, false);
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
        if marker == 0xd9 {
            break; // end of image
        }
        if marker == 0xda {
            // a scan of some of the components, or the first one of a progressive file
            let [_, _, components] = bytes(reader)?;
            has_more_scans |= size.is_some_and(|(_, all)| components < all);
            break;
        }
        filler = 0;
        let length = u16::from_be_bytes(bytes(reader)?).saturating_sub(2);
        match marker {
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) && length >= 5 => {
                let [_precision, h0, h1, w0, w1] = bytes(reader)?;
                let [components] = if length > 5 { bytes(reader)? } else { [0] };
                size = size.or(Some(([[w0, w1], [h0, h1]].map(u16::from_be_bytes), components)));
                has_more_scans = marker == 0xc2;
                reader.seek_relative(i64::from(length.saturating_sub(6)))?;
            }
            0xe1 if exif.len() <= MAX_EXIF_BYTES as usize => {
                let mut block = vec![0; usize::from(length)];
                reader.read_exact(&mut block)?;
                if let Some(more) = block.strip_prefix(b"Exif\0\0") {
                    exif.extend_from_slice(more); // long EXIF continues in the next segment
                } else if let Some(text) = block.strip_prefix(b"http://ns.adobe.com/xap/1.0/\0") {
                    xmp = text.to_vec();
                }
            }
            _ => reader.seek_relative(i64::from(length))?,
        }
    }
    let Some(([width, height], _)) = size else {
        return Err(DecodeError::Broken("it has no frame header before the first scan".into()));
    };
    let num_scans = if has_more_scans { num_scans(reader)? } else { 1 };
    Ok(((width.into(), height.into(), tiff::orientation(&exif, || xmp)), num_scans))
}

/// Number of scans of a JPEG. `reader` is inside the header of the first one.
fn num_scans(reader: &mut impl Image) -> Result<u32, DecodeError> {
    reader.all_pages();
    let mut num_scans = 1;
    while reader.skip_until(0xff)? > 0 {
        let marker = loop {
            match reader.fill_buf()?.first().copied() {
                Some(0xff) => reader.consume(1),
                marker => break marker,
            }
        };
        match marker {
            None | Some(0xd9) => break,
            Some(0x00 | 0x01 | 0xd0..=0xd8) => {}
            Some(marker) => {
                num_scans += u32::from(marker == 0xda);
                // the decoder reports that the file is truncated
                let Ok([_, l0, l1]) = bytes(reader) else { break };
                let length = u16::from_be_bytes([l0, l1]).saturating_sub(2);
                reader.seek_relative(length.into())?;
            }
        }
    }
    Ok(num_scans)
}

/// Minimum length of a PNG chunk, in bytes, for which read-ahead stays disabled. Shorter chunks
/// start on every page of the file.
const LARGE_CHUNK: u32 = 1 << 15;

struct PngHeader {
    size: UprightSize,
    /// The type to which the decoder expands the pixels.
    color: ColorType,
    is_animation: bool,
}

/// Reads the headers. The chunks with the orientation may follow the pixels; `tRNS` must precede
/// them.
fn read_png(reader: &mut impl Image) -> Result<PngHeader, DecodeError> {
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
    let (mut has_alpha, mut has_pixels, mut is_animation) = (false, false, false);
    let (mut exif, mut profile, mut xmp) = (None, None, Vec::new());
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
        is_animation |= &kind == b"acTL";
        let fits = length <= MAX_EXIF_BYTES && at + 12 + u64::from(length) <= end;
        let mut position = at + 8;
        if &kind == b"eXIf" && fits {
            let mut block = vec![0; length as usize];
            reader.read_exact(&mut block)?;
            if tiff::of_exif(&block).is_some() {
                exif = Some(block);
                break;
            }
            exif = Some(block);
            position += u64::from(length);
        } else if fits && matches!(&kind, b"tEXt" | b"zTXt" | b"iTXt") {
            match text(reader, kind, length)? {
                Some(Text::Exif(block)) => profile = Some(block),
                Some(Text::Xmp(text)) => xmp = text,
                None => {}
            }
            position = reader.stream_position()?;
        }
        let chunk_end = at + 12 + u64::from(length);
        // keeps the buffer across small chunks
        reader.seek_relative(chunk_end as i64 - position as i64)?;
        at = chunk_end;
    }
    // `tRNS` may be between the orientation and the pixels
    let color = color(has_alpha || exif.is_some() && !has_pixels);
    let orientation = tiff::orientation(&exif.or(profile).unwrap_or_default(), || xmp);
    Ok(PngHeader { size: (width, height, orientation), color, is_animation })
}

/// A text of a PNG that may have the orientation.
enum Text {
    Exif(Vec<u8>),
    Xmp(Vec<u8>),
}

/// Reads a chunk of this kind if it is EXIF, as ImageMagick writes it, or XMP. Skips other texts.
fn text(reader: &mut impl Image, kind: [u8; 4], length: u32) -> Result<Option<Text>, DecodeError> {
    const EXIF: &[u8] = b"Raw profile type exif\0";
    const XMP: &[u8] = b"XML:com.adobe.xmp\0";
    let mut chunk = vec![0; EXIF.len().min(length as usize)];
    reader.read_exact(&mut chunk)?;
    let is_exif = chunk == EXIF;
    if !is_exif && !chunk.starts_with(XMP) {
        return Ok(None);
    }
    chunk.drain(..if is_exif { EXIF.len() } else { XMP.len() });
    let at = chunk.len();
    chunk.resize(length as usize - if is_exif { EXIF.len() } else { XMP.len() }, 0);
    reader.read_exact(&mut chunk[at..])?;
    let inflated = |bytes: &[u8]| {
        let mut text = Vec::new();
        let inflated = flate2::read::ZlibDecoder::new(bytes).take(MAX_EXIF_BYTES.into());
        { inflated }.read_to_end(&mut text).map_or_else(|_| Vec::new(), |_| text)
    };
    let text = match (&kind, &chunk[..]) {
        (b"zTXt", [0, text @ ..]) => inflated(text),
        (b"iTXt", [is_compressed, 0, text @ ..]) => {
            // a language and a translation of the keyword precede the text
            let text = text.splitn(3, |byte| *byte == 0).nth(2).unwrap_or_default();
            if *is_compressed == 0 { text.to_vec() } else { inflated(text) }
        }
        (b"tEXt", text) => text.to_vec(),
        _ => return Ok(None),
    };
    if !is_exif {
        return Ok(Some(Text::Xmp(text)));
    }
    // three lines, of which the last is the length, then hexadecimal digits in lines
    let lines = text.split(|byte| *byte == b'\n').skip(3);
    let digits = lines.flatten().filter_map(|byte| char::from(*byte).to_digit(16));
    let digits: Vec<u8> = digits.map(|digit| digit as u8).collect();
    Ok(Some(Text::Exif(digits.as_chunks().0.iter().map(|[a, b]| a << 4 | b).collect())))
}

/// The first frame of a GIF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FirstFrame {
    /// Left, top, width and height in pixels of the canvas.
    pub(super) place: [usize; 4],
    /// Colour of the canvas around the frame; `None` if it is transparent.
    pub(super) around: Option<[u8; 3]>,
    /// Whether the file has another frame.
    pub(super) is_of_several: bool,
}

impl FirstFrame {
    /// Reads from the start of the file up to the second frame, or to where the file is damaged.
    pub(super) fn read(reader: &mut (impl BufRead + Seek)) -> Option<Self> {
        let mut first = None;
        // the decoder finds the defects of a damaged file
        let _ = Self::read_blocks(reader, &mut first);
        first
    }

    fn read_blocks(
        reader: &mut (impl BufRead + Seek),
        found: &mut Option<Self>,
    ) -> std::io::Result<()> {
        reader.rewind()?;
        let [_signature @ .., flags, _background, _aspect] = bytes::<13>(reader)?;
        let mut first_colour = first_of_palette(reader, flags)?;
        let mut is_transparent = false;
        loop {
            match bytes(reader)? {
                [b'!'] => {
                    if bytes(reader)? == [0xf9] && found.is_none() {
                        let [_length, flags] = bytes(reader)?;
                        reader.seek_relative(3)?;
                        is_transparent = flags & 1 > 0;
                    }
                    skip_blocks(reader)?;
                }
                [b','] => {
                    if let Some(first) = found {
                        first.is_of_several = true;
                        return Ok(());
                    }
                    let [x0, x1, y0, y1, w0, w1, h0, h1, flags] = bytes(reader)?;
                    let place = [[x0, x1], [y0, y1], [w0, w1], [h0, h1]];
                    let place = place.map(|side| u16::from_le_bytes(side).into());
                    first_colour = first_of_palette(reader, flags)?.or(first_colour);
                    let colour = first_colour.unwrap_or_default();
                    let around = (!is_transparent).then_some(colour);
                    *found = Some(Self { place, around, is_of_several: false });
                    let [_code_size] = bytes(reader)?;
                    skip_blocks(reader)?;
                }
                _ => return Ok(()),
            }
        }
    }
}

/// Reads the palette that `flags` declare. Returns its first colour.
fn first_of_palette(
    reader: &mut (impl BufRead + Seek),
    flags: u8,
) -> std::io::Result<Option<[u8; 3]>> {
    if flags & 0x80 == 0 {
        return Ok(None);
    }
    let first = bytes(reader)?;
    reader.seek_relative((3 << ((flags & 7) + 1)) - 3)?;
    Ok(Some(first))
}

/// Skips blocks of data up to an empty one.
fn skip_blocks(reader: &mut (impl BufRead + Seek)) -> std::io::Result<()> {
    loop {
        match bytes(reader)? {
            [0] => return Ok(()),
            [length] => reader.seek_relative(length.into())?,
        }
    }
}
