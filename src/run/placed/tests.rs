use super::super::load_model::{OpenModel, trainable};
use super::super::runner::rank_model;
use super::super::{encoder, load_shares::whole_model, loader_options, order, step_runner};
use crate::config::{RunConfig, load};
use crate::data::{DataState, JsonlRows, Loader};
use crate::ops;
use crate::train::Ranks;
use candle_core::{DType, Device, Tensor};
use std::path::Path;
use std::sync::Arc;

/// Whether weights follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Places {
    Placed,
    Apart,
}

/// What a step computes.
struct Outcome {
    loss: f64,
    gradients: Vec<Option<Tensor>>,
    /// Number of matrix products.
    products: usize,
}

/// The first step of a run of the quickstart's model, in which all linear layers of the decoder have
/// whole blocks of a bucket.
fn first_step(settings: &[&str], places: Places) -> Outcome {
    let own = ["device=cpu", "data.packing_length=26"];
    let all = own.iter().chain(settings).map(|setting| (*setting).to_owned());
    let config: RunConfig =
        load(Path::new("configs/quickstart.yaml"), &all.collect::<Vec<_>>()).unwrap();
    let encoder = encoder(&config).unwrap();
    let rows = Arc::new(JsonlRows::open(&config.data.train, encoder.clone()).unwrap());
    let order = order(&config, &rows).unwrap();
    let options = loader_options(&config, &encoder);
    let mut loader = Loader::start(rows, order, options, DataState::default());
    let open = OpenModel::open(&config.model, config.seed, &Device::Cpu).unwrap();
    let groups = open.groups(&config.model.freeze, &config.optim.lr_multipliers).unwrap();
    let model = match places {
        Places::Placed => {
            rank_model(&config, open, &groups, &Ranks::alone(), &Device::Cpu).unwrap()
        }
        Places::Apart => whole_model(open.load(&Device::Cpu).unwrap()),
    };
    let runner = step_runner(&config, model, &groups, None, &Device::Cpu).unwrap();
    let batches = loader.next_step().unwrap().unwrap().micro_batches;
    let before = ops::products_of_this_thread();
    let loss = runner.run(batches, 1e-3, 1).unwrap().loss;
    let products = ops::products_of_this_thread() - before;
    let kinds = trainable(&groups);
    assert_eq!(kinds.len(), runner.params.len());
    let buffers = runner.gradients.buffers();
    let gradients = (0..kinds.len()).map(|index| buffers.get(index).cloned()).collect();
    Outcome { loss, gradients, products }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

/// The largest difference, relative to the largest value.
fn difference(found: &Tensor, want: &Tensor) -> f32 {
    let (found, want) = (values(found), values(want));
    let scale = want.iter().fold(f32::MIN_POSITIVE, |scale, x| scale.max(x.abs()));
    let worst = found.iter().zip(&want).map(|(x, y)| (x - y).abs());
    worst.fold(0.0, f32::max) / scale
}

/// Compares a step with placed weights and one with weights that are apart. Returns how many
/// products fewer it has.
fn fewer_products(settings: &[&str], tolerance: f32) -> usize {
    let (placed, apart) =
        (first_step(settings, Places::Placed), first_step(settings, Places::Apart));
    let relative = (placed.loss - apart.loss).abs() / apart.loss;
    assert!(relative < 1e-6, "{settings:?}: loss {} and {}", placed.loss, apart.loss);
    for (index, (found, want)) in placed.gradients.iter().zip(&apart.gradients).enumerate() {
        assert_eq!(found.is_some(), want.is_some(), "{settings:?}: parameter {index}");
        if let (Some(found), Some(want)) = (found, want) {
            let error = difference(found, want);
            assert!(error <= tolerance, "{settings:?}: gradient {index} differs by {error}");
        }
    }
    apart.products - placed.products
}

/// Number of decoder layers, and of products that a layer saves in each pass if q, k and v are one
/// product, and gate and up are one.
const LAYERS: usize = 4;
const SAVED: usize = 2 + 1;

#[test]
fn a_step_on_a_gpu_has_one_product_for_q_k_v_and_one_for_gate_and_up() {
    let joins = usize::from(ops::joins_products(&Device::Cpu));
    // forward, and the gradients of inputs and weights
    let all = 3 * SAVED * LAYERS * joins;
    assert_eq!(fewer_products(&[], 2e-5), all);
    // with a second forward
    let again = ["model.precision=bf16", "model.recompute=full"];
    assert_eq!(fewer_products(&again, 3e-2), all + SAVED * LAYERS * joins);
}

#[test]
fn a_frozen_layer_of_a_group_is_computed_as_before() {
    let joins = usize::from(ops::joins_products(&Device::Cpu));
    // gate and up only
    let keys = ["model.freeze=['*language_model*.k_proj.weight']"];
    assert_eq!(fewer_products(&keys, 2e-5), 3 * LAYERS * joins);
    // Without gradients of weights, in all layers but the first.
    let layers = ["model.freeze=['model.language_model.layers.[123].*_proj.weight']"];
    assert_eq!(fewer_products(&layers, 2e-5), (3 + 2 * (LAYERS - 1)) * SAVED * joins);
}

#[test]
fn a_step_in_fp8_has_a_product_for_each_layer() {
    assert_eq!(fewer_products(&["model.matmul=fp8"], 2e-5), 0);
}
