//! Splits a shell script into commands, as far as launch scripts of trainers need it: quotes,
//! comments, continued lines, and variables that the script sets itself.

use std::collections::HashMap;
use std::iter::Peekable;
use std::str::Chars;

/// A word after the removal of quotes, with variables replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) text: String,
    pub(crate) line: usize,
    /// A variable or a substitution whose value the script does not contain.
    pub(crate) unknown: Option<String>,
}

/// A simple command: assignments before it, and its words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Command {
    /// Environment variables that this command receives, exported ones included.
    pub(crate) env: Vec<(String, Word)>,
    pub(crate) words: Vec<Word>,
}

/// Maximum number of bytes that the variables of a script are replaced by in total: variables that
/// contain each other twice would double with every line.
const MAX_EXPANDED: usize = 16 << 20;

/// Splits `text` into commands, and returns those with words that are wanted.
pub(crate) fn commands(
    text: &str,
    is_wanted: impl Fn(&[Word]) -> bool,
) -> impl Iterator<Item = Command> {
    let mut reader = Reader {
        chars: text.chars().peekable(),
        line: 1,
        variables: HashMap::new(),
        exported: Vec::new(),
        room: MAX_EXPANDED,
    };
    std::iter::from_fn(move || {
        loop {
            let words = reader.words()?;
            if let Some(command) = reader.command(words, &is_wanted) {
                return Some(command);
            }
        }
    })
}

struct Reader<'a> {
    chars: Peekable<Chars<'a>>,
    line: usize,
    variables: HashMap<String, Word>,
    exported: Vec<(String, Word)>,
    /// Number of bytes that variables may still be replaced by.
    room: usize,
}

impl Reader<'_> {
    /// The words up to the end of a command; `None` at the end of the text.
    fn words(&mut self) -> Option<Vec<Word>> {
        self.chars.peek()?;
        let mut words = Vec::new();
        let mut redirects = false; // the next word is the file of a redirection
        loop {
            match self.chars.peek().copied() {
                None => return Some(words),
                Some('\n' | ';' | '|' | '&') => {
                    let c = self.bump();
                    if c != Some('&') || !redirects {
                        return Some(words);
                    }
                }
                Some('#') => {
                    while self.chars.peek().is_some_and(|c| *c != '\n') {
                        self.bump();
                    }
                }
                Some('>' | '<') => {
                    self.bump();
                    redirects = true;
                }
                Some(c) if c.is_whitespace() => {
                    self.bump();
                }
                Some('\\') if self.continues() => {
                    self.bump();
                    self.bump();
                }
                Some(_) => {
                    let word = self.word();
                    let is_descriptor = !word.text.is_empty()
                        && word.text.chars().all(|c| c.is_ascii_digit())
                        && matches!(self.chars.peek(), Some('>' | '<'));
                    if !std::mem::take(&mut redirects) && !is_descriptor {
                        words.push(word);
                    }
                }
            }
        }
    }

    fn bump(&mut self) -> Option<char> {
        let c = self.chars.next()?;
        self.line += usize::from(c == '\n');
        Some(c)
    }

    /// Whether the next line continues this one.
    fn continues(&self) -> bool {
        self.chars.clone().nth(1) == Some('\n')
    }

    fn word(&mut self) -> Word {
        let mut word = Word { text: String::new(), line: self.line, unknown: None };
        let mut quote = None;
        while let Some(c) = self.chars.peek().copied() {
            match (c, quote) {
                ('\'' | '"', None) => quote = Some(c),
                (c, Some(open)) if c == open => quote = None,
                ('\\', None | Some('"')) => {
                    self.bump();
                    match self.bump() {
                        Some('\n') | None => {}
                        Some(escaped) => word.text.push(escaped),
                    }
                    continue;
                }
                ('$', None | Some('"')) => {
                    self.bump();
                    self.expand(&mut word);
                    continue;
                }
                ('`', None | Some('"')) => word.unknown = Some("`..`".to_owned()),
                (c, None) if c.is_whitespace() || ";|&<>".contains(c) => break,
                (c, _) => word.text.push(c),
            }
            self.bump();
        }
        word
    }

    /// Reads a variable after its `$` and appends its value.
    fn expand(&mut self, word: &mut Word) {
        let mut name = String::new();
        match self.chars.peek() {
            Some('{') => {
                self.bump();
                while let Some(c) = self.bump().filter(|c| *c != '}') {
                    name.push(c);
                }
            }
            Some('(') => {
                word.unknown = Some("$(..)".to_owned());
                return;
            }
            _ => {
                while let Some(c) = self.chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    name.push(c);
                }
            }
        }
        let (name, default) = match name.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (name.as_str(), None),
        };
        match (self.variables.get(name), default) {
            (Some(value), _) if value.text.len() <= self.room => {
                self.room -= value.text.len();
                word.text.push_str(&value.text);
                word.unknown = word.unknown.take().or_else(|| value.unknown.clone());
            }
            (None, Some(default)) => word.text.push_str(default),
            _ => word.unknown = Some(format!("${name}")),
        }
    }

    /// Separates assignments from the words of a command, and stores them.
    fn command(
        &mut self,
        words: Vec<Word>,
        is_wanted: impl Fn(&[Word]) -> bool,
    ) -> Option<Command> {
        let mut words = words.into_iter().peekable();
        let exports = words.next_if(|word| word.text == "export").is_some();
        let mut assigned = Vec::new();
        while let Some(word) = words.next_if(|word| assignment(&word.text).is_some()) {
            let (name, value) = assignment(&word.text)?;
            let (name, text) = (name.to_owned(), value.to_owned());
            assigned.push((name, Word { text, ..word }));
        }
        let words: Vec<Word> = words.collect();
        if !words.is_empty() && !exports {
            if !is_wanted(&words) {
                return None;
            }
            let env = self.exported.iter().cloned().chain(assigned).collect();
            return Some(Command { env, words });
        }
        if exports {
            self.exported.extend(assigned.iter().cloned());
            let known = words.iter().filter_map(|word| {
                Some((word.text.clone(), self.variables.get(&word.text)?.clone()))
            });
            self.exported.extend(known);
        }
        self.variables.extend(assigned);
        None
    }
}

