//! The ops of linear attention, with the sizes of published models and with others.

use super::{DTYPES, assert_all_close, operand};
use crate::gated_delta_rule::{backward_on_gpu, forward_on_gpu};
use crate::launch::with_kernels;
use crate::testing::{Tolerance, assert_close, bits, gradient_buffer, message, values};
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

/// `o`, `dqkv`, `dg` and `dbeta` of one segment by the definition, token by token in `f64`, for one key
/// head and one value head of `d` dims.
fn delta_by_token(d: usize, operands: [&[f64]; 4]) -> [Vec<f64>; 4] {
    let [qkv, g, beta, d_o] = operands;
    let (t, scale) = (g.len(), 1.0 / (d as f64).sqrt());
    let row = |i: usize, part: usize| &qkv[(3 * i + part) * d..(3 * i + part + 1) * d];
    let inverse = |x: &[f64]| 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    let unit = |i: usize, part: usize, scale: f64| -> Vec<f64> {
        let x = row(i, part);
        x.iter().map(|y| y * inverse(x) * scale).collect()
    };
    // The vector times a state, and a state times the vector.
    let read = |s: &[f64], x: &[f64]| -> Vec<f64> {
        (0..d).map(|c| (0..d).map(|r| s[r * d + c] * x[r]).sum()).collect()
    };
    let along = |s: &[f64], x: &[f64]| -> Vec<f64> {
        s.chunks(d).map(|row| row.iter().zip(x).map(|(s, x)| s * x).sum()).collect()
    };
    let add = |s: &mut [f64], x: &[f64], y: &[f64], sign: f64| {
        for (row, x) in s.chunks_mut(d).zip(x) {
            row.iter_mut().zip(y).for_each(|(s, y)| *s += sign * x * y);
        }
    };
    let (mut states, mut errors) = (vec![vec![0.0; d * d]], Vec::new());
    let mut o = Vec::new();
    for i in 0..t {
        let mut s: Vec<f64> = states[i].iter().map(|s| s * g[i].exp()).collect();
        let k = unit(i, 1, 1.0);
        let error: Vec<f64> = row(i, 2).iter().zip(read(&s, &k)).map(|(v, r)| v - r).collect();
        add(&mut s, &k, &error, beta[i]);
        o.extend(read(&s, &unit(i, 0, scale)));
        states.push(s);
        errors.push(error);
    }
    let (mut dqkv, mut dg, mut dbeta) = (vec![0.0; 3 * t * d], vec![0.0; t], vec![0.0; t]);
    let mut ds = vec![0.0; d * d];
    for i in (0..t).rev() {
        let (q, k, d_o) = (unit(i, 0, scale), unit(i, 1, 1.0), &d_o[i * d..(i + 1) * d]);
        let decayed: Vec<f64> = states[i].iter().map(|s| s * g[i].exp()).collect();
        add(&mut ds, &q, d_o, 1.0);
        let de = read(&ds, &k);
        dbeta[i] = de.iter().zip(&errors[i]).map(|(x, y)| x * y).sum();
        let dv: Vec<f64> = de.iter().map(|x| x * beta[i]).collect();
        let written: Vec<f64> = errors[i].iter().map(|e| e * beta[i]).collect();
        let reads = along(&decayed, &dv);
        let dk: Vec<f64> = along(&ds, &written).iter().zip(reads).map(|(w, r)| w - r).collect();
        add(&mut ds, &k, &dv, -1.0);
        dg[i] = ds.iter().zip(&decayed).map(|(x, y)| x * y).sum();
        for s in &mut ds {
            *s *= g[i].exp();
        }
        for (part, scale, du) in [(0, scale, along(&states[i + 1], d_o)), (1, 1.0, dk)] {
            let (x, inverse) = (row(i, part), inverse(row(i, part)));
            let dot: f64 = x.iter().zip(&du).map(|(x, du)| x * du).sum::<f64>() * inverse * inverse;
            for c in 0..d {
                dqkv[(3 * i + part) * d + c] = scale * inverse * (du[c] - dot * x[c]);
            }
        }
        dqkv[(3 * i + 2) * d..(3 * i + 3) * d].copy_from_slice(&dv);
    }
    [o, dqkv, dg, dbeta]
}

