//! Runs with an adapter: in every layout, on any number of ranks, resumed, merged, and with bad
//! input.

use super::harness::{Place, golden, some_of};
use super::ranks::{config, place, train};
use serde_json::Value;
use std::fs;

/// Adapters in all parts, with dropout.
const ALL: &str = "adapter={rank: 4, dropout: 0.2, parts: [llm, vision, merger], \
                   train_also: ['*.visual.merger.norm.weight']}";
const DORA: &str = "adapter={kind: dora, rank: 4, dropout: 0.2, parts: [llm, vision, merger]}";

/// Weights of the adapter and state of its optimizer after the last step.
pub(super) fn results(place: &Place, output: &str) -> [Vec<u8>; 2] {
    let names = place.names(&format!("{output}/checkpoints"));
    let last = names.last().unwrap();
    [
        place.read(&format!("{output}/final/adapter_model.safetensors")),
        place.read(&format!("{output}/checkpoints/{last}/optimizer.safetensors")),
    ]
}

pub(super) fn losses(place: &Place, output: &str) -> Vec<f64> {
    let rows = place.rows(&format!("{output}/metrics.jsonl"));
    rows.iter()
        .filter(|row| row["grad_norm"].is_f64())
        .map(|row| row["loss"].as_f64().unwrap())
        .collect()
}

#[test]
fn ranks_shares_and_recomputation_change_no_bit_of_an_adapter_with_dropout() {
    let place = place();
    for (kind, adapter) in [("lora", ALL), ("dora", DORA)] {
        train(&config(&place, kind, &[adapter]), 1, None);
        for (world, shard, recompute) in [
            (1, "none", "full"),
            (2, "none", "none"),
            (4, "gradients", "none"),
            (2, "full", "full"),
        ] {
            let output = format!("{kind}-{world}-{shard}-{recompute}");
            let shard = format!("distributed.shard={shard}");
            let recompute = format!("model.recompute={recompute}");
            train(&config(&place, &output, &[adapter, &shard, &recompute]), world, None);
            assert!(results(&place, &output) == results(&place, kind), "{output} differs");
        }
        let plain = format!("{kind}-plain");
        train(&config(&place, &plain, &[adapter, "adapter.dropout=0"]), 1, None);
        // in the first step, `B` is zero
        assert_ne!(losses(&place, &plain)[1], losses(&place, kind)[1], "dropout has an effect");
    }
}

#[test]
fn the_division_of_a_step_into_micro_batches_drops_the_same_inputs() {
    const UNPADDED: &str = "model.use_rmpad=true";
    let place = place();
    let run = |output: &str, batch_size: &str, steps: &str, padding: &str| {
        let order = ["data.packing=false", "data.shuffle=false", "train.max_steps=3"];
        let more = [&order[..], &[ALL, "data.eval=[]", batch_size, steps, padding]].concat();
        train(&config(&place, output, &more), 1, None);
        losses(&place, output)
    };
    let whole = run("whole", "train.batch_size=4", "train.gradient_accumulation_steps=1", UNPADDED);
    let same = |split: &[f64]| {
        assert_eq!(whole.len(), split.len());
        for (whole, split) in whole.iter().zip(split) {
            assert!((whole - split).abs() < 1e-5, "{whole} {split}");
        }
    };
    same(&run("split", "train.batch_size=1", "train.gradient_accumulation_steps=4", UNPADDED));
    for (output, batch_size, steps) in [("padded", 4, 1), ("padded-pairs", 2, 2)] {
        let batch_size = format!("train.batch_size={batch_size}");
        let steps = format!("train.gradient_accumulation_steps={steps}");
        same(&run(output, &batch_size, &steps, "model.use_rmpad=false"));
    }
}

