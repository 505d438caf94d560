//! Names of columns and roles, and entries that are refused.

use super::*;
use serde_json::json;

fn info(entry: &Value) -> Result<DatasetInfo, DatasetInfoError> {
    let Value::Object(entry) = entry else { panic!("an object") };
    InfoEntry { path: Path::new("data/dataset_info.json"), name: "a", keys: entry }.info()
}

fn applied(entry: &Value, row: Value) -> Value {
    let Value::Object(object) = row else { panic!("an object") };
    let mut row = RawRow { object, blobs: Vec::new() };
    info(entry).unwrap().mapping.apply(&mut row);
    Value::Object(row.object)
}

#[test]
fn columns_of_an_alpaca_row_get_our_names() {
    let entry = json!({"file_name": "a.json", "columns": {
        "prompt": "question", "query": "context", "response": "answer", "images": "photos"}});
    let row = json!({"id": 7, "question": "q", "context": "c", "answer": "a",
        "photos": ["p.png"], "system": "not named by the entry, so not read"});
    let expected = json!({"id": 7, "instruction": "q", "input": "c", "output": "a",
        "images": ["p.png"]});
    assert_eq!(applied(&entry, row), expected);
}

#[test]
fn columns_may_swap_their_names() {
    let entry = json!({"file_name": "a.json", "columns": {
        "prompt": "output", "response": "instruction"}});
    let row = json!({"instruction": "the answer", "output": "the question"});
    let expected = json!({"instruction": "the question", "output": "the answer"});
    assert_eq!(applied(&entry, row), expected);
}

#[test]
fn columns_replace_all_defaults() {
    let entry =
        json!({"file_name": "a.json", "columns": {"prompt": "instruction", "response": "output"}});
    let row = json!({"instruction": "q", "input": "not named", "output": "a"});
    assert_eq!(applied(&entry, row), json!({"instruction": "q", "output": "a"}));
}

#[test]
fn tags_of_a_sharegpt_row_get_our_roles() {
    let entry = json!({"file_name": "a.json", "formatting": "sharegpt",
        "columns": {"messages": "messages", "system": "intro"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
            "assistant_tag": "assistant", "observation_tag": "tool"}});
    let row = json!({"intro": "s", "messages": [{"role": "user", "content": "q"},
        {"role": "function_call", "content": "f"}, {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a"}]});
    let expected = json!({"system": "s", "conversations": [{"from": "human", "value": "q"},
        {"from": "function_call", "value": "f"}, {"from": "observation", "value": "t"},
        {"from": "gpt", "value": "a"}]});
    assert_eq!(applied(&entry, row), expected);
}

#[test]
fn a_system_turn_wins_over_the_system_column() {
    let entry = json!({"file_name": "a.json", "formatting": "sharegpt",
        "columns": {"messages": "conversations", "system": "system"}});
    let row = json!({"system": "column", "conversations": [
        {"from": "system", "value": "turn"}, {"from": "human", "value": "q"}]});
    assert_eq!(applied(&entry, row.clone())["system"], Value::Null);
}

#[test]
fn the_rows_and_their_images_are_relative_to_the_file() {
    let info = info(&json!({"file_name": "sub/a.jsonl", "num_samples": 5})).unwrap();
    assert_eq!(info.path(), Path::new("data/sub/a.jsonl"));
    assert_eq!((info.folder(), info.num_samples()), (Path::new("data"), Some(5)));
}

#[test]
fn entries_that_are_not_supported_are_refused_by_name() {
    for (key, entry) in [
        ("hf_hub_url", json!({"hf_hub_url": "a/b", "file_name": "a.json"})),
        ("script_url", json!({"script_url": "s"})),
        ("ranking", json!({"file_name": "a.json", "ranking": true})),
        ("subset", json!({"file_name": "a.json", "subset": "s"})),
        ("split", json!({"file_name": "a.json", "split": "test"})),
        ("formatting", json!({"file_name": "a.json", "formatting": "other"})),
        ("columns.chosen", json!({"file_name": "a.json", "columns": {"chosen": "c"}})),
        (
            "tags.other_tag",
            json!({"file_name": "a.json", "formatting": "sharegpt",
            "tags": {"other_tag": "c"}}),
        ),
        ("num_samples", json!({"file_name": "a.json", "num_samples": -1})),
        ("file_nam", json!({"file_nam": "a.json"})),
        ("file_name", json!({})),
    ] {
        let message = info(&entry).unwrap_err().to_string();
        assert!(message.starts_with(&format!("`{key}` of `a`")), "{message}");
    }
    assert!(info(&json!({"file_name": "a.json", "ranking": false, "subset": null})).is_ok());
}

#[test]
fn another_mapping_has_another_digest() {
    let digest = |entry: Value| info(&entry).unwrap().digest();
    let plain = digest(json!({"file_name": "a.json"}));
    assert_eq!(plain, digest(json!({"file_name": "b.json"})));
    let other = json!({"file_name": "a.json", "columns": {"response": "answer"}});
    assert_ne!(plain, digest(other));
}
