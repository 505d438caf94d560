//! Compares both backends with plain attention in `f64`, and checks the properties of packed
//! sequences.

mod windows;

use super::*;
use crate::testing::{Tolerance, assert_close, check_within, device, message, random, values};
use candle_core::D;

/// The implementations that the device of the tests has: dense masks are on the CPU only.
fn backends() -> &'static [&'static dyn AttentionBackend] {
    if device().is_cpu() { &[&Masked, &Flash] } else { &[&Flash] }
}

const MASKINGS: [Masking; 3] = [Masking::Causal, window(20), Masking::Full];

const fn window(tokens: usize) -> Masking {
    Masking::Window(NonZeroUsize::new(tokens).unwrap())
}

/// Whether token `i` of a segment attends to token `j`.
fn attends(masking: Masking, i: usize, j: usize) -> bool {
    match masking {
        Masking::Causal => j <= i,
        Masking::Window(window) => j <= i && i < j + window.get(),
        Masking::Full => true,
    }
}

/// Segments of these lengths under one dense mask.
fn segments(lengths: &[usize]) -> Segments {
    Segments::new(tiling(lengths), tiling(&[lengths.iter().sum()])).unwrap()
}

fn tiling(lengths: &[usize]) -> CuSeqlens {
    let lengths: Vec<u32> =
        lengths.iter().filter(|length| **length > 0).map(|length| *length as u32).collect();
    CuSeqlens::from_lengths(&lengths).unwrap()
}

/// Attention composed of plain candle ops, segment by segment.
fn plain(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cu_seqlens: &CuSeqlens,
    masking: Masking,
) -> Result<Tensor> {
    let ((_, h, dh), hkv) = (q.dims3()?, k.dim(1)?);
    let heads: Vec<u32> = (0..h).map(|head| (head / (h / hkv)) as u32).collect();
    let heads = Tensor::new(heads.as_slice(), q.device())?;
    let mut outputs = Vec::new();
    for range in cu_seqlens.segments() {
        let (start, l) = (range.start, range.len());
        let of = |x: &Tensor| x.narrow(0, start, l)?.transpose(0, 1)?.contiguous(); // [H, L, Dh]
        let q = of(q)?;
        let k = of(k)?.index_select(&heads, 0)?;
        let v = of(v)?.index_select(&heads, 0)?;
        let mask: Vec<f64> =
            (0..l * l).map(|i| if attends(masking, i / l, i % l) { 0.0 } else { -1e9 }).collect();
        let mask = Tensor::from_vec(mask, (l, l), &device())?.to_dtype(q.dtype())?;
        let scores = (q.matmul(&k.transpose(1, 2)?)? * (1.0 / (dh as f64).sqrt()))?;
        let scores = scores.broadcast_add(&mask)?;
        let exps = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let p = exps.broadcast_div(&exps.sum_keepdim(D::Minus1)?)?;
        outputs.push(p.matmul(&v)?.transpose(0, 1)?.contiguous()?);
    }
    Tensor::cat(&outputs, 0)
}

/// The tensor-core kernels round probabilities and their gradients to `bf16`; the CPU does not.
fn bf16_grads() -> Tolerance {
    let tiles = cfg!(any(feature = "cuda", feature = "cuda-emulation"));
    if tiles { Tolerance::BF16_TILES } else { Tolerance::BF16_SAVED }
}

fn check_backend(
    backend: &dyn AttentionBackend,
    lengths: &[usize],
    (h, hkv, dh): (usize, usize, usize),
    masking: Masking,
) {
    let segments = &segments(lengths);
    let t = lengths.iter().sum::<usize>();
    let inputs = [random(1, &[t, h, dh]), random(2, &[t, hkv, dh]), random(3, &[t, hkv, dh])];
    let what = format!("{} {masking:?} {lengths:?} {h}/{hkv} x {dh}", backend.name());
    check_within(
        bf16_grads(),
        &what,
        &inputs,
        |i| plain(&i[0], &i[1], &i[2], segments.cu_seqlens(), masking),
        |i, dy| {
            let qkv = Qkv { q: &i[0], k: &i[1], v: &i[2] };
            let scores = Scores::new(masking, dh);
            let (o, lse) = backend.forward(qkv, segments, scores)?;
            let QkvGrad { dq, dk, dv } = backend.backward(qkv, &o, &lse, dy, segments, scores)?;
            Ok((o, vec![dq, dk, dv]))
        },
    );
}

