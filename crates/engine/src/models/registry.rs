//! The families by `model_type`.

use super::config::ModelConfigError;
use super::model_config::ModelConfig;
use super::{qwen2_5_vl, qwen3, qwen3_5, qwen3_vl};
use serde_json::Value;
use std::path::Path;
use std::sync::LazyLock;

pub type ReadConfig = fn(&Value) -> Result<ModelConfig, ModelConfigError>;

pub const FAMILIES: [(&str, ReadConfig); 9] = [
    ("qwen3_vl", qwen3_vl::read),
    ("qwen3_5", qwen3_5::read),
    ("qwen3_5_text", qwen3_5::read_text),
    ("qwen2_5_vl", qwen2_5_vl::read),
    ("qwen3", qwen3::read),
    ("qwen3_vl_moe", qwen3_vl::read_moe),
    ("qwen3_moe", qwen3::read_moe),
    ("qwen3_5_moe", qwen3_5::read_moe),
    ("qwen3_5_moe_text", qwen3_5::read_text_moe),
];

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

    #[test]
    fn an_unknown_family_is_refused_with_the_known_ones() {
        let error = config_from_json(&json!({"model_type": "qwen3_next"})).unwrap_err();
        let error = error.to_string();
        assert_eq!(
            error,
            "config.json: `model_type` is `qwen3_next`, expected `qwen3_vl`, `qwen3_5`, `qwen3_5_text`, `qwen2_5_vl`, `qwen3`, `qwen3_vl_moe`, `qwen3_moe`, `qwen3_5_moe` or `qwen3_5_moe_text`"
        );
        for (model_type, _) in FAMILIES {
            assert!(error.contains(&format!("`{model_type}`")), "{error}");
        }
    }
}
