//! The settings of the other trainers: one text file per trainer in `tables/`.
//!
//! A line `@NAME | TEXT` defines a text that other lines contain as `@NAME`; definitions of
//! `transformers.txt` hold in all files. Every other line is a [`Row`], except for empty ones and
//! comments.

use crate::trainer::Trainer;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use std::collections::HashMap;
use std::sync::LazyLock;

/// A setting of another trainer.
#[derive(Debug)]
pub(crate) struct Row {
    /// Key, with dots between sections.
    pub(crate) key: &'static str,
    /// Default of the other trainer; empty if there is none, or if it has no effect here.
    pub(crate) default: &'static str,
    pub(crate) rule: Rule,
    /// The dotted key here of the same meaning; empty if there is none.
    pub(crate) here: &'static str,
    /// Why the setting is dropped or refused, or what happens here.
    pub(crate) reason: &'static str,
    /// What to do about the name in a config of this program; empty if there is a key here, or
    /// nothing special to do.
    pub(crate) advice: &'static str,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Rule {
    /// `copy KIND`: the value of our key.
    Copy(Kind),
    /// `role ROLE`: a part of a decision that needs several settings.
    Role(Role),
    /// `drop`: has no effect here.
    Drop,
    /// `refuse`: refused, unless its value switches it off.
    Refuse,
    /// `only VALUE ..`: dropped if it has one of these values, refused otherwise.
    Only(Vec<&'static str>),
    /// `adapter`: dropped if all parameters are trained or if it is off; refused otherwise.
    Adapter,
}

/// The values that a copied setting may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Number,
    /// A whole number of 0 or more.
    Count,
    Flag,
    /// A flag whose meaning here is the opposite.
    Not,
}

/// A part of a decision in `compose`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    AddSpecialTokens,
    AddTokens,
    AdapterFrom,
    AlignerLr,
    Accumulation,
    Attention,
    Beta1,
    Beta2,
    Bf16,
    CutoffLen,
    DataSeed,
    Dataset,
    DatasetDir,
    DatasetFormat,
    Deepstack,
    Dora,
    EarlyStopping,
    Epochs,
    EvalDataset,
    EvalSplit,
    EvalSteps,
    EvalStrategy,
    Fp16,
    FrameNum,
    FrameSampling,
    FreezeLlm,
    FreezeMerger,
    FreezeModules,
    FreezePrefixes,
    FreezeVision,
    ImageMaxTokens,
    ImageMinTokens,
    Keep,
    LastTurn,
    LogSteps,
    LoraAlpha,
    LoraDropout,
    LoraInit,
    LoraPlus,
    LoraRank,
    LoraTarget,
    LossScale,
    Lr,
    MaxFrames,
    MaxLength,
    MaxSamples,
    MaxSteps,
    MediaDir,
    MinFrames,
    Mix,
    Model,
    ModulesToSave,
    NeatPacking,
    NoRecompute,
    Nodes,
    Optimizer,
    OutputDir,
    Packing,
    PackingLength,
    PackingStrategy,
    Probabilities,
    Processes,
    Project,
    PureBf16,
    QuantBits,
    RandomConfig,
    RandomWeights,
    Recompute,
    RecomputeVision,
    ResizeVocab,
    Rslora,
    RunName,
    SaveSteps,
    SaveStrategy,
    Schedule,
    ScheduleArgs,
    SequenceParallel,
    Shard,
    Stopping,
    Strict,
    System,
    TensorParallel,
    Template,
    Thinking,
    TorchDtype,
    Trackers,
    Truncation,
    Tuner,
    UseSwanlab,
    VideoPixels,
    VideoTokens,
    VisibleDevices,
    VisionLr,
    WarmupRatio,
    WarmupSteps,
    Workers,
}

static TABLES: LazyLock<[Vec<Row>; 5]> = LazyLock::new(|| {
    let mut texts = HashMap::new();
    [
        include_str!("../tables/transformers.txt"),
        include_str!("../tables/swift.txt"),
        include_str!("../tables/llama_factory.txt"),
        include_str!("../tables/lmms_engine.txt"),
        include_str!("../tables/others.txt"),
    ]
    .map(|table| parse(table, &mut texts))
});

