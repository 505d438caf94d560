//! Generation: answers of transformers, cached turns, weights in their own dtype, and the command.

use crate::harness::{Output, Place, copy_folder, device, finish, golden, write};
use candle_core::{DType, Tensor};
use candle_transformers::generation::Sampling;
use serde_json::Value;
use std::fs;
use std::io::{Read as _, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Stdio};
use trainer::batch::{Content, Message, Pack, PaddingSide, Part, Sample};
use trainer::data::{Encoder, ImageConfig, RowFile, collate};
use trainer::models::{Cache, Model};
use trainer::ops::linear;
use trainer::run::{LoadedModel, OpenModel};
use trainer::tape::Pass;
use trainer::train::{GenerateOptions, Generator, ModelSection, TrainError, generate};

const DIGIT: &str = "data/digits/1400.png";

fn load(model: &str) -> (Encoder, LoadedModel) {
    load_from(&golden(&format!("models/{model}")))
}

fn load_from(folder: &Path) -> (Encoder, LoadedModel) {
    let encoder = Encoder::from_folder(folder, &ImageConfig::default()).unwrap();
    let open = OpenModel::open(&ModelSection::new(folder), 0, &device()).unwrap();
    (encoder, open.with_stored_dtype(&device()).load(&device()).unwrap())
}

fn greedy(encoder: &Encoder, max_new_tokens: usize) -> GenerateOptions {
    let stop_ids = encoder.stop_ids().to_vec();
    GenerateOptions { max_new_tokens, sampling: Sampling::ArgMax, seed: 0, stop_ids }
}

/// Made by `scripts/golden/answers.py`.
fn answers_of_transformers(model: &str) {
    let stored = fs::read_to_string(golden("answers.json")).unwrap();
    let stored: Value = serde_json::from_str(&stored).unwrap();
    assert_answers(&golden(&format!("models/{model}")), &stored[model]["answers"]);
}

/// Compares the greedy answers of the model in `folder` with 50 stored ones.
pub(super) fn assert_answers(folder: &Path, stored: &Value) {
    let (encoder, loaded) = load_from(folder);
    let options = greedy(&encoder, 16);
    let answers = stored.as_array().unwrap();
    assert_eq!(answers.len(), 50);
    for answer in answers {
        let (file, line) = answer["row"].as_str().unwrap().split_once(':').unwrap();
        let path = golden(&format!("data/{file}"));
        let rows = RowFile::open(&path, Some(&golden("data"))).unwrap();
        let sample = rows.read(line.parse::<usize>().unwrap() - 1).unwrap();
        let (prompt, _) = encoder.encode_prompt(&sample).unwrap();
        let ids = generate(&loaded.model, prompt, &options, &device()).unwrap();
        assert_eq!(serde_json::json!(ids), answer["ids"], "{file}:{line}");
        assert_eq!(encoder.decode(&ids).unwrap(), answer["text"].as_str().unwrap());
    }
}

#[test]
fn greedy_answers_equal_those_of_transformers() {
    answers_of_transformers("small-tied");
}

#[test]
fn greedy_answers_of_qwen35_equal_those_of_transformers() {
    answers_of_transformers("small-qwen35");
}

#[test]
fn greedy_answers_of_qwen25_vl_equal_those_of_transformers() {
    answers_of_transformers("small-qwen25vl");
}

#[test]
fn greedy_answers_of_qwen2_vl_equal_those_of_transformers() {
    answers_of_transformers("small-qwen2vl");
}

#[test]
fn greedy_answers_of_internvl_equal_those_of_transformers() {
    answers_of_transformers("small-internvl");
}

#[test]
fn greedy_answers_of_minicpm_equal_those_of_transformers() {
    answers_of_transformers("small-minicpm");
}

#[test]
fn greedy_answers_with_weights_that_stay_in_bf16_equal_those_of_transformers_in_f32() {
    answers_of_transformers("sharded-bf16");
}

#[test]
fn matrices_in_bf16_stay_in_bf16_and_all_else_is_in_f32() {
    let (_, loaded) = load("sharded-bf16");
    for (param, spec) in loaded.params.iter().zip(loaded.model.param_specs()) {
        let is_narrow = spec.is_large_matrix() && device().is_cpu();
        let expected = if is_narrow { DType::BF16 } else { DType::F32 };
        assert_eq!(param.dtype(), expected, "{}", spec.name);
    }
    let names = ["embed_tokens", "gate_proj", "attn.qkv", "mlp.linear_fc1"];
    for name in names {
        let param = loaded.params.iter().find(|param| param.name().contains(name)).unwrap();
        assert!(param.dtype() == DType::BF16 || !device().is_cpu(), "{name}");
    }
    assert_eq!(loaded.model.dtype(), DType::F32);
}

