//! Splits a text at added tokens.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Piece {
    /// Start and end byte of text without added tokens; never empty.
    Text(usize, usize),
    /// Id, start byte and end byte of an added token.
    Token(u32, usize, usize),
}

/// Added tokens, indexed by their first byte.
#[derive(Debug)]
pub(super) struct AddedTokens {
    by_first: Vec<Vec<(Box<str>, u32)>>, // [256], each list from the longest token to the shortest
    is_empty: bool,
}

impl AddedTokens {
    /// Indexes tokens, given as content and id. No content may be empty.
    pub(super) fn new<'a>(tokens: impl IntoIterator<Item = (&'a str, u32)>) -> Self {
        let mut by_first = vec![Vec::new(); 256];
        for (content, id) in tokens {
            by_first[usize::from(content.as_bytes()[0])].push((Box::from(content), id));
        }
        for tokens in &mut by_first {
            tokens.sort_by_key(|(content, _): &(Box<str>, u32)| std::cmp::Reverse(content.len()));
        }
        let is_empty = by_first.iter().all(Vec::is_empty);
        Self { by_first, is_empty }
    }

    /// Calls `each` with the pieces of `text`, in order. Of several tokens that match at the same
    /// place, the longest is used.
    pub(super) fn split(&self, text: &str, mut each: impl FnMut(Piece)) {
        let bytes = text.as_bytes();
        let (mut begin, mut at) = (0, if self.is_empty { bytes.len() } else { 0 });
        while let Some(byte) = bytes.get(at) {
            let found = self.by_first[usize::from(*byte)]
                .iter()
                .find(|(content, _)| bytes[at..].starts_with(content.as_bytes()));
            let Some((content, id)) = found else {
                at += 1;
                continue;
            };
            if begin < at {
                each(Piece::Text(begin, at));
            }
            begin = at + content.len();
            each(Piece::Token(*id, at, begin));
            at = begin;
        }
        if begin < bytes.len() {
            each(Piece::Text(begin, bytes.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_token_at_the_first_match_is_found() {
        let tokens = AddedTokens::new([("<a>", 1), ("<a>b", 2), ("a", 3), ("<", 4)]);
        let mut pieces = Vec::new();
        tokens.split("x<a>bc<a>a<<", |piece| pieces.push(piece));
        let (text, token) = (Piece::Text, Piece::Token);
        let expected = [
            text(0, 1),
            token(2, 1, 5),
            text(5, 6),
            token(1, 6, 9),
            token(3, 9, 10),
            token(4, 10, 11),
            token(4, 11, 12),
        ];
        assert_eq!(pieces, expected);
        tokens.split("", |piece| panic!("{piece:?} in an empty text"));
    }
}
