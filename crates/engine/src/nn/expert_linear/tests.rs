//! Compares the adapters of experts with candle's autograd and with differences of outputs.

use super::super::adapter::AdapterModule;
use super::*;
use crate::tape::{Gradients, Trainable};
use candle_core::{Device, Var};

const NAME: &str = "layer.mlp.experts.down_proj";
const MODULE: &str = "layer.mlp.experts";
const SCALE: f64 = 1.5;
const E: usize = 4;
const M: usize = 6;
const K: usize = 5;
const R: usize = 2;
/// Expert 1 has no row.
const OFFSETS: [u32; E + 1] = [0, 3, 3, 4, 9];

fn random(seed: u64, dims: &[usize]) -> Tensor {
    let count = dims.iter().product::<usize>() as u64;
    let value = |i: u64| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
    Tensor::from_vec((0..count).map(value).collect::<Vec<_>>(), dims, &Device::Cpu).unwrap()
}

/// `W`, `A` and `B`.
fn tensors(layout: ExpertLayout) -> [Tensor; 3] {
    let w = random(1, &[E, M, K]);
    let w = match layout {
        ExpertLayout::OutIn => w,
        ExpertLayout::InOut => w.transpose(1, 2).unwrap().contiguous().unwrap(),
    };
    [w, random(2, &[E * R, K]), random(3, &[M, E * R])]
}

fn layer_of(tensors: &[Tensor; 3], layout: ExpertLayout) -> (Vec<Param>, ExpertLinear) {
    let names = [NAME.to_owned(), AdapterTensor::A.name(MODULE), AdapterTensor::B.name(MODULE)];
    let params: Vec<Param> = (0..)
        .zip(names.into_iter().zip(tensors))
        .map(|(index, (name, tensor))| Param::new(name, index, tensor.clone()))
        .collect();
    let module = AdapterModule {
        name: MODULE.to_owned(),
        weight: NAME.to_owned(),
        experts: Some(layout),
        rank: R,
        scale: SCALE,
        is_dora: false,
    };
    let adapters = Adapters::new(&[module], &[], 0.0, 0);
    let layer = ExpertLinear::new(&ParamMap::new(&params, Some(&adapters)), NAME, layout).unwrap();
    (params, layer)
}

fn offsets() -> Tensor {
    Tensor::new(&OFFSETS, &Device::Cpu).unwrap()
}

/// Output and gradients of `x`, `W`, `A` and `B`, computed by the layer.
fn computed(x: &Tensor, dy: &Tensor, tensors: &[Tensor; 3], layout: ExpertLayout) -> Vec<Tensor> {
    let (params, layer) = layer_of(tensors, layout);
    let trainable = vec![Trainable::Yes; params.len()];
    let grads = Gradients::zeros(&params, &trainable, &Device::Cpu).unwrap();
    let offsets = offsets();
    let pass = Pass::training(&grads);
    let y = layer.forward(x, &offsets, &pass).unwrap();
    for _ in 0..2 {
        let du = layer.rank_grad(dy, &offsets, &pass).unwrap();
        layer.backward_params(x, dy, &du, &offsets, &pass).unwrap();
    }
    let du = layer.rank_grad(dy, &offsets, &pass).unwrap();
    let dx = layer.backward_input(dy, &du, &offsets, &pass).unwrap();
    // the gradients were added twice
    let sums = grads.iter().map(|grad| (grad.unwrap() / 2.0).unwrap());
    [vec![y, dx], sums.collect()].concat()
}

/// The same by candle's autograd, with the weights `W_e + scale B_e A_e`.
fn expected(x: &Tensor, dy: &Tensor, tensors: &[Tensor; 3], layout: ExpertLayout) -> Vec<Tensor> {
    let var = |tensor: &Tensor| Var::from_tensor(tensor).unwrap();
    let (x, [w, a, b]) = (var(x), tensors.each_ref().map(var));
    let rows = |expert: usize| -> Result<Tensor> {
        let (first, end) = (OFFSETS[expert] as usize, OFFSETS[expert + 1] as usize);
        let w_e = w.get(expert)?;
        let w_e = if layout == ExpertLayout::InOut { w_e.t()? } else { w_e };
        let a_e = a.narrow(0, expert * R, R)?;
        let columns = (0..R).map(|k| b.narrow(1, k * E + expert, 1)).collect::<Result<Vec<_>>>()?;
        let sum = (w_e + (Tensor::cat(&columns, 1)?.matmul(&a_e)? * SCALE)?)?;
        x.narrow(0, first, end - first)?.matmul(&sum.t()?)
    };
    let with_rows = [0, 2, 3].map(|expert| rows(expert).unwrap());
    let y = Tensor::cat(&with_rows, 0).unwrap();
    let store = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let grad = |var: &Var| store.get(var.as_tensor()).unwrap().clone();
    [vec![y], [&x, &w, &a, &b].map(grad).to_vec()].concat()
}

