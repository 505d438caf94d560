//! Kinds of TIFF files: palettes and grey of 2 and 4 bits, which the decoder does not read itself,
//! and the names of unsupported ones.

use std::io::{Cursor, Read, Seek};

use super::tags::Directory;

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
