//! Applies the tables to the settings, and keeps what `compose` decides on.

use super::error::{ConvertError, Refusal};
use super::input::Input;
use super::output::Output;
use super::rule::{Kind, Role, Row, Rule};
use super::tables;
use super::trainer::Trainer;
use super::value::{Origin, Setting, Value};
use crate::config::our_key;
use settings::nearest;

/// Why a setting whose value switches it off has no effect.
pub(super) const OFF: &str = "it is switched off";

/// A setting with a role in a decision.
#[derive(Debug)]
struct Part {
    role: Role,
    setting: Setting,
    is_used: bool,
}

/// A conversion in progress.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) trainer: Trainer,
    pub(super) out: Output,
    /// Settings without an effect, with the reason.
    pub(super) dropped: Vec<String>,
    /// Differences that stay.
    pub(super) notes: Vec<String>,
    pub(super) refused: Vec<Refusal>,
    pub(super) has_script: bool,
    parts: Vec<Part>,
    adapters: Vec<(Setting, &'static str)>,
}

impl Work {
    /// Applies the rule of each setting, then those of the defaults.
    pub(super) fn new(trainer: Trainer, input: Input) -> Result<Self, ConvertError> {
        let mut this = Self {
            trainer,
            out: Output::new()?,
            dropped: Vec::new(),
            notes: Vec::new(),
            refused: Vec::new(),
            has_script: input.has_script,
            parts: Vec::new(),
            adapters: Vec::new(),
        };
        for (key, origin, variable) in input.unknown {
            let reason = format!("its value `{variable}` is not in the file: write it out");
            this.refused.push(Refusal { place: origin.to_string(), setting: key, reason });
        }
        // once: a file can have thousands of unknown keys
        let keys: Vec<String> = tables::rows(trainer).map(|(key, _)| key).collect();
        for setting in input.settings {
            match tables::row_of(trainer, &setting.key) {
                Some(row) => this.apply(row, setting),
                None => this.unknown(&setting, &keys),
            }
        }
        for (key, row) in tables::rows(trainer).filter(|(_, row)| !row.default.is_empty()) {
            let value = Value::Text(row.default.to_owned());
            this.apply_default(row, Setting { key, value, origin: Origin::Default });
        }
        Ok(this)
    }

    fn apply(&mut self, row: &Row, setting: Setting) {
        match row.rule {
            Rule::Copy(kind) => self.copy(kind, &setting),
            Rule::Is(_) if setting.value == Value::Null => {
                self.drop(&setting, "it is empty, so the default applies");
            }
            Rule::Is(role) => self.parts.push(Part { role, setting, is_used: false }),
            Rule::Drop(reason) => self.drop(&setting, reason),
            Rule::Refuse(reason) => self.refuse_unless_off(&setting, reason),
            Rule::Only(values, reason) => {
                let text = setting.value.to_string().to_ascii_lowercase();
                let flag = setting.value.flag().map(|flag| flag.to_string());
                let fits = |value: &&str| *value == text || flag.as_deref() == Some(*value);
                if setting.value == Value::Null || values.iter().any(fits) {
                    self.drop(&setting, reason);
                } else {
                    self.refuse(&setting, reason);
                }
            }
            Rule::Adapter(reason) => self.adapters.push((setting, reason)),
        }
    }

    fn apply_default(&mut self, row: &Row, setting: Setting) {
        match row.rule {
            Rule::Copy(kind) => {
                let ours = our_key(setting.name()).unwrap_or_default();
                if !self.out.is_default(ours, &Self::copied(kind, &setting).unwrap_or_default()) {
                    self.copy(kind, &setting);
                }
            }
            Rule::Is(role) if self.parts.iter().all(|part| part.role != role) => {
                self.parts.push(Part { role, setting, is_used: false });
            }
            _ => {}
        }
    }

    /// The value of a copied setting as ours; `None` if it has the wrong type.
    fn copied(kind: Kind, Setting { value, .. }: &Setting) -> Option<String> {
        match kind {
            Kind::Number => value.number().and(value.text()).map(str::to_owned),
            Kind::Count => value.count().map(|count| count.to_string()),
            Kind::Flag => value.flag().map(|flag| flag.to_string()),
            Kind::Not => value.flag().map(|flag| (!flag).to_string()),
        }
    }

    fn copy(&mut self, kind: Kind, setting: &Setting) {
        if setting.value == Value::Null {
            return self.drop(setting, "it is empty, so the default applies");
        }
        let Some(value) = Self::copied(kind, setting) else {
            let expected = match kind {
                Kind::Number => "expected a number",
                Kind::Count => "expected a whole number of 0 or more",
                Kind::Flag | Kind::Not => "expected true or false",
            };
            return self.refuse(setting, expected);
        };
        let key = our_key(setting.name()).unwrap_or_default();
        match (self.out.has(key), setting.is_given()) {
            (true, true) => self.drop(setting, &format!("another setting decides `{key}`")),
            (true, false) => {}
            (false, _) => self.write(key, &value, &self.from(setting)),
        }
    }

