//! The blocks of a GIF up to its second frame.

use std::io::{BufRead, Seek};

use super::bytes;

/// The first frame of a GIF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct FirstFrame {
    /// Left, top, width and height in pixels of the canvas.
    pub(in super::super) place: [usize; 4],
    /// Colour of the canvas around the frame; `None` if it is transparent.
    pub(in super::super) around: Option<[u8; 3]>,
    /// Whether the file has another frame.
    pub(in super::super) is_of_several: bool,
}

impl FirstFrame {
    /// Reads from the start of the file up to the second frame, or to where the file is damaged.
    pub(in super::super) fn read(reader: &mut (impl BufRead + Seek)) -> Option<Self> {
        let mut first = None;
        // the decoder finds the defects of a damaged file
        let _ = Self::read_blocks(reader, &mut first);
        first
    }

    fn read_blocks(
        reader: &mut (impl BufRead + Seek),
        found: &mut Option<Self>,
    ) -> std::io::Result<()> {
        reader.rewind()?;
        let [_signature @ .., flags, _background, _aspect] = bytes::<13>(reader)?;
        let mut first_colour = first_of_palette(reader, flags)?;
        let mut is_transparent = false;
        loop {
            match bytes(reader)? {
                [b'!'] => {
                    if bytes(reader)? == [0xf9] && found.is_none() {
                        let [_length, flags] = bytes(reader)?;
                        reader.seek_relative(3)?;
                        is_transparent = flags & 1 > 0;
                    }
                    skip_blocks(reader)?;
                }
                [b','] => {
                    if let Some(first) = found {
                        first.is_of_several = true;
                        return Ok(());
                    }
                    let [x0, x1, y0, y1, w0, w1, h0, h1, flags] = bytes(reader)?;
                    let place = [[x0, x1], [y0, y1], [w0, w1], [h0, h1]];
                    let place = place.map(|side| u16::from_le_bytes(side).into());
                    first_colour = first_of_palette(reader, flags)?.or(first_colour);
                    let colour = first_colour.unwrap_or_default();
                    let around = (!is_transparent).then_some(colour);
                    *found = Some(Self { place, around, is_of_several: false });
                    let [_code_size] = bytes(reader)?;
                    skip_blocks(reader)?;
                }
                _ => return Ok(()),
            }
        }
    }
}

/// Reads the palette that `flags` declare. Returns its first colour.
fn first_of_palette(
    reader: &mut (impl BufRead + Seek),
    flags: u8,
) -> std::io::Result<Option<[u8; 3]>> {
    if flags & 0x80 == 0 {
        return Ok(None);
    }
    let first = bytes(reader)?;
    reader.seek_relative((3 << ((flags & 7) + 1)) - 3)?;
    Ok(Some(first))
}

/// Skips blocks of data up to an empty one.
fn skip_blocks(reader: &mut (impl BufRead + Seek)) -> std::io::Result<()> {
    loop {
        match bytes(reader)? {
            [0] => return Ok(()),
            [length] => reader.seek_relative(length.into())?,
        }
    }
}
