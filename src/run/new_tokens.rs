//! Tokens that the vocabulary of a model receives: the files that change, and the new rows of the
//! embedding and of the head.
//!
//! The model folder stays as it is. New tokens have the next ids, so they first use the rows that an
//! embedding has beyond the ids of its tokenizer.

use super::adapter::AdapterError;
use super::error::{RunError, SetupError};
use super::load_model::OpenModel;
use super::model_files::{HEAD, TOKENIZER, TOKENIZER_CONFIG, files_error, json};
use crate::checkpoint::{CheckpointError, WeightFiles, adapter_weights};
use crate::config::RunConfig;
use crate::data::{GrownTokenizer, NewToken, NewTokenProblem, Vocabulary, with_new_tokens};
use crate::files;
use crate::models::read_config;
use crate::nn::ParamSpec;
use crate::optim::ParamGroups;
use crate::train::{ModelSection, NewTokenRows};
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

const ADDED: &str = "added_tokens.json";
const DECODER: &str = "added_tokens_decoder";
/// Number of elements that are read at a time.
const READ: usize = 1 << 22;

/// The vocabulary of a model with the tokens of `model.add_tokens` and `add_special_tokens`.
pub struct NewVocabulary {
    grown: GrownTokenizer,
    /// `config.json` with the number of rows.
    pub(super) config_json: Value,
    /// Number of rows of the embedding.
    pub(super) vocab_size: usize,
    /// The changed files, by name.
    pub(super) files: Vec<(&'static str, Vec<u8>)>,
}

/// The tokens of a config, in the order of their ids.
fn tokens(section: &ModelSection) -> impl Iterator<Item = NewToken> {
    let token = |special| move |content: &String| NewToken { content: content.clone(), special };
    let special = section.add_special_tokens.iter().map(token(true));
    section.add_tokens.iter().map(token(false)).chain(special)
}

impl NewVocabulary {
    /// `None` if the config names no tokens.
    pub fn of(section: &ModelSection) -> Result<Option<Self>, SetupError> {
        let tokens: Vec<NewToken> = tokens(section).collect();
        if tokens.is_empty() {
            return Ok(None);
        }
        let folder = section.path.as_path();
        let path = folder.join(TOKENIZER);
        let bytes = files::read(&path).map_err(|source| {
            files_error(folder, CheckpointError::Read { path: path.clone(), source })
        })?;
        let (config, mut config_json) = read_config(folder)
            .map_err(|source| SetupError::Config { folder: folder.to_owned(), source })?;
        let grown = with_new_tokens(&path, &bytes, &tokens)
            .map_err(|problem| refused(section, &tokens, problem))?;
        let (stored, count) = (config.text.vocab_size, grown.added.len());
        let first = grown.first_id as usize;
        if first > stored {
            return Err(SetupError::Contradiction {
                folder: folder.to_owned(),
                what: format!("{TOKENIZER} has {first} ids, but `vocab_size` is {stored}"),
                hint: "copy tokenizer.json and config.json from the same model",
            });
        }
        let used = first + count;
        let vocab_size = if count == 0 { stored } else { stored.max(used) };
        for pointer in ["/vocab_size", "/text_config/vocab_size"] {
            if let Some(size) = config_json.pointer_mut(pointer).filter(|_| vocab_size > stored) {
                *size = vocab_size.into();
            }
        }
        let files = if count == 0 { Vec::new() } else { changed(folder, &grown) };
        Ok(Some(Self { grown, config_json, vocab_size, files }))
    }

    /// What an encoder reads in place of the files of the folder.
    pub fn of_encoder(&self) -> Vocabulary<'_> {
        Vocabulary { tokenizer: &self.grown.bytes, vocab_size: self.vocab_size }
    }

    pub(super) fn log(&self) {
        let GrownTokenizer { added, present, first_id, .. } = &self.grown;
        if !added.is_empty() {
            let (tokens, rows) = (added.len(), self.vocab_size);
            tracing::info!(tokens, first_id, rows, "the vocabulary receives tokens");
        }
        if !present.is_empty() {
            let names: Vec<String> = present.iter().map(|it| format!("`{}`", it.content)).collect();
            let names = names.join(", ");
            tracing::info!(
                "the vocabulary has these tokens already, which stay as they are: {names}"
            );
        }
    }