#[test]
fn kernel_names_match_the_device_and_dtype() {
    let named = |backend: &dyn AttentionBackend| {
        [(DType::F32, 128), (DType::BF16, 72), (DType::BF16, 256), (DType::BF16, 20)]
            .map(|(dtype, head_dim)| backend.kernel(&device(), dtype, head_dim))
    };
    if crate::launch::supports_device(&device()) {
        let plain = "flash, plain kernel in f32";
        let [f32, narrow, wide, odd] = named(&Flash);
        assert_eq!((f32, odd, narrow), (plain, plain, wide));
        let tiles = ["flash, tensor cores in bf16", "flash, Hopper's tensor cores in bf16"];
        assert!(tiles.contains(&wide), "{wide}");
        return;
    }
    assert_eq!(named(&Flash), ["flash, cpu"; 4]);
    assert_eq!(named(&Masked), ["masked, cpu"; 4]);
}

#[test]
fn both_backends_match_the_reference_for_every_head_shape() {
    for &backend in backends() {
        for masking in MASKINGS {
            for (h, hkv, dh) in [(1, 1, 32), (4, 1, 64), (2, 2, 72), (4, 2, 128), (2, 1, 256)] {
                check_backend(backend, &[5, 1, 17], (h, hkv, dh), masking);
            }
        }
    }
}

#[test]
fn both_backends_match_the_reference_across_tile_boundaries() {
    for &backend in backends() {
        for masking in MASKINGS {
            check_backend(backend, &[1, 2, 63, 64, 65], (4, 1, 32), masking);
            check_backend(backend, &[127, 128, 129], (1, 1, 16), masking);
        }
    }
}

/// Lengths with the sum `total`: one segment, or random lengths of which few are long.
fn random_lengths(seed: u64, total: usize) -> Vec<usize> {
    use rand::{Rng as _, SeedableRng as _};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let (mut lengths, mut left) = (Vec::new(), if seed == 0 { 0 } else { total });
    while left > 0 {
        let longest = total >> rng.random_range(0..8);
        let length = rng.random_range(1..=longest.max(1)).min(left);
        lengths.push(length);
        left -= length;
    }
    if seed == 0 { vec![total] } else { lengths }
}

/// On a GPU: tensor cores in bf16 against the plain kernel in f32, with the tokens of a full pack.
#[test]
fn long_segments_of_random_lengths_match_f32() {
    let (total, heads, dims) = if device().is_cpu() {
        (420, (2, 1), &[128][..])
    } else {
        (16_384, (8, 2), &[64, 72, 128][..])
    };
    let (h, hkv) = heads;
    for (seed, masking) in
        [(0, Masking::Causal), (0, window(total / 16)), (1, Masking::Causal), (2, Masking::Full)]
    {
        let lengths = random_lengths(seed, total);
        for dh in dims {
            let inputs = [h, hkv, hkv, h].map(|heads| {
                random(heads as u64, &[total, heads, *dh]).to_dtype(DType::BF16).unwrap()
            });
            let results = |dtype: DType, rounded_o: Option<&Tensor>| {
                let [q, k, v, d_o] = inputs.each_ref().map(|x| x.to_dtype(dtype).unwrap());
                let segments = segments(&lengths);
                let qkv = Qkv { q: &q, k: &k, v: &v };
                let scores = Scores::new(masking, *dh);
                let (o, lse) = Flash.forward(qkv, &segments, scores).unwrap();
                let saved = rounded_o.map_or_else(|| o.clone(), |o| o.to_dtype(dtype).unwrap());
                let grads = Flash.backward(qkv, &saved, &lse, &d_o, &segments, scores).unwrap();
                [o, lse, grads.dq, grads.dk, grads.dv]
            };
            let got = results(DType::BF16, None);
            // Backward reads the rounded output, whose error grows with the length of a segment.
            let want = results(DType::F32, Some(&got[0]));
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("{masking:?} {lengths:?} x {dh}: result {index}");
                assert_close(&what, got, want, bf16_grads());
            }
        }
    }
}

/// Returns `o`, `lse` and the gradients of a backend, with the usual scale.
fn run(
    backend: &dyn AttentionBackend,
    inputs: [&Tensor; 4],
    segments: &Segments,
    masking: Masking,
) -> [Tensor; 5] {
    let head_dim = inputs[0].dim(D::Minus1).unwrap();
    run_scaled(backend, inputs, segments, Scores::new(masking, head_dim))
}

