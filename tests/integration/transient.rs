//! Failures of the process or of a disk are never blamed on rows, whichever command reads them.

use super::harness::Place;

/// Reading the start of this file is an input/output error (EIO), as on a broken disk.
const BROKEN: &str = r#"{"messages":[{"role":"user","content":"<image>?"},{"role":"assistant","content":"."}],"images":["mem"]}"#;
const GOOD: &str =
    r#"{"messages":[{"role":"user","content":"?"},{"role":"assistant","content":"."}]}"#;

#[test]
fn a_disk_that_fails_ends_each_command_that_reads_rows_with_code_74() {
    let place = Place::empty();
    place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
    place.write("broken.jsonl", &format!("{GOOD}\n{BROKEN}\n{GOOD}\n"));
    place.write("good.jsonl", &format!("{GOOD}\n"));
    let [broken, good] =
        ["broken", "good"].map(|name| format!("[{{path: {name}.jsonl, image_root: /proc/self}}]"));
    let config = |train: &str, eval: &str, out: &str| {
        format!(
            "output_dir: {out}\nmodel: {{path: model}}\ndata: {{train: {train}, eval: {eval}, packing: false}}\n\
             train: {{max_steps: 1}}\n"
        )
    };
    place.write("train.yaml", &config(&broken, "[]", "train"));
    place.write("eval.yaml", &config(&good, &broken, "eval"));
    place.write("scores.yaml", &config(&good, &broken, "scores"));
    std::thread::scope(|scope| {
        for arguments in [
            &["eval", "--config", "eval.yaml"][..],
            &["sft", "--config", "scores.yaml", "--set", "eval.generate={}"],
            &["inspect", "--config", "train.yaml"],
            &["verify", "--config", "train.yaml"],
            &["check", "--config", "eval.yaml"],
            &["check", "--config", "train.yaml"],
        ] {
            let place = &place;
            scope.spawn(move || {
                let run = place.trainer(arguments);
                let text = format!("{}{}", run.stdout, run.stderr);
                assert_eq!(run.code, 74, "{arguments:?}: {text}");
                assert!(text.contains("broken.jsonl:2"), "{arguments:?}: {text}");
            });
        }
    });
    // The run has saved its weights before the evaluation.
    assert!(place.path("scores/checkpoints/step-00000001/manifest.json").is_file());
}
