//! The memory of a long run does not grow after every shape has occurred once.

use super::harness::{Place, golden};
use std::fs;

const STEPS: usize = 1000;
/// Number of rows. Each is one step, so that all shapes have occurred after this step.
const SETTLED: usize = 200;
/// Maximum growth afterwards, for allocators and the loader's threads; a third of it is typical.
/// One activation leaked in each step would add 30 MB.
const SLACK_BYTES: u64 = 24 << 20;

#[test]
fn a_thousand_steps_of_varying_shapes_take_no_more_memory_than_two_hundred() {
    let place = Place::empty();
    place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
    let lines = |name: &str| fs::read_to_string(golden(name)).unwrap();
    let (images, text) = (lines("data/image_exact.jsonl"), lines("data/text.jsonl"));
    let mut rows: Vec<&str> = images.lines().collect();
    rows.extend(text.lines().filter(|line| line.len() < 1500));
    rows.truncate(SETTLED);
    place.write("rows.jsonl", &(rows.join("\n") + "\n"));
    let images = golden("data").display().to_string();
    let config = format!(
        "output_dir: run\n\
         model: {{path: model}}\n\
         data: {{train: [{{path: rows.jsonl, image_root: '{images}'}}], packing: false}}\n\
         train: {{max_steps: {STEPS}}}\n"
    );
    place.write("config.yaml", &config);
    place.trainer(&["sft", "--config", "config.yaml"]).ends_with(0);
    let metrics = place.rows("run/metrics.jsonl");
    assert_eq!((rows.len(), metrics.len()), (SETTLED, STEPS));
    let numbers =
        |key: &str| -> Vec<u64> { metrics.iter().map(|row| row[key].as_u64().unwrap()).collect() };
    let mut shapes = numbers("num_tokens");
    shapes.sort_unstable();
    shapes.dedup();
    assert!(shapes.len() > 100, "{} lengths", shapes.len());
    let peak = numbers("peak_memory_bytes");
    let (settled, last) = (peak[SETTLED - 1], peak[STEPS - 1]);
    println!("peak memory: {} MiB, then {} MiB", settled >> 20, last >> 20);
    assert!(last <= settled + SLACK_BYTES, "{settled} bytes, then {last}");
}
