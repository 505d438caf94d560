//! Opcodes that compute from values of the same thread, with the types of their operands.

use super::types::{Class, Form, type_named};
use crate::instruction::{Compare, Round, Scalar, Type};

/// An operation and the types of its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Signature {
    pub(super) kind: Scalar,
    pub(super) to: Type,
    /// The first `count` of these.
    pub(super) from: [Type; 4],
    pub(super) count: usize,
}

impl Signature {
    fn new(kind: Scalar, to: Type, operands: &[Type]) -> Self {
        let mut from = [Type::Pred; 4];
        from[..operands.len()].copy_from_slice(operands);
        Self { kind, to, from, count: operands.len() }
    }
}

/// The operation of an opcode that is split at its dots; `None` if it is not understood.
pub(super) fn signature(parts: &[&str]) -> Option<Signature> {
    match parts[0] {
        "setp" => compare(parts),
        "cvt" => convert(parts),
        "and" | "or" | "xor" | "not" | "shl" | "shr" | "bfi" | "prmt" | "selp" => bits(parts),
        "ex2" | "lg2" | "rcp" | "rsqrt" | "sqrt" => function(parts),
        _ => arithmetic(parts),
    }
}

fn arithmetic(parts: &[&str]) -> Option<Signature> {
    let ty = type_named(parts[parts.len() - 1])?;
    let form = Form::from(ty);
    let (integer, float) = (form.is_integer(), form.class == Class::Float);
    let signed = form.class == Class::Signed;
    let rounded = |text: &str| if float { round(text) } else { None };
    let number = (integer || float).then_some(Round::Nearest);
    let kind = match *parts {
        ["add", _] => Scalar::Add(ty, number?),
        ["add", mode, _] => Scalar::Add(ty, rounded(mode)?),
        ["sub", _] => Scalar::Sub(ty, number?),
        ["sub", mode, _] => Scalar::Sub(ty, rounded(mode)?),
        ["mul", "lo", _] if integer => Scalar::MulLow(ty),
        ["mul", "hi", _] if integer => Scalar::MulHigh(ty),
        ["mul", "wide", _] => {
            return Some(Signature::new(Scalar::MulWide(ty), doubled(ty)?, &[ty; 2]));
        }
        ["mul", _] if float => Scalar::MulFloat(ty, Round::Nearest),
        ["mul", mode, _] => Scalar::MulFloat(ty, rounded(mode)?),
        ["mad", "lo", _] if integer => {
            return Some(Signature::new(Scalar::MadLow(ty), ty, &[ty; 3]));
        }
        ["fma", mode, _] => {
            return Some(Signature::new(Scalar::Fma(ty, rounded(mode)?), ty, &[ty; 3]));
        }
        ["div", _] if integer => Scalar::Div(ty),
        ["div", "rn", _] if float => Scalar::Div(ty),
        ["div", "approx", "f32"] => Scalar::DivApprox,
        ["rem", _] if integer => Scalar::Rem(ty),
        ["min", _] if integer || float => Scalar::Min(ty),
        ["max", _] if integer || float => Scalar::Max(ty),
        ["neg", _] if signed || float => {
            return Some(Signature::new(Scalar::Neg(ty), ty, &[ty]));
        }
        ["abs", _] if signed || float => {
            return Some(Signature::new(Scalar::Abs(ty), ty, &[ty]));
        }
        _ => return None,
    };
    Some(Signature::new(kind, ty, &[ty; 2]))
}

fn bits(parts: &[&str]) -> Option<Signature> {
    let [name, ty] = *parts else { return None };
    let ty = type_named(ty)?;
    let form = Form::from(ty);
    let predicate = ty == Type::Pred;
    let untyped = form.class == Class::Bits;
    Some(match name {
        "and" if untyped || predicate => Signature::new(Scalar::And(ty), ty, &[ty; 2]),
        "or" if untyped || predicate => Signature::new(Scalar::Or(ty), ty, &[ty; 2]),
        "xor" if untyped || predicate => Signature::new(Scalar::Xor(ty), ty, &[ty; 2]),
        "not" if untyped || predicate => Signature::new(Scalar::Not(ty), ty, &[ty]),
        // The amount always has 32 bits.
        "shl" if untyped => Signature::new(Scalar::Shl(ty), ty, &[ty, Type::U32]),
        "shr" if untyped || form.is_integer() => {
            Signature::new(Scalar::Shr(ty), ty, &[ty, Type::U32])
        }
        "bfi" if untyped && form.bits >= 32 => {
            Signature::new(Scalar::BitFieldInsert(ty), ty, &[ty, ty, Type::U32, Type::U32])
        }
        "prmt" if ty == Type::B32 => Signature::new(Scalar::Permute, ty, &[ty; 3]),
        "selp" if !predicate => Signature::new(Scalar::Select(ty), ty, &[ty, ty, Type::Pred]),
        _ => return None,
    })
}

