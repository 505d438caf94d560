//! Kernels: parameters, scopes, declarations, labels.

use std::collections::HashMap;

use super::ParseError;
use super::operands::Arg;
use super::shared::{SharedVariables, Storage, Variable, declared_twice, storage, type_directive};
use super::tokens::{Cursor, Token};
use super::types::{Form, integer};
use crate::instruction::{Guard, Instruction, Kernel, Op, Param, Reg, Space};

/// Most registers of a declaration `%r<n>`; real kernels have some thousands.
const REGISTERS: u32 = 1 << 20;

/// A kernel that is being read.
pub(super) struct Body<'a, 'p> {
    cursor: &'p mut Cursor<'a>,
    shared: &'p mut SharedVariables<'a>,
    pub(super) kernel: Kernel,
    /// Types of the registers as declared.
    pub(super) forms: Vec<Form>,
    /// Variables in shared memory that are declared in the kernel.
    variables: HashMap<&'a str, Variable<'a>>,
    /// All scopes; the first one is that of the kernel.
    scopes: Vec<Scope<'a>>,
    scope: usize,
    /// Branches, whose targets are set at the end.
    pub(super) branches: Vec<Jump<'a>>,
    /// A mask for the next instruction.
    used_bytes: Option<u32>,
    /// The last `.loc`.
    source: (u32, u32),
    /// The instruction that is being read, and its line.
    pub(super) opcode: &'a str,
    pub(super) line: u32,
}

/// `{ ... }`: names are not known outside, and hide those of outer scopes.
struct Scope<'a> {
    outer: usize,
    regs: HashMap<String, Reg>,
    labels: HashMap<&'a str, usize>,
}

pub(super) struct Jump<'a> {
    instruction: usize,
    scope: usize,
    label: &'a str,
}

impl<'a, 'p> Body<'a, 'p> {
    /// Reads a kernel from `.visible` to its `}`.
    pub(super) fn read(
        cursor: &'p mut Cursor<'a>,
        shared: &'p mut SharedVariables<'a>,
    ) -> Result<Kernel, ParseError> {
        let mut body = Self {
            cursor,
            shared,
            kernel: Kernel::default(),
            forms: vec![],
            variables: HashMap::new(),
            scopes: vec![],
            scope: 0,
            branches: vec![],
            used_bytes: None,
            source: (0, 0),
            opcode: "",
            line: 0,
        };
        body.open();
        body.head()?;
        while body.statement()? {}
        body.finish()
    }

    /// `.visible .entry name(.param .u64 name, ...)`, directives and `{`.
    fn head(&mut self) -> Result<(), ParseError> {
        self.cursor.expect(Token::Word(".visible"))?;
        self.cursor.expect(Token::Word(".entry"))?;
        self.cursor.name("the name of a kernel")?.clone_into(&mut self.kernel.name);
        self.cursor.expect(Token::Mark('('))?;
        if !self.cursor.take(Token::Mark(')')) {
            self.param()?;
            while self.cursor.take(Token::Mark(',')) {
                self.param()?;
            }
            self.cursor.expect(Token::Mark(')'))?;
        }
        while !self.cursor.take(Token::Mark('{')) {
            match self.cursor.peek() {
                Token::Word(".maxntid") => {
                    self.cursor.skip();
                    self.kernel.max_threads =
                        self.cursor.number::<u32>("a number of threads")? as usize;
                    // `%tid.y` and `%tid.z` are not understood either.
                    for _ in 0..2 {
                        if self.cursor.take(Token::Mark(',')) {
                            self.cursor.expect(Token::Number("1"))?;
                        }
                    }
                }
                Token::Word(".minnctapersm") => {
                    self.cursor.skip();
                    // a hint for the assembler
                    self.cursor.number::<u32>("a number of blocks")?;
                }
                _ => return Err(self.cursor.error("`.maxntid`, `.minnctapersm` or `{`")),
            }
        }
        Ok(())
    }

    /// A parameter. Each is at a multiple of its alignment.
    fn param(&mut self) -> Result<(), ParseError> {
        self.cursor.expect(Token::Word(".param"))?;
        let Storage { name, align, bytes } = storage(self.cursor, false)?;
        if self.kernel.params.iter().any(|param| param.name == name) {
            return Err(declared_twice(name, self.cursor));
        }
        let offset = self.kernel.param_bytes.next_multiple_of(align);
        self.kernel.params.push(Param { name: name.to_owned(), offset, bytes });
        self.kernel.param_bytes = offset + bytes;
        Ok(())
    }

