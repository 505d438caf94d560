//! Checks every row of the data sets.

use super::super::error::RunError;
use super::super::inputs::{DataList, loader_options, of_data_set, open_data};
use super::super::observer::SetupObserver;
use super::super::plan::cached_if_possible;
use super::super::plan_data::{DataPlan, plan_opened};
use super::start::check_resumed;
use super::{CheckReport, Finding, Note, Topic};
use crate::checkpoint::Found;
use crate::config::RunConfig;
use crate::data::{
    DataSet, Encoder, JsonlRows, LoaderError, LoaderOptions, OnError, Rejection, RowReader,
    RowTrouble, SampleIndex,
};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Number of examples of each reason.
const NUM_EXAMPLES: usize = 3;
/// Number of rows of a data set in which boxes are looked for.
const ROWS_WITH_BOXES: usize = 10_000;

/// The rejected rows of a data set: their number and the first ones, by reason.
type ByReason = BTreeMap<String, (u64, Vec<String>)>;

/// Opens each data set, and measures its rows. Returns the size of the run, if it can be planned.
/// `found` is the checkpoint that the run would resume from.
pub(super) fn check(
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    found: Option<&Found>,
    observer: &dyn SetupObserver,
    report: &mut CheckReport,
) -> Option<DataPlan> {
    let mut complete = !config.data.train.is_empty();
    for (list, topic) in [(DataList::Train, Topic::Train), (DataList::Eval, Topic::Eval)] {
        let sets = match list {
            DataList::Train => &config.data.train,
            DataList::Eval => &config.data.eval,
        };
        for (index, set) in sets.iter().enumerate() {
            // each alone, so that a broken file hides no other one
            let mut alone = config.clone();
            let own = match list {
                DataList::Train => &mut alone.data.train,
                DataList::Eval => &mut alone.data.eval,
            };
            *own = vec![set.clone()];
            match measure(&alone, list, encoder, observer) {
                Ok(rows) => add_rows(config, topic, &rows, encoder, report),
                Err(error) => {
                    complete = false;
                    report.error(topic, of_set(error, index));
                }
            }
        }
    }
    if !complete {
        return None;
    }
    add_plan(config, encoder, found, observer, report).unwrap_or_else(|error| {
        report.error(Topic::Plan, error);
        None
    })
}

/// Opens the files of the data sets without an encoder, which would read their rows.
pub(super) fn check_files(config: &RunConfig, report: &mut CheckReport) {
    let data = &config.data;
    for (name, topic, sets) in
        [("train", Topic::Train, &data.train), ("eval", Topic::Eval, &data.eval)]
    {
        for set in sets {
            if let Err(problem) = DataSet::check_files(set, data.unknown_keys) {
                report.error(topic, of_data_set(name, sets, problem));
            }
        }
    }
}

/// Gives an error about the only data set of a list its index in the config.
fn of_set(error: RunError, number: usize) -> RunError {
    match error {
        RunError::DataSet { list, key, problem, .. } => {
            RunError::DataSet { list, index: number, key, problem }
        }
        error => error,
    }
}

/// The rows of a data set, and a reader that has their lengths.
struct Measured {
    rows: Arc<JsonlRows>,
    reader: Arc<dyn RowReader>,
}