/// Stops runs with these settings after each step, and compares the resumed runs with an
/// uninterrupted one.
fn continues_equal_to_the_bit(name: &str, settings: &[&str]) {
    let place = place();
    let name = |end: &str| format!("{name}-{end}");
    train(&config(&place, &name("whole"), settings), 1, None);
    let whole = (results(&place, &name("whole")), losses(&place, &name("whole")));
    assert!(whole.1.len() > 3, "{:?}", whole.1);
    for stop in some_of(&(1..whole.1.len() as u64).collect::<Vec<_>>()) {
        let output = name(&stop.to_string());
        let config = config(&place, &output, settings);
        train(&config, 1, Some(stop));
        train(&config, 1, None);
        assert!(results(&place, &output) == whole.0, "{output} differs");
        assert_eq!(losses(&place, &output), whole.1);
    }
}

#[test]
fn a_run_of_an_adapter_continues_equal_to_the_bit_after_every_step() {
    for precision in ["f32", "bf16"] {
        let of_model = format!("model.precision={precision}");
        continues_equal_to_the_bit(&format!("lora-{precision}"), &[ALL, &of_model]);
    }
}

#[test]
fn a_run_with_magnitudes_continues_equal_to_the_bit_after_every_step() {
    continues_equal_to_the_bit("dora", &[DORA]);
}

#[test]
fn a_run_with_quantised_weights_continues_equal_to_the_bit_after_every_step() {
    continues_equal_to_the_bit("nf4", &[ALL, "adapter.quantize=nf4"]);
}

/// LoRA+: a higher learning rate of `B`.
#[test]
fn a_higher_learning_rate_of_b_changes_b_first() {
    let place = place();
    let plus = r#"optim.lr_multipliers={"*lora_B*": 16}"#;
    for (output, more) in [("plain", vec![ALL]), ("plus", vec![ALL, plus])] {
        train(&config(&place, output, &[&more[..], &["optim.lr=1.0e-3"]].concat()), 1, None);
    }
    let (plain, plus) = (losses(&place, "plain"), losses(&place, "plus"));
    // `B` is zero in the first step, so its rate has no effect on the loss of this step.
    assert_eq!(plain[0], plus[0]);
    assert_ne!(plain[1], plus[1]);
    assert!(plus.last().unwrap() < plain.last().unwrap(), "{plain:?} {plus:?}");
}

#[test]
fn checkpoints_contain_the_adapter_and_what_is_trained_besides_it_only() {
    let place = place();
    train(&config(&place, "run", &[ALL, "train.max_steps=2"]), 1, None);
    let last = place.names("run/checkpoints").pop().unwrap();
    let names = place.names(&format!("run/checkpoints/{last}"));
    assert!(
        !names.iter().any(|name| name.starts_with("model") || name == "config.json"),
        "{names:?}"
    );
    let header = place.read("run/final/adapter_model.safetensors");
    let length = u64::from_le_bytes(header[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&header[8..8 + length]).unwrap();
    let names: Vec<&String> = header.as_object().unwrap().keys().collect();
    let also = "base_model.model.model.visual.merger.norm";
    let others: Vec<_> = names
        .iter()
        .filter(|name| !name.contains(".lora_A.") && !name.contains(".lora_B."))
        .map(|name| name.as_str())
        .collect();
    assert_eq!(others, ["__metadata__", &format!("{also}.weight"), &format!("{also}.bias")]);
    let config: Value =
        serde_json::from_slice(&place.read("run/final/adapter_config.json")).unwrap();
    assert_eq!(config["modules_to_save"], serde_json::json!(["model.visual.merger.norm"]));
    assert_eq!(config["base_model_name_or_path"], place.path("model").display().to_string());
}

/// The loss of `data.eval` under some arguments.
pub(super) fn eval(place: &Place, arguments: &[&str]) -> f64 {
    let config = place.path("ranks.yaml").display().to_string();
    let all = [&["eval", "--config", &config], arguments].concat();
    let output = place.trainer(&all).ends_with(0);
    serde_json::from_str::<Value>(&output.stdout).unwrap()["loss"].as_f64().unwrap()
}

#[test]
fn a_merged_model_computes_what_model_and_adapter_compute() {
    let place = place();
    for (name, adapter) in [("lora", ALL), ("dora", DORA)] {
        let config = config(&place, name, &[adapter, "optim.lr=2.0e-2"]);
        train(&config, 1, None);
        let (adapter, merged) = (format!("{name}/final"), format!("{name}-merged"));
        let arguments = ["export", "--adapter", &adapter, "--merge", "--out", &merged];
        let report = place.trainer(&arguments).ends_with(0).stdout;
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["merged"], 26, "{report}");
        assert_eq!(report["replaced"], if name == "lora" { 2 } else { 0 }, "{report}");
        let with_adapter = eval(&place, &["--adapter", &adapter]);
        let inside = eval(&place, &["--checkpoint", &merged]);
        assert!((with_adapter - inside).abs() < 1e-5, "{name}: {with_adapter} {inside}");
        let alone = eval(&place, &[]);
        assert!((with_adapter - alone).abs() > 1e-3, "{name}: the adapter has an effect");
        let evals = place.rows(&format!("{name}/eval.jsonl"));
        let last = evals.last().unwrap();
        assert!((with_adapter - last["loss"].as_f64().unwrap()).abs() < 1e-6, "{last}");
        // a second run starts where the first ended
        let start =
            format!("adapter={{dropout: 0, start_from: {}}}", place.path(&adapter).display());
        let next = format!("{name}-next");
        train(
            &super::ranks::config(&place, &next, &[&start, "train.max_steps=1", "optim.lr=0"]),
            1,
            None,
        );
        let evals = place.rows(&format!("{next}/eval.jsonl"));
        let last = evals.last().unwrap();
        assert!((with_adapter - last["loss"].as_f64().unwrap()).abs() < 1e-6, "{last}");
    }
}

