//! Files with a column of images and columns of texts: the images are never dropped.

use super::encoding::encoder;
use super::harness::{Place, golden, write};
use arrow_array::{ArrayRef, BinaryArray, RecordBatch, StringArray, Time64MicrosecondArray};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use trainer::batch::EncodedSample;
use trainer::data::{ColumnNames, RowFile, RowRules};

const IMAGE: &str = "rgb.jpg";
const QUESTION: &str = "What is shown?";
const ANSWER: &str = "A gradient.";

fn images() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images")
}

fn encode(file: &Path, rules: RowRules) -> EncodedSample {
    let file = RowFile::open_with(&[file.to_owned()], Some(&images()), rules).unwrap();
    encoder().encode(&file.read(0).unwrap()).unwrap()
}

/// The row of a chat that means the same as an image, a question and an answer.
fn plain(place: &Place, question: Option<&str>) -> EncodedSample {
    let mut parts = vec![json!({"type": "image", "image": IMAGE})];
    parts.extend(question.map(|text| json!({"type": "text", "text": text})));
    let row = json!({"messages": [
        {"role": "user", "content": parts}, {"role": "assistant", "content": ANSWER},
    ]});
    place.write("plain.jsonl", &row.to_string());
    encode(&place.path("plain.jsonl"), RowRules::default())
}

/// A Parquet file with one row: columns of text, and `image` with the bytes of a file.
fn parquet(place: &Place, name: &str, image: &str, texts: &[(&str, &str)]) -> std::path::PathBuf {
    let bytes = fs::read(images().join(IMAGE)).unwrap();
    let mut columns = vec![(image, Arc::new(BinaryArray::from(vec![&bytes[..]])) as ArrayRef)];
    for (name, text) in texts {
        columns.push((name, Arc::new(StringArray::from(vec![*text]))));
    }
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let path = place.path(name);
    let mut writer =
        ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    path
}

#[test]
fn an_image_with_a_question_and_an_answer_is_a_chat_in_every_format() {
    let place = Place::empty();
    let texts = [("question", QUESTION), ("answer", ANSWER)];
    let row = json!({"image": IMAGE, "question": QUESTION, "answer": ANSWER});
    place.write("a.jsonl", &row.to_string());
    place.write("a.json", &json!([row]).to_string());
    place.write("a.csv", &format!("image,question,answer\n{IMAGE},{QUESTION},{ANSWER}\n"));
    parquet(&place, "a.parquet", "image", &texts);
    let expected = plain(&place, Some(QUESTION));
    for name in ["a.jsonl", "a.json", "a.csv", "a.parquet"] {
        let found = encode(&place.path(name), RowRules::default());
        assert_eq!(
            (found.input_ids, found.labels),
            (expected.input_ids.clone(), expected.labels.clone()),
            "{name}"
        );
        assert_eq!(found.media, expected.media, "{name}");
    }
}

#[test]
fn an_image_with_a_text_is_the_chat_of_the_image_alone() {
    let place = Place::empty();
    let expected = plain(&place, None);
    for key in ["text", "caption"] {
        let path = parquet(&place, "a.parquet", "image", &[(key, ANSWER)]);
        let found = encode(&path, RowRules::default());
        assert_eq!(
            (found.input_ids, found.media),
            (expected.input_ids.clone(), expected.media.clone())
        );
    }
}

#[test]
fn columns_of_any_name_are_read_if_the_data_set_names_them() {
    let place = Place::empty();
    let columns = |names: Value| {
        let names: ColumnNames = serde_json::from_value(names).unwrap();
        RowRules { columns: Some(Arc::new(names)), ..RowRules::default() }
    };
    let texts = [("request", QUESTION), ("reply", ANSWER), ("prompt", "x"), ("completion", "y")];
    let path = parquet(&place, "a.parquet", "picture", &texts);
    let rules = columns(json!({"prompt": "request", "response": "reply", "images": "picture"}));
    let (found, expected) = (encode(&path, rules), plain(&place, Some(QUESTION)));
    assert_eq!((found.input_ids, found.media), (expected.input_ids, expected.media));
    let rules = columns(json!({"response": "reply", "images": "picture"}));
    assert_eq!(encode(&path, rules).input_ids, plain(&place, None).input_ids);
    // an image that is not named keeps its meaning
    let path = parquet(&place, "b.parquet", "image", &texts);
    let rules = columns(json!({"prompt": "request", "response": "reply"}));
    assert_eq!(encode(&path, rules).input_ids, plain(&place, Some(QUESTION)).input_ids);
    // turns under another name
    let turns = json!([{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]);
    place.write("c.jsonl", &json!({"picture": IMAGE, "dialog": turns}).to_string());
    let rules = columns(json!({"messages": "dialog", "images": "picture"}));
    assert_eq!(
        encode(&place.path("c.jsonl"), rules).input_ids,
        plain(&place, Some(QUESTION)).input_ids
    );
}

/// A config with this data set.
fn with_set(place: &Place, set: &str) {
    let model = golden("models/small-tied");
    place.write(
        "c.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: '{}'}}\ndata: {{train: [{set}]}}\n",
            model.display()
        ),
    );
}

