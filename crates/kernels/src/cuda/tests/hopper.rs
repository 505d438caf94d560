//! Tests of the emulation of compute capability 9.0 (emulation/hopper.h): copies and products
//! against the definitions of the PTX manual, and planted errors, which must be found.

use super::super::launch::{Launch, address, empty};
use super::super::tensor_map::{Boxes, head_maps};
use super::operand;
use crate::testing::values;
use candle_core::{DType, Device, Result, Tensor};
use half::bf16;

/// Whether every element of `got` is close to `want`, relative to the size of the elements of
/// `want`.
fn is_close(got: &Tensor, want: &Tensor, bound: f64) -> bool {
    let (got, want) = (values(got), values(want));
    let size = want.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
    assert_eq!(got.len(), want.len());
    got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= bound * size)
}

/// Bits of the elements of a bf16 tensor.
fn bits(t: &Tensor) -> Vec<u16> {
    let elements: Vec<bf16> = t.flatten_all().unwrap().to_vec1().unwrap();
    elements.into_iter().map(bf16::to_bits).collect()
}

#[test]
fn a_box_arrives_permuted_and_with_zeros_outside_of_the_tensor() -> Result<()> {
    let (n, h, dh) = (21, 2, 72);
    let x = operand(1, &[n, h, dh], DType::BF16);
    let elements = bits(&x);
    for (columns, rows, at) in
        [(64, 16, [0, 1, 3]), (64, 24, [64, 0, 8]), (16, 8, [64, 1, 17]), (32, 40, [-8, 1, -2])]
    {
        let bytes = 2 * columns * rows;
        let out = empty(bytes / 4, DType::U32, &x)?;
        let map = Boxes::new(("test", "x"), &x, columns, rows)?.encode()?;
        let mut launch = Launch::new("probe_sm90_copy", DType::BF16).threads(64).shared(bytes + 8);
        launch = launch.words(map.to_vec()).address(address("test", "out", &out)?).int(bytes / 4);
        for coordinate in at {
            launch = launch.signed(coordinate);
        }
        launch.run(&x)?;
        let got = out.to_vec1::<u32>()?;
        for row in 0..rows {
            for column in 0..columns {
                let (c, r) = (at[0] + column as i32, at[2] + row as i32);
                let inside = (0..dh as i32).contains(&c) && (0..n as i32).contains(&r);
                let index = (r * h as i32 + at[1]) * dh as i32 + c;
                let want = if inside { elements[index as usize] } else { 0 };
                // Chunks of 16 bytes change places within rows of 128 bytes or less: a chunk of a
                // row of 128 bytes with the number of the row, one of narrower rows with that of
                // 128 bytes.
                let per_row = columns / 8;
                let chunk = (column / 8) ^ (row * per_row / 8 % per_row);
                let place = (row * per_row + chunk) * 8 + column % 8;
                let found = (got[place / 2] >> (16 * (place % 2))) as u16;
                assert_eq!(found, want, "{columns} x {rows} at {at:?}: row {row} column {column}");
            }
        }
    }
    Ok(())
}

/// Places of a matrix `[outer, 16]` in shared memory: the canonical layouts of the PTX manual, with
/// the dim that is summed over last.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// Field of the descriptor for the permutation, and bytes of its rows.
    mode: (u64, usize),
    /// Whether elements with the same place in the dim that is summed over are adjacent.
    transposed: bool,
    /// Bytes between parts of the matrix.
    lead: usize,
    stride: usize,
}

impl Layout {
    fn descriptor(self, start: usize) -> u64 {
        let field = |bytes: usize| (bytes / 16) as u64;
        field(start) | field(self.lead) << 16 | field(self.stride) << 32 | self.mode.0 << 62
    }

    /// Index of the 2-byte element.
    fn place(self, start: usize, outer: usize, inner: usize) -> usize {
        let (lead, stride, width) = (self.lead, self.stride, self.mode.1);
        let in_row = width / 2;
        let bytes = match (width, self.transposed) {
            (16, false) => outer % 8 * 16 + outer / 8 * stride + inner / 8 * lead + inner % 8 * 2,
            (16, true) => inner % 8 * 16 + inner / 8 * lead + outer / 8 * stride + outer % 8 * 2,
            (_, false) => outer % 8 * width + outer / 8 * stride + inner * 2,
            (_, true) => {
                let row = inner % 8 * width + inner / 8 * stride;
                row + outer / in_row * lead + outer % in_row * 2
            }
        } + start;
        let permuted = match width {
            128 => bytes ^ (bytes / 128 % 8 * 16),
            64 => bytes ^ (bytes / 128 % 4 * 16),
            32 => bytes ^ (bytes / 128 % 2 * 16),
            _ => bytes,
        };
        permuted / 2
    }
}

/// Layouts of 64 rows or columns, whose bytes fit between 0 and 16 KiB.
fn layouts() -> Vec<Layout> {
    let layout = |mode, transposed, lead, stride| Layout { mode, transposed, lead, stride };
    vec![
        layout((1, 128), false, 16, 1024),
        layout((1, 128), false, 16, 2048),
        layout((1, 128), true, 16, 1024),
        layout((2, 64), false, 16, 512),
        layout((2, 64), true, 1024, 512),
        layout((2, 64), true, 512, 2048),
        layout((3, 32), false, 16, 256),
        layout((3, 32), true, 512, 256),
        layout((0, 16), false, 128, 256),
        layout((0, 16), false, 1024, 128),
        layout((0, 16), true, 128, 256),
    ]
}

