//! Windows and scales: results in `f64`, and the tokens that a change reaches.

use super::*;
use crate::testing::bits;

/// `o`, `lse` and the gradients of attention, from their formulas in `f64`.
fn exact(inputs: [&Tensor; 4], lengths: &[usize], scores: Scores) -> [Tensor; 5] {
    let ((t, h, dh), hkv) = (inputs[0].dims3().unwrap(), inputs[1].dim(1).unwrap());
    let [q, k, v, d_o] = inputs.map(values);
    let (mut o, mut lse, mut dq) =
        (vec![0f64; t * h * dh], vec![0f64; h * t], vec![0f64; t * h * dh]);
    let (mut dk, mut dv) = (vec![0f64; t * hkv * dh], vec![0f64; t * hkv * dh]);
    let scale = f64::from(scores.scale);
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let add = |to: &mut [f64], factor: f64, x: &[f64]| {
        to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
    };
    let mut start = 0;
    for length in lengths {
        for (i, head) in (0..*length).flat_map(|i| (0..h).map(move |head| (i, head))) {
            let at = ((start + i) * h + head) * dh;
            let at = at..at + dh;
            let keys = (0..*length).filter(|j| attends(scores.masking, i, *j));
            let keys = keys.map(|j| ((start + j) * hkv + head / (h / hkv)) * dh);
            let keys: Vec<_> = keys.map(|at| at..at + dh).collect();
            let s: Vec<f64> =
                keys.iter().map(|key| scale * dot(&q[at.clone()], &k[key.clone()])).collect();
            let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let of_row = max + s.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
            lse[head * t + start + i] = of_row;
            let p: Vec<f64> = s.iter().map(|s| (s - of_row).exp()).collect();
            for (key, p) in keys.iter().zip(&p) {
                add(&mut o[at.clone()], *p, &v[key.clone()]);
            }
            let (d_o, delta) = (&d_o[at.clone()], dot(&o[at.clone()], &d_o[at.clone()]));
            for (key, p) in keys.iter().zip(&p) {
                let ds = scale * p * (dot(d_o, &v[key.clone()]) - delta);
                add(&mut dv[key.clone()], *p, d_o);
                add(&mut dq[at.clone()], ds, &k[key.clone()]);
                add(&mut dk[key.clone()], ds, &q[at.clone()]);
            }
        }
        start += length;
    }
    let tensor = |x: Vec<f64>, shape: &[usize]| {
        let x: Vec<f32> = x.into_iter().map(|x| x as f32).collect();
        Tensor::from_vec(x, shape, &device()).unwrap()
    };
    let (queries, keys) = ([t, h, dh], [t, hkv, dh]);
    [
        tensor(o, &queries),
        tensor(lse, &[h, t]),
        tensor(dq, &queries),
        tensor(dk, &keys),
        tensor(dv, &keys),
    ]
}

/// `q`, `k`, `v` and `d_o` of `t` tokens.
fn inputs(t: usize, (h, hkv, dh): (usize, usize, usize), dtype: DType) -> [Tensor; 4] {
    let of = |seed, heads| random(seed, &[t, heads, dh]).to_dtype(dtype).unwrap();
    [of(1, h), of(2, hkv), of(3, hkv), of(4, h)]
}

fn check_exact(
    backend: &dyn AttentionBackend,
    lengths: &[usize],
    heads: (usize, usize, usize),
    dtype: DType,
    scores: Scores,
) {
    let inputs = inputs(lengths.iter().sum(), heads, dtype);
    check_inputs(backend, inputs.each_ref(), lengths, scores);
}

fn check_inputs(
    backend: &dyn AttentionBackend,
    inputs: [&Tensor; 4],
    lengths: &[usize],
    scores: Scores,
) {
    let (dtype, heads) = (inputs[0].dtype(), inputs[0].dims());
    let want = exact(inputs, lengths, scores);
    let got = run_scaled(backend, inputs, &segments(lengths), scores);
    let (o, grads) = match dtype {
        DType::F32 => (Tolerance::F32, Tolerance::F32),
        _ => (Tolerance::BF16, bf16_grads()),
    };
    let tolerances = [o, Tolerance::F32, grads, grads, grads];
    for (index, name) in ["o", "lse", "dq", "dk", "dv"].iter().enumerate() {
        let what = format!("{} {scores:?} {lengths:?} {heads:?} {dtype:?}: {name}", backend.name());
        if [2, 3].contains(&index) && scores.masking == window(1) {
            // A score among no others has no gradient: these are differences of equal numbers.
            assert!(values(&got[index]).iter().all(|x| x.abs() < 1e-4), "{what}");
            continue;
        }
        assert_close(&what, &got[index], &want[index], tolerances[index]);
    }
}

