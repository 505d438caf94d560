//! `trainer bench` runs and prints plausible figures. docs/dev/performance.md has measured ones.

use super::harness::{Place, golden, json_lines};
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