/// Parses a table, and adds its definitions to `texts`.
fn parse(table: &'static str, texts: &mut HashMap<&'static str, &'static str>) -> Vec<Row> {
    let mut rows = Vec::new();
    for line in table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let mut columns = line.split('|').map(str::trim);
        let mut column = || columns.next().unwrap_or_default();
        let key = column();
        if key.starts_with('@') {
            texts.insert(key, column());
            continue;
        }
        let (default, rule, here) = (column(), column(), column());
        let mut text = || {
            let text = column();
            if text.starts_with('@') { texts[text] } else { text }
        };
        let (reason, advice) = (text(), text());
        assert!(columns.next().is_none(), "more than 6 columns: `{line}`");
        let rule = parse_rule(rule).unwrap_or_else(|error| panic!("`{line}`: {error}"));
        rows.push(Row { key, default, rule, here, reason, advice });
    }
    rows
}

fn parse_rule(rule: &'static str) -> Result<Rule, Error> {
    let (name, values) = rule.split_once(' ').unwrap_or((rule, ""));
    Ok(match name {
        "copy" => Rule::Copy(Kind::deserialize(values.into_deserializer())?),
        "role" => Rule::Role(Role::deserialize(values.into_deserializer())?),
        "drop" => Rule::Drop,
        "refuse" => Rule::Refuse,
        "only" => Rule::Only(values.split(' ').collect()),
        "adapter" => Rule::Adapter,
        _ => return Err(serde::de::Error::custom("unknown rule")),
    })
}

/// The settings that all three trainers take from transformers.
fn shared() -> &'static [Row] {
    &TABLES[0]
}

fn own(trainer: Trainer) -> &'static [Row] {
    match trainer {
        Trainer::MsSwift => &TABLES[1],
        Trainer::LlamaFactory => &TABLES[2],
        Trainer::LmmsEngine => &TABLES[3],
    }
}

/// Section of the shared settings.
fn section(trainer: Trainer) -> &'static str {
    match trainer {
        Trainer::MsSwift | Trainer::LlamaFactory => "",
        Trainer::LmmsEngine => "trainer_args.",
    }
}

/// The key as the tables have it: two spellings of one key become one.
pub(crate) fn normal(trainer: Trainer, key: &str) -> String {
    if trainer != Trainer::LmmsEngine {
        return key.replace('-', "_");
    }
    if let Some(rest) = key.strip_prefix("processor_config.") {
        return format!("dataset_config.processor_config.{rest}");
    }
    // older configs of lmms-engine have the keys of `trainer_args` at the top
    let of_trainer = format!("{}{key}", section(trainer));
    let is_flat = row_of(trainer, key).is_none() && row_of(trainer, &of_trainer).is_some();
    if is_flat { of_trainer } else { key.to_owned() }
}

/// Whether the tables have rows for keys inside of this one.
pub(crate) fn is_section(trainer: Trainer, key: &str) -> bool {
    own(trainer)
        .iter()
        .any(|row| row.key.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')))
}

/// The row of a setting; `None` if the trainer has no such setting.
pub(crate) fn row_of(trainer: Trainer, key: &str) -> Option<&'static Row> {
    let find = |rows: &'static [Row], key: &str| rows.iter().find(|row| row.key == key);
    find(own(trainer), key).or_else(|| find(shared(), key.strip_prefix(section(trainer))?))
}

/// All rows with their full keys.
pub(crate) fn rows(trainer: Trainer) -> impl Iterator<Item = (String, &'static Row)> {
    let shared = shared().iter().map(move |row| (format!("{}{}", section(trainer), row.key), row));
    let shared = shared.filter(move |(key, _)| !own(trainer).iter().any(|row| row.key == key));
    own(trainer).iter().map(|row| (row.key.to_owned(), row)).chain(shared)
}

/// All names of settings, without their sections, with the key here and the advice.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    TABLES.iter().flatten().map(|row| (last(row.key), row.here, row.advice))
}

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

/// The dotted key here for a setting that other trainers call `name`.
pub fn our_key(name: &str) -> Option<&'static str> {
    names().find(|(theirs, here, _)| *theirs == name && !here.is_empty()).map(|(_, here, _)| here)
}

