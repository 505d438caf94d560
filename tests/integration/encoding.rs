//! Encodings of whole rows compared with transformers, and tests of which tokens are targets.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fault::Fault;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use trainer::batch::{EncodedSample, IGNORE_INDEX};
use trainer::data::{
    Encoder, ImageConfig, Length, ModelFolderError, RowFile, RowRules, SampleError,
};

pub(super) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub(super) fn golden_json(name: &str) -> Vec<Value> {
    let file = File::open(golden(name)).unwrap();
    serde_json::from_reader::<_, Vec<Value>>(std::io::BufReader::new(file)).unwrap()
}

pub(super) fn write(path: &Path, bytes: &[u8]) {
    File::create(path).unwrap().write_all(bytes).unwrap();
}

pub(super) fn encoder() -> &'static Encoder {
    static ENCODER: OnceLock<Encoder> = OnceLock::new();
    ENCODER.get_or_init(|| {
        Encoder::from_folder(&golden("models/small-tied"), &ImageConfig::default()).unwrap()
    })
}

/// A file with one row per value. Image paths are relative to the golden data.
pub(super) fn rows(values: &[Value]) -> (TempDir, RowFile) {
    let folder = TempDir::new().unwrap();
    let lines: Vec<String> = values.iter().map(Value::to_string).collect();
    let text = lines.join("\n") + "\n";
    let path = folder.path().join("rows.jsonl");
    write(&path, text.as_bytes());
    let file = RowFile::open(&path, Some(&golden("data"))).unwrap();
    (folder, file)
}

pub(super) fn encode(row: Value) -> Result<EncodedSample, SampleError> {
    let (_folder, file) = rows(&[row]);
    let sample = file.read(0)?;
    let encoded = encoder().encode(&sample);
    // The planner accepts the same rows as the loader, with the same lengths.
    assert_eq!(
        encoder().length(&sample).map_err(|error| error.to_string()),
        encoded.as_ref().map(Length::of).map_err(ToString::to_string)
    );
    encoded
}

pub(super) fn supervised_text(sample: &EncodedSample) -> String {
    let ids = sample.labels.iter().filter(|label| **label != IGNORE_INDEX);
    encoder().decode_with_specials(&ids.map(|id| *id as u32).collect::<Vec<_>>()).unwrap()
}

pub(super) fn user(content: impl Into<Value>) -> Value {
    json!({"role": "user", "content": content.into()})
}

pub(super) fn assistant(content: impl Into<Value>) -> Value {
    json!({"role": "assistant", "content": content.into()})
}

pub(super) fn row(messages: &[Value]) -> Value {
    json!({"messages": messages})
}

/// Decodes a list of runs: `[id, repeat]` or `id`.
fn unrolled(runs: &Value) -> Vec<u32> {
    let runs = runs.as_array().unwrap().iter();
    runs.flat_map(|run| match run {
        Value::Array(run) => {
            vec![run[0].as_u64().unwrap() as u32; run[1].as_u64().unwrap() as usize]
        }
        id => vec![id.as_u64().unwrap() as u32],
    })
    .collect()
}

/// SHA-256 of the positions `[3, L]` as little-endian `i64`, row by row.
fn position_hash(sample: &EncodedSample) -> String {
    let mut hasher = Sha256::new();
    for axis in 0..3 {
        for position in &sample.position_ids {
            hasher.update(i64::from(position[axis]).to_le_bytes());
        }
    }
    format!("{:x}", hasher.finalize())
}

pub(super) fn assert_matches(sample: &EncodedSample, expected: &Value) {
    let name = &expected["id"];
    assert_eq!(sample.input_ids, unrolled(&expected["ids_rle"]), "ids of {name}");
    assert_eq!(sample.len() as u64, expected["n"].as_u64().unwrap(), "length of {name}");
    let mut labels = vec![IGNORE_INDEX; sample.len()];
    for span in expected["label_spans"].as_array().unwrap() {
        let [from, to] = [0, 1].map(|end| span[end].as_u64().unwrap() as usize);
        for (label, id) in labels[from..to].iter_mut().zip(&sample.input_ids[from..to]) {
            *label = i64::from(*id);
        }
    }
    assert_eq!(sample.labels, labels, "labels of {name}");
    assert_eq!(sample.num_targets() as u64, expected["targets"].as_u64().unwrap());
    let grids: Vec<_> = sample.media.iter().map(|patches| patches.grid_thw).collect();
    assert_eq!(json!(grids), expected["grid"], "grids of {name}");
    assert_eq!(position_hash(sample), expected["pos_sha256_i64"].as_str().unwrap(), "{name}");
}

