use super::super::params::ParamMap;
use super::*;
use crate::tape::{Gradients, Layout, Param, Trainable};
use candle_core::{DType, Device};
use kernels::Matmul;

const WIDTHS: [usize; 3] = [128, 64, 192];
/// Each weight has a multiple of 4,096 elements.
const INPUTS: usize = 64;
const TOKENS: usize = 19;

fn wave(dims: &[usize], step: f32, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..dims.iter().product()).map(|i| (i as f32 * step).sin()).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn bits(t: &Tensor) -> Vec<u32> {
    let t = t.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
    t.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Fails if an element differs by more than a rounding of the largest: sums of other sizes may be
/// added in another order.
fn assert_close(what: &str, found: &Tensor, want: &Tensor, dtype: DType) {
    let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
    let error = (wide(found) - wide(want)).unwrap().abs().unwrap().max_all().unwrap();
    let largest = wide(want).abs().unwrap().max_all().unwrap();
    let error = (error / largest).unwrap().to_scalar::<f32>().unwrap();
    assert!(error < if dtype == DType::F32 { 1e-6 } else { 1e-2 }, "{what}: {error}");
}

fn params(dtype: DType) -> Vec<Param> {
    let each = WIDTHS.iter().enumerate().map(|(index, width)| {
        let weight = wave(&[*width, INPUTS], 0.3 + index as f32, dtype);
        Param::new(format!("{index}.weight"), index, weight)
    });
    each.collect()
}

/// Moves the weights to one tensor, and returns gradients in another.
fn placed(params: &[Param], trainable: &[Trainable]) -> Gradients {
    let layout = Layout::new(&[params.iter().collect()], params, trainable, 1);
    let stage = &layout.stages()[0];
    for bucket in stage.buckets() {
        let flat = Tensor::zeros(bucket.len(), params[0].dtype(), &Device::Cpu).unwrap();
        for (index, view) in layout.views(bucket, &flat).unwrap() {
            let values = params[index].tensor().flatten_all().unwrap();
            view.flatten_all().unwrap().slice_set(&values, 0, 0).unwrap();
            params[index].set_tensor(view).unwrap();
        }
    }
    let flat = (!stage.trained.is_empty())
        .then(|| Tensor::full(7f32, stage.trained.len(), &Device::Cpu).unwrap());
    Gradients::in_buckets(&layout, &[flat]).unwrap()
}

fn layers(params: &[Param], matmul: Matmul) -> [Linear; 3] {
    let map = ParamMap::new(params, None).with_matmul(matmul);
    [0, 1, 2].map(|index| Linear::without_bias(&map, &index.to_string()).unwrap().of_decoder(&map))
}

/// `dys` in the places of the outputs.
fn in_place_of(ys: &[Tensor; 3], dtype: DType) -> [Tensor; 3] {
    let mut index = 0.0;
    ys.clone().map(|y| {
        index += 1.0;
        let dy = wave(y.dims(), 0.17 * index, dtype);
        kernels::replace_columns(&y, dy).unwrap()
    })
}

#[test]
fn layers_of_one_input_compute_what_each_computes_alone() {
    let joins = kernels::joins_products(&Device::Cpu);
    let (yes, no) = (Trainable::Yes, Trainable::Frozen);
    for dtype in [DType::F32, DType::BF16] {
        for (kinds, is_joined) in
            [([yes; 3], true), ([no; 3], true), ([yes, no, yes], false), ([no, yes, yes], false)]
        {
            let what = format!("{dtype:?} {kinds:?}");
            let (x, params, alone) =
                (wave(&[TOKENS, INPUTS], 0.37, dtype), params(dtype), params(dtype));
            let grads = placed(&params, &kinds);
            let want = Gradients::zeros(&alone, &kinds, &Device::Cpu).unwrap();
            let (layers, alone_layers) =
                (layers(&params, Matmul::Native), layers(&alone, Matmul::Native));
            grads.begin(&params).unwrap();
            want.begin(&alone).unwrap();
            for _ in 0..2 {
                let ys = forward(layers.each_ref(), &x).unwrap();
                assert_eq!(ys.iter().all(|y| !y.is_contiguous()), is_joined && joins, "{what}");
                for (y, layer) in ys.iter().zip(&alone_layers) {
                    assert_close(&what, y, &layer.forward(&x).unwrap(), dtype);
                }
                let dys = in_place_of(&ys, dtype);
                let own = dys.each_ref().map(|dy| dy.force_contiguous().unwrap());
                let dx = backward(layers.each_ref(), &x, dys, &grads).unwrap();
                let [q, k, v] = &alone_layers;
                let [d_q, d_k, d_v] = &own;
                let sum = q.backward(&x, d_q, &want).unwrap();
                let sum = k.backward_add(&x, d_k, sum, &want).unwrap();
                let sum = v.backward_add(&x, d_v, sum, &want).unwrap();
                assert_close(&what, &dx, &sum, dtype);
            }
            grads.end(&params).unwrap();
            for (found, want) in grads.iter().zip(want.iter()) {
                assert_eq!(found.is_some(), want.is_some(), "{what}");
                if let (Some(found), Some(want)) = (found, want) {
                    assert_close(&what, found, want, DType::F32);
                }
            }
        }
    }
}

#[test]
fn layers_in_fp8_are_computed_one_by_one() {
    for matmul in [Matmul::Fp8, Matmul::Fp8All] {
        let (x, params) = (wave(&[TOKENS, INPUTS], 0.37, DType::F32), params(DType::F32));
        let grads = placed(&params, &[Trainable::Yes; 3]);
        let layers = layers(&params, matmul);
        let ys = forward(layers.each_ref(), &x).unwrap();
        for (y, layer) in ys.iter().zip(&layers) {
            assert_eq!(bits(y), bits(&layer.forward(&x).unwrap()), "{matmul:?}");
        }
        grads.begin(&params).unwrap();
        backward_params(layers.each_ref(), &x, ys.each_ref(), &grads).unwrap();
        grads.end(&params).unwrap();
        for (index, (y, layer)) in ys.iter().zip(&layers).enumerate() {
            let alone = Gradients::zeros(&params, &[Trainable::Yes; 3], &Device::Cpu).unwrap();
            layer.backward_params(&x, y, &layer.output_grad(y).unwrap(), &alone).unwrap();
            let [found, want] = [&grads, &alone].map(|grads| bits(grads.get(index).unwrap()));
            assert_eq!(found, want, "{matmul:?}");
        }
    }
}
