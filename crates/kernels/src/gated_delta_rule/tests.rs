use super::super::testing::{
    Tolerance, assert_close, bits, check_within, device, message, random, values,
};
use super::*;
use candle_core::{D, Device};

fn boundaries(lengths: &[u32]) -> CuSeqlens {
    CuSeqlens::from_lengths(lengths).unwrap()
}

/// The definition, token by token, in ops that candle differentiates.
fn by_token(t: &[Tensor], heads: DeltaHeads, cu_seqlens: &CuSeqlens) -> Result<Tensor> {
    let DeltaHeads { key_heads, value_heads, key_dim: dk, value_dim: dv } = heads;
    let (qkv, g, beta, n) = (&t[0], &t[1], &t[2], t[0].dim(0)?);
    let unit = |x: Tensor| -> Result<Tensor> {
        let x = x.reshape((n, key_heads, dk))?;
        let unit = x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)?;
        let group = value_heads / key_heads;
        let repeated = unit.unsqueeze(2)?.broadcast_as((n, key_heads, group, dk))?;
        repeated.reshape((n, value_heads, dk, 1))
    };
    let keys = key_heads * dk;
    let q = (unit(qkv.narrow(1, 0, keys)?)? / (dk as f64).sqrt())?;
    let k = unit(qkv.narrow(1, keys, keys)?)?;
    let v = qkv.narrow(1, 2 * keys, value_heads * dv)?.reshape((n, value_heads, 1, dv))?;
    let (decay, beta) = (g.exp()?.reshape((n, value_heads, 1, 1))?, beta);
    let beta = beta.reshape((n, value_heads, 1, 1))?;
    let mut rows = Vec::new();
    for segment in cu_seqlens.segments() {
        let mut state = Tensor::zeros((value_heads, dk, dv), qkv.dtype(), qkv.device())?;
        for i in segment {
            state = state.broadcast_mul(&decay.get(i)?)?;
            let read = state.broadcast_mul(&k.get(i)?)?.sum_keepdim(1)?;
            let e = (v.get(i)? - read)?.broadcast_mul(&beta.get(i)?)?;
            state = (state + k.get(i)?.broadcast_mul(&e)?)?;
            rows.push(state.broadcast_mul(&q.get(i)?)?.sum(1)?.reshape((1, value_heads * dv))?);
        }
    }
    Tensor::cat(&rows, 0)
}

/// `qkv`, `g` and `beta`: the state of every second head decays.
fn operands(seed: u64, t: usize, heads: DeltaHeads) -> [Tensor; 3] {
    let width = 2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim;
    let noise = random(seed + 1, &[t, heads.value_heads]);
    let rates: Vec<f32> =
        (0..heads.value_heads).map(|head| if head % 2 == 0 { 0.03 } else { 3.0 }).collect();
    let rates = Tensor::new(rates, &device()).unwrap();
    let g = noise.abs().unwrap().neg().unwrap().broadcast_mul(&rates).unwrap();
    let beta = random(seed + 2, &[t, heads.value_heads]);
    let beta = ((beta.neg().unwrap().exp().unwrap() + 1.0).unwrap()).recip().unwrap();
    [random(seed, &[t, width]), g, beta]
}

fn inputs(t: &[Tensor]) -> DeltaInputs<'_> {
    DeltaInputs { qkv: &t[0], g: &t[1], beta: &t[2] }
}

/// The output and the gradients.
fn all(t: &[Tensor], heads: DeltaHeads, lengths: &[u32], d_o: &Tensor) -> Result<[Tensor; 4]> {
    let cu_seqlens = boundaries(lengths);
    let o = gated_delta_rule(inputs(t), heads, &cu_seqlens, None)?;
    let grad = gated_delta_rule_backward(inputs(t), heads, &cu_seqlens, d_o)?;
    Ok([o, grad.dqkv, grad.dg, grad.dbeta])
}

const HEADS: DeltaHeads = DeltaHeads { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 12 };

#[test]
fn the_rule_and_its_gradients_match_the_recurrence() {
    let wide = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 20, value_dim: 70 };
    for (heads, lengths) in [(HEADS, &[1u32, 3, 65][..]), (wide, &[17, 2]), (HEADS, &[1])] {
        let t = lengths.iter().sum::<u32>() as usize;
        let what = format!("{heads:?} {lengths:?}");
        let plain = |t: &[Tensor]| by_token(t, heads, &boundaries(lengths));
        check_within(Tolerance::BF16_SAVED, &what, &operands(1, t, heads), plain, |t, d_o| {
            let gates = [t[1].to_dtype(DType::F32)?, t[2].to_dtype(DType::F32)?];
            let [g, beta] = gates;
            let [o, dqkv, dg, dbeta] = all(&[t[0].clone(), g, beta], heads, lengths, d_o)?;
            Ok((o, vec![dqkv, dg, dbeta]))
        });
    }
}