#[test]
fn export_writes_clean_folders_and_changes_the_dtype() {
    let place = place();
    train(&config(&place, "run", &["train.max_steps=1"]), 1, None);
    let last = format!("run/checkpoints/{}", place.names("run/checkpoints").pop().unwrap());
    place.trainer(&["export", "--model", &last, "--out", "clean"]).ends_with(0);
    let names = place.names("clean");
    for name in ["optimizer.safetensors", "trainer_state.json", "manifest.json"] {
        assert!(!names.iter().any(|found| found == name), "{names:?}");
    }
    config(&place, "other", &[]);
    let (before, after) =
        (eval(&place, &["--checkpoint", &last]), eval(&place, &["--checkpoint", "clean"]));
    assert_eq!(before, after);
    place.trainer(&["export", "--model", "clean", "--out", "half", "--dtype", "bf16"]).ends_with(0);
    let bytes = |folder: &str| {
        fs::metadata(place.path(&format!("{folder}/model.safetensors"))).unwrap().len()
    };
    assert!(bytes("half") < bytes("clean") * 11 / 20);
    let config: Value = serde_json::from_slice(&place.read("half/config.json")).unwrap();
    assert!(config.to_string().contains("bfloat16"), "{config}");
    place.trainer(&["export", "--model", "clean", "--out", "half"]).ends_with(64).says("exists");
}

