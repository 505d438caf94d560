//! Decodes scans: directly to samples, or to coefficients if the file has several scans.

use super::bits::{Bits, ScanData};
use super::blocks::{self, Block};
use super::error::JpegError;
use super::huffman::Huffman;
use super::idct::Batch;
use super::output::Output;
use super::segments::{Frame, ScanComponent, ScanHeader, Tables};

/// Position in the data of a scan.
struct Reader<'a> {
    data: &'a ScanData,
    bits: Bits<'a>,
    restart_interval: usize,
    num_mcus: usize,
    /// Prediction of the next DC coefficient of each component of the scan.
    dc: [i32; 4],
    /// Number of further blocks without new coefficients, in progressive scans.
    end_run: u32,
}

impl<'a> Reader<'a> {
    fn new(data: &'a ScanData, restart_interval: usize) -> Result<Self, JpegError> {
        if restart_interval == 0 && data.num_intervals() > 1 {
            return Err(JpegError::Damaged("it has restart markers but no restart interval"));
        }
        let bits = data.interval(0)?;
        Ok(Self { data, bits, restart_interval, num_mcus: 0, dc: [0; 4], end_run: 0 })
    }

    #[inline]
    fn start_mcu(&mut self) -> Result<(), JpegError> {
        if self.restart_interval > 0
            && self.num_mcus > 0
            && self.num_mcus.is_multiple_of(self.restart_interval)
        {
            self.bits = self.data.interval(self.num_mcus / self.restart_interval)?;
            self.dc = [0; 4];
            self.end_run = 0;
        }
        self.num_mcus += 1;
        Ok(())
    }
}

/// Decodes the only scan of a sequential frame. Returns the data after it.
pub(super) fn decode_to<'a>(
    output: &mut Output,
    frame: &Frame,
    header: &ScanHeader,
    tables: &Tables,
    data: &'a [u8],
) -> Result<&'a [u8], JpegError> {
    struct Source<'a> {
        index: usize,
        tables: [&'a Huffman; 2],
        quantisation: [i32; 64],
        batch: Box<Batch>,
    }
    let (scan, length) = ScanData::read(data)?;
    let mut reader = Reader::new(&scan, tables.restart_interval)?;
    let source = |component: &ScanComponent| {
        Ok(Source {
            index: component.index,
            tables: [tables.dc(*component)?, tables.ac(*component)?],
            quantisation: tables.quantisation(&frame.components[component.index])?,
            batch: Batch::new(),
        })
    };
    let mut sources = header.components.iter().map(source).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..frame.mcus[1] {
        for column in 0..frame.mcus[0] {
            reader.start_mcu()?;
            for (source, dc) in sources.iter_mut().zip(&mut reader.dc) {
                let component = &frame.components[source.index];
                let plane = &mut output.planes[source.index];
                for row in 0..component.v {
                    for i in 0..component.h {
                        let batch = &mut *source.batch;
                        let lane = batch.len;
                        let lanes = &mut batch.coefficients;
                        let put = |at: usize, value| lanes[at % 64][lane % 16] = value;
                        let num = blocks::sequential(&mut reader.bits, source.tables, dc, put);
                        let place = plane.place(column * component.h + i, row);
                        batch.push(
                            num,
                            place,
                            &source.quantisation,
                            &mut plane.samples,
                            plane.stride,
                        );
                    }
                }
            }
            reader.bits.check()?;
        }
        for source in &mut sources {
            let plane = &mut output.planes[source.index];
            source.batch.finish(&source.quantisation, &mut plane.samples, plane.stride);
        }
        output.finish_mcu_row();
    }
    Ok(&data[length..])
}

pub(super) struct Coefficients {
    /// The blocks of each component, in rows that are padded to whole MCUs.
    blocks: Vec<Vec<Block>>,
    /// For each component, its table when its first scan starts.
    quantisation: Vec<Option<[i32; 64]>>,
    /// For each component and zigzag index, the number of low bits that the last scan left out.
    missing_bits: Vec<[Option<u32>; 64]>,
}

/// Number of coefficients, in zigzag order, that libjpeg-turbo estimates if they are incomplete.
const REQUIRED: usize = 10;

impl Coefficients {
    pub(super) fn new(frame: &Frame) -> Self {
        let num = frame.components.len();
        let blocks = (0..num).map(|component| {
            let [width, height] = frame.padded_blocks(component);
            vec![[0; 64]; width * height]
        });
        Self {
            blocks: blocks.collect(),
            quantisation: vec![None; num],
            missing_bits: vec![[None; 64]; num],
        }
    }

