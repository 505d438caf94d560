//! Decodes the bytes of an image to upright 8-bit RGB, `[height, width, 3]`.
//!
//! Grey is repeated for the three channels, palettes are expanded, 16-bit values become
//! `round(value / 257)`, and every kind of transparency is composited on white with the arithmetic
//! of Pillow's `alpha_composite`. Only the first frame of an animation is decoded. Incomplete files
//! are errors.

use std::borrow::Cow;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use image::metadata::Orientation;
use image::{DynamicImage, ImageFormat, ImageReader, Limits};

use super::header::{
    DecodeError, Directory, FirstFrame, Header, Indexed, MAX_DECODED_BYTES, swaps_sides,
};

/// 8-bit RGB, `[height, width, 3]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rgb {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) data: Vec<u8>,
}

/// Number of pixels above which images are decoded one after the other, so that the memory for them
/// does not depend on the number of threads.
const LARGE: u64 = 1 << 26;
static ONE_LARGE: Mutex<()> = Mutex::new(());

/// Decodes the bytes of a whole file. Returns its pixels, and whether the file has another page or
/// frame. A JPEG with more scans than `most_scans` is an error.
pub(super) fn decode(bytes: &[u8], most_scans: u32) -> Result<(Rgb, bool), DecodeError> {
    // A decoder that panics on a damaged image must not stop the run: reject only this image.
    catch_unwind(AssertUnwindSafe(|| decode_or_panic(bytes, most_scans)))
        .unwrap_or_else(|_| Err(DecodeError::Broken("the decoder panicked".into())))
}

fn decode_or_panic(bytes: &[u8], most_scans: u32) -> Result<(Rgb, bool), DecodeError> {
    let header = Header::read(&mut Cursor::new(bytes))?;
    if header.num_scans > most_scans {
        let kind = format!("JPEG with {} scans, more than {most_scans}", header.num_scans);
        return Err(DecodeError::NotSupported(kind));
    }
    let is_large = u64::from(header.width) * u64::from(header.height) > LARGE;
    let _turn = is_large.then(|| ONE_LARGE.lock().unwrap_or_else(PoisonError::into_inner));
    let [height, width] = [header.height as usize, header.width as usize];
    let rgb = match header.format {
        ImageFormat::Jpeg => {
            let data = jpeg::decode(bytes, [height, width])?;
            Rgb { width, height, data }
        }
        ImageFormat::Tiff => tiff(bytes)?,
        // The decoders accept incomplete files: missing pixels become grey, and an orientation that
        // is stored after the pixels is lost.
        ImageFormat::WebP if !riff_is_whole(bytes) => {
            return Err(DecodeError::Broken("the file is truncated".into()));
        }
        ImageFormat::Png if !png_has_an_end(bytes) => {
            return Err(DecodeError::Broken("the file is truncated".into()));
        }
        ImageFormat::Png => to_rgb(image(&without_profile_and_texts(bytes), header.format)?)?,
        ImageFormat::Gif => gif(bytes)?,
        ImageFormat::Bmp => bmp(bytes)?,
        format => to_rgb(image(bytes, format)?)?,
    };
    if [rgb.height, rgb.width] != [height, width] {
        return Err(DecodeError::Broken("its pixels and its header differ in size".into()));
    }
    Ok((upright(rgb, header.orientation), header.is_of_several))
}

impl From<jpeg::JpegError> for DecodeError {
    fn from(error: jpeg::JpegError) -> Self {
        match error {
            jpeg::JpegError::Unsupported(kind) => Self::NotSupported(format!("JPEG with {kind}")),
            error => Self::Broken(error.into()),
        }
    }
}

fn image(bytes: &[u8], format: ImageFormat) -> Result<DynamicImage, DecodeError> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::no_limits();
    // the pixels, and the same again for the decoder's buffers
    limits.max_alloc = Some(2 * MAX_DECODED_BYTES);
    reader.limits(limits);
    Ok(DynamicImage::from_decoder(reader.into_decoder()?)?)
}

/// Decodes the first page.
fn tiff(bytes: &[u8]) -> Result<Rgb, DecodeError> {
    let reader = &mut Cursor::new(bytes);
    let directory = Directory::read(reader);
    let tags = directory.as_ref();
    let of_tiff = |error: DecodeError| error.of_tiff(tags, &mut Cursor::new(bytes));
    let Some((tags, indexed)) = tags.and_then(|tags| Some((tags, Indexed::read(tags, reader)?)))
    else {
        return image(bytes, ImageFormat::Tiff).and_then(to_rgb).map_err(of_tiff);
    };
    let grey = indexed.as_grey(tags, bytes);
    let grey = grey.ok_or_else(|| of_tiff(DecodeError::NotSupported(String::new())))?;
    let indices = image(&grey, ImageFormat::Tiff).map_err(of_tiff)?.into_luma8();
    let data = indexed.colours(&indices);
    Ok(Rgb { width: indexed.width as usize, height: indexed.height as usize, data })
}

