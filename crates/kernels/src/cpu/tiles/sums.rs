//! The sums of a tile, for any type of vector, and such a type without vector instructions.

/// Number of elements of a vector.
pub(crate) const LANES: usize = 16;
pub(crate) const TILE_ROWS: usize = 8;
/// Number of columns of a tile of `dots`, and of one of `add_product`.
pub(crate) const DOTS: usize = 3;
pub(crate) const PANEL: usize = 3 * LANES;

/// The sums of a tile of `dots`.
pub(crate) type Dots = [[f32; DOTS]; TILE_ROWS];

/// A tile `[TILE_ROWS, PANEL]` of a matrix whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) start: *mut f32,
    pub(crate) stride: usize,
}

/// [`LANES`] elements.
///
/// # Safety
/// The CPU has the features of the type, and the pointers are valid for [`LANES`] elements.
pub(super) unsafe trait Vector: Copy {
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    /// `self + a * b`, rounded once.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    /// The sum of the lanes: halves are added until one is left.
    unsafe fn sum(self) -> f32;
}

/// # Safety
/// `x` has `TILE_ROWS * len` elements, each of `w` has `len`, and the CPU has the features of `V`.
#[inline(always)]
pub(super) unsafe fn dots_of<V: Vector, const ROWS: usize, const COLUMNS: usize>(
    len: usize,
    (x, num_rows): (*const f32, usize),
    w: [*const f32; DOTS],
    sums: &mut Dots,
) {
    for row in (0..num_rows.min(TILE_ROWS)).step_by(ROWS) {
        for column in (0..DOTS).step_by(COLUMNS) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let x = x.add(row * len);
                let mut part = [[V::zero(); COLUMNS]; ROWS];
                for at in (0..len).step_by(LANES) {
                    let mut right = [V::zero(); COLUMNS];
                    for (c, right) in right.iter_mut().enumerate() {
                        *right = V::load(w[column + c].add(at));
                    }
                    for (r, part) in part.iter_mut().enumerate() {
                        let left = V::load(x.add(r * len + at));
                        for (part, right) in part.iter_mut().zip(right) {
                            *part = part.add_product(left, right);
                        }
                    }
                }
                for (r, part) in part.into_iter().enumerate() {
                    for (c, part) in part.into_iter().enumerate() {
                        sums[row + r][column + c] = part.sum();
                    }
                }
            }
        }
    }
}

/// # Safety
/// `x` has `TILE_ROWS * terms` elements with these strides between rows and between terms, `w` has
/// `PANEL * terms`, `y` is as for `add_product`, and the CPU has the features of `V`.
#[inline(always)]
pub(super) unsafe fn products_of<V: Vector, const ROWS: usize, const VECTORS: usize>(
    terms: usize,
    (x, num_rows): (*const f32, usize),
    (row_stride, term_stride): (usize, usize),
    w: *const f32,
    y: Tile,
) {
    for row in (0..num_rows.min(TILE_ROWS)).step_by(ROWS) {
        for column in (0..PANEL).step_by(VECTORS * LANES) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let mut part = [[V::zero(); VECTORS]; ROWS];
                for term in 0..terms {
                    let mut right = [V::zero(); VECTORS];
                    for (v, right) in right.iter_mut().enumerate() {
                        *right = V::load(w.add(term * PANEL + column + v * LANES));
                    }
                    for (r, part) in part.iter_mut().enumerate() {
                        let at = (row + r) * row_stride + term * term_stride;
                        let left = V::splat(*x.add(at));
                        for (part, right) in part.iter_mut().zip(right) {
                            *part = part.add_product(left, right);
                        }
                    }
                }
                for (r, part) in part.into_iter().enumerate() {
                    for (v, part) in part.into_iter().enumerate() {
                        let to = y.start.add((row + r) * y.stride + column + v * LANES);
                        V::load(to).add(part).store(to);
                    }
                }
            }
        }
    }
}

/// Elements without vector instructions.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; LANES]);

// SAFETY: it needs no features.
unsafe impl Vector for Plain {
    unsafe fn zero() -> Self {
        Self([0.0; LANES])
    }
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    unsafe fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], self.0[i])))
    }
    unsafe fn sum(self) -> f32 {
        let (mut all, mut half) = (self.0, LANES / 2);
        while half > 0 {
            for i in 0..half {
                all[i] += all[i + half];
            }
            half /= 2;
        }
        all[0]
    }
}
