//! The template function `strftime_now`. It uses UTC, so that the text does not depend on the
//! machine.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"]; // from 1970-01-01

/// Formats `time`. Supports `%Y %m %d %H %M %S %B %b %A %a %y %%`; other directives are errors.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, Error> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next().unwrap_or('%');
        out.push_str(&match directive {
            'Y' => year.to_string(),
            'm' => two_digits(month),
            'd' => two_digits(day),
            'H' => two_digits(second / 3600),
            'M' => two_digits(second / 60 % 60),
            'S' => two_digits(second % 60),
            'B' => month_name.to_owned(),
            'b' => month_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'a' => day_name[..3].to_owned(),
            'y' => two_digits(year % 100),
            '%' => "%".to_owned(),
            other => {
                let message = format!("`strftime_now` does not support the directive `%{other}`");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        });
    }
    Ok(out)
}

fn two_digits(value: u64) -> String {
    format!("{value:02}")
}

/// Converts days since 1970-01-01 to year, month and day.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let mut year = 1970;
    loop {
        let length = 365 + u64::from(is_leap(year));
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, days + 1)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        assert!(error.to_string().contains("does not support the directive `%Q`"));
    }
}
