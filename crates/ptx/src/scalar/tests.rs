//! The tables are written from the ISA document and IEEE 754, as bits.

use super::*;
use crate::instruction::LANES;
use Scalar as S;
use rounding::SplitMix;
use tables::{BITS, CONVERSIONS, FLOATS, INTEGERS, SUMS};

mod rounding;
mod tables;

/// Operations with rows of operands and, at the end, the result.
type Table = &'static [(Scalar, &'static [&'static [u64]])];

/// Comparisons, and whether they hold for less, equal, greater and unordered operands (PTX ISA,
/// "Floating Point Comparisons").
const COMPARISONS: [(Compare, [u64; 4]); 14] = [
    (Compare::Eq, [0, 1, 0, 0]),
    (Compare::Ne, [1, 0, 1, 0]),
    (Compare::Lt, [1, 0, 0, 0]),
    (Compare::Le, [1, 1, 0, 0]),
    (Compare::Gt, [0, 0, 1, 0]),
    (Compare::Ge, [0, 1, 1, 0]),
    (Compare::Equ, [0, 1, 0, 1]),
    (Compare::Neu, [1, 0, 1, 1]),
    (Compare::Ltu, [1, 0, 0, 1]),
    (Compare::Leu, [1, 1, 0, 1]),
    (Compare::Gtu, [0, 0, 1, 1]),
    (Compare::Geu, [0, 1, 1, 1]),
    (Compare::Num, [1, 1, 1, 0]),
    (Compare::Nan, [0, 0, 0, 1]),
];

const TYPES: [Type; 12] = [
    Type::Pred,
    Type::B16,
    Type::B32,
    Type::B64,
    Type::U16,
    Type::U32,
    Type::U64,
    Type::S16,
    Type::S32,
    Type::S64,
    Type::F32,
    Type::F64,
];

/// The result, which all lanes must have.
fn result(kind: Scalar, operands: &[u64]) -> Result<u64, ScalarFault> {
    let mut from = [[0; LANES]; 4];
    for (lanes, operand) in from.iter_mut().zip(operands) {
        lanes.fill(*operand);
    }
    let mut to = [u64::MAX; LANES];
    execute(kind, &from.each_ref(), &mut to, u32::MAX)?;
    assert_eq!(to, [to[0]; LANES], "{kind:?}");
    Ok(to[0])
}

fn check(table: Table) {
    for (kind, rows) in table {
        for row in *rows {
            let (want, operands) = row.split_last().unwrap();
            let got = result(*kind, operands).unwrap();
            assert_eq!(got, *want, "{kind:?} {operands:#x?}: {got:#x} instead of {want:#x}");
        }
    }
}

#[test]
fn integers() {
    check(INTEGERS);
}

#[test]
fn bits() {
    check(BITS);
}

#[test]
fn sums_of_floats() {
    check(SUMS);
}

#[test]
fn floats() {
    check(FLOATS);
}

#[test]
fn conversions() {
    check(CONVERSIONS);
}

#[test]
fn comparisons() {
    // Less, equal and greater; the order of integers depends on the sign.
    let integers: [(Type, [[u64; 2]; 3]); 6] = [
        (Type::U16, [[1, 0xffff], [2, 2], [0xffff, 1]]),
        (Type::S16, [[0xffff, 1], [2, 2], [1, 0xffff]]),
        (Type::U32, [[1, 0xffff_ffff], [2, 2], [0xffff_ffff, 1]]),
        (Type::S32, [[0xffff_ffff, 1], [2, 2], [1, 0xffff_ffff]]),
        (Type::U64, [[1, u64::MAX], [2, 2], [u64::MAX, 1]]),
        (Type::S64, [[u64::MAX, 1], [2, 2], [1, u64::MAX]]),
    ];
    for (of, pairs) in integers {
        for (compare, want) in &COMPARISONS[..6] {
            let got = pairs.map(|pair| result(S::Compare(*compare, of), &pair).unwrap());
            assert_eq!(got, want[..3], "{compare:?} {of:?}");
        }
        for (compare, _) in &COMPARISONS[6..] {
            assert_eq!(result(S::Compare(*compare, of), &[0, 0]), Err(ScalarFault::Undefined));
        }
    }
    // -1 and 0.5, both zeros, infinity and 1, NaN and 1; then 1 and NaN, two NaN.
    let floats: [(Type, [[u64; 2]; 6]); 2] = [
        (
            Type::F32,
            [
                [0xbf80_0000, 0x3f00_0000],
                [0x8000_0000, 0],
                [0x7f80_0000, 0x3f80_0000],
                [0x7fc0_0000, 0x3f80_0000],
                [0x3f80_0000, 0x7fc0_0000],
                [0xffc0_0000, 0xffc0_0000],
            ],
        ),
        (
            Type::F64,
            [
                [0xbff0_0000_0000_0000, 0x3fe0_0000_0000_0000],
                [0x8000_0000_0000_0000, 0],
                [0x7ff0_0000_0000_0000, 0x3ff0_0000_0000_0000],
                [0x7ff8_0000_0000_0000, 0x3ff0_0000_0000_0000],
                [0x3ff0_0000_0000_0000, 0x7ff8_0000_0000_0000],
                [0xfff8_0000_0000_0000, 0xfff8_0000_0000_0000],
            ],
        ),
    ];
    for (of, pairs) in floats {
        for (compare, [less, equal, greater, unordered]) in COMPARISONS {
            let got = pairs.map(|pair| result(S::Compare(compare, of), &pair).unwrap());
            let want = [less, equal, greater, unordered, unordered, unordered];
            assert_eq!(got, want, "{compare:?} {of:?}");
        }
    }
    for of in [Type::B16, Type::B32, Type::B64] {
        assert_eq!(result(S::Compare(Compare::Eq, of), &[7, 7]), Ok(1));
        assert_eq!(result(S::Compare(Compare::Ne, of), &[7, 7]), Ok(0));
        assert_eq!(result(S::Compare(Compare::Lt, of), &[7, 7]), Err(ScalarFault::Undefined));
    }
}

#[test]
fn zero_divisors_matter_in_active_lanes_only() {
    for of in [Type::U16, Type::U32, Type::U64, Type::S16, Type::S32, Type::S64] {
        for kind in [S::Div(of), S::Rem(of)] {
            let mut from = [[9; LANES], [5; LANES], [0; LANES], [0; LANES]];
            from[1][3] = 0;
            from[1][31] = 0;
            let want = if kind == S::Div(of) { 1 } else { 4 };
            let mut to = [0; LANES];
            assert_eq!(execute(kind, &from.each_ref(), &mut to, !(1 << 3 | 1 << 31)), Ok(()));
            for lane in (0..LANES).filter(|lane| ![3, 31].contains(lane)) {
                assert_eq!(to[lane], want, "{kind:?}");
            }
            let fault = |lane| Err(ScalarFault::DivisionByZero { lane });
            assert_eq!(execute(kind, &from.each_ref(), &mut to, u32::MAX), fault(3));
            assert_eq!(execute(kind, &from.each_ref(), &mut to, 1 << 31), fault(31));
        }
    }
    assert_eq!(
        ScalarFault::DivisionByZero { lane: 3 }.to_string(),
        "lane 3 divides an integer by zero"
    );
}

#[test]
fn lanes_are_separate() {
    let a = std::array::from_fn(|lane| 100 + lane as u64);
    let b = std::array::from_fn(|lane| 3 * lane as u64);
    let from = [a, b, [0; LANES], [0; LANES]];
    let mut to = [0; LANES];
    execute(S::Add(Type::U32, Round::Nearest), &from.each_ref(), &mut to, u32::MAX).unwrap();
    assert_eq!(to, std::array::from_fn(|lane| 100 + 4 * lane as u64));
}

/// Kinds of one variant each, for all types and modes, whether they exist or not.
fn all_kinds() -> Vec<Scalar> {
    let mut kinds = vec![S::DivApprox, S::Permute, S::Widen, S::Narrow, S::Saturate, S::Bf16];
    kinds.extend([S::Bf16Pair, S::Lg2, S::Rcp, S::Rsqrt]);
    kinds.extend([S::Ex2 { flush: false }, S::Ex2 { flush: true }]);
    for of in TYPES {
        kinds.extend([S::Mov(of), S::MulLow(of), S::MulHigh(of), S::MulWide(of), S::MadLow(of)]);
        kinds.extend([S::Div(of), S::Rem(of), S::Min(of), S::Max(of), S::Neg(of), S::Abs(of)]);
        kinds.extend([S::And(of), S::Or(of), S::Xor(of), S::Not(of), S::Shl(of), S::Shr(of)]);
        kinds.extend([S::BitFieldInsert(of), S::Select(of), S::Sqrt(of)]);
        kinds.extend(COMPARISONS.map(|(compare, _)| S::Compare(compare, of)));
        for round in [Round::Nearest, Round::Zero, Round::Down] {
            kinds.extend([S::Add(of, round), S::Sub(of, round)]);
            kinds.extend([S::MulFloat(of, round), S::Fma(of, round)]);
        }
        for to in TYPES {
            kinds.extend([S::Convert { from: of, to }, S::FloatOf { from: of, to }]);
        }
    }
    kinds
}

/// A number for each variant of [`Scalar`], without a gap, and the type of the result.
fn variant(kind: Scalar) -> (usize, Type) {
    match kind {
        S::Mov(of) => (0, of),
        S::Add(of, _) => (1, of),
        S::Sub(of, _) => (2, of),
        S::MulFloat(of, _) => (3, of),
        S::MulLow(of) => (4, of),
        S::MulHigh(of) => (5, of),
        S::MulWide(Type::U16 | Type::S16) => (6, Type::B32),
        S::MulWide(_) => (6, Type::B64),
        S::MadLow(of) => (7, of),
        S::Fma(of, _) => (8, of),
        S::Div(of) => (9, of),
        S::DivApprox => (10, Type::F32),
        S::Rem(of) => (11, of),
        S::Min(of) => (12, of),
        S::Max(of) => (13, of),
        S::Neg(of) => (14, of),
        S::Abs(of) => (15, of),
        S::And(of) => (16, of),
        S::Or(of) => (17, of),
        S::Xor(of) => (18, of),
        S::Not(of) => (19, of),
        S::Shl(of) => (20, of),
        S::Shr(of) => (21, of),
        S::BitFieldInsert(of) => (22, of),
        S::Permute => (23, Type::B32),
        S::Select(of) => (24, of),
        S::Compare(..) => (25, Type::Pred),
        S::Convert { to, .. } => (26, to),
        S::FloatOf { to, .. } => (27, to),
        S::Widen => (28, Type::F64),
        S::Narrow => (29, Type::F32),
        S::Saturate => (30, Type::F32),
        S::Bf16 => (31, Type::B16),
        S::Bf16Pair => (32, Type::B32),
        S::Ex2 { .. } => (33, Type::F32),
        S::Lg2 => (34, Type::F32),
        S::Rcp => (35, Type::F32),
        S::Rsqrt => (36, Type::F32),
        S::Sqrt(of) => (37, of),
    }
}

/// The number of variants: one more than the largest number of [`variant`].
const VARIANTS: usize = 38;

#[test]
fn every_kind_has_a_test() {
    let mut tested = [false; VARIANTS];
    // `comparisons` has a table of its own.
    tested[variant(S::Compare(Compare::Eq, Type::B32)).0] = true;
    for (kind, rows) in [INTEGERS, BITS, SUMS, FLOATS, CONVERSIONS].concat() {
        tested[variant(kind).0] |= !rows.is_empty();
    }
    assert_eq!(tested, [true; VARIANTS]);
}

#[test]
fn any_kind_and_bits_give_a_result_of_its_width_or_a_fault() {
    let mut random = SplitMix(2);
    let mut defined = [false; VARIANTS];
    for kind in all_kinds() {
        let (number, of) = variant(kind);
        for bits in [1, 16, 32, 64, 8] {
            let from = [0; 4].map(|_| [0; LANES].map(|_| random.next() >> (64 - bits)));
            let mut to = [0; LANES];
            // Operands that are too wide are possible in inactive lanes.
            if execute(kind, &from.each_ref(), &mut to, 0) == Err(ScalarFault::Undefined) {
                continue;
            }
            defined[number] = true;
            let width = match of {
                Type::Pred => 1,
                Type::B16 | Type::U16 | Type::S16 => 16,
                Type::B32 | Type::U32 | Type::S32 | Type::F32 => 32,
                Type::B64 | Type::U64 | Type::S64 | Type::F64 => 64,
            };
            let fits = to.iter().all(|x| width == 64 || x >> width == 0);
            assert!(fits || bits > width, "{kind:?} {to:x?}");
        }
    }
    assert_eq!(defined, [true; VARIANTS]);
}

#[test]
fn kinds_that_do_not_exist_are_undefined() {
    let kinds = [
        S::Add(Type::Pred, Round::Nearest),
        S::Add(Type::B32, Round::Nearest),
        S::Add(Type::S32, Round::Zero),
        S::Add(Type::F64, Round::Zero),
        S::Fma(Type::F64, Round::Down),
        S::Fma(Type::S32, Round::Nearest),
        S::MulFloat(Type::U32, Round::Nearest),
        S::MulLow(Type::F32),
        S::MulWide(Type::U64),
        S::Div(Type::B32),
        S::Rem(Type::F32),
        S::Min(Type::B32),
        S::Neg(Type::U32),
        S::Abs(Type::U32),
        S::And(Type::U32),
        S::Not(Type::F32),
        S::Shl(Type::S32),
        S::Shr(Type::Pred),
        S::BitFieldInsert(Type::B16),
        S::Select(Type::Pred),
        S::Compare(Compare::Eq, Type::Pred),
        S::Convert { from: Type::B32, to: Type::U64 },
        S::Convert { from: Type::U32, to: Type::F32 },
        S::FloatOf { from: Type::F32, to: Type::F64 },
        S::FloatOf { from: Type::U32, to: Type::U64 },
        S::Sqrt(Type::U32),
    ];
    for kind in kinds {
        assert_eq!(result(kind, &[0; 4]), Err(ScalarFault::Undefined), "{kind:?}");
    }
}