fn largest(tensor: &Tensor) -> f32 {
    tensor.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

#[test]
fn outputs_and_gradients_are_those_of_autograd_in_both_layouts() {
    let (x, dy) = (random(6, &[9, K]), random(7, &[9, M]));
    for layout in [ExpertLayout::OutIn, ExpertLayout::InOut] {
        let tensors = tensors(layout);
        let found = computed(&x, &dy, &tensors, layout);
        let expected = expected(&x, &dy, &tensors, layout);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.dims(), expected.dims(), "{layout:?}, {index}");
            let error = largest(&(found - expected).unwrap());
            assert!(error < 2e-5, "{layout:?}, {index}: {error}");
        }
    }
}

/// The output is linear in `A` and in `B`, so a large step of the finite difference is exact.
#[test]
fn gradients_of_a_and_b_of_each_expert_are_finite_differences() {
    let layout = ExpertLayout::OutIn;
    let (x, dy) = (random(6, &[9, K]), random(7, &[9, M]));
    let grads = computed(&x, &dy, &tensors(layout), layout);
    for expert in 0..E {
        for (index, is_a) in [(1, true), (2, false)] {
            let belongs = |row: usize, column: usize| {
                if is_a { row / R == expert } else { column % E == expert }
            };
            let dims = tensors(layout)[index].dims2().unwrap();
            let own = |at: usize| f32::from(belongs(at / dims.1, at % dims.1));
            let mask = (0..dims.0 * dims.1).map(own).collect::<Vec<_>>();
            let mask = Tensor::from_vec(mask, dims, &Device::Cpu).unwrap();
            let direction = (random(8, &[dims.0, dims.1]) * mask).unwrap();
            let loss = |step: f64| {
                let mut tensors = tensors(layout);
                tensors[index] = (&tensors[index] + (&direction * step).unwrap()).unwrap();
                let (_params, layer) = layer_of(&tensors, layout);
                let y = layer
                    .forward(&x, &offsets(), &Pass::default())
                    .unwrap()
                    .to_dtype(DType::F64)
                    .unwrap();
                let loss = (y * dy.to_dtype(DType::F64).unwrap()).unwrap().sum_all().unwrap();
                loss.to_scalar::<f64>().unwrap()
            };
            let difference = loss(0.5) - loss(-0.5);
            let along = (&grads[2 + index] * &direction).unwrap().sum_all().unwrap();
            let along = f64::from(along.to_scalar::<f32>().unwrap());
            let error = (difference - along).abs();
            assert!(error < 1e-5 * along.abs().max(1.0), "{expert}, {index}: {difference} {along}");
            assert_eq!(along == 0.0, expert == 1, "{expert}, {index}");
        }
    }
}

#[test]
fn bf16_has_the_values_of_f32_rounded() {
    let (x, dy) = (random(6, &[9, K]), random(7, &[9, M]));
    let layout = ExpertLayout::InOut;
    let narrow = |tensor: &Tensor| tensor.to_dtype(DType::BF16).unwrap();
    let wide = |tensor: &Tensor| narrow(tensor).to_dtype(DType::F32).unwrap();
    let all = tensors(layout);
    let found = computed(&narrow(&x), &narrow(&dy), &all.each_ref().map(narrow), layout);
    let expected = computed(&wide(&x), &wide(&dy), &all.each_ref().map(wide), layout);
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let off = largest(&(found.to_dtype(DType::F32).unwrap() - expected).unwrap());
        assert!(off < 0.02 * largest(expected), "{index}: {off}");
    }
}
