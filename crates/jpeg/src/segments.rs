//! The segments of a file: frame header, scan headers and tables.

use super::error::JpegError;
use super::huffman::{self, Huffman};

/// Index in a block of the coefficient with the zigzag index `i`. Damaged data may exceed a block:
/// these coefficients overwrite the last one, as in libjpeg-turbo.
pub(super) const ZIGZAG: [u8; 128] = {
    let mut table = [63; 128];
    let (mut i, mut diagonal) = (0, 0);
    while diagonal < 15 {
        let mut step = 0;
        while step <= diagonal {
            let (row, column) =
                if diagonal % 2 == 0 { (diagonal - step, step) } else { (step, diagonal - step) };
            if row < 8 && column < 8 {
                table[i] = (row * 8 + column) as u8;
                i += 1;
            }
            step += 1;
        }
        diagonal += 1;
    }
    table
};

#[derive(Debug)]
pub(super) struct Segments<'a> {
    pub(super) rest: &'a [u8],
}

/// Marker of the end of the image.
pub(super) const END: u8 = 0xd9;

impl<'a> Segments<'a> {
    /// Returns the next marker and the content of its segment, which is empty for [`END`].
    pub(super) fn next(&mut self) -> Result<(u8, &'a [u8]), JpegError> {
        loop {
            let found = self.rest.iter().position(|byte| *byte == 0xff);
            self.rest = found.map_or(&[], |found| &self.rest[found..]);
            let fill = self.rest.iter().take_while(|byte| **byte == 0xff).count();
            let marker = *self.rest.get(fill).ok_or(JpegError::Truncated)?;
            self.rest = &self.rest[fill + 1..];
            match marker {
                0x00 | 0x01 | 0xd0..=0xd8 => {} // no length
                END => return Ok((END, &[])),
                _ => {
                    let length = self.rest.first_chunk().ok_or(JpegError::Truncated)?;
                    let length = usize::from(u16::from_be_bytes(*length)).max(2);
                    let (segment, rest) =
                        self.rest.split_at_checked(length).ok_or(JpegError::Truncated)?;
                    self.rest = rest;
                    return Ok((marker, &segment[2..]));
                }
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Component {
    id: u8,
    /// Sampling factors: blocks per MCU along the width and along the height.
    pub(super) h: usize,
    pub(super) v: usize,
    /// Size in samples.
    pub(super) width: usize,
    pub(super) height: usize,
    quantisation: usize,
}

#[derive(Debug)]
pub(super) struct Frame {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) is_progressive: bool,
    pub(super) components: Vec<Component>,
    /// Maximum sampling factors.
    pub(super) h_max: usize,
    pub(super) v_max: usize,
    /// Number of MCUs along the width and along the height.
    pub(super) mcus: [usize; 2],
}

impl Frame {
    /// Reads a frame header with the marker `marker`.
    pub(super) fn read(marker: u8, segment: &[u8]) -> Result<Self, JpegError> {
        let is_progressive = match marker {
            0xc0 | 0xc1 => false,
            0xc2 => true,
            0xc3 | 0xc7 | 0xcb | 0xcf => return Err(JpegError::Unsupported("lossless")),
            0xc5 | 0xc6 | 0xcd | 0xce => return Err(JpegError::Unsupported("hierarchical")),
            _ => return Err(JpegError::Unsupported("arithmetic coding")),
        };
        let [bits, h0, h1, w0, w1, num, components @ ..] = segment else {
            return Err(JpegError::Damaged("its frame header is too short"));
        };
        if *bits != 8 {
            return Err(JpegError::Unsupported("other than 8 bits per sample"));
        }
        if !matches!(num, 1 | 3 | 4) {
            return Err(JpegError::Unsupported("other than 1, 3 or 4 components"));
        }
        let components = components.as_chunks::<3>().0.get(..usize::from(*num));
        let mut components: Vec<_> = components
            .ok_or(JpegError::Damaged("its frame header is too short"))?
            .iter()
            .map(|[id, sampling, quantisation]| Component {
                id: *id,
                h: usize::from(sampling >> 4),
                v: usize::from(sampling & 15),
                width: 0,
                height: 0,
                quantisation: usize::from(*quantisation),
            })
            .collect();
        if components.iter().any(|c| !matches!((c.h, c.v), (1..=4, 1..=4)) || c.quantisation > 3) {
            return Err(JpegError::Damaged("a component of its frame header is invalid"));
        }
        if let [component] = &mut components[..] {
            (component.h, component.v) = (1, 1); // has no meaning
        }
        let h_max = components.iter().map(|component| component.h).max().unwrap_or(1);
        let v_max = components.iter().map(|component| component.v).max().unwrap_or(1);
        if components.iter().any(|c| h_max % c.h != 0 || v_max % c.v != 0) {
            return Err(JpegError::Unsupported("these sampling factors"));
        }
        let [height, width] =
            [[*h0, *h1], [*w0, *w1]].map(|bytes| usize::from(u16::from_be_bytes(bytes)));
        for component in &mut components {
            component.width = (width * component.h).div_ceil(h_max);
            component.height = (height * component.v).div_ceil(v_max);
        }
        let mcus = [width.div_ceil(8 * h_max), height.div_ceil(8 * v_max)];
        Ok(Self { width, height, is_progressive, components, h_max, v_max, mcus })
    }

    /// Number of blocks of a component along the width and the height, padded to whole MCUs.
    pub(super) fn padded_blocks(&self, component: usize) -> [usize; 2] {
        let Component { h, v, .. } = self.components[component];
        [self.mcus[0] * h, self.mcus[1] * v]
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ScanComponent {
    /// Index in the frame.
    pub(super) index: usize,
    dc_table: usize,
    ac_table: usize,
}

#[derive(Debug)]
pub(super) struct ScanHeader {
    pub(super) components: Vec<ScanComponent>,
    /// First and last coefficient, by zigzag index.
    pub(super) first: usize,
    pub(super) last: usize,
    /// Number of low bits that earlier scans left out, or 0 in the first scan of a coefficient.
    pub(super) earlier: u32,
    /// Number of low bits that this scan leaves out.
    pub(super) low: u32,
}

impl ScanHeader {
    pub(super) fn read(segment: &[u8], frame: &Frame) -> Result<Self, JpegError> {
        let invalid = || JpegError::Damaged("a scan header is invalid");
        let (num, rest) = segment.split_first().ok_or_else(invalid)?;
        let (selectors, rest) = rest.split_at_checked(2 * usize::from(*num)).ok_or_else(invalid)?;
        let [first, last, precision, ..] = *rest else { return Err(invalid()) };
        let mut components: Vec<ScanComponent> = Vec::new();
        for [id, tables] in selectors.as_chunks().0 {
            let index = frame.components.iter().position(|component| component.id == *id);
            let index = index.ok_or_else(invalid)?;
            let [dc_table, ac_table] = [tables >> 4, tables & 15].map(usize::from);
            let is_known = components.iter().any(|component| component.index == index);
            if is_known || dc_table > 3 || ac_table > 3 {
                return Err(invalid());
            }
            components.push(ScanComponent { index, dc_table, ac_table });
        }
        let blocks =
            components.iter().map(|c| frame.components[c.index].h * frame.components[c.index].v);
        if components.is_empty() || components.len() > 1 && blocks.sum::<usize>() > 10 {
            return Err(invalid());
        }
        if !frame.is_progressive {
            return Ok(Self { components, first: 0, last: 63, earlier: 0, low: 0 });
        }
        let [first, last] = [first, last].map(usize::from);
        let [earlier, low] = [precision >> 4, precision & 15].map(u32::from);
        let band_is_valid = if first == 0 {
            last == 0
        } else {
            last >= first && last < 64 && components.len() == 1
        };
        if !band_is_valid || low > 13 || earlier != 0 && earlier != low + 1 {
            return Err(invalid());
        }
        Ok(Self { components, first, last, earlier, low })
    }
}

/// How the components become colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Colours {
    Grey,
    Rgb,
    /// Luma and chroma.
    Ycc,
    /// Inverted CMYK, as programs of Adobe write it.
    Cmyk,
    /// Inverted CMYK whose inks of colour, not inverted, are stored as luma and chroma of R, G and
    /// B.
    Ycck,
}

/// Tables and settings that segments have defined so far.
#[derive(Debug, Default)]
pub(super) struct Tables {
    dc: [Option<Box<Huffman>>; 4],
    ac: [Option<Box<Huffman>>; 4],
    /// Divisors of the coefficients, in the order of a block.
    quantisation: [Option<[i32; 64]>; 4],
    /// Number of MCUs between restart markers; 0 if there are none.
    pub(super) restart_interval: usize,
    has_jfif: bool,
    /// `transform` of Adobe's segment.
    adobe: Option<u8>,
}

impl Tables {
    /// Reads a segment that is not a frame header or a scan header.
    pub(super) fn read(&mut self, marker: u8, segment: &[u8]) -> Result<(), JpegError> {
        match marker {
            0xc4 => self.read_huffman(segment),
            0xdb => self.read_quantisation(segment),
            0xdd => {
                let interval =
                    segment.first_chunk().ok_or(JpegError::Damaged("a segment is too short"))?;
                self.restart_interval = u16::from_be_bytes(*interval).into();
                Ok(())
            }
            0xe0 => {
                self.has_jfif |= segment.starts_with(b"JFIF\0") && segment.len() >= 14;
                Ok(())
            }
            0xee => {
                if let [b'A', b'd', b'o', b'b', b'e', _, _, _, _, _, _, transform, ..] = segment {
                    self.adobe = Some(*transform);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn read_huffman(&mut self, mut segment: &[u8]) -> Result<(), JpegError> {
        while let [class @ (0 | 1 | 2 | 3 | 0x10..=0x13), rest @ ..] = segment {
            let invalid = JpegError::Damaged("a Huffman table is too short");
            let (counts, symbols) = rest.split_first_chunk().ok_or(invalid)?;
            let is_dc = *class < 0x10;
            let table = Huffman::new(counts, symbols, if is_dc { 15 } else { 255 })?;
            let num: usize = counts.iter().map(|count| usize::from(*count)).sum();
            segment = &symbols[num..];
            let tables = if is_dc { &mut self.dc } else { &mut self.ac };
            tables[usize::from(class & 3)] = Some(table);
        }
        if segment.is_empty() {
            Ok(())
        } else {
            Err(JpegError::Damaged("a Huffman table is invalid"))
        }
    }

    fn read_quantisation(&mut self, mut segment: &[u8]) -> Result<(), JpegError> {
        let invalid = JpegError::Damaged("a quantisation table is invalid");
        while let [target, rest @ ..] = segment {
            let size = 1 + usize::from(target >> 4);
            let (values, rest) = rest.split_at_checked(64 * size).ok_or(invalid)?;
            if target >> 4 > 1 || target & 15 > 3 {
                return Err(invalid);
            }
            let mut table = [0; 64];
            for (value, at) in values.chunks(size).zip(ZIGZAG) {
                table[usize::from(at)] =
                    value.iter().fold(0, |sum, byte| sum << 8 | i32::from(*byte));
            }
            self.quantisation[usize::from(target & 3)] = Some(table);
            segment = rest;
        }
        Ok(())
    }

    /// Uses the standard tables where a file defines none.
    pub(super) fn add_standard(&mut self) -> Result<(), JpegError> {
        for (is_dc, tables) in [(true, &mut self.dc), (false, &mut self.ac)] {
            if tables.iter().all(Option::is_none) {
                let [luma, chroma] = huffman::standard(is_dc)?;
                tables[0] = Some(luma);
                tables[1] = Some(chroma);
            }
        }
        Ok(())
    }

    pub(super) fn dc(&self, component: ScanComponent) -> Result<&Huffman, JpegError> {
        self.dc[component.dc_table].as_deref().ok_or(MISSING_TABLE)
    }

    pub(super) fn ac(&self, component: ScanComponent) -> Result<&Huffman, JpegError> {
        self.ac[component.ac_table].as_deref().ok_or(MISSING_TABLE)
    }

    pub(super) fn quantisation(&self, component: &Component) -> Result<[i32; 64], JpegError> {
        self.quantisation[component.quantisation].ok_or(MISSING_TABLE)
    }

    /// Colours of `frame`, by the rules of libjpeg-turbo.
    pub(super) fn colours(&self, frame: &Frame) -> Colours {
        let ids: Vec<u8> = frame.components.iter().map(|component| component.id).collect();
        match (ids.len(), self.adobe) {
            (1, _) => Colours::Grey,
            (3, _) if self.has_jfif => Colours::Ycc,
            (3, Some(0)) => Colours::Rgb,
            (3, None) if ids == b"RGB" => Colours::Rgb,
            (3, _) => Colours::Ycc,
            (_, None | Some(0)) => Colours::Cmyk,
            _ => Colours::Ycck,
        }
    }
}

const MISSING_TABLE: JpegError = JpegError::Damaged("a table is missing");
