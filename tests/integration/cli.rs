//! The command line: help, exit codes, results on stdout, everything else on stderr.

use super::harness::{Place, golden, json_lines};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

const COMMANDS: [&str; 6] = ["sft", "init", "inspect", "eval", "generate", "bench"];

/// `trainer` with a config that reads a golden data set with the model folder `small-tied`.
fn with_config(data: &str, more: &str) -> Place {
    let place = Place::empty();
    let model = golden("models/small-tied").display().to_string();
    let rows = golden("data").join(format!("{data}.jsonl")).display().to_string();
    let config = format!(
        "output_dir: run\nmodel: {{path: '{model}'}}\ndata:\n  train: [{{path: '{rows}'}}]\n  \
         eval: [{{path: '{rows}'}}]\n{more}\n"
    );
    place.write("config.yaml", &config);
    place
}

#[test]
fn each_command_explains_itself_with_an_example() {
    let place = Place::empty();
    let all = place.trainer(&["--help"]).ends_with(0);
    for command in COMMANDS {
        assert!(all.stdout.contains(&format!("  {command} ")), "{}", all.stdout);
        let help = place.trainer(&[command, "--help"]).ends_with(0);
        assert!(help.stderr.is_empty(), "{}", help.stderr);
        let example = format!("Example:\n  trainer {command} --");
        assert!(help.stdout.contains(&example), "{command}:\n{}", help.stdout);
        // Each option of the example exists.
        let (usage, example) = help.stdout.split_once("Example:").unwrap();
        for option in example.split_whitespace().filter(|word| word.starts_with("--")) {
            assert!(usage.contains(option), "{command}: `{option}` is not an option");
        }
    }
    let version = place.trainer(&["--version"]).ends_with(0);
    let code = if cfg!(feature = "cuda") { "CUDA " } else { "without GPU code)" };
    let expected = format!("trainer {} ({code}", env!("CARGO_PKG_VERSION"));
    assert!(version.stdout.starts_with(&expected), "{}", version.stdout);
}

#[test]
fn wrong_arguments_end_with_64_and_say_what_would_be_right() {
    let place = Place::empty();
    for (arguments, said) in [
        (&["sft", "--confg", "a.yaml"][..], "--config"),
        (&["sft"], "--config <FILE>"),
        (&["trian"], "trian"),
        (&[], "Usage: trainer"),
        (&["init", "--preset", "huge", "--out", "m"], "debug"),
        (&["init", "--preset", "tiny"], "--out <DIR>"),
        (&["inspect", "--config", "a.yaml", "--num", "few"], "few"),
        (&["generate", "--model", "m"], "--prompt <PROMPT>"),
    ] {
        let output = place.trainer(arguments).ends_with(64).says(said);
        assert!(output.stdout.is_empty(), "{}", output.stdout);
    }
    place.trainer(&["sft", "--config", "none.yaml"]).ends_with(64).says("`none.yaml`");
}

#[test]
fn init_writes_a_folder_that_depends_on_preset_and_seed_alone() {
    let place = Place::empty();
    let init = |more: &[&str]| place.trainer(&[&["init"], more].concat());
    for (preset, out, seed) in
        [("debug", "a", "1"), ("debug", "b", "1"), ("debug", "c", "2"), ("tiny", "d", "1")]
    {
        let done = init(&["--preset", preset, "--out", out, "--seed", seed]).ends_with(0);
        assert!(done.stdout.is_empty(), "{}", done.stdout);
        assert!(done.stderr.contains("parameters="), "{}", done.stderr);
        let files = place.names(out);
        for file in ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"] {
            assert!(files.iter().any(|name| name == file), "{out}: no {file} in {files:?}");
        }
    }
    let weights = |out: &str| place.read(&format!("{out}/model.safetensors"));
    assert!(weights("a") == weights("b") && weights("a") != weights("c"));
    assert!(weights("d").len() > weights("a").len());
    // A folder that holds a model stays as it is.
    let refused = init(&["--preset", "tiny", "--out", "a"]).ends_with(64);
    refused.says("`a` already contains a model").says("hint: ");
    assert!(weights("a") == weights("b"));
}