fn run_scaled(
    backend: &dyn AttentionBackend,
    [q, k, v, d_o]: [&Tensor; 4],
    segments: &Segments,
    scores: Scores,
) -> [Tensor; 5] {
    let qkv = Qkv { q, k, v };
    let (o, lse) = backend.forward(qkv, segments, scores).unwrap();
    let QkvGrad { dq, dk, dv } = backend.backward(qkv, &o, &lse, d_o, segments, scores).unwrap();
    [o, lse, dq, dk, dv]
}

/// [`run`] of dense masks on the CPU, with results on the device of the tests.
fn run_dense(inputs: [&Tensor; 4], segments: &Segments, masking: Masking) -> [Tensor; 5] {
    let inputs = inputs.map(|x| x.to_device(&Device::Cpu).unwrap());
    let results = run(&Masked, inputs.each_ref(), segments, masking);
    results.map(|x| x.to_device(&device()).unwrap())
}

#[test]
fn both_backends_agree_on_a_pack_longer_than_one_tile_of_keys() {
    let lengths = [1, 2, 63, 64, 65, 127, 300, 700];
    let (segments, t) = (&segments(&lengths), lengths.iter().sum::<usize>());
    let (q, d_o) = (random(1, &[t, 4, 32]), random(4, &[t, 4, 32]));
    let (k, v) = (random(2, &[t, 1, 32]), random(3, &[t, 1, 32]));
    for masking in MASKINGS {
        let exact = run_dense([&q, &k, &v, &d_o], segments, masking);
        let tiled = run(&Flash, [&q, &k, &v, &d_o], segments, masking);
        for (name, (exact, tiled)) in
            ["o", "lse", "dq", "dk", "dv"].iter().zip(exact.iter().zip(&tiled))
        {
            assert_close(&format!("{masking:?} {name}"), tiled, exact, Tolerance::F32);
        }
    }
}

/// Results of the dense backend in `f32` and of the tiled one in `bf16` on the same values. `q` and
/// `k` are multiplied by `spread`. Checks that two runs of the tiled backend give the same bits.
fn dense_and_tiled(
    lengths: &[usize],
    (h, hkv, dh): (usize, usize, usize),
    masking: Masking,
    spread: f64,
) -> ([Tensor; 5], [Tensor; 5]) {
    let t = lengths.iter().sum::<usize>();
    let operand = |seed, heads, factor| {
        let x = random(seed, &[t, heads, dh]).affine(factor, 0.0).unwrap();
        x.to_dtype(DType::BF16).unwrap()
    };
    let (q, k) = (operand(1, h, spread), operand(2, hkv, spread));
    let (v, d_o) = (operand(3, hkv, 1.0), operand(4, h, 1.0));
    let [wide_q, wide_k, wide_v, wide_d_o] =
        [&q, &k, &v, &d_o].map(|x| x.to_dtype(DType::F32).unwrap());
    let segments = &Segments::new(tiling(lengths), tiling(lengths)).unwrap();
    let dense = run_dense([&wide_q, &wide_k, &wide_v, &wide_d_o], segments, masking);
    let tiled = run(&Flash, [&q, &k, &v, &d_o], segments, masking);
    let again = run(&Flash, [&q, &k, &v, &d_o], segments, masking);
    for (tiled, again) in tiled.iter().zip(&again) {
        assert_eq!(values(tiled), values(again));
    }
    (dense, tiled)
}

fn check_tiles(lengths: &[usize], heads: (usize, usize, usize), masking: Masking) {
    let (dense, tiled) = dense_and_tiled(lengths, heads, masking, 1.0);
    // The worst of thousands of elements. The reference backward uses an output that was not
    // rounded.
    let grads = Tolerance::BF16_TILES;
    let tolerances = [Tolerance::BF16, Tolerance::F32, grads, grads, grads];
    for (index, name) in ["o", "lse", "dq", "dk", "dv"].iter().enumerate() {
        let what = format!("{masking:?} {lengths:?} {heads:?}: {name}");
        assert_close(&what, &tiled[index], &dense[index], tolerances[index]);
    }
}

