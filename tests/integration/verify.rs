//! `trainer verify` passes on every family, and notices planted faults.

use super::harness::{Place, golden};
use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use trainer::batch::{CuSeqlens, VarlenBatch};
use trainer::config::{self, RunConfig};
use trainer::models::{Model, config_from_json};
use trainer::ops::{AttentionBackend, Flash, Matmul, Qkv, QkvGrad, Scores, Segments};
use trainer::run::RunError;
use trainer::run::verify::{
    CheckOutcome, Layout, Pipeline, RunPipeline, StepLosses, VerifyOptions, VerifyReport, compare,
    run_step,
};
use trainer::tape::Param;
use trainer::train::StepRunner;

const ROWS: &str = "rows.jsonl";
const FEATURES: &str = "model.visual.deepstack_merger_list.1";

/// Rows with and without images, of different lengths.
fn place() -> Place {
    let place = Place::empty();
    let mut rows = Vec::new();
    let text = |question: &str, answer: &str| {
        let turn =
            |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
        serde_json::json!({"messages": [turn("user", question), turn("assistant", answer)]})
    };
    let digits = fs::read_to_string(golden("data/digits_test.jsonl")).unwrap();
    for (line, (question, answer)) in
        digits.lines().zip([("1 + 1", "two"), ("Name a colour.", "Blue, or red.")])
    {
        rows.extend([serde_json::from_str(line).unwrap(), text(question, answer)]);
    }
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    place.write(ROWS, &(lines.join("\n") + "\n"));
    let texts: Vec<String> = [("1 + 1", "two"), ("A colour?", "Blue, or red."), ("b", "c d e")]
        .map(|(question, answer)| text(question, answer).to_string())
        .into();
    place.write("text.jsonl", &(texts.join("\n") + "\n"));
    place
}

fn yaml(place: &Place, model: &str) -> String {
    let rows = place.path(if model == "qwen3-text" { "text.jsonl" } else { ROWS });
    format!(
        "output_dir: {}\nmodel: {{path: {}}}\ndata:\n  train: [{{path: {}, image_root: {}}}]\n  \
         shuffle: false\n  packing_length: 128\ntrain: {{max_steps: 8}}\n",
        place.path("run").display(),
        golden("models").join(model).display(),
        rows.display(),
        golden("data").display()
    )
}

fn load(place: &Place, model: &str, overrides: &[&str]) -> RunConfig {
    place.write("config.yaml", &yaml(place, model));
    let overrides: Vec<String> = overrides.iter().map(|set| (*set).to_owned()).collect();
    config::load(&place.path("config.yaml"), &overrides).unwrap()
}

fn report(model: &str, overrides: &[&str], pipeline: &dyn Pipeline) -> VerifyReport {
    let place = place();
    let config = load(&place, model, overrides);
    let rows = 4.try_into().unwrap();
    let options = VerifyOptions { rows, folder: place.path("."), observer: &() };
    let report = compare(&config, &options, pipeline).unwrap();
    assert_eq!(report.rejected, 0);
    report
}

/// Asserts that one of the checks that failed has this name.
#[track_caller]
fn assert_caught(report: &VerifyReport, name: &str) {
    let failed = |check: &&trainer::run::verify::Check| check.outcome == CheckOutcome::Failed;
    let failed: Vec<&str> =
        report.checks.iter().filter(failed).map(|check| check.name.as_str()).collect();
    assert!(failed.contains(&name), "`{name}` is not among {failed:?}\n{report}");
    assert!(!report.passed);
}

/// A planted fault.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// All tokens of a micro-batch attend to all earlier ones.
    Leak,
    /// The gradients of the vision blocks are zero.
    Frozen,
    /// The second deepstack feature is zero, whatever the weights of its merger are.
    Deepstack,
    /// Attention ends at the samples, although targets do not.
    Targets,
    /// All gradients are multiplied by 0.9.
    Backward,
}

