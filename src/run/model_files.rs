//! The files of a model folder: the weights under the names of the model's parameters, and files
//! that contradict each other. Every command that reads a model folder compares them here first, so
//! that all commands give the same answer. `docs/model-folders.md` lists what is taken, as
//! transformers 5.23 does, and what is refused.

use super::error::SetupError;
use crate::checkpoint::{CheckpointError, WeightFiles};
use crate::files;
use crate::models::{ModelConfig, ModelConfigError, read_config};
use crate::nn::{ParamSpec, TensorNames};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

pub(super) fn files_error(folder: &Path, source: CheckpointError) -> SetupError {
    SetupError::Files { folder: folder.to_owned(), source: Box::new(source) }
}

/// Opens the weight files of a model folder under the names of the model's parameters.
pub(super) fn named_files(
    folder: &Path,
    names: TensorNames,
) -> Result<WeightFiles, CheckpointError> {
    WeightFiles::open(folder).and_then(|of| of.renamed(|name| names.of_file(name)))
}

/// Name and shape of each tensor that files have for a parameter.
fn in_files(spec: &ParamSpec) -> Vec<(String, Vec<usize>)> {
    let pieces = spec.pieces();
    if pieces.is_empty() { vec![(spec.name.clone(), spec.shape.clone())] } else { pieces }
}

/// Joins the pieces that the files have in place of a parameter.
pub(super) fn with_pieces(files: WeightFiles, specs: &[ParamSpec]) -> WeightFiles {
    specs.iter().fold(files, |files, spec| match spec.pieces() {
        pieces if pieces.is_empty() => files,
        pieces => files.joined(&spec.name, &spec.shape, &pieces),
    })
}

/// Opens the weight files and compares their names and shapes with the config. Returns the config
/// of a model as the files have it.
pub(super) fn open_files(
    folder: &Path,
    config: &ModelConfig,
) -> Result<(ModelConfig, WeightFiles), SetupError> {
    let files = named_files(folder, config.tensor_names);
    let files = files.map_err(|source| files_error(folder, source))?;
    let config = config.of_files(&|name| files.shape(name));
    let specs = config.param_specs();
    let needed: Vec<(String, Vec<usize>)> = specs.iter().flat_map(in_files).collect();
    let missing = || needed.iter().filter(|(name, _)| files.shape(name).is_none());
    if let Some((first, _)) = missing().next() {
        return Err(SetupError::MissingTensors {
            folder: folder.to_owned(),
            count: missing().count(),
            total: needed.len(),
            first: first.clone(),
            instead: instead(files.names(), &needed),
        });
    }
    for (name, expected) in needed {
        let found = files.shape(&name).unwrap_or_default();
        if found != expected {
            return Err(SetupError::Shape { folder: folder.to_owned(), name, found, expected });
        }
        if files.dtype(&name).is_none() {
            // Reading no element of it returns the error.
            let read = files.load_part(&name, 0..0, DType::F32, &Device::Cpu);
            read.map_err(|source| files_error(folder, source))?;
        }
    }
    let files = with_pieces(files, &specs);
    if let Some(name) = ignored(&files, &specs) {
        let what = format!(
            "the weight files have `{name}`, but config.json describes a layer without this tensor"
        );
        let hint = "copy config.json and the weight files of one model";
        return Err(SetupError::Contradiction { folder: folder.to_owned(), what, hint });
    }
    Ok((config, files))
}

/// The first weight or bias of the files that the model does not use although it has other tensors of
/// the same part of a layer: a bias, or a norm of queries or keys, that `config.json` does not have.
fn ignored(files: &WeightFiles, specs: &[ParamSpec]) -> Option<String> {
    let part = |name: &str| Some(name.rsplit_once('.')?.0.rsplit_once('.')?.0.to_owned());
    let known: HashSet<String> = specs.iter().filter_map(|spec| part(&spec.name)).collect();
    let is_of_layer = |name: &&str| {
        let kind = name.rsplit_once('.').map(|(_, kind)| kind);
        matches!(kind, Some("weight" | "bias"))
            && part(name).is_some_and(|part| known.contains(&part))
    };
    unused(files, specs).into_iter().find(is_of_layer).map(str::to_owned)
}

