//! Reads PTX text. Each opcode, modifier, type, operand and directive is either understood in full
//! or an error; nothing is skipped except debug information (`.section .debug_*`).

mod kernel;
mod opcodes;
mod operands;
mod scalars;
mod shared;
#[cfg(test)]
mod tests;
mod tokens;
mod types;

use std::sync::Arc;

use crate::instruction::{Kernel, Module};
use kernel::Body;
use shared::SharedVariables;
use tokens::{Cursor, Token};

/// Highest number of a `.file` line; the list of files has an entry of each number.
const FILES: usize = 1 << 16;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the PTX: found {found}, expected {expected}")]
pub struct ParseError {
    /// Line of the text, from 1.
    pub line: u32,
    pub found: String,
    pub expected: String,
}

pub fn parse(text: &str) -> Result<Module, ParseError> {
    let mut cursor = Cursor::new(text)?;
    let shared = SharedVariables::lay_out(&mut cursor)?;
    let mut parser = Parser { cursor, shared, sources: vec![String::new()], kernels: vec![] };
    while parser.directive()? {}
    parser.finish()
}

/// State of the module scope.
struct Parser<'a> {
    cursor: Cursor<'a>,
    shared: SharedVariables<'a>,
    sources: Vec<String>,
    kernels: Vec<Kernel>,
}

impl Parser<'_> {
    /// Reads a directive of the module scope; false at the end of the text.
    fn directive(&mut self) -> Result<bool, ParseError> {
        match self.cursor.peek() {
            Token::End => return Ok(false),
            Token::Word(".version") => {
                self.cursor.skip();
                match self.cursor.peek() {
                    Token::Number(version) if version.contains('.') => self.cursor.skip(),
                    _ => return Err(self.cursor.error("a version such as `9.0`")),
                }
            }
            Token::Word(".target") => {
                self.cursor.skip();
                match self.cursor.peek() {
                    Token::Word(target) if target.starts_with("sm_") => self.cursor.skip(),
                    _ => return Err(self.cursor.error("a target such as `sm_80`")),
                }
            }
            Token::Word(".address_size") => {
                self.cursor.skip();
                self.cursor.expect(Token::Number("64"))?;
            }
            Token::Word(".file") => self.file()?,
            Token::Word(".section") => self.section()?,
            Token::Word(".shared" | ".extern") => {
                let variable = self.shared.declare(&mut self.cursor)?;
                self.shared.add_to_module(variable, &self.cursor)?;
            }
            Token::Word(".visible") => {
                let kernel = Body::read(&mut self.cursor, &mut self.shared)?;
                if self.kernels.iter().any(|other| other.name == kernel.name) {
                    let expected = format!("one kernel named `{}`", kernel.name);
                    return Err(self.cursor.found_instead("another one", &expected));
                }
                self.kernels.push(kernel);
            }
            _ => return Err(self.cursor.error("a directive of the module scope")),
        }
        Ok(true)
    }

    /// `.file 1 "name"`.
    fn file(&mut self) -> Result<(), ParseError> {
        self.cursor.skip();
        let expected = "the number of a file, from 1, not given before";
        let wrong = self.cursor.error(expected);
        let number: usize = self.cursor.number(expected)?;
        if number == 0 || number > FILES {
            return Err(wrong);
        }
        let Token::Text(name) = self.cursor.peek() else {
            return Err(self.cursor.error("a file name in quotes"));
        };
        self.cursor.skip();
        if self.sources.len() <= number {
            self.sources.resize(number + 1, String::new());
        }
        if !self.sources[number].is_empty() {
            return Err(wrong);
        }
        name.clone_into(&mut self.sources[number]);
        Ok(())
    }

    /// Skips `.section .debug_str { ... }`.
    fn section(&mut self) -> Result<(), ParseError> {
        self.cursor.skip();
        match self.cursor.peek() {
            Token::Word(name) if name.starts_with(".debug_") => self.cursor.skip(),
            _ => return Err(self.cursor.error("a section of debug information")),
        }
        self.cursor.expect(Token::Mark('{'))?;
        loop {
            match self.cursor.peek() {
                Token::Mark('}') => break,
                Token::End | Token::Mark('{') => return Err(self.cursor.error("`}`")),
                _ => self.cursor.skip(),
            }
        }
        self.cursor.skip();
        Ok(())
    }

    /// Checks the files of `.loc` lines, which may precede the `.file` lines.
    fn finish(self) -> Result<Module, ParseError> {
        for instruction in self.kernels.iter().flat_map(|kernel| &kernel.code) {
            let (file, line) = instruction.source;
            let known = self.sources.get(file as usize).is_some_and(|name| !name.is_empty());
            if !known && (file, line) != (0, 0) {
                return Err(ParseError {
                    line: instruction.line,
                    found: format!("an instruction of file {file}"),
                    expected: format!("`.file {file}`"),
                });
            }
        }
        let sources = Arc::new(self.sources);
        let share = |kernel| Arc::new(Kernel { sources: Arc::clone(&sources), ..kernel });
        Ok(Module { kernels: self.kernels.into_iter().map(share).collect() })
    }
}
