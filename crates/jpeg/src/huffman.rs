use super::bits::Bits;
use super::error::JpegError;

/// Number of bits of the code, or of code and value, that a lookup decodes.
const LOOKUP_BITS: u32 = 10;
const LOOKUP: usize = 1 << LOOKUP_BITS;

#[derive(Debug, Clone)]
pub(super) struct Huffman {
    /// For the next bits: the length of the code (in the upper byte) and its symbol, or 0 if the
    /// code is longer.
    codes: [u16; LOOKUP],
    /// For the next bits: the value (upper 16 bits), the run before it (4 bits from bit 8) and the
    /// length of code and value together, or 0 if they are longer or if the symbol has no value.
    values: [i32; LOOKUP],
    /// For each length above [`LOOKUP_BITS`]: codes of this or a smaller length, as 16 bits, are
    /// below this limit.
    limits: [u32; 17],
    /// For each length: what to add to a code to get its index in `symbols`.
    offsets: [i32; 17],
    symbols: [u8; 256],
}

impl Huffman {
    /// Builds a table from the number of codes of each length and their symbols. `max` is the
    /// largest valid symbol.
    pub(super) fn new(counts: &[u8; 16], symbols: &[u8], max: u8) -> Result<Box<Self>, JpegError> {
        let invalid = JpegError::Damaged("a Huffman table is invalid");
        let num: usize = counts.iter().map(|count| usize::from(*count)).sum();
        if num > symbols.len() || num > 256 || symbols[..num].iter().any(|symbol| *symbol > max) {
            return Err(invalid);
        }
        let mut table = Box::new(Self {
            codes: [0; LOOKUP],
            values: [0; LOOKUP],
            limits: [0; 17],
            offsets: [0; 17],
            symbols: [0; 256],
        });
        table.symbols[..num].copy_from_slice(&symbols[..num]);
        let (mut code, mut index) = (0_u32, 0_usize);
        for (length, count) in (1..=16).zip(counts) {
            table.offsets[length as usize] = index as i32 - code as i32;
            for symbol in &symbols[index..index + usize::from(*count)] {
                if length <= LOOKUP_BITS {
                    let span = 1 << (LOOKUP_BITS - length);
                    let first = code as usize * span;
                    let Some(entries) = table.codes.get_mut(first..first + span) else {
                        return Err(invalid);
                    };
                    entries.fill((length << 8) as u16 | u16::from(*symbol));
                }
                code += 1;
            }
            index += usize::from(*count);
            if code > 1 << length {
                return Err(invalid);
            }
            table.limits[length as usize] = code << (16 - length);
            code <<= 1;
        }
        table.add_values();
        Ok(table)
    }

    fn add_values(&mut self) {
        for (bits, (entry, value)) in self.codes.iter().zip(&mut self.values).enumerate() {
            let (length, run, size) =
                (u32::from(entry >> 8), i32::from(entry >> 4 & 15), u32::from(entry & 15));
            if length > 0 && size > 0 && length + size <= LOOKUP_BITS {
                let bits = (bits >> (LOOKUP_BITS - length - size)) as i32 & ((1 << size) - 1);
                let signed = if bits < 1 << (size - 1) { bits - (1 << size) + 1 } else { bits };
                *value = signed << 16 | run << 8 | (length + size) as i32;
            }
        }
    }

    /// Reads a code and returns its symbol.
    #[inline]
    pub(super) fn symbol(&self, bits: &mut Bits<'_>) -> u32 {
        let entry = self.codes[bits.peek(LOOKUP_BITS) % LOOKUP];
        if entry == 0 {
            return self.long_symbol(bits);
        }
        bits.skip(u32::from(entry >> 8));
        u32::from(entry & 0xff)
    }

    #[cold]
    #[inline(never)]
    fn long_symbol(&self, bits: &mut Bits<'_>) -> u32 {
        let next = bits.peek(16) as u32;
        for length in LOOKUP_BITS + 1..=16 {
            if next < self.limits[length as usize] {
                bits.skip(length);
                let code = (next >> (16 - length)) as i32;
                return self.symbols[(code + self.offsets[length as usize]) as usize & 0xff].into();
            }
        }
        bits.set_damaged();
        bits.skip(1);
        0
    }

    /// Reads code and value if they are short. Returns the run before the value, and the value.
    #[inline]
    pub(super) fn short_value(&self, bits: &mut Bits<'_>) -> Option<(usize, i16)> {
        let entry = self.values[bits.peek(LOOKUP_BITS) % LOOKUP];
        if entry == 0 {
            return None;
        }
        bits.skip(entry as u32 & 0xff);
        Some(((entry >> 8 & 15) as usize, (entry >> 16) as i16))
    }
}

/// The tables of JPEG's annex K: luma and chroma. Frames of Motion JPEG omit them.
pub(super) fn standard(is_dc: bool) -> Result<[Box<Huffman>; 2], JpegError> {
    if is_dc {
        let symbols: [u8; 12] = std::array::from_fn(|i| i as u8);
        return Ok([
            Huffman::new(&[0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], &symbols, 15)?,
            Huffman::new(&[0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], &symbols, 15)?,
        ]);
    }
    Ok([
        Huffman::new(&[0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125], LUMA_AC, 255)?,
        Huffman::new(&[0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 119], CHROMA_AC, 255)?,
    ])
}

#[rustfmt::skip]
const LUMA_AC: &[u8; 162] = &[
    0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07, 0x22, 0x71,
    0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0, 0x24, 0x33, 0x62, 0x72,
    0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x34, 0x35, 0x36, 0x37,
    0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59,
    0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x83,
    0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3,
    0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3,
    0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2,
    0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa,
];

#[rustfmt::skip]
const CHROMA_AC: &[u8; 162] = &[
    0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71, 0x13, 0x22,
    0x32, 0x81, 0x08, 0x14, 0x42, 0x91, 0xa1, 0xb1, 0xc1, 0x09, 0x23, 0x33, 0x52, 0xf0, 0x15, 0x62, 0x72, 0xd1,
    0x0a, 0x16, 0x24, 0x34, 0xe1, 0x25, 0xf1, 0x17, 0x18, 0x19, 0x1a, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x35, 0x36,
    0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58,
    0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a,
    0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a,
    0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba,
    0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda,
    0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa,
];
