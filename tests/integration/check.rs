//! `trainer check` finds all problems in one pass, and changes nothing.

use super::harness::{Place, golden, json_lines, write};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use trainer::metrics::memory_text;

/// A folder with a model, good rows and a config without problems.
fn place() -> Place {
    let place = Place::with_model_and_rows();
    let rows = String::from_utf8(place.read("rows.jsonl")).unwrap();
    let text = rows.lines().filter(|line| !line.contains("image") && line.contains("assistant"));
    let short = text.filter(|line| line.starts_with("{\"id\"") && line.len() < 420);
    let good: Vec<&str> = short.take(8).collect();
    assert_eq!(good.len(), 8, "{rows}");
    place.write("good.jsonl", &(good.join("\n") + "\n"));
    place.write(
        "good.yaml",
        "output_dir: run\nmodel: {path: model}\ndata:\n  train: [{path: good.jsonl}]\n  \
         packing_length: 2048\ntrain: {max_steps: 3}\n",
    );
    place
}

fn findings(place: &Place, config: &str, code: i32) -> Vec<Value> {
    let output = place.trainer(&["check", "--config", config, "--json"]).ends_with(code);
    output.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_without_problems_passes_and_trains() {
    let place = place();
    let before = place.names(".");
    let found = findings(&place, "good.yaml", 0);
    assert!(found.iter().all(|finding| finding["kind"] == "ok"), "{found:?}");
    let new = place.names(".").into_iter().filter(|name| !before.contains(name));
    assert_eq!(new.collect::<Vec<_>>(), ["run"]);
    for topic in ["model", "tokenizer and template", "data.train", "plan", "memory", "disk"] {
        assert!(found.iter().any(|finding| finding["topic"] == topic), "{topic}: {found:?}");
    }
    assert_eq!(place.names("run"), ["cache"], "only the length cache is written");
    place.trainer(&["sft", "--config", "good.yaml"]).ends_with(0);
    let text = place.trainer(&["check", "--config", "good.yaml"]).ends_with(0).stdout;
    assert!(text.contains("has a run with a checkpoint of step 3"), "{text}");
}

/// The finding about memory, as text.
fn memory(found: &[Value]) -> String {
    let finding = found.iter().find(|finding| finding["topic"] == "memory").unwrap();
    finding["message"].as_str().unwrap().to_owned()
}

#[test]
fn the_memory_is_that_of_the_largest_pack_and_equals_the_plan() {
    let place = place();
    // Full packs of this length would need terabytes.
    let short = "output_dir: run\ndevice: cpu\nmodel: {path: model}\n\
                 data: {train: [{path: good.jsonl}], packing_length: 1000000000}\ntrain: {max_steps: 3}\n";
    // Without packing, a row may be longer than `packing_length`.
    let long = "output_dir: run\ndevice: cpu\nmodel: {path: model}\n\
                data: {train: [{path: long.jsonl}], packing_length: 16, packing: false}\ntrain: {max_steps: 3}\n";
    let text = "word ".repeat(9000);
    let row = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"?\"}},\
         {{\"role\":\"assistant\",\"content\":\"{text}\"}}]}}\n"
    );
    place.write("long.jsonl", &row);
    let mut bytes = Vec::new();
    for config in [short, long] {
        place.write("memory.yaml", config);
        let found = memory(&findings(&place, "memory.yaml", 0));
        let plan = place.trainer(&["plan", "--config", "memory.yaml", "--json"]).ends_with(0);
        let plan: Value = serde_json::from_str(plan.stdout.lines().last().unwrap()).unwrap();
        let all = plan["cpu_bytes"]["all"].as_f64().unwrap();
        bytes.push(all);
        let expected = format!("about {} for its largest pack", memory_text(all));
        assert!(found.starts_with(&expected), "{expected}: {found}");
    }
    assert!(bytes[1] > 1.5 * bytes[0], "{bytes:?}");
    // Rows that cannot be planned: full packs.
    place.write("memory.yaml", &short.replace("good.jsonl", "absent.jsonl"));
    let found = memory(&findings(&place, "memory.yaml", 65));
    assert!(found.contains("are needed for full packs, which are assumed"), "{found}");
}