#[test]
fn chunks_match_the_recurrence_at_every_boundary() {
    let lengths = [1, 63, 64, 65, 1, 1, 2, 128, 129];
    let t = lengths.iter().sum::<u32>() as usize;
    let operands = operands(5, t, HEADS);
    let wide: Vec<Tensor> = operands.iter().map(|t| t.to_dtype(DType::F64).unwrap()).collect();
    let want = by_token(&wide, HEADS, &boundaries(&lengths)).unwrap();
    let got = gated_delta_rule(inputs(&operands), HEADS, &boundaries(&lengths), None).unwrap();
    assert_close("o", &got, &want, Tolerance::F32);
}

/// The golden file has one key head and two value heads.
#[test]
fn outputs_states_and_gradients_match_the_golden_file() -> Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/delta_rule.safetensors");
    let golden = candle_core::safetensors::load(path, &Device::Cpu)?;
    let rule = |name: &str| golden[&format!("rule/{name}")].to_device(&device());
    let ends = golden["cu_seqlens"].to_vec1::<i32>()?;
    let lengths: Vec<u32> = ends.windows(2).map(|ends| (ends[1] - ends[0]) as u32).collect();
    let cat = |names: [&str; 3]| -> Result<Tensor> {
        let flat = names.map(|name| rule(name).and_then(|t| t.flatten_from(1)));
        let [q, k, v] = flat;
        Tensor::cat(&[q?, k?, v?], 1)
    };
    let heads = DeltaHeads { key_heads: 1, value_heads: 2, key_dim: 16, value_dim: 24 };
    let operands = [cat(["q", "k", "v"])?, rule("g")?, rule("beta")?];
    let [o, dqkv, dg, dbeta] = all(&operands, heads, &lengths, &rule("do")?.flatten_from(1)?)?;
    assert_close("o", &o, &rule("o")?.flatten_from(1)?, Tolerance::F32);
    assert_close("dqkv", &dqkv, &cat(["dq", "dk", "dv"])?, Tolerance::F32);
    assert_close("dg", &dg, &rule("dg")?, Tolerance::F32);
    assert_close("dbeta", &dbeta, &rule("dbeta")?, Tolerance::F32);
    let state = rule("state")?.zeros_like()?;
    gated_delta_rule(inputs(&operands), heads, &boundaries(&lengths), Some(&state))?;
    assert_close("state", &state, &rule("state")?, Tolerance::F32);
    Ok(())
}

/// Segments of one row, each computed alone.
fn alone(t: &[Tensor], lengths: &[u32], d_o: &Tensor) -> Result<[Vec<u32>; 4]> {
    let mut results: [Vec<u32>; 4] = Default::default();
    for segment in boundaries(lengths).segments() {
        let part = |x: &Tensor| x.narrow(0, segment.start, segment.len())?.force_contiguous();
        let t = [part(&t[0])?, part(&t[1])?, part(&t[2])?];
        let got = all(&t, HEADS, &[segment.len() as u32], &part(d_o)?)?;
        results.iter_mut().zip(got).for_each(|(all, got)| all.extend(bits(&got)));
    }
    Ok(results)
}

#[test]
fn a_packed_segment_has_the_bits_of_the_segment_alone() -> Result<()> {
    let lengths = [70, 1, 64, 5, 65, 130];
    let t = operands(7, 335, HEADS);
    let d_o = random(9, &[335, 48]);
    let packed = all(&t, HEADS, &lengths, &d_o)?.map(|t| bits(&t));
    assert_eq!(packed, alone(&t, &lengths, &d_o)?);
    Ok(())
}

/// With states that are carried over a boundary, the test above would fail.
#[test]
fn a_state_carried_over_a_boundary_changes_the_next_segment() -> Result<()> {
    let lengths = [70, 66];
    let t = operands(7, 136, HEADS);
    let packed = gated_delta_rule(inputs(&t), HEADS, &boundaries(&lengths), None)?;
    let leaked = gated_delta_rule(inputs(&t), HEADS, &boundaries(&[136]), None)?;
    let carried = {
        let state = Tensor::zeros((1, 4, 8, 12), DType::F32, &device())?;
        let mut parts = Vec::new();
        for segment in boundaries(&lengths).segments() {
            let part = |x: &Tensor| x.narrow(0, segment.start, segment.len())?.force_contiguous();
            let t = [part(&t[0])?, part(&t[1])?, part(&t[2])?];
            let one = boundaries(&[segment.len() as u32]);
            parts.push(gated_delta_rule(inputs(&t), HEADS, &one, Some(&state))?);
        }
        Tensor::cat(&parts, 0)?
    };
    let second = |o: &Tensor| o.narrow(0, 70, 66);
    let largest = |x: &Tensor, y: &Tensor| -> Result<f64> {
        Ok(values(&(x - y)?).into_iter().fold(0.0, |most, x| x.abs().max(most)))
    };
    assert!(largest(&second(&packed)?, &second(&leaked)?)? > 0.05);
    assert_close("a sequence in two calls", &carried, &leaked, Tolerance::F32);
    Ok(())
}

