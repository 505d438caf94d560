//! Operations on the values of single threads ([`Scalar`]), for all threads of a warp.
//!
//! Bits of a value above its width are zero, before and after. `f32` results that are NaN are the
//! canonical NaN, as the hardware's; those of `f64` are one quiet NaN.
//!
//! The approximations (`.approx`) are computed in `f64` and rounded once, which is the nearest
//! `f32` in all but extremely rare cases. A GPU may return any value within the bound that the
//! comment of each operation states.

use crate::instruction::{Compare, Lanes, Round, Scalar, Type};

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScalarFault {
    /// The result is unspecified (PTX ISA, `div` and `rem` of integers).
    #[error("lane {lane} divides an integer by zero")]
    DivisionByZero { lane: usize },
    /// The ISA does not have the operation for this type; or it rounds `f64` in another mode than
    /// `.rn`, which is not implemented.
    #[error("the operation is not defined for this type and rounding")]
    Undefined,
}

/// The NaN of `f32` results (PTX ISA, "Floating Point Instructions").
const NAN_F32: u32 = 0x7fff_ffff;
/// A quiet NaN.
const NAN_F64: u64 = 0x7ff8_0000_0000_0000;

/// A Rust type with the values of a register.
trait Value: Copy {
    fn from_bits(bits: u64) -> Self;
    /// The bits above the width are zero.
    fn bits(self) -> u64;
}

macro_rules! integer_values {
    ($($value:ty as $unsigned:ty),+) => {
        $(impl Value for $value {
            #[inline]
            fn from_bits(bits: u64) -> Self {
                bits as Self
            }
            #[inline]
            fn bits(self) -> u64 {
                self as $unsigned as u64
            }
        })+
    };
}
integer_values!(u16 as u16, i16 as u16, u32 as u32, i32 as u32, u64 as u64, i64 as u64);

impl Value for bool {
    #[inline]
    fn from_bits(bits: u64) -> Self {
        bits & 1 != 0
    }
    #[inline]
    fn bits(self) -> u64 {
        u64::from(self)
    }
}

impl Value for f32 {
    #[inline]
    fn from_bits(bits: u64) -> Self {
        f32::from_bits(bits as u32)
    }
    #[inline]
    fn bits(self) -> u64 {
        u64::from(if self.is_nan() { NAN_F32 } else { self.to_bits() })
    }
}

