//! The model shapes that `trainer init` writes.

use super::windowed::{WINDOWED_3B, WINDOWED_7B, WINDOWED_32B, WINDOWED_72B};
use clap::ValueEnum;
use serde_json::{Value, json};

/// Model shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Preset {
    /// 0.7 M parameters, for tests
    Debug,
    /// 1.6 M parameters, for the CPU
    Tiny,
    /// 0.9 M parameters, a mixture of experts for tests
    TinyMoe,
    /// Qwen3-VL 2B
    #[value(name = "2b")]
    B2,
    /// Qwen3-VL 4B
    #[value(name = "4b")]
    B4,
    /// Qwen3-VL 8B
    #[value(name = "8b")]
    B8,
    /// Qwen3-VL 32B
    #[value(name = "32b")]
    B32,
    /// Qwen3-VL 30B-A3B, a mixture of experts
    #[value(name = "30b-a3b")]
    B30A3,
    /// Qwen3-VL 235B-A22B, a mixture of experts
    #[value(name = "235b-a22b")]
    B235A22,
    /// Qwen3.5 0.8B
    #[value(name = "qwen3.5-0.8b")]
    Hybrid0B8,
    /// Qwen3.5 4B
    #[value(name = "qwen3.5-4b")]
    Hybrid4B,
    /// Qwen3.5 9B
    #[value(name = "qwen3.5-9b")]
    Hybrid9B,
    /// Qwen3.5 27B
    #[value(name = "qwen3.5-27b")]
    Hybrid27B,
    /// Qwen2.5-VL 3B
    #[value(name = "qwen2.5-vl-3b")]
    Windowed3B,
    /// Qwen2.5-VL 7B
    #[value(name = "qwen2.5-vl-7b")]
    Windowed7B,
    /// Qwen2.5-VL 32B
    #[value(name = "qwen2.5-vl-32b")]
    Windowed32B,
    /// Qwen2.5-VL 72B
    #[value(name = "qwen2.5-vl-72b")]
    Windowed72B,
}

const SMALL_CONFIG: &str = include_str!("../../../data/quickstart/model/config.json");

/// Widths and depths of a published shape.
struct Published {
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    intermediate: u64,
    tied: bool,
    vision: [u64; 3], // depth, hidden, intermediate
    deepstack: [u64; 3],
}

impl Preset {
    /// The content of `config.json`.
    pub(super) fn config(self) -> Value {
        let small = || serde_json::from_str::<Value>(SMALL_CONFIG).expect("a file of ours");
        let vit_l = ([24, 1024, 4096], [5, 11, 17]);
        let vit_so = ([27, 1152, 4304], [8, 16, 24]);
        let (layers, hidden, heads, kv_heads, intermediate, tied, (vision, deepstack)) = match self
        {
            Self::Tiny => return small(),
            Self::Debug => return debug(small()),
            Self::TinyMoe => return with_experts(debug(small()), [32, 16, 2]),
            Self::Hybrid0B8 => return HYBRID_0B8.config(),
            Self::Hybrid4B => return HYBRID_4B.config(),
            Self::Hybrid9B => return HYBRID_9B.config(),
            Self::Hybrid27B => return HYBRID_27B.config(),
            Self::Windowed3B => return WINDOWED_3B.config(),
            Self::Windowed7B => return WINDOWED_7B.config(),
            Self::Windowed32B => return WINDOWED_32B.config(),
            Self::Windowed72B => return WINDOWED_72B.config(),
            Self::B2 => (28, 2048, 16, 8, 6144, true, vit_l),
            Self::B4 => (36, 2560, 32, 8, 9728, true, vit_l),
            Self::B8 => (36, 4096, 32, 8, 12288, false, vit_so),
            Self::B32 => (64, 5120, 64, 8, 25600, false, vit_so),
            Self::B30A3 => (48, 2048, 32, 4, 6144, false, vit_so),
            Self::B235A22 => (94, 4096, 64, 4, 12288, false, vit_so),
        };
        let config =
            Published { layers, hidden, heads, kv_heads, intermediate, tied, vision, deepstack }
                .config();
        match self {
            Self::B30A3 => with_experts(config, [768, 128, 8]),
            Self::B235A22 => with_experts(config, [1536, 128, 8]),
            _ => config,
        }
    }

    /// Whether the preset has its own tokenizer and always gets weights.
    pub(super) fn is_small(self) -> bool {
        matches!(self, Self::Debug | Self::Tiny | Self::TinyMoe)
    }
}

