use serde_json::{Value, json};

use super::*;

fn published() -> Value {
    json!({
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    })
}

fn settings_in(name: &str, file: &Value, config: &ImageConfig) -> Result<ImageSettings, String> {
    settings_of(&json!({"model_type": "qwen3_vl"}), name, file, config)
}

fn settings_of(
    model: &Value,
    name: &str,
    file: &Value,
    config: &ImageConfig,
) -> Result<ImageSettings, String> {
    use std::io::Write as _;
    let folder = tempfile::tempdir().unwrap();
    let mut out = std::fs::File::create(folder.path().join(name)).unwrap();
    out.write_all(file.to_string().as_bytes()).unwrap();
    let mut out = std::fs::File::create(folder.path().join("config.json")).unwrap();
    out.write_all(model.to_string().as_bytes()).unwrap();
    ImageSettings::read(folder.path(), config).map_err(|error| error.to_string())
}

fn settings(changes: &Value) -> Result<ImageSettings, String> {
    let mut file = published();
    for (key, value) in changes.as_object().unwrap() {
        file[key] = value.clone();
    }
    settings_in("preprocessor_config.json", &file, &ImageConfig::default())
}

#[test]
fn the_published_file_is_read() {
    let found = settings(&json!({})).unwrap();
    let expected = ImageSettings {
        patch_size: 16,
        temporal_patch_size: 2,
        merge_size: 2,
        inner_size: 2,
        min_pixels: 65536,
        max_pixels: 16777216,
        cut: ImageCut::OneGrid,
        mean: [0.5; 3],
        std: [0.5; 3],
        scale: 255.0,
    };
    assert_eq!(found, expected);
}

#[test]
fn the_config_overrides_top_level_keys_and_these_override_size() {
    let file = json!({"min_pixels": 4096, "max_pixels": 200704});
    let found = settings(&file).unwrap();
    assert_eq!((found.min_pixels, found.max_pixels), (4096, 200704));
    let config = ImageConfig { max_pixels: Some(100_000), ..ImageConfig::default() };
    let found = settings_in("preprocessor_config.json", &published(), &config).unwrap();
    assert_eq!((found.min_pixels, found.max_pixels), (65536, 100_000));
}

#[test]
fn max_tokens_is_converted_to_an_area_and_the_smaller_limit_applies() {
    let settings = |max_tokens, max_pixels| {
        let max_tokens = NonZeroU32::new(max_tokens);
        let config = ImageConfig { max_pixels, max_tokens, ..ImageConfig::default() };
        settings_in("preprocessor_config.json", &published(), &config)
    };
    assert_eq!(settings(300, None).unwrap(), settings(0, Some(300 * 1024)).unwrap());
    assert_eq!(settings(300, Some(100_000)).unwrap().max_pixels, 100_000);
    assert_eq!(settings(97, Some(100_000)).unwrap().max_pixels, 97 * 1024);
    assert!(settings(63, None).unwrap_err().contains("`max_pixels` is `64512`"));
}

#[test]
fn the_combined_file_of_newer_transformers_is_read() {
    let file = json!({"image_processor": published(), "processor_class": "Qwen3VLProcessor"});
    let config = ImageConfig::default();
    let found = settings_in("processor_config.json", &file, &config).unwrap();
    assert_eq!(found, settings(&json!({})).unwrap());
}