    /// Reads a scan. Returns the data after it.
    pub(super) fn read_scan<'a>(
        &mut self,
        frame: &Frame,
        header: &ScanHeader,
        tables: &Tables,
        data: &'a [u8],
    ) -> Result<&'a [u8], JpegError> {
        for component in &header.components {
            let index = component.index;
            let missing = &mut self.missing_bits[index][header.first..=header.last];
            missing.fill(Some(header.low));
            if self.quantisation[index].is_none() {
                self.quantisation[index] = Some(tables.quantisation(&frame.components[index])?);
            }
        }
        let (scan, length) = ScanData::read(data)?;
        let mut reader = Reader::new(&scan, tables.restart_interval)?;
        if let [component] = header.components[..] {
            // a scan of one component omits the padding
            let size = &frame.components[component.index];
            let [width, height] = [size.width, size.height].map(|samples| samples.div_ceil(8));
            let stride = frame.padded_blocks(component.index)[0];
            let decode = BlockDecoder::new(frame, header, tables, component)?;
            for row in self.blocks[component.index].chunks_mut(stride.max(1)).take(height) {
                for block in &mut row[..width] {
                    reader.start_mcu()?;
                    decode.block(&mut reader, 0, block);
                    reader.bits.check()?;
                }
            }
            return Ok(&data[length..]);
        }
        let decoders = header
            .components
            .iter()
            .map(|component| BlockDecoder::new(frame, header, tables, *component));
        let decoders = decoders.collect::<Result<Vec<_>, _>>()?;
        for mcu_row in 0..frame.mcus[1] {
            for column in 0..frame.mcus[0] {
                reader.start_mcu()?;
                for (i, (component, decode)) in header.components.iter().zip(&decoders).enumerate()
                {
                    let size = &frame.components[component.index];
                    let stride = frame.padded_blocks(component.index)[0];
                    for row in 0..size.v {
                        let at = (mcu_row * size.v + row) * stride + column * size.h;
                        for block in &mut self.blocks[component.index][at..at + size.h] {
                            decode.block(&mut reader, i, block);
                        }
                    }
                }
                reader.bits.check()?;
            }
        }
        Ok(&data[length..])
    }

    /// Transforms all blocks to samples and converts them to pixels.
    pub(super) fn transform(&self, frame: &Frame, output: &mut Output) -> Result<(), JpegError> {
        for missing in &self.missing_bits {
            if missing[..REQUIRED].iter().any(|bits| *bits != Some(0)) {
                return Err(JpegError::Damaged("its scans are incomplete"));
            }
        }
        let mut batch = Batch::new();
        for mcu_row in 0..frame.mcus[1] {
            for (index, component) in frame.components.iter().enumerate() {
                let quantisation = self.quantisation[index].as_ref().ok_or(JpegError::Truncated)?;
                let plane = &mut output.planes[index];
                let stride = frame.padded_blocks(index)[0];
                for row in 0..component.v {
                    let at = (mcu_row * component.v + row) * stride;
                    for (column, block) in self.blocks[index][at..at + stride].iter().enumerate() {
                        let lane = batch.len;
                        for (lanes, value) in batch.coefficients.iter_mut().zip(block) {
                            lanes[lane % 16] = *value;
                        }
                        let num = if block[1..].iter().all(|value| *value == 0) { 1 } else { 64 };
                        let place = plane.place(column, row);
                        batch.push(num, place, quantisation, &mut plane.samples, plane.stride);
                    }
                }
                batch.finish(quantisation, &mut plane.samples, plane.stride);
            }
            output.finish_mcu_row();
        }
        Ok(())
    }
}

/// Decodes the blocks of a component of a scan.
enum BlockDecoder<'a> {
    Sequential([&'a Huffman; 2]),
    Progressive(&'a ScanHeader, Option<&'a Huffman>),
}

impl<'a> BlockDecoder<'a> {
    fn new(
        frame: &Frame,
        header: &'a ScanHeader,
        tables: &'a Tables,
        component: ScanComponent,
    ) -> Result<Self, JpegError> {
        Ok(if !frame.is_progressive {
            Self::Sequential([tables.dc(component)?, tables.ac(component)?])
        } else if header.first > 0 {
            Self::Progressive(header, Some(tables.ac(component)?))
        } else if header.earlier == 0 {
            Self::Progressive(header, Some(tables.dc(component)?))
        } else {
            Self::Progressive(header, None) // its bits have no code
        })
    }

    /// Decodes a block of the component with the index `i` in the scan.
    #[inline]
    fn block(&self, reader: &mut Reader<'_>, i: usize, block: &mut Block) {
        let (bits, dc) = (&mut reader.bits, &mut reader.dc[i]);
        match self {
            Self::Sequential(tables) => {
                block.fill(0);
                blocks::sequential(bits, *tables, dc, |at, value| block[at % 64] = value);
            }
            Self::Progressive(header, table) => {
                blocks::progressive(bits, header, *table, dc, &mut reader.end_run, block);
            }
        }
    }
}
