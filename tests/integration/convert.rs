//! `trainer convert`: configs of other trainers, written for these tests from the documented keys.

use super::harness::Place;
use serde_json::Value;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use trainer::config::{RunConfig, load, to_yaml};
use trainer::convert::{ConvertError, Trainer};
use trainer::run::{ConvertedConfig, convert_config};

const FIXTURES: &str = "tests/fixtures/convert";

/// Golden outputs: the trainer, the config in its folder, and the result.
/// `trainer convert --from TRAINER [--world-size 8] FILE` makes them again.
const GOLDEN: [(Trainer, &str, &str); 3] = [
    (Trainer::MsSwift, "01-full.sh", "ms-swift.yaml"),
    (Trainer::LlamaFactory, "06-launch.sh", "llama-factory.yaml"),
    (Trainer::LmmsEngine, "01-datasets.yaml", "lmms-engine.yaml"),
];

/// The example configs of a trainer.
fn examples(trainer: Trainer) -> Vec<PathBuf> {
    let folder = Path::new(FIXTURES).join(trainer.name());
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_example = |path: &PathBuf| {
        path.file_name().unwrap().to_str().unwrap().starts_with(|c: char| c.is_ascii_digit())
    };
    let mut found: Vec<PathBuf> = entries.filter(is_example).collect();
    found.sort();
    found
}

/// Writes a file and returns its path.
fn write(place: &Place, name: &str, text: &str) -> PathBuf {
    place.write(name, text);
    place.path(name)
}

/// Scripts say how many processes they start; config files do not.
fn converted(trainer: Trainer, path: &Path) -> Result<ConvertedConfig, ConvertError> {
    let is_script = path.extension().is_some_and(|ending| ending == "sh");
    convert_config(trainer, &[path.to_owned()], NonZeroU64::new(8).filter(|_| !is_script))
}

/// Converts a text and reads the result as JSON.
pub(crate) fn resolved(trainer: Trainer, name: &str, text: &str) -> Result<Value, ConvertError> {
    let place = Place::empty();
    let file = write(&place, name, text);
    let is_script = Path::new(name).extension().is_some_and(|ending| ending == "sh");
    let converted = convert_config(trainer, &[file], NonZeroU64::new(8).filter(|_| !is_script))?;
    let result = write(&place, "ours.yaml", &converted.yaml);
    let config: RunConfig = load(&result, &[]).unwrap();
    Ok(serde_json::to_value(&config).unwrap())
}

pub(crate) fn swift(more: &str) -> Result<Value, ConvertError> {
    let base = "model: Qwen/Qwen3-VL-2B-Instruct\ndataset: a.jsonl\ntuner_type: full\n";
    resolved(Trainer::MsSwift, "a.yaml", &format!("{base}{more}"))
}

fn llama_factory(more: &str) -> Result<Value, ConvertError> {
    let base = "model_name_or_path: Qwen/Qwen3-VL-2B-Instruct\nfinetuning_type: full\n";
    let more =
        if more.contains("dataset:") { more.to_owned() } else { format!("dataset: a\n{more}") };
    resolved(Trainer::LlamaFactory, "a.yaml", &format!("{base}{more}"))
}

