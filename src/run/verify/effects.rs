//! What affects the loss of a row: its own tokens and pixels, every stage of the model, and nothing
//! of other rows.

use super::difference::{Measured, SampleLosses, forward};
use super::layouts::{LaidOut, Layout, Place, lay_out};
use super::pipeline::Pipeline;
use super::report::Check;
use super::rows::Rows;
use super::subject::Subject;
use crate::batch::{EncodedSample, IGNORE_INDEX};
use crate::run::RunError;
use std::num::NonZeroU32;

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

    fn forward(&self, laid_out: &[LaidOut], num_samples: usize) -> Result<Measured, RunError> {
        forward(self.pipeline, &self.subject.runner, laid_out, num_samples)
    }

    /// With every token supervised, each token but the first of a segment is a target.
    fn targets(&self, samples: &[EncodedSample], found: &Measured) -> Check {
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
        before: &Measured,
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
            let tensors: Vec<_> = params.iter().map(|param| param.tensor()).collect();
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
