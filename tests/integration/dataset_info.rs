//! Data sets that are entries of LLaMA-Factory's `dataset_info.json`.

use super::harness::{Place, json_lines};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// A folder with the rows of `dataset_info.json` under its names and under ours, and a config.
fn place_with_data() -> Place {
    let place = Place::empty();
    fs::create_dir(place.path("data")).unwrap();
    place.write(
        "data/dataset_info.json",
        r#"{"chats": {"file_name": "theirs.json", "formatting": "sharegpt",
            "columns": {"messages": "talk", "system": "intro"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                     "assistant_tag": "bot"}, "num_samples": 4},
           "hub": {"hf_hub_url": "a/b"}}"#,
    );
    place.write(
        "data/theirs.json",
        r#"[{"intro": "Be brief.", "system": "Not read.", "talk": [
              {"role": "user", "content": "Hello"}, {"role": "bot", "content": "Hi."}]},
            {"talk": [{"role": "user", "content": "1 + 1?"}, {"role": "bot", "content": "2"}]}]"#,
    );
    place.write(
        "data/ours.jsonl",
        concat!(
            r#"{"system": "Be brief.", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]}"#,
            "\n",
            r#"{"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]}"#,
        ),
    );
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/quickstart/model");
    let model = format!("model: {{path: {:?}, weights: random}}\n", model.display().to_string());
    let entry = "{dataset_info: data/dataset_info.json#chats}";
    place.write("theirs.yaml", &format!("output_dir: a\n{model}data: {{train: [{entry}]}}\n"));
    place.write(
        "ours.yaml",
        &format!("output_dir: b\n{model}data: {{train: [{{path: data/ours.jsonl}}]}}\n"),
    );
    place
}

fn inspected(place: &Place, config: &str) -> Vec<Value> {
    let arguments = ["inspect", "--config", config, "--format", "jsonl"];
    json_lines(&place.trainer(&arguments).ends_with(0).stdout)
}

#[test]
fn a_row_of_an_entry_becomes_the_sample_of_the_same_row_under_our_names() {
    let place = place_with_data();
    let (theirs, ours) = (inspected(&place, "theirs.yaml"), inspected(&place, "ours.yaml"));
    assert_eq!((theirs.len(), ours.len()), (4, 2)); // the entry uses each row twice
    for (theirs, ours) in theirs.iter().zip(ours.iter().cycle()) {
        for key in ["input_ids", "labels"] {
            assert_eq!(theirs[key], ours[key]);
        }
    }
}

#[test]
fn another_mapping_is_another_data_set_with_its_own_length_cache() {
    let place = place_with_data();
    fs::create_dir(place.path("a")).unwrap();
    let cache = ["cache", "--config", "theirs.yaml"];
    let measured = |says: &str| drop(place.trainer(&cache).ends_with(0).says(says));
    measured("measured=2 reused=0");
    measured("measured=0 reused=2");
    let info = String::from_utf8(place.read("data/dataset_info.json")).unwrap();
    place.write("data/dataset_info.json", &info.replace(r#", "system": "intro""#, ""));
    measured("measured=2 reused=0");
}

#[test]
fn the_number_of_samples_of_an_entry_decides_how_often_a_row_is_used() {
    let place = place_with_data();
    let plan = |config: &str| {
        let set = ["--set", "train.max_steps=null", "--set", "data.packing=false"];
        let rest = ["--set", "eval.show=0"];
        let arguments = [&["sft", "--config", config][..], &set, &rest].concat();
        place.trainer(&arguments).ends_with(0);
        let folder = if config == "theirs.yaml" { "a" } else { "b" };
        place.rows(&format!("{folder}/metrics.jsonl")).len()
    };
    // 4 samples of 2 rows; a step has one sample
    assert_eq!((plan("theirs.yaml"), plan("ours.yaml")), (4, 2));
}

#[test]
fn faults_of_an_entry_are_reported_at_its_line_of_the_config() {
    let place = place_with_data();
    let set = |entry: &str| {
        let set = format!("data.train.0.dataset_info={entry}");
        place.trainer(&["inspect", "--config", "theirs.yaml", "--set", &set]).ends_with(64)
    };
    set("data/dataset_info.json#hub").says("`hf_hub_url` of `hub`");
    set("data/dataset_info.json#none").says("no entry `none`; it has `chats`, `hub`");
    set("data/missing.json#a").says("cannot read `data/missing.json`");
    set("data/dataset_info.json").says("expected `FILE#NAME`");
    set("null").says("`data.train.0.path` is `missing`, expected a path, or else `dataset_info`");
    let both = ["inspect", "--config", "theirs.yaml", "--set", "data.train.0.path=data/ours.jsonl"];
    place.trainer(&both).ends_with(64).says("no `path` in addition");
}