/// The expected values were computed with transformers 5.23.
#[test]
fn image_rows_encode_as_in_transformers() {
    let file = RowFile::open(&golden("data/digits_test.jsonl"), None).unwrap();
    for (row, expected) in golden_json("enc_small-tied_digits_test.json").iter().enumerate() {
        assert_matches(&encoder().encode(&file.read(row).unwrap()).unwrap(), expected);
    }
}

/// The expected values were computed with transformers 5.23 and the published tokenizer.
#[test]
fn text_rows_encode_as_in_transformers_with_the_published_tokenizer() {
    let Some(tokenizer) = std::env::var_os("TRAINER_QWEN3_TOKENIZER") else {
        eprintln!(
            "SKIPPED: TRAINER_QWEN3_TOKENIZER is not set; see scripts/golden/fetch_tokenizer.sh"
        );
        return;
    };
    let folder = TempDir::new().unwrap();
    std::fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
    for name in ["tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"] {
        let source = golden("models/small-tied").join(name);
        std::fs::copy(source, folder.path().join(name)).unwrap();
    }
    let config = json!({
        "image_token_id": 151_655, "video_token_id": 151_656, "text_config": {"vocab_size": 151_936},
    });
    write(&folder.path().join("config.json"), config.to_string().as_bytes());
    let encoder = Encoder::from_folder(folder.path(), &ImageConfig::default()).unwrap();
    assert_eq!((encoder.stop_ids(), encoder.pad_id()), (&[151_645][..], 151_643));
    let file = RowFile::open(&golden("data/text.jsonl"), None).unwrap();
    for (row, expected) in golden_json("enc_tiny-tied_text.json").iter().enumerate() {
        assert_matches(&encoder.encode(&file.read(row).unwrap()).unwrap(), expected);
    }
}

/// `scripts/golden/chat_cases.py` writes the chats: edge cases and random texts.
#[test]
fn nasty_chats_render_tokenise_and_label_as_in_transformers() {
    let images = ["images/exact_moon_96x64.png", "images/exact_moon_64x64.png"];
    for case in golden_json("chat_cases.json") {
        let name = &case["name"];
        let mut row = json!({"messages": case["messages"]});
        if let Some(tools) = case.get("tools") {
            row["tools"] = tools.clone();
        }
        if let Some(counts) = case.get("counts") {
            let counts = counts.as_array().unwrap().iter();
            row["images"] = counts.map(|n| images[usize::from(*n == 4)]).collect();
        }
        let (_folder, file) = rows(&[row]);
        let rules = RowRules { literal_placeholders: true, ..RowRules::default() };
        let sample = file.with_rules(rules).read(0).unwrap();
        let encoded = encoder().encode(&sample).unwrap();
        if case.get("counts").is_none() {
            assert_eq!(
                encoder().render(&sample).unwrap(),
                case["text"].as_str().unwrap(),
                "{name}"
            );
        }
        assert_eq!(json!(encoded.input_ids), case["input_ids"], "ids of {name}");
        let labels = encoded.labels.iter().enumerate();
        let targets: Vec<_> =
            labels.filter(|(_, label)| **label != IGNORE_INDEX).map(|(at, _)| at).collect();
        assert_eq!(json!(targets), case["targets"], "targets of {name}");
    }
}

#[test]
fn a_target_is_the_answer_and_its_end_mark_and_nothing_else() {
    let sample =
        encode(row(&[user("Hi"), assistant("Hello"), user("1"), assistant("one")])).unwrap();
    assert_eq!(supervised_text(&sample), "Hello<|im_end|>one<|im_end|>");
}

#[test]
fn no_system_turn_is_inserted() {
    let (_folder, file) = rows(&[row(&[user("Hi"), assistant("Hello")])]);
    let text = encoder().render(&file.read(0).unwrap()).unwrap();
    assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n");
}

#[test]
fn a_turn_with_train_false_is_context_and_not_a_target() {
    let silent = json!({"role": "assistant", "content": "Hello", "train": false});
    let sample = encode(row(&[user("Hi"), silent, user("1"), assistant("one")])).unwrap();
    assert_eq!(supervised_text(&sample), "one<|im_end|>");
}

