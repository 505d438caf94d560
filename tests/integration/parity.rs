//! Results equal those of the reference, PyTorch and transformers in f32, on the same model and
//! rows.
//!
//! The expected values are in `tests/golden/{curves,losses_at_init,qwen3_text}.json`; see the README
//! there for how they were computed.

use crate::harness::{device, is_long};
use candle_core::Device;
use serde_json::Value;
use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use trainer::batch::{EncodedSample, Pack, PaddingSide, Patches, VarlenBatch};
use trainer::data::{DatasetConfig, DatasetRows, Encoder, RowReader, SampleIndex, collate};
use trainer::optim::{Kind, Master, OptimConfig, Optimizer};
use trainer::run::{NewVocabulary, OpenAdapter, OpenModel, trainable};
use trainer::tape::{Gradients, Param};
use trainer::train::{
    AdapterConfig, AttentionChoice, Evaluator, GradientSums, ModelSection, Precision, RankWeights,
    Ranks, RecomputeChoice, StepResult, StepRunner, buffers_of_tree,
};

const SAMPLES_A_STEP: usize = 8;
const SMALL: &str = "small-tied";
pub(crate) const TEXT_ONLY: &str = "qwen3-text";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub(crate) fn golden_json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden(name)).unwrap()).unwrap()
}

/// Layout and options of a step of the same eight samples. Results must not depend on them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    pub(crate) use_rmpad: bool,
    pub(crate) attention: AttentionChoice,
    pub(crate) samples_a_row: usize,
    pub(crate) micro_batches: usize,
    pub(crate) recompute: RecomputeChoice,
    pub(crate) side: PaddingSide,
}

pub(crate) const PLAIN: Variant = Variant {
    use_rmpad: true,
    attention: AttentionChoice::Flash,
    samples_a_row: 1,
    micro_batches: 1,
    recompute: RecomputeChoice::None,
    side: PaddingSide::Right,
};

impl Variant {
    pub(crate) fn micro_batches(self, samples: &[EncodedSample]) -> Vec<VarlenBatch> {
        let per_micro_batch = samples.len() / self.micro_batches;
        let lay_out = |samples: &[EncodedSample]| {
            let rows = samples.chunks(self.samples_a_row);
            let packs = rows.map(|row| Pack { samples: row.to_vec() }).collect();
            let batch = collate(packs, 2017, self.side, merge_size(samples)).unwrap();
            if self.use_rmpad { batch.unpad().unwrap() } else { batch.keep_padding().unwrap() }
        };
        samples.chunks(per_micro_batch).map(lay_out).collect()
    }
}

/// Patches on a side of a token of the images.
fn merge_size(samples: &[EncodedSample]) -> NonZeroU32 {
    let patches = samples.iter().flat_map(|sample| &sample.media).map(Patches::num_patches);
    let tokens = samples.iter().map(|sample| sample.vision_rows.len());
    let per_token = patches.sum::<usize>().checked_div(tokens.sum()).unwrap_or(1);
    NonZeroU32::new(per_token.isqrt() as u32).unwrap()
}

fn rows(data: &str) -> DatasetRows {
    rows_for(SMALL, data)
}

/// Rows as the model in this folder reads them.
pub(crate) fn rows_for(model: &str, data: &str) -> DatasetRows {
    rows_with(&ModelSection::new(golden("models").join(model)), data)
}

/// Rows as a model reads them that receives tokens.
pub(crate) fn rows_with(section: &ModelSection, data: &str) -> DatasetRows {
    let vocabulary = NewVocabulary::of(section).unwrap();
    let vocabulary = vocabulary.as_ref().map(NewVocabulary::of_encoder);
    let (image, video) = Default::default();
    let encoder = Encoder::with_vocabulary(&section.path, &image, &video, vocabulary).unwrap();
    let path = golden("data").join(format!("{data}.jsonl"));
    DatasetRows::open(&[DatasetConfig::new(path)], Arc::new(encoder)).unwrap()
}