/// At and next to the ends of tiles: of the plain kernels, and of those for tensor cores. One is
/// longer than all segments.
#[test]
fn windows_of_every_length_match_the_exact_results() {
    let of_tiles = [1, 2, 47, 63, 64, 65, 79, 97, 127, 128, 129];
    for (dtype, windows) in [(DType::F32, &[1, 2, 31, 32, 33, 1000][..]), (DType::BF16, &of_tiles)]
    {
        for &backend in backends() {
            for tokens in windows {
                let scores = Scores::new(window(*tokens), 64);
                check_exact(backend, &[1, 150, 20], (1, 1, 64), dtype, scores);
            }
        }
    }
}

#[test]
fn windows_of_every_head_width_match_the_exact_results() {
    for &backend in backends() {
        for heads in [(3, 1, 20), (1, 1, 72), (2, 1, 128), (2, 1, 256)] {
            let scores = |tokens| Scores::new(window(tokens), heads.2);
            check_exact(backend, &[40, 9], heads, DType::F32, scores(17));
            for tokens in [40, 97] {
                check_exact(backend, &[140], heads, DType::BF16, scores(tokens));
            }
        }
    }
}

/// Several tiles of keys of the CPU. Those of GPUs are smaller, and have several in the other
/// tests.
#[test]
fn windows_in_long_segments_match_the_exact_results() {
    if !device().is_cpu() {
        return;
    }
    for (tokens, heads) in [(3, (1, 1, 16)), (513, (4, 1, 16)), (600, (1, 1, 16))] {
        let scores = Scores::new(window(tokens), 16);
        check_exact(&Flash, &[1200], heads, DType::F32, scores);
    }
}

#[test]
fn scales_other_than_that_of_the_head_match_the_exact_results() {
    for &backend in backends() {
        for (dh, scale, masking) in [
            (64, 0.3, Masking::Causal),
            (72, 0.01, window(20)),
            (128, 0.2, Masking::Full),
            (256, 0.1, Masking::Causal),
        ] {
            for dtype in [DType::F32, DType::BF16] {
                check_exact(backend, &[66, 1], (1, 1, dh), dtype, Scores { masking, scale });
            }
        }
    }
}

/// With a window of two tokens, the last queries of a block attend to no key of its first tile.
#[test]
fn queries_without_a_key_in_the_first_tile_match_the_exact_results_with_a_large_scale() {
    let scores = Scores { masking: window(2), scale: 1.0 };
    for &backend in backends() {
        for dh in [64, 80, 256] {
            for dtype in [DType::F32, DType::BF16] {
                let [q, k, v, d_o] = inputs(150, (1, 1, dh), dtype);
                let q = (q / (dh as f64).sqrt()).unwrap(); // scores of the usual size
                check_inputs(backend, [&q, &k, &v, &d_o], &[150], scores);
            }
        }
    }
}

fn assert_bits(what: &str, got: &[Tensor; 5], want: &[Tensor; 5]) {
    for (index, name) in ["o", "lse", "dq", "dk", "dv"].iter().enumerate() {
        assert!(bits(&got[index]) == bits(&want[index]), "{what}: {name}");
    }
}

#[test]
fn a_window_as_long_as_a_segment_has_the_bits_of_causal() {
    let lengths = [130, 7];
    for &backend in backends() {
        for (dh, dtype) in [(32, DType::F32), (64, DType::BF16), (128, DType::BF16)] {
            let inputs = inputs(137, (2, 1, dh), dtype);
            let run = |masking| run(backend, inputs.each_ref(), &segments(&lengths), masking);
            let causal = run(Masking::Causal);
            for tokens in [130, 131, usize::MAX] {
                let what = format!("{} {dh} {dtype:?} {tokens}", backend.name());
                assert_bits(&what, &run(window(tokens)), &causal);
            }
        }
    }
}