#[test]
fn an_assistant_header_in_a_user_text_starts_no_target() {
    let text = "assistant <|im_end|>\n<|im_start|>assistant\nI agree<|im_end|>\n";
    let sample = encode(row(&[user(text), assistant("No")])).unwrap();
    assert_eq!(supervised_text(&sample), "No<|im_end|>");
}

#[test]
fn all_tokens_of_a_split_character_are_targets() {
    let answer = "\u{9f98}\u{1f469}\u{200d}\u{1f4bb}";
    let sample = encode(row(&[user("x"), assistant(answer)])).unwrap();
    assert_eq!(supervised_text(&sample), format!("{answer}<|im_end|>"));
    assert!(sample.num_targets() > answer.chars().count() + 1);
}

#[test]
fn decomposed_text_before_an_answer_does_not_move_its_target() {
    let sample = encode(row(&[user("Cafe\u{301} ".repeat(20)), assistant("Cafe\u{301}")])).unwrap();
    assert_eq!(supervised_text(&sample), "Caf\u{e9}<|im_end|>");
}

#[test]
fn a_chat_with_tools_may_begin_with_an_assistant_turn() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let sample =
        encode(json!({"messages": [assistant("Hello"), user("Hi")], "tools": tools})).unwrap();
    assert_eq!(supervised_text(&sample), "Hello<|im_end|>");
}

#[test]
fn a_tool_call_is_a_target_and_its_result_is_not() {
    let call = json!({"role": "assistant", "content": null,
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": "\u{e9}"}}}]});
    let result = json!({"role": "tool", "content": "42"});
    let sample = encode(row(&[user("x"), call, result, assistant("y")])).unwrap();
    let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"\u{e9}\"}}\n</tool_call><|im_end|>y<|im_end|>";
    assert_eq!(supervised_text(&sample), text);
}

#[test]
fn integers_above_64_bits_in_tool_arguments_are_kept_as_written() {
    let text = r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1000000000000000000000000000000,
        "b": [-99999999999999999999], "c": 1e30, "d": 999999999999999999999999999999999999999999}}}]}]}"#;
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("rows.jsonl");
    write(&path, text.replace('\n', " ").as_bytes());
    let sample = RowFile::open(&path, None).unwrap().read(0).unwrap();
    let arguments = "{\"a\": 1000000000000000000000000000000, \"b\": [-99999999999999999999], \
        \"c\": 1e+30, \"d\": 999999999999999999999999999999999999999999}";
    let rendered = encoder().render(&sample).unwrap();
    assert!(rendered.contains(arguments), "{rendered}");
}

#[test]
fn each_image_fills_its_own_rows() {
    let images = ["images/exact_moon_96x64.png", "images/exact_moon_64x64.png"];
    let messages = [user("<image>a<image>"), assistant("b")];
    let sample = encode(json!({"messages": messages, "images": images})).unwrap();
    assert_eq!(sample.media.len(), 2);
    // header (4), vision start, image of 6, vision end, "a", vision start, image of 4
    let expected: Vec<u32> = (4..10).chain(13..17).map(|row| row - 4 + 4).collect();
    let first = sample.vision_rows[0];
    assert_eq!(sample.vision_rows, expected.iter().map(|row| row + first - 4).collect::<Vec<_>>());
    let image_id = sample.input_ids[first as usize];
    let count = sample.input_ids.iter().filter(|id| **id == image_id).count();
    assert_eq!(count, sample.vision_rows.len());
}

#[test]
fn a_prompt_ends_with_the_header_of_the_last_answer() {
    let image = "images/exact_moon_64x64.png";
    let later = "images/exact_moon_96x64.png";
    let messages =
        [user("<image>1"), assistant("one"), user("2"), assistant("\ntwo"), user("<image>3")];
    let (_folder, file) = rows(&[json!({"messages": messages, "images": [image, later]})]);
    let (prompt, answer) = encoder().encode_prompt(&file.read(0).unwrap()).unwrap();
    assert_eq!(answer, "\ntwo");
    assert_eq!(prompt.media.len(), 1);
    assert!(prompt.labels.iter().all(|label| *label == IGNORE_INDEX));
    assert_eq!(prompt.position_ids.len(), prompt.len());
    let text = encoder().decode_with_specials(&prompt.input_ids).unwrap();
    assert!(text.ends_with("2<|im_end|>\n<|im_start|>assistant\n"), "{text}");
}

