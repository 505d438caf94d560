//! A key that is declared once is read, has its default and its range, and is in the list of paths, in
//! the settings that decide a result, and in the schema.

mod fixture;

use fixture::{Config, Empty, Sampling, divide};
use serde_json::{Value, json};
use settings::{Setting, ValueError, schema};
use std::path::PathBuf;

fn config(value: Value) -> Config {
    serde_json::from_value(value).expect("a config")
}

fn errors(config: &Config) -> Vec<String> {
    let mut errors: Vec<ValueError> = Vec::new();
    config.check_values("", &mut errors);
    errors.iter().map(ToString::to_string).collect()
}

#[test]
fn a_new_key_needs_at_most_four_places() {
    let source = include_str!("fixture/mod.rs");
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    // The field and its use; a program has a line in a page, which is generated, and a test more.
    assert_eq!(code.filter(|line| line.contains("temperature")).count(), 2);
    assert_eq!(divide(1.0, &Sampling { temperature: 0.5, ..Sampling::default() }), 2.0);
}

#[test]
fn defaults_are_those_of_the_fields_and_other_keys_are_refused() {
    let default = Sampling { temperature: 1.0, threads: 2, empty: Empty::UseNext, stop: None };
    assert_eq!(Sampling::default(), default);
    let read = config(json!({"model": "m", "prompts": [{}], "best": {"threads": 3}}));
    assert_eq!(read.prompts, std::slice::from_ref(&default));
    assert_eq!(read.best, Some(Sampling { threads: 3, ..default }));
    assert_eq!(read.scores, [1.0, 0.5]);
    for (text, expected) in [
        ("{}", "missing field `model`"),
        (r#"{"model": "m", "prompt": []}"#, "unknown field `prompt`, expected one of `model`"),
        (r#"{"model": "m", "best": {"empty": "keep"}}"#, "expected `use_next` or `keep!`"),
    ] {
        let error = serde_json::from_str::<Config>(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    assert_eq!(Empty::Keep.name(), "keep!");
}

#[test]
fn each_number_out_of_its_range_is_named_with_the_first_range_that_it_is_outside_of() {
    assert_eq!(errors(&config(json!({"model": "m"}))), [""; 0]);
    let wrong = json!({
        "model": "m", "scores": [0.0, 1.5],
        "prompts": [{"temperature": 2.0}, {"temperature": 0.0}], "best": {"temperature": 3},
    });
    let expected = [
        "`prompts.1.temperature` is `0`, expected a finite number above 0",
        "`best.temperature` is `3`, expected at most 2",
        "`scores.1` is `1.5`, expected a number from 0 to below 1.5",
    ];
    assert_eq!(errors(&config(wrong)), expected);
    let best = Sampling { temperature: f64::NAN, ..Sampling::default() };
    let nan = Config { best: Some(best), ..config(json!({"model": "m"})) };
    let expected = ["`best.temperature` is `NaN`, expected a finite number above 0"];
    assert_eq!(errors(&nan), expected);
    let mut found = Vec::new();
    config(json!({"model": "m", "best": {"temperature": 3}})).check_values("", &mut found);
    let hint = |error: &ValueError| fault::Fault::hint(error).unwrap();
    assert_eq!(hint(&found[0]), "a usual value is 0.7");
    let expected = "change or remove `a.b`; `docs/config.md` has its default";
    assert_eq!(hint(&ValueError::new("a.b", 1, "2")), expected);
}

#[test]
fn each_path_is_visited_with_its_key() {
    let mut config = config(json!({"model": "m", "prompts": [{}, {"stop": "s"}], "best": {}}));
    let mut keys = Vec::new();
    config.paths("", &mut |key, path: &mut PathBuf| {
        keys.push(format!("{key}={}", path.display()));
        path.push("x");
    });
    assert_eq!(keys, ["model=m", "prompts.1.stop=s"]);
    assert_eq!(config.prompts[1].stop, Some("s/x".into()));
}

#[test]
fn neutral_keys_are_removed_in_lists_and_in_optional_sections() {
    let read = config(json!({"model": "m", "prompts": [{"threads": 3}], "best": {"threads": 4}}));
    let mut value = serde_json::to_value(read).unwrap();
    Config::kind().remove_neutral(&mut value);
    let section = json!({"temperature": 1.0, "empty": "use_next", "stop": null});
    let expected =
        json!({"model": "m", "prompts": [section], "best": section, "scores": [1.0, 0.5]});
    assert_eq!(value, expected);
}

#[test]
fn the_schema_has_types_ranges_defaults_and_meanings() {
    let schema = schema(&Config::kind(), "A config");
    assert_eq!(schema["required"], json!(["model"]));
    assert_eq!(schema["additionalProperties"], false);
    let scores = &schema["properties"]["scores"];
    let item = json!({"type": "number", "minimum": 0.0, "exclusiveMaximum": 1.5});
    assert_eq!((&scores["items"], &scores["maxItems"]), (&item, &json!(2)));
    let sampling = &schema["properties"]["prompts"]["items"]["properties"];
    let expected = json!({
        "type": "number", "exclusiveMinimum": 0.0, "maximum": 2.0, "default": 1.0,
        "description": "Shape of the distribution; see sampling",
    });
    assert_eq!(sampling["temperature"], expected);
    let names = sampling["empty"]["oneOf"].as_array().unwrap();
    let expected = json!([
        {"const": "use_next", "description": "Use the next one"},
        {"const": "keep!", "description": ""},
    ]);
    assert_eq!(Value::from(names.clone()), expected);
    let stop = json!([{"type": "string"}, {"type": "null"}]);
    assert_eq!(sampling["stop"]["anyOf"], stop);
}
