//! `adapter_config.json` of a folder in PEFT's layout.

use super::{CheckpointError, WeightFiles};
use crate::files;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;
use tokenizers::utils::SysRegex;

pub const ADAPTER_CONFIG: &str = "adapter_config.json";
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
    /// Whether a head that is the embedding stays the embedding if that was trained completely.
    #[serde(default)]
    pub ensure_weight_tying: bool,
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
    /// Ranks of some modules: the first key that [matches](Patterns) decides.
    #[serde(default)]
    pub rank_pattern: IndexMap<String, usize>,
    /// `lora_alpha` of some modules, in the same way.
    #[serde(default)]
    pub alpha_pattern: IndexMap<String, f64>,
    /// All other fields.
    #[serde(flatten, skip_serializing)]
    pub other: Map<String, Value>,
}

/// Fields that say how the adapter was trained, and those that [`PeftConfig::has_module`] reads.
const WITHOUT_EFFECT: [&str; 10] = [
    "auto_mapping",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_ga_config",
    "peft_version",
    "revision",
];

/// Values of `init_lora_weights` that leave the weights of the model as they are.
const INITS: [&str; 3] = ["eva", "gaussian", "orthogonal"];

/// Whether a field that is not read has no effect, or the value that PEFT writes for adapters
/// without it.
fn is_default(field: &str, value: &Value) -> bool {
    if WITHOUT_EFFECT.contains(&field) {
        return true;
    }
    match (field, value) {
        ("megatron_core", Value::String(value)) => value == "megatron.core",
        ("qalora_group_size", value) => *value == 16,
        (_, Value::Null | Value::Bool(false)) => true,
        (_, Value::String(value)) => value.is_empty(),
        (_, Value::Array(values)) => values.is_empty(),
        (_, Value::Object(values)) => values.is_empty(),
        _ => false,
    }
}

/// Ranks and `lora_alpha` of the modules of an adapter. As in PEFT, a key of a pattern is a regular
/// expression that matches the name of a module, or its last parts; the first such key decides.
pub struct Patterns {
    ranks: Vec<(SysRegex, usize)>,
    alphas: Vec<(SysRegex, f64)>,
    default: (usize, f64),
}

impl Patterns {
    /// Rank and `lora_alpha` of `module`.
    pub fn of(&self, module: &str) -> (usize, f64) {
        (
            first_match(&self.ranks, module).unwrap_or(self.default.0),
            first_match(&self.alphas, module).unwrap_or(self.default.1),
        )
    }
}

fn first_match<T: Copy>(pattern: &[(SysRegex, T)], module: &str) -> Option<T> {
    let matches = |regex: &SysRegex| regex.find_iter(module).next().is_some();
    pattern.iter().find(|(regex, _)| matches(regex)).map(|(_, value)| *value)
}

/// The regular expressions of PEFT, `(.*\.)?(KEY)$` from the start of a name. The error is a key that
/// is none, or whose meaning in Python may be another one.
fn compiled<T: Copy>(pattern: &IndexMap<String, T>) -> Result<Vec<(SysRegex, T)>, String> {
    let compile = |(key, value): (&String, &T)| {
        // Python has no flags there, and other sets. Look-arounds and back-references are refused
        // because a search that runs out of steps would count as no match.
        let is_plain = regex_syntax::Parser::new().parse(key).is_ok();
        let plain_groups = key.split("(?").skip(1).all(|group| group.starts_with(':'));
        let has_sets = ["[[", "&&", "--", "~~"].iter().any(|set| key.contains(set));
        let regex = SysRegex::new(&format!(r"^(?:.*\.)?(?:{key})$")).ok();
        let regex = regex.filter(|_| is_plain && plain_groups && !has_sets);
        Ok((regex.ok_or_else(|| key.clone())?, *value))
    };
    pattern.iter().map(compile).collect()
}