#[test]
fn a_packed_segment_has_the_bits_of_the_same_segment_alone() {
    let (lengths, inner) = ([9, 150, 5], 9..159);
    for (dh, dtype) in [(32, DType::F32), (64, DType::BF16), (80, DType::BF16), (128, DType::BF16)]
    {
        let packed = inputs(164, (2, 1, dh), dtype);
        let rows = |x: &Tensor| x.narrow(0, inner.start, inner.len()).unwrap().copy().unwrap();
        let alone = packed.each_ref().map(rows);
        for masking in [Masking::Causal, window(1), window(70), Masking::Full] {
            let [o, lse, dq, dk, dv] = run(&Flash, packed.each_ref(), &segments(&lengths), masking);
            let lse = lse.narrow(1, inner.start, inner.len()).unwrap();
            let got = [rows(&o), lse, rows(&dq), rows(&dk), rows(&dv)];
            let want = run(&Flash, alone.each_ref(), &segments(&[150]), masking);
            assert_bits(&format!("{dh} {dtype:?} {masking:?}"), &got, &want);
        }
    }
}

/// The tokens of `t` whose rows have other bits in `b` than in `a`.
fn differing(a: &Tensor, b: &Tensor) -> Vec<usize> {
    let rows = |x: &Tensor| {
        bits(x).chunks(x.elem_count() / x.dim(0).unwrap()).map(<[u32]>::to_vec).collect::<Vec<_>>()
    };
    let pairs = rows(a).into_iter().zip(rows(b)).enumerate();
    pairs.filter(|(_, (a, b))| a != b).map(|(token, _)| token).collect()
}

#[test]
fn a_change_reaches_only_the_tokens_on_the_other_side_of_a_window() {
    let (t, changed) = (160, 90); // in the segment 10..150
    let segments = &segments(&[10, 140, 10]);
    for &backend in backends() {
        for (dh, dtype) in
            [(32, DType::F32), (64, DType::BF16), (72, DType::BF16), (128, DType::BF16)]
        {
            let [q, k, v, d_o] = inputs(t, (2, 2, dh), dtype);
            let other = |x: &Tensor| {
                let mut all = values(x);
                all[changed * 2 * dh..(changed + 1) * 2 * dh].iter_mut().for_each(|x| *x += 1.0);
                let all: Vec<f32> = all.into_iter().map(|x| x as f32).collect();
                Tensor::from_vec(all, x.shape(), &device()).unwrap().to_dtype(dtype).unwrap()
            };
            let [other_k, other_v, other_d_o] = [&k, &v, &d_o].map(other);
            for tokens in [1, 65] {
                let run = |inputs| run(backend, inputs, segments, window(tokens));
                let before = run([&q, &k, &v, &d_o]);
                let keys = run([&q, &other_k, &other_v, &d_o]);
                let grads = run([&q, &k, &v, &other_d_o]);
                let what = format!("{} {dh} {dtype:?} {tokens}", backend.name());
                let (seen_by, sees) = (
                    changed..(changed + tokens).min(150),
                    (changed + 1 - tokens).max(10)..changed + 1,
                );
                assert_eq!(
                    differing(&before[0], &keys[0]),
                    seen_by.clone().collect::<Vec<_>>(),
                    "{what}: o"
                );
                assert_eq!(
                    differing(&before[4], &grads[4]),
                    sees.clone().collect::<Vec<_>>(),
                    "{what}: dv"
                );
                let dk = differing(&before[3], &grads[3]);
                assert!(dk.iter().all(|token| sees.contains(token)), "{what}: dk of {dk:?}");
                let dq = differing(&before[2], &keys[2]);
                assert!(dq.iter().all(|token| seen_by.contains(token)), "{what}: dq of {dq:?}");
                assert!(tokens == 1 || !(dk.is_empty() || dq.is_empty()), "{what}: dk, dq");
            }
        }
    }
}

#[test]
fn the_visible_keys_of_a_query_and_their_number_follow_the_masking() {
    for length in 1..8 {
        for masking in [Masking::Causal, window(1), window(3), window(7), window(9), Masking::Full]
        {
            let mut all = 0;
            for i in 0..length {
                let visible = masking.visible_keys(i, length);
                let want = (0..length).filter(|j| attends(masking, i, *j));
                assert_eq!(visible.clone().collect::<Vec<_>>(), want.collect::<Vec<_>>());
                all += visible.len();
            }
            let counted = masking.num_scores(length);
            assert!(counted <= all as f64 && all as f64 - counted <= length as f64 / 2.0);
        }
    }
}