/// `NAME=value`.
fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let is_name = name.chars().all(|c| c.is_alphanumeric() || c == '_')
        && name.chars().next().is_some_and(|c| !c.is_numeric());
    is_name.then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(command: &Command) -> Vec<&str> {
        command.words.iter().map(|word| word.text.as_str()).collect()
    }

    #[test]
    fn a_launch_script_becomes_words_with_its_variables_replaced() {
        let script = "#!/bin/bash\nset -e\nMODEL=Qwen/Qwen3-VL-4B-Instruct\nexport FPS=1\n\
            MAX_PIXELS=1003520 \\\nNPROC_PER_NODE=2 \\\nswift sft \\\n  --model \"$MODEL\" \\\n  \
            --args '{\"a\": 1}' --dir out/${NAME:-run} # a comment\n  > log 2>&1 &\nnext $UNSET\n";
        let found = commands(script, |_| true).collect::<Vec<_>>();
        assert_eq!(found.len(), 3, "{found:?}");
        let swift = &found[1];
        let expected = ["swift", "sft", "--model", "Qwen/Qwen3-VL-4B-Instruct", "--args"];
        assert_eq!(texts(swift)[..5], expected);
        assert_eq!(texts(swift)[5..], ["{\"a\": 1}", "--dir", "out/run"]);
        let env: Vec<_> = swift.env.iter().map(|(k, v)| (k.as_str(), v.text.as_str())).collect();
        assert_eq!(env, [("FPS", "1"), ("MAX_PIXELS", "1003520"), ("NPROC_PER_NODE", "2")]);
        assert_eq!(swift.words[2].line, 8);
        assert_eq!(found[2].words[1].unknown.as_deref(), Some("$UNSET"));
    }

    #[test]
    fn a_word_may_have_quotes_and_escapes_inside() {
        let found = commands(r#"a b"c d"e 'f $g' \$h "\"" "" -x=1; i && j 2>&1 | k"#, |_| true)
            .collect::<Vec<_>>();
        assert_eq!(texts(&found[0]), ["a", "bc de", "f $g", "$h", "\"", "", "-x=1"]);
        assert_eq!(found.len(), 4);
        assert_eq!(texts(&found[2]), ["j"]);
    }
}
