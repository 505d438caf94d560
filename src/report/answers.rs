//! Held-out answers with their images.

use super::folder::{ReportError, RunFolder};
use super::html::{escaped, push};
use super::numbers::find;
use super::svg_chart::number;
use super::tables::short;
use super::thumbnail::thumbnail;
use crate::data::{DatasetRows, Pixels, RowReader};
use serde_json::Value;
use std::collections::BTreeMap;

const MAX_ANSWERS: usize = 24;
/// Maximum number of pixels of all images of a page: at most 700 kB as PNG in text.
const PAGE_PIXELS: u64 = 150_000;
/// Keys of an answer that are no scores.
const KNOWN: [&str; 2] = ["step", "num_media"];
const MAX_IMAGES: usize = 4;

/// Answers of the last evaluation of a run: half of them wrong, if there are enough of each.
pub(super) fn answers(
    run: &RunFolder,
    rows: Option<&DatasetRows>,
    num_runs: usize,
) -> Result<String, ReportError> {
    let Some(first) = run.answers.first() else { return Ok(String::new()) };
    let limit = (MAX_ANSWERS / num_runs).max(2);
    let is_right = |answer: &&Value| answer["expected"] == answer["answered"];
    let (right, wrong): (Vec<&Value>, Vec<&Value>) = run.answers.iter().partition(is_right);
    let num_wrong = wrong.len().min((limit / 2).max(limit.saturating_sub(right.len())));
    let shown = wrong.iter().take(num_wrong).chain(right.iter().take(limit - num_wrong));
    let shown: Vec<&Value> = shown.copied().collect();
    let mut html = format!(
        "<h2>Held-out answers</h2>\n<p>{} of {} answers after step {} equal the expected ones; {} are shown.</p>\n<div class=\"answers\">\n",
        right.len(),
        run.answers.len(),
        first["step"].as_u64().unwrap_or(0),
        shown.len()
    );
    let pixels = PAGE_PIXELS / (shown.len() * num_runs).max(1) as u64;
    let images_of = rows.map_or_else(BTreeMap::new, |rows| images(rows, &shown));
    for answer in &shown {
        let is_right = is_right(answer);
        let class = if is_right { "right" } else { "wrong" };
        push(&mut html, format_args!("<article class=\"{class}\">\n"));
        let images = images_of.get(text(answer, "row").as_str()).map_or(&[][..], Vec::as_slice);
        for image in images.iter().take(MAX_IMAGES) {
            let small = thumbnail(image, pixels / images.len().min(MAX_IMAGES) as u64);
            let small = small.map_err(|error| ReportError::Image(error.to_string()))?;
            push(
                &mut html,
                format_args!(
                    "<img src=\"{}\" width=\"{}\" height=\"{}\" alt=\"\">\n",
                    small.uri, small.width, small.height
                ),
            );
        }
        push(
            &mut html,
            format_args!(
                "<p><b>{class}</b> <code>{}</code></p>\n<dl><dt>expected</dt><dd>{}</dd><dt>answered</dt><dd>{}</dd>",
                short(&text(answer, if answer["id"].is_null() { "row" } else { "id" })),
                short(&text(answer, "expected")),
                short(&text(answer, "answered"))
            ),
        );
        // the other numbers are scores
        for (name, score) in answer.as_object().into_iter().flatten() {
            if let (Some(score), false) = (score.as_f64(), KNOWN.contains(&name.as_str())) {
                let score = number(score);
                let known = find(&format!("eval.{name}"));
                let name = known.map_or_else(|| escaped(name), |number| number.name.to_owned());
                push(&mut html, format_args!("<dt>{name}</dt><dd>{score}</dd>"));
            }
        }
        html.push_str("</dl>\n</article>\n");
    }
    html.push_str("</div>\n");
    Ok(html)
}

fn text(answer: &Value, key: &str) -> String {
    answer[key].as_str().map_or_else(|| answer[key].to_string(), str::to_owned)
}

/// The images of rows, by the name of the row. Rows that cannot be read have none.
fn images(rows: &DatasetRows, shown: &[&Value]) -> BTreeMap<String, Vec<Pixels>> {
    let wanted: Vec<String> = shown.iter().map(|answer| text(answer, "row")).collect();
    let mut found = BTreeMap::new();
    for row in rows.rows() {
        let name = rows.id(row).to_string();
        if !wanted.contains(&name) {
            continue;
        }
        if let Ok(sample) = rows.read(row) {
            let processor = rows.encoder().image_processor();
            let media = sample.media.iter().filter(|of| !of.continues_medium).take(MAX_IMAGES);
            let pixels = media.flat_map(|patches| processor.pixels(patches)).collect();
            found.insert(name, pixels);
        }
    }
    found
}
