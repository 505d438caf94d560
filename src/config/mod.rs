//! The config of a run: composed of the structs of its sections, and checked. The crate `settings` reads
//! the YAML.

mod evaluations;
mod identity;
mod load;
mod paths;

pub use identity::Change;
pub(crate) use load::{explained, load_text};
pub use load::{load, load_all, refuse};
pub use settings::{ConfigError, LeftOut, Loaded, Place, to_yaml};

use crate::checkpoint::CheckpointConfig;
use crate::data::{DataConfig, UrlConfig};
use crate::dist::{Distributed, Shard};
use crate::optim::{AdafactorConfig, Kind, Moments, OptimConfig, ScheduleConfig};
use crate::train::{
    AdapterConfig, DeviceChoice, EvalConfig, LogConfig, MatmulChoice, ModelSection, Offload,
    OnNonFinite, Quantize, TrainConfig,
};
use serde::{Deserialize, Serialize};
use std::num::NonZeroUsize;
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
#[derive(Debug, Clone, PartialEq, thiserror::Error, fault::Fault)]
#[error("`{key}` is `{found}`, expected {expected}")]
#[fault(exit = Usage, hint = self.fix())]
pub struct ValueError {
    /// Dotted key of the value.
    pub key: &'static str,
    /// The value as written.
    pub found: String,
    /// The values that are valid.
    pub expected: &'static str,
}

