use super::super::testing::{
    Tolerance, assert_close, bits, check, check_chain, device, kernels_are_tested, message,
    operand, random, routing, values, with_threads,
};
use super::super::{
    ExpertLayout, RecomputeInput, expert_swiglu, expert_swiglu_backward, grouped_linear,
    grouped_linear_backward_input, grouped_linear_backward_weight,
};
use super::*;
use candle_core::D;

fn logits(rows: &[&[f32]]) -> Tensor {
    let flat: Vec<f32> = rows.iter().flat_map(|row| row.iter().copied()).collect();
    Tensor::from_vec(flat, (rows.len(), rows[0].len()), &device()).unwrap()
}

fn numbers(t: &Tensor) -> Vec<u32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn the_largest_logits_are_chosen_and_their_softmax_is_the_weight() {
    let routing = route(&logits(&[&[1.0, 3.0, 2.0, -1.0], &[0.0, -5.0, 0.5, 4.0]]), 2).unwrap();
    assert_eq!(numbers(&routing.experts), [1, 2, 3, 2]);
    let (a, b) = (1.0 / (1.0 + (-1f64).exp()), 1.0 / (1.0 + (-3.5f64).exp()));
    let want = Tensor::new(&[[a, 1.0 - a], [b, 1.0 - b]], &device()).unwrap();
    assert_close("weights", &routing.weights, &want, Tolerance::F32);
    assert_eq!(numbers(&routing.offsets), [0, 0, 1, 3, 4]);
    assert_eq!(numbers(&routing.order), [0, 1, 3, 2]);
    assert_eq!(numbers(&routing.places), [0, 1, 3, 2]);
}

#[test]
fn of_equal_logits_the_lower_expert_comes_first() {
    let rows: [&[f32]; 3] = [&[1.0, 2.0, 2.0, 2.0, 1.0], &[7.0; 5], &[-0.0, 0.0, -1.0, 0.0, -0.0]];
    let routing = route(&logits(&rows), 3).unwrap();
    assert_eq!(numbers(&routing.experts), [1, 2, 3, 0, 1, 2, 0, 1, 3]);
    let third = 1.0 / 3.0;
    assert!(values(&routing.weights).iter().all(|weight| (weight - third).abs() < 1e-6));
    let bits = bits(&routing.weights);
    assert!(bits.iter().all(|weight| *weight == bits[0]), "{bits:?}");
}

#[test]
fn a_logit_that_is_not_a_number_makes_the_weights_of_its_token_nan() {
    let nan = f32::NAN;
    for nan in [nan, -nan] {
        let rows: [&[f32]; 2] =
            [&[1.0, f32::INFINITY, nan, 0.0], &[1.0, 2.0, 3.0, f32::NEG_INFINITY]];
        let routing = route(&logits(&rows), 2).unwrap();
        assert_eq!(numbers(&routing.experts), [2, 1, 2, 1]);
        let weights = values(&routing.weights);
        assert!(weights[0].is_nan() && weights[1].is_nan(), "{weights:?}");
        assert!((weights[2] + weights[3] - 1.0).abs() < 1e-6, "{weights:?}");
    }
}

/// Sizes `(T, E, k)`: one token, more experts than tokens, all experts, one expert, odd numbers.
const SIZES: [(usize, usize, usize); 8] = [
    (1, 1, 1),
    (1, 40, 8),
    (3, 128, 8),
    (70, 4, 4),
    (65, 7, 1),
    (257, 33, 5),
    (33, 300, 10),
    (5, 8, 8),
];

#[test]
fn rows_are_sorted_by_expert_and_places_are_their_inverse() {
    for (t, e, k) in SIZES {
        let routing = routing(1, (t, e, k), 0.0);
        let (experts, order) = (numbers(&routing.experts), numbers(&routing.order));
        let (places, offsets) = (numbers(&routing.places), numbers(&routing.offsets));
        let mut sorted: Vec<u32> = (0..(t * k) as u32).collect();
        sorted.sort_by_key(|choice| experts[*choice as usize]);
        assert_eq!(order, sorted, "{t} {e} {k}");
        for (row, choice) in order.iter().enumerate() {
            assert_eq!(places[*choice as usize], row as u32, "{t} {e} {k}");
            let expert = experts[*choice as usize] as usize;
            assert!(offsets[expert] as usize <= row && row < offsets[expert + 1] as usize);
        }
        assert_eq!((offsets[0], offsets[e], offsets.len()), (0, (t * k) as u32, e + 1));
    }
}

