//! Divides the source of a template into tags and their tokens, as the engine does, checks it
//! before it is compiled, and adds a filter to each expression whose cost the engine does not
//! count.
//!
//! The engine counts instructions. One instruction may join two long texts, compare them, or copy a
//! list, so texts that double in a loop need few instructions. The operands of such instructions
//! get a filter that counts their size ([`super::filters`]): `a ~ b` becomes `a|__read ~ b|__read`.
//! Lists, maps and slices get a filter that counts their items and limits their depth.

use std::collections::BTreeMap;
use std::ops::Range;

/// Longest source in bytes.
const MAX_BYTES: usize = 1 << 20;
/// Most `elif` in a template; each is nested in the one before it.
const MAX_ELIF: usize = 500;
/// Longest text between tags whose output is not counted.
const UNCOUNTED: usize = 32;
/// Longest text between tags that cannot be counted, because it has no two letters in succession.
const MAX_UNCOUNTED: usize = 256;
/// Longest `raw` block.
const MAX_RAW: usize = 1024;

/// Counts the size of a text or list.
pub(super) const SIZE: &str = "__size";
/// Counts the size of a text, or of a list with everything in it.
pub(super) const READ: &str = "__read";
/// Counts the size of a value that is indexed, unless it is a list or a map.
pub(super) const INDEXED: &str = "__indexed";
/// Counts the items of a new list or map, and limits its depth.
pub(super) const BUILT: &str = "__built";
/// Counts the items of a slice, and makes it a list.
pub(super) const SLICED: &str = "__sliced";
/// Counts a number of bytes, and is empty.
pub(super) const BYTES: &str = "__bytes";

/// The tags with which transformers marks answers, and tags with the same scope of variables. Neither
/// has an effect on the text.
const GENERATION: [(&str, &str); 2] = [("generation", "with"), ("endgeneration", "endwith")];
/// Words of expressions that are not variables.
const WORDS: [&str; 9] = ["and", "or", "not", "in", "is", "if", "else", "recursive", "as"];
/// Operators that read both operands.
const READING: [&str; 8] = ["~", "+", "==", "!=", "<", ">", "<=", ">="];

/// What precedes a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// The end of a value.
    Value,
    /// The name of a tag, a filter or a test: `(` begins its arguments.
    Name,
    /// An operator, or nothing.
    Other,
}

/// What a bracket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Group {
    Arguments,
    Parentheses,
    Index,
    List,
}

/// An open bracket.
struct Open {
    group: Group,
    /// Index of its token.
    token: usize,
    /// Start of the value that contains it.
    value: usize,
    has_comma: bool,
    has_colon: bool,
}

impl Open {
    fn new(group: Group, token: usize, value: usize) -> Self {
        Self { group, token, value, has_comma: false, has_colon: false }
    }
}

/// Returns the source with the filters, and without tags that the engine does not have.
pub(super) fn with_counters(source: &str) -> Result<String, TemplateSourceError> {
    if source.len() > MAX_BYTES {
        let what = format!("it has {} bytes; at most {MAX_BYTES} are supported", source.len());
        return Err(TemplateSourceError { what, line: 1 });
    }
    let mut scan = TemplateScan { source, added: BTreeMap::new(), renamed: Vec::new() };
    let mut at = 0;
    let mut num_elif = 0;
    while let Some(start) = next_tag(source, at) {
        scan.count_text(at..start)?;
        let is_block = source[start..].starts_with("{%");
        if source[start..].starts_with("{#") {
            at = source[start..].find("#}").map_or(source.len(), |end| start + end + 2);
            continue;
        }
        let (tokens, end) = tokens(source, start + 2, if is_block { "%}" } else { "}}" })?;
        let name = tokens.first().filter(|_| is_block).map_or("", |token| &source[token.clone()]);
        num_elif += usize::from(name == "elif");
        if num_elif > MAX_ELIF {
            return Err(scan.error(start, format!("more than {MAX_ELIF} `elif`")));
        }
        at = end;
        if let Some((_, scope)) = GENERATION.iter().find(|(tag, _)| *tag == name) {
            scan.renamed.push((tokens[0].clone(), scope));
        }
        if name == "raw" {
            at = end_of_raw(source, end);
            if at - end > MAX_RAW {
                return Err(scan.error(start, "a long `raw` block is not supported".to_owned()));
            }
            continue;
        }
        scan.tag(&tokens, name)?;
    }
    scan.count_text(at..source.len())?;
    Ok(scan.finish())
}

struct TemplateScan<'a> {
    source: &'a str,
    /// Texts to add at bytes of the source: after the token that ends there, and before the one
    /// that starts there.
    added: BTreeMap<usize, [String; 2]>,
    /// Names of tags, and their new names, which are not longer.
    renamed: Vec<(Token, &'static str)>,
}