fn section(model: &str, variant: Variant, precision: Precision) -> ModelSection {
    ModelSection {
        use_rmpad: variant.use_rmpad,
        attention: variant.attention,
        precision,
        recompute: variant.recompute,
        ..ModelSection::new(golden("models").join(model))
    }
}

/// The folder of the adapter that a curve starts from.
fn adapter_of(curve: &Value) -> Option<(TempDir, AdapterConfig)> {
    if let Some(init) = curve["args"].get("init").filter(|init| init.is_string()) {
        let config = serde_json::json!({"rank": 8, "alpha": 16, "dropout": 0, "init": init});
        return Some((TempDir::new().unwrap(), serde_json::from_value(config).unwrap()));
    }
    let source = golden("adapters").join(curve["args"]["adapter"].as_str()?);
    let folder = TempDir::new().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(source.join(name), folder.path().join(name)).unwrap();
    }
    if curve["args"]["rslora"] == true {
        let path = folder.path().join("adapter_config.json");
        let text = fs::read_to_string(&path).unwrap();
        let with_rslora = text.replace("\"use_rslora\": false", "\"use_rslora\": true");
        assert_ne!(with_rslora, text);
        crate::harness::write(&path, with_rslora.as_bytes());
    }
    let start_from = Some(folder.path().to_owned());
    Some((folder, AdapterConfig { start_from, dropout: 0.0, ..AdapterConfig::default() }))
}

fn runner(model: &str, variant: Variant, precision: Precision) -> StepRunner {
    runner_of(&serde_json::json!({ "model": model }), variant, precision)
}

/// The model of a curve, with its adapter, and the settings of the reference: the optimizer of the
/// curve, constant learning rate 1e-3, clipping at 1, no weight decay.
pub(crate) fn runner_of(curve: &Value, variant: Variant, precision: Precision) -> StepRunner {
    let device = device();
    let mut section = section(curve["model"].as_str().unwrap(), variant, precision);
    let tokens = |key: &str| serde_json::from_value(curve[key].clone()).unwrap_or_default();
    section.add_tokens = tokens("add_tokens");
    section.add_special_tokens = tokens("add_special_tokens");
    let mut open = OpenModel::open(&section, 0, &device).unwrap();
    let adapter = adapter_of(curve);
    if let Some((_, adapter)) = &adapter {
        open = open.with_adapter(|specs| OpenAdapter::new(adapter, specs, 0)).unwrap();
    }
    let loaded = open.load(&device).unwrap();
    let kind = curve["args"]
        .get("optimizer")
        .map_or(Kind::Adamw, |kind| serde_json::from_value(kind.clone()).unwrap());
    let master = curve["args"]
        .get("master")
        .map_or(Master::F32, |master| serde_json::from_value(master.clone()).unwrap());
    let optim = OptimConfig { lr: 1e-3, kind, master, ..OptimConfig::default() };
    let groups = loaded.open.groups(&[], &optim.lr_multipliers).unwrap();
    let master = |param: &Param, part, device: &Device| loaded.open.master(param, part, device);
    let optimizer =
        Optimizer::new(&optim, 1.0, &loaded.params, &groups, None, master, &device).unwrap();
    let trainable = trainable(&groups);
    let zeros = |_| Gradients::zeros(&loaded.params, &trainable, &device).unwrap();
    let buffers = (0..buffers_of_tree(variant.micro_batches)).map(zeros).collect();
    StepRunner {
        gradients: GradientSums::Alone(buffers),
        weights: RankWeights::default(),
        ranks: Ranks::alone(),
        saved_as: Vec::new(),
        kept: Vec::new(),
        model: loaded.model,
        params: loaded.params,
        optimizer,
        recompute: variant.recompute.policy(),
        aux_loss: curve["args"]["aux_loss"].as_f64().unwrap_or(0.0),
        dtype: precision.dtype(),
        device,
    }
}

fn curve(data: &str, variant: Variant, precision: Precision, steps: u64) -> Vec<StepResult> {
    curve_of(&serde_json::json!({ "model": SMALL, "data": data }), variant, precision, steps)
}

