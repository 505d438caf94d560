//! Checks of a verification: what affects the loss of a row, gradients against the change of the
//! loss, and a run that is stopped and resumed against one that is not.
//!
//! Along the gradient `g` of a component, `loss(w + h g) - loss(w - h g) = 2 h |g|^2` up to terms
//! of third order in `h`. Two values of `h` cancel these.

use super::super::build::{Run, RunOptions};
use super::difference::{LayoutLosses, SampleLosses, forward};
use super::layouts::{LaidOut, Layout, Place, Rows, lay_out};
use super::report::Check;
use super::subject::{Pipeline, Subject};
use crate::batch::{EncodedSample, IGNORE_INDEX};
use crate::checkpoint::Checkpointer;
use crate::config::RunConfig;
use crate::files;
use crate::metrics::{EvalMetrics, StepMetrics};
use crate::run::RunError;
use crate::train::{EvalConfig, Observer};
use candle_core::Tensor;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Factor by which the check of a stage changes its parameters.
const FACTOR: f64 = 1.5;

/// The rows, and the parts of a run that compute them.
pub(super) struct Effects<'a> {
    pub(super) pipeline: &'a dyn Pipeline,
    pub(super) subject: &'a Subject,
    pub(super) rows: &'a Rows,
    pub(super) packing_length: NonZeroU32,
}

