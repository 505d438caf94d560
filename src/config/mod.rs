//! The config of a run: composed of the structs of its sections, read from YAML, and checked.

mod de;
mod error;
mod excerpt;
mod fault;
mod load;
mod nearest;
mod other_trainers;
mod scalar;
mod set;
mod tree;

pub use error::{ConfigError, Place};
pub use load::{load, refuse, to_yaml};
pub(crate) use load::{load_text, parse_tree, read_tree};
pub(crate) use nearest::nearest;
pub(crate) use other_trainers::our_key;
pub(crate) use tree::{Node, Value as NodeValue};

use crate::checkpoint::{CheckpointConfig, is_model_file};
use crate::data::DataConfig;
use crate::dist::{Distributed, Shard};
use crate::net::hub::Cached;
use crate::optim::{Kind, Moments, OptimConfig, ScheduleConfig};
use crate::train::{
    AdapterConfig, AdapterInit, DeviceChoice, EvalConfig, LogConfig, ModelSection, Offload,
    Quantize, TrainConfig,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The config of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Folder that the run writes to.
    pub output_dir: PathBuf,
    /// Seed of the row order and of random weights; 42 by default.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Device to train on; `auto` by default.
    #[serde(default)]
    pub device: DeviceChoice,
    /// The model, its precision and its kernels.
    pub model: ModelSection,
    /// The adapter to train; by default the model itself is trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterConfig>,
    /// The data to train and evaluate on.
    pub data: DataConfig,
    /// Size of a step, number of steps, and gradient clipping.
    #[serde(default)]
    pub train: TrainConfig,
    /// The optimizer and its learning rates.
    #[serde(default)]
    pub optim: OptimConfig,
    /// When checkpoints are saved, and how many are kept.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// When the model is evaluated.
    #[serde(default)]
    pub eval: EvalConfig,
    /// How often metrics are logged.
    #[serde(default)]
    pub log: LogConfig,
    /// How the ranks of the run are started, and how they work together.
    #[serde(default)]
    pub distributed: Distributed,
}

fn default_seed() -> u64 {
    42
}

/// A value that has the right type and is out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("`{key}` is `{found}`, expected {expected}")]
pub struct ValueError {
    /// Dotted key of the value.
    pub key: &'static str,
    /// The value as written.
    pub found: String,
    /// The values that are valid.
    pub expected: &'static str,
}

impl ValueError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> String {
        match self.key {
            "optim.warmup_ratio" if self.expected == NOT_BOTH => {
                "remove one of `optim.warmup_steps` and `optim.warmup_ratio`".to_owned()
            }
            "distributed.shard" => {
                "remove `distributed.shard`; to divide the state, set `optim.kind: adamw_8bit`"
                    .to_owned()
            }
            "optim.lr" => "a usual value is 1.0e-5".to_owned(),
            "optim.betas.0" | "optim.betas.1" => "a usual value is [0.9, 0.999]".to_owned(),
            "model.offload" | "adapter.quantize" if self.expected == NOT_DIVIDED => {
                "frozen weights need no division among ranks then: use `distributed.shard: optimizer`"
                    .to_owned()
            }
            "adapter.quantize" => {
                "weights in NF4 stay on the device: remove `model.offload`".to_owned()
            }
            "data.workers" => "one worker per core is enough".to_owned(),
            "model.freeze" => {
                "select the parts that receive an adapter with `adapter.parts`".to_owned()
            }
            "adapter.init" => {
                "`pissa` and `olora` change the weights, so the adapter would not fit the quantised \
                 weights of the model: remove `adapter.quantize` or `adapter.init`"
                    .to_owned()
            }
            "adapter.alpha" => "a usual value is twice `adapter.rank`, or more".to_owned(),
            key => format!("change or remove `{key}`; `docs/config.md` has its default"),
        }
    }
}

const NO_FREEZE: &str = "no entry with an adapter, which freezes the whole model";
const NOT_DIVIDED: &str = "`none` with `distributed.shard: full`";
const NOT_ON_HOST: &str = "`none` with `model.offload: frozen`";
const NOT_NF4: &str = "`default` or `gaussian` with `adapter.quantize: nf4`";
const NOT_BOTH: &str = "only one of it and `optim.warmup_steps`";
/// Keys with their defaults that older versions did not have. Fingerprints leave them out, so that a
/// run of an older version can be resumed. Quotes in texts of a config are escaped, so these match
/// keys only.
const LATER_DEFAULTS: [&str; 3] =
    [",\"offload\":\"none\"", "\"kind\":\"adamw\",", ",\"master\":\"f32\""];
