//! The template function `strftime_now`. It uses UTC, so that the text does not depend on the
//! machine.

use std::time::SystemTime;

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, Utc};
use minijinja::{Error, ErrorKind};

/// Formats `time`. An unknown directive is an error.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, Error> {
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        let message = format!("`strftime_now` does not support a directive in `{format}`");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(DateTime::<Utc>::from(time).format_with_items(items.iter()).to_string())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn dates_are_formatted_as_in_python() {
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
    fn the_error_for_an_unsupported_directive_names_it() {
        let error = strftime("%Q", UNIX_EPOCH).unwrap_err();
        assert!(error.to_string().contains("does not support a directive in `%Q`"));
    }
}