#[test]
fn init_writes_published_shapes_without_weights() {
    let place = Place::empty();
    for (preset, layers, hidden) in [
        ("2b", 28, 2048),
        ("4b", 36, 2560),
        ("8b", 36, 4096),
        ("32b", 64, 5120),
        ("30b-a3b", 48, 2048),
        ("qwen3.5-0.8b", 24, 1024),
        ("qwen3.5-27b", 64, 5120),
        ("qwen2.5-vl-3b", 36, 2048),
        ("qwen2.5-vl-7b", 28, 3584),
        ("qwen2.5-vl-72b", 80, 8192),
        ("qwen2-vl-7b", 28, 3584),
        ("internvl3.5-38b", 64, 5120),
        ("minicpm-v-4.6", 24, 1024),
    ] {
        place.trainer(&["init", "--preset", preset, "--out", preset]).ends_with(0);
        let folder: u64 = place.names(preset).iter().map(|name| size(&place, preset, name)).sum();
        assert!(folder < 100_000, "{preset}: {folder} bytes without weights");
        let config: Value =
            serde_json::from_slice(&place.read(&format!("{preset}/config.json"))).unwrap();
        // published files of Qwen2.5-VL have one level
        let text = config.get("text_config").unwrap_or(&config);
        assert_eq!(
            (&text["num_hidden_layers"], &text["hidden_size"]),
            (&layers.into(), &hidden.into())
        );
        let vision = &config["vision_config"];
        let out = vision.get("out_hidden_size").unwrap_or(&vision["hidden_size"]);
        // the width of the tokens of these families is that of the decoder and has no key of its own
        let has_no_key =
            ["internvl", "minicpmv4_6"].iter().any(|family| config["model_type"] == *family);
        assert!(*out == hidden || has_no_key, "{preset}");
    }
}

fn size(place: &Place, folder: &str, name: &str) -> u64 {
    fs::metadata(place.path(&format!("{folder}/{name}"))).unwrap().len()
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

#[test]
fn inspect_prints_the_fields_of_the_contract_and_stores_what_they_sum_up() {
    let place = with_config("image_exact", "  shuffle: false");
    let arguments = ["inspect", "--config", "config.yaml", "--num", "5"];
    let jsonl = ["--format", "jsonl", "--tensors", "tensors.safetensors"];
    let output = place.trainer(&[&arguments[..], &jsonl].concat()).ends_with(0);
    let rows = json_lines(&output.stdout);
    assert_eq!(rows.len(), 5);
    let device = candle_core::Device::Cpu;
    let tensors =
        candle_core::safetensors::load(place.path("tensors.safetensors"), &device).unwrap();
    for (index, row) in rows.iter().enumerate() {
        let keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys.join(" "),
            "id length input_ids labels position_ids image_grid_thw video_grid_thw pixel_sum pixel_abs_sum"
        );
        let id = row["id"].as_str().unwrap();
        assert!(id.ends_with(&format!("image_exact.jsonl:{}", index + 1)), "{id}");
        let length = row["length"].as_u64().unwrap() as usize;
        let (ids, labels) = (numbers(&row["input_ids"]), numbers(&row["labels"]));
        assert_eq!((ids.len(), labels.len()), (length, length));
        let axes = row["position_ids"].as_array().unwrap();
        assert!(axes.len() == 3 && axes.iter().all(|axis| numbers(axis).len() == length));
        assert!(labels.iter().zip(&ids).all(|(label, id)| *label == -100 || label == id));
        assert!(labels.iter().any(|label| *label != -100));

        let tensor = |what: &str| &tensors[&format!("{id}/{what}")];
        assert_eq!(tensor("input_ids").to_vec1::<i64>().unwrap(), ids);
        assert_eq!(tensor("labels").to_vec1::<i64>().unwrap(), labels);
        let positions = tensor("position_ids").to_vec2::<i64>().unwrap();
        assert!(positions.iter().zip(axes).all(|(found, axis)| *found == numbers(axis)));
        let grids = row["image_grid_thw"].as_array().unwrap();
        let patches: i64 = grids.iter().map(|grid| numbers(grid).iter().product::<i64>()).sum();
        let pixels = tensor("pixel_values").to_vec2::<f32>().unwrap();
        assert_eq!(pixels.len() as i64, patches);
        let sum =
            |f: fn(f64) -> f64| pixels.iter().flatten().map(|x| f(f64::from(*x))).sum::<f64>();
        let printed = |key: &str| row[key].as_f64().unwrap();
        assert!((sum(|x| x) - printed("pixel_sum")).abs() < 1e-6);
        assert!((sum(f64::abs) - printed("pixel_abs_sum")).abs() < 1e-6);
        // A merged token represents four patches.
        let image = numbers(&row["input_ids"]).iter().filter(|id| **id == 2029).count() as i64;
        assert_eq!(4 * image, patches, "{id}");
    }

    let text = place.trainer(&arguments).ends_with(0).stdout;
    assert_eq!(text.matches(" targets, image grids").count(), 5, "{text}");
    assert!(text.contains(" image tokens>") && text.contains("[["), "{text}");
}