fn curve_of(golden: &Value, variant: Variant, precision: Precision, steps: u64) -> Vec<StepResult> {
    let (model, data) = (golden["model"].as_str().unwrap(), golden["data"].as_str().unwrap());
    let rows = rows_for(model, data.trim_end_matches(".jsonl"));
    let runner = runner_of(golden, variant, precision);
    let lr = golden["args"].get("lr").map_or(1e-3, |lr| lr.as_f64().unwrap());
    let all: Vec<SampleIndex> = rows.rows().collect();
    let mut next = all.iter().cycle();
    let run = |step: u64| {
        let samples = next.by_ref().take(SAMPLES_A_STEP).map(|row| rows.read(*row).unwrap());
        let samples: Vec<EncodedSample> = samples.collect();
        runner.run(variant.micro_batches(&samples), lr, step).unwrap()
    };
    (1..=steps).map(run).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect()
}

/// The first steps of a curve, which most layouts run. All layouts run all steps with
/// `TRAINER_LONG_TESTS=1`.
const FIRST_STEPS: usize = 2;

impl Variant {
    /// Number of steps of a curve of `steps` steps: all for samples without padding, each alone, in
    /// one micro-batch.
    fn steps(self, steps: usize) -> usize {
        let is_alone = self.samples_a_row == PLAIN.samples_a_row;
        let without_padding = self.use_rmpad && self.attention == AttentionChoice::Flash;
        let one_pass = self.micro_batches == 1 && self.recompute == RecomputeChoice::None;
        if without_padding && one_pass && is_alone || is_long() {
            steps
        } else {
            steps.min(FIRST_STEPS)
        }
    }
}

/// Asserts that losses are within 2e-5 at step 1 and 1e-4 afterwards, gradient norms within 0.1 %,
/// and target counts equal.
pub(crate) fn assert_follows(golden: &Value, variant: Variant) -> Vec<StepResult> {
    let (loss, norm) = (numbers(&golden["loss"]), numbers(&golden["grad_norm"]));
    let targets = numbers(&golden["target_tokens"]);
    let found = curve_of(golden, variant, Precision::F32, variant.steps(loss.len()) as u64);
    for (i, outcome) in found.iter().enumerate() {
        let bound = if i == 0 { 2e-5 } else { 1e-4 };
        let off = (outcome.loss - loss[i]).abs();
        assert!(off <= bound, "{variant:?} step {}: {} not {}", i + 1, outcome.loss, loss[i]);
        let off = (outcome.grad_norm / norm[i] - 1.0).abs();
        assert!(
            off <= 1e-3,
            "{variant:?} step {}: norm {} not {}",
            i + 1,
            outcome.grad_norm,
            norm[i]
        );
        assert_eq!(outcome.counts.num_targets as f64, targets[i], "{variant:?} step {}", i + 1);
    }
    let worst = found.iter().zip(&loss).map(|(o, l)| (o.loss - l).abs()).fold(0.0, f64::max);
    let (model, data) = (&golden["model"], &golden["data"]);
    println!("{model} {data} {variant:?}: worst loss difference {worst:.1e}");
    found
}

/// Compares every layout and recomputation with the reference and with each other.
pub(crate) fn assert_all_variants_follow(golden: &Value) {
    let plain = assert_follows(golden, PLAIN);
    let variants = [
        Variant { use_rmpad: false, ..PLAIN },
        Variant { use_rmpad: false, side: PaddingSide::Left, ..PLAIN },
        Variant { attention: AttentionChoice::Masked, ..PLAIN },
        Variant { attention: AttentionChoice::Masked, use_rmpad: false, ..PLAIN },
        Variant { samples_a_row: 8, ..PLAIN },
        Variant { micro_batches: 4, ..PLAIN },
        Variant { recompute: RecomputeChoice::Full, ..PLAIN },
    ];
    // Dense masks are on the CPU only.
    let exist =
        |variant: &Variant| device().is_cpu() || variant.attention == AttentionChoice::Flash;
    // A GPU multiplies matrices of other sizes with other kernels, which add in another order.
    let bound = if device().is_cpu() { 1e-5 } else { 4e-5 };
    for variant in variants.into_iter().filter(exist) {
        let found = assert_follows(golden, variant);
        for (step, (a, b)) in found.iter().zip(&plain).enumerate() {
            let off = (a.loss - b.loss).abs();
            assert!(off <= bound, "{variant:?} step {}: {} not {}", step + 1, a.loss, b.loss);
        }
    }
}

