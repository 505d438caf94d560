//! Computes rows of the user's data in every layout, and compares losses and gradients.
//!
//! The reference is the model of the config that computes the rows one by one. [`verify`] compares
//! with it packs, padded rows, several micro-batches, another attention kernel and, for a GPU, the
//! CPU. Further checks need no reference: which tokens, pixels and weights affect which losses, and
//! whether gradients are derivatives of the loss. In bf16 the bounds are what the rounding to bf16
//! changes: the differences from the same model in f32.

mod checks;
mod difference;
mod layouts;
mod report;
mod subject;

pub use layouts::Layout;
pub use report::{Check, CheckOutcome, Difference, LayoutReport, StageReport, VerifyReport};
pub use subject::{Pipeline, RowLosses, RunPipeline, StepLosses, run_step};

use super::device::device_name;
use super::inputs::{SetupObserver, check};
use super::output_dir::TemporaryFolder;
use super::trials::in_one_process;
use crate::config::RunConfig;
use crate::nn::{AdapterTensor, ParamSpec};
use crate::run::RunError;
use crate::train::Precision;
use candle_core::{Device, Tensor};
use checks::{Derivative, Effects, MIN_LOSS, RESUMED, derivatives, resumed};
use difference::{LayoutLosses, Sums, copy_gradients, differences, measure, rms};
use layouts::{LaidOut, Rows, lay_out, layouts, misplaced};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use subject::Subject;

/// Bound of differences in f32.
const BOUND: f64 = 1e-5;

pub struct VerifyOptions<'a> {
    pub rows: NonZeroUsize,
    /// A temporary folder is made here, and removed at the end.
    pub folder: PathBuf,
    /// Receives the progress of reading the data.
    pub observer: &'a dyn SetupObserver,
}

/// Verifies the first rows of a config's training data, in the order of a run: [`compare`], and a
/// short run that is stopped and resumed.
///
/// Writes below [`VerifyOptions::folder`] only.
pub fn verify(
    config: &RunConfig,
    options: &VerifyOptions<'_>,
    pipeline: &dyn Pipeline,
) -> Result<VerifyReport, RunError> {
    let folder = temporary_folder(&options.folder)?;
    let config = in_folder(config, folder.path());
    let mut report = compare_in_folder(&config, options, pipeline)?;
    if report.passed {
        tracing::info!("stopping and resuming a run");
        report.checks.push(resumed(&config, folder.path())?);
    } else {
        report.checks.push(Check::skipped(RESUMED, "a check above failed"));
    }
    report.passed = report.count(CheckOutcome::Failed) == 0;
    Ok(report)
}

/// Computes rows in every layout, and compares losses and gradients; without the resumed run of
/// [`verify`].
pub fn compare(
    config: &RunConfig,
    options: &VerifyOptions<'_>,
    pipeline: &dyn Pipeline,
) -> Result<VerifyReport, RunError> {
    let folder = temporary_folder(&options.folder)?;
    compare_in_folder(&in_folder(config, folder.path()), options, pipeline)
}

/// As [`compare`], for a config whose `output_dir` is temporary.
fn compare_in_folder(
    config: &RunConfig,
    options: &VerifyOptions<'_>,
    pipeline: &dyn Pipeline,
) -> Result<VerifyReport, RunError> {
    check(config)?;
    let device = config.device.open()?;
    let rows = Rows::first(config, options.rows.get(), options.observer)?;
    let mut verification = Verification::new(config, pipeline, &rows, &device)?;
    verification.compare(config, &device)?;
    let mut report = verification.report;
    report.passed = report.count(CheckOutcome::Failed) == 0;
    Ok(report)
}

/// The config of a run in one process that writes to `folder` only.
fn in_folder(config: &RunConfig, folder: &Path) -> RunConfig {
    let mut config = in_one_process(config, folder);
    // A tokenised corpus is read where it is; all other caches are small.
    let has_corpus = config.data.train.iter().any(|set| set.corpus.is_some());
    if !has_corpus || !config.cache_dir().is_dir() {
        config.data.cache_dir = Some(folder.join("cache"));
    }
    config
}