/// `setp`, without a second predicate and without a boolean operation.
fn compare(parts: &[&str]) -> Option<Signature> {
    let ["setp", comparison, ty] = *parts else { return None };
    let ty = type_named(ty)?;
    let class = Form::from(ty).class;
    let ordered = matches!(class, Class::Unsigned | Class::Signed | Class::Float);
    let float = class == Class::Float;
    let comparison = match comparison {
        "eq" if class != Class::Predicate => Compare::Eq,
        "ne" if class != Class::Predicate => Compare::Ne,
        "lt" if ordered => Compare::Lt,
        "le" if ordered => Compare::Le,
        "gt" if ordered => Compare::Gt,
        "ge" if ordered => Compare::Ge,
        "equ" if float => Compare::Equ,
        "neu" if float => Compare::Neu,
        "ltu" if float => Compare::Ltu,
        "leu" if float => Compare::Leu,
        "gtu" if float => Compare::Gtu,
        "geu" if float => Compare::Geu,
        "num" if float => Compare::Num,
        "nan" if float => Compare::Nan,
        _ => return None,
    };
    Some(Signature::new(Scalar::Compare(comparison, ty), Type::Pred, &[ty; 2]))
}

fn convert(parts: &[&str]) -> Option<Signature> {
    let integer = |ty| Form::from(ty).is_integer();
    Some(match *parts {
        ["cvt", "f64", "f32"] => Signature::new(Scalar::Widen, Type::F64, &[Type::F32]),
        ["cvt", "rn", "f32", "f64"] => Signature::new(Scalar::Narrow, Type::F32, &[Type::F64]),
        ["cvt", "sat", "f32", "f32"] => Signature::new(Scalar::Saturate, Type::F32, &[Type::F32]),
        ["cvt", "rn", "bf16", "f32"] => Signature::new(Scalar::Bf16, Type::B16, &[Type::F32]),
        ["cvt", "rn", "bf16x2", "f32"] => {
            Signature::new(Scalar::Bf16Pair, Type::B32, &[Type::F32; 2])
        }
        ["cvt", "rn", to @ ("f32" | "f64"), from] => {
            let (to, from) = (type_named(to)?, type_named(from)?);
            if !integer(from) {
                return None;
            }
            Signature::new(Scalar::FloatOf { from, to }, to, &[from])
        }
        ["cvt", to, from] => {
            let (to, from) = (type_named(to)?, type_named(from)?);
            if !integer(to) || !integer(from) {
                return None;
            }
            Signature::new(Scalar::Convert { from, to }, to, &[from])
        }
        _ => return None,
    })
}

fn function(parts: &[&str]) -> Option<Signature> {
    let kind = match *parts {
        ["ex2", "approx", "f32"] => Scalar::Ex2 { flush: false },
        ["ex2", "approx", "ftz", "f32"] => Scalar::Ex2 { flush: true },
        ["lg2", "approx", "f32"] => Scalar::Lg2,
        ["rcp", "rn", "f32"] => Scalar::Rcp,
        ["rsqrt", "approx", "f32"] => Scalar::Rsqrt,
        ["sqrt", "rn", "f32"] => Scalar::Sqrt(Type::F32),
        ["sqrt", "rn", "f64"] => {
            return Some(Signature::new(Scalar::Sqrt(Type::F64), Type::F64, &[Type::F64]));
        }
        _ => return None,
    };
    Some(Signature::new(kind, Type::F32, &[Type::F32]))
}

fn round(text: &str) -> Option<Round> {
    Some(match text {
        "rn" => Round::Nearest,
        "rz" => Round::Zero,
        "rm" => Round::Down,
        _ => return None,
    })
}

/// The type of products of this type (`mul.wide`).
fn doubled(ty: Type) -> Option<Type> {
    Some(match ty {
        Type::U16 => Type::U32,
        Type::S16 => Type::S32,
        Type::U32 => Type::U64,
        Type::S32 => Type::S64,
        _ => return None,
    })
}
