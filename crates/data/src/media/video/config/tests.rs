use std::io::Write as _;

use serde_json::{Value, json};

use super::*;
use crate::ImageConfig;

fn settings(files: &[(&str, Value)], config: &VideoConfig) -> Result<VideoSettings, String> {
    let folder = tempfile::tempdir().unwrap();
    let image = json!({
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    });
    let image = ("preprocessor_config.json", image);
    let model = ("config.json", json!({"model_type": "qwen3_vl"}));
    for (name, value) in [&model].into_iter().chain(files).chain([&image]) {
        let mut file = std::fs::File::create(folder.path().join(name)).unwrap();
        file.write_all(value.to_string().as_bytes()).unwrap();
    }
    let images = ImageProcessor::from_folder(folder.path(), &ImageConfig::default());
    let images = images.map_err(|error| error.to_string())?;
    VideoSettings::read(folder.path(), config, &images).map_err(|error| error.to_string())
}

#[test]
fn a_folder_without_video_settings_uses_the_published_values() {
    let found = settings(&[], &VideoConfig::default()).unwrap();
    assert_eq!(found.sampling, FrameSampling { fps: 2.0, min_frames: 4, max_frames: 768 });
    let all = Budget { min_pixels: 4096, max_pixels: 25_165_824 };
    assert_eq!(found.pixels, PixelLimits { all, frame: None });
    assert_eq!(found.marks, VideoMarks::Nested);
}

#[test]
fn the_config_overrides_the_combined_file_and_that_overrides_the_published_one() {
    let published = ("video_preprocessor_config.json", json!({"fps": 3, "max_frames": 5}));
    let combined = json!({"video_processor": {"fps": 4, "min_frames": 2}});
    let combined = ("processor_config.json", combined);
    let none = VideoConfig::default();
    let fps = |files: &[_], config: &_| settings(files, config).unwrap().sampling.fps;
    assert_eq!(fps(std::slice::from_ref(&published), &none), 3.0);
    assert_eq!(fps(&[published.clone(), combined.clone()], &none), 4.0);
    let config = VideoConfig { fps: Some(0.5), max_pixels: Some(70_000), ..none };
    let found = settings(&[published, combined], &config).unwrap();
    assert_eq!(found.sampling, FrameSampling { fps: 0.5, min_frames: 2, max_frames: 768 });
    assert_eq!(found.pixels.all, Budget { min_pixels: 4096, max_pixels: 70_000 });
}

/// The helper's image settings have limits of 65,536 to 16,777,216 pixels and a mean of 0.5.
#[test]
fn the_limits_of_a_qwen25_vl_folder_are_those_of_a_frame_and_the_config_limits_all_frames() {
    let model = |tokens: Value| {
        let vision = json!({"tokens_per_second": tokens});
        ("config.json", json!({"model_type": "qwen2_5_vl", "vision_config": vision}))
    };
    let none = VideoConfig::default();
    let found = settings(&[model(json!(2))], &none).unwrap();
    assert_eq!(found.family.videos, VideoForm::OneRun { tokens_per_second: Some(2.0) });
    let frame = Budget { min_pixels: 65_536, max_pixels: 16_777_216 };
    let all = Budget { min_pixels: 1, max_pixels: u64::MAX };
    assert_eq!(found.pixels, PixelLimits { all, frame: Some(frame) });
    let config = VideoConfig { max_pixels: Some(70_000), ..none.clone() };
    let found = settings(&[model(Value::Null)], &config).unwrap();
    assert_eq!(found.family.videos, VideoForm::OneRun { tokens_per_second: Some(4.0) });
    let all = Budget { min_pixels: 1, max_pixels: 70_000 };
    assert_eq!(found.pixels, PixelLimits { all, frame: Some(frame) });
    let own = ("video_preprocessor_config.json", json!({"min_pixels": 784}));
    let found = settings(&[model(json!(2)), own], &none).unwrap();
    let frame = Budget { min_pixels: 784, max_pixels: 602_112 };
    assert_eq!(found.pixels.frame, Some(frame));
    for (file, key) in [
        (json!({"min_pixels": 5000, "max_pixels": 4000}), "min_pixels` is `5000`"),
        (
            json!({"size": {"shortest_edge": 5000, "longest_edge": 4000}}),
            "size.shortest_edge` is `5000`",
        ),
    ] {
        let own = ("video_preprocessor_config.json", file);
        let error = settings(&[model(json!(2)), own], &config).unwrap_err();
        assert!(error.contains(&format!("video_preprocessor_config.json`: `{key}")), "{error}");
    }

    let error = settings(&[model(json!(0))], &none).unwrap_err();
    assert!(error.contains("`vision_config.tokens_per_second` is `0`"), "{error}");
    let config = VideoConfig { marks: VideoMarks::Flat, ..none };
    let error = settings(&[model(json!(2))], &config).unwrap_err();
    assert!(error.contains("`data.video.marks` is `flat`"), "{error}");
}

#[test]
fn the_error_for_an_invalid_value_names_its_key_and_value() {
    let none = VideoConfig::default();
    for (config, message) in [
        (VideoConfig { fps: Some(0.0), ..none.clone() }, "`data.video.fps` is `0`"),
        (VideoConfig { max_frames: Some(1), ..none.clone() }, "`data.video.max_frames` is `1`"),
        (VideoConfig { min_frames: Some(769), ..none.clone() }, "`data.video.min_frames`"),
        (VideoConfig { max_pixels: Some(9), ..none.clone() }, "`data.video.max_pixels` is `9`"),
        (VideoConfig { min_pixels: Some(0), ..none.clone() }, "`data.video.min_pixels` is `0`"),
        (VideoConfig { timeout_s: 0.0, ..none.clone() }, "`data.video.timeout_s` is `0`"),
    ] {
        let error = settings(&[], &config).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    for (file, message) in [
        (json!({"patch_size": 14}), "`patch_size` is `14`, expected `16` as for images"),
        (json!({"cap_pixels_per_frame": true}), "`cap_pixels_per_frame` is `true`"),
        (json!({"image_std": [0.5, 0.0, 0.5]}), "above 0 for `image_std`"),
        (json!({"image_std": [0.5, 1024.0, 0.5]}), "up to 255 * `rescale_factor`"),
        (json!({"fps": "2"}), "cannot parse"),
        (json!({"min_pixels": 9, "max_pixels": 8}), "`min_pixels` is `9`"),
        (json!({"size": {"shortest_edge": 0}}), "`size.shortest_edge` is `0`"),
        (
            json!({"max_pixels": 9}),
            "json`: `max_pixels` is `9`, expected at least the minimum of 4096",
        ),
        (json!({"size": {"longest_edge": 9}}), "`size.longest_edge` is `9`"),
    ] {
        let error = settings(&[("video_preprocessor_config.json", file)], &none).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}