/// The small config with fewer and narrower layers.
fn debug(mut config: Value) -> Value {
    config["text_config"]["num_hidden_layers"] = json!(2);
    config["text_config"]["hidden_size"] = json!(64);
    config["text_config"]["intermediate_size"] = json!(128);
    config["vision_config"]["out_hidden_size"] = json!(64);
    config["vision_config"]["depth"] = json!(2);
    config["vision_config"]["deepstack_visual_indexes"] = json!([0]);
    config
}

/// A Qwen3-VL config with experts; `sizes` are their width, their number, and the number that
/// computes a token.
fn with_experts(mut config: Value, sizes: [u64; 3]) -> Value {
    config["architectures"] = json!(["Qwen3VLMoeForConditionalGeneration"]);
    config["model_type"] = json!("qwen3_vl_moe");
    config["vision_config"]["model_type"] = json!("qwen3_vl_moe");
    let [width, experts, of_token] = sizes;
    let text = &mut config["text_config"];
    text["model_type"] = json!("qwen3_vl_moe_text");
    for (key, value) in [
        ("decoder_sparse_step", json!(1)),
        ("mlp_only_layers", json!([])),
        ("moe_intermediate_size", json!(width)),
        ("norm_topk_prob", json!(true)),
        ("num_experts", json!(experts)),
        ("num_experts_per_tok", json!(of_token)),
    ] {
        text[key] = value;
    }
    config
}

impl Published {
    fn config(&self) -> Value {
        json!({
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "image_token_id": 151655,
            "model_type": "qwen3_vl",
            "text_config": {
                "attention_bias": false,
                "attention_dropout": 0.0,
                "bos_token_id": 151643,
                "dtype": "bfloat16",
                "eos_token_id": 151645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": self.hidden,
                "initializer_range": 0.02,
                "intermediate_size": self.intermediate,
                "max_position_embeddings": 262144,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": self.heads,
                "num_hidden_layers": self.layers,
                "num_key_value_heads": self.kv_heads,
                "rms_norm_eps": 1e-6,
                "rope_scaling": {
                    "mrope_interleaved": true,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default"
                },
                "rope_theta": 5000000,
                "tie_word_embeddings": self.tied,
                "use_cache": true,
                "vocab_size": 151936
            },
            "tie_word_embeddings": self.tied,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": 151656,
            "vision_config": vision_config("qwen3_vl", self.vision, &self.deepstack, self.hidden),
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652
        })
    }
}

/// A published shape of Qwen3.5. The vision encoders of 0.8B and 4B were not confirmed with their
/// files.
struct Hybrid {
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    value_heads: u64,
    intermediate: u64,
    tied: bool,
    vision: [u64; 3], // depth, hidden, intermediate
}

const HYBRID_0B8: Hybrid = Hybrid {
    layers: 24,
    hidden: 1024,
    heads: 8,
    kv_heads: 2,
    value_heads: 16,
    intermediate: 3584,
    tied: true,
    vision: [12, 768, 3072],
};
const HYBRID_4B: Hybrid = Hybrid {
    layers: 32,
    hidden: 2560,
    heads: 16,
    kv_heads: 4,
    value_heads: 32,
    intermediate: 9216,
    tied: true,
    vision: [24, 1024, 4096],
};
const HYBRID_9B: Hybrid = Hybrid {
    layers: 32,
    hidden: 4096,
    heads: 16,
    kv_heads: 4,
    value_heads: 32,
    intermediate: 12288,
    tied: false,
    vision: [27, 1152, 4304],
};
const HYBRID_27B: Hybrid = Hybrid {
    layers: 64,
    hidden: 5120,
    heads: 24,
    kv_heads: 4,
    value_heads: 48,
    intermediate: 17408,
    tied: false,
    vision: [27, 1152, 4304],
};

