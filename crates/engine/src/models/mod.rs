//! [`ModelConfig`] and [`Model`], of any family.
//!
//! A family is a reader of `config.json`, selected by `model_type` ([`read_config`]), that returns
//! a [`ModelConfig`]. Other modules see only that. `docs/dev/architecture.md` lists the places of a
//! family.

mod config;
mod experts;
mod generate;
mod internvl;
mod minicpm;
mod model;
mod model_config;
mod qwen2;
mod qwen2_5_vl;
mod qwen2_vl;
mod qwen3;
mod qwen3_5;
mod qwen3_5_decoder;
mod qwen3_decoder;
mod qwen3_vl;
mod vision;

pub use config::ModelConfigError;
pub use generate::Cache;
pub use model::{Model, ModelInput, RecomputePolicy, Tape};
pub use model_config::{LLM, ModelConfig};
pub use vision::{
    EarlyMerger, MERGER, MergerHidden, MergerParts, NormPlace, TableReading, VISION,
    VisionAttention, VisionConfig, VisionMlp, VisionNames, VisionNorm, VisionParts, VisionWindows,
};

use serde_json::Value;
use std::path::Path;
use std::sync::LazyLock;

/// Reads the parsed `config.json` of a family.
pub type ReadConfig = fn(&Value) -> Result<ModelConfig, ModelConfigError>;

/// The families by `model_type`.
pub const FAMILIES: [(&str, ReadConfig); 13] = [
    ("qwen3_vl", qwen3_vl::read),
    ("qwen3_5", qwen3_5::read),
    ("qwen3_5_text", qwen3_5::read_text),
    ("qwen2_5_vl", qwen2_5_vl::read),
    ("qwen2_vl", qwen2_vl::read),
    ("qwen3", qwen3::read),
    ("qwen3_vl_moe", qwen3_vl::read_moe),
    ("qwen3_moe", qwen3::read_moe),
    ("qwen3_5_moe", qwen3_5::read_moe),
    ("qwen3_5_moe_text", qwen3_5::read_text_moe),
    ("internvl", internvl::read),
    ("minicpmv4_6", minicpm::read),
    ("minicpmv4_7", minicpm::read_canvas),
];

/// The shape of a published model.
#[derive(Debug)]
pub struct Preset {
    pub name: &'static str,
    pub title: &'static str,
    /// The content of its `config.json`.
    pub config: &'static str,
}

macro_rules! presets {
    ($($name:literal: $title:literal),+ $(,)?) => {
        /// Shapes of published models. The vision encoders of Qwen3.5 0.8B and 4B, the larger one of
        /// InternVL3.5 38B, and the file of MiniCPM-V were not confirmed with the published files.
        pub const PRESETS: &[Preset] = &[$(Preset {
            name: $name,
            title: $title,
            config: include_str!(concat!("presets/", $name, ".json")),
        }),+];
    };
}

presets! {
    "2b": "Qwen3-VL 2B",
    "4b": "Qwen3-VL 4B",
    "8b": "Qwen3-VL 8B",
    "32b": "Qwen3-VL 32B",
    "30b-a3b": "Qwen3-VL 30B-A3B, a mixture of experts",
    "235b-a22b": "Qwen3-VL 235B-A22B, a mixture of experts",
    "qwen3.5-0.8b": "Qwen3.5 0.8B",
    "qwen3.5-4b": "Qwen3.5 4B",
    "qwen3.5-9b": "Qwen3.5 9B",
    "qwen3.5-27b": "Qwen3.5 27B",
    "qwen2.5-vl-3b": "Qwen2.5-VL 3B",
    "qwen2.5-vl-7b": "Qwen2.5-VL 7B",
    "qwen2.5-vl-32b": "Qwen2.5-VL 32B",
    "qwen2.5-vl-72b": "Qwen2.5-VL 72B",
    "qwen2-vl-2b": "Qwen2-VL 2B",
    "qwen2-vl-7b": "Qwen2-VL 7B",
    "qwen2-vl-72b": "Qwen2-VL 72B",
    "internvl3.5-1b": "InternVL3.5 1B",
    "internvl3.5-2b": "InternVL3.5 2B",
    "internvl3.5-4b": "InternVL3.5 4B",
    "internvl3.5-8b": "InternVL3.5 8B",
    "internvl3.5-14b": "InternVL3.5 14B",
    "internvl3.5-38b": "InternVL3.5 38B",
    "internvl3.5-30b-a3b": "InternVL3.5 30B-A3B, a mixture of experts",
    "minicpm-v-4.6": "MiniCPM-V 4.6",
}

static KNOWN_TYPES: LazyLock<String> = LazyLock::new(|| {
    let types = FAMILIES.map(|(name, _)| format!("`{name}`"));
    let [others @ .., last] = &types;
    format!("{} or {last}", others.join(", "))
});

/// Reads `<folder>/config.json`. Also returns the whole file, which goes into checkpoints.
pub fn read_config(folder: &Path) -> Result<(ModelConfig, Value), ModelConfigError> {
    let path = folder.join("config.json");
    let text = files::read_to_string(&path);
    let text = text.map_err(|source| ModelConfigError::Read { path: path.clone(), source })?;
    let json =
        serde_json::from_str(&text).map_err(|source| ModelConfigError::Json { path, source })?;
    Ok((config_from_json(&json)?, json))
}

pub fn config_from_json(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    let model_type = json["model_type"].as_str().unwrap_or("missing");
    match FAMILIES.iter().find(|(name, _)| *name == model_type) {
        Some((_, read)) => read(json),
        None => Err(ModelConfigError::Unsupported {
            key: "model_type",
            found: model_type.to_owned(),
            known: &KNOWN_TYPES,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// An adapter of a table would not be computed.
    #[test]
    fn the_tables_of_the_presets_are_no_linear_layers() {
        for preset in PRESETS {
            let config = config_from_json(&serde_json::from_str(preset.config).unwrap()).unwrap();
            let positions = config.vision.as_ref().unwrap().parts.names.positions;
            for spec in config.param_specs() {
                let is_table = spec.name == positions || spec.name.contains("embed_tokens");
                assert!(!is_table || spec.linear_layer().is_none(), "{}", spec.name);
            }
        }
    }

    #[test]
    fn an_unknown_family_is_refused_with_the_known_ones() {
        let error = config_from_json(&json!({"model_type": "qwen3_next"})).unwrap_err();
        let error = error.to_string();
        assert_eq!(
            error,
            "config.json: `model_type` is `qwen3_next`, expected `qwen3_vl`, `qwen3_5`, `qwen3_5_text`, `qwen2_5_vl`, `qwen2_vl`, `qwen3`, `qwen3_vl_moe`, `qwen3_moe`, `qwen3_5_moe`, `qwen3_5_moe_text`, `internvl`, `minicpmv4_6` or `minicpmv4_7`"
        );
        for (model_type, _) in FAMILIES {
            assert!(error.contains(&format!("`{model_type}`")), "{error}");
        }
    }
}
