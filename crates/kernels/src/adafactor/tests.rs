use super::super::testing::{Tolerance, assert_close, bits, device, message, random, with_threads};
use super::*;

const HYPER: Adafactor = Adafactor { beta2_decay: -0.8, eps: [f32::EPSILON as f64, 1e-3], d: 1.0 };

fn zeros(n: usize) -> Tensor {
    Tensor::zeros(n, DType::F32, &device()).unwrap()
}

/// Second moments of zero for a parameter of this shape.
fn moments(shape: &[usize]) -> Vec<Tensor> {
    let count: usize = shape.iter().product();
    match shape {
        [.., rows, columns] => vec![zeros(count / columns), zeros(count / rows)],
        _ => vec![zeros(count)],
    }
}

fn second(moments: &[Tensor]) -> SecondMoment<'_> {
    match moments {
        [rows, columns] => SecondMoment::Factored([rows, columns]),
        all => SecondMoment::Full(&all[0]),
    }
}

/// Updates a weight with random gradients of the size `size`; returns it and its second moments.
fn trained(
    (weight, master): (&Tensor, Option<&Tensor>),
    (first, last): (u64, u64),
    (size, lr, weight_decay): (f64, f64, f64),
) -> Vec<Tensor> {
    let moments = moments(weight.dims());
    for step in first..=last {
        let grad = (random(10 + step, weight.dims()) * size).unwrap();
        let (second, index) = (second(&moments), 3);
        let update =
            AdafactorUpdate { weight, master, second, grad: &grad, index, lr, weight_decay };
        adafactor_step(&HYPER, &update, step, 0.5).unwrap();
    }
    [vec![weight.clone()], moments].concat()
}

/// The same updates in `f64`, by the equations of `torch.optim.Adafactor`.
fn plain(
    weight: &Tensor,
    (first, last): (u64, u64),
    (size, lr, weight_decay): (f64, f64, f64),
) -> Vec<Tensor> {
    let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
    let rms = |t: &Tensor| t.sqr().unwrap().mean_all().unwrap().sqrt().unwrap();
    let rms = |t: &Tensor| rms(t).to_scalar::<f64>().unwrap();
    let [eps1, eps2] = HYPER.eps;
    let (mut weight, rank) = (wide(weight), weight.rank());
    let mut moments: Vec<Tensor> = Vec::new();
    for step in first..=last {
        let grad = (wide(&(random(10 + step, weight.dims()) * size).unwrap()) * 0.5).unwrap();
        let squares = grad.sqr().unwrap();
        let means = match rank {
            1 => vec![squares],
            _ => [1, 2].map(|of| squares.mean_keepdim(rank - of).unwrap()).to_vec(),
        };
        let new = (step as f64).powf(HYPER.beta2_decay);
        let old =
            |of: usize| moments.get(of).map_or(Ok(means[of].zeros_like()?), |m| Ok(m.clone()));
        let old: Vec<Tensor> = (0..means.len()).map(old).collect::<Result<_>>().unwrap();
        let mixed = old.iter().zip(&means).map(|(old, mean)| (old * (1.0 - new))? + (mean * new)?);
        moments = mixed.collect::<Result<_>>().unwrap();
        let estimate = match &moments[..] {
            [rows, columns] => {
                let mean = rows.mean_keepdim(rank - 2).unwrap().maximum(eps1).unwrap();
                rows.broadcast_mul(columns).unwrap().broadcast_div(&mean).unwrap()
            }
            full => full[0].clone(),
        };
        let update = (grad / estimate.maximum(eps1 * eps1).unwrap().sqrt().unwrap()).unwrap();
        let alpha = rms(&weight).max(eps2) * lr.min(1.0 / (step as f64).sqrt());
        let update = (&update * (-alpha / (rms(&update) / HYPER.d).max(1.0))).unwrap();
        weight = ((weight * (1.0 - lr * weight_decay)).unwrap() + update).unwrap();
    }
    let moments = moments.iter().map(|moment| moment.flatten_all().unwrap());
    [weight.clone()].into_iter().chain(moments).collect()
}

#[test]
fn vectors_matrices_and_stacks_of_matrices_match_the_equations_in_f64() {
    let shapes: [&[usize]; 7] =
        [&[1], &[300], &[24, 40], &[70, 33], &[1, 7], &[9, 1], &[6, 2, 3, 5, 4]];
    for shape in shapes {
        // with lr 0.9 the step is limited by 1 / sqrt(step); tiny gradients reach `eps`
        for (steps, of) in
            [((1, 3), (1.0, 0.01, 0.1)), ((1, 4), (1.0, 0.9, 0.0)), ((1, 2), (1e-8, 0.1, 0.0))]
        {
            let weight = random(1, shape);
            let want = plain(&weight, steps, of);
            let got = trained((&weight, None), steps, of);
            for (got, want) in got.iter().zip(&want) {
                let want = want.to_dtype(DType::F32).unwrap();
                assert_close(&format!("{shape:?} {of:?}"), got, &want, Tolerance::F32);
            }
        }
    }
}

#[test]
fn bf16_weights_follow_with_and_without_masters_on_any_number_of_threads() {
    let run = |dtype: DType, has_master: bool, threads: usize| {
        let weight = random(1, &[3, 48, 40]).to_dtype(DType::BF16).unwrap();
        let master = has_master.then(|| weight.to_dtype(DType::F32).unwrap());
        let weight = weight.to_dtype(dtype).unwrap();
        with_threads(threads, || {
            trained((&weight, master.as_ref()), (1, 4), (1.0, 0.01, 0.1)).swap_remove(0)
        })
    };
    let exact = run(DType::F32, false, 1);
    for has_master in [true, false] {
        let one = run(DType::BF16, has_master, 1);
        assert!(bits(&one) == bits(&run(DType::BF16, has_master, 3)));
        assert_close("bf16", &one, &exact, Tolerance::BF16_SAVED);
    }
}

#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
#[test]
fn the_ops_of_candle_give_the_sums_and_directions_of_the_kernels() {
    use crate::launch::with_kernels;
    let grad = random(1, &[3, 50, 70]);
    let (of_rows, of_columns) =
        (random(2, &[3, 50]).abs().unwrap(), random(3, &[210]).sqr().unwrap());
    let means = mean_squares(&grad, 0.3).unwrap();
    for (got, want) in with_kernels(|| mean_squares(&grad, 0.3)).unwrap().iter().zip(&means) {
        assert_close("means", got, want, Tolerance::F32);
    }
    let want = direction(&grad, 0.3, &of_rows, &of_columns, 1e-3).unwrap();
    let got = with_kernels(|| direction(&grad, 0.3, &of_rows, &of_columns, 1e-3)).unwrap();
    assert_close("direction", &got, &want, Tolerance::F32);
}

#[test]
fn a_moment_of_another_size_is_refused() {
    let (weight, grad, short) = (random(1, &[4, 6]), random(2, &[24]), zeros(5));
    let second = SecondMoment::Factored([&zeros(4), &short]);
    let update = AdafactorUpdate {
        weight: &weight,
        master: None,
        second,
        grad: &grad,
        index: 0,
        lr: 0.1,
        weight_decay: 0.0,
    };
    let error = message(adafactor_step(&HYPER, &update, 1, 1.0));
    assert!(error.contains("`col_var` is [5], expected [6]"), "{error}");
}
