//! Applies the tables to the settings, and keeps what `compose` decides on.

use crate::error::Refusal;
use crate::input::Input;
use crate::line::Line;
use crate::tables::{self, Kind, Role, Row, Rule};
use crate::trainer::Trainer;
use crate::value::{Origin, Setting, Value};
use settings::nearest;

/// Why a setting whose value switches it off has no effect.
pub(crate) const OFF: &str = "it is switched off";

#[derive(Debug)]
pub(crate) struct Conversion {
    pub(crate) trainer: Trainer,
    pub(crate) lines: Vec<Line>,
    /// Settings without an effect, with the reason.
    pub(crate) dropped: Vec<String>,
    /// Differences that stay.
    pub(crate) notes: Vec<String>,
    pub(crate) refused: Vec<Refusal>,
    pub(crate) has_script: bool,
    /// Settings with a role that no decision has consumed.
    undecided: Vec<(Role, Setting)>,
    adapters: Vec<(Setting, &'static str)>,
}

impl Conversion {
    /// Applies the rule of each setting, then those of the defaults.
    pub(crate) fn new(trainer: Trainer, input: Input) -> Self {
        let mut this = Self {
            trainer,
            lines: Vec::new(),
            dropped: Vec::new(),
            notes: Vec::new(),
            refused: Vec::new(),
            has_script: input.has_script,
            undecided: Vec::new(),
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
        this
    }

    fn apply(&mut self, row: &Row, setting: Setting) {
        let reason = row.reason;
        match &row.rule {
            Rule::Copy(kind) => self.copy(*kind, row.here, &setting),
            Rule::Role(_) if setting.value == Value::Null => {
                self.drop(&setting, "it is empty, so the default applies");
            }
            Rule::Role(role) => self.undecided.push((*role, setting)),
            Rule::Drop => self.drop(&setting, reason),
            Rule::Refuse => self.refuse_unless_off(&setting, reason),
            Rule::Only(values) => {
                let text = setting.value.to_string().to_ascii_lowercase();
                let boolean = setting.value.boolean().map(|value| value.to_string());
                let fits = |value: &&str| *value == text || boolean.as_deref() == Some(*value);
                if setting.value == Value::Null || values.iter().any(fits) {
                    self.drop(&setting, reason);
                } else {
                    self.refuse(&setting, reason);
                }
            }
            Rule::Adapter => self.adapters.push((setting, reason)),
        }
    }

    fn apply_default(&mut self, row: &Row, setting: Setting) {
        match row.rule {
            Rule::Copy(kind) => self.copy(kind, row.here, &setting),
            Rule::Role(role) if self.undecided.iter().all(|(known, _)| *known != role) => {
                self.undecided.push((role, setting));
            }
            _ => {}
        }
    }

    /// The value of a copied setting as ours; `None` if it has the wrong type.
    fn copied(kind: Kind, Setting { value, .. }: &Setting) -> Option<String> {
        match kind {
            Kind::Number => value.number().and(value.text()).map(str::to_owned),
            Kind::Count => value.count().map(|count| count.to_string()),
            Kind::Flag => value.boolean().map(|value| value.to_string()),
            Kind::Not => value.boolean().map(|value| (!value).to_string()),
        }
    }

    fn copy(&mut self, kind: Kind, key: &str, setting: &Setting) {
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
        match (self.has(key), setting.is_written()) {
            (true, true) => self.drop(setting, &format!("another setting decides `{key}`")),
            (true, false) => {}
            (false, _) => self.write_setting(key, &value, setting),
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

    /// Consumes the setting with a role; the default if it is left out. Of several settings with the
    /// role, the others are dropped.
    pub(crate) fn consume(&mut self, role: Role) -> Option<Setting> {
        let (found, rest): (Vec<_>, _) =
            std::mem::take(&mut self.undecided).into_iter().partition(|(known, _)| *known == role);
        self.undecided = rest;
        let mut found = found.into_iter().map(|(_, setting)| setting);
        let first = found.next()?;
        for setting in found {
            self.drop(&setting, &format!("`{}` decides", first.key));
        }
        Some(first)
    }

    /// [`Self::consume`], with `None` for a default.
    pub(crate) fn consume_written(&mut self, role: Role) -> Option<Setting> {
        self.consume(role).filter(Setting::is_written)
    }

    /// [`Self::consume`], with the value that `read` returns; if it returns none, the setting is
    /// refused.
    pub(crate) fn consume_as<T>(
        &mut self,
        role: Role,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Option<(T, Setting)> {
        let setting = self.consume(role)?;
        let found = read(&setting.value);
        if found.is_none() {
            self.refuse(&setting, &format!("expected {expected}"));
        }
        Some((found?, setting))
    }

    pub(crate) fn consume_boolean(&mut self, role: Role) -> Option<(bool, Setting)> {
        self.consume_as(role, "true or false", Value::boolean)
    }

    pub(crate) fn consume_count(&mut self, role: Role) -> Option<(u64, Setting)> {
        self.consume_as(role, "a whole number of 0 or more", Value::count)
    }

    pub(crate) fn consume_number(&mut self, role: Role) -> Option<(f64, Setting)> {
        self.consume_as(role, "a number", Value::number)
    }

    /// Consumes the settings with these roles, which have no effect.
    pub(crate) fn drop_roles(&mut self, roles: impl IntoIterator<Item = Role>, reason: &str) {
        for role in roles {
            if let Some(setting) = self.consume(role) {
                self.drop(&setting, reason);
            }
        }
    }

    /// Consumes the settings that no adapter here has, with the reasons.
    pub(crate) fn consume_adapters(&mut self) -> Vec<(Setting, &'static str)> {
        std::mem::take(&mut self.adapters)
    }

    /// The origin of a value, for the comment on its line.
    pub(crate) fn origin(&self, setting: &Setting) -> String {
        match setting.origin {
            Origin::Default => format!("{}: default of {}", setting.key, self.trainer.title()),
            Origin::File(..) => format!("{} ({})", setting.key, setting.origin.short()),
        }
    }

    pub(crate) fn line(&self, key: &str) -> Option<&Line> {
        self.lines.iter().find(|line| line.key == key)
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.line(key).is_some()
    }

    pub(crate) fn has_eval(&self) -> bool {
        let keys = ["data.eval.", "data.eval_share", "data.eval_rows"];
        self.lines.iter().any(|line| keys.iter().any(|key| line.key.starts_with(key)))
    }

    /// Whether the list of names that a key is set to has `name`.
    pub(crate) fn lists(&self, key: &str, name: &str) -> Option<bool> {
        let list = &self.line(key)?.value;
        Some(list.trim_matches(['[', ']']).split(", ").any(|entry| entry == name))
    }

    /// Writes a key. The first value of a key stays.
    pub(crate) fn write(&mut self, key: &str, value: &str, origin: &str) {
        self.write_line(key, value, origin.to_owned(), false);
    }

    pub(crate) fn write_setting(&mut self, key: &str, value: &str, setting: &Setting) {
        self.write_line(key, value, self.origin(setting), !setting.is_written());
    }

    fn write_line(&mut self, key: &str, value: &str, origin: String, is_default: bool) {
        if !self.has(key) {
            let (key, value) = (key.to_owned(), value.to_owned());
            self.lines.push(Line { key, value, origin, is_default });
        }
    }

    pub(crate) fn drop(&mut self, setting: &Setting, reason: &str) {
        if setting.is_written() {
            let Setting { key, value, origin } = setting;
            self.dropped.push(format!("{key}: {value} ({}): {reason}", origin.short()));
        }
    }

    pub(crate) fn refuse(&mut self, setting: &Setting, reason: &str) {
        let place = match &setting.origin {
            Origin::Default => format!("default of {}", self.trainer.title()),
            origin @ Origin::File(..) => origin.to_string(),
        };
        let setting = format!("{}: {}", setting.key, setting.value);
        self.refused.push(Refusal { place, setting, reason: reason.to_owned() });
    }

    /// Refuses a setting for this reason, or drops it if its value switches it off.
    pub(crate) fn refuse_unless_off(&mut self, setting: &Setting, reason: &str) {
        if setting.value.is_off() {
            self.drop(setting, OFF);
        } else {
            self.refuse(setting, reason);
        }
    }

    pub(crate) fn refuse_missing(&mut self, setting: &str, reason: &str) {
        let (setting, reason) = (setting.to_owned(), reason.to_owned());
        self.refused.push(Refusal { place: "missing".to_owned(), setting, reason });
    }

    pub(crate) fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Drops the settings with a role that no decision has consumed.
    pub(crate) fn drop_unused(&mut self) {
        for (_, setting) in std::mem::take(&mut self.undecided) {
            self.drop(&setting, "has no effect together with the other settings");
        }
    }
}
