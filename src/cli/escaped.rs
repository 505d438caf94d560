//! Shows control characters of rows, file names and model folders as text, so that they cannot
//! control the terminal.

use std::borrow::Cow;

/// The codes with which the log sets colours: styles that hide nothing.
const COLOURS: [&str; 11] =
    ["[0m", "[1m", "[2m", "[3m", "[31m", "[32m", "[33m", "[34m", "[35m", "[36m", "[37m"];

/// Returns `text` with its control characters written as `\u{1b}`. Ends of lines and tabs stay.
pub(super) fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, |c, _| matches!(c, '\n' | '\t'))
}

/// [`escaped`] for a log line, which stays one line whatever its fields contain. With `colours`, the
/// codes of colours stay.
pub(super) fn escaped_line(line: &str, colours: bool) -> Cow<'_, str> {
    let end = line.len() - usize::from(line.ends_with('\n'));
    escape(line, |c, at| {
        let is_colour = || COLOURS.iter().any(|code| line[at + 1..].starts_with(code));
        at == end || c == '\t' || (colours && c == '\u{1b}' && is_colour())
    })
}

/// [`escaped`] for a part of a message: lines after the first one begin with a space, as in excerpts
/// of files, so that no name in it can look like a line of its own.
pub(super) fn escaped_part(text: &str) -> Cow<'_, str> {
    escape(text, |c, at| c == '\t' || (c == '\n' && text[at + 1..].starts_with([' ', '\n'])))
}

/// `stays` receives a character and its place.
fn escape(text: &str, stays: impl Fn(char, usize) -> bool) -> Cow<'_, str> {
    // Besides control characters: ends of lines and of paragraphs, and changes of direction.
    let is_raw = |at: usize, c: char| {
        (c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'))
            && !stays(c, at)
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
        assert_eq!(escaped("\u{202e}fdp.exe"), r"\u{202e}fdp.exe");
        let plain = "two\nlines\t\u{4e2d} \u{1f4bb} \\u{1b}";
        assert!(matches!(escaped(plain), Cow::Borrowed(same) if same == plain));
    }

    #[test]
    fn a_log_line_stays_one_line_and_keeps_its_colours_only() {
        let line = "\u{1b}[33m WARN\u{1b}[0m \u{1b}[8mhidden\u{1b}]0;title\u{7}";
        let shown = "\u{1b}[33m WARN\u{1b}[0m \\u{1b}[8mhidden\\u{1b}]0;title\\u{7}";
        assert_eq!(escaped_line(line, true), shown);
        let forged = "no file `a\nhint: b`\n   |\n\n 2 | c: d";
        assert_eq!(escaped_part(forged), forged.replacen('\n', "\\n", 1));
        let forged = "INFO data file=a\n12:00:00 INFO finished\u{2028}\r\n\n";
        let shown = "INFO data file=a\\n12:00:00 INFO finished\\u{2028}\\r\\n\n";
        assert_eq!(escaped_line(forged, false), shown);
    }
}
