use crate::models::config::{ModelConfigError, Section};
use crate::models::model_config::ModelConfig;
use crate::models::qwen3_5_decoder::{decoder, decoder_with_experts, on_three_axes};
use crate::models::vision::{VisionConfig, VisionParts};
use crate::nn::{DecoderConfig, TensorNames};
use serde_json::Value;

/// Reads the sizes of a model with a vision encoder from the parsed `config.json`.
pub(in crate::models) fn read(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    read_with(json, decoder)
}

/// As [`read`], for a model with experts.
pub(in crate::models) fn read_moe(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    read_with(json, decoder_with_experts)
}

fn read_with(
    json: &Value,
    decoder: impl Fn(&Section<'_>) -> Result<DecoderConfig, ModelConfigError>,
) -> Result<ModelConfig, ModelConfigError> {
    let top = Section { value: json, name: "" };
    let text = Section::of(json, "text_config")?;
    let vision = Section::of(json, "vision_config")?;
    let parts = VisionParts::with_table(&vision, Vec::new())?;
    let config = ModelConfig {
        // transformers reads only the key of the whole file
        text: DecoderConfig {
            tie_word_embeddings: top.is_true("tie_word_embeddings")?,
            ..on_three_axes(&text, decoder(&text)?)?
        },
        vision: Some(VisionConfig::read(&top, &vision, parts)?),
        tensor_names: TensorNames::Modules,
    };
    config.check()?;
    Ok(config)
}

pub(in crate::models) fn read_text(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    let top = Section { value: json, name: "" };
    Ok(ModelConfig::text_only(decoder(&top)?))
}

/// As [`read_text`], for a model with experts.
pub(in crate::models) fn read_text_moe(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    let top = Section { value: json, name: "" };
    Ok(ModelConfig::text_only(decoder_with_experts(&top)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn published() -> Value {
        json!({
            "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024,
            "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu",
            "attn_output_gate": true, "tie_word_embeddings": true,
            "rope_parameters": {
                "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "rope_type": "default",
                "mrope_section": [11, 11, 10], "mrope_interleaved": true,
            },
        })
    }

    #[test]
    fn a_quarter_of_a_head_is_rotated_and_every_fourth_layer_has_full_attention() {
        let config = read_text(&published()).unwrap().text;
        assert_eq!(config.rotary_dim, 64);
        let is_full = |k: &usize| config.layers[*k].linear_attention().is_none();
        assert_eq!((0..24).filter(is_full).collect::<Vec<_>>(), [3, 7, 11, 15, 19, 23]);
        assert_eq!(config.linear_attention().unwrap().qkv_width(), 3 * 16 * 128);
    }

    #[test]
    fn a_folder_that_transformers_has_saved_lists_no_deepstack_layers() {
        let mut vision = json!({
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
            "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "num_position_embeddings": 2304, "out_hidden_size": 1024, "model_type": "qwen3_5_vision",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
        });
        for list in [json!([]), Value::Null] {
            vision["deepstack_visual_indexes"] = list;
            let json = json!({
                "model_type": "qwen3_5", "text_config": published(), "vision_config": vision,
                "image_token_id": 248_056, "tie_word_embeddings": true,
            });
            let config = read(&json).unwrap();
            assert!(config.vision.unwrap().parts.deepstack.is_empty());
            assert!(config.text.tie_word_embeddings);
        }
    }

    #[test]
    fn values_that_are_not_supported_are_refused_by_name() {
        for (key, value) in [
            ("layer_types", json!(["full_attention"])),
            ("layer_types", json!(vec!["sliding_attention"; 24])),
            ("linear_num_key_heads", json!(3)),
            ("linear_conv_kernel_dim", json!(0)),
            ("linear_conv_kernel_dim", json!(3)),
            ("attention_bias", json!(true)),
        ] {
            let mut json = published();
            json[key] = value;
            let error = read_text(&json).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
        let mut json = published();
        json["rope_parameters"]["partial_rotary_factor"] = json!(0.3);
        let error = read_text(&json).unwrap_err().to_string();
        assert!(error.contains("partial_rotary_factor"), "{error}");
    }
}
