//! Tokens of PTX text (PTX ISA, "Syntax").

use std::fmt;

use super::ParseError;
use super::types::integer;

/// A token. Equal tokens have the same text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// A name, a directive, or an opcode with all its modifiers.
    Word(&'a str),
    /// Anything that begins with a digit, with a minus before it if there is one.
    Number(&'a str),
    /// A text in quotes, without them.
    Text(&'a str),
    Mark(char),
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(text) | Self::Number(text) => write!(f, "`{text}`"),
            Self::Text(text) => write!(f, "`\"{text}\"`"),
            Self::Mark(mark) => write!(f, "`{mark}`"),
            Self::End => write!(f, "the end of the text"),
        }
    }
}

pub(super) struct Cursor<'a> {
    /// Tokens with their lines. The last one is the end.
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(text: &'a str) -> Result<Self, ParseError> {
        Ok(Self { tokens: tokens(text)?, at: 0 })
    }

    pub(super) fn rewind(&mut self) {
        self.at = 0;
    }

    pub(super) fn peek(&self) -> Token<'a> {
        self.tokens[self.at].0
    }

    pub(super) fn before(&self) -> Option<Token<'a>> {
        Some(self.tokens[self.at.checked_sub(1)?].0)
    }

    pub(super) fn after(&self) -> Token<'a> {
        self.tokens.get(self.at + 1).map_or(Token::End, |(token, _)| *token)
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    pub(super) fn skip(&mut self) {
        self.at = (self.at + 1).min(self.tokens.len() - 1);
    }

    /// Skips the next token if it is this one.
    pub(super) fn take(&mut self, token: Token) -> bool {
        let found = self.peek() == token;
        if found {
            self.skip();
        }
        found
    }

    pub(super) fn expect(&mut self, token: Token) -> Result<(), ParseError> {
        if self.take(token) { Ok(()) } else { Err(self.error(&token.to_string())) }
    }

    pub(super) fn name(&mut self, expected: &str) -> Result<&'a str, ParseError> {
        match self.peek() {
            Token::Word(name) if !name.starts_with('.') => {
                self.skip();
                Ok(name)
            }
            _ => Err(self.error(expected)),
        }
    }

    /// An integer in the range of `T`.
    pub(super) fn number<T: TryFrom<i128>>(&mut self, expected: &str) -> Result<T, ParseError> {
        let found = match self.peek() {
            Token::Number(text) => integer(text).and_then(|value| T::try_from(value).ok()),
            _ => None,
        };
        let Some(number) = found else { return Err(self.error(expected)) };
        self.skip();
        Ok(number)
    }

    pub(super) fn error(&self, expected: &str) -> ParseError {
        self.found_instead(&self.peek().to_string(), expected)
    }

    /// An error in the line of the next token.
    pub(super) fn found_instead(&self, found: &str, expected: &str) -> ParseError {
        ParseError { line: self.line(), found: found.to_owned(), expected: expected.to_owned() }
    }
}

/// Splits a text, leaving out comments.
fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, ParseError> {
    let bytes = text.as_bytes();
    let (mut tokens, mut at, mut line) = (Vec::with_capacity(text.len() / 4), 0, 1);
    while let Some(&byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let length = match byte {
            b'\n' | b'\r' | b' ' | b'\t' => 1,
            b'/' if rest.starts_with(b"//") => find_end(rest, |byte| byte == b'\n'),
            b'"' => text_length(rest).ok_or_else(|| ParseError {
                line,
                found: "a quote".to_owned(),
                expected: "a text that ends in the same line".to_owned(),
            })?,
            b'-' if rest.get(1).is_some_and(u8::is_ascii_digit) => 1 + word_length(&rest[1..]),
            _ if is_word(byte) => word_length(rest),
            _ => 1,
        };
        let part = text.get(at..at + length).unwrap_or_default();
        match byte {
            b'\n' => line += 1,
            b'\r' | b' ' | b'\t' => {}
            b'/' if length > 1 => {}
            b'"' => tokens.push((Token::Text(&part[1..length - 1]), line)),
            b'0'..=b'9' => tokens.push((Token::Number(part), line)),
            b'-' if length > 1 => tokens.push((Token::Number(part), line)),
            _ if is_word(byte) => tokens.push((Token::Word(part), line)),
            b'{' | b'}' | b'[' | b']' | b'(' | b')' | b'<' | b'>' | b',' | b';' | b':' | b'@'
            | b'!' | b'|' | b'+' | b'-' => tokens.push((Token::Mark(char::from(byte)), line)),
            _ => {
                let found = text[at..].chars().next().unwrap_or_default();
                let expected = "a character of PTX".to_owned();
                return Err(ParseError { line, found: format!("`{found}`"), expected });
            }
        }
        at += length;
    }
    tokens.push((Token::End, line));
    Ok(tokens)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Length of a word. `::` belongs to it (`shared::cta`), a single colon ends a label.
fn word_length(bytes: &[u8]) -> usize {
    let mut length = 0;
    loop {
        if bytes[length..].starts_with(b"::") {
            length += 2;
        } else if bytes.get(length).copied().is_some_and(is_word) {
            length += 1;
        } else {
            return length;
        }
    }
}

/// Length of a text with both quotes.
fn text_length(bytes: &[u8]) -> Option<usize> {
    let length = find_end(&bytes[1..], |byte| byte == b'"' || byte == b'\n');
    (bytes.get(length + 1) == Some(&b'"')).then_some(length + 2)
}

/// Number of bytes before the first one that is found.
fn find_end(bytes: &[u8], found: impl Fn(u8) -> bool) -> usize {
    bytes.iter().position(|&byte| found(byte)).unwrap_or(bytes.len())
}