/// Topic of each planted problem, and a part of its message.
const PLANTED: [(&str, &str); 30] = [
    ("config", "`device`"),
    ("config", "`learning_rate`"),
    ("config", "`precison`"),
    ("config", "`model.attention`"),
    ("config", "`data.packing_length`"),
    ("config", "`max_rejcted`"),
    ("config", "`train.batch_size`"),
    ("config", "`epoch`"),
    ("config", "`optim.schedule`"),
    ("config", "`checkpoint.keep`"),
    ("config", "`data.workers`"),
    ("config", "`train.max_grad_norm`"),
    ("config", "`optim.lr`"),
    ("config", "`optim.weight_decay`"),
    ("config", "`optim.eps`"),
    ("config", "`optim.warmup_ratio`"),
    ("config", "`distributed.timeout_s`"),
    ("model", "no.such.part"),
    ("data.train", "absent.jsonl"),
    ("data.train", "missing.jsonl"),
    ("data.train", "bad.jsonl:1"),
    ("data.train", "bad.jsonl:2"),
    ("data.train", "bad.jsonl:3"),
    ("data.train", "bad.jsonl:4"),
    ("data.train", "bad.jsonl:5"),
    ("data.train", "bad.jsonl:7"),
    ("data.train", "bad.jsonl:8"),
    ("data.eval", "gone.png"),
    ("data.eval", "lost.jsonl"),
    ("output_dir", "not_a_folder"),
];

/// Panics unless all of `planted` are among the findings.
#[track_caller]
fn assert_found(found: &[Value], planted: &[(&str, &str)]) {
    let errors: Vec<&Value> = found.iter().filter(|finding| finding["kind"] != "ok").collect();
    let text = |finding: &Value| format!("{} {}", finding["message"], finding["examples"]);
    // An error of the config has its line and column.
    let has_line = |finding: &Value| {
        let rest = finding["message"].as_str().unwrap().strip_prefix("bad.yaml:");
        let line = rest.and_then(|rest| rest.split(':').next()?.parse::<u32>().ok());
        finding["topic"] != "config" || line.is_some()
    };
    let is_found = |(topic, what): &(&str, &str)| {
        let mut of_topic = errors.iter().filter(|finding| finding["topic"] == *topic);
        of_topic.any(|finding| text(finding).contains(what) && has_line(finding))
    };
    let missed: Vec<_> = planted.iter().filter(|planted| !is_found(planted)).collect();
    assert!(missed.is_empty(), "{missed:?} in {errors:#?}");
}

#[test]
fn thirty_planted_problems_are_found_in_one_pass() {
    let place = place();
    let chat = |user: &str, answer: &str, more: &str| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{user}\"}},\
             {{\"role\":\"assistant\",\"content\":\"{answer}\"}}]{more}}}"
        )
    };
    let rows = [
        "{\"messages\": not JSON".to_owned(),
        "{\"messages\":[{\"role\":\"user\",\"content\":\"no answer\"}]}".to_owned(),
        chat("<image>?", "a", ""),
        chat("<image>?", "a", ",\"images\":[\"none.png\"]"),
        chat("<image>?", "a", ",\"images\":[\"text.png\"]"),
        chat("?", &"long ".repeat(3000), ""),
        "{\"messages\":[{\"role\":\"wizard\",\"content\":\"?\"}]}".to_owned(),
        "{\"messages\":[]}".to_owned(),
    ];
    place.write("text.png", "no image");
    place.write("bad.jsonl", &(rows.join("\n") + "\n"));
    place.write("eval.jsonl", &(chat("<image>?", "a", ",\"images\":[\"gone.png\"]") + "\n"));
    place.write("not_a_folder", "");
    place.write(
        "bad.yaml",
        "output_dir: not_a_folder\n\
         device: tpu\n\
         learning_rate: 1.0e-4\n\
         model: {path: model, precison: bf16, attention: fast, freeze: [no.such.part]}\n\
         data:\n\
         \x20 train:\n\
         \x20   - {path: bad.jsonl}\n\
         \x20   - {path: absent.jsonl}\n\
         \x20   - {path: missing.jsonl}\n\
         \x20 eval: [{path: eval.jsonl}, {path: lost.jsonl}]\n\
         \x20 packing_length: long\n\
         \x20 workers: 5000\n\
         \x20 max_rejcted: 0.5\n\
         train: {max_steps: 3, batch_size: 0, max_grad_norm: -1.0, epoch: 2}\n\
         optim: {lr: -1.0, schedule: cosin, weight_decay: -0.1, eps: 0.0, warmup_ratio: 2.0}\n\
         checkpoint: {keep: none}\n\
         distributed: {timeout_s: 0}\n",
    );
    assert_found(&findings(&place, "bad.yaml", 65), &PLANTED);
    assert!(fs::metadata(place.path("not_a_folder")).unwrap().is_file());
}

