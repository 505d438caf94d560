//! Images to patches, compared with transformers' `Qwen2VLImageProcessor`, for files and data URIs.
//! `scripts/golden/image_fixtures.py` writes fixtures and expected values.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::error::Error as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use fault::Fault;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use trainer::batch::{MediaRef, MediaSource, Patches, VideoLimits, VideoRef};
use trainer::data::VideoConfig;
use trainer::data::image::{ImageConfig, ImageProcessor};
use trainer::data::video::VideoProcessor;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn processor(settings: &Value) -> ImageProcessor {
    let folder = tempfile::tempdir().unwrap();
    let model = json!({"model_type": "qwen3_vl"});
    for (name, value) in [("config.json", &model), ("preprocessor_config.json", settings)] {
        let mut file = fs::File::create(folder.path().join(name)).unwrap();
        file.write_all(value.to_string().as_bytes()).unwrap();
    }
    ImageProcessor::from_folder(folder.path(), &ImageConfig::default()).unwrap()
}

fn small_processor() -> ImageProcessor {
    processor(&json!({
        "size": {"shortest_edge": 4096, "longest_edge": 16384}, "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }))
}

fn file(name: &str) -> MediaRef {
    let root: Arc<Path> = repository("tests/fixtures/images").into();
    MediaSource::File { root, path: name.into() }.into()
}

fn uri(bytes: &[u8]) -> MediaRef {
    let text = base64::engine::general_purpose::STANDARD.encode(bytes);
    MediaSource::DataUri(format!("data:image/png;base64,{text}")).into()
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(repository("tests/fixtures/images").join(name)).unwrap()
}

fn fixtures() -> Vec<String> {
    let folder = fs::read_dir(repository("tests/fixtures/images")).unwrap();
    let mut names: Vec<_> =
        folder.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 50);
    names
}

/// The patches of an image that has no slices.
fn patches_of(processor: &ImageProcessor, media: &MediaRef) -> Patches {
    let (_, patches) = processor.load(media).unwrap();
    patches.into_iter().next().unwrap()
}

fn sha256(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    format!("{:x}", Sha256::digest(&bytes))
}

fn golden(name: &str) -> Value {
    serde_json::from_slice(&fs::read(repository("tests/golden").join(name)).unwrap()).unwrap()
}

#[test]
fn pixel_values_are_the_reference_processors() {
    for case in golden("images.json")["processor"].as_array().unwrap() {
        let name = case["file"].as_str().unwrap();
        let patches = patches_of(&processor(&case["config"]), &file(name));
        assert_eq!(json!(patches.grid_thw), case["grid_thw"], "{case}");
        assert_eq!(case["sha256"], sha256(&patches.pixel_values), "{case}");
    }
}

/// `scripts/golden/resized.py` writes the expected values. Almost every image and frame is resized:
/// larger, smaller, or along one axis only.
#[test]
fn resized_images_and_frames_equal_those_of_the_processors_of_every_family() {
    let cases = golden("resized.json");
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 70);
    for case in cases {
        let folder = repository("tests/golden/models").join(case["model"].as_str().unwrap());
        let media = |path: &Value| {
            let path = path.as_str().unwrap().into();
            MediaRef::from(MediaSource::File { root: repository("").into(), path })
        };
        let files: Vec<MediaRef> = case["files"].as_array().unwrap().iter().map(media).collect();
        let area = |at: usize| case["areas"][at].as_u64();
        let config =
            ImageConfig { min_pixels: area(0), max_pixels: area(1), ..ImageConfig::default() };
        let images = ImageProcessor::from_folder(&folder, &config).unwrap();
        let patches = if case.get("areas").is_some() {
            patches_of(&images, &files[0])
        } else {
            let videos = VideoProcessor::from_folder(&folder, &VideoConfig::default(), &images);
            let limits = VideoLimits::default();
            let frames = VideoRef::Frames { frames: files, fps: None, limits };
            videos.unwrap().load(&frames).unwrap().1.remove(0)
        };
        assert_eq!(json!(patches.grid_thw), case["grid_thw"], "{case}");
        assert_eq!(case["sha256"], sha256(&patches.pixel_values), "{case}");
    }
}

#[test]
fn the_grid_from_the_header_is_the_grid_of_the_patches() {
    let processor = small_processor();
    for name in fixtures() {
        for media in [file(&name), uri(&fixture(&name))] {
            let grid = processor.grid(&media).unwrap().whole;
            let patches = patches_of(&processor, &media);
            assert_eq!(grid, patches.grid_thw, "{name}");
            assert_eq!(patches.pixel_values.len(), patches.num_patches() * 1536, "{name}");
            assert_eq!(processor.num_tokens(grid) * 4, patches.num_patches(), "{name}");
        }
    }
}

#[test]
fn exif_orientation_swaps_the_sides_of_the_grid() {
    let processor = processor(&json!({
        "size": {"shortest_edge": 1, "longest_edge": 16384}, "patch_size": 8,
        "temporal_patch_size": 2, "merge_size": 1, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }));
    for orientation in 1..=8 {
        let grid = processor.grid(&file(&format!("orientation_{orientation}.jpg"))).unwrap().whole;
        let expected = if orientation < 5 { [1, 2, 3] } else { [1, 3, 2] };
        assert_eq!(grid, expected, "{orientation}");
    }
    let late = processor.grid(&file("orientation_8_behind_pixels.png")).unwrap().whole;
    assert_eq!(late, [1, 3, 2]);
}

/// A black, uncompressed image.
pub(crate) fn bmp(width: u32, height: u32) -> Vec<u8> {
    let row = (width * 3).next_multiple_of(4);
    let mut bytes = b"BM".to_vec();
    for field in [54 + row * height, 0, 54, 40, width, height, (24 << 16) | 1, 0, 0, 0, 0, 0, 0] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.resize(bytes.len() + (row * height) as usize, 0);
    bytes
}

#[test]
fn each_unusable_image_is_rejected_with_its_reason_and_its_name() {
    let mut bomb = fixture("rgb.png");
    bomb[16..24].fill(0x7f);
    let data_uri = |text: &str| MediaRef::from(MediaSource::DataUri(text.into()));
    let processor = small_processor();
    for (media, reason, message) in [
        (file("no.png"), "image_missing", "`no.png`"),
        (file("../../../Cargo.toml"), "image_path_escapes_root", "`../../../Cargo.toml`"),
        (uri(&fixture("rgb.png")[..30]), "image_broken", "in a data URI"),
        (uri(&fixture("rgb.jpg")[..700]), "image_broken", "in a data URI"),
        (uri(b"GIF, but not really"), "image_format", "in a data URI"),
        (data_uri("data:image/png,abc"), "image_data_uri", "`;base64`"),
        (uri(&bmp(201, 1)), "image_aspect_ratio", "is 201 x 1"),
        (uri(&bomb), "image_too_large", "is 2139062143 x 2139062143"),
    ] {
        let error = processor.load(&media).unwrap_err();
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.source().is_some(), reason == "image_broken", "{error:?}");
        if reason != "image_broken" {
            assert_eq!(processor.grid(&media).unwrap_err().reason(), reason);
        }
    }
    assert!(processor.load(&uri(&bmp(200, 1))).is_ok());
}
