//! Tokens, merges, special tokens and the chat template.

use super::super::error::{RunError, SetupError};
use super::super::model_files::files_error;
use super::Metadata;
use crate::checkpoint::{CheckpointError, GgufValue};
use crate::data::chat_template_source;
use serde_json::Value;
use std::path::Path;

/// Kinds of tokens in a file.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// How text is split before merges: a pattern of `tokenizer.json` and its name in llama.cpp.
const SPLITS: [(&str, &str); 2] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen35",
    ),
];

/// `json` is the model's `config.json`. `changed` has the files that differ from those of `folder`.
pub(super) fn metadata(
    (folder, changed): (&Path, &[(&str, Vec<u8>)]),
    json: &Value,
    vocab_size: usize,
) -> Result<Metadata, RunError> {
    let unsupported = |what| SetupError::NoGguf { folder: folder.to_owned(), what };
    let read = |name| read(folder, changed, name);
    let tokenizer = read("tokenizer.json")?;
    let split = split(&tokenizer).map_err(unsupported)?;
    let (tokens, kinds) = tokens(&tokenizer, vocab_size).map_err(unsupported)?;
    let merges = merges(&tokenizer).map_err(unsupported)?;
    let text = |key: &str, value: String| (key.to_owned(), GgufValue::Text(value));
    let mut found = vec![
        text("tokenizer.ggml.model", "gpt2".to_owned()),
        text("tokenizer.ggml.pre", split.to_owned()),
        ("tokenizer.ggml.tokens".to_owned(), GgufValue::Texts(tokens)),
        ("tokenizer.ggml.token_type".to_owned(), GgufValue::I32s(kinds)),
        ("tokenizer.ggml.merges".to_owned(), GgufValue::Texts(merges)),
    ];
    let settings = read("tokenizer_config.json")?;
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("pad", "padding")] {
        let id = special(&tokenizer, &settings, json, name);
        let id = id.map(|id| (format!("tokenizer.ggml.{key}_token_id"), GgufValue::U32(id)));
        found.extend(id);
    }
    let adds_bos = settings["add_bos_token"] == true;
    found.push(("tokenizer.ggml.add_bos_token".to_owned(), GgufValue::Bool(adds_bos)));
    found.extend(
        chat_template_source(folder)?.map(|source| text("tokenizer.chat_template", source)),
    );
    Ok(found)
}

fn read(folder: &Path, changed: &[(&str, Vec<u8>)], name: &str) -> Result<Value, SetupError> {
    let path = folder.join(name);
    let bytes = match changed.iter().find(|(of, _)| *of == name) {
        Some((_, bytes)) => Ok(bytes.clone()),
        None => crate::files::read(&path)
            .map_err(|source| CheckpointError::Read { path: path.clone(), source }),
    };
    let json = bytes.and_then(|bytes| {
        serde_json::from_slice(&bytes).map_err(|error| CheckpointError::invalid(&path, &error))
    });
    json.map_err(|source| files_error(folder, source))
}

/// The name of how text is split.
fn split(tokenizer: &Value) -> Result<&'static str, String> {
    let is_bytes = tokenizer["decoder"]["type"] == "ByteLevel";
    if tokenizer["model"]["type"] != "BPE" || !is_bytes {
        return Err("tokenizer.json is not a byte-level BPE".to_owned());
    }
    let splits = &tokenizer["pre_tokenizer"]["pretokenizers"];
    let pattern = splits[0]["pattern"]["Regex"].as_str().unwrap_or_default();
    let found = SPLITS.iter().find(|(known, _)| *known == pattern);
    found.map(|(_, name)| *name).ok_or_else(|| {
        format!(
            "tokenizer.json splits text by `{pattern}`, expected the pattern of Qwen2 or Qwen3.5"
        )
    })
}

/// The text and the kind of each token.
fn tokens(tokenizer: &Value, vocab_size: usize) -> Result<(Vec<String>, Vec<i32>), String> {
    let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut kinds = vec![UNUSED; vocab_size];
    let mut set = |text: &str, id: &Value, kind| {
        let id = id.as_u64().map_or(usize::MAX, |id| id as usize);
        let Some(token) = tokens.get_mut(id) else {
            return Err(format!("tokenizer.json: the id of `{text}` is not below {vocab_size}"));
        };
        text.clone_into(token);
        kinds[id] = kind;
        Ok(())
    };
    for (text, id) in tokenizer["model"]["vocab"].as_object().into_iter().flatten() {
        set(text, id, NORMAL)?;
    }
    for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().unwrap_or_default();
        let is_mark = text.starts_with("<|") && text.ends_with("|>");
        let is_control = token["special"] == true || is_mark;
        set(text, &token["id"], if is_control { CONTROL } else { USER_DEFINED })?;
    }
    Ok((tokens, kinds))
}

/// The two parts of each merge, with a space between them.
fn merges(tokenizer: &Value) -> Result<Vec<String>, String> {
    let merges = tokenizer["model"]["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    let merge = |merge: &Value| match (merge.as_str(), merge[0].as_str(), merge[1].as_str()) {
        (Some(both), ..) => Some(both.to_owned()),
        (_, Some(left), Some(right)) => Some(format!("{left} {right}")),
        _ => None,
    };
    let merges: Option<Vec<String>> = merges.iter().map(merge).collect();
    merges.ok_or_else(|| "tokenizer.json: an entry of `merges` is not two texts".to_owned())
}

/// The id of a special token: that of tokenizer_config.json, or else of config.json.
fn special(tokenizer: &Value, settings: &Value, json: &Value, name: &str) -> Option<u32> {
    let token = &settings[format!("{name}_token")];
    let text = token.as_str().or_else(|| token["content"].as_str());
    let added = tokenizer["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = added.iter().find(|entry| text.is_some() && entry["content"].as_str() == text);
    let key = format!("{name}_token_id");
    let of_config = || [json, &json["text_config"]].into_iter().find_map(|at| at[&key].as_u64());
    found.and_then(|entry| entry["id"].as_u64()).or_else(of_config).map(|id| id as u32)
}