/// Problems of a mixture with corpora, an adapter, videos and evaluations, as in [`PLANTED`].
const PLANTED_IN_A_MIXTURE: [(&str, &str); 36] = [
    ("config", "`model.recompute`"),
    ("config", "`adapter.rank`"),
    ("config", "`adapter.quantize`"),
    ("config", "`adapter.alpha`"),
    ("config", "`adapter.dropout`"),
    ("config", "`data.train.3.corpus.sampling`"),
    ("config", "missing key `sampling`"),
    ("config", "`data.mixture`"),
    ("config", "`data.train.1.weight`"),
    ("config", "`data.train.2.name`"),
    ("config", "`data.train.8.weight`"),
    ("config", "`data.train.9.name`"),
    ("config", "`data.max_rejected`"),
    ("config", "`data.url.timeout_s`"),
    ("config", "`data.video.marks`"),
    ("config", "`eval.generate.batch`"),
    ("config", "`eval.early_stopping.min_delta`"),
    ("config", "`checkpoint.best.metric`"),
    ("config", "`log.trackers.0`"),
    ("model", "`decoder`"),
    ("model", "zq_proj"),
    ("model", "no.such"),
    ("model", "nothing.*"),
    ("tokenizer and template", "`data.video.fps`"),
    ("data.train", "`data.train.4.corpus.eos_token`"),
    ("data.train", "plain.txt"),
    ("data.train", "`data.train.6.dataset_info`"),
    ("data.train", "`data.train.8.path`"),
    ("data.train", "media.jsonl:1"),
    ("data.train", "media.jsonl:2"),
    ("data.train", "media.jsonl:3"),
    ("data.train", "media.jsonl:4"),
    ("data.train", "media.jsonl:5"),
    ("data.train", "media.jsonl:6"),
    ("data.train", "media.jsonl:7"),
    ("data.eval", "eval.jsonl:2"),
];

