//! Tags of a TIFF file, and of EXIF, which has the same structure; the orientation in them and in
//! XMP. Kinds of TIFF files: palettes and grey of 2 and 4 bits, which the decoder does not read
//! itself, and the names of unsupported ones.
//!
//! The rules are those of Pillow, whose `ImageOps.exif_transpose` the loaders of transformers call.

use std::io::{Cursor, Read, Seek, SeekFrom};

use image::metadata::Orientation;

const WIDTH: u16 = 256;
const HEIGHT: u16 = 257;
const BITS: u16 = 258;
const COMPRESSION: u16 = 259;
const PHOTOMETRIC: u16 = 262;
const SAMPLES: u16 = 277;
const COLOUR_MAP: u16 = 320;
const TILE_WIDTH: u16 = 322;
const SAMPLE_FORMAT: u16 = 339;
/// Value of [`PHOTOMETRIC`]: 0 is black.
const GREY: u64 = 1;
const PALETTE: u64 = 3;

/// An image whose pixels are indices into a table of colours.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) struct Indexed {
    pub(in super::super) width: u32,
    pub(in super::super) height: u32,
    /// Bits of an index: 1, 2, 4 or 8.
    bits: u64,
    /// The colour of each index.
    colours: Vec<[u8; 3]>,
}

impl Indexed {
    /// Reads the table of colours; `None` for other kinds of TIFF files.
    pub(in super::super) fn read(
        directory: &Directory,
        reader: &mut (impl Read + Seek),
    ) -> Option<Self> {
        let mut one = |tag| directory.numbers(reader, tag)?.first().copied();
        let (bits, photometric) = (one(BITS)?, one(PHOTOMETRIC)?);
        let [width, height] = [u32::try_from(one(WIDTH)?).ok()?, u32::try_from(one(HEIGHT)?).ok()?];
        let is_one_sample = one(SAMPLES).unwrap_or(1) == 1;
        if !is_one_sample || !matches!(bits, 1 | 2 | 4 | 8) {
            return None;
        }
        let count = 1 << bits;
        let colours = match photometric {
            PALETTE => {
                let map = directory.numbers(reader, COLOUR_MAP)?;
                if map.len() != 3 * count {
                    return None;
                }
                // 16-bit values, all of red first
                let colour = |i: usize| [0, 1, 2].map(|c| (map[c * count + i] >> 8) as u8);
                (0..count).map(colour).collect()
            }
            0 | GREY if matches!(bits, 2 | 4) => {
                let level = |i: usize| (i * 255 / (count - 1)) as u8;
                let level = |i| if photometric == GREY { level(i) } else { 255 - level(i) };
                (0..count).map(|i| [level(i); 3]).collect()
            }
            _ => return None,
        };
        Some(Self { width, height, bits, colours })
    }

    /// Returns the file with a grey image of 8 bits, whose pixels are the bytes of the indices.
    pub(in super::super) fn as_grey(&self, directory: &Directory, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut grey = bytes.to_vec();
        let mut set = |tag, value: u64| {
            let (at, length) = directory.place(tag)?;
            let value = match bytes[0] {
                b'M' => value << (64 - 8 * length),
                _ => value.swap_bytes(),
            };
            grey.get_mut(at..at + length)?.copy_from_slice(&value.to_be_bytes()[..length]);
            Some(())
        };
        let reader = &mut Cursor::new(bytes);
        if let Some(width) = directory.numbers(reader, TILE_WIDTH) {
            set(TILE_WIDTH, width.first()? * self.bits / 8)?;
        }
        set(WIDTH, (u64::from(self.width) * self.bits).div_ceil(8))?;
        set(BITS, 8)?;
        set(PHOTOMETRIC, GREY)?;
        Some(grey)
    }

    /// Returns the colours `[height, width, 3]` of the pixels of [`Self::as_grey`].
    pub(in super::super) fn colours(&self, indices: &[u8]) -> Vec<u8> {
        let (width, bits) = (self.width as usize, self.bits as usize);
        let per_byte = 8 / bits;
        let rows = indices.chunks_exact(width.div_ceil(per_byte));
        let pixels = rows.flat_map(|row| {
            (0..width).flat_map(move |x| {
                let shift = 8 - bits * (x % per_byte + 1);
                self.colours[(usize::from(row[x / per_byte]) >> shift) % self.colours.len()]
            })
        });
        pixels.collect()
    }
}

