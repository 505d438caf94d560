//! Videos compared with transformers' `Qwen3VLProcessor` and model, and errors of unusable videos.
//! `scripts/golden/video_cases.py` writes the expected values.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use crate::harness::device;
use candle_core::{DType, Device, Tensor};
use fault::Fault;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use trainer::batch::{EncodedSample, MediumKind, Pack, PaddingSide, VarlenBatch};
use trainer::data::{
    Encoder, ImageConfig, Length, RowFile, RowRules, SampleError, VideoConfig, collate,
    video::VideoMarks,
};
use trainer::optim::{OptimConfig, Optimizer};
use trainer::run::{LoadedModel, load_model};
use trainer::tape::{Gradients, Pass, Trainable};
use trainer::train::{
    AttentionChoice, GradientSums, ModelSection, Precision, RankWeights, Ranks, RecomputeChoice,
    StepRunner,
};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn golden_json() -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden("video.json")).unwrap()).unwrap()
}

fn encoder(video: &VideoConfig) -> Encoder {
    let folder = golden("models/small-tied");
    Encoder::with_video(&folder, &ImageConfig::default(), video).unwrap()
}

/// Every row of the golden file, with its expected values.
fn rows() -> Vec<(EncodedSample, Value)> {
    let (encoder, golden_rows) = (encoder(&VideoConfig::default()), golden_json());
    let file = RowFile::open(&golden("data/video.jsonl"), None).unwrap();
    let expected = golden_rows["rows"].as_array().unwrap().clone();
    assert_eq!(file.len(), expected.len());
    let encode = |(row, expected): (usize, Value)| {
        let sample = file.read(row).unwrap();
        let encoded = encoder.encode(&sample).unwrap();
        // The planner computes the same length from headers.
        assert_eq!(encoder.length(&sample).unwrap(), Length::of(&encoded));
        (encoded, expected)
    };
    expected.into_iter().enumerate().map(encode).collect()
}

/// Pixel values and grids of the videos of a sample, without its images.
fn video_values(sample: &EncodedSample) -> (Vec<f32>, Vec<[u32; 3]>) {
    let (mut values, mut grids) = (vec![], vec![]);
    for patches in sample.media.iter().filter(|of| of.kind == MediumKind::Video) {
        values.extend_from_slice(&patches.pixel_values);
        grids.push(patches.grid_thw);
    }
    (values, grids)
}

/// Compares ids, labels and positions of a row with those that a script has written.
pub(crate) fn assert_tokens(encoder: &Encoder, sample: &EncodedSample, expected: &Value) {
    let name = &expected["id"];
    let text = encoder.decode_with_specials(&sample.input_ids).unwrap();
    assert_eq!(json!(sample.input_ids), expected["input_ids"], "ids of {name}: {text}");
    assert_eq!(json!(sample.labels), expected["labels"], "labels of {name}");
    for axis in 0..3 {
        let positions: Vec<u32> = sample.position_ids.iter().map(|p| p[axis]).collect();
        assert_eq!(json!(positions), expected["position_ids"][axis], "{name}, axis {axis}");
    }
}

#[test]
fn rows_with_videos_encode_as_in_transformers() {
    let encoder = encoder(&VideoConfig::default());
    for (sample, expected) in rows() {
        let name = &expected["id"];
        assert_tokens(&encoder, &sample, &expected);
        let (values, grids) = video_values(&sample);
        assert_eq!(json!(grids), expected["video_grid_thw"], "grids of {name}");
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let sha256 = format!("{:x}", Sha256::digest(bytes));
        assert_eq!(sha256, expected["video_sha256"], "pixels of {name}");
    }
}

fn packed(samples: &[EncodedSample]) -> VarlenBatch {
    let packs = vec![Pack { samples: samples.to_vec() }];
    collate(packs, 2017, PaddingSide::Right, 2.try_into().unwrap()).unwrap().unpad().unwrap()
}

fn loaded() -> LoadedModel {
    let section = ModelSection {
        attention: AttentionChoice::Flash,
        ..ModelSection::new(golden("models/small-tied"))
    };
    load_model(&section, 0, &device()).unwrap()
}

#[test]
fn logits_of_rows_with_videos_are_the_references() {
    let file = golden("video.safetensors");
    let expected = candle_core::safetensors::load(file, &device()).unwrap();
    let model = loaded().model;
    let mut compared = 0;
    for (sample, case) in rows() {
        let id = case["id"].as_str().unwrap();
        let Some(expected) = expected.get(&format!("logits/{id}")) else { continue };
        let targets: Vec<u32> = (1..sample.len() as u32)
            .filter(|at| sample.labels[*at as usize] >= 0)
            .map(|at| at - 1)
            .collect();
        let batch = packed(&[sample]);
        let input = model.upload(batch, DType::F32, &device()).unwrap();
        let hidden = model.hidden(&input, &Pass::default()).unwrap();
        let targets = Tensor::new(targets, &device()).unwrap();
        let rows = hidden.index_select(&targets, 0).unwrap();
        let head = model.lm_head().tensor().unwrap().t().unwrap();
        let logits = rows.matmul(&head).unwrap();
        let off = (logits - expected).unwrap().abs().unwrap().max_all().unwrap();
        let off = off.to_scalar::<f32>().unwrap();
        assert!(off < 1e-4, "{id}: logits off by {off}");
        compared += 1;
    }
    assert_eq!(compared, 5);
}

