//! Boxes and names of objects: their text, their rejections, and the page that shows them.

use std::path::Path;

use fault::Fault;
use serde_json::{Value, json};
use trainer::batch::EncodedSample;
use trainer::data::{Length, RowFile, RowRules, SampleError};

use super::encoding::{assistant, encoder, supervised_text, user, write};
use super::harness::Place;

fn fixtures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images")
}

fn encode_with(row: &Value, rules: RowRules) -> Result<EncodedSample, SampleError> {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("rows.jsonl");
    write(&path, row.to_string().as_bytes());
    let file = RowFile::open(&path, Some(&fixtures())).unwrap().with_rules(rules);
    let sample = file.read(0)?;
    let encoded = encoder().encode(&sample);
    assert_eq!(
        encoder().length(&sample).map_err(|error| error.to_string()),
        encoded.as_ref().map(Length::of).map_err(ToString::to_string)
    );
    encoded
}

fn encode(row: &Value) -> Result<EncodedSample, SampleError> {
    encode_with(row, RowRules::default())
}

/// A row whose answer is `answer`, with these images and objects.
fn row(images: &[&str], answer: &str, objects: &Value) -> Value {
    let placeholders = "<image>".repeat(images.len());
    json!({
        "messages": [user(format!("{placeholders}Where?")), assistant(answer)],
        "images": images, "objects": objects,
    })
}

fn answer(row: &Value) -> String {
    supervised_text(&encode(row).unwrap()).replace("<|im_end|>", "")
}

fn reason(row: &Value) -> &'static str {
    encode(row).unwrap_err().reason()
}

#[test]
fn a_box_becomes_thousandths_of_the_image_before_any_resize() {
    let photo = ["photo_150x100.png"];
    for (unit, bbox, expected) in [
        (json!("real"), json!([30, 20, 75.4, 60]), "[200, 200, 503, 600]"),
        (Value::Null, json!([0, 0, 150, 100]), "[0, 0, 1000, 1000]"),
        (json!("norm1"), json!([0.25, 0.5, 0.7535, 1.0]), "[250, 500, 754, 1000]"),
        (json!("norm1000"), json!([1, 2.5, 3.5, 1000]), "[1, 2, 4, 1000]"),
        (json!("real"), json!([15, 10]), "[100, 100]"),
    ] {
        let objects = json!({"bbox": [bbox], "bbox_type": unit});
        assert_eq!(answer(&row(&photo, "at <bbox>.", &objects)), format!("at {expected}."));
    }
}

#[test]
fn names_and_boxes_fill_their_placeholders_in_the_order_of_the_text() {
    let mut row = row(
        &["photo_150x100.png", "photo_40x30.png"],
        "<ref-object>: <bbox>, <ref-object>: <bbox>",
        &json!({"ref": ["eye", "<bbox> & <ref-object>", "ear"], "bbox": [[15, 10, 30, 20], [4, 3, 20, 15]], "image_id": [0, 1]}),
    );
    row["messages"][0]["content"] = json!("<image>Find the <ref-object>.<image>");
    // a name is not searched for placeholders
    let expected = "<bbox> & <ref-object>: [100, 100, 200, 200], ear: [100, 100, 500, 500]";
    assert_eq!(answer(&row), expected);
    let ids = encode(&row).unwrap().input_ids;
    assert!(encoder().decode(&ids).unwrap().contains("Find the eye."));
}

/// The stored image is 40 x 30 (or the reverse), and viewers turn it.
#[test]
fn boxes_count_in_the_upright_image() {
    let (width, height) = (24, 16); // as stored; EXIF says to turn it
    let objects = json!({"bbox": [[0, 0, height, width]]});
    let row = row(&["orientation_6.jpg"], "<bbox>", &objects);
    assert_eq!(answer(&row), "[0, 0, 1000, 1000]");
}

