//! Counts and losses of a step and of a run by data set.

use super::step_result::SampleResult;
use crate::data::{DataState, Rejection, SampleCounts};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::AddAssign;
use tracing::field::display;

/// Number of samples, tokens, targets and media of a data set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DatasetCounts {
    pub num_samples: u64,
    pub num_tokens: u64,
    pub num_target_tokens: u64,
    pub num_images: u64,
    pub num_videos: u64,
    /// Number of samples with at least one image or video.
    pub num_with_media: u64,
}

impl DatasetCounts {
    pub fn of(sample: &SampleCounts) -> Self {
        Self {
            num_samples: 1,
            num_tokens: sample.num_tokens.into(),
            num_target_tokens: sample.num_targets.into(),
            num_images: sample.num_images.into(),
            num_videos: sample.num_videos.into(),
            num_with_media: (sample.num_images + sample.num_videos > 0).into(),
        }
    }

    /// Share of the samples that have an image or a video, in percent.
    pub fn percent_with_media(&self) -> f64 {
        100.0 * self.num_with_media as f64 / self.num_samples.max(1) as f64
    }
}

impl AddAssign for DatasetCounts {
    fn add_assign(&mut self, other: Self) {
        self.num_samples += other.num_samples;
        self.num_tokens += other.num_tokens;
        self.num_target_tokens += other.num_target_tokens;
        self.num_images += other.num_images;
        self.num_videos += other.num_videos;
        self.num_with_media += other.num_with_media;
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DatasetLoss {
    pub counts: DatasetCounts,
    /// Sum of the negative log likelihoods of its targets, each multiplied by its weight.
    pub nll_sum: f64,
    pub target_weight: f64,
}

impl DatasetLoss {
    /// Weighted mean over its targets; `None` without targets.
    pub fn loss(&self) -> Option<f64> {
        (self.counts.num_target_tokens > 0).then(|| self.nll_sum / self.target_weight)
    }
}

/// Counts of rejected rows and texts, as `metrics.jsonl` reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rejected {
    /// Number of rejections for each reason.
    pub by_reason: BTreeMap<String, u64>,
    /// Number of rejections for each data file and reason.
    pub by_file: BTreeMap<String, BTreeMap<String, u64>>,
}

impl Rejected {
    /// Counts rejected corpus texts once, because they are read before the first step.
    pub fn of_texts<'a>(texts: impl IntoIterator<Item = &'a Rejection>) -> Self {
        let mut counts = DataState::default();
        for Rejection { file, reason, .. } in texts {
            counts.count(file, reason, 1);
        }
        Self { by_reason: counts.rejected, by_file: counts.rejected_by_file }
    }

    /// Adds the rejected rows of a run whose position in the data is `data`.
    #[must_use]
    pub fn with_rows(&self, data: &DataState) -> Self {
        let mut counts = self.clone();
        add(&mut counts.by_reason, &data.rejected);
        for (file, reasons) in &data.rejected_by_file {
            add(counts.by_file.entry(file.clone()).or_default(), reasons);
        }
        counts
    }

    pub fn total(&self) -> u64 {
        self.by_reason.values().sum()
    }
}

fn add(counts: &mut BTreeMap<String, u64>, more: &BTreeMap<String, u64>) {
    for (reason, count) in more {
        *counts.entry(reason.clone()).or_default() += count;
    }
}

/// Adds up the results of `samples` by data set.
pub(super) fn by_dataset<'a>(
    num_datasets: usize,
    samples: impl IntoIterator<Item = &'a SampleResult>,
) -> Vec<DatasetLoss> {
    let mut sets = vec![DatasetLoss::default(); num_datasets];
    for sample in samples {
        let set = &mut sets[sample.size.dataset as usize];
        set.counts += DatasetCounts::of(&sample.size);
        set.nll_sum += sample.nll_sum;
        set.target_weight += sample.target_weight;
    }
    sets
}