#[test]
fn the_problems_of_a_mixture_are_found_in_one_pass() {
    let place = place();
    let row = |turns: &[(&str, &str)], key: &str, media: Value| {
        let turn = |(role, text): &(&str, &str)| json!({"role": role, "content": text});
        let turns: Vec<Value> = turns.iter().map(turn).collect();
        json!({"messages": turns, key: media}).to_string() + "\n"
    };
    let chat = |text: &str, key: &str, media: Value| {
        row(&[("user", text), ("assistant", "a")], key, media)
    };
    fs::copy(golden("data/images/exact_moon_64x64.png"), place.path("ok.png")).unwrap();
    place.write("empty.png", "");
    let media = [
        chat("<video>?", "videos", json!([["ok.png"]])),
        chat("<image>?", "images", json!(["../secret.png"])),
        chat("<image>?", "images", json!(["empty.png"])),
        chat("<image>?", "images", json!(["https://example.org/a.png"])),
        chat("<image> <image>?", "images", json!(["ok.png"])),
        chat("<|image_pad|>", "images", json!([])),
        row(&[("user", "a"), ("system", "b"), ("assistant", "c")], "images", json!([])),
        chat("<image>?", "images", json!(["ok.png"])),
    ];
    place.write("media.jsonl", &media.concat());
    place.write("corpus.jsonl", &(json!({"text": "many words ".repeat(50)}).to_string() + "\n"));
    place.write("plain.txt", "words");
    place.write("info.json", r#"{"known": {"file_name": "good.jsonl"}}"#);
    let eval = chat("a", "images", json!([])) + &row(&[("user", "a")], "images", json!([]));
    place.write("eval.jsonl", &eval);
    place.write(
        "bad.yaml",
        "output_dir: run\n\
         model: {path: model, recompute: some}\n\
         adapter: {rank: 0, alpha: -1.0, dropout: 1.5, parts: [decoder, llm], target: [zq_proj],\n\
         \x20         train_also: [no.such], quantize: int3}\n\
         data:\n\
         \x20 train:\n\
         \x20   - {path: media.jsonl, name: media}\n\
         \x20   - {path: good.jsonl, weight: -1.0, name: other}\n\
         \x20   - {path: good.jsonl, name: media}\n\
         \x20   - {path: corpus.jsonl, corpus: {sampling: dice}}\n\
         \x20   - {path: corpus.jsonl, corpus: {sampling: document, eos_token: <nope>}}\n\
         \x20   - {path: plain.txt}\n\
         \x20   - {dataset_info: 'info.json#unknown'}\n\
         \x20   - {path: corpus.jsonl, corpus: {}}\n\
         \x20   - {path: none.jsonl, weight: 0.0}\n\
         \x20   - {path: good.jsonl, name: other}\n\
         \x20 eval: [{path: eval.jsonl}]\n\
         \x20 mixture: shares\n\
         \x20 video: {fps: -1.0, marks: round}\n\
         \x20 url: {timeout_s: 0.0}\n\
         \x20 max_rejected: 2.0\n\
         train: {max_steps: 3}\n\
         optim: {lr_multipliers: {'nothing.*': 0.5}}\n\
         checkpoint: {best: {metric: eval.f1}}\n\
         eval: {generate: {max_new_tokens: 4, batch: 100}, early_stopping: {patience: 2, min_delta: -1.0}}\n\
         log: {trackers: [comet]}\n",
    );
    assert_found(&findings(&place, "bad.yaml", 65), &PLANTED_IN_A_MIXTURE);
}

#[test]
fn a_wrong_pattern_and_a_wrong_template_hide_no_other_problem() {
    let place = place();
    place.write("model/chat_template.jinja", "{% for message in messages %}");
    place.write(
        "bad.yaml",
        "output_dir: run\n\
         model: {path: model, freeze: [no.first, vision, no.second]}\n\
         data: {train: [{path: good.jsonl}, {path: absent.jsonl}], eval: [{path: lost.jsonl}]}\n\
         optim: {lr_multipliers: {no.third: 0.5, no.fourth: 0.1}}\n\
         train: {max_steps: 3}\n",
    );
    let expected = [
        ("model", "no.first"),
        ("model", "no.second"),
        ("model", "no.third"),
        ("model", "no.fourth"),
        ("tokenizer and template", "chat_template"),
        ("data.train", "`data.train.1.path`"),
        ("data.eval", "`data.eval.0.path`"),
    ];
    let found = findings(&place, "bad.yaml", 65);
    let errors: Vec<&Value> = found.iter().filter(|finding| finding["kind"] != "ok").collect();
    assert_eq!(errors.len(), expected.len(), "{errors:#?}");
    let has = |topic: &str, what: &str| {
        let is_it = |finding: &&&Value| {
            finding["topic"] == topic && finding["message"].to_string().contains(what)
        };
        errors.iter().any(|finding| is_it(&finding))
    };
    for (topic, what) in expected {
        assert!(has(topic, what), "{topic}: {what} in {errors:#?}");
    }
    place.write(
        "adapter.yaml",
        "output_dir: run\n\
         model: {path: model}\n\
         adapter: {target: [nope, q_proj, neither]}\n\
         data: {train: [{path: absent.jsonl}]}\n\
         train: {max_steps: 3}\n",
    );
    let found = findings(&place, "adapter.yaml", 65);
    let of_model = found.iter().filter(|finding| finding["topic"] == "model");
    let text: Vec<String> = of_model.map(|finding| finding["message"].to_string()).collect();
    assert!(text.iter().any(|text| text.contains("`nope`")), "{text:?}");
    assert!(text.iter().any(|text| text.contains("`neither`")), "{text:?}");
}

/// The messages of the errors, in order.
fn errors(found: &[Value]) -> Vec<String> {
    let errors = found.iter().filter(|finding| finding["kind"] == "error");
    errors.map(|finding| finding["message"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn errors_behind_a_list_item_that_was_left_out_have_its_number_and_line_in_the_file() {
    let place = place();
    place.write(
        "bad.yaml",
        "output_dir: run\n\
         model: {path: model, freeze: [[], no.such]}\n\
         data:\n\
         \x20 train:\n\
         \x20   - {path: a.jsonl, corpus: {}}\n\
         \x20   - path: good.jsonl\n\
         \x20   - path: ~other/a.jsonl\n\
         \x20   - path: absent.jsonl\n\
         \x20 eval: [5, {corpus: {}}, {path: lost.jsonl}]\n\
         train: {max_steps: 3}\n",
    );
    let found = errors(&findings(&place, "bad.yaml", 65));
    let expected = [
        "bad.yaml:2:31: `model.freeze.0` is a list",
        "bad.yaml:5:23: missing key `sampling` in `data.train.0.corpus`",
        "bad.yaml:9:10: `data.eval.0` is `5`",
        "bad.yaml:9:14: missing key `sampling` in `data.eval.1.corpus`",
        "bad.yaml:7:13: `~other/a.jsonl` begins with",
        "bad.yaml:2:35: ",
        "bad.yaml:7:13: `data.train.2.path`",
        "bad.yaml:8:13: `data.train.3.path`",
        "bad.yaml:9:34: `data.eval.2.path`",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{expected}: {found}");
    }
}

#[test]
fn a_broken_evaluation_set_makes_no_setting_of_evaluations_wrong() {
    let place = place();
    let text = String::from_utf8(place.read("good.yaml")).unwrap();
    let text = text.replace("  packing_length", "  eval: [5]\n  packing_length");
    let more = "eval: {early_stopping: {patience: 2}, generate: {max_new_tokens: 4}}\n\
                checkpoint: {best: {metric: eval.loss}}\n";
    place.write("bad.yaml", &(text.clone() + more));
    let found = findings(&place, "bad.yaml", 65);
    let wrong = errors(&found);
    assert!(wrong.len() == 1 && wrong[0].contains("`data.eval.0` is `5`"), "{wrong:?}");
    assert!(memory(&found).contains("for its largest pack"), "{found:?}");
    place.write("bad.yaml", &(text.replace("[5]", "[]") + more));
    assert_eq!(errors(&findings(&place, "bad.yaml", 65)).len(), 3);
}

#[test]
fn without_a_usable_training_set_the_other_parts_of_a_run_are_checked() {
    let place = place();
    place.write(
        "bad.yaml",
        "output_dir: run\n\
         model: {path: model, freeze: [no.such]}\n\
         data: {train: [good.jsonl], eval: [{path: lost.jsonl}]}\n\
         optim: {lr: -1.0}\n\
         train: {max_steps: 3}\n",
    );
    let found = findings(&place, "bad.yaml", 65);
    let is_checked = |topic: &str| found.iter().any(|finding| finding["topic"] == topic);
    assert!(!is_checked("memory") && !is_checked("disk"), "without the value: {found:#?}");
    let found = errors(&found);
    let expected = ["`data.train.0` is `good.jsonl`", "`optim.lr`", "`no.such`", "lost.jsonl"];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.contains(expected), "{expected}: {found}");
    }
}

#[test]
fn a_wrong_value_of_the_model_folder_is_reported_once() {
    let place = place();
    let path = "model/video_preprocessor_config.json";
    let good = String::from_utf8(place.read("good.yaml")).unwrap();
    let with =
        |video: &str| good.replace("  packing_length", &format!("  {video}\n  packing_length"));
    let of_encoder = |found: &[Value]| {
        let is_error = |finding: &&Value| {
            finding["topic"] == "tokenizer and template" && finding["kind"] != "ok"
        };
        let text = found.iter().filter(is_error).map(|finding| finding["message"].to_string());
        text.collect::<Vec<String>>()
    };
    place.write(path, r#"{"fps": -1.0}"#);
    place.write("bad.yaml", &with("video: {max_frames: 8}"));
    let found = findings(&place, "bad.yaml", 65);
    let errors = of_encoder(&found);
    assert!(errors.len() == 1 && errors[0].contains("`data.video.fps` is `-1`"), "{errors:?}");

    // The rows are checked with the settings of the folder; the run would have other packs.
    place.write(path, "{}");
    place.write("bad.yaml", &with("video: {fps: -2.0}"));
    let found = findings(&place, "bad.yaml", 65);
    let errors = of_encoder(&found);
    assert!(errors.len() == 1 && errors[0].contains("`data.video.fps` is `-2`"), "{errors:?}");
    assert!(memory(&found).contains("full packs, which are assumed"), "{found:?}");

    // The other settings of the section still apply to the rows.
    fs::copy(golden("data/images/exact_moon_64x64.png"), place.path("frame.png")).unwrap();
    let row = json!({"messages": [{"role": "user", "content": "<video>?"},
        {"role": "assistant", "content": "a"}], "videos": [vec!["frame.png"; 8]]});
    place.write("good.jsonl", &(row.to_string() + "\n"));
    let rows = |video: &str, code| {
        place.write("rows.yaml", &with(video));
        let found = findings(&place, "rows.yaml", code);
        let rows = found.iter().find(|finding| finding["topic"] == "data.train").unwrap();
        rows["message"].to_string()
    };
    let small = "max_pixels: 8192";
    let expected = rows(&format!("video: {{{small}}}"), 0);
    assert_ne!(expected, rows("video: {}", 0));
    assert_eq!(expected, rows(&format!("video: {{{small}, fps: -2.0}}"), 65));
}

#[test]
fn the_folder_of_an_adapter_in_place_of_a_model_is_recognised() {
    let place = place();
    let tensors = candle_core::safetensors::load(
        place.path("model/model.safetensors"),
        &candle_core::Device::Cpu,
    );
    for (prefix, said) in [("base_model.model.", "PEFT adapter"), ("module.", "prefix `module.`")] {
        let renamed: std::collections::HashMap<String, candle_core::Tensor> = tensors
            .as_ref()
            .unwrap()
            .iter()
            .map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone()))
            .collect();
        candle_core::safetensors::save(&renamed, place.path("model/model.safetensors")).unwrap();
        let found = findings(&place, "good.yaml", 65);
        let of_model = found.iter().find(|finding| finding["topic"] == "model").unwrap();
        assert!(of_model["message"].as_str().unwrap().contains(said), "{of_model}");
    }
}

#[test]
fn a_setting_that_prevents_resuming_is_named() {
    let place = place();
    place.trainer(&["sft", "--config", "good.yaml"]).ends_with(0);
    let check = ["check", "--config", "good.yaml", "--set", "optim.lr=3e-3"];
    let output = place.trainer(&check).ends_with(0);
    assert!(output.stdout.contains("would not be resumed: `optim.lr` was"), "{}", output.stdout);
}

#[test]
fn checkpoints_that_do_not_fit_on_the_disk_are_reported_before_the_run() {
    let place = place();
    let many = ["--set", "checkpoint={every_steps: 1, keep: 100000000}"];
    // A run of few steps writes few checkpoints, whatever it may keep.
    let few = [&["check", "--config", "good.yaml"][..], &many].concat();
    place.trainer(&few).ends_with(0);
    let long = [&many[..], &["--set", "train={max_steps: 100000000}"]].concat();
    stops(&place, &long, &["on the disk of `run`"]);
    let mut command = place.command(&[&["sft", "--config", "good.yaml"][..], &long].concat());
    let mut run = command.stderr(Stdio::piped()).spawn().unwrap();
    let log = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    let before: Vec<String> = log.take_while(|line| !line.contains("train step=1 ")).collect();
    run.kill().unwrap();
    run.wait().unwrap();
    let warning = "WARN the disk of `output_dir` lacks space";
    assert!(before.iter().any(|line| line.contains(warning)), "{before:#?}");
    // A resumed run replaces its checkpoints. Those of another run are moved aside, and stay.
    fs::create_dir_all(place.path("run/checkpoints/earlier")).unwrap();
    let file = fs::File::create(place.path("run/checkpoints/earlier/file")).unwrap();
    file.set_len(1 << 43).unwrap(); // without blocks on the disk
    let many = "checkpoint={every_steps: 1, keep: 500000}"; // 4 TB
    let long = ["--set", many, "--set", "train={max_steps: 500000}"];
    place.trainer(&[&["check", "--config", "good.yaml"][..], &long].concat()).ends_with(0);
    stops(&place, &[&long[..], &["--set", "optim.lr=0.5"]].concat(), &["on the disk of `run`"]);
}

/// Panics unless `check` with `more` ends with code 65 and has an error with each of `texts`.
#[track_caller]
fn stops(place: &Place, more: &[&str], texts: &[&str]) {
    let arguments = [&["check", "--config", "good.yaml"], more].concat();
    let output = place.trainer(&arguments).ends_with(65);
    for text in texts {
        let found =
            output.stdout.lines().any(|line| line.contains("error: ") && line.contains(text));
        assert!(found, "{more:?}: no `{text}` in {}", output.stdout);
    }
}

#[test]
fn what_stops_a_run_at_its_start_is_found_before() {
    let place = place();
    let address = ["--set", "output_dir=s3://bucket/run"];
    stops(&place, &address, &["`output_dir` is `s3://bucket/run`, expected a folder"]);
    assert!(!place.path("s3:").exists());
    let ranks = ["--set", "distributed.processes=3", "--set", "distributed.sequence=3"];
    let slots = ["--set", "distributed.processes=2", "--set", "device=cuda:0"];
    stops(&place, &ranks, &["`distributed.sequence`"]);
    let masked = ["--set", "model.attention=masked"];
    let device = ["`device` is `cuda:0`", "reference implementation", "micro-batch"];
    stops(&place, &[&slots[..], &masked].concat(), &device);
    std::os::unix::fs::symlink(place.path("good.jsonl"), place.path("model/vocab.json")).unwrap();
    stops(&place, &[], &["vocab.json"]);
    fs::remove_file(place.path("model/vocab.json")).unwrap();

    place
        .trainer(&["sft", "--config", "good.yaml", "--set", "checkpoint.every_steps=1"])
        .ends_with(0);
    stops(&place, &["--set", "model.path=run/final"], &["`model.path` is in `output_dir` `run`"]);
    {
        // A running process holds this lock.
        let folder = fs::File::open(place.path("run")).unwrap();
        folder.try_lock().unwrap();
        stops(&place, &[], &["another run is using `run`"]);
    }
    let check = || place.trainer(&["check", "--config", "good.yaml"]);
    let optimizer = place.path("run/checkpoints/step-00000003/optimizer.safetensors");
    fs::File::options().write(true).open(&optimizer).unwrap().set_len(1000).unwrap();
    let damaged = check().ends_with(0).stdout;
    assert!(damaged.contains("warning: a checkpoint would be skipped"), "{damaged}");
    assert!(damaged.contains("would resume from step 2"), "{damaged}");
    let template = String::from_utf8(place.read("model/chat_template.jinja")).unwrap();
    place.write("model/chat_template.jinja", &format!("{template}{{# changed #}}"));
    stops(&place, &[], &["changed since checkpoint", "template"]);
    place.write("model/chat_template.jinja", &template);
    check().ends_with(0);
    let rows = String::from_utf8(place.read("good.jsonl")).unwrap();
    let less = rows.split_once('\n').unwrap().1;
    place.write("good.jsonl", less);
    stops(&place, &[], &["the training files changed since"]);
}

/// The warnings of `check` with `rows` in place of the good ones.
fn warnings(place: &Place, rows: &[Value], more: &[&str]) -> Vec<String> {
    let lines: Vec<String> = rows.iter().map(|row| row.to_string() + "\n").collect();
    place.write("good.jsonl", &lines.concat());
    let arguments = [&["check", "--config", "good.yaml", "--json"], more].concat();
    let shown = json_lines(&place.trainer(&arguments).stdout);
    let warnings = shown.iter().filter(|finding| finding["kind"] == "warning");
    warnings.map(|finding| finding["message"].as_str().unwrap().to_owned()).collect()
}

fn chat(user: &str, answer: &str) -> Value {
    json!({"messages": [
        {"role": "user", "content": user}, {"role": "assistant", "content": answer},
    ]})
}

#[test]
fn truncated_rows_and_the_answers_that_lose_their_end_are_counted() {
    let place = place();
    let long = "word ".repeat(300);
    let rows = [chat("short", "short"), chat("short", &long), chat(&long, "short")];
    let set = |truncation| {
        ["--set", "data.max_length=200", "--set", truncation, "--set", "data.max_rejected=1.0"]
    };
    let found = warnings(&place, &rows, &set("data.truncation=right"));
    // The answer of the third row is cut off as a whole, so the row is rejected.
    assert!(
        found.iter().any(|it| it.contains("1 of 3 rows are truncated")
            && it.contains("; 1 of them lose supervised")),
        "{found:?}"
    );
    let found = warnings(&place, &rows, &set("data.truncation=left"));
    assert!(
        found.iter().any(|it| it.contains("2 of 3 rows are truncated")
            && it.contains("; 1 of them lose supervised")),
        "{found:?}"
    );
    assert_eq!(warnings(&place, &rows, &[]), Vec::<String>::new());
}

#[test]
fn rows_that_train_something_else_than_their_writer_may_expect_are_counted() {
    let place = place();
    let dangling = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]});
    let rows = [chat("a", "b"), chat("a", " "), dangling, chat("what is <image>?", "a tag")];
    let literal = ["--set", "data.train.0.literal_placeholders=true"];
    let found = warnings(&place, &rows, &literal);
    for part in [
        "1 of 4 rows have an empty answer",
        "1 of 4 rows end with a turn",
        "1 of 4 rows contain `<image>`",
    ] {
        assert!(found.iter().any(|it| it.contains(part)), "{part}: {found:#?}");
    }
    assert_eq!(found.len(), 3, "{found:#?}");
}