const COLOURS: &[(u64, &str)] = &[
    (0, "grey"),
    (1, "grey"),
    (2, "RGB"),
    (3, "palette"),
    (4, "mask"),
    (5, "CMYK"),
    (6, "YCbCr"),
    (8, "CIELab"),
];
const COMPRESSIONS: &[(u64, &str)] = &[
    (1, "no compression"),
    (2, "CCITT run lengths"),
    (3, "CCITT group 3"),
    (4, "CCITT group 4"),
    (5, "LZW"),
    (6, "old JPEG"),
    (7, "JPEG"),
    (8, "deflate"),
    (32_773, "PackBits"),
    (32_946, "deflate"),
    (34_925, "LZMA"),
    (50_000, "zstd"),
    (50_001, "WebP"),
];

/// Names the kind of a TIFF file, for errors.
pub(in super::super) fn kind(directory: &Directory, reader: &mut (impl Read + Seek)) -> String {
    let mut numbers = |tag| directory.numbers(reader, tag).unwrap_or_default();
    let name = |value: Option<u64>, what: &str, names: &[(u64, &str)]| {
        let known = names.iter().find(|(number, _)| Some(*number) == value);
        known.map_or_else(|| format!("{what} {value:?}"), |(_, name)| (*name).to_owned())
    };
    let colours = name(numbers(PHOTOMETRIC).first().copied(), "colours", COLOURS);
    let compression = Some(numbers(COMPRESSION).first().copied().unwrap_or(1));
    let compression = name(compression, "compression", COMPRESSIONS);
    let samples = numbers(SAMPLES).first().copied().unwrap_or(1);
    let bits = numbers(BITS).first().copied().unwrap_or(1);
    let format = match numbers(SAMPLE_FORMAT).first() {
        None | Some(1) => "",
        Some(3) => " float",
        Some(_) => " signed",
    };
    format!("TIFF of {colours}, {samples} x {bits}{format} bits, {compression}")
}

/// Maximum size of the value of a tag, in bytes; larger ones are ignored.
const MAX_VALUE_BYTES: u64 = 1 << 20;
/// Maximum number of tags that are read; usual files have a few dozen.
const MAX_TAGS: u64 = 4096;
const ORIENTATION: u16 = 0x112;
const XMP: u16 = 700;
const EXIF_PREFIX: &[u8] = b"Exif\0\0";

#[derive(Debug, Clone, Copy)]
struct TiffTag {
    tag: u16,
    kind: u16,
    count: u64,
    /// Position of the value, or of its offset if the value does not fit there.
    at: u64,
}

/// The first directory of a TIFF file or of an EXIF block.
#[derive(Debug)]
pub(in super::super) struct Directory {
    entries: Vec<TiffTag>,
    is_big_endian: bool,
    /// The layout of `BigTIFF`, with offsets of 64 bits.
    is_big: bool,
    /// Offset of the next directory; 0 if there is none.
    pub(super) next: u64,
}

/// Size of a value in bytes; `None` for kinds that are ignored, with their tags.
fn value_bytes(kind: u16) -> Option<u64> {
    match kind {
        1 | 2 | 6 | 7 => Some(1),
        3 | 8 => Some(2),
        4 | 9 | 11 | 13 => Some(4),
        5 | 10 | 12 | 16 => Some(8),
        _ => None,
    }
}

impl Directory {
    /// Reads the tags; `None` if these are not the bytes of a TIFF file.
    pub(in super::super) fn read(reader: &mut (impl Read + Seek)) -> Option<Self> {
        let start = bytes_at(reader, 0, 8)?;
        let is_big_endian = match start[..2] {
            [b'I', b'I'] => false,
            [b'M', b'M'] => true,
            _ => return None,
        };
        let is_big = match number(is_big_endian, &start[2..4]) {
            42 => false,
            43 => true,
            _ => return None,
        };
        let mut directory = Self { entries: Vec::new(), is_big_endian, is_big, next: 0 };
        let first = if is_big { bytes_at(reader, 8, 8)? } else { start[4..8].to_vec() };
        let first = number(is_big_endian, &first);
        let [count_bytes, entry_bytes, offset_bytes] = if is_big { [8, 20, 8] } else { [2, 12, 4] };
        let count = number(is_big_endian, &bytes_at(reader, first, count_bytes)?).min(MAX_TAGS);
        let table = first.saturating_add(count_bytes);
        for at in (0..count).map(|i| table.saturating_add(i * entry_bytes)) {
            let Some(entry) = bytes_at(reader, at, entry_bytes) else { return Some(directory) };
            let (fixed, value) = entry.split_at((entry_bytes - offset_bytes) as usize);
            let [tag, kind] = [&fixed[..2], &fixed[2..4]].map(|n| number(is_big_endian, n) as u16);
            let count = number(is_big_endian, &fixed[4..]);
            let at = at + entry_bytes - value.len() as u64;
            if value_bytes(kind).is_some() && directory.entry(tag).is_none() {
                directory.entries.push(TiffTag { tag, kind, count, at });
            }
        }
        if let Some(next) =
            bytes_at(reader, table.saturating_add(count * entry_bytes), offset_bytes)
        {
            directory.next = number(is_big_endian, &next);
        }
        Some(directory)
    }

