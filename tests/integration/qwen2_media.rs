//! Videos and boxes of Qwen2.5-VL and Qwen2-VL, compared with transformers. `scripts/golden/qwen2_video.py` writes
//! the expected values of videos. `internvl` and `minicpm` compare the same values of their videos.

use super::harness::{Place, device, golden, write};
use super::parity::{
    PLAIN, assert_all_variants_follow, assert_gradient_norms, golden_json, rows_for, runner_of,
};
use crate::video::assert_tokens;
use candle_transformers::generation::Sampling;
use fault::Fault;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::sync::Arc;
use trainer::batch::{EncodedSample, MediumKind, Patches};
use trainer::data::{
    CachedRows, DatasetConfig, DatasetRows, Encoder, ImageConfig, Length, RowFile, RowReader,
    SampleError, VideoConfig,
};
use trainer::run::OpenModel;
use trainer::train::{GenerateOptions, ModelSection, Precision, generate};

const MODEL: &str = "small-qwen25vl";
const OLDER: &str = "small-qwen2vl";

/// Made by `scripts/golden/qwen2_video.py` and `internvl_video.py`.
fn golden_videos(model: &str) -> Value {
    golden_json(match model {
        MODEL => "qwen25_video.json",
        OLDER => "qwen2_video.json",
        "small-internvl" => "internvl_video.json",
        _ => panic!("{model} has no such file"),
    })
}

#[test]
fn rows_with_videos_of_qwen25_vl_encode_as_in_transformers() {
    assert_rows_encode(MODEL, &["sampled", "slow", "odd"]);
}

#[test]
fn rows_with_videos_of_qwen2_vl_encode_as_in_transformers() {
    assert_rows_encode(OLDER, &["slow"]);
}

/// The script places the text after the videos of the rows `moved`; all other positions are
/// transformers' own.
pub(super) fn assert_rows_encode(model: &str, moved: &[&str]) {
    let golden = golden_videos(model);
    let expected = golden["rows"].as_array().unwrap();
    let others = expected.iter().filter(|row| row["as_transformers"] != true);
    let others: Vec<&Value> = others.map(|row| &row["id"]).collect();
    assert_eq!(json!(others), json!(moved));
    assert_encode(&rows_for(model, "video_28"), expected);
}

/// Compares rows, their videos and, if the file has their hash, their images with the reference.
pub(super) fn assert_encode(rows: &DatasetRows, expected: &[Value]) {
    let encoder = rows.encoder();
    assert_eq!(rows.rows().count(), expected.len());
    for (row, expected) in rows.rows().zip(expected) {
        let (sample, name) = (rows.read(row).unwrap(), &expected["id"]);
        // the planner reads headers only
        assert_eq!(rows.length(row).unwrap(), Length::of(&sample), "{name}");
        assert_tokens(encoder, &sample, expected);
        for (kind, [grid, sha256]) in [
            (MediumKind::Video, ["video_grid_thw", "video_sha256"]),
            (MediumKind::Image, ["image_grid_thw", "image_sha256"]),
        ] {
            let of: Vec<&Patches> = sample.media.iter().filter(|of| of.kind == kind).collect();
            let grids: Vec<[u32; 3]> = of.iter().map(|patches| patches.grid_thw).collect();
            assert_eq!(json!(grids), expected[grid], "grids of {name}");
            let values = of.iter().flat_map(|patches| &patches.pixel_values);
            let bytes: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
            let digest = (!bytes.is_empty()).then(|| format!("{:x}", Sha256::digest(bytes)));
            if let Some(expected) = expected.get(sha256) {
                assert_eq!(json!(digest), *expected, "pixels of {name}");
            }
        }
    }
}

#[test]
fn qwen25_vl_with_videos_follows_the_reference_in_every_layout() {
    assert_curve_with_videos(MODEL);
}

#[test]
fn qwen2_vl_with_videos_follows_the_reference_in_every_layout() {
    assert_curve_with_videos(OLDER);
}

