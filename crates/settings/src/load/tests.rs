//! The struct below has all the shapes of a config: sections, lists of sections, optional values,
//! choices with and without settings, maps with free keys.

use super::*;
use crate::set;
use fault::Fault;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;
use std::path::PathBuf;

mod all;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    output_dir: PathBuf,
    #[serde(default)]
    seed: u64,
    data: Data,
    #[serde(default)]
    optim: Optim,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Data {
    train: Vec<Dataset>,
    #[serde(default)]
    packing: bool,
    #[serde(default)]
    packing_length: Option<NonZeroU32>,
    #[serde(default)]
    packing_strategy: Strategy,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dataset {
    path: String,
    #[serde(default)]
    weight: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Strategy {
    Sequential,
    #[default]
    BestFit,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Optim {
    lr: f64,
    betas: [f64; 2],
    schedule: Schedule,
    lr_multipliers: BTreeMap<String, f64>,
    share: Share,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Schedule {
    #[default]
    Cosine,
    Wsd {
        decay: f64,
        #[serde(default)]
        floor: Option<f64>,
    },
}

/// A value that its type validates.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
struct Share(f64);

impl TryFrom<f64> for Share {
    type Error = String;

    fn try_from(value: f64) -> Result<Self, String> {
        if (0.0..=1.0).contains(&value) { Ok(Self(value)) } else { Err("not in 0..=1".to_owned()) }
    }
}

impl From<Share> for f64 {
    fn from(share: Share) -> Self {
        share.0
    }
}

const GOOD: &str = "\
# a comment
output_dir: runs/demo
data:
  train: [{path: a.jsonl}, {path: b.jsonl, weight: 2}]
  packing: true   # why
  packing_length: 8192
optim:
  lr: 1.0e-5
  betas: [0.9, 0.999]
  schedule:
    wsd: {decay: 0.1}
  lr_multipliers:
    vision: 0.1
    model.*: 1
";

fn load_text(text: &str, overrides: &[&str]) -> Result<Config, ConfigError> {
    load_bytes(text.as_bytes(), overrides)
}

fn load_bytes(bytes: &[u8], overrides: &[&str]) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    fs::write(&path, bytes).unwrap();
    let mut root = parse_file(&path)?;
    overrides.iter().try_for_each(|argument| set(&mut root, argument))?;
    read(&root)
}

/// The first line of the message, without the folder.
fn message(error: &ConfigError) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap();
    line.split_once("/config.yaml")
        .map_or(line.to_owned(), |(_, rest)| format!("config.yaml{rest}"))
}

/// Checks that `GOOD` with `old` replaced by `new` fails with `expected`.
#[track_caller]
fn assert_fails(old: &str, new: &str, expected: &str) {
    assert!(GOOD.contains(old), "{old}");
    let error = load_text(&GOOD.replace(old, new), &[]).unwrap_err();
    assert_eq!(message(&error), expected);
    assert!(error.hint().is_some());
    // Overrides of other keys must not move the place, even if they add list items before it.
    let overrides = ["seed=7", "data.train.0.weight=3", "data.train.2={path: c}"];
    let error = load_text(&GOOD.replace(old, new), &overrides).unwrap_err();
    assert_eq!(message(&error), expected);
}

#[track_caller]
fn assert_set_fails(argument: &str, expected: &str) {
    let error = load_text(GOOD, &[argument]).unwrap_err();
    assert_eq!(error.to_string(), format!("--set {argument}: {expected}"));
    assert!(error.hint().is_some());
}

#[test]
fn a_good_config_is_read_with_its_defaults() {
    let config = load_text(GOOD, &[]).unwrap();
    assert_eq!(config.output_dir, PathBuf::from("runs/demo"));
    assert_eq!(config.data.train[1], Dataset { path: "b.jsonl".to_owned(), weight: Some(2.0) });
    assert_eq!(config.data.packing_length.unwrap().get(), 8192);
    assert_eq!(config.data.packing_strategy, Strategy::BestFit);
    assert_eq!(config.optim.schedule, Schedule::Wsd { decay: 0.1, floor: None });
    assert_eq!(config.optim.betas, [0.9, 0.999]);
    assert_eq!(config.optim.lr_multipliers["model.*"], 1.0);
}

#[test]
fn an_unknown_key_names_its_place_and_the_nearest_valid_one() {
    assert_fails(
        "packing_length",
        "packing_lenght",
        "config.yaml:6:3: unknown key `packing_lenght` in `data`, did you mean `packing_length`?",
    );
    assert_fails(
        "weight: 2",
        "wieght: 2",
        "config.yaml:4:44: unknown key `wieght` in `data.train.1`, did you mean `weight`?",
    );
    assert_fails(
        "output_dir: runs/demo",
        "output_dir: runs/demo\nzzz: 1",
        "config.yaml:3:1: unknown key `zzz`",
    );
    assert_fails(
        "{decay: 0.1}",
        "{decai: 0.1}",
        "config.yaml:11:11: unknown key `decai` in `optim.schedule.wsd`, did you mean `decay`?",
    );
}

#[test]
fn an_error_shows_the_line_and_the_valid_keys() {
    let error = load_text(&GOOD.replace("packing: true", "packign: true"), &[]).unwrap_err();
    let text = error.to_string();
    let shown: Vec<_> = text.lines().skip(1).collect();
    assert_eq!(shown, ["   |", " 5 |   packign: true   # why", "   |   ^^^^^^^"]);
    let hint = "valid keys here: `train`, `packing`, `packing_length`, `packing_strategy`";
    assert_eq!(error.hint().unwrap(), hint);
    assert_eq!(error.place().unwrap().position(), Some((5, 3)));
}

#[test]
fn a_missing_key_is_reported_at_its_section() {
    assert_fails("output_dir: runs/demo", "seed: 1", "config.yaml:2:1: missing key `output_dir`");
    assert_fails(
        "{path: a.jsonl}",
        "{weight: 1}",
        "config.yaml:4:11: missing key `path` in `data.train.0`",
    );
    assert_fails(
        "{decay: 0.1}",
        "{floor: 0.1}",
        "config.yaml:11:5: missing key `decay` in `optim.schedule.wsd`",
    );
    let error = load_text("output_dir: a\ndata:\n  packing: true\n", &[]).unwrap_err();
    assert_eq!(message(&error), "config.yaml:2:1: missing key `train` in `data`");
    assert_eq!(error.hint().unwrap(), "add it to the file, or pass `--set data.train=..`");
    let error = load_text("output_dir: a\ndata:\n  # packing: true\n", &[]).unwrap_err();
    assert_eq!(message(&error), "config.yaml:2:1: missing key `train` in `data`");
}

#[test]
fn a_wrong_value_names_what_is_there_and_what_is_expected() {
    assert_fails(
        "packing: true",
        "packing: yes",
        "config.yaml:5:12: `data.packing` is `yes`, expected `true` or `false`",
    );
    assert_fails(
        "8192",
        "0",
        "config.yaml:6:19: `data.packing_length` is `0`, expected a whole number of 1 or more",
    );
    assert_fails(
        "8192",
        "many",
        "config.yaml:6:19: `data.packing_length` is `many`, expected a whole number",
    );
    assert_fails(
        "8192",
        "\"8192\"",
        "config.yaml:6:19: `data.packing_length` is the text \"8192\", expected a whole number",
    );
    assert_fails("1.0e-5", "", "config.yaml:8:3: `optim.lr` is empty, expected a number");
    assert_fails(
        "[0.9, 0.999]",
        "[0.9]",
        "config.yaml:9:10: `optim.betas` is a list of 1, expected a list of 2",
    );
    assert_fails(
        "weight: 2",
        "weight: [2]",
        "config.yaml:4:52: `data.train.1.weight` is a list, expected a number",
    );
    assert_fails(
        "vision: 0.1",
        "vision: low",
        "config.yaml:13:13: `optim.lr_multipliers.vision` is `low`, expected a number",
    );
    assert_fails(
        "  lr: 1.0e-5",
        "  lr: 1.0e-5\n  share: 1.5",
        "config.yaml:9:10: `optim.share`: not in 0..=1",
    );
    let error = load_text("just text\n", &[]).unwrap_err();
    assert_eq!(message(&error), "config.yaml:1:1: `the config` is `just text`, expected a mapping");
}

#[test]
fn a_choice_names_the_nearest_valid_value() {
    assert_fails(
        "packing: true",
        "packing_strategy: bestfit",
        "config.yaml:5:21: unknown value `bestfit` for `data.packing_strategy`, did you mean `best_fit`?",
    );
    assert_fails(
        "wsd: {decay: 0.1}",
        "wds: {decay: 0.1}",
        "config.yaml:11:5: unknown value `wds` for `optim.schedule`, did you mean `wsd`?",
    );
    assert_fails(
        "wsd: {decay: 0.1}",
        "wsd",
        "config.yaml:11:5: `optim.schedule` is `wsd` alone, expected `wsd: {..}` with its settings",
    );
    assert_fails(
        "wsd: {decay: 0.1}",
        "cosine: {decay: 0.1}",
        "config.yaml:11:13: `optim.schedule` is a mapping below `cosine`, expected `cosine` alone",
    );
    assert_fails(
        "wsd: {decay: 0.1}",
        "[cosine]",
        "config.yaml:11:5: `optim.schedule` is a list, expected one of `cosine`, `wsd`",
    );
}

#[test]
fn a_key_is_written_once() {
    let error = load_text("output_dir: a\nseed: 1\noutput_dir: b\n", &[]).unwrap_err();
    let text = message(&error);
    assert!(
        text.starts_with("config.yaml:3:1: duplicate key `output_dir`, first used at"),
        "{text}"
    );
    assert!(text.ends_with("config.yaml:1:1"), "{text}");
}

#[test]
fn invalid_yaml_is_an_error_at_its_place() {
    let error = load_text("output_dir: a\ndata:\n\tpacking: true\n", &[]).unwrap_err();
    assert_eq!(error.place().unwrap().position(), Some((3, 2)));
    assert!(error.hint().unwrap().contains("tab"), "{error}");
    let error = load_text("output_dir: [a\nseed: 1\n", &[]).unwrap_err();
    assert!(message(&error).starts_with("config.yaml:2:"), "{error}");
    let error = load_text("a: 1\n---\nb: 1\n", &[]).unwrap_err();
    assert_eq!(message(&error), "config.yaml:3:1: a second document begins here, expected one");
    let error = load_text("a: *anchor\n", &[]).unwrap_err();
    assert!(message(&error).starts_with("config.yaml:1:4: "), "{error}");
}

#[test]
fn files_that_are_binary_empty_or_missing_are_named() {
    let error = load_bytes(b"output_dir: a\nseed: \xff\n", &[]).unwrap_err();
    assert_eq!(message(&error), "config.yaml:2:7: not UTF-8 text");
    for text in ["", "\n", "# nothing\n", "\u{feff}"] {
        let error = load_text(text, &["seed=1"]).unwrap_err();
        assert_eq!(message(&error), "config.yaml: the config is empty", "{text:?}");
    }
    let error = parse_file(Path::new("/no/such/config.yaml")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read config `/no/such/config.yaml`");
    assert_eq!(error.hint().unwrap(), "check the path given to `--config`");
    assert_eq!(
        load_text(&format!("\u{feff}{GOOD}"), &[]).unwrap().output_dir,
        Path::new("runs/demo")
    );
}

#[test]
fn set_replaces_adds_and_reaches_into_lists() {
    let config = load_text(
        GOOD,
        &[
            "data.packing=false",
            "data.train.0.path=x.jsonl",
            "data.train.2.path=new.jsonl",
            "data.packing_length=null",
            "data.packing_strategy=sequential",
            "optim.schedule.wsd.floor=1e-6",
            "optim.betas=[0.8, 0.95]",
            "optim.lr_multipliers={\"model.layers.*\": 0.5}",
            "seed=1",
            "seed=2",
            "output_dir=a=b",
        ],
    )
    .unwrap();
    assert!(!config.data.packing);
    let paths: Vec<_> = config.data.train.iter().map(|dataset| dataset.path.as_str()).collect();
    assert_eq!(paths, ["x.jsonl", "b.jsonl", "new.jsonl"]);
    assert_eq!(config.data.packing_length, None);
    assert_eq!(config.data.packing_strategy, Strategy::Sequential);
    assert_eq!(config.optim.schedule, Schedule::Wsd { decay: 0.1, floor: Some(1e-6) });
    assert_eq!(config.optim.betas, [0.8, 0.95]);
    assert_eq!(config.optim.lr_multipliers, BTreeMap::from([("model.layers.*".to_owned(), 0.5)]));
    assert_eq!(config.seed, 2);
    assert_eq!(config.output_dir, PathBuf::from("a=b"));
}

#[test]
fn set_replaces_missing_and_invalid_values_of_the_file() {
    let file = "data: {packing: maybe, train: null}\n";
    let overrides = ["output_dir=a", "data.packing=true", "data.train.0.path=a.jsonl"];
    let config = load_text(file, &overrides).unwrap();
    assert!(config.data.packing);
    assert_eq!(config.data.train.len(), 1);
}

#[test]
fn an_error_in_a_set_names_the_argument() {
    assert_set_fails(
        "data.packing_lenght=1",
        "unknown key `packing_lenght` in `data`, did you mean `packing_length`?",
    );
    assert_set_fails("dta.packing=true", "unknown key `dta`, did you mean `data`?");
    assert_set_fails("data.packing=maybe", "`data.packing` is `maybe`, expected `true` or `false`");
    assert_set_fails(
        "data.train.0.weight=heavy",
        "`data.train.0.weight` is `heavy`, expected a number",
    );
    assert_set_fails(
        "data.packing_strategy=bestfit",
        "unknown value `bestfit` for `data.packing_strategy`, did you mean `best_fit`?",
    );
    assert_set_fails(
        "data.train.7.path=x",
        "there is no `7` in `data.train`, which is a list of 2",
    );
    assert_set_fails("data.packing.x=1", "there is no `x` in `data.packing`, which is `true`");
    assert_set_fails("data.packing", "expected `key=value`");
    assert_set_fails("data..packing=1", "`data..packing` has an empty key");
    assert_set_fails("seed=", "`seed` is empty, expected a whole number");
    let error = load_text(GOOD, &["optim.betas=[1"]).unwrap_err().to_string();
    assert!(error.starts_with("--set optim.betas=[1: "), "{error}");
}

#[test]
fn aliases_and_merges_are_expanded_and_bombs_rejected() {
    let text = "\
output_dir: a
data:
  train:
    - &first {path: a, weight: 1}
    - *first
    - {<<: *first, path: b}
";
    let config = load_text(text, &[]).unwrap();
    assert_eq!(config.data.train[1], config.data.train[0]);
    assert_eq!(config.data.train[2], Dataset { path: "b".to_owned(), weight: Some(1.0) });

    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for i in 1..9 {
        let aliases = vec![format!("*a{}", i - 1); 10].join(", ");
        bomb = format!("{bomb}a{i}: &a{i} [{aliases}]\n");
    }
    let error = load_text(&bomb, &[]).unwrap_err();
    assert!(error.to_string().contains("too many values"), "{error}");
    let deep = format!("a: {}{}", "[".repeat(100), "]".repeat(100));
    let error = load_text(&deep, &[]).unwrap_err();
    assert!(error.to_string().contains("nested too deeply"), "{error}");
}

#[test]
fn the_resolved_config_loads_back_equal() {
    let mut config = load_text(GOOD, &["data.train.0.weight=0.1"]).unwrap();
    let texts = "plain/null/~//true/1.10/1e5/0x1F/ led/trail /a: b/# no/- no/it's/say \"x\"/two\nlines/\
        tab\t/{no}/[no]/*no/&no/<</!no/%no/@no/`no`/\u{e9}\u{4e2d}/a\\b/line\n/\nfirst/|/>/yes/.inf";
    for text in texts.split('/') {
        config.output_dir = text.into();
        config.data.train[0].path = text.to_owned();
        config.optim.lr_multipliers.insert(text.to_owned(), 0.25);
        let yaml = to_yaml(&config).unwrap();
        let loaded = load_text(&yaml, &[]);
        assert_eq!(loaded.unwrap(), config, "{text:?} in\n{yaml}");
    }
    for lr in [1e-5, 0.1 + 0.2, 1e-300, f64::MAX, 5e-324, 1e22, 123456789.0] {
        config.optim.lr = lr;
        let yaml = to_yaml(&config).unwrap();
        assert_eq!(load_text(&yaml, &[]).unwrap(), config, "{yaml}");
    }
}
