//! Tokens that a run adds: as in transformers (`tests/golden/new_tokens.json`, made by
//! `scripts/golden/new_tokens.py`), resumed, on several ranks, in adapters, and refused.

use super::adapter_runs::{losses, results};
use super::harness::{Place, copy_folder, golden, json_lines, tensors, values};
use super::parity::{PLAIN, assert_losses, golden_json, rows_with, runner_of};
use super::ranks::{assert_same, config, place, train};
use candle_core::{DType, Device, safetensors};
use fault::Fault;
use serde_json::{Value, json};
use std::fs;
use trainer::batch::EncodedSample;
use trainer::data::RowReader;
use trainer::run::{OpenModel, Resume, Run, RunOptions};
use trainer::tape::Param;
use trainer::train::{ModelSection, Precision, Weights};

fn strings(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A model of `tests/golden/models` with the tokens of the reference.
fn section(model: &str) -> ModelSection {
    let golden_tokens = golden_json("new_tokens.json");
    ModelSection {
        add_tokens: strings(&golden_tokens["add_tokens"]),
        add_special_tokens: strings(&golden_tokens["add_special_tokens"]),
        ..ModelSection::new(golden("models").join(model))
    }
}

/// The embedding and a head of its own, with the names of the reference.
fn tables(params: &[Param]) -> Vec<(&'static str, &Param)> {
    let name = |param: &Param| match param.name() {
        "lm_head.weight" => Some("head"),
        name if name.ends_with("embed_tokens.weight") => Some("embed"),
        _ => None,
    };
    params.iter().filter_map(|param| Some((name(param)?, param))).collect()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let bound = 1e-5 * expected.iter().fold(0f32, |most, value| most.max(value.abs()));
    let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(off <= bound, "{what}: {off} above {bound}");
}

#[test]
fn rows_ids_losses_and_gradients_of_new_tokens_equal_those_of_transformers() {
    let golden_tokens = golden_json("new_tokens.json");
    let stored = safetensors::load(golden("new_tokens.safetensors"), &Device::Cpu).unwrap();
    for (model, num_tables) in [("small-tied", 1), ("untied", 2)] {
        let expected = &golden_tokens["models"][model];
        let rows = rows_with(&section(model), "new_tokens");
        let samples: Vec<EncodedSample> = rows.rows().map(|row| rows.read(row).unwrap()).collect();
        for (sample, ids) in samples.iter().zip(expected["input_ids"].as_array().unwrap()) {
            assert_eq!(json!(sample.input_ids), *ids, "{model}");
        }
        let mut curve = golden_tokens.clone();
        curve["model"] = json!(model);
        let runner = runner_of(&curve, PLAIN, Precision::F32);
        assert_losses(&rows, &runner, &expected["losses"]);
        let first = expected["first_id"].as_u64().unwrap() as usize;
        let found = tables(&runner.params);
        assert_eq!(found.len(), num_tables);
        let batches = PLAIN.micro_batches(&samples);
        runner.accumulate(runner.prepare(batches).unwrap(), 1).unwrap();
        for (table, param) in found {
            let of = |kind: &str| values(&stored[&format!("{model}/{kind}/{table}")]);
            let weight = param.tensor().unwrap();
            assert_eq!(json!(weight.dim(0).unwrap()), expected["vocab_size"]);
            let rows = weight.narrow(0, first, 8).unwrap();
            assert_close(&values(&rows), &of("rows"), table);
            let gradients = runner.grads().get(param.index()).unwrap();
            let gradients = gradients.reshape(weight.shape()).unwrap().narrow(0, first, 8).unwrap();
            assert_close(&values(&gradients), &of("grad"), table);
            for row in values(&gradients).chunks(weight.dim(1).unwrap()) {
                assert!(row.iter().any(|value| *value != 0.0), "{model} {table}: no gradient");
            }
        }
        for param in &runner.params {
            let gradients = runner.grads().get(param.index()).unwrap();
            let norm = trainer::ops::sum_of_squares(gradients).unwrap().sqrt();
            let expected = expected["grad_norms"][param.name()].as_f64().unwrap_or(0.0);
            let off = (norm - expected).abs();
            assert!(off <= 1e-5 * expected, "{}: {norm} not {expected}", param.name());
        }
    }
}

/// All values of a table, and the number of its rows.
fn table(section: &ModelSection, name: &str) -> (Vec<f32>, usize, Value) {
    let open = OpenModel::open(section, 7, &Device::Cpu).unwrap();
    let config = open.config_json["text_config"]["vocab_size"].clone();
    let loaded = open.load(&Device::Cpu).unwrap();
    let param = loaded.params.iter().find(|param| param.name().ends_with(name)).unwrap();
    let all = 0..param.shape().elem_count();
    let values = values(&loaded.open.master(param, all, &Device::Cpu).unwrap());
    assert_eq!(values, self::values(&param.tensor().unwrap().to_dtype(DType::F32).unwrap()));
    (values, param.shape().dims()[0], config)
}

#[test]
fn free_rows_are_used_first_and_no_other_row_changes() {
    let (width, first) = (128, 2043);
    let plain = ModelSection::new(golden("models/small-tied"));
    let (before, rows, _) = table(&plain, "embed_tokens.weight");
    assert_eq!(rows, 2048);
    let two = ModelSection { add_tokens: vec!["<a>".into(), "<b>".into()], ..plain.clone() };
    let (after, rows, config) = table(&two, "embed_tokens.weight");
    assert_eq!((rows, config), (2048, json!(2048)));
    let new = first * width..(first + 2) * width;
    assert_eq!(after[..new.start], before[..new.start]);
    assert_eq!(after[new.end..], before[new.end..], "free rows that stay free");
    assert!(after[new.clone()].chunks(width).zip(before[new].chunks(width)).all(|(a, b)| a != b));
    let (after, rows, config) = table(&section("small-tied"), "embed_tokens.weight");
    assert_eq!((rows, config), (2051, json!(2051)));
    assert_eq!(after[..first * width], before[..first * width]);
    // drawn at random, the others stay the same as well
    let random = |section: ModelSection| {
        table(&ModelSection { weights: Weights::Random, ..section }, "embed_tokens.weight")
    };
    let ((before, ..), (after, rows, _)) = (random(plain), random(section("small-tied")));
    assert_eq!((rows, &after[..before.len()]), (2051, &before[..]));
    let drawn = &after[before.len()..];
    assert!(drawn.iter().all(|value| *value != 0.0));
}

#[test]
fn with_mean_each_new_row_is_the_mean_of_the_rows_of_all_tokens() {
    let mean = |rows: &[f32]| -> Vec<f32> {
        let column = |at: usize| rows.iter().skip(at).step_by(24).map(|value| f64::from(*value));
        (0..24).map(|at| (column(at).sum::<f64>() / 2043.0) as f32).collect()
    };
    let section = ModelSection {
        new_token_rows: trainer::train::NewTokenRows::Mean,
        ..section("qwen3-text")
    };
    for name in ["embed_tokens.weight", "lm_head.weight"] {
        let (values, rows, _) = table(&section, name);
        assert_eq!(rows, 2051);
        let (old, new) = values.split_at(2043 * 24);
        let expected = mean(old);
        for row in new.chunks(24) {
            assert_close(row, &expected, name);
        }
    }
}

/// Rows with new tokens for the model of [`place`], in front of its other rows.
fn place_of_tokens() -> Place {
    let place = place();
    let rows = fs::read_to_string(golden("data/new_tokens.jsonl")).unwrap();
    let others = String::from_utf8(place.read("rows.jsonl")).unwrap();
    place.write("rows.jsonl", &(rows + &others));
    place
}

const TOKENS: &str = "model.add_tokens=['<box>', 'ünit é', 'hello world', '日本語モデル']";
const SPECIAL: &str =
    "model.add_special_tokens=['<|act_0|>', '<|act_1|>', '<|act_10|>', '<|äct|>']";
const ADAPTER: &str = "adapter={rank: 4, dropout: 0.1, train_also: ['*embed_tokens*']}";

#[test]
fn a_run_continues_equal_to_the_bit_and_on_any_number_of_ranks() {
    let place = place_of_tokens();
    for (name, more) in [("full", ""), ("lora", ADAPTER)] {
        let mut settings = vec![TOKENS, SPECIAL, "train.max_steps=3"];
        settings.extend(Some(more).filter(|more| !more.is_empty()));
        train(&config(&place, name, &settings), 1, None);
        let output = format!("{name}-stopped");
        let stopped = config(&place, &output, &settings);
        train(&stopped, 1, Some(1));
        train(&stopped, 1, None);
        let mut sharded = settings.clone();
        sharded.push("distributed.shard=full");
        let ranks = format!("{name}-ranks");
        train(&config(&place, &ranks, &sharded), 2, None);
        if more.is_empty() {
            assert_same(&place, &output, name);
            assert_same(&place, &ranks, name);
        } else {
            assert_eq!(results(&place, &output), results(&place, name));
            assert_eq!(results(&place, &ranks), results(&place, name));
            assert_eq!(losses(&place, &output), losses(&place, name));
        }
    }
    let other =
        config(&place, "full", &["model.add_tokens=['<box>']", SPECIAL, "train.max_steps=3"]);
    let from = Resume::From(place.path("full/checkpoints/step-00000002"));
    let options = RunOptions { resume: from, ..RunOptions::default() };
    let error = Run::with_options(&other, &options).err().unwrap();
    assert!(error.to_string().contains("`model.add_tokens"), "{error}");
}

#[test]
fn a_trained_folder_has_the_vocabulary_and_is_used_like_any_other() {
    let place = place_of_tokens();
    let settings = [TOKENS, SPECIAL, "train.max_steps=2"];
    train(&config(&place, "run", &settings), 1, None);
    let json = |name: &str| -> Value {
        serde_json::from_slice(&place.read(&format!("run/final/{name}"))).unwrap()
    };
    let (config_json, tokenizer) = (json("config.json"), json("tokenizer.json"));
    let rows = tensors(&place, "run/final/model.safetensors");
    let rows = rows["model.language_model.embed_tokens.weight"].dim(0).unwrap();
    assert_eq!(config_json["text_config"]["vocab_size"], rows);
    let first = 2043;
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let ids: Vec<(u64, &str)> = added
        .iter()
        .map(|token| (token["id"].as_u64().unwrap(), token["content"].as_str().unwrap()))
        .filter(|(id, _)| *id >= first)
        .collect();
    assert_eq!(ids[0], (first, "<box>"));
    assert_eq!(ids[7], (first + 7, "<|äct|>"));
    let decoder = json("tokenizer_config.json")["added_tokens_decoder"].clone();
    assert_eq!(decoder[(first + 7).to_string()]["special"], true);
    assert_eq!(decoder[first.to_string()]["normalized"], true);
    // the same config continues from the folder, which has its tokens already
    let path = place.path("run/final").display().to_string();
    let yaml = place.path("ranks.yaml").display().to_string();
    let model = format!("model.path={path}");
    let mut arguments = vec!["--config", &yaml];
    for setting in [model.as_str(), TOKENS, SPECIAL, "output_dir=next"] {
        arguments.extend(["--set", setting]);
    }
    let check = [&["check"], &arguments[..]].concat();
    place.trainer(&check).ends_with(0);
    let inspect = [&["inspect", "--format", "jsonl", "--num", "40"], &arguments[..]].concat();
    let output = place.trainer(&inspect).ends_with(0).says("already");
    let shown = json_lines(&output.stdout);
    let box_id = json!(first);
    let has_box =
        |row: &Value| row["input_ids"].as_array().is_some_and(|ids| ids.contains(&box_id));
    assert!(shown.iter().any(has_box), "{shown:?}");
    place.trainer(&["export", "--model", &path, "--dtype", "bf16", "--out", "bf16"]).ends_with(0);
    let prompt = "Where? <box>";
    let generate = ["generate", "--prompt", prompt, "--max-new-tokens", "4", "--model"];
    for folder in ["run", "bf16"] {
        place.trainer(&[&generate[..], &[folder]].concat()).ends_with(0);
    }
}

/// Stores the embedding of the model a second time, as its head.
fn with_head(place: &Place) {
    let mut stored = tensors(place, "model/model.safetensors");
    let embedding = stored["model.language_model.embed_tokens.weight"].clone();
    stored.insert("lm_head.weight".to_owned(), embedding);
    candle_core::safetensors::save(&stored, place.path("model/model.safetensors")).unwrap();
}

#[test]
fn an_adapter_stores_the_rows_and_is_merged_with_them() {
    for model in ["small-tied", "untied"] {
        let place = place_of_tokens();
        fs::remove_dir_all(place.path("model")).unwrap();
        copy_folder(&golden("models").join(model), &place.path("model"));
        if model == "small-tied" {
            with_head(&place); // as some published folders have it
        }
        let settings = [TOKENS, SPECIAL, "train.max_steps=2", "data.packing_length=1024"];
        let yaml = place.path("ranks.yaml").display().to_string();
        let tables: &[&str] = match model {
            "untied" => &["model.language_model.embed_tokens", "lm_head"],
            _ => &["model.language_model.embed_tokens"],
        };
        // nothing trains the rows, or only one of the tables
        let embedding = "adapter.train_also=['*embed_tokens*']";
        for adapter in ["adapter={rank: 4}", embedding].into_iter().take(tables.len()) {
            let config = config(&place, "run", &[&settings[..], &[adapter]].concat());
            let error = Run::from_config(&config).err().unwrap();
            assert!(error.to_string().contains("has the rows of new tokens"), "{error}");
            let hint = error.hint().unwrap();
            assert!(tables.iter().all(|name| hint.contains(name)), "{hint}");
        }
        let also = format!("adapter.train_also=['{}.weight']", tables.join(".weight', '"));
        let all = [&settings[..], &["adapter.rank=4", &also]].concat();
        train(&config(&place, "run", &all), 1, None);
        let stored = tensors(&place, "run/final/adapter_model.safetensors");
        let shape = |name: &str| stored[&format!("base_model.model.{name}.weight")].dims().to_vec();
        // PEFT stores a tied head as well
        for name in ["model.language_model.embed_tokens", "lm_head"] {
            assert_eq!(shape(name)[0], 2051, "{model} {name}");
        }
        let merge = ["export", "--adapter", "run/final", "--merge", "--out", "merged"];
        place.trainer(&merge).ends_with(0);
        let merged = tensors(&place, "merged/model.safetensors");
        for name in tables {
            let name = format!("{name}.weight");
            let of_adapter = &stored[&format!("base_model.model.{name}")];
            assert_eq!(values(&merged[&name]), values(of_adapter));
        }
        assert_eq!(merged.contains_key("lm_head.weight"), model == "untied");
        assert_eq!(place.read("merged/tokenizer.json"), place.read("run/final/tokenizer.json"));
        let merge = ["export", "--adapter", "run/final", "--merge", "--gguf", "of_adapter"];
        place.trainer(&merge).ends_with(0);
        place.trainer(&["export", "--model", "merged", "--gguf", "of_model"]).ends_with(0);
        let file = place.read("of_adapter/model-f16.gguf");
        assert!(file.windows(5).any(|bytes| bytes == b"<box>"));
        assert!(file == place.read("of_model/model-f16.gguf"));
        // the adapter's folder alone says which tokens there are
        let rows = place.path("rows.jsonl").display().to_string();
        let data = format!("data.eval=[{{path: {rows}}}]");
        config(&place, "run", &[]);
        let eval = ["eval", "--config", &yaml, "--set", &data, "--set", "data.packing_length=1024"];
        let loss = |more: &[&str]| {
            let output = place.trainer(&[&eval[..], more].concat()).ends_with(0);
            json_lines(&output.stdout)[0]["loss"].as_f64().unwrap()
        };
        let with_adapter = loss(&["--adapter", "run/final"]);
        let merged = loss(&["--checkpoint", "merged"]);
        assert!((with_adapter - merged).abs() < 1e-5, "{with_adapter} {merged}");
        let generate = ["generate", "--prompt", "<box>", "--max-new-tokens", "4", "--model"];
        let answer =
            |folder: &str| place.trainer(&[&generate[..], &[folder]].concat()).ends_with(0).stdout;
        assert_eq!(answer("run"), answer("merged"));
    }
}

#[test]
fn tokens_that_cannot_be_added_are_refused_with_the_key_and_what_to_do() {
    let place = place();
    config(&place, "run", &[]);
    let yaml = place.path("ranks.yaml").display().to_string();
    let refused = |settings: &[&str], problem: &str, hint: &str| {
        let mut arguments = vec!["sft", "--config", &yaml];
        for setting in settings {
            arguments.extend(["--set", setting]);
        }
        place.trainer(&arguments).ends_with(64).says(problem).says(hint);
    };
    refused(&["model.add_tokens=['<a>', the]"], "`model.add_tokens.1` is `the`", "remove it");
    refused(
        &["model.add_tokens=['<|im_end|>']"],
        "which the vocabulary has as a special token with id 2019",
        "choose a text",
    );
    refused(
        &["model.add_special_tokens=['<think>']"],
        "as an added token that is not special",
        "remove it",
    );
    refused(
        &["model.add_tokens=['a<|im_end|>b']"],
        "its parts are found before it",
        "without other tokens",
    );
    refused(
        &["model.add_tokens=['<a>']", "model.freeze=[llm]"],
        "has the rows of new tokens and is not trained",
        "do not freeze",
    );
    refused(&["model.new_token_rows=mean"], "no value without new tokens", "new_token_rows");
    // an added token of the same kind stays as it is
    let same = ["check", "--config", &yaml, "--set", "model.add_tokens=['<think>']"];
    place.trainer(&same).ends_with(0);
}
