//! The published shapes of Qwen2.5-VL.

use serde_json::{Value, json};

/// A published shape of Qwen2.5-VL.
pub(super) struct Windowed {
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    intermediate: u64,
    vocabulary: u64,
    tied: bool,
    vision_intermediate: u64,
}

pub(super) const WINDOWED_3B: Windowed = Windowed {
    layers: 36,
    hidden: 2048,
    heads: 16,
    kv_heads: 2,
    intermediate: 11008,
    vocabulary: 151_936,
    tied: true,
    vision_intermediate: 3420,
};
pub(super) const WINDOWED_7B: Windowed = Windowed {
    layers: 28,
    hidden: 3584,
    heads: 28,
    kv_heads: 4,
    intermediate: 18944,
    vocabulary: 152_064,
    tied: false,
    vision_intermediate: 3420,
};
pub(super) const WINDOWED_32B: Windowed = Windowed {
    layers: 64,
    hidden: 5120,
    heads: 40,
    kv_heads: 8,
    intermediate: 27648,
    vocabulary: 152_064,
    tied: false,
    vision_intermediate: 3456,
};
pub(super) const WINDOWED_72B: Windowed = Windowed {
    layers: 80,
    hidden: 8192,
    heads: 64,
    kv_heads: 8,
    intermediate: 29568,
    vocabulary: 152_064,
    tied: false,
    vision_intermediate: 3456,
};

impl Windowed {
    /// The flat layout of the published files.
    pub(super) fn config(&self) -> Value {
        json!({
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "attention_dropout": 0.0,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "image_token_id": 151_655,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 128_000,
            "max_window_layers": self.layers,
            "model_type": "qwen2_5_vl",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
            "rope_theta": 1_000_000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.49.0",
            "use_cache": true,
            "use_sliding_window": false,
            "video_token_id": 151_656,
            "vision_config": {
                "depth": 32,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "hidden_act": "silu",
                "hidden_size": 1280,
                "in_chans": 3,
                "intermediate_size": self.vision_intermediate,
                "model_type": "qwen2_5_vl",
                "num_heads": 16,
                "out_hidden_size": self.hidden,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
                "tokens_per_second": 2,
                "window_size": 112
            },
            "vision_end_token_id": 151_653,
            "vision_start_token_id": 151_652,
            "vision_token_id": 151_654,
            "vocab_size": self.vocabulary
        })
    }
}
