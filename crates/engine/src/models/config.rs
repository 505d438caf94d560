//! Reads values of `config.json` in both spellings of transformers.

use crate::nn::{AttentionSpec, DecoderConfig, LayerSpec, MixerSpec, MlpSpec};
use batch::WrongSize;
use kernels::NormScale;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum ModelConfigError {
    #[error("cannot read `{}`", .path.display())]
    #[fault(hint = "`model.path` must be a model folder with a config.json")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("`{}` is not JSON", .path.display())]
    #[fault(hint = "the file is damaged: copy it from the published model again")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("config.json: `{key}` is missing or is not {expected}")]
    #[fault(
        hint = "copy config.json from the published model again; `trainer init` writes a valid one"
    )]
    Key {
        /// Dotted key.
        key: String,
        expected: &'static str,
    },
    #[error("config.json: `{key}` is `{found}`, expected {known}")]
    #[fault(hint = "use a model of a family that README.md lists, in the transformers layout")]
    Unsupported {
        /// Dotted key.
        key: &'static str,
        found: String,
        known: &'static str,
    },
    #[error("config.json: `{key}` is {found}, expected {expected}")]
    #[fault(
        hint = "copy config.json from the published model again; `trainer init` writes a valid one"
    )]
    Range {
        /// Dotted key.
        key: String,
        found: String,
        expected: String,
    },
    #[error("config.json: {what}")]
    #[fault(
        hint = "copy config.json from the published model again; `trainer init` writes a valid one"
    )]
    Shape { what: String },
}

impl From<WrongSize> for ModelConfigError {
    fn from(WrongSize { key, found, expected }: WrongSize) -> Self {
        Self::Range { key: key.to_owned(), found: found.to_string(), expected }
    }
}

