//! Files of a model folder that contradict each other. Every command that reads a model folder
//! compares them here first, so that all commands give the same answer.
//! `docs/model-folders.md` lists what is taken, as transformers 5.23 does, and what is refused.

use super::model_files::{files_error, named_files};
use super::setup_error::SetupError;
use crate::checkpoint::{CheckpointError, WeightFiles};
use crate::files;
use crate::models::{ModelConfig, ModelConfigError, read_config};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

const HEAD: &str = "lm_head.weight";
/// Number of elements that are compared at a time.
const COMPARED: usize = 1 << 22;
/// Keys of an added token besides its text.
const FLAGS: [&str; 5] = ["lstrip", "rstrip", "single_word", "normalized", "special"];
/// The files with a chat template; the processor of transformers takes the first one.
const TEMPLATES: [&str; 3] = ["processor_config.json", "chat_template.json", "chat_template.jinja"];

/// Keys of a decoder that files may have twice.
const SIZES: [&str; 15] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "mrope_section",
    "hidden_act",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "tie_word_embeddings",
];

/// Fails if the model is not known, or if two files of its folder contradict each other. Files that
/// are missing or damaged are no errors here: the code that reads them reports them.
pub(crate) fn check_model_folder(folder: &Path) -> Result<(), SetupError> {
    let is_file = |name: &str| folder.join(name).is_file();
    let fault = |(what, hint)| SetupError::Contradiction { folder: folder.to_owned(), what, hint };
    if is_file("config.json") {
        match read_config(folder) {
            Ok((config, json)) => {
                check_config(&json).map_err(fault)?;
                check_head(folder, &*config)?;
            }
            Err(ModelConfigError::Read { .. } | ModelConfigError::Json { .. }) => {}
            Err(source) => return Err(SetupError::Config { folder: folder.to_owned(), source }),
        }
    }
    check_tokens(folder).and_then(|()| check_templates(folder)).map_err(fault)
}

