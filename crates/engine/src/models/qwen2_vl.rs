//! Qwen2-VL: the decoder of Qwen2, and a vision encoder with layer norms, `quick_gelu` and full
//! attention.

use super::config::{ModelConfigError, Section};
use super::model_config::ModelConfig;
use super::qwen2;
use super::vision::{VisionConfig, VisionMlp, VisionParts, expect_rope, gelu};
use crate::nn::DecoderConfig;
use batch::PatchSizes;
use kernels::Gelu;
use serde_json::Value;

/// Reads the sizes from the parsed `config.json`.
pub(super) fn read(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    qwen2::read(json, vision)
}

/// Sizes that the file lacks are those of transformers, some versions of which do not write them.
fn vision(
    top: &Section<'_>,
    section: &Section<'_>,
    text: &DecoderConfig,
) -> Result<VisionConfig, ModelConfigError> {
    expect_rope(section)?;
    let (hidden_size, num_heads) =
        (section.size_or("embed_dim", 1280)?, section.size_or("num_heads", 16)?);
    if !hidden_size.is_multiple_of(4 * num_heads) {
        let expected = format!("a multiple of 4 * `num_heads` {num_heads}");
        return Err(section.range("embed_dim", expected));
    }
    let out_hidden_size = section.size_or("hidden_size", 3584)?;
    if out_hidden_size != text.hidden_size {
        let expected = format!("the `hidden_size` of the decoder, {}", text.hidden_size);
        return Err(section.range("hidden_size", expected));
    }
    let mlp = VisionMlp::Gelu { act: gelu(section, Gelu::Quick)?, layers: ["fc1", "fc2"] };
    let parts = VisionParts { mlp, ..VisionParts::QWEN };
    Ok(VisionConfig {
        depth: section.size_or("depth", 32)?,
        hidden_size,
        intermediate_size: section.size_or("mlp_ratio", 4)? * hidden_size,
        num_heads,
        in_channels: section.size_or("in_channels", 3)?,
        patch_size: section.size_or("patch_size", PatchSizes::QWEN2.patch as usize)?,
        temporal_patch_size: section
            .size_or("temporal_patch_size", PatchSizes::QWEN2.temporal as usize)?,
        spatial_merge_size: section
            .size_or("spatial_merge_size", PatchSizes::QWEN2.merge as usize)?,
        out_hidden_size,
        image_token_id: top.size("image_token_id")? as u32,
        parts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::config::assert_refused;
    use serde_json::json;

    /// The published file of the 2B model.
    fn published() -> Value {
        json!({
            "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0,
            "bos_token_id": 151_643, "eos_token_id": 151_645, "vision_start_token_id": 151_652,
            "vision_end_token_id": 151_653, "vision_token_id": 151_654, "image_token_id": 151_655,
            "video_token_id": 151_656, "hidden_act": "silu", "hidden_size": 1536,
            "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 32768,
            "max_window_layers": 28, "model_type": "qwen2_vl", "num_attention_heads": 12,
            "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0, "sliding_window": 32768, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
            "vision_config": {
                "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2,
                "spatial_patch_size": 14, "temporal_patch_size": 2,
            },
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151_936,
        })
    }

    #[test]
    fn the_width_of_the_vision_encoder_is_embed_dim() {
        let config = read(&published()).unwrap();
        let vision = config.vision.as_ref().unwrap();
        assert_eq!((vision.hidden_size, vision.out_hidden_size), (1280, 1536));
        assert_eq!(vision.intermediate_size, 5120);
        assert!(config.text.tie_word_embeddings && vision.parts.windows.is_none());
        let mlp = VisionMlp::Gelu { act: Gelu::Quick, layers: ["fc1", "fc2"] };
        assert_eq!(vision.parts.mlp, mlp);
        // as transformers 4.46 writes them, for this model and for the 7B model
        let mut json = published();
        json["vision_config"] = json!({"hidden_size": 1536, "in_chans": 3});
        assert_eq!(read(&json).unwrap(), config);
        json["vision_config"] = json!({"in_chans": 3});
        for (key, value) in [
            ("hidden_size", 3584),
            ("intermediate_size", 18944),
            ("num_attention_heads", 28),
            ("num_key_value_heads", 4),
        ] {
            json[key] = value.into();
        }
        assert_eq!(read(&json).unwrap().vision.unwrap().out_hidden_size, 3584);
    }

    #[test]
    fn values_that_are_not_supported_are_refused_by_name() {
        let changes = [
            ("", "hidden_act", json!("gelu"), "hidden_act"),
            ("", "tie_word_embeddings", json!("false"), "`tie_word_embeddings` is \"false\""),
            ("vision_config", "hidden_act", json!("relu"), "vision_config.hidden_act"),
            ("vision_config", "embed_dim", json!(1281), "`vision_config.embed_dim` is 1281"),
            ("vision_config", "embed_dim", json!("1280"), "vision_config.embed_dim"),
            ("vision_config", "hidden_size", json!(1280), "`vision_config.hidden_size` is 1280"),
            ("vision_config", "hidden_size", Value::Null, "`hidden_size` of the decoder, 1536"),
            ("vision_config", "rope_parameters", json!({"rope_theta": 500.0}), "rope_theta"),
        ];
        assert_refused(read, &published(), changes);
    }
}