/// A row of the golden data whose turns a conversation replaces.
fn conversation(media: &[&str]) -> Sample {
    let text = media.iter().map(|_| "<image>").collect::<String>();
    conversation_of(&serde_json::json!({
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": ""}],
        "images": media,
    }))
}

fn conversation_of(row: &Value) -> Sample {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("row.jsonl");
    fs::File::create(&path).unwrap().write_all(format!("{row}\n").as_bytes()).unwrap();
    let root = golden("data");
    let mut sample = RowFile::open(&path, Some(&root)).unwrap().read(0).unwrap();
    sample.messages.clear();
    sample
}

/// Answers `sample` with the keys and values of earlier turns, and again without them. Returns the
/// number of tokens that were not computed again, and the answer.
fn both(
    generator: &mut Generator<'_>,
    (encoder, model): (&Encoder, &Model),
    sample: &Sample,
) -> (usize, String) {
    let options = greedy(encoder, 12);
    let mut sample = sample.clone();
    sample.messages.push(Message::new("assistant", Content::Text(String::new())));
    let (prompt, _) = encoder.encode_prompt(&sample).unwrap();
    let alone = generate(model, prompt.clone(), &options, &device()).unwrap();
    let go_on = |_: &[u32]| Ok::<_, TrainError>(ControlFlow::Continue(()));
    let answer = generator.answer(prompt, &options, go_on).unwrap();
    assert_eq!(answer.ids, alone);
    assert!(answer.num_reused < answer.num_prompt_tokens);
    (answer.num_reused, encoder.decode(&alone).unwrap())
}

/// The models of a few layers whose sizes are not those of blocks of the kernels.
#[test]
fn logits_of_stored_models_do_not_depend_on_the_place_in_a_group_and_on_the_others() {
    for model in ["small-tied", "small-qwen35", "sharded-bf16"] {
        let (encoder, loaded) = load(model);
        let model = &loaded.model;
        let rows = RowFile::open(&golden("data/image_exact.jsonl"), Some(&golden("data"))).unwrap();
        let prefill = |row: usize| {
            let (prompt, _) = encoder.encode_prompt(&rows.read(row).unwrap()).unwrap();
            let pack = Pack { samples: vec![prompt] };
            let batch = collate(vec![pack], 0, PaddingSide::Right, model.merge_size()).unwrap();
            model.prefill(batch.unpad().unwrap(), &device(), &Pass::default()).unwrap().1
        };
        // in 4 rows, bf16 weights have a product of their own, and in 9 rows not
        for num_rows in [4, 9] {
            let group = |rows: &[usize]| {
                let mut caches: Vec<Cache> = rows.iter().map(|row| prefill(*row)).collect();
                let mut logits = Tensor::zeros(1, DType::F32, &device()).unwrap();
                for step in 0..2 {
                    let ids: Vec<u32> = rows.iter().map(|row| (row + step) as u32).collect();
                    let mut caches: Vec<&mut Cache> = caches.iter_mut().collect();
                    let hidden = model
                        .extend(&ids, &mut caches, num_rows, &device(), &Pass::default())
                        .unwrap();
                    logits = linear(&hidden, &model.lm_head().tensor().unwrap(), None).unwrap();
                }
                let at = rows.iter().position(|row| *row == 30).unwrap();
                logits.get(at).unwrap().to_vec1::<f32>().unwrap()
            };
            let expected = group(&[30]);
            for rows in [&[30, 31][..], &[32, 30], &[33, 31, 30, 32], &[34, 33, 32, 30]] {
                assert!(group(rows) == expected, "{rows:?} in {num_rows} rows");
            }
        }
    }
}

fn user(parts: &[Part], text: &str) -> Message {
    Message::new("user", Content::Parts([parts, &[Part::Text(text.to_owned())]].concat()))
}

