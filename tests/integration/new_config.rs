//! `trainer new`, and paths with `~` and variables.

use super::harness::{Place, finish, golden};

fn model() -> String {
    golden("models/small-tied").display().to_string()
}

fn rows(name: &str) -> String {
    golden("data").join(name).display().to_string()
}

fn text(place: &Place, file: &str) -> String {
    String::from_utf8(place.read(file)).unwrap()
}

#[test]
fn check_accepts_a_new_config_unchanged() {
    let place = Place::empty();
    let (model, images) = (model(), golden("data").display().to_string());
    let rows = std::fs::read_to_string(rows("digits_test.jsonl")).unwrap();
    let first: String = rows.lines().take(20).map(|line| line.to_owned() + "\n").collect();
    place.write("rows.jsonl", &rows);
    place.write("first.jsonl", &first);
    let new = [
        "new",
        "--model",
        &model,
        "--data",
        "rows.jsonl",
        "--eval",
        "first.jsonl",
        "--out",
        "a.yaml",
    ];
    // The images are in another folder: nothing follows from rows that cannot be used.
    let refused = place.trainer(&new).ends_with(65);
    refused
        .says("rows.jsonl: 200 of 200 rows cannot be used")
        .says("hint: pass `--image-root FOLDER`");
    assert!(!place.path("a.yaml").exists());
    let new = [&new[..], &["--image-root", &images]].concat();
    let written = place.trainer(&new).ends_with(0);
    assert!(written.stdout.is_empty(), "{}", written.stdout);
    let config = text(&place, "a.yaml");
    assert!(config.contains("output_dir: runs/a ") && config.contains("200 rows"), "{config}");
    assert!(config.contains("  freeze: [] "), "{config}");
    let check = place.trainer(&["check", "--config", "a.yaml"]).ends_with(0);
    assert!(!check.stdout.contains("  warning: "), "{}", check.stdout);
    place.trainer(&new).ends_with(64).says("`a.yaml` exists");
}

#[test]
fn a_new_config_for_texts_freezes_what_receives_no_gradient() {
    let place = Place::empty();
    let line = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#;
    place.write("rows.jsonl", &format!("{line}\n").repeat(20));
    let new = place.trainer(&["new", "--model", &model(), "--data", "rows.jsonl"]).ends_with(0);
    assert!(new.stdout.contains("  freeze: [merger, vision] "), "{}", new.stdout);
    place.write("b.yaml", &new.stdout);
    place.trainer(&["check", "--config", "b.yaml"]).ends_with(0);
}

#[test]
fn a_folder_without_weights_gets_random_ones() {
    let place = Place::empty();
    place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
    std::fs::remove_file(place.path("model/model.safetensors")).unwrap();
    let rows = rows("digits_test.jsonl");
    let new = place.trainer(&["new", "--model", "model", "--data", &rows]).ends_with(0);
    assert!(new.stdout.contains("  weights: random "), "{}", new.stdout);
}

#[test]
fn paths_of_arguments_and_configs_are_expanded() {
    let place = Place::empty();
    place.trainer(&["init", "--preset", "debug", "--out", "home/model"]).ends_with(0);
    let config =
        "output_dir: $RUNS/x\nmodel: {path: ~/model}\ndata: {train: [{path: '${RUNS}.jsonl'}]}\n";
    place.write("home/a.yaml", config);
    let home = place.path("home");
    let mut command = place.command(&["check", "--config=~/a.yaml"]);
    let check = finish(command.env("HOME", &home).env("RUNS", "runs/of-a"));
    assert!(check.stdout.contains("runs/of-a/x"), "{}", check.stdout);
    assert!(check.stdout.contains("`runs/of-a.jsonl`"), "{}", check.stdout);
}

#[test]
fn a_variable_that_is_not_set_is_refused_with_its_line() {
    let place = Place::empty();
    let config =
        "output_dir: run\nmodel:\n  path: $NO_SUCH/model\ndata: {train: [{path: a.jsonl}]}\n";
    place.write("a.yaml", config);
    let refused = place.trainer(&["sft", "--config", "a.yaml"]).ends_with(64);
    let refused = refused.says("the environment variable `NO_SUCH` is not set");
    refused.says("a.yaml:3:").says("hint: set `NO_SUCH`");
    let refused = place.trainer(&["sft", "--config=$NO_SUCH/a.yaml"]).ends_with(64);
    refused.says("the environment variable `NO_SUCH` is not set").says("--config");
}
