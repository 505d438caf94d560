//! CRC-32 checksums: of the blocks of a cache file, so that damage on the disk is found before its
//! bytes are used, and of media files, so that another file of the same name is noticed.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use flate2::Crc;
use rayon::prelude::*;

/// Bytes of each block except the last.
const BLOCK: u64 = 1 << 18;
/// Bytes of a checksum in a file.
const SUM: u64 = size_of::<u32>() as u64;
/// Marks the record after the checksums of an Arrow file.
const MAGIC: [u8; 8] = *b"trnrsums";
/// Bytes of that record: the mark, the number of bytes before the checksums, the checksum of these
/// two and of the checksums, and that of the footer.
const RECORD: u64 = 24;
/// Bytes of the record of a flush: the number of bytes before it, and their checksum.
const FLUSH: usize = size_of::<u64>() + SUM as usize;
/// The end of an Arrow file: the length of the footer, and the magic number.
const ARROW_END: u64 = 10;
const ARROW_MAGIC: [u8; 6] = *b"ARROW1";

/// The checksum of `bytes`.
pub(crate) fn of_bytes(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Bytes at the start and at the end of a media file that its checksum covers.
const MEDIA_END: u64 = 16 << 10;
/// Maximum size of a media file whose checksum covers all of its bytes.
pub(crate) const ALL_SUMMED: u64 = 2 * MEDIA_END;

/// The checksum of the first and the last 16 KiB of the regular file at `path`; of all bytes if it
/// is shorter than both.
pub(crate) fn of_ends(path: &Path) -> io::Result<u32> {
    let file = files::open(path)?;
    let size = file.metadata()?.len();
    let mut bytes = read_at(&file, 0, size.min(MEDIA_END))?;
    let last = (size - bytes.len() as u64).min(MEDIA_END);
    bytes.extend(read_at(&file, size - last, last)?);
    Ok(of_bytes(&bytes))
}

/// The checksums of the blocks in the first `num_bytes` bytes of `file`.
pub(crate) fn of_blocks(file: &File, num_bytes: u64) -> io::Result<Vec<u32>> {
    let sum = |block| read_block(file, block, num_bytes).map(|bytes| of_bytes(&bytes));
    (0..num_bytes.div_ceil(BLOCK)).into_par_iter().map(sum).collect()
}

/// Reads a block of the first `num_bytes` bytes of `file`.
fn read_block(file: &File, block: u64, num_bytes: u64) -> io::Result<Vec<u8>> {
    let start = block * BLOCK;
    read_at(file, start, BLOCK.min(num_bytes - start))
}

fn read_at(file: &File, start: u64, num_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; num_bytes as usize];
    file.read_exact_at(&mut bytes, start)?;
    Ok(bytes)
}

fn damaged(what: impl Into<String>) -> io::Error {
    let what: String = what.into();
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The content of a file of checksums for `file`: its size, the checksums, and their checksum.
fn sums_of(file: &File) -> io::Result<Vec<u8>> {
    let size = file.metadata()?.len();
    let mut bytes = size.to_le_bytes().to_vec();
    bytes.extend(of_blocks(file, size)?.iter().flat_map(|sum| sum.to_le_bytes()));
    bytes.extend(of_bytes(&bytes).to_le_bytes());
    Ok(bytes)
}

/// Writes the checksums of `file` to a new file at `path`.
pub(crate) fn write_sums(file: &File, path: &Path) -> io::Result<()> {
    files::create(path)?.write_all(&sums_of(file)?)
}

/// Whether `file` has the checksums in the file at `path`.
pub(crate) fn has_sums(file: &File, path: &Path) -> io::Result<bool> {
    Ok(files::read(path)? == sums_of(file)?)
}

/// Inserts checksums before the footer of a complete Arrow file. Readers of Arrow files do not see
/// them, because the footer says where the batches are.
pub(crate) fn seal_arrow(file: &mut File) -> io::Result<()> {
    let size = file.metadata()?.len();
    let footer = arrow_footer(file, size)?;
    let start = size - footer.len() as u64;
    let sums = of_blocks(file, start)?;
    let mut bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    bytes.extend(MAGIC);
    bytes.extend(start.to_le_bytes());
    bytes.extend(of_bytes(&bytes).to_le_bytes());
    bytes.extend(of_bytes(&footer).to_le_bytes());
    bytes.extend(footer);
    file.seek(SeekFrom::Start(start))?;
    file.write_all(&bytes)
}

/// Reads the footer of an Arrow file, its length and the magic number.
fn arrow_footer(file: &File, size: u64) -> io::Result<Vec<u8>> {
    let no_end = || damaged("the file has no end of an Arrow file");
    let end = read_at(file, size.checked_sub(ARROW_END).ok_or_else(no_end)?, ARROW_END)?;
    let length = end.first_chunk().map_or(-1, |length| i32::from_le_bytes(*length));
    let length = u64::try_from(length).ok().filter(|_| end.ends_with(&ARROW_MAGIC));
    let length = length.map(|length| length + ARROW_END).filter(|length| *length <= size);
    let length = length.ok_or_else(no_end)?;
    read_at(file, size - length, length)
}

/// A file that is written from its start. Each flush appends the number of bytes before it and
/// their checksum to a second file, so that [`checked_bytes`] finds what a killed process wrote.
#[derive(Debug)]
pub(crate) struct SummedFile {
    file: File,
    sums: File,
    crc: Crc,
    num_bytes: u64,
}

impl SummedFile {
    /// `file` and `sums` are empty.
    pub(crate) fn new(file: File, sums: File) -> Self {
        Self { file, sums, crc: Crc::new(), num_bytes: 0 }
    }

    pub(crate) fn into_inner(self) -> File {
        self.file
    }
}

impl Write for SummedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let num_written = self.file.write(bytes)?;
        self.crc.update(&bytes[..num_written]);
        self.num_bytes += num_written as u64;
        Ok(num_written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut record = self.num_bytes.to_le_bytes().to_vec();
        record.extend(self.crc.sum().to_le_bytes());
        self.sums.write_all(&record)
    }
}