    /// Reads a statement; false after the `}` of the kernel.
    fn statement(&mut self) -> Result<bool, ParseError> {
        match self.cursor.peek() {
            Token::Mark('{') => {
                self.cursor.skip();
                self.open();
            }
            Token::Mark('}') => {
                self.cursor.skip();
                if self.scope == 0 {
                    return Ok(false);
                }
                self.scope = self.scopes[self.scope].outer;
            }
            Token::Word(".reg") => self.registers()?,
            Token::Word(".shared" | ".extern") => self.variable()?,
            Token::Word(".loc") => self.location()?,
            Token::Word(".pragma") => {
                self.cursor.skip();
                self.pragma()?;
            }
            Token::Word(_) if self.cursor.after() == Token::Mark(':') => self.label()?,
            Token::Mark('@') => self.instruction()?,
            Token::Word(word) if word.starts_with(|first: char| first.is_ascii_lowercase()) => {
                self.instruction()?;
            }
            _ => return Err(self.cursor.error("an instruction, a label or a directive")),
        }
        Ok(true)
    }

    fn open(&mut self) {
        let scope = Scope { outer: self.scope, regs: HashMap::new(), labels: HashMap::new() };
        self.scope = self.scopes.len();
        self.scopes.push(scope);
    }

    /// `.reg .b32 %r<9>, x;`.
    fn registers(&mut self) -> Result<(), ParseError> {
        self.cursor.skip();
        let form = type_directive(self.cursor)?;
        if form.bits == 8 {
            return Err(self.cursor.found_instead("registers of 8 bits", "other ones"));
        }
        loop {
            let name = self.cursor.name("the name of a register")?;
            if self.cursor.take(Token::Mark('<')) {
                let expected = "a number of registers";
                let wrong = self.cursor.error(expected);
                let count: u32 = self.cursor.number(expected)?;
                if count > REGISTERS {
                    return Err(wrong);
                }
                self.cursor.expect(Token::Mark('>'))?;
                for number in 0..count {
                    self.register(format!("{name}{number}"), form)?;
                }
            } else {
                self.register(name.to_owned(), form)?;
            }
            if !self.cursor.take(Token::Mark(',')) {
                return self.cursor.expect(Token::Mark(';'));
            }
        }
    }

    fn register(&mut self, name: String, form: Form) -> Result<(), ParseError> {
        let register = Reg(self.kernel.regs.len() as u32);
        if self.scopes[self.scope].regs.insert(name.clone(), register).is_some() {
            return Err(declared_twice(&name, self.cursor));
        }
        self.kernel.regs.push(name);
        self.kernel.reg_bits.push(form.bits);
        self.forms.push(form);
        Ok(())
    }

    fn variable(&mut self) -> Result<(), ParseError> {
        if self.scope != 0 {
            return Err(self.cursor.error("variables only in the outer scope of a kernel"));
        }
        let variable = self.shared.declare(self.cursor)?;
        match self.variables.insert(variable.name, variable) {
            None => Ok(()),
            Some(_) => Err(declared_twice(variable.name, self.cursor)),
        }
    }

    /// `.loc FILE LINE COLUMN`, and for inlined code `, function_name ...` to the end of the line.
    fn location(&mut self) -> Result<(), ParseError> {
        let line = self.cursor.line();
        self.cursor.skip();
        let wrong = self.cursor.error("the number of a file, from 1");
        let file: u32 = self.cursor.number(&wrong.expected)?;
        if file == 0 {
            return Err(wrong);
        }
        self.source = (file, self.cursor.number("a line")?);
        self.cursor.number::<u32>("a column")?;
        if self.cursor.take(Token::Mark(',')) {
            self.cursor.expect(Token::Word("function_name"))?;
            while self.cursor.line() == line && self.cursor.peek() != Token::End {
                self.cursor.skip();
            }
        }
        Ok(())
    }

    /// `"nounroll"`, of which the code is a consequence, or `"used_bytes_mask 4095"`.
    fn pragma(&mut self) -> Result<(), ParseError> {
        let expected = "`\"nounroll\"` or a `\"used_bytes_mask\"`";
        let Token::Text(text) = self.cursor.peek() else { return Err(self.cursor.error(expected)) };
        if let Some(mask) = text.strip_prefix("used_bytes_mask ") {
            let mask = integer(mask).and_then(|mask| u32::try_from(mask).ok());
            let mask = mask.filter(|_| self.used_bytes.is_none());
            self.used_bytes = Some(mask.ok_or_else(|| self.cursor.error("one mask of 32 bits"))?);
        } else if text != "nounroll" {
            return Err(self.cursor.error(expected));
        }
        self.cursor.skip();
        self.cursor.expect(Token::Mark(';'))
    }

    /// A mask of used bytes belongs to the load that follows it.
    fn use_bytes(&mut self, op: &Op) -> Result<(), ParseError> {
        let Some(mask) = self.used_bytes.take() else { return Ok(()) };
        let bytes = match op {
            Op::Load { bytes, to, .. } => bytes * to.len(),
            _ => 0,
        };
        if bytes == 0 || mask >> bytes != 0 {
            return Err(ParseError {
                line: self.line,
                found: format!("`{}`", self.opcode),
                expected: format!("a load of the bytes of the mask {mask}"),
            });
        }
        self.kernel.used_bytes.insert(self.kernel.code.len(), mask);
        Ok(())
    }

