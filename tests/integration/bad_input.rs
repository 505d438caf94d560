//! Bad input never trains silently and never panics.
//!
//! `tests/fixtures/bad_input.md` lists every broken config and row, with the words in which the
//! binary refuses it. `@TMP@` is the folder in which a test runs.

use super::harness::binary;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

const TABLE: &str = include_str!("../fixtures/bad_input.md");

/// What the binary should do with one fixture.
struct Case {
    file: String,
    /// Exit code of a config; reason of a row.
    verdict: String,
    message: String,
    hint: String,
}

/// The lines of the table under `heading`.
fn cases(heading: &str) -> Vec<Case> {
    let section = TABLE.split("\n## ").find(|text| text.starts_with(heading)).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    rows.map(|line| {
        let cells: Vec<String> = line.trim_matches('|').split(" | ").map(cell).collect();
        let [file, verdict, message, hint] = cells.try_into().unwrap();
        Case { file, verdict, message, hint }
    })
    .collect()
}

fn cell(text: &str) -> String {
    text.trim().replace("\\|", "|")
}

/// Returns the error message and the hint of an output.
fn reported(output: &Output, folder: &Path) -> (String, String) {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!stderr.contains("panicked at"), "{stderr}");
    assert!(!stderr.contains('\u{1b}'), "no terminal, no colours: {stderr}");
    let stderr = shortened(&stderr, folder);
    let line =
        |start: &str| stderr.lines().find_map(|line| line.strip_prefix(start)).map(str::trim);
    let mut message = line("error: ").unwrap_or("no error").to_owned();
    for cause in stderr.lines().filter_map(|line| line.strip_prefix("caused by: ")) {
        let _ = write!(message, "; caused by: {cause}");
    }
    (message, line("hint: ").unwrap_or("no hint").to_owned())
}

fn trainer(args: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("RUST_LOG")
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HOME", "nowhere")
        .env_remove("HF_HUB_CACHE")
        .env("RUST_BACKTRACE", "1");
    command.args(args).output().unwrap()
}

/// Runs `check` on all cases, a few at a time, and reports all differences at once.
fn check_all(cases: &[Case], check: impl Fn(&Case) -> Result<(), String> + Sync) {
    let next = AtomicUsize::new(0);
    let failed: Vec<String> = std::thread::scope(|scope| {
        let check_some = || {
            let mut failed = Vec::new();
            while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                failed.extend(check(case).err());
            }
            failed
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(check_some)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(failed.is_empty(), "{} differ:\n{}", failed.len(), failed.join("\n"));
}

fn same(case: &Case, verdict: &str, message: &str, hint: &str) -> Result<(), String> {
    let line = |cells: [&str; 4]| {
        format!("| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "))
    };
    let expected = line([&case.file, &case.verdict, &case.message, &case.hint]);
    let found = line([&case.file, verdict, message, hint]);
    if expected == found { Ok(()) } else { Err(format!("expected {expected}\nfound    {found}")) }
}

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder)
}

