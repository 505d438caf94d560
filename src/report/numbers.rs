//! The names of the numbers of a run and what they mean: the same ones in charts, tables and answers.

use super::svg_chart::Unit;

/// A number of `metrics.jsonl` or `eval.jsonl`.
pub(super) struct Number {
    /// Its key; those of evaluations begin with `eval.`.
    pub(super) key: &'static str,
    pub(super) name: &'static str,
    pub(super) meaning: &'static str,
    pub(super) unit: Unit,
    /// Whether its axis may be logarithmic.
    pub(super) may_be_log: bool,
    /// Whether it varies from step to step, so that its curve is smoothed.
    pub(super) is_noisy: bool,
    /// Whether it is about the machine, not about what is learned.
    pub(super) of_machine: bool,
}

const fn number(key: &'static str, name: &'static str, meaning: &'static str) -> Number {
    let unit = Unit::Number;
    Number { key, name, meaning, unit, may_be_log: false, is_noisy: false, of_machine: false }
}

const fn score(key: &'static str, name: &'static str, meaning: &'static str) -> Number {
    Number { unit: Unit::Share, ..number(key, name, meaning) }
}

const fn machine(key: &'static str, name: &'static str, meaning: &'static str) -> Number {
    Number { of_machine: true, is_noisy: true, ..number(key, name, meaning) }
}

/// In the order of their charts.
#[rustfmt::skip]
pub(super) static NUMBERS: [Number; 15] = [
    Number { may_be_log: true, is_noisy: true, ..number("loss", "Training loss", "Mean negative log-likelihood of the supervised tokens of a step; lower is better.") },
    Number { may_be_log: true, ..number("eval.loss", "Evaluation loss", "Mean negative log-likelihood of rows that are not trained on. If it rises while the training loss falls, the model learns the rows by heart.") },
    score("eval.accuracy", "Exact answers", "Share of the held-out chats in which each supervised token is the most likely one, so that greedy decoding gives the expected answers."),
    score("eval.exact", "Exact generated answers", "Share of the answers of eval.generate that equal the expected ones. They may be of fewer rows than the exact answers, and only of the last turn."),
    score("eval.contains", "Answers with the expected text", "Share of the generated answers that contain the expected one."),
    score("eval.rouge_l", "ROUGE-L of the answers", "How many words the generated and the expected answers have in common, in the same order: F1, mean of all answers."),
    score("eval.bbox_iou", "IoU of the boxes", "Overlap of the generated and the expected boxes, mean of all answers."),
    number("lr", "Learning rate", "Before the multipliers of parameter groups."),
    Number { may_be_log: true, is_noisy: true, ..number("grad_norm", "Gradient norm", "L2 norm of the gradient before clipping.") },
    number("rejected", "Rejected rows", "Rows so far that cannot be used; rejects.jsonl has the reasons."),
    machine("tokens_per_s", "Tokens per second", "Tokens of a step, those of images included, over its time."),
    Number { unit: Unit::Share, ..machine("fill", "Packing efficiency", "Share of the packs that tokens fill.") },
    Number { unit: Unit::Share, ..machine("data_wait", "Waiting for data", "Share of the time of a step in which no data was ready.") },
    Number { unit: Unit::Bytes, is_noisy: false, ..machine("peak_memory_bytes", "Peak memory", "Largest memory of the process so far.") },
    Number { unit: Unit::Bytes, is_noisy: false, ..machine("peak_device_reserved_bytes", "Peak GPU memory", "Largest memory so far that the process has reserved on its GPU.") },
];

/// A number that has no name here.
pub(super) static UNNAMED: Number = number("", "", "");

/// The number of `key`, which is in the list.
pub(super) fn named(key: &str) -> &'static Number {
    find(key).expect("a key of the list")
}

/// The number of `key`; `None` for those of user-defined names, such as the losses of data sets.
pub(super) fn find(key: &str) -> Option<&'static Number> {
    NUMBERS.iter().find(|number| number.key == key)
}
