//! Finds the steps without a row in `metrics.jsonl`, and those with several.

use serde_json::Value;
use std::fmt;

/// The steps of the rows of a file, from its first row on.
#[derive(Debug, Default)]
pub struct StepRows {
    last: Option<u64>,
    missing: Vec<(u64, u64)>,
    double: Vec<(u64, u64)>,
}

struct Ranges<'a>(&'a [(u64, u64)]);

const MOST: usize = 5;

impl StepRows {
    pub fn push(&mut self, row: &Value) {
        let Some(step) = row["step"].as_u64() else { return };
        match self.last {
            Some(last) if step <= last => match self.double.last_mut() {
                Some(range) if range.1.checked_add(1) == Some(step) => range.1 = step,
                _ => self.double.push((step, step)),
            },
            Some(last) => {
                self.add_missing(last, step);
                self.last = Some(step);
            }
            None => self.last = Some(step),
        }
    }

    /// Returns a sentence about the steps up to `step` that have no row, or several; `None` if each
    /// has one. A file without rows belongs to a run that was resumed from another folder.
    pub fn finish(mut self, step: u64) -> Option<String> {
        let last = self.last?;
        self.add_missing(last, step.saturating_add(1));
        let found = [("missing", &self.missing), ("double", &self.double)];
        let found: Vec<String> = found
            .iter()
            .filter(|(_, ranges)| !ranges.is_empty())
            .map(|(what, ranges)| format!("{what}: steps {}", Ranges(ranges)))
            .collect();
        (!found.is_empty()).then(|| found.join("; "))
    }

    fn add_missing(&mut self, last: u64, next: u64) {
        if next.saturating_sub(last) > 1 {
            self.missing.push((last + 1, next - 1));
        }
    }
}

impl fmt::Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.0.iter().take(MOST).enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first} to {last}")?;
            }
        }
        match self.0.len().saturating_sub(MOST) {
            0 => Ok(()),
            more => write!(f, " and {more} more ranges"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(steps: &[u64], step: u64) -> Option<String> {
        let mut rows = StepRows::default();
        for step in steps {
            rows.push(&json!({"step": step, "loss": 1.0}));
        }
        rows.finish(step)
    }

    #[test]
    fn missing_and_double_steps_are_named() {
        assert_eq!(report(&[1, 2, 3], 3), None);
        assert_eq!(report(&[7, 8], 8), None, "resumed from another folder at step 6");
        assert_eq!(report(&[], 4), None);
        assert_eq!(report(&[1, 2, 6, 8], 10).unwrap(), "missing: steps 3 to 5, 7, 9 to 10");
        assert_eq!(report(&[1, 2, 3, 2, 3, 4], 4).unwrap(), "double: steps 2 to 3");
        assert_eq!(report(&[1, 1, 3], 3).unwrap(), "missing: steps 2; double: steps 1");
        let odd: Vec<u64> = (0..8).map(|number| 2 * number + 1).collect();
        let expected = "missing: steps 2, 4, 6, 8, 10 and 2 more ranges";
        assert_eq!(report(&odd, 15).unwrap(), expected);
    }
}