impl Hybrid {
    fn config(&self) -> Value {
        let kind = |layer: u64| {
            if (layer + 1).is_multiple_of(4) { "full_attention" } else { "linear_attention" }
        };
        let layer_types: Vec<&str> = (0..self.layers).map(kind).collect();
        json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 248_056,
            "model_type": "qwen3_5",
            "text_config": {
                "attention_bias": false,
                "attention_dropout": 0.0,
                "attn_output_gate": true,
                "dtype": "bfloat16",
                "eos_token_id": 248_046,
                "full_attention_interval": 4,
                "head_dim": 256,
                "hidden_act": "silu",
                "hidden_size": self.hidden,
                "initializer_range": 0.02,
                "intermediate_size": self.intermediate,
                "layer_types": layer_types,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": self.value_heads,
                "linear_value_head_dim": 128,
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": 262_144,
                "mlp_only_layers": [],
                "model_type": "qwen3_5_text",
                "num_attention_heads": self.heads,
                "num_hidden_layers": self.layers,
                "num_key_value_heads": self.kv_heads,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "mrope_interleaved": true,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10_000_000,
                    "rope_type": "default"
                },
                "tie_word_embeddings": self.tied,
                "use_cache": true,
                "vocab_size": 248_320
            },
            "tie_word_embeddings": self.tied,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": 248_057,
            "vision_config": vision_config("qwen3_5", self.vision, &[], self.hidden),
            "vision_end_token_id": 248_054,
            "vision_start_token_id": 248_053
        })
    }
}

/// `size` has depth, hidden size and width of the MLP; `out` is the hidden size of the decoder.
fn vision_config(model_type: &str, size: [u64; 3], deepstack: &[u64], out: u64) -> Value {
    let [depth, hidden, intermediate] = size;
    json!({
        "deepstack_visual_indexes": deepstack,
        "depth": depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "model_type": model_type,
        "num_heads": if hidden == 768 { 12 } else { 16 },
        "num_position_embeddings": 2304,
        "out_hidden_size": out,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::config_from_json;
    use candle_core::{DType, Device, Tensor};

    #[test]
    fn the_decoders_of_qwen35_have_as_many_parameters_as_their_names_say() {
        for (preset, expected) in [
            (Preset::Hybrid0B8, 0.75e9),
            (Preset::Hybrid4B, 4.2e9),
            (Preset::Hybrid9B, 8.95e9),
            (Preset::Hybrid27B, 26.9e9),
        ] {
            let config = config_from_json(&preset.config()).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / expected - 1.0).abs() < 0.02, "{preset:?}: {count}");
        }
    }

    #[test]
    fn models_with_experts_have_as_many_parameters_and_active_ones_as_their_names_say() {
        for (preset, all, active) in
            [(Preset::B30A3, 30.53e9, 3.35e9), (Preset::B235A22, 235.09e9, 22.19e9)]
        {
            let config = config_from_json(&preset.config()).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / all - 1.0).abs() < 1e-3, "{preset:?}: {count}");
            let count = count - config.text().idle_weights();
            assert!((count as f64 / active - 1.0).abs() < 1e-2, "{preset:?}: {count} active");
        }
    }

    #[test]
    fn the_shapes_of_qwen25_vl_have_as_many_parameters_as_the_published_models() {
        for (preset, expected) in [
            (Preset::Windowed3B, 3_754_622_976),
            (Preset::Windowed7B, 8_292_166_656),
            (Preset::Windowed32B, 33_452_718_336),
            (Preset::Windowed72B, 73_410_777_344),
        ] {
            let specs = config_from_json(&preset.config()).unwrap().param_specs();
            let count: usize = specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert_eq!(count, expected, "{preset:?}");
        }
    }

    /// With `TRAINER_EMULATE_CUDA`, the ops run the CUDA kernels.
    #[test]
    fn the_norms_of_the_presets_have_a_width_that_their_ops_support() -> candle_core::Result<()> {
        let mut widths = std::collections::BTreeSet::new();
        for preset in Preset::value_variants() {
            let specs = config_from_json(&preset.config()).unwrap().param_specs();
            let has = |name: &str| specs.iter().any(|spec| spec.name == name);
            for spec in specs.iter().filter(|spec| spec.name.ends_with("weight")) {
                let [width] = spec.shape[..] else { continue };
                widths.insert((width, has(&spec.name.replace("weight", "bias"))));
            }
        }
        assert!(widths.contains(&(8192, false)) && widths.contains(&(4608, true)), "{widths:?}");
        for (width, bias) in widths {
            let x = Tensor::ones((2, width), DType::F32, &Device::Cpu)?;
            let w = Tensor::ones(width, DType::F32, &Device::Cpu)?;
            if bias {
                let (y, stats) = crate::ops::layer_norm(&x, &w, &w, 1e-6)?;
                crate::ops::layer_norm_backward(&x, &stats, &w, &y, None, None, None)?;
                continue;
            }
            let scale = crate::ops::NormScale::Weight;
            let (y, rstd) = crate::ops::rms_norm(&x, &w, scale, 1e-6)?;
            crate::ops::rms_norm_backward(&x, &rstd, &w, scale, &y, None, None)?;
        }
        Ok(())
    }
}