#[test]
fn rejected_rows_are_judged_by_their_share_of_all_data_sets_like_in_the_run() {
    let place = place();
    let good = String::from_utf8(place.read("good.jsonl")).unwrap();
    place.write("many.jsonl", &good.repeat(20));
    place.write("few.jsonl", &(good + "{\"messages\": []}\n"));
    let run = |command: &[&str], weight: &str| {
        let sets = format!("data.train=[{{path: many.jsonl}}, {{path: few.jsonl, {weight}}}]");
        let settings = ["--set", &sets, "--set", "train={epochs: 1}"];
        place.trainer(&[command, &["--config", "good.yaml"], &settings].concat())
    };
    // 1 of 169 rows and 20 of 340
    for (weight, code) in [("weight: 1", 0), ("weight: 20", 65)] {
        let found = run(&["check"], weight).ends_with(code);
        let text = found.stdout + &found.stderr;
        assert!(text.contains("few.jsonl: 1 of 9 rows would be rejected: no_messages"), "{text}");
        run(&["sft", "--resume", "never"], weight).ends_with(code);
    }
}

#[test]
fn the_first_three_rows_of_each_reason_are_named() {
    let place = place();
    let good = String::from_utf8(place.read("good.jsonl")).unwrap();
    place.write("good.jsonl", &("{\"messages\": []}\n".repeat(5) + &good + "{}\n"));
    let found = findings(&place, "good.yaml", 65);
    let rows = |message: &str| -> Vec<String> {
        let finding = found.iter().find(|finding| finding["message"] == message);
        let finding = finding.unwrap_or_else(|| panic!("no `{message}` in {found:#?}"));
        let examples = finding["examples"].as_array().unwrap().iter();
        let row =
            |example: &Value| example.as_str().unwrap().split(": ").next().unwrap().to_owned();
        examples.map(row).collect()
    };
    let empty = rows("good.jsonl: 5 of 14 rows would be rejected: no_messages");
    assert_eq!(empty, ["good.jsonl:1", "good.jsonl:2", "good.jsonl:3"]);
    assert_eq!(rows("good.jsonl: 1 of 14 rows would be rejected: row_form"), ["good.jsonl:14"]);
}

