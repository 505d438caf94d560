//! Launches for many tensors give the bits of a launch for each.

use super::operand;
use crate::launch::with_kernels;
use crate::testing::{bits, gradient_buffer, message};
use crate::{Nf4, bias_backward, join_column_sums};
use candle_core::{DType, Device, Result, Tensor};

/// More widths than a launch has gradients; one column, and ends of warps.
fn widths() -> Vec<usize> {
    (1..40).chain([63, 64, 65, 255, 256, 257, 1000]).collect()
}

#[test]
fn joined_column_sums_have_the_bits_of_separate_ones() -> Result<()> {
    let dys: Vec<Tensor> = (1..)
        .zip(widths())
        .map(|(i, d)| operand(i, &[i as usize * 37 % 300, d], DType::BF16))
        .collect();
    let buffers = || -> Vec<Tensor> { widths().iter().map(|d| gradient_buffer(&[*d])).collect() };
    let (separate, joined) = (buffers(), buffers());
    // The last gradient receives two sums, so its order counts.
    let add = |grads: &[Tensor]| -> Result<()> {
        for (dy, grad) in dys.iter().zip(grads).chain(dys.iter().zip(grads).next_back()) {
            bias_backward(dy, grad)?;
        }
        Ok(())
    };
    with_kernels(|| add(&separate))?;
    let grads: Vec<&Tensor> = joined.iter().collect();
    with_kernels(|| join_column_sums(&grads, || add(&joined)))?;
    for ((separate, joined), d) in separate.iter().zip(&joined).zip(widths()) {
        assert_eq!(bits(separate), bits(joined), "{d} columns");
        assert_ne!(bits(joined), bits(&gradient_buffer(&[d])), "{d} columns: nothing was added");
    }
    Ok(())
}

#[test]
fn only_the_named_gradients_wait_for_the_end() -> Result<()> {
    let dy = operand(1, &[70, 33], DType::F32);
    let zeros = || Tensor::zeros(33, DType::F32, &Device::Cpu);
    let (named, other) = (zeros()?, zeros()?);
    let at_once = with_kernels(|| {
        join_column_sums(&[&named], || {
            bias_backward(&dy, &named)?;
            bias_backward(&dy, &other)?;
            other.copy()
        })
    })?;
    assert_eq!(bits(&at_once), bits(&named));
    assert_ne!(bits(&at_once), bits(&zeros()?));
    Ok(())
}

#[test]
fn a_backward_that_fails_leaves_no_sums_behind() -> Result<()> {
    let (dy, grad) = (operand(1, &[70, 33], DType::F32), gradient_buffer(&[33]));
    let failed = with_kernels(|| {
        join_column_sums(&[&grad], || -> Result<()> {
            bias_backward(&dy, &grad)?;
            candle_core::bail!("no memory")
        })
    });
    assert!(message(failed).starts_with("no memory"));
    assert_eq!(bits(&grad), bits(&gradient_buffer(&[33])));
    with_kernels(|| bias_backward(&dy, &grad))?;
    assert_ne!(bits(&grad), bits(&gradient_buffer(&[33])));
    Ok(())
}

#[test]
fn matrices_in_nf4_have_the_same_bits_together_and_alone() -> Result<()> {
    // More than a launch has, and empty ones between them.
    let sizes: Vec<usize> =
        [0, 1, 7, 64, 135, 2048, 0, 2051, 40_000].into_iter().cycle().take(40).collect();
    let matrix = |n: usize| {
        let x = operand(n as u64, &[n], DType::F32);
        Nf4::quantize(&[n], |range| x.narrow(0, range.start, range.len()))
    };
    let matrices: Vec<Nf4> = sizes.iter().map(|n| matrix(*n)).collect::<Result<_>>()?;
    for dtype in [DType::F32, DType::BF16] {
        for offset in [0, 1] {
            let places = || -> Result<Vec<Tensor>> {
                let place = |n: &usize| {
                    Tensor::full(f32::NAN, n + offset, &Device::Cpu)?
                        .to_dtype(dtype)?
                        .narrow(0, offset, *n)
                };
                sizes.iter().map(place).collect()
            };
            let (together, alone) = (places()?, places()?);
            let all: Vec<(&Nf4, &Tensor)> = matrices.iter().zip(&together).collect();
            with_kernels(|| Nf4::dequantize_all(&all))?;
            for ((matrix, alone), together) in matrices.iter().zip(&alone).zip(&together) {
                matrix.dequantize_into(alone)?;
                assert_eq!(bits(together), bits(alone), "{:?} {dtype:?} {offset}", matrix.shape());
            }
        }
    }
    Ok(())
}

#[test]
fn matrices_in_nf4_of_two_dtypes_are_refused() -> Result<()> {
    let x = operand(1, &[64], DType::F32);
    let matrix = Nf4::quantize(&[64], |range| x.narrow(0, range.start, range.len()))?;
    let places = [DType::F32, DType::BF16].map(|dtype| operand(2, &[64], dtype));
    let all = [(&matrix, &places[0]), (&matrix, &places[1])];
    let error = message(with_kernels(|| Nf4::dequantize_all(&all)));
    assert!(error.starts_with("nf4: "), "{error}");
    Ok(())
}