#[test]
fn a_corpus_with_a_column_of_images_is_an_error() {
    let place = Place::empty();
    let no_picture = json!({"text": "a long text"}).to_string();
    for (column, message) in [
        (
            "image",
            "has rows of the form `media with text`, but its data set has a `corpus` section",
        ),
        ("img", "unknown row form: found `img`, `text`"),
        ("scan", "unknown row form: found `scan`, `text`"),
    ] {
        parquet(&place, "a.parquet", column, &[("text", ANSWER)]);
        with_set(&place, "{path: a.parquet, corpus: {sampling: document}}");
        for command in ["inspect", "check"] {
            let output = place.trainer(&[command, "--config", "c.yaml"]).ends_with(65);
            let text = output.stdout + &output.stderr; // `check` prints to stdout
            assert!(text.contains(message), "{command}: {text}");
        }
    }
    // the first row has no image
    let row = json!({"text": ANSWER, "image": IMAGE}).to_string();
    place.write("a.jsonl", &format!("{no_picture}\n{row}\n"));
    with_set(&place, "{path: a.jsonl, corpus: {sampling: document}}");
    place.trainer(&["inspect", "--config", "c.yaml"]).ends_with(65).says("media with text");
    // the first hundred rows have none
    place
        .write("a.jsonl", &(format!("{no_picture}\n").repeat(100) + &format!("{row}\n").repeat(3)));
    let output = place.trainer(&["inspect", "--config", "c.yaml", "--num", "0"]).ends_with(65);
    output.says("a.jsonl:101: `image`: images and videos in a corpus are not supported");
}

#[test]
fn columns_that_contradict_another_key_are_refused_with_the_key() {
    let place = Place::empty();
    place.write("a.jsonl", &json!({"a": "b", "c": "d"}).to_string());
    for (set, key) in [
        ("{path: a.jsonl, columns: {prompt: a}}", "data.train.0.columns.response"),
        ("{path: a.jsonl, columns: {messages: a, response: c}}", "data.train.0.columns.messages"),
        (
            "{path: a.jsonl, columns: {response: c}, corpus: {sampling: document}}",
            "data.train.0.columns",
        ),
        ("{dataset_info: 'a.json#b', columns: {response: c}}", "data.train.0.columns"),
        ("{path: a.jsonl, columns: {respons: c}}", "respons"),
    ] {
        with_set(&place, set);
        let output = place.trainer(&["inspect", "--config", "c.yaml"]).ends_with(64);
        assert!(output.stderr.contains(key), "{set}: {}", output.stderr);
    }
    with_set(&place, "{path: a.jsonl}");
    let output = place.trainer(&["inspect", "--config", "c.yaml"]).ends_with(65);
    output.says("columns: {prompt: question, response: answer, images: image}");
}

/// docs/data-format.md: "dates and times become text".
#[test]
fn a_time_of_day_becomes_text() {
    let place = Place::empty();
    let columns = [
        ("prompt", Arc::new(StringArray::from(vec!["When?"])) as ArrayRef),
        ("completion", Arc::new(Time64MicrosecondArray::from(vec![45_296_000_000i64]))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let path = place.path("a.parquet");
    let mut writer =
        ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let file = RowFile::open(&path, None).unwrap();
    let text = encoder().render(&file.read(0).unwrap()).unwrap();
    assert!(text.contains("assistant\n12:34:56<|im_end|>"), "{text}");
}

#[test]
fn a_null_is_named_in_the_message_of_an_unknown_form() {
    let place = Place::empty();
    place.write("a.jsonl", r#"{"query": "a", "response": null}"#);
    let error = RowFile::open(&place.path("a.jsonl"), None).unwrap_err().to_string();
    assert!(error.contains("found `query`, `response` (null), expected"), "{error}");
}

#[test]
fn nan_in_a_row_is_named() {
    let place = Place::empty();
    for number in ["NaN", "Infinity", "-Infinity"] {
        let row = format!(r#"{{"prompt": "a", "completion": "b", "score": [1, {number}]}}"#);
        write(&place.path("a.jsonl"), row.as_bytes());
        let error = RowFile::open(&place.path("a.jsonl"), None).unwrap_err().to_string();
        let named = format!("invalid JSON: `{number}` is no JSON value; write null or a number");
        assert!(error.contains(&named), "{error}");
    }
}

#[test]
fn check_counts_the_rows_whose_texts_have_boxes_of_another_unit() {
    let place = Place::empty();
    let row = |list: &str| {
        let answer = format!(r#"[{{"bbox_2d": {list}, "label": "eye"}}]"#);
        let question = format!("<image>{QUESTION}");
        json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], "images": ["exact_96x64.png"]})
            .to_string()
    };
    let lists = [
        "[1, 2, 3, 4]",
        "[0.1, 0.2, 0.5, 0.6]",
        "[1, 2, 1500, 1600]",
        "[5, 5, 300, 999]",
        "[-1, 2, 3, 4]",
        "[1, 2, 1, 4]",
    ];
    place.write("a.jsonl", &lists.map(row).join("\n"));
    with_set(&place, &format!("{{path: a.jsonl, image_root: '{}'}}", images().display()));
    let config = String::from_utf8(place.read("c.yaml")).unwrap();
    // Qwen2.5-VL writes pixels, and the image is smaller than 300 x 999.
    for (model, outside) in [("small-tied", 2), ("small-qwen25vl", 3)] {
        place.write("c.yaml", &config.replace("small-tied", model));
        let output = place.trainer(&["check", "--config", "c.yaml"]);
        let text = output.stdout + &output.stderr;
        for line in [
            "1 of 6 rows have boxes with fractions in a text",
            &format!("{outside} of 6 rows have boxes outside of the image in a text"),
            "1 of 6 rows have boxes without an area in a text",
        ] {
            assert!(text.contains(&format!("a.jsonl: {line}")), "{model}: {text}");
        }
    }
}