    fn entry(&self, tag: u16) -> Option<TiffTag> {
        self.entries.iter().find(|entry| entry.tag == tag).copied()
    }

    /// Position of the value of a tag that has one value, and its size in bytes.
    pub(super) fn place(&self, tag: u16) -> Option<(usize, usize)> {
        let entry = self.entry(tag).filter(|entry| entry.count == 1)?;
        Some((usize::try_from(entry.at).ok()?, value_bytes(entry.kind)? as usize))
    }

    /// Reads the bytes of a value.
    fn bytes(&self, reader: &mut (impl Read + Seek), tag: u16) -> Option<(u16, Vec<u8>)> {
        let TiffTag { kind, count, at, .. } = self.entry(tag)?;
        let length = count.checked_mul(value_bytes(kind)?).filter(|n| *n <= MAX_VALUE_BYTES)?;
        let inline = if self.is_big { 8 } else { 4 };
        let at = if length <= inline {
            at
        } else {
            number(self.is_big_endian, &bytes_at(reader, at, inline)?)
        };
        Some((kind, bytes_at(reader, at, length)?))
    }

    /// Reads the values of a tag as unsigned integers.
    pub(super) fn numbers(&self, reader: &mut (impl Read + Seek), tag: u16) -> Option<Vec<u64>> {
        let (kind, bytes) = self.bytes(reader, tag)?;
        let values = bytes.chunks_exact(value_bytes(kind)? as usize);
        Some(values.map(|value| number(self.is_big_endian, value)).collect())
    }

    /// The value of the orientation tag; `None` without the tag, 0 if it is not an integer.
    fn orientation(&self, reader: &mut (impl Read + Seek)) -> Option<u64> {
        let values = self.numbers(reader, ORIENTATION)?;
        let is_integer = matches!(self.entry(ORIENTATION)?.kind, 3 | 4 | 6 | 8 | 9 | 13 | 16);
        values.first().map(|value| if is_integer { *value } else { 0 })
    }

    /// The orientation of a TIFF file, whose directory this is.
    pub(super) fn orientation_of_file(&self, reader: &mut (impl Read + Seek)) -> Orientation {
        let value = self.orientation(reader);
        let xmp = || of_xmp(&self.bytes(reader, XMP)?.1);
        from_value(value.or_else(xmp))
    }
}

/// The orientation of an image with this EXIF and this XMP, which are empty if there is none. XMP
/// counts if EXIF has no orientation.
pub(super) fn orientation(exif: &[u8], xmp: impl FnOnce() -> Vec<u8>) -> Orientation {
    from_value(of_exif(exif).or_else(|| of_xmp(&xmp())))
}

/// The value of the orientation tag of EXIF. Some programs write JPEG's prefix `Exif\0\0` in other
/// formats too, or twice.
pub(super) fn of_exif(exif: &[u8]) -> Option<u64> {
    let strip = |exif: &[u8]| exif.strip_prefix(EXIF_PREFIX).map(<[u8]>::to_vec);
    let once = strip(exif).unwrap_or_else(|| exif.to_vec());
    let reader = &mut Cursor::new(strip(&once).unwrap_or(once));
    Directory::read(reader)?.orientation(reader)
}

/// The first orientation in XMP, as attribute or as element.
fn of_xmp(xmp: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"tiff:Orientation";
    xmp.windows(NAME.len() + 3).find_map(|text| match text.strip_prefix(NAME)? {
        [b'=', b'"', digit @ b'0'..=b'9'] | [b'>', digit @ b'0'..=b'9', _] => {
            Some(u64::from(digit - b'0'))
        }
        _ => None,
    })
}

pub(super) fn from_value(value: Option<u64>) -> Orientation {
    let value = value.and_then(|value| u8::try_from(value).ok());
    value.and_then(Orientation::from_exif).unwrap_or(Orientation::NoTransforms)
}

fn bytes_at(reader: &mut (impl Read + Seek), at: u64, length: u64) -> Option<Vec<u8>> {
    reader.seek(SeekFrom::Start(at)).ok()?;
    let mut bytes = Vec::new();
    reader.by_ref().take(length).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 == length).then_some(bytes)
}

fn number(is_big_endian: bool, bytes: &[u8]) -> u64 {
    let join = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
    if is_big_endian { bytes.iter().fold(0, join) } else { bytes.iter().rev().fold(0, join) }
}