impl Effects<'_> {
    pub(super) fn checks(&self) -> Result<Vec<Check>, RunError> {
        let samples: Vec<EncodedSample> = self.rows.samples.iter().map(supervised).collect();
        let laid_out = self.packed(&samples)?;
        let before = self.forward(&laid_out, samples.len())?;
        Ok(vec![
            self.targets(&samples, &before),
            self.isolation(&samples, &laid_out, &before)?,
            self.pixels()?,
            self.stages()?,
        ])
    }

    fn packed(&self, samples: &[EncodedSample]) -> Result<Vec<LaidOut>, RunError> {
        let mut laid_out = lay_out(Layout::Packed, samples, self.rows, self.packing_length)?;
        let (batches, places): (Vec<_>, Vec<_>) =
            laid_out.drain(..).map(|of| (of.batch, of.places)).unzip();
        let batches = self.pipeline.batches(Layout::Packed, batches);
        let join = |(batch, places)| LaidOut { batch, places };
        Ok(batches.into_iter().zip(places).map(join).collect())
    }

    fn forward(&self, laid_out: &[LaidOut], num_samples: usize) -> Result<LayoutLosses, RunError> {
        forward(self.pipeline, &self.subject.runner, laid_out, num_samples)
    }

    /// With every token supervised, each token but the first of a segment is a target.
    fn targets(&self, samples: &[EncodedSample], found: &LayoutLosses) -> Check {
        let counts = samples.iter().zip(&found.samples);
        let wrong = counts.zip(&self.rows.labels).find_map(|((sample, found), label)| {
            let (expected, found) = (sample.num_targets(), found.nll.len());
            (found != expected).then(|| format!("{label}: {found} targets, expected {expected}"))
        });
        let name = "no target crosses rows, with every token supervised";
        let total: usize = samples.iter().map(EncodedSample::num_targets).sum();
        Check::of(name, wrong, || format!("{total} targets"))
    }

    /// Another first row, and then another last row of each pack, change no bit of the other
    /// losses.
    fn isolation(
        &self,
        samples: &[EncodedSample],
        laid_out: &[LaidOut],
        before: &LayoutLosses,
    ) -> Result<Check, RunError> {
        let name = "a row does not affect other rows of its pack";
        let rows = laid_out.iter().flat_map(|of| of.places.chunk_by(|a, b| a.row == b.row));
        let shared: Vec<&[Place]> = rows.filter(|places| places.len() > 1).collect();
        if shared.is_empty() {
            return Ok(Check::skipped(name, "no pack has two rows"));
        }
        for end in [<[Place]>::first, <[Place]>::last] {
            let mut changed = samples.to_vec();
            let chosen: Vec<usize> =
                shared.iter().filter_map(|places| Some(end(places)?.sample)).collect();
            for sample in &chosen {
                disturb(&mut changed[*sample]);
            }
            let after = self.forward(&self.packed(&changed)?, samples.len())?;
            for (sample, label) in self.rows.labels.iter().enumerate() {
                let same = same_bits(&before.samples[sample], &after.samples[sample]);
                let has_targets = !before.samples[sample].nll.is_empty();
                let is_changed = has_targets && changed[sample] != samples[sample];
                if !chosen.contains(&sample) && !same {
                    let problem = format!("{label}: the loss changes with another row of its pack");
                    return Ok(Check::of(name, Some(problem), String::new));
                }
                if is_changed && same {
                    let problem =
                        format!("{label}: other tokens do not change the loss of the row");
                    return Ok(Check::of(name, Some(problem), String::new));
                }
            }
        }
        Ok(Check::of(name, None, || {
            format!("packs with several rows: {}; no bit changes", shared.len())
        }))
    }

    /// Other pixels of an image or video change the loss of its row.
    fn pixels(&self) -> Result<Check, RunError> {
        let name = "the pixels of each row affect its loss";
        let samples = &self.rows.samples;
        let with_media = |sample: &&usize| !samples[**sample].media.is_empty();
        let all: Vec<usize> = (0..samples.len()).collect();
        let Some(_) = all.iter().find(with_media) else {
            return Ok(Check::skipped(name, "no row has images or videos"));
        };
        let before = self.forward(&self.packed(samples)?, samples.len())?;
        let mut changed = samples.clone();
        for sample in &mut changed {
            for value in sample.media.iter_mut().flat_map(|media| &mut media.pixel_values) {
                *value = 0.3 - *value;
            }
        }
        let after = self.forward(&self.packed(&changed)?, samples.len())?;
        // an image after the last target affects no loss
        let seen = |sample: &&usize| {
            let sample = &samples[**sample];
            let last = sample.labels.iter().rposition(|label| *label != IGNORE_INDEX);
            sample.vision_rows.first().is_some_and(|row| Some(*row as usize) < last)
        };
        let seen: Vec<usize> = all.iter().filter(seen).copied().collect();
        let blind = seen.iter().find(|at| same_bits(&before.samples[**at], &after.samples[**at]));
        let problem =
            blind.map(|at| format!("{}: the loss does not change", self.rows.labels[*at]));
        Ok(Check::of(name, problem, || format!("{} rows with images or videos", seen.len())))
    }

    /// Other weights of a stage, trained or not, change the loss.
    fn stages(&self) -> Result<Check, RunError> {
        let name = "every stage of the model affects the loss";
        let samples = &self.rows.samples;
        let has_media = samples.iter().position(|sample| !sample.media.is_empty());
        let chosen = [samples[has_media.unwrap_or(0)].clone()].map(|sample| supervised(&sample));
        let laid_out = lay_out(Layout::OneByOne, &chosen, self.rows, self.packing_length)?;
        let before = self.forward(&laid_out, 1)?;
        let (mut checked, mut without) = (0, Vec::new());
        for (stage, params) in self.subject.stages() {
            let media = params.iter().any(|index| self.subject.needs_media(*index));
            if media && has_media.is_none() {
                continue;
            }
            let params = params.iter().map(|index| &self.subject.runner.params[*index]);
            let params: Vec<_> = params.filter(|param| param.is_resident()).collect();
            let tensors = params.iter().map(|param| param.tensor());
            let tensors = tensors.collect::<candle_core::Result<Vec<_>>>()?;
            for (param, tensor) in params.iter().zip(&tensors) {
                param.set_tensor((tensor * FACTOR)?)?;
            }
            let after = self.forward(&laid_out, 1);
            for (param, tensor) in params.iter().zip(tensors) {
                param.set_tensor(tensor)?;
            }
            checked += 1;
            if same_bits(&before.samples[0], &after?.samples[0]) {
                without.push(stage);
            }
        }
        let problem = (!without.is_empty()).then(|| format!("no effect: {}", without.join(", ")));
        let images =
            if has_media.is_none() { ", none of the vision encoder: no images" } else { "" };
        Ok(Check::of(name, problem, || format!("{checked} stages{images}")))
    }
}

/// The sample with every token supervised but those of images and videos.
fn supervised(sample: &EncodedSample) -> EncodedSample {
    let mut labels: Vec<i64> = sample.input_ids.iter().map(|id| i64::from(*id)).collect();
    for row in &sample.vision_rows {
        labels[*row as usize] = IGNORE_INDEX;
    }
    EncodedSample { labels, weights: None, ..sample.clone() }
}

