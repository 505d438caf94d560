//! Checks every row of the data sets, and finds rows that can be used but train something else than
//! their writer may expect.

use super::super::error::RunError;
use super::super::inputs::{DataList, SetupObserver, loader_options, of_data_set, open_data};
use super::super::plan::{DataPlan, cached_if_possible, plan_opened};
use super::super::resume::{InputDigests, resumed_state};
use super::{CheckReport, Finding, Note, Topic};
use crate::batch::{Message, Sample};
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::data::{
    BoxFault, DataConfig, DataSet, DatasetConfig, DatasetRows, Encoder, LengthSummary, LoaderError,
    LoaderOptions, LossScale, Mixture, OnError, Rejection, RowReader, SampleIndex,
    TransientRowError, length_hint, texts,
};
use fault::Fault;
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of examples of each reason and of each kind.
const NUM_EXAMPLES: usize = 3;

/// The rejected rows of a data set: their number and the first ones, by reason.
type ByReason = BTreeMap<String, (u64, Vec<String>)>;

/// Opens each data set, and measures its rows. Returns the size of the run, if it can be planned.
/// `found` is the checkpoint that the run would resume from.
pub(super) fn check(
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    found: Option<&Checkpoint>,
    observer: &dyn SetupObserver,
    report: &mut CheckReport,
) -> Option<DataPlan> {
    let mut complete = !config.data.train.is_empty();
    let mut contents = Vec::new();
    for (list, topic) in [(DataList::Train, Topic::Train), (DataList::Eval, Topic::Eval)] {
        let sets = match list {
            DataList::Train => &config.data.train,
            DataList::Eval => &config.data.eval,
        };
        let mut counted = Vec::new();
        for (index, set) in sets.iter().enumerate() {
            // each alone, so that a broken file hides no other one
            let mut alone = config.clone();
            (alone.data.eval_share, alone.data.eval_rows) = (None, None); // all rows are checked
            let own = match list {
                DataList::Train => &mut alone.data.train,
                DataList::Eval => &mut alone.data.eval,
            };
            *own = vec![set.clone()];
            match measure(&alone, list, encoder, observer) {
                Ok(measured) => match count(&measured, &loader_options(config, encoder)) {
                    Ok(counts) => counted.push((set, measured, counts)),
                    Err(error) => report.error(topic, LoaderError::Transient(error)),
                },
                Err(error) => {
                    complete = false;
                    report.error(topic, of_set(error, index));
                }
            }
        }
        let too_many = rejected_share(config, &counted) > config.data.max_rejected;
        for (set, measured, counts) in counted {
            add_rows(config, topic, (&measured, counts), too_many, report);
            survey((&config.data, set), topic, &measured.rows, report);
            contents.push((topic, measured.rows));
        }
    }
    add_copies(&contents, report);
    if !complete {
        return None;
    }
    add_plan(config, encoder, found, observer, report).unwrap_or_else(|error| {
        report.error(Topic::Plan, error);
        None
    })
}

/// Warns of data sets with the same content.
fn add_copies(contents: &[(Topic, Arc<DatasetRows>)], report: &mut CheckReport) {
    let path = |rows: &DatasetRows| rows.sets()[0].path().display().to_string();
    for (number, (topic, rows)) in contents.iter().enumerate() {
        let same =
            |(_, other): &&(Topic, Arc<DatasetRows>)| other.fingerprint() == rows.fingerprint();
        let Some((earlier, other)) = contents[..number].iter().find(same) else { continue };
        let (path, other) = (path(rows), path(other));
        let note = if topic == earlier {
            Note::new(
                format!("{path} has the rows of {other}, which is listed before it"),
                "remove one of the two; `weight` trains on the rows of a data set more often",
            )
        } else {
            Note::new(
                format!(
                    "{path} of `data.eval` has the rows of {other} of `data.train`: the evaluation measures how well the model remembers them"
                ),
                "evaluate on rows that are not in the training data",
            )
        };
        report.add(*topic, Finding::Warning(note));
    }
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
    rows: Arc<DatasetRows>,
    reader: Arc<dyn RowReader>,
    /// Counts of the rows of `data.train`, if they are cached.
    lengths: Vec<LengthSummary>,
}

