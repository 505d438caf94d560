//! `trainer report` through the command line: the page of a run, of several runs, and its errors.

use super::harness::{Place, golden};
use serde_json::{Value, json};
use std::fs;

/// Text of a row that must not become markup.
const HOSTILE: &str = "<script>fetch('https://example.com')</script>";

/// A folder with the run `run`: two steps, each with answers to two rows, of which one has an image,
/// and the other hostile text.
fn place() -> Place {
    let place = Place::with_model_and_rows();
    let data = fs::read_to_string(golden("data/image_exact.jsonl")).unwrap();
    let mut row: Value = serde_json::from_str(data.lines().nth(30).unwrap()).unwrap();
    let image = row.to_string();
    let last = row["messages"].as_array().unwrap().len() - 1;
    row["messages"][last]["content"] = HOSTILE.into();
    row["id"] = HOSTILE.into();
    place.write("eval.jsonl", &format!("{image}\n{row}\n"));
    let images = golden("data").display().to_string();
    place.write(
        "config.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: model}}\ndevice: cpu\ndata:\n\
             \x20 train: [{{path: rows.jsonl, image_root: '{images}'}}]\n\
             \x20 eval: [{{path: eval.jsonl, image_root: '{images}'}}]\n\
             \x20 packing_length: 512\n  max_rejected: 1.0\ntrain: {{max_steps: 2}}\n\
             checkpoint: {{every_steps: 0}}\n\
             eval: {{every_steps: 1, show: 0, generate: {{max_new_tokens: 2}}}}\n"
        ),
    );
    place.trainer(&["sft", "--config", "config.yaml"]).ends_with(0);
    place
}

/// Fails if the page could load or run something, or is too large.
#[track_caller]
fn check(page: &str) {
    assert!(page.len() <= 2_000_000, "{} bytes", page.len());
    assert!(page.contains("Content-Security-Policy") && page.contains("default-src 'none'"));
    let lower = page.to_lowercase();
    for part in
        ["<script", "<link", "<iframe", "<object", "<embed", "<form", "<base", "url(", "@import"]
    {
        assert!(!lower.contains(part), "{part}");
    }
    for attribute in ["src=", "href="] {
        for found in lower.split(attribute).skip(1) {
            let is_local = found.starts_with("\"data:image/") || found.starts_with("\"#");
            assert!(is_local, "{attribute}{}", &found[..found.len().min(80)]);
        }
    }
}

#[test]
fn the_page_of_a_run_has_its_answers_and_loads_nothing() {
    let place = place();
    let written = place.read("run/report.html"); // by `sft`
    let output = place.trainer(&["report", "run"]).ends_with(0);
    assert_eq!(output.stdout, "run/report.html\n");
    let page = String::from_utf8(place.read("run/report.html")).unwrap();
    check(&page);
    assert!(page.contains("&lt;script&gt;fetch("), "the expected answer is text");
    assert!(page.contains("src=\"data:image/png;base64,"), "the image of a row");
    assert!(page.contains("<code>run</code>") && written.len() > page.len() / 2);
    let last = place.rows("run/metrics.jsonl").pop().unwrap();
    let predicted = last["predicted_memory_bytes"].as_f64().unwrap() / f64::from(1 << 20);
    assert!(page.contains(&format!("<td>{predicted:.0} MiB (")), "the prediction of the log");
    // a run that writes checkpoints in the background also needs their copy
    let saves = ["--set", "output_dir=saves", "--set", "checkpoint.every_steps=1"];
    place.trainer(&[&["sft", "--config", "config.yaml"][..], &saves].concat()).ends_with(0);
    let saved = String::from_utf8(place.read("saves/report.html")).unwrap();
    assert!(saved.contains(" MiB for the copy of a checkpoint ("), "{saved}");
    // `--out`, also to stdout
    let out = ["report", "run", "--out", "page.html"];
    assert_eq!(place.trainer(&out).ends_with(0).stdout, "page.html\n");
    assert!(place.read("page.html") == page.as_bytes());
    let stdout = place.trainer(&["report", "run", "--out", "/dev/stdout"]).ends_with(0).stdout;
    assert!(stdout.starts_with(&page), "the page, and then its path");
}

