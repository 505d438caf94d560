//! Copies of operands in the order in which tiles read them, in `f32`.

#![expect(unsafe_code, reason = "operands and copies are given by address")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]
#![expect(clippy::needless_range_loop, reason = "loops over registers have constant lengths")]

use super::vectors::{Square, Widen};
use half::bf16;

/// Number of terms that are copied for one panel before those of the next.
const TERMS: usize = 8;
/// Size of a cache line, in bytes.
pub(super) const LINE: usize = 64;
/// Distance between the terms of a lane that are read and those that are fetched into the cache, in
/// bytes.
const AHEAD: usize = 4 * LINE;

/// An element of an operand.
pub(super) trait Source: Copy {
    /// Number of elements in 4 bytes.
    const PACKED: usize;
    fn wide(self) -> f32;
    /// # Safety
    /// The pointer is valid for 8 elements, and the CPU has the features of `V`.
    unsafe fn load<V: Widen>(from: *const Self) -> V;
    /// Returns the `PACKED` terms of each lane.
    ///
    /// # Safety
    /// The CPU has the features of `V`.
    unsafe fn terms<V: Square<SIDE>, const SIDE: usize>(lanes: V) -> impl IntoIterator<Item = V>;
}

impl Source for f32 {
    const PACKED: usize = 1;
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<V: Widen>(from: *const Self) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { V::load(from) }
    }
    #[inline(always)]
    unsafe fn terms<V: Square<SIDE>, const SIDE: usize>(lanes: V) -> impl IntoIterator<Item = V> {
        [lanes]
    }
}

impl Source for bf16 {
    const PACKED: usize = 2;
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    unsafe fn load<V: Widen>(from: *const Self) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { V::widen(from) }
    }
    #[inline(always)]
    unsafe fn terms<V: Square<SIDE>, const SIDE: usize>(lanes: V) -> impl IntoIterator<Item = V> {
        // SAFETY: guaranteed by the caller.
        unsafe { [lanes.first(), lanes.second()] }
    }
}

/// Rows or columns of an operand. Term `t` of lane `l` is at offset
/// `l * lane_stride + t * term_stride`.
#[derive(Clone, Copy)]
pub(super) struct Lanes<E> {
    pub(super) start: *const E,
    pub(super) lane_stride: usize,
    pub(super) term_stride: usize,
    pub(super) count: usize,
    pub(super) terms: usize,
}

/// Copies panels `[terms, width]` to `y`, the last of them `[terms, last]` with zeros after its
/// lanes.
///
/// # Safety
/// All elements of `x` are valid, `y` is valid for the panels and 8 more elements, and the CPU has
/// the features of `V`.
#[inline(always)]
pub(super) unsafe fn panels<V: Widen, E: Source>(
    x: &Lanes<E>,
    (width, last): (usize, usize),
    y: *mut f32,
) {
    let panels = || {
        (0..x.count).step_by(width).map(|lane| {
            let given = (x.count - lane).min(width);
            let of = if lane + width < x.count { width } else { last };
            (lane, given, of)
        })
    };
    // SAFETY: guaranteed by the caller.
    unsafe {
        if x.lane_stride == 1 {
            for first in (0..x.terms).step_by(TERMS) {
                let terms = first..x.terms.min(first + TERMS);
                for (lane, given, of) in panels() {
                    for t in terms.clone() {
                        let from = x.start.add(t * x.term_stride + lane);
                        term::<V, E>(from, given, y.add(lane * x.terms + t * of), of);
                    }
                }
            }
            return;
        }
        for (lane, given, of) in panels() {
            let start = x.start.add(lane * x.lane_stride);
            let (x, y) = (Lanes { start, count: given, ..*x }, y.add(lane * x.terms));
            if x.term_stride == 1 {
                // A group of fewer than 8 lanes writes beyond them. The next term overwrites this.
                debug_assert!(of < 8 || of.is_multiple_of(8), "no group follows a partial one");
                // A cache line of each lane at a time: the lanes may be in the same sets of a cache.
                let line = LINE / size_of::<E>();
                for first in (0..x.terms).step_by(line) {
                    let terms = first..x.terms.min(first + line);
                    for group in (0..of).step_by(8) {
                        transpose::<V, E>(&x, terms.clone(), group, of, y);
                    }
                }
            } else {
                one_by_one(&x, 0..x.terms, 0..of, of, y);
            }
        }
    }
}

/// Copies the adjacent lanes of a term.
///
/// # Safety
/// As for [`panels`].
#[inline(always)]
unsafe fn term<V: Widen, E: Source>(x: *const E, given: usize, y: *mut f32, width: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (given, width) {
            (6, 6) => {
                let x: [E; 6] = x.cast::<[E; 6]>().read_unaligned();
                y.cast::<[f32; 6]>().write_unaligned(x.map(E::wide));
            }
            (8, 8) => vectors::<V, E, 1>(x, y),
            (16, 16) => vectors::<V, E, 2>(x, y),
            (32, 32) => vectors::<V, E, 4>(x, y),
            (48, 48) => vectors::<V, E, 6>(x, y),
            _ => {
                for lane in 0..width {
                    *y.add(lane) = if lane < given { (*x.add(lane)).wide() } else { 0.0 };
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn vectors<V: Widen, E: Source, const N: usize>(x: *const E, y: *mut f32) {
    for v in 0..N {
        // SAFETY: guaranteed by the caller.
        unsafe { E::load::<V>(x.add(v * 8)).store(y.add(v * 8)) };
    }
}

/// Copies lanes `group..group + 8`, whose terms are adjacent.
///
/// # Safety
/// As for [`panels`].
#[inline(always)]
unsafe fn transpose<V: Widen, E: Source>(
    x: &Lanes<E>,
    terms: std::ops::Range<usize>,
    group: usize,
    width: usize,
    y: *mut f32,
) {
    let given = x.count.saturating_sub(group).min(8);
    let step = 8 * E::PACKED;
    let whole = terms.start + terms.len() / step * step;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let start = x.start.wrapping_add(group * x.lane_stride);
        for i in 0..given {
            let next = start.wrapping_add(i * x.lane_stride + terms.start);
            prefetch(next.wrapping_byte_add(AHEAD));
        }
        for t in (terms.start..whole).step_by(step) {
            let mut square = [V::zero(); 8];
            if given == 8 {
                for i in 0..8 {
                    square[i] = V::load(start.add(i * x.lane_stride + t).cast());
                }
            } else {
                for i in 0..given {
                    square[i] = V::load(start.add(i * x.lane_stride + t).cast());
                }
            }
            let square = V::transpose(square);
            for i in 0..8 {
                for (part, term) in E::terms(square[i]).into_iter().enumerate() {
                    term.store(y.add((t + i * E::PACKED + part) * width + group));
                }
            }
        }
        one_by_one(x, whole..terms.end, group..width.min(group + 8), width, y);
    }
}

#[inline(always)]
pub(super) fn prefetch<E>(at: *const E) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: it reads nothing that the program can observe, and every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
}

/// Copies element by element.
///
/// # Safety
/// As for [`panels`].
#[inline(always)]
unsafe fn one_by_one<E: Source>(
    x: &Lanes<E>,
    terms: std::ops::Range<usize>,
    lanes: std::ops::Range<usize>,
    width: usize,
    y: *mut f32,
) {
    for t in terms {
        for lane in lanes.clone() {
            // SAFETY: guaranteed by the caller.
            unsafe {
                *y.add(t * width + lane) = if lane < x.count {
                    (*x.start.add(lane * x.lane_stride + t * x.term_stride)).wide()
                } else {
                    0.0
                };
            }
        }
    }
}