#[test]
fn inspect_packs_every_row_once_and_within_the_limit() {
    let place = with_config("image_exact", "  packing_length: 300\n  max_rejected: 0.5");
    let arguments = ["inspect", "--config", "config.yaml", "--packs", "--num", "0"];
    let packs = json_lines(&place.trainer(&arguments).ends_with(0).stdout);
    let mut seen = BTreeSet::new();
    let mut total = 0;
    for (index, pack) in packs.iter().enumerate() {
        assert_eq!(pack["pack"], index);
        let ids = pack["ids"].as_array().unwrap();
        let lengths = numbers(&pack["lengths"]);
        assert_eq!(ids.len(), lengths.len());
        let length: i64 = lengths.iter().sum();
        assert!(length <= 300 && pack["length"] == length, "{pack}");
        total += length;
        for id in ids {
            assert!(seen.insert(id.as_str().unwrap().to_owned()), "{id} comes twice");
        }
    }
    let all = ["inspect", "--config", "config.yaml", "--num", "0", "--format", "jsonl"];
    let rows = json_lines(&place.trainer(&all).ends_with(0).stdout);
    let fitting: Vec<&Value> =
        rows.iter().filter(|row| row["length"].as_u64() <= Some(300)).collect();
    let ids: BTreeSet<String> =
        fitting.iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(seen, ids);
    assert_eq!(total, fitting.iter().map(|row| row["length"].as_i64().unwrap()).sum::<i64>());
}

#[test]
fn eval_prints_one_object_and_writes_a_line_a_sample() {
    let place = with_config("text", "");
    let arguments = ["eval", "--config", "config.yaml", "--per-sample", "scores.jsonl"];
    let output = place.trainer(&arguments).ends_with(0);
    let summary = json_lines(&output.stdout);
    assert_eq!(summary.len(), 1, "{}", output.stdout);
    let scores = place.rows("scores.jsonl");
    assert_eq!(summary[0]["num_samples"], scores.len());
    assert_eq!(scores.len(), 160);
    let (mut nll, mut targets) = (0.0, 0);
    for (index, score) in scores.iter().enumerate() {
        assert!(score["id"].as_str().unwrap().ends_with(&format!("text.jsonl:{}", index + 1)));
        nll += score["nll_sum"].as_f64().unwrap();
        targets += score["num_targets"].as_u64().unwrap();
        assert!(score["exact"].is_boolean());
    }
    assert_eq!(summary[0]["num_target_tokens"], targets);
    let loss = summary[0]["loss"].as_f64().unwrap();
    assert!((loss - nll / targets as f64).abs() < 1e-9, "{loss}");
    let nothing = ["eval", "--config", "config.yaml", "--set", "data.eval=[]"];
    place.trainer(&nothing).ends_with(64).says("`data.eval` is empty").says("hint: ");
}

/// `data.max_length` limits the rows of `data.train` only.
#[test]
fn rows_longer_than_max_length_are_evaluated_whole() {
    let place = with_config("text", "");
    let text = fs::read_to_string(golden("data/text.jsonl")).unwrap();
    let rows: Vec<&str> = text.lines().filter(|line| line.len() < 420).take(4).collect();
    place.write("four.jsonl", &rows.join("\n"));
    let eval = |more: &[&str]| {
        let rows = ["--set", "data.eval=[{path: four.jsonl}]"];
        let all = [&["eval", "--config", "config.yaml"], &rows[..], more].concat();
        place.trainer(&all).ends_with(0).stdout
    };
    let whole = eval(&[]);
    let targets = json_lines(&whole)[0]["num_target_tokens"].as_u64().unwrap();
    assert!(targets > 4 * 8, "the rows have more tokens than the limit below: {whole}");
    for truncation in ["delete", "right"] {
        let truncation = format!("data.truncation={truncation}");
        assert_eq!(eval(&["--set", "data.max_length=8", "--set", &truncation]), whole);
    }
}

