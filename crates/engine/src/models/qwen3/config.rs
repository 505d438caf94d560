use crate::models::config::{ModelConfigError, Section};
use crate::models::model_config::ModelConfig;
use crate::models::qwen3_decoder::decoder;
use serde_json::Value;

pub(in crate::models) fn read(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    Ok(ModelConfig::text_only(decoder(&Section { value: json, name: "" })?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn published() -> Value {
        json!({
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "head_dim": 128,
            "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
            "rope_scaling": null, "attention_bias": false, "hidden_act": "silu",
            "use_sliding_window": false, "tie_word_embeddings": true,
        })
    }

    #[test]
    fn unsupported_values_are_refused_by_name() {
        let published = published();
        assert_eq!(read(&published).unwrap().text.rope_theta, 1e6);
        for (key, value) in [
            ("use_sliding_window", json!(true)),
            ("attention_bias", json!(true)),
            ("rope_scaling", json!({"rope_type": "yarn"})),
            ("rope_scaling", json!({"type": "yarn"})),
            ("rope_scaling", json!({"rope_type": "mrope", "mrope_section": [24, 20, 20]})),
            ("rope_scaling", json!({"type": "mrope"})),
            ("num_key_value_heads", json!(3)),
            ("layer_types", json!(["full_attention", "sliding_attention"])),
            ("attention_dropout", json!(0.5)),
            ("hidden_size", json!("big")),
        ] {
            let mut json = published.clone();
            json[key] = value;
            let error = read(&json).unwrap_err().to_string();
            let named = if key == "rope_scaling" { "type`" } else { key };
            assert!(error.contains(named), "{error}");
        }
        // no layer comes after the first 28, so none has a window
        let mut json = published.clone();
        json["use_sliding_window"] = json!(true);
        json["max_window_layers"] = json!(28);
        json["attention_dropout"] = json!(0);
        read(&json).unwrap();
    }

    #[test]
    fn a_number_that_no_model_has_is_refused_with_its_range() {
        for (key, value, expected) in [
            ("num_hidden_layers", json!(1_u64 << 32), "at most 1024"),
            ("vocab_size", json!(1_u64 << 32), "at most 16777216"),
            ("intermediate_size", json!(1_u64 << 40), "at most 1048576"),
            ("rms_norm_eps", json!(0.0), "above 0 and below 1"),
            ("rms_norm_eps", json!(-1e-6), "above 0 and below 1"),
            ("rms_norm_eps", json!(1.8e19), "above 0 and below 1"),
            ("rope_theta", json!(0), "above 0"),
            ("rope_theta", json!(-1e6), "above 0"),
        ] {
            let mut json = published();
            json[key] = value;
            let error = read(&json).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(expected), "{error}");
        }
    }
}