impl TemplateScan<'_> {
    fn error(&self, at: usize, what: String) -> TemplateSourceError {
        TemplateSourceError::new(self.source, at, what)
    }

    fn after(&mut self, at: usize, filter: &str, close: &str) {
        let [after, _] = self.added.entry(at).or_default();
        let more = format!("|{filter}{close}");
        if !(close.is_empty() && after.ends_with(&more)) {
            after.push_str(&more);
        }
    }

    fn open(&mut self, at: usize) {
        self.added.entry(at).or_default()[1].push('(');
    }

    fn finish(self) -> String {
        let mut source = self.source.to_owned();
        for (token, name) in self.renamed {
            let padded = format!("{name:width$}", width = token.len());
            source.replace_range(token, &padded);
        }
        let mut out = String::with_capacity(source.len() * 2);
        let mut last = 0;
        for (at, [after, before]) in self.added {
            out.push_str(&source[last..at]);
            out.push_str(&after);
            out.push_str(&before);
            last = at;
        }
        out.push_str(&source[last..]);
        out
    }

    /// Adds a tag that counts the bytes of a text between tags. It is inserted between two
    /// letters, so the engine strips no whitespace.
    fn count_text(&mut self, text: Range<usize>) -> Result<(), TemplateSourceError> {
        let inner = &self.source[text.clone()];
        if inner.len() <= UNCOUNTED {
            return Ok(());
        }
        let mut pairs = inner.char_indices().zip(inner.chars().skip(1));
        let letters = pairs.find(|((_, a), b)| a.is_alphanumeric() && b.is_alphanumeric());
        if let Some(((at, first), _)) = letters {
            let tag = format!("{{{{{}|{BYTES}}}}}", inner.len());
            let between = text.start + at + first.len_utf8();
            self.added.entry(between).or_default()[0].push_str(&tag);
            return Ok(());
        }
        let before = &self.source[..text.start];
        let is_trimmed = ["-%}", "-}}", "-#}"].iter().any(|end| before.ends_with(end))
            || self.source.as_bytes().get(text.end + 2) == Some(&b'-');
        let is_dropped = is_trimmed && inner.trim().is_empty();
        if inner.len() > MAX_UNCOUNTED && !is_dropped {
            let what = format!("a text of {} bytes has no letters", inner.len());
            return Err(self.error(text.start, what));
        }
        Ok(())
    }

    /// Adds the filters of one tag; `name` is empty for an output.
    fn tag(&mut self, tokens: &[Token], name: &str) -> Result<(), TemplateSourceError> {
        let source = self.source;
        let text = |index: usize| tokens.get(index).map_or("", |token| &source[token.clone()]);
        let pairs = self.pairs(tokens)?;
        let first = self.first_of_values(tokens, name);
        let mut opened: Vec<Open> = Vec::new();
        let is_named = !matches!(name, "" | "set" | "for");
        let mut before = if is_named { Before::Name } else { Before::Other };
        let mut value = 0; // start of the current value
        for index in first..tokens.len() {
            let Token { start, end } = tokens[index];
            let last = if index > first { text(index - 1) } else { "" };
            let token = text(index);
            let is_new = before != Before::Value;
            before = match token.as_bytes()[0] {
                b'(' | b'[' | b'{' => {
                    let group = match (token, before) {
                        ("(", Before::Value | Before::Name) => Group::Arguments,
                        ("(", Before::Other) => Group::Parentheses,
                        ("[", Before::Value) => Group::Index,
                        _ => Group::List,
                    };
                    value = if is_new { start } else { value };
                    opened.push(Open::new(group, index, value));
                    Before::Other
                }
                b')' | b']' | b'}' => {
                    if let Some(open) = opened.pop() {
                        value = open.value;
                        self.close(tokens, &open, index);
                    }
                    Before::Value
                }
                b'\'' | b'"' | b'0'..=b'9' => {
                    value = if is_new && last != "." { start } else { value };
                    Before::Value
                }
                _ if last == "." => Before::Value,
                _ if last == "|"
                    || last == "is"
                    || (last == "not" && index > first + 1 && text(index - 2) == "is") =>
                {
                    if token == "not" && last == "is" { Before::Other } else { Before::Name }
                }
                _ if READING.contains(&token) || token == "in" => {
                    let filter = if token == "+" { SIZE } else { READ };
                    let left =
                        if last == "not" { index.wrapping_sub(2) } else { index.wrapping_sub(1) };
                    if let Some(left) = tokens.get(left).filter(|_| index > first) {
                        self.after(left.end, filter, "");
                    }
                    if let Some(right) = operand_end(&text, &pairs, index + 1, tokens.len()) {
                        self.after(tokens[right].end, filter, "");
                    }
                    Before::Other
                }
                _ if WORDS.contains(&token) => Before::Other,
                c if c == b'_' || c.is_ascii_alphabetic() || !c.is_ascii() => {
                    value = start;
                    Before::Value
                }
                c => {
                    if let Some(open) = opened.last_mut() {
                        open.has_comma |= c == b',';
                        open.has_colon |= c == b':';
                    } else if c == b',' && name == "set" {
                        let what = "`set` with several values is not supported";
                        return Err(self.error(end, what.to_owned()));
                    }
                    if c == b'.' { before } else { Before::Other }
                }
            };
        }
        Ok(())
    }

    /// The index of the first token that belongs to a value: after the name of the tag, and after
    /// the targets of `set` and `for`.
    fn first_of_values(&self, tokens: &[Token], name: &str) -> usize {
        let target_end = match name {
            "" => return 0,
            "set" => "=",
            "for" => "in",
            _ => return 1,
        };
        let found = tokens.iter().position(|token| &self.source[token.clone()] == target_end);
        found.map_or(tokens.len(), |index| index + 1)
    }

    /// For each opening bracket the index of the closing one.
    fn pairs(&self, tokens: &[Token]) -> Result<BTreeMap<usize, usize>, TemplateSourceError> {
        let mut pairs = BTreeMap::new();
        let mut opened: Vec<usize> = Vec::new();
        let fault = |token: &Token| Err(self.error(token.start, "unbalanced brackets".to_owned()));
        for (index, token) in tokens.iter().enumerate() {
            match self.source[token.clone()].as_bytes()[0] {
                b'(' | b'[' | b'{' => opened.push(index),
                b')' | b']' | b'}' => match opened.pop() {
                    Some(open) => {
                        pairs.insert(open, index);
                    }
                    None => return fault(token),
                },
                _ => {}
            }
        }
        match opened.pop() {
            Some(open) => fault(&tokens[open]),
            None => Ok(pairs),
        }
    }

    /// Adds the filters of a group that ends with token `close`.
    fn close(&mut self, tokens: &[Token], open: &Open, close: usize) {
        let (start, end) = (tokens[open.token].start, tokens[close].end);
        match open.group {
            Group::Arguments => {}
            Group::Parentheses if !open.has_comma => {}
            Group::List | Group::Parentheses => {
                self.open(start);
                self.after(end, BUILT, ")");
            }
            Group::Index if open.has_colon => {
                self.open(open.value);
                self.open(open.value);
                self.after(tokens[open.token - 1].end, SIZE, ")");
                self.after(end, SLICED, ")");
            }
            Group::Index => {
                let inner = &self.source[tokens[open.token].end..tokens[close].start];
                let is_key = close == open.token + 2 && inner.trim_start().starts_with(['\'', '"']);
                if !is_key {
                    self.open(open.value);
                    self.after(tokens[open.token - 1].end, INDEXED, ")");
                }
            }
        }
    }
}