/// Whether `end` is `name` or its last parts.
fn is_end(end: &str, name: &str) -> bool {
    name.strip_suffix(end).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

fn none() -> String {
    "none".to_owned()
}

impl PeftConfig {
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(ADAPTER_CONFIG);
        let text = files::read(&path).map_err(CheckpointError::read(&path))?;
        serde_json::from_slice(&text).map_err(|error| CheckpointError::invalid(&path, &error))
    }

    /// Ranks and `lora_alpha` of all modules. The error is a field that is not supported, and its
    /// value.
    pub fn patterns(&self) -> Result<Patterns, (String, String)> {
        let field = |name: &'static str| move |key| (name.to_owned(), key);
        Ok(Patterns {
            ranks: compiled(&self.rank_pattern).map_err(field("rank_pattern"))?,
            alphas: compiled(&self.alpha_pattern).map_err(field("alpha_pattern"))?,
            default: (self.r, self.lora_alpha),
        })
    }

    /// Factor of the output of an adapter.
    pub fn scale(&self, alpha: f64, rank: usize) -> f64 {
        alpha / if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 }
    }

    /// Whether `target_modules` names the linear layer `module`, and neither `exclude_modules` nor
    /// `layers_to_transform` leaves it out. Of the first two, only lists are compared: PEFT has
    /// regular expressions with look-arounds there, and words such as `all-linear`.
    pub fn has_module(&self, module: &str) -> bool {
        let names = |list: &Value| {
            let list = list.as_array()?;
            Some(list.iter().filter_map(Value::as_str).any(|of| is_end(of, module)))
        };
        let field = |name: &str| self.other.get(name).unwrap_or(&Value::Null);
        let number = module.rsplit('.').find_map(|part| part.parse::<u64>().ok());
        let in_layers = match field("layers_to_transform") {
            Value::Null => true,
            Value::Array(layers) if layers.is_empty() => true,
            Value::Array(layers) => layers.iter().any(|layer| layer.as_u64() == number),
            layer => layer.as_u64() == number,
        };
        names(&self.target_modules) != Some(false)
            && names(field("exclude_modules")) != Some(true)
            && in_layers
    }

    pub fn has_parameter(&self, name: &str) -> bool {
        let mut parameters = self.target_parameters.iter().flatten();
        parameters.any(|parameter| is_end(parameter, name))
    }

    /// The first field with a value that is not supported, and that value. A field that is not
    /// known must have a value that PEFT writes for adapters without it.
    pub fn unsupported(&self) -> Option<(String, String)> {
        // Other ways to draw the initial values also change the weights of the model.
        let init = match &self.init_lora_weights {
            Value::Null | Value::Bool(_) => true,
            init => INITS.iter().any(|name| init == name),
        };
        let read = [
            (self.peft_type == "LORA", "peft_type", self.peft_type.as_str().into()),
            (self.bias == "none", "bias", self.bias.as_str().into()),
            (init, "init_lora_weights", self.init_lora_weights.clone()),
            (!self.fan_in_fan_out, "fan_in_fan_out", true.into()),
        ];
        let read = read.into_iter().filter(|(is_supported, ..)| !is_supported);
        let read = read.map(|(_, field, value)| (field.to_owned(), value));
        let other = self.other.iter().filter(|(field, value)| !is_default(field, value));
        let found = read.chain(other.map(|(field, value)| (field.clone(), value.clone()))).next();
        let shown = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        found.map(|(field, value)| (field, shown(value)))
    }
}

