//! The template function `strftime_now`. It uses UTC, so that the text does not depend on the
//! machine.

use std::time::SystemTime;

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, Utc};
use minijinja::{Error, ErrorKind};

/// Directives whose text is the same in Python. Others, such as `%f` and `%c`, differ.
const DIRECTIVES: &str = "YmdHMSBbAay%";

/// Formats `time`. A directive that is not in [`DIRECTIVES`] is an error.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, Error> {
    let mut directives = format.split('%').skip(1);
    let mut known = true;
    while let Some(rest) = directives.next() {
        // An empty part is the first half of `%%`; the text after it is not a directive.
        known &= match rest.chars().next() {
            Some(directive) => DIRECTIVES.contains(directive),
            None => directives.next().is_some(),
        };
    }
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if !known || items.contains(&Item::Error) {
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
            (0, "%%f%%%d%%", "%f%01%"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(strftime(format, at(seconds)).unwrap(), expected);
        }
    }

    #[test]
    fn the_error_for_an_unsupported_directive_names_it() {
        for format in ["%Q", "%f", "at %c", "50%", "%%%x"] {
            let error = strftime(format, UNIX_EPOCH).unwrap_err().to_string();
            assert!(
                error.contains(&format!("does not support a directive in `{format}`")),
                "{error}"
            );
        }
    }
}
