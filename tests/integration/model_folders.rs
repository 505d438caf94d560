//! Model folders whose files contradict each other: every command gives the same answer.

use super::harness::{Place, binary, bits, copy_folder, finish, golden, tensors};
use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

const ROW: &str =
    r#"{"messages":[{"role":"user","content":"What?"},{"role":"assistant","content":"A cat."}]}"#;

/// A place with a copy of a golden model in `model`, a config and a row.
fn place(model: &str) -> Place {
    let place = Place::empty();
    copy_folder(&golden("models").join(model), &place.path("model"));
    place.write("rows.jsonl", ROW);
    place.write(
        "c.yaml",
        "output_dir: run\nmodel: {path: model}\ntrain: {max_steps: 1}\n\
         data: {train: [{path: rows.jsonl}], eval: [{path: rows.jsonl}]}\n",
    );
    place
}

/// Each command that reads a model folder.
const COMMANDS: [&[&str]; 8] = [
    &["check", "--config", "c.yaml"],
    &["sft", "--config", "c.yaml"],
    &["inspect", "--config", "c.yaml"],
    &["cache", "--config", "c.yaml"],
    &["eval", "--config", "c.yaml", "--checkpoint", "model"],
    &["generate", "--model", "model", "--prompt", "a", "--max-new-tokens", "1"],
    &["export", "--model", "model", "--out", "out"],
    &["bench", "--data", "--config", "c.yaml"],
];

fn change(place: &Place, file: &str, change: impl FnOnce(&mut Value)) {
    let path = format!("model/{file}");
    let mut json = serde_json::from_slice(&place.read(&path)).unwrap();
    change(&mut json);
    place.write(&path, &json.to_string());
}

fn changed_weights(place: &Place, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let mut weights = tensors(place, "model/model.safetensors");
    change(&mut weights);
    safetensors::save(&weights, place.path("model/model.safetensors")).unwrap();
}

const EMBEDDING: &str = "model.language_model.embed_tokens.weight";

