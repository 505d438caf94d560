//! The charts of the page.

use super::folder::RunFolder;
use super::html::push;
use super::numbers::{NUMBERS, Number, UNNAMED, find, named};
use super::svg_chart::{Chart, ChartLine, Mark, Unit};
use std::collections::BTreeSet;

const MAX_SETS: usize = 16;
/// Number of places of all lines of a chart together.
const PLACES: usize = 1600;

/// The charts of what is learned, and folded those of the machine.
pub(super) fn charts(runs: &[RunFolder]) -> String {
    let mut learned = String::new();
    let mut machine = String::new();
    for number in &NUMBERS {
        let out = if number.of_machine { &mut machine } else { &mut learned };
        match number.key {
            "loss" => out.push_str(&losses(runs, number)),
            "eval.loss" if runs.len() == 1 => {} // in the chart of the training loss
            "rejected" if runs.iter().all(|run| run.last["rejected"].as_u64() == Some(0)) => {}
            "eval.exact" if is_twin(runs) => {}
            key => out.push_str(&chart(runs, number, lines(runs, key)).html()),
        }
    }
    for key in other_scores(runs) {
        let lines = lines(runs, &format!("eval.{key}"));
        let is_share = lines.iter().all(|line| line.series.max() <= Some(1.0));
        let unit = if is_share { Unit::Share } else { Unit::Number };
        let title = format!("Evaluation: {key}");
        learned.push_str(&Chart { title, unit, ..chart(runs, &UNNAMED, lines) }.html());
    }
    for run in runs {
        learned.push_str(&data_sets(runs, run));
    }
    let mut out = format!("<div class=\"charts\">\n{learned}</div>\n");
    if !machine.is_empty() {
        push(
            &mut out,
            format_args!(
                "<details><summary>The machine: speed, memory, packing, waiting for data</summary>\n\
                 <div class=\"charts\">\n{machine}</div></details>\n"
            ),
        );
    }
    out
}

/// The losses of steps, for one run with those of evaluations.
fn losses(runs: &[RunFolder], number: &Number) -> String {
    let mut both = lines(runs, number.key);
    let eval = if runs.len() == 1 { lines(runs, "eval.loss") } else { Vec::new() };
    let has_legend = !eval.is_empty() && !both.is_empty();
    both.extend(eval);
    if has_legend {
        for (colour, (line, label)) in both.iter_mut().zip(["training", "evaluation"]).enumerate() {
            (line.label, line.colour) = (label.to_owned(), colour);
        }
    }
    let chart = chart(runs, number, both);
    if !has_legend {
        return chart.html();
    }
    let (title, of_eval) = ("Training and evaluation loss".to_owned(), named("eval.loss").meaning);
    let meaning = format!("Training loss: {} Evaluation loss: {of_eval}", chart.meaning);
    Chart { title, meaning, has_legend, ..chart }.html()
}

fn data_sets(runs: &[RunFolder], run: &RunFolder) -> String {
    let mut html = String::new();
    let of = if runs.len() > 1 { format!(" of {}", run.path.display()) } else { String::new() };
    for (values, key, dots) in [(&run.train, "loss", false), (&run.eval, "eval.loss", true)] {
        let number = named(key);
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
        let title = format!("{} by data set{of}", number.name);
        let chart = Chart { title, has_legend: true, ..chart(runs, number, lines) };
        html.push_str(&Chart { marks: Vec::new(), ..chart }.html());
    }
    html
}

/// The last step of any run: all charts have the same axis of steps.
fn last_step(runs: &[RunFolder]) -> u64 {
    runs.iter().filter_map(|run| run.last["step"].as_u64()).max().unwrap_or(0)
}

/// Keys of evaluations that have no name in [`NUMBERS`].
fn other_scores(runs: &[RunFolder]) -> BTreeSet<String> {
    let keys = runs.iter().flat_map(|run| run.eval.keys());
    let other = keys.filter(|key| {
        let is_known = ["step", "time_s"].contains(&key.as_str()) || key.contains("loss/");
        !is_known && !key.starts_with("num_") && find(&format!("eval.{key}")).is_none()
    });
    other.cloned().collect()
}

/// Whether the exact generated answers are the exact answers, as they are if all rows are
/// generated.
fn is_twin(runs: &[RunFolder]) -> bool {
    let points = |run: &RunFolder, key| run.eval.get(key).map(|series| series.0.clone());
    runs.iter().all(|run| {
        let exact = points(run, "exact");
        exact.is_none() || exact == points(run, "accuracy")
    })
}

/// A line per run that has values of `key`; those of evaluations have dots.
fn lines<'a>(runs: &'a [RunFolder], key: &str) -> Vec<ChartLine<'a>> {
    let found = runs.iter().enumerate().filter_map(|(colour, run)| {
        let label = run.path.display().to_string();
        let (series, dots) = match key.strip_prefix("eval.") {
            Some(key) => (run.eval.get(key)?, true),
            None => (run.train(key)?, false),
        };
        Some(ChartLine { label, colour, series, dots })
    });
    found.collect()
}

/// A chart with the restarts of a single run, and in those of losses and norms its unusual steps.
fn chart<'a>(runs: &[RunFolder], number: &Number, lines: Vec<ChartLine<'a>>) -> Chart<'a> {
    let mut marks = Vec::new();
    if let [run] = runs {
        marks.extend(run.restarts().into_iter().map(|step| Mark {
            step,
            class: "restart",
            title: format!("restart after step {step}"),
        }));
        if number.may_be_log {
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
    Chart {
        title: number.name.to_owned(),
        meaning: number.meaning.to_owned(),
        unit: number.unit,
        places: PLACES / lines.len().max(4),
        lines,
        marks,
        may_be_log: number.may_be_log,
        is_noisy: number.is_noisy,
        has_legend: false,
        last_step: last_step(runs),
    }
}