/// The number of bytes at the start of `file` that a [`SummedFile`] wrote, up to the last flush
/// before the first damaged byte. `sums` is the path of its checksums.
pub(crate) fn checked_bytes(file: &File, sums: &Path) -> io::Result<u64> {
    let sums = files::read(sums)?;
    let (mut crc, mut position) = (Crc::new(), 0);
    for record in sums.chunks_exact(FLUSH) {
        let (end, sum) = record.split_at(FLUSH - SUM as usize);
        let end = end.try_into().map_or(0, u64::from_le_bytes);
        let mut next = position;
        while next < end {
            let Ok(bytes) = read_at(file, next, BLOCK.min(end - next)) else {
                return Ok(position);
            };
            crc.update(&bytes);
            next += bytes.len() as u64;
        }
        if next != end || crc.sum().to_le_bytes() != sum {
            break;
        }
        position = end;
    }
    Ok(position)
}

/// Reads an Arrow file with checksums. A damaged byte is an error before it is returned.
#[derive(Debug)]
pub(crate) struct CheckedArrow {
    file: File,
    size: u64,
    sums: Vec<u32>,
    /// Number of bytes that `sums` covers.
    num_bytes: u64,
    footer: Vec<u8>,
    position: u64,
    /// The number and the bytes of the block that was read last.
    block: Option<(u64, Vec<u8>)>,
}

impl CheckedArrow {
    /// Fails if there are no checksums, or if they or the footer are damaged.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        let footer = arrow_footer(&file, size)?;
        let none = || damaged("the file has no checksums before its footer");
        let record = size - footer.len() as u64;
        let start = record.checked_sub(RECORD).ok_or_else(none)?;
        let bytes = read_at(&file, start, RECORD)?;
        if !bytes.starts_with(&MAGIC) {
            return Err(none());
        }
        let number = |at: usize| {
            u64::from(u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")))
        };
        let num_bytes = number(8) | number(12) << 32;
        let is_start = |sums: &u64| num_bytes.checked_add(sums * SUM) == Some(start);
        let num_sums = Some(num_bytes.div_ceil(BLOCK)).filter(is_start).ok_or_else(none)?;
        let mut sums = read_at(&file, num_bytes, num_sums * SUM)?;
        sums.extend(&bytes[..16]);
        if u64::from(of_bytes(&sums)) != number(16) {
            return Err(damaged("the checksums are damaged"));
        }
        if u64::from(of_bytes(&footer)) != number(20) {
            return Err(damaged("the footer is damaged"));
        }
        sums.truncate((num_sums * SUM) as usize);
        let sums = sums.chunks_exact(SUM as usize);
        let sums = sums.map(|sum| u32::from_le_bytes(sum.try_into().expect("four bytes")));
        let sums = sums.collect();
        Ok(Self { file, size, sums, num_bytes, footer, position: 0, block: None })
    }

