//! Plain text and mixtures: the output of `inspect`, training, resuming, metrics per data set.

use super::harness::{Place, json_lines};
use serde_json::Value;
use std::collections::BTreeSet;
use std::iter::repeat;

/// A folder with a tiny model, a text of 34 digits (35 tokens with the end token), documents and
/// chats.
fn place() -> Place {
    let place = Place::empty();
    place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
    place.write("digits.txt", &"0123456789".repeat(4)[..34]);
    let text = |row: u32| {
        format!("{{\"text\": \"Row {row} of {}\"}}", "a text ".repeat(row as usize % 7 + 1))
    };
    let rows: Vec<String> = (0..60).map(text).collect();
    place.write("documents.jsonl", &rows.join("\n"));
    let chat = |row: u32| {
        format!("{{\"instruction\": \"What is {row} + 1?\", \"output\": \"{}\"}}", row + 1)
    };
    let rows: Vec<String> = (0..24).map(chat).collect();
    place.write("chats.jsonl", &rows.join("\n"));
    place
}

fn config(place: &Place, data: &str, train: &str) {
    place.write(
        "config.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: model}}\ndata: {data}\ntrain: {train}\n\
             optim: {{lr: 2.0e-3}}\ncheckpoint: {{every_steps: 3, keep: 100}}\n"
        ),
    );
}

const INSPECT: [&str; 7] =
    ["inspect", "--config", "config.yaml", "--num", "0", "--format", "jsonl"];

fn inspected(place: &Place, packs: bool) -> Vec<Value> {
    let arguments = if packs { [&INSPECT[..], &["--packs"]].concat() } else { INSPECT.to_vec() };
    json_lines(&place.trainer(&arguments).ends_with(0).stdout)
}

fn starts(rows: &[Value]) -> Vec<usize> {
    let start = |row: &Value| row["id"].as_str().unwrap().rsplit('@').next().unwrap().parse();
    rows.iter().map(|row| start(row).unwrap()).collect()
}

#[test]
fn inspect_shows_the_windows_of_thirty_five_tokens() {
    let place = place();
    let show = |corpus: &str, more: &str| {
        let train = format!("{{train: [{{path: digits.txt, corpus: {{{corpus}}}}}], {more}}}");
        config(&place, &train, "{batch_size: 2}");
        inspected(&place, false)
    };
    let sliding = show("sampling: sliding_window, length: 5, stride: 1", "shuffle: false");
    assert_eq!(starts(&sliding), (0..30).collect::<Vec<_>>());
    for row in &sliding {
        assert_eq!(
            (&row["length"], &row["position_ids"][0]),
            (&6.into(), &serde_json::json!([0, 1, 2, 3, 4, 5]))
        );
        assert_eq!(row["labels"][0], -100);
        assert_eq!(
            row["labels"].as_array().unwrap()[1..],
            row["input_ids"].as_array().unwrap()[1..]
        );
    }
    let first: Vec<&Value> = sliding.iter().map(|row| &row["input_ids"][0]).collect();
    assert_eq!(first[..10], first[10..20], "digits repeat");
    let random = starts(&show("sampling: random, length: 5", "shuffle: true"));
    let sorted: BTreeSet<usize> = random.iter().copied().collect();
    let offset = sorted.first().unwrap() % 5;
    assert_eq!(sorted, (0..6).map(|window| offset + 5 * window).collect());
    assert!(!random.is_sorted());
    let sequential = starts(&show("sampling: sequential, length: 5", "packing: false"));
    let (offset, lane) = (sequential[0], sequential[1] - sequential[0]);
    assert_eq!(lane, (34 - offset) / 2);
    let expected = [0, lane, 5, 5 + lane, 10, 10 + lane].map(|start| offset + start);
    assert_eq!(sequential, expected);
    let document = show("sampling: document", "");
    assert_eq!((document.len(), &document[0]["length"]), (1, &35.into()));
    let split = show("sampling: document", "max_length: 10, truncation: split, shuffle: false");
    assert_eq!(starts(&split), [0, 9, 18, 27]);
    let lengths: Vec<_> = split.iter().map(|row| row["length"].as_u64().unwrap()).collect();
    assert_eq!(lengths, [10, 10, 10, 8]);
    for (truncation, start) in [("right", 0), ("left", 25)] {
        let data = format!("max_length: 10, truncation: {truncation}");
        let cut = show("sampling: document", &data);
        assert_eq!((starts(&cut), &cut[0]["length"]), (vec![start], &10.into()));
        let ids = |row: &Value| row["input_ids"].as_array().unwrap().clone();
        assert_eq!(ids(&cut[0]), ids(&document[0])[start..start + 10]);
    }
    assert!(!place.path("run").exists(), "`inspect` writes no `output_dir`");
}