    /// The new rows of each table of `specs`, by its index. `specs` are those of the folder.
    pub(super) fn rows(
        &self,
        (section, specs): (&ModelSection, &[ParamSpec]),
        files: &WeightFiles,
    ) -> Result<HashMap<usize, NewRows>, SetupError> {
        let GrownTokenizer { added, pieces, first_id, .. } = &self.grown;
        let tables = specs.iter().enumerate().filter(|(_, spec)| is_table(&spec.name));
        let mut rows = HashMap::new();
        for (index, spec) in tables.filter(|_| !added.is_empty()) {
            let width = spec.shape[1];
            let mean = |ranges: &mut dyn Iterator<Item = Range<usize>>| {
                let (mut sums, mut count) = (vec![0f64; width], 0usize);
                for rows in ranges {
                    let elements = rows.start * width..rows.end * width;
                    let part = files.load_part(&spec.name, elements, DType::F32, &Device::Cpu);
                    let part = part.map_err(|source| files_error(&section.path, source))?;
                    for row in part.to_vec1::<f32>()?.chunks_exact(width) {
                        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                        count += 1;
                    }
                }
                Ok::<_, SetupError>(sums.into_iter().map(move |sum| (sum / count as f64) as f32))
            };
            let mut values = Vec::with_capacity(added.len() * width);
            match section.new_token_rows {
                NewTokenRows::Pieces => {
                    for ids in pieces {
                        values.extend(mean(
                            &mut ids.iter().map(|id| *id as usize..*id as usize + 1),
                        )?);
                    }
                }
                NewTokenRows::Mean => {
                    let (all, step) = (*first_id as usize, (READ / width).max(1));
                    let parts = (0..all).step_by(step).map(|at| at..all.min(at + step));
                    let mean: Vec<f32> = mean(&mut { parts })?.collect();
                    (0..added.len()).for_each(|_| values.extend_from_slice(&mean));
                }
            }
            let (first, stored) = (*first_id as usize * width, spec.shape.clone());
            let values = Tensor::from_vec(values, added.len() * width, &Device::Cpu)?;
            rows.insert(index, NewRows { stored, first, values });
        }
        Ok(rows)
    }
}

/// The files of a model folder that have the added tokens.
fn changed(folder: &Path, grown: &GrownTokenizer) -> Vec<(&'static str, Vec<u8>)> {
    let mut files = vec![(TOKENIZER, grown.bytes.clone())];
    let pretty =
        |value: &Map<String, Value>| format!("{:#}\n", Value::Object(value.clone())).into_bytes();
    let entries = || grown.added.iter().map(|(token, entry)| (token, entry["id"].clone(), entry));
    let config: Option<Map<String, Value>> = json(folder, TOKENIZER_CONFIG);
    if let Some(mut config) = config
        && let Some(decoder) = config.get_mut(DECODER).and_then(Value::as_object_mut)
    {
        for (_, id, entry) in entries() {
            let mut entry = entry.as_object().cloned().unwrap_or_default();
            entry.shift_remove("id");
            decoder.insert(id.to_string(), entry.into());
        }
        files.push((TOKENIZER_CONFIG, pretty(&config)));
    }
    if let Some(mut ids) = json::<Map<String, Value>>(folder, ADDED) {
        ids.extend(entries().map(|(token, id, _)| (token.content.clone(), id)));
        files.push((ADDED, pretty(&ids)));
    }
    files
}

/// The error of a token that cannot be added.
fn refused(section: &ModelSection, tokens: &[NewToken], problem: NewTokenProblem) -> SetupError {
    let (token, problem, hint) = match problem {
        NewTokenProblem::Taken { token, id, as_what } => {
            let problem = format!("which the vocabulary has as {as_what} with id {id}");
            (token, problem, "remove it, or choose a text that the vocabulary does not have")
        }
        NewTokenProblem::NotFound { token, ids } => {
            let problem =
                format!("which would be encoded as {ids:?}: its parts are found before it");
            (token, problem, "choose a text without other tokens in it")
        }
        NewTokenProblem::NoPieces { token } => {
            let problem = "which the tokenizer encodes as no token".to_owned();
            (token, problem, "choose another text")
        }
        NewTokenProblem::Tokenizer(source) => {
            return SetupError::Tokenizer { folder: section.path.clone(), source };
        }
    };
    let normal = section.add_tokens.len();
    let key = match token.checked_sub(normal) {
        None => format!("model.add_tokens.{token}"),
        Some(index) => format!("model.add_special_tokens.{index}"),
    };
    SetupError::NewToken { key, token: tokens[token].content.clone(), problem, hint }
}

/// Whether a parameter has a row for each token.
fn is_table(name: &str) -> bool {
    name.ends_with(".embed_tokens.weight") || name == HEAD
}

/// The rows of new tokens in a table.
pub(super) struct NewRows {
    /// Shape of the table in the folder.
    pub(super) stored: Vec<usize>,
    /// The first new element of the flat table.
    first: usize,
    values: Tensor, // flat, f32, on the CPU
}

