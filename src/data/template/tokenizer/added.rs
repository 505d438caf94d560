//! Added tokens: found in the text before anything else is done to it.

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// From and to this byte: text without added tokens, never empty.
    Text(usize, usize),
    /// An added token and its bytes.
    Token(u32, usize, usize),
}

/// The added tokens, by their first byte.
#[derive(Debug)]
pub(super) struct AddedTokens {
    by_first: Vec<Vec<(Box<str>, u32)>>, // 256 lists, the longest token first
}

impl AddedTokens {
    /// Takes contents, none of them empty, and ids.
    pub(super) fn new<'a>(tokens: impl IntoIterator<Item = (&'a str, u32)>) -> Self {
        let mut by_first = vec![Vec::new(); 256];
        for (content, id) in tokens {
            by_first[usize::from(content.as_bytes()[0])].push((Box::from(content), id));
        }
        for tokens in &mut by_first {
            tokens.sort_by_key(|(content, _): &(Box<str>, u32)| std::cmp::Reverse(content.len()));
        }
        Self { by_first }
    }

    /// Calls `each` with the parts of `text`, in order: of the tokens that begin at a place the
    /// longest.
    pub(super) fn split(&self, text: &str, mut each: impl FnMut(Part)) {
        let bytes = text.as_bytes();
        let (mut begin, mut at) = (0, 0);
        while let Some(byte) = bytes.get(at) {
            let found = self.by_first[usize::from(*byte)]
                .iter()
                .find(|(content, _)| bytes[at..].starts_with(content.as_bytes()));
            let Some((content, id)) = found else {
                at += 1;
                continue;
            };
            if begin < at {
                each(Part::Text(begin, at));
            }
            begin = at + content.len();
            each(Part::Token(*id, at, begin));
            at = begin;
        }
        if begin < bytes.len() {
            each(Part::Text(begin, bytes.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_and_of_these_the_longest_is_found() {
        let tokens = AddedTokens::new([("<a>", 1), ("<a>b", 2), ("a", 3), ("<", 4)]);
        let mut parts = Vec::new();
        tokens.split("x<a>bc<a>a<<", |part| parts.push(part));
        let (text, token) = (Part::Text, Part::Token);
        let expected = [
            text(0, 1),
            token(2, 1, 5),
            text(5, 6),
            token(1, 6, 9),
            token(3, 9, 10),
            token(4, 10, 11),
            token(4, 11, 12),
        ];
        assert_eq!(parts, expected);
        tokens.split("", |part| panic!("{part:?} of nothing"));
    }
}
