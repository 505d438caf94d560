//! The model's shape, read from a folder's `config.json` in either spelling of transformers.

use crate::ops::Gelu;
use serde_json::Value;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

/// Sizes of the language model.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// `V`.
    pub vocab_size: usize,
    /// `D`.
    pub hidden_size: usize,
    /// `F`.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// `H`.
    pub num_attention_heads: usize,
    /// `Hkv`; divides `H`.
    pub num_key_value_heads: usize,
    /// `Dh`; `H * Dh` need not be `D`.
    pub head_dim: usize,
    /// Added to the mean square of every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How many frequencies belong to time, height and width; they sum to `Dh / 2`.
    pub mrope_section: [usize; 3],
}

/// Sizes of the vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// Width of the tower.
    pub hidden_size: usize,
    /// Width of a block's MLP.
    pub intermediate_size: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Colour channels.
    pub in_channels: usize,
    /// Pixels a patch side.
    pub patch_size: usize,
    /// Frames a patch.
    pub temporal_patch_size: usize,
    /// Patches a side that merge into one token.
    pub spatial_merge_size: usize,
    /// Rows of the learned position table; a square.
    pub num_position_embeddings: usize,
    /// Width of the mergers' output: the language model's hidden size.
    pub out_hidden_size: usize,
    /// Blocks after which a deepstack merger reads the features.
    pub deepstack_visual_indexes: Vec<usize>,
    /// Activation of the blocks' MLP.
    pub hidden_act: Gelu,
}

/// The whole model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Language model.
    pub text: TextConfig,
    /// Vision tower.
    pub vision: VisionConfig,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
    /// Token that an image's features replace.
    pub image_token_id: u32,
}

/// Why a `config.json` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelConfigError {
    /// The file cannot be read.
    #[error("cannot read `{}`", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("`{}` is not JSON", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Position and reason.
        source: serde_json::Error,
    },
    /// A key that the model needs.
    #[error("config.json: `{key}` is missing or is not {expected}")]
    Key {
        /// Dotted key.
        key: String,
        /// What should stand there.
        expected: &'static str,
    },
    /// An architecture that this trainer does not have.
    #[error("config.json: `{key}` is `{found}`: this trainer knows {known}")]
    Unsupported {
        /// Dotted key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What would work.
        known: &'static str,
    },
    /// Sizes that contradict each other.
    #[error("config.json: {what}")]
    Shape {
        /// The contradiction.
        what: String,
    },
}

impl ModelConfigError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Read { .. } => "`model.path` must be a model folder with a config.json",
            Self::Json { .. } => "the file is damaged: copy it from the published model again",
            Self::Key { .. } | Self::Shape { .. } => {
                "copy config.json from the published model again; `trainer init` writes a valid one"
            }
            Self::Unsupported { .. } => {
                "use a Qwen3-VL model in the transformers layout (`model_type` is `qwen3_vl`)"
            }
        }
    }
}

/// A JSON object and the dotted name of it, for errors.
struct Section<'a> {
    value: &'a Value,
    name: &'static str,
}

impl Section<'_> {
    fn key(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    fn size(&self, key: &str) -> Result<usize, ModelConfigError> {
        self.value[key].as_u64().filter(|n| *n > 0).map(|n| n as usize).ok_or_else(|| {
            ModelConfigError::Key { key: self.key(key), expected: "a positive integer" }
        })
    }

    fn float(&self, key: &str) -> Result<f64, ModelConfigError> {
        self.value[key]
            .as_f64()
            .ok_or_else(|| ModelConfigError::Key { key: self.key(key), expected: "a number" })
    }

    fn sizes(&self, key: &str) -> Result<Vec<usize>, ModelConfigError> {
        let list = self.value[key].as_array().and_then(|list| {
            list.iter().map(|n| n.as_u64().map(|n| n as usize)).collect::<Option<Vec<_>>>()
        });
        list.ok_or_else(|| ModelConfigError::Key {
            key: self.key(key),
            expected: "a list of integers",
        })
    }
}

