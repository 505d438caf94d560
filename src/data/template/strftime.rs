//! `strftime_now` of templates that write a date; UTC, so that every machine writes the same.

use std::time::SystemTime;

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, Utc};
use minijinja::{Error, ErrorKind};

/// Formats `time`; an error for a format with an unknown directive.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, Error> {
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        let message = format!("`strftime_now`: `{format}` is not supported");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(DateTime::<Utc>::from(time).format_with_items(items.iter()).to_string())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn dates_are_written_as_python_writes_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let cases = [
            (0, "%Y-%m-%d %A", "1970-01-01 Thursday"),
            (951_782_400, "%d %b %Y %a", "29 Feb 2000 Tue"),
            (1_735_689_599, "%d %B %y %H:%M:%S %%", "31 December 24 23:59:59 %"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(strftime(format, at(seconds)).unwrap(), expected);
        }
    }

    #[test]
    fn an_unknown_directive_is_named() {
        let error = strftime("%Q", UNIX_EPOCH).unwrap_err();
        assert!(error.to_string().contains("`%Q` is not supported"));
    }
}
