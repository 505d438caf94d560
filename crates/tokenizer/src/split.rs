//! Splits a text into words: a scanner for the split patterns of the published Qwen tokenizers.
//!
//! ```text
//! (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N} | ?[^\s\p{L}\p{N}]+[\r\n]*
//!                              | \s*[\r\n]+ | \s+(?!\S) | \s+
//! ```
//!
//! In the pattern of Qwen3.5, marks (`\p{M}`) are letters, except in the class before the first
//! letter. There it makes no difference: a mark begins the same word as its first letter.
//!
//! The first alternative that matches is used, with its longest match. Some alternative matches at
//! every character, so the words cover the text without gaps.

use super::classes::{Classes, KIND, LETTER, Letters, NUMBER, SPACE};

/// The patterns that [`word_end`] implements, as written in `tokenizer.json`.
pub(super) const PATTERNS: [(Letters, &str); 2] = [
    (
        Letters::Plain,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        Letters::WithMarks,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// Returns the end of the word that starts at byte `at` of the UTF-8 `text`. `at` must be below the
/// length of the text.
pub(super) fn word_end(classes: Classes, text: &[u8], at: usize) -> usize {
    let run = |kind: u8, mut at: usize| {
        while let Some((flags, len)) = classes.at(text, at) {
            if flags & KIND != kind {
                break;
            }
            at += len;
        }
        at
    };
    let Some((flags, len)) = classes.at(text, at) else { return at };
    let next = at + len;
    match flags & KIND {
        LETTER => return run(LETTER, next),
        NUMBER => return next,
        _ => {}
    }
    let first = text[at];
    if let Some(len) = contraction(&text[at..]) {
        return at + len;
    }
    let kind_at = |at| classes.at(text, at).map(|(flags, _)| flags & KIND);
    if !is_newline(first) && kind_at(next) == Some(LETTER) {
        return run(LETTER, next);
    }
    let body = if first == b' ' { next } else { at };
    if kind_at(body) == Some(0) {
        let end = run(0, body);
        let newlines = text[end..].iter().take_while(|byte| is_newline(**byte)).count();
        return end + newlines;
    }
    let (mut end, mut last, mut after_newline) = (at, at, None);
    while let Some((flags, len)) = classes.at(text, end) {
        if flags & SPACE == 0 {
            break;
        }
        last = end;
        end += len;
        if is_newline(text[last]) {
            after_newline = Some(end);
        }
    }
    match after_newline {
        Some(after_newline) => after_newline,
        // `\s+(?!\S)`: of several spaces before a word, the last one is left for the next match
        None if end < text.len() && last > at => last,
        None => end,
    }
}

fn is_newline(byte: u8) -> bool {
    byte == b'\r' || byte == b'\n'
}

/// Returns the number of bytes of the contraction at the start of `text`. Case-insensitively, `s`
/// also matches the long s (U+017F, bytes `c5 bf`).
fn contraction(text: &[u8]) -> Option<usize> {
    let lower = |at: usize| text.get(at).map(u8::to_ascii_lowercase);
    if text[0] != b'\'' {
        return None;
    }
    match (lower(1)?, lower(2)) {
        (b's' | b't' | b'm' | b'd', _) => Some(2),
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) | (0xc5, Some(0xbf)) => Some(3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(letters: Letters, text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        let mut at = 0;
        while at < text.len() {
            let end = word_end(Classes::get(letters), text.as_bytes(), at);
            words.push(&text[at..end]);
            at = end;
        }
        words
    }

    #[test]
    fn words_match_the_pattern() {
        for (text, expected) in [
            ("don't WE'LL x'\u{17f}", &["don", "'t", " WE", "'LL", " x", "'\u{17f}"] as &[_]),
            ("'hello' 'r", &["'hello", "'", " '", "r"]),
            ("a1 23", &["a", "1", " ", "2", "3"]),
            ("a  b   ", &["a", " ", " b", "   "]),
            ("a \n\n b", &["a", " \n\n", " b"]),
            ("a \n  ", &["a", " \n", "  "]),
            ("x!?\r\n\n y", &["x", "!?\r\n\n", " y"]),
            ("\u{3000}\u{4e2d}\u{6587}, ok", &["\u{3000}\u{4e2d}\u{6587}", ",", " ok"]),
            ("\u{3000}\u{3000}!", &["\u{3000}", "\u{3000}", "!"]),
            ("\t\tx\t!", &["\t", "\tx", "\t", "!"]),
            (" ?!", &[" ?!"]),
            ("e\u{301}a", &["e", "\u{301}a"]),
        ] {
            assert_eq!(words(Letters::Plain, text), expected, "{text:?}");
        }
        for (text, expected) in [
            ("e\u{301}a", &["e\u{301}a"] as &[_]),
            ("\u{301}a!\u{301} ?\u{301}", &["\u{301}a", "!\u{301}", " ?", "\u{301}"]),
            (" \u{301}1", &[" \u{301}", "1"]),
        ] {
            assert_eq!(words(Letters::WithMarks, text), expected, "{text:?}");
        }
    }
}