/// A run with a planted fault.
struct Faulty {
    fault: Fault,
    /// The samples of micro-batches by their numbers of tokens.
    samples: Arc<Mutex<BTreeMap<usize, CuSeqlens>>>,
}

impl Faulty {
    fn new(fault: Fault) -> Self {
        Self { fault, samples: Arc::default() }
    }
}

/// Attention with the samples of [`Faulty`], or inside the whole micro-batch where it has none.
struct OtherSegments(Arc<Mutex<BTreeMap<usize, CuSeqlens>>>);

impl OtherSegments {
    fn of(&self, segments: &Segments) -> Result<Segments> {
        let num_tokens = segments.cu_seqlens().num_tokens();
        let all = CuSeqlens::from_lengths(&[num_tokens as u32]).unwrap();
        let samples = self.0.lock().unwrap().get(&num_tokens).cloned();
        Segments::new(samples.unwrap_or_else(|| all.clone()), all)
    }
}

impl AttentionBackend for OtherSegments {
    fn name(&self) -> &'static str {
        Flash.name()
    }

    fn kernel(&self, device: &Device, dtype: DType, head_dim: usize) -> &'static str {
        Flash.kernel(device, dtype, head_dim)
    }

    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: &Segments,
        scores: Scores,
    ) -> Result<(Tensor, Tensor)> {
        Flash.forward(qkv, &self.of(segments)?, scores)
    }

    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: &Segments,
        scores: Scores,
    ) -> Result<QkvGrad> {
        Flash.backward(qkv, o, lse, d_o, &self.of(segments)?, scores)
    }
}

fn build(model: &str, params: &[Param], attention: impl AttentionBackend + 'static) -> Model {
    let attention: Arc<dyn AttentionBackend> = Arc::new(attention);
    let path = golden(&format!("models/{model}/config.json"));
    let json = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    config_from_json(&json).unwrap().build(params, &attention, None, Matmul::Native).unwrap()
}

/// The model `untied` with a second deepstack feature of zero: the model reads other tensors than
/// those of the merger.
fn without_deepstack(params: &[Param]) -> Model {
    let detached = |param: &Param| {
        if !param.name().starts_with(FEATURES) {
            return param.clone();
        }
        let zeros = param.tensor().unwrap().zeros_like().unwrap();
        Param::new(param.name(), param.index(), zeros)
    };
    let params: Vec<Param> = params.iter().map(detached).collect();
    build("untied", &params, Flash)
}

impl Pipeline for Faulty {
    fn model(&self, real: Model, params: &[Param]) -> Model {
        match self.fault {
            Fault::Deepstack => without_deepstack(params),
            Fault::Leak | Fault::Targets => {
                build("qwen3-text", params, OtherSegments(Arc::clone(&self.samples)))
            }
            Fault::Frozen | Fault::Backward => real,
        }
    }

    fn batches(&self, _: Layout, mut batches: Vec<VarlenBatch>) -> Vec<VarlenBatch> {
        if self.fault == Fault::Targets {
            let mut samples = self.samples.lock().unwrap();
            for batch in &mut batches {
                let all = batch.mask_boundaries.clone();
                let own = std::mem::replace(&mut batch.cu_seqlens, all);
                let other = samples.insert(own.num_tokens(), own.clone());
                assert!(other.is_none_or(|other| other == own), "found by the number of tokens");
            }
        }
        batches
    }

    fn step(
        &self,
        runner: &StepRunner,
        batches: Vec<VarlenBatch>,
    ) -> std::result::Result<StepLosses, RunError> {
        let losses = run_step(runner, batches)?;
        let factor = match self.fault {
            Fault::Frozen => 0.0,
            Fault::Backward => 0.9,
            _ => return Ok(losses),
        };
        for (param, grad) in runner.params.iter().zip(runner.grads().iter()) {
            let is_faulty = self.fault == Fault::Backward || param.name().contains("visual.blocks");
            if let Some(grad) = grad.filter(|_| is_faulty) {
                grad.slice_set(&(grad * factor)?, 0, 0)?;
            }
        }
        Ok(losses)
    }
}