/// Every file of the folder is in the table, and the reverse.
fn assert_complete(folder: &str, ending: &str, cases: &[Case]) {
    let entries = fs::read_dir(fixtures(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<String> = entries
        .filter(|path| path.extension().is_some_and(|found| found == ending))
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    files.sort();
    assert_eq!(cases.iter().map(|case| case.file.clone()).collect::<Vec<_>>(), files);
    assert!(files.len() >= 25);
}

fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    fs::File::create(path).unwrap().write_all(bytes.as_ref()).unwrap();
}

/// Copies of a small model, each broken in another way, below `folder`.
fn break_models(folder: &Path) {
    let good = folder.join("good");
    let made = trainer(&["init", "--preset", "debug", "--out", good.to_str().unwrap()]);
    assert!(made.status.success());
    let copy = |name: &str| {
        let copy = folder.join(name);
        fs::create_dir(&copy).unwrap();
        for entry in fs::read_dir(&good).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
        }
        copy
    };
    let edit = |name: &str, file: &str, change: &dyn Fn(&mut Value)| {
        let path = copy(name).join(file);
        let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        write(&path, json.to_string());
    };
    edit("wrong-shape", "config.json", &|c| c["text_config"]["intermediate_size"] = json!(96));
    edit("missing-tensor", "config.json", &|c| c["text_config"]["num_hidden_layers"] = json!(3));
    edit("llava", "config.json", &|c| c["model_type"] = json!("llava"));
    edit("contradicting-sizes", "config.json", &|c| {
        c["text_config"]["num_key_value_heads"] = json!(3);
    });
    edit("config-without-sizes", "config.json", &|c| {
        c["text_config"].as_object_mut().unwrap().remove("hidden_size");
    });
    edit("smaller-vocabulary", "config.json", &|c| c["text_config"]["vocab_size"] = json!(100));
    edit("no-resize", "preprocessor_config.json", &|c| c["do_resize"] = json!(false));
    write(&copy("config-not-json").join("config.json"), "{\"model_type\": \"qwen3_vl\",\n");
    fs::remove_file(copy("no-tokenizer").join("tokenizer.json")).unwrap();
    write(&copy("broken-tokenizer").join("tokenizer.json"), "{}");
    edit("no-chat-template", "tokenizer_config.json", &|c| {
        c.as_object_mut().unwrap().remove("chat_template");
    });
    fs::remove_file(folder.join("no-chat-template/chat_template.jinja")).unwrap();
    write(&copy("broken-chat-template").join("chat_template.jinja"), "{% for message in %}");
    fs::remove_file(copy("no-image-config").join("preprocessor_config.json")).unwrap();
    let weights = |name: &str| copy(name).join("model.safetensors");
    let bytes = fs::read(good.join("model.safetensors")).unwrap();
    write(&weights("truncated-weights"), &bytes[..bytes.len() / 2]);
    write(&weights("garbage-weights"), b"not weights at all, but long enough to look at");
    write(&weights("nan-weights"), with_nan(&bytes));
    let eight_bit = String::from_utf8_lossy(&bytes[8..header_end(&bytes)]).replacen(
        "\"dtype\":\"F32\"",
        "\"dtype\":\"I32\"",
        1,
    );
    write(
        &weights("wrong-dtype"),
        [&bytes[..8], eight_bit.as_bytes(), &bytes[header_end(&bytes)..]].concat(),
    );
    let index = json!({"weight_map": {"model.visual.pos_embed.weight": "model-00001-of-00002.safetensors"}});
    let shards = copy("missing-shard");
    fs::remove_file(shards.join("model.safetensors")).unwrap(); // it would be read alone
    write(&shards.join("model.safetensors.index.json"), index.to_string());
}

