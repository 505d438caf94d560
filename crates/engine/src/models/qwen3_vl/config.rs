use crate::models::config::{ModelConfigError, QK_NORM, Section};
use crate::models::experts::Family;
use crate::models::model_config::ModelConfig;
use crate::models::vision::{VisionConfig, VisionParts};
use crate::nn::{DecoderConfig, ExpertFiles, Mrope, MropeLayout, TensorNames};
use serde_json::Value;

/// Numbers of rotary frequencies of time, height and width if the file does not have them.
const MROPE_SECTION: [usize; 3] = [24, 20, 20];

const EXPERTS: Family =
    Family { published: ExpertFiles::InOut, must_have_norm: false, has_shared: false };

pub(in crate::models) fn read(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    let dense = |text: &Section<'_>| text.decoder(QK_NORM);
    read_with(json, dense)
}

pub(in crate::models) fn read_moe(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    read_with(json, |text| text.with_experts(text.decoder(QK_NORM)?, EXPERTS))
}

fn read_with(
    json: &Value,
    decoder: impl Fn(&Section<'_>) -> Result<DecoderConfig, ModelConfigError>,
) -> Result<ModelConfig, ModelConfigError> {
    let top = Section { value: json, name: "" };
    let text = Section::of(json, "text_config")?;
    let vision = Section::of(json, "vision_config")?;
    let rope = text.rope()?;
    rope.expect("mrope_interleaved", &Value::Bool(true), "`true` (Qwen3-VL)")?;
    // Published files have the key in both places; transformers 5 writes it to the whole file only.
    let tied = [top.flag("tie_word_embeddings")?, text.flag("tie_word_embeddings")?];
    let section = rope.mrope_section(MROPE_SECTION)?;
    let deepstack = vision.sizes("deepstack_visual_indexes")?;
    let parts = VisionParts::with_table(&vision, deepstack)?;
    let config = ModelConfig {
        text: DecoderConfig {
            tie_word_embeddings: tied[0].or(tied[1]).unwrap_or(false),
            mrope: Some(Mrope { section, layout: MropeLayout::Interleaved }),
            ..decoder(&text)?
        },
        vision: Some(VisionConfig::read(&top, &vision, parts)?),
        tensor_names: TensorNames::Modules,
    };
    config.check()?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn published() -> Value {
        json!({
            "model_type": "qwen3_vl", "tie_word_embeddings": true, "image_token_id": 151655,
            "text_config": {
                "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
                "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20],
                                 "rope_type": "default"},
            },
            "vision_config": {
                "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
                "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2,
                "spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 2048,
                "deepstack_visual_indexes": [5, 11, 17], "hidden_act": "gelu_pytorch_tanh",
            },
        })
    }

    #[test]
    fn both_spellings_of_rope_settings_are_read() {
        let old = published();
        let mut new = published();
        let text = new["text_config"].as_object_mut().unwrap();
        let mut rope = text.remove("rope_scaling").unwrap();
        rope["rope_theta"] = text.remove("rope_theta").unwrap();
        text.insert("rope_parameters".to_owned(), rope);
        assert_eq!(read(&old).unwrap(), read(&new).unwrap());
    }

    #[test]
    fn head_dim_comes_from_the_config_and_not_from_the_hidden_size() {
        let mut json = published();
        json["text_config"]["num_attention_heads"] = json!(32);
        let config = read(&json).unwrap();
        assert_eq!(config.text.head_dim * config.text.num_attention_heads, 4096);
    }

    #[test]
    fn weights_of_experts_always_sum_to_one_and_transformers_does_not_read_the_key() {
        let mut json = published();
        for (key, value) in [
            ("num_experts", 128),
            ("num_experts_per_tok", 8),
            ("moe_intermediate_size", 768),
            ("decoder_sparse_step", 1),
        ] {
            json["text_config"][key] = json!(value);
        }
        let text = read_moe(&json).unwrap().text;
        let moe = text.moe().unwrap();
        assert_eq!(
            (text.layers.iter().filter(|layer| layer.experts().is_some()).count(), moe.files),
            (28, ExpertFiles::InOut)
        );
        assert!(read(&json).unwrap().text.moe().is_none());
        json["text_config"]["norm_topk_prob"] = json!(true);
        read_moe(&json).unwrap();
        json["text_config"]["norm_topk_prob"] = json!(false);
        let error = read_moe(&json).unwrap_err().to_string();
        assert!(error.contains("`norm_topk_prob` is `false`"), "{error}");
    }

    #[test]
    fn unsupported_values_are_refused_by_name() {
        let cases: [(&str, &str, Value, &str); 10] = [
            ("text_config", "attention_dropout", json!(0.5), "attention_dropout"),
            ("vision_config", "attention_dropout", json!(0.5), "attention_dropout"),
            ("text_config", "use_sliding_window", json!(true), "use_sliding_window"),
            ("vision_config", "depth", json!(1_u64 << 32), "vision_config.depth"),
            ("vision_config", "num_position_embeddings", json!(1_u64 << 60), "at most 1048576"),
            ("text_config", "attention_bias", json!(true), "attention_bias"),
            ("text_config", "hidden_size", json!("big"), "text_config.hidden_size"),
            ("text_config", "num_key_value_heads", json!(3), "num_key_value_heads"),
            ("vision_config", "deepstack_visual_indexes", json!([5, 99]), "deepstack"),
            ("vision_config", "out_hidden_size", json!(1024), "out_hidden_size"),
        ];
        for (section, key, value, named) in cases {
            let mut json = published();
            json[section][key] = value;
            let error = read(&json).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
        let mut json = published();
        json["text_config"]["rope_scaling"]["type"] = json!("yarn");
        let error = read(&json).unwrap_err().to_string();
        assert!(error.contains("`type` is `yarn`"), "{error}");
    }
}