/// Curves of `optimizers.json`. In 8 bits, a value next to the middle of two codes may have either.
#[test]
fn other_optimizers_follow_the_reference() {
    let golden = golden_json("optimizers.json");
    for (name, bound) in [("muon", 1e-5), ("adafactor", 1e-5), ("adamw_8bit", 1e-4)] {
        let loss = numbers(&golden[name]["loss"]);
        let steps = if is_long() { loss.len() } else { 8 };
        let found = curve_of(&golden[name], PLAIN, Precision::F32, steps as u64);
        let off = found.iter().zip(&loss).map(|(found, loss)| (found.loss - loss).abs());
        let off: Vec<f64> = off.collect();
        println!("{name}: {off:?}");
        assert!(off.iter().all(|off| *off <= bound), "{name}: {off:?}");
    }
}

#[test]
fn text_follows_the_reference_in_every_layout() {
    assert_all_variants_follow(&golden_json("curves.json")["text_small-tied"]);
}

#[test]
fn images_follow_the_reference_in_every_layout() {
    assert_all_variants_follow(&golden_json("curves.json")["image_exact_small-tied"]);
}

#[test]
fn digits_follow_the_reference_in_every_layout() {
    assert_all_variants_follow(&golden_json("curves.json")["digits_small-tied"]);
}

#[test]
fn qwen35_follows_the_reference_in_every_layout() {
    for name in ["text_small-qwen35", "image_exact_small-qwen35"] {
        assert_all_variants_follow(&golden_json("curves.json")[name]);
    }
}

#[test]
fn qwen25_vl_follows_the_reference_in_every_layout() {
    assert_all_variants_follow(&golden_json("curves.json")["text_small-qwen25vl"]);
}

#[test]
fn qwen25_vl_with_images_follows_the_reference_in_every_layout() {
    assert_all_variants_follow(&golden_json("curves.json")["image_28_small-qwen25vl"]);
}

#[test]
fn qwen2_vl_follows_the_reference_in_every_layout() {
    assert_all_variants_follow(&golden_json("curves.json")["text_small-qwen2vl"]);
}

#[test]
fn qwen2_vl_with_images_follows_the_reference_in_every_layout() {
    assert_all_variants_follow(&golden_json("curves.json")["image_28_small-qwen2vl"]);
}

#[test]
fn internvl_follows_the_reference_in_every_layout() {
    for name in ["text_small-internvl", "image_exact_small-internvl"] {
        assert_all_variants_follow(&golden_json("curves.json")[name]);
    }
}

#[test]
fn minicpm_follows_the_reference_in_every_layout() {
    for name in ["text_small-minicpm", "image_exact_small-minicpm"] {
        assert_all_variants_follow(&golden_json("curves.json")[name]);
    }
}

/// The sides of these images are multiples of 28, where a family needs multiples of 32, or of 32.
/// Recomputation limits the curves to their first steps, unless `TRAINER_LONG_TESTS` is set.
#[test]
fn resized_images_follow_the_reference_as_closely_as_others() {
    let curves = golden_json("curves.json");
    for name in [
        "image_28_small-tied",
        "image_28_small-qwen35",
        "image_exact_small-qwen25vl",
        "image_exact_small-qwen2vl",
    ] {
        assert_follows(&curves[name], Variant { recompute: RecomputeChoice::Full, ..PLAIN });
    }
}