impl NewRows {
    /// Elements of the flat table. `stored` reads elements of the folder's.
    pub(super) fn part(
        &self,
        elements: &Range<usize>,
        (dtype, device): (DType, &Device),
        stored: impl Fn(Range<usize>) -> Result<Tensor, SetupError>,
    ) -> Result<Tensor, SetupError> {
        let end = self.first + self.values.elem_count();
        let within = |from: usize, to: usize| elements.start.max(from)..elements.end.min(to);
        let mut parts = Vec::new();
        let before = within(0, self.first);
        if !before.is_empty() {
            parts.push(stored(before)?);
        }
        let new = within(self.first, end);
        if !new.is_empty() {
            let values = self.values.narrow(0, new.start - self.first, new.len())?.copy()?;
            parts.push(values.to_dtype(dtype)?.to_device(device)?);
        }
        let after = within(end, usize::MAX);
        if !after.is_empty() {
            parts.push(stored(after)?);
        }
        if parts.is_empty() {
            parts.push(stored(0..0)?);
        }
        if parts.len() == 1 { Ok(parts.remove(0)) } else { Ok(Tensor::cat(&parts, 0)?) }
    }
}

/// Fails if a table with new rows is not trained: they would keep their first values.
pub(super) fn check_rows(
    config: &RunConfig,
    open: &OpenModel,
    groups: &ParamGroups,
) -> Result<(), SetupError> {
    if open.vocabulary.as_ref().is_none_or(|of| of.grown.added.is_empty()) {
        return Ok(());
    }
    let specs = open.specs.iter().zip(groups.iter());
    let tables: Vec<_> = specs.filter(|(spec, _)| is_table(&spec.name)).collect();
    let Some((spec, _)) = tables.iter().find(|(_, group)| group.frozen) else { return Ok(()) };
    let names: Vec<&str> = tables.iter().map(|(spec, _)| spec.name.as_str()).collect();
    let (key, hint) = match config.adapter {
        Some(_) => {
            ("adapter.train_also", format!("set `adapter.train_also: [{}]`", names.join(", ")))
        }
        None => ("model.freeze", format!("do not freeze {}", names.join(" and "))),
    };
    Err(SetupError::FrozenRows { key, name: spec.name.clone(), hint })
}

/// Fails if the adapter in `adapter`, which training starts from, has other tokens than the model of
/// `section`: its rows would be those of other tokens.
pub(super) fn check_start(
    section: &ModelSection,
    open: &OpenModel,
    adapter: &Path,
) -> Result<(), RunError> {
    let adds = tokens(&with_tokens_of(section, adapter)).next().is_some();
    // without a tokenizer, the rows of its embedding may be those of any tokens
    let lacks_copy = !adapter.join(TOKENIZER).exists() && has_embedding(adapter);
    if adds && (lacks_copy || open.differs_from_copy(adapter) == Some(TOKENIZER)) {
        let folder = adapter.to_owned();
        return Err(SetupError::from(AdapterError::Tokens { folder }).into());
    }
    Ok(())
}

/// Whether the adapter in `adapter` has an embedding. Errors of its files are reported when they are
/// read.
fn has_embedding(adapter: &Path) -> bool {
    let is_there = |files: WeightFiles| files.names().any(|name| name.contains("embed_tokens"));
    adapter_weights(adapter).is_ok_and(is_there)
}

/// The settings of a model with the tokens that the adapter in `adapter` was trained with, if they
/// name none themselves: those that its copy of the tokenizer has and that of the model has not.
pub(crate) fn with_tokens_of(section: &ModelSection, adapter: &Path) -> ModelSection {
    let mut section = section.clone();
    if tokens(&section).next().is_some() || !has_embedding(adapter) {
        return section;
    }
    let added = |folder: &Path| {
        let file: Option<Map<String, Value>> = json(folder, TOKENIZER);
        let list = file.and_then(|mut file| file.remove("added_tokens"));
        let list: Vec<Value> = list.and_then(|list| list.as_array().cloned()).unwrap_or_default();
        let token = |entry: Value| {
            let content = entry["content"].as_str()?.to_owned();
            Some(NewToken { content, special: entry["special"] == json!(true) })
        };
        list.into_iter().filter_map(token).collect::<Vec<_>>()
    };
    let of_model: HashSet<String> =
        added(&section.path).into_iter().map(|token| token.content).collect();
    for NewToken { content, special } in added(adapter) {
        if of_model.contains(&content) {
            continue;
        }
        let list = if special { &mut section.add_special_tokens } else { &mut section.add_tokens };
        list.push(content);
    }
    section
}
