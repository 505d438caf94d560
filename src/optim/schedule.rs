//! The learning rate as a pure function of the step.

use serde::{Deserialize, Serialize};

/// How the learning rate changes after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleConfig {
    /// Half a cosine from `lr` to `min_lr`.
    Cosine,
    /// Linear from `lr` to `min_lr`.
    Linear,
    /// Stays at `lr`.
    Constant,
}

/// Length of the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// Optimizer steps.
    Steps(u64),
    /// Fraction of all steps, rounded up.
    Ratio(f64),
}

/// Learning rate of each optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    shape: ScheduleConfig,
    lr: f64,
    min_lr: f64,
    warmup_steps: u64,
    total_steps: u64,
}

impl Schedule {
    /// `total_steps` is the number of optimizer steps of the whole run.
    pub fn new(
        shape: ScheduleConfig,
        lr: f64,
        min_lr: f64,
        warmup: Warmup,
        total_steps: u64,
    ) -> Self {
        let warmup_steps = match warmup {
            Warmup::Steps(steps) => steps,
            Warmup::Ratio(ratio) => (ratio * total_steps as f64).ceil() as u64,
        };
        Self { shape, lr, min_lr, warmup_steps, total_steps }
    }

    /// Learning rate of step `step`, counted from 1.
    pub fn lr(&self, step: u64) -> f64 {
        let (s, w) = (step as f64, self.warmup_steps as f64);
        if step < self.warmup_steps {
            return self.lr * s / w;
        }
        // A run can be longer than planned if a row fails late: the rate stays at its end value.
        let p = ((s - w) / (self.total_steps as f64 - w).max(1.0)).min(1.0);
        let range = self.lr - self.min_lr;
        match self.shape {
            ScheduleConfig::Constant => self.lr,
            ScheduleConfig::Linear => self.min_lr + range * (1.0 - p),
            ScheduleConfig::Cosine => {
                self.min_lr + range * (1.0 + (std::f64::consts::PI * p).cos()) / 2.0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_rises_to_the_peak_and_cosine_ends_at_the_minimum() {
        let schedule = Schedule::new(ScheduleConfig::Cosine, 1.0, 0.1, Warmup::Steps(4), 12);
        let lrs: Vec<f64> = (1..=12).map(|step| schedule.lr(step)).collect();
        assert_eq!(lrs[..4], [0.25, 0.5, 0.75, 1.0]);
        assert!((lrs[7] - 0.55).abs() < 1e-12, "half way: {}", lrs[7]);
        assert!((lrs[11] - 0.1).abs() < 1e-12);
        assert!((schedule.lr(13) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn linear_falls_by_equal_steps_and_constant_stays() {
        let linear = Schedule::new(ScheduleConfig::Linear, 1.0, 0.0, Warmup::Steps(0), 4);
        assert_eq!([1, 2, 3, 4].map(|step| linear.lr(step)), [0.75, 0.5, 0.25, 0.0]);
        let constant = Schedule::new(ScheduleConfig::Constant, 1.0, 0.0, Warmup::Steps(2), 4);
        assert_eq!([1, 2, 3, 4].map(|step| constant.lr(step)), [0.5, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_ratio_is_rounded_up_to_steps() {
        let ratio = Schedule::new(ScheduleConfig::Constant, 1.0, 0.0, Warmup::Ratio(0.03), 100);
        let steps = Schedule::new(ScheduleConfig::Constant, 1.0, 0.0, Warmup::Steps(3), 100);
        assert_eq!(ratio, steps);
        let short = Schedule::new(ScheduleConfig::Constant, 1.0, 0.0, Warmup::Ratio(0.03), 34);
        assert!((short.lr(1) - 0.5).abs() < 1e-12);
    }
}