/// Rotates the text of a sample by one token, and changes its pixels. Labels stay.
fn disturb(sample: &mut EncodedSample) {
    let is_text = |at: &usize| sample.vision_rows.binary_search(&(*at as u32)).is_err();
    let text: Vec<usize> = (0..sample.len()).filter(is_text).collect();
    let mut ids: Vec<u32> = text.iter().map(|at| sample.input_ids[*at]).collect();
    if !ids.is_empty() {
        ids.rotate_right(1);
    }
    for (at, id) in text.into_iter().zip(ids) {
        sample.input_ids[at] = id;
    }
    for value in sample.media.iter_mut().flat_map(|media| &mut media.pixel_values) {
        *value = 0.3 - *value;
    }
}

fn same_bits(one: &SampleLosses, other: &SampleLosses) -> bool {
    let bits = |of: &SampleLosses| of.nll.iter().map(|nll| nll.to_bits()).collect::<Vec<_>>();
    bits(one) == bits(other)
}

/// The change of the loss that the smaller of the two steps aims at; at most a tenth of the loss.
const CHANGE: f64 = 0.01;
/// The minimum loss: the rounding of smaller ones in f32 hides the change.
pub(super) const MIN_LOSS: f64 = 1e-3;

/// The derivative of the loss along the gradient of a component.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Derivative {
    pub(super) component: &'static str,
    pub(super) norm: f64,
    /// The slope of the loss; the norm, if the gradient is right.
    pub(super) slope: f64,
}

/// The derivatives of all components with a gradient in `gradients`.
pub(super) fn derivatives(
    pipeline: &dyn Pipeline,
    subject: &Subject,
    gradients: &[Option<Tensor>],
    laid_out: &[LaidOut],
    (num_samples, loss): (usize, f64),
) -> std::result::Result<Vec<Derivative>, RunError> {
    let mut components: Vec<&'static str> = Vec::new();
    for spec in &subject.specs {
        if !components.contains(&spec.component.name) {
            components.push(spec.component.name);
        }
    }
    let mut found = Vec::new();
    for component in components {
        let of = |index: &usize| subject.specs[*index].component.name == component;
        let trained: Vec<usize> =
            (0..gradients.len()).filter(of).filter(|index| gradients[*index].is_some()).collect();
        let norm = norm(&trained, gradients)?;
        if norm == 0.0 || !norm.is_finite() {
            continue; // another check reports it
        }
        let step = CHANGE.min(0.1 * loss) / (2.0 * norm);
        let slope = |distance: f64| {
            let at = |distance: f64| -> std::result::Result<f64, RunError> {
                let moved = Moved::along(subject, &trained, gradients, distance / norm)?;
                let losses = forward(pipeline, &subject.runner, laid_out, num_samples);
                moved.back()?;
                Ok(losses?.loss)
            };
            Ok::<_, RunError>((at(distance)? - at(-distance)?) / (2.0 * distance))
        };
        let (wide, narrow) = (slope(2.0 * step)?, slope(step)?);
        found.push(Derivative { component, norm, slope: (4.0 * narrow - wide) / 3.0 });
    }
    Ok(found)
}

fn norm(indexes: &[usize], gradients: &[Option<Tensor>]) -> candle_core::Result<f64> {
    let mut squares = 0.0;
    for gradient in indexes.iter().filter_map(|index| gradients[*index].as_ref()) {
        squares += crate::ops::sum_of_squares(&gradient.flatten_all()?)?;
    }
    Ok(squares.sqrt())
}

/// Parameters with other values.
struct Moved<'a> {
    subject: &'a Subject,
    before: Vec<(usize, Tensor)>,
}

impl<'a> Moved<'a> {
    /// Adds the gradients, times a factor.
    fn along(
        subject: &'a Subject,
        indexes: &[usize],
        gradients: &[Option<Tensor>],
        factor: f64,
    ) -> candle_core::Result<Self> {
        let mut before = Vec::new();
        for index in indexes {
            let param = &subject.runner.params[*index];
            let Some(gradient) = &gradients[*index] else { continue };
            let tensor = param.tensor()?;
            param.set_tensor((&tensor + (gradient * factor)?)?)?;
            before.push((*index, tensor));
        }
        Ok(Self { subject, before })
    }

