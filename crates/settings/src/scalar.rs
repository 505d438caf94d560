//! Plain YAML scalars as numbers and booleans (the core schema of YAML 1.2).

/// Reads `true` or `false`. The `yes` and `on` of YAML 1.1 are text.
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" | "True" | "TRUE" => Some(true),
        "false" | "False" | "FALSE" => Some(false),
        _ => None,
    }
}

/// Reads a decimal, `0x` or `0o` integer, which may have `_` between digits.
pub(crate) fn integer(text: &str) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (radix, digits) = match digits.get(..2) {
        Some("0x") => (16, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        _ => (10, digits),
    };
    let digits = without_separators(digits)?;
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    i128::from_str_radix(&digits, radix).ok().map(|value| sign * value)
}

/// Reads a decimal number, with or without point and exponent, `.inf` or `.nan`.
pub(crate) fn float(text: &str) -> Option<f64> {
    match text {
        ".nan" | ".NaN" | ".NAN" => return Some(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => return Some(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => return Some(f64::NEG_INFINITY),
        _ => {}
    }
    if let Some(integer) = integer(text) {
        return Some(integer as f64);
    }
    let digits = without_separators(text)?;
    // Rust also parses `inf`, `nan` and `infinity`, which are text in YAML.
    let is_number = digits.chars().all(|c| matches!(c, '0'..='9' | '.' | 'e' | 'E' | '+' | '-'));
    is_number.then(|| digits.parse().ok()).flatten()
}

/// Removes each `_` between two digits; `None` if there is one elsewhere.
fn without_separators(text: &str) -> Option<String> {
    let letters: Vec<char> = text.chars().collect();
    let is_digit = |index: usize| letters.get(index).is_some_and(char::is_ascii_hexdigit);
    let is_separator = |index: usize| index > 0 && is_digit(index - 1) && is_digit(index + 1);
    (0..letters.len())
        .filter(|&index| letters[index] != '_' || !is_separator(index))
        .map(|index| (letters[index] != '_').then_some(letters[index]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        for (text, value) in [
            ("8192", Some(8192)),
            ("8_192", Some(8192)),
            ("-3", Some(-3)),
            ("+3", Some(3)),
            ("0x1F", Some(31)),
            ("0o17", Some(15)),
            ("017", Some(17)),
            ("0", Some(0)),
            ("", None),
            ("-", None),
            ("+-3", None),
            ("1.0", None),
            ("_1", None),
            ("1_", None),
            ("1__0", None),
            ("12a", None),
            ("0x", None),
        ] {
            assert_eq!(integer(text), value, "{text}");
        }
        for (text, value) in [
            ("1e-5", Some(1e-5)),
            ("1.0e-5", Some(1e-5)),
            ("1E5", Some(1e5)),
            (".5", Some(0.5)),
            ("-2.5", Some(-2.5)),
            ("3", Some(3.0)),
            (".inf", Some(f64::INFINITY)),
            ("inf", None),
            ("nan", None),
            ("1e", None),
            ("1.2.3", None),
            ("", None),
        ] {
            assert_eq!(float(text), value, "{text}");
        }
        assert!(float(".nan").unwrap().is_nan());
    }

    #[test]
    fn only_true_and_false_are_booleans() {
        assert_eq!(boolean("true"), Some(true));
        assert_eq!(boolean("False"), Some(false));
        for text in ["yes", "no", "on", "off", "1", "0", ""] {
            assert_eq!(boolean(text), None);
        }
    }
}
