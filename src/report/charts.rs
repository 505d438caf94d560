//! The charts of the page: their keys, order and names.

use super::folder::RunFolder;
use super::series::Series;
use super::svg_chart::{Chart, ChartLine, Mark, Unit};
use std::collections::BTreeSet;

/// Keys of steps that have a chart: key, title, unit, and whether its axis may be logarithmic.
const TRAIN: [(&str, &str, Unit, bool); 8] = [
    ("lr", "Learning rate", Unit::Number, false),
    ("grad_norm", "Gradient norm before clipping", Unit::Number, true),
    ("tokens_per_s", "Tokens per second", Unit::Number, false),
    ("peak_memory_bytes", "Peak memory of the process", Unit::Bytes, false),
    ("peak_device_reserved_bytes", "Peak GPU memory, reserved", Unit::Bytes, false),
    ("fill", "Packing efficiency (fill)", Unit::Share, false),
    ("data_wait", "Time of a step spent waiting for data", Unit::Share, false),
    ("rejected", "Rejected rows so far", Unit::Number, false),
];

const MAX_SETS: usize = 16;
/// Number of places of all lines of a chart together.
const PLACES: usize = 1600;

pub(super) fn charts(runs: &[RunFolder]) -> String {
    let mut out = String::from("<div class=\"charts\">\n");
    out.push_str(&losses(runs));
    let accuracy = lines(runs, |run| run.eval.get("accuracy"), true);
    out.push_str(&chart(runs, "Exact held-out answers", Unit::Share, accuracy, false));
    for key in other_scores(runs) {
        let scores = lines(runs, |run| run.eval.get(&key), true);
        let unit = if scores.iter().all(|line| line.series.max() <= Some(1.0)) {
            Unit::Share
        } else {
            Unit::Number
        };
        out.push_str(&chart(runs, &format!("Evaluation: {key}"), unit, scores, false));
    }
    for (key, title, unit, may_be_log) in TRAIN {
        let found = lines(runs, |run| run.train(key), false);
        let is_zero = key == "rejected" && found.iter().all(|line| line.series.max() == Some(0.0));
        if !is_zero {
            out.push_str(&chart(runs, title, unit, found, may_be_log));
        }
    }
    for run in runs {
        out.push_str(&data_sets(runs, run));
    }
    out.push_str("</div>\n");
    out
}

/// The losses of steps and evaluations: in one chart for one run, in two for several.
fn losses(runs: &[RunFolder]) -> String {
    let train = lines(runs, |run| run.train("loss"), false);
    let eval = lines(runs, |run| run.eval.get("loss"), true);
    if let ([_], [_]) = (runs, eval.as_slice()) {
        let mut both: Vec<ChartLine<'_>> = train.into_iter().chain(eval).collect();
        for (colour, (line, label)) in both.iter_mut().zip(["training", "evaluation"]).enumerate() {
            (line.label, line.colour) = (label.to_owned(), colour);
        }
        let chart =
            Chart { has_legend: true, ..with_marks(runs, "Loss", Unit::Number, both, true) };
        return chart.html();
    }
    chart(runs, "Loss of the steps", Unit::Number, train, true)
        + &chart(runs, "Loss of the evaluations", Unit::Number, eval, true)
}

fn data_sets(runs: &[RunFolder], run: &RunFolder) -> String {
    let mut html = String::new();
    let of = if runs.len() > 1 { format!(" of {}", run.path.display()) } else { String::new() };
    for (values, kind, dots) in [(&run.train, "steps", false), (&run.eval, "evaluations", true)] {
        let sets =
            values.iter().filter_map(|(key, series)| Some((key.strip_prefix("loss/")?, series)));
        let lines: Vec<ChartLine<'_>> = sets
            .take(MAX_SETS)
            .enumerate()
            .map(|(colour, (name, series))| ChartLine {
                label: name.to_owned(),
                colour,
                series,
                dots,
            })
            .collect();
        let places = PLACES / lines.len().max(4);
        let title = format!("Loss of the {kind} by data set{of}");
        let chart = Chart {
            title,
            unit: Unit::Number,
            lines,
            marks: Vec::new(),
            may_be_log: true,
            has_legend: true,
            places,
            last_step: last_step(runs),
        };
        html.push_str(&chart.html());
    }
    html
}

/// The last step of any run: all charts have the same axis of steps.
fn last_step(runs: &[RunFolder]) -> u64 {
    runs.iter().filter_map(|run| run.last["step"].as_u64()).max().unwrap_or(0)
}

/// Keys of evaluations that have no chart of their own, such as those of generated answers.
fn other_scores(runs: &[RunFolder]) -> BTreeSet<String> {
    const KNOWN: [&str; 6] =
        ["step", "loss", "accuracy", "num_target_tokens", "num_samples", "time_s"];
    let keys = runs.iter().flat_map(|run| run.eval.keys());
    let other = keys.filter(|key| {
        !KNOWN.contains(&key.as_str()) && !key.contains("loss/") && !key.starts_with("num_")
    });
    // A generated evaluation usually counts the same exact answers as `accuracy`.
    let is_twin = |key: &str| {
        let points = |run: &RunFolder, key| run.eval.get(key).map(|series| series.0.clone());
        key == "exact"
            && runs.iter().all(|run| {
                let exact = points(run, "exact");
                exact.is_none() || exact == points(run, "accuracy")
            })
    };
    other.filter(|key| !is_twin(key)).cloned().collect()
}

fn lines<'a>(
    runs: &'a [RunFolder],
    of: impl Fn(&'a RunFolder) -> Option<&'a Series>,
    dots: bool,
) -> Vec<ChartLine<'a>> {
    let found = runs.iter().enumerate().filter_map(|(colour, run)| {
        let label = run.path.display().to_string();
        Some(ChartLine { label, colour, series: of(run)?, dots })
    });
    found.collect()
}

fn chart(
    runs: &[RunFolder],
    title: &str,
    unit: Unit,
    lines: Vec<ChartLine<'_>>,
    may_be_log: bool,
) -> String {
    with_marks(runs, title, unit, lines, may_be_log).html()
}

/// A chart with the restarts of a single run, and in those of losses and norms its unusual steps.
fn with_marks<'a>(
    runs: &[RunFolder],
    title: &str,
    unit: Unit,
    lines: Vec<ChartLine<'a>>,
    may_be_log: bool,
) -> Chart<'a> {
    let mut marks = Vec::new();
    if let [run] = runs {
        marks.extend(run.restarts().into_iter().map(|step| Mark {
            step,
            class: "restart",
            title: format!("restart after step {step}"),
        }));
        if may_be_log {
            let gaps = lines.iter().flat_map(|line| line.series.gaps());
            marks.extend(gaps.map(|step| Mark {
                step,
                class: "bad",
                title: format!("step {step}: not finite"),
            }));
            marks.extend(run.spikes.iter().map(|(step, spike)| Mark {
                step: *step,
                class: "spike",
                title: format!("step {step}: spike of {}", spike.name),
            }));
        }
    }
    let places = PLACES / lines.len().max(4);
    let last_step = last_step(runs);
    Chart {
        title: title.to_owned(),
        unit,
        lines,
        marks,
        may_be_log,
        has_legend: false,
        places,
        last_step,
    }
}