fn measure(
    config: &RunConfig,
    list: DataList,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<Measured, RunError> {
    let rows = Arc::new(open_data(config, list, encoder, observer)?);
    let cached = match list {
        DataList::Train => cached_if_possible(config, &rows, observer)?,
        DataList::Eval => None,
    };
    Ok(if let Some(cached) = cached {
        let lengths = cached.summaries(&loader_options(config, encoder));
        Measured { rows, reader: Arc::new(cached), lengths }
    } else {
        let reader = Arc::clone(&rows) as Arc<dyn RowReader>;
        Measured { rows, reader, lengths: Vec::new() }
    })
}

/// The rows of a data set that can be used, and those that cannot.
#[derive(Default)]
struct Counts {
    rows: u64,
    usable: u64,
    /// Tokens of the usable rows.
    tokens: u64,
    rejected: ByReason,
}

/// The share of the rows of an epoch that is rejected, which the run compares with
/// `data.max_rejected`.
fn rejected_share(config: &RunConfig, counted: &[(&DatasetConfig, Measured, Counts)]) -> f64 {
    let [mut rejected, mut rows] = [0.0; 2];
    for (set, _, counts) in counted {
        let passes = match config.data.mixture {
            Mixture::Repeat => set.weight,
            Mixture::Share => set.weight / counts.rows as f64,
        };
        rejected += passes * (counts.rows - counts.usable) as f64;
        rows += passes * counts.rows as f64;
    }
    rejected / rows
}

/// Adds what is known about the rows of a data set. `too_many`: whether the run stops because of
/// the rejected rows of all data sets.
fn add_rows(
    config: &RunConfig,
    topic: Topic,
    (measured, counts): (&Measured, Counts),
    too_many: bool,
    report: &mut CheckReport,
) {
    let file = measured.rows.sets()[0].path().display();
    let Counts { rows, usable, tokens, rejected } = counts;
    if usable > 0 {
        report.fact(topic, format!("{file}: {usable} of {rows} rows can be used, {tokens} tokens"));
    }
    let is_train = topic == Topic::Train;
    let stops = is_train && (usable == 0 || too_many || config.data.on_error == OnError::Stop);
    for (reason, (count, examples)) in rejected {
        let what = if is_train { "would be rejected" } else { "cannot be scored" };
        let note = Note {
            message: format!("{file}: {count} of {rows} rows {what}: {reason}"),
            examples,
            // Rows that are rejected for another reason have a hint in each example.
            hint: length_hint(&reason).map(str::to_owned),
        };
        let finding = if stops { Finding::Problem(note) } else { Finding::Warning(note) };
        report.add(topic, finding);
    }
    for LengthSummary { file, rows, truncated, tokens_cut, answers_cut, .. } in &measured.lengths {
        if *truncated > 0 {
            let note = Note::new(
                format!(
                    "{}: {truncated} of {rows} rows are truncated to `data.max_length`, by {tokens_cut} tokens in total; \
                     {answers_cut} of them lose supervised tokens",
                    file.display()
                ),
                "raise `data.max_length`, or set `data.truncation: delete` to reject these rows; `trainer inspect --html` \
                 shows the tokens that are removed",
            );
            report.add(topic, Finding::Warning(note));
        }
    }
}

/// Number of usable rows, their tokens, and the rejected rows.
fn count(measured: &Measured, options: &LoaderOptions) -> Result<Counts, TransientRowError> {
    let reader = &*measured.reader;
    let num_rows = measured.rows.sets()[0].len() as u32;
    let length = |row| {
        let index = SampleIndex { dataset: 0, row };
        let length = TransientRowError::or_read(Rejection::clone, || reader.length(index))?;
        Ok(length.and_then(|length| {
            options.check_length(length, || reader.id(index))?;
            Ok(length.tokens as u64)
        }))
    };
    let lengths = (0..num_rows).into_par_iter().map(length);
    let lengths = lengths.collect::<Result<Vec<Result<u64, Rejection>>, _>>()?;
    let mut counts = Counts { rows: u64::from(num_rows), ..Counts::default() };
    for length in lengths {
        match length {
            Ok(length) => {
                counts.usable += 1;
                counts.tokens += length;
            }
            Err(rejection) => {
                let text = rejection.to_string();
                let (count, examples) = counts.rejected.entry(rejection.reason).or_default();
                *count += 1;
                if examples.len() < NUM_EXAMPLES {
                    examples.push(text);
                }
            }
        }
    }
    Ok(counts)
}

/// Counts the steps of the run. `None` if rows prevent it, which are reported with their data set.
fn add_plan(
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    found: Option<&Checkpoint>,
    observer: &dyn SetupObserver,
    report: &mut CheckReport,
) -> Result<Option<DataPlan>, RunError> {
    let rows = Arc::new(open_data(config, DataList::Train, encoder, observer)?);
    for (set, name) in rows.sets().iter().zip(rows.names()) {
        let DataSet::Chats(chats) = set else { continue };
        let (all, trained) = (chats.file().len(), chats.len());
        if trained < all {
            let held_out = all - trained;
            let fact = format!("{name}: {held_out} of {all} rows are held out to evaluate on");
            report.fact(Topic::Eval, fact);
        }
    }
    if let Some(found) = found
        && let inputs = InputDigests::new(&rows, encoder)
        && let Err(error) = resumed_state(config, &rows, &inputs, found, true)
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
    if let Some(max_steps) = config.train.max_steps.filter(|most| most.get() > steps) {
        let note = Note::new(
            format!(
                "`train.epochs` ends the run after {steps} steps, before `train.max_steps` ({max_steps})"
            ),
            "set `train.epochs: null` for a run of `train.max_steps`",
        );
        report.add(Topic::Plan, Finding::Warning(note));
    }
    if config.optim.warmup_steps.is_some_and(|warmup| warmup >= steps) {
        let note = Note::new(
            format!("`optim.warmup_steps` reaches the end of the {steps} steps of the run"),
            "lower it, or use `optim.warmup_ratio`",
        );
        report.add(Topic::Plan, Finding::Warning(note));
    }
    Ok(Some(planned))
}

/// Maximum number of rows of a data set that are surveyed; of a larger one, every n-th.
const NUM_SURVEYED: usize = 10_000;

/// A kind of row: what is reported of these rows, and the hint.
type RowKind = [Cow<'static, str>; 2];

const HIDDEN_THOUGHTS: RowKind = [
    Cow::Borrowed(
        "have thoughts that the chat template does not render: these answers are trained on without them",
    ),
    Cow::Borrowed(
        "set `data.loss_scale: last_round` to train on the last answer of each row only; `trainer inspect` names the turns",
    ),
];
const EMPTY_ANSWER: RowKind = [
    Cow::Borrowed(
        "have an empty answer that is trained on: the model learns to end its turn at once",
    ),
    Cow::Borrowed("remove these rows, or write `\"loss\": false` into the message"),
];
const NO_ANSWER: RowKind = [
    Cow::Borrowed("end with a turn that no answer follows: it costs tokens and is not trained on"),
    Cow::Borrowed("add the answer, or remove the turn"),
];
const LITERAL: RowKind = [
    Cow::Borrowed("contain `<image>` or `<video>` as text, because `literal_placeholders` is set"),
    Cow::Borrowed("list the images of these rows in `images`, or ignore this if the text is meant"),
];

/// The kinds of a row.
fn kinds(
    (data, set): (&DataConfig, &DatasetConfig),
    encoder: &Encoder,
    sample: &Sample,
) -> Vec<RowKind> {
    let messages = &sample.messages;
    let mut found = Vec::new();
    let mut add = |kind: RowKind, is: bool| found.extend(is.then_some(kind));
    let all_rounds = data.loss_scale != LossScale::LastRound;
    let hidden = || encoder.hidden_thoughts(sample).is_ok_and(|turns| !turns.is_empty());
    add(HIDDEN_THOUGHTS, all_rounds && hidden());
    add(EMPTY_ANSWER, messages.iter().any(is_empty_answer));
    add(NO_ANSWER, messages.last().is_some_and(|last| last.role != "assistant"));
    let has_mark = |text: &str| text.contains("<image>") || text.contains("<video>");
    add(LITERAL, set.literal_placeholders && texts(messages).any(|text| has_mark(text)));
    let of_box = |fault: BoxFault| [fault.describe().into(), fault.hint().unwrap_or_default()];
    found.extend(encoder.box_faults(sample).into_iter().map(of_box));
    found
}

fn is_empty_answer(message: &Message) -> bool {
    let is_trained = message.role == "assistant" && message.weight > 0.0;
    let has_more = message.tool_calls.is_some() || message.reasoning_content.is_some();
    is_trained
        && !has_more
        && texts(std::slice::from_ref(message)).all(|text| text.trim().is_empty())
}

/// Warns of each kind of row in the only data set of `rows`.
fn survey(
    (data, set): (&DataConfig, &DatasetConfig),
    topic: Topic,
    rows: &DatasetRows,
    report: &mut CheckReport,
) {
    if set.corpus.is_some() {
        return; // its texts have no turns
    }
    let all: Vec<SampleIndex> = rows.rows().collect();
    let every = all.len().div_ceil(NUM_SURVEYED).max(1);
    let surveyed: Vec<SampleIndex> = all.into_iter().step_by(every).collect();
    // Rows that cannot be used are reported elsewhere.
    let of_row = |row: &SampleIndex| match rows.sample(*row) {
        Some(Ok(sample)) => kinds((data, set), rows.encoder(), &sample),
        _ => Vec::new(),
    };
    let kinds: Vec<Vec<RowKind>> = surveyed.par_iter().map(of_row).collect();
    let mut found: BTreeMap<RowKind, Vec<SampleIndex>> = BTreeMap::new();
    for (row, kinds) in surveyed.iter().zip(kinds) {
        for kind in kinds {
            found.entry(kind).or_default().push(*row);
        }
    }
    let (of, path) = (surveyed.len(), rows.sets()[0].path().display());
    let sampled = if every > 1 { "sampled " } else { "" };
    for ([what, hint], of_kind) in found {
        let text = format!("{path}: {} of {of} {sampled}rows {what}", of_kind.len());
        let mut note = Note::new(text, &hint);
        note.examples = of_kind.iter().take(NUM_EXAMPLES).map(|row| rows.label(*row)).collect();
        report.add(topic, Finding::Warning(note));
    }
}
