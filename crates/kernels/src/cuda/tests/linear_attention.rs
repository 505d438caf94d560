//! The ops of linear attention, with the sizes of published models and with others.

use super::{DTYPES, assert_all_close, operand};
use crate::gated_delta_rule::{backward_on_gpu, forward_on_gpu};
use crate::launch::with_kernels;
use crate::testing::{bits, gradient_buffer, message};
use crate::{DeltaHeads, DeltaInputs, RecomputeInput};
use batch::CuSeqlens;
use candle_core::{DType, Device, Result, Tensor};

fn boundaries(lengths: &[u32]) -> CuSeqlens {
    CuSeqlens::from_lengths(lengths).unwrap()
}

#[test]
fn gates_match_the_cpu_for_any_size() -> Result<()> {
    for n in [0, 1, 2047, 4101] {
        for (dtype, tolerance) in DTYPES {
            let (gate, x) = (operand(1, &[n], dtype), operand(2, &[n], dtype));
            let dy = operand(3, &[n], dtype);
            let (gpu, cpu) = both!({
                let grads = |recompute| {
                    crate::sigmoid_gate_backward(gate.copy()?, x.copy()?, dy.copy()?, recompute)
                };
                let (dgate, dx, again) = grads(RecomputeInput::Yes)?;
                let alone = grads(RecomputeInput::No)?;
                let results = [crate::sigmoid_gate(&gate, &x)?, dgate, dx, alone.0, alone.1];
                results.into_iter().chain(again).collect()
            });
            assert_all_close(&format!("sigmoid_gate {n} {dtype:?}"), &gpu, &cpu, tolerance);
        }
    }
    for (t, h) in [(0, 4), (1, 1), (64, 32), (65, 48), (300, 33)] {
        for (dtype, tolerance) in DTYPES {
            let (a, b) = (operand(1, &[t, h], dtype), operand(2, &[t, h], dtype));
            let (a_log, dt_bias) = (operand(3, &[h], DType::F32), operand(4, &[h], DType::F32));
            let (dg, dbeta) = (operand(5, &[t, h], DType::F32), operand(6, &[t, h], DType::F32));
            let (gpu, cpu) = both!({
                let (g, beta) = crate::delta_gates(&a, &b, &a_log, &dt_bias)?;
                let (da_log, ddt_bias) = (gradient_buffer(&[h]), gradient_buffer(&[h]));
                let inputs = [&a, &b, &a_log, &dt_bias];
                let grad = crate::delta_gates_backward(
                    inputs,
                    &dg,
                    &dbeta,
                    Some(&da_log),
                    Some(&ddt_bias),
                )?;
                let one = gradient_buffer(&[h]);
                let again = crate::delta_gates_backward(inputs, &dg, &dbeta, None, Some(&one))?;
                vec![g, beta, grad.da, grad.db, da_log, ddt_bias, one, again.da, again.db]
            });
            assert_all_close(&format!("delta_gates {t} {h} {dtype:?}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

#[test]
fn gated_norms_match_the_cpu_for_any_row_width() -> Result<()> {
    // The last size has more rows than a backward pass has blocks, so blocks iterate.
    for (n, d) in [(0, 64), (3, 8), (9, 128), (5, 520), (2, 2561), (5000, 16)] {
        for (dtype, tolerance) in DTYPES {
            let (x, z) = (operand(1, &[n, d], dtype), operand(2, &[n, d], dtype));
            let (w, dy) = (operand(3, &[d], dtype), operand(4, &[n, d], dtype));
            let (gpu, cpu) = both!({
                let (y, rstd) = crate::gated_rms_norm(&x, &z, &w, 1e-6)?;
                let dw = gradient_buffer(&[d]);
                let (dx, dz) = crate::gated_rms_norm_backward(&x, &z, &rstd, &w, &dy, Some(&dw))?;
                let alone = crate::gated_rms_norm_backward(&x, &z, &rstd, &w, &dy, None)?;
                vec![y, rstd, dw, dx, dz, alone.0, alone.1]
            });
            assert_all_close(&format!("gated_rms_norm {dtype:?} {n} {d}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

/// The last layout is longer than the number of ranges with the smallest number of tokens.
#[test]
fn convolutions_match_the_cpu_for_any_layout() -> Result<()> {
    let layouts: [&[u32]; 6] =
        [&[], &[1], &[1, 2, 3, 4, 5, 1, 1], &[31, 1, 32, 33, 64], &[200], &[1500, 3, 1000]];
    for lengths in layouts {
        for c in [8, 9, 1160] {
            if lengths.contains(&1500) && c == 1160 {
                continue;
            }
            for (dtype, tolerance) in DTYPES {
                let t = lengths.iter().sum::<u32>() as usize;
                let (x, dy) = (operand(1, &[t, c], dtype), operand(2, &[t, c], dtype));
                let (w, cu) = (operand(3, &[c, 4], dtype), boundaries(lengths));
                let (gpu, cpu) = both!({
                    let dw = gradient_buffer(&[c, 4]);
                    let dx = crate::causal_conv1d_backward(&x, &w, &dy, &cu, Some(&dw))?;
                    let alone = crate::causal_conv1d_backward(&x, &w, &dy, &cu, None)?;
                    vec![crate::causal_conv1d(&x, &w, &cu)?, dx, dw, alone]
                });
                assert_all_close(&format!("{lengths:?} {c} {dtype:?}"), &gpu, &cpu, tolerance);
            }
        }
    }
    Ok(())
}

/// A token that is not finite reaches no other segment, also not as a factor of zero.
#[test]
fn convolutions_do_not_read_the_segment_before() -> Result<()> {
    let cu = boundaries(&[3, 5]);
    let [x, dy] = [1, 2].map(|seed| operand(seed, &[8, 8], DType::F32));
    let w = operand(3, &[8, 4], DType::F32);
    let bad = Tensor::full(f32::INFINITY, (3, 8), &Device::Cpu)?;
    let bad = |t: &Tensor| Tensor::cat(&[&bad, &t.narrow(0, 3, 5)?], 0);
    let (x, dy) = (bad(&x)?, bad(&dy)?);
    let y = with_kernels(|| crate::causal_conv1d(&x, &w, &cu))?;
    let dx = with_kernels(|| crate::causal_conv1d_backward(&x, &w, &dy, &cu, None))?;
    for result in [y, dx] {
        let rows = result.to_vec2::<f32>()?;
        assert!(rows[3..].iter().flatten().all(|x| x.is_finite()), "{rows:?}");
    }
    Ok(())
}

/// `qkv`, `g`, `beta` and `d_o`: the state of every second head decays.
fn delta_operands(seed: u64, t: usize, heads: DeltaHeads, dtype: DType) -> Result<[Tensor; 4]> {
    let DeltaHeads { key_heads, value_heads: h, key_dim, value_dim } = heads;
    let rates: Vec<f32> = (0..h).map(|head| if head % 2 == 0 { 0.03 } else { 2.0 }).collect();
    let rates = Tensor::new(rates, &Device::Cpu)?;
    let g = operand(seed + 1, &[t, h], DType::F32).abs()?.neg()?.broadcast_mul(&rates)?;
    let beta = operand(seed + 2, &[t, h], DType::F32);
    let beta = (beta.neg()?.exp()? + 1.0)?.recip()?;
    let qkv = operand(seed, &[t, 2 * key_heads * key_dim + h * value_dim], dtype);
    Ok([qkv, g, beta, operand(seed + 3, &[t, h * value_dim], dtype)])
}

fn delta_inputs(t: &[Tensor; 4]) -> DeltaInputs<'_> {
    DeltaInputs { qkv: &t[0], g: &t[1], beta: &t[2] }
}

#[test]
fn the_delta_rule_matches_the_cpu_for_any_heads_and_layout() -> Result<()> {
    let heads = |key_heads, value_heads, key_dim, value_dim| DeltaHeads {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
    };
    let cases: [(DeltaHeads, &[u32]); 9] = [
        (heads(2, 4, 128, 128), &[33, 1, 70]),
        (heads(1, 3, 128, 40), &[64, 32]),
        (heads(1, 6, 64, 32), &[31, 40]), // more heads in a group than warps in a block
        (heads(3, 3, 20, 33), &[1, 31, 32, 33, 63, 64, 65, 1, 1, 2]),
        (heads(2, 4, 33, 7), &[300]),
        (heads(1, 1, 1, 1), &[5, 1]),
        (heads(1, 1, 70, 9), &[34]), // 32 columns at a time: three times, and four
        (heads(1, 1, 101, 9), &[34]),
        (heads(1, 2, 8, 8), &[]),
    ];
    for (heads, lengths) in cases {
        let (t, cu) = (lengths.iter().sum::<u32>() as usize, boundaries(lengths));
        for (dtype, tolerance) in DTYPES {
            let operands = delta_operands(1, t, heads, dtype)?;
            let inputs = delta_inputs(&operands);
            let shape = [lengths.len(), heads.value_heads, heads.key_dim, heads.value_dim];
            let (gpu, cpu) = both!({
                let o = crate::gated_delta_rule(inputs, heads, &cu, None)?;
                let state = operand(9, &shape, DType::F32);
                let continued = crate::gated_delta_rule(inputs, heads, &cu, Some(&state))?;
                let grad = crate::gated_delta_rule_backward(inputs, heads, &cu, &operands[3])?;
                vec![o, state, continued, grad.dqkv, grad.dg, grad.dbeta]
            });
            assert_all_close(&format!("{heads:?} {lengths:?} {dtype:?}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

/// The order of sums does not depend on the number of key heads at a time.
#[test]
fn the_delta_rule_in_parts_has_the_same_bits() -> Result<()> {
    let heads = DeltaHeads { key_heads: 3, value_heads: 6, key_dim: 12, value_dim: 40 };
    let cu = boundaries(&[1, 70, 33]);
    let operands = delta_operands(1, 104, heads, DType::F32)?;
    let inputs = delta_inputs(&operands);
    let all = |most: usize| -> Result<[Vec<u32>; 5]> {
        let state = operand(9, &[3, 6, 12, 40], DType::F32);
        let o = forward_on_gpu(most, inputs, heads, &cu, Some(&state))?;
        let grad = backward_on_gpu(most, inputs, heads, &cu, &operands[3])?;
        Ok([&o, &state, &grad.dqkv, &grad.dg, &grad.dbeta].map(bits))
    };
    let whole = all(usize::MAX)?;
    assert!(all(1)? == whole, "one key head at a time");
    let two = 2 * heads.gpu_backward(6, DType::F32);
    assert_eq!(heads.gpu_key_heads(heads.gpu_backward(6, DType::F32), two), 2);
    assert!(all(two)? == whole, "two key heads at a time");
    Ok(())
}

#[test]
fn a_packed_segment_has_the_bits_of_the_segment_alone_with_the_sizes_of_published_heads()
-> Result<()> {
    let heads = DeltaHeads { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128 };
    let lengths = [1, 40, 2, 65];
    let all = |t: &[Tensor; 4], lengths: &[u32]| -> Result<[Vec<u32>; 4]> {
        let (inputs, cu) = (delta_inputs(t), boundaries(lengths));
        let o = with_kernels(|| crate::gated_delta_rule(inputs, heads, &cu, None))?;
        let grad = with_kernels(|| crate::gated_delta_rule_backward(inputs, heads, &cu, &t[3]))?;
        Ok([&o, &grad.dqkv, &grad.dg, &grad.dbeta].map(bits))
    };
    for (dtype, _) in DTYPES {
        let t = delta_operands(1, 108, heads, dtype)?;
        let mut alone: [Vec<u32>; 4] = Default::default();
        for segment in boundaries(&lengths).segments() {
            let part = |x: &Tensor| x.narrow(0, segment.start, segment.len())?.force_contiguous();
            let part = [part(&t[0])?, part(&t[1])?, part(&t[2])?, part(&t[3])?];
            let got = all(&part, &[segment.len() as u32])?;
            alone.iter_mut().zip(got).for_each(|(all, got)| all.extend(got));
        }
        assert!(all(&t, &lengths)? == alone, "{dtype:?}");
        assert!(all(&t, &[108])? != alone, "a state that is carried over changes nothing");
    }
    Ok(())
}

#[test]
fn keys_with_too_many_dims_are_rejected() -> Result<()> {
    let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 129, value_dim: 8 };
    let t = delta_operands(1, 3, heads, DType::F32)?;
    let cu = boundaries(&[3]);
    let error =
        message(with_kernels(|| crate::gated_delta_rule(delta_inputs(&t), heads, &cu, None)));
    assert!(error.contains("keys have 129 dims, expected at most 128"), "{error}");
    Ok(())
}
