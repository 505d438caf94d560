//! InternVL3.5 in the layout of transformers: a decoder of Qwen3, and a vision encoder with a class
//! token, a table of positions, layer scale, and separate layers for queries, keys and values. Each
//! tile of an image is a frame.

use super::config::{ModelConfigError, ReadDecoder, Section};
use super::model_config::ModelConfig;
use super::qwen3_decoder::{decoder, decoder_with_experts};
use super::vision::{
    MergerHidden, MergerParts, NormPlace, VisionAttention, VisionConfig, VisionMlp, VisionNames,
    VisionNorm, VisionParts, gelu,
};
use crate::nn::{DecoderConfig, TensorNames};
use batch::TileSizes;
use kernels::Gelu;
use serde_json::Value;

const NAMES: VisionNames = VisionNames {
    patch_embed: "model.vision_tower.embeddings.patch_embeddings.projection",
    positions: "model.vision_tower.embeddings.position_embeddings",
    class_token: Some("model.vision_tower.embeddings.cls_token"),
    blocks: "model.vision_tower.encoder.layer",
    norms: ["layernorm_before", "layernorm_after"],
    attention: "attention",
    attention_output: "attention.projection_layer",
    layer_scales: Some(["lambda_1", "lambda_2"]),
};
const MERGER: MergerParts = MergerParts {
    name: "model.multi_modal_projector",
    layers: ["layer_norm", "linear_1", "linear_2"],
    norm: VisionNorm::Layer,
    eps: 1e-5, // the default of PyTorch
    place: NormPlace::AfterMerge,
    hidden: MergerHidden::Output,
};

/// Reads the sizes from the parsed `config.json`.
pub(super) fn read(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    let top = Section { value: json, name: "" };
    let section = Section::of(json, "text_config")?;
    let readers: [(&str, ReadDecoder); 2] =
        [("qwen3", decoder), ("qwen3_moe", decoder_with_experts)];
    let text = section.decoder_of_kind(readers, None, "`qwen3` or `qwen3_moe`")?;
    let tied = [top.flag("tie_word_embeddings")?, section.flag("tie_word_embeddings")?];
    let config = ModelConfig {
        vision: Some(vision(&top, &Section::of(json, "vision_config")?, &text)?),
        // Without the key, transformers ties the two.
        text: DecoderConfig { tie_word_embeddings: tied[0].or(tied[1]).unwrap_or(true), ..text },
        tensor_names: TensorNames::Nested,
    };
    config.check()?;
    Ok(config)
}

/// Sizes that the file lacks are those of transformers.
fn vision(
    top: &Section<'_>,
    section: &Section<'_>,
    text: &DecoderConfig,
) -> Result<VisionConfig, ModelConfigError> {
    expect_supported(top, section)?;
    let norm = match &section.value["norm_type"] {
        Value::Null => VisionNorm::Layer,
        kind if kind == "layer_norm" => VisionNorm::Layer,
        kind if kind == "rms_norm" => VisionNorm::Rms,
        found => {
            return Err(ModelConfigError::Unsupported {
                key: "vision_config.norm_type",
                found: found.as_str().map_or_else(|| found.to_string(), str::to_owned),
                known: "`layer_norm` or `rms_norm`",
            });
        }
    };
    let TileSizes { side, patch, merge } = TileSizes::read(top.value)?;
    let patches = (side / patch) as usize; // on a side of a tile
    let tokens = (patches / merge as usize).pow(2); // of a tile
    if top.size_or("image_seq_length", tokens)? != tokens {
        return Err(top.range("image_seq_length", format!("the {tokens} tokens of a tile")));
    }
    let parts = VisionParts {
        names: NAMES,
        norm,
        eps: section.epsilon("layer_norm_eps", Some(1e-6))?,
        attention: VisionAttention::Separate {
            has_bias: section.is_true("attention_bias")?,
            has_norms: section.is_true("use_qk_norm")?,
        },
        mlp: VisionMlp::Gelu { act: gelu(section, Gelu::Erf)?, layers: ["fc1", "fc2"] },
        has_temporal_kernel: false,
        has_patch_bias: true,
        num_position_embeddings: Some(patches * patches + 1),
        merger: MERGER,
        ..VisionParts::QWEN
    };
    Ok(VisionConfig {
        depth: section.size_or("num_hidden_layers", 24)?,
        hidden_size: section.size_or("hidden_size", 1024)?,
        intermediate_size: section.size_or("intermediate_size", 4096)?,
        num_heads: section.size_or("num_attention_heads", 16)?,
        in_channels: section.size_or("num_channels", 3)?,
        patch_size: patch as usize,
        temporal_patch_size: 1,
        spatial_merge_size: merge as usize,
        out_hidden_size: text.hidden_size,
        image_token_id: top.size("image_token_id")? as u32,
        parts,
    })
}