/// The config without dropout, whose masks depend on the place of a row.
fn without_dropout(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    if let Some(adapter) = &mut config.adapter {
        adapter.dropout = 0.0;
    }
    config.train.gradient_accumulation_steps = NonZeroUsize::MIN; // one gradient buffer
    config
}

struct Verification<'a> {
    pipeline: &'a dyn Pipeline,
    rows: &'a Rows,
    one_by_one: Vec<LaidOut>,
    /// The layouts to compare; the first one is that of the config.
    others: Vec<(Layout, Vec<LaidOut>)>,
    report: VerifyReport,
}

/// Losses and gradients of the reference, and the bounds of differences from it.
struct Reference {
    measured: LayoutLosses,
    gradients: Vec<Option<Tensor>>,
    loss_bound: f64,
    /// Of each stage.
    gradient_bounds: Vec<f64>,
    stages: Vec<(String, Vec<usize>)>,
}

impl<'a> Verification<'a> {
    fn new(
        config: &RunConfig,
        pipeline: &'a dyn Pipeline,
        rows: &'a Rows,
        device: &Device,
    ) -> Result<Self, RunError> {
        let samples = &rows.samples;
        let targets = samples.iter().map(crate::batch::EncodedSample::num_targets).sum();
        if targets == 0 {
            return Err(RunError::NoTargets { rows: samples.len() });
        }
        let lay_out = |layout| -> Result<Vec<LaidOut>, RunError> {
            let laid_out = lay_out(layout, samples, rows, config.data.packing_length)?;
            let (batches, places): (Vec<_>, Vec<_>) =
                laid_out.into_iter().map(|of| (of.batch, of.places)).unzip();
            let batches = pipeline.batches(layout, batches).into_iter();
            Ok(batches.zip(places).map(|(batch, places)| LaidOut { batch, places }).collect())
        };
        let others =
            layouts(&rows.options).into_iter().map(|layout| Ok((layout, lay_out(layout)?)));
        let report = VerifyReport {
            passed: false,
            rows: samples.len(),
            rejected: rows.rejected,
            tokens: samples.iter().map(crate::batch::EncodedSample::len).sum(),
            targets,
            media: samples.iter().map(crate::batch::EncodedSample::num_media).sum(),
            precision: config.model.precision.hf_name(),
            device: device_name(device),
            layouts: Vec::new(),
            stages: Vec::new(),
            checks: Vec::new(),
        };
        let one_by_one = lay_out(Layout::OneByOne)?;
        let others = others.collect::<Result<_, RunError>>()?;
        Ok(Self { pipeline, rows, one_by_one, others, report })
    }

    fn compare(&mut self, config: &RunConfig, device: &Device) -> Result<(), RunError> {
        let config = without_dropout(config);
        let (mut subject, reference) = self.reference(&config, device)?;
        self.check_gradients(&subject, &reference)?;
        let others = std::mem::take(&mut self.others);
        for (layout, laid_out) in &others {
            self.check_places(*layout, laid_out);
            self.layout(layout.name(), &subject, laid_out, &reference)?;
        }
        if subject.exchange() {
            let (_, laid_out) = &others[0];
            self.layout(subject.other_attention, &subject, laid_out, &reference)?;
            subject.exchange();
        }
        let packing_length = config.data.packing_length;
        let (pipeline, rows) = (self.pipeline, self.rows);
        tracing::info!("changing rows, pixels and stages");
        let effects = Effects { pipeline, rows, subject: &subject, packing_length };
        self.report.checks.extend(effects.checks()?);
        if !device.is_cpu() {
            drop(subject);
            let on_cpu = Subject::load(&config, &Device::Cpu, self.pipeline)?;
            let one_by_one = std::mem::take(&mut self.one_by_one);
            self.layout("cpu", &on_cpu, &one_by_one, &reference)?;
        }
        Ok(())
    }