#[test]
fn a_run_that_ends_early_has_a_page_too() {
    let place = place();
    let settings = ["output_dir=early", "optim.lr=1.0e6", "train.max_grad_norm=0", "data.eval=[]"];
    let settings = settings.iter().chain(&["eval.generate=null", "train.max_steps=20"]);
    let settings = settings.flat_map(|setting| ["--set", setting]);
    let arguments: Vec<&str> =
        ["sft", "--config", "config.yaml"].into_iter().chain(settings).collect();
    let output = place.trainer(&arguments).ends_with(65).says("wrote a report of the run");
    assert!(output.stderr.contains("error: "), "{}", output.stderr);
    let page = String::from_utf8(place.read("early/report.html")).unwrap();
    check(&page);
    assert!(page.contains("not finished"));
}

#[test]
fn the_page_of_several_runs_names_the_settings_in_which_they_differ() {
    let place = place();
    let other = ["--set", "output_dir=other", "--set", "optim.lr=1.25e-4"];
    place.trainer(&[&["sft", "--config", "config.yaml"][..], &other].concat()).ends_with(0);
    let output = place.trainer(&["report", "run", "other"]).ends_with(0);
    assert_eq!(output.stdout, "report.html\n");
    let page = String::from_utf8(place.read("report.html")).unwrap();
    check(&page);
    assert!(page.contains("0.000125") && page.contains("optim.lr"));
    assert!(page.contains("<code>run</code>") && page.contains("<code>other</code>"));
    assert_eq!(
        page.matches("class=\"line c1\"").count(),
        page.matches("class=\"line c0\"").count()
    );
}

#[test]
fn the_page_of_a_long_run_with_many_answers_is_small() {
    let place = Place::empty();
    fs::create_dir(place.path("run")).unwrap();
    let lines = |rows: &mut dyn Iterator<Item = Value>| {
        rows.map(|row| row.to_string()).collect::<Vec<_>>().join("\n")
    };
    let step = |step: u64| {
        let value = 1.0 + (step as f64 * 0.37).sin();
        json!({"step": step, "loss": value, "grad_norm": value, "lr": 1e-4, "tokens_per_s": 1000.0 * value,
               "skipped": false, "fill": 0.9, "step_time_s": value, "data_wait_s": 0.1 * value,
               "peak_memory_bytes": 1 << 30, "rejected": step, "rejected_by_reason": {HOSTILE: step}})
    };
    place.write("run/metrics.jsonl", &lines(&mut (1..=30_000).map(step)));
    let answer = |index: u64| {
        let text = format!("{HOSTILE} ").repeat(2_000);
        json!({"step": 30_000, "row": index.to_string(), "expected": text, "answered": text, "exact": 1.0})
    };
    place.write("run/predictions.jsonl", &lines(&mut (0..60).map(answer)));
    place.trainer(&["report", "run"]).ends_with(0);
    check(&String::from_utf8(place.read("run/report.html")).unwrap());
}

#[test]
fn a_report_that_cannot_be_made_says_why() {
    let place = Place::empty();
    let none = place.trainer(&["report", "none"]).ends_with(64);
    none.says("cannot read `none/metrics.jsonl`").says("hint: pass the `output_dir` of a run");
    place.trainer(&["report"]).ends_with(64).says("RUN_DIR");
    fs::create_dir(place.path("run")).unwrap();
    place.write("run/metrics.jsonl", "{\"step\":1,\"loss\":1.5,\"grad_norm\":1.0}\n");
    let out = ["report", "run", "--out", "no/page.html"];
    place.trainer(&["report", "none", "--out", "no/page.html"]).ends_with(73);
    place.trainer(&out).ends_with(73).says("cannot write `no/page.html`").says("`--out`");
    place.trainer(&["report", "run"]).ends_with(0);
}