#[test]
fn bad_input_is_refused_with_the_key_and_what_to_do() {
    let place = place();
    config(&place, "run", &[]);
    let yaml = place.path("ranks.yaml").display().to_string();
    let refused = |setting: &str, problem: &str, hint: &str| {
        let arguments = ["sft", "--config", &yaml, "--set", setting];
        place.trainer(&arguments).ends_with(64).says(problem).says(hint);
    };
    refused(
        "adapter={rank: 0}",
        "`adapter.rank` is `0`",
        "hint: change the value, or pass `--set adapter.rank=..`",
    );
    refused("adapter={alpha: 0}", "`adapter.alpha` is `0`", "a usual value");
    refused("adapter={dropout: 1}", "`adapter.dropout` is `1`", "`docs/config.md` has its default");
    refused("adapter={parts: [projector]}", "`projector` is not a component", "`llm`");
    refused("adapter={target: [q_prj]}", "`q_prj` matches no linear layer", "q_proj");
    refused("adapter={target: ['*embed_tokens']}", "matches no linear layer", "embeddings");
    refused(
        "adapter={parts: [vision], target: ['*patch_embed.proj']}",
        "no linear layer",
        "convolutions",
    );
    refused("adapter={train_also: ['*.q_proj.weight']}", "which has an adapter", "one of");
    refused(
        "adapter={target: ['[']}",
        "`adapter.target`: `[` is not a valid glob",
        "matches any text",
    );
    refused("adapter={target: []}", "no layer would receive an adapter", "all-linear");
    refused("adapter={quantize: int4}", "unknown value `int4`", "valid values: `none`, `nf4`");
    let arguments =
        ["sft", "--config", &yaml, "--set", "adapter={}", "--set", "model.freeze=[vision]"];
    place.trainer(&arguments).ends_with(64).says("`model.freeze`").says("adapter.parts");
    place.trainer(&["export", "--model", "model", "--dtype", "nf4", "--out", "four"]).ends_with(0);
    let base = "model.path=four";
    place
        .trainer(&["sft", "--config", &yaml, "--set", base])
        .ends_with(64)
        .says("`model.path`")
        .says("stored in 4 bits")
        .says("`adapter: {quantize: nf4}`");
    let nothing = "adapter={start_from: /no/such/folder}";
    place
        .trainer(&["sft", "--config", &yaml, "--set", nothing])
        .ends_with(65)
        .says("adapter_config.json");
}

#[test]
fn an_adapter_of_another_model_is_refused() {
    let place = place();
    train(&config(&place, "run", &["adapter={}", "train.max_steps=1"]), 1, None);
    // the same shapes with other values
    let model = "--set=model.weights=random";
    let yaml = place.path("ranks.yaml").display().to_string();
    let eval = ["eval", "--config", &yaml, model, "--adapter", "run/final"];
    place.trainer(&eval).ends_with(64).says("whose weights differ").says("wrong answers");
    // other shapes
    let other = golden("models/small-tied").join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(other).unwrap()).unwrap();
    json["text_config"]["intermediate_size"] = 64.into();
    place.write("model/config.json", &json.to_string());
    fs::remove_file(place.path("run/final/trainer_state.json")).unwrap();
    place.trainer(&eval).ends_with(64).says("has shape").says("trained on");
}

