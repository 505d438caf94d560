use super::super::testing::{device, message, random, values, with_threads};
use super::*;

const HYPER: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

/// The update in `f64`.
fn plain(p: &mut f64, m: &mut f64, v: &mut f64, g: f64, lr: f64, decay: f64, step: i32) {
    *p *= 1.0 - lr * decay;
    *m += (1.0 - HYPER.beta1) * (g - *m);
    *v = HYPER.beta2 * *v + (1.0 - HYPER.beta2) * g * g;
    let denominator = v.sqrt() / (1.0 - HYPER.beta2.powi(step)).sqrt() + HYPER.eps;
    *p -= lr / (1.0 - HYPER.beta1.powi(step)) * *m / denominator;
}

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &device()).unwrap()
}

#[test]
fn five_steps_match_the_equations_in_f64() {
    for n in [1, 15, 16, 17, 70_000] {
        let weight = random(1, &[n]);
        let (exp_avg, exp_avg_sq) = (zeros(&[n]), zeros(&[n]));
        let mut want = values(&weight);
        let (mut m, mut v) = (vec![0f64; n], vec![0f64; n]);
        for step in 1..=5 {
            let grad = random(10 + step, &[n]);
            let lr = 1e-2 / step as f64;
            let tensors = AdamWTensors {
                weight: &weight,
                master: None,
                exp_avg: &exp_avg,
                exp_avg_sq: &exp_avg_sq,
                absmax: None,
                grad: &grad,
            };
            adamw_step(&HYPER, &tensors, lr, 0.1, step, 0.5).unwrap();
            for (i, g) in values(&grad).iter().enumerate() {
                plain(&mut want[i], &mut m[i], &mut v[i], 0.5 * g, lr, 0.1, step as i32);
            }
        }
        for (got, want) in values(&weight).iter().zip(&want) {
            assert!((got - want).abs() < 1e-6 * (1.0 + want.abs()), "{n}: {got} {want}");
        }
    }
}

#[test]
fn a_bf16_weight_follows_its_master() {
    let master = random(1, &[33]);
    let alone = master.copy().unwrap();
    let weight = master.to_dtype(DType::BF16).unwrap();
    let state = [zeros(&[33]), zeros(&[33]), zeros(&[33]), zeros(&[33])];
    let grad = random(2, &[33]);
    for step in 1..=3 {
        let tensors = AdamWTensors {
            weight: &weight,
            master: Some(&master),
            exp_avg: &state[0],
            exp_avg_sq: &state[1],
            absmax: None,
            grad: &grad,
        };
        adamw_step(&HYPER, &tensors, 1e-4, 0.01, step, 1.0).unwrap();
        let tensors = AdamWTensors {
            weight: &alone,
            master: None,
            exp_avg: &state[2],
            exp_avg_sq: &state[3],
            absmax: None,
            grad: &grad,
        };
        adamw_step(&HYPER, &tensors, 1e-4, 0.01, step, 1.0).unwrap();
    }
    assert_eq!(values(&master), values(&alone));
    assert_eq!(values(&weight), values(&master.to_dtype(DType::BF16).unwrap()));
}

/// Weight, moments and gradient of a parameter; some do not start at a vector boundary.
struct State {
    tensors: [Tensor; 4],
}

impl State {
    /// More parameters than one launch accepts, with sizes around that of a vector and of a chunk.
    fn many() -> Vec<Self> {
        let sizes = [1, 3, 4, 5, 0, 1023, 2048, 65_535, 65_536, 65_540, 131_075, 2, 8, 7];
        let sizes = sizes.into_iter().chain((0..160).map(|i| i % 9));
        let tensor =
            |seed, n: usize, start| random(seed, &[n + start]).narrow(0, start, n).unwrap();
        let state = sizes.enumerate().map(|(i, n)| {
            let (seed, start) = (10 * i as u64, i % 3);
            // Squared before `narrow`: on a GPU, candle fails for a tensor without elements.
            let exp_avg_sq = random(seed + 2, &[n + start]).sqr().unwrap();
            let exp_avg_sq = exp_avg_sq.narrow(0, start, n).unwrap();
            let tensors = [
                tensor(seed, n, start),
                tensor(seed + 1, n, start),
                exp_avg_sq,
                tensor(seed + 3, n, start),
            ];
            Self { tensors }
        });
        state.collect()
    }

