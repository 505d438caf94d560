//! Decodes a JPEG to 8-bit RGB, to the bit as libjpeg-turbo does with its default settings and
//! Pillow with `convert("RGB")`: accurate integer inverse DCT, upsampling of chroma with a triangle
//! filter ("fancy upsampling"), and 16-bit fixed point for colours.
//!
//! Supports sequential and progressive Huffman coding with 8 bits per sample, in grey, RGB, YCbCr,
//! CMYK and YCCK, and integer sampling factors. Unlike libjpeg-turbo, it rejects incomplete and
//! damaged data, because missing samples would become grey.
//!
//! A sequential file with a single scan is decoded one row of MCUs after another. Other files need
//! memory for all coefficients: two bytes per sample.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod bits;
mod blocks;
mod error;
mod huffman;
mod idct;
mod output;
mod scans;
mod segments;
#[cfg(test)]
mod tests;

pub use error::JpegError;
use output::Output;
use scans::Coefficients;
use segments::{END, Frame, ScanHeader, Segments, Tables};

/// Decodes the bytes of a whole file to values of shape `[height, width, 3]`. `size` is the
/// expected `[height, width]`.
pub fn decode(bytes: &[u8], size: [usize; 2]) -> Result<Vec<u8>, JpegError> {
    let mut segments = Segments { rest: bytes };
    let mut tables = Tables::default();
    let frame = loop {
        let (marker, segment) = segments.next()?;
        match marker {
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                break Frame::read(marker, segment)?;
            }
            END | 0xda => return Err(JpegError::Damaged("it has no frame header")),
            _ => tables.read(marker, segment)?,
        }
    };
    if [frame.height, frame.width] != size || size.contains(&0) {
        return Err(JpegError::Damaged("its pixels and its header differ in size"));
    }
    let mut output = None;
    let mut coefficients = None;
    loop {
        let (marker, segment) = segments.next()?;
        match marker {
            END => break,
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                return Err(JpegError::Damaged("it has two frame headers"));
            }
            0xda => {
                let header = ScanHeader::read(segment, &frame)?;
                tables.add_standard()?;
                let has_all = header.components.len() == frame.components.len();
                if coefficients.is_none() && output.is_some() {
                    return Err(JpegError::Damaged("it has a scan after its last scan"));
                }
                let output =
                    output.get_or_insert_with(|| Output::new(&frame, tables.colours(&frame)));
                segments.rest = if has_all && !frame.is_progressive && coefficients.is_none() {
                    scans::decode_to(output, &frame, &header, &tables, segments.rest)?
                } else {
                    let coefficients =
                        coefficients.get_or_insert_with(|| Coefficients::new(&frame));
                    coefficients.read_scan(&frame, &header, &tables, segments.rest)?
                };
            }
            _ => tables.read(marker, segment)?,
        }
    }
    let mut output = output.ok_or(JpegError::Damaged("it has no scan"))?;
    if let Some(coefficients) = coefficients {
        coefficients.transform(&frame, &mut output)?;
    }
    Ok(output.into_pixels())
}
