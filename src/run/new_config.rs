//! Writes the config of a new run from a model folder and data files, or from the config of another
//! trainer.

use super::check::memory_lack;
use super::error::RunError;
use super::inputs::{DataList, SetupObserver, download, encoder, open_data, open_for_run};
use crate::checkpoint::WeightFiles;
use crate::config::{RunConfig, explained, load_text};
use crate::convert::{self, ConvertError, Line, Trainer};
use crate::data::{DataSet, DatasetInfo, DatasetRows, RowReader, SampleIndex};
use crate::nn::Inputs;
use crate::train::{AdapterConfig, Precision, RecomputeChoice, Weights};
use candle_core::Device;
use rayon::prelude::*;
use serde_json::{Value, json};
use settings::Setting;
use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};

/// Maximum number of rows of a data set that are measured.
const MAX_MEASURED: usize = 20_000;
/// Number of samples of a pack and of a step to aim at.
const SAMPLES: usize = 16;
/// Maximum number of tokens of a pack, unless a row is longer.
const PACK: usize = 8192;
const GIB: f64 = 1_073_741_824.0;

#[derive(Debug, Clone)]
pub struct NewRun {
    /// Model folder, or an id of the hub.
    pub model: PathBuf,
    pub train: Vec<PathBuf>,
    pub eval: Vec<PathBuf>,
    /// Folder of the images that the rows name.
    pub image_root: Option<PathBuf>,
    pub output_dir: PathBuf,
    /// Name of the config in its comments.
    pub name: String,
}

/// Returns the config as YAML with comments. It reads the model folder and measures rows, and
/// writes nothing.
pub fn new_config(new: &NewRun, observer: &dyn SetupObserver) -> Result<String, RunError> {
    let mut config = new.config();
    if new.model.is_dir() && WeightFiles::open(&new.model).is_err() {
        config.model.weights = Weights::Random;
    }
    // The config has the paths as given.
    let local = download(&config, observer)?;
    config.model.path.clone_from(&local.model.path);
    config.data = local.data;
    let encoder = encoder(&config)?;
    let sets = |list| -> Result<Vec<DatasetLengths>, RunError> {
        let rows = open_data(&config, list, &encoder, observer)?;
        (0..rows.sets().len())
            .map(|index| DatasetLengths::of(&rows, index).check(&config))
            .collect()
    };
    let (train, eval) = (sets(DataList::Train)?, sets(DataList::Eval)?);
    let choices = Choices::of(&mut config, &train)?;
    Ok(new.yaml(&config, &choices, [&train, &eval]))
}

struct DatasetLengths {
    form: String,
    rows: usize,
    /// Number of rows that were measured, those that cannot be used included.
    num_read: usize,
    /// Tokens of the measured rows that can be used.
    tokens: usize,
    usable: usize,
    longest: usize,
    has_images: bool,
    /// Why the first unusable row cannot be used.
    rejected: Option<String>,
    file: String,
}

impl DatasetLengths {
    /// Measures rows at equal distances.
    fn of(rows: &DatasetRows, index: usize) -> Self {
        let set = &rows.sets()[index];
        let form = match set {
            DataSet::Chats(chats) => chats.file().form().to_string(),
            DataSet::Corpus(_) => "plain text".to_owned(),
        };
        let measured = set.len().min(MAX_MEASURED);
        let length = |number: usize| {
            let row = (number * set.len() / measured) as u32;
            rows.length(SampleIndex { dataset: index as u32, row })
        };
        let lengths: Vec<_> = (0..measured).into_par_iter().map(length).collect();
        let usable = || lengths.iter().filter_map(|length| length.as_ref().ok());
        Self {
            file: set.path().display().to_string(),
            form,
            rows: set.len(),
            num_read: measured,
            tokens: usable().map(|length| length.tokens).sum(),
            usable: usable().count(),
            longest: usable().map(|length| length.tokens).max().unwrap_or(0),
            has_images: usable().any(|length| length.pixel_bytes > 0),
            rejected: lengths.iter().find_map(|length| Some(length.as_ref().err()?.to_string())),
        }
    }

