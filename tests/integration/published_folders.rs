//! Folders with the keys, files and names of tensors that published models and fine-tunes have.
//! `tests/fixtures/published_folders.json` lists how each folder differs from the golden model
//! `like`, which has the same values; `-` removes a key or a file. `docs/models.md` lists the models.

use super::harness::{Place, bits, copy_folder, golden, tensors};
use candle_core::safetensors;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use trainer::nn::TensorNames;

const REMOVED: &str = "-";
const HEAD: &str = "lm_head.weight";

fn layouts() -> serde_json::Map<String, Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/published_folders.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Sets the values of `changes` in `json`.
fn change(json: &mut Value, changes: &Value) {
    match (json, changes) {
        (Value::Object(json), Value::Object(changes)) => {
            for (key, value) in changes {
                if value == REMOVED {
                    json.remove(key);
                } else {
                    change(json.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (json, changes) => *json = changes.clone(),
    }
}

/// A place with a copy of a golden model in `model`, a config, and rows with images.
pub(super) fn place(model: &str) -> Place {
    let place = Place::empty();
    copy_folder(&golden("models").join(model), &place.path("model"));
    let file = if model.contains("vl") { "image_28.jsonl" } else { "image_exact.jsonl" };
    let rows = fs::read_to_string(golden("data").join(file)).unwrap();
    place.write("rows.jsonl", &rows.lines().take(2).collect::<Vec<_>>().join("\n"));
    let set = json!([{"path": "rows.jsonl", "image_root": golden("data")}]);
    let config = json!({
        "output_dir": "run", "model": {"path": "model"}, "train": {"max_steps": 1},
        "data": {"train": set, "eval": set},
    });
    place.write("c.yaml", &config.to_string());
    place
}

/// Changes the golden model of a place to a folder of this layout.
pub(super) fn apply(place: &Place, layout: &Value) {
    for (name, changes) in layout.as_object().unwrap() {
        let file = format!("model/{name}");
        if Path::new(name).extension().is_none() {
            continue;
        }
        if changes == REMOVED {
            fs::remove_file(place.path(&file)).unwrap();
            continue;
        }
        let text = fs::read(place.path(&file)).unwrap_or_else(|_| b"{}".to_vec());
        let mut json: Value = serde_json::from_slice(&text).unwrap();
        if name == "config.json" && layout["nested"] == true {
            let mut text = json.clone();
            text.as_object_mut().unwrap().remove("vision_config");
            json["text_config"] = text;
        }
        change(&mut json, changes);
        place.write(&file, &json.to_string());
    }
    let mut weights = tensors(place, "model/model.safetensors");
    if layout["module names"] == true {
        let named = weights.into_iter();
        weights = named.map(|(name, of)| (TensorNames::Flat.of_file(&name), of)).collect();
    }
    let embedding = weights.iter().find(|(name, _)| name.ends_with("embed_tokens.weight"));
    let embedding = embedding.map(|(_, tensor)| tensor.clone()).unwrap();
    for name in layout["added tensors"].as_array().into_iter().flatten() {
        weights.insert(name.as_str().unwrap().to_owned(), embedding.clone());
    }
    safetensors::save(&weights, place.path("model/model.safetensors")).unwrap();
}

/// The losses of the rows with the model in `folder`.
fn losses(place: &Place, folder: &str) -> Vec<Value> {
    let eval = ["eval", "--config", "c.yaml", "--checkpoint", folder, "--per-sample", "losses"];
    place.trainer(&eval).ends_with(0);
    let losses = place.rows("losses");
    fs::remove_file(place.path("losses")).unwrap();
    losses
}

#[test]
fn folders_like_those_of_published_models_load_and_are_saved_with_all_their_tensors() {
    let mut expected: HashMap<String, Vec<Value>> = HashMap::new();
    for (name, layout) in layouts() {
        println!("{name}");
        let like = layout["like"].as_str().unwrap();
        let place = place(like);
        let expected =
            expected.entry(like.to_owned()).or_insert_with(|| losses(&place, "model")).clone();
        apply(&place, &layout);
        assert_eq!(losses(&place, "model"), expected, "{name}");
        let trained = place.trainer(&["sft", "--config", "c.yaml"]).ends_with(0);
        trained.says(layout["says"].as_str().unwrap_or_default());
        losses(&place, "run/final");
        let module_name = |name: &String| TensorNames::Flat.of_file(name);
        let [given, saved] = ["model", "run/final"]
            .map(|folder| tensors(&place, &format!("{folder}/model.safetensors")));
        let names = |of: &HashMap<String, _>| of.keys().map(module_name).collect::<BTreeSet<_>>();
        let mut kept = names(&given);
        if like != "moe-qwen35" {
            kept.remove(HEAD); // a tied head is saved once
        }
        assert_eq!(names(&saved), kept, "{name}");
        // tensors that the model does not use
        let (given, saved) = (bits(&given), bits(&saved));
        for unused in given.keys().filter(|of| of.starts_with("mtp") || of.starts_with("multi")) {
            assert_eq!(given[unused], saved[unused], "{name}: {unused}");
        }
    }
}

#[test]
fn the_page_of_the_models_names_each_layout() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    let page = fs::read_to_string(page).unwrap();
    for name in layouts().keys() {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}