#[test]
fn an_answer_counts_as_exact_if_and_only_if_greedy_generation_gives_it() {
    let place = with_config("digits_train", "  packing_length: 416");
    let rows = fs::read_to_string(golden("data/digits_train.jsonl")).unwrap();
    let rows: Vec<&str> = rows.lines().take(20).collect();
    place.write("twenty.jsonl", &(rows.join("\n") + "\n"));
    let eval = format!("data.eval=[{{path: twenty.jsonl, image_root: {:?}}}]", golden("data"));
    let config = ["--config", "config.yaml", "--set", eval.as_str()];
    let brief = ["train.max_steps=32", "optim.lr=3e-3", "optim.schedule=constant", "eval.show=0"];
    let brief: Vec<&str> = brief.iter().flat_map(|set| ["--set", *set]).collect();
    place.trainer(&[&["sft"], &config[..], &brief].concat()).ends_with(0);
    let score = ["--checkpoint", "run/final", "--per-sample", "scores.jsonl"];
    place.trainer(&[&["eval"], &config[..], &score].concat()).ends_with(0);

    let mut exact = Vec::new();
    for (row, score) in rows.iter().zip(place.rows("scores.jsonl")) {
        let row: Value = serde_json::from_str(row).unwrap();
        let image = golden("data").join(row["images"][0].as_str().unwrap());
        let expected = row["messages"][1]["content"].as_str().unwrap();
        let arguments = ["generate", "--model", "run/final", "--prompt", "What digit is this?"];
        let more = ["--image", image.to_str().unwrap(), "--max-new-tokens", "8"];
        let answer = place.trainer(&[&arguments[..], &more].concat()).ends_with(0);
        let given = answer.stdout.strip_suffix('\n').unwrap();
        assert_eq!(score["exact"], given == expected, "{}: `{given}`, {expected}", score["id"]);
        exact.push(given == expected);
    }
    let right = exact.iter().filter(|exact| **exact).count();
    println!("{right} of {} answers are exact", exact.len());
    assert!(
        right > 0 && right < exact.len(),
        "the test needs right and wrong answers, found {right} right ones"
    );
}

#[test]
fn generate_gives_the_same_answer_again() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    let image = golden("data/digits/1400.png");
    let generate = |more: &[&str]| {
        let paths = ["--model", model.to_str().unwrap(), "--image", image.to_str().unwrap()];
        let rest = ["--prompt", "Was ist das?", "--max-new-tokens", "12"];
        place.trainer(&[&["generate"], &paths[..], &rest, more].concat()).ends_with(0)
    };
    let (greedy, warm) = (generate(&[]), generate(&["--temperature", "2", "--seed", "5"]));
    assert!(greedy.stdout.ends_with('\n') && greedy.stderr.is_empty(), "{}", greedy.stderr);
    assert_eq!(greedy.stdout, generate(&[]).stdout);
    assert_eq!(warm.stdout, generate(&["--temperature", "2", "--seed", "5"]).stdout);
    assert_ne!(warm.stdout, generate(&["--temperature", "2", "--seed", "6"]).stdout);
    assert_ne!(warm.stdout, greedy.stdout);
}

#[test]
fn training_prints_nothing_to_stdout_and_no_escape_codes_without_a_terminal() {
    let place = with_config("digits_test", "train: {max_steps: 3, batch_size: 4}");
    let sft = place.trainer(&["sft", "--config", "config.yaml"]).ends_with(0);
    let eval = ["eval", "--config", "config.yaml"];
    let inspect = ["inspect", "--config", "config.yaml", "--num", "2"];
    let wrong = ["sft", "--config", "config.yaml", "--set", "optim.lrr=1"];
    let log = String::from_utf8(place.read("run/train.log")).unwrap();
    assert!(sft.stdout.is_empty(), "{}", sft.stdout);
    assert!(
        sft.stderr.contains("INFO train step=3 ") && log.contains("INFO train step=3 "),
        "{log}"
    );
    let others = [place.trainer(&eval).ends_with(0), place.trainer(&inspect).ends_with(0)];
    let mut texts = vec![log, sft.stderr, place.trainer(&wrong).ends_with(64).stderr];
    texts.extend(others.into_iter().flat_map(|output| [output.stdout, output.stderr]));
    for text in texts {
        assert!(!text.contains('\u{1b}') && !text.contains('\r'), "{text:?}");
    }
}

#[test]
fn an_unknown_key_of_rows_is_reported_once_with_its_count_and_the_nearest_key() {
    let place = with_config("text", "");
    let row = |key: &str| {
        format!(
            "{{\"{key}\": \"a.png\", \"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, \
             {{\"role\": \"assistant\", \"content\": \"b\"}}]}}\n"
        )
    };
    place.write("rows.jsonl", &(row("image_path").repeat(3) + &row("images_")));
    let arguments = ["inspect", "--config", "config.yaml", "--set", "data.train.0.path=rows.jsonl"];
    let output = place.trainer(&arguments).ends_with(0);
    let warning =
        "unknown key `image_path` is ignored, did you mean `images`? (3 of the first 4 rows)";
    assert_eq!(output.stderr.matches(warning).count(), 1, "{}", output.stderr);
    let more = [&arguments[..], &["--set", "data.unknown_keys=ignore"]].concat();
    let output = place.trainer(&more).ends_with(0);
    assert!(!output.stderr.contains("unknown key"), "{}", output.stderr);
}