#[test]
fn packs_of_a_corpus_contain_each_window_once() {
    let place = place();
    let set = "{path: documents.jsonl, corpus: {sampling: random, length: 15}}";
    config(&place, &format!("{{train: [{set}], packing_length: 64}}"), "{}");
    let packs = inspected(&place, true);
    let ids: Vec<&str> = packs
        .iter()
        .flat_map(|pack| pack["ids"].as_array().unwrap())
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(ids.len(), ids.iter().collect::<BTreeSet<_>>().len());
    assert!(ids.len() > 30 && packs[0]["length"] == 64);
}

/// Rows of `metrics.jsonl` after a step, without times and memory.
fn metrics(place: &Place, run: &str, after: u64) -> Vec<Value> {
    rows_of(place, &format!("{run}/metrics.jsonl"), after)
}

/// Rows of `eval.jsonl` after a step, without times.
fn evals(place: &Place, run: &str, after: u64) -> Vec<Value> {
    rows_of(place, &format!("{run}/eval.jsonl"), after)
}

fn rows_of(place: &Place, file: &str, after: u64) -> Vec<Value> {
    let mut rows = place.rows(file);
    rows.retain(|row| row["step"].as_u64().unwrap() > after);
    for row in &mut rows {
        let row = row.as_object_mut().unwrap();
        row.retain(|key, _| !key.ends_with("_s") && !key.ends_with("memory_bytes"));
    }
    rows
}

/// Trains, and resumes from checkpoints in the middle; all must end bit-identical.
fn assert_resumes(place: &Place, last: u64) {
    let sft = ["sft", "--config", "config.yaml", "--resume"];
    place.trainer(&[&sft[..], &["never"]].concat()).ends_with(0);
    for step in (3..last).step_by(3) {
        let (from, to) = (format!("run/checkpoints/step-{step:08}"), format!("from-{step}"));
        let output = format!("output_dir={to}");
        place.trainer(&[&sft[..], &[&from, "--set", &output]].concat()).ends_with(0);
        let weights = |run: &str| place.read(&format!("{run}/final/model.safetensors"));
        assert!(weights(&to) == weights("run"), "from step {step}");
        assert_eq!(metrics(place, &to, step), metrics(place, "run", step), "from step {step}");
        assert_eq!(evals(place, &to, step), evals(place, "run", step), "from step {step}");
        let state =
            |run: &str| place.read(&format!("{run}/checkpoints/step-{last:08}/trainer_state.json"));
        assert!(state(&to) == state("run"), "from step {step}");
    }
    for rows in [metrics(place, "run", 0), evals(place, "run", 0)] {
        let keys = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        for row in &rows {
            assert_eq!(keys(row), keys(&rows[0]), "{row}");
        }
    }
    let steps = metrics(place, "run", 0);
    let steps: Vec<u64> = steps.iter().filter_map(|row| row["step"].as_u64()).collect();
    assert_eq!(steps, (1..=last).collect::<Vec<_>>());
}

