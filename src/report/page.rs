//! The report of one run, or of several next to each other.

use super::answers;
use super::charts::charts;
use super::folder::{ReportError, RunFolder};
use super::html::{document, escaped, push};
use super::svg_chart::legend;
use super::tables;
use crate::data::DatasetRows;
use std::iter;

/// The page of runs. `rows` are the eval rows of each run, whose images it shows; without them it
/// shows none.
pub fn report(runs: &[RunFolder], rows: &[Option<&DatasetRows>]) -> Result<String, ReportError> {
    let mut body = String::from("<h1>Training report</h1>\n");
    if let [run] = runs {
        let path = escaped(&run.path.display().to_string());
        push(&mut body, format_args!("<p><code>{path}</code></p>\n"));
    }
    body.push_str(&tables::summary(runs));
    if runs.len() > 1 {
        body.push_str("<div class=\"runs\">");
        let names: Vec<String> = runs.iter().map(|run| run.path.display().to_string()).collect();
        legend(names.iter().enumerate().map(|(colour, name)| (name.as_str(), colour)), &mut body);
        body.push_str("</div>\n");
    }
    body.push_str("<h2>Curves over optimizer steps</h2>\n");
    body.push_str(&charts(runs));
    if runs.len() > 1 {
        body.push_str(&tables::differences(runs));
    }
    let rows = rows.iter().copied().chain(iter::repeat(None));
    for (run, rows) in runs.iter().zip(rows) {
        let mut parts = tables::starts(run) + &tables::unusual(run) + &tables::rejected(run);
        parts += &answers::answers(run, rows, runs.len())?;
        if runs.len() > 1 && !parts.is_empty() {
            let path = escaped(&run.path.display().to_string());
            push(&mut body, format_args!("<h2 class=\"run\"><code>{path}</code></h2>\n"));
        }
        body.push_str(&parts);
    }
    body.push_str(&tables::configs(runs));
    let version = env!("CARGO_PKG_VERSION");
    push(&mut body, format_args!("<p class=\"end\">Written by trainer {version}.</p>\n"));
    Ok(document("Training report", include_str!("page.css"), &body))
}