impl ValueError {
    fn fix(&self) -> String {
        match self.key {
            "output_dir" if self.found.contains("://") => {
                "mount the storage, or copy the model to it after the run".to_owned()
            }
            "output_dir" => "choose another name".to_owned(),
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
const NO_ADAPTER: &str = "`native` with an adapter, whose products are not in FP8";
const NOT_DIVIDED: &str = "`none` with `distributed.shard: full`";
const NOT_ON_HOST: &str = "`none` with `model.offload: frozen`";
const NO_PADDING: &str = "`true` with `model.aux_loss`, which counts no padding";
const NOT_NF4: &str = "`default` or `gaussian` with `adapter.quantize: nf4`";
const NOT_BOTH: &str = "only one of it and `optim.warmup_steps`";
/// Maximum learning rate, weight decay and factor of a learning rate.
const MAX_LR: f64 = 1e6;
/// Maximum number of loader threads.
pub(crate) const MAX_WORKERS: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Maximum rank of an adapter; above the width of a model, a higher rank changes nothing.
const MAX_RANK: usize = 8192;

impl RunConfig {
    /// Checks the ranges of values and the rules between them; returns the first problem.
    pub fn check(&self) -> Result<(), ValueError> {
        self.problems(&LeftOut::default()).into_iter().next().map_or(Ok(()), Err)
    }

    /// All values that are out of range or contradict each other, except those that contradict only
    /// the lack of a value that is `left_out`.
    pub fn problems(&self, left_out: &LeftOut) -> Vec<ValueError> {
        let optim = &self.optim;
        let mut problems = Vec::new();
        let mut rule = |holds: bool, key, found: &dyn ToString, expected| {
            if !holds {
                problems.push(ValueError { key, found: found.to_string(), expected });
            }
        };
        let finite = |x: f64| x.is_finite() && x >= 0.0;
        rule(finite(optim.lr), "optim.lr", &optim.lr, "a finite number of 0 or more");
        for (key, beta) in [("optim.betas.0", optim.betas[0]), ("optim.betas.1", optim.betas[1])] {
            rule((0.0..1.0).contains(&beta), key, &beta, "a number of 0 or more and below 1");
        }
        let eps = optim.eps;
        rule(eps.is_finite() && eps > 0.0, "optim.eps", &eps, "a finite number above 0");
        let decay = optim.weight_decay;
        rule(finite(decay), "optim.weight_decay", &decay, "a finite number of 0 or more");
        let min_lr = optim.min_lr;
        rule(
            finite(min_lr) && (min_lr <= optim.lr || !finite(optim.lr)),
            "optim.min_lr",
            &min_lr,
            "a number from 0 to `optim.lr`",
        );
        if let Some(ratio) = optim.warmup_ratio {
            rule((0.0..=1.0).contains(&ratio), "optim.warmup_ratio", &ratio, "a share from 0 to 1");
            let both = optim.warmup_steps.is_some();
            rule(!both, "optim.warmup_ratio", &ratio, NOT_BOTH);
        }
        if let Some(ratio) = optim.decay_ratio {
            let valid = ratio > 0.0 && ratio <= 1.0;
            rule(valid, "optim.decay_ratio", &ratio, "a share of all steps above 0, at most 1");
            let used = optim.schedule == ScheduleConfig::Wsd;
            rule(used, "optim.decay_ratio", &ratio, "no value unless `optim.schedule` is `wsd`");
        }
        let norm = self.train.max_grad_norm;
        let expected = "a finite number of 0 or more (0: no clipping)";
        rule(finite(norm), "train.max_grad_norm", &norm, expected);
        let workers = self.data.workers;
        rule(workers <= MAX_WORKERS, "data.workers", &workers, "a number from 1 to 1024");
        let timeout = self.distributed.timeout_s;
        let valid = (1..=Distributed::MAX_TIMEOUT_S).contains(&timeout);
        rule(valid, "distributed.timeout_s", &timeout, "a number of seconds from 1 to 86400");
        let port = self.distributed.port;
        let found = port.unwrap_or_default();
        rule(port != Some(0), "distributed.port", &found, "a port from 1 to 65535");
        if let (Some(min), Some(max)) = (self.data.image.min_pixels, self.data.image.max_pixels) {
            rule(min <= max, "data.image.min_pixels", &min, "at most `data.image.max_pixels`");
        }
        let divided = self.distributed.shard == Shard::Full;
        let offload = self.model.offload != Offload::None;
        rule(!offload || !divided, "model.offload", &"frozen", NOT_DIVIDED);
        if let Some(adapter) = &self.adapter {
            let native = self.model.matmul == MatmulChoice::Native;
            rule(native, "model.matmul", &self.model.matmul.name(), NO_ADAPTER);
            let nf4 = adapter.quantize == Quantize::Nf4;
            rule(!nf4 || !divided, "adapter.quantize", &"nf4", NOT_DIVIDED);
            rule(!nf4 || !offload, "adapter.quantize", &"nf4", NOT_ON_HOST);
            let rank = adapter.rank.get();
            rule(rank <= MAX_RANK, "adapter.rank", &rank, "at most 8192");
            let init = format!("{:?}", adapter.init).to_lowercase();
            rule(!nf4 || !adapter.init.is_part(), "adapter.init", &init, NOT_NF4);
            let alpha = adapter.alpha;
            let valid = alpha.is_finite() && alpha > 0.0;
            rule(valid, "adapter.alpha", &alpha, "a finite number above 0");
            let dropout = adapter.dropout;
            let valid = (0.0..1.0).contains(&dropout);
            rule(valid, "adapter.dropout", &dropout, "a number of 0 or more and below 1");
            let freeze = &self.model.freeze;
            rule(freeze.is_empty(), "model.freeze", &freeze.join(", "), NO_FREEZE);
        }
        problems.extend(self.check_optimizer().and_then(|()| self.check_aux_loss()).err());
        problems.extend(self.evaluation_problems(left_out));
        problems.extend(self.check_output_dir().err());
        problems.extend(self.settings_without_effect());
        problems
    }

    fn check_output_dir(&self) -> Result<(), ValueError> {
        let found = self.output_dir.display().to_string();
        let error =
            |expected| Err(ValueError { key: "output_dir", found: found.clone(), expected });
        if found.contains("://") {
            return error("a folder of this machine");
        }
        // it begins lines of the output, which a line break would forge
        if found.contains(char::is_control) {
            return error("a name without tabs, line breaks and other control characters");
        }
        Ok(())
    }

    /// Settings of something that is off and that differ from their defaults.
    fn settings_without_effect(&self) -> impl Iterator<Item = ValueError> {
        let (optim, train, data) = (&self.optim, &self.train, &self.data);
        let skips = train.on_non_finite == OnNonFinite::Skip;
        let patches = data.max_patches_per_pack;
        let settings = [
            (
                optim.schedule == ScheduleConfig::Constant && optim.min_lr > 0.0,
                "optim.min_lr",
                optim.min_lr.to_string(),
                "0 with `optim.schedule: constant`",
            ),
            (
                !skips && train.max_skipped != TrainConfig::default().max_skipped,
                "train.max_skipped",
                train.max_skipped.to_string(),
                "no value unless `train.on_non_finite` is `skip`",
            ),
            (
                !data.packing && patches.is_some(),
                "data.max_patches_per_pack",
                patches.map_or_else(String::new, |patches| patches.to_string()),
                "no value with `data.packing: false`",
            ),
            (
                !data.allow_urls && data.url != UrlConfig::default(),
                "data.url",
                "set".to_owned(),
                "no value without `data.allow_urls: true`",
            ),
        ];
        let without_effect = settings.into_iter().filter(|(has_none, ..)| *has_none);
        without_effect.map(|(_, key, found, expected)| ValueError { key, found, expected })
    }

    /// Checks the settings that `optim.kind` does not support.
    fn check_optimizer(&self) -> Result<(), ValueError> {
        let (kind, moments) = (self.optim.kind, self.optim.moments);
        let shard = self.distributed.shard;
        let (key, found, expected) = if moments == Moments::Bf16 && kind != Kind::Adamw {
            ("optim.moments", "bf16", "`bf16` only with `optim.kind: adamw`")
        } else if moments == Moments::Host && !kind.divides_state() {
            let expected = "`f32` with `optim.kind: muon` and `adafactor`";
            ("optim.moments", "host", expected)
        } else if shard != Shard::None && !kind.divides_state() {
            let expected = match kind {
                Kind::Muon => "`none` with `optim.kind: muon`, which needs whole matrices",
                _ => "`none` with `optim.kind: adafactor`, which needs whole parameters",
            };
            ("distributed.shard", shard.name(), expected)
        } else {
            self.check_rates()?;
            return self.check_adafactor();
        };
        Err(ValueError { key, found: found.to_owned(), expected })
    }

    /// Checks that the scalars of an update are finite in `f32`, with which it computes.
    fn check_rates(&self) -> Result<(), ValueError> {
        let optim = &self.optim;
        let invalid = |key, found: &dyn ToString, expected| {
            Err(ValueError { key, found: found.to_string(), expected })
        };
        if optim.lr > MAX_LR {
            return invalid("optim.lr", &optim.lr, "a number from 0 to 1e6");
        }
        if optim.eps > 0.0 && optim.eps as f32 == 0.0 {
            return invalid("optim.eps", &optim.eps, "1e-45 or more, which f32 can represent");
        }
        if optim.weight_decay > MAX_LR {
            return invalid("optim.weight_decay", &optim.weight_decay, "a number from 0 to 1e6");
        }
        match optim.lr_multipliers.values().find(|factor| **factor > MAX_LR) {
            Some(factor) => invalid("optim.lr_multipliers", factor, "numbers from 0 to 1e6"),
            None => Ok(()),
        }
    }

    fn check_aux_loss(&self) -> Result<(), ValueError> {
        let factor = self.model.aux_loss;
        let (key, found, expected) = if !(factor.is_finite() && factor >= 0.0) {
            ("model.aux_loss", factor.to_string(), "a finite number of 0 or more")
        } else if factor > 0.0 && !self.model.use_rmpad {
            ("model.use_rmpad", "false".to_owned(), NO_PADDING)
        } else {
            return Ok(());
        };
        Err(ValueError { key, found, expected })
    }

    /// Checks that Adafactor has no settings of AdamW.
    fn check_moments(&self) -> Result<(), ValueError> {
        let (optim, default) = (&self.optim, OptimConfig::default());
        let (key, found) = if optim.kind != Kind::Adafactor {
            return Ok(());
        } else if optim.betas != default.betas {
            ("optim.betas", format!("{:?}", optim.betas))
        } else if optim.eps != default.eps {
            ("optim.eps", format!("{:e}", optim.eps))
        } else {
            return Ok(());
        };
        let expected = "no value with `optim.kind: adafactor`, which has `optim.adafactor`";
        Err(ValueError { key, found, expected })
    }

    fn check_adafactor(&self) -> Result<(), ValueError> {
        let settings = self.optim.adafactor;
        let AdafactorConfig { beta2_decay, eps: [eps1, eps2], d } = settings;
        let square = (eps1 * eps1) as f32; // as the update uses it
        let (key, found, expected) = if !(beta2_decay.is_finite() && beta2_decay <= 0.0) {
            ("optim.adafactor.beta2_decay", beta2_decay, "a finite number of 0 or less")
        } else if !(square.is_finite() && square > 0.0) {
            ("optim.adafactor.eps.0", eps1, "a number from 1e-22 to 1e19")
        } else if !(eps2.is_finite() && eps2 >= 0.0) {
            ("optim.adafactor.eps.1", eps2, "a finite number of 0 or more")
        } else if !(d.is_finite() && d >= 1.0) {
            ("optim.adafactor.d", d, "a finite number of 1 or more")
        } else if self.optim.kind != Kind::Adafactor && settings != AdafactorConfig::default() {
            let key = "optim.adafactor";
            let found = serde_json::to_string(&settings).expect("plain values");
            let expected = "no value unless `optim.kind` is `adafactor`";
            return Err(ValueError { key, found, expected });
        } else {
            return self.check_moments();
        };
        Err(ValueError { key, found: found.to_string(), expected })
    }

    /// Folder of the length caches: `data.cache_dir`, or `cache` in `output_dir`.
    pub fn cache_dir(&self) -> PathBuf {
        self.data.cache_dir.clone().unwrap_or_else(|| self.output_dir.join("cache"))
    }
}
