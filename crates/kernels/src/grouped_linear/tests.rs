use super::super::testing::{
    Tolerance, added, assert_close, bits, check, device, gradient_buffer, ids_are_checked,
    kernels_are_tested, message, random, routing, with_threads,
};
use super::*;

const LAYOUTS: [ExpertLayout; 2] = [ExpertLayout::OutIn, ExpertLayout::InOut];

fn offsets(counts: &[u32]) -> Tensor {
    let mut at = vec![0];
    at.extend(counts.iter().scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    }));
    Tensor::new(at, &device()).unwrap()
}

fn weight_dims(e: usize, m: usize, k: usize, layout: ExpertLayout) -> [usize; 3] {
    if layout == ExpertLayout::OutIn { [e, m, k] } else { [e, k, m] }
}

/// The products of each expert by itself.
fn plain(x: &Tensor, w: &Tensor, layout: ExpertLayout, counts: &[u32]) -> Result<Tensor> {
    let (mut parts, mut first) = (Vec::new(), 0);
    for (expert, count) in counts.iter().enumerate() {
        if *count > 0 {
            let w = w.get(expert)?;
            let w = if layout == ExpertLayout::OutIn { w.t()? } else { w };
            parts.push(x.narrow(0, first, *count as usize)?.matmul(&w)?);
            first += *count as usize;
        }
    }
    Tensor::cat(&parts, 0)
}

#[test]
fn products_of_experts_and_their_gradients_match_the_reference() {
    let cases: [(&[u32], usize, usize); 8] = [
        (&[1], 1, 1),
        (&[3, 0, 1], 17, 33),
        (&[0, 70, 0, 0], 65, 40),
        (&[1, 2, 3, 4, 5, 6, 7, 8, 9], 49, 31),
        (&[64, 65, 0, 130], 33, 100),
        (&[0, 0, 5], 1, 130),
        (&[2, 31], 130, 1),
        (&[13, 21], 96, 600),
    ];
    for (counts, m, k) in cases {
        let (rows, at) = (counts.iter().sum::<u32>() as usize, offsets(counts));
        for layout in LAYOUTS {
            let dims = weight_dims(counts.len(), m, k, layout);
            let inputs = [random(1, &[rows, k]), random(2, &dims)];
            let what = format!("grouped_linear {counts:?} {m} {k} {layout:?}");
            check(
                &what,
                &inputs,
                |t| plain(&t[0], &t[1], layout, counts),
                |t, dy| {
                    let y = grouped_linear(&t[0], &t[1], layout, &at)?;
                    let dw = gradient_buffer(&dims);
                    grouped_linear_backward_weight(&t[0], dy, layout, &at, &dw)?;
                    let dx = grouped_linear_backward_input(dy, &t[1], layout, &at)?;
                    Ok((y, vec![dx, added(&dw)]))
                },
            );
        }
    }
}

#[test]
fn the_gradient_of_an_expert_without_rows_is_not_touched() {
    let (counts, m, k) = ([0u32, 3, 0, 1, 0], 40, 33);
    for layout in LAYOUTS {
        for dtype in [DType::F32, DType::BF16] {
            let dims = weight_dims(counts.len(), m, k, layout);
            let x = random(1, &[4, k]).to_dtype(dtype).unwrap();
            let dy = random(2, &[4, m]).to_dtype(dtype).unwrap();
            let dw = (random(3, &dims) * f64::NAN).unwrap();
            let zeros = Tensor::zeros(&dims, DType::F32, &device()).unwrap();
            for dw in [&dw, &zeros] {
                let before: Vec<_> = (0..5).map(|e| bits(&dw.get(e).unwrap())).collect();
                grouped_linear_backward_weight(&x, &dy, layout, &offsets(&counts), dw).unwrap();
                for (expert, before) in before.iter().enumerate() {
                    let after = bits(&dw.get(expert).unwrap());
                    let is_nan = f32::from_bits(before[0]).is_nan();
                    // a GPU may write a NaN with other bits
                    let touched = if is_nan {
                        after.iter().any(|bits| !f32::from_bits(*bits).is_nan())
                    } else {
                        after != *before
                    };
                    assert_eq!(touched, counts[expert] > 0 && !is_nan, "{expert} {layout:?}");
                }
            }
        }
    }
}

