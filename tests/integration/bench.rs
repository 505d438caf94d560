//! `trainer bench` runs and prints plausible figures. docs/dev/performance.md has measured ones.

use super::harness::{Place, finish, golden, json_lines};
use serde_json::Value;
use std::collections::BTreeSet;

#[track_caller]
fn assert_positive(row: &Value, key: &str) {
    let value = row[key].as_f64().unwrap_or(f64::NAN);
    assert!(value > 0.0 && value.is_finite(), "`{key}` of {row}");
}

#[test]
fn every_benchmark_of_an_op_runs_in_both_precisions() {
    let place = Place::empty();
    for precision in ["f32", "bf16"] {
        let arguments = ["bench", "--ops", "--sizes", "tiny", "--json", "--precision", precision];
        let rows = json_lines(&place.trainer(&arguments).ends_with(0).stdout);
        assert_eq!(rows[2]["used"], precision);
        assert_eq!(rows[3]["name"], "peak");
        let mut ops = BTreeSet::new();
        for row in &rows[4..] {
            for key in ["ms", "median_ms", "share"] {
                assert_positive(row, key);
            }
            ops.insert(row["name"].as_str().unwrap().rsplit_once(' ').unwrap().0.to_owned());
        }
        for op in [
            "linear dw",
            "route",
            "grouped_linear dw",
            "expert_swiglu",
            "rms_norm backward",
            "vision_rope",
            "embedding backward",
            "adamw",
        ] {
            assert!(ops.contains(op), "no `{op}` in {ops:?}");
        }
        assert!(rows.iter().any(|row| row["memory_mib"].is_number()));
    }
}

#[test]
fn a_step_reports_its_speed_and_its_memory() {
    let place = Place::with_model_and_rows();
    let rows = format!("{{path: rows.jsonl, image_root: {:?}}}", golden("data"));
    let config = format!(
        "output_dir: run\nmodel: {{path: model, precision: bf16}}\n\
         data: {{train: [{rows}], packing_length: 512, max_rejected: 1.0}}\n"
    );
    place.write("config.yaml", &config);
    let arguments = ["bench", "--step", "--steps", "2", "--json", "--config", "config.yaml"];
    let rows = json_lines(&place.trainer(&arguments).ends_with(0).stdout);
    let [row] = rows.as_slice() else { panic!("one row, not {rows:?}") };
    for key in ["tokens", "targets", "tokens/s", "step_s", "mfu", "mfu_lmms_engine"] {
        assert_positive(row, key);
    }
    for key in ["peak_memory_gib", "predicted_memory_gib", "first_step_s", "loss"] {
        assert_positive(row, key);
    }
    let wait = row["data_wait"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&wait), "{row}");
}

/// Launches of a step, a product of matrices as one, with emulated kernels.
fn launches(settings: &[&str]) -> usize {
    let place = Place::with_model_and_rows();
    let config = format!(
        "output_dir: run\nmodel: {{path: model, weights: random, precision: bf16}}\n\
         data: {{train: [{{path: rows.jsonl, image_root: '{}'}}], packing_length: 256, max_rejected: 1.0}}\n",
        golden("data").display()
    );
    place.write("config.yaml", &config);
    let mut arguments = vec!["bench", "--step", "--steps", "1", "--config", "config.yaml"];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    let mut command = place.command(&arguments);
    command.env("TRAINER_EMULATE_CUDA", "8.0").env("RUST_LOG", "kernels::launch=trace");
    let log = finish(&mut command).ends_with(0).stderr;
    log.lines().filter(|line| line.contains("launch")).count() / 2 // the first step is not timed
}

#[test]
fn a_step_has_no_more_launches_than_it_needed_before() {
    if !cfg!(feature = "cuda-emulation") {
        return;
    }
    for (settings, most) in [
        (&[][..], 207),
        (&["adapter={rank: 8, parts: [llm]}"][..], 240),
        (&["adapter={rank: 8, parts: [llm], quantize: nf4}"][..], 246),
    ] {
        // A run on a busy machine once had one launch more; a step that needs more has them always.
        let mut found = launches(settings);
        for _ in 0..2 {
            if found > most {
                found = launches(settings);
            }
        }
        assert!((1..=most).contains(&found), "{settings:?}: {found} launches, at most {most}");
    }
}