/// Loss and gradient norms of the rows that need no resizing, in one pack and as single samples.
#[test]
fn losses_and_gradients_of_rows_with_videos_are_the_references() {
    let golden_values = golden_json();
    let exact: Vec<EncodedSample> = rows()
        .into_iter()
        .filter(|(_, case)| case["id"] != "resized")
        .map(|(sample, _)| sample)
        .collect();
    let alone: Vec<VarlenBatch> =
        exact.iter().map(|sample| packed(std::slice::from_ref(sample))).collect();
    for micro_batches in [vec![packed(&exact)], alone] {
        let loaded = loaded();
        let optim = OptimConfig::default();
        let groups = loaded.open.groups(&[], &optim.lr_multipliers).unwrap();
        let master = |param: &trainer::tape::Param, part, device: &Device| {
            loaded.open.master(param, part, device)
        };
        let optimizer =
            Optimizer::new(&optim, 1.0, &loaded.params, &groups, None, master, &device()).unwrap();
        let trainable = vec![Trainable::Yes; loaded.params.len()];
        let runner = StepRunner {
            gradients: GradientSums::Alone(vec![
                Gradients::zeros(&loaded.params, &trainable, &device()).unwrap(),
            ]),
            weights: RankWeights::default(),
            ranks: Ranks::alone(),
            saved_as: Vec::new(),
            kept: Vec::new(),
            model: loaded.model,
            params: loaded.params,
            optimizer,
            recompute: RecomputeChoice::None.policy(),
            aux_loss: 0.0,
            dtype: Precision::F32.dtype(),
            device: device(),
        };
        let losses = runner.accumulate(runner.prepare(micro_batches).unwrap(), 1).unwrap();
        assert_eq!(losses.counts.num_targets, golden_values["num_targets"].as_u64().unwrap());
        let loss = losses.sum().unwrap() / losses.counts.num_targets as f64;
        let off = (loss - golden_values["loss"].as_f64().unwrap()).abs();
        assert!(off <= 2e-5, "{loss} not {}", golden_values["loss"]);
        for param in &runner.params {
            let expected = golden_values["grad_norms"][param.name()].as_f64().unwrap();
            let buffer = runner.grads().get(param.index()).unwrap();
            let found = trainer::ops::sum_of_squares(buffer).unwrap().sqrt();
            let off = (found - expected).abs();
            assert!(off <= 1e-3 * expected + 1e-6, "{}: {found} not {expected}", param.name());
            assert!(found > 0.0, "the gradient of `{}` is zero", param.name());
        }
    }
}

fn frames(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("video/pan_{index}.png")).collect()
}

fn with_videos(videos: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "a"}], "videos": videos})
}

fn encode_with(row: &Value, config: &VideoConfig) -> Result<EncodedSample, SampleError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::io::Write::write_all(
        &mut std::fs::File::create(&path).unwrap(),
        format!("{row}\n").as_bytes(),
    )
    .unwrap();
    let file = RowFile::open(&path, Some(&golden("data"))).unwrap();
    file.read(0).and_then(|sample| encoder(config).encode(&sample))
}

fn encode(row: &Value) -> Result<EncodedSample, SampleError> {
    encode_with(row, &VideoConfig::default())
}

