use super::super::load_model::trainable;
use super::super::runner::rank_model;
use super::super::{encoder, load_shares::whole_model, loader_options, order, step_runner};
use super::*;
use crate::config::{RunConfig, load};
use crate::data::{DataState, DatasetRows, Loader};
use crate::train::{Ranks, Weights, stored_memory};
use candle_core::{DType, Tensor};
use fault::Fault;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

/// A run on the quickstart's images with frozen layers in all parts of the model.
fn config(settings: &[&str]) -> RunConfig {
    let layers = "'model.language_model.layers.[123].*_proj.weight'";
    let freeze = format!("model.freeze=[merger, '*visual.blocks.*', {layers}]");
    let own = [freeze.as_str(), "device=cpu", "data.packing_length=104"];
    let all = own.iter().chain(settings).map(|setting| (*setting).to_owned());
    load(Path::new("configs/quickstart.yaml"), &all.collect::<Vec<_>>()).unwrap()
}

fn open(config: &RunConfig) -> OpenModel {
    OpenModel::open(&config.model, config.seed, &Device::Cpu).unwrap()
}

fn kinds(config: &RunConfig, open: &OpenModel) -> Vec<Trainable> {
    trainable(&open.groups(&config.model.freeze, &config.optim.lr_multipliers).unwrap())
}

type Loaded = (LoadedModel, Option<StoredWeights>);

fn loaded(config: &RunConfig, storage: WeightStorage) -> Loaded {
    let open = open(config);
    let is_stored = stored_elsewhere(&open, &kinds(config, &open), storage);
    assert_eq!(is_stored.contains(&true), storage != WeightStorage::Device);
    load_stored(open, &is_stored, storage, &Device::Cpu).unwrap()
}

/// Losses of three steps, and all weights afterwards.
fn trained(config: &RunConfig, (loaded, stored): Loaded) -> (Vec<u64>, Vec<Vec<f32>>) {
    let encoder = encoder(config).unwrap();
    let rows = Arc::new(DatasetRows::open(&config.data.train, encoder.clone()).unwrap());
    let order = order(config, &rows).unwrap();
    let options = loader_options(config, &encoder);
    let mut loader = Loader::start(rows, order, options, DataState::default());
    let groups = loaded.open.groups(&config.model.freeze, &config.optim.lr_multipliers).unwrap();
    let runner =
        step_runner(config, whole_model(loaded, stored), &groups, None, &Device::Cpu).unwrap();
    let step = |step| {
        let batches = loader.next_step().unwrap().unwrap().micro_batches;
        runner.run(batches, 1e-3, step).unwrap().loss.to_bits()
    };
    let losses = (1..=3).map(step).collect();
    let weight = |param| values(&runner.weights.saved(param).unwrap());
    (losses, runner.params.iter().map(weight).collect())
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

#[test]
fn weights_that_are_copied_to_slots_train_to_the_same_bits() {
    for recompute in ["none", "full"] {
        for precision in ["f32", "bf16"] {
            let settings = [("recompute", recompute), ("precision", precision)];
            let settings = settings.map(|(key, value)| format!("model.{key}={value}"));
            let config = config(&settings.each_ref().map(String::as_str));
            let train = |storage| trained(&config, loaded(&config, storage));
            assert!(train(WeightStorage::Host) == train(WeightStorage::Device), "{settings:?}");
        }
    }
}

#[test]
fn weights_in_nf4_train_like_tensors_with_their_values() {
    let config = config(&["model.recompute=llm"]);
    let (plain, stored) = loaded(&config, WeightStorage::Device);
    let is_stored = stored_elsewhere(&plain.open, &kinds(&config, &plain.open), WeightStorage::Nf4);
    for param in plain.params.iter().filter(|param| is_stored[param.index()]) {
        let weight = Tensor::zeros(param.shape(), param.dtype(), &Device::Cpu).unwrap();
        plain.open.nf4(param.index()).unwrap().dequantize_into(&weight).unwrap();
        assert_ne!(values(&weight), values(&param.tensor().unwrap()));
        param.set_tensor(weight).unwrap();
    }
    let in_nf4 = trained(&config, loaded(&config, WeightStorage::Nf4));
    assert!(in_nf4 == trained(&config, (plain, stored)));
}

#[test]
fn offloading_changes_neither_the_fingerprint_nor_anything_on_the_cpu() {
    let (kept, offloaded) = (config(&[]), config(&["model.offload=frozen"]));
    assert_eq!(kept.fingerprint(), offloaded.fingerprint());
    assert_eq!(weight_storage(&offloaded, &Device::Cpu), WeightStorage::Device);
}

#[test]
fn all_linear_layers_of_a_frozen_model_are_stored_elsewhere_and_tables_stay() {
    let open = open(&config(&[]));
    let frozen = vec![Trainable::Frozen; open.specs.len()];
    let is_stored = stored_elsewhere(&open, &frozen, WeightStorage::Nf4);
    let kept = open
        .specs
        .iter()
        .zip(&is_stored)
        .filter(|(spec, is_stored)| !**is_stored && spec.shape.len() > 1);
    let kept: Vec<&str> = kept.map(|(spec, _)| spec.name.as_str()).collect();
    let tables = ["visual.patch_embed.proj", "visual.pos_embed", "language_model.embed_tokens"];
    assert_eq!(kept, tables.map(|name| format!("model.{name}.weight")));
}

/// `config.json` of the published model of 8 billion parameters.
const QWEN3_VL_8B: &str = r#"{"model_type": "qwen3_vl", "tie_word_embeddings": false,
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {"model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "hidden_act": "silu",
        "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20],
            "rope_type": "default"}},
    "vision_config": {"model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152,
        "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
        "hidden_act": "gelu_pytorch_tanh"}}"#;

