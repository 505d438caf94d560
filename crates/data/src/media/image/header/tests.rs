use std::cell::Cell;
use std::io::{Read, SeekFrom};

use super::*;
use crate::media::image::golden;

/// EXIF block with a rotation by 90 degrees.
const TURNED: &[u8] = b"MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0";

fn chunk(kind: [u8; 4], data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u32).to_be_bytes();
    [&length, &kind[..], data, &[0; 4]].concat()
}

/// A PNG header of 7 x 5 pixels, followed by `chunks`.
fn png(chunks: &[Vec<u8>]) -> Vec<u8> {
    let size = [7u32, 5].map(u32::to_be_bytes).concat();
    let header = chunk(*b"IHDR", &[&size[..], &[8, 2, 0, 0, 0]].concat());
    [b"\x89PNG\r\n\x1a\n".to_vec(), header, chunks.concat()].concat()
}

/// A file that counts its read calls.
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

/// Returns the upright size and the number of read calls.
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
fn a_jpeg_may_have_a_few_bytes_between_segments_but_not_more_than_1_mib() {
    let jpeg = golden::fixture("rgb.jpg");
    let first = 4 + usize::from(u16::from_be_bytes([jpeg[4], jpeg[5]])); // end of a segment
    let with = |filler: usize| [&jpeg[..first], &vec![7; filler], &jpeg[first..]].concat();
    let size = read(jpeg.clone()).0;
    assert_eq!(read(with(1000)).0, size);
    let (found, reads) = try_read(with(1 << 22));
    assert!(found.is_err() && reads < 200, "{reads} reads");
}

#[test]
fn images_that_take_more_than_384_mib_are_rejected_from_their_header() {
    let header = |width: u32, height: u32, depth: u8, colour: u8| {
        let size = [width, height].map(u32::to_be_bytes).concat();
        let header = chunk(*b"IHDR", &[&size[..], &[depth, colour, 0, 0, 0]].concat());
        let bytes = [b"\x89PNG\r\n\x1a\n".to_vec(), header].concat();
        Header::read(&mut Cursor::new(bytes)).map(|header| header.upright_size())
    };
    for (depth, colour, pixel_bytes) in [
        (8, 2, 3),
        (8, 3, 3),
        (1, 0, 4),
        (16, 0, 4),
        (8, 6, 4),
        (8, 4, 5),
        (16, 4, 6),
        (16, 2, 9),
        (16, 6, 12),
    ] {
        let limit = (384 << 20) / pixel_bytes;
        let height = limit / 16384;
        assert_eq!(header(16384, height, depth, colour).unwrap(), [height, 16384]);
        let error = header(16384, height + 1, depth, colour).unwrap_err();
        let DecodeError::TooLarge { limit: found, .. } = error else { panic!("{error:?}") };
        assert_eq!(found, u64::from(limit), "{depth} bits, colour {colour}");
    }
    let tiff = |height: u32| {
        let entry = |tag: u16, kind: u16, count: u32, value: u32| {
            let tag_and_kind = [tag, kind].map(u16::to_le_bytes).concat();
            [tag_and_kind, [count, value].map(u32::to_le_bytes).concat()].concat()
        };
        let bits_at = 8 + 2 + 9 * 12 + 4;
        let entries = [
            entry(256, 4, 1, 16384),
            entry(257, 4, 1, height),
            entry(258, 3, 3, bits_at),
            entry(259, 3, 1, 1), // no compression
            entry(262, 3, 1, 2), // RGB
            entry(273, 4, 1, 200),
            entry(277, 3, 1, 3),
            entry(278, 4, 1, height),
            entry(279, 4, 1, 100),
        ];
        let start = [b"II*\0\x08\0\0\0\x09\0".to_vec(), entries.concat(), vec![0; 4]];
        let bits = [16u16; 3].map(u16::to_le_bytes).concat();
        Header::read(&mut Cursor::new([start.concat(), bits, vec![0; 200]].concat()))
    };
    let limit = (384u64 << 20) / 9; // three values of 16 bits, and the same in 8 bits
    assert!(tiff((limit / 16384) as u32).is_ok());
    let error = tiff((limit / 16384) as u32 + 1).unwrap_err();
    assert!(matches!(error, DecodeError::TooLarge { limit: found, .. } if found == limit));
}