    /// Computes the reference. In bf16, the same model in f32 gives the bounds and the derivatives.
    fn reference(
        &mut self,
        config: &RunConfig,
        device: &Device,
    ) -> Result<(Subject, Reference), RunError> {
        let in_f32 = {
            let mut config = config.clone();
            config.model.precision = Precision::F32;
            config
        };
        let subject = Subject::load(&in_f32, device, self.pipeline)?;
        let measured = self.one_by_one(&subject)?;
        let gradients = copy_gradients(&subject.runner)?;
        self.check_slopes(&subject, &gradients, measured.loss)?;
        let stages = subject.stages();
        let mut reference = Reference {
            gradient_bounds: vec![BOUND; stages.len()],
            loss_bound: BOUND,
            measured,
            gradients,
            stages,
        };
        let mut subject = subject;
        if config.model.precision == Precision::Bf16 {
            drop(subject);
            subject = Subject::load(config, device, self.pipeline)?;
            let measured = self.one_by_one(&subject)?;
            let rounding = differences(&reference.gradients, &subject.runner)?;
            let bound = |(_, params): &(String, Vec<usize>)| {
                joined(params, &rounding).relative().max(BOUND)
            };
            reference.gradient_bounds = reference.stages.iter().map(bound).collect();
            reference.loss_bound = BOUND.max(rms(&reference.measured, &measured));
            reference.gradients.clear(); // before the copy: two sets at a time
            reference.gradients = copy_gradients(&subject.runner)?;
            reference.measured = measured;
        }
        self.report.stages = empty_stages(&subject, &reference)?;
        let tokens = self.one_by_one.iter().map(|of| of.batch.input_ids.len()).sum();
        self.report.layouts.push(LayoutReport {
            name: Layout::OneByOne.name().to_owned(),
            micro_batches: self.one_by_one.len(),
            tokens,
            loss: reference.measured.loss,
            difference: 0.0,
            row_difference: 0.0,
            row: String::new(),
            bound: reference.loss_bound,
        });
        Ok((subject, reference))
    }

    fn one_by_one(&self, subject: &Subject) -> Result<LayoutLosses, RunError> {
        tracing::info!(dtype = ?subject.runner.dtype, "computing the rows one by one");
        measure(self.pipeline, &subject.runner, &self.one_by_one, self.rows.samples.len())
    }

    /// Computes all rows in a layout, and compares losses and gradients.
    fn layout(
        &mut self,
        name: &str,
        subject: &Subject,
        laid_out: &[LaidOut],
        reference: &Reference,
    ) -> Result<(), RunError> {
        tracing::info!(layout = name, "computing the rows");
        let num_samples = self.rows.samples.len();
        let measured = measure(self.pipeline, &subject.runner, laid_out, num_samples)?;
        let sums = differences(&reference.gradients, &subject.runner)?;
        self.check_losses(name, laid_out, &measured, reference);
        let mut worst: Option<(f64, String)> = None;
        for ((_, params), stage) in reference.stages.iter().zip(&mut self.report.stages) {
            let of_stage = joined(params, &sums);
            let difference = Difference {
                relative: of_stage.relative(),
                one_minus_cosine: of_stage.one_minus_cosine(),
            };
            stage.differences.push(difference);
            for index in params {
                let relative = sums[*index].map_or(0.0, |sums| sums.relative());
                if relative > stage.worst_difference {
                    stage.worst_difference = relative;
                    subject.specs[*index].name.clone_into(&mut stage.worst_tensor);
                }
            }
            let used = difference.relative / stage.bound;
            if used > 1.0 && worst.as_ref().is_none_or(|(most, _)| used > *most) {
                let Difference { relative, .. } = difference;
                let text =
                    format!("{}: off by {relative:.1e}, bound {:.1e}", stage.name, stage.bound);
                worst = Some((used, text));
            }
        }
        let num_stages = reference.stages.len();
        let check = format!("{name}: the gradient of every stage");
        let problem = worst.map(|(_, text)| text);
        self.report.checks.push(Check::of(check, problem, || format!("{num_stages} stages")));
        Ok(())
    }
}

