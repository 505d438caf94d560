//! Types (PTX ISA, "Fundamental Types") and literals (PTX ISA, "Integer Constants").

use std::fmt;

use crate::instruction::Type;

/// What the bits of a value mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Predicate,
    /// `.b32` and the like: untyped.
    Bits,
    Unsigned,
    Signed,
    Float,
}

/// A type with those that only memory has (`.u8`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) class: Class,
    pub(super) bits: u8,
}

impl Form {
    pub(super) const PREDICATE: Self = Self { class: Class::Predicate, bits: 1 };
    pub(super) const B32: Self = Self { class: Class::Bits, bits: 32 };
    pub(super) const B64: Self = Self { class: Class::Bits, bits: 64 };
    pub(super) const U64: Self = Self { class: Class::Unsigned, bits: 64 };
    pub(super) const U32: Self = Self { class: Class::Unsigned, bits: 32 };
    pub(super) const F32: Self = Self { class: Class::Float, bits: 32 };

    pub(super) fn named(name: &str) -> Option<Self> {
        if name == "pred" {
            return Some(Self::PREDICATE);
        }
        let bits = match name.get(1..)? {
            "8" => 8,
            "16" => 16,
            "32" => 32,
            "64" => 64,
            _ => return None,
        };
        let class = match name.as_bytes()[0] {
            b'b' => Class::Bits,
            b'u' => Class::Unsigned,
            b's' => Class::Signed,
            // `.f16` is a type of PTX, but no kernel uses it.
            b'f' if bits >= 32 => Class::Float,
            _ => return None,
        };
        Some(Self { class, bits })
    }

    pub(super) fn bytes(self) -> usize {
        usize::from(self.bits) / 8
    }

    pub(super) fn is_integer(self) -> bool {
        matches!(self.class, Class::Unsigned | Class::Signed)
    }

    /// Whether a register that is declared so can be an operand of the type `wanted` (PTX ISA,
    /// "Fundamental Types"). Integers of both signs are the same, untyped bits are any type. If it may
    /// be wider (PTX ISA, "Operand Size Exceeding Instruction-Type Size"), this holds for all but
    /// floating-point types.
    pub(super) fn fits(self, wanted: Self, wider: bool) -> bool {
        let (a, b) = (self.class, wanted.class);
        if a == Class::Predicate || b == Class::Predicate {
            return a == b;
        }
        let untyped = a == Class::Bits || b == Class::Bits;
        let wider = wider && a != Class::Float && b != Class::Float && self.bits > wanted.bits;
        (self.bits == wanted.bits || wider)
            && (untyped || (a == Class::Float) == (b == Class::Float))
    }
}

/// As in PTX: `.u32`.
impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.class {
            Class::Predicate => write!(f, "`.pred`"),
            Class::Bits => write!(f, "`.b{}`", self.bits),
            Class::Unsigned => write!(f, "`.u{}`", self.bits),
            Class::Signed => write!(f, "`.s{}`", self.bits),
            Class::Float => write!(f, "`.f{}`", self.bits),
        }
    }
}

impl From<Type> for Form {
    fn from(ty: Type) -> Self {
        let (class, bits) = match ty {
            Type::Pred => (Class::Predicate, 1),
            Type::B16 => (Class::Bits, 16),
            Type::B32 => (Class::Bits, 32),
            Type::B64 => (Class::Bits, 64),
            Type::U16 => (Class::Unsigned, 16),
            Type::U32 => (Class::Unsigned, 32),
            Type::U64 => (Class::Unsigned, 64),
            Type::S16 => (Class::Signed, 16),
            Type::S32 => (Class::Signed, 32),
            Type::S64 => (Class::Signed, 64),
            Type::F32 => (Class::Float, 32),
            Type::F64 => (Class::Float, 64),
        };
        Self { class, bits }
    }
}

pub(super) fn type_named(name: &str) -> Option<Type> {
    Some(match name {
        "pred" => Type::Pred,
        "b16" => Type::B16,
        "b32" => Type::B32,
        "b64" => Type::B64,
        "u16" => Type::U16,
        "u32" => Type::U32,
        "u64" => Type::U64,
        "s16" => Type::S16,
        "s32" => Type::S32,
        "s64" => Type::S64,
        "f32" => Type::F32,
        "f64" => Type::F64,
        _ => return None,
    })
}

/// An integer: decimal or hexadecimal, of 64 bits, signed or not. Octal ones (`017`) are not
/// understood.
pub(super) fn integer(text: &str) -> Option<i128> {
    let (digits, sign) = match text.strip_prefix('-') {
        Some(digits) => (digits, -1),
        None => (text, 1),
    };
    let size = match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None if digits.starts_with('0') && digits.len() > 1 => return None,
        None => digits.parse::<u64>(),
    };
    let value = sign * i128::from(size.ok()?);
    (value >= i128::from(i64::MIN)).then_some(value)
}

/// A literal as an operand of a type: its bits, the others are zero. Integers are truncated.
pub(super) fn literal(text: &str, form: Form) -> Option<u64> {
    let float = |prefix: &str, bits: u8| {
        let digits = text.strip_prefix(prefix)?;
        let right = form.bits == bits && matches!(form.class, Class::Float | Class::Bits);
        (right && digits.len() == usize::from(bits) / 4).then_some(digits)
    };
    if let Some(digits) = float("0f", 32).or_else(|| float("0d", 64)) {
        return u64::from_str_radix(digits, 16).ok();
    }
    let value = integer(text)?;
    match form.class {
        Class::Float => None,
        // As in C (PTX ISA, "Predicate Constants"); nvcc writes -1.
        Class::Predicate => Some(u64::from(value != 0)),
        _ => Some(value as u64 & (u64::MAX >> (64 - form.bits))),
    }
}