#[test]
fn an_exif_chunk_of_more_than_1_mib_is_ignored() {
    let size = |length: usize| {
        let mut exif = TURNED.to_vec();
        exif.resize(length, 0);
        read(png(&[chunk(*b"eXIf", &exif)])).0
    };
    assert_eq!(size(1 << 20), [7, 5]);
    assert_eq!(size((1 << 20) + 1), [5, 7]);
}

#[test]
fn png_orientation_is_read_before_and_after_the_pixels_but_not_after_the_end_chunk() {
    let [exif, pixels, end] =
        [(*b"eXIf", TURNED), (*b"IDAT", &[0; 9000]), (*b"IEND", &[])].map(|(k, d)| chunk(k, d));
    let all = [exif, pixels, end];
    let size = |order: [usize; 3]| read(png(&order.map(|at| all[at].clone()))).0;
    assert_eq!(size([0, 1, 2]), [7, 5]);
    assert_eq!(size([1, 0, 2]), [7, 5]);
    assert_eq!(size([1, 2, 0]), [5, 7]);
}

#[test]
fn many_small_chunks_take_few_reads_and_zeros_are_not_parsed_as_chunks() {
    let small = vec![chunk(*b"tEXt", b"a=b"); 1000];
    assert!(read(png(&small)).1 <= 4);
    assert!(read(png(&[vec![0; 1 << 20]])).1 <= 2);
}

/// The scan of a progressive file, once more as often as `more` says.
fn with_more_scans(name: &str, more: usize) -> Vec<u8> {
    let jpeg = golden::fixture(name);
    let end = jpeg.len() - 2; // the end mark
    let is_scan = |at: &usize| jpeg[*at..].starts_with(&[0xff, 0xda]);
    let last = (0..end).rev().find(is_scan).unwrap();
    [&jpeg[..end], &jpeg[last..end].repeat(more), &jpeg[end..]].concat()
}

#[test]
fn the_scans_of_a_jpeg_are_counted() {
    let scans = |bytes: Vec<u8>| try_read(bytes).0.unwrap().num_scans;
    assert_eq!(scans(golden::fixture("rgb.jpg")), 1);
    assert_eq!(scans(golden::fixture("restarts.jpg")), 1);
    assert_eq!(scans(golden::fixture("progressive.jpg")), 10);
    assert_eq!(scans(with_more_scans("progressive.jpg", 1000)), 1010);
    let cut = with_more_scans("progressive.jpg", 5);
    assert!((1..cut.len()).all(|length| {
        try_read(cut[..length].to_vec()).0.map_or(0, |header| header.num_scans) <= 15
    }));
}

#[test]
fn a_kind_that_is_not_supported_is_not_called_damaged() {
    let header = |bytes: &[u8]| Header::read(&mut Cursor::new(bytes));
    let mut yellow = golden::fixture("palette_8bit_le.tif");
    let at = yellow.windows(4).position(|bytes| bytes == [6, 1, 3, 0]).unwrap();
    yellow[at + 8] = 8;
    let error = header(&yellow).unwrap_err();
    let DecodeError::NotSupported(kind) = error else { panic!("{error:?}") };
    assert_eq!(kind, "TIFF of CIELab, 1 x 8 bits, no compression");
    let mut packed = golden::fixture("555_masks.bmp");
    packed[30] = 4; // a JPEG inside of a BMP
    let error = header(&packed).unwrap_err();
    assert!(matches!(error, DecodeError::NotSupported(_)), "{error:?}");
}