/// Maximum number of loader threads.
const MAX_WORKERS: usize = 1024;

impl RunConfig {
    /// Checks the ranges of values and the rules between them.
    pub fn check(&self) -> Result<(), ValueError> {
        let optim = &self.optim;
        let rule = |holds: bool, key, found: &dyn ToString, expected| {
            if holds { Ok(()) } else { Err(ValueError { key, found: found.to_string(), expected }) }
        };
        let finite = |x: f64| x.is_finite() && x >= 0.0;
        rule(finite(optim.lr), "optim.lr", &optim.lr, "a finite number of 0 or more")?;
        for (key, beta) in [("optim.betas.0", optim.betas[0]), ("optim.betas.1", optim.betas[1])] {
            rule((0.0..1.0).contains(&beta), key, &beta, "a number of 0 or more and below 1")?;
        }
        rule(
            optim.eps.is_finite() && optim.eps > 0.0,
            "optim.eps",
            &optim.eps,
            "a finite number above 0",
        )?;
        self.check_optimizer()?;
        let decay = optim.weight_decay;
        rule(finite(decay), "optim.weight_decay", &decay, "a finite number of 0 or more")?;
        let min_lr = optim.min_lr;
        rule(
            finite(min_lr) && min_lr <= optim.lr,
            "optim.min_lr",
            &min_lr,
            "a number from 0 to `optim.lr`",
        )?;
        if let Some(ratio) = optim.warmup_ratio {
            rule(
                (0.0..=1.0).contains(&ratio),
                "optim.warmup_ratio",
                &ratio,
                "a share from 0 to 1",
            )?;
            let both = optim.warmup_steps.is_some();
            rule(!both, "optim.warmup_ratio", &ratio, NOT_BOTH)?;
        }
        if let Some(ratio) = optim.decay_ratio {
            let valid = ratio > 0.0 && ratio <= 1.0;
            rule(valid, "optim.decay_ratio", &ratio, "a share of all steps above 0, at most 1")?;
            let used = optim.schedule == ScheduleConfig::Wsd;
            rule(used, "optim.decay_ratio", &ratio, "no value unless `optim.schedule` is `wsd`")?;
        }
        let norm = self.train.max_grad_norm;
        rule(
            finite(norm),
            "train.max_grad_norm",
            &norm,
            "a finite number of 0 or more (0: no clipping)",
        )?;
        let workers = self.data.workers.get();
        rule(workers <= MAX_WORKERS, "data.workers", &workers, "a number from 1 to 1024")?;
        let timeout = self.distributed.timeout_s;
        let valid = (1..=Distributed::MAX_TIMEOUT_S).contains(&timeout);
        rule(valid, "distributed.timeout_s", &timeout, "a number of seconds from 1 to 86400")?;
        let port = self.distributed.port;
        let found = port.unwrap_or_default();
        rule(port != Some(0), "distributed.port", &found, "a port from 1 to 65535")?;
        if let (Some(min), Some(max)) = (self.data.image.min_pixels, self.data.image.max_pixels) {
            rule(min <= max, "data.image.min_pixels", &min, "at most `data.image.max_pixels`")?;
        }
        let divided = self.distributed.shard == Shard::Full;
        let offload = self.model.offload != Offload::None;
        rule(!offload || !divided, "model.offload", &"frozen", NOT_DIVIDED)?;
        if let Some(adapter) = &self.adapter {
            let nf4 = adapter.quantize == Quantize::Nf4;
            rule(!nf4 || !divided, "adapter.quantize", &"nf4", NOT_DIVIDED)?;
            rule(!nf4 || !offload, "adapter.quantize", &"nf4", NOT_ON_HOST)?;
            let init = serde_json::to_value(adapter.init).unwrap_or_default();
            let init = init.as_str().unwrap_or_default();
            let splits = matches!(adapter.init, AdapterInit::Pissa | AdapterInit::Olora);
            rule(!nf4 || !splits, "adapter.init", &init, NOT_NF4)?;
            let alpha = adapter.alpha;
            let valid = alpha.is_finite() && alpha > 0.0;
            rule(valid, "adapter.alpha", &alpha, "a finite number above 0")?;
            let dropout = adapter.dropout;
            let valid = (0.0..1.0).contains(&dropout);
            rule(valid, "adapter.dropout", &dropout, "a number of 0 or more and below 1")?;
            let freeze = &self.model.freeze;
            rule(freeze.is_empty(), "model.freeze", &freeze.join(", "), NO_FREEZE)?;
        }
        Ok(())
    }