/// Names of the tensors that the model does not use, such as those of multi-token prediction. Some
/// folders contain a tied head, which equals the embedding and is not listed.
pub(super) fn unused<'a>(files: &'a WeightFiles, specs: &[ParamSpec]) -> Vec<&'a str> {
    let known: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    let names = files.names().filter(|name| *name != HEAD);
    names.filter(|name| !known.contains(name)).collect()
}

/// Whether the head of a model with these parameters is its embedding.
pub(super) fn is_tied(specs: &[ParamSpec]) -> bool {
    specs.iter().all(|spec| spec.name != HEAD)
}

/// What weight files have in place of the tensors of a model.
fn instead<'a>(
    names: impl Iterator<Item = &'a str>,
    needed: &[(String, Vec<usize>)],
) -> Option<String> {
    let known: HashSet<&str> = needed.iter().map(|(name, _)| name.as_str()).collect();
    let unused: Vec<&str> = names.filter(|name| !known.contains(name)).collect();
    let first = unused.first()?;
    let all = |prefix: &str| unused.iter().all(|name| name.starts_with(prefix));
    let meaning = if all("base_model.model.") {
        ": this is a PEFT adapter; set `model.path` to its base, and `adapter.start_from` to this folder"
    } else if all("module.") {
        ": a wrapper for several GPUs has saved them with the prefix `module.`; save the model without it"
    } else if all("_orig_mod.") {
        ": `torch.compile` has saved them with the prefix `_orig_mod.`; save the model without it"
    } else {
        ""
    };
    Some(format!(
        "; the files have {} other tensors, the first is `{first}`{meaning}",
        unused.len()
    ))
}

/// Name of a head of its own.
pub(super) const HEAD: &str = "lm_head.weight";
/// Number of elements that are compared at a time.
const COMPARED: usize = 1 << 22;
/// Keys of an added token besides its text.
const FLAGS: [&str; 5] = ["lstrip", "rstrip", "single_word", "normalized", "special"];
/// The files with a chat template; the processor of transformers takes the first one.
const TEMPLATES: [&str; 3] = ["processor_config.json", "chat_template.json", "chat_template.jinja"];

/// Keys of a decoder that files may have twice.
const SIZES: [&str; 27] = [
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
    "full_attention_interval",
    "partial_rotary_factor",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "tie_word_embeddings",
];
/// Keys of `config.json` with the id of a token, and the token. Families differ in that of images,
/// and the tokenizer of one may have those of others too.
const TOKEN_IDS: [(&str, &[&str]); 4] = [
    ("image_token_id", &["<IMG_CONTEXT>", "<|image_pad|>"]),
    ("video_token_id", &["<|video_pad|>"]),
    ("vision_start_token_id", &["<|vision_start|>"]),
    ("vision_end_token_id", &["<|vision_end|>"]),
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
                check_adapter(folder).map_err(fault)?;
                // the weight files are opened again for their errors
                if let Ok(files) = named_files(folder, config.tensor_names) {
                    check_quantization(&json, files.is_quantized()).map_err(fault)?;
                    check_head(folder, &config, &files)?;
                }
            }
            Err(ModelConfigError::Read { .. } | ModelConfigError::Json { .. }) => {}
            Err(source) => return Err(SetupError::Config { folder: folder.to_owned(), source }),
        }
    }
    let tokens = check_tokens(folder).and_then(|()| check_templates(folder));
    tokens.and_then(|()| check_processors(folder)).map_err(fault)
}

