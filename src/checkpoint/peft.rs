//! `adapter_config.json` of a folder in PEFT's layout.

use super::CheckpointError;
use crate::files;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the config in the folder of an adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Name of the weights in the folder of an adapter.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// The fields of `adapter_config.json` that PEFT 0.21 writes and that are in use here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the fields of PEFT")]
pub struct PeftConfig {
    /// `LORA`, also for DoRA.
    pub peft_type: String,
    /// `CAUSAL_LM`.
    #[serde(default)]
    pub task_type: Option<String>,
    /// The model that the adapter was trained on.
    #[serde(default)]
    pub base_model_name_or_path: Option<String>,
    /// Rank.
    pub r: usize,
    /// Numerator of the factor of the output.
    pub lora_alpha: f64,
    /// Dropout in training.
    #[serde(default)]
    pub lora_dropout: f64,
    /// Modules with an adapter: suffixes of their names, or a regular expression.
    #[serde(default)]
    pub target_modules: Value,
    /// Parameters of modules that are not linear layers, such as experts.
    #[serde(default)]
    pub target_parameters: Option<Vec<String>>,
    /// Modules that were trained completely.
    #[serde(default)]
    pub modules_to_save: Option<Vec<String>>,
    /// `none` unless biases were trained.
    #[serde(default = "none")]
    pub bias: String,
    /// Whether the adapter has magnitudes.
    #[serde(default)]
    pub use_dora: bool,
    /// Whether the factor is `lora_alpha / sqrt(r)` instead of `lora_alpha / r`.
    #[serde(default)]
    pub use_rslora: bool,
    /// How the values were drawn at the start.
    #[serde(default)]
    pub init_lora_weights: Value,
    /// Whether PEFT loads the adapter without training it.
    #[serde(default)]
    pub inference_mode: bool,
    /// Whether weights are stored as `[inputs, outputs]`.
    #[serde(default)]
    pub fan_in_fan_out: bool,
    /// Ranks of some modules.
    #[serde(default)]
    pub rank_pattern: BTreeMap<String, usize>,
    /// `lora_alpha` of some modules.
    #[serde(default)]
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// Whether `end` is `name` or its last parts.
fn is_end(end: &str, name: &str) -> bool {
    name.strip_suffix(end).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

fn none() -> String {
    "none".to_owned()
}

impl PeftConfig {
    /// Reads `adapter_config.json` of `folder`.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(ADAPTER_CONFIG);
        let text = files::read(&path).map_err(CheckpointError::read(&path))?;
        serde_json::from_slice(&text).map_err(|error| CheckpointError::invalid(&path, &error))
    }

    /// Factor of the output of the adapter of `module`, whose rank is `rank`.
    pub fn scale(&self, module: &str, rank: usize) -> f64 {
        let own =
            self.alpha_pattern.iter().find(|(key, _)| is_end(key.trim_start_matches('^'), module));
        let alpha = own.map_or(self.lora_alpha, |(_, alpha)| *alpha);
        alpha / if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 }
    }

    /// Whether `target_parameters` names the parameter `name`.
    pub fn has_parameter(&self, name: &str) -> bool {
        let mut parameters = self.target_parameters.iter().flatten();
        parameters.any(|parameter| is_end(parameter, name))
    }

    /// The first field with a value that is not supported, and that value.
    pub fn unsupported(&self) -> Option<(&'static str, String)> {
        let has = |set: bool, name, found: &dyn ToString| set.then(|| (name, found.to_string()));
        // These ways to draw the initial values also change the weights of the model.
        let init = self.init_lora_weights.as_str().unwrap_or_default();
        let changes_model = ["pissa", "olora", "corda", "loftq", "lora_ga"];
        let changes_model = changes_model.iter().any(|name| init.starts_with(name));
        has(self.peft_type != "LORA", "peft_type", &self.peft_type)
            .or_else(|| has(self.bias != "none", "bias", &self.bias))
            .or_else(|| has(changes_model, "init_lora_weights", &init))
            .or_else(|| has(self.fan_in_fan_out, "fan_in_fan_out", &true))
    }
}