/// The index of the last token of the operand that starts at `from`.
fn operand_end<'a>(
    text: &impl Fn(usize) -> &'a str,
    pairs: &BTreeMap<usize, usize>,
    from: usize,
    num_tokens: usize,
) -> Option<usize> {
    let mut at = from;
    while matches!(text(at), "not" | "-" | "+") {
        at += 1;
    }
    if at >= num_tokens {
        return None;
    }
    let is_text = text(at).starts_with(['\'', '"']);
    at = pairs.get(&at).copied().unwrap_or(at);
    while is_text && text(at + 1).starts_with(['\'', '"']) {
        at += 1;
    }
    loop {
        at = match text(at + 1) {
            "." => at + 2,
            "[" | "(" => *pairs.get(&(at + 1))?,
            // a filter binds tighter than an operator, which reads its result
            "|" => match text(at + 3) {
                "(" => *pairs.get(&(at + 3))?,
                _ => at + 2,
            },
            _ => return Some(at.min(num_tokens - 1)),
        };
    }
}

/// Most tokens between the delimiters of one tag: parser and compiler recurse for each operator.
const MAX_TOKENS: usize = 512;

/// What is wrong, and in which line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TemplateSourceError {
    pub(super) what: String,
    pub(super) line: usize,
}

impl TemplateSourceError {
    pub(super) fn new(source: &str, at: usize, what: String) -> Self {
        Self { what, line: 1 + source[..at].matches('\n').count() }
    }
}

/// A token within a tag, as bytes of the source.
type Token = Range<usize>;