/// A contradiction and the fix.
type Contradiction = (String, &'static str);

/// Fails if `config.json` and its `text_config` have different sizes. Files that transformers 4
/// saved have both.
fn check_config(json: &Value) -> Result<(), Contradiction> {
    let text = &json["text_config"];
    for key in SIZES {
        let mut of_sections = [None; 2];
        for (section, found) in [json, text].into_iter().zip(&mut of_sections) {
            let places = [section, &section["rope_parameters"], &section["rope_scaling"]];
            let mut given = places.map(|place| &place[key]).into_iter().filter(|it| !it.is_null());
            *found = given.next();
            if let (Some(first), Some(other)) =
                (*found, given.find(|it| !is_same(it, found.unwrap_or(it))))
            {
                let what = format!(
                    "`{key}` in config.json is {first}, but {other} in its rotary settings"
                );
                return Err((what, "remove the one that is wrong"));
            }
        }
        let [Some(above), Some(inside)] = of_sections else { continue };
        if is_same(above, inside) {
            continue;
        }
        let what = format!("`{key}` in config.json is {above}, but {inside} in its `text_config`");
        // the shapes of the weights are compared with the number of rows in `text_config`
        if key == "tie_word_embeddings" || key == "vocab_size" {
            tracing::warn!("{what}; docs/model-folders.md says which one is used");
            continue;
        }
        return Err((what, "transformers uses that of `text_config`: remove the other one"));
    }
    let decoder = if text.is_object() { text } else { json };
    if let (Some(every), Some(kinds)) =
        (decoder["full_attention_interval"].as_u64(), decoder["layer_types"].as_array())
    {
        let is_full = |layer: usize| (layer as u64 + 1).is_multiple_of(every);
        let differs =
            |(layer, kind): (usize, &Value)| (*kind == "full_attention") != is_full(layer);
        if kinds.iter().enumerate().any(differs) {
            tracing::info!(
                "`layer_types` in config.json differs from `full_attention_interval: {every}` and is \
                 used, as in transformers"
            );
        }
    }
    Ok(())
}

fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b))
        }
        _ => a == b || (a.is_number() && a.as_f64() == b.as_f64()),
    }
}

/// Fails if the folder of a model has an adapter too: transformers adds it to the model.
fn check_adapter(folder: &Path) -> Result<(), Contradiction> {
    let name = "adapter_config.json";
    if !folder.join(name).is_file() {
        return Ok(());
    }
    let what = format!("it has a model and {name}: transformers adds the adapter to the model");
    Err((
        what,
        "move the files of the adapter to another folder, or merge it with `trainer export`",
    ))
}

/// Fails if `quantization_config` does not describe the weights. `in_nf4`: whether they have
/// matrices in NF4.
fn check_quantization(json: &Value, in_nf4: bool) -> Result<(), Contradiction> {
    const NOT_NF4: &str = "remove the section if the weights are not quantised; of quantised models, \
                           only those of bitsandbytes in NF4 are read";
    const NF4: &str = "copy config.json and the weight files of one model";
    let sections = [json, &json["text_config"], &json["vision_config"]];
    let section =
        sections.map(|of| &of["quantization_config"]).into_iter().find(|of| of.is_object());
    let Some(section) = section else {
        let what = "the weights are in NF4, and config.json has no `quantization_config`";
        return if in_nf4 { Err((what.to_owned(), NF4)) } else { Ok(()) };
    };
    let text = |key: &str| section[key].as_str().unwrap_or("missing");
    let [method, kind] = ["quant_method", "bnb_4bit_quant_type"].map(text);
    let is_nf4 = method == "bitsandbytes" && kind == "nf4" && section["load_in_4bit"] == true;
    match (is_nf4, in_nf4) {
        (true, true) => Ok(()),
        (_, true) => {
            let what = format!(
                "the weights are in NF4, and `quantization_config` in config.json has \
                 `quant_method` {method}, `load_in_4bit` {}, `bnb_4bit_quant_type` {kind}",
                section["load_in_4bit"]
            );
            Err((what, NF4))
        }
        (_, false) => {
            let what = format!(
                "config.json has `quantization_config` (`quant_method`: {method}), and the weights \
                 are not in NF4"
            );
            Err((what, NOT_NF4))
        }
    }
}