    /// Refuses rows of which a run would reject too many: settings that follow from the others would
    /// be wrong.
    fn check(self, config: &RunConfig) -> Result<Self, RunError> {
        let Self { file, num_read: measured, usable, rejected, .. } = &self;
        let unusable = measured - usable;
        match rejected {
            Some(first) if unusable as f64 > config.data.max_rejected * *measured as f64 => {
                Err(RunError::UnusableRows {
                    file: file.clone(),
                    unusable,
                    measured: *measured,
                    first: first.clone(),
                })
            }
            _ => Ok(self),
        }
    }

    fn mean(&self) -> usize {
        self.tokens.div_ceil(self.usable.max(1))
    }

    fn comment(&self) -> String {
        let Self { form, rows, num_read: measured, usable, longest, .. } = self;
        let mean = self.mean();
        let part =
            if measured < rows { format!(", {measured} of them measured") } else { String::new() };
        let unusable = measured - usable;
        let unusable = if unusable > 0 { format!(", {unusable} unusable") } else { String::new() };
        format!("{form}; {rows} rows{part}{unusable}; mean {mean} tokens, longest {longest}")
    }
}

/// The values that depend on the model and the rows, with the reasons.
struct Choices {
    packing_length: usize,
    accumulation: usize,
    epochs: usize,
    lr: &'static str,
    /// Steps between two checkpoints or evaluations.
    every: usize,
    /// Steps between two log lines.
    log_every: usize,
    /// Components without a gradient, because no row has an image.
    unused: BTreeSet<&'static str>,
    /// GiB that training all weights needs and that are free, if an adapter is trained instead.
    adapter: Option<[f64; 2]>,
}

impl Choices {
    fn of(config: &mut RunConfig, train: &[DatasetLengths]) -> Result<Self, RunError> {
        let sum = |of: fn(&DatasetLengths) -> usize| train.iter().map(of).sum::<usize>();
        let mean = sum(|set| set.tokens).div_ceil(sum(|set| set.usable).max(1)).max(1);
        let longest = train.iter().map(|set| set.longest).max().unwrap_or(0);
        let unit = if mean < 256 { 64 } else { 256 };
        let packing_length = longest.max((SAMPLES * mean).min(PACK)).next_multiple_of(unit);
        let per_pack = (packing_length / mean).max(1);
        let accumulation = (SAMPLES / per_pack).clamp(1, SAMPLES);
        let rows = sum(|set| set.rows);
        let is_random = config.model.weights == Weights::Random;
        let epochs = if is_random { 10 } else { (2000 / rows.max(1)).clamp(1, 3) };
        let steps = (epochs * rows).div_ceil(per_pack * accumulation);
        let unused = if train.iter().any(|set| set.has_images) {
            BTreeSet::new()
        } else {
            let open = open_for_run(&config.model, config.seed, &Device::Cpu)?;
            let of_media = open.specs.iter().filter(|spec| spec.component.inputs == Inputs::Media);
            of_media.map(|spec| spec.component.name).collect()
        };
        config.model.freeze = unused.iter().map(|&name| name.to_owned()).collect();
        config.model.precision = if is_random { Precision::F32 } else { Precision::Bf16 };
        config.data.packing_length =
            NonZeroU32::new(packing_length as u32).unwrap_or(NonZeroU32::MIN);
        let adapter = choose_memory(config)?;
        let lr = match (is_random, adapter) {
            (true, _) => "1.0e-3",
            (false, Some(_)) => "1.0e-4",
            (false, None) => "1.0e-5",
        };
        // Of a short run, one checkpoint and one evaluation at its end, and a line for each step.
        let every = if steps > 1000 { 200 } else { steps.div_ceil(5).max(10) };
        let log_every = (steps / 20).clamp(1, 10);
        Ok(Self { packing_length, accumulation, epochs, lr, every, log_every, unused, adapter })
    }
}

/// Chooses recomputation, and an adapter if even then the memory does not suffice. Returns the GiB
/// that training all weights needs and that are free, if it chose an adapter.
fn choose_memory(config: &mut RunConfig) -> Result<Option<[f64; 2]>, RunError> {
    if memory_lack(config)?.is_none() {
        return Ok(None);
    }
    config.model.recompute = RecomputeChoice::Full;
    let Some(lack) = memory_lack(config)? else { return Ok(None) };
    if config.model.weights == Weights::Random {
        return Ok(None); // random weights need training
    }
    config.model.freeze = Vec::new();
    config.adapter = Some(AdapterConfig::default());
    Ok(Some(lack.map(|bytes| bytes / GIB)))
}