/// What to do about a setting of other trainers that has no key here.
pub fn advice(name: &str) -> Option<&'static str> {
    let found = names().find(|(theirs, _, advice)| *theirs == name && !advice.is_empty());
    found.map(|(.., advice)| advice)
}

/// Values of other trainers, and the value here; a value applies where it is a choice.
const VALUES: &[(&str, &str)] = &[
    ("bfloat16", "bf16"),
    ("float32", "f32"),
    ("fp32", "f32"),
    ("float16", "bf16"),
    ("fp16", "bf16"),
    ("adamw_torch", "adamw"),
    ("adamw_torch_fused", "adamw"),
    ("adamw_hf", "adamw"),
    ("paged_adamw_32bit", "adamw"),
    ("adamw_bnb_8bit", "adamw_8bit"),
    ("paged_adamw_8bit", "adamw_8bit"),
    ("ignore_think_prefix", "default"),
    ("zero1", "optimizer"),
    ("zero2", "gradients"),
    ("zero3", "full"),
    ("fsdp", "full"),
    ("4bit", "nf4"),
    ("4", "nf4"),
    ("cosine_with_min_lr", "cosine"),
    ("flash_attention_2", "flash"),
    ("sdpa", "flash"),
];

/// The value here that other trainers call `value`, if it is one of `valid`.
pub fn our_value(value: &str, valid: &[&'static str]) -> Option<&'static str> {
    let ours = |theirs: &&(&str, &str)| theirs.0 == value && valid.contains(&theirs.1);
    VALUES.iter().find(ours).map(|(_, ours)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::fmt::Write;
    use std::fs;

    #[test]
    fn every_row_is_unique_and_every_copied_setting_has_a_key_here() {
        for trainer in Trainer::ALL {
            let mut keys = BTreeSet::new();
            for (key, row) in rows(trainer) {
                assert!(keys.insert(key.clone()), "{}: `{key}` twice", trainer.name());
                let needs_here = matches!(row.rule, Rule::Copy(_));
                assert!(!needs_here || !row.here.is_empty(), "`{key}` leads nowhere");
                let needs_reason = !needs_here && !matches!(row.rule, Rule::Role(_));
                assert!(!needs_reason || !row.reason.is_empty(), "`{key}` has no reason");
            }
        }
    }

    #[test]
    fn a_name_means_the_same_in_every_table() {
        let mut meanings = BTreeMap::new();
        for (name, here, advice) in names() {
            assert!(here.is_empty() || advice.is_empty(), "`{name}` has a key here and an advice");
            let meaning = meanings.entry(name).or_insert((here, advice));
            assert_eq!(*meaning, (here, advice), "`{name}` in two tables");
        }
    }

    /// The table of docs/migration.md: a line per key here.
    fn page() -> String {
        let mut keys: BTreeMap<&str, [Vec<&str>; 3]> = BTreeMap::new();
        for (index, trainer) in Trainer::ALL.into_iter().enumerate() {
            for (_, row) in rows(trainer).filter(|(_, row)| !row.here.is_empty()) {
                let names = &mut keys.entry(row.here).or_default()[index];
                if !names.contains(&last(row.key)) {
                    names.push(last(row.key));
                }
            }
        }
        let mut page =
            "| ms-swift | LLaMA-Factory | lmms-engine | here |\n|---|---|---|---|\n".to_owned();
        for (key, names) in &keys {
            let cell = |index: usize| match &names[index] {
                names if names.is_empty() => "–".to_owned(),
                same if index > 0 && *same == names[0] => "=".to_owned(),
                names => format!("`{}`", names.join("`, `")),
            };
            writeln!(page, "| {} | {} | {} | `{key}` |", cell(0), cell(1), cell(2)).unwrap();
        }
        page
    }

    /// `UPDATE=1 cargo test -p convert` writes the table into the page.
    #[test]
    fn the_manual_has_the_names_of_the_tables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/migration.md");
        let manual = fs::read_to_string(path).unwrap();
        let (before, rest) = manual.split_once("| ms-swift |").unwrap();
        let (_, after) = rest.split_once("\n\n").unwrap();
        let expected = format!("{before}{}\n{after}", page());
        if std::env::var_os("UPDATE").is_some() {
            fs::write(path, expected).unwrap();
        } else {
            assert!(manual == expected, "run `UPDATE=1 cargo test -p convert`");
        }
    }
}