/// The lines of the stages, without a difference.
fn empty_stages(subject: &Subject, reference: &Reference) -> candle_core::Result<Vec<StageReport>> {
    let sums = differences(&reference.gradients, &subject.runner)?;
    let stage = |((name, params), bound): (&(String, Vec<usize>), &f64)| StageReport {
        name: name.clone(),
        component: params.first().map_or("", |index| subject.specs[*index].component.name),
        trained: params.iter().filter(|index| subject.is_trained(**index)).count(),
        frozen: params.iter().filter(|index| !subject.is_trained(**index)).count(),
        norm: joined(params, &sums).reference.sqrt(),
        differences: Vec::new(),
        bound: *bound,
        worst_tensor: String::new(),
        worst_difference: 0.0,
    };
    Ok(reference.stages.iter().zip(&reference.gradient_bounds).map(stage).collect())
}

/// The sums over the parameters of a stage.
fn joined(params: &[usize], sums: &[Option<Sums>]) -> Sums {
    let mut joined = Sums::default();
    params.iter().filter_map(|index| sums[*index]).for_each(|sums| joined += sums);
    joined
}

fn temporary_folder(parent: &Path) -> Result<TemporaryFolder, RunError> {
    TemporaryFolder::create(parent)
        .map_err(|(folder, problem)| RunError::TemporaryFolder { folder, problem })
}

/// Bound of the difference of a slope of the loss from the gradient, relative.
const SLOPE_BOUND: f64 = 0.01;