impl NewRun {
    fn config(&self) -> RunConfig {
        let sets = |paths: &[PathBuf]| -> Vec<Value> {
            let set = |path: &PathBuf| {
                let mut set = json!({ "path": path.to_string_lossy() });
                if let Some(root) = &self.image_root {
                    set["image_root"] = root.to_string_lossy().into();
                }
                set
            };
            paths.iter().map(set).collect()
        };
        let config = json!({
            "output_dir": self.output_dir.to_string_lossy(),
            "model": { "path": self.model.to_string_lossy() },
            "data": { "train": sets(&self.train), "eval": sets(&self.eval) },
        });
        serde_json::from_value(config).expect("all keys have valid values")
    }

    fn yaml(
        &self,
        config: &RunConfig,
        choices: &Choices,
        [train, eval]: [&[DatasetLengths]; 2],
    ) -> String {
        let [need, free] = choices.adapter.unwrap_or_default().map(|gib| format!("{gib:.1}"));
        let unused: Vec<&str> = choices.unused.iter().copied().collect();
        let longest = train.iter().map(|set| set.longest).max().unwrap_or(0);
        let values = [
            ("name", self.name.clone()),
            ("output_dir", path(&self.output_dir)),
            ("model", path(&self.model)),
            ("need", need),
            ("free", free),
            ("unused", unused.join(", ")),
            ("train", self.sets("train", &self.train, train)),
            ("eval", self.sets("eval", &self.eval, eval)),
            ("packing_length", choices.packing_length.to_string()),
            ("longest", longest.to_string()),
            ("accumulation", choices.accumulation.to_string()),
            ("epochs", choices.epochs.to_string()),
            ("lr", choices.lr.to_owned()),
            ("every", choices.every.to_string()),
            ("log_every", choices.log_every.to_string()),
        ];
        let (is_bf16, has_adapter) =
            (config.model.precision == Precision::Bf16, choices.adapter.is_some());
        let conditions = [
            ("random", config.model.weights == Weights::Random),
            ("bf16", is_bf16),
            ("f32", !is_bf16),
            ("recompute", config.model.recompute == RecomputeChoice::Full),
            ("adapter", has_adapter),
            ("all", !has_adapter && unused.is_empty()),
            ("unused", !has_adapter && !unused.is_empty()),
            ("images", unused.is_empty()),
            ("eval", !self.eval.is_empty()),
        ];
        filled(include_str!("new_config.yaml"), &values, &conditions)
    }

    fn sets(&self, key: &str, paths: &[PathBuf], sets: &[DatasetLengths]) -> String {
        if paths.is_empty() {
            let comment = "rows that are not in `train`: [{path: eval.jsonl}]";
            return format!("{:<33} # {comment}", "  eval: []");
        }
        let mut lines = vec![format!("  {key}:")];
        for (file, set) in paths.iter().zip(sets) {
            lines.push(format!("    # {}", set.comment()));
            if let Some(rejected) = &set.rejected {
                let first = rejected.lines().next().unwrap_or_default();
                let shown: String = first.chars().filter(|c| !c.is_control()).take(200).collect();
                lines.push(format!("    # unusable: {shown}"));
            }
            lines.push(format!("    - path: {}", path(file)));
            if let Some(root) = &self.image_root {
                lines.push(format!("      image_root: {}", path(root)));
            }
        }
        lines.join("\n")
    }
}

/// The template with its values. A line `?NAME REST` is left out if the condition does not hold.
/// Comments after values stand in one column.
fn filled(template: &str, values: &[(&str, String)], conditions: &[(&str, bool)]) -> String {
    let mut filled = String::new();
    for line in template.lines() {
        let mut line = line;
        if let Some(after) = line.strip_prefix('?') {
            let (name, rest) = after.split_once(' ').unwrap_or((after, ""));
            let condition = conditions.iter().find(|(known, _)| *known == name);
            if !condition.expect("the template names a condition").1 {
                continue;
            }
            line = rest;
        }
        let key_and_comment = line.split_once(" # ").filter(|(key, _)| !key.trim().is_empty());
        match key_and_comment {
            Some((key, comment)) => {
                let [key, comment] = [key, comment].map(|text| fill(text, values));
                filled.extend([format!("{key:<33} # {comment}\n")]);
            }
            None => filled.extend([&fill(line, values), "\n"]),
        }
    }
    filled
}