pub fn adapter_weights(folder: &Path) -> Result<WeightFiles, CheckpointError> {
    let path = folder.join(ADAPTER_WEIGHTS);
    let pickled = folder.join("adapter_model.bin");
    if !path.exists() && pickled.exists() {
        return Err(CheckpointError::Pickled { path: pickled, expected: ADAPTER_WEIGHTS });
    }
    WeightFiles::open_file(&path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fault::Fault;
    use serde_json::json;

    fn config(fields: &Value) -> PeftConfig {
        let mut json = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16});
        let fields = fields.as_object().unwrap().clone();
        json.as_object_mut().unwrap().extend(fields);
        serde_json::from_value(json).unwrap()
    }

    /// The right values are those of `get_pattern_key` in PEFT 0.21.2.
    #[test]
    fn a_key_of_a_pattern_is_a_regular_expression_and_the_first_one_that_matches_decides() {
        let module = "model.language_model.layers.1.self_attn.v_proj";
        for (pattern, alpha) in [
            (json!({"v_proj": 2}), 2.0),
            (json!({"_proj": 2}), 16.0),
            (json!({"attn.v_proj": 2}), 16.0),
            (json!({"self_attn.v_proj": 2}), 2.0),
            (json!({".*": 2, "v_proj": 4}), 2.0),
            (json!({"v_proj": 4, ".*": 2}), 4.0),
            (json!({"z": 1, "q_proj|v_proj": 2, "a": 3}), 2.0),
            (json!({"layers.[01].*": 2}), 2.0),
            (json!({"layers\\.1\\..*v": 2}), 16.0),
            (json!({"^model.language_model.layers.1.self_attn.v_proj": 2}), 2.0),
            (json!({"^layers.1.self_attn.v_proj": 2}), 16.0),
            (json!({"v_proj$": 2}), 2.0),
            (json!({"v.proj": 2}), 2.0),
            (json!({"(?:q|v)_proj": 2}), 2.0),
        ] {
            let patterns =
                config(&json!({"alpha_pattern": pattern, "rank_pattern": {"v_proj": 3}}));
            assert_eq!(patterns.patterns().ok().unwrap().of(module), (3, alpha), "{pattern}");
        }
    }

    #[test]
    fn a_key_that_is_no_plain_regular_expression_is_refused() {
        for key in
            ["v_proj(", "(?=v)v_proj", "(?i)V_proj", "(v)\\1", "[a--b]_proj", "*.v_proj", "a)|(b"]
        {
            let refused = config(&json!({"rank_pattern": {"q_proj": 4, key: 2}})).patterns();
            let expected = ("rank_pattern".to_owned(), key.to_owned());
            assert_eq!(refused.err().unwrap(), expected, "{key}");
        }
    }

    #[test]
    fn modules_that_the_config_leaves_out_have_no_adapter() {
        let module = "model.language_model.layers.3.self_attn.q_proj";
        for (fields, expected) in [
            (json!({"target_modules": ["q_proj"]}), true),
            (json!({"target_modules": ["v_proj"]}), false),
            (json!({"target_modules": "all-linear"}), true),
            (json!({"exclude_modules": ["self_attn.q_proj"]}), false),
            (json!({"exclude_modules": ["lm_head"]}), true),
            (json!({"layers_to_transform": [0, 3]}), true),
            (json!({"layers_to_transform": 3}), true),
            (json!({"layers_to_transform": []}), true),
            (json!({"layers_to_transform": [0]}), false),
        ] {
            assert_eq!(config(&fields).has_module(module), expected, "{fields}");
        }
    }

    #[test]
    fn a_field_that_is_not_understood_is_refused_unless_it_has_its_default() {
        assert_eq!(config(&json!({})).unsupported(), None);
        for understood in [
            json!({"alora_invocation_tokens": null, "use_qalora": false, "qalora_group_size": 16}),
            json!({"megatron_core": "megatron.core", "loftq_config": {}, "new": [], "newer": ""}),
            json!({"peft_version": "0.21.2", "revision": "main", "layers_to_transform": [1]}),
            json!({"auto_mapping": {"base_model_class": "Model"}, "exclude_modules": ["lm_head"]}),
            json!({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}),
            json!({"init_lora_weights": "gaussian"}),
            json!({"ensure_weight_tying": true}),
        ] {
            assert_eq!(config(&understood).unsupported(), None, "{understood}");
        }
        for (field, value) in [
            ("alora_invocation_tokens", json!([5, 6])),
            ("layer_replication", json!([[0, 2], [1, 3]])),
            ("kasa_config", json!({"beta": 1e-4})),
            ("velora_config", json!({"num_groups": 2})),
            ("monteclora_config", json!({"num_samples": 4})),
            ("arrow_config", json!({"top_k": 3})),
            ("use_bdlora", json!({"nblocks": 2})),
            ("use_qalora", json!(true)),
            ("qalora_group_size", json!(32)),
            ("lora_bias", json!(true)),
            ("trainable_token_indices", json!([1])),
            ("megatron_config", json!({"a": 1})),
            ("megatron_core", json!("other")),
            ("fan_in_fan_out", json!(true)),
            ("bias", json!("all")),
            ("peft_type", json!("VERA")),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("init_lora_weights", json!("of_tomorrow")),
            ("a_field_of_tomorrow", json!(0.5)),
        ] {
            let mut fields = json!({});
            fields[field] = value.clone();
            let refused = config(&fields).unsupported();
            let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            assert_eq!(refused, Some((field.to_owned(), shown)));
        }
    }

    #[test]
    fn an_adapter_in_a_file_of_torch_is_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::File::create(folder.path().join("adapter_model.bin")).unwrap();
        let error = adapter_weights(folder.path()).unwrap_err();
        assert!(error.to_string().contains("expected `adapter_model.safetensors`"), "{error}");
        assert!(error.hint().unwrap().contains("safe_serialization=True"), "{error}");
    }
}