/// Rows, inputs and outputs beyond the tiles of all kernels, and uneven experts.
#[test]
fn products_of_experts_have_the_same_bits_for_any_number_of_threads() {
    let (t, e, k) = (300, 12, 3);
    let (m, inputs) = if kernels_are_tested() { (72, 90) } else { (530, 1100) };
    let at = routing(1, (t, e, k), 3.0).offsets;
    for layout in LAYOUTS {
        for dtype in [DType::F32, DType::BF16] {
            let dims = weight_dims(e, m, inputs, layout);
            let cast = |t: Tensor| t.to_dtype(dtype).unwrap();
            let (x, w) = (cast(random(1, &[t * k, inputs])), cast(random(2, &dims)));
            let dy = cast(random(3, &[t * k, m]));
            let run = |threads| {
                with_threads(threads, || {
                    let dw = gradient_buffer(&dims);
                    grouped_linear_backward_weight(&x, &dy, layout, &at, &dw).unwrap();
                    let y = grouped_linear(&x, &w, layout, &at).unwrap();
                    let dx = grouped_linear_backward_input(&dy, &w, layout, &at).unwrap();
                    [bits(&y), bits(&dx), bits(&dw)]
                })
            };
            let one = run(1);
            assert!(one == run(2) && one == run(3) && one == run(7), "{layout:?} {dtype:?}");
        }
    }
}

#[test]
fn the_bits_of_a_row_do_not_depend_on_the_number_of_rows_of_its_expert() {
    let (rows, m, k) = if kernels_are_tested() { (150, 71, 200) } else { (150, 131, 1500) };
    for layout in LAYOUTS {
        for dtype in [DType::F32, DType::BF16] {
            let w = random(1, &weight_dims(1, m, k, layout)).to_dtype(dtype).unwrap();
            let x = random(2, &[rows, k]).to_dtype(dtype).unwrap();
            let all = grouped_linear(&x, &w, layout, &offsets(&[rows as u32])).unwrap();
            for (first, count) in [(0, 1), (149, 1), (3, 2), (7, 8), (40, 33), (1, 100)] {
                let some = x.narrow(0, first, count).unwrap();
                let y = grouped_linear(&some, &w, layout, &offsets(&[count as u32])).unwrap();
                let want = all.narrow(0, first, count).unwrap();
                assert!(bits(&y) == bits(&want), "{count} rows {layout:?} {dtype:?}");
            }
        }
    }
}

#[test]
fn without_rows_and_without_inputs_the_results_are_empty_or_zero() {
    for layout in LAYOUTS {
        let w = random(1, &weight_dims(2, 5, 3, layout));
        let none = Tensor::zeros((0, 3), DType::F32, &device()).unwrap();
        let at = offsets(&[0, 0]);
        assert_eq!(grouped_linear(&none, &w, layout, &at).unwrap().dims(), [0, 5]);
        let dy = Tensor::zeros((0, 5), DType::F32, &device()).unwrap();
        let dx = grouped_linear_backward_input(&dy, &w, layout, &at).unwrap();
        assert_eq!(dx.dims(), [0, 3]);
        let before = bits(&w);
        grouped_linear_backward_weight(&none, &dy, layout, &at, &w).unwrap();
        assert_eq!(bits(&w), before);
    }
}

#[test]
fn a_weight_in_bf16_is_multiplied_with_rows_in_f32_as_if_it_were_f32() {
    if kernels_are_tested() {
        return; // only the CPU multiplies different dtypes
    }
    let (counts, m, k) = ([9u32, 0, 40, 1], 50, 70);
    let (x, at) = (random(1, &[50, k]), offsets(&counts));
    for layout in LAYOUTS {
        let w = random(2, &weight_dims(4, m, k, layout)).to_dtype(DType::BF16).unwrap();
        let y = grouped_linear(&x, &w, layout, &at).unwrap();
        let wide = w.to_dtype(DType::F32).unwrap();
        let want = grouped_linear(&x, &wide, layout, &at).unwrap();
        assert_close("y", &y, &want, Tolerance::F32);
    }
}

#[test]
fn errors_name_the_operand_and_the_expected_value() {
    let (x, w) = (random(1, &[4, 6]), random(2, &[3, 5, 6]));
    let at = offsets(&[1, 1, 2]);
    let error = message(grouped_linear(&x, &w, ExpertLayout::InOut, &at));
    assert!(error.contains("`x` is [4, 6]: found 6 columns, expected 5"), "{error}");
    let error = message(grouped_linear(&x, &w, ExpertLayout::OutIn, &offsets(&[1, 3])));
    assert!(error.contains("`offsets` is [3], expected [4]"), "{error}");
    let error = message(grouped_linear(&x, &random(2, &[5, 6]), ExpertLayout::OutIn, &at));
    assert!(error.contains("`w` is [5, 6], expected [E, M, K]"), "{error}");
    let dy = random(3, &[4, 5]);
    let error = message(grouped_linear_backward_weight(&x, &dy, ExpertLayout::InOut, &at, &w));
    assert!(error.contains("`x` is [4, 6]"), "{error}");
    let dw = w.to_dtype(DType::BF16).unwrap();
    let error = message(grouped_linear_backward_weight(&x, &dy, ExpertLayout::OutIn, &at, &dw));
    assert!(error.contains("`dw` is BF16, expected F32"), "{error}");
    if ids_are_checked() {
        let error = message(grouped_linear(&x, &w, ExpertLayout::OutIn, &offsets(&[1, 1, 1])));
        assert!(error.contains("expected ascending rows from 0 to 4"), "{error}");
    }
}