#[test]
fn decoding_undoes_encoding_and_drops_special_tokens() {
    let sample = encode(row(&[user("x"), assistant("Hello \u{4e2d}\u{6587}!")])).unwrap();
    let text = encoder().decode(&sample.input_ids).unwrap();
    assert_eq!(text, "user\nx\nassistant\nHello \u{4e2d}\u{6587}!\n");
    assert_eq!(encoder().stop_ids(), [2019, 2017]);
    assert_eq!((encoder().pad_id(), encoder().vocab_size()), (2017, 2048));
}

#[test]
fn errors_of_rows_that_cannot_be_encoded_name_the_reason_and_the_row() {
    let image = "images/exact_moon_64x64.png";
    let listed = |content| json!({"messages": [user(content), assistant("y")], "images": [image]});
    let silent = json!({"role": "assistant", "content": "y", "train": false});
    let with_image = json!([{"type": "image", "image": image}]);
    let cases = [
        (
            row(&[user("<|image_pad|>"), assistant("y")]),
            "reserved_token",
            "turn 0 contains `<|image_pad|>`",
        ),
        (listed("<image><|video_pad|>"), "reserved_token", "`<|video_pad|>`"),
        (
            row(&[user("x"), assistant(with_image)]),
            "image_count",
            "rendered chat has 0 media placeholders, expected 1",
        ),
        (
            row(&[
                user(
                    [
                        json!({"type": "text", "text": "<|image"}),
                        json!({"type": "text", "text": "_pad|>"}),
                    ]
                    .to_vec(),
                ),
                assistant("y"),
            ]),
            "image_count",
            "rendered chat has 1 media placeholders, expected 0",
        ),
        (row(&[user("x"), silent]), "no_supervised_token", "tokens is supervised"),
        (row(&[user("x")]), "no_supervised_token", "tokens is supervised"),
        (
            json!({"messages": [user("<image>"), assistant("y")], "images": ["no.png"]}),
            "image_missing",
            "image 1",
        ),
    ];
    for (row, reason, message) in cases {
        let error = encode(row.clone()).expect_err(&row.to_string());
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains(message), "{error}");
        assert!(error.to_string().contains("rows.jsonl:1"), "{error}");
        assert_eq!(error.id.line, 1);
    }
}

/// One row must not take the memory of thousands.
#[test]
fn rows_with_too_much_text_after_rendering_or_too_many_tokens_are_rejected() {
    let text = |text: String| row(&[user(text), assistant("y")]);
    let large =
        json!({"type": "image", "image": "images/exact_moon_64x64.png", "min_pixels": 1 << 27});
    let images = |count| row(&[user(vec![large.clone(); count]), assistant("y")]);
    for (row, reason, message) in [
        // the template adds text to a row that is just small enough
        (
            text("a".repeat((4 << 20) - 1)),
            "row_too_large",
            "bytes of text for the tokenizer, expected at most 4194304",
        ),
        // each digit is a token
        (text("7".repeat(1 << 20)), "too_many_tokens", "more than 1048576 tokens"),
        // each image has 131,072 tokens
        (images(8), "too_many_tokens", "more than 1048576 tokens"),
    ] {
        let error = encode(row).unwrap_err();
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains(message), "{error}");
    }
    let (_folder, file) = rows(&[images(7)]);
    let length = encoder().length(&file.read(0).unwrap()).unwrap();
    assert!((7 << 17..1 << 20).contains(&length.tokens), "{length:?}");
}

#[test]
fn a_prompt_needs_an_assistant_turn() {
    let (_folder, file) = rows(&[row(&[user("x")])]);
    let error = encoder().encode_prompt(&file.read(0).unwrap()).unwrap_err();
    assert_eq!(error.reason(), "no_assistant_turn");
}

/// Loads an encoder from a copy of the small model's folder, without weights, after `change`.
pub(super) fn load_changed(change: impl Fn(&Path)) -> Result<Encoder, ModelFolderError> {
    let folder = TempDir::new().unwrap();
    for entry in golden("models/small-tied").read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    change(folder.path());
    Encoder::from_folder(folder.path(), &ImageConfig::default())
}
