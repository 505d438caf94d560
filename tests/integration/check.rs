//! `trainer check` finds all problems in one pass, and changes nothing.

use super::harness::Place;
use serde_json::Value;
use std::fs;

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
    let found = findings(&place, "good.yaml", 0);
    assert!(found.iter().all(|finding| finding["kind"] == "ok"), "{found:?}");
    for topic in ["model", "tokenizer and template", "data.train", "plan", "memory", "disk"] {
        assert!(found.iter().any(|finding| finding["topic"] == topic), "{topic}: {found:?}");
    }
    assert_eq!(place.names("run"), ["cache"], "only the length cache is written");
    place.trainer(&["sft", "--config", "good.yaml"]).ends_with(0);
    let text = place.trainer(&["check", "--config", "good.yaml"]).ends_with(0).stdout;
    assert!(text.contains("has a run with a checkpoint of step 3"), "{text}");
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
    let found = findings(&place, "bad.yaml", 65);
    let errors: Vec<&Value> = found.iter().filter(|finding| finding["kind"] != "ok").collect();
    assert_eq!(PLANTED.len(), 30);
    let text = |finding: &Value| format!("{} {}", finding["message"], finding["examples"]);
    for (topic, what) in PLANTED {
        let is_it = |finding: &&&Value| finding["topic"] == topic && text(finding).contains(what);
        assert!(errors.iter().any(|finding| is_it(&finding)), "{topic}: {what} in {errors:#?}");
    }
    assert!(fs::metadata(place.path("not_a_folder")).unwrap().is_file());
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
