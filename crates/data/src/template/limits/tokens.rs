//! Divides the source of a template into tags and their tokens, as the engine does.

use std::ops::Range;

/// Most tokens between the delimiters of one tag: parser and compiler recurse for each operator.
const MAX_TOKENS: usize = 512;

/// What is wrong, and in which line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SourceError {
    pub(super) what: String,
    pub(super) line: usize,
}

impl SourceError {
    pub(super) fn new(source: &str, at: usize, what: String) -> Self {
        Self { what, line: 1 + source[..at].matches('\n').count() }
    }
}

/// A token within a tag, as bytes of the source.
pub(super) type Token = Range<usize>;

/// The start of the next tag or comment.
pub(super) fn next_tag(source: &str, from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        let start = at + source[at..].find('{')?;
        if matches!(source.as_bytes().get(start + 1), Some(b'{' | b'%' | b'#')) {
            return Some(start);
        }
        at = start + 1;
    }
}

/// The start of the `endraw` tag; the parser reports a missing one.
pub(super) fn end_of_raw(source: &str, from: usize) -> usize {
    let is_end = |at: &usize| {
        let rest = source[at + 2..].trim_start_matches(['-', '+']).trim_start();
        rest.starts_with("endraw")
    };
    let mut tags = source[from..].match_indices("{%").map(|(at, _)| from + at);
    tags.find(is_end).unwrap_or(source.len())
}

/// The tokens up to the delimiter `end`, and the end of the tag.
pub(super) fn tokens(
    source: &str,
    from: usize,
    end: &str,
) -> Result<(Vec<Token>, usize), SourceError> {
    let mut tokens: Vec<Token> = Vec::new();
    let mut at = from + usize::from(source[from..].starts_with(['-', '+']));
    let mut depth = 0_usize;
    loop {
        at += source[at..].len() - source[at..].trim_start().len();
        let rest = &source[at..];
        let Some(first) = rest.chars().next() else {
            return Ok((tokens, source.len())); // the parser reports the missing delimiter
        };
        if depth == 0 {
            let sign = usize::from(rest.starts_with(['-', '+']));
            if rest[sign..].starts_with(end) {
                return Ok((tokens, at + sign + end.len()));
            }
        }
        let length = token_length(source, at, first, tokens.last());
        match first {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            '*' => {
                let what = "the operator `*` is not supported in chat templates";
                return Err(SourceError::new(source, at, what.to_owned()));
            }
            _ => {}
        }
        tokens.push(at..at + length);
        if tokens.len() > MAX_TOKENS {
            let what = format!("a tag has more than {MAX_TOKENS} names and operators");
            return Err(SourceError::new(source, at, what));
        }
        at += length;
    }
}

fn token_length(source: &str, at: usize, first: char, last: Option<&Token>) -> usize {
    let rest = &source[at..];
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    match first {
        '\'' | '"' => {
            let mut escaped = false;
            let closing = rest.char_indices().skip(1).find(|(_, c)| {
                let closes = !escaped && *c == first;
                escaped = !escaped && *c == '\\';
                closes
            });
            closing.map_or(rest.len(), |(end, _)| end + 1)
        }
        '0'..='9' => {
            let word = |from: usize| {
                let rest = &rest[from..];
                from + rest.len() - rest.trim_start_matches(is_word).len()
            };
            let mut end = word(0);
            let after_dot = last.is_some_and(|last| &source[last.clone()] == ".");
            let digit = |at: usize| rest.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
            if !after_dot && rest[end..].starts_with('.') && digit(end + 1) {
                end = word(end + 1);
            }
            let has_exponent = !rest.starts_with("0x") && rest[..end].ends_with(['e', 'E']);
            if has_exponent && rest[end..].starts_with(['+', '-']) && digit(end + 1) {
                end = word(end + 1);
            }
            end
        }
        c if is_word(c) => rest.len() - rest.trim_start_matches(is_word).len(),
        _ if ["==", "!=", "<=", ">=", "//"].iter().any(|two| rest.starts_with(two)) => 2,
        c => c.len_utf8(),
    }
}
