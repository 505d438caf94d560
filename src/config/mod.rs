//! The config of a run: composed of the structs of its sections, and checked. The crate `settings` reads
//! the YAML.

mod evaluations;
mod identity;
mod load;
mod paths;

pub use identity::ConfigChange;
pub(crate) use load::{explained, load_text};
pub use load::{load, load_all, refuse};
pub use settings::{ConfigError, LeftOut, Loaded, Place, ValueError, to_yaml};

use crate::checkpoint::CheckpointConfig;
use crate::data::{DataConfig, LengthCaching, UrlConfig};
use crate::dist::{Distributed, Shard};
use crate::optim::{AdafactorConfig, Kind, MAX_LR, Moments, OptimConfig, ScheduleConfig};
use crate::train::{
    AdapterConfig, DeviceChoice, EvalConfig, LogConfig, MatmulChoice, ModelSection, NewTokenRows,
    Offload, OnNonFinite, Quantize, TrainConfig, Weights,
};
use settings::{Setting, section};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The config of a run.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct RunConfig {
    /// Folder for everything that the run writes
    #[key(neutral)]
    pub output_dir: PathBuf,
    /// Seed of the row order, of the rows that are drawn for a fractional `weight` or held out, and of
    /// random weights
    #[key(default = 42)]
    pub seed: u64,
    /// Where the run computes: `auto`, `cpu` or `cuda:N`
    #[key(default, neutral)]
    pub device: DeviceChoice,
    /// The model, its precision and its kernels
    pub model: ModelSection,
    /// The adapter to train; without it the model itself is trained
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterConfig>,
    /// The data sets, and how their rows become batches
    pub data: DataConfig,
    /// Size of a step, number of steps, and gradient clipping
    #[key(default)]
    pub train: TrainConfig,
    /// The optimizer and its learning rates
    #[key(default)]
    pub optim: OptimConfig,
    /// When checkpoints are saved, and how many are kept
    #[key(default, neutral)]
    pub checkpoint: CheckpointConfig,
    /// When the model is evaluated
    #[key(default, neutral)]
    pub eval: EvalConfig,
    /// How often metrics are logged
    #[key(default, neutral)]
    pub log: LogConfig,
    /// How the ranks of the run are started, and how they work together
    #[key(default, neutral)]
    pub distributed: Distributed,
}

const NO_FREEZE: &str = "no entry with an adapter, which freezes the whole model";
const NO_ADAPTER: &str = "`native` with an adapter, whose products are not in FP8";
const NOT_DIVIDED: &str = "`none` with `distributed.shard: full`";
const NOT_ON_HOST: &str = "`none` with `model.offload: frozen`";
const NOT_NF4: &str = "`default` or `gaussian` with `adapter.quantize: nf4`";
const ON_DEVICE: &str = "weights in NF4 stay on the device: remove `model.offload`";
const FROZEN: &str =
    "frozen weights need no division among ranks then: use `distributed.shard: optimizer`";

impl RunConfig {
    /// Checks the ranges of values and the rules between them; returns the first problem.
    pub fn check(&self) -> Result<(), ValueError> {
        self.problems(&LeftOut::default()).into_iter().next().map_or(Ok(()), Err)
    }

