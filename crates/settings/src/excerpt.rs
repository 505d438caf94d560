//! The line of an error, with the word underlined.

use std::fmt;

/// Maximum number of characters shown; a longer line is shown from the underlined word on.
const WIDTH: usize = 100;

/// An excerpt to display below a message; empty if the line does not exist.
pub(crate) struct Excerpt<'a>(Option<Line<'a>>);

struct Line<'a> {
    number: usize,
    text: &'a str,
    column: usize,
}

impl<'a> Excerpt<'a> {
    /// `line` and `column` count from 1, columns in characters.
    pub(crate) fn of(text: &'a str, line: usize, column: usize) -> Self {
        let found = text.lines().nth(line.saturating_sub(1));
        Self(found.filter(|text| !text.trim().is_empty()).map(|text| Line {
            number: line,
            text,
            column,
        }))
    }

    pub(crate) fn none() -> Self {
        Self(None)
    }
}

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(Line { number, text, column }) = self.0 else { return Ok(()) };
        let before = column.saturating_sub(1);
        let skipped = if before + 20 > WIDTH { before } else { 0 };
        // A tab becomes one space, so that the underline stays below its word.
        let shown: String = text
            .chars()
            .skip(skipped)
            .take(WIDTH)
            .map(|letter| if letter.is_control() { ' ' } else { letter })
            .collect();
        let word = text.chars().skip(before).take_while(|letter| is_word(*letter)).count();
        let margin = " ".repeat(number.to_string().len());
        let indent = " ".repeat(before - skipped);
        let mark = "^".repeat(word.clamp(1, WIDTH));
        write!(f, "\n {margin} |\n {number} | {}\n {margin} | {indent}{mark}", shown.trim_end())
    }
}

fn is_word(letter: char) -> bool {
    !letter.is_whitespace() && !matches!(letter, ':' | ',' | '[' | ']' | '{' | '}' | '#')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_below_the_word() {
        let text = "data:\n  packing_lenght: 8192  # tokens\n";
        assert_eq!(
            Excerpt::of(text, 2, 3).to_string(),
            "\n   |\n 2 |   packing_lenght: 8192  # tokens\n   |   ^^^^^^^^^^^^^^"
        );
    }

    #[test]
    fn a_long_line_is_shown_from_the_word_on() {
        let text = format!("[{}, wrong]", "x".repeat(500));
        let shown = Excerpt::of(&text, 1, 504).to_string();
        assert!(shown.ends_with("1 | wrong]\n   | ^^^^^"), "{shown}");
    }

    #[test]
    fn a_place_past_the_end_shows_nothing() {
        for (line, column) in [(3, 1), (2, 1), (0, 0)] {
            let shown = Excerpt::of("\n\n", line, column).to_string();
            assert_eq!(shown, "");
        }
        assert_eq!(Excerpt::of("a: 1", 1, 99).to_string().lines().count(), 4);
    }
}