    fn update(&self, i: usize) -> AdamWUpdate<'_> {
        let [weight, exp_avg, exp_avg_sq, grad] = &self.tensors;
        let tensors =
            AdamWTensors { weight, master: None, exp_avg, exp_avg_sq, absmax: None, grad };
        AdamWUpdate {
            tensors,
            index: i,
            first: 0,
            lr: 1e-2 / (i + 1) as f64,
            weight_decay: (i % 2) as f64,
        }
    }
}

/// Both calls of a step; returns the sums of squares.
fn clip_and_update(updates: &[AdamWUpdate<'_>], step: u64, max_grad_norm: f64) -> Tensor {
    let grads: Vec<&Tensor> = updates.iter().map(|update| update.tensors.grad).collect();
    let squares = sums_of_squares(&grads).unwrap();
    clipped_update(&HYPER, updates, step, &squares, max_grad_norm).unwrap();
    squares
}

#[test]
fn an_update_of_all_parameters_is_theirs_one_by_one_with_a_joint_norm() {
    for max_grad_norm in [0.0, 0.5, 1e9] {
        let (together, alone) = (State::many(), State::many());
        let updates: Vec<_> = together.iter().zip(0..).map(|(s, i)| s.update(i)).collect();
        let squares = clip_and_update(&updates, 3, max_grad_norm);
        let squares = squares.to_vec1::<f64>().unwrap();
        let norm = squares.iter().sum::<f64>().sqrt();
        let scale = if max_grad_norm == 0.5 { 0.5 / (norm + 1e-6) } else { 1.0 };
        for (i, (together, alone)) in together.iter().zip(&alone).enumerate() {
            let want: f64 = values(&alone.tensors[3]).iter().map(|x| x * x).sum();
            assert!((squares[i] - want).abs() <= 1e-9 * want, "{i}: {} {want}", squares[i]);
            let AdamWUpdate { tensors, lr, weight_decay, .. } = alone.update(i);
            adamw_step(&HYPER, &tensors, lr, weight_decay, 3, scale as f32).unwrap();
            for (together, alone) in together.tensors.iter().zip(&alone.tensors) {
                assert_eq!(values(together), values(alone), "parameter {i}");
            }
        }
    }
}

#[test]
fn gradients_that_are_not_finite_change_nothing() {
    for bad in [f32::NAN, f32::INFINITY] {
        let (mut changed, before) = (State::many(), State::many());
        changed[6].tensors[3] = Tensor::full(bad, 2048, &device()).unwrap();
        changed[6].tensors[3] = changed[6].tensors[3].contiguous().unwrap();
        let updates: Vec<_> = changed.iter().zip(0..).map(|(s, i)| s.update(i)).collect();
        let squares = clip_and_update(&updates, 1, 1.0);
        let squares = squares.to_vec1::<f64>().unwrap();
        assert_eq!(squares.iter().position(|square| !square.is_finite()), Some(6));
        for (changed, before) in changed.iter().zip(&before) {
            for (changed, before) in changed.tensors[..3].iter().zip(&before.tensors) {
                assert_eq!(values(changed), values(before));
            }
        }
    }
}

#[test]
fn many_tensors_become_zero_and_their_neighbours_stay() {
    let whole: Vec<Tensor> = (0..170).map(|i| random(i, &[i as usize % 9 + 6])).collect();
    let inner: Vec<Tensor> =
        whole.iter().map(|t| t.narrow(0, 2, t.elem_count() - 4).unwrap()).collect();
    fill_zero_all(&inner.iter().collect::<Vec<_>>()).unwrap();
    for tensor in &whole {
        let x = values(tensor);
        let zeros = x.iter().map(|x| *x == 0.0);
        let want = (0..x.len()).map(|i| (2..x.len() - 2).contains(&i));
        assert!(zeros.eq(want), "{x:?}");
    }
}

#[test]
fn state_of_the_wrong_kind_is_refused() {
    let (x, y, z) = (random(1, &[3]), zeros(&[3]), zeros(&[3]));
    let grad = random(2, &[3]);
    let tensors = AdamWTensors {
        weight: &x,
        master: None,
        exp_avg: &y,
        exp_avg_sq: &z,
        absmax: None,
        grad: &grad,
    };
    assert!(message(adamw_step(&HYPER, &tensors, 0.1, 0.0, 0, 1.0)).contains("count from 1"));
    let twice = AdamWTensors { exp_avg_sq: &y, ..tensors };
    let said = message(adamw_step(&HYPER, &twice, 0.1, 0.0, 1, 1.0));
    assert!(said.contains("`exp_avg` is written in place"), "{said}");
    let master = zeros(&[3]);
    let two = AdamWTensors { master: Some(&master), ..tensors };
    let said = message(adamw_step(&HYPER, &two, 0.1, 0.0, 1, 1.0));
    assert!(said.contains("`weight` is F32 and has a `master`"), "{said}");
    let codes = zeros(&[3]).to_dtype(DType::U8).unwrap();
    let bare = AdamWTensors { exp_avg: &codes, ..tensors };
    let said = message(adamw_step(&HYPER, &bare, 0.1, 0.0, 1, 1.0));
    assert!(said.contains("`exp_avg` is U8"), "{said}");
    let [scale, many] = [zeros(&[1]), zeros(&[2])];
    let odd = AdamWTensors {
        exp_avg: &codes,
        exp_avg_sq: &codes.copy().unwrap(),
        absmax: Some([&scale, &many]),
        ..tensors
    };
    let said = message(adamw_step(&HYPER, &odd, 0.1, 0.0, 1, 1.0));
    assert!(said.contains("`absmax` is [2], expected [1]"), "{said}");
}

#[test]
fn the_norm_is_exact_and_the_same_on_any_number_of_threads() {
    let x = random(1, &[100_003]);
    let want: f64 = values(&x).iter().map(|x| x * x).sum();
    let one = with_threads(1, || sum_of_squares(&x)).unwrap();
    let two = with_threads(2, || sum_of_squares(&x)).unwrap();
    assert_eq!(one.to_bits(), two.to_bits());
    assert!((one - want).abs() < 1e-9 * want, "{one} {want}");
    fill_zero(&x).unwrap();
    assert_eq!(sum_of_squares(&x).unwrap(), 0.0);
}

#[test]
fn squares_of_blocks_depend_neither_on_the_place_of_a_block_nor_on_zeros_after_it() {
    let x = random(1, &[3 * SQUARES_BLOCK + 77]);
    let all: Vec<f64> = squares_of_blocks(&x).unwrap().to_vec1().unwrap();
    assert_eq!(all.len(), 4);
    for (block, got) in values(&x).chunks(SQUARES_BLOCK).zip(&all) {
        let want: f64 = block.iter().map(|x| x * x).sum();
        assert!((got - want).abs() < 1e-12 * want, "{got} {want}");
    }
    // elsewhere in memory, at no vector boundary, with zeros at the end
    let zeros = Tensor::zeros(9, DType::F32, &device()).unwrap();
    let moved = Tensor::cat(&[&zeros, &x, &zeros], 0).unwrap();
    let moved = moved.narrow(0, 9, x.elem_count() + 9).unwrap();
    let again: Vec<f64> = squares_of_blocks(&moved).unwrap().to_vec1().unwrap();
    assert_eq!(again, all);
    let empty = squares_of_blocks(&x.narrow(0, 0, 0).unwrap()).unwrap();
    assert_eq!(empty.dims(), [0]);
}

#[test]
fn sums_of_squares_in_order_are_those_of_the_blocks_wherever_they_are() {
    let sizes = [1, SQUARES_BLOCK - 1, SQUARES_BLOCK, 5 * SQUARES_BLOCK + 3, 200_000];
    let tensors: Vec<Tensor> = sizes.iter().map(|size| random(7, &[*size])).collect();
    let found = sums_of_squares_in_order(&tensors).unwrap();
    assert_eq!(found.len(), sizes.len());
    for (tensor, found) in tensors.iter().zip(found) {
        let mut sum = 0.0;
        for start in (0..tensor.elem_count()).step_by(SQUARES_BLOCK) {
            // each block alone, as if it were on another rank
            let len = SQUARES_BLOCK.min(tensor.elem_count() - start);
            let block = tensor.narrow(0, start, len).unwrap().copy().unwrap();
            sum += squares_of_blocks(&block).unwrap().to_vec1::<f64>().unwrap()[0];
        }
        assert_eq!(found.to_bits(), f64::to_bits(sum), "{:?}", tensor.dims());
    }
    assert!(sums_of_squares_in_order(&[]).unwrap().is_empty());
}
