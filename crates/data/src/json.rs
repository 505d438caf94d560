//! JSON of data rows, with integers of any size.
//!
//! `serde_json` reads an integer outside of the range of 64 bits as a float, so `10^30` would
//! become `1e+30` in the rendered chat. Here such an integer is kept as written: it is an object
//! with one key, made by [`parse`] and recognised by [`long_integer`]. The feature
//! `arbitrary_precision` of `serde_json` does the same, but it changes how every crate of the
//! program reads numbers.

use serde_json::{Error, Value};

/// Key of an object that represents an integer; its value has the digits. `\u{0}` makes it differ
/// from every key of users.
const LONG_INTEGER_KEY: &str = "\u{0}integer";
/// Minimum length of an integer that may need more than 64 bits, in digits.
const LONG_DIGITS: usize = 19;

/// Parses JSON and keeps integers of more than 64 bits as written.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, Error> {
    if has_long_run_of_digits(bytes)
        && let Some(marked) = with_marked_integers(bytes)
        && let Ok(value) = serde_json::from_slice(&marked)
    {
        return Ok(value);
    }
    serde_json::from_slice(bytes)
}

/// The digits of an integer of more than 64 bits, with its sign; `None` for every other value.
pub(super) fn long_integer(value: &Value) -> Option<&str> {
    value.as_object().filter(|object| object.len() == 1)?.get(LONG_INTEGER_KEY)?.as_str()
}

/// An upper bound of the number of values in JSON text. An object counts as 8, because its map
/// takes the memory of several values. Text that is not JSON has some number, too.
pub(super) fn values(bytes: &[u8]) -> usize {
    let (mut count, mut at) = (1, 0);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => at += string_length(&bytes[at..]).max(1) - 1,
            b',' | b'[' => count += 1,
            b'{' => count += 8,
            _ => {}
        }
        at += 1;
    }
    count
}

/// Returns whether `bytes` has [`LONG_DIGITS`] digits in a row, in a number or a string. It reads
/// few of the bytes, because such a run covers one of every [`LONG_DIGITS`] positions.
fn has_long_run_of_digits(bytes: &[u8]) -> bool {
    let mut at = LONG_DIGITS - 1;
    while let Some(byte) = bytes.get(at) {
        if byte.is_ascii_digit() {
            let is_digit = |byte: &&u8| byte.is_ascii_digit();
            let before = bytes[..at].iter().rev().take_while(is_digit).count();
            let after = bytes[at..].iter().take_while(is_digit).count();
            if before + after >= LONG_DIGITS {
                return true;
            }
            at += after;
        }
        at += LONG_DIGITS;
    }
    false
}

/// The JSON text with an object in place of each integer that 64 bits do not hold; `None` if there
/// is none.
fn with_marked_integers(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut marked = Vec::new();
    let (mut at, mut copied) = (0, 0);
    while let Some(byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let length = match byte {
            b'"' => string_length(rest),
            b'-' | b'0'..=b'9' => rest.iter().take_while(|byte| is_of_number(**byte)).count(),
            _ => 1,
        };
        let number = std::str::from_utf8(&rest[..length]).unwrap_or_default();
        if is_long_integer(number) {
            marked.extend_from_slice(&bytes[copied..at]);
            marked.extend_from_slice(format!("{{\"\\u0000integer\":\"{number}\"}}").as_bytes());
            copied = at + length;
        }
        at += length;
    }
    marked.extend_from_slice(&bytes[copied..]);
    Some(marked).filter(|_| copied > 0)
}

fn is_of_number(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')
}

/// Whether `text` is an integer in JSON's spelling and needs more than 64 bits.
fn is_long_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    digits.len() >= LONG_DIGITS
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && !digits.starts_with('0')
        && text.parse::<i64>().is_err()
        && text.parse::<u64>().is_err()
}

/// Length of the string that starts with the quotation mark `text[0]`, with both marks.
fn string_length(text: &[u8]) -> usize {
    let mut at = 1;
    while let Some(byte) = text.get(at) {
        at += match byte {
            b'"' => return at + 1,
            b'\\' => 2,
            _ => 1,
        };
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn integers_of_more_than_64_bits_keep_their_digits_and_others_are_numbers() {
        let digits = "1".repeat(400);
        for text in ["18446744073709551616", "-9223372036854775809", &digits] {
            let value = parse(format!("{{\"a\": [{text}, 1]}}").as_bytes()).unwrap();
            assert_eq!(long_integer(&value["a"][0]), Some(text));
            assert_eq!(value["a"][1], json!(1));
        }
        for (text, value) in [
            ("18446744073709551615", json!(u64::MAX)),
            ("-9223372036854775808", json!(i64::MIN)),
            ("1000000000000000000000000000000.0", json!(1e30)),
            ("1000000000000000000000000000000e0", json!(1e30)),
            ("\"18446744073709551616\"", json!("18446744073709551616")),
            (r#""\"18446744073709551616""#, json!("\"18446744073709551616")),
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap(), value, "{text}");
        }
    }

    /// The nearest double of each text has this text as its shortest one.
    #[test]
    fn numbers_keep_their_text() {
        for text in [
            "0.9385958677423489",
            "0.1",
            "123456789.12345679",
            "5e-324",
            "2.2250738585072014e-308",
            "1.7976931348623157e+308",
            "-0.0",
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap().to_string(), text);
        }
        // multiples of an irrational step, as random numbers
        for step in 1..2000 {
            let text = (f64::from(step) * 0.618_033_988_749_894_9).fract().to_string();
            assert_eq!(parse(text.as_bytes()).unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_long_integer_is_found_at_every_position() {
        for before in 0..60 {
            let text = format!("{}[18446744073709551616 , 3]", " ".repeat(before));
            let value = parse(text.as_bytes()).unwrap();
            assert_eq!(long_integer(&value[0]), Some("18446744073709551616"), "{before}");
        }
    }

    #[test]
    fn an_error_names_the_column_of_the_text_as_written() {
        let error = parse(b"[18446744073709551616, x]").unwrap_err();
        assert_eq!(error.column(), 24);
    }
}
