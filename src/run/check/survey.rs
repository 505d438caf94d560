//! Rows that can be used, but train something else than their writer may expect.

use super::{CheckReport, Finding, Note, Topic};
use crate::batch::{Content, Message, Part, Sample};
use crate::data::{DataConfig, DatasetConfig, Encoder, JsonlRows, LossScale, SampleIndex};
use rayon::prelude::*;

/// Maximum number of rows of a data set that are surveyed; of a larger one, every n-th.
const NUM_SURVEYED: usize = 2000;
/// Number of examples of each kind.
const NUM_EXAMPLES: usize = 3;

/// A kind of row.
struct Kind {
    /// What is reported of these rows.
    what: &'static str,
    hint: &'static str,
    /// Whether the kind matters with these settings.
    matters: fn(&DataConfig, &DatasetConfig) -> bool,
    is: fn(&Encoder, &Sample) -> bool,
}

const KINDS: [Kind; 4] = [
    Kind {
        what: "have thoughts that the chat template does not render: these answers are trained on without them",
        hint: "set `data.loss_scale: last_round` to train on the last answer of each row only; `trainer inspect` names the turns",
        matters: |data, _| data.loss_scale != LossScale::LastRound,
        is: |encoder, sample| encoder.hidden_thoughts(sample).is_ok_and(|turns| !turns.is_empty()),
    },
    Kind {
        what: "have an empty answer that is trained on: the model learns to end its turn at once",
        hint: "remove these rows, or write `\"loss\": false` into the message",
        matters: |_, _| true,
        is: |_, sample| sample.messages.iter().any(is_empty_answer),
    },
    Kind {
        what: "end with a turn that no answer follows: it costs tokens and is not trained on",
        hint: "add the answer, or remove the turn",
        matters: |_, _| true,
        is: |_, sample| sample.messages.last().is_some_and(|last| last.role != "assistant"),
    },
    Kind {
        what: "contain `<image>` or `<video>` as text, because `literal_placeholders` is set",
        hint: "list the images of these rows in `images`, or ignore this if the text is meant",
        matters: |_, set| set.literal_placeholders,
        is: |_, sample| {
            let mut texts = sample.messages.iter().flat_map(texts);
            texts.any(|text| ["<image>", "<video>"].iter().any(|mark| text.contains(mark)))
        },
    },
];

fn texts(message: &Message) -> Vec<&str> {
    match &message.content {
        Content::Text(text) => vec![text],
        Content::Parts(parts) => parts.iter().filter_map(text_of).collect(),
    }
}

fn text_of(part: &Part) -> Option<&str> {
    match part {
        Part::Text(text) => Some(text),
        Part::Image | Part::Video => None,
    }
}

fn is_empty_answer(message: &Message) -> bool {
    let is_trained = message.role == "assistant" && message.weight > 0.0;
    let has_more = message.tool_calls.is_some() || message.reasoning_content.is_some();
    is_trained && !has_more && texts(message).iter().all(|text| text.trim().is_empty())
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
    let surveyed: Vec<SampleIndex> = all.iter().copied().step_by(every).collect();
    let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| (kind.matters)(data, set)).collect();
    // The kinds of each row. Rows that cannot be used are reported elsewhere.
    let found: Vec<Vec<bool>> = surveyed
        .par_iter()
        .map(|row| match rows.sample(*row) {
            Some(Ok(sample)) => {
                kinds.iter().map(|kind| (kind.is)(rows.encoder(), &sample)).collect()
            }
            _ => vec![false; kinds.len()],
        })
        .collect();
    let sampled = if every > 1 { "sampled " } else { "" };
    for (number, kind) in kinds.iter().enumerate() {
        let of_kind = surveyed.iter().zip(&found).filter(|(_, kinds)| kinds[number]);
        let of_kind: Vec<SampleIndex> = of_kind.map(|(row, _)| *row).collect();
        if of_kind.is_empty() {
            continue;
        }
        let (count, of) = (of_kind.len(), surveyed.len());
        let path = rows.sets()[0].path().display();
        let text = format!("{path}: {count} of {of} {sampled}rows {}", kind.what);
        let mut note = Note::new(text, kind.hint);
        note.examples = of_kind.iter().take(NUM_EXAMPLES).map(|row| rows.label(*row)).collect();
        report.add(topic, Finding::Warning(note));
    }
}