#[test]
fn corpora_of_every_sampling_train_and_resume_to_the_bit() {
    for (corpus, data, train, last) in [
        ("sampling: random, length: 15", "packing_length: 64", "{max_steps: 12}", 12),
        (
            "sampling: sliding_window, length: 15, stride: 7",
            "packing_length: 64",
            "{max_steps: 7}",
            7,
        ),
        // 4 epochs
        (
            "sampling: sequential, length: 30",
            "packing: false",
            "{batch_size: 4, max_steps: 13}",
            13,
        ),
        (
            "sampling: document",
            "packing_length: 64, max_length: 12, truncation: split, packing_strategy: sequential",
            "{max_steps: 8}",
            8,
        ),
        (
            "sampling: document",
            "packing_length: 64, max_length: 12, truncation: left",
            "{max_steps: 5}",
            5,
        ),
    ] {
        let place = place();
        let set = format!("{{path: documents.jsonl, corpus: {{{corpus}}}}}");
        config(&place, &format!("{{train: [{set}], {data}}}"), train);
        assert_resumes(&place, last);
        assert!(place.names("run/cache")[0].starts_with("documents-"));
    }
}

#[test]
fn unusable_texts_are_counted_as_rejected_rows() {
    let place = place();
    let mut rows = String::from_utf8(place.read("documents.jsonl")).unwrap();
    rows.push_str("\n{\"text\": 5}\n{\"text\": \"\"}\n");
    place.write("documents.jsonl", &rows);
    let set = "{path: documents.jsonl, corpus: {sampling: document}}";
    let data = format!("{{train: [{set}], packing_length: 64, max_length: 12, max_rejected: 0.9}}");
    config(&place, &data, "{max_steps: 7}");
    assert_resumes(&place, 7);
    let rows = metrics(&place, "run", 0);
    let mut too_long = 0;
    for row in &rows {
        let reasons = &row["rejected_by_reason"];
        assert_eq!((&reasons["wrong_type"], &reasons["empty"]), (&1.into(), &1.into()), "{row}");
        let now = reasons["too_long"].as_u64().unwrap_or(0);
        assert!(now >= too_long);
        too_long = now;
        assert_eq!(row["rejected"], 2 + too_long);
        assert_eq!(row["rejected_by_file"], serde_json::json!({"documents.jsonl": reasons}));
    }
    let reported = place.rows("run/rejects.jsonl");
    assert!(too_long > 0 && reported.len() as u64 == 2 + too_long, "{reported:?}");
}

#[test]
fn a_mixture_by_share_reports_each_data_set_and_resumes_to_the_bit() {
    let place = place();
    let corpus = "corpus: {sampling: random, length: 15}";
    let data = format!(
        "{{train: [{{path: chats.jsonl, weight: 3}}, {{path: documents.jsonl, name: text, {corpus}}}], \
         eval: [{{path: chats.jsonl}}, {{path: digits.txt, corpus: {{sampling: document}}}}], \
         mixture: share, packing_length: 96, packing_strategy: sequential}}"
    );
    config(&place, &data, "{gradient_accumulation_steps: 2, max_steps: 10}");
    assert_resumes(&place, 10);
    let rows = metrics(&place, "run", 0);
    let (mut chats, mut text) = (0, 0);
    let number =
        |row: &Value, key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no `{key}` in {row}"));
    let evals = evals(&place, "run", 0);
    for (row, is_eval) in rows.iter().zip(repeat(false)).chain(evals.iter().zip(repeat(true))) {
        let names = if is_eval { ["chats", "digits"] } else { ["chats", "text"] };
        let of = |key: &str| names.map(|name| number(row, &format!("{key}/{name}")));
        let (losses, targets) = (of("loss"), of("num_target_tokens"));
        let sum = losses[0] * targets[0] + losses[1] * targets[1];
        let loss = number(row, "loss") * number(row, "num_target_tokens");
        assert!((sum - loss).abs() < 1e-9 * loss, "{row}");
        assert_eq!(targets.iter().sum::<f64>(), number(row, "num_target_tokens"));
        assert_eq!(of("num_samples").iter().sum::<f64>(), number(row, "num_samples"));
        if !is_eval {
            assert_eq!(of("num_tokens").iter().sum::<f64>(), number(row, "num_tokens"));
            chats += of("num_samples")[0] as i64;
            text += of("num_samples")[1] as i64;
        }
    }
    // The loss of each data set equals that of an evaluation of this set alone.
    let last = evals.last().unwrap();
    for (name, set) in [
        ("chats", "{path: chats.jsonl}"),
        ("digits", "{path: digits.txt, corpus: {sampling: document}}"),
    ] {
        let set = format!("data.eval=[{set}]");
        let eval = ["eval", "--config", "config.yaml", "--checkpoint", "run/final", "--set", &set];
        let alone = json_lines(&place.trainer(&eval).ends_with(0).stdout);
        let (alone, mixed) = (number(&alone[0], "loss"), number(last, &format!("loss/{name}")));
        assert!((alone - mixed).abs() < 1e-5 * mixed, "{name}: {alone} alone, {mixed} mixed");
    }
    // Sequential packs keep the order, so the shares hold at the end of each step.
    assert!((chats - 3 * text).abs() < 4, "{chats} chats, {text} windows");
    let log = String::from_utf8(place.read("run/train.log")).unwrap();
    assert!(log.contains("trained so far name=") && log.contains("share=75.0%"), "{log}");
}