#[test]
fn turns_after_cached_ones_are_answered_like_the_whole_conversation() {
    for model in ["small-tied", "sharded-bf16"] {
        let (encoder, loaded) = load(model);
        let of = (&encoder, &loaded.model);
        let device = device();
        let mut generator = Generator::new(&loaded.model, &device);
        let all = conversation(&["images/exact_moon_64x64.png", "digits/1400.png"]);
        let mut sample = Sample { media: all.media[..1].to_vec(), ..all.clone() };
        sample.messages.push(user(&[Part::Image], "What is this?"));
        let (reused, answer) = both(&mut generator, of, &sample);
        assert_eq!(reused, 0);
        sample.messages.push(Message::new("assistant", Content::Text(answer)));
        sample.messages.push(user(&[], "Why?"));
        let (first, answer) = both(&mut generator, of, &sample);
        assert!(first > 10, "{model}: {first}");
        sample.messages.push(Message::new("assistant", Content::Text(answer)));
        sample.messages.push(user(&[Part::Image], "And this?"));
        sample.media.clone_from(&all.media);
        let (second, _) = both(&mut generator, of, &sample);
        assert!(second > first, "{model}: {second}");

        // Other images of the same size: everything from the first one on is computed again.
        let mut other = conversation(&["digits/0009.png", "digits/1400.png"]);
        other.messages.clone_from(&sample.messages);
        let (reused, _) = both(&mut generator, of, &other);
        assert!(reused < first, "{model}: {reused}");
        // An earlier question.
        sample.messages.truncate(3);
        sample.media.truncate(1);
        both(&mut generator, of, &sample);
        let (reused, _) = both(&mut generator, of, &sample);
        assert!(reused > 10, "{model}: {reused}");
    }
}

/// The tokens are the same, but their positions are not.
#[test]
fn the_frames_of_a_video_at_another_rate_are_computed_again() {
    let (encoder, loaded) = load("small-qwen25vl");
    let device = device();
    let mut generator = Generator::new(&loaded.model, &device);
    let mut reused = |rate: f64| {
        let frames: Vec<_> = (0..8).map(|k| format!("video28/pan_{k}.png")).collect();
        let video = serde_json::json!({"type": "video", "video": frames, "sample_fps": rate});
        let mut sample = conversation_of(&serde_json::json!({"messages": [
            {"role": "user", "content": [video]}, {"role": "assistant", "content": ""},
        ]}));
        sample.messages.push(user(&[Part::Video], "What is this?"));
        both(&mut generator, (&encoder, &loaded.model), &sample).0
    };
    assert_eq!(reused(4.0), 0);
    let (same, other) = (reused(4.0), reused(1.0));
    assert!(same > other + 16, "{same}, then {other}"); // 4 groups of 4 tokens
}

/// Runs `generate` with these lines as stdin.
fn chat(place: &Place, model: &Path, arguments: &[&str], lines: &str) -> Output {
    let fixed = ["generate", "--chat", "--max-new-tokens", "8", "--model"];
    let model = [model.to_str().unwrap()];
    let mut command = place.command(&[&fixed[..], &model, arguments].concat());
    place.write("lines.txt", lines);
    finish(command.stdin(fs::File::open(place.path("lines.txt")).unwrap()))
}

fn once(place: &Place, model: &Path, arguments: &[&str]) -> Output {
    let fixed = ["generate", "--max-new-tokens", "8", "--model", model.to_str().unwrap()];
    place.trainer(&[&fixed[..], arguments].concat())
}

#[test]
fn a_conversation_keeps_its_turns_until_a_reset() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    let image = golden(DIGIT);
    let image = image.to_str().unwrap();
    let text = once(&place, &model, &["--prompt", "What is this?"]).ends_with(0).stdout;
    let seen = once(&place, &model, &["--prompt", "What is this?", "--image", image]);
    let seen = seen.ends_with(0).stdout;
    assert_ne!(text, seen);
    let lines = format!(
        "What is this?\n/reset\n\n/image {image}\nWhat is this?\n/reset\nWhat is this?\n/exit\nno"
    );
    let output = chat(&place, &model, &[], &lines).ends_with(0);
    assert_eq!(output.stdout, format!("{text}{seen}{text}"));
    assert!(output.stderr.is_empty(), "{}", output.stderr);
    // The second turn of a conversation is no first turn.
    let twice = chat(&place, &model, &[], "What is this?\nWhat is this?\n").ends_with(0).stdout;
    assert!(twice.starts_with(&text) && twice != text.repeat(2), "{twice}");
    let first = chat(&place, &model, &["--prompt", "What is this?"], "What is this?");
    assert_eq!(first.ends_with(0).stdout, twice);
}

