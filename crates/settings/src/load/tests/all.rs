//! All errors of a config at once.

use super::*;

/// The errors of [`read_all`], and the config.
fn load_all_text(text: &str) -> (Vec<String>, Loaded<Config>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    fs::write(&path, text).unwrap();
    let loaded = read_all::<Config>(parse_file(&path).unwrap());
    (loaded.errors.iter().map(message).collect(), loaded)
}

#[test]
fn errors_of_list_items_have_the_number_of_the_item_in_the_file() {
    let text = "\
output_dir: a
data:
  train:
    - path: [not, a, text]
    - weight: 1
    - weight: 2
    - 5
    - pth: misspelled
    - path: b.jsonl
      weight: heavy
    - path: c.jsonl
";
    let (errors, loaded) = load_all_text(text);
    let expected = [
        "config.yaml:4:13: `data.train.0.path` is a list, expected a text",
        "config.yaml:5:7: missing key `path` in `data.train.1`",
        "config.yaml:6:7: missing key `path` in `data.train.2`",
        "config.yaml:7:7: `data.train.3` is `5`, expected a mapping",
        "config.yaml:8:7: unknown key `pth` in `data.train.4`, did you mean `path`?",
        "config.yaml:10:15: `data.train.5.weight` is `heavy`, expected a number",
    ];
    assert_eq!(errors, expected);
    let paths: Vec<String> =
        loaded.config.unwrap().data.train.into_iter().map(|set| set.path).collect();
    assert_eq!(paths, ["b.jsonl", "c.jsonl"]);
    let left_out = loaded.left_out;
    assert_eq!([0, 1].map(|number| left_out.number_in_file("data.train", number)), [5, 6]);
    let keys = ["data", "train", "1", "path"].map(str::to_owned);
    assert_eq!(left_out.in_file(&keys).join("."), "data.train.6.path");
    assert!(left_out.has("data.train") && !left_out.has("data.tra"));
}

#[test]
fn what_was_left_out_causes_no_other_error() {
    for (old, new, error) in [
        // the first key of its section
        (
            "train: [",
            "tran: [",
            "config.yaml:4:3: unknown key `tran` in `data`, did you mean `train`?",
        ),
        ("lr: 1.0e-5", "learning: 1", "config.yaml:8:3: unknown key `learning` in `optim`"),
        (
            "{decay: 0.1}",
            "{decay: x}",
            "config.yaml:11:18: `optim.schedule.wsd.decay` is `x`, expected a number",
        ),
        (
            "wsd: {decay: 0.1}",
            "wds: {decay: 0.1}",
            "config.yaml:11:5: unknown value `wds` for `optim.schedule`, did you mean `wsd`?",
        ),
        (
            "[0.9, 0.999]",
            "[x, 0.999]",
            "config.yaml:9:11: `optim.betas.0` is `x`, expected a number",
        ),
        (
            "model.*: 1",
            "model.*: low",
            "config.yaml:14:14: `optim.lr_multipliers.model.*` is `low`, expected a number",
        ),
    ] {
        assert!(GOOD.contains(old), "{old}");
        assert_eq!(load_all_text(&GOOD.replace(old, new)).0, [error]);
    }
    // A wrong value does not follow from a misspelled key of the same name.
    let both = GOOD.replace("packing: true", "packign: true\n  packing: maybe");
    assert_eq!(load_all_text(&both).0.len(), 2);
}
