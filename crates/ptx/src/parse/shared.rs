//! Variables in shared memory.
//!
//! All static variables of a module, also those of single kernels, are laid out in the order of
//! the file, from address 0, each at a multiple of its alignment. So an address belongs to one
//! variable, whatever kernel names it. Dynamic variables (`.extern .shared`) all begin at one
//! address: the end of all static variables, rounded up to the largest alignment of a dynamic one.

use std::collections::HashMap;

use super::ParseError;
use super::tokens::{Cursor, Token};
use super::types::{Class, Form};

#[derive(Debug, Clone, Copy)]
pub(super) struct Variable<'a> {
    pub(super) name: &'a str,
    pub(super) address: usize,
    /// Zero for a dynamic variable.
    pub(super) bytes: usize,
    pub(super) align: usize,
    pub(super) dynamic: bool,
}

pub(super) struct SharedVariables<'a> {
    /// All variables, in the order of the file.
    variables: Vec<Variable<'a>>,
    /// Number of variables that are declared before the cursor.
    declared: usize,
    /// Variables of the module scope that are declared before the cursor.
    module: HashMap<&'a str, Variable<'a>>,
}

impl<'a> SharedVariables<'a> {
    /// Finds the declarations of the whole text and gives each variable its address.
    pub(super) fn lay_out(cursor: &mut Cursor<'a>) -> Result<Self, ParseError> {
        let mut variables = vec![];
        while cursor.peek() != Token::End {
            // Elsewhere (`.param .u64 .ptr .shared`), a directive precedes.
            let first =
                !matches!(cursor.before(), Some(Token::Word(word)) if word.starts_with('.'));
            if first && matches!(cursor.peek(), Token::Word(".shared" | ".extern")) {
                variables.push(declaration(cursor)?);
            } else {
                cursor.skip();
            }
        }
        cursor.rewind();
        let mut end = 0_usize;
        for variable in variables.iter_mut().filter(|variable| !variable.dynamic) {
            variable.address = end.next_multiple_of(variable.align);
            end = variable.address + variable.bytes;
        }
        let dynamic = || variables.iter().filter(|variable| variable.dynamic);
        let align = dynamic().map(|variable| variable.align).max().unwrap_or(1);
        for variable in variables.iter_mut().filter(|variable| variable.dynamic) {
            variable.address = end.next_multiple_of(align);
            variable.align = align;
        }
        Ok(Self { variables, declared: 0, module: HashMap::new() })
    }

    pub(super) fn declare(&mut self, cursor: &mut Cursor<'a>) -> Result<Variable<'a>, ParseError> {
        let name = declaration(cursor)?.name;
        let variable = self.variables.get(self.declared).filter(|variable| variable.name == name);
        self.declared += 1;
        let expected = "a declaration that begins with `.shared` or `.extern`";
        variable.copied().ok_or_else(|| cursor.found_instead(name, expected))
    }

    /// Makes a variable known to the kernels that follow.
    pub(super) fn add_to_module(
        &mut self,
        variable: Variable<'a>,
        cursor: &Cursor<'a>,
    ) -> Result<(), ParseError> {
        match self.module.insert(variable.name, variable) {
            None => Ok(()),
            Some(_) => Err(declared_twice(variable.name, cursor)),
        }
    }

    /// A variable of the module scope.
    pub(super) fn find_in_module(&self, name: &str) -> Option<Variable<'a>> {
        self.module.get(name).copied()
    }
}

/// The error of a name that has a meaning already.
pub(super) fn declared_twice(name: &str, cursor: &Cursor) -> ParseError {
    cursor.found_instead(&format!("a second declaration of `{name}`"), "a new name")
}

/// `.shared .align 4 .b8 name[128];` or `.extern .shared .align 128 .b8 name[];`. The address is
/// not known yet.
fn declaration<'a>(cursor: &mut Cursor<'a>) -> Result<Variable<'a>, ParseError> {
    let dynamic = cursor.take(Token::Word(".extern"));
    cursor.expect(Token::Word(".shared"))?;
    let Storage { name, align, bytes } = storage(cursor, dynamic)?;
    cursor.expect(Token::Mark(';'))?;
    Ok(Variable { name, address: 0, bytes, align, dynamic })
}

/// A name with its size and alignment, as parameters and variables have it.
pub(super) struct Storage<'a> {
    pub(super) name: &'a str,
    pub(super) align: usize,
    pub(super) bytes: usize,
}

/// `.align 8 .b8 name[128]`, `.u32 name`, or with `open` the array `.align 8 .b8 name[]`.
pub(super) fn storage<'a>(cursor: &mut Cursor<'a>, open: bool) -> Result<Storage<'a>, ParseError> {
    let mut align = None;
    if cursor.take(Token::Word(".align")) {
        let expected = "an alignment, a power of two";
        let wrong = cursor.error(expected);
        let bytes: u32 = cursor.number(expected)?;
        if !bytes.is_power_of_two() {
            return Err(wrong);
        }
        align = Some(bytes as usize);
    }
    let form = type_directive(cursor)?;
    if form.class == Class::Predicate {
        return Err(cursor.found_instead("`.pred`", "a type of values in memory"));
    }
    let name = cursor.name("a name")?;
    let mut bytes = form.bytes();
    if open {
        cursor.expect(Token::Mark('['))?;
        cursor.expect(Token::Mark(']'))?;
        bytes = 0;
    } else if cursor.take(Token::Mark('[')) {
        bytes *= cursor.number::<u32>("a number of elements")? as usize;
        cursor.expect(Token::Mark(']'))?;
    }
    Ok(Storage { name, align: align.unwrap_or(form.bytes()), bytes })
}

/// A type such as `.u32`.
pub(super) fn type_directive(cursor: &mut Cursor) -> Result<Form, ParseError> {
    let form = match cursor.peek() {
        Token::Word(word) => word.strip_prefix('.').and_then(Form::named),
        _ => None,
    };
    let Some(form) = form else { return Err(cursor.error("a type that is understood")) };
    cursor.skip();
    Ok(form)
}