/// Decodes the first frame. Pillow fills the canvas around it with the first colour of the palette,
/// or leaves it transparent if the frame has transparency.
fn gif(bytes: &[u8]) -> Result<Rgb, DecodeError> {
    let mut rgb = to_rgb(image(bytes, ImageFormat::Gif)?)?;
    let first = FirstFrame::read(&mut Cursor::new(bytes));
    if let Some(FirstFrame { place: [left, top, width, height], around: Some(colour), .. }) = first
    {
        let columns = left..left + width;
        for (at, pixel) in rgb.data.as_chunks_mut::<3>().0.iter_mut().enumerate() {
            let (x, y) = (at % rgb.width, at / rgb.width);
            if !(columns.contains(&x) && (top..top + height).contains(&y)) {
                *pixel = colour;
            }
        }
    }
    Ok(rgb)
}

/// Decodes a BMP. Pillow rounds values of 5 and 6 bits down, and the decoder to the nearest.
fn bmp(bytes: &[u8]) -> Result<Rgb, DecodeError> {
    const BITFIELDS: u32 = 3;
    let mut rgb = to_rgb(image(bytes, ImageFormat::Bmp)?)?;
    let number = |at: usize| {
        let bytes = bytes.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    };
    let [bits, compression, masks @ ..] =
        [number(28) & 0xffff, number(30), number(54), number(58), number(62)];
    let bits_of = |channel: usize| match compression {
        BITFIELDS => masks[channel].count_ones(),
        _ => 5,
    };
    if bits == 16 {
        let largest = [0, 1, 2].map(|channel| (1_u32 << bits_of(channel).min(8)) - 1);
        for pixel in rgb.data.as_chunks_mut::<3>().0 {
            for (value, largest) in pixel.iter_mut().zip(largest) {
                let stored = (u32::from(*value) * largest + 127) / 255;
                *value = (stored * 255).checked_div(largest).unwrap_or(0) as u8;
            }
        }
    }
    Ok(rgb)
}

/// Leaves out the colour profile and the texts of a PNG. They are not used, and the decoder would
/// inflate them: a profile of 1 MB can become 1 GB.
fn without_profile_and_texts(bytes: &[u8]) -> Cow<'_, [u8]> {
    let mut kept = Vec::new();
    let (mut at, mut copied) = (8, 0);
    while let Some([l0, l1, l2, l3, kind @ ..]) = bytes.get(at..).and_then(<[u8]>::first_chunk::<8>)
    {
        let end = at.saturating_add(12 + u32::from_be_bytes([*l0, *l1, *l2, *l3]) as usize);
        if [b"iCCP", b"tEXt", b"zTXt", b"iTXt"].contains(&kind) && end <= bytes.len() {
            kept.extend_from_slice(&bytes[copied..at]);
            copied = end;
        }
        at = end;
    }
    if copied == 0 {
        return Cow::Borrowed(bytes);
    }
    kept.extend_from_slice(&bytes[copied..]);
    Cow::Owned(kept)
}

/// Returns whether the chunks end with `IEND`.
fn png_has_an_end(bytes: &[u8]) -> bool {
    let mut at = 8;
    while let Some([l0, l1, l2, l3, kind @ ..]) = bytes.get(at..).and_then(<[u8]>::first_chunk::<8>)
    {
        if kind == b"IEND" {
            return true;
        }
        at += 12 + u32::from_be_bytes([*l0, *l1, *l2, *l3]) as usize;
    }
    false
}

/// Returns whether the file has all bytes that the RIFF container declares.
fn riff_is_whole(bytes: &[u8]) -> bool {
    bytes[4..]
        .first_chunk()
        .is_some_and(|size| bytes.len() as u64 >= 8 + u64::from(u32::from_le_bytes(*size)))
}

