//! NFC, and which bytes of the text each character of the result stands for.

use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization as _, is_nfc_quick};

use super::classes::{Classes, UNSTABLE};

/// A text in NFC.
pub(super) struct Normalised {
    /// The result.
    pub text: String,
    /// For each of its bytes the bytes of the text before, from and to. A character that was joined
    /// from several has those of the first.
    pub spans: Vec<(usize, usize)>,
}

/// Whether `text` is in NFC beyond doubt. A text that is may give `false`, and takes longer then.
pub(super) fn is_nfc(classes: Classes, text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some((flags, len)) = classes.at(bytes, at) {
        if flags & UNSTABLE != 0 {
            return is_nfc_quick(text[at..].chars()) == IsNormalized::Yes;
        }
        at += len;
    }
    true
}

/// Normalises. A character of the result comes with a change: 1 if it was split off from the one
/// before, else 0, less the number of characters after it that were joined to it.
pub(super) fn nfc(text: &str) -> Normalised {
    let mut source = text.char_indices().map(|(at, c)| (at, at + c.len_utf8()));
    let mut span = (0, 0);
    let mut result = Normalised { text: String::with_capacity(text.len()), spans: Vec::new() };
    for (c, change) in text.nfc() {
        let mut last = span;
        if change <= 0 {
            span = source.next().unwrap_or(span);
            last = span;
            for _ in change..0 {
                last = source.next().unwrap_or(last);
            }
        }
        result.text.push(c);
        result.spans.extend(std::iter::repeat_n(span, c.len_utf8()));
        span = last;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_split_and_reordered_characters_know_where_they_come_from() {
        // e + acute joins; the Devanagari qa splits into ka and nukta; dot below sorts before acute
        for (text, expected, spans) in [
            ("e\u{301}x", "\u{e9}x", [(0, 1), (0, 1), (3, 4)].as_slice()),
            (
                "\u{958}x",
                "\u{915}\u{93c}x",
                &[(0, 3), (0, 3), (0, 3), (0, 3), (0, 3), (0, 3), (3, 4)],
            ),
        ] {
            let result = nfc(text);
            assert_eq!((result.text.as_str(), result.spans.as_slice()), (expected, spans));
        }
    }

    #[test]
    fn a_text_in_nfc_is_told_from_others() {
        for (text, expected) in [
            ("", true),
            ("plain \u{e9}\u{4e2d}\u{1f600}", true),
            ("\u{e9}\u{4e2d} e\u{301}", false),
            ("\u{5e9}\u{5c1}", true),
            ("\u{212b}", false),
            ("\u{1100}\u{1161}", false),
        ] {
            assert_eq!(is_nfc(Classes::get(), text), expected, "{text:?}");
        }
    }
}
