//! A family with a whole image and slices, whose numbers and marks the chat template leaves out.

use std::fs;
use std::io::Write as _;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::truncate::KeptEnd;
use super::*;
use crate::row::{SampleCounts, SampleIndex};
use batch::{
    AreaLimits, BoxRef, BoxUnit, IGNORE_INDEX, ImageLimits, MediaRef, MediaSource, Objects,
};
use fault::Fault;

pub(super) const IMAGES: &str = "<|image_pad|>";

pub(super) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The small model with another `downsample_mode`, and changed settings of images. Those of videos
/// are in a file of their own.
pub(super) fn folder(mode: &str, changes: &[(&str, Value)]) -> tempfile::TempDir {
    let model = repository("tests/golden/models/small-minicpm");
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| fs::read_to_string(model.join(name)).unwrap();
    let mut config: Value = serde_json::from_str(&read("config.json")).unwrap();
    config["downsample_mode"] = mode.into();
    let mut images: Value = serde_json::from_str(&read("preprocessor_config.json")).unwrap();
    images["downsample_mode"] = mode.into();
    for (key, value) in changes {
        images[key] = value.clone();
    }
    let copied = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"];
    let texts = copied.map(|name| (name, read(name)));
    let changed = [
        ("config.json", config.to_string()),
        ("preprocessor_config.json", images.to_string()),
        ("video_preprocessor_config.json", json!({"downsample_mode": mode}).to_string()),
    ];
    for (name, text) in texts.into_iter().chain(changed) {
        let mut file = fs::File::create(folder.path().join(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }
    folder
}

fn encoder(mode: &str, changes: &[(&str, Value)], config: &ImageConfig) -> Encoder {
    Encoder::from_folder(folder(mode, changes).path(), config).unwrap()
}

fn published() -> Encoder {
    let model = repository("tests/golden/models/small-minicpm");
    Encoder::from_folder(&model, &ImageConfig::default()).unwrap()
}

fn file(path: &str) -> MediaRef {
    MediaSource::File { root: repository("").into(), path: Path::new(path).into() }.into()
}

/// A black image.
pub(super) fn bmp(height: u32, width: u32) -> MediaRef {
    let line = (3 * width).next_multiple_of(4);
    let mut bytes = b"BM".to_vec();
    for value in [54 + line * height, 0, 54, 40, width, height, 1 | 24 << 16] {
        bytes.extend(value.to_le_bytes());
    }
    bytes.resize((54 + line * height) as usize, 0);
    let bytes: Arc<[u8]> = bytes.into();
    MediaSource::Bytes(bytes).into()
}

pub(super) fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

pub(super) fn sample(question: Vec<Part>, images: Vec<MediaRef>) -> Sample {
    let message = |role: &str, parts| Message::new(role, Content::Parts(parts));
    Sample {
        id: SampleId { file: Path::new("rows.jsonl").into(), line: 1 },
        messages: vec![message("user", question), message("assistant", vec![text("A cup.")])],
        media: images.into_iter().map(Medium::Image).collect(),
        tools: None,
        objects: Objects::default(),
    }
}

/// An image of 150 x 100 pixels, which becomes 1 x 2 slices.
pub(super) fn photo() -> MediaRef {
    file("tests/fixtures/images/photo_150x100.png")
}

/// The text of the whole image and its slices, without the number; each has four tokens.
fn four_each(rows: usize, columns: usize) -> String {
    let pads = IMAGES.repeat(4);
    let row = format!("<slice>{pads}</slice>").repeat(columns);
    format!("<image>{pads}</image>{}", vec![row; rows].join("\n"))
}

#[test]
fn the_text_has_numbers_of_images_and_rows_of_slices() {
    let parts = vec![Part::Image, text("Look:"), Part::Image, Part::Image, text("What?")];
    let rows = sample(parts, vec![photo(), bmp(30, 30), bmp(400, 200)]);
    for (changes, numbers) in [
        (&[][..], ["<image_id>0</image_id>", "<image_id>1</image_id>", "<image_id>2</image_id>"]),
        (&[("use_image_id", json!(false))], [""; 3]),
    ] {
        let encoder = encoder("16x", changes, &ImageConfig::default());
        let found = encoder.encode(&rows).unwrap();
        let grids: Vec<_> =
            found.media.iter().map(|of| (of.grid_thw, of.continues_medium)).collect();
        let expected = [
            ([1, 8, 8], false),
            ([2, 8, 8], true),
            ([1, 8, 8], false),
            ([1, 12, 4], false), // 158 x 79 pixels
            ([8, 8, 8], true),
        ];
        assert_eq!(grids, expected);
        assert_eq!(found.num_media(), 3);
        let counts = SampleCounts::of(SampleIndex { dataset: 0, row: 0 }, &found);
        assert_eq!((counts.num_images, counts.num_videos), (3, 0));
        let [first, second, third] = numbers;
        let slices = four_each(4, 2).replacen(&IMAGES.repeat(4), &IMAGES.repeat(3), 1);
        let start = format!(
            "<|im_start|>user\n{first}{}\nLook:\n{second}{}\n{third}{slices}\nWhat?<|im_end|>\n",
            four_each(1, 2),
            four_each(0, 0),
        );
        let shown = encoder.decode_with_specials(&found.input_ids).unwrap();
        assert!(shown.starts_with(&start), "{shown}");
        assert_eq!(found.vision_rows.len(), 4 * 3 + 4 + 3 + 8 * 4);
        let positions: Vec<_> = (0..found.input_ids.len() as u32).map(|at| [at; 3]).collect();
        assert_eq!(found.position_ids, positions);
        let (prompt, answer) = encoder.encode_prompt(&rows).unwrap();
        assert_eq!((prompt.num_media(), answer.as_str()), (3, "A cup."));
        let pixels = |at: usize| encoder.image_processor().pixels(&found.media[at]).len();
        assert_eq!([pixels(0), pixels(1), pixels(4)], [1, 2, 8]);
    }
}

#[test]
fn pixels_are_those_of_the_reference() {
    let path = repository("tests/golden/slices.json");
    let golden: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let cases = golden["pixels"].as_array().unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let changes = ["scale_resolution", "max_slice_nums"].map(|key| (key, case[key].clone()));
        let mode = case["downsample_mode"].as_str().unwrap();
        let encoder = encoder(mode, &changes, &ImageConfig::default());
        let image = file(case["files"][0].as_str().unwrap());
        let (_, patches) = encoder.image_processor().load(&image).unwrap();
        let grids: Vec<_> = patches.iter().map(|of| of.grid_thw).collect();
        assert_eq!(json!(grids), case["grid_thw"], "{case}");
        let values = patches.iter().flat_map(|of| &of.pixel_values);
        let bytes: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(case["sha256"], format!("{:x}", Sha256::digest(&bytes)), "{case}");
    }
}

/// Lengths, of media too, come from the headers of images.
#[test]
fn lengths_that_are_measured_are_those_of_encoded_samples() {
    let one = |value| NonZeroU32::new(value);
    let limits = |max_pixels, resized: Option<[u32; 2]>| ImageLimits {
        resized: resized.map(|sides| sides.map(|side| NonZeroU32::new(side).unwrap())),
        area: AreaLimits { max_pixels: one(max_pixels), ..AreaLimits::default() },
    };
    let all = [limits(0, None), limits(40_000, None), limits(1, None), limits(0, Some([333, 77]))];
    let none = ImageConfig::default;
    for (mode, changes, config) in [
        ("16x", vec![], none()),
        ("4x", vec![("use_image_id", json!(false))], none()),
        ("16x", vec![("max_slice_nums", json!(20)), ("scale_resolution", json!(60))], none()),
        ("16x", vec![("slice_mode", json!(false))], none()),
        ("16x", vec![], ImageConfig { max_tokens: one(20), ..none() }),
        ("4x", vec![], ImageConfig { max_pixels: Some(50_000), ..none() }),
    ] {
        let encoder = encoder(mode, &changes, &config);
        let mut num_sliced = 0;
        for size in [[1, 1], [3, 600], [113, 112], [150, 301], [299, 101], [401, 409], [90, 700]] {
            for limits in all {
                let image = MediaRef { limits, ..bmp(size[0], size[1]) };
                let rows =
                    sample(vec![text("See"), Part::Image, Part::Image], vec![image, photo()]);
                let found = encoder.encode(&rows).unwrap();
                let length = encoder.length(&rows).unwrap();
                assert_eq!(length, Length::of(&found), "{mode} {changes:?} {config:?} {size:?}");
                let measured = encoder.measure(&rows).unwrap();
                assert_eq!(encoder.visual_tokens(&measured), found.vision_rows.len());
                let [first, second, ..] = &found.media[..] else { panic!() };
                if second.continues_medium && limits.area.max_pixels.is_none() {
                    let patches = (first.num_patches() + second.num_patches()) as u64;
                    let tokens = patches / u64::from(encoder.merge_size().get().pow(2));
                    assert!(config.max_tokens.is_none_or(|max| tokens <= u64::from(max.get())));
                    assert!(config.max_pixels.is_none_or(|max| patches * 14 * 14 <= max));
                    num_sliced += 1;
                }
            }
        }
        assert!(num_sliced > 0 || changes.iter().any(|(key, _)| *key == "slice_mode"));
    }
}

#[test]
fn texts_must_not_contain_tokens_of_images() {
    let encoder = published();
    let marks = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"];
    for mark in marks.into_iter().chain([IMAGES, "<|video_pad|>"]) {
        let row = sample(vec![text(&format!("a {mark} b"))], vec![]);
        let fault = encoder.length(&row).unwrap_err();
        assert_eq!(fault.reason(), "reserved_token", "{fault}");
        assert_eq!(encoder.encode(&row).unwrap_err().to_string(), fault.to_string());
        assert_eq!(encoder.encode_text(mark).unwrap_err().reason(), "reserved_token");
    }
    let mut row = sample(vec![text("a")], vec![]);
    let function = json!({"name": "f", "description": "cut <slice>", "parameters": {}});
    row.tools = Some(json!([{"type": "function", "function": function}]));
    let fault = encoder.encode(&row).unwrap_err();
    assert!(fault.to_string().contains("contains `<slice>`, which is reserved"), "{fault}");
    let other = Encoder::from_folder(
        &repository("tests/golden/models/small-tied"),
        &ImageConfig::default(),
    );
    other.unwrap().encode(&sample(vec![text("a <slice> b")], vec![])).unwrap();
}

#[test]
fn truncation_keeps_an_image_with_its_number_and_slices() {
    let encoder = published();
    let row = sample(vec![text("Look: "), Part::Image, text("What is it?")], vec![photo()]);
    let whole = encoder.encode(&row).unwrap().input_ids;
    let image = format!("<image_id>0</image_id>{}", four_each(1, 2));
    let marked = 3 + 3 * (4 + 2);
    for keep in [KeptEnd::Beginning, KeptEnd::End] {
        for max_length in marked + 1..whole.len() as u32 {
            let max_length = NonZeroU32::new(max_length).unwrap();
            let cut = Some(TruncationRule { max_length, keep });
            let Ok(found) = encoder.encode_truncated(&row, cut) else { continue };
            assert_eq!(encoder.length_truncated(&row, cut).unwrap(), Length::of(&found));
            assert_eq!(found.input_ids.len(), max_length.get() as usize);
            let shown = encoder.decode_with_specials(&found.input_ids).unwrap();
            assert!(shown.contains(&image), "{max_length}: {shown}");
        }
    }
    let max_length = NonZeroU32::new(marked).unwrap();
    let cut = Some(TruncationRule { max_length, keep: KeptEnd::End });
    let error = encoder.encode_truncated(&row, cut).unwrap_err().to_string();
    assert!(error.contains("its media have 21 tokens"), "{error}");
}

#[test]
fn an_image_in_an_answer_is_not_trained_on() {
    let encoder = published();
    let mut row = sample(vec![text("Draw.")], vec![bmp(250, 250)]);
    row.messages[1].content = Content::Parts(vec![text("Here:"), Part::Image, text("Done.")]);
    let found = encoder.encode(&row).unwrap();
    let trained: Vec<u32> = (0..found.len())
        .filter(|at| found.labels[*at] != IGNORE_INDEX)
        .map(|at| found.input_ids[at])
        .collect();
    assert_eq!(encoder.decode_with_specials(&trained).unwrap(), "Here:\n\nDone.<|im_end|>");
    assert_eq!(encoder.length(&row).unwrap(), Length::of(&found));
}

#[test]
fn boxes_and_minimums_are_refused() {
    let encoder = published();
    let mut row = sample(vec![Part::Image], vec![photo()]);
    let boxes = vec![BoxRef { coordinates: vec![0.0; 4], unit: BoxUnit::Pixel, image: 0 }];
    row.objects = Objects { names: vec!["a cup".to_owned()], boxes };
    let fault = encoder.encode(&row).unwrap_err();
    assert!(fault.to_string().contains("boxes of objects for this model are not supported"));

    let area = AreaLimits { min_pixels: NonZeroU32::new(4096), ..AreaLimits::default() };
    let image = MediaRef { limits: ImageLimits { area, ..ImageLimits::default() }, ..photo() };
    let row = sample(vec![Part::Image], vec![image]);
    for fault in [encoder.encode(&row).unwrap_err(), encoder.length(&row).unwrap_err()] {
        assert_eq!(fault.reason(), "image_min_pixels", "{fault}");
    }
    let fault = encoder.length(&sample(vec![Part::Image], vec![bmp(1, 201)])).unwrap_err();
    assert_eq!(fault.reason(), "image_aspect_ratio");
    encoder.encode(&sample(vec![Part::Image], vec![bmp(1, 200)])).unwrap();
}

#[test]
fn files_that_contradict_each_other_and_missing_tokens_are_refused() {
    let refused = |folder: &tempfile::TempDir| {
        let error = Encoder::from_folder(folder.path(), &ImageConfig::default()).err();
        error.unwrap().to_string()
    };
    let error = refused(&folder("16x", &[("downsample_mode", json!("4x"))]));
    assert!(error.contains("preprocessor_config.json") && error.contains("in config.json"));
    for section in ["image_processor", "video_processor"] {
        let folder = folder("16x", &[]);
        let text = json!({section: {"downsample_mode": "4x"}}).to_string();
        let mut file = fs::File::create(folder.path().join("processor_config.json")).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let expected = format!("processor_config.json`: `{section}.downsample_mode` is `4x`");
        let error = refused(&folder);
        assert!(error.contains(&expected), "{error}");
    }
    let folder = folder("16x", &[]);
    let path = folder.path().join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"</slice>\"", "\"</piece>\"");
    fs::File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
    assert!(refused(&folder).contains("no token `</slice>`"));
}