/// Keys of `metrics.jsonl` and `eval.jsonl`: `loss/NAME`, `num_samples/NAME` and so on. Empty for a
/// single data set, whose values equal those of the whole row.
pub fn metric_keys(names: &[String], sets: &[DatasetLoss]) -> BTreeMap<String, Value> {
    let mut keys = BTreeMap::new();
    if names.len() < 2 {
        return keys;
    }
    for (name, set) in names.iter().zip(sets) {
        let counts = &set.counts;
        keys.insert(format!("loss/{name}"), set.loss().into());
        keys.insert(format!("num_samples/{name}"), counts.num_samples.into());
        keys.insert(format!("num_tokens/{name}"), counts.num_tokens.into());
        keys.insert(format!("num_target_tokens/{name}"), counts.num_target_tokens.into());
    }
    keys
}

pub(super) fn count(
    seen: &mut BTreeMap<String, DatasetCounts>,
    names: &[String],
    sets: &[DatasetLoss],
) {
    for (name, set) in names.iter().zip(sets) {
        *seen.entry(name.clone()).or_default() += set.counts;
    }
}

/// Logs one line per data set that begins with `what`: its counts, and its share of all rows if
/// there are several.
pub fn log_datasets(what: &str, seen: &BTreeMap<String, DatasetCounts>) {
    let total: u64 = seen.values().map(|counts| counts.num_samples).sum();
    for (name, counts) in seen {
        let share = 100.0 * counts.num_samples as f64 / total.max(1) as f64;
        let share = (seen.len() > 1).then(|| display(format!("{share:.1}%")));
        tracing::info!(
            %name,
            share,
            rows = counts.num_samples,
            images = counts.num_images,
            videos = Some(counts.num_videos).filter(|videos| *videos > 0),
            tokens = counts.num_tokens,
            targets = counts.num_target_tokens,
            "{what}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::step_result::by_sample;
    use super::*;
    use crate::loss::TargetLosses;

    fn size(dataset: u32, num_tokens: u32, num_targets: u32) -> SampleCounts {
        SampleCounts {
            dataset,
            row: 0,
            num_tokens,
            num_targets,
            num_images: dataset * num_tokens,
            num_videos: 0,
        }
    }

    #[test]
    fn losses_go_to_the_data_sets_of_their_samples() {
        let samples = [size(1, 5, 2), size(0, 4, 0), size(0, 3, 1), size(1, 9, 1)];
        // the second micro-batch had no targets and so no entry
        let losses = [vec![1.0, 2.0], vec![4.0, 8.0]];
        let losses = losses.map(|nll| TargetLosses { nll, weights: None });
        let sets = by_dataset(3, &by_sample(&samples, &losses));
        assert_eq!(sets.iter().map(|set| set.nll_sum).collect::<Vec<_>>(), [4.0, 11.0, 0.0]);
        let names = ["a", "b", "c"].map(str::to_owned);
        let keys = serde_json::to_value(metric_keys(&names, &sets)).unwrap();
        let expected = serde_json::json!({
            "loss/a": 4.0, "num_samples/a": 2, "num_tokens/a": 7, "num_target_tokens/a": 1,
            "loss/b": 11.0 / 3.0, "num_samples/b": 2, "num_tokens/b": 14, "num_target_tokens/b": 3,
            "loss/c": null, "num_samples/c": 0, "num_tokens/c": 0, "num_target_tokens/c": 0,
        });
        assert_eq!(keys, expected);
        assert!(metric_keys(&names[..1], &sets[..1]).is_empty());
        let mut seen = BTreeMap::new();
        count(&mut seen, &names, &sets);
        count(&mut seen, &names, &sets);
        let counts = DatasetCounts {
            num_samples: 4,
            num_tokens: 28,
            num_target_tokens: 6,
            num_images: 28,
            num_videos: 0,
            num_with_media: 4,
        };
        assert_eq!(seen["b"], counts);
    }

    #[test]
    fn the_loss_of_a_data_set_is_the_mean_under_its_weights() {
        let losses = [
            TargetLosses { nll: vec![1.0, 2.0], weights: Some(vec![3.0, 0.5]) },
            TargetLosses { nll: vec![5.0], weights: None },
        ];
        let samples = [size(1, 5, 2), size(0, 3, 1)];
        let sets = by_dataset(2, &by_sample(&samples, &losses));
        assert_eq!(sets[1].loss(), Some((1.0 * 3.0 + 2.0 * 0.5) / 3.5));
        assert_eq!(sets[0].loss(), Some(5.0));
        assert_eq!(sets[1].counts.num_target_tokens, 2);
    }
}