impl Verification<'_> {
    fn check_losses(
        &mut self,
        name: &str,
        laid_out: &[LaidOut],
        measured: &LayoutLosses,
        reference: &Reference,
    ) {
        let relative = |found: f64, expected: f64| {
            let difference = (found - expected).abs() / expected.abs().max(1.0);
            if difference.is_nan() { f64::INFINITY } else { difference }
        };
        let pairs = measured.samples.iter().zip(&reference.measured.samples);
        let of_rows = pairs.map(|(found, expected)| relative(found.mean(), expected.mean()));
        let worst = of_rows.enumerate().max_by(|x, y| x.1.total_cmp(&y.1));
        let (row, row_difference) = worst.unwrap_or_default();
        let line = LayoutReport {
            name: name.to_owned(),
            micro_batches: laid_out.len(),
            tokens: laid_out.iter().map(|of| of.batch.input_ids.len()).sum(),
            loss: measured.loss,
            difference: relative(measured.loss, reference.measured.loss),
            row_difference,
            row: if row_difference > 0.0 { self.rows.labels[row].clone() } else { String::new() },
            bound: reference.loss_bound,
        };
        let counts = self.rows.samples.iter().zip(&measured.samples).zip(&self.rows.labels);
        let miscounted = counts.into_iter().find_map(|((sample, found), label)| {
            let (found, expected) = (found.nll.len(), sample.num_targets());
            (found != expected).then(|| format!("{label}: {found} targets, expected {expected}"))
        });
        let (bound, difference) = (line.bound, line.difference);
        let problem = miscounted.or_else(|| {
            let text =
                |what: &str, off: f64| format!("{what}: off by {off:.1e}, bound {bound:.1e}");
            if difference > bound {
                let what = format!("{:.6} instead of {:.6}", line.loss, reference.measured.loss);
                Some(text(&what, difference))
            } else {
                (row_difference > bound).then(|| text(&line.row, row_difference))
            }
        });
        let targets = self.report.targets;
        let check = format!("{name}: the loss, and that of every row");
        self.report.checks.push(Check::of(check, problem, || format!("{targets} targets")));
        self.report.layouts.push(line);
    }

    fn check_places(&mut self, layout: Layout, laid_out: &[LaidOut]) {
        let problem = misplaced(laid_out, &self.rows.samples);
        let problem =
            problem.map(|(sample, problem)| format!("{}: {problem}", self.rows.labels[sample]));
        let check =
            format!("{}: tokens, labels, positions and segments of every row", layout.name());
        let rows = self.rows.samples.len();
        self.report.checks.push(Check::of(check, problem, || format!("{rows} rows")));
    }

    /// Every trained tensor received a finite gradient, and no frozen one has one.
    fn check_gradients(
        &mut self,
        subject: &Subject,
        reference: &Reference,
    ) -> Result<(), RunError> {
        let sums = differences(&reference.gradients, &subject.runner)?;
        let (mut trained, mut without, mut unexpected, mut unchecked) = (0, vec![], vec![], 0);
        for (index, spec) in subject.specs.iter().enumerate() {
            let norm = sums[index].map(|sums| sums.reference);
            match (subject.is_trained(index), norm) {
                (true, _) if subject.needs_media(index) && self.report.media == 0 => unchecked += 1,
                (true, Some(norm)) if norm > 0.0 && norm.is_finite() => trained += 1,
                (true, _) => without.push(spec.name.as_str()),
                (false, Some(_)) => unexpected.push(spec.name.as_str()),
                (false, None) => {}
            }
        }
        let list = |what: &str, names: &[&str]| {
            let more = if names.len() > 3 { ", .." } else { "" };
            let first = names.iter().take(3).copied().collect::<Vec<_>>().join(", ");
            (!names.is_empty()).then(|| format!("{} {what}: {first}{more}", names.len()))
        };
        let problem = list("trained tensors without a finite gradient", &without)
            .or_else(|| list("frozen tensors with a gradient", &unexpected));
        let frozen = subject.specs.len() - trained - unchecked;
        let name = "every trained tensor has a gradient, and no frozen one";
        self.report.checks.push(Check::of(name, problem, || {
            let images = if unchecked > 0 {
                format!(", {unchecked} not checked: no row has images")
            } else {
                String::new()
            };
            format!("{trained} trained, {frozen} frozen{images}")
        }));
        Ok(())
    }

    /// The loss changes along the gradient of each component as the gradient says.
    fn check_slopes(
        &mut self,
        subject: &Subject,
        gradients: &[Option<Tensor>],
        loss: f64,
    ) -> Result<(), RunError> {
        let name = "gradients are derivatives of the loss, in f32";
        let is_dora = |spec: &ParamSpec| {
            matches!(AdapterTensor::of(&spec.name), Some((AdapterTensor::Magnitude, _)))
        };
        let reason = if subject.specs.iter().any(is_dora) {
            Some("DoRA takes row norms as constants")
        } else if subject.specs.iter().any(ParamSpec::is_experts) {
            Some("the loss jumps where a token changes its experts")
        } else {
            (loss < MIN_LOSS).then_some("the loss is too small for differences in f32")
        };
        if let Some(reason) = reason {
            self.report.checks.push(Check::skipped(name, reason));
            return Ok(());
        }
        tracing::info!("changing the weights along the gradient");
        let num_samples = self.rows.samples.len();
        let (_, laid_out) = &self.others[0];
        let found = derivatives(self.pipeline, subject, gradients, laid_out, (num_samples, loss))?;
        let off = |of: &Derivative| {
            let off = (of.slope / of.norm - 1.0).abs();
            if off.is_nan() { f64::INFINITY } else { off }
        };
        let text = |of: &Derivative| format!("{} off by {:.1e}", of.component, off(of));
        let wrong = found.iter().find(|of| off(of) > SLOPE_BOUND).map(text);
        let problem = wrong.map(|wrong| format!("{wrong}, bound {SLOPE_BOUND}"));
        self.report.checks.push(Check::of(name, problem, || {
            found.iter().map(text).collect::<Vec<_>>().join(", ")
        }));
        Ok(())
    }
}