    fn back(self) -> candle_core::Result<()> {
        let params = &self.subject.runner.params;
        self.before.into_iter().try_for_each(|(index, tensor)| params[index].set_tensor(tensor))
    }
}

/// The name of the check.
pub(super) const RESUMED: &str =
    "a run that is stopped and resumed equals one that is not, to the bit";
const STEPS: u64 = 4;
/// The step after which one of the runs stops.
const STOP_AFTER: u64 = 2;
/// Maximum number of micro-batches of a step.
const MICRO_BATCHES: usize = 2;

/// Trains a few steps of the config twice, once with a stop and a resume. Compares losses, gradient
/// norms, weights, optimizer state and the position in the data, all to the bit.
pub(super) fn resumed(config: &RunConfig, folder: &Path) -> Result<Check, RunError> {
    let mut config = config.clone();
    config.train.epochs = None;
    config.train.max_steps = NonZeroU64::new(STEPS);
    let most = NonZeroUsize::new(MICRO_BATCHES).unwrap_or(NonZeroUsize::MIN);
    let micro_batches = &mut config.train.gradient_accumulation_steps;
    *micro_batches = most.min(*micro_batches);
    (config.eval, config.checkpoint.every_steps) = (EvalConfig::default(), 0);
    (config.checkpoint.keep, config.checkpoint.best) = (NonZeroUsize::MIN, None);
    let whole = RunConfig { output_dir: folder.join("whole"), ..config.clone() };
    let parts = RunConfig { output_dir: folder.join("parts"), ..config };
    let mut expected = Steps::default();
    train(&whole, &mut expected)?;
    let mut found = Steps { stop_after: Some(STOP_AFTER), ..Steps::default() };
    train(&parts, &mut found)?;
    found.stop_after = None;
    train(&parts, &mut found)?;
    let problem = match expected.values.iter().zip(&found.values).find(|(x, y)| x != y) {
        Some((expected, _)) => {
            Some(format!("step {} has another loss or gradient norm", expected.0))
        }
        None if expected.values.len() != found.values.len() => {
            Some(format!("{} steps instead of {}", found.values.len(), expected.values.len()))
        }
        None => {
            let (expected, found) = (files(&whole)?, files(&parts)?);
            let differs = expected.iter().find(|(file, digest)| found.get(*file) != Some(digest));
            differs.map(|(file, _)| format!("`{file}` of the last checkpoint differs"))
        }
    };
    Ok(Check::of(RESUMED, problem, || {
        format!("{STEPS} steps, stopped after {STOP_AFTER}: losses, weights and optimizer state")
    }))
}

fn train(config: &RunConfig, steps: &mut Steps) -> Result<(), RunError> {
    steps.stop = Arc::default();
    let options =
        RunOptions { stop: Arc::clone(&steps.stop), evaluates: false, ..RunOptions::default() };
    Run::with_options(config, &options)?.train(steps)?;
    Ok(())
}

/// Records the steps of a run, and stops it.
#[derive(Default)]
struct Steps {
    /// Number, loss and gradient norm of each step, in bits.
    values: Vec<(u64, u64, u64)>,
    stop_after: Option<u64>,
    stop: Arc<AtomicBool>,
}

impl Observer for Steps {
    fn step(&mut self, metrics: &StepMetrics, _: u64) {
        let StepMetrics { step, loss, grad_norm, .. } = metrics;
        self.values.push((*step, loss.to_bits(), grad_norm.to_bits()));
        if self.stop_after == Some(*step) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn evaluating(&mut self, _: usize, _: usize) {}

    fn evaluated(&mut self, _: &EvalMetrics) {}
}

/// Digests of the tensor files and of the training state of the last checkpoint.
fn files(config: &RunConfig) -> Result<BTreeMap<String, String>, RunError> {
    let folder = Checkpointer::new(&config.output_dir, &config.checkpoint).step_folder(STEPS);
    let problem = |problem| RunError::TemporaryFolder { folder: folder.clone(), problem };
    let mut digests = BTreeMap::new();
    for entry in std::fs::read_dir(&folder).map_err(problem)? {
        let entry = entry.map_err(problem)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") || name == "trainer_state.json" {
            let mut digest = Sha256::new();
            let mut file = files::open(entry.path()).map_err(problem)?;
            io::copy(&mut file, &mut digest).map_err(problem)?;
            digests.insert(name, format!("{:x}", digest.finalize()));
        }
    }
    Ok(digests)
}