/// Decays near one over a long segment, near zero, and both in turn.
#[test]
fn the_delta_rule_matches_f64_for_long_segments_and_any_gates() -> Result<()> {
    for rates in [(1e-5, 1e-5), (30.0, 30.0), (1e-4, 30.0)] {
        matches_f64(16, rates, 1.0)?;
    }
    Ok(())
}

/// States of the size of published models that grow over all chunks, as small parts are added to
/// them: tensor cores truncate sums.
#[test]
fn large_states_that_grow_over_long_segments_match_f64() -> Result<()> {
    matches_f64(128, (1e-6, 1e-6), 0.05)
}

/// Compares a head of `dims` with the recurrence in f64, for a decay in most tokens and one in some,
/// and `beta` times a factor.
fn matches_f64(dims: usize, (near_one, near_zero): (f32, f32), factor: f64) -> Result<()> {
    let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: dims, value_dim: dims };
    let t = 1500;
    for (dtype, tolerance, of_grads) in [
        (DType::F32, Tolerance::F32, Tolerance::F32),
        (DType::BF16, Tolerance::BF16, Tolerance::BF16_SAVED),
    ] {
        let [qkv, g, beta, d_o] = delta_operands(1, t, heads, dtype)?;
        let rate = |i: usize| if i % 97 < 90 { near_one } else { near_zero };
        let rates = Tensor::from_vec((0..t).map(rate).collect::<Vec<f32>>(), (t, 1), qkv.device())?;
        let operands = [qkv.clone(), (&g * 40.0)?.mul(&rates)?, (beta * factor)?, d_o];
        let wide = operands.each_ref().map(values);
        let want = delta_by_token(dims, wide.each_ref().map(Vec::as_slice));
        let (inputs, cu) = (delta_inputs(&operands), boundaries(&[t as u32]));
        let o = with_kernels(|| crate::gated_delta_rule(inputs, heads, &cu, None))?;
        let grad =
            with_kernels(|| crate::gated_delta_rule_backward(inputs, heads, &cu, &operands[3]))?;
        let got = [o, grad.dqkv, grad.dg, grad.dbeta];
        let names = [("o", tolerance), ("dqkv", of_grads), ("dg", of_grads), ("dbeta", of_grads)];
        for ((name, tolerance), (got, want)) in names.into_iter().zip(got.iter().zip(want)) {
            let want = Tensor::from_vec(want, got.shape(), got.device())?;
            let what = format!("{name} {dims} {dtype:?} {near_one} {near_zero}");
            assert_close(&what, got, &want, tolerance);
        }
    }
    Ok(())
}

/// With many blocks, a block has one chunk at a time in shared memory; alone, it has two.
#[test]
fn the_number_of_blocks_changes_no_bit_of_the_delta_rule() -> Result<()> {
    let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 8, value_dim: 8 };
    for (dtype, _) in DTYPES {
        let lengths: Vec<u32> = (0..150).map(|i| if i == 70 { 130 } else { 1 }).collect();
        let t = delta_operands(1, 279, heads, dtype)?;
        let all = |t: &[Tensor; 4], lengths: &[u32]| -> Result<[Tensor; 4]> {
            let (inputs, cu) = (delta_inputs(t), boundaries(lengths));
            let o = with_kernels(|| crate::gated_delta_rule(inputs, heads, &cu, None))?;
            let grad =
                with_kernels(|| crate::gated_delta_rule_backward(inputs, heads, &cu, &t[3]))?;
            Ok([o, grad.dqkv, grad.dg, grad.dbeta])
        };
        let part = |x: &Tensor| x.narrow(0, 70, 130)?.force_contiguous();
        let alone = all(&[part(&t[0])?, part(&t[1])?, part(&t[2])?, part(&t[3])?], &[130])?;
        for (packed, alone) in all(&t, &lengths)?.iter().zip(&alone) {
            assert_eq!(bits(&part(packed)?), bits(alone), "{dtype:?}");
        }
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
