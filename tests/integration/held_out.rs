//! `data.eval_share`: rows that are held out are evaluated and never trained on, also after a resume
//! and on several ranks; and `data.system`.

use super::harness::{Place, golden, without_measured};
use super::ranks::train;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use trainer::config::{RunConfig, load};

const STEPS: u64 = 8;

/// 36 rows with 9 images, in two data sets.
fn place() -> Place {
    let place = Place::with_model_and_rows();
    let images = golden("data").display().to_string();
    let text = fs::read_to_string(golden("data/image_exact.jsonl")).unwrap();
    let files = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let files: BTreeSet<String> =
        files.filter_map(|row| row["images"][0].as_str().map(str::to_owned)).take(9).collect();
    assert!(files.len() > 3, "{files:?}");
    for set in ["first", "second"] {
        let row = |number: usize| {
            let image = files.iter().nth(number % files.len()).unwrap();
            let user = format!("<image>{set} {number}?");
            json!({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": "yes"}], "images": [image]})
        };
        let rows: Vec<String> = (0..18).map(|number| row(number).to_string()).collect();
        place.write(&format!("{set}.jsonl"), &rows.join("\n"));
    }
    let config = format!(
        "output_dir: run\n\
         model: {{path: model}}\n\
         data:\n\
         \x20 train: [{{path: first.jsonl, image_root: '{images}'}}, {{path: second.jsonl, image_root: '{images}'}}]\n\
         \x20 eval_share: 0.3\n\
         \x20 eval_group: images\n\
         \x20 packing_length: 192\n\
         train: {{gradient_accumulation_steps: 2, max_steps: {STEPS}}}\n\
         optim: {{lr: 2.0e-3}}\n\
         checkpoint: {{every_steps: 3, keep: 100}}\n\
         eval: {{every_steps: 3}}\n\
         log: {{samples: true}}\n"
    );
    place.write("config.yaml", &config);
    place
}

fn trained(place: &Place, run: &str) -> BTreeSet<String> {
    let steps = place.rows(&format!("{run}/samples.jsonl"));
    let rows = steps.iter().flat_map(|step| step["rows"].as_array().unwrap().clone());
    rows.map(|row| row.as_str().unwrap().to_owned()).collect()
}

fn evaluated(place: &Place, run: &str) -> BTreeSet<String> {
    let model = format!("{run}/final");
    let arguments =
        ["eval", "--config", "config.yaml", "--checkpoint", &model, "--per-sample", "scores.jsonl"];
    place.trainer(&arguments).ends_with(0);
    place.rows("scores.jsonl").iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect()
}

/// The images of rows `file:line`.
fn images(place: &Place, rows: &BTreeSet<String>) -> BTreeSet<String> {
    let image = |row: &String| {
        let (file, line) = row.rsplit_once(':').unwrap();
        let rows = place.rows(file);
        rows[line.parse::<usize>().unwrap() - 1]["images"][0].as_str().unwrap().to_owned()
    };
    rows.iter().map(image).collect()
}

#[test]
fn held_out_rows_are_evaluated_and_never_trained_on_also_after_a_resume() {
    let place = place();
    let check = place.trainer(&["check", "--config", "config.yaml"]).ends_with(0);
    let counts: Vec<&str> =
        check.stdout.lines().filter(|line| line.contains("are held out to evaluate on")).collect();
    assert_eq!(counts.len(), 2, "{}", check.stdout);
    let sft = ["sft", "--config", "config.yaml"];
    place.trainer(&sft).ends_with(0);
    let (train, eval) = (trained(&place, "run"), evaluated(&place, "run"));
    assert_eq!(train.len() + eval.len(), 36, "every row is used");
    assert!(train.is_disjoint(&eval));
    assert!(images(&place, &train).is_disjoint(&images(&place, &eval)));
    for set in ["first", "second"] {
        let of_set = eval.iter().filter(|row| row.starts_with(set)).count();
        assert!((1..=5).contains(&of_set), "{set}: {eval:?}");
        let line = format!("{set}: {of_set} of 18 rows are held out to evaluate on");
        assert!(check.stdout.contains(&line), "{}", check.stdout);
    }
    let evals = without_measured(place.rows("run/eval.jsonl"));
    assert_eq!(evals.len(), 3);
    assert!(evals[0]["loss/first"].is_number() && evals[0]["loss/second"].is_number());

    // the same rows after a stop, and to the bit the same end
    let resume = ["--resume", "run/checkpoints/step-00000003", "--set", "output_dir=resumed"];
    place.trainer(&[&sft[..], &resume[..]].concat()).ends_with(0);
    assert_eq!(evaluated(&place, "resumed"), eval);
    assert!(trained(&place, "resumed").is_subset(&train));
    let weights = |run: &str| place.read(&format!("{run}/final/model.safetensors"));
    assert!(weights("resumed") == weights("run"));
    assert_eq!(without_measured(place.rows("resumed/eval.jsonl")), evals);

    // A replayed step has its rows; another share is another run.
    let step = place.rows("run/samples.jsonl")[4].clone();
    let replay = ["sft", "--config", "run/config.yaml", "--replay-step", "5"];
    let replay = place.trainer(&replay).ends_with(0);
    for row in step["rows"].as_array().unwrap() {
        assert!(replay.stdout.contains(row.as_str().unwrap()), "{}", replay.stdout);
    }
    place
        .trainer(
            &[&sft[..], &["--set", "data.eval_share=0.2", "--set", "train.max_steps=1"]].concat(),
        )
        .ends_with(0)
        .says("data.eval_share");
}

#[test]
fn every_rank_holds_out_the_same_rows() {
    let place = place();
    let config = |output: &str| {
        let path = place.path("config.yaml");
        let mut config: RunConfig = load(&path, &[]).unwrap();
        config.output_dir = place.path(output);
        config.model.path = place.path("model");
        for set in &mut config.data.train {
            for path in set.path.paths_mut() {
                *path = place.path(path.to_str().unwrap());
            }
        }
        config
    };
    train(&config("one"), 1, None);
    train(&config("two"), 2, None);
    let evals = |run: &str| without_measured(place.rows(&format!("{run}/eval.jsonl")));
    assert_eq!(evals("one"), evals("two"));
    assert_eq!(trained(&place, "one"), trained(&place, "two"));
}

#[test]
fn the_system_turn_of_the_config_trains_as_one_in_the_rows() {
    let place = place();
    let with = |name: &str| {
        let rows = place.rows(&format!("{name}.jsonl"));
        let row = |mut row: Value| {
            row["system"] = json!("Answer in one word.");
            row.to_string()
        };
        rows.into_iter().map(row).collect::<Vec<_>>().join("\n")
    };
    let run = |output: &str, more: &[&str]| {
        let output = format!("output_dir={output}");
        let fixed = ["sft", "--config", "config.yaml", "--set", &output];
        let settings = [
            "train.max_steps=2",
            "data.shuffle=false",
            "data.eval_share=null",
            "data.eval_group=rows",
        ];
        let settings = settings.iter().flat_map(|setting| ["--set", *setting]);
        place
            .trainer(
                &fixed.into_iter().chain(settings).chain(more.iter().copied()).collect::<Vec<_>>(),
            )
            .ends_with(0);
    };
    let system = "data.system=Answer in one word.";
    run("of_config", &["--set", system]);
    run(
        "of_set",
        &[
            "--set",
            "data.system=Other.",
            "--set",
            "data.train.0.system=Answer in one word.",
            "--set",
            "data.train.1.system=Answer in one word.",
        ],
    );
    run("without", &[]);
    run(
        "none",
        &["--set", system, "--set", "data.train.0.system=''", "--set", "data.train.1.system=''"],
    );
    for name in ["first", "second"] {
        let rows = with(name);
        place.write(&format!("{name}.jsonl"), &rows);
    }
    run("of_rows", &[]);
    let losses = |run: &str| -> Vec<Value> {
        place.rows(&format!("{run}/metrics.jsonl")).iter().map(|row| row["loss"].clone()).collect()
    };
    assert_ne!(losses("of_config"), losses("without"));
    assert_eq!(losses("none"), losses("without"));
    for run in ["of_set", "of_rows"] {
        assert_eq!(losses("of_config"), losses(run), "{run}");
    }
}