/// The logits of a token in `f64`, and the sum of `g` times the weights of the chosen experts.
fn objective(logits: &[f64], experts: &[u32], g: &[f64]) -> f64 {
    let chosen = experts.iter().map(|expert| logits[*expert as usize].exp());
    let sum: f64 = chosen.clone().sum();
    chosen.zip(g).map(|(x, g)| x / sum * g).sum()
}

#[test]
fn the_gradient_of_the_logits_is_the_finite_difference_and_zero_for_other_experts() {
    for (t, e, k) in SIZES {
        let (logits, g) = (random(1, &[t, e]), random(2, &[t, k]));
        let routing = route(&logits, k).unwrap();
        let got = values(&route_backward(&routing, &g, e).unwrap());
        let (logits, g, experts) = (values(&logits), values(&g), numbers(&routing.experts));
        for token in 0..t {
            let (experts, g) = (&experts[token * k..][..k], &g[token * k..][..k]);
            for expert in 0..e {
                let value = |delta: f64| {
                    let mut logits = logits[token * e..][..e].to_vec();
                    logits[expert] += delta;
                    objective(&logits, experts, g)
                };
                let (slope, got) = ((value(1e-5) - value(-1e-5)) / 2e-5, got[token * e + expert]);
                assert!((slope - got).abs() < 2e-6, "{t} {e} {k}: {got}, expected {slope}");
                assert!(experts.contains(&(expert as u32)) || got == 0.0, "{t} {e} {k}: {got}");
            }
        }
    }
}