/// The text with its values in place of their names in braces.
fn fill(text: &str, values: &[(&str, String)]) -> String {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('{') {
        let value = values.iter().find_map(|(name, value)| {
            Some((value.as_str(), after.strip_prefix(name)?.strip_prefix('}')?))
        });
        let (value, after) = value.unwrap_or(("{", after));
        filled.extend([before, value]);
        rest = after;
    }
    filled + rest
}

/// A path as YAML that is read as it was given: its `~` and `$` are not expanded.
fn path(path: &Path) -> String {
    let text = path.to_string_lossy().replace('$', "$$");
    let text = if text.starts_with('~') { format!("./{text}") } else { text };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    let starts_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/' || c == '.');
    let is_word = matches!(text.as_str(), "true" | "false" | "null" | "yes" | "no" | "on" | "off");
    if starts_plain && !is_word && text.chars().all(is_plain) {
        text
    } else {
        json!(text).to_string()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertedConfig {
    /// The config as YAML. A comment on each line says where its value came from; comments at the
    /// end list the dropped settings and the differences.
    pub yaml: String,
    /// Settings without an effect here, each with the reason.
    pub dropped: Vec<String>,
    /// What differs from the other trainer although every setting is converted.
    pub notes: Vec<String>,
}

/// Converts the settings in `files`, of which later ones win.
///
/// `world_size` is the number of processes that the other trainer ran; it is needed if the files do
/// not contain it.
pub fn convert_config(
    trainer: Trainer,
    files: &[PathBuf],
    world_size: Option<NonZeroU64>,
) -> Result<ConvertedConfig, ConvertError> {
    let read_entry = |file: &Path, name: &str| match DatasetInfo::read(file, name) {
        Ok(info) => Ok((info.path().to_owned(), info.num_samples())),
        Err(error) => Err(error.to_string()),
    };
    let converted =
        convert::convert(trainer, files, world_size, &read_entry).map_err(|error| match error {
            ConvertError::Syntax(error) => ConvertError::Syntax(explained(error)),
            other => other,
        })?;
    let convert::Converted { lines, dropped, notes } = converted;
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let mut yaml = format!("# Converted from {}: {}\n", trainer.title(), names.join(", "));
    yaml += &body(lines);
    for (title, lines) in [("Dropped", &dropped), ("Notes", &notes)] {
        if !lines.is_empty() {
            yaml.extend(["\n# ", title, ":\n"]);
        }
        for line in lines {
            yaml.extend(["# - ", line, "\n"]);
        }
    }
    check(&yaml)?;
    Ok(ConvertedConfig { yaml, dropped, notes })
}

/// Reads the result as `trainer sft` will.
fn check(yaml: &str) -> Result<(), ConvertError> {
    let config: RunConfig = load_text(Path::new("config.yaml"), yaml)
        .map_err(|error| ConvertError::Bug { problem: error.to_string() })?;
    let invalid = |problem: String| ConvertError::Invalid { problem };
    config.check().map_err(|error| invalid(error.to_string()))
}

/// The lines as YAML, in the order of docs/config.md, without values that are default in both
/// trainers.
fn body(mut lines: Vec<Line>) -> String {
    let config = RunConfig::kind();
    let keys = config.flat();
    // The innermost key of which a line gives the value or a part; a list is one key.
    let place = |line: &Line| {
        keys.iter().rposition(|(known, _)| {
            let rest = line.key.strip_prefix(known.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    let default = |line: &Line| keys[place(line)?].1.default.as_ref();
    lines.retain(|line| !line.is_default || !default(line).is_some_and(|of| is_equal(of, line)));
    lines.sort_by_cached_key(place);
    let mut text = String::new();
    let mut open: Vec<&str> = Vec::new(); // the sections of the previous line
    for Line { key, value, origin, .. } in &lines {
        let mut sections: Vec<&str> = key.split('.').collect();
        let name = sections.pop().unwrap_or_default();
        let common = open.iter().zip(&sections).take_while(|(a, b)| a == b).count();
        let mut mark = ""; // of the first line of a list item
        for (depth, section) in sections.iter().enumerate().skip(common) {
            if section.parse::<usize>().is_ok() {
                mark = "- ";
            } else {
                text.extend([&" ".repeat(2 * depth), *section, ":\n"]);
            }
        }
        let indent = " ".repeat(2 * sections.len() - mark.len());
        text.extend([&indent, mark, name, ": ", value, "  # ", origin, "\n"]);
        open = sections;
    }
    text
}

/// Whether the value of a line is this default.
fn is_equal(default: &Value, Line { value, .. }: &Line) -> bool {
    match default {
        Value::String(text) => text == value,
        Value::Bool(default) => default.to_string() == *value,
        Value::Number(number) => {
            value.parse::<f64>().is_ok_and(|value| number.as_f64() == Some(value))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_template_is_part_of_a_valid_config() {
        let template = include_str!("new_config.yaml");
        let names = ["name", "output_dir", "model", "need", "free", "longest"];
        let mut values = names.map(|name| (name, "1.5".to_owned())).to_vec();
        values.extend(
            ["packing_length", "accumulation", "epochs", "every", "log_every"]
                .map(|name| (name, "7".to_owned())),
        );
        values.extend([
            ("lr", "1.0e-5".to_owned()),
            ("unused", "vision, merger".to_owned()),
            ("train", "  train: [{path: a.jsonl}]".to_owned()),
            ("eval", "  eval: [{path: b.jsonl}]".to_owned()),
        ]);
        let all =
            ["random", "bf16", "f32", "recompute", "adapter", "all", "unused", "images", "eval"];
        let mut seen = String::new();
        for holding in [
            &["random", "bf16", "recompute", "adapter", "images", "eval"][..],
            &["f32", "unused"],
            &["bf16", "all", "images", "eval"],
        ] {
            let conditions = all.map(|name| (name, holding.contains(&name)));
            let text = filled(template, &values, &conditions);
            assert!(
                !text.contains('?')
                    && !values.iter().any(|(name, _)| text.contains(&format!("{{{name}}}"))),
                "{text}"
            );
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &text).unwrap();
            let config: RunConfig = crate::config::load(file.path(), &[]).unwrap();
            assert_eq!(config.adapter.is_some(), holding.contains(&"adapter"), "{text}");
            seen += &text;
        }
        for (line, name) in template
            .lines()
            .filter_map(|line| Some((line, line.strip_prefix('?')?.split(' ').next()?)))
        {
            assert!(all.contains(&name), "{line}");
            let rest = line
                .get(name.len() + 2..)
                .unwrap_or_default()
                .split(['{', '#'])
                .next()
                .unwrap_or_default();
            assert!(seen.contains(rest.trim_end()), "{line}");
        }
    }

    #[test]
    fn a_path_is_read_as_it_was_given() {
        for (given, written) in [
            ("data/a.jsonl", "data/a.jsonl"),
            ("a b.jsonl", "\"a b.jsonl\""),
            ("~x", "\"./~x\""),
            ("a$b", "\"a$$b\""),
            ("12", "\"12\""),
            ("null", "\"null\""),
        ] {
            assert_eq!(path(Path::new(given)), written);
        }
    }

    #[test]
    fn lines_are_written_in_the_order_of_the_sections_without_defaults_of_both_trainers() {
        let line = |key: &str, value: &str, is_default: bool| Line {
            key: key.to_owned(),
            value: value.to_owned(),
            origin: "c".to_owned(),
            is_default,
        };
        let lines = vec![
            line("optim.lr", "1e-4", false),
            line("data.video.fps", "1", true),
            line("data.packing", "false", false),
            line("seed", "42", true),
            line("model.path", "m", false),
            line("output_dir", "o", false),
            line("data.train.0.path", "a", false),
            line("data.train.0.image_root", "b", false),
            line("data.train.1.path", "c", false),
        ];
        assert_eq!(
            body(lines),
            "output_dir: o  # c\nmodel:\n  path: m  # c\ndata:\n  train:\n    - path: a  # c\n      \
             image_root: b  # c\n    - path: c  # c\n  packing: false  # c\n  video:\n    fps: 1  # c\n\
             optim:\n  lr: 1e-4  # c\n"
        );
    }
}