fn header_end(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

/// The last weights of the file become not-a-numbers.
fn with_nan(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let length = bytes.len();
    for value in bytes[length - 64..].as_chunks_mut::<4>().0 {
        *value = f32::NAN.to_le_bytes();
    }
    bytes
}

#[test]
fn every_bad_config_is_refused_in_words_and_leaves_no_checkpoint() {
    let cases = cases("Configs");
    assert_complete("bad_configs", "yaml", &cases);
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    break_models(folder);
    write(&folder.join("empty.jsonl"), "\n\n");
    write(&folder.join("a-file"), "in the way");
    check_all(&cases, |case| {
        let output_dir = folder.join(case.file.replace(".yaml", ""));
        let name = output_dir.display().to_string();
        let bytes = fs::read(fixtures("bad_configs").join(&case.file)).unwrap();
        let config = folder.join(&case.file);
        match String::from_utf8(bytes) {
            Ok(text) => {
                let text = text.replace("@TMP@/out\n", &format!("{name}\n"));
                write(&config, text.replace("@TMP@", folder.to_str().unwrap()));
            }
            Err(error) => write(&config, error.into_bytes()),
        }
        let output = trainer(&["sft", "--config", config.to_str().unwrap()]);
        let (message, hint) = reported(&output, folder);
        for forbidden in ["checkpoints", "final", "previous-1"] {
            if output_dir.join(forbidden).exists() {
                return Err(format!("{}: left `{forbidden}` behind", case.file));
            }
        }
        same(case, &output.status.code().unwrap_or(-1).to_string(), &message, &hint)?;
        found_by_check(case, &config, folder)
    });
}

/// `check` finds what stops the run, in the same words. It neither trains nor reads the values of
/// weights.
fn found_by_check(case: &Case, config: &Path, folder: &Path) -> Result<(), String> {
    if ["68-folder-nan-weights.yaml", "71-lr-that-explodes.yaml"].contains(&&*case.file) {
        return Ok(());
    }
    let output = trainer(&["check", "--config", config.to_str().unwrap(), "--json"]);
    let stdout = shortened(&String::from_utf8_lossy(&output.stdout), folder);
    let code = output.status.code();
    if code != Some(65) {
        return Err(format!("{}: check ends with {code:?}:\n{stdout}", case.file));
    }
    let words = match &*case.file {
        "41-packing-length-below-every-row.yaml" => "160 of 160 rows would be rejected: overlong",
        "69-output-dir-is-a-file.yaml" | "70-output-dir-below-a-file.yaml" => {
            "`@TMP@/a-file` is a file"
        }
        _ => case.message.split("; caused by: ").next().unwrap(),
    };
    let findings = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut errors = findings.filter(|finding| finding["kind"] == "error");
    let found = errors.find(|error| error["message"].as_str().unwrap().contains(words));
    // Rows of a wrong length share the hint of the finding; the others have one in each example.
    let has_hint = |error: Value| !words.contains("overlong") || error["hint"] == case.hint;
    if found.is_some_and(has_hint) {
        return Ok(());
    }
    Err(format!("{}: no `{words}` in\n{stdout}", case.file))
}

/// A config in `folder` that trains on `rows.jsonl` in it; images are those of the fixtures.
fn row_config(folder: &Path, lines: &str) -> PathBuf {
    let text = format!(
        "output_dir: {folder}/out\nmodel: {{path: data/quickstart/model, weights: random}}\n\
         data:\n  train: [{{path: {folder}/rows.jsonl, image_root: {images}}}]\n  shuffle: false\n{lines}",
        folder = folder.display(),
        images = fixtures("bad_rows/images").display(),
    );
    let path = folder.join("config.yaml");
    write(&path, text);
    path
}

fn sft(config: &Path, more: &[&str]) -> Output {
    trainer(&[&["sft", "--config", config.to_str().unwrap()], more].concat())
}

/// Rows that train: texts of one length, every fourth with an image. Ends with a newline.
fn good_rows(num: usize) -> String {
    let row = |index: usize| match index % 4 {
        0 => json!({"messages": [{"role": "user", "content": "<image>What is it?"},
            {"role": "assistant", "content": "grey"}], "images": ["good.png"]}),
        _ => json!({"messages": [{"role": "user", "content": format!("{:03}?", index)},
            {"role": "assistant", "content": "yes"}]}),
    };
    (0..num).map(|index| row(index).to_string() + "\n").collect()
}

#[test]
fn every_bad_row_stops_a_run_that_shall_stop_with_its_line_and_reason() {
    let cases = cases("Rows");
    assert_complete("bad_rows", "jsonl", &cases);
    let folder = TempDir::new().unwrap();
    check_all(&cases, |case| {
        let folder = folder.path().join(&case.file);
        fs::create_dir(&folder).unwrap();
        let bad = fs::read(fixtures("bad_rows").join(&case.file)).unwrap();
        write(&folder.join("rows.jsonl"), [good_rows(1).as_bytes(), &bad].concat());
        let config =
            row_config(&folder, "  on_error: stop\n  packing_length: 64\ntrain: {epochs: 1}\n");
        let output = sft(&config, &[]);
        let (message, _) = reported(&output, &folder);
        let code = output.status.code();
        if code != Some(65) || folder.join("out/checkpoints").exists() {
            return Err(format!("{}: exit code {code:?}: {message}", case.file));
        }
        let rejects = jsonl(&folder.join("out/rejects.jsonl"));
        let [reject] = rejects.as_slice() else {
            return Err(format!("{}: {} lines in rejects.jsonl", case.file, rejects.len()));
        };
        let text = |key: &str| row_text(&reject[key], &folder);
        assert_eq!((text("file"), &reject["row"]), ("@TMP@/rows.jsonl".to_owned(), &json!(2)));
        let whole = text("message");
        let (listed, hint) = whole.split_once("; hint: ").unwrap_or((&whole, "no hint"));
        let place = "@TMP@/rows.jsonl:2";
        let listed = listed.strip_prefix(place).unwrap_or(listed);
        if !(message.starts_with(place) && message.contains(listed)) {
            return Err(format!("{}: {message}\nbut in rejects.jsonl {listed}", case.file));
        }
        same(case, &text("reason"), listed.trim_start_matches(": "), hint)
    });
}

#[test]
fn bad_rows_among_good_ones_are_skipped_counted_and_listed() {
    let cases = cases("Rows");
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    // A good row before each bad one, the rest after them.
    let mut rows = Vec::new();
    for (index, good) in good_rows(200).lines().enumerate() {
        rows.extend_from_slice(good.as_bytes());
        rows.push(b'\n');
        if let Some(case) = cases.get(index) {
            rows.extend(fs::read(fixtures("bad_rows").join(&case.file)).unwrap());
        }
    }
    write(&folder.join("rows.jsonl"), rows);
    let config = row_config(
        folder,
        "  packing_length: 64\n  max_rejected: 0.5\ntrain: {epochs: 1, batch_size: 30}\n",
    );
    let output = sft(&config, &[]);
    let (message, _) = reported(&output, folder);
    assert_eq!(output.status.code(), Some(0), "{message}");
    let metrics = jsonl(&folder.join("out/metrics.jsonl"));
    assert!(metrics.len() >= 2, "at least two steps");
    let samples: u64 = metrics.iter().map(|row| row["num_samples"].as_u64().unwrap()).sum();
    assert_eq!(samples, 200, "every good row trains, once");
    assert_eq!(metrics.last().unwrap()["rejected"], json!(cases.len()));
    let mut rejects = jsonl(&folder.join("out/rejects.jsonl"));
    assert_eq!(rejects.len(), cases.len());
    // rows with broken pixels are reported when their step is made, the others when they are
    // measured
    rejects.sort_by_key(|reject| reject["row"].as_u64());
    for (index, (case, reject)) in cases.iter().zip(&rejects).enumerate() {
        assert_eq!(reject["row"], json!(2 * index + 2), "{}", case.file);
        assert_eq!(reject["reason"], json!(case.verdict), "{}", case.file);
        let text = row_text(&reject["message"], folder);
        assert!(text.contains(&case.message), "{text}");
    }
}

#[test]
fn one_bad_row_in_two_hundred_is_skipped_and_three_stop_the_run() {
    for (num_bad, code) in [(1, 0), (3, 65)] {
        let folder = TempDir::new().unwrap();
        let folder = folder.path();
        let bad = "not json\n".repeat(num_bad);
        write(&folder.join("rows.jsonl"), good_rows(199) + &bad + &good_rows(1));
        let train = "train: {epochs: 1, batch_size: 60}\n";
        let output = sft(&row_config(folder, &format!("  packing_length: 64\n{train}")), &[]);
        let (message, hint) = reported(&output, folder);
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert_eq!(jsonl(&folder.join("out/rejects.jsonl")).len(), num_bad);
        if code == 65 {
            let expected = "3 of 202 rows rejected (3 json), the limit `data.max_rejected` is 0.01";
            assert_eq!(message, expected);
            assert!(hint.contains("`data.max_rejected`"), "{hint}");
            assert!(!folder.join("out/checkpoints").exists());
        }
    }
}

#[test]
fn rows_refused_while_the_loader_runs_are_listed_too() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    write(&folder.join("rows.jsonl"), good_rows(20) + &"not json\n".repeat(80));
    // Without epochs nothing is planned, so that the loop itself meets the rows.
    let config = row_config(folder, "  packing_length: 64\ntrain: {max_steps: 9}\n");
    let output = sft(&config, &[]);
    let (message, _) = reported(&output, folder);
    assert_eq!(output.status.code(), Some(65), "{message}");
    assert!(message.starts_with("80 of 100 rows rejected (80 json)"), "{message}");
    assert_eq!(jsonl(&folder.join("out/rejects.jsonl")).len(), 80);
}