    fn label(&mut self) -> Result<(), ParseError> {
        let name = self.cursor.name("a label")?;
        let target = self.kernel.code.len();
        if self.scopes[self.scope].labels.insert(name, target).is_some() {
            return Err(declared_twice(name, self.cursor));
        }
        self.cursor.expect(Token::Mark(':'))
    }

    /// `@p opcode operands;`.
    fn instruction(&mut self) -> Result<(), ParseError> {
        self.line = self.cursor.line();
        let mut guard = None;
        self.opcode = "@";
        if self.cursor.take(Token::Mark('@')) {
            let negated = self.cursor.take(Token::Mark('!'));
            let predicate = Arg::Name(self.cursor.name("a predicate")?);
            guard = Some(Guard { predicate: self.reg(&predicate, Form::PREDICATE)?, negated });
        }
        self.opcode = self.cursor.name("an opcode")?;
        let mut args = vec![];
        if !self.cursor.take(Token::Mark(';')) {
            args.push(Arg::read(self.cursor)?);
            while self.cursor.take(Token::Mark(',')) {
                args.push(Arg::read(self.cursor)?);
            }
            self.cursor.expect(Token::Mark(';'))?;
        }
        let op = self.operation(&args)?;
        self.use_bytes(&op)?;
        let (line, source) = (self.line, self.source);
        self.kernel.code.push(Instruction { guard, op, line, source });
        Ok(())
    }

    /// Remembers that the current instruction branches to a label, which may follow.
    pub(super) fn jump(&mut self, label: &'a str) {
        let instruction = self.kernel.code.len();
        self.branches.push(Jump { instruction, scope: self.scope, label });
    }

    /// The register of this name in the innermost scope that has one.
    pub(super) fn find_reg(&self, name: &str) -> Option<Reg> {
        self.find(self.scope, |scope| scope.regs.get(name).copied())
    }

    /// Looks in a scope and those around it.
    fn find<T>(&self, mut at: usize, look: impl Fn(&Scope) -> Option<T>) -> Option<T> {
        loop {
            let scope = &self.scopes[at];
            let found = look(scope);
            if found.is_some() || at == 0 {
                return found;
            }
            at = scope.outer;
        }
    }

    /// The address of a variable in shared memory, which the kernel may access from then on.
    pub(super) fn shared_address(&mut self, name: &str) -> Option<u64> {
        let own = self.variables.get(name).copied();
        let variable = own.or_else(|| self.shared.find_in_module(name))?;
        let range = variable.address..variable.address + variable.bytes;
        let ranges = &mut self.kernel.shared_ranges;
        if variable.dynamic {
            self.kernel.dynamic_shared = Some(variable.address);
        } else if let Err(index) = ranges.binary_search_by_key(&range.start, |other| other.start) {
            ranges.insert(index, range);
        }
        Some(variable.address as u64)
    }

    /// Sets the targets of branches and checks that execution cannot run past the end.
    fn finish(mut self) -> Result<Kernel, ParseError> {
        for jump in &self.branches {
            let target = self.find(jump.scope, |scope| scope.labels.get(jump.label).copied());
            let instruction = &self.kernel.code[jump.instruction];
            let wrong = |expected: &str| ParseError {
                line: instruction.line,
                found: format!("a branch to `{}`", jump.label),
                expected: expected.to_owned(),
            };
            let target = target.ok_or_else(|| wrong("a label of this scope"))?;
            if target == self.kernel.code.len() {
                return Err(wrong("a label before an instruction"));
            }
            if let Op::Branch { target: to, .. } = &mut self.kernel.code[jump.instruction].op {
                *to = target;
            }
        }
        let ends = self.kernel.code.last().is_some_and(|last| {
            last.guard.is_none() && matches!(last.op, Op::Exit | Op::Branch { .. })
        });
        if !ends {
            let found = format!("the end of the kernel `{}`", self.kernel.name);
            return Err(self.cursor.found_instead(&found, "`ret` or a branch before it"));
        }
        let mut kernel = std::mem::take(&mut self.kernel);
        kernel.has_order = kernel
            .code
            .iter()
            .any(|of| matches!(of.op, Op::LoadStrong { .. } | Op::AddStrong { to: Some(_), .. }));
        kernel.has_products =
            kernel.code.iter().any(|instruction| matches!(instruction.op, Op::WarpgroupMma(_)));
        kernel.shared_shift = smallest_store(&kernel.code, Space::Shared).min(4).ilog2();
        kernel.global_shift = smallest_store(&kernel.code, Space::Global).min(16).ilog2();
        Ok(kernel)
    }
}

/// The number of bytes of the smallest store, at most 16.
fn smallest_store(code: &[Instruction], memory: Space) -> usize {
    let bytes = code.iter().filter_map(|instruction| match &instruction.op {
        Op::Store { space, bytes, from, .. } if *space == memory => Some(bytes * from.len()),
        _ => None,
    });
    bytes.min().unwrap_or(16)
}