#[test]
fn routing_has_the_same_bits_for_any_number_of_threads() {
    let (logits, g) = (random(1, &[513, 60]), random(2, &[513, 6]));
    let run = |threads| {
        with_threads(threads, || {
            let routing = route(&logits, 6).unwrap();
            let d_logits = route_backward(&routing, &g, 60).unwrap();
            (
                bits(&routing.weights),
                numbers(&routing.order),
                numbers(&routing.offsets),
                bits(&d_logits),
            )
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}

#[test]
fn rows_of_experts_and_their_sums_match_the_reference() {
    for (t, e, k) in SIZES {
        let d = 1 + (t * 8 + e) % 72;
        let routing = routing(3, (t, e, k), 0.0);
        let tokens: Vec<u32> =
            numbers(&routing.order).iter().map(|choice| choice / k as u32).collect();
        let tokens = Tensor::new(tokens, &device()).unwrap();
        let plain = |x: &[Tensor]| x[0].index_select(&tokens, 0);
        check(&format!("expert_rows {t} {e} {k} {d}"), &[random(1, &[t, d])], plain, |x, dy| {
            Ok((expert_rows(&x[0], &routing)?, vec![expert_rows_backward(dy, &routing)?]))
        });
        let inputs = [random(1, &[t * k, d]), random(2, &[t, d])];
        let plain = |x: &[Tensor]| {
            x[0].index_select(&routing.places, 0)?.reshape((t, k, d))?.sum(1)? + &x[1]
        };
        check(&format!("combine {t} {e} {k} {d}"), &inputs, plain, |x, dy| {
            let y = combine(&x[0], &routing, Some(&x[1]))?;
            Ok((y, vec![expert_rows(dy, &routing)?, dy.clone()]))
        });
        let (zeros, rows) = (inputs[1].zeros_like().unwrap(), &inputs[0]);
        let without = combine(rows, &routing, None).unwrap();
        assert_eq!(bits(&without), bits(&combine(rows, &routing, Some(&zeros)).unwrap()));
    }
}

/// The weights of the router as a matrix `[T, E]`, in `f64`: a softmax over all experts, those of
/// the chosen ones divided by their sum.
fn plain_weights(logits: &Tensor, k: usize) -> Result<Tensor> {
    let routing = route(&logits.to_dtype(DType::F32)?, k)?;
    let (t, e) = logits.dims2()?;
    let mut mask = vec![0f64; t * e];
    for (choice, expert) in numbers(&routing.experts).iter().enumerate() {
        mask[choice / k * e + *expert as usize] = 1.0;
    }
    let all = logits.exp()?;
    let all = all.broadcast_div(&all.sum_keepdim(D::Minus1)?)?;
    let chosen = (all * Tensor::from_vec(mask, (t, e), &device())?)?;
    chosen.broadcast_div(&chosen.sum_keepdim(D::Minus1)?)
}

/// A layer of experts, in which each expert computes each token.
fn plain_layer(t: &[Tensor], layout: ExpertLayout, k: usize) -> Result<Tensor> {
    let [x, logits, gate_up, down] = t else { unreachable!("four operands") };
    let (weights, width) = (plain_weights(logits, k)?, x.dim(1)?);
    let matrix = |w: &Tensor, expert: usize| {
        let w = w.get(expert)?;
        if layout == ExpertLayout::OutIn { w.t() } else { Ok(w) }
    };
    let mut sum = Tensor::zeros((x.dim(0)?, width), x.dtype(), x.device())?;
    for expert in 0..logits.dim(1)? {
        let both = x.matmul(&matrix(gate_up, expert)?)?;
        let width = both.dim(1)? / 2;
        let (gate, up) = (both.narrow(1, 0, width)?, both.narrow(1, width, width)?);
        let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
        let y = (silu * up)?.matmul(&matrix(down, expert)?)?;
        sum = (sum + y.broadcast_mul(&weights.narrow(1, expert, 1)?)?)?;
    }
    Ok(sum)
}

/// The layer with our ops, and its gradients.
fn layer(
    t: &[Tensor],
    dy: &Tensor,
    layout: ExpertLayout,
    k: usize,
) -> Result<(Tensor, Vec<Tensor>)> {
    let [x, logits, gate_up, down] = t else { unreachable!("four operands") };
    let routing = route(&logits.to_dtype(DType::F32)?, k)?;
    let at = &routing.offsets;
    let rows = expert_rows(x, &routing)?;
    let both = grouped_linear(&rows, gate_up, layout, at)?;
    let activated = expert_swiglu(&both, &routing)?;
    let y = combine(&grouped_linear(&activated, down, layout, at)?, &routing, None)?;

    let [d_gate_up, d_down] =
        [gate_up, down].map(|w| Tensor::zeros(w.shape(), DType::F32, &device()).unwrap());
    let d_rows = expert_rows(dy, &routing)?;
    let d_activated = grouped_linear_backward_input(&d_rows, down, layout, at)?;
    let (d_both, d_weights, again) =
        expert_swiglu_backward(both, &routing, d_activated, RecomputeInput::Yes)?;
    let again = again.unwrap();
    assert_eq!(bits(&again), bits(&activated), "the recomputed activations");
    grouped_linear_backward_weight(&again, &d_rows, layout, at, &d_down)?;
    grouped_linear_backward_weight(&rows, &d_both, layout, at, &d_gate_up)?;
    let dx = grouped_linear_backward_input(&d_both, gate_up, layout, at)?;
    let dx = expert_rows_backward(&dx, &routing)?;
    let d_logits = route_backward(&routing, &d_weights, logits.dim(1)?)?;
    Ok((y, vec![dx, d_logits, d_gate_up, d_down]))
}

/// Operands of a layer: tokens, logits, and weights of experts with `d` inputs and width `i`.
fn operands((t, e): (usize, usize), d: usize, i: usize, layout: ExpertLayout) -> [Tensor; 4] {
    let (gate_up, down) = match layout {
        ExpertLayout::OutIn => ([e, 2 * i, d], [e, d, i]),
        ExpertLayout::InOut => ([e, d, 2 * i], [e, i, d]),
    };
    let scale = |x: Tensor, width: usize| (x / (width as f64).sqrt()).unwrap();
    let (x, logits) = (random(1, &[t, d]), random(2, &[t, e]));
    [x, logits, scale(random(3, &gate_up), d), scale(random(4, &down), i)]
}

#[test]
fn a_layer_of_experts_and_its_gradients_match_the_reference() {
    for layout in [ExpertLayout::OutIn, ExpertLayout::InOut] {
        for ((t, e), k) in [((9, 4), 2), ((3, 16), 4), ((40, 3), 3), ((33, 6), 1)] {
            let inputs = operands((t, e), 24, 17, layout);
            let what = format!("layer {layout:?} {t} {e} {k}");
            check_chain(
                (Tolerance::BF16_SAVED, Tolerance::BF16_TILES),
                &what,
                &inputs,
                |x| plain_layer(x, layout, k),
                |x, dy| layer(x, dy, layout, k),
            );
        }
    }
}

/// Another sample in the batch changes the number of rows of each expert.
#[test]
fn the_rows_of_a_token_have_the_same_bits_for_any_other_tokens_and_any_order() {
    let (t, e, k, kept) = (150, 5, 2, 37);
    for (dtype, layout) in [
        (DType::F32, ExpertLayout::OutIn),
        (DType::F32, ExpertLayout::InOut),
        (DType::BF16, ExpertLayout::OutIn),
        (DType::BF16, ExpertLayout::InOut),
    ] {
        let (d, i) = if kernels_are_tested() { (40, 24) } else { (300, 70) };
        let [x, logits, gate_up, down] = operands((t, e), d, i, layout);
        let dy = random(7, &[t, d]);
        let run = |tokens: &[u32]| {
            let tokens = Tensor::new(tokens, &device()).unwrap();
            let pick = |x: &Tensor| {
                let picked = x.index_select(&tokens, 0).unwrap();
                operand(&picked, dtype).unwrap()
            };
            let weights = [&gate_up, &down].map(|w| operand(w, dtype).unwrap());
            let [gate_up, down] = weights;
            let inputs = [pick(&x), pick(&logits), gate_up, down];
            let (y, grads) = layer(&inputs, &pick(&dy), layout, k).unwrap();
            let rows = |t: &Tensor| {
                (0..t.dim(0).unwrap()).map(|row| bits(&t.get(row).unwrap())).collect::<Vec<_>>()
            };
            (rows(&y), rows(&grads[0]), rows(&grads[1]))
        };
        let all: Vec<u32> = (0..t as u32).collect();
        let reversed: Vec<u32> = all.iter().rev().copied().collect();
        let want = run(&all);
        let turned = run(&reversed);
        let few = run(&all[..kept]);
        let alone = run(&all[..1]);
        for token in 0..t {
            let what = format!("token {token} {dtype:?} {layout:?}");
            let other = t - 1 - token;
            assert!(want.0[token] == turned.0[other], "{what}: output, other order");
            assert!(want.1[token] == turned.1[other], "{what}: dx, other order");
            assert!(want.2[token] == turned.2[other], "{what}: logits, other order");
        }
        for token in 0..kept {
            let what = format!("token {token} {dtype:?} {layout:?}");
            assert!(want.0[token] == few.0[token], "{what}: output, fewer tokens");
            assert!(want.1[token] == few.1[token], "{what}: dx, fewer tokens");
            assert!(want.2[token] == few.2[token], "{what}: logits, fewer tokens");
        }
        assert!(want.0[0] == alone.0[0] && want.1[0] == alone.1[0], "one token");
    }
}

#[test]
fn without_tokens_there_are_no_rows() {
    let empty = Tensor::zeros((0, 6), DType::F32, &device()).unwrap();
    let routing = route(&empty, 2).unwrap();
    assert_eq!(numbers(&routing.offsets), [0; 7]);
    let rows = expert_rows(&empty, &routing).unwrap();
    assert_eq!(rows.dims(), [0, 6]);
    assert_eq!(combine(&rows, &routing, Some(&empty)).unwrap().dims(), [0, 6]);
    assert_eq!(expert_rows_backward(&rows, &routing).unwrap().dims(), [0, 6]);
    let d_weights = Tensor::zeros((0, 2), DType::F32, &device()).unwrap();
    assert_eq!(route_backward(&routing, &d_weights, 6).unwrap().dims(), [0, 6]);
}

#[test]
fn errors_name_the_operand_and_the_expected_value() {
    let logits = random(1, &[4, 6]);
    for k in [0, 7] {
        let error = message(route(&logits, k));
        assert!(error.contains(&format!("k = {k}, expected 1 to 6")), "{error}");
    }
    let error = message(route(&logits.to_dtype(DType::BF16).unwrap(), 2));
    assert!(error.contains("`logits` is BF16, expected F32"), "{error}");
    let routing = route(&logits, 2).unwrap();
    let error = message(expert_rows(&random(1, &[5, 3]), &routing));
    assert!(error.contains("`x` is [5, 3], expected [4, 3]"), "{error}");
    let error = message(combine(&random(1, &[7, 3]), &routing, None));
    assert!(error.contains("`rows` is [7, 3], expected [8, 3]"), "{error}");
    let error = message(route_backward(&routing, &random(1, &[4, 3]), 6));
    assert!(error.contains("`d_weights` is [4, 3], expected [4, 2]"), "{error}");
}