    /// Checks the settings that `optim.kind` does not support.
    fn check_optimizer(&self) -> Result<(), ValueError> {
        let (kind, moments) = (self.optim.kind, self.optim.moments);
        let (is_adamw, is_muon) = (kind == Kind::Adamw, kind == Kind::Muon);
        let shard = self.distributed.shard;
        let (key, found, expected) = if moments == Moments::Bf16 && !is_adamw {
            ("optim.moments", "bf16", "`bf16` only with `optim.kind: adamw`")
        } else if moments == Moments::Host && is_muon {
            ("optim.moments", "host", "`f32` with `optim.kind: muon`")
        } else if shard != Shard::None && is_muon {
            let expected = "`none` with `optim.kind: muon`, which needs whole matrices";
            ("distributed.shard", shard.name(), expected)
        } else {
            return Ok(());
        };
        Err(ValueError { key, found: found.to_owned(), expected })
    }

    /// Folder of the length caches: `data.cache_dir`, or `cache` in `output_dir`.
    pub fn cache_dir(&self) -> PathBuf {
        self.data.cache_dir.clone().unwrap_or_else(|| self.output_dir.join("cache"))
    }

    /// The config with hub ids in place of paths in the hub's cache, each with its commit, so that
    /// it has the same meaning on other machines and later.
    #[must_use]
    pub fn portable(&self) -> Self {
        self.with_names(Cached::name)
    }

    /// The config with other names for paths in the hub's cache.
    fn with_names(&self, name: impl Fn(&Cached) -> String) -> Self {
        let mut config = self.clone();
        let sets = config.data.train.iter_mut().chain(&mut config.data.eval);
        for path in sets.flat_map(|set| set.path.paths_mut()).chain([&mut config.model.path]) {
            if let Some(cached) = Cached::of(path) {
                *path = name(&cached).into();
            }
        }
        config
    }

    /// Hash of the settings that decide the result. A run resumes only from a checkpoint with the
    /// same fingerprint.
    ///
    /// Settings that do not change the result are left out: `output_dir`, `data.cache_dir`, device,
    /// `data.url.timeout_s`, `use_rmpad`, `attention`, `recompute`, `offload`, workers, the handling of rejected
    /// rows, the settings of eval, log, checkpoints and ranks, and the length of the run.
    pub fn fingerprint(&self) -> String {
        use sha2::{Digest, Sha256};
        // Of a model of the hub, the files that are used decide, not the commit.
        let mut same = self.with_names(|cached| cached.identity(is_model_file));
        let neutral = ModelSection {
            use_rmpad: true,
            attention: crate::train::AttentionChoice::Auto,
            recompute: crate::train::RecomputeChoice::None,
            offload: Offload::None,
            ..same.model
        };
        same.model = neutral;
        same.output_dir = PathBuf::new();
        same.device = DeviceChoice::Auto;
        same.checkpoint = CheckpointConfig::default();
        same.eval = EvalConfig::default();
        same.log = LogConfig::default();
        same.distributed = Distributed::default();
        same.data.eval.clear();
        same.data.cache_dir = None;
        same.data.url.timeout_s = 0.0;
        same.data.workers = std::num::NonZeroUsize::MIN;
        (same.data.on_error, same.data.max_rejected) = (crate::data::OnError::Skip, 1.0);
        (same.train.epochs, same.train.max_steps) = (None, None);
        let mut json = serde_json::to_string(&same).expect("a config of plain values");
        for default in LATER_DEFAULTS {
            json = json.replace(default, "");
        }
        let mut hash = format!("{:x}", Sha256::digest(json.as_bytes()));
        hash.truncate(32); // 128 bits are enough to distinguish runs
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn keys_that_were_added_do_not_change_the_fingerprint_of_a_config_without_them() {
        let config: RunConfig = load(Path::new("configs/quickstart.yaml"), &[]).unwrap();
        // of version 0.1.0 of 2026-11-22, before `model.offload`, `optim.kind` and `optim.master`
        assert_eq!(config.fingerprint(), "f4fde377b1bd6454f00819818ea4000d");
        let set = |setting: &str| {
            let config: RunConfig =
                load(Path::new("configs/quickstart.yaml"), &[setting.to_owned()]).unwrap();
            config.fingerprint()
        };
        for setting in ["optim.kind=muon", "optim.master=none", "adapter={}"] {
            assert_ne!(set(setting), config.fingerprint(), "{setting}");
        }
        assert_eq!(set("model.offload=frozen"), config.fingerprint());
    }
}