    /// All values that are out of range or contradict each other, except those that contradict only
    /// the lack of a value that is `left_out`.
    pub fn problems(&self, left_out: &LeftOut) -> Vec<ValueError> {
        let mut problems = Vec::new();
        self.check_values("", &mut problems);
        let optim = &self.optim;
        let mut rule = |holds: bool, problem: ValueError| {
            if !holds {
                problems.push(problem);
            }
        };
        let min_lr = optim.min_lr;
        let expected = "a number from 0 to `optim.lr`";
        let above = optim.lr >= 0.0 && min_lr > optim.lr;
        rule(!above, ValueError::new("optim.min_lr", min_lr, expected));
        if let (Some(ratio), Some(_)) = (optim.warmup_ratio, optim.warmup_steps) {
            let twice = ValueError::new(
                "optim.warmup_ratio",
                ratio,
                "only one of it and `optim.warmup_steps`",
            );
            let hint = "remove one of `optim.warmup_steps` and `optim.warmup_ratio`";
            rule(false, twice.with_hint(hint));
        }
        if let Some(ratio) = optim.decay_ratio {
            let used = optim.schedule == ScheduleConfig::Wsd;
            let expected = "no value unless `optim.schedule` is `wsd`";
            rule(used, ValueError::new("optim.decay_ratio", ratio, expected));
        }
        if let (Some(min), Some(max)) = (self.data.image.min_pixels, self.data.image.max_pixels) {
            let expected = "at most `data.image.max_pixels`";
            rule(min <= max, ValueError::new("data.image.min_pixels", min, expected));
        }
        let off = self.data.length_cache == LengthCaching::Off;
        let expected = "`complete`, unless the run ends at `train.max_steps` alone";
        let problem = ValueError::new("data.length_cache", "off", expected).with_hint(
            "set `train.max_steps` and no `train.epochs`: without lengths, the steps of an epoch are \
             not known",
        );
        rule(!off || self.train.epoch_limit().is_none(), problem);
        let divided = self.distributed.shard == Shard::Full;
        let offload = self.model.offload != Offload::None;
        let problem = ValueError::new("model.offload", "frozen", NOT_DIVIDED).with_hint(FROZEN);
        rule(!offload || !divided, problem);
        if let Some(adapter) = &self.adapter {
            let matmul = self.model.matmul;
            rule(
                matmul == MatmulChoice::Native,
                ValueError::new("model.matmul", matmul.name(), NO_ADAPTER),
            );
            let nf4 = adapter.quantize == Quantize::Nf4;
            let problem = ValueError::new("adapter.quantize", "nf4", NOT_DIVIDED).with_hint(FROZEN);
            rule(!nf4 || !divided, problem);
            let problem =
                ValueError::new("adapter.quantize", "nf4", NOT_ON_HOST).with_hint(ON_DEVICE);
            rule(!nf4 || !offload, problem);
            let problem = ValueError::new("adapter.init", adapter.init.name(), NOT_NF4).with_hint(
                "`pissa` and `olora` change the weights, so the adapter would not fit the quantised \
                 weights of the model: remove `adapter.quantize` or `adapter.init`",
            );
            rule(!nf4 || !adapter.init.is_part(), problem);
            let freeze = &self.model.freeze;
            let problem = ValueError::new("model.freeze", freeze.join(", "), NO_FREEZE)
                .with_hint("select the parts that receive an adapter with `adapter.parts`");
            rule(freeze.is_empty(), problem);
        }
        let others = self
            .check_optimizer()
            .and_then(|()| self.check_aux_loss())
            .err()
            .into_iter()
            .chain(self.new_token_problems())
            .chain(self.evaluation_problems(left_out))
            .chain(self.check_output_dir().err())
            .chain(self.settings_without_effect())
            .chain(self.data.problems());
        problems.extend(others);
        problems.retain(|problem| problem.key != "data.train" || !left_out.has("data.train"));
        problems
    }

    /// Tokens that are empty or named twice.
    fn new_token_problems(&self) -> Vec<ValueError> {
        let mut named = BTreeMap::new();
        let mut problems = Vec::new();
        let lists = [
            ("model.add_tokens", &self.model.add_tokens),
            ("model.add_special_tokens", &self.model.add_special_tokens),
        ];
        let tokens = lists.into_iter().flat_map(|(list, tokens)| {
            tokens.iter().enumerate().map(move |(index, token)| (format!("{list}.{index}"), token))
        });
        for (key, token) in tokens {
            if token.is_empty() {
                problems.push(ValueError::contradiction(key, "is empty"));
            } else if let Some(first) = named.insert(token, key.clone()) {
                let expected = format!("each token once: `{first}` is the same");
                problems.push(ValueError::new(key, token, &expected));
            }
        }
        problems
    }

    fn check_output_dir(&self) -> Result<(), ValueError> {
        let found = self.output_dir.display().to_string();
        let error = |expected| ValueError::new("output_dir", &found, expected);
        if found.contains("://") {
            let hint = "mount the storage, or copy the model to it after the run";
            return Err(error("a folder of this machine").with_hint(hint));
        }
        // it begins lines of the output, which a line break would forge
        if found.contains(char::is_control) {
            let expected = "a name without tabs, line breaks and other control characters";
            return Err(error(expected).with_hint("choose another name"));
        }
        Ok(())
    }

