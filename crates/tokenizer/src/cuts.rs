//! Finds places inside a word that no token crosses, so that its parts can be tokenised separately.
//!
//! In scripts without spaces, words are as long as sentences. If no token of the vocabulary
//! contains the bytes around the place between two characters, no merge crosses it. The parts
//! between such places are short and repeat often, so their tokens can be cached.

/// Number of hash bits that index [`Cuts::wide`].
const WIDE_BITS: u32 = 22;

/// Byte sequences that occur inside tokens around the start of a multi-byte character.
#[derive(Debug)]
pub(super) struct Cuts {
    wide: Vec<u64>, // bit set, indexed by the hash of three bytes before and three after
    narrow: Vec<bool>, // [256 * 256] by one byte before and one after, for places near token ends
}

impl Cuts {
    /// Collects the byte sequences of `tokens`, the bytes of every token of the model.
    pub(super) fn new(tokens: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut cuts = Self { wide: vec![0; 1 << (WIDE_BITS - 6)], narrow: vec![false; 1 << 16] };
        for token in tokens {
            for at in (1..token.len()).filter(|at| is_between(&token, *at)) {
                if let Some(bit) = wide_bit(&token, at) {
                    cuts.wide[bit / 64] |= 1 << (bit % 64);
                } else {
                    cuts.narrow[narrow_index(&token, at)] = true;
                }
            }
        }
        cuts
    }

    /// Returns the first place after `at` where `word` can be cut, or its end.
    pub(super) fn next(&self, word: &[u8], at: usize) -> usize {
        let mut places = at + 1..word.len();
        places.find(|at| is_between(word, *at) && !self.may_join(word, *at)).unwrap_or(word.len())
    }

    /// Returns whether a token may cross the place. `true` may be wrong, because hashes collide.
    fn may_join(&self, word: &[u8], at: usize) -> bool {
        let Some(bit) = wide_bit(word, at) else { return true };
        self.wide[bit / 64] >> (bit % 64) & 1 != 0 || self.narrow[narrow_index(word, at)]
    }
}

/// Returns whether a multi-byte character starts at `at`, directly after another one.
fn is_between(bytes: &[u8], at: usize) -> bool {
    bytes[at] >= 0xc0 && bytes[at - 1] >= 0x80
}

fn wide_bit(bytes: &[u8], at: usize) -> Option<usize> {
    let six: &[u8; 6] = bytes.get(at.checked_sub(3)?..)?.first_chunk()?;
    let [a, b, c, d, e, f] = *six;
    let hash = u64::from_le_bytes([a, b, c, d, e, f, 0, 0]).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Some((hash >> (64 - WIDE_BITS)) as usize)
}

fn narrow_index(bytes: &[u8], at: usize) -> usize {
    usize::from(bytes[at - 1]) << 8 | usize::from(bytes[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_cut_where_no_token_crosses() {
        // three tokens of Chinese characters: `ab`, `bc` and `a`
        let (a, b, c, d) = ("\u{4e00}", "\u{4e01}", "\u{4e02}", "\u{4e43}");
        let tokens = [format!("{a}{b}"), format!("{b}{c}"), a.to_owned()].map(String::into_bytes);
        let cuts = Cuts::new(tokens.into_iter());
        let word = format!("{a}{b}{c}{a}x{a}{b}");
        let places = |cuts: &Cuts, word: &str| {
            let mut places = vec![0];
            while *places.last().unwrap() < word.len() {
                places.push(cuts.next(word.as_bytes(), *places.last().unwrap()));
            }
            places
        };
        assert_eq!(places(&cuts, &word), [0, 9, 19]);
        // a token that starts inside a character may cross the place after any character that ends
        // with the same byte
        let inside = [a.as_bytes()[2..].to_vec(), [&a.as_bytes()[2..], b.as_bytes()].concat()];
        let cuts = Cuts::new(inside.into_iter());
        assert_eq!(places(&cuts, &format!("{c}{b}{a}{b}{d}")), [0, 3, 6, 12, 15]);
    }
}
