//! Compares the adapters of layers with candle's autograd.

use super::super::linear::Linear;
use super::super::{Component, Init, ParamSpec, Stored};
use super::*;
use crate::tape::{Gradients, Trainable};
use candle_core::{Device, Var};

const LAYER: &str = "layer";
const SCALE: f64 = 1.5;

fn random(seed: u64, dims: &[usize]) -> Tensor {
    let count = dims.iter().product::<usize>() as u64;
    let value = |i: u64| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
    Tensor::from_vec((0..count).map(value).collect::<Vec<_>>(), dims, &Device::Cpu).unwrap()
}

/// `W [6, 5]`, `A [2, 5]`, `B [6, 2]`, bias and magnitude `[6]`.
fn tensors(is_dora: bool) -> Vec<(String, Tensor)> {
    let mut all = vec![
        (format!("{LAYER}.weight"), random(1, &[6, 5])),
        (AdapterTensor::A.name(LAYER), random(2, &[2, 5])),
        (AdapterTensor::B.name(LAYER), random(3, &[6, 2])),
        (format!("{LAYER}.bias"), random(4, &[6])),
    ];
    if is_dora {
        all.push((AdapterTensor::Magnitude.name(LAYER), random(5, &[6])));
    }
    all
}

/// The layer with these tensors; with a magnitude if there are five.
fn layer_of(tensors: Vec<(String, Tensor)>, dropout: f64) -> (Vec<Param>, Linear) {
    let is_dora = tensors.len() > 4;
    let params: Vec<Param> =
        (0..).zip(tensors).map(|(index, (name, tensor))| Param::new(name, index, tensor)).collect();
    let component = Component { name: "llm", inputs: Inputs::All };
    let weight = format!("{LAYER}.weight");
    let specs = [ParamSpec {
        name: weight.clone(),
        shape: vec![6, 5],
        component,
        init: Init::Normal,
        stored: Stored::Whole,
    }];
    let name = LAYER.to_owned();
    let module = AdapterModule { name, weight, experts: None, rank: 2, scale: SCALE, is_dora };
    let adapters = Adapters::new(&[module], &specs, dropout, 9);
    let layer = Linear::with_bias(&ParamMap::new(&params, Some(&adapters)), LAYER).unwrap();
    (params, layer)
}

fn first_step() -> DropoutPlace {
    DropoutPlace { step: 1, runs: [(0, 0)].into(), patches: (0, 0) }
}

/// Output and gradients of the parameters and of `x`, computed by the layer.
fn computed(x: &Tensor, dy: &Tensor, tensors: Vec<(String, Tensor)>, dropout: f64) -> Vec<Tensor> {
    let (params, layer) = layer_of(tensors, dropout);
    let trainable = vec![Trainable::Yes; params.len()];
    let grads = Gradients::zeros(&params, &trainable, &Device::Cpu).unwrap();
    let dropout = first_step();
    let pass = Pass { dropout: Some(&dropout), ..Pass::training(&grads) };
    let y = layer.forward_add(x, dy, &pass).unwrap(); // any residual
    let dx = layer.backward(x, dy, &pass).unwrap();
    let more = layer.backward_add(x, dy, dx.copy().unwrap(), &pass).unwrap();
    let (dx_twice, more) = ((&dx * 2.0).unwrap(), more);
    assert_close(&more, &dx_twice, "backward_add");
    // the layer was run backward twice
    let sums = grads.iter().map(|grad| (grad.unwrap() / 2.0).unwrap());
    [vec![y, dx], sums.collect()].concat()
}

/// The same by candle's autograd.
fn expected(x: &Tensor, dy: &Tensor, is_dora: bool, dropout: f64) -> Vec<Tensor> {
    let vars: Vec<Var> = tensors(is_dora)
        .into_iter()
        .map(|(_, tensor)| Var::from_tensor(&tensor).unwrap())
        .collect();
    let x = Var::from_tensor(x).unwrap();
    let layer = DropoutMask::seed_of(LAYER.bytes().map(u64::from));
    let seed = DropoutMask::seed_of([9, 1, u64::from(layer)]);
    let mask = DropoutMask { seed, first_row: 0, probability: dropout };
    let kept = kernels::dropout(&x.ones_like().unwrap(), mask).unwrap();
    let [w, a, b, bias] = [0, 1, 2, 3].map(|index| vars[index].as_tensor());
    let y = || -> Result<Tensor> {
        let dropped = (x.as_tensor() * &kept)?;
        let low_rank = (dropped.matmul(&a.t()?)?.matmul(&b.t()?)? * SCALE)?;
        let mut product = (x.matmul(&w.t()?)? + low_rank)?;
        if let Some(magnitude) = vars.get(4) {
            let sum = (w + (b.matmul(a)? * SCALE)?)?;
            let norm = sum.sqr()?.sum(1)?.sqrt()?.detach();
            product = product.broadcast_mul(&(magnitude.as_tensor() / norm)?)?;
        }
        product.broadcast_add(bias)? + dy
    };
    let y = y().unwrap();
    let store = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let grad = |var: &Var| store.get(var.as_tensor()).unwrap().clone();
    [vec![y, grad(&x)], vars.iter().map(grad).collect()].concat()
}