/// The processors of transformers take keys of `tokenizer_config.json` in place of their own.
#[test]
fn a_setting_in_tokenizer_config_that_differs_from_that_of_the_processor_is_refused() {
    for (model, key, value, refused) in [
        ("small-minicpm", "max_slice_nums", json!(1), true),
        ("small-minicpm", "max_slice_nums", json!(9), false),
        ("small-minicpm", "max_slice_nums", Value::Null, false),
        ("small-minicpm", "use_image_id", json!(false), true),
        ("small-minicpm", "max_num_frames", json!(3), true), // of videos alone
        ("small-minicpm", "max_pixels", json!(20_000), false), // no setting of this processor
        ("small-qwen25vl", "max_pixels", json!(20_000), true),
        ("small-qwen25vl", "size", json!({"shortest_edge": 1, "longest_edge": 2}), true),
        ("small-qwen25vl", "patch_size", json!(16), true),
        ("small-qwen25vl", "unknown", json!(16), false),
        ("small-tied", "max_pixels", json!(20_000), true),
        ("small-internvl", "max_patches", json!(1), true),
        ("small-internvl", "max_pixels", json!(20_000), false),
    ] {
        let folder = copy_of(model);
        let path = folder.path().join("tokenizer_config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value.clone();
        fs::File::create(&path).unwrap().write_all(config.to_string().as_bytes()).unwrap();
        let error = Encoder::from_folder(folder.path(), &ImageConfig::default()).err();
        let error = error.map(|error| error.to_string());
        let expected = format!("tokenizer_config.json`: `{key}` is `{value}`, which contradicts");
        let is_refused = error.as_ref().is_some_and(|error| error.contains(&expected));
        assert_eq!((is_refused, error.is_some()), (refused, refused), "{model} {key}: {error:?}");
    }
}

/// What `from_pretrained(folder, max_pixels=.., min_pixels=..)` of transformers saves, with limits of
/// videos of their own in Qwen3-VL.
#[test]
fn settings_of_images_that_transformers_saves_twice_are_accepted() {
    for model in ["small-qwen25vl", "small-tied"] {
        let folder = copy_of(model);
        for (name, keys) in [
            ("tokenizer_config.json", json!({"min_pixels": 4096, "max_pixels": 180_000})),
            (
                "preprocessor_config.json",
                json!({"size": {"shortest_edge": 4096, "longest_edge": 180_000},
                    "min_pixels": null, "max_pixels": null}),
            ),
        ] {
            let path = folder.path().join(name);
            let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            file.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            fs::File::create(&path).unwrap().write_all(file.to_string().as_bytes()).unwrap();
        }
        Encoder::from_folder(folder.path(), &ImageConfig::default()).unwrap();
    }
}

/// A model folder without its weights.
fn copy_of(model: &str) -> tempfile::TempDir {
    let (folder, from) = (tempfile::tempdir().unwrap(), repository("tests/golden/models"));
    for file in fs::read_dir(from.join(model)).unwrap().map(Result::unwrap) {
        if file.path().extension().is_none_or(|ending| ending != "safetensors") {
            fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
    }
    folder
}

/// What decides the text or the size of an image changes the key of caches of lengths.
#[test]
fn keys_of_caches_have_the_settings_of_slices() {
    let keys = |changes: &[(&str, Value)]| {
        let encoder = encoder("16x", changes, &ImageConfig::default());
        (encoder.text_key(), encoder.image_processor().limits())
    };
    let (text, limits) = keys(&[]);
    assert_ne!(keys(&[("use_image_id", json!(false))]).0, text);
    for (key, value) in [
        ("max_slice_nums", json!(4)),
        ("scale_resolution", json!(56)),
        ("slice_mode", json!(false)),
    ] {
        let found = keys(&[(key, value)]);
        assert!(found.0 == text && found.1 != limits, "{key}");
    }
}