#[test]
fn the_same_video_in_every_form_is_the_same_sample() {
    let list = frames(4);
    let turn = |content: Value| json!([{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]);
    let text = json!({"type": "text", "text": "?"});
    let expected = encode(&with_videos(&json!([list]))).unwrap();
    let conversations =
        json!([{"from": "human", "value": "<video>?"}, {"from": "gpt", "value": "a"}]);
    for row in [
        with_videos(&json!([{"video": list}])),
        with_videos(&json!([{"video": list, "fps": 2}])),
        json!({"messages": turn(json!("<video>?")), "video": list}),
        json!({"messages": turn(json!("<video>?")), "video": list, "fps": 2.0}),
        json!({"conversations": conversations, "video": list}),
        json!({"messages": turn(json!([{"type": "video", "video": list}, text]))}),
        json!({"messages": turn(json!([{"video": list, "fps": "2.0"}, text]))}),
        json!({"messages": turn(json!([{"type": "video_url", "video_url": {"url": list}}, text]))}),
        json!({"messages": turn(json!([{"type": "video"}, text])), "videos": [list]}),
    ] {
        let found = encode(&row).unwrap_or_else(|error| panic!("{row}: {error}"));
        assert_eq!(
            (found.input_ids, found.media),
            (expected.input_ids.clone(), expected.media.clone()),
            "{row}"
        );
    }
}

#[test]
fn a_literal_placeholder_is_replaced_only_if_the_row_lists_media_of_its_kind() {
    let mut row = json!({"messages": [{"role": "user", "content": "<image> <video>"}, {"role": "assistant", "content": "a"}], "videos": [frames(4)]});
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let mut text = format!("{row}\n");
    row["images"] = json!([]);
    text += &row.to_string();
    std::fs::File::create(&path).and_then(|mut file| writeln!(file, "{text}")).unwrap();
    let rules = RowRules { literal_placeholders: true, ..RowRules::default() };
    let file = RowFile::open(&path, Some(&golden("data"))).unwrap().with_rules(rules);
    let encoder = encoder(&VideoConfig::default());
    for row in 0..2 {
        let sample = encoder.encode(&file.read(row).unwrap()).unwrap();
        let text = encoder.decode_with_specials(&sample.input_ids).unwrap();
        assert!(text.contains("<image> <|vision_start|><0.2 seconds>"), "{text}");
    }
}

#[test]
fn the_config_sets_the_number_of_frames_and_pixels() {
    let row = with_videos(&json!([{"video": frames(8), "fps": 8}]));
    let none = VideoConfig::default;
    for (config, expected) in [
        (none(), [2, 4, 4]),
        (VideoConfig { fps: Some(6.0), ..none() }, [3, 4, 4]),
        (VideoConfig { fps: Some(8.0), ..none() }, [4, 4, 4]),
        (VideoConfig { fps: Some(8.0), max_frames: Some(5), ..none() }, [3, 4, 4]),
        (VideoConfig { min_frames: Some(7), ..none() }, [4, 4, 4]),
        (VideoConfig { max_pixels: Some(4 * 32 * 64), ..none() }, [2, 2, 2]),
        (VideoConfig { min_pixels: Some(4 * 90 * 90), ..none() }, [2, 6, 6]),
    ] {
        let sample = encode_with(&row, &config).unwrap();
        assert_eq!(sample.media[0].grid_thw, expected, "{config:?}");
    }
}

#[test]
fn flat_marks_render_as_in_earlier_versions_of_transformers() {
    let row = with_videos(&json!([frames(4)]));
    let nested = encode(&row).unwrap();
    let config = VideoConfig { marks: VideoMarks::Flat, ..VideoConfig::default() };
    let flat = encode_with(&row, &config).unwrap();
    let decode = |sample: &EncodedSample| {
        let text = encoder(&config).decode_with_specials(&sample.input_ids).unwrap();
        text.replace("<|video_pad|>", "")
    };
    let frames =
        "<0.2 seconds><|vision_start|><|vision_end|><1.2 seconds><|vision_start|><|vision_end|>";
    assert!(decode(&nested).contains(&format!("user\n<|vision_start|>{frames}<|vision_end|>?")));
    assert!(decode(&flat).contains(&format!("user\n{frames}?")), "{}", decode(&flat));
    assert_eq!(flat.num_targets(), nested.num_targets());
    assert_eq!(flat.len() + 2, nested.len());
}

#[test]
fn each_unusable_video_is_rejected_with_its_reason() {
    let mixed = json!([["video/pan_0.png", "video/tall_0.png"]]);
    let broken = json!([["video/pan_0.png", "data:image/png;base64,aGFsZg=="]]);
    for (videos, reason, message) in [
        (json!([["video/pan_0.png"]]), "video_too_short", "too few frames: 1"),
        (json!([["no.png", "no.png"]]), "video_frame", "frame 1: image `no.png` does not exist"),
        (mixed, "video_frame_size", "frame 2 is 64 x 96, expected 64 x 64 like the first frame"),
        (broken, "video_frame", "frame 2: image in a data URI"),
        (json!([frames(2), frames(2)]), "video_count", "1 video placeholders but the row lists 2"),
        (json!([]), "media_missing", "1 video placeholders but the row lists 0"),
        (json!([[]]), "missing_key", "`videos[0]` is missing"),
        (json!([{"video": frames(2), "crop": 2}]), "not_supported", "`videos[0].crop`"),
        (json!([{"video": frames(2), "fps": 0}]), "wrong_type", "`videos[0].fps`"),
        (json!(["https://a.b/c.mp4"]), "not_supported", "videos by URL are not supported"),
    ] {
        let error = encode(&with_videos(&videos)).unwrap_err();
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains(message), "{error}");
        assert!(error.hint().is_some(), "{error}");
    }
    #[cfg(not(feature = "video"))]
    {
        let error = encode(&with_videos(&json!(["a.mp4"]))).unwrap_err();
        assert_eq!(error.reason(), "video_not_built");
        assert!(error.hint().unwrap().contains("--features video"), "{error}");
    }
    let in_answer = json!({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<video>"}], "videos": [frames(2)]});
    let reason = encode(&in_answer).map_err(|error| error.reason());
    assert!(reason.is_ok() || reason == Err("image_count"), "{reason:?}");
}