#[test]
fn boxes_that_cannot_be_meant_reject_the_row() {
    let photo = ["photo_150x100.png"];
    for (objects, expected) in [
        (json!({"bbox": [[0, 0, 151, 50]]}), "box_range"),
        (json!({"bbox": [[0, 0, 150, 100.5]]}), "box_range"),
        (json!({"bbox": [[-1, 0, 150, 100]]}), "box_range"),
        (json!({"bbox": [[0, 0, 1.5, 1]], "bbox_type": "norm1"}), "box_range"),
        (json!({"bbox": [[0, 0, 999, 1001]], "bbox_type": "norm1000"}), "box_range"),
        (json!({"bbox": [[50, 0, 20, 10]]}), "box_inverted"),
        (json!({"bbox": [[0, 50, 20, 10]]}), "box_inverted"),
        (json!({"bbox": [[0, 0, 9, 9], [0, 0, 9, 9]]}), "box_count"),
        (json!({"bbox": []}), "box_count"),
        (json!({"bbox": [[0, 0, 9, 9]], "ref": ["eye"]}), "box_count"),
        (json!({"bbox": [[0, 0, 9, 9]], "bbox_type": "xywh"}), "box_type"),
        (json!({"bbox": [[0, 0, 9, 9]], "image_id": [1]}), "box_image"),
        (json!({"bbox": [[0, 0, 9]]}), "wrong_type"),
        (json!({"bbox": [[0, 0, 9, "9"]]}), "wrong_type"),
        (json!({"bbox": [[0, 0, 9, 9]], "image_id": [-1]}), "wrong_type"),
        (json!({"bbox": [[0, 0, 9, 9]], "image_id": [0, 0]}), "missing_key"),
        (json!({"bbox": [[0, 0, 9, 9]], "label": ["eye"]}), "not_supported"),
    ] {
        assert_eq!(reason(&row(&photo, "<bbox>", &objects)), expected, "{objects}");
    }
    let objects = json!({"bbox": [[0, 0, 9, 9]]});
    assert_eq!(reason(&row(&["missing.png"], "<bbox>", &objects)), "image_missing");
    assert_eq!(reason(&row(&[], "<bbox>", &objects)), "box_image");
}

#[test]
fn placeholders_without_objects_are_rejected_unless_they_are_literal() {
    for text in ["at <bbox>", "the <ref-object>"] {
        let row = json!({"messages": [user("Where?"), assistant(text)]});
        assert_eq!(reason(&row), "box_count");
        let rules = RowRules { literal_placeholders: true, ..RowRules::default() };
        let encoded = encode_with(&row, rules).unwrap();
        assert_eq!(supervised_text(&encoded), format!("{text}<|im_end|>"));
    }
}

#[test]
fn the_example_of_the_manual_is_what_the_model_sees() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/data-format.md");
    let page = std::fs::read_to_string(page).unwrap();
    let section = page.split("\n## Grounding\n").nth(1).unwrap();
    let block = |language: &str| {
        let block = section.split(&format!("```{language}\n")).nth(1).unwrap();
        block.split("\n```").next().unwrap()
    };
    let row: Value = serde_json::from_str(block("jsonl")).unwrap();
    assert_eq!(answer(&row), block("text"));
}

#[test]
fn the_page_of_inspect_draws_each_box_on_its_image() {
    let place = Place::empty();
    let rows = row(
        &["photo_150x100.png", "photo_40x30.png"],
        "<bbox> <bbox>",
        &json!({"bbox": [[30, 20, 75, 60], [4, 3, 20, 15]], "image_id": [0, 1]}),
    );
    place.write("rows.jsonl", &rows.to_string());
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/small-tied");
    let config = format!(
        "output_dir: run\nmodel: {{path: '{}'}}\ndata:\n  train: [{{path: rows.jsonl, image_root: '{}'}}]\n",
        model.display(),
        fixtures().display()
    );
    place.write("config.yaml", &config);
    place.trainer(&["inspect", "--config", "config.yaml", "--html", "page.html"]).ends_with(0);
    let page = String::from_utf8(place.read("page.html")).unwrap();
    let figures: Vec<&str> = page.split("<figure>").skip(1).collect();
    for (figure, style) in [
        (figures[0], "left:20%;top:20%;width:30%;height:40%"),
        (figures[1], "left:10%;top:10%;width:40%;height:40%"),
    ] {
        let boxes: Vec<&str> = figure.split("class=\"box\" style=\"").skip(1).collect();
        assert_eq!(boxes.len(), 1, "{figure}");
        assert!(boxes[0].starts_with(style), "{}", boxes[0]);
    }
}
