use settings::Setting;

use super::*;

/// The first problem.
fn problem(config: &DataConfig) -> Option<String> {
    let mut problems = Vec::new();
    config.check_values("data", &mut problems);
    problems.extend(config.problems());
    problems.first().map(ToString::to_string)
}

fn parse(text: &str) -> Result<DataConfig, serde_json::Error> {
    serde_json::from_str(text)
}

#[test]
fn the_defaults_are_those_of_the_contract() {
    let config = parse(r#"{"train": [{"path": "a.jsonl"}]}"#).unwrap();
    assert_eq!(problem(&config), None);
    assert_eq!(
        serde_json::to_string(&config).unwrap(),
        r#"{"train":[{"path":"a.jsonl","dataset_info":null,"columns":null,"name":null,"image_root":null,"weight":1.0,"#.to_owned()
            + r#""literal_placeholders":false,"system":null,"corpus":null}],"#
            + r#""eval":[],"eval_share":null,"eval_rows":null,"eval_group":"rows","system":null,"mixture":"repeat","stopping_strategy":"all_exhausted","packing":true,"#
            + r#""packing_length":8192,"packing_strategy":"best_fit","packing_window":1000,"#
            + r#""max_patches_per_pack":null,"balance":"none","filter_overlong":true,"#
            + r#""max_length":null,"truncation":"delete","loss_scale":"default","train_empty_think":false,"shuffle":true,"#
            + r#""image":{"min_pixels":null,"max_pixels":null,"max_tokens":null},"#
            + r#""allow_urls":false,"url":{"timeout_s":30.0,"max_bytes":33554432},"#
            + r#""video":{"fps":null,"min_frames":null,"max_frames":null,"min_pixels":null,"#
            + r#""max_pixels":null,"marks":"nested","timeout_s":60.0,"max_source_frames":36000},"length_cache":"complete","cache_dir":null,"workers":2,"unknown_keys":"warn","on_error":"skip","#
            + r#""max_rejected":0.01}"#
    );
}

#[test]
fn unknown_keys_and_impossible_values_are_refused() {
    for text in [
        r#"{"train": [], "packing_lenght": 1}"#,
        r#"{"train": [{"path": "a", "wieght": 1.0}]}"#,
        r#"{"train": [], "packing_length": 0}"#,
        r#"{"train": [], "workers": 0}"#,
        r#"{"train": [], "truncation": "middle"}"#,
        r"{}",
    ] {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn weights_and_shares_out_of_range_are_named() {
    let begins = |config: &DataConfig, expected: &str| {
        let problem = problem(config).unwrap_or_default();
        assert!(problem.starts_with(expected), "{problem}");
    };
    begins(&parse(r#"{"train": []}"#).unwrap(), "`data.train` is an empty list");
    let mut config = parse(r#"{"train": [{"path": "a"}], "eval": [{"path": "b"}]}"#).unwrap();
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        config.eval[0].weight = weight;
        begins(&config, "`data.eval.0.weight` is");
    }
    config.eval.clear();
    config.balance = Balance::Cost;
    assert_eq!(problem(&config), None);
    config.packing_strategy = PackingStrategy::Sequential;
    begins(&config, "`data.balance` is `cost`");
    config.balance = Balance::None;
    config.train_empty_think = true;
    assert_eq!(problem(&config), None);
    config.loss_scale = LossScale::IgnoreEmptyThink;
    begins(&config, "`data.train_empty_think` is true");
    config.train_empty_think = false;
    for max_rejected in [-0.1, 1.1, f64::NAN] {
        config.max_rejected = max_rejected;
        begins(&config, "`data.max_rejected` is");
    }
}

#[test]
fn keys_of_held_out_rows_that_contradict_others_are_named() {
    let of = |keys: &str| {
        problem(&parse(&format!(r#"{{"train": [{{"path": "a"}}]{keys}}}"#)).unwrap())
            .unwrap_or_default()
    };
    for keys in [
        r#", "eval_share": 0.01"#,
        r#", "eval_rows": 500, "eval_group": "images""#,
        r#", "eval": [{"path": "b"}]"#,
    ] {
        assert_eq!(of(keys), "", "{keys}");
    }
    for (keys, expected) in [
        (
            r#", "eval_share": 0.0"#,
            "`data.eval_share` is `0`, expected a share above 0 and below 1",
        ),
        (
            r#", "eval_share": 1.0"#,
            "`data.eval_share` is `1`, expected a share above 0 and below 1",
        ),
        (r#", "eval_share": 0.1, "eval_rows": 5"#, "`data.eval_rows` is set, and"),
        (r#", "eval_share": 0.1, "eval": [{"path": "b"}]"#, "`data.eval_share` holds out rows"),
        (r#", "eval_group": "id""#, "`data.eval_group` is `id`, expected no value without"),
    ] {
        assert!(of(keys).starts_with(expected), "{keys}: {}", of(keys));
    }
    assert!(parse(r#"{"train": [], "eval_rows": 0}"#).is_err());
    let corpus =
        r#"{"train": [{"path": "a.txt", "corpus": {"sampling": "document"}}], "eval_share": 0.1}"#;
    assert!(problem(&parse(corpus).unwrap()).unwrap().contains("is a corpus"));
    let corpus =
        r#"{"train": [{"path": "a.txt", "system": "S", "corpus": {"sampling": "document"}}]}"#;
    assert!(problem(&parse(corpus).unwrap()).unwrap().starts_with("`data.train.0.system` is `S`"));
}

#[test]
fn truncation_is_left_or_right_of_what_stays_and_needs_a_length() {
    let mut config = parse(r#"{"train": [{"path": "a"}], "max_length": 9}"#).unwrap();
    let max_length = NonZeroU32::new(9).unwrap();
    for (truncation, keep) in [
        (Truncation::Delete, None),
        (Truncation::Error, None),
        (Truncation::Left, Some(KeptEnd::End)),
        (Truncation::Right, Some(KeptEnd::Beginning)),
    ] {
        config.truncation = truncation;
        assert_eq!(config.truncation_rule(), keep.map(|keep| TruncationRule { max_length, keep }));
        assert_eq!(problem(&config), None);
    }
    config.max_length = None;
    let expected = "`data.truncation` is `right`, and `data.max_length` is not set";
    assert_eq!(problem(&config).unwrap(), expected);
    assert_eq!(config.truncation_rule(), None);
}

#[test]
fn the_packing_keys_become_one_value() {
    let mut config = parse(r#"{"train": [], "filter_overlong": false}"#).unwrap();
    let length = NonZeroU32::new(8192).unwrap();
    let strategy = PackingStrategy::BestFit;
    let expected = Packing::On { length, strategy, overlong: Overlong::Alone };
    assert_eq!(config.packing(), expected);
    config.packing = false;
    assert_eq!(config.packing(), Packing::Off);
    let step =
        StepPacks { micro_batches: NonZeroUsize::new(6).unwrap(), batch_size: NonZeroUsize::MIN };
    assert_eq!(config.pack_rules(step, NonZeroU64::MIN).balanced_step, None);
    config.balance = Balance::Cost;
    assert_eq!(config.pack_rules(step, NonZeroU64::MIN).balanced_step, Some(step));
}

#[test]
fn a_path_is_a_text_or_a_list_and_is_written_as_it_was_given() {
    for text in ["\"a.jsonl\"", "[\"a.jsonl\",\"b/*.parquet\"]"] {
        let path: DataPath = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&path).unwrap(), text);
    }
    assert!(serde_json::from_str::<DataPath>("[]").is_err());
    assert!(serde_json::from_str::<DataPath>("3").is_err());
}

#[test]
fn a_data_set_is_named_after_its_file_or_folder() {
    for (path, name) in [
        ("a/train.jsonl", "train"),
        ("a/train.jsonl.gz", "train"),
        ("a/train.x.jsonl", "train.x"),
        ("a/b/", "b"),
        ("a/b/**/*.parquet", "b"),
        ("*.csv", "data"),
    ] {
        assert_eq!(DataPath::from(path).name(), name);
    }
}
