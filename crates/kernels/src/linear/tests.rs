use super::super::testing::{
    Tolerance, added, assert_close, bits, check, device, gradient_buffer, message, operand, random,
};
use super::*;
use candle_core::DType;

fn plain(t: &[Tensor]) -> Result<Tensor> {
    t[0].matmul(&t[1].t()?)?.broadcast_add(&t[2])
}

#[test]
fn linear_and_its_gradients_match_the_reference() {
    for (n, k, m) in [(1, 1, 1), (1, 33, 65), (3, 17, 5), (31, 64, 33), (65, 40, 1), (130, 70, 96)]
    {
        let inputs = [random(1, &[n, k]), random(2, &[m, k]), random(3, &[m])];
        check(&format!("linear {n} {k} {m}"), &inputs, plain, |t, dy| {
            let y = linear(&t[0], &t[1], Some(&t[2]))?;
            let (dw, db) = (gradient_buffer(&[m, k]), gradient_buffer(&[m]));
            linear_backward_weight(&t[0], dy, &dw)?;
            bias_backward(dy, &db)?;
            Ok((y, vec![linear_backward_input(dy, &t[1])?, added(&dw), added(&db)]))
        });
    }
}

#[test]
fn the_bias_gradient_is_the_sum_of_all_rows_at_any_storage_offset() {
    for (n, m) in [(1, 8), (63, 300), (600, 520), (4_200, 3)] {
        for dtype in [DType::F32, DType::BF16] {
            let aligned = random(1, &[n + 1, m]).to_dtype(dtype).unwrap();
            for start in [0, 1] {
                let dy = aligned.narrow(0, start, n).unwrap();
                let db = gradient_buffer(&[m]);
                bias_backward(&dy, &db).unwrap();
                let want = dy.to_dtype(DType::F64).unwrap().sum(0).unwrap();
                assert_close(&format!("bias {n} {m}"), &added(&db), &want, Tolerance::F32);
            }
        }
    }
}

#[test]
fn the_term_of_an_adapter_is_added_in_forward_and_backward() {
    for (n, k, m, r) in [(1, 1, 1, 1), (33, 20, 40, 3), (130, 70, 96, 8)] {
        let inputs =
            [random(1, &[n, k]), random(2, &[m, k]), random(3, &[n, r]), random(4, &[m, r])];
        let plain = |t: &[Tensor]| t[0].matmul(&t[1].t()?)? + t[2].matmul(&t[3].t()?)?;
        check(&format!("linear_low_rank {n} {k} {m} {r}"), &inputs, plain, |t, dy| {
            let low_rank = LowRank { u: &t[2], b: &t[3] };
            let y = linear_low_rank(&t[0], &t[1], low_rank, None, None)?;
            let (dw, db) = (gradient_buffer(&[m, k]), gradient_buffer(&[m, r]));
            linear_backward_weight(&t[0], dy, &dw)?;
            linear_backward_weight(&t[2], dy, &db)?;
            let du = linear_backward_input(dy, &t[3])?;
            Ok((y, vec![linear_backward_input(dy, &t[1])?, added(&dw), du, added(&db)]))
        });
        let (dy, du, a) = (random(5, &[n, m]), random(6, &[n, r]), random(7, &[r, k]));
        let dx = linear_backward_input_low_rank(&dy, &inputs[1], LowRank { u: &du, b: &a });
        let want = dy.matmul(&inputs[1]).unwrap() + du.matmul(&a).unwrap();
        assert_close("dx", &dx.unwrap(), &want.unwrap(), Tolerance::F32);
    }
    let (x, w, b) = (random(1, &[5, 12]), random(2, &[7, 12]), random(3, &[7, 2]));
    let low_rank = LowRank { u: &random(4, &[4, 2]), b: &b };
    let error = message(linear_low_rank(&x, &w, low_rank, None, None));
    assert!(error.contains("`u` is [4, 2], expected 5 rows"), "{error}");
}

#[test]
fn residuals_are_added_in_forward_and_backward() {
    let inputs =
        [random(1, &[33, 20]), random(2, &[40, 20]), random(3, &[40]), random(4, &[33, 40])];
    let plain = |t: &[Tensor]| plain(t)? + &t[3];
    check("linear_add", &inputs, plain, |t, dy| {
        let y = linear_add(&t[0], &t[1], Some(&t[2]), &t[3])?;
        let (dw, db) = (gradient_buffer(&[40, 20]), gradient_buffer(&[40]));
        linear_backward_weight(&t[0], dy, &dw)?;
        bias_backward(dy, &db)?;
        let dx = Tensor::ones((33, 20), dy.dtype(), &device())?;
        let dx = (linear_backward_input_add(dy, &t[1], dx)? - 1.0)?;
        Ok((y, vec![dx, added(&dw), added(&db), dy.clone()]))
    });
}

#[test]
fn a_replaced_weight_gradient_has_the_bits_of_one_that_is_added_to_zeros() {
    for (n, k, m) in [(0, 3, 4), (1, 1, 1), (31, 64, 33), (130, 70, 96)] {
        for dtype in [DType::F32, DType::BF16] {
            let of = |seed, width| operand(&random(seed, &[n, width]), dtype).unwrap();
            let (x, dy) = (of(1, k), of(2, m));
            let run = |before: f64, write| {
                let dw = Tensor::full(before as f32, (m, k), &device()).unwrap();
                linear_backward_weight_into(&x, &dy, &dw, write).unwrap();
                bits(&dw)
            };
            let want = run(0.0, Store::Add);
            assert_eq!(run(f64::NAN, Store::Overwrite), want, "{n} {k} {m} {dtype:?}");
        }
    }
}

#[test]
fn a_weight_with_more_than_two_dims_is_read_as_a_matrix() {
    let (x, w) = (random(1, &[5, 12]), random(2, &[7, 3, 2, 2]));
    let y = linear(&x, &w, None).unwrap();
    let flat = linear(&x, &w.reshape((7, 12)).unwrap(), None).unwrap();
    assert_eq!(y.to_vec2::<f32>().unwrap(), flat.to_vec2::<f32>().unwrap());
    let dw = Tensor::zeros((7, 3, 2, 2), DType::F32, &device()).unwrap();
    linear_backward_weight(&x, &y, &dw).unwrap();
    assert!(dw.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap() > 0.0);
}

#[test]
fn errors_name_the_operand_with_the_wrong_shape() {
    let (x, w) = (random(1, &[5, 12]), random(2, &[7, 11]));
    let error = message(linear(&x, &w, None));
    assert!(error.contains("found 12 inputs, expected 11"), "{error}");
    let error = message(linear(&x.t().unwrap(), &random(2, &[7, 5]), None));
    assert!(error.contains("`x`") && error.contains("contiguous"), "{error}");
    let error = message(bias_backward(&x, &x));
    assert!(error.contains("`db`"), "{error}");
    let square = random(1, &[12, 12]);
    let error = message(linear_backward_weight(&square, &square, &square));
    assert!(error.contains("shares memory"), "{error}");
    let dw = square.to_dtype(DType::BF16).unwrap();
    let error = message(linear_backward_weight(&square, &square, &dw));
    assert!(error.contains("`dw` is BF16, expected F32"), "{error}");
}