    /// The checked bytes of a block.
    fn block(&mut self, number: u64) -> io::Result<&[u8]> {
        if self.block.as_ref().is_none_or(|block| block.0 != number) {
            self.block = None;
            let bytes = read_block(&self.file, number, self.num_bytes)?;
            if of_bytes(&bytes) != self.sums[number as usize] {
                let start = number * BLOCK;
                let end = start + bytes.len() as u64;
                return Err(damaged(format!("the bytes {start} to {end} are damaged")));
            }
            self.block = Some((number, bytes));
        }
        Ok(self.block.as_ref().map_or(&[][..], |block| &block.1[..]))
    }
}

impl Read for CheckedArrow {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let position = self.position;
        let footer = self.size - self.footer.len() as u64;
        if position >= self.size || buffer.is_empty() {
            return Ok(0);
        }
        let rest = if position >= footer {
            &self.footer[(position - footer) as usize..]
        } else if position < self.num_bytes {
            &self.block(position / BLOCK)?[(position % BLOCK) as usize..]
        } else {
            return Err(damaged("the file is read between its batches and its footer"));
        };
        let num_read = rest.len().min(buffer.len());
        buffer[..num_read].copy_from_slice(&rest[..num_read]);
        self.position += num_read as u64;
        Ok(num_read)
    }
}

impl Seek for CheckedArrow {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(offset) => self.size.checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with the end of an Arrow file, and checksums.
    fn sealed(num_bytes: u64) -> (Vec<u8>, File) {
        let mut bytes: Vec<u8> = (0..num_bytes).map(|byte| (byte % 251) as u8).collect();
        bytes.extend(b"footer");
        bytes.extend(6i32.to_le_bytes());
        bytes.extend(ARROW_MAGIC);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        seal_arrow(&mut file).unwrap();
        (bytes, file)
    }

    fn read_all(file: &File, num_bytes: usize) -> io::Result<Vec<u8>> {
        let mut reader = CheckedArrow::new(file.try_clone()?)?;
        let mut bytes = vec![0; num_bytes];
        reader.read_exact(&mut bytes)?;
        reader.seek(SeekFrom::End(-16))?;
        reader.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn bytes_and_footer_of_a_file_with_checksums_come_back() {
        for num_bytes in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 77] {
            let (expected, file) = sealed(num_bytes);
            assert!(read_all(&file, num_bytes as usize).unwrap() == expected, "{num_bytes} bytes");
        }
    }

    #[test]
    fn each_damaged_byte_is_found() {
        let num_bytes = BLOCK + 300;
        let (_, file) = sealed(num_bytes);
        let size = file.metadata().unwrap().len();
        for at in (0..size).filter(|at| at % 65_537 == 0 || *at >= BLOCK + 290) {
            let byte = read_at(&file, at, 1).unwrap()[0];
            file.write_all_at(&[byte ^ 4], at).unwrap();
            assert!(read_all(&file, num_bytes as usize).is_err(), "byte {at}");
            file.write_all_at(&[byte], at).unwrap();
        }
        assert!(read_all(&file, num_bytes as usize).is_ok());
    }

    #[test]
    fn what_was_written_before_the_last_flush_is_used_up_to_the_damage() {
        let folder = tempfile::tempdir().unwrap();
        let [path, sums] = ["a", "a.sums"].map(|name| folder.path().join(name));
        let mut file = SummedFile::new(File::create(&path).unwrap(), File::create(&sums).unwrap());
        for length in [10, 300_000, 1] {
            file.write_all(&vec![7; length]).unwrap();
            file.flush().unwrap();
        }
        file.write_all(b"not flushed").unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        assert_eq!(checked_bytes(&file, &sums).unwrap(), 300_011);
        for (at, expected) in [(300_010, 300_010), (290_000, 10), (9, 0)] {
            file.write_all_at(&[3], at).unwrap();
            assert_eq!(checked_bytes(&file, &sums).unwrap(), expected, "byte {at}");
        }
        file.write_all_at(&vec![7; 300_011], 0).unwrap();
        file.set_len(200_000).unwrap();
        assert_eq!(checked_bytes(&file, &sums).unwrap(), 10);
        assert!(checked_bytes(&file, &folder.path().join("none")).is_err());
    }

    #[test]
    fn a_file_without_checksums_is_refused() {
        let file = tempfile::tempfile().unwrap();
        for text in [&b""[..], b"ARROW1", b"0123456789", b"\x02\0\0\0ARROW1", b"\0\0\0\0ARROW1"] {
            file.set_len(0).unwrap();
            file.write_all_at(text, 0).unwrap();
            assert!(CheckedArrow::new(file.try_clone().unwrap()).is_err());
        }
    }
}