/// A contradiction and the fix.
type Found = (String, &'static str);

/// Fails if `config.json` and its `text_config` have different sizes. Files that transformers 4
/// saved have both.
fn check_config(json: &Value) -> Result<(), Found> {
    let text = &json["text_config"];
    for key in SIZES {
        let [above, inside] = [json, text].map(|section| {
            let places = [&section[key], &section["rope_parameters"][key]];
            places.into_iter().chain([&section["rope_scaling"][key]]).find(|value| !value.is_null())
        });
        let (Some(above), Some(inside)) = (above, inside) else { continue };
        let is_same = above == inside || (above.is_number() && above.as_f64() == inside.as_f64());
        if is_same {
            continue;
        }
        let what = format!("`{key}` in config.json is {above}, but {inside} in its `text_config`");
        if key == "tie_word_embeddings" {
            tracing::warn!("{what}; docs/model-folders.md says which one is used");
            continue;
        }
        return Err((what, "transformers uses that of `text_config`: remove the other one"));
    }
    Ok(())
}

/// Fails if the files have a head of their own although the config ties it to the embedding.
fn check_head(folder: &Path, config: &dyn ModelConfig) -> Result<(), SetupError> {
    if !config.text().tie_word_embeddings {
        return Ok(());
    }
    // the files are opened again for their errors
    let Ok(files) = named_files(folder, config.tensor_names()) else { return Ok(()) };
    let specs = config.param_specs();
    let embedding = specs.iter().find(|spec| spec.name.ends_with("embed_tokens.weight"));
    let Some(embedding) = embedding.filter(|spec| files.shape(&spec.name).is_some()) else {
        return Ok(());
    };
    let names = [HEAD, &embedding.name];
    if files.shape(HEAD).is_none()
        || is_equal(&files, names).map_err(|error| files_error(folder, error))?
    {
        return Ok(());
    }
    let what = format!(
        "`{HEAD}` differs from the embedding `{}`, but config.json has `tie_word_embeddings: true`",
        config.tensor_names().in_file(&embedding.name)
    );
    let hint = "to use the head, as transformers does, write `\"tie_word_embeddings\": false` wherever \
                config.json has the key; to share the embedding, remove the head from the weight files";
    Err(SetupError::Contradiction { folder: folder.to_owned(), what, hint })
}

/// Whether two tensors have the same shape and values.
fn is_equal(files: &WeightFiles, names: [&str; 2]) -> Result<bool, CheckpointError> {
    let shape = files.shape(names[0]);
    if shape != files.shape(names[1]) {
        return Ok(false);
    }
    let len = shape.unwrap_or_default().iter().product();
    let values = |name: &str, range: Range<usize>| {
        let part = files.load_part(name, range, DType::F32, &Device::Cpu)?;
        let tensor = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        Tensor::to_vec1::<f32>(&part).map_err(tensor)
    };
    for start in (0..len).step_by(COMPARED) {
        let range = start..len.min(start + COMPARED);
        if values(names[0], range.clone())? != values(names[1], range)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The parts of `tokenizer.json` that are compared.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<Map<String, Value>>,
    model: ModelOfTokenizer,
}

#[derive(Deserialize)]
struct ModelOfTokenizer {
    vocab: HashMap<String, u32>,
}

fn json<T: for<'a> Deserialize<'a>>(folder: &Path, name: &str) -> Option<T> {
    let path = folder.join(name);
    let text = files::read(path).ok()?;
    serde_json::from_slice(&text).ok()
}

const THERE: &str = "tokenizer_config.json";
const HERE: &str = "tokenizer.json";

/// Compares the tokens of `tokenizer.json` with those of the other files.
fn check_tokens(folder: &Path) -> Result<(), Found> {
    const HINT: &str = "load the tokenizer with transformers and save it with `save_pretrained`, or \
                        copy the files of one model";
    let Some(TokenizerFile { added_tokens, model }) = json(folder, "tokenizer.json") else {
        return Ok(());
    };
    let config: Map<String, Value> = json(folder, "tokenizer_config.json").unwrap_or_default();
    let text =
        |token: &Value| Some(token.as_str().or_else(|| token["content"].as_str())?.to_owned());
    let id = |token: &Map<String, Value>| token.get("id").and_then(Value::as_u64);
    let added: HashMap<String, &Map<String, Value>> = added_tokens
        .iter()
        .filter_map(|token| Some((text(token.get("content")?)?, token)))
        .collect();
    let only = |token: &str, id: Option<u64>, there: &str, not_there: &str| {
        let id = id.map_or_else(String::new, |id| format!(" with id {id}"));
        let what = format!("{there} has the added token `{token}`{id}, and {not_there} has not");
        Err((what, HINT))
    };
    if let Some(Value::Object(decoder)) = config.get("added_tokens_decoder") {
        for (key, token) in decoder {
            let (name, number) = (text(token).unwrap_or_default(), key.parse().ok());
            let Some(ours) = added.get(&name).filter(|ours| id(ours) == number) else {
                return only(&name, number, THERE, HERE);
            };
            let differs = |flag: &&&str| {
                token.get(**flag).is_some_and(|theirs| ours.get(**flag) != Some(theirs))
            };
            if let Some(flag) = FLAGS.iter().find(differs) {
                let [theirs, ours] = [token.get(*flag), ours.get(*flag)]
                    .map(|value| value.map_or_else(|| "missing".to_owned(), Value::to_string));
                let what = format!(
                    "`{flag}` of the added token `{name}` is {theirs} in {THERE} and {ours} in {HERE}"
                );
                return Err((what, HINT));
            }
        }
        let listed: HashSet<String> = decoder.values().filter_map(text).collect();
        let missing = added_tokens.iter().find(|token| {
            let name = token.get("content").and_then(text);
            name.is_some_and(|name| !listed.contains(&name))
        });
        if let Some(token) = missing {
            let name = token.get("content").and_then(text).unwrap_or_default();
            return only(&name, id(token), HERE, THERE);
        }
    } else if let Some(older) = json::<HashMap<String, u64>>(folder, "added_tokens.json") {
        let mut older: Vec<(String, u64)> = older.into_iter().collect();
        older.sort();
        for (name, number) in older {
            if added.get(&name).and_then(|ours| id(ours)) != Some(number) {
                return only(&name, Some(number), "added_tokens.json", HERE);
            }
        }
    }
    for (key, value) in &config {
        let tokens: Vec<&Value> = match (key.as_str(), value) {
            ("additional_special_tokens" | "extra_special_tokens", Value::Array(tokens)) => {
                tokens.iter().collect()
            }
            ("extra_special_tokens", Value::Object(tokens)) => tokens.values().collect(),
            (key, token) if key.ends_with("_token") => vec![token],
            _ => continue,
        };
        if let Some(name) = tokens.into_iter().filter_map(text).find(|of| !added.contains_key(of)) {
            let what =
                format!("`{key}` in {THERE} has `{name}`, which is no added token of {HERE}");
            return Err((what, HINT));
        }
    }
    check_generation(folder, |token| {
        model.vocab.values().any(|id| u64::from(*id) == token)
            || added_tokens.iter().any(|added| id(added) == Some(token))
    })
}

/// Compares `generation_config.json` with the ids of the tokenizer.
fn check_generation(folder: &Path, is_token: impl Fn(u64) -> bool) -> Result<(), Found> {
    let config: Map<String, Value> = json(folder, "generation_config.json").unwrap_or_default();
    for key in ["eos_token_id", "pad_token_id", "bos_token_id"] {
        let ids = match config.get(key) {
            None | Some(Value::Null) => continue,
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) => vec![id.clone()],
        };
        if let Some(id) = ids.iter().find(|id| !id.as_u64().is_some_and(&is_token)) {
            let what = format!(
                "`{key}` in generation_config.json is {id}, which is no id of tokenizer.json"
            );
            return Err((what, "correct generation_config.json, or copy both files of one model"));
        }
    }
    Ok(())
}

/// Compares the chat templates of the folder.
fn check_templates(folder: &Path) -> Result<(), Found> {
    let source = |name: &str| match name {
        "chat_template.jinja" => files::read_to_string(folder.join(name)).ok(),
        _ => Some(json::<Value>(folder, name)?["chat_template"].as_str()?.to_owned()),
    };
    let mut templates = TEMPLATES.iter().filter_map(|name| Some((*name, source(name)?)));
    let Some((first, template)) = templates.next() else { return Ok(()) };
    if let Some((other, _)) = templates.find(|(_, other)| *other != template) {
        let what = format!("the chat template of {first} differs from that of {other}");
        return Err((
            what,
            "remove one of them; the processor of transformers takes the first one",
        ));
    }
    let of_tokenizer = source("tokenizer_config.json");
    if of_tokenizer.is_some_and(|other| other != template) {
        tracing::info!(
            "the chat template of tokenizer_config.json differs from that of {first}, which is used, as in transformers"
        );
    }
    Ok(())
}
