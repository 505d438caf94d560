//! The whole config: composes the section structs, checks them against each other.

mod de;
mod error;
mod excerpt;
mod fault;
mod load;
mod nearest;
mod scalar;
mod set;
mod tree;

pub use error::{ConfigError, Place};
pub use load::{load, to_yaml};

use crate::checkpoint::CheckpointConfig;
use crate::data::DataConfig;
use crate::optim::OptimConfig;
use crate::train::{EvalConfig, LogConfig, ModelSection, TrainConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A run, as YAML says it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Folder of everything that the run writes.
    pub output_dir: PathBuf,
    /// Seed of the row order and of random weights.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Which model, and how it computes.
    pub model: ModelSection,
    /// What it is trained and evaluated on.
    pub data: DataConfig,
    /// How much goes into a step, and how many steps there are.
    #[serde(default)]
    pub train: TrainConfig,
    /// AdamW and its learning rates.
    #[serde(default)]
    pub optim: OptimConfig,
    /// When state goes to disk.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// When the eval data is scored.
    #[serde(default)]
    pub eval: EvalConfig,
    /// How often a step is reported.
    #[serde(default)]
    pub log: LogConfig,
}

fn default_seed() -> u64 {
    42
}

/// A value that its type allows and its meaning does not.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("`{key}` is {found}: it must be {expected}")]
pub struct ValueError {
    /// Dotted key.
    pub key: &'static str,
    /// As given.
    pub found: String,
    /// What would do.
    pub expected: &'static str,
}

impl RunConfig {
    /// Checks what types cannot.
    pub fn check(&self) -> Result<(), ValueError> {
        let optim = &self.optim;
        let rule = |holds: bool, key, found: &dyn ToString, expected| {
            if holds { Ok(()) } else { Err(ValueError { key, found: found.to_string(), expected }) }
        };
        let finite = |x: f64| x.is_finite() && x >= 0.0;
        rule(finite(optim.lr), "optim.lr", &optim.lr, "finite and not negative")?;
        for (key, beta) in [("optim.betas[0]", optim.betas[0]), ("optim.betas[1]", optim.betas[1])] {
            rule((0.0..1.0).contains(&beta), key, &beta, "at least 0 and below 1")?;
        }
        rule(optim.eps.is_finite() && optim.eps > 0.0, "optim.eps", &optim.eps, "above 0")?;
        let decay = optim.weight_decay;
        rule(finite(decay), "optim.weight_decay", &decay, "finite and not negative")?;
        let min_lr = optim.min_lr;
        rule(finite(min_lr) && min_lr <= optim.lr, "optim.min_lr", &min_lr, "between 0 and `optim.lr`")?;
        if let Some(ratio) = optim.warmup_ratio {
            rule((0.0..=1.0).contains(&ratio), "optim.warmup_ratio", &ratio, "between 0 and 1")?;
            let both = optim.warmup_steps.is_some();
            rule(!both, "optim.warmup_ratio", &ratio, "absent when `optim.warmup_steps` is given")?;
        }
        let norm = self.train.max_grad_norm;
        rule(finite(norm), "train.max_grad_norm", &norm, "finite and not negative (0: no clipping)")?;
        Ok(())
    }

    /// Hash of what decides the result: a checkpoint of another fingerprint is of another run.
    ///
    /// Left out is what changes no number (where files lie, `use_rmpad`, `attention`, `recompute`,
    /// workers, how many rejected rows stop it, eval, logs, checkpoints) and how long the run is.
    pub fn fingerprint(&self) -> String {
        use sha2::{Digest, Sha256};
        let mut same = self.clone();
        let neutral = ModelSection {
            use_rmpad: true,
            attention: crate::train::AttentionChoice::Auto,
            recompute: crate::train::RecomputeChoice::None,
            ..same.model
        };
        same.model = neutral;
        same.output_dir = PathBuf::new();
        same.checkpoint = CheckpointConfig::default();
        same.eval = EvalConfig::default();
        same.log = LogConfig::default();
        same.data.eval.clear();
        same.data.workers = std::num::NonZeroUsize::MIN;
        (same.data.on_error, same.data.max_rejected) = (crate::data::OnError::Skip, 1.0);
        (same.train.epochs, same.train.max_steps) = (None, None);
        let json = serde_json::to_string(&same).expect("a config of plain values");
        let hash = Sha256::digest(json.as_bytes());
        hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }
}