#[test]
fn what_is_not_read_is_found_by_the_run() {
    let place = place();
    let run = |command: &str, settings: &[&str], code: i32| {
        place.trainer(&[&[command, "--config", "good.yaml"], settings].concat()).ends_with(code)
    };
    // an image that is damaged after its header
    let mut image = fs::read(golden("data/images/exact_moon_64x64.png")).unwrap();
    let pixels = image.windows(4).position(|kind| kind == b"IDAT").unwrap();
    image[pixels + 40..pixels + 42].copy_from_slice(&[0xff, 0xff]);
    write(&place.path("damaged.png"), &image);
    let mut row = chat("<image>?", "a");
    row["images"] = json!(["damaged.png"]);
    place.write("image.jsonl", &(row.to_string() + "\n"));
    let settings = ["data.train=[{path: image.jsonl}]", "data.on_error=stop"];
    let settings = settings.map(|set| ["--set", set]).concat();
    let checked = run("check", &settings, 0).stdout;
    assert!(checked.contains("image.jsonl: 1 of 1 rows can be used"), "{checked}");
    run("sft", &settings, 65).says("image `damaged.png` is damaged");

    // a weight that is not a number
    let weights = place.read("model/model.safetensors");
    let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize + 8;
    let mut changed = weights.clone();
    changed[header..header + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    write(&place.path("model/model.safetensors"), &changed);
    run("check", &[], 0);
    run("sft", &[], 65).says("is not finite");
    write(&place.path("model/model.safetensors"), &weights);

    // a changed byte in the weights of a checkpoint
    let once = ["--set", "train.max_steps=1"];
    run("sft", &once, 0);
    let path = "run/checkpoints/step-00000001/model.safetensors";
    let mut weights = place.read(path);
    *weights.last_mut().unwrap() ^= 1;
    fs::remove_file(place.path(path)).unwrap(); // `final` links to it
    write(&place.path(path), &weights);
    let checked = run("check", &once, 0).stdout;
    assert!(!checked.contains("warning"), "{checked}");
    run("sft", &once, 0).says("skipped a checkpoint");
}

#[test]
fn a_data_set_that_is_listed_twice_is_a_warning() {
    let place = place();
    let rows = [chat("a", "b")];
    place.write("copy.jsonl", &(rows[0].to_string() + "\n"));
    let found =
        warnings(&place, &rows, &["--set", "data.train=[{path: good.jsonl}, {path: copy.jsonl}]"]);
    assert!(
        found[0].contains("copy.jsonl has the rows of good.jsonl, which is listed"),
        "{found:?}"
    );
    let found = warnings(&place, &rows, &["--set", "data.eval=[{path: copy.jsonl}]"]);
    assert!(
        found[0].contains("copy.jsonl of `data.eval` has the rows of good.jsonl of"),
        "{found:?}"
    );
}
