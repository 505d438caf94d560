//! The ops of mixtures of experts, with rows that are 16-byte aligned, uneven experts and several
//! tiles.

use super::{DTYPES, assert_all_close, operand};
use crate::launch::with_kernels;
use crate::testing::{Tolerance, assert_close, bits, gradient_buffer, ids, random};
use crate::{
    ExpertLayout, RecomputeInput, grouped_linear, grouped_linear_backward_input,
    grouped_linear_backward_weight,
};
use candle_core::{DType, Result, Tensor};

fn offsets(counts: &[u32]) -> Tensor {
    let sums = counts.iter().scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    });
    ids(&[0].into_iter().chain(sums).collect::<Vec<_>>())
}

#[test]
fn routing_of_several_tiles_matches_the_cpu() -> Result<()> {
    for (t, e, k) in [(0, 6, 2), (1, 5, 5), (300, 128, 8), (129, 40, 8), (1030, 3, 1), (9, 1100, 4)]
    {
        let (logits, d_weights) = (random(1, &[t, e]), random(2, &[t, k]));
        // Many equal logits.
        let logits = ((logits * 2.0)?.round()? / 2.0)?;
        let (gpu, cpu) = both!({
            let routing = crate::route(&logits, k)?;
            let d_logits = crate::route_backward(&routing, &d_weights, e)?;
            vec![
                routing.weights,
                d_logits,
                routing.experts,
                routing.order,
                routing.places,
                routing.offsets,
            ]
        });
        let what = format!("route {t} {e} {k}");
        assert_all_close(&what, &gpu[..2], &cpu[..2], Tolerance::F32);
        for (index, (gpu, cpu)) in gpu[2..].iter().zip(&cpu[2..]).enumerate() {
            let numbers = |t: &Tensor| t.flatten_all()?.to_vec1::<u32>();
            assert_eq!(numbers(gpu)?, numbers(cpu)?, "{what}: {index}");
        }
    }
    Ok(())
}

#[test]
fn probabilities_of_routers_match_the_cpu() -> Result<()> {
    for (t, e) in [(1, 1), (3, 128), (300, 40), (9, 1100)] {
        let (logits, slopes) = ((random(1, &[t, e]) * 4.0)?, random(2, &[e]));
        let (gpu, cpu) = both!({
            let d_logits = gradient_buffer(&[t, e]);
            crate::router_probabilities_backward(&logits, &slopes, &d_logits)?;
            vec![crate::router_probabilities(&logits)?.to_dtype(DType::F32)?, d_logits]
        });
        assert_all_close(&format!("probabilities {t} {e}"), &gpu, &cpu, Tolerance::F32);
    }
    Ok(())
}

#[test]
fn rows_sums_and_activations_of_experts_match_the_cpu() -> Result<()> {
    for ((t, e, k), d) in
        [((0, 4, 2), 64), ((65, 7, 3), 264), ((9, 12, 6), 1032), ((5, 2, 1), 2049)]
    {
        let routing = crate::route(&random(1, &[t, e]), k)?;
        for (dtype, tolerance) in DTYPES {
            let (x, rows) = (operand(2, &[t, d], dtype), operand(3, &[t * k, d], dtype));
            let (gate_up, dy) = (operand(4, &[t * k, 2 * d], dtype), rows.clone());
            let (gpu, cpu) = both!({
                let swiglu = |recompute| {
                    crate::expert_swiglu_backward(gate_up.copy()?, &routing, dy.copy()?, recompute)
                };
                let (d_both, d_weights, again) = swiglu(RecomputeInput::Yes)?;
                let alone = swiglu(RecomputeInput::No)?;
                let results = [
                    crate::expert_rows(&x, &routing)?,
                    crate::expert_swiglu(&gate_up, &routing)?,
                    d_both,
                    d_weights,
                    alone.0,
                    alone.1,
                ];
                results.into_iter().chain(again).collect()
            });
            let what = format!("experts {t} {e} {k} {d} {dtype:?}");
            assert_all_close(&what, &gpu, &cpu, tolerance);
            for residual in [None, Some(&x)] {
                let sums = with_kernels(|| crate::combine(&rows, &routing, residual))?;
                let want = crate::combine(&rows, &routing, residual)?;
                assert_close(&what, &sums, &want, tolerance);
            }
        }
    }
    Ok(())
}

/// The products, the gradient of the rows, and that of the weights.
fn products(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    layout: ExpertLayout,
    at: &Tensor,
) -> Result<[Tensor; 3]> {
    let dw = gradient_buffer(w.dims());
    grouped_linear_backward_weight(x, dy, layout, at, &dw)?;
    let y = grouped_linear(x, w, layout, at)?;
    Ok([y, grouped_linear_backward_input(dy, w, layout, at)?, dw])
}