#[track_caller]
fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let error = (found - expected).unwrap().abs().unwrap().flatten_all().unwrap();
    let error = error.max(0).unwrap().to_scalar::<f32>().unwrap();
    assert!(error < 2e-5, "{what}: {error}");
}

#[test]
fn outputs_and_gradients_of_lora_and_dora_are_those_of_autograd() {
    let (x, dy) = (random(6, &[7, 5]), random(7, &[7, 6]));
    for is_dora in [false, true] {
        for dropout in [0.0, 0.4] {
            let found = computed(&x, &dy, tensors(is_dora), dropout);
            let expected = expected(&x, &dy, is_dora, dropout);
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("dora {is_dora}, dropout {dropout}, result {index}");
                assert_close(found, expected, &what);
            }
        }
    }
}

/// The output is linear in `A` and in `B`, so a large step of the finite difference is exact.
#[test]
fn gradients_of_a_and_b_are_directional_finite_differences() {
    let (x, dy) = (random(6, &[7, 5]), random(7, &[7, 6]));
    for dropout in [0.0, 0.4] {
        let grads = computed(&x, &dy, tensors(false), dropout);
        for (index, dims) in [(1, [2, 5]), (2, [6, 2])] {
            let direction = random(8, &dims);
            let loss = |step: f64| {
                let mut tensors = tensors(false);
                tensors[index].1 = (&tensors[index].1 + (&direction * step).unwrap()).unwrap();
                let (_params, layer) = layer_of(tensors, dropout);
                let place = first_step();
                let pass = Pass { dropout: Some(&place), ..Pass::default() };
                let y = layer.forward_add(&x, &dy, &pass).unwrap().to_dtype(DType::F64).unwrap();
                let loss = (y * dy.to_dtype(DType::F64).unwrap()).unwrap().sum_all().unwrap();
                loss.to_scalar::<f64>().unwrap()
            };
            let difference = loss(0.5) - loss(-0.5);
            let along = (&grads[2 + index] * &direction).unwrap().sum_all().unwrap();
            let along = f64::from(along.to_scalar::<f32>().unwrap());
            let error = (difference - along).abs();
            assert!(error < 1e-5 * along.abs().max(1.0), "{index}: {difference} {along}");
        }
    }
}

/// A row of zeros, such as one of a pruned weight, has the magnitude 0.
#[test]
fn a_row_of_zero_norm_has_finite_outputs_and_gradients() {
    let (x, dy) = (random(6, &[7, 5]), random(7, &[7, 6]));
    let mut tensors = tensors(true);
    let rows = Tensor::new(&[1f32, 1.0, 0.0, 1.0, 1.0, 1.0], &Device::Cpu).unwrap();
    for index in [0, 2, 4] {
        let tensor = &tensors[index].1;
        let rows = if tensor.rank() == 2 { rows.unsqueeze(1).unwrap() } else { rows.clone() };
        tensors[index].1 = tensor.broadcast_mul(&rows).unwrap();
    }
    let found = computed(&x, &dy, tensors.clone(), 0.0);
    for (index, found) in found.iter().enumerate() {
        let values = found.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(values.iter().all(|value| value.is_finite()), "result {index}: {values:?}");
    }
    // The output of the row is the bias and what is added.
    let bias = tensors[3].1.to_vec1::<f32>().unwrap()[2];
    let added = dy.to_vec2::<f32>().unwrap();
    for (row, added) in found[0].to_vec2::<f32>().unwrap().iter().zip(&added) {
        assert_eq!(row[2], bias + added[2]);
    }
}

#[test]
fn names_of_peft_have_a_tensor_and_a_module() {
    for tensor in [AdapterTensor::A, AdapterTensor::B, AdapterTensor::Magnitude] {
        assert_eq!(AdapterTensor::of(&tensor.name("a.b")), Some((tensor, "a.b")));
    }
    assert_eq!(AdapterTensor::of("a.b.weight"), None);
    assert_eq!(AdapterTensor::of(&peft_name("a.norm.weight")), None);
}
