//! The entropy-coded data of a scan: restart intervals, and a reader of bits.

use std::ops::Range;

use super::error::JpegError;

/// The data of a scan without byte stuffing, divided at its restart markers.
#[derive(Debug)]
pub(super) struct ScanData {
    /// Bytes of all intervals, and eight zeros.
    bytes: Vec<u8>,
    /// The range of each interval in `bytes`.
    intervals: Vec<Range<usize>>,
}

impl ScanData {
    /// Reads the data up to the next marker that is not a restart marker. Returns it with the
    /// number of bytes before that marker.
    pub(super) fn read(data: &[u8]) -> Result<(Self, usize), JpegError> {
        let mut scan = Self { bytes: Vec::with_capacity(data.len() + 8), intervals: Vec::new() };
        let (mut at, mut start) = (0, 0);
        loop {
            let clean = length_before_ff(&data[at..]);
            scan.bytes.extend_from_slice(&data[at..at + clean]);
            at += clean;
            let fill = data[at..].iter().take_while(|byte| **byte == 0xff).count();
            let marker = data.get(at + fill).ok_or(JpegError::Truncated)?;
            if *marker == 0 {
                scan.bytes.push(0xff);
            } else {
                scan.intervals.push(start..scan.bytes.len());
                start = scan.bytes.len();
                let expected = 0xd0 + (scan.intervals.len() - 1) % 8;
                match *marker {
                    0xd0..=0xd7 if usize::from(*marker) == expected => {}
                    0xd0..=0xd7 => return Err(JpegError::Damaged("a restart marker is missing")),
                    _ => {
                        scan.bytes.extend([0; 8]);
                        return Ok((scan, at));
                    }
                }
            }
            at += fill + 1;
        }
    }

    /// Returns a reader of the interval with the index `interval`.
    pub(super) fn interval(&self, interval: usize) -> Result<Bits<'_>, JpegError> {
        let Range { start, end } = *self.intervals.get(interval).ok_or(JpegError::Truncated)?;
        Ok(Bits { bytes: &self.bytes, at: start, end, word: 0, count: 0, is_damaged: false })
    }

    pub(super) fn num_intervals(&self) -> usize {
        self.intervals.len()
    }
}

/// Returns the number of bytes before the first `ff`, or all.
fn length_before_ff(data: &[u8]) -> usize {
    let has_ff =
        |chunk: &[u8; 32]| chunk.iter().fold(0, |ff, byte| ff | u8::from(*byte == 0xff)) != 0;
    let chunks = data.as_chunks::<32>().0;
    let clean = 32 * chunks.iter().position(has_ff).unwrap_or(chunks.len());
    let rest = data[clean..].iter().position(|byte| *byte == 0xff);
    rest.map_or(data.len(), |rest| clean + rest)
}

/// Reads bits, the most significant bit of each byte first.
///
/// Reading after the end returns any bits; [`Bits::check`] reports it.
#[derive(Debug)]
pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    /// Index of the next byte that is not in `word`.
    at: usize,
    /// End of the interval.
    end: usize,
    /// The next bits, the first one in the most significant position.
    word: u64,
    /// Number of bits that were put into `word` and not read.
    count: u32,
    /// Whether a code was read that the table does not have.
    is_damaged: bool,
}

/// Number of bits of the longest code and the longest value.
const SYMBOL_BITS: u32 = 16 + 15;

impl Bits<'_> {
    /// Makes at least [`SYMBOL_BITS`] bits available.
    #[inline]
    pub(super) fn refill(&mut self) {
        if self.count <= SYMBOL_BITS {
            let next = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk);
            self.word |= next.map_or(0, |bytes| u64::from_be_bytes(*bytes)) >> self.count;
            self.at += ((63 - self.count) >> 3) as usize;
            self.count |= 0x38;
        }
    }

    /// Returns the next `count` bits, at least one, without reading them.
    #[inline]
    pub(super) fn peek(&self, count: u32) -> usize {
        (self.word >> (64 - count)) as usize
    }

    #[inline]
    pub(super) fn skip(&mut self, count: u32) {
        self.word <<= count;
        self.count = self.count.wrapping_sub(count);
    }

    /// Reads `count` bits, at most 15.
    #[inline]
    pub(super) fn unsigned(&mut self, count: u32) -> i32 {
        let value = (self.word >> 1 >> (63 - count)) as i32;
        self.skip(count);
        value
    }

    /// Reads a value of `count` bits, at most 15. If the first bit is 0, the value is negative.
    #[inline]
    pub(super) fn signed(&mut self, count: u32) -> i32 {
        let value = self.unsigned(count);
        let is_negative = value < (1 << count) >> 1;
        value - i32::from(is_negative) * ((1 << count) - 1)
    }

    #[inline]
    pub(super) fn set_damaged(&mut self) {
        self.is_damaged = true;
    }

    /// Fails if the data was invalid or has ended before the last bits that were read.
    #[inline]
    pub(super) fn check(&self) -> Result<(), JpegError> {
        if self.is_damaged {
            return Err(JpegError::Damaged("its Huffman codes are invalid"));
        }
        if self.at * 8 > self.end * 8 + self.count as usize {
            return Err(JpegError::Truncated);
        }
        Ok(())
    }
}
