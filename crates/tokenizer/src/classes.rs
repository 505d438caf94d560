//! Character classes for the tokenizer: letter, number, space, and changed by NFC.
//!
//! The classes come from the crates that the `tokenizers` crate uses, so that both use the same
//! version of Unicode.

use std::iter;
use std::sync::LazyLock;

use regex_syntax::Parser;
use regex_syntax::hir::{Class, HirKind};
use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

/// Flag of [`Letters`].
pub(super) const LETTER: u8 = 1;
/// Flag of the class `\p{N}`.
pub(super) const NUMBER: u8 = 2;
/// Flag of the class `\s`.
pub(super) const SPACE: u8 = 4;
/// Mask of the flags that determine where words end.
pub(super) const KIND: u8 = LETTER | NUMBER | SPACE;
/// Flag of characters that NFC may change, or whose neighbours it may change. All of them are in
/// [`COMBINING`].
pub(super) const UNSTABLE: u8 = 8;

/// Range of the characters that are tested for [`UNSTABLE`]. A test checks that it contains all.
const COMBINING: std::ops::Range<u32> = 0x300..0x2fa20;

/// The characters of a word that are not numbers, spaces or symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Letters {
    /// The class `\p{L}`, of Qwen3.
    Plain,
    /// The classes `\p{L}` and `\p{M}`, of Qwen3.5.
    WithMarks,
}

impl Letters {
    /// The class, as written in `tokenizer.json`.
    fn class(self) -> &'static str {
        match self {
            Self::Plain => r"\p{L}",
            Self::WithMarks => r"[\p{L}\p{M}]",
        }
    }
}

static PLAIN: LazyLock<Vec<u8>> = LazyLock::new(|| flags(Letters::Plain));
static WITH_MARKS: LazyLock<Vec<u8>> = LazyLock::new(|| flags(Letters::WithMarks));

/// Flags of all characters, `[char::MAX + 1]`.
fn flags(letters: Letters) -> Vec<u8> {
    let mut flags = vec![0; char::MAX as usize + 1];
    for (class, flag) in [(letters.class(), LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE)] {
        let parsed = Parser::new().parse(class).expect("the classes are valid constants");
        let HirKind::Class(Class::Unicode(ranges)) = parsed.kind() else {
            unreachable!("the pattern is a class of characters")
        };
        for range in ranges.iter() {
            for flags in &mut flags[range.start() as usize..=range.end() as usize] {
                *flags |= flag;
            }
        }
    }
    for c in COMBINING.filter_map(char::from_u32).filter(|c| is_unstable(*c)) {
        flags[c as usize] |= UNSTABLE;
    }
    flags
}

fn is_unstable(c: char) -> bool {
    canonical_combining_class(c) != 0 || is_nfc_quick(iter::once(c)) != IsNormalized::Yes
}

/// Table of character flags. A caller gets it once per text, to avoid a check per character.
#[derive(Debug, Clone, Copy)]
pub(super) struct Classes(&'static [u8]);

impl Classes {
    /// Returns the table, which the first call builds.
    pub(super) fn get(letters: Letters) -> Self {
        match letters {
            Letters::Plain => Self(&PLAIN),
            Letters::WithMarks => Self(&WITH_MARKS),
        }
    }

    /// Returns the flags and the number of bytes of the character at byte `at` of the UTF-8
    /// `text`; `None` at the end.
    #[inline]
    pub(super) fn at(self, text: &[u8], at: usize) -> Option<(u8, usize)> {
        let first = u32::from(*text.get(at)?);
        if first < 0x80 {
            return Some((self.0[first as usize], 1));
        }
        let next = |i: usize| u32::from(text[at + i]) & 0x3f;
        let (c, len) = match first {
            0..0xe0 => ((first & 0x1f) << 6 | next(1), 2),
            0xe0..0xf0 => ((first & 0x0f) << 12 | next(1) << 6 | next(2), 3),
            _ => ((first & 0x07) << 18 | next(1) << 12 | next(2) << 6 | next(3), 4),
        };
        Some((self.0[c as usize], len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_nfc_may_change_are_all_flagged() {
        for c in '\0'..=char::MAX {
            let unstable = PLAIN[c as usize] & UNSTABLE != 0;
            assert_eq!(unstable, is_unstable(c), "{:04x}", c as u32);
        }
    }

    #[test]
    fn characters_of_every_utf8_length_are_decoded() {
        let text = "a1 \u{e9}\u{301}\u{3000}\u{4e2d}\u{1f600}\u{1d400}";
        let mut at = 0;
        let mut found = Vec::new();
        while let Some((flags, len)) = Classes::get(Letters::Plain).at(text.as_bytes(), at) {
            found.push((flags, len));
            at += len;
        }
        let expected = [
            (LETTER, 1),
            (NUMBER, 1),
            (SPACE, 1),
            (LETTER, 2),
            (UNSTABLE, 2),
            (SPACE, 3),
            (LETTER, 3),
            (0, 4),
            (LETTER, 4),
        ];
        assert_eq!((found.as_slice(), at), (expected.as_slice(), text.len()));
    }
}
