//! What a run leaves for a person at its end: one screen of text, and a model card.

use super::harness::{Place, finish, golden};
use std::fs;

/// A folder with the config of a short run on images and text, some of whose rows are rejected.
fn place() -> Place {
    let place = Place::with_model_and_rows();
    let images = golden("data").display().to_string();
    let config = format!(
        "output_dir: run\nmodel: {{path: model}}\ndevice: cpu\ndata:\n\
         \x20 train: [{{path: rows.jsonl, image_root: '{images}'}}]\n\
         \x20 eval: [{{path: rows.jsonl, image_root: '{images}'}}]\n\
         \x20 packing_length: 512\n  max_length: 200\n  truncation: right\n  max_rejected: 1.0\n\
         train: {{max_steps: 6}}\neval: {{every_steps: 2}}\n"
    );
    place.write("config.yaml", &config);
    place
}

/// What the run prints after its log.
fn end(place: &Place, settings: &[&str]) -> String {
    let settings = settings.iter().flat_map(|setting| ["--set", *setting]);
    let arguments: Vec<&str> =
        ["sft", "--config", "config.yaml"].into_iter().chain(settings).collect();
    let output = place.trainer(&arguments).ends_with(0);
    let (_, screen) = output.stderr.split_once("\n\n").expect("an empty line ends the log");
    screen.to_owned()
}

fn text(place: &Place, name: &str) -> String {
    String::from_utf8(place.read(name)).unwrap()
}

#[test]
fn the_end_of_a_run_is_one_screen_with_its_result_its_problems_and_the_next_commands() {
    let place = place();
    let screen = end(&place, &[]);
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines.len() <= 24, "{} lines: {screen}", lines.len());
    let steps = place.rows("run/metrics.jsonl");
    let mean = |rows: &[serde_json::Value]| {
        rows.iter().map(|row| row["loss"].as_f64().unwrap()).sum::<f64>() / rows.len() as f64
    };
    let sum = |key: &str| steps.iter().map(|row| row[key].as_u64().unwrap()).sum::<u64>();
    let last = steps.last().unwrap();
    let evals = place.rows("run/eval.jsonl");
    let start = &place.rows("run/starts.jsonl")[0];
    let truncated = start["data"][0]["truncated"].as_u64().unwrap();
    assert!(truncated > 0 && last["rejected"].as_u64().unwrap() > 0, "{start}");
    assert!(start["machine"].as_str().is_some_and(|name| name.contains("threads")), "{start}");
    assert_eq!(start["parameters"], start["trained"]);
    for expected in [
        "6 steps in ".to_owned(),
        format!("{} rows, ", sum("num_samples")),
        format!(
            "training loss    {:.4} -> {:.4}, means of 3 steps",
            mean(&steps[..3]),
            mean(&steps[3..])
        ),
        format!("evaluation loss  {:.4}", evals.last().unwrap()["loss"].as_f64().unwrap()),
        format!("rejected rows    {} (", last["rejected"]),
        "image_missing ".to_owned(),
        ": run/rejects.jsonl".to_owned(),
        format!("truncated rows   {truncated} to `data.max_length`"),
        "report           run/report.html".to_owned(),
        "trainer generate --model run/final --prompt \"What is this?\" --image cat.png".to_owned(),
        "trainer eval --config config.yaml --checkpoint run/final".to_owned(),
    ] {
        assert!(screen.contains(&expected), "{expected}\nnot in\n{screen}");
    }
    assert!(!screen.contains("skipped steps"), "{screen}");

    // an adapter, without rows to evaluate on, with a changed setting, on text only
    let only_text = fs::read_to_string(golden("data/text.jsonl")).unwrap();
    place.write("text.jsonl", &only_text.lines().take(6).collect::<Vec<_>>().join("\n"));
    let settings = ["output_dir=lora", "adapter={rank: 4}", "data.eval=[]"];
    let data = ["data.train=[{path: text.jsonl}]", "data.packing_length=4096"];
    let screen = end(&place, &[&settings[..], &data].concat());
    for expected in [
        "evaluation       none; `--set data.eval_share=0.01` holds out 1 % of the rows",
        "trainer generate --model model --adapter lora/final --prompt \"What is this?\"\n",
        "trainer export --adapter lora/final --merge --out merged",
    ] {
        assert!(screen.contains(expected), "{expected}\nnot in\n{screen}");
    }
    assert!(!screen.contains("--image") && !screen.contains("trainer eval"), "{screen}");
    let screen = end(&place, &["output_dir=other", "train.max_steps=2"]);
    assert!(screen.contains("--config other/config.yaml"), "the values of `--set`: {screen}");
}