#[test]
fn the_error_for_an_invalid_value_names_its_key_and_value() {
    for (changes, message) in [
        (json!({"patch_size": null}), "`patch_size` is `missing`"),
        (json!({"merge_size": 0}), "`merge_size` is `0`"),
        (json!({"image_mean": null}), "`image_mean` is `missing`"),
        (json!({"image_std": [0.5, 0.0, 0.5]}), "`image_std` is `[0.5, 0.0, 0.5]`"),
        (json!({"image_std": [0.5, 1024.0, 0.5]}), "`image_std` is `[0.5, 1024.0, 0.5]`"),
        (json!({"image_mean": [1e30, 0.5, 0.5]}), "from 0 to 255 * `rescale_factor`"),
        (json!({"image_mean": [-0.5, 0.5, 0.5]}), "from 0 to 255 * `rescale_factor`"),
        (json!({"image_std": [0.5]}), "cannot parse"),
        (json!({"patch_size": "16"}), "cannot parse"),
        (json!({"resample": 2}), "`resample` is `2`, expected 3"),
        (json!({"do_normalize": false}), "`do_normalize` is `false`"),
        (json!({"rescale_factor": 0.0}), "`rescale_factor` is `0`"),
        (json!({"size": {"shortest_edge": 5}}), "`size.longest_edge` is `missing`"),
        (json!({"size": null}), "`size.shortest_edge` is `missing`"),
        (json!({"max_pixels": 65535}), "`min_pixels` is `65536` and `max_pixels` is `65535`"),
        (json!({"min_pixels": 0}), "`min_pixels` is `0`"),
    ] {
        let error = settings(&changes).unwrap_err();
        assert!(error.contains(message), "{changes}: {error}");
    }
}

#[test]
fn the_error_for_a_folder_without_the_file_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let error = ImageSettings::read(folder.path(), &ImageConfig::default()).unwrap_err();
    assert!(error.to_string().contains("has neither `preprocessor_config.json`"), "{error}");
}

/// The published sizes of a model with tiles, with `changes` of `config.json` and of the
/// preprocessor's file.
fn tile_settings(
    model_changes: &[(&str, Value)],
    changes: &[(&str, Value)],
    config: &ImageConfig,
) -> Result<ImageSettings, String> {
    let mut model = json!({
        "model_type": "internvl", "downsample_ratio": 0.5, "image_token_id": 151671,
        "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
    });
    let mut file = json!({
        "crop_to_patches": false, "min_patches": 1, "max_patches": 12, "resample": 3,
        "do_center_crop": null, "size": {"height": 448, "width": 448},
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "rescale_factor": 0.00392156862745098,
    });
    for (pointer, value) in model_changes {
        *model.pointer_mut(pointer).unwrap() = value.clone();
    }
    for (pointer, value) in changes {
        *file.pointer_mut(pointer).unwrap() = value.clone();
    }
    settings_of(&model, "preprocessor_config.json", &file, config)
}

#[test]
fn the_published_files_of_a_model_with_tiles_are_read() {
    let none = ImageConfig::default();
    let found = tile_settings(&[], &[], &none).unwrap();
    let sizes = [found.patch_size, found.temporal_patch_size, found.merge_size];
    assert_eq!(sizes, [14, 1, 2]);
    assert_eq!(found.cut, ImageCut::Tiles(Tiles { side: 448, min: 1, max: 12 }));
    assert_eq!([found.min_pixels, found.max_pixels], [1, u64::MAX]);
    let numbers =
        [("/vision_config/image_size", json!(448)), ("/vision_config/patch_size", json!(14))];
    assert_eq!(tile_settings(&numbers, &[], &none), Ok(found.clone()));
    let missing = ["/vision_config/image_size", "/vision_config/patch_size", "/downsample_ratio"]
        .map(|key| (key, Value::Null));
    assert_eq!(tile_settings(&missing, &[], &none), Ok(found.clone()));
    let without = [("/min_patches", Value::Null), ("/max_patches", Value::Null)];
    assert_eq!(tile_settings(&[], &without, &none), Ok(found));
    let config = ImageConfig { max_tokens: NonZeroU32::new(512), ..none };
    assert_eq!(tile_settings(&[], &[], &config).unwrap().max_pixels, 2 * 448 * 448);
}

