//! Pages of run folders that are written by hand.

use super::{RunFolder, model_card, report};
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
        let page = page(&folder);
        assert_eq!(page.matches("aria-label=\"Exact generated answers\"").count(), charts);
        assert_eq!(page.matches("aria-label=\"Exact answers\"").count(), 1);
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
    assert!(page.contains("<dt>ROUGE-L of the answers</dt><dd>0.25</dd>"), "{page}");
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

/// A config of the run, as `config.yaml` in its folder.
fn write_config(folder: &Path, model: &str, more: &str) {
    let text = format!(
        "output_dir: runs/a\nmodel: {{path: '{model}'}}\ndata: {{train: [{{path: a.jsonl}}, \
         {{path: b.jsonl}}]}}\noptim: {{lr: 0.0025}}\n{more}"
    );
    write_atomically(&folder.join("config.yaml"), text.as_bytes()).unwrap();
}

/// A run of 40 steps of 2 s and 0.5 s of waiting, whose losses are 40, 39, .. 1, each times `scale`.
fn complete_run(scale: f64, model: &str, more: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let step = |step: u64| {
        json!({
            "step": step, "epoch": 1.0, "loss": scale * (41 - step) as f64, "grad_norm": 1.0,
            "skipped": false, "lr": 1e-5, "num_samples": 3, "num_tokens": 1000,
            "num_target_tokens": 100, "step_time_s": 2.0, "data_wait_s": 0.5, "fill": 0.9,
            "save_hold_s": if step == 20 { json!(20.0) } else { Value::Null },
            "tokens_per_s": 500.0 / scale, "peak_memory_bytes": 1 << 30, "rejected": 2,
            "rejected_by_reason": {"bad_json": 2}, "num_samples/a": 2, "num_tokens/a": 700,
            "num_samples/b": 1, "num_tokens/b": 300,
        })
    };
    write(folder.path(), "metrics.jsonl", (1..=40).map(step));
    let eval = |step: u64, loss: f64| json!({"step": step, "loss": scale * loss, "accuracy": 0.5});
    write(folder.path(), "eval.jsonl", [eval(20, 0.25), eval(40, 0.5)]);
    let start = json!({
        "after_step": 0, "time": 1_700_000_000, "version": "1", "world": 1,
        "machine": "Fast CPU, 8 threads", "parameters": 1_646_016, "trained": 4096,
        "data": [{"name": "a", "rows": 60, "truncated": 5}, {"name": "b", "rows": 7, "truncated": null}],
    });
    write(folder.path(), "starts.jsonl", [start]);
    write_config(folder.path(), model, more);
    folder
}

/// The value of a fact at the head of a page of one run.
fn value<'a>(page: &'a str, name: &str) -> &'a str {
    let start = page.find(&format!("<tr><th>{name}<small>")).unwrap_or_else(|| panic!("{name}"));
    page[start..].split("<td>").nth(1).unwrap().split("</td>").next().unwrap()
}

#[test]
fn the_head_of_the_page_has_the_sums_of_the_metrics() {
    let folder = complete_run(1.0, "models/m", "adapter: {rank: 4, quantize: nf4}\n");
    let mut run = RunFolder::read(folder.path()).unwrap();
    run.price_per_hour = Some(36.0);
    let page = report(&[run], &[]).unwrap();
    for (name, expected) in [
        ("Model", "models/m: 1,646,016 parameters, 4,096 trained"),
        ("Method", "QLoRA, rank 4, alpha 32, in llm, weights of the model in 4 bits"),
        (
            "Data",
            "a: 60 rows, trained on 80 rows with 28,000 tokens; b: 7 rows, trained on 40 rows with \
             12,000 tokens",
        ),
        ("Machine", "Fast CPU, 8 threads"),
        ("Started", "2023-11-14 22:13 UTC"),
        ("Training time", "1 min 40 s"), // 40 * 2 s + 20 s
        ("Tokens", "40,000, 4,000 supervised"),
        ("Time per 1,000 tokens", "2.5 s"),
        ("Cost", "1.00, 0.025 per 1,000 tokens"), // 100 s at 0.01 per second
        ("Training loss", "35.5 at the start, 5.5 at the end (means of 10 steps)"),
        ("Evaluation loss", "0.5 at the end, 0.25 after step 20"),
        ("Exact answers", "50.0 %"),
        ("Rejected rows", "2"),
        ("Truncated rows", "5"),
    ] {
        assert_eq!(value(&page, name), expected, "{name}");
    }
    let free = self::page(&folder);
    assert!(!free.contains("<th>Cost<small>"), "no price was given");
}

#[test]
fn charts_of_the_machine_are_folded_and_each_number_has_one_name_with_its_meaning() {
    let page = page(&complete_run(1.0, "m", ""));
    let (learned, machine) = page.split_once("<details><summary>The machine").unwrap();
    for name in ["Training and evaluation loss", "Exact answers", "Learning rate", "Gradient norm"]
    {
        assert!(learned.contains(&format!("aria-label=\"{name}\"")), "{name}");
    }
    let machine = machine.split_once("</details>").unwrap().0;
    for name in ["Tokens per second", "Packing efficiency", "Waiting for data", "Peak memory"] {
        let chart = format!("aria-label=\"{name}\"");
        assert!(machine.contains(&chart) && !learned.contains(&chart), "{name}");
    }
    assert_eq!(page.matches("<figcaption>").count(), page.matches("<p class=\"what\">").count());
    assert!(!page.contains("<p class=\"what\"></p>"), "a chart without a meaning");
    assert!(page.contains("class=\"raw c0\"") && page.contains("Line: mean of 5 steps."));
}

/// Elements that have no end.
const VOID: [&str; 3] = ["meta", "img", "input"];