#[test]
fn errors_of_a_corpus_name_the_config_key_or_the_file_and_row() {
    let place = place();
    let refuse = |set: &str, more: &str, code: i32, message: &str| {
        config(&place, &format!("{{train: [{set}], {more}}}"), "{}");
        place.trainer(&["sft", "--config", "config.yaml"]).ends_with(code).says(message);
    };
    refuse(
        "{path: digits.txt}",
        "",
        65,
        "`digits.txt` is plain text, but its data set has no `corpus` section",
    );
    refuse(
        "{path: documents.jsonl}",
        "",
        65,
        "is plain text, but its data set has no `corpus` section",
    );
    let with = |path: &str, corpus: &str| format!("{{path: {path}, corpus: {{{corpus}}}}}");
    let chats = with("chats.jsonl", "sampling: document");
    refuse(&chats, "", 65, "`chats.jsonl` has rows of the form `alpaca`");
    let long = with("digits.txt", "sampling: random, length: 64");
    refuse(
        &long,
        "packing_length: 64",
        64,
        "`data.train.0.corpus.length` is `64`, expected less than",
    );
    let none = with("digits.txt", "sampling: random");
    refuse(&none, "", 64, "`data.train.0.corpus.length` is `null`");
    let sequential = with("digits.txt", "sampling: sequential, length: 5");
    refuse(&sequential, "", 64, "`data.train.0.corpus.sampling` is `sequential`");
    refuse(
        "{path: chats.jsonl}",
        "max_length: 9, truncation: split",
        64,
        "`data.truncation` is `split`",
    );
    let eos = with("digits.txt", "sampling: document, eos_token: </s>");
    refuse(&eos, "", 64, "`corpus.eos_token` of `digits.txt` is `</s>`");
    refuse(
        "{path: chats.jsonl, name: a}, {path: digits.txt, name: a, corpus: {sampling: document}}",
        "",
        64,
        "`data.train.1.name` is `a`, expected a name that no other data set has",
    );
    let missing = with("none.txt", "sampling: document");
    refuse(&missing, "", 64, "cannot read `none.txt`");
    place.write("bad.jsonl", "{\"text\": \"a b c d e f g\"}\n{\"text\": 5}\n");
    let bad = with("bad.jsonl", "sampling: document");
    refuse(&bad, "", 65, "bad.jsonl:2: `text` is a number");
    refuse(&bad, "max_rejected: 0.5", 0, "bad.jsonl:2: `text` is a number");
    let rejects = place.rows("run/rejects.jsonl");
    assert_eq!(
        (rejects.len(), &rejects[0]["row"], &rejects[0]["reason"]),
        (1, &2.into(), &"wrong_type".into())
    );
}