#[test]
fn errors_for_invalid_sizes_of_tiles_name_their_keys() {
    let none = ImageConfig::default();
    for (key, value, message) in [
        (
            "/vision_config/image_size",
            json!([448, 224]),
            "`vision_config.image_size` is `[448,224]`",
        ),
        (
            "/vision_config/image_size",
            json!(440),
            "`vision_config.image_size` is `440`, expected a multiple",
        ),
        ("/vision_config/image_size", json!(224), "`size.height` is `448`, expected 224"),
        ("/vision_config/patch_size", json!([0, 0]), "`vision_config.patch_size` is `[0,0]`"),
        ("/vision_config/patch_size", json!("14"), "`vision_config.patch_size` is `\"14\"`"),
        ("/downsample_ratio", json!(0.4), "`downsample_ratio` is `0.4`"),
        ("/downsample_ratio", json!(0), "`downsample_ratio` is `0`"),
    ] {
        let error = tile_settings(&[(key, value)], &[], &none).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    for (key, value, message) in [
        ("/size", json!({"height": 448, "width": 384}), "`size.width` is `384`, expected 448"),
        ("/size", json!({"shortest_edge": 448}), "`size.height` is `missing`"),
        ("/max_patches", json!(0), "`max_patches` is `0`"),
        ("/min_patches", json!(13), "`min_patches` is `13`, expected at most `max_patches`"),
        ("/resample", json!(2), "`resample` is `2`, expected 3"),
    ] {
        let error = tile_settings(&[], &[(key, value)], &none).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn limits_of_a_row_precede_those_of_the_config() {
    let of = |min, max| {
        let limits =
            AreaLimits { min_pixels: NonZeroU32::new(min), max_pixels: NonZeroU32::new(max) };
        over(limits, [100, 1000])
    };
    assert_eq!(of(0, 0), [100, 1000]);
    assert_eq!(of(50, 0), [50, 1000]);
    assert_eq!(of(2000, 0), [2000, 2000]);
    assert_eq!(of(0, 5000), [100, 5000]);
    assert_eq!(of(0, 30), [30, 30]);
    assert_eq!(of(7, 9), [7, 9]);
}

#[test]
fn all_sizes_of_the_reference_table_agree() {
    let table: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../../tests/golden/smart_resize.json"))
            .unwrap();
    let rows = table["image"].as_array().unwrap();
    assert_eq!(rows.len(), 600);
    for row in rows {
        let [h, w, factor, min, max] = std::array::from_fn(|i| row[i].as_u64().unwrap());
        let expected: Option<[u32; 2]> = serde_json::from_value(row[5].clone()).unwrap();
        let found = smart_resize(h as u32, w as u32, factor as u32, min, max);
        assert_eq!(found, expected, "{row}");
    }
}

#[test]
fn sides_round_half_to_even() {
    let side = |n| smart_resize(n, 320, 32, 1, u64::MAX).unwrap()[0];
    assert_eq!([48, 80, 112].map(side), [64, 64, 128]);
}

#[test]
fn a_ratio_of_200_passes_and_one_more_pixel_does_not() {
    assert!(smart_resize(3, 600, 32, 4096, 200_704).is_some());
    assert_eq!(smart_resize(3, 601, 32, 4096, 200_704), None);
}

/// The published sizes of a model with slices, with `changes` of `config.json` and of the
/// preprocessor's file.
fn slice_settings(
    model_changes: &Value,
    changes: &Value,
    config: &ImageConfig,
) -> Result<ImageSettings, String> {
    let mut model = json!({
        "model_type": "minicpmv4_6", "downsample_mode": "16x", "image_token_id": 248056,
        "vision_config": {"image_size": 980, "patch_size": 14},
    });
    let mut file = json!({
        "max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "slice_mode": true,
        "downsample_mode": "16x", "use_image_id": true, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.00392156862745098, "resample": 3,
    });
    for (to, changes) in [(&mut model, model_changes), (&mut file, changes)] {
        for (key, value) in changes.as_object().unwrap() {
            to[key] = value.clone();
        }
    }
    settings_of(&model, "preprocessor_config.json", &file, config)
}

#[test]
fn the_settings_of_a_model_with_slices_are_read() {
    let (none, same) = (ImageConfig::default(), json!({}));
    let found = slice_settings(&same, &same, &none).unwrap();
    let sizes = [found.patch_size, found.temporal_patch_size, found.merge_size, found.inner_size];
    assert_eq!(sizes, [14, 1, 4, 2]);
    let slices = Slices { side: 448, patch: 14, merge: 4, max: 9, is_numbered: true };
    assert_eq!(found.cut, ImageCut::Slices(slices));
    assert_eq!([found.min_pixels, found.max_pixels], [1, u64::MAX]);
    let keys = ["max_slice_nums", "scale_resolution", "patch_size", "slice_mode", "use_image_id"];
    let missing = |keys: &[&str]| keys.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
    let without = missing(&[&keys[..], &["downsample_mode", "image_mean", "image_std"]].concat());
    let no_mode = missing(&["downsample_mode"]);
    assert_eq!(slice_settings(&no_mode, &without, &none), Ok(found.clone()));
    let square = json!({"vision_config": {"patch_size": [14, 14]}});
    assert_eq!(slice_settings(&square, &same, &none), Ok(found));
    let mode = json!({"downsample_mode": "4x"});
    let changes = json!({"downsample_mode": "4x", "slice_mode": false, "use_image_id": false});
    let found = slice_settings(&mode, &changes, &none).unwrap();
    assert_eq!([found.merge_size, found.inner_size], [2, 2]);
    let slices = Slices { side: 448, patch: 14, merge: 2, max: 1, is_numbered: false };
    assert_eq!(found.cut, ImageCut::Slices(slices));
    let config = ImageConfig { max_tokens: NonZeroU32::new(100), ..none };
    assert_eq!(slice_settings(&same, &same, &config).unwrap().max_pixels, 100 * 56 * 56);
    assert_eq!(slice_settings(&mode, &mode, &config).unwrap().max_pixels, 100 * 28 * 28);
}

#[test]
fn errors_for_settings_of_slices_name_the_files_and_the_keys() {
    let (none, same) = (ImageConfig::default(), json!({}));
    for (model, file, messages) in [
        (
            json!({"downsample_mode": "4x"}),
            same.clone(),
            ["`downsample_mode` is `16x`", "`4x`, the `downsample_mode` in config.json"],
        ),
        (
            same.clone(),
            json!({"downsample_mode": "4x"}),
            ["`downsample_mode` is `4x`", "`16x`, the `downsample_mode` in config.json"],
        ),
        (
            json!({"downsample_mode": "8x"}),
            same.clone(),
            ["config.json`: `downsample_mode` is `\"8x\"`", "`16x` or `4x`"],
        ),
        (
            json!({"vision_config": {}}),
            same.clone(),
            ["`patch_size` is `14`", "16, the `vision_config.patch_size` in config.json"],
        ),
        (
            same.clone(),
            json!({"patch_size": 16}),
            ["preprocessor_config.json`: `patch_size` is `16`", "expected 14"],
        ),
        (
            json!({"vision_config": {"patch_size": [14, 16]}}),
            same.clone(),
            ["`vision_config.patch_size` is `[14,16]`", "a list of two"],
        ),
        (same.clone(), json!({"max_slice_nums": 0}), ["`max_slice_nums` is `0`", "from 1"]),
        (same.clone(), json!({"scale_resolution": 1025}), ["`scale_resolution` is `1025`", "1024"]),
        (same.clone(), json!({"resample": 2}), ["`resample` is `2`", "expected 3"]),
    ] {
        let error = slice_settings(&model, &file, &none).unwrap_err();
        assert!(messages.iter().all(|message| error.contains(message)), "{error}");
    }
    let config = ImageConfig { min_pixels: Some(4096), ..none };
    let error = slice_settings(&same, &same, &config).unwrap_err();
    assert!(error.contains("`data.image.min_pixels` is `4096`, expected `null`"), "{error}");
}