pub(super) fn assert_curve_with_videos(model: &str) {
    assert_curve(&rows_for(model, "video_28"), &golden_videos(model)["curve"]);
}

/// `rows` are those of the curve.
pub(super) fn assert_curve(rows: &DatasetRows, curve: &Value) {
    assert_all_variants_follow(curve);
    let runner = runner_of(curve, PLAIN, Precision::F32);
    assert_gradient_norms(rows, &runner, &curve["grad_norms_step1"]);
}

#[test]
fn greedy_answers_of_qwen25_vl_about_videos_are_the_references() {
    assert_answers_about_videos(MODEL);
}

#[test]
fn greedy_answers_of_qwen2_vl_about_videos_are_the_references() {
    assert_answers_about_videos(OLDER);
}

pub(super) fn assert_answers_about_videos(name: &str) {
    let folder = golden("models").join(name);
    assert_short_answers(folder, "video_28", golden_videos(name)["rows"].as_array().unwrap());
}

/// Compares greedy answers of the model in `folder` about all rows of a file with the reference.
pub(super) fn assert_short_answers(folder: PathBuf, data: &str, expected: &[Value]) {
    let encoder = Encoder::from_folder(&folder, &ImageConfig::default()).unwrap();
    let open = OpenModel::open(&ModelSection::new(folder), 0, &device()).unwrap();
    let model = open.load(&device()).unwrap().model;
    let options = GenerateOptions {
        max_new_tokens: 8,
        sampling: Sampling::ArgMax,
        seed: 0,
        stop_ids: Vec::new(),
    };
    let file = RowFile::open(&golden(&format!("data/{data}.jsonl")), None).unwrap();
    for (row, expected) in expected.iter().enumerate() {
        let (prompt, _) = encoder.encode_prompt(&file.read(row).unwrap()).unwrap();
        let ids = generate(&model, prompt, &options, &device()).unwrap();
        assert_eq!(json!(ids), expected["answer"], "{}", expected["id"]);
    }
}

#[test]
fn the_config_limits_the_frames_and_pixels_of_videos() {
    let row = json!({
        "messages": [
            {"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "a"},
        ],
        "videos": [{"video": (0..9).map(|k| format!("video28/pan_{k}.png")).collect::<Vec<_>>(), "fps": 9}],
    });
    let none = VideoConfig::default;
    for (config, expected) in [
        (none(), [2, 4, 4]),
        (VideoConfig { fps: Some(6.0), ..none() }, [3, 4, 4]),
        (VideoConfig { fps: Some(9.0), ..none() }, [4, 4, 4]),
        (VideoConfig { min_frames: Some(7), ..none() }, [3, 4, 4]),
        (VideoConfig { max_pixels: Some(4 * 28 * 56), ..none() }, [2, 2, 2]),
        (VideoConfig { min_pixels: Some(4 * 80 * 80), ..none() }, [2, 6, 6]),
    ] {
        let folder = golden("models").join(MODEL);
        let encoder = Encoder::with_video(&folder, &ImageConfig::default(), &config).unwrap();
        let sample = encode(&encoder, &row).unwrap();
        assert_eq!(sample.media[0].grid_thw, expected, "{config:?}");
    }
}

/// An odd last frame is repeated, and the positions of Qwen2.5-VL follow from the rate.
#[test]
fn frames_with_the_rate_at_which_they_were_sampled_are_all_used() {
    let encoder = |model| {
        Encoder::from_folder(&golden("models").join(model), &ImageConfig::default()).unwrap()
    };
    let encoders = [MODEL, OLDER].map(encoder);
    for (encoder, frames, rate, groups, step) in [
        (&encoders[0], 8, 4.0, 4, 1),
        (&encoders[0], 5, 1.0, 3, 4),
        (&encoders[0], 9, 0.5, 5, 8),
        (&encoders[1], 8, 4.0, 4, 1),
        (&encoders[1], 9, 0.5, 5, 1),
    ] {
        let frames: Vec<_> = (0..frames).map(|k| format!("video28/pan_{k}.png")).collect();
        let video = json!({"type": "video", "video": frames, "sample_fps": rate});
        let row = json!({"messages": [
            {"role": "user", "content": [video]}, {"role": "assistant", "content": "a"},
        ]});
        let sample = encode(encoder, &row).unwrap();
        assert_eq!(sample.media[0].grid_thw, [groups, 4, 4], "{row}");
        let times = sample.vision_rows.iter().map(|row| sample.position_ids[*row as usize][0]);
        let last = times.clone().max().unwrap() - times.min().unwrap();
        assert_eq!(last, (groups - 1) * step, "{row}");
    }
}

fn encode(encoder: &Encoder, row: &Value) -> Result<EncodedSample, SampleError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    write(&path, row.to_string().as_bytes());
    let file = RowFile::open(&path, Some(&golden("data"))).unwrap();
    let sample = file.read(0)?;
    let encoded = encoder.encode(&sample);
    let length = encoder.length(&sample).map_err(|error| error.to_string());
    assert_eq!(length, encoded.as_ref().map(Length::of).map_err(ToString::to_string));
    encoded
}