/// Fails if a setting that changes the computation is not that of all published models.
fn expect_supported(top: &Section<'_>, section: &Section<'_>) -> Result<(), ModelConfigError> {
    for (key, accepted, known) in [
        ("projector_hidden_act", Value::from("gelu"), "`gelu`"),
        ("vision_feature_layer", Value::from(-1), "`-1`"),
        ("vision_feature_select_strategy", Value::from("default"), "`default`"),
    ] {
        top.expect(key, &accepted, known)?;
    }
    for (key, accepted, known) in [
        ("use_absolute_position_embeddings", true, "`true`"),
        ("use_mean_pooling", true, "`true`"),
        ("use_mask_token", false, "`false`"),
    ] {
        section.expect(key, &Value::from(accepted), known)?;
    }
    section.expect("model_type", &Value::from("internvl_vision"), "`internvl_vision`")?;
    for key in ["attention_dropout", "hidden_dropout_prob", "projection_dropout"] {
        section.expect_no_dropout(key)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::config::assert_refused;
    use serde_json::json;

    /// The file of the 1B model.
    fn published() -> Value {
        json!({
            "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5,
            "image_seq_length": 256, "image_token_id": 151_671, "model_type": "internvl",
            "projector_hidden_act": "gelu", "torch_dtype": "bfloat16",
            "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
            "text_config": {
                "architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
                "attention_dropout": 0.0, "bos_token_id": 151_643, "eos_token_id": 151_645,
                "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
                "initializer_range": 0.02, "intermediate_size": 3072,
                "layer_types": vec!["full_attention"; 28], "max_position_embeddings": 40960,
                "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
                "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
                "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": null,
                "tie_word_embeddings": false, "use_cache": true, "use_sliding_window": false,
                "vocab_size": 151_936,
            },
            "vision_config": {
                "architectures": ["InternVisionModel"], "attention_bias": true,
                "attention_dropout": 0.0, "dropout": 0.0, "hidden_act": "gelu",
                "hidden_dropout_prob": 0.0, "hidden_size": 1024, "image_size": [448, 448],
                "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 4096,
                "layer_norm_eps": 1e-6, "layer_scale_init_value": 0.1,
                "model_type": "internvl_vision", "norm_type": "layer_norm",
                "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24,
                "patch_size": [14, 14], "projection_dropout": 0.0,
                "use_absolute_position_embeddings": true, "use_mask_token": false,
                "use_mean_pooling": true, "use_qk_norm": false,
            },
        })
    }

    fn num_parameters(config: &ModelConfig) -> usize {
        let specs = config.param_specs();
        specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum()
    }

    #[test]
    fn the_sizes_are_those_of_the_published_models() {
        let config = read(&published()).unwrap();
        assert_eq!(num_parameters(&config), 1_060_897_792);
        let vision = config.vision.unwrap();
        assert_eq!(
            (vision.parts.num_position_embeddings, vision.spatial_merge_size),
            (Some(1025), 2)
        );
        let mut json = published();
        for (key, value) in [
            ("hidden_size", 4096),
            ("intermediate_size", 12288),
            ("num_attention_heads", 32),
            ("num_hidden_layers", 36),
        ] {
            json["text_config"][key] = json!(value);
        }
        json["text_config"].as_object_mut().unwrap().remove("layer_types");
        assert_eq!(num_parameters(&read(&json).unwrap()), 8_528_318_464);
    }

    #[test]
    fn sizes_that_the_file_lacks_are_those_of_transformers_and_a_head_is_tied_by_default() {
        let mut json = published();
        let config = read(&json).unwrap();
        assert!(!config.text.tie_word_embeddings);
        json["vision_config"] = json!({"attention_bias": true, "patch_size": 14});
        json.as_object_mut().unwrap().remove("downsample_ratio");
        assert_eq!(read(&json).unwrap(), config);
        json["text_config"].as_object_mut().unwrap().remove("tie_word_embeddings");
        assert!(read(&json).unwrap().text.tie_word_embeddings);
        json["tie_word_embeddings"] = json!(false);
        assert!(!read(&json).unwrap().text.tie_word_embeddings);
    }

    #[test]
    fn the_larger_encoder_has_rms_norms_and_norms_of_queries_and_keys() {
        let mut json = published();
        for (key, value) in [
            ("norm_type", json!("rms_norm")),
            ("use_qk_norm", json!(true)),
            ("attention_bias", json!(false)),
        ] {
            json["vision_config"][key] = value;
        }
        let specs = read(&json).unwrap().param_specs();
        let has = |name: &str| {
            let name = format!("model.vision_tower.encoder.layer.3.{name}");
            specs.iter().any(|spec| spec.name == name)
        };
        assert!(has("attention.q_norm.weight") && has("layernorm_after.weight"));
        assert!(!has("attention.q_proj.bias") && !has("layernorm_after.bias"));
        assert!(has("attention.projection_layer.bias") && has("lambda_2"));
    }

    #[test]
    fn values_that_are_not_supported_are_refused_by_name() {
        let changes = [
            ("", "vision_feature_layer", json!(-2), "vision_feature_layer"),
            ("", "vision_feature_select_strategy", json!("full"), "select_strategy"),
            ("", "downsample_ratio", json!(0.3), "`downsample_ratio` is 0.3"),
            ("", "downsample_ratio", json!(0.0), "`downsample_ratio` is 0"),
            (
                "text_config",
                "model_type",
                json!("gpt_oss"),
                "`text_config.model_type` is `gpt_oss`",
            ),
            ("vision_config", "use_mean_pooling", json!(false), "use_mean_pooling"),
            ("vision_config", "norm_type", json!("batch_norm"), "vision_config.norm_type"),
            ("vision_config", "norm_type", json!(1), "vision_config.norm_type"),
            ("vision_config", "layer_norm_eps", json!(0), "`vision_config.layer_norm_eps` is 0"),
            ("vision_config", "model_type", json!("siglip_vision_model"), "siglip_vision_model"),
            ("vision_config", "attention_bias", json!("yes"), "vision_config.attention_bias"),
            ("", "image_seq_length", json!(64), "the 256 tokens of a tile"),
            (
                "text_config",
                "rope_scaling",
                json!({"rope_type": "mrope"}),
                "`rope_type` is `mrope`",
            ),
            ("vision_config", "image_size", json!([448, 224]), "vision_config.image_size"),
            ("vision_config", "image_size", json!(450), "a multiple of 2 patches of 14"),
            ("vision_config", "patch_size", json!(0), "vision_config.patch_size"),
            ("vision_config", "hidden_dropout_prob", json!(0.1), "hidden_dropout_prob"),
        ];
        assert_refused(read, &published(), changes);
    }
}