#[test]
fn every_check_passes_for_every_family_and_precision_and_for_adapters() {
    let lora = "adapter={rank: 2, dropout: 0.3, parts: [llm, vision, merger]}";
    let dora = "adapter={kind: dora, rank: 2}";
    for (model, overrides) in [
        ("untied", &[][..]),
        ("untied", &["model.precision=bf16"]),
        ("untied", &["model.freeze=[vision, merger]", "model.use_rmpad=false"]),
        ("untied", &["data.packing=false", "train.batch_size=3", "model.attention=masked"]),
        ("untied", &[lora]),
        ("untied", &[lora, "model.precision=bf16"]),
        ("sharded-bf16", &["model.precision=bf16", "train.gradient_accumulation_steps=2"]),
        ("qwen3-text", &[]),
        ("qwen3-text", &[dora, "model.recompute=full"]),
    ] {
        let report = report(model, overrides, &RunPipeline);
        assert!(report.passed, "{model} {overrides:?}\n{report}");
        assert!(report.count(CheckOutcome::Passed) >= 14, "{report}");
    }
}

#[test]
fn attention_that_leaks_between_samples_is_caught() {
    let report = report("qwen3-text", &[], &Faulty::new(Fault::Leak));
    assert_caught(&report, "packed: the loss, and that of every row");
    assert_caught(&report, "packed: the gradient of every stage");
    assert_caught(&report, "a row does not affect other rows of its pack");
}

#[test]
fn a_frozen_part_that_should_train_is_caught() {
    let report = report("untied", &[], &Faulty::new(Fault::Frozen));
    assert_caught(&report, "every trained tensor has a gradient, and no frozen one");
}

#[test]
fn a_dropped_deepstack_feature_is_caught_also_where_it_is_frozen() {
    let affects = "every stage of the model affects the loss";
    let trained = report("untied", &[], &Faulty::new(Fault::Deepstack));
    assert_caught(&trained, affects);
    assert_caught(&trained, "every trained tensor has a gradient, and no frozen one");
    let frozen =
        report("untied", &["model.freeze=[vision, merger]"], &Faulty::new(Fault::Deepstack));
    assert_caught(&frozen, affects);
    assert!(frozen.to_string().contains(&format!("no effect: {FEATURES}")), "{frozen}");
}

#[test]
fn targets_that_cross_samples_are_caught() {
    let report = report("qwen3-text", &[], &Faulty::new(Fault::Targets));
    assert_caught(&report, "no target crosses rows, with every token supervised");
}

#[test]
fn a_wrong_backward_is_caught() {
    let report = report("qwen3-text", &[], &Faulty::new(Fault::Backward));
    assert_caught(&report, "gradients are derivatives of the loss, in f32");
}

/// Positions that go on in the next sample of a pack.
struct Positions;

impl Pipeline for Positions {
    fn batches(&self, layout: Layout, mut batches: Vec<VarlenBatch>) -> Vec<VarlenBatch> {
        if layout == Layout::Packed {
            for batch in &mut batches {
                let positions = (0..).zip(&mut batch.position_ids);
                positions.for_each(|(at, position)| *position = [at; 3]);
            }
        }
        batches
    }
}

#[test]
fn positions_that_do_not_restart_are_caught() {
    let report = report("qwen3-text", &[], &Positions);
    assert_caught(&report, "packed: tokens, labels, positions and segments of every row");
}

/// Labels that are shifted by one token over the whole micro-batch.
struct Labels;

impl Pipeline for Labels {
    fn batches(&self, layout: Layout, mut batches: Vec<VarlenBatch>) -> Vec<VarlenBatch> {
        if layout == Layout::Packed {
            for batch in &mut batches {
                batch.labels.rotate_right(1);
            }
        }
        batches
    }
}