#[test]
fn the_steps_before_rejected_rows_end_a_run_are_saved_and_another_limit_continues_them() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    write(&folder.join("rows.jsonl"), good_rows(99) + &"not json\n".repeat(5));
    for (setting, code) in [("", 65), ("  max_rejected: 0.5\n", 0), ("  on_error: stop\n", 65)] {
        let lines = format!("  packing: false\n{setting}train: {{max_steps: 101}}\n");
        let output = sft(&row_config(folder, &lines), &[]);
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{log}");
        let start = if setting.contains("max_rejected") { "resume from_step=98" } else { "start" };
        assert!(log.contains(start), "{log}");
        let saved = fs::read_dir(folder.join("out/checkpoints")).unwrap().count();
        assert_eq!(saved, 1 + usize::from(code == 0), "{setting}: {log}");
        if code == 0 {
            fs::remove_dir_all(folder.join("out")).unwrap();
        }
    }
}

#[test]
fn a_line_of_16_megabytes_is_a_bad_row_like_any_other() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    let long = format!("{{\"messages\": \"{}\n", "a".repeat(16 << 20));
    write(&folder.join("rows.jsonl"), good_rows(3) + &long + &good_rows(1));
    let config = row_config(folder, "  max_rejected: 0.5\ntrain: {epochs: 1}\n");
    let output = sft(&config, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", reported(&output, folder).0);
    let rejects = jsonl(&folder.join("out/rejects.jsonl"));
    assert_eq!(rejects.len(), 1);
    let text = row_text(&rejects[0]["message"], folder);
    assert!(text.starts_with("@TMP@/rows.jsonl:4:") && text.contains("invalid JSON"), "{text}");
}

