//! Decodes the coefficients of a block: the whole block of a sequential scan, or the part of a
//! progressive scan.

use super::bits::Bits;
use super::huffman::Huffman;
use super::segments::{ScanHeader, ZIGZAG};

/// Coefficients of a block, in the order of its rows.
pub(super) type Block = [i16; 64];

/// Reads a block of a sequential scan and calls `put` with the place and value of each coefficient.
/// Returns the number of coefficients up to the last one that is not zero, in zigzag order.
#[expect(clippy::inline_always, reason = "`put` must be inlined into the loop")]
#[inline(always)]
pub(super) fn sequential(
    bits: &mut Bits<'_>,
    [dc_table, ac_table]: [&Huffman; 2],
    dc: &mut i32,
    mut put: impl FnMut(usize, i16),
) -> usize {
    bits.refill();
    let size = dc_table.symbol(bits);
    *dc = dc.wrapping_add(bits.signed(size));
    put(0, *dc as i16);
    let mut at = 1;
    while at < 64 {
        bits.refill();
        if let Some((run, value)) = ac_table.short_value(bits) {
            at += run;
            put(ZIGZAG[at % 128].into(), value);
            at += 1;
            continue;
        }
        let symbol = ac_table.symbol(bits);
        let (run, size) = ((symbol >> 4) as usize, symbol & 15);
        if size > 0 {
            at += run;
            put(ZIGZAG[at % 128].into(), bits.signed(size) as i16);
            at += 1;
        } else if run == 15 {
            at += 16;
        } else {
            break;
        }
    }
    if at > 64 {
        bits.set_damaged();
    }
    at
}

/// Reads the part of a block that a progressive scan contains. `table` is `None` in scans that
/// refine DC. `end_run` is the number of further blocks that have no new coefficients in this scan.
pub(super) fn progressive(
    bits: &mut Bits<'_>,
    header: &ScanHeader,
    table: Option<&Huffman>,
    dc: &mut i32,
    end_run: &mut u32,
    block: &mut Block,
) {
    match (table, header.first, header.earlier) {
        (None, ..) => {
            bits.refill();
            block[0] |= (bits.unsigned(1) << header.low) as i16;
        }
        (Some(table), 0, _) => {
            bits.refill();
            let size = table.symbol(bits);
            *dc = dc.wrapping_add(bits.signed(size));
            block[0] = (*dc << header.low) as i16;
        }
        (Some(table), _, 0) => first_ac(bits, header, table, end_run, block),
        (Some(table), ..) => refine_ac(bits, header, table, end_run, block),
    }
}

/// Reads the length of a run of blocks, including the present one, after its symbol.
fn read_end_run(bits: &mut Bits<'_>, exponent: u32) -> u32 {
    (1 << exponent) + bits.unsigned(exponent) as u32
}

fn first_ac(
    bits: &mut Bits<'_>,
    header: &ScanHeader,
    table: &Huffman,
    end_run: &mut u32,
    block: &mut Block,
) {
    if *end_run > 0 {
        *end_run -= 1;
        return;
    }
    let mut at = header.first;
    while at <= header.last {
        bits.refill();
        let symbol = table.symbol(bits);
        let (run, size) = ((symbol >> 4) as usize, symbol & 15);
        if size > 0 {
            at += run;
            block[usize::from(ZIGZAG[at % 128])] = (bits.signed(size) << header.low) as i16;
            at += 1;
        } else if run == 15 {
            at += 16;
        } else {
            *end_run = read_end_run(bits, run as u32) - 1;
            break;
        }
    }
    if at > 64 {
        bits.set_damaged();
    }
}

/// Adds a bit to the coefficients that are not zero, and reads new ones of one bit.
fn refine_ac(
    bits: &mut Bits<'_>,
    header: &ScanHeader,
    table: &Huffman,
    end_run: &mut u32,
    block: &mut Block,
) {
    let one = 1_i16 << header.low;
    let mut at = header.first;
    if *end_run == 0 {
        while at <= header.last {
            bits.refill();
            let symbol = table.symbol(bits);
            let (mut run, size) = (symbol >> 4, symbol & 15);
            let mut new = 0;
            if size > 0 {
                new = if bits.unsigned(1) == 1 { one } else { -one };
            } else if run < 15 {
                *end_run = read_end_run(bits, run);
                break;
            }
            while at <= header.last {
                let coefficient = &mut block[usize::from(ZIGZAG[at % 128])];
                if *coefficient == 0 {
                    if run == 0 {
                        *coefficient = new;
                        break;
                    }
                    run -= 1;
                } else {
                    refine(bits, coefficient, one);
                }
                at += 1;
            }
            at += 1;
        }
    }
    if *end_run > 0 {
        while at <= header.last {
            let coefficient = &mut block[usize::from(ZIGZAG[at % 128])];
            if *coefficient != 0 {
                refine(bits, coefficient, one);
            }
            at += 1;
        }
        *end_run -= 1;
    }
}

#[inline]
fn refine(bits: &mut Bits<'_>, coefficient: &mut i16, one: i16) {
    bits.refill();
    if bits.unsigned(1) == 1 && *coefficient & one == 0 {
        *coefficient = coefficient.wrapping_add(if *coefficient > 0 { one } else { -one });
    }
}