#[test]
fn shifted_labels_are_caught() {
    let report = report("qwen3-text", &[], &Labels);
    assert_caught(&report, "packed: tokens, labels, positions and segments of every row");
    assert_caught(&report, "packed: the loss, and that of every row");
    assert_caught(&report, "packed: the gradient of every stage");
}

/// Each micro-batch is divided by its own number of targets.
struct MeanOfMeans;

impl Pipeline for MeanOfMeans {
    fn step(
        &self,
        runner: &StepRunner,
        batches: Vec<VarlenBatch>,
    ) -> std::result::Result<StepLosses, RunError> {
        let count = batches.len() as f64;
        let mut all = StepLosses { loss: 0.0, micro_batches: Vec::new() };
        let mut sums: Vec<Tensor> = Vec::new();
        for batch in batches {
            let mut step = run_step(runner, vec![batch])?;
            all.loss += step.loss / count;
            all.micro_batches.append(&mut step.micro_batches);
            let grads = runner.grads().iter().flatten();
            let own = grads.map(|grad| grad / count).collect::<Result<Vec<_>>>()?;
            sums = if sums.is_empty() {
                own
            } else {
                sums.iter().zip(&own).map(|(x, y)| x + y).collect::<Result<_>>()?
            };
        }
        for (grad, sum) in runner.grads().iter().flatten().zip(&sums) {
            grad.slice_set(sum, 0, 0)?;
        }
        Ok(all)
    }
}

/// The bounds of bf16 are wide for rounding, but not for a fault.
#[test]
fn planted_faults_exceed_the_bounds_of_bf16() {
    let bf16 = &["model.precision=bf16"][..];
    let leak = report("qwen3-text", bf16, &Faulty::new(Fault::Leak));
    assert_caught(&leak, "packed: the loss, and that of every row");
    assert_caught(&leak, "packed: the gradient of every stage");
    let labels = report("qwen3-text", bf16, &Labels);
    assert_caught(&labels, "packed: the loss, and that of every row");
    assert_caught(&labels, "packed: the gradient of every stage");
    let means = report("qwen3-text", bf16, &MeanOfMeans);
    assert_caught(&means, "split: the gradient of every stage");
}

#[test]
fn a_mean_of_the_means_of_micro_batches_is_caught() {
    let report = report("qwen3-text", &[], &MeanOfMeans);
    assert_caught(&report, "split: the loss, and that of every row");
    assert_caught(&report, "split: the gradient of every stage");
}

#[test]
fn the_command_prints_a_report_and_leaves_no_file() {
    let place = place();
    place.write("config.yaml", &yaml(&place, "qwen3-text"));
    fs::create_dir(place.path("run")).unwrap();
    place.write("run/notes.txt", "kept");
    let before = (place.names("."), place.names("run"));
    let arguments = ["verify", "--config", "config.yaml", "--rows", "3"];
    let output = place.trainer(&arguments).ends_with(0);
    assert!(output.stdout.contains("stopped after 2"), "{}", output.stdout);
    assert!(output.stdout.contains("\npassed: "), "{}", output.stdout);
    let output = place.trainer(&[&arguments[..4], &["2", "--json"]].concat()).ends_with(0);
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((report["passed"].as_bool(), report["rows"].as_u64()), (Some(true), Some(2)));
    assert_eq!((place.names("."), place.names("run")), before);
}

#[test]
fn weights_that_are_not_finite_end_with_65() {
    let place = place();
    let model = place.path("model");
    super::harness::copy_folder(&golden("models/qwen3-text"), &model);
    let file = model.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    super::harness::write(&file, &bytes);
    place.write("config.yaml", &yaml(&place, "qwen3-text"));
    let set = format!("model.path={}", model.display());
    place.trainer(&["verify", "--config", "config.yaml", "--set", &set, "--json"]).ends_with(65);
    assert!(!Path::new(&place.path("run")).exists());
}