/// Fails if an element is not closed, or closed in another one.
#[track_caller]
fn is_well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    for tag in page.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        let name = tag.split([' ', '\n', '/']).next().unwrap();
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name), "{open:?}"),
            None if tag.starts_with('!') || tag.ends_with('/') || VOID.contains(&name) => {}
            None => open.push(name),
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn pages_are_well_formed() {
    let folder = complete_run(1.0, "m", "");
    let answer = json!({"step": 40, "row": HOSTILE, "expected": HOSTILE, "answered": "<b>"});
    write(folder.path(), "predictions.jsonl", [answer]);
    is_well_formed(&page(&folder));
    is_well_formed(&page(&run(12)));
    let runs = [&folder, &run(12)].map(|folder| RunFolder::read(folder.path()).unwrap());
    is_well_formed(&report(&runs, &[]).unwrap());
}

#[test]
fn compared_runs_are_sorted_and_each_column_has_their_order() {
    let folders = [3.0, 1.0, 2.0].map(|scale| complete_run(scale, "m", ""));
    let without = run(4); // its evaluation loss is 1.25
    write(without.path(), "eval.jsonl", []);
    let paths: Vec<&Path> = folders.iter().chain([&without]).map(TempDir::path).collect();
    let runs: Vec<RunFolder> = paths.iter().map(|path| RunFolder::read(path).unwrap()).collect();
    let page = report(&runs, &[]).unwrap();
    assert!(!is_active(&page));
    let table = page.split("<table class=\"sort\"").nth(1).unwrap();
    let table = table.split("</table>").next().unwrap();
    let columns = table.split("<label>").skip(1);
    let columns: Vec<&str> = columns.map(|label| label.split(['>', '<']).nth(2).unwrap()).collect();
    let column = |name: &str| columns.iter().position(|of| *of == name).unwrap();
    // for each run, in the order of the table: its number in `paths`, and its place by each column
    let rows = table.split("<tr style=\"").skip(1).map(|row| {
        let (style, rest) = row.split_once('"').unwrap();
        let places =
            style.split(';').map(|place| place.split(':').nth(1).unwrap().parse().unwrap());
        let is_run = |path: &&Path| rest.starts_with(&format!("><th>{}<", path.display()));
        (paths.iter().position(is_run).unwrap(), places.collect::<Vec<usize>>())
    });
    let rows: Vec<(usize, Vec<usize>)> = rows.collect();
    let order: Vec<usize> = rows.iter().map(|(run, _)| *run).collect();
    assert_eq!(order, [1, 2, 0, 3], "by the evaluation loss; a run without one is last");
    assert!(table.contains("class=\"s0\" checked>Evaluation loss<"), "{table}");
    let by = |name: &str| {
        let mut runs = rows.clone();
        runs.sort_by_key(|(_, places)| places[column(name)]);
        runs.into_iter().map(|(run, _)| run).collect::<Vec<_>>()
    };
    assert_eq!(by("Evaluation loss"), [1, 2, 0, 3]);
    assert_eq!(by("Training loss"), [3, 1, 2, 0], "its last loss is 2.46");
    assert_eq!(by("Tokens per second"), [3, 1, 2, 0], "more is better: 1000, 500, 250, 167");
    assert_eq!(by("Training time"), [3, 0, 1, 2], "equal values keep their order");
    let css = include_str!("page.css");
    assert!(columns.len() <= css.matches(":checked) tr { order: var(--s").count(), "{columns:?}");
}

#[test]
fn a_model_card_names_the_base_model_and_how_to_load_the_folder() {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let of_hub = format!("owner/base-model@{commit}");
    let adapter = "adapter: {kind: dora, rank: 4}\n";
    let run = complete_run(1.0, &of_hub, adapter);
    let folder = tempfile::tempdir().unwrap();
    let add = |name: &str, text: &str| {
        write_atomically(&folder.path().join(name), text.as_bytes()).unwrap();
    };
    add("adapter_config.json", "{}");
    add("preprocessor_config.json", "{}");
    let read = RunFolder::read(run.path()).unwrap();
    let card = model_card(folder.path(), "", Some(&read), "Made by a test.");
    let head = "---\nbase_model: owner/base-model\nlibrary_name: peft\n\
                pipeline_tag: image-text-to-text\ntags:\n- sft\n- dora\n---\n";
    assert!(card.starts_with(head), "{card}");
    for part in [
        "Made by a test.\nIt is fine-tuned from `owner/base-model`: DoRA, rank 4,",
        "from peft import PeftModel\n",
        "model = AutoModelForImageTextToText.from_pretrained(\"owner/base-model\", ",
        "processor = AutoProcessor.from_pretrained(\"owner/base-model\")\n",
        "| Evaluation loss | 0.5 at the end, 0.25 after step 20 |",
        "| Data | a: 60 rows, trained on 80 rows with 28,000 tokens; b: ",
        "| `optim.lr` | 0.0025 |",
    ] {
        assert!(card.contains(part), "{part} not in {card}");
    }
    assert!(!card.contains("license") && !card.contains(commit), "{card}");

    // a text model from a local folder, whose path is not published
    let run = complete_run(1.0, "someone/base|model", "");
    let read = RunFolder::read(run.path()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let card = model_card(folder.path(), "", Some(&read), "Made by a test.");
    let head =
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- sft\n---\n";
    assert!(card.starts_with(head), "{card}");
    assert!(card.contains("AutoModelForCausalLM") && !card.contains("peft"), "{card}");
    assert!(card.contains("base\\|model") && !card.contains("someone"), "{card}");
    // without a run: what is known of the folder
    let card = model_card(folder.path(), &of_hub, None, "Made by a test.");
    assert!(card.contains("base_model: owner/") && !card.contains("## Training"), "{card}");
}