fn measure(
    config: &RunConfig,
    list: DataList,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<Measured, RunError> {
    let rows = Arc::new(open_data(config, list, encoder, observer)?);
    let reader = match list {
        DataList::Train => cached_if_possible(config, &rows, observer)?,
        DataList::Eval => Arc::clone(&rows) as Arc<dyn RowReader>,
    };
    Ok(Measured { rows, reader })
}

/// Adds what is known about the rows of a data set.
fn add_rows(
    config: &RunConfig,
    topic: Topic,
    measured: &Measured,
    encoder: &Encoder,
    report: &mut CheckReport,
) {
    let options = loader_options(config, encoder);
    for set in measured.rows.sets() {
        let file = set.path().display();
        let (usable, tokens, rejected) = match count(&*measured.reader, set, &options) {
            Ok(counts) => counts,
            Err(trouble) => {
                report.error(topic, LoaderError::Trouble(trouble));
                continue;
            }
        };
        let rows = set.len() as u64;
        report.fact(topic, format!("{file}: {usable} of {rows} rows can be used, {tokens} tokens"));
        let num_rejected: u64 = rejected.values().map(|(count, _)| count).sum();
        let is_train = topic == Topic::Train;
        let too_many = num_rejected as f64 > config.data.max_rejected * rows as f64;
        let stops = is_train
            && num_rejected > 0
            && (usable == 0 || too_many || config.data.on_error == OnError::Stop);
        add_boxes(topic, measured, set, encoder, report);
        for (reason, (count, examples)) in rejected {
            let what = if is_train { "would be rejected" } else { "cannot be scored" };
            let note = Note {
                message: format!("{file}: {count} of {rows} rows {what}: {reason}"),
                examples,
                hint: None, // each example has one
            };
            let finding = if stops { Finding::Problem(note) } else { Finding::Warning(note) };
            report.add(topic, finding);
        }
    }
}

/// Adds the numbers of rows whose texts have boxes with a fault, among the first rows.
fn add_boxes(
    topic: Topic,
    measured: &Measured,
    set: &DataSet,
    encoder: &Encoder,
    report: &mut CheckReport,
) {
    let faults = |row| {
        let index = SampleIndex { dataset: 0, row };
        let sample = measured.rows.sample(index)?.ok()?;
        let faults = encoder.box_faults(&sample);
        (!faults.is_empty()).then(|| (measured.rows.id(index), faults))
    };
    let len = set.len().min(ROWS_WITH_BOXES);
    let rows: Vec<_> = (0..len as u32).into_par_iter().filter_map(faults).collect();
    for fault in rows.iter().flat_map(|(_, faults)| faults).collect::<BTreeSet<_>>() {
        let ids = rows.iter().filter(|(_, faults)| faults.contains(fault)).map(|(id, _)| id);
        let (file, count, what) = (set.path().display(), ids.clone().count(), fault.describe());
        let first = if len < set.len() { "the first " } else { "" };
        let note = Note {
            message: format!("{file}: {count} of {first}{len} rows have {what}"),
            examples: ids.take(NUM_EXAMPLES).map(ToString::to_string).collect(),
            hint: Some(fault.hint().to_owned()),
        };
        report.add(topic, Finding::Warning(note));
    }
}

/// Number of usable rows, their tokens, and the rejected rows.
fn count(
    reader: &dyn RowReader,
    set: &DataSet,
    options: &LoaderOptions,
) -> Result<(u64, u64, ByReason), RowTrouble> {
    let rows = (0..set.len() as u32).into_par_iter();
    let length = |row| {
        let index = SampleIndex { dataset: 0, row };
        let length = RowTrouble::or_read(Rejection::clone, || reader.length(index))?;
        Ok(length.and_then(|length| {
            options.check_length(length, || reader.id(index))?;
            Ok(length.tokens as u64)
        }))
    };
    let lengths = rows.map(length).collect::<Result<Vec<Result<u64, Rejection>>, _>>()?;
    let mut rejected = ByReason::new();
    let (mut usable, mut tokens) = (0, 0);
    for length in lengths {
        match length {
            Ok(length) => {
                usable += 1;
                tokens += length;
            }
            Err(rejection) => {
                let text = rejection.to_string();
                let (count, examples) = rejected.entry(rejection.reason).or_default();
                *count += 1;
                if examples.len() < NUM_EXAMPLES {
                    examples.push(text);
                }
            }
        }
    }
    Ok((usable, tokens, rejected))
}

/// Counts the steps of the run. `None` if rows prevent it, which are reported with their data set.
fn add_plan(
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    found: Option<&Found>,
    observer: &dyn SetupObserver,
    report: &mut CheckReport,
) -> Result<Option<DataPlan>, RunError> {
    let rows = Arc::new(open_data(config, DataList::Train, encoder, observer)?);
    if let Some(found) = found
        && let Err(error) = check_resumed(config, encoder, &rows, found)
    {
        report.error(Topic::Output, error);
    }
    let planned = match plan_opened(config, encoder, &rows, observer) {
        Err(RunError::Plan(_)) if report.counts()[0] > 0 => return Ok(None),
        planned => planned?,
    };
    let (steps, epochs) = (planned.steps, planned.epochs);
    let (packs, tokens) = (planned.plan.packs, planned.plan.tokens);
    report.fact(
        Topic::Plan,
        format!("{steps} steps; {epochs} epoch(s) have {packs} packs and {tokens} tokens"),
    );
    if config.optim.warmup_steps.is_some_and(|warmup| warmup >= steps) {
        let note = Note::new(
            format!("`optim.warmup_steps` reaches the end of the {steps} steps of the run"),
            "lower it, or use `optim.warmup_ratio`",
        );
        report.add(Topic::Plan, Finding::Warning(note));
    }
    Ok(Some(planned))
}