#[test]
fn a_wrong_line_ends_a_conversation_that_is_not_on_a_terminal() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    let output = chat(&place, &model, &[], "/imaeg cat.png\n").ends_with(64);
    write(&place.path("bytes.txt"), b"caf\xe9?\n");
    let arguments = ["generate", "--chat", "--model", model.to_str().unwrap()];
    let mut command = place.command(&arguments);
    let bytes = finish(command.stdin(fs::File::open(place.path("bytes.txt")).unwrap()));
    bytes.ends_with(64).says("the line is not UTF-8").says("`caf\u{fffd}?`");
    output.says("unknown command `/imaeg`").says("`/image FILE`");
    chat(&place, &model, &[], "/image nowhere.png\n").ends_with(65).says("`nowhere.png`");
    let video = chat(&place, &model, &[], "/video nowhere.mp4\nWhat?\n").ends_with(65);
    video.says("`nowhere.mp4`");
}

#[test]
fn a_folder_of_frames_is_a_video() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    fs::create_dir(place.path("frames")).unwrap();
    for frame in 0..4 {
        let name = format!("pan_{frame}.png");
        fs::copy(golden("data/video").join(&name), place.path("frames").join(name)).unwrap();
    }
    let frames = place.path("frames");
    let video = ["--video", frames.to_str().unwrap(), "--prompt", "What is this?"];
    let seen = once(&place, &model, &video).ends_with(0).stdout;
    let blind = once(&place, &model, &["--prompt", "What is this?"]).ends_with(0).stdout;
    assert_ne!(seen, blind);
    let lines = format!("/video {}\nWhat is this?\n", frames.display());
    assert_eq!(chat(&place, &model, &[], &lines).ends_with(0).stdout, seen);
}

#[test]
fn an_answer_ends_before_a_stop_text() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    let whole = once(&place, &model, &["--prompt", "What is this?"]).ends_with(0).stdout;
    let at = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let stop = &whole[at..whole.len() - 1];
    let stopped = once(&place, &model, &["--prompt", "What is this?", "--stop", stop]);
    let expected = &whole[..whole.find(stop).unwrap()];
    assert_eq!(stopped.ends_with(0).stdout, format!("{expected}\n"));
}

#[test]
fn json_has_the_answer_and_why_it_ended() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    let ask = |more: &[&str]| {
        let prompt = ["--prompt", "What is this?"];
        once(&place, &model, &[&prompt, more].concat()).ends_with(0).stdout
    };
    let whole = ask(&[]);
    let answer = |more: &[&str]| -> Value {
        serde_json::from_str(&ask(&[&["--json"], more].concat())).unwrap()
    };
    let cut = answer(&[]);
    assert_eq!(format!("{}\n", cut["answer"].as_str().unwrap()), whole);
    assert_eq!((&cut["finish_reason"], &cut["num_new_tokens"]), (&"length".into(), &8.into()));
    let at = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let stopped = answer(&["--stop", &whole[at..whole.len() - 1]]);
    assert_eq!(stopped["finish_reason"], "stop");
    assert!(whole.starts_with(stopped["answer"].as_str().unwrap()));
    // The prompt has the tokens of an image.
    let image = golden(DIGIT);
    let seen = answer(&["--image", image.to_str().unwrap()]);
    assert!(seen["num_prompt_tokens"].as_u64() > cut["num_prompt_tokens"].as_u64());
    // A line for each turn.
    let turns = chat(&place, &model, &["--json"], "What is this?\nAnd this?\n").ends_with(0).stdout;
    let lines: Vec<Value> = turns.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0], cut);
}

#[test]
fn arguments_of_sampling_without_an_effect_are_refused() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    for (argument, value) in [("--top-p", "0.9"), ("--top-k", "5"), ("--seed", "1")] {
        let output = once(&place, &model, &["--prompt", "x", argument, value]).ends_with(64);
        output.says(&format!("`{argument}` has no effect at temperature 0"));
        once(&place, &model, &["--prompt", "x", argument, value, "--temperature", "1"])
            .ends_with(0);
    }
    for wrong in [["--temperature", "-1"], ["--stop", ""], ["--max-new-tokens", "0"]] {
        let wrong = [&["--prompt", "x"][..], &wrong].concat();
        let fixed = ["generate", "--model", model.to_str().unwrap()];
        place.trainer(&[&fixed[..], &wrong].concat()).ends_with(64);
    }
}