#[test]
fn a_run_and_an_export_write_a_model_card_and_leave_the_card_of_the_base_model_alone() {
    let place = place();
    let base = "# The base model\n";
    place.write("model/README.md", base);
    end(&place, &["adapter={rank: 4}"]);
    let card = text(&place, "run/final/README.md");
    for part in [
        "---\nlibrary_name: peft\npipeline_tag: image-text-to-text\ntags:\n- sft\n- lora\n---\n",
        "It is fine-tuned from `model`: LoRA, rank 4, alpha 32, in llm.\n",
        "model = PeftModel.from_pretrained(model, folder)\n",
        "| Training loss | ",
        "| `adapter.rank` | 4 |",
    ] {
        assert!(card.contains(part), "{part} not in {card}");
    }
    assert!(!card.contains("The base model"));
    assert!(!text(&place, "run/final/manifest.json").contains("README"), "it may be edited");
    assert!(!place.path("run/checkpoints/step-00000006/README.md").exists());

    // with a card, the folder is read as before, and a finished run leaves an edited one
    place.write("run/final/README.md", "edited\n");
    let model = ["generate", "--model", "model", "--adapter", "run/final", "--prompt", "a"];
    place.trainer(&[&model[..], &["--max-new-tokens", "2"]].concat()).ends_with(0);
    end(&place, &["adapter={rank: 4}"]);
    assert_eq!(text(&place, "run/final/README.md"), "edited\n");

    let export = |more: &[&str]| {
        place.trainer(&[&["export", "--adapter", "run/final"], more].concat()).ends_with(0);
    };
    export(&["--merge", "--out", "merged"]);
    export(&["--out", "copy"]);
    place.trainer(&["export", "--model", "model", "--out", "plain"]).ends_with(0);
    let merged = text(&place, "merged/README.md");
    let copy = text(&place, "copy/README.md");
    let plain = text(&place, "plain/README.md");
    assert!(merged.contains("library_name: transformers\n") && merged.contains("- lora"));
    assert!(merged.contains("added to its weights") && !merged.contains("PeftModel"), "{merged}");
    assert!(copy.contains("library_name: peft\n") && copy.contains("| Training loss | "), "{copy}");
    assert!(plain.contains("A model, written by") && !plain.contains("## Training"), "{plain}");
    for card in [&merged, &copy, &plain] {
        assert!(!card.contains("edited") && !card.contains("The base model"), "{card}");
    }
    assert_eq!(text(&place, "model/README.md"), base);
    place
        .trainer(&["generate", "--model", "merged", "--prompt", "a", "--max-new-tokens", "2"])
        .ends_with(0);
}

#[test]
fn the_variables_for_colours_decide_about_log_lines_and_errors_in_files_too() {
    let place = place();
    let stderr = |variables: &[(&str, &str)], arguments: &[&str]| {
        let mut command = place.command(arguments);
        finish(command.envs(variables.iter().copied())).stderr
    };
    let check = ["check", "--config", "config.yaml"];
    let error = ["check", "--config", "none.yaml"];
    for arguments in [&check, &error] {
        assert!(!stderr(&[], arguments).contains('\u{1b}'), "{arguments:?}");
        assert!(
            stderr(&[("CLICOLOR_FORCE", "1")], arguments).contains("\u{1b}[3"),
            "{arguments:?}"
        );
        let both = [("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")];
        assert!(!stderr(&both, arguments).contains('\u{1b}'), "{arguments:?}");
    }
}