#[test]
fn grouped_products_match_the_cpu() -> Result<()> {
    // More experts than four of each lane of a warp, which counts their tiles.
    let many: Vec<u32> = (0..150).map(|expert| u32::from(expert % 37 == 5) * expert).collect();
    let cases: [(&[u32], usize, usize); 7] = [
        (&[], 8, 8),
        (&many, 8, 8),
        (&[1], 8, 16),
        (&[0, 65, 3, 0], 136, 72),
        (&[7, 0, 64, 130, 1], 64, 264),
        (&[2; 40], 72, 200),
        (&[5, 70], 33, 70),
    ];
    for (counts, m, k) in cases {
        let (rows, at) = (counts.iter().sum::<u32>() as usize, offsets(counts));
        for (dtype, tolerance) in DTYPES {
            for layout in [ExpertLayout::OutIn, ExpertLayout::InOut] {
                let e = counts.len();
                let dims = if layout == ExpertLayout::OutIn { [e, m, k] } else { [e, k, m] };
                let (x, w) = (operand(1, &[rows, k], dtype), operand(2, &dims, dtype));
                let dy = operand(3, &[rows, m], dtype);
                let run = || products(&x, &w, &dy, layout, &at);
                let (gpu, cpu) = (with_kernels(run)?, run()?);
                let what = format!("grouped {counts:?} {m} {k} {dtype:?} {layout:?}");
                assert_all_close(&what, &gpu[..2], &cpu[..2], tolerance);
                assert_close(&what, &gpu[2], &cpu[2], Tolerance::F32);
            }
        }
    }
    Ok(())
}

#[test]
fn a_row_of_a_grouped_product_has_the_same_bits_with_any_other_rows() -> Result<()> {
    let (rows, m, k) = (140, 136, 200);
    for (dtype, _) in DTYPES {
        for layout in [ExpertLayout::OutIn, ExpertLayout::InOut] {
            let dims = if layout == ExpertLayout::OutIn { [2, m, k] } else { [2, k, m] };
            let (x, w) = (operand(1, &[rows, k], dtype), operand(2, &dims, dtype));
            let dy = operand(3, &[rows, m], dtype);
            let products = |x: &Tensor, dy: &Tensor, at: &Tensor| {
                with_kernels(|| products(x, &w, dy, layout, at))
            };
            let all = products(&x, &dy, &offsets(&[0, rows as u32]))?;
            for (first, count) in [(0, 1), (64, 70), (8, 33)] {
                let part = |t: &Tensor| t.narrow(0, first, count)?.copy();
                let at = offsets(&[0, count as u32]);
                let some = products(&part(&x)?, &part(&dy)?, &at)?;
                for (all, some) in all[..2].iter().zip(&some) {
                    assert!(bits(&part(all)?) == bits(some), "{count} rows {dtype:?} {layout:?}");
                }
            }
        }
    }
    Ok(())
}

/// The other gradient is the sum of enough rows that a block uses each of its buffers again.
#[test]
fn the_gradient_of_an_expert_without_rows_stays_as_it_was() -> Result<()> {
    let (rows, m, k) = (200, 72, 136);
    for (dtype, _) in DTYPES {
        let (x, dy) = (operand(1, &[rows, k], dtype), operand(2, &[rows, m], dtype));
        let dw = (Tensor::ones((4, m, k), DType::F32, x.device())? * f64::NAN)?;
        dw.slice_set(&Tensor::zeros((1, m, k), DType::F32, x.device())?, 0, 2)?;
        let before = bits(&dw);
        let at = offsets(&[0, 0, rows as u32, 0]);
        let add =
            |dw: &Tensor| grouped_linear_backward_weight(&x, &dy, ExpertLayout::OutIn, &at, dw);
        with_kernels(|| add(&dw))?;
        let after = bits(&dw);
        let size = m * k;
        let untouched = |range: std::ops::Range<usize>| before[range.clone()] == after[range];
        assert!(untouched(0..2 * size) && untouched(3 * size..4 * size));
        let want = Tensor::zeros((4, m, k), DType::F32, x.device())?;
        add(&want)?;
        let [found, want] = [&dw, &want].map(|all| all.narrow(0, 2, 1)?.contiguous());
        assert_close(&format!("{dtype:?}"), &found?, &want?, Tolerance::F32);
    }
    Ok(())
}