#[test]
fn a_changed_segment_changes_no_bit_of_another() -> Result<()> {
    let lengths = [70, 5, 66];
    let (t, d_o) = (operands(7, 141, HEADS), random(9, &[141, 48]));
    let replace = |x: &Tensor, seed: u64| {
        let other = random(seed, &[5, x.dim(1)?]).abs()?.neg()?;
        Tensor::cat(&[x.narrow(0, 0, 70)?, other, x.narrow(0, 75, 66)?], 0)
    };
    let changed = [replace(&t[0], 20)?, replace(&t[1], 21)?, replace(&t[2], 22)?];
    let before = all(&t, HEADS, &lengths, &d_o)?;
    let after = all(&changed, HEADS, &lengths, &replace(&d_o, 23)?)?;
    for (before, after) in before.iter().zip(&after) {
        for (start, len) in [(0, 70), (75, 66)] {
            let [before, after] = [before, after].map(|t| t.narrow(0, start, len).unwrap());
            assert_eq!(bits(&before.contiguous()?), bits(&after.contiguous()?));
        }
        assert_ne!(bits(before), bits(after));
    }
    Ok(())
}

/// A token at a time, as in generation.
#[test]
fn single_tokens_with_a_state_match_the_whole_sequence() -> Result<()> {
    let t = operands(3, 67, HEADS);
    let whole = gated_delta_rule(inputs(&t), HEADS, &boundaries(&[67]), None)?;
    let state = Tensor::zeros((1, 4, 8, 12), DType::F32, &device())?;
    let steps = (0..67).map(|i| {
        let part = |x: &Tensor| x.narrow(0, i, 1)?.force_contiguous();
        let t = [part(&t[0])?, part(&t[1])?, part(&t[2])?];
        gated_delta_rule(inputs(&t), HEADS, &boundaries(&[1]), Some(&state))
    });
    let steps = Tensor::cat(&steps.collect::<Result<Vec<_>>>()?, 0)?;
    assert_close("token by token", &steps, &whole, Tolerance::F32);
    Ok(())
}

/// The sum of `g` over a chunk is about -1000, where `f32` has steps of 6e-5.
#[test]
fn a_token_after_a_strong_decay_remembers_accurately() -> Result<()> {
    let [qkv, g, beta] = operands(11, 64, HEADS);
    let mut decays = vec![-0.001f32; 64 * 4];
    decays[..32 * 4].fill(-30.0);
    let t = [qkv, Tensor::from_vec(decays, (64, 4), &device())?, beta];
    drop(g);
    let wide: Vec<Tensor> = t.iter().map(|t| t.to_dtype(DType::F64)).collect::<Result<_>>()?;
    let want = by_token(&wide, HEADS, &boundaries(&[64]))?;
    let got = gated_delta_rule(inputs(&t), HEADS, &boundaries(&[64]), None)?;
    assert_close("o", &got, &want, Tolerance::F32);
    Ok(())
}

/// The numbers of the module comment.
#[test]
fn temporary_memory_on_a_gpu_is_bounded() {
    let heads = DeltaHeads { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
    let per_token = |dtype| heads.gpu_bytes_per_token(dtype) / 2.0 / 1024.0;
    assert_eq!(per_token(DType::BF16), 2.5 + 16.25 / 1024.0);
    assert_eq!(per_token(DType::F32), 7.875 + 16.5 / 1024.0);
    let at_a_time = |tokens: usize| {
        let bytes = heads.gpu_backward(tokens / gpu_chunk(DType::BF16), DType::BF16);
        heads.gpu_key_heads(bytes, GPU_DELTA_BYTES)
    };
    assert_eq!([64, 4096, 8192, 16_384, 1 << 20].map(at_a_time), [16, 16, 16, 8, 1]);
}

#[test]
fn wrong_shapes_are_rejected() -> Result<()> {
    let t = operands(1, 5, HEADS);
    let error = message(gated_delta_rule(inputs(&t), HEADS, &boundaries(&[4]), None));
    assert!(error.contains("ends at 4, but `qkv` has 5 tokens"), "{error}");
    let three = DeltaHeads { value_heads: 3, ..HEADS };
    let error = message(gated_delta_rule(inputs(&t), three, &boundaries(&[5]), None));
    assert!(error.contains("multiple of `Hk`"), "{error}");
    let state = Tensor::zeros((2, 4, 8, 12), DType::F32, &device())?;
    let error = message(gated_delta_rule(inputs(&t), HEADS, &boundaries(&[5]), Some(&state)));
    assert!(error.contains("`state`"), "{error}");
    Ok(())
}
