//! Models with experts: agreement with transformers, files, ranks, resume, presets. `laws` compares
//! their gradients with an oracle in `f64`.
//!
//! The expected values are in `tests/golden/experts.json`, made by `scripts/golden/experts.py`.

use super::harness::{Place, copy_folder, finish, golden};
use super::parity::{
    PLAIN, assert_all_variants_follow, assert_gradient_norms, assert_per_sample_losses,
    golden_json, rows_for, runner_of,
};
use super::ranks::{config, place, train};
use candle_core::{DType, Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use trainer::train::{Outcome, Precision};

const VL: &str = "moe-vl";
const TEXT: &str = "moe-text";

fn curve(name: &str) -> Value {
    golden_json("experts.json")["curves"][name].clone()
}

#[test]
fn text_with_experts_follows_the_reference_in_every_layout() {
    assert_all_variants_follow(&curve("text_moe-vl"));
}

#[test]
fn images_with_experts_follow_the_reference_in_every_layout() {
    assert_all_variants_follow(&curve("image_exact_moe-vl"));
}

#[test]
fn a_text_only_model_with_experts_follows_the_reference_in_every_layout() {
    assert_all_variants_follow(&curve("text_moe-text"));
}

#[test]
fn losses_of_single_samples_equal_the_references() {
    for (name, entry) in golden_json("experts.json")["losses"].as_object().unwrap() {
        assert_per_sample_losses(name, entry);
    }
}

#[test]
fn gradient_norms_of_every_parameter_and_expert_equal_the_references() {
    for name in ["text_moe-vl", "image_exact_moe-vl", "text_moe-text"] {
        let golden = curve(name);
        let (model, data) = (golden["model"].as_str().unwrap(), golden["data"].as_str().unwrap());
        let rows = rows_for(model, data.trim_end_matches(".jsonl"));
        let runner = runner_of(&golden, PLAIN, Precision::F32);
        assert_gradient_norms(&rows, &runner, &golden["grad_norms_step1"]);
        let mut compared = 0;
        for (param, expected) in golden["gradients"].as_object().unwrap() {
            let found = runner.params.iter().find(|of| of.name() == param).unwrap();
            let grads = runner.grads().get(found.index()).unwrap();
            for (expert, expected) in expected.as_array().unwrap().iter().enumerate() {
                let squares = grads.get(expert).unwrap().sqr().unwrap().sum_all().unwrap();
                let found = f64::from(squares.to_scalar::<f32>().unwrap()).sqrt();
                let expected = expected.as_f64().unwrap();
                let off = (found - expected).abs();
                assert!(off <= 1e-3 * expected + 1e-7, "{param} {expert}: {found} not {expected}");
                compared += 1;
            }
        }
        assert!(compared >= 24, "{compared}");
    }
}

/// The tensors of a folder with experts as `[E, D, 2I]` in another layout.
fn relaid(layout: &str) -> HashMap<String, Tensor> {
    let file = golden("models/moe-vl/model.safetensors");
    let mut tensors = HashMap::new();
    for (name, tensor) in safetensors::load(file, &Device::Cpu).unwrap() {
        let is_experts = name.contains(".mlp.experts.");
        if layout == "in_out" || !is_experts {
            tensors.insert(name, tensor);
            continue;
        }
        let out_in = tensor.transpose(1, 2).unwrap().contiguous().unwrap();
        if layout == "out_in" {
            tensors.insert(name, out_in);
            continue;
        }
        let (module, part) = name.rsplit_once('.').unwrap();
        let parts: &[&str] =
            if part == "gate_up_proj" { &["gate_proj", "up_proj"] } else { &["down_proj"] };
        for expert in 0..out_in.dim(0).unwrap() {
            let matrix = out_in.get(expert).unwrap();
            for (at, part) in parts.iter().enumerate() {
                let rows = matrix.dim(0).unwrap() / parts.len();
                let piece = matrix.narrow(0, at * rows, rows).unwrap().contiguous().unwrap();
                tensors.insert(format!("{module}.{expert}.{part}.weight"), piece);
            }
        }
    }
    tensors
}

/// A folder with rows and one of the models.
fn place_with(model: &str) -> Place {
    let place = place();
    std::fs::remove_dir_all(place.path("model")).unwrap();
    copy_folder(&golden("models").join(model), &place.path("model"));
    place
}

/// Steps over rows of text and images.
const SETTINGS: [&str; 7] = [
    "train.epochs=null",
    "train.max_steps=3",
    "train.gradient_accumulation_steps=4",
    "checkpoint.every_steps=0",
    "data.eval=[]",
    "eval.every_steps=0",
    "data.packing_length=256",
];

fn trained(place: &Place, name: &str, world: usize, settings: &[&str]) -> HashMap<String, Tensor> {
    let settings = [&SETTINGS[..], settings].concat();
    let outcomes = train(&config(place, name, &settings), world, None);
    assert!(outcomes.iter().all(|end| matches!(end, Outcome::Finished { .. })), "{name}");
    tensors(place, &format!("{name}/final/model.safetensors"))
}

fn tensors(place: &Place, file: &str) -> HashMap<String, Tensor> {
    safetensors::load(place.path(file), &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Dtype and bits of each tensor.
fn bits(tensors: &HashMap<String, Tensor>) -> BTreeMap<&str, (DType, Vec<u32>)> {
    let bits = |tensor: &Tensor| values(tensor).into_iter().map(f32::to_bits).collect();
    tensors.iter().map(|(name, tensor)| (name.as_str(), (tensor.dtype(), bits(tensor)))).collect()
}

#[test]
fn each_layout_of_experts_is_read_and_saved_as_it_was() {
    let place = place_with(VL);
    let mut results = Vec::new();
    for layout in ["in_out", "out_in", "separate"] {
        let start = relaid(layout);
        safetensors::save(&start, place.path("model/model.safetensors")).unwrap();
        let found = trained(&place, layout, 1, &[]);
        let shapes = |tensors: &HashMap<String, Tensor>| -> BTreeMap<String, Vec<usize>> {
            tensors.iter().map(|(name, of)| (name.clone(), of.dims().to_vec())).collect()
        };
        assert_eq!(shapes(&found), shapes(&start), "{layout}");
        // an export of one that was trained has the same tensors
        let (from, to) = (format!("{layout}/final"), format!("{layout}-export"));
        place.trainer(&["export", "--model", &from, "--out", &to]).ends_with(0);
        let exported = tensors(&place, &format!("{to}/model.safetensors"));
        assert_eq!(bits(&exported), bits(&found), "{layout}");
        safetensors::save(&found, place.path("model/model.safetensors")).unwrap();
        let again = trained(&place, &format!("{layout}-again"), 1, &["optim.lr=0.0"]);
        assert_eq!(bits(&again), bits(&found), "{layout}");
        results.push(found);
    }
    let experts = "model.language_model.layers.2.mlp.experts";
    let down = |results: &HashMap<String, Tensor>| results[&format!("{experts}.down_proj")].clone();
    let (in_out, out_in) = (down(&results[0]), down(&results[1]));
    let (found, expected) = (values(&in_out.transpose(1, 2).unwrap()), values(&out_in));
    let worst = found.iter().zip(&expected).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-4, "{worst}");
    // in memory, one tensor for each expert is the second layout
    for expert in 0..8 {
        let separate = values(&results[2][&format!("{experts}.{expert}.down_proj.weight")]);
        assert_eq!(separate, values(&out_in.get(expert).unwrap()), "{expert}");
    }
}

#[test]
fn a_missing_or_wrong_tensor_of_an_expert_is_named() {
    let place = place_with(VL);
    config(&place, "run", &[]);
    let run = |tensors: &HashMap<String, Tensor>, name: &str| {
        safetensors::save(tensors, place.path("model/model.safetensors")).unwrap();
        let output = place.trainer(&sft("output_dir=run", &[]));
        assert!(output.code != 0 && output.stderr.contains(name), "{output:?}");
    };
    let mut separate = relaid("separate");
    let name = "model.language_model.layers.2.mlp.experts.5.up_proj.weight";
    let tensor = separate.remove(name).unwrap();
    run(&separate, name);
    separate.insert(name.to_owned(), tensor.narrow(0, 0, 3).unwrap().contiguous().unwrap());
    run(&separate, name);
    let mut fused = relaid("in_out");
    let name = "model.language_model.layers.0.mlp.experts.down_proj";
    fused.insert(name.to_owned(), fused[name].narrow(1, 0, 3).unwrap().contiguous().unwrap());
    run(&fused, name);
}

#[test]
fn ranks_and_shards_train_the_weights_of_one_rank() {
    for model in [VL, TEXT] {
        let place = place_with(model);
        for (at, settings) in [
            vec![],
            vec!["model.precision=bf16", "optim.master=none", "optim.kind=adamw_8bit"],
            vec!["model.freeze=['*.mlp.experts.*']"],
        ]
        .into_iter()
        .enumerate()
        {
            let alone = trained(&place, &format!("alone-{at}"), 1, &settings);
            for (world, shard) in [(2, "none"), (4, "none"), (2, "gradients"), (4, "full")] {
                let shard = format!("distributed.shard={shard}");
                let settings = [&settings[..], &[&shard]].concat();
                let name = format!("{world}-{at}-{shard}");
                let found = trained(&place, &name, world, &settings);
                assert!(bits(&found) == bits(&alone), "{model}, {world} ranks, {settings:?}");
            }
        }
    }
}

#[test]
fn a_run_that_was_stopped_continues_to_the_same_bits() {
    for (model, settings) in [
        (VL, &["optim.kind=muon"][..]),
        (TEXT, &["model.precision=bf16", "model.recompute=full"]),
        (TEXT, &["optim.kind=adafactor", "optim.lr=1.0e-2"]),
    ] {
        let place = place_with(model);
        let settings = [&SETTINGS[..6], settings, &["data.eval=[]", "train.max_steps=4"]].concat();
        let run = |name: &str, world, stop| train(&config(&place, name, &settings), world, stop);
        run("whole", 1, None);
        let stopped = run("parts", 1, Some(2));
        assert!(matches!(stopped[0], Outcome::Stopped { .. }), "{stopped:?}");
        run("parts", 2, None);
        let [whole, parts] = ["whole", "parts"]
            .map(|run| tensors(&place, &format!("{run}/final/model.safetensors")));
        assert!(bits(&parts) == bits(&whole), "{model}, {settings:?}");
    }
}

/// Arguments of a short run.
fn sft<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["sft", "--config", "ranks.yaml", "--set", output];
    arguments.extend(SETTINGS.iter().chain(more).flat_map(|setting| ["--set", setting]));
    arguments
}

#[test]
fn threads_change_no_bit() {
    let place = place_with(VL);
    config(&place, "run", &[]);
    for threads in ["1", "3"] {
        let output = format!("output_dir={threads}");
        let mut command = place.command(&sft(&output, &[]));
        finish(command.env("RAYON_NUM_THREADS", threads)).ends_with(0);
    }
    let [one, three] = ["1", "3"].map(|run| place.read(&format!("{run}/final/model.safetensors")));
    assert!(one == three);
}

#[test]
fn globs_train_the_router_alone_or_the_experts_alone() {
    let place = place_with(VL);
    let start = tensors(&place, "model/model.safetensors");
    let changed = |name: &str, settings: &[&str]| -> Vec<String> {
        let (found, start) = (trained(&place, name, 1, settings), bits(&start));
        let found = bits(&found);
        let mut changed: Vec<String> = found
            .iter()
            .filter(|(name, values)| **values != start[**name])
            .map(|(name, _)| (*name).to_owned())
            .collect();
        changed.sort();
        changed
    };
    let is_router = |name: &String| name.ends_with(".mlp.gate.weight");
    let is_expert = |name: &String| name.contains(".mlp.experts.");
    let all = changed("all", &[]);
    assert_eq!(all.iter().filter(|name| is_router(name)).count(), 2);
    assert_eq!(all.iter().filter(|name| is_expert(name)).count(), 4);
    let found = changed("no-router", &["model.freeze=['*.mlp.gate.weight']"]);
    assert_eq!(found, all.iter().filter(|name| !is_router(name)).cloned().collect::<Vec<_>>());
    let found = changed("no-experts", &["model.freeze=['*.mlp.experts.*']"]);
    assert_eq!(found, all.iter().filter(|name| !is_expert(name)).cloned().collect::<Vec<_>>());
    let slow = "optim.lr_multipliers={'*': 0.0, '*.mlp.gate.weight': 1.0}";
    assert_eq!(
        changed("router", &[slow]),
        all.iter().filter(|n| is_router(n)).cloned().collect::<Vec<_>>()
    );
}
