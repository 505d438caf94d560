//! Operands (PTX ISA, "Instruction Operands"): their text, and their registers and values with
//! checks of types.

use std::fmt;

use super::ParseError;
use super::kernel::Body;
use super::tokens::{Cursor, Token};
use super::types::{Form, integer, literal};
use crate::instruction::{Address, Operand, Reg, Space, Special};

/// An operand as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Arg<'a> {
    /// A register, a variable, a label, or `_`.
    Name(&'a str),
    Number(&'a str),
    /// `{a, b}`.
    List(Vec<Arg<'a>>),
    /// `[base + offset]`.
    Memory {
        base: &'a str,
        offset: i64,
    },
    /// `[map, {x, y, z}]`.
    Box {
        map: &'a str,
        at: Vec<Arg<'a>>,
    },
    /// `value|predicate`.
    Pair(&'a str, &'a str),
}

impl<'a> Arg<'a> {
    pub(super) fn read(cursor: &mut Cursor<'a>) -> Result<Self, ParseError> {
        if cursor.peek() == Token::Mark('{') {
            return Ok(Self::List(list(cursor)?));
        }
        if cursor.take(Token::Mark('[')) {
            let memory = memory(cursor)?;
            cursor.expect(Token::Mark(']'))?;
            return Ok(memory);
        }
        match single(cursor)? {
            Self::Name(first) if cursor.take(Token::Mark('|')) => {
                Ok(Self::Pair(first, cursor.name("a predicate")?))
            }
            arg => Ok(arg),
        }
    }
}

/// A name or a number.
fn single<'a>(cursor: &mut Cursor<'a>) -> Result<Arg<'a>, ParseError> {
    if let Token::Number(text) = cursor.peek() {
        cursor.skip();
        return Ok(Arg::Number(text));
    }
    Ok(Arg::Name(cursor.name("an operand")?))
}

/// `{a, b}`.
fn list<'a>(cursor: &mut Cursor<'a>) -> Result<Vec<Arg<'a>>, ParseError> {
    cursor.expect(Token::Mark('{'))?;
    let mut list = vec![single(cursor)?];
    while cursor.take(Token::Mark(',')) {
        list.push(single(cursor)?);
    }
    cursor.expect(Token::Mark('}'))?;
    Ok(list)
}

/// What is between the brackets of an address.
fn memory<'a>(cursor: &mut Cursor<'a>) -> Result<Arg<'a>, ParseError> {
    let base = cursor.name("a register or a variable")?;
    if cursor.take(Token::Mark(',')) {
        return Ok(Arg::Box { map: base, at: list(cursor)? });
    }
    let offset = if cursor.take(Token::Mark('+')) {
        i64::from(cursor.number::<i32>("an offset of 32 bits")?)
    } else {
        0
    };
    Ok(Arg::Memory { base, offset })
}

impl fmt::Display for Arg<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |list: &[Arg]| list.iter().map(Arg::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Name(text) | Self::Number(text) => write!(f, "{text}"),
            Self::List(list) => write!(f, "{{{}}}", join(list)),
            Self::Memory { base, offset } => write!(f, "[{base}+{offset}]"),
            Self::Box { map, at } => write!(f, "[{map}, {{{}}}]", join(at)),
            Self::Pair(first, second) => write!(f, "{first}|{second}"),
        }
    }
}

impl Body<'_, '_> {
    pub(super) fn wrong(&self, found: &Arg, expected: &str) -> ParseError {
        let found = format!("`{found}` in `{}`", self.opcode);
        ParseError { line: self.line, found, expected: expected.to_owned() }
    }

    /// Refuses another number of operands.
    pub(super) fn count(&self, args: &[Arg], expected: &[usize]) -> Result<(), ParseError> {
        if expected.contains(&args.len()) {
            return Ok(());
        }
        let numbers = expected.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ");
        Err(ParseError {
            line: self.line,
            found: format!("{} operands of `{}`", args.len(), self.opcode),
            expected: numbers,
        })
    }

    /// A register of exactly this type.
    pub(super) fn reg(&self, arg: &Arg, form: Form) -> Result<Reg, ParseError> {
        self.reg_or_wider(arg, form, false)
    }

    /// A register of this type, or a wider one if `wider`.
    pub(super) fn reg_or_wider(
        &self,
        arg: &Arg,
        form: Form,
        wider: bool,
    ) -> Result<Reg, ParseError> {
        let least = if wider { "at least " } else { "" };
        let expected = format!("a register of {least}{form}");
        let Arg::Name(name) = arg else { return Err(self.wrong(arg, &expected)) };
        let Some(reg) = self.find_reg(name) else { return Err(self.wrong(arg, &expected)) };
        let declared = self.forms[reg.0 as usize];
        if declared.fits(form, wider) {
            return Ok(reg);
        }
        Err(ParseError {
            line: self.line,
            found: format!("`{name}` of {declared} in `{}`", self.opcode),
            expected,
        })
    }