#[test]
fn the_folder_of_a_run_is_its_final_model_or_else_its_newest_checkpoint() {
    let place = Place::empty();
    let folders =
        ["run/final", "run/checkpoints/step-00000002", "run/checkpoints/step-00000010", "run/best"];
    let answers = folders.map(|folder| {
        let seed = folder.len().to_string();
        place
            .trainer(&["init", "--preset", "debug", "--out", folder, "--seed", &seed])
            .ends_with(0);
        once(&place, Path::new(folder), &["--prompt", "Hello"]).ends_with(0).stdout
    });
    let run = || once(&place, Path::new("run"), &["--prompt", "Hello"]).ends_with(0);
    let with_final = run().says("run/final");
    assert_eq!(with_final.stdout, answers[0]);
    fs::remove_dir_all(place.path("run/final")).unwrap();
    let newest = run().says("run/checkpoints/step-00000010").says("because the run has no `final`");
    assert_eq!(newest.stdout, answers[2]);
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    once(&place, Path::new("run"), &["--prompt", "Hello"]).ends_with(65).says("config.json");
}

#[test]
fn a_run_that_trained_an_adapter_names_its_model() {
    let place = Place::empty();
    let (model, adapter) = (golden("models/small-tied"), golden("adapters/dora"));
    let both = ["--adapter", adapter.to_str().unwrap(), "--prompt", "What is this?"];
    let expected = once(&place, &model, &both).ends_with(0).stdout;
    assert_ne!(expected, once(&place, &model, &both[2..]).ends_with(0).stdout);
    fs::create_dir_all(place.path("run/final")).unwrap();
    let config = fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["base_model_name_or_path"] = model.to_str().unwrap().into();
    place.write("run/final/adapter_config.json", &config.to_string());
    let weights = "adapter_model.safetensors";
    fs::copy(adapter.join(weights), place.path("run/final").join(weights)).unwrap();
    let found = once(&place, Path::new("run"), &both[2..]).ends_with(0);
    assert_eq!(found.stdout, expected);
    once(&place, Path::new("run"), &both).ends_with(64).says("is an adapter, and `--adapter` is");
}

#[test]
fn ctrl_c_ends_an_answer_at_the_end_of_a_line() {
    let place = Place::empty();
    let model = golden("models/small-tied");
    let fixed = ["generate", "--model", model.to_str().unwrap(), "--prompt", "What is this?"];
    // takes a second
    let long = ["--max-new-tokens", "30000", "--temperature", "100", "--seed", "1"];
    let mut command = place.command(&[&fixed[..], &long].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap(); // before the answer is complete
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(rest.ends_with(b"\n") && said.contains("stopped by Ctrl-C"), "{said}");
}

#[test]
fn an_answer_of_the_maximum_length_has_ended_if_a_stop_id_follows() {
    let place = Place::empty();
    copy_folder(&golden("models/small-tied"), &place.path("model"));
    let row = fs::read_to_string(golden("data/image_exact.jsonl")).unwrap();
    place.write("eval.jsonl", row.lines().nth(30).unwrap());
    let (encoder, loaded) = load("small-tied");
    let rows = RowFile::open(&place.path("eval.jsonl"), Some(&golden("data"))).unwrap();
    let (prompt, _) = encoder.encode_prompt(&rows.read(0).unwrap()).unwrap();
    let ids = generate(&loaded.model, prompt, &greedy(&encoder, 3), &device()).unwrap();
    assert!(ids.len() == 3 && !ids[..2].contains(&ids[2]), "{ids:?}");
    // the third token ends the answer
    let stops = [encoder.stop_ids(), &ids[2..]].concat();
    let stops = serde_json::json!({ "eos_token_id": stops }).to_string();
    place.write("model/generation_config.json", &stops);
    let images = golden("data").display().to_string();
    place.write(
        "config.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: model}}\ndevice: cpu\ndata:\n\
             \x20 train: [{{path: eval.jsonl, image_root: '{images}'}}]\n\
             \x20 eval: [{{path: eval.jsonl, image_root: '{images}'}}]\n\
             \x20 packing_length: 1024\ntrain: {{max_steps: 1}}\noptim: {{lr: 0.0, weight_decay: 0.0}}\n"
        ),
    );
    for (most, ended) in [(1, false), (2, true), (3, true)] {
        let run = format!("output_dir=run-{most}");
        let generate = format!("eval.generate={{max_new_tokens: {most}}}");
        let sft = ["sft", "--config", "config.yaml", "--set", &run, "--set", &generate];
        place.trainer(&sft).ends_with(0);
        let answer = place.rows(&format!("run-{most}/predictions.jsonl")).remove(0);
        assert_eq!(answer["ended"], ended, "{most}: {answer}");
        let text = encoder.decode(&ids[..most.min(2)]).unwrap();
        assert_eq!(answer["answered"], text, "{most}: {answer}");
    }
}
