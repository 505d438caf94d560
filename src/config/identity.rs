//! What makes two configs the same run: names that hold on other machines, the fingerprint, and the
//! settings in which two configs differ.

use super::RunConfig;
use crate::checkpoint::is_model_file;
use crate::net::hub::Cached;
use serde_json::Value;
use settings::{Setting, join};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};

/// Dotted keys with their values as JSON.
type Settings = BTreeMap<String, String>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigChange {
    /// Dotted key, list items by number.
    pub key: String,
    /// The earlier value as JSON, or `absent`, or `set` for a section.
    pub old: String,
    /// The present value as JSON, or `absent`, or `set` for a section.
    pub new: String,
}

impl fmt::Display for ConfigChange {
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
        config.paths("", &mut |_, path: &mut PathBuf| {
            if let Some(cached) = Cached::of(path) {
                *path = name(&cached).into();
            }
        });
        config
    }

    /// Hash of the settings that decide the result. A run resumes only from a checkpoint with the
    /// same fingerprint.
    ///
    /// Neutral keys, which do not change the result, are left out.
    pub fn fingerprint(&self) -> String {
        use sha2::{Digest, Sha256};
        let json = self.deciding().to_string();
        let mut hash = format!("{:x}", Sha256::digest(json.as_bytes()));
        hash.truncate(32); // 128 bits are enough to distinguish runs
        hash
    }

    /// The settings in which this config differs from an earlier one, without those that a resumed
    /// run may change. A section that only one of them has is one change.
    pub fn changes_since(&self, earlier: &Self) -> Vec<ConfigChange> {
        let (old, new) = (settings_of(&earlier.deciding()), settings_of(&self.deciding()));
        let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        let mut changes = Vec::new();
        for key in keys.into_iter().filter(|key| old.get(*key) != new.get(*key)) {
            let ends = key.match_indices('.').map(|(end, _)| &key[..end]);
            let section = ends.into_iter().find(|part| lacks(&old, part) || lacks(&new, part));
            let change = if let Some(section) = section {
                let of = |values| if lacks(values, section) { "absent" } else { "set" }.to_owned();
                ConfigChange { key: section.to_owned(), old: of(&old), new: of(&new) }
            } else {
                let of = |values: &Settings| {
                    values.get(key).cloned().unwrap_or_else(|| "absent".to_owned())
                };
                ConfigChange { key: key.clone(), old: of(&old), new: of(&new) }
            };
            if changes.last() != Some(&change) {
                changes.push(change);
            }
        }
        changes
    }

    /// All settings: dotted keys with their values as JSON, list items by number.
    pub fn settings(&self) -> Settings {
        settings_of(&self.json())
    }

    fn json(&self) -> Value {
        serde_json::to_value(self).expect("a config of plain values")
    }

    /// The config as JSON, without neutral keys.
    fn deciding(&self) -> Value {
        // Of a model of the hub, the files that are used decide, not the commit.
        let mut same = self.with_names(|cached| cached.identity(is_model_file));
        same.paths("", &mut |_, path: &mut PathBuf| *path = tidy(path));
        let mut json = same.json();
        Self::kind().remove_neutral(&mut json);
        json
    }
}

fn settings_of(config: &Value) -> Settings {
    let mut values = Settings::new();
    flatten("", config, &mut values);
    values
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
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(part, value)| flatten(&join(key, part), value, values));
        }
        Value::Array(list) => {
            let items = list.iter().enumerate();
            items.for_each(|(index, value)| flatten(&join(key, index), value, values));
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
    fn the_fingerprint_has_all_settings_that_decide_the_result() {
        let set = |setting: &str| {
            let config: RunConfig =
                load(Path::new("configs/quickstart.yaml"), &[setting.to_owned()]).unwrap();
            config.fingerprint()
        };
        let fingerprint = set("output_dir=other");
        for setting in [
            "model.matmul=fp8",
            "optim.kind=muon",
            "optim.master=none",
            "adapter={}",
            "data.train.0.weight=2",
            "data.url.max_bytes=1",
        ] {
            assert_ne!(set(setting), fingerprint, "{setting}");
        }
        for setting in [
            "model.offload=frozen",
            "train.max_steps=7",
            "data.workers=7",
            "data.url.timeout_s=7",
            "checkpoint.keep=7",
            "distributed.timeout_s=7",
        ] {
            assert_eq!(set(setting), fingerprint, "{setting}");
        }
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
        let texts = |changes: &[ConfigChange]| {
            changes.iter().map(ConfigChange::to_string).collect::<Vec<_>>()
        };
        let added = "`adapter` was absent and is set";
        assert_eq!(texts(&changes), [added, "`optim.lr` was 0.001 and is 0.002"]);
        let changes = earlier.changes_since(&later);
        assert_eq!(texts(&changes)[0], "`adapter` was set and is absent");
        let changes = config(&["adapter={rank: 8}"]).changes_since(&config(&["adapter={rank: 4}"]));
        assert_eq!(texts(&changes), ["`adapter.rank` was 4 and is 8"]);
    }
}