    /// A register or a literal of exactly this type.
    pub(super) fn value(&self, arg: &Arg, form: Form) -> Result<Operand, ParseError> {
        self.value_or_wider(arg, form, false)
    }

    /// A register or a literal of this type, or a wider register if `wider`.
    pub(super) fn value_or_wider(
        &self,
        arg: &Arg,
        form: Form,
        wider: bool,
    ) -> Result<Operand, ParseError> {
        if let Arg::Number(text) = arg {
            let value = literal(text, form);
            let value = value.ok_or_else(|| self.wrong(arg, &format!("a literal of {form}")))?;
            return Ok(Operand::Immediate(value));
        }
        Ok(Operand::Reg(self.reg_or_wider(arg, form, wider)?))
    }

    /// An integer constant.
    pub(super) fn constant(&self, arg: &Arg, allowed: &[u32]) -> Result<u32, ParseError> {
        let number = match arg {
            Arg::Number(text) => integer(text).and_then(|number| u32::try_from(number).ok()),
            _ => None,
        };
        let expected = || match allowed {
            [] => "a constant".to_owned(),
            _ => format!("one of the constants {allowed:?}"),
        };
        number
            .filter(|number| allowed.is_empty() || allowed.contains(number))
            .ok_or_else(|| self.wrong(arg, &expected()))
    }

    /// The elements of a list of this length.
    pub(super) fn list<'l, 'a>(
        &self,
        arg: &'l Arg<'a>,
        length: usize,
    ) -> Result<&'l [Arg<'a>], ParseError> {
        match arg {
            Arg::List(list) if list.len() == length => Ok(list),
            _ => Err(self.wrong(arg, &format!("a list of {length} operands"))),
        }
    }

    /// A list of registers of this type that an instruction writes.
    pub(super) fn regs(&self, arg: &Arg, n: usize, form: Form) -> Result<Vec<Reg>, ParseError> {
        let regs = self.list(arg, n)?.iter().map(|arg| self.reg(arg, form));
        let regs = regs.collect::<Result<Vec<_>, _>>()?;
        self.distinct(arg, &regs)?;
        Ok(regs)
    }

    /// Refuses a list to write without a register, or with one twice (PTX ISA, "Vectors as
    /// Operands").
    pub(super) fn distinct(&self, arg: &Arg, regs: &[Reg]) -> Result<(), ParseError> {
        let is_new = |(index, reg): (usize, &Reg)| !regs[..index].contains(reg);
        if !regs.is_empty() && regs.iter().enumerate().all(is_new) {
            return Ok(());
        }
        Err(self.wrong(arg, "different registers"))
    }

    /// A list of values of this type.
    pub(super) fn values<const N: usize>(
        &self,
        arg: &Arg,
        form: Form,
    ) -> Result<[Operand; N], ParseError> {
        let mut values = [Operand::Immediate(0); N];
        for (value, arg) in values.iter_mut().zip(self.list(arg, N)?) {
            *value = self.value(arg, form)?;
        }
        Ok(values)
    }

    /// An address in a state space. A register hides a variable of its name.
    pub(super) fn address(&mut self, arg: &Arg, space: Space) -> Result<Address, ParseError> {
        let Arg::Memory { base, offset } = *arg else {
            return Err(self.wrong(arg, "an address in brackets"));
        };
        if self.find_reg(base).is_none() {
            return match self.variable_address(base) {
                Some((found, address)) if found == space => {
                    Ok(Address { base: Operand::Immediate(address), offset })
                }
                _ => Err(self.wrong(arg, &format!("an address of the space {space:?}"))),
            };
        }
        let name = Arg::Name(base);
        // Addresses in shared memory may have 32 bits.
        let reg = match space {
            Space::Shared => self.reg(&name, Form::U32).or_else(|_| self.reg(&name, Form::U64)),
            Space::Param | Space::Global => self.reg(&name, Form::U64),
        }?;
        Ok(Address { base: Operand::Reg(reg), offset })
    }

    /// The state space and the address of a variable or parameter.
    pub(super) fn variable_address(&mut self, name: &str) -> Option<(Space, u64)> {
        if let Some(param) = self.kernel.params.iter().find(|param| param.name == name) {
            return Some((Space::Param, param.offset as u64));
        }
        Some((Space::Shared, self.shared_address(name)?))
    }
}

/// The special register of this name; only those of dimensions that kernels use.
pub(super) fn special(name: &str) -> Option<Special> {
    Some(match name {
        "%tid.x" => Special::Thread,
        "%ntid.x" => Special::Threads,
        "%ctaid.x" => Special::Block(0),
        "%ctaid.y" => Special::Block(1),
        "%ctaid.z" => Special::Block(2),
        "%nctaid.x" => Special::Blocks(0),
        "%nctaid.y" => Special::Blocks(1),
        "%nctaid.z" => Special::Blocks(2),
        _ => return None,
    })
}