/// What is changed in a copy of the model, and the parts of the message.
type Case = (&'static str, fn(&Place), &'static [&'static str]);

const CASES: [Case; 25] = [
    (
        "small-tied",
        |place| {
            changed_weights(place, |weights| {
                let head = (weights[EMBEDDING].clone() * -1.0).unwrap();
                weights.insert("lm_head.weight".to_owned(), head);
            });
        },
        &["`lm_head.weight` differs from the embedding", "`tie_word_embeddings: true`", "hint: "],
    ),
    (
        "small-tied",
        |place| {
            changed_weights(place, |weights| {
                let part = weights[EMBEDDING].narrow(0, 0, 8).unwrap();
                weights.insert("lm_head.weight".to_owned(), part);
            });
        },
        &["`lm_head.weight` differs from the embedding"],
    ),
    (
        "small-tied",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                json["added_tokens_decoder"]["2043"] = json!({"content": "<|loc|>"});
            });
        },
        &[
            "tokenizer_config.json has the added token `<|loc|>` with id 2043, and tokenizer.json has not",
            "hint: ",
        ],
    ),
    (
        "small-tied",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                let tokens = json["added_tokens_decoder"].as_object_mut().unwrap();
                let token = tokens.remove("2042").unwrap();
                tokens.insert("2041".to_owned(), token);
            });
        },
        &["tokenizer_config.json has the added token", "with id 2041, and tokenizer.json has not"],
    ),
    (
        "small-tied",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                json["added_tokens_decoder"].as_object_mut().unwrap().remove("2042");
            });
        },
        &["tokenizer.json has the added token", "with id 2042, and tokenizer_config.json has not"],
    ),
    (
        "qwen3-text",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                json["added_tokens_decoder"]["2042"]["lstrip"] = json!(true);
            });
        },
        &[
            "`lstrip` of the added token",
            "is true in tokenizer_config.json and false in tokenizer.json",
        ],
    ),
    (
        "small-tied",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                json["additional_special_tokens"] = json!(["<|im_end|>", "<|loc|>"]);
            });
        },
        &["`additional_special_tokens` in tokenizer_config.json has `<|loc|>`"],
    ),
    (
        "small-tied",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                json["extra_special_tokens"] = json!({"loc_token": {"content": "<|loc|>"}});
            });
        },
        &["`extra_special_tokens` in tokenizer_config.json has `<|loc|>`"],
    ),
    (
        "small-tied",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                json.as_object_mut().unwrap().remove("added_tokens_decoder");
            });
            place.write("model/added_tokens.json", r#"{"<|loc|>": 2043}"#);
        },
        &[
            "added_tokens.json has the added token `<|loc|>` with id 2043, and tokenizer.json has not",
        ],
    ),
    (
        "small-tied",
        |place| {
            change(place, "chat_template.json", |json| {
                json["chat_template"] =
                    json!(format!("{} ", json["chat_template"].as_str().unwrap()));
            });
        },
        &["the chat template of chat_template.json differs from that of chat_template.jinja"],
    ),
    (
        "small-qwen25vl",
        |place| {
            place.write("model/processor_config.json", r#"{"chat_template": "{{ messages }}"}"#);
        },
        &["the chat template of processor_config.json differs from that of chat_template.json"],
    ),
    (
        "small-tied",
        |place| {
            change(place, "generation_config.json", |json| {
                json["eos_token_id"] = json!([2000, 151_645]);
            });
        },
        &["`eos_token_id` in generation_config.json is 151645, which is no id of tokenizer.json"],
    ),
    (
        "small-tied",
        |place| {
            change(place, "generation_config.json", |json| json["pad_token_id"] = json!("x"));
        },
        &["`pad_token_id` in generation_config.json is \"x\""],
    ),
    (
        "small-qwen25vl",
        |place| {
            change(place, "config.json", |json| {
                let (above, inside) = if json["text_config"].is_object() {
                    ("hidden_size", json["text_config"].clone())
                } else {
                    ("hidden_size", json.clone())
                };
                json["text_config"] = inside;
                json[above] = json!(1);
            });
        },
        &["`hidden_size` in config.json is 1, but", "in its `text_config`"],
    ),
    (
        "small-qwen35",
        |place| {
            change(place, "config.json", |json| json["rope_parameters"] = json!({"rope_theta": 7}));
        },
        &["`rope_theta` in config.json is 7, but"],
    ),
    (
        "small-tied",
        |place| change(place, "config.json", |json| json["model_type"] = json!("llava")),
        &["`model_type` is `llava`, expected `qwen3_vl`"],
    ),
    (
        "qwen3-text",
        |place| {
            change(place, "config.json", |json| {
                json.as_object_mut().unwrap().remove("model_type");
            });
        },
        &["`model_type` is `missing`, expected `qwen3_vl`"],
    ),
    (
        "small-tied",
        |place| {
            let mut section: Value =
                serde_json::from_slice(&place.read("model/preprocessor_config.json")).unwrap();
            section["image_mean"] = json!([0.1, 0.1, 0.1]);
            let combined = json!({ "image_processor": section });
            place.write("model/processor_config.json", &combined.to_string());
        },
        &["`image_mean` of `image_processor` in processor_config.json is [0.1,0.1,0.1], but ["],
    ),
    (
        "small-tied",
        |place| place.write("model/adapter_config.json", "{}"),
        &["it has a model and adapter_config.json"],
    ),
    (
        "small-tied",
        |place| {
            change(place, "config.json", |json| {
                json["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
            });
        },
        &["`quantization_config` (`quant_method`: gptq), and the weights are not in NF4"],
    ),
    (
        "small-qwen35",
        |place| {
            change(place, "config.json", |json| {
                json["text_config"]["partial_rotary_factor"] = json!(0.75);
            });
        },
        &["`partial_rotary_factor` in config.json is 0.75, but 0."],
    ),
    (
        "small-tied",
        |place| {
            let mut section: Value =
                serde_json::from_slice(&place.read("model/preprocessor_config.json")).unwrap();
            section["size"] = json!({"min_pixels": 4096, "max_pixels": 8192});
            let combined = json!({ "image_processor": section });
            place.write("model/processor_config.json", &combined.to_string());
        },
        &["`max_pixels` of `image_processor` in processor_config.json is 8192, but "],
    ),
    (
        "small-tied",
        |place| change(place, "config.json", |json| json["video_token_id"] = json!(7)),
        &["`video_token_id` in config.json is 7, but `<|video_pad|>` has id "],
    ),
    (
        "small-internvl",
        |place| change(place, "config.json", |json| json["image_token_id"] = json!(7)),
        &["`image_token_id` in config.json is 7, but `<IMG_CONTEXT>` has id "],
    ),
    (
        "small-tied",
        |place| {
            change(place, "tokenizer_config.json", |json| {
                json.as_object_mut().unwrap().remove("added_tokens_decoder");
            });
            place.write("model/special_tokens_map.json", r#"{"eos_token": "<|im_start|>"}"#);
        },
        &["`eos_token` is `<|im_start|>` in special_tokens_map.json and `"],
    ),
];

#[test]
fn files_of_a_model_that_contradict_each_other_are_refused_by_every_command() {
    for (model, change, messages) in CASES {
        let place = place(model);
        change(&place);
        for command in COMMANDS {
            let output = place.trainer(command).ends_with(65);
            let text = output.stdout + &output.stderr; // `check` prints to stdout
            for message in messages {
                assert!(text.contains(message), "{command:?}: {message}\n{text}");
            }
        }
        assert!(!place.path("out").exists(), "{messages:?}");
    }
}

#[test]
fn a_redundant_head_that_equals_the_embedding_is_no_contradiction() {
    let place = place("small-tied");
    changed_weights(&place, |weights| {
        weights.insert("lm_head.weight".to_owned(), weights[EMBEDDING].clone());
    });
    place.trainer(&["inspect", "--config", "c.yaml"]).ends_with(0);
    place.trainer(&["sft", "--config", "c.yaml"]).ends_with(0);
}

/// The hint of the refusal: with the flag at false, the head is trained and saved.
#[test]
fn a_head_of_its_own_is_used_after_the_flag_is_changed() {
    let place = place("small-tied");
    CASES[0].1(&place);
    change(&place, "config.json", |json| {
        for section in ["", "/text_config"] {
            let section = json.pointer_mut(section).unwrap().as_object_mut().unwrap();
            if let Some(flag) = section.get_mut("tie_word_embeddings") {
                *flag = json!(false);
            }
        }
    });
    place.trainer(&["sft", "--config", "c.yaml"]).ends_with(0);
    assert!(tensors(&place, "run/final/model.safetensors").contains_key("lm_head.weight"));
}

/// A copy of the model whose index names a shard with the negated weights.
fn with_stale_index(place: &Place) {
    let weights = tensors(place, "model/model.safetensors");
    let negated: HashMap<&String, Tensor> =
        weights.iter().map(|(name, tensor)| (name, tensor.neg().unwrap())).collect();
    safetensors::save(&negated, place.path("model/model-00001-of-00001.safetensors")).unwrap();
    let map: HashMap<&String, &str> =
        weights.keys().map(|name| (name, "model-00001-of-00001.safetensors")).collect();
    place.write("model/model.safetensors.index.json", &json!({ "weight_map": map }).to_string());
}

#[test]
fn a_single_file_of_weights_is_taken_before_an_index_with_a_warning() {
    let place = place("small-tied");
    let single = tensors(&place, "model/model.safetensors");
    with_stale_index(&place);
    let ignored = "ignored an index of weights, because model.safetensors is next to it";
    place.trainer(&["export", "--model", "model", "--out", "out"]).ends_with(0).says(ignored);
    assert_eq!(bits(&tensors(&place, "out/model.safetensors")), bits(&single));
    for command in [COMMANDS[0], COMMANDS[1], COMMANDS[4], COMMANDS[5]] {
        place.trainer(command).ends_with(0).says(ignored);
    }
    // without the single file the index counts, and a shard that it does not name is reported
    fs::remove_file(place.path("model/model.safetensors")).unwrap();
    let other = place.path("model/model-00002-of-00002.safetensors");
    fs::copy(place.path("model/model-00001-of-00001.safetensors"), other).unwrap();
    let output = place.trainer(&["export", "--model", "model", "--out", "index"]).ends_with(0);
    output.says("ignored `model-00002-of-00002.safetensors`, which the index does not name");
    let stored = candle_core::safetensors::load(
        place.path("model/model-00001-of-00001.safetensors"),
        &Device::Cpu,
    );
    assert_eq!(bits(&tensors(&place, "index/model.safetensors")), bits(&stored.unwrap()));
}

#[test]
fn the_template_of_the_processor_is_used_and_that_of_the_tokenizer_is_reported() {
    let place = place("small-tied");
    change(&place, "tokenizer_config.json", |json| json["chat_template"] = json!("{{ messages }}"));
    let output = place.trainer(&["inspect", "--config", "c.yaml"]).ends_with(0);
    assert!(output.stdout.contains("[[A cat.<|im_end|>]]"), "{}", output.stdout);
    output
        .says("the chat template of tokenizer_config.json differs from that of chat_template.json");
}

#[test]
fn the_list_of_the_kinds_of_layers_is_used_and_the_interval_is_reported() {
    let place = place("small-qwen35");
    change(&place, "config.json", |json| {
        json["text_config"]["full_attention_interval"] = json!(3);
    });
    let output = place.trainer(&["inspect", "--config", "c.yaml"]).ends_with(0);
    output.says("`layer_types` in config.json differs from `full_attention_interval: 3`");
}

/// The families of the models and those of the texts are two lists.
#[test]
fn every_family_of_models_is_known_to_the_encoder() {
    for (family, _) in trainer::models::FAMILIES {
        // the tokens of images of these families have other names
        let place = place(match family {
            "internvl" => "small-internvl",
            "minicpmv4_6" | "minicpmv4_7" => "small-minicpm",
            _ => "small-tied",
        });
        change(&place, "config.json", |json| {
            json["model_type"] = json!(family);
            // only `minicpmv4_7` reads these
            json["newline_id"] = json!(198);
            let tokens = ["image_start_id", "image_end_id", "slice_start_id", "slice_end_id"];
            tokens.into_iter().zip(2043..).for_each(|(key, id)| json[key] = json!(id));
        });
        let folder: &Path = &place.path("model");
        trainer::data::Encoder::from_folder(folder, &trainer::data::ImageConfig::default())
            .unwrap();
    }
}

/// A command that opened the pipe would wait for another program.
#[test]
fn a_pipe_in_place_of_a_file_is_refused_at_once() {
    let place = place("small-tied");
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
    let refused = |what: &str, config: &str, settings: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["60", &binary(), "sft", "--config", config]).args(settings);
        command.current_dir(place.path(".")).env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
        let output = finish(&mut command);
        assert!([64, 65].contains(&output.code), "{what}: {} {}", output.code, output.stderr);
        output.says("it is not a regular file");
    };
    let mut row: Value = serde_json::from_str(ROW).unwrap();
    (row["messages"][0]["content"], row["images"]) = ("<image>What?".into(), json!(["pipe"]));
    place.write("image.jsonl", &row.to_string());
    fs::create_dir(place.path("adapter")).unwrap();
    let link = |path: &str| {
        std::os::unix::fs::symlink(place.path("pipe"), place.path(path)).unwrap();
    };
    link("adapter/adapter_config.json");
    refused("--config", "pipe", &[]);
    for setting in [
        "data.train=[{path: pipe}]",
        "data={train: [{path: image.jsonl}], on_error: stop}",
        "adapter={start_from: adapter}",
    ] {
        refused(setting, "c.yaml", &["--set", setting]);
    }
    for file in ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"] {
        let path = format!("model/{file}");
        fs::rename(place.path(&path), place.path("kept")).unwrap();
        link(&path);
        refused(file, "c.yaml", &[]);
        fs::rename(place.path("kept"), place.path(&path)).unwrap();
    }
}