    /// Settings of something that is off and that differ from their defaults.
    fn settings_without_effect(&self) -> impl Iterator<Item = ValueError> {
        let (optim, train, data) = (&self.optim, &self.train, &self.data);
        let skips = train.on_non_finite == OnNonFinite::Skip;
        let model = &self.model;
        let adds = !(model.add_tokens.is_empty() && model.add_special_tokens.is_empty());
        let draws = model.weights == Weights::Random;
        let patches = data.max_patches_per_pack;
        let settings = [
            (
                (!adds || draws) && model.new_token_rows != NewTokenRows::default(),
                "model.new_token_rows",
                model.new_token_rows.name().to_owned(),
                "no value without new tokens, or with `model.weights: random`, which draws all rows",
            ),
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
        without_effect.map(|(_, key, found, expected)| ValueError::new(key, found, expected))
    }

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
            let hint =
                "remove `distributed.shard`; to divide the state, set `optim.kind: adamw_8bit`";
            let error = ValueError::new("distributed.shard", shard.name(), expected);
            return Err(error.with_hint(hint));
        } else {
            self.check_rates()?;
            return self.check_adafactor();
        };
        Err(ValueError::new(key, found, expected))
    }

    /// Checks that the scalars of an update are finite in `f32`, with which it computes.
    fn check_rates(&self) -> Result<(), ValueError> {
        let optim = &self.optim;
        if optim.eps > 0.0 && optim.eps as f32 == 0.0 {
            let expected = "1e-45 or more, which f32 can represent";
            return Err(ValueError::new("optim.eps", optim.eps, expected));
        }
        match optim.lr_multipliers.values().find(|factor| **factor > MAX_LR) {
            Some(factor) => {
                Err(ValueError::new("optim.lr_multipliers", factor, "numbers from 0 to 1e6"))
            }
            None => Ok(()),
        }
    }

    fn check_aux_loss(&self) -> Result<(), ValueError> {
        if self.model.aux_loss > 0.0 && !self.model.use_rmpad {
            let expected = "`true` with `model.aux_loss`, which counts no padding";
            return Err(ValueError::new("model.use_rmpad", "false", expected));
        }
        Ok(())
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
        Err(ValueError::new(key, found, expected))
    }

    fn check_adafactor(&self) -> Result<(), ValueError> {
        let settings = self.optim.adafactor;
        let [eps1, eps2] = settings.eps;
        let square = (eps1 * eps1) as f32; // as the update uses it
        if !(square.is_finite() && square > 0.0) {
            let expected = "a number from 1e-22 to 1e19";
            return Err(ValueError::new("optim.adafactor.eps.0", eps1, expected));
        }
        if !(eps2.is_finite() && eps2 >= 0.0) {
            let expected = "a finite number of 0 or more";
            return Err(ValueError::new("optim.adafactor.eps.1", eps2, expected));
        }
        if self.optim.kind != Kind::Adafactor && settings != AdafactorConfig::default() {
            let found = serde_json::to_string(&settings).expect("plain values");
            let expected = "no value unless `optim.kind` is `adafactor`";
            return Err(ValueError::new("optim.adafactor", found, expected));
        }
        self.check_moments()
    }

    /// Folder of the length caches: `data.cache_dir`, or `cache` in `output_dir`.
    pub fn cache_dir(&self) -> PathBuf {
        self.data.cache_dir.clone().unwrap_or_else(|| self.output_dir.join("cache"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_value_that_contradicts_two_others_is_a_problem_with_each() {
        let text = "output_dir: a\nmodel: {path: b, offload: frozen}\nadapter: {quantize: nf4}\n\
                    data: {train: [{path: c}]}\ndistributed: {shard: full}\n";
        let config: RunConfig = load_text(Path::new("a.yaml"), text).unwrap();
        let problems = config.problems(&LeftOut::default());
        let of = |key: &str| problems.iter().filter(|problem| problem.key == key).count();
        assert_eq!([of("adapter.quantize"), of("model.offload"), problems.len()], [2, 1, 3]);
    }
}
