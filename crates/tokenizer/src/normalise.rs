//! NFC normalisation that maps each byte of the result to its bytes in the original text.

use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization as _, is_nfc_quick};

use super::classes::{Classes, UNSTABLE};

/// A text in NFC.
pub(super) struct Normalised {
    pub text: String,
    /// Start and end byte of the original character, for each byte of `text`. A character that was
    /// composed from several has the span of the first.
    pub spans: Vec<(usize, usize)>,
}

/// Returns whether `text` is certainly in NFC. A text in NFC may also return `false`; the caller
/// then normalises it without effect.
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

/// Normalises `text` to NFC.
pub(super) fn nfc(text: &str) -> Normalised {
    let mut source = text.char_indices().map(|(at, c)| (at, at + c.len_utf8()));
    let mut span = (0, 0);
    let mut result = Normalised { text: String::with_capacity(text.len()), spans: Vec::new() };
    // `change` is 1 for a character that was split off from the one before; otherwise it is minus
    // the number of following characters that were composed into this one.
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
    use super::super::classes::Letters;
    use super::*;

    #[test]
    fn composed_and_decomposed_characters_keep_their_original_bytes() {
        // e + acute is composed; Devanagari qa is decomposed into ka and nukta
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
    fn is_nfc_accepts_only_texts_in_nfc() {
        for (text, expected) in [
            ("", true),
            ("plain \u{e9}\u{4e2d}\u{1f600}", true),
            ("\u{e9}\u{4e2d} e\u{301}", false),
            ("\u{5e9}\u{5c1}", true),
            ("\u{212b}", false),
            ("\u{1100}\u{1161}", false),
        ] {
            assert_eq!(is_nfc(Classes::get(Letters::Plain), text), expected, "{text:?}");
        }
    }
}
