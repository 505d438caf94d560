//! The tables of the page.

use super::facts::{duration, method, thousands};
use super::folder::RunFolder;
use super::html::{escaped, push};
use super::numbers::find;
use super::svg_chart::number;
use crate::run::{copy_of_checkpoint, predicted_memory};
use chrono::DateTime;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of steps, rows or settings in a table.
const MAX_ROWS: usize = 200;
/// Maximum number of characters of a value or message.
const MAX_CHARS: usize = 300;

/// The end of text that is too long is left out; the rest is escaped.
pub(super) fn short(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => escaped(&text[..end]) + " …",
        None => escaped(text),
    }
}

/// A value without the quotes of texts.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A table that can be scrolled sideways; the first row is its head.
fn table(rows: &[Vec<String>]) -> String {
    let mut html = String::from("<div class=\"wide\"><table>\n");
    for (index, row) in rows.iter().enumerate() {
        html.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let tag = if index == 0 || column == 0 { "th" } else { "td" };
            push(&mut html, format_args!("<{tag}>{cell}</{tag}>"));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></div>\n");
    html
}

type Text = fn(&RunFolder) -> Option<String>;
type ComparedBy = fn(&RunFolder) -> Option<f64>;

/// What the head of the page has of each run: the key of a number or another name, what it means if
/// that is not the meaning of the number, its value, and what runs are sorted by, lower values
/// first; with `None`, runs are not sorted by it.
#[rustfmt::skip]
static FACTS: [(&str, &str, Text, Option<ComparedBy>); 22] = [
    ("State", "", |run| Some(state(run)), None),
    ("Model", "", RunFolder::model, None),
    ("Method", "", |run| run.config.as_ref().ok().map(method), None),
    ("Data", "", RunFolder::data, None),
    ("Machine", "", RunFolder::machine, None),
    ("Started", "", RunFolder::started, None),
    ("eval.loss", "", eval_loss, Some(|run| Some(run.outcome().eval?[0].1))),
    ("loss", "", training_loss, Some(|run| Some(run.outcome().loss?.1))),
    ("eval.accuracy", "", |run| run.eval.get("accuracy")?.last().map(percent), Some(|run| Some(-run.eval.get("accuracy")?.last()?))),
    ("Training time", "Steps with their waits for data and checkpoints, without the start and evaluations.", |run| Some(duration(run.outcome().seconds)), Some(|run| Some(run.outcome().seconds))),
    ("Tokens", "Those of images included. The loss is that of the supervised ones.", tokens, Some(|run| Some(run.outcome().tokens as f64))),
    ("Time per 1,000 tokens", "Training time over tokens.", |run| Some(format!("{} s", number(run.time_per_1000()?))), Some(RunFolder::time_per_1000)),
    ("Cost", "Training time times the given price of an hour.", cost, Some(|run| Some(run.cost()?[0]))),
    ("tokens_per_s", "Median of the steps.", |run| run.train("tokens_per_s")?.median().map(number), Some(|run| Some(-run.train("tokens_per_s")?.median()?))),
    ("fill", "", |run| run.train("fill")?.median().map(percent), None),
    ("data_wait", "", |run| run.train("data_wait")?.median().map(percent), None),
    ("Peak memory, measured", "Of the tensors on the GPU, otherwise of the process.", |run| measured(run).map(bytes), Some(measured)),
    ("Peak memory, predicted", "", predicted, None),
    ("rejected", "", |run| run.last["rejected"].as_u64().map(thousands), None),
    ("Truncated rows", "Rows of the data files that are longer than data.max_length.", |run| Some(thousands(run.outcome().truncated)).filter(|rows| rows != "0"), None),
    ("Skipped steps", "Steps that changed no weight, because a value was not finite.", |run| Some(run.skipped.len().to_string()), None),
    ("Restarts", "", |run| Some(run.restarts().len().to_string()), None),
];

/// The name of a fact with its meaning.
fn title(key: &str, meaning: &str) -> String {
    let (name, of_number) = find(key).map_or((key, ""), |number| (number.name, number.meaning));
    let meaning = escaped(if meaning.is_empty() { of_number } else { meaning });
    format!("{name}<small>{meaning}</small>")
}

/// The name and the value of a fact about a run, by the key of its number or by its name.
pub(super) fn fact(run: &RunFolder, key: &str) -> Option<(&'static str, String)> {
    let (key, _, text, _) = FACTS.iter().find(|(of, ..)| *of == key)?;
    Some((find(key).map_or(*key, |number| number.name), text(run)?))
}

/// One row per fact and one column per run. Several runs are also compared, one row per run.
pub(super) fn summary(runs: &[RunFolder]) -> String {
    let mut rows = Vec::new();
    let mut head = vec![String::new()];
    head.extend(runs.iter().map(|run| escaped(&run.path.display().to_string())));
    rows.push(if runs.len() > 1 { head } else { Vec::new() });
    for (key, meaning, text, _) in &FACTS {
        let values: Vec<Option<String>> = runs.iter().map(text).collect();
        if values.iter().any(Option::is_some) {
            let cell = |value: Option<String>| value.map_or_else(|| "-".to_owned(), |v| short(&v));
            let cells = values.into_iter().map(cell);
            rows.push(std::iter::once(title(key, meaning)).chain(cells).collect());
        }
    }
    let mut html = table(&rows);
    if runs.len() > 1 {
        html = comparison(runs)
            + "<details><summary>All facts about the runs</summary>\n"
            + &html
            + "</details>\n";
    }
    for run in runs.iter().filter(|run| run.damaged > 0) {
        let path = escaped(&run.path.display().to_string());
        let lines = run.damaged;
        push(&mut html, format_args!("<p>{path}: {lines} damaged lines are left out.</p>\n"));
    }
    html
}

/// A row per run, sorted by the first number that they have. A click on another one sorts by it: the
/// style sheet places row `i` by the value of `--i` of the checked column.
fn comparison(runs: &[RunFolder]) -> String {
    let sorted = FACTS.iter().filter_map(|(key, meaning, text, order)| {
        let values: Vec<Option<f64>> = runs.iter().map((*order)?).collect();
        let place = |run: usize| (values[run].is_none(), values[run]);
        let mut ranks: Vec<usize> = (0..runs.len()).collect();
        ranks.sort_by(|a, b| {
            let (a, b) = (place(*a), place(*b));
            a.0.cmp(&b.0).then(a.1.unwrap_or(0.0).total_cmp(&b.1.unwrap_or(0.0)))
        });
        values.iter().any(Option::is_some).then(|| (title(key, meaning), *text, ranks))
    });
    let columns: Vec<(String, Text, Vec<usize>)> = sorted.collect();
    let mut html = format!(
        "<div class=\"wide\"><table class=\"sort\" style=\"--n:{}\">\n<tr><th>Run</th>",
        columns.len()
    );
    for (index, (title, ..)) in columns.iter().enumerate() {
        let checked = if index == 0 { " checked" } else { "" };
        push(
            &mut html,
            format_args!(
                "<th><label><input type=\"radio\" name=\"sort\" class=\"s{index}\"{checked}>{title}</label></th>"
            ),
        );
    }
    html.push_str("</tr>\n");
    let first = columns.first().map_or_else(|| (0..runs.len()).collect(), |of| of.2.clone());
    for run in first {
        let place = |ranks: &[usize]| 1 + ranks.iter().position(|at| *at == run).unwrap_or(0);
        let places = columns.iter().enumerate();
        let places: Vec<String> =
            places.map(|(index, of)| format!("--s{index}:{}", place(&of.2))).collect();
        let path = escaped(&runs[run].path.display().to_string());
        let style = places.join(";");
        push(&mut html, format_args!("<tr style=\"{style}\"><th>{path}</th>"));
        for (_, text, _) in &columns {
            let cell = text(&runs[run]).map_or_else(|| "-".to_owned(), |value| short(&value));
            push(&mut html, format_args!("<td>{cell}</td>"));
        }
        html.push_str("</tr>\n");
    }
    html + "</table></div>\n"
}

fn tokens(run: &RunFolder) -> Option<String> {
    let of = run.outcome();
    let text = format!("{}, {} supervised", thousands(of.tokens), thousands(of.targets));
    (of.tokens > 0).then_some(text)
}

fn training_loss(run: &RunFolder) -> Option<String> {
    let (first, last, steps) = run.outcome().loss?;
    let over = if steps > 1 { format!(" (means of {steps} steps)") } else { String::new() };
    Some(format!("{} at the start, {} at the end{over}", number(first), number(last)))
}

fn eval_loss(run: &RunFolder) -> Option<String> {
    let of = run.outcome();
    let [(at, last), (step, best)] = of.eval?;
    let when = match (at < of.last_step, best < last) {
        (true, _) => format!(" after step {at}"),
        (false, true) => " at the end".to_owned(),
        (false, false) => String::new(),
    };
    let least =
        if best < last { format!(", {} after step {step}", number(best)) } else { String::new() };
    Some(number(last) + &when + &least)
}

fn cost(run: &RunFolder) -> Option<String> {
    let [all, per_1000] = run.cost()?;
    let all = if all < 1.0 { number(all) } else { format!("{all:.2}") };
    Some(format!("{all}, {} per 1,000 tokens", number(per_1000)))
}

fn state(run: &RunFolder) -> String {
    let step = run.last["step"].as_u64().unwrap_or(0);
    let epoch = run.last["epoch"]
        .as_f64()
        .map_or_else(String::new, |epoch| format!(", epoch {}", number(epoch)));
    let state = if run.is_finished { "finished" } else { "not finished" };
    format!("{state}, step {step}{epoch}")
}

/// Peak memory of the tensors on the GPU if there is one, otherwise of the process: what
/// `predicted_memory_bytes` predicts.
fn measured(run: &RunFolder) -> Option<f64> {
    let series = run.train("peak_device_memory_bytes").or_else(|| run.train("peak_memory_bytes"));
    series?.max()
}

/// The prediction of the run from its data, otherwise that of `trainer check`, the copy of a rank
/// from which its checkpoints were written, and the distance of their sum from the measured peak.
fn predicted(run: &RunFolder) -> Option<String> {
    let of_config = || {
        let is_alone = run.last["ranks"].is_null();
        let config = run.config.as_ref().ok().filter(|_| is_alone)?;
        predicted_memory(config).ok()
    };
    let predicted = run.last["predicted_memory_bytes"].as_f64().or_else(of_config)?;
    let measured = measured(run)?;
    let copy = copy(run);
    let more = 100.0 * ((predicted + copy) / measured - 1.0);
    let copy = match copy {
        copy if copy > 0.0 => format!(" and {} for the copy of a checkpoint", bytes(copy)),
        _ => String::new(),
    };
    Some(format!("{}{copy} ({more:+.0} %)", bytes(predicted)))
}

/// Bytes of host memory for the copy of a rank; 0 if the peak is that of a GPU, or if no checkpoint
/// was written in the background.
fn copy(run: &RunFolder) -> f64 {
    let Ok(config) = &run.config else { return 0.0 };
    let step = run.last["step"].as_u64().unwrap_or(0);
    let is_written = run.is_finished || step >= config.checkpoint.every_steps;
    if !is_written || run.train("peak_device_memory_bytes").is_some() {
        return 0.0;
    }
    let world = run.last["ranks"]["world"].as_f64().unwrap_or(1.0);
    copy_of_checkpoint(config).unwrap_or(0.0) / world
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn bytes(bytes: f64) -> String {
    match bytes / 1024_f64.powi(3) {
        gib if gib >= 1.0 => format!("{gib:.2} GiB"),
        gib => format!("{:.0} MiB", gib * 1024.0),
    }
}

/// The processes that trained the run, if there were several.
pub(super) fn starts(run: &RunFolder) -> String {
    let restarts = run.restarts();
    if restarts.is_empty() {
        return String::new();
    }
    let mut html = String::from("<h2>Restarts</h2>\n");
    if run.starts.is_empty() {
        let steps = list(&restarts);
        push(&mut html, format_args!("<p>After step {steps}, where the peak memory falls.</p>\n"));
        return html;
    }
    let head = ["Process", "After step", "Time (UTC)", "Version", "Ranks"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (index, start) in run.starts.iter().take(MAX_ROWS).enumerate() {
        let time = start["time"].as_i64().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
        rows.push(vec![
            (index + 1).to_string(),
            short(&plain(&start["after_step"])),
            time.map_or_else(String::new, |time| {
                time.format("<span class=\"one\">%Y-%m-%d %H:%M:%S</span>").to_string()
            }),
            short(&plain(&start["version"])),
            short(&plain(&start["world"])),
        ]);
    }
    html + &table(&rows)
}

/// Steps in which a value is not finite, that changed no weight, or are far above those before.
pub(super) fn unusual(run: &RunFolder) -> String {
    let mut items = String::new();
    for (values, of) in [(&run.train, ""), (&run.eval, " of evaluations")] {
        for (key, series) in values {
            let gaps = series.gaps();
            if !gaps.is_empty() {
                let (key, count) = (escaped(key), gaps.len());
                let steps = list(&gaps);
                push(
                    &mut items,
                    format_args!(
                        "<li><b class=\"bad\">Not finite</b>: <code>{key}</code>{of} in {count} steps: {steps}</li>\n"
                    ),
                );
            }
        }
    }
    if !run.skipped.is_empty() {
        let (count, steps) = (run.skipped.len(), list(&run.skipped));
        push(
            &mut items,
            format_args!(
                "<li><b class=\"bad\">Skipped</b>: {count} steps changed no weight: {steps}</li>\n"
            ),
        );
    }
    for (step, spike) in run.spikes.iter().take(MAX_ROWS) {
        let [value, usual] = [spike.value, spike.usual].map(number);
        push(
            &mut items,
            format_args!(
                "<li><b class=\"spike\">Spike</b>: <code>{}</code> is {value} in step {step}, the median before was {usual}</li>\n",
                spike.name
            ),
        );
    }
    if items.is_empty() {
        return items;
    }
    format!("<h2>Unusual steps</h2>\n<ul>\n{items}</ul>\n")
}

/// The first steps of a list.
fn list(steps: &[u64]) -> String {
    const SHOWN: usize = 30;
    let shown: Vec<String> = steps.iter().take(SHOWN).map(u64::to_string).collect();
    shown.join(", ") + if steps.len() > SHOWN { " …" } else { "" }
}

pub(super) fn rejected(run: &RunFolder) -> String {
    let reasons = run.last["rejected_by_reason"].as_object();
    let has_reasons = reasons.is_some_and(|reasons| !reasons.is_empty());
    if !has_reasons && run.rejects.is_empty() {
        return String::new();
    }
    let mut html = String::from("<h2>Rejected rows</h2>\n");
    if let Some(reasons) = reasons.filter(|_| has_reasons) {
        let mut rows = vec![vec!["Reason".to_owned(), "Rows".to_owned()]];
        let counts = reasons.iter().take(MAX_ROWS);
        rows.extend(counts.map(|(reason, count)| vec![short(reason), short(&plain(count))]));
        html += &table(&rows);
    }
    if !run.rejects.is_empty() {
        push(
            &mut html,
            format_args!(
                "<details><summary>The first {} lines of <code>rejects.jsonl</code></summary>\n<ul>\n",
                run.rejects.len()
            ),
        );
        for row in &run.rejects {
            push(
                &mut html,
                format_args!(
                    "<li><code>{}:{}</code> <b>{}</b> {}</li>\n",
                    short(&plain(&row["file"])),
                    short(&plain(&row["row"])),
                    short(&plain(&row["reason"])),
                    short(&plain(&row["message"]))
                ),
            );
        }
        html.push_str("</ul></details>\n");
    }
    html
}

/// The settings in which the runs differ.
pub(super) fn differences(runs: &[RunFolder]) -> String {
    let settings: Vec<BTreeMap<String, String>> = runs.iter().map(settings).collect();
    let keys: BTreeSet<&String> = settings.iter().flat_map(BTreeMap::keys).collect();
    let mut head = vec!["Setting".to_owned()];
    head.extend(runs.iter().map(|run| escaped(&run.path.display().to_string())));
    let mut rows = vec![head];
    for key in keys.into_iter().filter(|key| key.as_str() != "output_dir") {
        let values: Vec<Option<&String>> = settings.iter().map(|of| of.get(key)).collect();
        if values.iter().any(|value| *value != values[0]) && rows.len() <= MAX_ROWS {
            let cell = |value: Option<&String>| value.map_or_else(|| "-".to_owned(), |v| short(v));
            let cells = values.into_iter().map(cell);
            rows.push(
                std::iter::once(format!("<code>{}</code>", short(key))).chain(cells).collect(),
            );
        }
    }
    if rows.len() == 1 {
        return "<h2>Settings that differ</h2>\n<p>None.</p>\n".to_owned();
    }
    "<h2>Settings that differ</h2>\n".to_owned() + &table(&rows)
}

fn settings(run: &RunFolder) -> BTreeMap<String, String> {
    run.config.as_ref().map(crate::config::RunConfig::settings).unwrap_or_default()
}

/// All settings of each run, folded.
pub(super) fn configs(runs: &[RunFolder]) -> String {
    let mut html = String::from("<h2>Config</h2>\n");
    for run in runs {
        let path = escaped(&run.path.display().to_string());
        if let Err(error) = &run.config {
            push(&mut html, format_args!("<p>{path}: {}</p>\n", short(error)));
            continue;
        }
        let settings = settings(run);
        push(&mut html, format_args!("<details><summary>{path}</summary>\n<dl>\n"));
        for (key, value) in settings.iter().take(MAX_ROWS) {
            push(&mut html, format_args!("<dt>{}</dt><dd>{}</dd>\n", short(key), short(value)));
        }
        html.push_str("</dl></details>\n");
    }
    html
}
