//! The JSON files of a model folder.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::model_file::{ModelFolderError, read_json, read_json_if_there};
use tokenizer::TextTokenizer;

/// A parsed file and its path.
pub(super) struct JsonFile {
    pub(super) path: PathBuf,
    pub(super) value: Value,
}

impl JsonFile {
    pub(super) fn read(folder: &Path, name: &str) -> Result<Self, ModelFolderError> {
        let path = folder.join(name);
        Ok(Self { value: read_json(&path)?, path })
    }

    pub(super) fn read_if_there(
        folder: &Path,
        name: &str,
    ) -> Result<Option<Self>, ModelFolderError> {
        let path = folder.join(name);
        Ok(read_json_if_there(&path)?.map(|value| Self { path, value }))
    }

    /// Whether this `config.json` is that of a model without a vision encoder.
    pub(super) fn is_text_only(&self) -> bool {
        self.value["vision_config"].is_null() && self.value["image_token_id"].is_null()
    }

    pub(super) fn id(&self, key: &'static str) -> Result<u32, ModelFolderError> {
        as_id(&self.value[key]).ok_or_else(|| self.key_error(key, "token id"))
    }

    /// One id or a list of ids. Empty without the key.
    pub(super) fn ids(&self, key: &str) -> Vec<u32> {
        match &self.value[key] {
            Value::Array(ids) => ids.iter().filter_map(as_id).collect(),
            one => as_id(one).into_iter().collect(),
        }
    }

    pub(super) fn token(
        &self,
        key: &'static str,
        id: u32,
        tokenizer: &TextTokenizer,
    ) -> Result<String, ModelFolderError> {
        tokenizer.token(id).ok_or_else(|| ModelFolderError::UnknownToken {
            path: self.path.clone(),
            key,
            token: id.to_string(),
        })
    }

    pub(super) fn vocab_size(&self) -> Result<usize, ModelFolderError> {
        let nested = self.value["text_config"]["vocab_size"].as_u64();
        nested
            .or_else(|| self.value["vocab_size"].as_u64())
            .map(|size| size as usize)
            .ok_or_else(|| self.key_error("text_config.vocab_size", "count"))
    }

    /// The text of a token: a string, or the `content` of an object.
    pub(super) fn special_token(&self, key: &str) -> Option<String> {
        let value = &self.value[key];
        value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
    }

    /// The template, or the one named `default` of several.
    pub(super) fn chat_template(&self) -> Option<String> {
        let value = &self.value["chat_template"];
        let of_list = || {
            let templates = value.as_array()?;
            let default = templates.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str()
        };
        value.as_str().or_else(of_list).map(str::to_owned)
    }

    fn key_error(&self, key: &'static str, expected: &'static str) -> ModelFolderError {
        ModelFolderError::Key { path: self.path.clone(), key, expected }
    }
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