/// Asserts that each change of a valid file, the value of a key in a section or at the top level, is
/// refused with an error that contains a text.
#[cfg(test)]
pub(super) fn assert_refused<const N: usize>(
    read: super::ReadConfig,
    published: &Value,
    changes: [(&str, &str, Value, &str); N],
) {
    for (section, key, value, named) in changes {
        let mut json = published.clone();
        if section.is_empty() {
            json[key] = value;
        } else {
            json[section][key] = value;
        }
        let error = read(&json).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

/// Attention with norms of queries and keys.
pub(super) const QK_NORM: AttentionSpec =
    AttentionSpec { qk_norm: true, qkv_bias: false, output_gate: false, window: None };

/// Maximum number of layers or blocks, and number of pixels or patches on a side.
const MAX_COUNT: u64 = 1 << 10;
/// Maximum width of a tensor, and number of heads.
const MAX_WIDTH: u64 = 1 << 20;
const MAX_VOCABULARY: u64 = 1 << 24;

/// The largest value of a size. It is far above that of every known model; a larger one is a
/// damaged file, and memory for it must not be allocated.
fn largest(key: &str) -> u64 {
    match key {
        "vocab_size" | "image_token_id" => MAX_VOCABULARY,
        "num_hidden_layers"
        | "depth"
        | "patch_size"
        | "temporal_patch_size"
        | "spatial_merge_size"
        | "in_channels" => MAX_COUNT,
        _ => MAX_WIDTH,
    }
}

/// A value of the settings of rotary positions, without the difference between `1` and `1.0` and
/// between the names of the default kind, which applies without a value, too.
fn meaning(key: &str, value: &Value) -> Value {
    match value.as_str() {
        Some("mrope") => Value::from("default"),
        None if key == "rope_type" && value.is_null() => Value::from("default"),
        _ => value.as_f64().map_or_else(|| value.clone(), Value::from),
    }
}

/// Reads the decoder that a section describes.
pub(super) type ReadDecoder = fn(&Section<'_>) -> Result<DecoderConfig, ModelConfigError>;

/// A JSON object and its dotted name, for errors.
pub(super) struct Section<'a> {
    pub(super) value: &'a Value,
    pub(super) name: &'static str,
}

impl Section<'_> {
    pub(super) fn of<'a>(
        json: &'a Value,
        name: &'static str,
    ) -> Result<Section<'a>, ModelConfigError> {
        let value = &json[name];
        if !value.is_object() {
            let key = name.to_owned();
            return Err(ModelConfigError::Key { key, expected: "an object" });
        }
        Ok(Section { value, name })
    }

    pub(super) fn key(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ModelConfigError> {
        let size = self.value[key].as_u64().filter(|n| *n > 0).ok_or_else(|| {
            ModelConfigError::Key { key: self.key(key), expected: "a positive integer" }
        })?;
        if size > largest(key) {
            return Err(self.range(key, format!("at most {}", largest(key))));
        }
        Ok(size as usize)
    }

    /// The size `key`, or `default` if the file does not have it.
    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelConfigError> {
        if self.value[key].is_null() { Ok(default) } else { self.size(key) }
    }

    pub(super) fn range(&self, key: &str, expected: String) -> ModelConfigError {
        ModelConfigError::Range { key: self.key(key), found: self.value[key].to_string(), expected }
    }

    pub(super) fn float(&self, key: &str) -> Result<f64, ModelConfigError> {
        self.value[key]
            .as_f64()
            .ok_or_else(|| ModelConfigError::Key { key: self.key(key), expected: "a number" })
    }

    /// The decoder of the section `text_config`, whose `model_type`, or `default` without one, selects
    /// the reader. `known` lists the types.
    pub(super) fn decoder_of_kind(
        &self,
        readers: [(&str, ReadDecoder); 2],
        default: Option<&str>,
        known: &'static str,
    ) -> Result<DecoderConfig, ModelConfigError> {
        let kind = self.value["model_type"].as_str().or(default).unwrap_or("missing");
        match readers.iter().find(|(name, _)| *name == kind) {
            Some((_, read)) => read(self),
            None => Err(ModelConfigError::Unsupported {
                key: "text_config.model_type",
                found: kind.to_owned(),
                known,
            }),
        }
    }

    /// What a norm adds to the variance or the mean square, or `default` if there is one and the file
    /// does not have the key.
    pub(super) fn epsilon(&self, key: &str, default: Option<f64>) -> Result<f64, ModelConfigError> {
        let eps = match default {
            Some(default) if self.value[key].is_null() => default,
            _ => self.float(key)?,
        };
        if eps > 0.0 && eps < 1.0 {
            return Ok(eps);
        }
        Err(self.range(key, "a number above 0 and below 1".to_owned()))
    }

    /// The value of `key`, if the file has it. A text such as `"false"` is an error: transformers
    /// takes it as true.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ModelConfigError> {
        match &self.value[key] {
            Value::Null => Ok(None),
            Value::Bool(value) => Ok(Some(*value)),
            _ => Err(self.range(key, "`true` or `false`".to_owned())),
        }
    }

    /// Whether `key` is present and true.
    pub(super) fn is_true(&self, key: &str) -> Result<bool, ModelConfigError> {
        Ok(self.flag(key)? == Some(true))
    }

    pub(super) fn sizes(&self, key: &str) -> Result<Vec<usize>, ModelConfigError> {
        let list = self.value[key].as_array().and_then(|list| {
            let size = |n: &Value| n.as_u64().filter(|n| *n <= MAX_WIDTH).map(|n| n as usize);
            list.iter().map(size).collect::<Option<Vec<_>>>()
        });
        list.ok_or_else(|| ModelConfigError::Key {
            key: self.key(key),
            expected: "a list of integers",
        })
    }

    /// Numbers of rotary frequencies of time, height and width, or `default` if the file does not
    /// have them.
    pub(super) fn mrope_section(
        &self,
        default: [usize; 3],
    ) -> Result<[usize; 3], ModelConfigError> {
        if self.value["mrope_section"].is_null() {
            return Ok(default);
        }
        self.sizes("mrope_section")?.try_into().map_err(|_| ModelConfigError::Key {
            key: self.key("mrope_section"),
            expected: "a list of 3 integers",
        })
    }

    /// Fails if `key` is present with a value that is not `accepted`.
    pub(super) fn expect(
        &self,
        key: &'static str,
        accepted: &Value,
        known: &'static str,
    ) -> Result<(), ModelConfigError> {
        let found = &self.value[key];
        if found.is_null() || found == accepted {
            return Ok(());
        }
        let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
        Err(ModelConfigError::Unsupported { key, found, known })
    }

    /// Fails if `key` is present and not zero: no dropout of a model is implemented.
    pub(super) fn expect_no_dropout(&self, key: &'static str) -> Result<(), ModelConfigError> {
        let found = &self.value[key];
        if found.is_null() || found.as_f64() == Some(0.0) {
            return Ok(());
        }
        Err(ModelConfigError::Unsupported { key, found: found.to_string(), known: "`0.0`" })
    }

    /// Fails if a layer of `num_layers` has attention over a window.
    fn expect_full_attention(&self, num_layers: usize) -> Result<(), ModelConfigError> {
        let first = self.value["max_window_layers"].as_u64(); // layers from this one on have a window
        let is_unbounded = self.value.get("sliding_window").is_some_and(Value::is_null);
        if !is_unbounded && first.is_none_or(|first| first < num_layers as u64) {
            self.expect("use_sliding_window", &Value::Bool(false), "`false`")?;
        }
        let mut kinds = self.value["layer_types"].as_array().into_iter().flatten();
        match kinds.find(|kind| *kind != "full_attention") {
            Some(kind) => Err(ModelConfigError::Unsupported {
                key: "layer_types",
                found: kind.to_string(),
                known: "`full_attention`",
            }),
            None => Ok(()),
        }
    }

    /// The settings of rotary positions. transformers 5 writes them to `rope_parameters`; older
    /// files have `rope_scaling`, and `rope_theta` in this section. A file may have both if they
    /// have the same keys with equal values; only the kind may be missing.
    pub(super) fn rope(&self) -> Result<Section<'_>, ModelConfigError> {
        let name = |key: &'static str| if self.name.is_empty() { "" } else { key };
        let [new, old] = ["rope_parameters", "rope_scaling"].map(|key| &self.value[key]);
        if !new.is_object() {
            return Ok(Section { value: old, name: name("text_config.rope_scaling") });
        }
        self.expect_one_rope()?;
        Ok(Section { value: new, name: name("text_config.rope_parameters") })
    }

    /// The setting `key` of rotary positions in `section`, and its dotted name. transformers fills
    /// in keys that are next to the section.
    fn rope_setting(&self, section: &str, key: &str) -> (String, &Value) {
        let older = if key == "rope_type" { "type" } else { key };
        let places = [(section, key), (section, older), ("", key)];
        let found = places.into_iter().map(|(section, key)| match section {
            "" => (self.key(key), &self.value[key]),
            _ => (self.key(&format!("{section}.{key}")), &self.value[section][key]),
        });
        let mut found: Vec<_> = found.collect();
        let at = found.iter().position(|(_, value)| !value.is_null()).unwrap_or(0);
        found.swap_remove(at)
    }

    /// Fails if `rope_parameters` and the older keys have different values, or if one of the two
    /// sections lacks a value of the other: transformers uses only one of them.
    fn expect_one_rope(&self) -> Result<(), ModelConfigError> {
        const NAMES: [&str; 2] = ["rope_parameters", "rope_scaling"];
        let object = |name: &str| self.value[name].as_object().into_iter().flatten();
        let keys = NAMES.into_iter().flat_map(object).map(|(key, _)| key.as_str());
        let keys = keys.map(|key| if key == "type" { "rope_type" } else { key });
        let has_old = object(NAMES[1]).next().is_some();
        for key in keys.collect::<BTreeSet<_>>() {
            let (name, now) = self.rope_setting(NAMES[0], key);
            let old = has_old.then(|| self.rope_setting(NAMES[1], key));
            let theta = &self.value["rope_theta"];
            let next_to = (key == "rope_theta" && !theta.is_null()).then(|| (self.key(key), theta));
            for (older_name, older) in old.into_iter().chain(next_to) {
                if meaning(key, now) != meaning(key, older) {
                    let said = |value: &Value| match value {
                        Value::Null => "missing".to_owned(),
                        value => value.to_string(),
                    };
                    let what =
                        format!("`{name}` is {}, but `{older_name}` is {}", said(now), said(older));
                    return Err(ModelConfigError::Shape { what });
                }
            }
        }
        Ok(())
    }

    /// A decoder in which all layers have this attention and an MLP.
    pub(super) fn decoder(
        &self,
        attention: AttentionSpec,
    ) -> Result<DecoderConfig, ModelConfigError> {
        let config = self.decoder_sizes(attention)?;
        self.expect_full_attention(config.layers.len())?;
        Ok(config)
    }

    /// Width of the MLP. A file whose layers all have experts need not have it.
    fn mlp_width(&self) -> Result<usize, ModelConfigError> {
        let key = "intermediate_size";
        if self.value["moe_intermediate_size"].is_null() {
            return self.size(key);
        }
        self.size_or(key, self.size("moe_intermediate_size")?)
    }

    /// As [`Self::decoder`], without the check that all layers have full attention.
    pub(super) fn decoder_sizes(
        &self,
        attention: AttentionSpec,
    ) -> Result<DecoderConfig, ModelConfigError> {
        // transformers does not read the key of families whose queries, keys and values have biases
        if !attention.qkv_bias {
            self.expect("attention_bias", &Value::Bool(false), "`false`")?;
        }
        self.expect("hidden_act", &Value::from("silu"), "`silu`")?;
        let rope = self.rope()?;
        // `type` is the old name of `rope_type`, and `mrope` was the old name of `default`
        for key in ["rope_type", "type"] {
            if rope.value[key] != "mrope" {
                rope.expect(key, &Value::from("default"), "`default`")?;
            }
        }
        self.expect_no_dropout("attention_dropout")?;
        let theta = if rope.value["rope_theta"].is_null() { self } else { &rope };
        let heads = self.size("num_attention_heads")?;
        let hidden_size = self.size("hidden_size")?;
        let head_dim = if self.value["head_dim"].is_null() {
            hidden_size / heads
        } else {
            self.size("head_dim")?
        };
        let layer = LayerSpec { mixer: MixerSpec::Attention(attention), mlp: MlpSpec::Dense };
        let config = DecoderConfig {
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.mlp_width()?,
            num_attention_heads: heads,
            num_key_value_heads: self.size("num_key_value_heads")?,
            head_dim,
            rotary_dim: head_dim,
            attention_scale: 1.0 / (head_dim as f32).sqrt(),
            rms_norm_eps: self.epsilon("rms_norm_eps", None)?,
            rope_theta: theta.float("rope_theta")?,
            mrope: None,
            tie_word_embeddings: self.is_true("tie_word_embeddings")?,
            initializer_range: self.value["initializer_range"].as_f64().unwrap_or(0.02),
            norm_scale: NormScale::Weight,
            layers: vec![layer; self.size("num_hidden_layers")?],
        };
        if !(config.rope_theta > 0.0 && config.rope_theta.is_finite()) {
            return Err(theta.range("rope_theta", "a number above 0".to_owned()));
        }
        if heads % config.num_key_value_heads != 0 {
            let what = format!(
                "`num_key_value_heads` {} does not divide `num_attention_heads` {heads}",
                config.num_key_value_heads
            );
            return Err(ModelConfigError::Shape { what });
        }
        if config.head_dim == 0 || !config.head_dim.is_multiple_of(2) {
            let what = format!("`head_dim` {} is 0 or odd", config.head_dim);
            return Err(ModelConfigError::Shape { what });
        }
        Ok(config)
    }
}
