//! What makes two configs the same run: names that hold on other machines, the fingerprint, and the
//! settings in which two configs differ.

use super::RunConfig;
use crate::checkpoint::{CheckpointConfig, is_model_file};
use crate::dist::Distributed;
use crate::net::hub::Cached;
use crate::train::{DeviceChoice, EvalConfig, LogConfig, ModelSection, Offload, TrainConfig};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};

/// Keys with their defaults that older versions did not have. Fingerprints leave them out, so that
/// a run of an older version can be resumed. Quotes in texts of a config are escaped, so these
/// match keys only.
const LATER_DEFAULTS: [&str; 15] = [
    ",\"train_empty_think\":false",
    ",\"offload\":\"none\"",
    ",\"aux_loss\":0.0",
    ",\"matmul\":\"native\"",
    ",\"algorithms\":null",
    ",\"columns\":null",
    "\"kind\":\"adamw\",",
    ",\"master\":\"f32\"",
    ",\"on_non_finite\":\"stop\",\"max_skipped\":10,\"timeout_s\":3600",
    ",\"samples\":true",
    ",\"background\":true",
    ",\"trackers\":[]",
    ",\"best\":null",
    ",\"generate\":null,\"early_stopping\":null",
    ",\"adafactor\":{\"beta2_decay\":-0.8,\"eps\":[1.1920928955078125e-7,0.001],\"d\":1.0}",
];

/// Dotted keys with their values as JSON.
type Settings = BTreeMap<String, String>;

/// A setting with different values in two configs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Dotted key, list items by number.
    pub key: String,
    /// The earlier value as JSON, or `absent`, or `set` for a section.
    pub old: String,
    /// The present value as JSON, or `absent`, or `set` for a section.
    pub new: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` was {} and is {}", self.key, self.old, self.new)
    }
}

impl RunConfig {
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
    /// `data.url.timeout_s`, `use_rmpad`, `attention`, `recompute`, `offload`, workers, the
    /// handling of rejected rows and of steps that are not finite, `train.timeout_s`, the settings
    /// of eval, log, checkpoints and ranks, and the length of the run.
    pub fn fingerprint(&self) -> String {
        use sha2::{Digest, Sha256};
        let mut json = serde_json::to_string(&self.deciding()).expect("a config of plain values");
        for default in LATER_DEFAULTS {
            json = json.replace(default, "");
        }
        let mut hash = format!("{:x}", Sha256::digest(json.as_bytes()));
        hash.truncate(32); // 128 bits are enough to distinguish runs
        hash
    }

    /// The settings in which this config differs from an earlier one, without those that a resumed
    /// run may change. A section that only one of them has is one change.
    pub fn changes_since(&self, earlier: &Self) -> Vec<Change> {
        let (old, new) = (earlier.deciding().settings(), self.deciding().settings());
        let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        let mut changes = Vec::new();
        for key in keys.into_iter().filter(|key| old.get(*key) != new.get(*key)) {
            let ends = key.match_indices('.').map(|(end, _)| &key[..end]);
            let section = ends.into_iter().find(|part| lacks(&old, part) || lacks(&new, part));
            let change = if let Some(section) = section {
                let of = |values| if lacks(values, section) { "absent" } else { "set" }.to_owned();
                Change { key: section.to_owned(), old: of(&old), new: of(&new) }
            } else {
                let of = |values: &Settings| {
                    values.get(key).cloned().unwrap_or_else(|| "absent".to_owned())
                };
                Change { key: key.clone(), old: of(&old), new: of(&new) }
            };
            if changes.last() != Some(&change) {
                changes.push(change);
            }
        }
        changes
    }

    /// All settings: dotted keys with their values as JSON, list items by number.
    pub fn settings(&self) -> Settings {
        let mut values = Settings::new();
        let json = serde_json::to_value(self).expect("a config of plain values");
        flatten("", &json, &mut values);
        values
    }

    /// The config with a fixed value for each setting that does not change the result.
    fn deciding(&self) -> Self {
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
        let TrainConfig { batch_size, gradient_accumulation_steps, max_grad_norm, .. } = same.train;
        same.train = TrainConfig {
            batch_size,
            gradient_accumulation_steps,
            max_grad_norm,
            ..TrainConfig::default()
        };
        let sets = &mut same.data.train;
        let paths = sets.iter_mut().flat_map(|set| {
            let roots = set.image_root.as_mut();
            set.path.paths_mut().iter_mut().chain(roots)
        });
        let of_model = [&mut same.model.path].into_iter().chain(&mut same.model.algorithms);
        paths.chain(of_model).for_each(|path| *path = tidy(path));
        same
    }
}

/// Whether there is no setting in a section, and the section itself has no value.
fn lacks(settings: &Settings, section: &str) -> bool {
    let inside = format!("{section}.");
    let next = settings.range(inside.clone()..).next();
    settings.get(section).is_none_or(|value| value == "null")
        && next.is_none_or(|(key, _)| !key.starts_with(&inside))
}

/// The path without `.` components and repeated separators, so that two spellings of a path are
/// equal.
fn tidy(path: &Path) -> PathBuf {
    path.components().filter(|part| *part != Component::CurDir).collect()
}

/// Adds the values under `key` with their dotted keys.
fn flatten(key: &str, value: &Value, values: &mut Settings) {
    let dotted =
        |part: &str| if key.is_empty() { part.to_owned() } else { format!("{key}.{part}") };
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(part, value)| flatten(&dotted(part), value, values));
        }
        Value::Array(list) => {
            let items = list.iter().enumerate();
            items.for_each(|(index, value)| flatten(&dotted(&index.to_string()), value, values));
        }
        value => {
            values.insert(key.to_owned(), value.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;

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
        let settings = [
            "model.matmul=fp8",
            "model.matmul=fp8_all",
            "model.algorithms=algorithms.json",
            "optim.kind=muon",
            "optim.kind=adafactor",
            "optim.master=none",
            "adapter={}",
        ];
        for setting in settings {
            assert_ne!(set(setting), config.fingerprint(), "{setting}");
        }
        assert_eq!(set("model.offload=frozen"), config.fingerprint());
    }

    #[test]
    fn a_path_spelled_differently_is_the_same() {
        let config = |setting: &str| -> RunConfig {
            load(Path::new("configs/quickstart.yaml"), &[setting.to_owned()]).unwrap()
        };
        let plain = config("model.path=data/quickstart/model");
        let other = config("model.path=./data//quickstart/./model/");
        assert_eq!(plain.fingerprint(), other.fingerprint());
        assert_eq!(plain.changes_since(&other), []);
    }

    #[test]
    fn changes_name_the_keys_that_decide_the_result() {
        let config = |settings: &[&str]| -> RunConfig {
            let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
            load(Path::new("configs/quickstart.yaml"), &settings).unwrap()
        };
        let earlier = config(&["optim.lr=1e-3", "seed=7"]);
        let later = config(&["optim.lr=2e-3", "seed=7", "data.workers=3", "adapter={rank: 4}"]);
        let changes = later.changes_since(&earlier);
        let texts = |changes: &[Change]| changes.iter().map(Change::to_string).collect::<Vec<_>>();
        let added = "`adapter` was absent and is set";
        assert_eq!(texts(&changes), [added, "`optim.lr` was 0.001 and is 0.002"]);
        let changes = earlier.changes_since(&later);
        assert_eq!(texts(&changes)[0], "`adapter` was set and is absent");
        let changes = config(&["adapter={rank: 8}"]).changes_since(&config(&["adapter={rank: 4}"]));
        assert_eq!(texts(&changes), ["`adapter.rank` was 4 and is 8"]);
    }
}