/// Every value of the model below an adapter belongs to what the adapter was trained on.
#[test]
fn a_model_that_changed_below_its_adapter_is_refused_by_every_command() {
    let place = place();
    let settings = ["adapter={rank: 2}", "train.max_steps=2", "data.eval=[]"];
    train(&config(&place, "run", &settings), 1, None);
    train(&config(&place, "cut", &settings), 1, Some(1));
    let yaml = place.path("ranks.yaml").display().to_string();
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    let output = format!("output_dir={}", place.path("cut").display());
    let sft: Vec<&str> = ["sft", "--config", &yaml].into_iter().chain(sets).collect();
    let sft = [&sft[..], &["--set", &output]].concat();
    let commands = [
        &["eval", "--config", &yaml, "--adapter", "run/final"][..],
        &["generate", "--model", "run/final", "--prompt", "x", "--max-new-tokens", "1"],
        &["export", "--adapter", "run/final", "--merge", "--out", "merged"],
        &sft,
    ];
    let json = String::from_utf8(place.read("model/config.json")).unwrap();
    let weights = place.read("model/model.safetensors");
    let number = |key: &str, value: f64| {
        let mut config: Value = serde_json::from_str(&json).unwrap();
        config["text_config"][key] = value.into();
        config.to_string()
    };
    // one bit in the middle of a tensor, where no sample of its values is
    let mut flipped = weights.clone();
    let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize + 8;
    let info: Value = serde_json::from_slice(&weights[8..header]).unwrap();
    let layer = "model.language_model.layers.0.mlp.up_proj.weight";
    let start = info[layer]["data_offsets"][0].as_u64().unwrap() as usize;
    flipped[header + start + 400] ^= 1;
    for (config, weights, problem) in [
        (&number("rope_theta", 100.0), &weights, "`config.json` differs from that"),
        (&number("rms_norm_eps", 0.1), &weights, "`config.json` differs from that"),
        (&json, &flipped, "weights differ from those"),
    ] {
        place.write("model/config.json", config);
        super::harness::write(&place.path("model/model.safetensors"), weights);
        for command in commands {
            place.trainer(command).ends_with(64).says(problem).says("wrong answers");
        }
    }
    place.write("model/config.json", &json);
    super::harness::write(&place.path("model/model.safetensors"), &weights);
    // what the adapter's folder has a copy of: another token, prompt or resolution
    for (name, [from, to], what) in [
        ("chat_template.jinja", ["", "{# other #}"], "chat template"),
        ("preprocessor_config.json", ["{", "{\"max_pixels\": 8192, "], "processor of images"),
        (
            "tokenizer_config.json",
            ["{", "{\"sep_token\": \"<|im_end|>\", "],
            "tokenizer_config.json",
        ),
    ] {
        let file = format!("model/{name}");
        let text = String::from_utf8(place.read(&file)).unwrap();
        place.write(&file, &text.replacen(from, to, 1));
        // a resumed run compares what it reads from these files
        for command in &commands[..3] {
            place.trainer(command).ends_with(64).says(&format!("whose {what} differs from that"));
        }
        place.write(&file, &text);
    }
    place.write("model/video_preprocessor_config.json", "{\"fps\": 4}");
    place.trainer(commands[2]).ends_with(64).says("whose processor of videos differs from that");
    fs::remove_file(place.path("model/video_preprocessor_config.json")).unwrap();
    // the same values in files that were written again, and names without a meaning
    let mut same: Value = serde_json::from_str(&json).unwrap();
    for key in ["_name_or_path", "dtype", "torch_dtype", "transformers_version"] {
        same[key] = "bfloat16".into();
    }
    place.write("model/config.json", &same.to_string());
    super::harness::write(&place.path("model/model.safetensors"), &weights);
    for command in commands {
        place.trainer(command).ends_with(0);
    }
}

#[test]
fn a_folder_of_peft_that_contradicts_itself_or_means_something_else_is_refused() {
    let place = place();
    train(&config(&place, "run", &["adapter={rank: 2}", "train.max_steps=1"]), 1, None);
    let yaml = place.path("ranks.yaml").display().to_string();
    let json = String::from_utf8(place.read("run/final/adapter_config.json")).unwrap();
    let start = format!("adapter={{start_from: {}}}", place.path("run/final").display());
    let commands = [
        &["eval", "--config", &yaml, "--adapter", "run/final"][..],
        &["generate", "--model", "run/final", "--prompt", "x"],
        &["export", "--adapter", "run/final", "--merge", "--out", "merged"],
        &["sft", "--config", &yaml, "--set", &start],
    ];
    for (field, value, problem) in [
        ("r", "4", "has rank 2, but `r` and `rank_pattern` of adapter_config.json give 4"),
        ("rank_pattern", "{\"q_proj\": 1}", "q_proj.lora_A.weight` has rank 2, but `r`"),
        ("target_modules", "[\"q_proj\"]", "that `target_modules` of adapter_config.json does not"),
        ("alora_invocation_tokens", "[5]", "`alora_invocation_tokens`"),
        ("alpha_pattern", "{\"q_proj(\": 1}", "`alpha_pattern`"),
    ] {
        let mut config: Value = serde_json::from_str(&json).unwrap();
        config[field] = serde_json::from_str(value).unwrap();
        place.write("run/final/adapter_config.json", &config.to_string());
        for command in commands {
            place.trainer(command).ends_with(64).says(problem);
        }
    }
    place.write("run/final/adapter_config.json", &json);
    fs::rename(
        place.path("run/final/adapter_model.safetensors"),
        place.path("run/final/adapter_model.bin"),
    )
    .unwrap();
    place.trainer(commands[0]).says("is a file of `torch.save`").says("safe_serialization=True");
}
