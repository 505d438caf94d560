//! Pages of run folders that are written by hand.

use super::{RunFolder, report};
use crate::checkpoint::write_atomically;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use tempfile::TempDir;

/// Text of a row that must not become markup.
const HOSTILE: &str = "<script>alert(1)</script><img src=https://example.com/a.png onerror=x>\"'";

fn write(folder: &Path, name: &str, rows: impl IntoIterator<Item = Value>) {
    let mut text = String::new();
    for row in rows {
        writeln!(text, "{row}").unwrap();
    }
    write_atomically(&folder.join(name), text.as_bytes()).unwrap();
}

fn row(step: u64, loss: Option<f64>) -> Value {
    json!({
        "step": step, "epoch": 0.5, "loss": loss, "grad_norm": 1.0, "skipped": loss.is_none(),
        "lr": 1e-4, "fill": 0.9, "step_time_s": 2.0, "data_wait_s": 0.5, "tokens_per_s": 1000.0,
        "peak_memory_bytes": 1 << 30, "rejected": 3, "rejected_by_reason": {HOSTILE: 3},
        "ranks": null, (format!("loss/{HOSTILE}")): 1.5, "loss/b": 2.5,
    })
}

/// A run of `steps` steps with a loss that is not finite in step 7.
fn run(steps: u64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let loss = |step: u64| (step != 7).then(|| 1.0 + 5.0 / step as f64);
    write(folder.path(), "metrics.jsonl", (1..=steps).map(|step| row(step, loss(step))));
    write(folder.path(), "eval.jsonl", [json!({"step": 10, "loss": 1.25, "accuracy": 0.5})]);
    folder
}

fn page(folder: &TempDir) -> String {
    report(&[RunFolder::read(folder.path()).unwrap()], &[]).unwrap()
}

/// Whether the page has an element or attribute that could load or run something.
fn is_active(page: &str) -> bool {
    let lower = page.to_lowercase();
    let elements = ["<script", "<link", "<iframe", "<object", "<embed", "<form", "url("];
    let loads =
        lower.split("src=\"").skip(1).any(|rest| !rest.starts_with("data:image/png;base64,"));
    elements.iter().any(|element| lower.contains(element)) || loads
}

#[test]
fn text_of_rows_and_settings_never_becomes_markup() {
    let folder = run(12);
    let answer = json!({"step": 10, "id": HOSTILE, "row": HOSTILE, "expected": HOSTILE, "answered": HOSTILE, HOSTILE: 0.5});
    write(folder.path(), "predictions.jsonl", [answer]);
    let reject =
        json!({"step": 1, "file": HOSTILE, "row": 3, "reason": HOSTILE, "message": HOSTILE});
    write(folder.path(), "rejects.jsonl", [reject]);
    let start =
        json!({"after_step": 4, "time": 1_700_000_000, "version": HOSTILE, "world": HOSTILE});
    write(folder.path(), "starts.jsonl", [start]);
    let page = page(&folder);
    assert!(!is_active(&page), "{page}");
    // reason twice, data set, answer (id, expected, answered, score), reject (3 texts), start (2)
    assert!(page.matches("&lt;script&gt;").count() >= 10, "{page}");
}

#[test]
fn a_loss_that_is_not_finite_is_a_gap_and_is_listed() {
    let page = page(&run(12));
    let line = page.split("class=\"line c0\" d=\"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(line.matches('M').count(), 2);
    assert!(page.contains("<code>loss</code> in 1 steps: 7</li>"), "{page}");
    assert!(page.contains("1 steps changed no weight: 7</li>"), "{page}");
}

#[test]
fn restarts_are_marked_and_listed() {
    let folder = run(12);
    let start = |step: u64| json!({"after_step": step, "time": 1_700_000_000 + step, "version": "1", "world": 1});
    write(folder.path(), "starts.jsonl", [0, 0, 4, 8].map(start));
    let page = page(&folder);
    assert!(
        page.contains("restart after step 4") && page.contains("restart after step 8"),
        "{page}"
    );
    assert!(!page.contains("restart after step 0"), "a start before the first step");
    assert!(page.contains("2023-11-14 22:13:24"), "{page}");
}

#[test]
fn exact_answers_have_one_chart_unless_two_evaluations_differ() {
    let folder = run(4);
    for (exact, charts) in [(0.75, 0), (0.5, 1)] {
        let eval = json!({"step": 1, "loss": 0.125, "accuracy": 0.75, "exact": exact});
        write(folder.path(), "eval.jsonl", [eval]);
        assert_eq!(page(&folder).matches("aria-label=\"Evaluation: exact").count(), charts);
    }
}

#[test]
fn a_page_of_long_runs_stays_small() {
    let folder = run(20_000);
    let runs: Vec<RunFolder> = (0..4).map(|_| RunFolder::read(folder.path()).unwrap()).collect();
    let page = report(&runs, &[]).unwrap();
    assert!(page.len() < 1 << 20, "{}", page.len());
    assert!(page.contains("class=\"band c3\""));
}

#[test]
fn answers_that_are_wrong_are_half_of_those_shown() {
    let folder = run(4);
    let answer = |index: u64, answered: &str| json!({"step": 4, "row": index.to_string(), "expected": "a", "answered": answered, "rouge_l": 0.25});
    let old = json!({"step": 2, "row": "0", "expected": "a", "answered": "old"});
    let answers = (0..100).map(|index| answer(index, if index < 60 { "a" } else { "b" }));
    write(folder.path(), "predictions.jsonl", std::iter::once(old).chain(answers));
    let page = page(&folder);
    assert!(page.contains("60 of 100 answers after step 4 equal"), "{page}");
    assert_eq!(page.matches("<article class=\"wrong\">").count(), 12);
    assert_eq!(page.matches("<article class=\"right\">").count(), 12);
    assert!(page.contains("<dt>rouge_l</dt><dd>0.25</dd>"), "{page}");
}

#[test]
fn a_folder_without_metrics_and_one_without_steps_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = RunFolder::read(folder.path()).unwrap_err();
    assert!(error.to_string().ends_with("metrics.jsonl`"), "{error}");
    write_atomically(&folder.path().join("metrics.jsonl"), b"{\"step").unwrap();
    let error = RunFolder::read(folder.path()).unwrap_err();
    assert!(error.to_string().ends_with("has no step"), "{error}");
}
