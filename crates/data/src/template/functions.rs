//! Functions of templates: Python's `json.dumps(value, ensure_ascii=False)`, for templates that
//! print tools and tool calls, and `strftime_now`. It uses UTC, so that the text does not depend on
//! the machine.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, Utc};
use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Formats `value` with Python's separators `", "` and `": "`, or on lines with `indent` spaces per
/// level.
pub(super) fn dumps(value: &Value, indent: Option<usize>) -> Result<String, Error> {
    let mut writer = JsonWriter { out: String::new(), indent, depth: 0 };
    writer.value(value)?;
    Ok(writer.out)
}

/// A number that templates would not print like Python, as its text.
#[derive(Debug)]
struct NumberText(String);

impl Object for NumberText {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(super) fn integer(digits: &str) -> Value {
    let value = digits.parse::<i128>().map(Value::from);
    value.unwrap_or_else(|_| Value::from_object(NumberText(digits.to_owned())))
}

/// A floating-point number, which prints as in Python.
pub(super) fn number(value: f64) -> Value {
    let text = float(value);
    if text.contains('e') { Value::from_object(NumberText(text)) } else { Value::from(value) }
}

struct JsonWriter {
    out: String,
    indent: Option<usize>,
    depth: usize,
}

impl JsonWriter {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        if let Some(NumberText(digits)) = value.downcast_object_ref() {
            self.out.push_str(digits);
            return Ok(());
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let items = value.try_iter()?.collect::<Vec<_>>();
                self.container(['[', ']'], &items, Self::value)?;
            }
            ValueKind::Map => {
                let keys = value.try_iter()?.collect::<Vec<_>>();
                self.container(['{', '}'], &keys, |this, key| {
                    this.string(&key.to_string());
                    this.out.push_str(": ");
                    this.value(&value.get_item(key)?)
                })?;
            }
            kind => {
                let message = format!("`tojson` does not support a value of type {kind}");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        items: &[Value],
        mut item: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        self.depth += 1;
        for (index, value) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(if self.indent.is_some() { "," } else { ", " });
            }
            self.new_line();
            item(self, value)?;
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.new_line();
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * self.depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..'\u{20}' => {
                    let code = format!("\\u{:04x}", c as u32);
                    self.out.push_str(&code);
                }
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Formats a float like Python's `repr`: shortest digits, with an exponent below 1e-4 and from 1e16
/// on.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) =
            exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{value:?}")
}

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
    fn floats_are_formatted_as_in_python() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (123456789.125, "123456789.125"),
            (9007199254740993.0, "9007199254740992.0"),
            (1e16, "1e+16"),
            (-2.5e100, "-2.5e+100"),
        ];
        for (value, text) in cases {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn integers_of_any_size_are_printed_as_written() {
        let digits = "9".repeat(60);
        for text in
            ["7", "18446744073709551616", "-170141183460469231731687303715884105728", &digits]
        {
            assert_eq!(dumps(&integer(text), None).unwrap(), text);
            assert_eq!(integer(text).to_string(), text);
        }
    }

    #[test]
    fn html_non_ascii_text_and_key_order_are_kept() {
        let inner = Value::from_pairs([("z", Value::from("<\u{e9}&'\"\\\n\u{1}\u{7f}>"))]);
        let items = vec![Value::from(1), Value::from(true), Value::from(()), inner];
        let value = Value::from_pairs([("b", Value::from(items)), ("a", Value::from(2.5))]);
        let expected =
            "{\"b\": [1, true, null, {\"z\": \"<\u{e9}&'\\\"\\\\\\n\\u0001\u{7f}>\"}], \"a\": 2.5}";
        assert_eq!(dumps(&value, None).unwrap(), expected);
    }

    #[test]
    fn empty_containers_stay_on_one_line_with_indentation() {
        let value = Value::from_pairs([
            ("a", Value::from(vec![1, 2])),
            ("b", Value::from(Vec::<i32>::new())),
        ]);
        let expected = "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": []\n}";
        assert_eq!(dumps(&value, Some(2)).unwrap(), expected);
    }

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
