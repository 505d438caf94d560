//! Signs of trouble in the recent steps: values far outside of their range, a loss above its start,
//! and steps in a row that updated nothing.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Number of recent steps that a step is compared with.
const WINDOW: usize = 64;
/// Minimum number of recent steps for a comparison.
const MIN_STEPS: usize = 20;
/// Number of first steps whose mean loss is the start of the run.
const FIRST_STEPS: usize = 10;
/// The start is at most this many times the first loss: a run may diverge within its first steps,
/// and their mean would then hide it.
const MOST_OF_FIRST: f64 = 1.5;
/// Number of steps after which a loss above its start is a divergence.
const LONG: u64 = 100;

/// Losses and gradient norms of the recent steps. Checkpoints contain it, so that a resumed run
/// gives the same warnings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    /// Losses of the last steps. `f32`, whose decimal form is exact when it is read again.
    losses: VecDeque<f32>,
    /// Of the last steps.
    grad_norms: VecDeque<f32>,
    /// Losses of the first steps of the run.
    first: Vec<f32>,
    /// Number of steps in a row after which the mean loss of the window was above that of the first
    /// steps.
    above: u64,
    skipped_in_a_row: u64,
    skipped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spike {
    /// `loss` or `grad_norm`.
    pub name: &'static str,
    pub value: f64,
    /// Median of the recent steps.
    pub usual: f64,
}

/// Losses at the start and in the last steps of a run that diverges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divergence {
    /// Mean loss of the first steps, at most 1.5 times the first loss.
    pub first: f64,
    /// Mean loss of the recent steps.
    pub now: f64,
    /// Whether this step is the one at which it is noticed.
    pub is_new: bool,
}

impl Health {
    /// Adds the results of a step that updated the weights. Returns the values far above those of
    /// the recent steps.
    pub fn add(&mut self, loss: f64, grad_norm: f64) -> Vec<Spike> {
        self.skipped_in_a_row = 0;
        let values = [
            ("loss", loss, &mut self.losses, Limit { spread: 8.0, factor: 1.5, floor: 0.2 }),
            (
                "grad_norm",
                grad_norm,
                &mut self.grad_norms,
                Limit { spread: 12.0, factor: 5.0, floor: 1.0 },
            ),
        ];
        let mut spikes = Vec::new();
        for (name, value, recent, limit) in values {
            let usual = limit.is_exceeded(value, recent);
            spikes.extend(usual.map(|usual| Spike { name, value, usual }));
            push(recent, narrow(value));
        }
        if self.first.len() < FIRST_STEPS {
            self.first.push(narrow(loss));
        }
        let is_above = self.means().is_some_and(|[first, now]| now > first);
        self.above = if is_above { self.above + 1 } else { 0 };
        spikes
    }

    /// Counts a step that updated nothing; returns the number of such steps in a row.
    pub fn skip(&mut self) -> u64 {
        self.skipped += 1;
        self.skipped_in_a_row += 1;
        self.skipped_in_a_row
    }

    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Whether the mean loss of the recent steps has been above that of the first steps for long.
    pub fn divergence(&self) -> Option<Divergence> {
        let [first, now] = self.means().filter(|_| self.above >= LONG)?;
        Some(Divergence { first, now, is_new: self.above == LONG })
    }

    /// Loss at the start of the run, and mean loss of the recent steps.
    fn means(&self) -> Option<[f64; 2]> {
        let mean = |values: &mut dyn Iterator<Item = &f32>, count: usize| {
            values.map(|value| f64::from(*value)).sum::<f64>() / count as f64
        };
        (self.losses.len() == WINDOW).then(|| {
            let start = mean(&mut self.first.iter(), self.first.len());
            let most = MOST_OF_FIRST * f64::from(self.first[0]);
            [start.min(most), mean(&mut self.losses.iter(), self.losses.len())]
        })
    }
}

/// When a value is far above its recent range: above the median by `spread` times the scaled median
/// deviation, above `factor` times the median, and above it by `floor`.
struct Limit {
    spread: f64,
    factor: f64,
    floor: f64,
}