#[test]
fn a_base_of_8_billion_parameters_in_nf4_takes_at_most_7_and_a_half_gb() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = std::fs::File::create(folder.path().join("config.json")).unwrap();
    file.write_all(QWEN3_VL_8B.as_bytes()).unwrap();
    let mut config = config(&["model.precision=bf16"]);
    config.model.path = folder.path().to_owned();
    let open = open(&config);
    let frozen = vec![Trainable::Frozen; open.specs.len()];
    let is_stored = stored_elsewhere(&open, &frozen, WeightStorage::Nf4);
    let model = without_weights(open, &Device::Cpu).unwrap();
    let memory = stored_memory(&model.model.stages(), &is_stored, WeightStorage::Nf4);
    let all: usize = model.params.iter().map(|param| param.shape().elem_count()).sum();
    assert!((8.7e9..8.8e9).contains(&(all as f64)), "{all} parameters");
    let held = memory.of(crate::metrics::Division::alone(all as f64, 0.0, 0.0));
    let bytes = 2.0 * (held.weights + held.weight_slots) + held.stored_bytes;
    assert!((7.0e9..7.5e9).contains(&bytes), "{bytes} bytes: {memory:?}");
}

/// A folder of `model` whose linear layers are stored as bitsandbytes stores them.
fn quantized_folder(model: &LoadedModel, is_stored: &[bool]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let from = Path::new("data/quickstart/model").join(name);
        std::fs::copy(from, folder.path().join(name)).unwrap();
    }
    let golden = candle_core::safetensors::load("tests/golden/nf4.safetensors", &Device::Cpu);
    let golden = golden.unwrap();
    let mut tensors = HashMap::new();
    for param in &model.params {
        let name = param.name();
        if !is_stored[param.index()] {
            tensors.insert(name.to_owned(), param.tensor().unwrap());
            continue;
        }
        let parts = model.open.nf4(param.index()).unwrap().parts().unwrap();
        let json = serde_json::json!({"quant_type": "nf4", "blocksize": 64, "dtype": "float32",
            "shape": parts.shape, "nested_blocksize": 256, "nested_offset": parts.offset});
        let state = json.to_string().into_bytes();
        let mut add = |end: &str, tensor: candle_core::Result<Tensor>| {
            tensors.insert(format!("{name}{end}"), tensor.unwrap());
        };
        let codes = Tensor::new(parts.codes.as_slice(), &Device::Cpu);
        add("", codes.and_then(|codes| codes.unsqueeze(1)));
        add(".absmax", Tensor::new(parts.scales.as_slice(), &Device::Cpu));
        add(".nested_absmax", Tensor::new(parts.ranges.as_slice(), &Device::Cpu));
        add(".quant_state.bitsandbytes__nf4", Tensor::new(state.as_slice(), &Device::Cpu));
        for map in [".quant_map", ".nested_quant_map"] {
            add(map, Ok(golden[&format!("random.weight{map}")].clone()));
        }
    }
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    folder
}

#[test]
fn a_folder_of_bitsandbytes_is_used_as_it_is_and_not_trained_without_an_adapter() {
    let mut config = config(&[]);
    let (plain, _) = loaded(&config, WeightStorage::Device);
    let frozen = vec![Trainable::Frozen; plain.params.len()];
    let is_stored = stored_elsewhere(&plain.open, &frozen, WeightStorage::Nf4);
    let folder = quantized_folder(&plain, &is_stored);
    config.model.path = folder.path().to_owned();
    config.model.weights = Weights::Pretrained;
    let quantized = open(&config);
    for param in plain.params.iter().filter(|param| is_stored[param.index()]) {
        let nf4 = |open: &OpenModel| open.nf4(param.index()).unwrap().parts().unwrap();
        assert_eq!(nf4(&quantized), nf4(&plain.open), "{}", param.name());
    }
    let groups = quantized.groups(&[], &config.optim.lr_multipliers).unwrap();
    let model = rank_model(&config, quantized, &groups, &Ranks::alone(), &Device::Cpu);
    let error = model.err().unwrap();
    assert!(error.to_string().contains("stored in 4 bits, which cannot be trained"), "{error}");
    let RunError::Setup(error) = error else { panic!("{error}") };
    assert!(error.hint().unwrap().contains("`adapter: {quantize: nf4}`"));
}