    /// Refuses a setting that is none of `keys`, those of the trainer.
    fn unknown(&mut self, setting: &Setting, keys: &[String]) {
        let is_variable = setting.key.chars().all(|c| !c.is_ascii_lowercase());
        if is_variable && self.has_script {
            return self.drop(setting, "an environment variable that is no setting of the trainer");
        }
        let name = setting.name();
        let names = keys.iter().map(|key| key.rsplit('.').next().unwrap_or(key));
        let hint = match nearest(name, names) {
            Some(near) if near == name => {
                let full = keys.iter().find(|key| key.ends_with(near)).map_or(near, String::as_str);
                format!(", did you mean `{full}`?")
            }
            Some(near) => format!(", did you mean `{near}`?"),
            None => "; remove it if it has no effect on the training".to_owned(),
        };
        self.refuse(setting, &format!("no known setting of {}{hint}", self.trainer.title()));
    }

    /// Takes the setting with a role; the default if the setting is left out.
    pub(super) fn take(&mut self, role: Role) -> Option<Setting> {
        let mut found = None;
        for index in 0..self.parts.len() {
            let part = &mut self.parts[index];
            if part.role != role || part.is_used {
                continue;
            }
            part.is_used = true;
            let setting = part.setting.clone();
            match &found {
                None => found = Some(setting),
                Some(first) => {
                    let first: &Setting = first;
                    let reason = format!("`{}` decides", first.key);
                    self.drop(&setting, &reason);
                }
            }
        }
        found
    }

    /// [`Work::take`] a setting that is written in the files.
    pub(super) fn given(&mut self, role: Role) -> Option<Setting> {
        self.take(role).filter(Setting::is_given)
    }

    /// [`Work::take`] with a value that `read` accepts; any other value is refused.
    pub(super) fn read<T>(
        &mut self,
        role: Role,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Option<(T, Setting)> {
        let setting = self.take(role)?;
        let found = read(&setting.value);
        if found.is_none() {
            self.refuse(&setting, &format!("expected {expected}"));
        }
        Some((found?, setting))
    }

    pub(super) fn flag(&mut self, role: Role) -> Option<(bool, Setting)> {
        self.read(role, "true or false", Value::flag)
    }

    pub(super) fn count(&mut self, role: Role) -> Option<(u64, Setting)> {
        self.read(role, "a whole number of 0 or more", Value::count)
    }

    pub(super) fn number(&mut self, role: Role) -> Option<(f64, Setting)> {
        self.read(role, "a number", Value::number)
    }

    /// The origin of a value, for the comment on its line.
    pub(super) fn from(&self, setting: &Setting) -> String {
        match setting.origin {
            Origin::Default => format!("{}: default of {}", setting.key, self.trainer.title()),
            Origin::File(..) => format!("{} ({})", setting.key, setting.origin.short()),
        }
    }

    pub(super) fn write(&mut self, key: &str, value: &str, comment: &str) {
        self.out.set(key, value, comment);
    }

    /// Writes the value of a setting, unless it is a default that is ours too.
    pub(super) fn write_from(&mut self, key: &str, value: &str, setting: &Setting) {
        if setting.is_given() || !self.out.is_default(key, value) {
            self.write(key, value, &self.from(setting));
        }
    }

    pub(super) fn drop(&mut self, setting: &Setting, reason: &str) {
        if setting.is_given() {
            let Setting { key, value, origin } = setting;
            self.dropped.push(format!("{key}: {value} ({}): {reason}", origin.short()));
        }
    }

    pub(super) fn refuse(&mut self, setting: &Setting, reason: &str) {
        let place = match &setting.origin {
            Origin::Default => format!("default of {}", self.trainer.title()),
            origin @ Origin::File(..) => origin.to_string(),
        };
        let setting = format!("{}: {}", setting.key, setting.value);
        self.refused.push(Refusal { place, setting, reason: reason.to_owned() });
    }

    /// Refuses a setting for this reason, or drops it if its value switches it off.
    pub(super) fn refuse_unless_off(&mut self, setting: &Setting, reason: &str) {
        if setting.value.is_off() {
            self.drop(setting, OFF);
        } else {
            self.refuse(setting, reason);
        }
    }

    /// Refuses because a setting is missing.
    pub(super) fn need(&mut self, setting: &str, reason: &str) {
        let (setting, reason) = (setting.to_owned(), reason.to_owned());
        self.refused.push(Refusal { place: "missing".to_owned(), setting, reason });
    }

    pub(super) fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Takes the settings that no adapter here has, with the reasons.
    pub(super) fn adapters(&mut self) -> Vec<(Setting, &'static str)> {
        std::mem::take(&mut self.adapters)
    }

    /// Drops the settings with a role that no decision needed.
    pub(super) fn drop_unused(&mut self) {
        for index in 0..self.parts.len() {
            if !self.parts[index].is_used {
                let setting = self.parts[index].setting.clone();
                self.drop(&setting, "has no effect together with the other settings");
            }
        }
    }
}