impl Limit {
    /// The median of the recent values if `value` is far above them.
    fn is_exceeded(&self, value: f64, recent: &VecDeque<f32>) -> Option<f64> {
        if recent.len() < MIN_STEPS {
            return None;
        }
        let usual = median(recent.iter().map(|value| f64::from(*value)));
        // 1.4826: the standard deviation of a normal distribution
        let deviation =
            1.4826 * median(recent.iter().map(|value| (f64::from(*value) - usual).abs()));
        let limits = [usual + self.spread * deviation, self.factor * usual, usual + self.floor];
        limits.into_iter().all(|limit| value > limit).then_some(usual)
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// A finite `f32`: JSON has no infinity, so a checkpoint with one could not be read again.
fn narrow(value: f64) -> f32 {
    value.clamp(f32::MIN.into(), f32::MAX.into()) as f32
}

fn push(recent: &mut VecDeque<f32>, value: f32) {
    if recent.len() == WINDOW {
        recent.pop_front();
    }
    recent.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss that falls with noise.
    fn usual(step: u64) -> f64 {
        2.0 / (1.0 + step as f64 / 50.0) + 0.05 * ((step * 7) % 5) as f64
    }

    fn after(steps: u64) -> Health {
        let mut health = Health::default();
        for step in 0..steps {
            assert_eq!(health.add(usual(step), 1.0 + usual(step)), [], "step {step}");
        }
        health
    }

    #[test]
    fn a_loss_far_above_the_recent_ones_is_a_spike() {
        let spikes = after(100).add(5.0, 1.0);
        assert_eq!(spikes.iter().map(|spike| spike.name).collect::<Vec<_>>(), ["loss"]);
        assert!(spikes[0].usual < 2.0 && spikes[0].value == 5.0);
    }

    #[test]
    fn a_gradient_far_above_the_recent_ones_is_a_spike() {
        let spikes = after(100).add(usual(100), 400.0);
        assert_eq!(spikes.iter().map(|spike| spike.name).collect::<Vec<_>>(), ["grad_norm"]);
    }

    #[test]
    fn the_first_steps_have_no_spike() {
        assert_eq!(after(10).add(50.0, 500.0), []);
    }

    #[test]
    fn a_loss_above_its_start_for_long_is_a_divergence_that_is_noticed_once() {
        let mut health = after(100);
        assert_eq!(health.divergence(), None);
        let mut noticed = 0;
        for _ in 0..400 {
            health.add(9.0, 1.0);
            noticed += u64::from(health.divergence().is_some_and(|found| found.is_new));
        }
        assert_eq!(noticed, 1);
        assert!(health.divergence().unwrap().now > 8.9);
        for _ in 0..70 {
            health.add(0.1, 1.0);
        }
        assert_eq!(health.divergence(), None);
    }

    #[test]
    fn a_run_that_diverges_within_its_first_steps_is_noticed() {
        let mut health = Health::default();
        let losses = [2.0, 3.0, 9.0, 30.0].into_iter().chain(std::iter::repeat(9.0));
        for loss in losses.take(WINDOW + LONG as usize) {
            health.add(loss, 1.0);
        }
        assert_eq!(health.divergence().unwrap().first, 3.0);
    }

    #[test]
    fn skipped_steps_in_a_row_are_counted_until_one_updates() {
        let mut health = Health::default();
        assert_eq!([health.skip(), health.skip()], [1, 2]);
        health.add(1.0, 1.0);
        assert_eq!((health.skip(), health.skipped()), (1, 3));
    }

    #[test]
    fn values_beyond_f32_can_be_read_again() {
        let mut health = Health::default();
        health.add(1e39, 1e300); // finite
        let text = serde_json::to_string(&health).unwrap();
        assert_eq!(serde_json::from_str::<Health>(&text).unwrap(), health);
    }

    #[test]
    fn it_is_equal_after_writing_and_reading() {
        let health = after(90);
        let text = serde_json::to_string(&health).unwrap();
        assert_eq!(serde_json::from_str::<Health>(&text).unwrap(), health);
    }
}