/// Text-only Qwen3, made by `scripts/golden/qwen3_text.py`. Its curve is stored in three layouts.
#[test]
fn text_only_qwen3_follows_the_reference_in_every_layout() {
    let golden = golden_json("qwen3_text.json");
    for layout in ["per-sample", "padded", "packed"] {
        let mut curve = golden[layout].clone();
        (curve["model"], curve["data"]) = (golden["model"].clone(), golden["data"].clone());
        match layout {
            "per-sample" => assert_all_variants_follow(&curve),
            "padded" => drop(assert_follows(&curve, Variant { use_rmpad: false, ..PLAIN })),
            _ => drop(assert_follows(&curve, Variant { samples_a_row: 8, ..PLAIN })),
        }
    }
}

#[test]
fn a_text_only_model_rejects_rows_with_images() {
    let rows = rows_for(TEXT_ONLY, "image_exact");
    let rejection = rows.read(rows.rows().next().unwrap()).unwrap_err();
    assert_eq!(rejection.reason, "not_supported");
    assert!(rejection.message.contains("the model is text-only"), "{}", rejection.message);
}

#[test]
fn text_only_qwen3_gradient_norms_equal_the_references() {
    let golden = &golden_json("qwen3_text.json")["per-sample"]["grad_norms_step1"];
    let (rows, runner) = (rows_for(TEXT_ONLY, "text"), runner(TEXT_ONLY, PLAIN, Precision::F32));
    assert_gradient_norms(&rows, &runner, golden);
}

#[test]
fn gradient_norms_of_every_parameter_equal_the_references() {
    let curves = golden_json("curves.json");
    for (model, data) in [
        ("small-tied", "image_exact"),
        ("small-qwen35", "image_exact"),
        ("small-qwen25vl", "image_28"),
        ("small-qwen2vl", "image_28"),
        ("small-internvl", "image_exact"),
        ("small-minicpm", "image_exact"),
    ]
    .into_iter()
    .flat_map(|(model, images)| ["text", images].map(|data| (model, data)))
    {
        let golden = &curves[format!("{data}_{model}")]["grad_norms_step1"];
        let runner = runner(model, PLAIN, Precision::F32);
        assert_gradient_norms(&rows_for(model, data), &runner, golden);
    }
}

/// Of the first step; those of the frozen parameters are not computed.
pub(crate) fn assert_gradient_norms(rows: &DatasetRows, runner: &StepRunner, golden: &Value) {
    let samples: Vec<EncodedSample> =
        rows.rows().take(SAMPLES_A_STEP).map(|row| rows.read(row).unwrap()).collect();
    runner.accumulate(runner.prepare(PLAIN.micro_batches(&samples)).unwrap(), 1).unwrap();
    let mut compared = 0;
    for param in &runner.params {
        let Some(buffer) = runner.grads().get(param.index()) else { continue };
        let expected = golden[param.name()].as_f64().unwrap_or_else(|| panic!("{}", param.name()));
        compared += 1;
        let found = trainer::ops::sum_of_squares(buffer).unwrap().sqrt();
        let off = (found - expected).abs();
        assert!(off <= 1e-3 * expected + 1e-6, "{}: {found} not {expected}", param.name());
    }
    assert_eq!(compared, golden.as_object().unwrap().len());
}

#[test]
fn losses_of_single_samples_equal_the_references() {
    let golden = golden_json("losses_at_init.json");
    for (name, entry) in golden.as_object().unwrap() {
        assert_per_sample_losses(name, entry);
    }
}

/// `name` has the model and the data of an entry of `losses_at_init.json`.
pub(crate) fn assert_per_sample_losses(name: &str, entry: &Value) {
    let (model, data) = name.split_once('|').unwrap();
    let (rows, runner) = (rows_for(model, data), runner(model, PLAIN, Precision::F32));
    assert_losses(&rows, &runner, &entry["per_sample"]);
}

