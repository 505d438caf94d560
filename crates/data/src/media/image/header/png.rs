//! The chunks of a PNG without its pixels.

use std::io::{Read as _, SeekFrom};

use image::ColorType;

use super::{DecodeError, Image, MAX_EXIF_BYTES, Size, bytes, tags};

/// Minimum length of a PNG chunk, in bytes, for which read-ahead stays disabled. Shorter chunks
/// start on every page of the file.
const LARGE_CHUNK: u32 = 1 << 15;

pub(super) struct PngHeader {
    pub(super) size: Size,
    /// The type to which the decoder expands the pixels.
    pub(super) color: ColorType,
    pub(super) is_animation: bool,
}

/// Reads the headers. The chunks with the orientation may follow the pixels; `tRNS` must precede
/// them.
pub(super) fn read(reader: &mut impl Image) -> Result<PngHeader, DecodeError> {
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
            if tags::of_exif(&block).is_some() {
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
    let orientation = tags::orientation(&exif.or(profile).unwrap_or_default(), || xmp);
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