fn to_rgb(image: DynamicImage) -> Result<Rgb, DecodeError> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let data = match image {
        DynamicImage::ImageRgb8(pixels) => pixels.into_raw(),
        DynamicImage::ImageLuma8(pixels) => grey(&pixels),
        DynamicImage::ImageLuma16(pixels) => grey(&eight_bits(pixels.into_raw())),
        DynamicImage::ImageLumaA8(pixels) => grey_alpha(&pixels),
        DynamicImage::ImageLumaA16(pixels) => grey_alpha(&eight_bits(pixels.into_raw())),
        DynamicImage::ImageRgb16(pixels) => eight_bits(pixels.into_raw()),
        DynamicImage::ImageRgba8(pixels) => rgb_alpha(pixels.into_raw()),
        DynamicImage::ImageRgba16(pixels) => rgb_alpha(eight_bits(pixels.into_raw())),
        other => {
            let problem = format!("colour type `{:?}`", other.color());
            return Err(DecodeError::NotSupported(problem));
        }
    };
    Ok(Rgb { width, height, data })
}

/// Converts 16-bit to 8-bit values by `round(value / 257)`: 65535 becomes 255. Frees the values.
fn eight_bits(values: Vec<u16>) -> Vec<u8> {
    values.into_iter().map(|value| ((u32::from(value) + 128) / 257) as u8).collect()
}

fn grey(values: &[u8]) -> Vec<u8> {
    values.iter().flat_map(|value| [*value; 3]).collect()
}

fn grey_alpha(pixels: &[u8]) -> Vec<u8> {
    pixels.as_chunks().0.iter().flat_map(|[value, alpha]| [on_white(*value, *alpha); 3]).collect()
}

/// Uses the memory of `pixels` for the result.
fn rgb_alpha(mut pixels: Vec<u8>) -> Vec<u8> {
    let count = pixels.len() / 4;
    for i in 0..count {
        if let Some([r, g, b, alpha]) = pixels[4 * i..].first_chunk().copied() {
            let rgb = [r, g, b].map(|c| on_white(c, alpha));
            pixels[3 * i..3 * i + 3].copy_from_slice(&rgb);
        }
    }
    pixels.truncate(3 * count);
    pixels.shrink_to_fit();
    pixels
}

/// Composites `value` on white, rounded as in Pillow's `alpha_composite`.
fn on_white(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    let sum = ((value * alpha + 255 * (255 - alpha)) << 7) + (0x80 << 7);
    ((((sum >> 8) + sum) >> 8) >> 7) as u8
}

/// Applies an EXIF orientation. Each row of the result reads the source with a fixed stride.
pub(crate) fn upright(image: Rgb, orientation: Orientation) -> Rgb {
    // Copy in square tiles, so that a column of the source stays in the cache.
    const TILE: usize = 64;
    let (w, h) = (image.width as isize, image.height as isize);
    // Index of the source pixel for (0, 0) of the result, and its increments per step right and
    // per step down.
    let (origin, right, down) = match orientation {
        Orientation::NoTransforms => return image,
        Orientation::FlipHorizontal => (w - 1, -1, w),
        Orientation::Rotate180 => (w * h - 1, -1, -w),
        Orientation::FlipVertical => (w * (h - 1), 1, -w),
        Orientation::Rotate90FlipH => (0, w, 1),
        Orientation::Rotate90 => (w * (h - 1), -w, 1),
        Orientation::Rotate270FlipH => (w * h - 1, -w, -1),
        Orientation::Rotate270 => (w - 1, w, -1),
    };
    let (width, height) = if swaps_sides(orientation) {
        (image.height, image.width)
    } else {
        (image.width, image.height)
    };
    let source = image.data.as_chunks::<3>().0;
    let mut data = vec![0; image.data.len()];
    let target = data.as_chunks_mut::<3>().0;
    for top in (0..height).step_by(TILE) {
        for left in (0..width).step_by(TILE) {
            for y in top..height.min(top + TILE) {
                for x in left..width.min(left + TILE) {
                    let from = origin + x as isize * right + y as isize * down;
                    target[y * width + x] = source[from as usize];
                }
            }
        }
    }
    Rgb { width, height, data }
}

#[cfg(test)]
mod tests {
    use super::super::golden;
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Rgb, DecodeError> {
        super::decode(bytes, u32::MAX).map(|(rgb, _)| rgb)
    }

    #[test]
    fn every_format_and_colour_type_decodes_to_the_reference_rgb() {
        let expected = golden::images("rgb/");
        assert!(expected.len() > 50);
        for (name, expected) in expected {
            let found = decode(&golden::fixture(&name)).unwrap();
            assert_eq!((found.width, found.height), (expected.width, expected.height), "{name}");
            assert!(found == expected, "the pixels of {name} differ");
        }
    }