#[test]
fn tiles_of_every_segment_length_match_the_dense_backend() {
    let lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200];
    for masking in MASKINGS {
        for (h, hkv, dh) in [(1, 1, 64), (1, 1, 72), (2, 1, 128), (2, 1, 256)] {
            check_tiles(&lengths, (h, hkv, dh), masking);
        }
    }
}

#[test]
fn tiles_of_every_group_of_heads_match_the_dense_backend() {
    for masking in MASKINGS {
        for (h, hkv, dh) in
            [(2, 2, 96), (4, 2, 64), (4, 1, 128), (8, 1, 72), (3, 1, 20), (4, 1, 256), (2, 2, 136)]
        {
            check_tiles(&[66, 1, 131], (h, hkv, dh), masking);
        }
    }
}

/// Long enough that the kernels for compute capability 9.0 use a buffer of each ring again. Heads of 80 fill
/// their kernel, those of 72 do not.
#[test]
fn segments_of_more_tiles_than_buffers_match_the_dense_backend() {
    for dh in [64, 80] {
        check_tiles(&[330], (1, 1, dh), Masking::Full);
    }
}

/// Widths that are no multiple of 8 have plain kernels, which divide the columns of a head by 32, and the
/// terms of a score by 4.
#[test]
fn heads_of_odd_width_match_the_dense_backend() {
    check_tiles(&[35, 2], (1, 1, 251), Masking::Causal);
    for &backend in backends() {
        check_backend(backend, &[35, 2], (2, 1, 19), Masking::Causal);
    }
}

/// With such scores the gradients of `q` and `k` are differences of large numbers, so only that of
/// `v` is compared.
#[test]
fn large_scores_give_finite_gradients() {
    for masking in MASKINGS {
        for dh in [64, 72, 128, 256] {
            let (dense, tiled) = dense_and_tiled(&[70, 3, 1], (1, 1, dh), masking, 12.0);
            for (index, name, tolerance) in
                [(0, "o", Tolerance::BF16), (1, "lse", Tolerance::F32), (4, "dv", bf16_grads())]
            {
                let what = format!("{masking:?} x {dh}: {name}");
                assert_close(&what, &tiled[index], &dense[index], tolerance);
            }
            for grad in &tiled[2..] {
                assert!(values(grad).iter().all(|x| x.is_finite()));
            }
        }
    }
}

#[test]
fn several_dense_masks_give_the_results_of_a_single_one() {
    let [q, k, v, d_o] = [1, 2, 3, 4].map(|seed| random(seed, &[14, 2, 8]));
    for masking in MASKINGS {
        let [one, two] = [&[14][..], &[7, 7]].map(|rows| {
            let segments = Segments::new(tiling(&[3, 4, 5, 2]), tiling(rows)).unwrap();
            run_dense([&q, &k, &v, &d_o], &segments, masking)
        });
        for (one, two) in one.iter().zip(&two) {
            assert_close("rows", two, one, Tolerance::F32);
        }
    }
}

/// Indices of the tokens whose rows differ in two tensors `[T, ..]`.
fn differing_tokens(a: &Tensor, b: &Tensor) -> Vec<usize> {
    let rows = |x: &Tensor| x.flatten_from(1).unwrap().to_vec2::<f32>().unwrap();
    let (a, b) = (rows(a), rows(b));
    (0..a.len()).filter(|t| a[*t] != b[*t]).collect()
}

#[test]
fn a_token_affects_neither_earlier_positions_nor_other_segments() {
    let lengths = [70, 140, 30];
    let (segments, t) = (&segments(&lengths), 240);
    let [q, k, v, d_o] = [1, 2, 3, 4].map(|seed| random(seed, &[t, 2, 32]));
    let changed = 150; // in the segment 70..210
    let mut nudge = vec![0f32; t * 64];
    nudge[changed * 64..(changed + 1) * 64].fill(0.5);
    let nudge = Tensor::from_vec(nudge, (t, 2, 32), &device()).unwrap();
    let (k2, v2) = ((&k + &nudge).unwrap(), (&v + &nudge).unwrap());
    for &backend in backends() {
        for (masking, reached) in
            [(Masking::Causal, changed..210), (window(40), changed..190), (Masking::Full, 70..210)]
        {
            let before = run(backend, [&q, &k, &v, &d_o], segments, masking);
            let after = run(backend, [&q, &k2, &v2, &d_o], segments, masking);
            let name = backend.name();
            let o = differing_tokens(&before[0], &after[0]);
            assert_eq!(o, reached.clone().collect::<Vec<_>>(), "{name} {masking:?}: output");
            for grad in 2..5 {
                let tokens = differing_tokens(&before[grad], &after[grad]);
                assert!(
                    tokens.iter().all(|token| (70..210).contains(token)),
                    "{name} {masking:?}: gradient {grad} at {tokens:?}"
                );
            }
        }
    }
}