impl ModelConfig {
    /// Reads `<folder>/config.json`; also returns it whole, for checkpoints to carry on.
    pub fn from_folder(folder: &Path) -> Result<(Self, Value), ModelConfigError> {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path)
            .map_err(|source| ModelConfigError::Read { path: path.clone(), source })?;
        let json = serde_json::from_str(&text)
            .map_err(|source| ModelConfigError::Json { path, source })?;
        Ok((Self::from_json(&json)?, json))
    }

    /// From the parsed `config.json`.
    pub fn from_json(json: &Value) -> Result<Self, ModelConfigError> {
        expect_text(json, "model_type", &["qwen3_vl"], "`qwen3_vl` (dense)")?;
        let top = Section { value: json, name: "" };
        let text = Section { value: &json["text_config"], name: "text_config" };
        let vision = Section { value: &json["vision_config"], name: "vision_config" };
        for section in [&text, &vision] {
            if !section.value.is_object() {
                let key = section.name.to_owned();
                return Err(ModelConfigError::Key { key, expected: "an object" });
            }
        }
        let config = Self {
            text: TextConfig::read(&text)?,
            vision: VisionConfig::read(&vision)?,
            // Published files say it in both places; transformers 5 writes the first only.
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
        if text.num_attention_heads % text.num_key_value_heads != 0 {
            return fail(format!(
                "`num_key_value_heads` {} does not divide `num_attention_heads` {}",
                text.num_key_value_heads, text.num_attention_heads
            ));
        }
        if text.head_dim % 2 != 0 || text.mrope_section.iter().sum::<usize>() != text.head_dim / 2 {
            return fail(format!(
                "`mrope_section` {:?} does not sum to half of `head_dim` {}",
                text.mrope_section, text.head_dim
            ));
        }
        if vision.hidden_size % (4 * vision.num_heads) != 0 {
            return fail(format!(
                "vision `hidden_size` {} is not a multiple of 4 * `num_heads` {}",
                vision.hidden_size, vision.num_heads
            ));
        }
        if vision.out_hidden_size != text.hidden_size {
            return fail(format!(
                "vision `out_hidden_size` {} is not the text `hidden_size` {}",
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
                "`deepstack_visual_indexes` {taps:?} must ascend, stay below `depth` {} and be at \
                 most `num_hidden_layers` {} many",
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

    /// Patches a side that merge into one token.
    pub fn merge_size(&self) -> NonZeroU32 {
        NonZeroU32::new(self.vision.spatial_merge_size as u32).unwrap_or(NonZeroU32::MIN)
    }

    /// Merged vision tokens that one row of the language model gets from `patches` patches.
    pub fn merged(&self, patches: usize) -> usize {
        patches / (self.vision.spatial_merge_size * self.vision.spatial_merge_size)
    }
}

fn expect_text(
    value: &Value,
    key: &'static str,
    accepted: &[&str],
    known: &'static str,
) -> Result<(), ModelConfigError> {
    match value[key].as_str() {
        Some(found) if accepted.contains(&found) => Ok(()),
        found => Err(ModelConfigError::Unsupported {
            key,
            found: found.unwrap_or("missing").to_owned(),
            known,
        }),
    }
}

impl TextConfig {
    fn read(section: &Section<'_>) -> Result<Self, ModelConfigError> {
        let value = section.value;
        if value["attention_bias"].as_bool() == Some(true) {
            return Err(ModelConfigError::Unsupported {
                key: "attention_bias",
                found: "true".to_owned(),
                known: "`false`",
            });
        }
        if !value["hidden_act"].is_null() {
            expect_text(value, "hidden_act", &["silu"], "`silu`")?;
        }
        // The published files say `rope_scaling` + `rope_theta`; transformers 5 writes `rope_parameters`.
        let (rope, name) = if value["rope_parameters"].is_object() {
            (&value["rope_parameters"], "text_config.rope_parameters")
        } else {
            (&value["rope_scaling"], "text_config.rope_scaling")
        };
        let rope = Section { value: rope, name };
        if !rope.value["rope_type"].is_null() {
            expect_text(rope.value, "rope_type", &["default"], "`default`")?;
        }
        if rope.value["mrope_interleaved"].as_bool() == Some(false) {
            return Err(ModelConfigError::Unsupported {
                key: "mrope_interleaved",
                found: "false".to_owned(),
                known: "`true` (Qwen3-VL)",
            });
        }
        let theta = if rope.value["rope_theta"].is_null() { section } else { &rope };
        let mrope_section = rope.sizes("mrope_section")?;
        let heads = section.size("num_attention_heads")?;
        let hidden_size = section.size("hidden_size")?;
        Ok(Self {
            vocab_size: section.size("vocab_size")?,
            hidden_size,
            intermediate_size: section.size("intermediate_size")?,
            num_hidden_layers: section.size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: section.size("num_key_value_heads")?,
            head_dim: if value["head_dim"].is_null() {
                hidden_size / heads
            } else {
                section.size("head_dim")?
            },
            rms_norm_eps: section.float("rms_norm_eps")?,
            rope_theta: theta.float("rope_theta")?,
            mrope_section: mrope_section.try_into().map_err(|_| ModelConfigError::Key {
                key: rope.key("mrope_section"),
                expected: "a list of 3 integers",
            })?,
        })
    }
}

impl VisionConfig {
    fn read(section: &Section<'_>) -> Result<Self, ModelConfigError> {
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
        assert_eq!(ModelConfig::from_json(&old).unwrap(), ModelConfig::from_json(&new).unwrap());
    }

    #[test]
    fn head_dim_comes_from_the_config_and_not_from_the_hidden_size() {
        let mut json = published();
        json["text_config"]["num_attention_heads"] = json!(32);
        let config = ModelConfig::from_json(&json).unwrap();
        assert_eq!(config.text.head_dim * config.text.num_attention_heads, 4096);
    }

    #[test]
    fn what_the_trainer_does_not_know_is_refused_by_name() {
        let cases: [(&str, &str, Value, &str); 6] = [
            ("", "model_type", json!("qwen3_vl_moe"), "qwen3_vl_moe"),
            ("text_config", "attention_bias", json!(true), "attention_bias"),
            ("text_config", "hidden_size", json!("big"), "text_config.hidden_size"),
            ("text_config", "num_key_value_heads", json!(3), "num_key_value_heads"),
            ("vision_config", "deepstack_visual_indexes", json!([5, 99]), "deepstack"),
            ("vision_config", "out_hidden_size", json!(1024), "out_hidden_size"),
        ];
        for (section, key, value, named) in cases {
            let mut json = published();
            let object = if section.is_empty() { &mut json } else { &mut json[section] };
            object[key] = value;
            let error = ModelConfig::from_json(&json).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
