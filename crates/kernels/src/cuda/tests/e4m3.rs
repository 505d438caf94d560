//! The kernels that round to FP8, and the scaling of their products.

use super::{DTYPES, operand};
use crate::e4m3::{e4m3_columns, e4m3_rows, value};
use crate::e4m3_linear::{E4m3Sums, multiply, round_columns, round_rows};
use crate::testing::{Tolerance, assert_close, bits, random};
use candle_core::{DType, Result, Tensor};

/// The values of codes `[rows, columns]` with their scales, and whether all of them outside `[n, k]`
/// are zeros.
fn values(codes: &Tensor, scales: &Tensor, [n, k]: [usize; 2]) -> Result<Vec<u32>> {
    let (codes, scales) = (codes.to_vec2::<u8>()?, scales.to_vec1::<f32>()?);
    let mut found = Vec::new();
    for (row, (codes, scale)) in codes.iter().zip(&scales).enumerate() {
        for (column, code) in codes.iter().enumerate() {
            if row < n && column < k {
                found.push((value(*code) * scale).to_bits());
            } else {
                assert_eq!(*code, 0, "padding at {row}, {column}");
            }
        }
    }
    Ok(found)
}

/// Rows of very different sizes, with numbers that are not finite and a row of zeros.
fn matrix(n: usize, k: usize, dtype: DType) -> Result<Tensor> {
    let mut x = random(1, &[n, k]).flatten_all()?.to_vec1::<f32>()?;
    for (at, x) in x.iter_mut().enumerate() {
        *x *= [1.0, 1e-38, 3e4, 1e-30, 0.0, 1e37][at / k % 6];
        match at {
            5 => *x = f32::NAN,
            70 => *x = f32::NEG_INFINITY,
            _ => {}
        }
    }
    operand_of(x, n, k, dtype)
}

fn operand_of(x: Vec<f32>, n: usize, k: usize, dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(x, (n, k), operand(1, &[1], dtype).device())?.to_dtype(dtype)
}

#[test]
fn codes_and_scales_are_those_of_the_cpu() -> Result<()> {
    for (n, k) in [(1, 1), (3, 16), (7, 65), (70, 528), (200, 33), (65, 4096), (3, 1031)] {
        for (dtype, _) in DTYPES {
            let x = matrix(n, k, dtype)?;
            let same = |found: &[u32], want: &Tensor| {
                for (at, (found, want)) in found.iter().zip(bits(want)).enumerate() {
                    let (found, want) = (f32::from_bits(*found), f32::from_bits(want));
                    let equal = found.to_bits() == want.to_bits();
                    assert!(
                        equal || found.is_nan() && want.is_nan(),
                        "{n} {k} {at} {found} {want}"
                    );
                }
            };
            let rows = round_rows("test", ("x", &x), (n, k), n + 3)?;
            let found = values(&rows.codes, &rows.scales, [n, k])?;
            same(&found, &e4m3_rows(&x)?);
            assert_eq!(rows.codes.dims(), [n + 3, k.next_multiple_of(16)]);
            let columns = round_columns("test", ("x", &x), (n, k), k + 3)?;
            let found = values(&columns.codes, &columns.scales, [k, n])?;
            same(&found, &e4m3_columns(&x)?.t()?.contiguous()?);
            assert_eq!(columns.codes.dims(), [k + 3, n.next_multiple_of(16)]);
        }
    }
    Ok(())
}

#[test]
fn every_bf16_number_has_the_code_of_the_cpu() -> Result<()> {
    // 1 and 448 in each row give all of them the scale 1.
    let all: Vec<f32> = (0..=u16::MAX).map(|x| half::bf16::from_bits(x).to_f32()).collect();
    let mut x = Vec::new();
    for part in all.chunks(255) {
        x.push(448.0);
        x.extend(part.iter().map(|x| if x.abs() <= 448.0 { *x } else { f32::NAN }));
        x.resize(x.len().next_multiple_of(256), 1.0);
    }
    let x = operand_of(x.clone(), x.len() / 256, 256, DType::BF16)?;
    let n = x.dim(0)?;
    let rows = round_rows("test", ("x", &x), (n, 256), n)?;
    assert!(rows.scales.to_vec1::<f32>()?.iter().all(|scale| *scale == 1.0));
    let found = values(&rows.codes, &rows.scales, [n, 256])?;
    for (found, want) in found.iter().zip(bits(&e4m3_rows(&x)?)) {
        let both_nan = f32::from_bits(*found).is_nan() && f32::from_bits(want).is_nan();
        assert!(*found == want || both_nan, "{found:x} {want:x}");
    }
    Ok(())
}

#[test]
fn sums_of_a_few_rows_at_a_time_give_the_same_bits() -> Result<()> {
    let (n, m, k) = (300, 40, 48);
    for (dtype, tolerance) in [(DType::F32, Tolerance::E4M3_SUMS), (DType::BF16, Tolerance::BF16)] {
        let (x, w) = (operand(1, &[n, k], dtype), operand(2, &[m, k], dtype));
        let (bias, residual) = (operand(3, &[m], dtype), operand(4, &[n, m], dtype));
        let x_rounded = round_rows("test", ("x", &x), (n, k), n)?;
        let w_rounded = round_rows("test", ("w", &w), (m, k), 48)?;
        let product = |bytes: usize| {
            let y = operand(5, &[n, m], dtype);
            let others = (Some(&bias), Some(&residual));
            let operands = ([&x_rounded, &w_rounded], E4m3Sums::F32);
            multiply("test", operands, (n, m), others, &y, bytes)?;
            Ok::<_, candle_core::Error>(y)
        };
        let (all, parts) = (product(1 << 20)?, product(0)?);
        assert_eq!(bits(&all), bits(&parts));
        let wide = |t: &Tensor| t.to_dtype(DType::F64);
        let want = wide(&e4m3_rows(&x)?)?.matmul(&wide(&e4m3_rows(&w)?)?.t()?)?;
        let want = want.broadcast_add(&wide(&bias)?)?.add(&wide(&residual)?)?;
        assert_close("product", &all, &want, tolerance);
    }
    Ok(())
}

/// Sums in about 14 bits differ from those in f32, by a small part.
#[test]
fn fast_sums_are_close_to_exact_ones() -> Result<()> {
    let (n, m) = (17, 32);
    for k in [16, 300, 4096] {
        let (x, w) = (operand(1, &[n, k], DType::F32), operand(2, &[m, k], DType::F32));
        let rounded =
            [round_rows("test", ("x", &x), (n, k), n)?, round_rows("test", ("w", &w), (m, k), m)?];
        let product = |sums| -> Result<Tensor> {
            let y = operand(5, &[n, m], DType::F32);
            let operands = ([&rounded[0], &rounded[1]], sums);
            multiply("test", operands, (n, m), (None, None), &y, 1 << 20)?;
            Ok(y)
        };
        let wide = |t: &Tensor| t.to_dtype(DType::F64);
        let want = wide(&e4m3_rows(&x)?)?.matmul(&wide(&e4m3_rows(&w)?)?.t()?)?;
        let fast = product(E4m3Sums::Fast)?;
        assert_close(&format!("{k}"), &fast, &want, Tolerance::E4M3_FAST);
        assert_ne!(bits(&fast), bits(&product(E4m3Sums::F32)?), "{k}");
    }
    Ok(())
}