#[test]
fn an_output_gradient_does_not_reach_keys_after_its_token() {
    let [q, k, v] = [1, 2, 3].map(|seed| random(seed, &[150, 1, 16]));
    let mut d_o = vec![0f32; 150 * 16];
    d_o[140 * 16..141 * 16].fill(1.0); // only the output of token 140 has a gradient
    let d_o = Tensor::from_vec(d_o, (150, 1, 16), &device()).unwrap();
    let segments = &segments(&[150]);
    for &backend in backends() {
        for (masking, first) in [(Masking::Causal, 0), (window(65), 76), (window(2), 139)] {
            let [_, _, dq, dk, dv] = run(backend, [&q, &k, &v, &d_o], segments, masking);
            let zeros = dk.zeros_like().unwrap();
            assert_eq!(differing_tokens(&dq, &zeros), [140], "{}", backend.name());
            for grad in [dk, dv] {
                let want: Vec<usize> = (first..=140).collect();
                assert_eq!(differing_tokens(&grad, &zeros), want, "{}", backend.name());
            }
        }
    }
}

#[test]
fn decode_attention_matches_the_rows_of_one_causal_pass() {
    let s = 140;
    let tolerances = [(DType::F32, Tolerance::F32), (DType::BF16, Tolerance::BF16)];
    for (dtype, tolerance) in tolerances {
        let of = |seed, heads| random(seed, &[s, heads, 32]).to_dtype(dtype).unwrap();
        let (q, k, v) = (of(1, 4), of(2, 2), of(3, 2));
        let qkv = Qkv { q: &q, k: &k, v: &v };
        for masking in [Masking::Causal, window(1), window(64), window(s)] {
            let scores = Scores { masking, scale: 0.3 };
            let (whole, _) = Flash.forward(qkv, &segments(&[s]), scores).unwrap();
            for (num_past, n) in [(0, 1), (0, s), (5, 1), (100, 40), (s - 1, 1), (s - 3, 2)] {
                let q = q.narrow(0, num_past, n).unwrap();
                let of_keys = |x: &Tensor| x.narrow(0, 0, num_past + n).unwrap();
                let (k, v) = (of_keys(&k), of_keys(&v));
                let got = decode_attention(&q, &k, &v, num_past, scores).unwrap();
                let want = whole.narrow(0, num_past, n).unwrap();
                assert_close(&format!("{masking:?} {num_past} + {n}"), &got, &want, tolerance);
            }
        }
    }
}

#[test]
fn invalid_boundaries_are_rejected() {
    let error = message(Segments::new(tiling(&[3]), tiling(&[4])));
    assert!(error.contains("`cu_seqlens` ends at 3, but `mask_boundaries` ends at 4"), "{error}");
    let error = message(Segments::new(tiling(&[4]), tiling(&[2, 2])));
    assert!(error.contains("the mask boundary 2 lies inside a segment"), "{error}");
    let x = random(1, &[4, 1, 8]);
    let qkv = Qkv { q: &x, k: &x, v: &x };
    for &backend in backends() {
        let forward = |lengths: &[usize], scale| {
            let scores = Scores { masking: Masking::Causal, scale };
            message(backend.forward(qkv, &segments(lengths), scores))
        };
        let error = forward(&[3], 1.0);
        assert!(error.contains("`cu_seqlens` ends at 3, but `q` has 4 tokens"), "{error}");
        for scale in [0.0, -1.0, f32::INFINITY, f32::NAN] {
            let expected = format!("the scale of scores is {scale}, expected a positive number");
            let error = forward(&[4], scale);
            assert!(error.contains(&expected), "{error}");
        }
    }
    let three = random(2, &[4, 3, 8]);
    let two = random(2, &[4, 2, 8]);
    let qkv = Qkv { q: &three, k: &two, v: &two };
    let error = message(Flash.forward(qkv, &segments(&[4]), Scores::new(Masking::Full, 8)));
    assert!(error.contains("3 query heads"), "{error}");
}
