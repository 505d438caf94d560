//! Sizes of a Qwen3-VL model, read from `config.json`.

use crate::models::config::{ModelConfigError, Section};
use crate::nn::DecoderConfig;
use crate::ops::Gelu;
use serde_json::Value;
use std::num::NonZeroU32;

/// Sizes of the vision encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    /// Number of blocks.
    pub depth: usize,
    /// Hidden size of the blocks, `Dv`.
    pub hidden_size: usize,
    /// Width of a block's MLP.
    pub intermediate_size: usize,
    /// Number of attention heads.
    pub num_heads: usize,
    /// Number of colour channels.
    pub in_channels: usize,
    /// Pixels on a side of a patch.
    pub patch_size: usize,
    /// Frames in a patch.
    pub temporal_patch_size: usize,
    /// Patches on a side of the square that becomes one token.
    pub spatial_merge_size: usize,
    /// Rows of the learned position table; a square number.
    pub num_position_embeddings: usize,
    /// Width of the mergers' output: the language model's hidden size.
    pub out_hidden_size: usize,
    /// Blocks after which a deepstack merger reads the features.
    pub deepstack_visual_indexes: Vec<usize>,
    /// Activation of the blocks' MLP.
    pub hidden_act: Gelu,
}

/// Sizes of the whole model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The decoder.
    pub text: DecoderConfig,
    /// Numbers of rotary frequencies of time, height and width; they sum to `Dh / 2`.
    pub mrope_section: [usize; 3],
    /// The vision encoder.
    pub vision: VisionConfig,
    /// Whether head and embedding are one tensor.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
    /// Id of the token whose embedding the features of an image replace.
    pub image_token_id: u32,
}

impl Config {
    /// Reads the sizes from the parsed `config.json`.
    pub fn from_json(json: &Value) -> Result<Self, ModelConfigError> {
        let top = Section { value: json, name: "" };
        let text = Section::of(json, "text_config")?;
        let vision = Section::of(json, "vision_config")?;
        let rope = text.rope();
        rope.expect("mrope_interleaved", &Value::Bool(true), "`true` (Qwen3-VL)")?;
        let mrope_section = rope.sizes("mrope_section")?;
        let config = Self {
            text: text.decoder()?,
            mrope_section: mrope_section.try_into().map_err(|_| ModelConfigError::Key {
                key: rope.key("mrope_section"),
                expected: "a list of 3 integers",
            })?,
            vision: VisionConfig::read(&vision)?,
            // Published files have the key in both places; transformers 5 writes the first only.
            tie_word_embeddings: json["tie_word_embeddings"]
                .as_bool()
                .or_else(|| text.value["tie_word_embeddings"].as_bool())
                .unwrap_or(false),
            initializer_range: text.value["initializer_range"].as_f64().unwrap_or(0.02),
            image_token_id: top.size("image_token_id")? as u32,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ModelConfigError> {
        let (text, vision) = (&self.text, &self.vision);
        let fail = |what: String| Err(ModelConfigError::Shape { what });
        if self.mrope_section.iter().sum::<usize>() != text.head_dim / 2 {
            return fail(format!(
                "`mrope_section` {:?} does not sum to half of `head_dim` {}",
                self.mrope_section, text.head_dim
            ));
        }
        if vision.hidden_size % (4 * vision.num_heads) != 0 {
            return fail(format!(
                "vision `hidden_size` is {}, expected a multiple of 4 * `num_heads` {}",
                vision.hidden_size, vision.num_heads
            ));
        }
        if vision.out_hidden_size != text.hidden_size {
            return fail(format!(
                "vision `out_hidden_size` is {}, expected the text `hidden_size` {}",
                vision.out_hidden_size, text.hidden_size
            ));
        }
        let side = vision.num_position_embeddings.isqrt();
        if side * side != vision.num_position_embeddings {
            return fail(format!(
                "`num_position_embeddings` {} is not a square",
                vision.num_position_embeddings
            ));
        }
        let taps = &vision.deepstack_visual_indexes;
        if taps.windows(2).any(|pair| pair[0] >= pair[1])
            || taps.iter().any(|block| *block >= vision.depth)
            || taps.len() > text.num_hidden_layers
        {
            return fail(format!(
                "`deepstack_visual_indexes` {taps:?}: expected ascending numbers below `depth` {}, at \
                 most `num_hidden_layers` {} of them",
                vision.depth, text.num_hidden_layers
            ));
        }
        if self.image_token_id as usize >= text.vocab_size {
            return fail(format!(
                "`image_token_id` {} is not below `vocab_size` {}",
                self.image_token_id, text.vocab_size
            ));
        }
        Ok(())
    }

    /// Patches on a side of the square that becomes one token.
    pub fn merge_size(&self) -> NonZeroU32 {
        NonZeroU32::new(self.vision.spatial_merge_size as u32).unwrap_or(NonZeroU32::MIN)
    }

    /// Number of patches that become one token.
    pub(super) fn patches_per_token(&self) -> usize {
        self.vision.spatial_merge_size.pow(2)
    }
}

impl VisionConfig {
    fn read(section: &Section<'_>) -> Result<Self, ModelConfigError> {
        section.expect_no_dropout("attention_dropout")?;
        let act = section.value["hidden_act"].as_str().unwrap_or("gelu_pytorch_tanh");
        Ok(Self {
            depth: section.size("depth")?,
            hidden_size: section.size("hidden_size")?,
            intermediate_size: section.size("intermediate_size")?,
            num_heads: section.size("num_heads")?,
            in_channels: section.size("in_channels")?,
            patch_size: section.size("patch_size")?,
            temporal_patch_size: section.size("temporal_patch_size")?,
            spatial_merge_size: section.size("spatial_merge_size")?,
            num_position_embeddings: section.size("num_position_embeddings")?,
            out_hidden_size: section.size("out_hidden_size")?,
            deepstack_visual_indexes: section.sizes("deepstack_visual_indexes")?,
            hidden_act: match act {
                "gelu_pytorch_tanh" | "gelu_new" => Gelu::Tanh,
                "gelu" => Gelu::Erf,
                found => {
                    return Err(ModelConfigError::Unsupported {
                        key: "vision_config.hidden_act",
                        found: found.to_owned(),
                        known: "`gelu_pytorch_tanh` and `gelu`",
                    });
                }
            },
        })
    }

    /// Values in one flattened patch: `channels * temporal_patch_size * patch_size^2`.
    pub fn patch_values(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }
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
        assert_eq!(Config::from_json(&old).unwrap(), Config::from_json(&new).unwrap());
    }

    #[test]
    fn head_dim_comes_from_the_config_and_not_from_the_hidden_size() {
        let mut json = published();
        json["text_config"]["num_attention_heads"] = json!(32);
        let config = Config::from_json(&json).unwrap();
        assert_eq!(config.text.head_dim * config.text.num_attention_heads, 4096);
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
            let error = Config::from_json(&json).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
        let mut json = published();
        json["text_config"]["rope_scaling"]["type"] = json!("yarn");
        let error = Config::from_json(&json).unwrap_err().to_string();
        assert!(error.contains("`type` is `yarn`"), "{error}");
    }
}