/// Fails if the files have a head of their own although the config ties it to the embedding.
fn check_head(folder: &Path, config: &ModelConfig, files: &WeightFiles) -> Result<(), SetupError> {
    if !config.text.tie_word_embeddings {
        return Ok(());
    }
    let specs = config.param_specs();
    let embedding = specs.iter().find(|spec| spec.name.ends_with("embed_tokens.weight"));
    let Some(embedding) = embedding.filter(|spec| files.shape(&spec.name).is_some()) else {
        return Ok(());
    };
    let names = [HEAD, &embedding.name];
    if files.shape(HEAD).is_none()
        || same_values(files, names).map_err(|error| files_error(folder, error))?
    {
        return Ok(());
    }
    let what = format!(
        "`{HEAD}` differs from the embedding `{}`, but config.json has `tie_word_embeddings: true`",
        config.tensor_names.in_file(&embedding.name)
    );
    let hint = "to use the head, as transformers does, write `\"tie_word_embeddings\": false` wherever \
                config.json has the key; to share the embedding, remove the head from the weight files";
    Err(SetupError::Contradiction { folder: folder.to_owned(), what, hint })
}

/// Whether two tensors have the same shape and values.
pub(super) fn same_values(files: &WeightFiles, names: [&str; 2]) -> Result<bool, CheckpointError> {
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

/// A JSON file of a folder; `None` if it cannot be read.
pub(super) fn json<T: for<'a> Deserialize<'a>>(folder: &Path, name: &str) -> Option<T> {
    let path = folder.join(name);
    let text = files::read(path).ok()?;
    serde_json::from_slice(&text).ok()
}

pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";

const TOKENIZER_HINT: &str = "load the tokenizer with transformers and save it with \
                              `save_pretrained`, or copy the files of one model";

/// Compares the tokens of `tokenizer.json` with those of the other files.
fn check_tokens(folder: &Path) -> Result<(), Contradiction> {
    let Some(TokenizerFile { added_tokens, model }) = json(folder, "tokenizer.json") else {
        return Ok(());
    };
    let config: Map<String, Value> = json(folder, "tokenizer_config.json").unwrap_or_default();
    let id = |token: &Map<String, Value>| token.get("id").and_then(Value::as_u64);
    let added: HashMap<String, &Map<String, Value>> = added_tokens
        .iter()
        .filter_map(|token| Some((text(token.get("content")?)?, token)))
        .collect();
    let only = |token: &str, id: Option<u64>, there: &str, not_there: &str| {
        let id = id.map_or_else(String::new, |id| format!(" with id {id}"));
        let what = format!("{there} has the added token `{token}`{id}, and {not_there} has not");
        Err((what, TOKENIZER_HINT))
    };
    if let Some(Value::Object(decoder)) = config.get("added_tokens_decoder") {
        for (key, token) in decoder {
            let (name, number) = (text(token).unwrap_or_default(), key.parse().ok());
            let Some(ours) = added.get(&name).filter(|ours| id(ours) == number) else {
                return only(&name, number, TOKENIZER_CONFIG, TOKENIZER);
            };
            let differs = |flag: &&&str| {
                token.get(**flag).is_some_and(|theirs| ours.get(**flag) != Some(theirs))
            };
            if let Some(flag) = FLAGS.iter().find(differs) {
                let [theirs, ours] = [token.get(*flag), ours.get(*flag)]
                    .map(|value| value.map_or_else(|| "missing".to_owned(), Value::to_string));
                let what = format!(
                    "`{flag}` of the added token `{name}` is {theirs} in {TOKENIZER_CONFIG} and {ours} in {TOKENIZER}"
                );
                return Err((what, TOKENIZER_HINT));
            }
        }
        let listed: HashSet<String> = decoder.values().filter_map(text).collect();
        let missing = added_tokens.iter().find(|token| {
            let name = token.get("content").and_then(text);
            name.is_some_and(|name| !listed.contains(&name))
        });
        if let Some(token) = missing {
            let name = token.get("content").and_then(text).unwrap_or_default();
            return only(&name, id(token), TOKENIZER, TOKENIZER_CONFIG);
        }
    } else if let Some(older) = json::<HashMap<String, u64>>(folder, "added_tokens.json") {
        let mut older: Vec<(String, u64)> = older.into_iter().collect();
        older.sort();
        for (name, number) in older {
            if added.get(&name).and_then(|ours| id(ours)) != Some(number) {
                return only(&name, Some(number), "added_tokens.json", TOKENIZER);
            }
        }
    }
    for (key, value) in &config {
        let tokens: Vec<&Value> = match (key.as_str(), value) {
            ("additional_special_tokens" | "extra_special_tokens", Value::Array(tokens)) => {
                tokens.iter().collect()
            }
            ("extra_special_tokens" | "model_specific_special_tokens", Value::Object(tokens)) => {
                tokens.values().collect()
            }
            (key, token) if key.ends_with("_token") => vec![token],
            _ => continue,
        };
        if let Some(name) = tokens.into_iter().filter_map(text).find(|of| !added.contains_key(of)) {
            let what = format!(
                "`{key}` in {TOKENIZER_CONFIG} has `{name}`, which is no added token of {TOKENIZER}"
            );
            return Err((what, TOKENIZER_HINT));
        }
    }
    // as in transformers, which reads the older file only without this list
    if !config.contains_key("added_tokens_decoder") {
        check_special_tokens(folder, &config)?;
    }
    check_token_ids(folder, |name| id(added.get(name)?))?;
    check_generation(folder, |token| {
        model.vocab.values().any(|id| u64::from(*id) == token)
            || added_tokens.iter().any(|added| id(added) == Some(token))
    })
}

/// The text of a token, which may be an object with its flags.
fn text(token: &Value) -> Option<String> {
    Some(token.as_str().or_else(|| token["content"].as_str())?.to_owned())
}

/// Compares the special tokens of `special_tokens_map.json`, which older versions wrote, with those
/// of `tokenizer_config.json`.
fn check_special_tokens(folder: &Path, config: &Map<String, Value>) -> Result<(), Contradiction> {
    let older: Map<String, Value> = json(folder, "special_tokens_map.json").unwrap_or_default();
    for (key, token) in older.iter().filter(|(key, _)| key.ends_with("_token")) {
        let [theirs, ours] = [Some(token), config.get(key)].map(|token| token.and_then(text));
        if let (Some(theirs), Some(ours)) = (theirs, ours)
            && theirs != ours
        {
            let what = format!(
                "`{key}` is `{theirs}` in special_tokens_map.json and `{ours}` in {TOKENIZER_CONFIG}"
            );
            return Err((what, "remove special_tokens_map.json, or correct it"));
        }
    }
    Ok(())
}

/// Compares the ids of image and video tokens in `config.json` with those of the tokenizer.
fn check_token_ids(
    folder: &Path,
    id_of: impl Fn(&str) -> Option<u64>,
) -> Result<(), Contradiction> {
    let model_config: Value = json(folder, "config.json").unwrap_or_default();
    for (key, names) in TOKEN_IDS {
        let ids: Vec<(&str, u64)> =
            names.iter().filter_map(|name| Some((*name, id_of(name)?))).collect();
        let Some(&(name, ours)) = ids.first() else { continue };
        let is_known = |id: &u64| ids.iter().any(|(_, ours)| ours == id);
        if let Some(theirs) = model_config[key].as_u64().filter(|theirs| !is_known(theirs)) {
            let what = format!(
                "`{key}` in config.json is {theirs}, but `{name}` has id {ours} in {TOKENIZER}"
            );
            return Err((what, "copy config.json and the tokenizer of one model"));
        }
    }
    Ok(())
}

/// Compares `generation_config.json` with the ids of the tokenizer.
fn check_generation(folder: &Path, is_token: impl Fn(u64) -> bool) -> Result<(), Contradiction> {
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

const COMBINED: &str = "processor_config.json";
/// Its sections, and the files that older versions have.
const PROCESSORS: [[&str; 2]; 2] = [
    ["image_processor", "preprocessor_config.json"],
    ["video_processor", "video_preprocessor_config.json"],
];

/// Compares the sections of `processor_config.json`, which transformers takes, with the files that
/// older versions have.
fn check_processors(folder: &Path) -> Result<(), Contradiction> {
    let combined: Map<String, Value> = json(folder, COMBINED).unwrap_or_default();
    for [section, file] in PROCESSORS {
        let older: Option<Map<String, Value>> = json(folder, file);
        let (Some(Value::Object(ours)), Some(older)) = (combined.get(section), older) else {
            continue;
        };
        let older = of_processor(&older);
        for (key, value) in of_processor(ours) {
            if let Some(other) = older.get(key).filter(|other| !is_same(value, other)) {
                let what = format!(
                    "`{key}` of `{section}` in {COMBINED} is {value}, but {other} in {file}"
                );
                return Err((
                    what,
                    "transformers uses processor_config.json: remove the other file",
                ));
            }
        }
    }
    Ok(())
}

/// The settings of a processor, with the limits of pixels under one name each.
fn of_processor(file: &Map<String, Value>) -> BTreeMap<&str, &Value> {
    let size = file.get("size").and_then(Value::as_object);
    let limits = size.into_iter().flatten().chain(file);
    let named = limits.map(|(key, value)| match key.as_str() {
        "shortest_edge" => ("min_pixels", value),
        "longest_edge" => ("max_pixels", value),
        key => (key, value),
    });
    // names of classes differ from version to version, and the form of tensors has no effect here
    let is_setting = |key: &str| {
        let is_form = ["size", "data_format", "input_data_format", "return_tensors", "device"];
        !(is_form.contains(&key) || key.ends_with("_type") || key.ends_with("_class"))
    };
    named.filter(|(key, value)| is_setting(key) && !value.is_null()).collect()
}

/// The chat template in a file of the folder.
fn template_in(folder: &Path, name: &str) -> Option<String> {
    if name == "chat_template.jinja" {
        return files::read_to_string(folder.join(name)).ok();
    }
    let file = json::<Value>(folder, name)?;
    let value = &file["chat_template"];
    let text = value.as_str().map(str::to_owned);
    text.or_else(|| (!value.is_null()).then(|| value.to_string())) // a list of named templates
}

/// What the folder of an adapter has a copy of and the folder of its model has differently: a part
/// of the tokenizer, the template or the processors that is used. `tokenizer` is the
/// `tokenizer.json` of a model that has received tokens.
pub(crate) fn differs_from_copy(
    adapter: &Path,
    model: &Path,
    tokenizer: Option<&[u8]>,
) -> Option<&'static str> {
    let file = |folder: &Path, name: &str| json::<Map<String, Value>>(folder, name);
    let copy = files::read(adapter.join(TOKENIZER)).ok()?; // else the folder has no copies
    let used = tokenizer.map(<[u8]>::to_vec).or_else(|| files::read(model.join(TOKENIZER)).ok());
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Map<String, Value>>(bytes).ok();
    // published tokenizers take a second to parse
    let has_tokenizer = used.is_some_and(|used| used == copy || parsed(&used) == parsed(&copy));
    let tokens = |folder: &Path| -> Map<String, Value> {
        let config = file(folder, TOKENIZER_CONFIG).unwrap_or_default();
        let is_token = |key: &str| key.ends_with("_token") || key.ends_with("_tokens");
        config.into_iter().filter(|(key, _)| is_token(key)).collect()
    };
    let template = |folder: &Path| {
        let names = TEMPLATES.into_iter().chain([TOKENIZER_CONFIG]);
        names.into_iter().find_map(|name| template_in(folder, name))
    };
    let processor = |folder: &Path, [section, name]: [&str; 2]| {
        let mut combined = file(folder, COMBINED).unwrap_or_default();
        let section = combined.remove(section).and_then(|of| of.as_object().cloned());
        section.or_else(|| file(folder, name)).unwrap_or_default()
    };
    let is_same_processor = |names| {
        let [copy, of_model] = [adapter, model].map(|folder| processor(folder, names));
        let [copy, of_model] = [&copy, &of_model].map(of_processor);
        copy.len() == of_model.len()
            && copy.iter().all(|(key, a)| of_model.get(key).is_some_and(|b| is_same(a, b)))
    };
    let differs = [
        (!has_tokenizer, TOKENIZER),
        (tokens(adapter) != tokens(model), TOKENIZER_CONFIG),
        (template(adapter) != template(model), "chat template"),
        (!is_same_processor(PROCESSORS[0]), "processor of images"),
        (!is_same_processor(PROCESSORS[1]), "processor of videos"),
    ];
    differs.into_iter().find(|(differs, _)| *differs).map(|(_, what)| what)
}

fn check_templates(folder: &Path) -> Result<(), Contradiction> {
    let source = |name: &str| template_in(folder, name);
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