fn row_text(value: &Value, folder: &Path) -> String {
    shortened(value.as_str().unwrap(), folder)
}

/// Without the folders of this machine.
fn shortened(text: &str, folder: &Path) -> String {
    let root = fixtures("bad_rows/images");
    let text = text.replace(root.to_str().unwrap(), "@IMAGES@");
    text.replace(folder.to_str().unwrap(), "@TMP@")
}

fn jsonl(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Arguments, exit code, what stderr has; `@TMP@` in both.
type Refused<'a> = (&'a [&'a str], i32, &'a [&'a str]);

fn assert_refused(folder: &Path, refused: &[Refused<'_>]) {
    for (args, code, texts) in refused {
        let args: Vec<String> =
            args.iter().map(|arg| arg.replace("@TMP@", folder.to_str().unwrap())).collect();
        let output = trainer(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let stderr = shortened(&String::from_utf8_lossy(&output.stderr), folder);
        assert_eq!(output.status.code(), Some(*code), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{args:?} printed a result");
        assert!(stderr.contains("error: ") && !stderr.contains("panicked"), "{args:?}: {stderr}");
        assert!(stderr.contains("try '--help'") || stderr.contains("\nhint: "), "{stderr}");
        for text in *texts {
            assert!(stderr.contains(text), "{args:?}: no `{text}` in\n{stderr}");
        }
    }
}

#[test]
fn a_set_that_cannot_be_used_is_named_as_it_was_typed() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    write(&folder.join("rows.jsonl"), good_rows(4));
    row_config(folder, "  packing_length: 64\n");
    let set = |argument: &'static str| -> [&str; 5] {
        ["sft", "--config", "@TMP@/config.yaml", "--set", argument]
    };
    assert_refused(
        folder,
        &[
            (
                &set("data.packin=false"),
                64,
                &[
                    "--set data.packin=false: unknown key `packin` in `data`, did you mean `packing`?",
                ],
            ),
            (&set("data.packing"), 64, &["--set data.packing: expected `key=value`"]),
            (&set("data..packing=1"), 64, &["`data..packing` has an empty key"]),
            (&set("seed.a=1"), 64, &["--set seed.a=1: "]),
            (
                &set("data.train.7.path=a"),
                64,
                &["--set data.train.7.path=a: there is no `7` in `data.train`"],
            ),
            (
                &set("optim.lr=fast"),
                64,
                &["--set optim.lr=fast: `optim.lr` is `fast`, expected a number"],
            ),
            (
                &set("optim.lr=-1"),
                64,
                &["--set optim.lr=-1: `optim.lr` is `-1`, expected a finite number"],
            ),
            (
                &set("model.path=nowhere"),
                64,
                &["--set model.path=nowhere: `model.path`: there is nothing at `nowhere`"],
            ),
            (
                &set("model.freeze=[visual]"),
                64,
                &["--set model.freeze=[visual]: `model.freeze`: `visual` matches no"],
            ),
            (&set("data.train=[a: }"), 64, &["--set data.train=[a: }: "]),
            (&["sft", "--config", "@TMP@/no.yaml"], 64, &["cannot read config `@TMP@/no.yaml`"]),
            (&["sft", "--confg", "a.yaml"], 64, &["unexpected argument '--confg'"]),
        ],
    );
    assert!(!folder.join("out/checkpoints").exists());
}

#[test]
fn values_of_other_trainers_and_settings_without_effect_have_hints() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    write(&folder.join("rows.jsonl"), good_rows(4));
    row_config(folder, "  packing: false\n");
    write(&folder.join("other.yaml"), "model_name_or_path: a\nstage: sft\ntemplate: b\n");
    let of = |set: &'static str, texts: &[&'static str]| {
        let args = ["sft", "--config", "@TMP@/config.yaml", "--set", set];
        assert_refused(folder, &[(&args, 64, texts)]);
    };
    of("adapter=dora", &["hint: write `adapter: {kind: dora}`"]);
    of("adapter={target: 'q_proj,v_proj'}", &["hint: write a list", "`[q_proj, v_proj]`"]);
    of("model.path=s3://b/m", &["hint: copy the model to a folder of this machine"]);
    of("optim.kind=paged_adamw_8bit", &["did you mean `adamw_8bit`?"]);
    of("data.loss_scale=ignore_think_prefix", &["did you mean `default`?"]);
    of("optim={schedule: constant, min_lr: 1e-6}", &["`optim.min_lr` is `0.000001`, expected 0"]);
    of("train.max_skipped=9", &["`train.max_skipped` is `9`, expected no value"]);
    of("data.max_patches_per_pack=9", &["`data.max_patches_per_pack` is `9`, expected no value"]);
    of("data.url={timeout_s: 9}", &["`data.url` is `set`, expected no value"]);
    of("output_dir=\"a\\nb\"", &["`output_dir` is `a\\nb`, expected a name without tabs"]);
    for command in ["sft", "plan"] {
        let args = [command, "--config", "@TMP@/other.yaml"];
        assert_refused(folder, &[(&args, 64, &["this is a config of LLaMA-Factory"])]);
    }
}

#[test]
fn a_checkpoint_that_cannot_be_resumed_is_refused_and_stays_as_it_is() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    write(&folder.join("rows.jsonl"), good_rows(16));
    let config = row_config(
        folder,
        "  packing_length: 64\ntrain: {max_steps: 2}\ncheckpoint: {every_steps: 1}\n",
    );
    assert_eq!(sft(&config, &[]).status.code(), Some(0));
    let newest = folder.join("out/checkpoints/step-00000002");
    fs::create_dir(folder.join("empty")).unwrap();
    let resume = |from: &'static str, set: &'static str| -> [&str; 7] {
        ["sft", "--config", "@TMP@/config.yaml", "--set", set, "--resume", from]
    };
    let (same, checkpoint) = ("train.max_steps=3", "@TMP@/out/checkpoints/step-00000002");
    assert_refused(
        folder,
        &[
            (
                &resume("@TMP@/nowhere", same),
                64,
                &["`--resume`: there is nothing at `@TMP@/nowhere`"],
            ),
            (&resume("atuo", same), 64, &["`--resume`: there is nothing at `atuo`"]),
            (&resume("@TMP@/empty", same), 65, &["checkpoint `@TMP@/empty` is damaged"]),
            (
                &resume(checkpoint, "optim.lr=1.0e-4"),
                64,
                &["was written by a run with another config"],
            ),
        ],
    );
    let weights = newest.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::remove_file(&weights).unwrap(); // `final` links to it
    write(&weights, &bytes);
    assert_refused(
        folder,
        &[(&resume(checkpoint, same), 65, &["step-00000002` is damaged: `model.safetensors`"])],
    );
    fs::copy(folder.join("out/final/model.safetensors"), &weights).unwrap();
    write(&folder.join("rows.jsonl"), good_rows(17));
    assert_refused(
        folder,
        &[(&resume(checkpoint, same), 65, &["the training files changed since `@TMP@/out"])],
    );
    assert!(newest.exists() && folder.join("out/final").exists());
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of commands and their errors")]
fn other_commands_refuse_bad_input_as_well() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    break_models(folder);
    write(&folder.join("rows.jsonl"), good_rows(4));
    write(&folder.join("bad.jsonl"), "{\"messages\": []}\n".repeat(3));
    write(&folder.join("image.png"), "no image");
    row_config(
        folder,
        "  eval: [{path: \"@TMP@/bad.jsonl\"}]\n"
            .replace("@TMP@", folder.to_str().unwrap())
            .as_str(),
    );
    let with = |command: &'static str, set: &'static str| -> [&str; 5] {
        [command, "--config", "@TMP@/config.yaml", "--set", set]
    };
    let generate = |model: &'static str, image: &'static str| -> [&str; 7] {
        ["generate", "--prompt", "What?", "--model", model, "--image", image]
    };
    let image =
        "@IMAGES@/good.png".replace("@IMAGES@", fixtures("bad_rows/images").to_str().unwrap());
    let plain = |model: &'static str| ["generate", "--prompt", "What?", "--model", model];
    assert_refused(
        folder,
        &[
            (&with("inspect", "model.path=nowhere"), 64, &["there is nothing at `nowhere`"]),
            (
                &with("inspect", "data.train.0.path=nowhere"),
                64,
                &["`data.train.0.path`: cannot read `nowhere`"],
            ),
            (
                &with("inspect", "model.path=@TMP@/no-tokenizer"),
                65,
                &["no-tokenizer/tokenizer.json"],
            ),
            (&with("eval", "model.path=nowhere"), 64, &["there is nothing at `nowhere`"]),
            (&with("eval", "data.eval=[]"), 64, &["`data.eval` is empty"]),
            (
                &with("eval", "seed=1"),
                65,
                &["none of the 3 eval rows can be scored", "bad.jsonl:1"],
            ),
            (&with("eval", "model.weights=pretrained"), 64, &["`model.weights` is `pretrained`"]),
            (
                &["eval", "--config", "@TMP@/config.yaml", "--checkpoint", "nowhere"],
                64,
                &["`--checkpoint`: there is nothing at `nowhere`"],
            ),
            (
                &[
                    "eval",
                    "--config",
                    "@TMP@/config.yaml",
                    "--checkpoint",
                    "@TMP@/truncated-weights",
                ],
                65,
                &["truncated-weights/model.safetensors` is not valid"],
            ),
            (&plain("nowhere"), 64, &["there is nothing at `nowhere`"]),
            (&plain("@TMP@/llava"), 65, &["`model_type` is `llava`"]),
            (&plain("@TMP@/missing-tensor"), 65, &["11 of 74 tensors are missing"]),
            (&generate("@TMP@/good", "nowhere.png"), 65, &["cannot read `nowhere.png`"]),
            (&generate("@TMP@/good", "@TMP@/image.png"), 65, &["is not a PNG, JPEG"]),
            (
                &[
                    "generate",
                    "--prompt",
                    "<|image_pad|>",
                    "--model",
                    "@TMP@/good",
                    "--image",
                    &image,
                ],
                65,
                &["`<|image_pad|>`, which is reserved"],
            ),
            (
                &[
                    "generate",
                    "--prompt",
                    "What?",
                    "--model",
                    "@TMP@/good",
                    "--top-p",
                    "0.9",
                    "--temperature",
                    "1",
                    "--max-new-tokens",
                    "many",
                ],
                64,
                &["'many'"],
            ),
            (
                &["init", "--preset", "debug", "--out", "@TMP@/good"],
                64,
                &["already contains a model"],
            ),
            (
                &["init", "--preset", "debug", "--out", "@TMP@/rows.jsonl/model"],
                73,
                &["cannot create folder"],
            ),
            (
                &["init", "--preset", "2b", "--out", "@TMP@/new", "--tokenizer", "nowhere"],
                64,
                &["`--tokenizer`: there is nothing"],
            ),
        ],
    );
}