#[test]
fn products_decode_every_layout_of_the_manual() -> Result<()> {
    const B: usize = 16 << 10;
    let (a, b) = (operand(1, &[64, 16], DType::BF16), operand(2, &[64, 16], DType::BF16));
    let want = a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?.t()?)?;
    let (a, b) = (bits(&a), bits(&b));
    let mut cases = Vec::new();
    for of_b in layouts() {
        cases.extend(layouts().into_iter().map(|of_a| (Some(of_a), of_b)));
        cases.push((None, of_b));
    }
    for (of_a, of_b) in cases {
        let mut image = vec![0xFFFF; B];
        for (index, element) in a.iter().enumerate() {
            let place = of_a.map_or(index, |of_a| of_a.place(0, index / 16, index % 16));
            image[place] = *element;
        }
        for (index, element) in b.iter().enumerate() {
            image[of_b.place(B, index / 16, index % 16)] = *element;
        }
        let words: Vec<u32> =
            image.chunks(2).map(|pair| u32::from(pair[0]) | u32::from(pair[1]) << 16).collect();
        let image = Tensor::new(words.as_slice(), &Device::Cpu)?;
        let out = empty((64, 64), DType::F32, &want)?;
        Launch::new("probe_sm90_product", DType::BF16)
            .threads(128)
            .shared(2 * B)
            .address(address("test", "image", &image)?)
            .int(words.len())
            .long(of_a.map_or(0, |of_a| of_a.descriptor(0)) as usize)
            .long(of_b.descriptor(B) as usize)
            .flag(of_a.is_some_and(|of_a| of_a.transposed))
            .flag(of_b.transposed)
            .flag(of_a.is_none())
            .address(address("test", "out", &out)?)
            .run(&want)?;
        assert!(is_close(&out, &want, 1e-5), "{of_a:?} {of_b:?}");
    }
    Ok(())
}

/// The result of the pipeline with a planted error (`Planted` in probes.cpp), and the right one.
fn pipeline(planted: usize) -> (Result<Tensor>, Tensor) {
    let tiles = 5;
    let own = operand(1, &[64, 1, 128], DType::BF16);
    let others = operand(2, &[64 * tiles, 1, 128], DType::BF16);
    let run = || {
        let out = empty((64, 128), DType::F32, &own)?;
        Launch::new("probe_sm90_pipeline", DType::BF16)
            .threads(256)
            .shared(3 * 64 * 256 + 5 * 8)
            .words(head_maps("test", "own", &own, 64)?)
            .words(head_maps("test", "others", &others, 64)?)
            .int(tiles)
            .int(planted)
            .address(address("test", "out", &out)?)
            .run(&own)?;
        Ok(out)
    };
    let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap().squeeze(1).unwrap();
    let (left, right) = (wide(&own), wide(&others));
    let scores = left.matmul(&right.t().unwrap()).unwrap();
    let rounded = scores.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    (run(), rounded.matmul(&right).unwrap())
}

#[test]
fn a_pipeline_of_copies_and_products_is_right() {
    for _ in 0..5 {
        let (got, want) = pipeline(0);
        assert!(is_close(&got.unwrap(), &want, 1e-3));
    }
}

#[test]
fn planted_errors_are_found() {
    for (planted, name) in [
        (1, "stride of a descriptor"),
        (2, "lead of a descriptor"),
        (3, "permutation of a descriptor"),
        (4, "rows of a descriptor"),
        (5, "parity of the wait for a copy"),
        (6, "parity of the wait for a release"),
        (7, "no wait for a copy"),
        (8, "no wait for a release"),
        (9, "no wait for scores"),
        (10, "no wait for sums"),
        (11, "release before the wait for products"),
        (12, "release by one of four warps"),
        (13, "release by all warps twice"),
        (14, "too few bytes expected"),
        (15, "no bytes expected"),
        (16, "no fence"),
        (17, "no commit"),
        (18, "operand changes before the wait"),
        (19, "no initialisation"),
    ] {
        // The order of warps and copies is random, so a run may miss an error.
        let found = (0..20).any(|_| match pipeline(planted) {
            (Err(_), _) => true,
            (Ok(got), want) => !is_close(&got, &want, 1e-2),
        });
        assert!(found, "{name}");
    }
}

#[test]
fn errors_of_the_emulation_name_the_kernel_and_the_cause() {
    for (planted, cause) in [
        (10, "an operand of a product changes between its start and the wait for it"),
        (14, "a phase of a barrier does not end"),
        (16, "a group of products must begin with a fence"),
        (18, "a register operand of a product changes before the wait for it"),
        (19, "uses a barrier that is not initialised"),
    ] {
        let errors: Vec<String> =
            (0..5).filter_map(|_| Some(pipeline(planted).0.err()?.to_string())).collect();
        let named = |error: &String| error.contains("kernel `probe_sm90_pipeline_bf16`");
        assert!(errors.iter().all(named), "{errors:?}");
        assert!(errors.iter().any(|error| error.contains(cause)), "{cause}: {errors:?}");
    }
}
