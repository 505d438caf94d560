//! The segments of a JPEG up to its first scan, and the number of its scans.

use std::io::BufRead;

use super::{DecodeError, Image, MAX_EXIF_BYTES, Size, bytes, tags};

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
pub(super) fn read(reader: &mut impl Image) -> Result<(Size, u32), DecodeError> {
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
    Ok(((width.into(), height.into(), tags::orientation(&exif, || xmp)), num_scans))
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
