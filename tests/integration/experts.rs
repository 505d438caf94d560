//! Models with experts: agreement with transformers, files, ranks, resume, presets. `laws` compares
//! their gradients with an oracle in `f64`.
//!
//! The expected values are in `tests/golden/experts.json`, made by `scripts/golden/experts.py`.

use super::harness::{Place, bits, copy_folder, finish, golden, tensors, values};
use super::parity::{
    PLAIN, Variant, assert_all_variants_follow, assert_follows, assert_gradient_norms,
    assert_per_sample_losses, golden_json, rows_for, runner_of,
};
use super::ranks::{config, place, train};
use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use trainer::train::{Precision, RecomputeChoice, TrainOutcome};

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
fn qwen35_with_a_shared_expert_follows_the_reference_in_every_layout() {
    for name in ["text_moe-qwen35", "image_exact_moe-qwen35"] {
        assert_all_variants_follow(&curve(name));
    }
}

/// The loss of the curve is without the auxiliary loss, which changes the gradients.
#[test]
fn the_auxiliary_loss_is_that_of_the_whole_step_in_any_division() {
    let golden = curve("image_exact_moe-vl_aux");
    let numbers = |key: &str| -> Vec<f64> {
        golden[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let [aux, load, idle] = ["aux_loss", "expert_load", "experts_idle"].map(numbers);
    for variant in [
        PLAIN,
        Variant { samples_a_row: 8, recompute: RecomputeChoice::Full, ..PLAIN },
        Variant { micro_batches: 4, ..PLAIN },
        Variant { micro_batches: 8, recompute: RecomputeChoice::Full, ..PLAIN },
    ] {
        for (step, outcome) in assert_follows(&golden, variant).iter().enumerate() {
            let choices = outcome.choices.as_ref().unwrap();
            let off = (choices.aux_loss().unwrap() - aux[step]).abs();
            assert!(off < 1e-4, "{variant:?}, step {}: {off}", step + 1);
            let found = (choices.load(), choices.idle());
            assert_eq!(found, (load[step], idle[step]), "{variant:?}, step {}", step + 1);
        }
    }
}

#[test]
fn losses_of_single_samples_equal_the_references() {
    for (name, entry) in golden_json("experts.json")["losses"].as_object().unwrap() {
        assert_per_sample_losses(name, entry);
    }
}

#[test]
fn gradient_norms_of_every_parameter_and_expert_equal_the_references() {
    for name in ["text_moe-vl", "image_exact_moe-vl", "text_moe-text", "text_moe-qwen35"] {
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
    let start: BTreeMap<String, Tensor> =
        safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect();
    for (name, tensor) in start {
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
pub(super) fn place_with(model: &str) -> Place {
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
    assert!(outcomes.iter().all(|end| matches!(end, TrainOutcome::Finished { .. })), "{name}");
    tensors(place, &format!("{name}/final/model.safetensors"))
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
        assert!(matches!(stopped[0], TrainOutcome::Stopped { .. }), "{stopped:?}");
        run("parts", 2, None);
        let [whole, parts] = ["whole", "parts"]
            .map(|run| tensors(&place, &format!("{run}/final/model.safetensors")));
        assert!(bits(&parts) == bits(&whole), "{model}, {settings:?}");
    }
}

#[test]
fn ranks_know_the_auxiliary_loss_and_the_load_of_the_whole_step() {
    let place = place_with(VL);
    for shard in ["none", "full"] {
        let shard = format!("distributed.shard={shard}");
        let settings = ["model.aux_loss=0.1", &shard];
        let alone = trained(&place, &format!("alone-{shard}"), 1, &settings);
        for world in [2, 4] {
            let name = format!("{world}-{shard}");
            assert!(bits(&trained(&place, &name, world, &settings)) == bits(&alone), "{name}");
            let rows = |name: &str| place.rows(&format!("{name}/metrics.jsonl"));
            for (found, expected) in rows(&name).iter().zip(&rows(&format!("alone-{shard}"))) {
                for key in ["aux_loss", "expert_load", "experts_idle"] {
                    assert!(found[key].is_f64(), "{key}");
                    assert_eq!(found[key], expected[key], "{name}, {key}");
                }
            }
        }
    }
    let without = trained(&place, "without", 1, &[]);
    let with = tensors(&place, "alone-distributed.shard=none/final/model.safetensors");
    assert!(bits(&with) != bits(&without));
    assert!(place.rows("without/metrics.jsonl")[0].get("aux_loss").is_none());
    let recomputed = trained(&place, "recomputed", 1, &["model.recompute=full"]);
    assert!(bits(&recomputed) == bits(&without));
    let load = |run: &str| place.rows(&format!("{run}/metrics.jsonl"))[2]["expert_load"].clone();
    assert_eq!(load("recomputed"), load("without"), "each token counts once");
}

#[test]
fn settings_that_do_not_fit_the_model_are_refused_by_every_command() {
    let place = place_with(VL);
    config(&place, "run", &[]);
    let dense = golden("models/small-tied").display().to_string();
    for (device, setting, text) in [
        ("cpu", format!("model={{path: {dense}, aux_loss: 0.1}}"), "the model has no experts"),
        ("cpu", "model.aux_loss=-1".to_owned(), "model.aux_loss"),
    ] {
        let device = format!("device={device}");
        for command in ["sft", "check", "plan"] {
            let settings = ["--set", device.as_str(), "--set", setting.as_str()];
            let arguments = [&[command, "--config", "ranks.yaml"], &settings[..]].concat();
            let output = place.trainer(&arguments);
            assert!(output.code != 0, "{command} {setting}");
            if command == "sft" && device.ends_with("cuda:0") {
                continue; // this build may have no GPU
            }
            let said = format!("{}{}", output.stdout, output.stderr);
            assert!(said.contains(text), "{command}: {said}");
        }
    }
    let plan = ["plan", "--config", "ranks.yaml", "--set", "device=cuda:0", "--memory", "1TiB"];
    place.trainer(&plan).ends_with(0);
}

#[test]
fn the_small_preset_trains_and_says_how_many_parameters_compute_a_token() {
    let place = place();
    place.trainer(&["init", "--preset", "tiny-moe", "--out", "moe"]).ends_with(0);
    config(&place, "run", &[]);
    let with = |command: &str| {
        let settings =
            ["model={path: moe}", "data.eval=[]", "train.epochs=null", "train.max_steps=2"];
        let settings = settings.iter().flat_map(|setting| ["--set", setting]);
        let arguments: Vec<&str> =
            [command, "--config", "ranks.yaml"].into_iter().chain(settings).collect();
        place.trainer(&arguments).ends_with(0)
    };
    let planned = with("plan").stdout;
    assert!(planned.contains(" for each token, float32"), "{planned}");
    let checked = with("check");
    let checked = checked.stdout + &checked.stderr;
    assert!(checked.contains("of them compute a token"), "{checked}");
    with("sft");
    let generate =
        ["generate", "--model", "run/final", "--prompt", "Hello", "--max-new-tokens", "4"];
    place.trainer(&generate).ends_with(0);
}

#[test]
fn an_adapter_leaves_out_the_experts_and_says_so() {
    let place = place_with(VL);
    config(&place, "run", &[]);
    let run = |output: &'static str, more: &[&'static str]| {
        place.trainer(&sft(output, &[&["train.max_steps=1"], more].concat()))
    };
    let adapter = "adapter={rank: 2, train_also: ['*.mlp.gate.weight']}";
    run("output_dir=adapter", &[adapter]).ends_with(0).says("leaves out the experts");
    let saved = tensors(&place, "adapter/final/adapter_model.safetensors");
    assert!(saved.keys().any(|name| name.ends_with(".mlp.gate.weight")), "{:?}", saved.keys());
    assert!(!saved.keys().any(|name| name.contains("experts")));
    let merge =
        ["export", "--model", "model", "--adapter", "adapter/final", "--merge", "--out", "merged"];
    place.trainer(&merge).ends_with(0);
    let (start, merged) =
        (tensors(&place, "model/model.safetensors"), tensors(&place, "merged/model.safetensors"));
    let (start, merged) = (bits(&start), bits(&merged));
    assert_eq!(start.keys().collect::<Vec<_>>(), merged.keys().collect::<Vec<_>>());
    for (name, values) in &merged {
        let changes = name.ends_with(".mlp.gate.weight")
            || name.contains("language_model") && name.contains("_proj.weight");
        assert_eq!(*values != start[name], changes, "{name}");
    }
    let output = run("output_dir=refused", &["adapter={train_also: ['*.mlp.experts.*']}"]);
    let text = "cannot have whole experts";
    assert!(output.code != 0 && output.stderr.contains(text), "{output:?}");
}

#[test]
fn answers_of_a_model_with_experts_do_not_depend_on_the_group() {
    let place = place_with(VL);
    config(&place, "run", &[]);
    let answers = |batch: &str| {
        let settings =
            ["eval.generate={max_new_tokens: 6}", &format!("eval.generate.batch={batch}")];
        let mut arguments =
            vec!["eval", "--config", "ranks.yaml", "--answers", "--per-sample", batch];
        arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        place.trainer(&arguments).ends_with(0);
        let answers = place.rows(batch).into_iter().map(|row| row["answered"].to_string());
        answers.collect::<Vec<_>>()
    };
    let one = answers("1");
    assert!(one.len() >= 4 && one.iter().all(|answer| answer.starts_with('"')), "{one:?}");
    assert_eq!(one, answers("4"));
}

#[test]
fn verify_passes_with_experts() {
    let place = place_with(VL);
    config(&place, "run", &[]);
    let output = place.trainer(&["verify", "--config", "ranks.yaml"]);
    assert_eq!(output.code, 0, "{output:?}");
    let text = output.stdout + &output.stderr;
    assert!(text.contains("the loss jumps where a token changes its experts"), "{text}");
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
