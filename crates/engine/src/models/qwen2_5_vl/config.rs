use crate::models::config::{ModelConfigError, Section};
use crate::models::model_config::ModelConfig;
use crate::models::qwen2;
use crate::models::vision::{
    MergerParts, VisionConfig, VisionMlp, VisionNorm, VisionParts, VisionWindows, expect_rope,
};
use batch::PatchSizes;
use serde_json::Value;

/// Reads the sizes from the parsed `config.json`.
pub(in crate::models) fn read(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    qwen2::read(json, |top, section, _| vision(top, section))
}

/// Sizes that the file lacks are those of transformers: version 4.49 did not write them.
fn vision(top: &Section<'_>, section: &Section<'_>) -> Result<VisionConfig, ModelConfigError> {
    section.expect("hidden_act", &Value::from("silu"), "`silu`")?;
    expect_rope(section)?;
    let patch_size = section.size_or("patch_size", PatchSizes::QWEN2.patch as usize)?;
    let spatial_merge_size =
        section.size_or("spatial_merge_size", PatchSizes::QWEN2.merge as usize)?;
    let token = patch_size * spatial_merge_size; // pixels on a side
    let pixels = section.size_or("window_size", 112)?;
    if pixels < token {
        return Err(section.range("window_size", format!("at least the {token} pixels of a token")));
    }
    let full_attention_blocks = match &section.value["fullatt_block_indexes"] {
        Value::Null => vec![7, 15, 23, 31],
        _ => section.sizes("fullatt_block_indexes")?,
    };
    let qwen = VisionParts::QWEN;
    let parts = VisionParts {
        norm: VisionNorm::Rms,
        mlp: VisionMlp::SwiGlu,
        windows: Some(VisionWindows { side: pixels / token, full_attention_blocks }),
        merger: MergerParts { norm: VisionNorm::Rms, ..qwen.merger },
        ..qwen
    };
    Ok(VisionConfig {
        depth: section.size_or("depth", 32)?,
        hidden_size: section.size("hidden_size")?,
        intermediate_size: section.size_or("intermediate_size", 3420)?,
        num_heads: section.size_or("num_heads", 16)?,
        in_channels: section.size_or("in_channels", 3)?,
        patch_size,
        temporal_patch_size: section
            .size_or("temporal_patch_size", PatchSizes::QWEN2.temporal as usize)?,
        spatial_merge_size,
        out_hidden_size: section.size_or("out_hidden_size", 3584)?,
        image_token_id: top.size("image_token_id")? as u32,
        parts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The published file of the 7B model.
    fn published() -> Value {
        json!({
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0,
            "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 18944, "max_position_embeddings": 128_000, "max_window_layers": 28,
            "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false,
            "vision_config": {
                "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
                "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
                "temporal_patch_size": 2,
            },
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152_064,
            "image_token_id": 151_655, "video_token_id": 151_656,
        })
    }

    #[test]
    fn a_window_has_four_tokens_on_a_side_and_every_eighth_block_has_none() {
        let config = read(&published()).unwrap();
        let vision = config.vision.unwrap();
        let full: Vec<usize> = (0..32).filter(|k| !vision.has_windows(*k)).collect();
        assert_eq!(full, [7, 15, 23, 31]);
        let window = vision.parts.windows.as_ref().unwrap().side;
        assert_eq!((window, config.text.head_dim), (4, 128));
        assert!(!config.text.tie_word_embeddings);
    }

    /// Keys with the default values of their class are missing.
    #[test]
    fn the_vision_encoder_of_a_file_of_transformers_4_49_has_the_published_sizes() {
        let mut json = published();
        json["vision_config"] = json!({
            "hidden_size": 1280, "in_chans": 3, "model_type": "qwen2_5_vl",
            "spatial_patch_size": 14, "tokens_per_second": 2,
        });
        json["rope_scaling"] = json!({"mrope_section": [16, 24, 24], "rope_type": "mrope"});
        json["attention_bias"] = json!(true); // not read: there are always biases
        assert_eq!(read(&json).unwrap(), read(&published()).unwrap());
        json["vision_config"]["out_hidden_size"] = json!(2048);
        let error = read(&json).unwrap_err().to_string();
        assert!(error.contains("`out_hidden_size` is 2048"), "{error}");
    }

    #[test]
    fn the_layouts_of_transformers_4_and_5_are_read_alike() {
        let flat = published();
        let mut nested = json!({});
        let mut text = json!({});
        for (key, value) in flat.as_object().unwrap() {
            let is_top = key.ends_with("_id") || key.starts_with("vision") || key == "model_type";
            if is_top { nested[key] = value.clone() } else { text[key] = value.clone() }
        }
        nested["text_config"] = text.clone();
        assert_eq!(read(&flat).unwrap(), read(&nested).unwrap());
        let text = &mut nested["text_config"];
        text["rope_parameters"] = text["rope_scaling"].take();
        text["rope_parameters"]["rope_theta"] = text["rope_theta"].take();
        text["rope_parameters"]["rope_type"] = json!("default");
        text["tie_word_embeddings"] = json!(true);
        text["layer_types"] = json!(vec!["full_attention"; 28]);
        let config = read(&nested).unwrap();
        assert!(config.text.tie_word_embeddings);
        assert_eq!(config.text.rope_theta, 1e6);
    }

    #[test]
    fn two_different_settings_of_rotary_positions_are_refused_with_both_values() {
        let sections = json!([16, 24, 24]);
        for (parameters, named) in [
            (json!({"rope_type": "default", "mrope_section": sections}), None),
            (json!({"rope_theta": 1_000_000, "mrope_section": sections, "type": "default"}), None),
            (json!({"mrope_section": sections}), None),
            (
                json!({"rope_type": "yarn", "mrope_section": sections}),
                Some([
                    "`rope_parameters.rope_type` is \"yarn\"",
                    "`rope_scaling.type` is \"mrope\"",
                ]),
            ),
            (
                json!({"mrope_section": [8, 28, 28]}),
                Some([
                    "`rope_parameters.mrope_section` is [8,28,28]",
                    "`rope_scaling.mrope_section` is [16,24,24]",
                ]),
            ),
            (
                json!({"rope_theta": 5e6, "mrope_section": sections}),
                Some(["`rope_parameters.rope_theta` is 5000000.0", "`rope_theta` is 1000000.0"]),
            ),
        ] {
            let mut json = published();
            json["rope_parameters"] = parameters;
            match (read(&json), named) {
                (Ok(config), None) => assert_eq!(config, read(&published()).unwrap()),
                (Err(error), Some(named)) => {
                    let error = error.to_string();
                    assert!(named.iter().all(|part| error.contains(part)), "{error}");
                }
                (found, _) => panic!("{named:?}: {found:?}"),
            }
        }
    }

    /// transformers uses `rope_scaling` alone if a file has both sections.
    #[test]
    fn a_setting_of_rotary_positions_that_only_one_section_has_is_refused() {
        for (parameters, scaling, named) in [
            (
                json!({"rope_theta": 1e6}),
                json!({"rope_type": "yarn", "factor": 4}),
                ["`rope_parameters.factor` is missing", "`rope_scaling.factor` is 4"],
            ),
            (
                json!({"rope_theta": 1e6}),
                json!({"type": "yarn"}),
                ["`rope_parameters.rope_type` is missing", "`rope_scaling.type` is \"yarn\""],
            ),
            (
                json!({}),
                json!({"rope_type": "yarn"}),
                ["`rope_parameters.rope_type` is missing", "`rope_scaling.rope_type` is \"yarn\""],
            ),
            (
                json!({"rope_type": "default", "rope_theta": 1e6}),
                json!({"mrope_section": [8, 28, 28]}),
                [
                    "`rope_parameters.mrope_section` is missing",
                    "`rope_scaling.mrope_section` is [8,28,28]",
                ],
            ),
            (
                json!({"rope_theta": 5e6}),
                json!({"type": "mrope"}),
                [
                    "`rope_parameters.rope_theta` is 5000000.0",
                    "`rope_scaling.rope_theta` is missing",
                ],
            ),
        ] {
            let mut json = published();
            // in the first four cases it applies to both sections
            if named[1].contains("rope_theta") {
                json["rope_theta"].take();
            }
            json["rope_parameters"] = parameters;
            json["rope_scaling"] = scaling;
            let error = read(&json).unwrap_err().to_string();
            assert!(named.iter().all(|part| error.contains(part)), "{error}");
        }
        // the message names the key that has the value
        let mut json = published();
        json["rope_parameters"] = json["rope_scaling"].clone();
        json["rope_parameters"]["rope_theta"] = json!(1e6);
        json["rope_scaling"]["rope_theta"] = json!(5e6);
        let error = read(&json).unwrap_err().to_string();
        assert!(error.contains("`rope_scaling.rope_theta` is 5000000.0"), "{error}");
        // an empty section counts as none in transformers
        json["rope_scaling"] = json!({});
        assert_eq!(read(&json).unwrap(), read(&published()).unwrap());
    }

    #[test]
    fn values_that_are_not_supported_are_refused_by_name() {
        for (key, value) in [
            ("use_sliding_window", json!(true)),
            ("head_dim", json!(64)),
            ("hidden_act", json!("gelu")),
            ("rope_scaling", json!({"type": "yarn"})),
            ("rope_scaling", json!({"type": "mrope", "mrope_section": [24, 20, 10]})),
            ("image_token_id", json!(200_000)),
        ] {
            let mut json = published();
            if key == "use_sliding_window" {
                json["max_window_layers"] = json!(20);
            }
            json[key] = value;
            let error = read(&json).unwrap_err().to_string();
            let named = if key == "rope_scaling" { "`" } else { key };
            let named = if key == "head_dim" { "hidden_size" } else { named };
            assert!(error.contains(named), "{error}");
        }
        for (key, value) in [
            ("window_size", json!(20)),
            ("hidden_act", json!("gelu")),
            ("out_hidden_size", json!(2048)),
            ("fullatt_block_indexes", json!(7)),
            ("rope_parameters", json!({"rope_theta": 5000.0})),
            ("rope_parameters", json!({"rope_type": "yarn"})),
        ] {
            let mut json = published();
            json["vision_config"][key] = value;
            let error = read(&json).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }
}
