//! Tables of algorithms of products on a GPU. `scripts/cuda/stand_in.sh tune` tests how products use
//! them; here the table is read on the CPU, which does not use it.

use super::harness::Place;
use std::fs;
use trainer::ops::{
    AlgorithmEntry, AlgorithmSettings, AlgorithmTable, MatmulLibrary, MatrixDType, Product,
    Transpose,
};

fn table() -> AlgorithmTable {
    let product = Product {
        transpose: Transpose::Tn,
        shape: [64, 96, 512],
        operands: MatrixDType::Bf16,
        result: MatrixDType::F32,
        second_halves: [false, true],
        alignments: [256, 2, 256, 256],
        in_place: true,
        bias: false,
    };
    let settings = AlgorithmSettings {
        id: 66,
        tile: 20,
        stages: 36,
        split_k: 1,
        reduction: 0,
        swizzle: 0,
        custom: 0,
        inner_shape: 0,
        cluster_shape: 2,
    };
    let entry =
        AlgorithmEntry { product, first_us: 9.5, best_us: 8.0, place: 2, settings, data: [7; 8] };
    let measured_on = MatmulLibrary {
        gpu: "NVIDIA H200".to_owned(),
        compute_capability: "9.0".to_owned(),
        cublaslt: 130_002,
        driver: 13_000,
    };
    AlgorithmTable { measured_on, products: vec![entry] }
}

/// A place with a table and a run that uses it.
fn place() -> Place {
    let place = Place::with_model_and_rows();
    let images = super::harness::golden("data");
    let rows = format!("{{path: rows.jsonl, image_root: '{}'}}", images.display());
    let config = format!(
        "output_dir: run\nmodel: {{path: model, algorithms: table.json}}\n\
         data: {{train: [{rows}], packing_length: 512, max_rejected: 1.0}}\n\
         train: {{max_steps: 1}}\neval: {{show: 0}}\n"
    );
    place.write("config.yaml", &config);
    place.write("table.json", &table().to_text());
    place
}

const SFT: [&str; 3] = ["sft", "--config", "config.yaml"];

#[test]
fn a_table_that_cannot_be_read_is_an_error_with_its_place() {
    let place = place();
    let text = table().to_text();
    place.write("table.json", &text.replace("\"tile\":20", "\"tile\":\"large\""));
    for command in ["sft", "check"] {
        let output = place.trainer(&[command, "--config", "config.yaml"]);
        let output = if command == "sft" { output.ends_with(64) } else { output };
        let both = format!("{}{}", output.stdout, output.stderr);
        let found = "`table.json`, line 4, column ";
        assert!(both.contains(found), "{command}: {both}");
        assert!(both.contains("invalid type: string \"large\", expected u32"), "{both}");
        assert!(both.contains("trainer bench --tune FILE --config CONFIG"), "{both}");
    }
    fs::remove_file(place.path("table.json")).unwrap();
    place
        .trainer(&SFT)
        .ends_with(64)
        .says("config.yaml:2:34: cannot read the table of algorithms `table.json`: No such file");
}

#[test]
fn a_run_resumes_with_the_table_of_its_start_only() {
    let place = place();
    let sft = |more: &[&str]| place.trainer(&[&SFT[..], more].concat());
    sft(&[]).ends_with(0);
    let more = ["--set", "train.max_steps=2"];
    sft(&more).ends_with(0).says("resume from_step=1 steps=2");
    // A table of the same name, and of another name.
    let mut other = table();
    other.products.clear();
    place.write("table.json", &other.to_text());
    let more = ["--set", "train.max_steps=3"];
    let changed = sft(&more).ends_with(65);
    let changed =
        changed.says("changed since checkpoint `run/checkpoints/step-00000002`: table of");
    changed.says("restore these files, or start a new run with `--resume never`");
    place.write("table.json", &table().to_text());
    place.write("other.json", &table().to_text());
    let from =
        ["--resume", "run/checkpoints/step-00000002", "--set", "model.algorithms=other.json"];
    sft(&from).ends_with(64).says("`model.algorithms` was \"table.json\" and is \"other.json\"");
    sft(&more).ends_with(0).says("resume from_step=2 steps=3");
}

#[test]
fn measuring_needs_a_gpu() {
    let place = place();
    let arguments = ["bench", "--tune", "new.json", "--config", "config.yaml"];
    let command = [&arguments[..], &["--set", "device=cpu"]].concat();
    place
        .trainer(&command)
        .ends_with(64)
        .says("`--tune` measures algorithms of a GPU, and the device of the config is the CPU");
    assert!(!place.path("new.json").exists());
    place.trainer(&["bench", "--tune", "new.json"]).ends_with(64).says("`--tune` need a config");
}