/// The start of the next tag or comment.
fn next_tag(source: &str, from: usize) -> Option<usize> {
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
fn end_of_raw(source: &str, from: usize) -> usize {
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
) -> Result<(Vec<Token>, usize), TemplateSourceError> {
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
                return Err(TemplateSourceError::new(source, at, what.to_owned()));
            }
            _ => {}
        }
        tokens.push(at..at + length);
        if tokens.len() > MAX_TOKENS {
            let what = format!("a tag has more than {MAX_TOKENS} names and operators");
            return Err(TemplateSourceError::new(source, at, what));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_that_an_instruction_reads_are_counted() {
        for (source, expected) in [
            ("{{ a ~ b }}", "{{ a|__read ~ b|__read }}"),
            ("{{ a == b|length - 1 }}", "{{ a|__read == b|length|__read - 1 }}"),
            (
                "{{- a.b[0] + f(x) | upper -}}",
                "{{- (a.b|__indexed)[0]|__size + f(x) | upper|__size -}}",
            ),
            ("{% if 'a' not in b %}", "{% if 'a'|__read not in b|__read %}"),
            (
                "{% if a is not none and a == 'x' 'y' %}",
                "{% if a is not none and a|__read == 'x' 'y'|__read %}",
            ),
            ("{% for a in b if a in c %}", "{% for a in b if a|__read in c|__read %}"),
            ("{{ a - 1e+5 }}{{ 1.5 }}", "{{ a - 1e+5 }}{{ 1.5 }}"),
        ] {
            assert_eq!(with_counters(source).unwrap(), expected);
        }
    }

    #[test]
    fn lists_and_slices_are_counted() {
        for (source, expected) in [
            ("{% set a = [b] %}", "{% set a = ([b]|__built) %}"),
            ("{{ {'a': {}}['a'] }}", "{{ ({'a': ({}|__built)}|__built)['a'] }}"),
            ("{{ (a, b)|f((c)) }}", "{{ ((a, b)|__built)|f((c)) }}"),
            ("{% for m in x.y[::-1] %}", "{% for m in ((x.y|__size)[::-1]|__sliced) %}"),
            ("{% set a = (b, 1) %}", "{% set a = ((b, 1)|__built) %}"),
            (
                "{{ f(x)[0][1:] + a }}",
                "{{ (((f(x)|__indexed)[0]|__size)[1:]|__sliced)|__size + a|__size }}",
            ),
            ("{% macro m(a, b=[]) %}", "{% macro m(a, b=([]|__built)) %}"),
            ("{{ x is in [1] }}", "{{ x is in ([1]|__built) }}"),
        ] {
            assert_eq!(with_counters(source).unwrap(), expected);
        }
    }

    #[test]
    fn texts_comments_and_raw_blocks_stay() {
        for source in
            ["{# a ~ b #}{% raw %}{{ a ~ b }}{% endraw %}", "{ a ~ b }", "{{ 'a ~ \\' b' }}"]
        {
            assert_eq!(with_counters(source).unwrap(), source);
        }
        let long = format!("  {}", "ab ".repeat(30));
        let counted = with_counters(&long).unwrap();
        assert_eq!(counted.replacen("{{92|__bytes}}", "", 1), long);
        let chinese = "你是一个助手".repeat(30);
        let counted = with_counters(&chinese).unwrap();
        assert_eq!(counted.replacen("{{540|__bytes}}", "", 1), chinese);
    }

    #[test]
    fn the_tags_that_mark_answers_become_scopes_of_the_same_length() {
        let found = with_counters("a\n{%- generation +%}{{ x }}{%endgeneration%}").unwrap();
        assert_eq!(found, "a\n{%- with       +%}{{ x }}{%endwith      %}");
        for source in ["{# {% generation %} #}", "{{ '{% generation %}' }}{{ generation }}"] {
            assert_eq!(with_counters(source).unwrap(), source);
        }
    }

    #[test]
    fn long_chains_are_refused_with_their_line() {
        for chain in ["-", "not ", "a.", "a|b", "1+", "1 if 1 else "] {
            let source = format!("\n{{{{ {}1 }}}}", chain.repeat(1000));
            assert_eq!(with_counters(&source).unwrap_err().line, 2);
        }
        let elif = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(501));
        assert!(with_counters(&elif).is_err());
        assert!(with_counters(&" ".repeat(MAX_BYTES + 1)).is_err());
        assert!(with_counters("{{ 'a' * 9 }}").unwrap_err().what.contains("`*`"));
        assert!(with_counters("{{ (a }}").is_err());
        assert!(with_counters(&format!("{{{{ a }}}}{}", " ".repeat(300))).is_err());
        assert!(with_counters(&format!("{{{{ a -}}}}{}", " ".repeat(300))).is_ok());
    }
}