pub(crate) fn refusal(result: Result<Value, ConvertError>) -> String {
    match result {
        Err(error @ ConvertError::Refused { .. }) => error.to_string(),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn twenty_configs_of_each_trainer_convert_and_pass_the_config_reader() {
    let place = Place::empty();
    for trainer in Trainer::ALL {
        let examples = examples(trainer);
        assert_eq!(examples.len(), 20, "{}", trainer.name());
        for path in examples {
            let result = converted(trainer, &path);
            let result = result.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let file = write(&place, "config.yaml", &result.yaml);
            let config: RunConfig = load(&file, &[]).unwrap();
            config.check().unwrap();
            assert!(to_yaml(&config).is_ok());
        }
    }
}

/// A token of Qwen2.5-VL and Qwen2-VL has 28 x 28 pixels, one of the others 32 x 32.
#[test]
fn sizes_in_tokens_become_pixels_of_the_models_family() {
    for (model, pixels) in
        [("Qwen3-VL-2B", 1024), ("Qwen3.5-4B", 1024), ("Qwen2.5-VL-3B", 784), ("Qwen2-VL-2B", 784)]
    {
        let script = format!(
            "IMAGE_MIN_TOKEN_NUM=5 VIDEO_MAX_TOKEN_NUM=10 FPS_MAX_FRAMES=6 swift sft --model \
             Qwen/{model}-Instruct --dataset a.jsonl --tuner_type full"
        );
        let config = resolved(Trainer::MsSwift, "a.sh", &script).unwrap();
        assert_eq!(config["data"]["image"]["min_pixels"], 5 * pixels, "{model}");
        assert_eq!(config["data"]["video"]["max_pixels"], 6 * 10 * pixels, "{model}");
    }
}

/// Parts of InternVL3.5 are components, and its frames have no limits of pixels.
#[test]
fn settings_of_internvl_are_those_that_its_runs_accept() {
    for (lines, key, expected) in [
        (
            "finetuning_type: full\nfreeze_multi_modal_projector: true\n",
            "model.freeze",
            "[\"vision\",\"merger\"]",
        ),
        (
            "finetuning_type: lora\nfreeze_vision_tower: false\n",
            "adapter.parts",
            "[\"llm\",\"vision\"]",
        ),
    ] {
        let text = format!(
            "model_name_or_path: ./InternVL3_5-1B-HF\ndataset: a\nstage: sft\nvideo_max_pixels: 65536\n{lines}"
        );
        let config = resolved(Trainer::LlamaFactory, "a.yaml", &text).unwrap();
        let (section, name) = key.split_once('.').unwrap();
        assert_eq!(config[section][name].to_string(), expected, "{key}");
        assert_eq!(config["data"]["video"]["max_pixels"], Value::Null);
        assert!(!config.to_string().contains(".visual."), "{config}");
    }
}

/// The limits of LLaMA-Factory apply before an image is cut into slices, and it has defaults for them.
#[test]
fn settings_of_minicpm_are_those_that_its_runs_accept() {
    let text = "model_name_or_path: openbmb/MiniCPM-V-4.6\ndataset: a\nstage: sft\n\
        finetuning_type: full\nfreeze_multi_modal_projector: true\nvideo_max_pixels: 65536\n\
        video_maxlen: 24\n";
    let config = resolved(Trainer::LlamaFactory, "a.yaml", text).unwrap();
    assert_eq!(config["model"]["freeze"].to_string(), "[\"vision\",\"merger\"]");
    assert_eq!(config["data"]["video"]["max_frames"], 24);
    for (section, key) in
        [("image", "min_pixels"), ("image", "max_pixels"), ("video", "max_pixels")]
    {
        assert_eq!(config["data"][section][key], Value::Null, "{section}.{key}");
    }
}

/// The templates of ms-swift for these models do not read the variables of qwen-vl-utils.
#[test]
fn variables_of_ms_swift_that_a_family_does_not_read_are_left_out() {
    for (model, expected) in [
        ("openbmb/MiniCPM-V-4.6", Value::Null),
        ("OpenGVLab/InternVL3_5-1B-HF", Value::Null),
        ("Qwen/Qwen3-VL-2B-Instruct", 6.into()),
    ] {
        let script = format!(
            "FPS_MIN_FRAMES=6 FPS_MAX_FRAMES=6 FPS=6 IMAGE_MAX_TOKEN_NUM=6 swift sft --model \
             {model} --dataset a.jsonl --tuner_type full"
        );
        let config = resolved(Trainer::MsSwift, "a.sh", &script).unwrap();
        let [image, video] = ["image", "video"].map(|kind| &config["data"][kind]);
        let found = [&video["min_frames"], &video["max_frames"], &image["max_tokens"]];
        assert_eq!(found, [&expected; 3], "{model}");
        assert_eq!(video["fps"].as_f64(), expected.as_f64(), "{model}");
        assert_eq!(image["min_pixels"].is_null(), expected.is_null(), "{model}");
        let place = Place::empty();
        let yaml = converted(Trainer::MsSwift, &write(&place, "a.sh", &script)).unwrap().yaml;
        let is_dropped = yaml.contains("FPS: 6 (a.sh:1): it has no effect on this model");
        assert_eq!(is_dropped, expected.is_null(), "{yaml}");
    }
}

#[test]
fn folders_and_templates_of_other_families_are_accepted_in_every_spelling() {
    for (trainer, text) in [
        (Trainer::MsSwift, "model: OpenGVLab/InternVL3_5-8B-HF\n"),
        (Trainer::MsSwift, "model: ./my_internvl3_5_8b_hf_sft\n"),
        (Trainer::MsSwift, "model: OpenGVLab/InternVL3_5-30B-A3B-HF\n"),
        (Trainer::LlamaFactory, "model_name_or_path: ./internvl3.5-1b-hf\n"),
        (Trainer::MsSwift, "model: openbmb/MiniCPM-V-4.6\n"),
        (Trainer::MsSwift, "model: ./minicpm_v_4_6_sft\n"),
        (Trainer::MsSwift, "model: openbmb/MiniCPM-V-4.7-1B\n"),
        (Trainer::MsSwift, "model: Qwen/Qwen2-VL-2B-Instruct\ntemplate: qwen2_vl\n"),
        (Trainer::MsSwift, "model: ./models/my_qwen2_vl_7b\n"),
        (Trainer::MsSwift, "model: ./models/my_qwen2_5_vl_7b\n"),
        (Trainer::LlamaFactory, "model_name_or_path: ./qwen2vl-7b\ntemplate: qwen2_vl\n"),
    ] {
        let rest = match trainer {
            Trainer::MsSwift => "dataset: a.jsonl\ntuner_type: full\n",
            _ => "dataset: a\nfinetuning_type: full\nstage: sft\n",
        };
        let place = Place::empty();
        place.write("a.yaml", &format!("{text}{rest}"));
        let name = trainer.name();
        let arguments = ["convert", "--from", name, "a.yaml", "--world-size", "1"];
        place.trainer(&arguments).ends_with(0);
    }
}

#[test]
fn the_golden_configs_are_reproduced() {
    for (trainer, name, golden) in GOLDEN {
        let path = Path::new(FIXTURES).join(trainer.name()).join(name);
        let expected = fs::read_to_string(Path::new(FIXTURES).join("golden").join(golden)).unwrap();
        assert_eq!(converted(trainer, &path).unwrap().yaml, expected, "{golden}");
    }
}

#[test]
fn each_line_of_the_result_says_where_it_came_from() {
    for trainer in Trainer::ALL {
        for path in examples(trainer) {
            for line in converted(trainer, &path).unwrap().yaml.lines() {
                let is_section = line.ends_with(':') && !line.starts_with('#');
                assert!(line.is_empty() || is_section || line.contains("# "), "`{line}`");
            }
        }
    }
}

#[test]
fn settings_that_are_left_out_get_the_default_of_the_other_trainer() {
    let swift = swift("").unwrap();
    let factory = llama_factory("").unwrap();
    let engine = resolved(
        Trainer::LmmsEngine,
        "a.yaml",
        "dataset_config: {dataset_path: a.jsonl}\nmodel_config: {load_from_pretrained_path: m}\n",
    );
    let engine = engine.unwrap();
    for (config, key, expected) in [
        (&swift, "/optim/weight_decay", "0.1"),
        (&swift, "/optim/betas", "[0.9,0.95]"),
        (&swift, "/model/precision", "\"bf16\""),
        (&swift, "/model/freeze", "[\"vision\",\"merger\"]"),
        (&swift, "/model/recompute", "\"llm\""),
        (&swift, "/data/image/max_tokens", "16384"),
        (&swift, "/data/image/min_pixels", "4096"),
        (&swift, "/optim/lr", "1e-5"),
        (&swift, "/log/every_steps", "5"),
        (&factory, "/data/max_length", "2048"),
        (&factory, "/data/truncation", "\"right\""),
        (&factory, "/data/image/max_pixels", "589824"),
        (&factory, "/data/video/max_frames", "128"),
        (&factory, "/data/video/max_pixels", "8388608"),
        (&factory, "/optim/lr", "5e-5"),
        (&factory, "/optim/schedule", "\"linear\""),
        (&factory, "/train/batch_size", "8"),
        (&factory, "/model/precision", "\"f32\""),
        (
            &factory,
            "/model/freeze",
            "[\"vision\",\"*.deepstack_merger_list.*\",\"*.visual.merger.*\"]",
        ),
        (&engine, "/data/video/fps", "1.0"),
        (&engine, "/model/freeze", "[]"),
        (&engine, "/model/recompute", "\"none\""),
        (&engine, "/optim/schedule", "\"linear\""),
    ] {
        let found = config.pointer(key).unwrap();
        assert_eq!(*found, serde_json::from_str::<Value>(expected).unwrap(), "{key}");
    }
    for config in [&swift, &factory, &engine] {
        assert_eq!(config["data"]["packing"], false);
        assert_eq!(config["checkpoint"]["every_steps"], 500);
        assert_eq!(config["checkpoint"]["keep"], 1_000_000);
        assert_eq!(config["train"]["epochs"], 3);
    }
}

#[test]
fn a_step_accumulates_what_all_processes_did() {
    let steps = |config: Value| config["train"]["gradient_accumulation_steps"].clone();
    // 8 processes
    assert_eq!(steps(llama_factory("gradient_accumulation_steps: 2").unwrap()), 16);
    // ms-swift reaches at least 16 samples: 3 x 8 in one step, 8 x 1 in two
    assert_eq!(steps(swift("per_device_train_batch_size: 3").unwrap()), 8);
    assert_eq!(steps(swift("").unwrap()), 16);
    // groups of 4 processes share their samples
    let parallel = swift("sequence_parallel_size: 4\ngradient_accumulation_steps: 8");
    assert_eq!(steps(parallel.unwrap()), 16);
    let script = |start: &str| {
        let text = format!(
            "{start} swift sft --model Qwen/Qwen3-VL-2B-Instruct --dataset a.jsonl \
                            --tuner_type full --gradient_accumulation_steps 3"
        );
        steps(resolved(Trainer::MsSwift, "a.sh", &text).unwrap())
    };
    assert_eq!(script(""), 3);
    assert_eq!(script("NPROC_PER_NODE=4"), 12);
    assert_eq!(script("NPROC_PER_NODE=4 NNODES=2"), 24);
    assert_eq!(script("CUDA_VISIBLE_DEVICES=0,1"), 3); // one process with two devices
}

#[test]
fn the_number_of_processes_is_required_if_the_files_do_not_contain_it() {
    let path = Path::new(FIXTURES).join("llama-factory/02-minimal.yaml");
    let message = convert_config(Trainer::LlamaFactory, &[path], None).unwrap_err().to_string();
    assert!(message.contains("`--world-size`") && message.contains("1 setting"), "{message}");
}

#[test]
fn a_kind_of_tuning_that_is_unknown_is_refused() {
    let text = "model_name_or_path: m\ndataset: a\nfinetuning_type: freeze\n";
    let freeze = refusal(resolved(Trainer::LlamaFactory, "a.yaml", text));
    assert!(freeze.contains("`finetuning_type: freeze`"), "{freeze}");
}

#[test]
fn all_refusals_are_listed_at_once_with_exit_code_64() {
    let place = Place::empty();
    let text = "model_name_or_path: Qwen/Qwen-VL-Chat\ndataset: a\nfinetuning_type: full\n\
                learnin_rate: 1e-4\nquantization_bit: 4\nrope_scaling: yarn\nstage: dpo\n";
    place.write("a.yaml", text);
    let arguments = ["convert", "--from", "llama-factory", "a.yaml", "--out", "b.yaml"];
    let output = place.trainer(&arguments).ends_with(64);
    for name in [
        "a.yaml:1: `model_name_or_path: Qwen/Qwen-VL-Chat`",
        "a.yaml:4: `learnin_rate: 1e-4`: no known setting of LLaMA-Factory, did you mean `learning_rate`?",
        "a.yaml:5: `quantization_bit: 4`",
        "a.yaml:6: `rope_scaling: yarn`",
        "a.yaml:7: `stage: dpo`",
        "`--world-size`",
        "6 settings of LLaMA-Factory cannot be converted",
    ] {
        assert!(output.stderr.contains(name), "no `{name}` in:\n{}", output.stderr);
    }
    assert!(!place.path("b.yaml").exists());
}

#[test]
fn the_command_writes_a_config_and_never_replaces_one() {
    let place = Place::empty();
    place.write("a.yaml", "model: Qwen/Qwen3-VL-2B-Instruct\ndataset: a.jsonl\ntuner_type: full\n");
    let arguments = ["convert", "--from", "ms-swift", "a.yaml", "--world-size", "1"];
    let printed = place.trainer(&arguments).ends_with(0).says("dropped: tuner_type: full");
    let to_file = [&arguments[..], &["--out", "b.yaml"]].concat();
    place.trainer(&to_file).ends_with(0).says("wrote b.yaml");
    assert_eq!(fs::read_to_string(place.path("b.yaml")).unwrap(), printed.stdout);
    place.trainer(&to_file).ends_with(64).says("`b.yaml` exists");
}

#[test]
fn rates_by_part_become_multipliers() {
    let rates = "learning_rate: 1e-5\nvit_lr: 2e-6\naligner_lr: 1e-5\n";
    let config = swift(&format!("{rates}freeze_vit: false\nfreeze_aligner: false")).unwrap();
    assert_eq!(config["optim"]["lr_multipliers"].to_string(), r#"{"vision":0.2,"merger":1.0}"#);
    // by default, neither is trained
    assert_eq!(swift(rates).unwrap()["optim"]["lr_multipliers"].to_string(), "{}");
}

#[test]
fn trackers_and_early_stopping_become_keys_of_this_trainer() {
    let config = swift("report_to: [wandb, tensorboard]").unwrap();
    assert_eq!(config["log"]["trackers"].to_string(), r#"["wandb","tensorboard"]"#);
    let config = swift("report_to: all").unwrap(); // those with a package
    assert_eq!(config["log"]["trackers"].to_string(), r#"["tensorboard"]"#);
    let config = swift("report_to: swanlab\nswanlab_project: a b\nrun_name: first").unwrap();
    assert_eq!(config["log"]["trackers"].to_string(), r#"["swanlab"]"#);
    assert_eq!(
        (&config["log"]["project"], &config["log"]["run_name"]),
        (&"a b".into(), &"first".into())
    );
    let config = llama_factory("use_swanlab: true\nswanlab_run_name: one").unwrap();
    assert_eq!(config["log"]["trackers"].to_string(), r#"["swanlab"]"#);
    assert_eq!(config["log"]["run_name"], "one");
    let unknown = refusal(llama_factory("report_to: [wandb, comet_ml]"));
    assert!(unknown.contains("there is no tracker `comet_ml`"), "{unknown}");
    assert_eq!(swift("report_to: none").unwrap()["log"]["trackers"].to_string(), "[]");
    let config = llama_factory("early_stopping_steps: 4").unwrap();
    assert_eq!(config["eval"]["early_stopping"], Value::Null); // no evaluation data
    let config = llama_factory("dataset: a\neval_dataset: b\nearly_stopping_steps: 4").unwrap();
    assert_eq!(config["eval"]["early_stopping"]["patience"], 4);
    let share = refusal(llama_factory("early_stopping_steps: 0.5"));
    assert!(share.contains("a whole number of evaluations"), "{share}");
}

#[test]
fn held_out_rows_and_system_turns_become_keys_of_this_trainer() {
    let config = llama_factory(
        "val_size: 0.1\ndefault_system: Be short.\neval_strategy: steps\neval_steps: 50",
    )
    .unwrap();
    assert_eq!(config["data"]["eval_share"], 0.1);
    assert_eq!(config["data"]["system"], "Be short.");
    assert_eq!(config["eval"]["every_steps"], 50);
    assert_eq!(llama_factory("val_size: 200").unwrap()["data"]["eval_rows"], 200);
    assert_eq!(llama_factory("val_size: 0.0").unwrap()["data"]["eval_share"], Value::Null);
    let refused = refusal(llama_factory("val_size: 1.5"));
    assert!(refused.contains("or a number of rows"), "{refused}");
    let both = refusal(llama_factory("dataset: a\neval_dataset: b\nval_size: 0.1"));
    assert!(both.contains("LLaMA-Factory refuses both"), "{both}");
    let config = swift("split_dataset_ratio: 0.01\nsystem: Be short.").unwrap();
    assert_eq!(config["data"]["eval_share"], 0.01);
    assert_eq!(config["data"]["system"], "Be short.");
    assert!(refusal(swift("system: system.txt")).contains("write the text of the file"));
}

#[test]
fn settings_of_experts_and_templates_of_newer_models_convert() {
    for config in [
        swift("router_aux_loss_coef: 0.001").unwrap(),
        llama_factory("moe_aux_loss_coef: 0.001").unwrap(),
    ] {
        assert_eq!(config["model"]["aux_loss"], 0.001);
    }
    for (template, trains) in [
        ("qwen3_vl", true),
        ("qwen3_5", true),
        ("qwen3_6", true),
        ("qwen3_5_nothink", false),
        ("qwen3_nothink", false),
    ] {
        let config = llama_factory(&format!("template: {template}")).unwrap();
        assert_eq!(config["data"]["train_empty_think"], trains, "{template}");
    }
    assert!(refusal(llama_factory("template: llama3")).contains("`template: llama3`"));
}

#[test]
fn max_steps_overrides_epochs() {
    let config = llama_factory("max_steps: 100\nnum_train_epochs: 2").unwrap();
    assert_eq!(config["train"]["max_steps"], 100);
    assert_eq!(config["train"]["epochs"], Value::Null);
}

#[test]
fn a_share_as_warm_up_steps_is_a_ratio_and_a_constant_rate_has_no_warm_up() {
    let config = llama_factory("warmup_steps: 0.03").unwrap();
    assert_eq!(config["optim"]["warmup_ratio"], 0.03);
    let config = llama_factory("lr_scheduler_type: constant\nwarmup_steps: 10").unwrap();
    assert_eq!(config["optim"]["warmup_steps"], Value::Null);
    let config =
        llama_factory("lr_scheduler_type: constant_with_warmup\nwarmup_steps: 10").unwrap();
    assert_eq!(config["optim"]["warmup_steps"], 10);
}

#[test]
fn a_limit_on_rows_becomes_a_weight_if_the_rows_can_be_counted() {
    let path = Path::new(FIXTURES).join("ms-swift/09-rows.yaml");
    assert!(
        converted(Trainer::MsSwift, &path).unwrap().yaml.contains("weight: 0.4  # 2 of 5 rows")
    );
    let message = refusal(llama_factory("max_samples: 10"));
    assert!(message.contains("cannot be counted"), "{message}");
}

#[test]
fn data_sets_of_llama_factory_keep_their_entry_and_its_faults_are_refused() {
    let folder = format!("dataset_dir: {FIXTURES}/llama-factory/data\n");
    let config = llama_factory(&format!("{folder}dataset: faces, questions")).unwrap();
    let train = &config["data"]["train"];
    let info = format!("{FIXTURES}/llama-factory/data/dataset_info.json");
    assert_eq!(train[0]["dataset_info"], format!("{info}#faces"));
    assert_eq!(train[1]["dataset_info"], format!("{info}#questions"));
    for (name, expected) in
        [("on_a_hub", "hf_hub_url"), ("preferences", "ranking"), ("missing", "no entry `missing`")]
    {
        let message = refusal(llama_factory(&format!("{folder}dataset: {name}")));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn checkpoints_of_each_epoch_become_steps_if_the_rows_can_be_counted() {
    let text = format!(
        "dataset_dir: {FIXTURES}/llama-factory/data\ndataset: questions\n\
                        save_strategy: epoch\nper_device_train_batch_size: 1\npacking: "
    );
    // 4 rows, 8 samples a step
    let config = llama_factory(&format!("{text}false")).unwrap();
    assert_eq!(config["checkpoint"]["every_steps"], 1);
    let message = refusal(llama_factory(&format!("{text}true")));
    assert!(message.contains("`save_strategy: epoch`"), "{message}");
}

#[test]
fn a_text_only_model_gets_no_settings_of_images() {
    let text = "model: Qwen/Qwen3-4B\ndataset: a.jsonl\ntuner_type: full\n";
    let config = resolved(Trainer::MsSwift, "a.yaml", text).unwrap();
    assert_eq!(config["model"]["freeze"], Value::Array(Vec::new()));
    assert_eq!(config["data"]["image"]["max_tokens"], Value::Null);
    assert_eq!(config["data"]["video"]["max_pixels"], Value::Null);
}

#[test]
fn a_value_that_the_script_does_not_contain_is_refused() {
    let text = "swift sft --model $MODEL --dataset a.jsonl --tuner_type full";
    let message = refusal(resolved(Trainer::MsSwift, "a.sh", text));
    assert!(message.contains("`model`") && message.contains("`$MODEL`"), "{message}");
}

#[test]
fn a_stage_of_a_sharded_optimizer_becomes_the_same_division() {
    for (lines, shard, kind) in [
        ("deepspeed: zero1", "optimizer", "adamw"),
        ("deepspeed: zero2", "gradients", "adamw"),
        ("deepspeed: ds_z3_offload.json", "full", "adamw"),
        ("fsdp: full_shard auto_wrap", "full", "adamw"),
        ("fsdp: shard_grad_op", "gradients", "adamw"),
        ("deepspeed: {zero_optimization: {stage: 2}}", "gradients", "adamw"),
        ("fsdp: ''", "none", "adamw"),
        // moments in 8 bits cannot be divided, so the setting is dropped
        ("deepspeed: zero3\noptim: adamw_bnb_8bit", "none", "adamw_8bit"),
        ("optim: adamw_torch_fused", "none", "adamw"),
        ("experts_impl: grouped_mm", "none", "adamw"),
    ] {
        let config = swift(&format!("{lines}\n")).unwrap();
        assert_eq!(config["distributed"]["shard"], shard, "{lines}");
        assert_eq!(config["optim"]["kind"], kind, "{lines}");
    }
    for (line, expected) in [
        ("optim: lion_32bit", "set `optim.kind` to `adamw`"),
        ("packing_strategy: random", "expected `binpack`"),
    ] {
        let message = refusal(swift(&format!("packing: true\nmax_length: 64\n{line}\n")));
        assert!(message.contains(expected), "{line}: {message}");
    }
}

#[test]
fn settings_of_the_trainer_may_stand_at_the_top_of_a_config_of_lmms_engine() {
    let text = "dataset_config: {dataset_path: a.jsonl, dataset_format: jsonl, packing: true,\n  \
                packing_length: 64, extra_kwargs: {packing_kwargs: {open_packs: 8}}}\n\
                model_config: {load_from_pretrained_path: m}\n\
                processor_config: {processor_type: qwen3_vl}\n\
                learning_rate: 2.0e-5\nfsdp2: true\n";
    let config = resolved(Trainer::LmmsEngine, "a.yaml", text).unwrap();
    assert_eq!(config["optim"]["lr"], 2e-5);
    assert_eq!(config["distributed"]["shard"], "full");
    assert_eq!(config["data"]["packing_length"], 64);
}

#[test]
fn an_argument_outside_of_the_command_is_an_error() {
    let command = "swift sft --model m --tuner_type full \\\n  --dataset a.jsonl";
    for end in ["\n", " \\ \n"] {
        let script = format!("set -e\n{command}{end}  --learning_rate 5e-6\n");
        let error = resolved(Trainer::MsSwift, "a.sh", &script).unwrap_err();
        let found = "a.sh:4: `--learning_rate` does not belong to the command";
        assert!(error.to_string().contains(found), "{error}");
    }
}

/// The time of a hostile file grows with its size, not with its square or more.
#[test]
fn the_time_of_a_conversion_is_linear() {
    let seconds = |text: &str, name: &str| {
        let start = std::time::Instant::now();
        refusal(resolved(Trainer::MsSwift, name, text));
        start.elapsed().as_secs_f64()
    };
    let lines =
        |count, line: fn(usize) -> String| (0..count).map(line).collect::<Vec<_>>().concat();
    let unknown = |count| lines(count, |i| format!("unknown{i}: 1\n"));
    let (few, many) = (seconds(&unknown(250), "a.yaml"), seconds(&unknown(2_000), "a.yaml"));
    assert!(many < 24.0 * few.max(0.01), "250 unknown keys: {few} s, 2,000: {many} s");
    let doubled = lines(60, |i| format!("A{}=$A{i}$A{i}\n", i + 1));
    let command = "swift sft --model $A60 --dataset a.jsonl --tuner_type full\n";
    let text = format!("A0=aaaaaaaa\n{doubled}{command}");
    let message = refusal(resolved(Trainer::MsSwift, "a.sh", &text));
    assert!(message.contains("its value `$A"), "{message}");
}

#[test]
fn a_later_file_wins() {
    let place = Place::empty();
    let base = "model: Qwen/Qwen3-VL-2B-Instruct\ndataset: a.jsonl\ntuner_type: full\nseed: 1\n";
    let files = [write(&place, "a.yaml", base), write(&place, "b.yaml", "seed: 2\n")];
    let result = convert_config(Trainer::MsSwift, &files, NonZeroU64::new(1)).unwrap();
    assert!(result.yaml.contains("seed: 2  # seed (b.yaml:1)"), "{}", result.yaml);
}

#[test]
fn config_errors_translate_the_names_of_other_trainers() {
    let base = "output_dir: a\nmodel: {path: m}\ndata: {train: [{path: a.jsonl}]}\n";
    for (line, expected) in [
        ("learning_rate: 1e-5", "unknown key `learning_rate`, here: `optim.lr`"),
        (
            "train: {per_device_train_batch_size: 1}",
            "unknown key `per_device_train_batch_size` in `train`, here: `train.batch_size`",
        ),
        ("cutoff_len: 1", "here: `data.max_length`"),
        ("max_seq_length: 1", "here: `data.max_length`"),
        ("train: {packing: true}", "unknown key `packing` in `train`, here: `data.packing`"),
    ] {
        let place = Place::empty();
        let file = write(&place, "a.yaml", &format!("{base}{line}\n"));
        let error = load::<RunConfig>(&file, &[]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
