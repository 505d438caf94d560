//! Format, size and orientation of an image, from its headers alone.
//!
//! `grid` and `load` both ask here, so they cannot disagree. The format comes from the first bytes,
//! never from a name. JPEG and PNG are walked by hand: the decoders would read the whole file, or
//! miss an `eXIf` chunk behind the pixels.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Seek, SeekFrom};

use image::codecs::{bmp::BmpDecoder, gif::GifDecoder, webp::WebPDecoder};
use image::metadata::Orientation;
use image::{ImageDecoder, ImageFormat};

use super::decode::{DecodeError, MAX_PIXELS};

/// What is known before pixels are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) format: ImageFormat,
    /// Sides as stored.
    pub(super) width: u32,
    pub(super) height: u32,
    /// What EXIF says to do before showing it.
    pub(super) orientation: Orientation,
}

/// Something to read an image from.
pub(super) trait Image: BufRead + Seek {
    /// Said before a part of all pages is read; until then few of them are.
    fn all_pages(&self) {}
}

impl<T: AsRef<[u8]>> Image for Cursor<T> {}

impl Image for BufReader<File> {
    #[cfg(not(target_vendor = "apple"))]
    fn all_pages(&self) {
        let _ = rustix::fs::fadvise(self.get_ref(), 0, None, rustix::fs::Advice::Normal);
    }
}

/// A file whose headers alone are wanted: of pages that are not in memory, few are read.
///
/// The system reads no more than it is asked for until [`Image::all_pages`]: reading ahead is most of the
/// time of such a header.
pub(super) fn for_headers(file: BufReader<File>) -> BufReader<File> {
    let file = file.into_inner(); // nothing has been read
    // refused, it only takes longer
    #[cfg(not(target_vendor = "apple"))]
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    BufReader::with_capacity(BUFFER, file)
}

/// Bytes read at a time: the places where chunks of a PNG begin are a page each.
const BUFFER: usize = 1 << 10;

/// Bytes of a JPEG between segments that are put up with; encoders write a few at most. The decoder takes any number.
const MOST_FILLING: usize = 1 << 20;

/// An EXIF block is at most 64 KiB in a JPEG; a longer one in a PNG is none.
const MOST_EXIF: u32 = 1 << 20;

/// Chunks of PNG below this are met on all pages that are read.
const LARGE_CHUNK: u32 = 1 << 15;

impl Header {
    /// Reads the headers from the start of `reader`.
    pub(super) fn read(reader: &mut impl Image) -> Result<Self, DecodeError> {
        let start = reader.fill_buf()?;
        if start.is_empty() {
            return Err(DecodeError::Broken("the file is empty".into()));
        }
        let format = image::guess_format(start).map_err(|_| DecodeError::UnknownFormat)?;
        let (width, height, orientation) = match format {
            ImageFormat::Jpeg => jpeg(reader)?,
            ImageFormat::Png => png(reader)?,
            ImageFormat::WebP => {
                let mut decoder = WebPDecoder::new(reader)?;
                let orientation = orientation(&decoder.exif_metadata()?.unwrap_or_default());
                let (width, height) = decoder.dimensions();
                (width, height, orientation)
            }
            ImageFormat::Gif => without_exif(&GifDecoder::new(reader)?),
            ImageFormat::Bmp => without_exif(&BmpDecoder::new(reader)?),
            _ => return Err(DecodeError::UnknownFormat),
        };
        if width == 0 || height == 0 {
            return Err(DecodeError::Broken("a side is 0".into()));
        }
        if u64::from(width) * u64::from(height) > MAX_PIXELS {
            return Err(DecodeError::TooLarge { width, height });
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

/// Whether the orientation turns the image on its side.
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

/// Orientation in an EXIF block; some writers put JPEG's prefix before it in other formats too.
fn orientation(exif: &[u8]) -> Orientation {
    let exif = exif.strip_prefix(EXIF_PREFIX).unwrap_or(exif);
    Orientation::from_exif_chunk(exif).unwrap_or(Orientation::NoTransforms)
}

const EXIF_PREFIX: &[u8] = b"Exif\0\0";

fn bytes<const N: usize>(reader: &mut impl BufRead) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes).map(|()| bytes)
}

fn next_byte(reader: &mut impl BufRead, filling: &mut usize) -> Result<u8, DecodeError> {
    *filling += 1;
    if *filling > MOST_FILLING {
        return Err(DecodeError::Broken("there is no segment in 1 MiB".into()));
    }
    let [byte] = bytes(reader)?;
    Ok(byte)
}

/// Width, height and orientation from the segments before the first scan.
fn jpeg(reader: &mut (impl BufRead + Seek)) -> Result<(u32, u32, Orientation), DecodeError> {
    let mut exif = None;
    let mut size = None;
    bytes::<2>(reader)?; // start of image
    let mut filling = 0; // bytes since the last segment
    loop {
        while next_byte(reader, &mut filling)? != 0xff {} // tolerate bytes between segments
        let marker = loop {
            match next_byte(reader, &mut filling)? {
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
        filling = 0;
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
        return Err(DecodeError::Broken("there is no frame header before the first scan".into()));
    };
    Ok((width.into(), height.into(), orientation(&exif.unwrap_or_default())))
}

/// Width, height and orientation; the `eXIf` chunk may stand behind the pixels.
fn png(reader: &mut impl Image) -> Result<(u32, u32, Orientation), DecodeError> {
    let [_signature, [_, _, _, _, b'I', b'H', b'D', b'R']] = [bytes::<8>(reader)?, bytes(reader)?]
    else {
        return Err(DecodeError::Broken("the first chunk is not `IHDR`".into()));
    };
    let [width, height] = [u32::from_be_bytes(bytes(reader)?), u32::from_be_bytes(bytes(reader)?)];
    let end = reader.seek(SeekFrom::End(0))?;
    let mut at = 8 + 12 + 13;
    let mut is_told = false;
    reader.seek(SeekFrom::Start(at))?;
    while at + 12 <= end {
        let length = u32::from_be_bytes(bytes(reader)?);
        let kind: [u8; 4] = bytes(reader)?;
        // what is no chunk may be read as millions of them, and nothing of the image stands behind its end
        if !kind.iter().all(u8::is_ascii_alphabetic) || &kind == b"IEND" {
            break;
        }
        if &kind == b"IDAT" && length < LARGE_CHUNK && !is_told {
            reader.all_pages();
            is_told = true;
        }
        if &kind == b"eXIf" && length <= MOST_EXIF && at + 12 + u64::from(length) <= end {
            let mut exif = vec![0; length as usize];
            reader.read_exact(&mut exif)?;
            return Ok((width, height, orientation(&exif)));
        }
        at += 12 + u64::from(length);
        reader.seek_relative(i64::from(length) + 4)?; // small chunks are read together
    }
    Ok((width, height, Orientation::NoTransforms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::media::image::golden;
    use std::cell::Cell;
    use std::io::Read;

    /// Turn by 90 degrees, in EXIF.
    const TURNED: &[u8] = b"MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0";

    fn chunk(kind: [u8; 4], data: &[u8]) -> Vec<u8> {
        let length = (data.len() as u32).to_be_bytes();
        [&length, &kind[..], data, &[0; 4]].concat()
    }

    /// A PNG of 7 x 5 pixels whose data nobody reads.
    fn png(chunks: &[Vec<u8>]) -> Vec<u8> {
        let size = [7u32, 5].map(u32::to_be_bytes).concat();
        let header = chunk(*b"IHDR", &[&size[..], &[8, 2, 0, 0, 0]].concat());
        [b"\x89PNG\r\n\x1a\n".to_vec(), header, chunks.concat()].concat()
    }

    /// A file that counts how often it is asked.
    struct Counting<'a> {
        bytes: Cursor<Vec<u8>>,
        reads: &'a Cell<usize>,
    }

    impl Read for Counting<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.reads.set(self.reads.get() + 1);
            self.bytes.read(buffer)
        }
    }

    impl Seek for Counting<'_> {
        fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
            self.bytes.seek(to)
        }
    }

