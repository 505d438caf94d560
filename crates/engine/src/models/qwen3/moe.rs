use crate::models::config::{ModelConfigError, Section};
use crate::models::model_config::ModelConfig;
use crate::models::qwen3_decoder::decoder_with_experts;
use serde_json::Value;

pub(in crate::models) fn read_moe(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    Ok(ModelConfig::text_only(decoder_with_experts(&Section { value: json, name: "" })?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn published() -> Value {
        json!({
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "head_dim": 128,
            "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
            "rope_scaling": null, "attention_bias": false, "hidden_act": "silu",
            "use_sliding_window": false, "max_window_layers": 48, "tie_word_embeddings": false,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8,
            "output_router_logits": false, "router_aux_loss_coef": 0.001,
        })
    }

    fn experts(json: &Value) -> crate::nn::MoeConfig {
        *read_moe(json).unwrap().text.moe().unwrap()
    }

    #[test]
    fn both_names_of_the_number_of_experts_are_read() {
        let json = published();
        assert_eq!(experts(&json).num_experts, 128);
        let mut other = published();
        let object = other.as_object_mut().unwrap();
        let number = object.remove("num_experts").unwrap();
        object.insert("num_local_experts".to_owned(), number);
        assert_eq!(experts(&other), experts(&json));
        other["num_experts"] = json!(64);
        let error = read_moe(&other).unwrap_err().to_string();
        assert_eq!(error, "config.json: `num_experts` is 64, but `num_local_experts` is 128");
    }

    #[test]
    fn layers_without_experts_are_listed_or_follow_from_the_step() {
        let mut json = published();
        json["num_hidden_layers"] = json!(6);
        json["decoder_sparse_step"] = json!(2);
        json["mlp_only_layers"] = json!([3]);
        let layers = read_moe(&json).unwrap().text.layers;
        let sparse: Vec<bool> = layers.iter().map(|layer| layer.experts().is_some()).collect();
        assert_eq!(sparse, [false, true, false, false, false, true]);
        json["mlp_only_layers"] = json!(null);
        json["decoder_sparse_step"] = json!(7);
        let error = read_moe(&json).unwrap_err().to_string();
        assert!(error.contains("leave none of the 6 layers with experts"), "{error}");
    }

    #[test]
    fn values_that_are_not_supported_are_refused_by_name() {
        for (key, value) in [
            ("norm_topk_prob", json!(false)),
            ("norm_topk_prob", json!(null)),
            ("norm_topk_prob", json!("yes")),
            ("norm_topk_prob", json!(1)),
            ("output_router_logits", json!(true)),
            ("num_experts", json!(0)),
            ("num_experts_per_tok", json!(129)),
            ("moe_intermediate_size", json!(null)),
            ("mlp_only_layers", json!("none")),
            ("decoder_sparse_step", json!(0)),
        ] {
            let mut json = published();
            json[key] = value;
            let error = read_moe(&json).unwrap_err().to_string();
            assert!(error.contains(&format!("`{key}`")), "{error}");
        }
    }
}
