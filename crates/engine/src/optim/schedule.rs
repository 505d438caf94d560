//! The learning rate as a pure function of the step.

use serde::{Deserialize, Serialize};
use settings::Choice;

/// How the learning rate changes after warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleConfig {
    /// Half a cosine from `lr` to `min_lr`.
    #[default]
    Cosine,
    /// Linear from `lr` to `min_lr`.
    Linear,
    /// Stays at `lr`.
    Constant,
    /// Stays at `lr`, then linear to `min_lr` in the last part of the run (warm-up, stable, decay).
    Wsd,
}

/// Length of a part of the schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Span {
    /// Optimizer steps.
    Steps(u64),
    /// Fraction of all steps, rounded up.
    Ratio(f64),
}

impl Span {
    fn steps(self, total_steps: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Ratio(ratio) => (ratio * total_steps as f64).ceil() as u64,
        }
    }
}

/// Learning rate of each optimizer step.
///
/// Decay reaches `min_lr` after the last step, so that every step of a run trains. Transformers'
/// schedules have the same rates after warm-up; the first step of their warm-up has rate 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    shape: ScheduleConfig,
    lr: f64,
    min_lr: f64,
    warmup_steps: u64,
    decay_start: u64, // number of steps before the decay
    total_steps: u64,
}

impl Schedule {
    /// `total_steps` is the number of optimizer steps of the whole run. `decay` is used by
    /// [`ScheduleConfig::Wsd`] only; the other shapes decay from the end of warm-up.
    pub fn new(
        shape: ScheduleConfig,
        [lr, min_lr]: [f64; 2],
        [warmup, decay]: [Span; 2],
        total_steps: u64,
    ) -> Self {
        let warmup_steps = warmup.steps(total_steps);
        let decay_start = match shape {
            ScheduleConfig::Wsd => {
                total_steps.saturating_sub(decay.steps(total_steps)).max(warmup_steps)
            }
            _ => warmup_steps,
        };
        Self { shape, lr, min_lr, warmup_steps, decay_start, total_steps }
    }

    /// Learning rate of step `step`, counted from 1.
    pub fn lr(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return self.lr * step as f64 / self.warmup_steps as f64;
        }
        let done = step.saturating_sub(1 + self.decay_start) as f64;
        let steps = self.total_steps.saturating_sub(self.decay_start).max(1) as f64;
        // A run can be longer than planned if a row fails late: the rate stays at its end value.
        let p = (done / steps).min(1.0);
        let range = self.lr - self.min_lr;
        match self.shape {
            ScheduleConfig::Constant => self.lr,
            ScheduleConfig::Linear | ScheduleConfig::Wsd => self.min_lr + range * (1.0 - p),
            ScheduleConfig::Cosine => {
                self.min_lr + range * (1.0 + (std::f64::consts::PI * p).cos()) / 2.0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lrs(shape: ScheduleConfig, min_lr: f64, spans: [Span; 2], total: u64) -> Vec<f64> {
        let schedule = Schedule::new(shape, [1.0, min_lr], spans, total);
        (1..=total).map(|step| schedule.lr(step)).collect()
    }

    const NO_WARMUP: [Span; 2] = [Span::Steps(0), Span::Ratio(0.1)];

    #[test]
    fn every_step_of_every_schedule_trains() {
        use ScheduleConfig::{Constant, Cosine, Linear, Wsd};
        for shape in [Cosine, Linear, Constant, Wsd] {
            for total in [1, 2, 3, 10] {
                for warmup in 0..=total {
                    let spans = [Span::Steps(warmup), Span::Ratio(0.5)];
                    let lrs = lrs(shape, 0.0, spans, total);
                    assert!(
                        lrs.iter().all(|lr| *lr > 0.0),
                        "{shape:?}, {warmup} of {total} steps of warm-up: {lrs:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn warm_up_rises_to_the_peak_and_cosine_falls_towards_the_minimum() {
        let schedule =
            Schedule::new(ScheduleConfig::Cosine, [1.0, 0.1], [Span::Steps(4), Span::Steps(0)], 12);
        let lrs: Vec<f64> = (1..=12).map(|step| schedule.lr(step)).collect();
        assert_eq!(lrs[..5], [0.25, 0.5, 0.75, 1.0, 1.0]);
        assert!((lrs[8] - 0.55).abs() < 1e-12, "half way: {}", lrs[8]);
        assert!(lrs[11] > 0.1 && (schedule.lr(13) - 0.1).abs() < 1e-12, "the end: {lrs:?}");
        assert!((schedule.lr(14) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn linear_falls_by_equal_steps_and_constant_stays() {
        let linear = lrs(ScheduleConfig::Linear, 0.0, NO_WARMUP, 4);
        assert_eq!(linear, [1.0, 0.75, 0.5, 0.25]);
        let constant = [Span::Steps(2), Span::Steps(0)];
        assert_eq!(lrs(ScheduleConfig::Constant, 0.0, constant, 4), [0.5, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn wsd_stays_at_the_peak_and_falls_in_its_last_steps() {
        let spans = [Span::Steps(2), Span::Ratio(0.4)];
        let expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25];
        assert_eq!(lrs(ScheduleConfig::Wsd, 0.0, spans, 10), expected);
        let all_decay = [Span::Steps(0), Span::Ratio(1.0)];
        let linear = lrs(ScheduleConfig::Linear, 0.2, NO_WARMUP, 7);
        assert_eq!(lrs(ScheduleConfig::Wsd, 0.2, all_decay, 7), linear);
    }

    /// transformers 5.23: `get_cosine_schedule_with_warmup(optimizer, 3, 8)`, and the same with
    /// `linear`: `lr_lambda(step)` for the steps 3 to 7, counted from 0.
    #[test]
    fn after_warm_up_the_rates_are_those_of_transformers() {
        let cosine =
            [1.0, 0.9045084971874737, 0.6545084971874737, 0.34549150281252633, 0.09549150281252633];
        let linear = [1.0, 0.8, 0.6, 0.4, 0.2];
        let spans = [Span::Steps(3), Span::Steps(0)];
        for (shape, expected) in
            [(ScheduleConfig::Cosine, cosine), (ScheduleConfig::Linear, linear)]
        {
            for (lr, expected) in lrs(shape, 0.0, spans, 8)[3..].iter().zip(expected) {
                assert!((lr - expected).abs() < 1e-15, "{shape:?}: {lr} {expected}");
            }
        }
    }

    #[test]
    fn a_ratio_is_rounded_up_to_steps() {
        let of = |span, total| lrs(ScheduleConfig::Constant, 0.0, [span, Span::Steps(0)], total);
        assert_eq!(of(Span::Ratio(0.03), 100), of(Span::Steps(3), 100));
        assert_eq!(of(Span::Ratio(0.03), 34)[..3], [0.5, 1.0, 1.0]);
    }
}
