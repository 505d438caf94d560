//! Rounded sums of random numbers against exact integers.

use super::{S, result};
use crate::instruction::{Round, Scalar, Type};

/// Splitmix64.
pub(super) struct SplitMix(pub(super) u64);

impl SplitMix {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// A finite number with a random sign, an exponent between the two (0 is subnormal) and often
    /// only a few bits.
    fn float(&mut self, exponents: [u64; 2]) -> f32 {
        let [low, high] = exponents;
        let bits = self.next();
        let exponent = (low + bits % (high + 1 - low)) as u32;
        let fraction = match bits >> 16 & 3 {
            0 => 0,
            1 => 1 << (bits >> 20 & 15),
            2 => 0x7f_ffff,
            _ => (bits >> 40) as u32 & 0x7f_ffff,
        };
        f32::from_bits((bits >> 63 << 31) as u32 | exponent << 23 | fraction)
    }

    /// Three operands of `fma`: anything, near each other, or such that they nearly cancel.
    fn operands(&mut self, case: u64) -> [f32; 3] {
        let exponents = match case % 4 {
            0 => [0, 254],
            1 => [115, 140],
            2 => [60, 66],
            _ => [0, 2],
        };
        let [a, b, c] = [0; 3].map(|_| self.float(exponents));
        match self.next() % 4 {
            0 if (a * b).is_finite() => [a, b, f32::from_bits((-(a * b)).to_bits() ^ 1)],
            1 if (a * b).is_finite() => [a, b, -(a * b)],
            2 => [a, self.float([127, 128]), c],
            _ => [a, b, c],
        }
    }
}

/// The sign of the sum of products of finite numbers: a number of 640 bits counts units of 2^-298,
/// the square of the least subnormal.
fn find_sign(products: &[[f32; 2]]) -> i32 {
    let mut sum = [0u64; 10];
    for [a, b] in products {
        let ([m, i], [n, j]) = (parts(*a), parts(*b));
        let shift = i + j;
        let product = u128::from(m * n) << (shift % 64);
        let mut term = [0u64; 10];
        term[shift as usize / 64] = product as u64;
        term[shift as usize / 64 + 1] = (product >> 64) as u64;
        let negative = a.is_sign_negative() != b.is_sign_negative();
        // Two's complement: the negative is the complement plus one.
        let mut carry = u128::from(negative);
        for (word, part) in sum.iter_mut().zip(term) {
            carry += u128::from(*word) + u128::from(if negative { !part } else { part });
            *word = carry as u64;
            carry >>= 64;
        }
    }
    if sum[9] >> 63 != 0 { -1 } else { i32::from(sum != [0; 10]) }
}

/// An integer and an exponent: the magnitude is the integer times 2^(exponent - 149).
fn parts(x: f32) -> [u64; 2] {
    let bits = u64::from(x.to_bits());
    let (exponent, fraction) = (bits >> 23 & 0xff, bits & 0x7f_ffff);
    if exponent == 0 { [fraction, 0] } else { [fraction | 1 << 23, exponent - 1] }
}

/// Whether `y` is the sum of the products, rounded, by exact comparisons with its neighbours.
fn is_rounded(round: Round, exact: &[[f32; 2]], y: f32) -> bool {
    // The sign of the exact value minus a finite one; infinity counts as 2^128.
    let versus = |y: f32| {
        let limit = [f32::from_bits(0x7f00_0000), -2f32.copysign(y)];
        find_sign(&[exact, &[if y.is_infinite() { limit } else { [-1.0, y] }]].concat())
    };
    let (below, above) = (y.next_down(), y.next_up());
    match round {
        Round::Nearest => {
            // Twice the exact value against the sum of two neighbours.
            let middle = |z: f32| {
                let half = |y: f32| {
                    if y.is_infinite() {
                        [2f32.copysign(y), -f32::from_bits(0x7f00_0000)]
                    } else {
                        [y, -1.0]
                    }
                };
                find_sign(&[exact, exact, &[half(y), half(z)]].concat())
            };
            let even = y.to_bits() & 1 == 0;
            (y == f32::NEG_INFINITY || middle(below) > 0 || even && middle(below) == 0)
                && (y == f32::INFINITY || middle(above) < 0 || even && middle(above) == 0)
        }
        Round::Down => {
            (y == f32::NEG_INFINITY && versus(f32::MIN) < 0 || y.is_finite() && versus(y) >= 0)
                && (above == f32::INFINITY || versus(above) < 0)
        }
        Round::Zero => match find_sign(exact) {
            0 => y == 0.0,
            sign if sign > 0 => {
                y.is_finite() && versus(y) >= 0 && (above == f32::INFINITY || versus(above) < 0)
            }
            _ => {
                y.is_finite() && versus(y) <= 0 && (below == f32::NEG_INFINITY || versus(below) > 0)
            }
        },
    }
}

#[test]
fn sums_are_exactly_rounded() {
    let mut random = SplitMix(1);
    for case in 0..20_000 {
        let [a, b, c] = random.operands(case);
        for round in [Round::Nearest, Round::Zero, Round::Down] {
            let of = Type::F32;
            let check = |kind: Scalar, operands: &[f32], exact: &[[f32; 2]]| {
                let operands: Vec<u64> = operands.iter().map(|x| u64::from(x.to_bits())).collect();
                let y = f32::from_bits(result(kind, &operands).unwrap() as u32);
                assert!(is_rounded(round, exact, y), "{kind:?} {operands:#x?}: {y:e}");
            };
            check(S::Add(of, round), &[a, c], &[[a, 1.0], [c, 1.0]]);
            check(S::Sub(of, round), &[a, c], &[[a, 1.0], [c, -1.0]]);
            check(S::MulFloat(of, round), &[a, b], &[[a, b]]);
            check(S::Fma(of, round), &[a, b, c], &[[a, b], [c, 1.0]]);
        }
    }
}