impl Value for f64 {
    #[inline]
    fn from_bits(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    #[inline]
    fn bits(self) -> u64 {
        if self.is_nan() { NAN_F64 } else { self.to_bits() }
    }
}

// Each call has a loop of its own for one function and its types, which the compiler can vectorise.

fn map1<A: Value, R: Value>(from: &[&Lanes; 4], to: &mut Lanes, f: impl Fn(A) -> R) {
    for (to, a) in to.iter_mut().zip(from[0]) {
        *to = f(A::from_bits(*a)).bits();
    }
}

fn map2<A: Value, B: Value, R: Value>(from: &[&Lanes; 4], to: &mut Lanes, f: impl Fn(A, B) -> R) {
    for ((to, a), b) in to.iter_mut().zip(from[0]).zip(from[1]) {
        *to = f(A::from_bits(*a), B::from_bits(*b)).bits();
    }
}

fn map3<A: Value, B: Value, C: Value, R: Value>(
    from: &[&Lanes; 4],
    to: &mut Lanes,
    f: impl Fn(A, B, C) -> R,
) {
    for (((to, a), b), c) in to.iter_mut().zip(from[0]).zip(from[1]).zip(from[2]) {
        *to = f(A::from_bits(*a), B::from_bits(*b), C::from_bits(*c)).bits();
    }
}

/// Runs the body with `$t` as the Rust type of a [`Type`]; other types are undefined.
macro_rules! with {
    ($type:expr, $t:ident in { $($variant:ident: $rust:ty),+ }, $body:expr) => {
        match $type {
            $(Type::$variant => {
                type $t = $rust;
                $body
            })+
            _ => return Err(ScalarFault::Undefined),
        }
    };
}

macro_rules! with_integer {
    ($type:expr, $t:ident => $body:expr) => {
        with!($type, $t in { U16: u16, U32: u32, U64: u64, S16: i16, S32: i32, S64: i64 }, $body)
    };
}

macro_rules! with_signed {
    ($type:expr, $t:ident => $body:expr) => {
        with!($type, $t in { S16: i16, S32: i32, S64: i64 }, $body)
    };
}

macro_rules! with_float {
    ($type:expr, $t:ident => $body:expr) => {
        with!($type, $t in { F32: f32, F64: f64 }, $body)
    };
}

/// Computes all lanes. Lanes that are not `active` may have any operands; their results mean
/// nothing.
pub fn execute(
    kind: Scalar,
    from: &[&Lanes; 4],
    to: &mut Lanes,
    active: u32,
) -> Result<(), ScalarFault> {
    use Scalar as S;
    match kind {
        S::Mov(_) | S::Select(_) | S::Permute => movement(kind, from, to),
        S::Add(Type::F32 | Type::F64, _)
        | S::Sub(Type::F32 | Type::F64, _)
        | S::MulFloat(..)
        | S::Fma(..) => rounded(kind, from, to),
        S::Div(Type::F32 | Type::F64)
        | S::Min(Type::F32 | Type::F64)
        | S::Max(Type::F32 | Type::F64)
        | S::Neg(Type::F32 | Type::F64)
        | S::Abs(Type::F32 | Type::F64)
        | S::Rcp
        | S::Sqrt(_) => float(kind, from, to),
        S::DivApprox | S::Ex2 { .. } | S::Lg2 | S::Rsqrt => approximation(kind, from, to),
        S::Add(..)
        | S::Sub(..)
        | S::MadLow(_)
        | S::Min(_)
        | S::Max(_)
        | S::Neg(_)
        | S::Abs(_)
        | S::MulLow(_) => integer(kind, from, to),
        S::MulHigh(_) | S::MulWide(_) => product(kind, from, to),
        S::Div(_) | S::Rem(_) => quotient(kind, from, to, active),
        S::And(_) | S::Or(_) | S::Xor(_) | S::Not(_) => logic(kind, from, to),
        S::Shl(_) | S::Shr(_) | S::BitFieldInsert(_) => shift(kind, from, to),
        S::Compare(compare, of) => comparison(compare, of, from, to),
        S::Convert { .. }
        | S::FloatOf { .. }
        | S::Widen
        | S::Narrow
        | S::Saturate
        | S::Bf16
        | S::Bf16Pair => conversion(kind, from, to),
    }
}

/// PTX ISA, `mov`, `selp` and `prmt`.
fn movement(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    match kind {
        Scalar::Mov(_) => *to = *from[0],
        Scalar::Select(of) if of != Type::Pred => {
            map3(from, to, |a: u64, b: u64, first: bool| if first { a } else { b });
        }
        Scalar::Permute => map3(from, to, permute),
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// Each of the four low digits of the selector chooses a byte of `b:a`; its bit 3 replaces the byte
/// by copies of the byte's sign.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let mut result = 0;
    for byte_index in 0..4 {
        let choice = selector >> (4 * byte_index) & 15;
        let byte = (bytes >> (8 * (choice & 7))) as u8;
        let byte = if choice & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        result |= u32::from(byte) << (8 * byte_index);
    }
    result
}

/// PTX ISA, "Integer Arithmetic Instructions": `add`, `sub`, `mad.lo`, `mul.lo`, `min`, `max`, `neg`
/// and `abs`. They wrap: the negative and the magnitude of the least value are that value.
fn integer(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    match kind {
        Scalar::Add(of, Round::Nearest) => {
            with_integer!(of, T => map2(from, to, |a: T, b: T| a.wrapping_add(b)));
        }
        Scalar::Sub(of, Round::Nearest) => {
            with_integer!(of, T => map2(from, to, |a: T, b: T| a.wrapping_sub(b)));
        }
        Scalar::MulLow(of) => {
            with_integer!(of, T => map2(from, to, |a: T, b: T| a.wrapping_mul(b)));
        }
        Scalar::MadLow(of) => {
            with_integer!(of, T => map3(from, to, |a: T, b: T, c: T| {
                a.wrapping_mul(b).wrapping_add(c)
            }));
        }
        Scalar::Min(of) => with_integer!(of, T => map2(from, to, |a: T, b: T| a.min(b))),
        Scalar::Max(of) => with_integer!(of, T => map2(from, to, |a: T, b: T| a.max(b))),
        Scalar::Neg(of) => with_signed!(of, T => map1(from, to, |a: T| a.wrapping_neg())),
        Scalar::Abs(of) => with_signed!(of, T => map1(from, to, |a: T| a.wrapping_abs())),
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// PTX ISA, `mul` of integers: `mul.hi` and `mul.wide`.
fn product(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    macro_rules! high {
        ($t:ty, $wide:ty) => {
            map2(from, to, |a: $t, b: $t| ((a as $wide * b as $wide) >> <$t>::BITS) as $t)
        };
    }
    macro_rules! wide {
        ($t:ty, $wide:ty) => {
            map2(from, to, |a: $t, b: $t| a as $wide * b as $wide)
        };
    }
    match kind {
        Scalar::MulHigh(Type::U16) => high!(u16, u32),
        Scalar::MulHigh(Type::S16) => high!(i16, i32),
        Scalar::MulHigh(Type::U32) => high!(u32, u64),
        Scalar::MulHigh(Type::S32) => high!(i32, i64),
        Scalar::MulHigh(Type::U64) => high!(u64, u128),
        Scalar::MulHigh(Type::S64) => high!(i64, i128),
        Scalar::MulWide(Type::U16) => wide!(u16, u32),
        Scalar::MulWide(Type::S16) => wide!(i16, i32),
        Scalar::MulWide(Type::U32) => wide!(u32, u64),
        Scalar::MulWide(Type::S32) => wide!(i32, i64),
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// PTX ISA, `div` and `rem` of integers. The quotient of the least value and -1 wraps.
fn quotient(
    kind: Scalar,
    from: &[&Lanes; 4],
    to: &mut Lanes,
    active: u32,
) -> Result<(), ScalarFault> {
    match kind {
        Scalar::Div(of) => with_integer!(of, T => map2(from, to, |a: T, b: T| {
            if b == 0 { 0 } else { a.wrapping_div(b) }
        })),
        Scalar::Rem(of) => with_integer!(of, T => map2(from, to, |a: T, b: T| {
            if b == 0 { 0 } else { a.wrapping_rem(b) }
        })),
        _ => return Err(ScalarFault::Undefined),
    }
    match (0..).zip(from[1]).find(|(lane, b)| **b == 0 && active >> lane & 1 != 0) {
        Some((lane, _)) => Err(ScalarFault::DivisionByZero { lane }),
        None => Ok(()),
    }
}

/// PTX ISA, "Logic and Shift Instructions": `and`, `or`, `xor` and `not`.
fn logic(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    let (Scalar::And(of) | Scalar::Or(of) | Scalar::Xor(of) | Scalar::Not(of)) = kind else {
        return Err(ScalarFault::Undefined);
    };
    let ones = match of {
        Type::Pred => 1,
        Type::B16 => u64::from(u16::MAX),
        Type::B32 => u64::from(u32::MAX),
        Type::B64 => u64::MAX,
        _ => return Err(ScalarFault::Undefined),
    };
    match kind {
        Scalar::And(_) => map2(from, to, |a: u64, b: u64| a & b),
        Scalar::Or(_) => map2(from, to, |a: u64, b: u64| a | b),
        Scalar::Xor(_) => map2(from, to, |a: u64, b: u64| a ^ b),
        _ => map1(from, to, |a: u64| a ^ ones),
    }
    Ok(())
}

/// PTX ISA, `shl`, `shr` and `bfi`.
fn shift(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    match kind {
        Scalar::Shl(of) => with!(of, T in { B16: u16, B32: u32, B64: u64 }, {
            map2(from, to, |a: T, amount: u32| if amount < T::BITS { a << amount } else { 0 });
        }),
        Scalar::Shr(of @ (Type::S16 | Type::S32 | Type::S64)) => with_signed!(of, T => {
            map2(from, to, |a: T, amount: u32| a >> amount.min(T::BITS - 1));
        }),
        Scalar::Shr(of) => {
            with!(of, T in { B16: u16, U16: u16, B32: u32, U32: u32, B64: u64, U64: u64 }, {
                map2(from, to, |a: T, amount: u32| if amount < T::BITS { a >> amount } else { 0 });
            });
        }
        Scalar::BitFieldInsert(of) => with!(of, T in { B32: u32, B64: u64 }, {
            let values = from[0].iter().zip(from[1]);
            let fields = from[2].iter().zip(from[3]);
            for (to, ((a, b), (start, length))) in to.iter_mut().zip(values.zip(fields)) {
                // Both are 8 bits; bits of the field beyond the width are not inserted.
                let start = (*start as u32 & 0xff).min(T::BITS);
                let length = (*length as u32 & 0xff).min(T::BITS - start);
                let ones = T::MAX.checked_shr(T::BITS - length).unwrap_or(0);
                // Without a field, the shift may be the width.
                let field = ones.checked_shl(start).unwrap_or(0);
                let inserted = (*a as T).checked_shl(start).unwrap_or(0);
                *to = (*b as T & !field | inserted & field).bits();
            }
        }),
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// PTX ISA, `setp` and "Integer and Bit-Size Comparisons". Untyped bits (`.b`) have no order.
fn comparison(
    compare: Compare,
    of: Type,
    from: &[&Lanes; 4],
    to: &mut Lanes,
) -> Result<(), ScalarFault> {
    match of {
        Type::F32 => compare_floats::<f32>(compare, from, to),
        Type::F64 => compare_floats::<f64>(compare, from, to),
        Type::B16 | Type::B32 | Type::B64 => match compare {
            Compare::Eq => map2(from, to, |a: u64, b: u64| a == b),
            Compare::Ne => map2(from, to, |a: u64, b: u64| a != b),
            _ => return Err(ScalarFault::Undefined),
        },
        _ => with_integer!(of, T => match compare {
            Compare::Eq => map2(from, to, |a: T, b: T| a == b),
            Compare::Ne => map2(from, to, |a: T, b: T| a != b),
            Compare::Lt => map2(from, to, |a: T, b: T| a < b),
            Compare::Le => map2(from, to, |a: T, b: T| a <= b),
            Compare::Gt => map2(from, to, |a: T, b: T| a > b),
            Compare::Ge => map2(from, to, |a: T, b: T| a >= b),
            _ => return Err(ScalarFault::Undefined),
        }),
    }
    Ok(())
}

/// PTX ISA, "Floating Point Comparisons". Without `u`, a comparison with NaN is false, `ne` included;
/// with `u`, it is true.
fn compare_floats<T: Value + PartialOrd>(compare: Compare, from: &[&Lanes; 4], to: &mut Lanes) {
    let unordered = |a: T, b: T| a.partial_cmp(&b).is_none();
    match compare {
        Compare::Eq => map2(from, to, |a: T, b: T| a == b),
        Compare::Ne => map2(from, to, |a: T, b: T| a != b && !unordered(a, b)),
        Compare::Lt => map2(from, to, |a: T, b: T| a < b),
        Compare::Le => map2(from, to, |a: T, b: T| a <= b),
        Compare::Gt => map2(from, to, |a: T, b: T| a > b),
        Compare::Ge => map2(from, to, |a: T, b: T| a >= b),
        Compare::Equ => map2(from, to, |a: T, b: T| a == b || unordered(a, b)),
        Compare::Neu => map2(from, to, |a: T, b: T| a != b),
        Compare::Ltu => map2(from, to, |a: T, b: T| a < b || unordered(a, b)),
        Compare::Leu => map2(from, to, |a: T, b: T| a <= b || unordered(a, b)),
        Compare::Gtu => map2(from, to, |a: T, b: T| a > b || unordered(a, b)),
        Compare::Geu => map2(from, to, |a: T, b: T| a >= b || unordered(a, b)),
        Compare::Num => map2(from, to, |a: T, b: T| !unordered(a, b)),
        Compare::Nan => map2(from, to, unordered),
    }
}

/// PTX ISA, "Floating Point Instructions": `add`, `sub`, `mul` and `fma`. In `f64`, products of two
/// `f32` are exact; sums are not, see [`sum_and_error`].
fn rounded(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    use Round::{Down, Nearest, Zero};
    use Type::{F32, F64};
    let wide = f64::from;
    match kind {
        Scalar::Add(of, Nearest) => with_float!(of, T => map2(from, to, |a: T, b: T| a + b)),
        Scalar::Sub(of, Nearest) => with_float!(of, T => map2(from, to, |a: T, b: T| a - b)),
        Scalar::MulFloat(of, Nearest) => with_float!(of, T => map2(from, to, |a: T, b: T| a * b)),
        Scalar::Fma(F32, Nearest) => map3(from, to, f32::mul_add),
        Scalar::Fma(F64, Nearest) => map3(from, to, f64::mul_add),
        Scalar::Add(F32, Zero) => {
            map2(from, to, |a: f32, b: f32| sum_toward_zero(wide(a), wide(b)));
        }
        Scalar::Add(F32, Down) => map2(from, to, |a: f32, b: f32| sum_down(wide(a), wide(b))),
        Scalar::Sub(F32, Zero) => {
            map2(from, to, |a: f32, b: f32| sum_toward_zero(wide(a), wide(-b)));
        }
        Scalar::Sub(F32, Down) => map2(from, to, |a: f32, b: f32| sum_down(wide(a), wide(-b))),
        Scalar::MulFloat(F32, Zero) => map2(from, to, |a: f32, b: f32| {
            let exact = wide(a) * wide(b);
            sum_toward_zero(exact, 0f64.copysign(exact))
        }),
        Scalar::MulFloat(F32, Down) => map2(from, to, |a: f32, b: f32| {
            let exact = wide(a) * wide(b);
            sum_down(exact, 0f64.copysign(exact))
        }),
        Scalar::Fma(F32, Zero) => {
            map3(from, to, |a: f32, b: f32, c: f32| sum_toward_zero(wide(a) * wide(b), wide(c)));
        }
        Scalar::Fma(F32, Down) => {
            map3(from, to, |a: f32, b: f32, c: f32| sum_down(wide(a) * wide(b), wide(c)));
        }
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// The nearest `f64` to `a + b`, and the exact rest (Knuth's two-sum). Operands are `f32` values or
/// products of two, so that nothing overflows or underflows. The rest is NaN if the sum is not
/// finite.
fn sum_and_error(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let of_b = sum - a;
    let of_a = sum - of_b;
    (sum, (a - of_a) + (b - of_b))
}

// Below, `near`, the nearest `f32` to the nearest `f64`, is a neighbour of the exact sum. Rounding
// is monotone: if `near` differs from the nearest `f64`, it is on the same side of the exact sum.
// If they are equal, the sign of the rest decides.

/// The largest `f32` that is not above `a + b`.
fn sum_down(a: f64, b: f64) -> f32 {
    let (sum, error) = sum_and_error(a, b);
    if sum == 0.0 {
        // An exact zero is negative in this mode, unless both terms are +0.
        return if a.is_sign_positive() && b.is_sign_positive() { 0.0 } else { -0.0 };
    }
    let near = sum as f32;
    let back = f64::from(near);
    if back > sum || back == sum && error < 0.0 { near.next_down() } else { near }
}

/// The `f32` of the largest magnitude that is not above the magnitude of `a + b`.
fn sum_toward_zero(a: f64, b: f64) -> f32 {
    let (sum, error) = sum_and_error(a, b);
    let near = sum as f32;
    let back = f64::from(near);
    if sum > 0.0 && (back > sum || back == sum && error < 0.0) {
        near.next_down()
    } else if sum < 0.0 && (back < sum || back == sum && error > 0.0) {
        near.next_up()
    } else {
        near
    }
}

/// PTX ISA, "Floating Point Instructions": `div.rn`, `abs`, `neg`, `min`, `max`, `rcp.rn` and
/// `sqrt.rn`.
fn float(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    match kind {
        Scalar::Div(of) => with_float!(of, T => map2(from, to, |a: T, b: T| a / b)),
        Scalar::Sqrt(of) => with_float!(of, T => map1(from, to, |a: T| a.sqrt())),
        Scalar::Rcp => map1(from, to, |a: f32| 1.0 / a),
        // The sign of a NaN changes too; the ISA leaves open which NaN results.
        Scalar::Neg(Type::F32) => map1(from, to, |a: u32| a ^ 1 << 31),
        Scalar::Neg(Type::F64) => map1(from, to, |a: u64| a ^ 1 << 63),
        Scalar::Abs(Type::F32) => map1(from, to, |a: u32| a & !(1 << 31)),
        // A NaN does not change.
        Scalar::Abs(Type::F64) => {
            map1(from, to, |a: u64| if f64::from_bits(a).is_nan() { a } else { a & !(1 << 63) });
        }
        // A number and NaN give the number, and -0 is below +0.
        Scalar::Min(of) => with_float!(of, T => map2(from, to, |a: T, b: T| {
            if b.is_nan() || a < b || a == b && a.is_sign_negative() { a } else { b }
        })),
        Scalar::Max(of) => with_float!(of, T => map2(from, to, |a: T, b: T| {
            if b.is_nan() || a > b || a == b && a.is_sign_positive() { a } else { b }
        })),
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// PTX ISA, "Floating Point Instructions": `div.approx.f32`, `rsqrt.approx.f32`, `lg2.approx.f32` and
/// `ex2.approx.f32`.
fn approximation(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    match kind {
        Scalar::DivApprox => map2(from, to, divide_approximately),
        // A relative error of 2^-22.9. The reciprocal of -0 is -infinity, of a negative number NaN.
        Scalar::Rsqrt => map1(from, to, |a: f32| (1.0 / f64::from(a).sqrt()) as f32),
        // An error of 2^-22, absolute between 0.5 and 2, relative elsewhere. The logarithms of both
        // zeros are -infinity, those of negative numbers NaN.
        Scalar::Lg2 => map1(from, to, |a: f32| f64::from(a).log2() as f32),
        // 2 ulp. Subnormal operands give 1, flushed or not.
        Scalar::Ex2 { flush: false } => map1(from, to, |a: f32| f64::from(a).exp2() as f32),
        Scalar::Ex2 { flush: true } => map1(from, to, |a: f32| {
            let result = f64::from(a).exp2() as f32;
            if result < f32::MIN_POSITIVE { 0.0 } else { result }
        }),
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// 2 ulp for divisors from 2^-126 to 2^126. For larger ones the result is a zero with the sign of the
/// quotient, or NaN if the dividend is infinite. No bound is given for subnormal divisors; these are
/// divided like others.
fn divide_approximately(a: f32, b: f32) -> f32 {
    const LIMIT: f32 = f32::from_bits((126 + 127) << 23);
    if b.abs() > LIMIT { a * 0f32.copysign(b) } else { a / b }
}

/// PTX ISA, `cvt`.
fn conversion(kind: Scalar, from: &[&Lanes; 4], to: &mut Lanes) -> Result<(), ScalarFault> {
    match kind {
        Scalar::Convert { from: source, to: target } => {
            let ones = with_integer!(target, T => (-1i64 as T).bits());
            // Nothing is extended from 64 bits, so their sign does not matter.
            with!(source, T in { U16: u16, U32: u32, U64: i64, S16: i16, S32: i32, S64: i64 }, {
                map1(from, to, |a: T| a as u64 & ones);
            });
        }
        Scalar::FloatOf { from: source, to: Type::F32 } => {
            with_integer!(source, T => map1(from, to, |a: T| a as f32));
        }
        Scalar::FloatOf { from: source, to: Type::F64 } => {
            with_integer!(source, T => map1(from, to, |a: T| a as f64));
        }
        Scalar::Widen => map1(from, to, |a: f32| f64::from(a)),
        Scalar::Narrow => map1(from, to, |a: f64| a as f32),
        // NaN and -0 give +0.
        Scalar::Saturate => map1(from, to, |a: f32| if a > 0.0 { a.min(1.0) } else { 0.0 }),
        Scalar::Bf16 => map1(from, to, bf16),
        Scalar::Bf16Pair => {
            map2(from, to, |high: f32, low: f32| {
                u32::from(bf16(high)) << 16 | u32::from(bf16(low))
            });
        }
        _ => return Err(ScalarFault::Undefined),
    }
    Ok(())
}

/// The nearest bf16, ties to even.
fn bf16(a: f32) -> u16 {
    if a.is_nan() {
        return 0x7fff;
    }
    // Adds just under half of the last digit, and the rest of the half if the last bit is odd. A
    // carry into the exponent is right too, up to infinity.
    let bits = a.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests;
