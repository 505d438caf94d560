//! Shows control characters of rows, file names and model folders as text, so that they cannot
//! control the terminal.

use std::borrow::Cow;

/// The codes with which the log sets colours: styles that hide nothing.
const COLOURS: [&str; 11] =
    ["[0m", "[1m", "[2m", "[3m", "[31m", "[32m", "[33m", "[34m", "[35m", "[36m", "[37m"];

/// Returns `text` with its control characters written as `\u{1b}`. Ends of lines and tabs stay.
pub(super) fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, |_| false)
}

/// [`escaped`] for a line of a log with colours, whose codes stay.
pub(super) fn escaped_with_colours(text: &str) -> Cow<'_, str> {
    escape(text, |rest| COLOURS.iter().any(|code| rest.starts_with(code)))
}

/// `is_colour` receives the text after an escape character.
fn escape(text: &str, is_colour: impl Fn(&str) -> bool) -> Cow<'_, str> {
    let is_raw = |at: usize, c: char| {
        let stays = matches!(c, '\n' | '\t') || (c == '\u{1b}' && is_colour(&text[at + 1..]));
        c.is_control() && !stays
    };
    if !text.char_indices().any(|(at, c)| is_raw(at, c)) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for (at, c) in text.char_indices() {
        if is_raw(at, c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_all_other_text_stays() {
        let text = "\u{1b}[2J\u{1b}[31mred\r\u{7}\u{9b}2J\u{7f}";
        let shown = r"\u{1b}[2J\u{1b}[31mred\r\u{7}\u{9b}2J\u{7f}";
        assert_eq!(escaped(text), shown);
        let plain = "two\nlines\t\u{4e2d} \u{1f4bb} \\u{1b}";
        assert!(matches!(escaped(plain), Cow::Borrowed(same) if same == plain));
    }

    #[test]
    fn a_log_keeps_its_colours_and_shows_all_other_codes() {
        let line = "\u{1b}[33m WARN\u{1b}[0m \u{1b}[8mhidden\u{1b}]0;title\u{7}";
        let shown = "\u{1b}[33m WARN\u{1b}[0m \\u{1b}[8mhidden\\u{1b}]0;title\\u{7}";
        assert_eq!(escaped_with_colours(line), shown);
    }
}
