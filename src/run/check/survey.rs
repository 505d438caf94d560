//! Rows that can be used, but train something else than their writer may expect.

use super::{CheckReport, Finding, Note, Topic};
use crate::batch::{Message, Sample};
use crate::data::{
    BoxFault, DataConfig, DatasetConfig, Encoder, JsonlRows, LossScale, SampleIndex, texts,
};
use fault::Fault;
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Maximum number of rows of a data set that are surveyed; of a larger one, every n-th.
const NUM_SURVEYED: usize = 10_000;
/// Number of examples of each kind.
const NUM_EXAMPLES: usize = 3;

/// A kind of row: what is reported of these rows, and the hint.
type Kind = [Cow<'static, str>; 2];

const HIDDEN_THOUGHTS: Kind = [
    Cow::Borrowed(
        "have thoughts that the chat template does not render: these answers are trained on without them",
    ),
    Cow::Borrowed(
        "set `data.loss_scale: last_round` to train on the last answer of each row only; `trainer inspect` names the turns",
    ),
];
const EMPTY_ANSWER: Kind = [
    Cow::Borrowed(
        "have an empty answer that is trained on: the model learns to end its turn at once",
    ),
    Cow::Borrowed("remove these rows, or write `\"loss\": false` into the message"),
];
const NO_ANSWER: Kind = [
    Cow::Borrowed("end with a turn that no answer follows: it costs tokens and is not trained on"),
    Cow::Borrowed("add the answer, or remove the turn"),
];
const LITERAL: Kind = [
    Cow::Borrowed("contain `<image>` or `<video>` as text, because `literal_placeholders` is set"),
    Cow::Borrowed("list the images of these rows in `images`, or ignore this if the text is meant"),
];

/// The kinds of a row.
fn kinds(
    (data, set): (&DataConfig, &DatasetConfig),
    encoder: &Encoder,
    sample: &Sample,
) -> Vec<Kind> {
    let messages = &sample.messages;
    let mut found = Vec::new();
    let mut add = |kind: Kind, is: bool| found.extend(is.then_some(kind));
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
pub(super) fn survey(
    (data, set): (&DataConfig, &DatasetConfig),
    topic: Topic,
    rows: &JsonlRows,
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
    let kinds: Vec<Vec<Kind>> = surveyed.par_iter().map(of_row).collect();
    let mut found: BTreeMap<Kind, Vec<SampleIndex>> = BTreeMap::new();
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