    impl Image for BufReader<Counting<'_>> {}

    /// Upright size, and how many reads it took.
    fn read(bytes: Vec<u8>) -> ([u32; 2], usize) {
        let (header, reads) = try_read(bytes);
        (header.unwrap().upright_size(), reads)
    }

    fn try_read(bytes: Vec<u8>) -> (Result<Header, DecodeError>, usize) {
        let reads = Cell::new(0);
        let file = Counting { bytes: Cursor::new(bytes), reads: &reads };
        let header = Header::read(&mut BufReader::new(file));
        (header, reads.get())
    }

    #[test]
    fn a_jpeg_is_given_up_after_many_bytes_that_are_no_segment_and_read_after_a_few() {
        let jpeg = golden::fixture("rgb.jpg");
        let first = 4 + usize::from(u16::from_be_bytes([jpeg[4], jpeg[5]])); // behind its segment
        let with = |filling: usize| [&jpeg[..first], &vec![7; filling], &jpeg[first..]].concat();
        let size = read(jpeg.clone()).0;
        assert_eq!(read(with(1000)).0, size);
        let (given_up, reads) = try_read(with(1 << 22));
        assert!(given_up.is_err() && reads < 200, "{reads} reads");
    }

    #[test]
    fn an_exif_chunk_of_more_than_a_megabyte_is_none() {
        let size = |length: usize| {
            let mut exif = TURNED.to_vec();
            exif.resize(length, 0);
            read(png(&[chunk(*b"eXIf", &exif)])).0
        };
        assert_eq!(size(1 << 20), [7, 5]);
        assert_eq!(size((1 << 20) + 1), [5, 7]);
    }

    #[test]
    fn a_turn_is_found_before_and_behind_the_pixels_and_not_behind_the_end() {
        let [exif, pixels, end] =
            [(*b"eXIf", TURNED), (*b"IDAT", &[0; 9000]), (*b"IEND", &[])].map(|(k, d)| chunk(k, d));
        let all = [exif, pixels, end];
        let size = |order: [usize; 3]| read(png(&order.map(|at| all[at].clone()))).0;
        assert_eq!(size([0, 1, 2]), [7, 5]);
        assert_eq!(size([1, 0, 2]), [7, 5]);
        assert_eq!(size([1, 2, 0]), [5, 7]);
    }

    #[test]
    fn many_small_chunks_are_read_together_and_zeros_are_no_chunks() {
        let small = vec![chunk(*b"tEXt", b"a=b"); 1000];
        assert!(read(png(&small)).1 <= 4);
        assert!(read(png(&[vec![0; 1 << 20]])).1 <= 2);
    }
}