/// The second group of four frames is `2 * 2 / fps` positions behind the first one.
#[test]
fn a_video_whose_positions_are_not_exact_is_refused() {
    let folder = golden("models").join(MODEL);
    let encoder = Encoder::from_folder(&folder, &ImageConfig::default()).unwrap();
    let last = |fps: f64| {
        let frames: Vec<_> = (0..4).map(|k| format!("video28/pan_{k}.png")).collect();
        let row = json!({
            "messages": [
                {"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "a"},
            ],
            "videos": [{"video": frames, "fps": fps}],
        });
        encode(&encoder, &row).map(|sample| {
            let times = sample.vision_rows.iter().map(|row| sample.position_ids[*row as usize][0]);
            times.clone().max().unwrap() - times.min().unwrap()
        })
    };
    let limit = f64::from(1 << 24);
    assert_eq!(last(4.0 / limit).unwrap(), 1 << 24);
    for fps in [3.99 / limit, 1e-9, 1e-300] {
        let error = last(fps).unwrap_err();
        assert_eq!(error.reason(), "video_duration", "{error}");
        assert!(error.to_string().contains("expected at most 8388608 s"), "{error}");
    }
}

/// Limits of this model: 3,136 to 153,664 pixels; sides are multiples of 28.
#[test]
fn a_box_counts_in_the_resized_image() {
    let folder = golden("models").join(MODEL);
    let objects = |unit: &str, bbox: Value| json!({"bbox": [bbox], "bbox_type": unit});
    let answer = |image: &ImageConfig, images: &[&str], objects: Value| {
        let encoder = Encoder::from_folder(&folder, image).unwrap();
        let question = format!("{}Where?", "<image>".repeat(images.len()));
        let row = json!({
            "messages": [
                {"role": "user", "content": question}, {"role": "assistant", "content": "at <bbox>"},
            ],
            "images": images, "objects": objects,
        });
        let sample = encode(&encoder, &row)?;
        let labels = sample.labels.iter().filter(|label| **label >= 0);
        let ids: Vec<u32> = labels.map(|label| *label as u32).collect();
        Ok::<_, SampleError>((encoder.decode(&ids).unwrap(), sample.media[0].grid_thw))
    };
    // 160 x 96 (width and height) becomes 168 x 84
    let coins = ["images/exact_coins_160x96.png"];
    let default = ImageConfig::default();
    for (unit, bbox, expected) in [
        ("real", json!([80, 48, 160, 96]), "at [84, 42, 168, 84]"),
        ("real", json!([10, 6, 70.5, 30]), "at [10, 5, 74, 26]"),
        ("norm1", json!([0, 0.5, 1, 1]), "at [0, 42, 168, 84]"),
        ("norm1000", json!([500, 250, 1000, 500]), "at [84, 21, 168, 42]"),
        ("real", json!([40, 24]), "at [42, 21]"),
    ] {
        let (text, grid) = answer(&default, &coins, objects(unit, bbox)).unwrap();
        assert_eq!((text.as_str(), grid), (expected, [1, 6, 12]));
    }
    // the limits on pixels change the boxes
    let small = ImageConfig { max_pixels: Some(4000), ..ImageConfig::default() };
    let (text, grid) = answer(&small, &coins, objects("real", json!([80, 48, 160, 96]))).unwrap();
    assert_eq!((text.as_str(), grid), ("at [28, 14, 56, 28]", [1, 2, 4]));
    let outside = answer(&default, &coins, objects("real", json!([0, 0, 161, 96])));
    assert_eq!(outside.unwrap_err().reason(), "box_range");
    // a relative box needs its image, too
    let relative = answer(&default, &[], objects("norm1", json!([0, 0, 1, 1])));
    assert_eq!(relative.unwrap_err().reason(), "box_image");
}

/// Names and boxes as ms-swift writes them for this family.
#[test]
fn a_box_of_qwen2_vl_is_between_special_tokens_in_thousandths() {
    let folder = golden("models").join(OLDER);
    let encoder = Encoder::from_folder(&folder, &ImageConfig::default()).unwrap();
    let sample = |question: &str, answer: &str, objects: Value| {
        let row = json!({
            "messages": [
                {"role": "user", "content": question}, {"role": "assistant", "content": answer},
            ],
            "images": ["images/exact_coins_160x96.png"], "objects": objects,
        });
        encode(&encoder, &row).unwrap()
    };
    let objects = json!({"ref": ["a coin", "a coin"], "bbox": [[80, 48, 160, 96], [40, 24]]});
    let found = sample("<image>Where is <ref-object>?", "<ref-object><bbox>, at <bbox>", objects);
    let name = "<|object_ref_start|>a coin<|object_ref_end|>";
    let answer = format!(
        "{name}<|box_start|>(500,500),(1000,1000)<|box_end|>, at <|box_start|>(250,250)<|box_end|>"
    );
    let expected = sample(&format!("<image>Where is {name}?"), &answer, Value::Null);
    // as `eval.generate` compares a generated answer with the expected one
    let targets = found.labels.iter().filter(|label| **label >= 0).map(|label| *label as u32);
    let targets: Vec<u32> = targets.filter(|id| !encoder.stop_ids().contains(id)).collect();
    assert_eq!(encoder.decode_with_specials(&targets).unwrap(), answer);
    assert_eq!((found.input_ids, found.labels), (expected.input_ids, expected.labels));
}

/// The number of tokens of a box depends on the size of its image.
#[test]
fn other_limits_on_pixels_measure_rows_with_boxes_again() {
    let place = Place::empty();
    let row = json!({
        "messages": [
            {"role": "user", "content": "<image>Where?"}, {"role": "assistant", "content": "<bbox>"},
        ],
        "images": [golden("data/images/exact_coins_160x96.png")],
        "objects": {"bbox": [[80, 48, 160, 96]]},
    });
    place.write("rows.jsonl", &row.to_string());
    let mut lengths = Vec::new();
    for max_pixels in [None, Some(4000), None] {
        let image = ImageConfig { max_pixels, ..ImageConfig::default() };
        let encoder = Encoder::from_folder(&golden("models").join(MODEL), &image).unwrap();
        let set = DatasetConfig {
            image_root: Some("/".into()),
            ..DatasetConfig::new(place.path("rows.jsonl"))
        };
        let rows = Arc::new(DatasetRows::open(&[set], Arc::new(encoder)).unwrap());
        let (cached, _) = CachedRows::update(rows.clone(), &place.path("cache"), &|_| ()).unwrap();
        let index = rows.rows().next().unwrap();
        let length = cached.length(index).unwrap();
        assert_eq!(length, Length::of(&rows.read(index).unwrap()), "{max_pixels:?}");
        lengths.push(length.tokens);
    }
    // 18 visual tokens become 2, and `84, 42, 168, 84` becomes `28, 14, 56, 28`
    assert_eq!(lengths, [lengths[0], lengths[0] - 17, lengths[0]]);
}