/// `per_sample` has an id, the mean loss and the number of targets of each row.
pub(crate) fn assert_losses(rows: &DatasetRows, runner: &StepRunner, per_sample: &Value) {
    let device = device();
    let dtype = runner.dtype;
    let evaluator = Evaluator {
        rows,
        max_tokens: 2048,
        dtype,
        device: &device,
        ranks: &Ranks::alone(),
        weights: &RankWeights::default(),
    };
    let report = evaluator.run(&runner.model, &|_| {}).unwrap();
    for (found, expected) in report.samples.iter().zip(per_sample.as_array().unwrap()) {
        let found = found.result;
        let (row, num_targets) = (found.size.row, u64::from(found.size.num_targets));
        let mean = found.nll_sum / num_targets as f64;
        let off = (mean - expected[1].as_f64().unwrap()).abs();
        assert!(off <= 2e-5, "row {row}: {mean} not {}", expected[1]);
        assert_eq!(num_targets, expected[2].as_u64().unwrap(), "row {row}");
    }
}

#[test]
fn bf16_follows_f32() {
    let variant = Variant { samples_a_row: 8, ..PLAIN };
    let exact = curve("image_exact", variant, Precision::F32, 10);
    let rough = curve("image_exact", variant, Precision::Bf16, 10);
    for (a, b) in rough.iter().zip(&exact) {
        assert!((a.loss / b.loss - 1.0).abs() < 0.02, "{} not {}", a.loss, b.loss);
    }
}

/// Finds rows by file and id.
fn samples_by_id(wanted: &Value) -> Vec<EncodedSample> {
    let row = |wanted: &Value| {
        let rows = rows(wanted["file"].as_str().unwrap().trim_end_matches(".jsonl"));
        let text = std::fs::read_to_string(rows.sets()[0].path()).unwrap();
        let has_id =
            |line: &str| serde_json::from_str::<Value>(line).unwrap()["id"] == wanted["id"];
        let row = text.lines().position(has_id).unwrap() as u32;
        rows.read(SampleIndex { dataset: 0, row }).unwrap()
    };
    wanted.as_array().unwrap().iter().map(row).collect()
}

/// Two models from `scripts/golden/make_variants.py`: one with an untied head, a q projection wider
/// than the hidden size and `config.json` as transformers 5 writes it; one with bf16 weights in two
/// shards.
#[test]
fn other_shapes_and_files_give_the_references_losses_and_gradients() {
    let golden_variants = golden_json("variants.json");
    let samples = samples_by_id(&golden_variants["rows"]);
    let file = golden("variants_grads.safetensors");
    let full = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let mut compared = 0;
    for model in ["untied", "sharded-bf16"] {
        let (golden, runner) = (&golden_variants[model], runner(model, PLAIN, Precision::F32));
        let step = runner.prepare(PLAIN.micro_batches(&samples)).unwrap();
        let losses = runner.accumulate(step, 1).unwrap();
        assert_eq!(losses.counts.num_targets, golden["num_targets"].as_u64().unwrap());
        let loss = losses.sum().unwrap() / losses.counts.num_targets as f64;
        let off = (loss - golden["loss"].as_f64().unwrap()).abs();
        assert!(off <= 1e-5, "{model}: {loss} not {}", golden["loss"]);
        for param in &runner.params {
            let buffer = runner.grads().get(param.index()).unwrap();
            let norm = trainer::ops::sum_of_squares(buffer).unwrap().sqrt();
            let expected = golden["grad_norms"][param.name()].as_f64().unwrap();
            let off = (norm - expected).abs();
            assert!(
                off <= 1e-3 * expected + 1e-6,
                "{model} {}: {norm} not {expected}",
                param.name()
            );
            let Some(expected) = full.get(&format!("{model}/{}", param.name())) else { continue };
            let difference = (buffer - expected).unwrap();
            let off = trainer::ops::sum_of_squares(&difference).unwrap().sqrt();
            assert!(off <= 1e-4 * norm, "{model} {}: {off} of {norm}", param.name());
            compared += 1;
        }
    }
    assert_eq!(compared, full.len());
}