    #[test]
    fn a_tiff_decodes_to_the_pixels_of_the_png_and_a_truncated_one_is_an_error() {
        let pixels = |name: &str| decode(&golden::fixture(name)).unwrap();
        for (name, same) in [
            ("rgb.tif", "rgb.png"),
            ("grey.tif", "grey.png"),
            ("orientation_6.tif", "orientation_6.png"),
            ("two_pages.tif", "rgb.png"),
        ] {
            let found = pixels(name);
            assert!(found == pixels(same), "{name}");
            let bytes = golden::fixture(name);
            for length in 0..bytes.len() {
                if let Ok(part) = decode(&bytes[..length]) {
                    assert!(part == found, "{name} cut to {length}");
                }
            }
        }
    }

    #[test]
    fn a_second_page_or_frame_is_noticed() {
        let is_of_several = |name: &str| super::decode(&golden::fixture(name), u32::MAX).unwrap().1;
        for name in ["two_pages.tif", "animated.gif", "animated.webp"] {
            assert!(is_of_several(name), "{name}");
        }
        for name in ["rgb.tif", "palette_lzw.tif", "palette.gif", "lossless.webp", "rgb.png"] {
            assert!(!is_of_several(name), "{name}");
        }
    }

    #[test]
    fn a_jpeg_has_at_most_the_given_number_of_scans() {
        let decode = |most| super::decode(&golden::fixture("progressive.jpg"), most);
        assert!(decode(10).is_ok());
        let error = decode(9).unwrap_err();
        assert!(matches!(error, DecodeError::NotSupported(kind) if kind.contains("10 scans")));
    }

    #[test]
    fn a_truncated_file_is_an_error_or_decodes_to_the_same_pixels() {
        for (name, _) in golden::images("rgb/") {
            if name.contains(".tif") {
                continue; // the test above
            }
            let bytes = golden::fixture(&name);
            let whole = decode(&bytes).unwrap();
            // Long files have too many lengths to test; take 400 of them, evenly spaced.
            for length in (0..bytes.len()).step_by(1 + bytes.len() / 400) {
                if let Ok(part) = decode(&bytes[..length]) {
                    let spare = name.contains(".gif") || length + 8 >= bytes.len();
                    assert!(spare && part == whole, "{name} cut to {length}");
                }
            }
        }
    }

    #[test]
    fn damaged_bytes_never_make_a_decoder_panic() {
        for (name, _) in golden::images("rgb/") {
            let bytes = golden::fixture(&name);
            for at in (0..bytes.len()).step_by(1 + bytes.len() / 60) {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0xff;
                damaged[at / 2] ^= 0x10;
                if let Err(DecodeError::Broken(error)) = decode(&damaged) {
                    assert!(!error.to_string().contains("panicked"), "{name} damaged at {at}");
                }
            }
        }
    }

    #[test]
    fn a_colour_profile_and_texts_of_a_png_are_not_read() {
        let image = golden::fixture("rgb.png");
        let header_end = 8 + 25; // signature and `IHDR`
        let mut with_more = image[..header_end].to_vec();
        for kind in [b"iCCP", b"zTXt", b"iTXt", b"tEXt"] {
            with_more.extend_from_slice(&5_u32.to_be_bytes());
            with_more.extend_from_slice(kind);
            with_more.extend_from_slice(b"junk.????"); // no profile, and a wrong checksum
        }
        with_more.extend_from_slice(&image[header_end..]);
        assert_eq!(*without_profile_and_texts(&with_more), *without_profile_and_texts(&image));
        assert_eq!(decode(&with_more).unwrap(), decode(&image).unwrap());
    }

    #[test]
    fn transparency_on_white_rounds_as_in_the_reference() {
        let table: Vec<u8> = (0..=255)
            .flat_map(|value| (0..=255).map(move |alpha| on_white(value, alpha)))
            .collect();
        assert_eq!(golden::json()["over_white_sha256"], golden::sha256(&table));
    }

    #[test]
    fn an_image_of_too_many_pixels_is_rejected_from_its_header() {
        let mut bomb = golden::fixture("rgb.png");
        bomb[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0x10, 1]); // 65536 x 4097
        let found = decode(&bomb);
        assert!(matches!(found, Err(DecodeError::TooLarge { width: 65536, height: 4097, .. })));
    }

    #[test]
    fn unknown_formats_and_damaged_images_are_different_errors() {
        let broken = |bytes: &[u8]| matches!(decode(bytes), Err(DecodeError::Broken(_)));
        let unknown = |bytes: &[u8]| matches!(decode(bytes), Err(DecodeError::UnknownFormat));
        assert!(broken(b""));
        assert!(broken(&golden::fixture("rgb.png")[..20]));
        assert!(broken(b"\xff\xd8\xff\xd9"));
        assert!(unknown(b"<html>404</html>"));
        assert!(unknown(b"\0\0\0\x1cftypavif"));
    }
}
