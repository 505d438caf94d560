//! Checks of single values.

use super::Setting;
use std::borrow::Cow;
use std::fmt::Display;
use std::ops::{Bound, RangeBounds};

/// A value that has the right type and cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[error("`{key}` {problem}")]
#[fault(exit = Usage, hint = Some(self.fix()))]
pub struct ValueError {
    /// Dotted key, list items by number.
    pub key: String,
    /// What follows the key in the message.
    problem: String,
    /// The fix; `None`: to change the key.
    hint: Option<&'static str>,
}

impl ValueError {
    pub fn new(key: impl Into<String>, found: impl Display, expected: &str) -> Self {
        Self::contradiction(key, format!("is `{found}`, expected {expected}"))
    }

    /// `problem` follows the key in the message.
    pub fn contradiction(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { key: key.into(), problem: problem.into(), hint: None }
    }

    #[must_use]
    pub fn with_hint(self, hint: &'static str) -> Self {
        Self { hint: Some(hint), ..self }
    }

    fn fix(&self) -> Cow<'static, str> {
        let key = &self.key;
        let fix = || format!("change or remove `{key}`; `docs/config.md` has its default").into();
        self.hint.map_or_else(fix, Cow::Borrowed)
    }
}

/// The bounds of valid numbers.
pub type Range = (Bound<f64>, Bound<f64>);

/// Numbers above `bound`.
pub fn above(bound: f64) -> Range {
    (Bound::Excluded(bound), Bound::Unbounded)
}

/// The bounds of `range`.
#[doc(hidden)]
pub fn range(range: impl RangeBounds<f64>) -> Range {
    (range.start_bound().cloned(), range.end_bound().cloned())
}

/// Adds an error for each number of a value that is outside of a range, with what is expected and the
/// hint of the first such range.
#[doc(hidden)]
pub fn check(
    value: &impl Setting,
    key: &str,
    ranges: &[(Range, &'static str, Option<&'static str>)],
    errors: &mut Vec<ValueError>,
) {
    value.numbers(key, &mut |key, number| {
        let is_wrong = |range: &Range| !number.is_finite() || !range.contains(&number);
        if let Some((_, expected, hint)) = ranges.iter().find(|(range, ..)| is_wrong(range)) {
            errors.push(ValueError { hint: *hint, ..ValueError::new(key, number, expected) });
        }
    });
}
