use super::*;
use ::simd::at_each_level;
use half::bf16;

fn wave(len: usize, step: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * step).sin()).collect()
}

fn narrowed(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|x| bf16::from_f32(*x)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The chains of the contract, one multiply-add after another.
fn chains(
    (m, n, k): (usize, usize, usize),
    dst: &[f32],
    into: Store,
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let start = |at: usize| if into == Store::Add { dst[at] } else { 0.0 };
    let chain = |at: usize| {
        let (i, j) = (at / n, at % n);
        (0..k).fold(start(at), |sum, p| a(i, p).mul_add(b(p, j), sum))
    };
    (0..m * n).map(chain).collect()
}

/// Compares products of all layouts and dtypes with the chains.
fn check((m, n, k): (usize, usize, usize), threads: Threads) {
    let (a, b) = (wave(m * k, 0.37), wave(k * n, 0.73));
    let (a16, b16) = (narrowed(&a), narrowed(&b));
    let wide = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (a_wide, b_wide) = (wide(&a16), wide(&b16));
    for (a, b, a_exact, b_exact) in [
        (Values::F32(&a), Values::F32(&b), &a, &b),
        (Values::Bf16(&a16), Values::F32(&b), &a_wide, &b),
        (Values::F32(&a), Values::Bf16(&b16), &a, &b_wide),
        (Values::Bf16(&a16), Values::Bf16(&b16), &a_wide, &b_wide),
    ] {
        for layout in 0..4 {
            let (a_t, b_t) = (layout & 1 == 1, layout & 2 == 2);
            let a = if a_t { Matrix::rows(a, m).t() } else { Matrix::rows(a, k) };
            let b = if b_t { Matrix::rows(b, k).t() } else { Matrix::rows(b, n) };
            let a_at = |i: usize, p: usize| a_exact[if a_t { p * m + i } else { i * k + p }];
            let b_at = |p: usize, j: usize| b_exact[if b_t { j * k + p } else { p * n + j }];
            for into in [Store::Overwrite, Store::Add] {
                let mut y = wave(m * n, 0.11);
                let want = chains((m, n, k), &y, into, a_at, b_at);
                multiply((m, n, k), (&mut y, n), into, a, b, threads);
                let what = format!("{m} x {n} x {k}, layout {layout}, {into:?}, {threads:?}");
                assert_eq!(bits(&y), bits(&want), "{what}");
            }
        }
    }
}

#[test]
fn every_element_is_one_chain_at_every_simd_level() {
    let sizes = [
        (1, 1, 1),
        (1, 50, 130),
        (3, 7, 5),
        (5, 1, 40),
        (6, 16, 17),
        (8, 48, 16),
        (9, 49, 33),
        (13, 8, 20),
        (40, 3, 19),
        (17, 97, 9),
        (2, 200, 40),
        (97, 15, 12),
        (20, 100, 1),
    ];
    for size in sizes {
        at_each_level(|| check(size, Threads::One));
    }
}

/// Compares products of few rows with the chains, at each level. The right operand is stored by
/// columns, which are `stride` elements apart and start at element `start` of a slice.
fn check_few_rows((m, n, k): (usize, usize, usize), start: usize, stride: usize) {
    let (a, b) = (wave(m * k, 0.37), wave(start + n * stride, 0.73));
    let (a16, b16) = (narrowed(&a), narrowed(&b));
    let wide = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (a_wide, b_wide) = (wide(&a16), wide(&b16));
    for (a, b, a_exact, b_exact) in [
        (Values::F32(&a), Values::F32(&b[start..]), &a, &b),
        (Values::Bf16(&a16), Values::F32(&b[start..]), &a_wide, &b),
        (Values::F32(&a), Values::Bf16(&b16[start..]), &a, &b_wide),
        (Values::Bf16(&a16), Values::Bf16(&b16[start..]), &a_wide, &b_wide),
    ] {
        let (a, b) = (Matrix::rows(a, k), Matrix::rows(b, stride).t());
        let a_at = |i: usize, p: usize| a_exact[i * k + p];
        let b_at = |p: usize, j: usize| b_exact[start + j * stride + p];
        for into in [Store::Overwrite, Store::Add] {
            let old = wave(m * n, 0.11);
            let want = bits(&chains((m, n, k), &old, into, a_at, b_at));
            let on = |threads: Threads| {
                let mut y = old.clone();
                multiply((m, n, k), (&mut y, n), into, a, b, threads);
                bits(&y)
            };
            let what = format!("{m} x {n} x {k}, from {start} by {stride}, {into:?}");
            for (level, y) in at_each_level(|| on(Threads::One)) {
                assert!(y == want, "{what}, {level}");
            }
            assert!(on(Threads::All) == want, "{what}, all threads");
        }
    }
}

#[test]
fn products_of_few_rows_are_chains_around_the_sizes_of_vectors() {
    for m in 1..=5 {
        for n in [7, 15, 16, 17, 31, 32, 33, 50] {
            for k in [1, 15, 31, 32, 33, 47, 48, 63, 64, 65] {
                check_few_rows((m, n, k), 0, k);
            }
        }
    }
}

#[test]
fn products_of_few_rows_are_chains_wherever_the_columns_start() {
    for m in 1..=4 {
        for (n, k) in [(17, 40), (35, 100)] {
            for start in [0, 1, 4, 8, 15, 31] {
                for stride in [k, k + 1, 128] {
                    check_few_rows((m, n, k), start, stride);
                }
            }
        }
    }
}

#[test]
fn products_of_few_rows_are_chains_on_all_threads() {
    for (m, n, k) in [(1, 1900, 321), (2, 999, 512), (3, 530, 400), (4, 1333, 130)] {
        check_few_rows((m, n, k), 3, k + 7);
    }
}

/// A product with a few columns is computed transposed.
#[test]
fn products_of_few_columns_are_chains() {
    for (m, k) in [(16, 32), (33, 65), (50, 100)] {
        for n in 1..=3 {
            at_each_level(|| check((m, n, k), Threads::One));
        }
    }
}

#[test]
fn empty_products_leave_or_clear_the_destination() {
    for size in [(0, 3, 2), (3, 0, 2), (3, 4, 0), (0, 0, 0), (3, 200, 0), (200, 3, 0)] {
        at_each_level(|| check(size, Threads::One));
    }
}

#[test]
fn sums_over_several_blocks_are_one_chain() {
    for size in [
        (100, 60, 600),
        (7, 60, 300),
        (105, 2100, 3),
        (30, 2040, 40),
        (20, 2100, 530),
        (8, 1000, 130),
        (5, 600, 130),
    ] {
        check(size, Threads::One);
        check(size, Threads::All);
    }
}

#[test]
fn products_on_all_threads_have_the_bits_of_one() {
    for (m, n, k) in [(300, 120, 70), (64, 400, 130), (1000, 8, 90), (8, 1000, 90)] {
        let (a, b) = (wave(m * k, 0.37), wave(k * n, 0.73));
        let on = |threads: Threads| {
            let mut y = vec![0f32; m * n];
            let (a, b) = (Matrix::rows(&a[..], k), Matrix::rows(&b[..], n));
            multiply((m, n, k), (&mut y, n), Store::Overwrite, a, b, threads);
            bits(&y)
        };
        assert!(on(Threads::All) == on(Threads::One), "{m} x {n} x {k}");
    }
}

/// Gradients of micro-batches rely on this.
#[test]
fn a_sum_that_is_continued_has_the_bits_of_the_whole() {
    let (m, n, k) = (37, 70, 200);
    let (a, b) = (wave(k * m, 0.37), wave(k * n, 0.73));
    let mut whole = vec![0f32; m * n];
    tn((m, n, k), &mut whole, Store::Add, &a[..], &b[..]);
    for parts in [2, 8, 200] {
        let mut sum = vec![0f32; m * n];
        let size = k / parts;
        for (a, b) in a.chunks(size * m).zip(b.chunks(size * n)) {
            tn((m, n, size), &mut sum, Store::Add, a, b);
        }
        assert!(bits(&sum) == bits(&whole), "{parts} parts");
    }
}

/// Answers that are generated at the same time, and packs, rely on this.
#[test]
fn a_row_of_a_product_of_few_rows_does_not_depend_on_its_place_and_on_the_others() {
    for (m, n, k) in [(2, 33, 7), (3, 129, 700), (8, 70, 1100), (17, 257, 513), (64, 90, 300)] {
        let (row, b) = (wave(k, 0.37), wave(n * k, 0.73));
        let mut alone = vec![0f32; n];
        nt((1, n, k), &mut alone, Store::Overwrite, &row[..], &b[..]);
        for place in 0..m {
            let mut a = wave(m * k, 1.7);
            a[place * k..(place + 1) * k].copy_from_slice(&row);
            let mut y = vec![0f32; m * n];
            nt((m, n, k), &mut y, Store::Overwrite, &a[..], &b[..]);
            assert!(y[place * n..(place + 1) * n] == alone, "row {place} of {m} x {n} x {k}");
        }
    }
}

#[test]
fn matrices_inside_wider_ones_are_read_and_written_in_their_columns() {
    let (m, n, k, wide) = (19, 21, 30, 64);
    let (a, b) = (wave(m * wide, 0.37), wave(k * wide, 0.73));
    let results = at_each_level(|| {
        let mut y = wave(m * wide, 0.11);
        let (a, b) = (Matrix::rows(&a[..], wide), Matrix::rows(&b[..], wide));
        multiply((m, n, k), (&mut y[5..], wide), Store::Add, a, b, Threads::One);
        y
    });
    let old = wave(m * wide, 0.11);
    for (level, y) in results {
        for (at, (y, old)) in y.iter().zip(&old).enumerate() {
            let (i, j) = (at / wide, at % wide);
            let inside = (5..5 + n).contains(&j);
            let chain = (0..if inside { k } else { 0 })
                .fold(*old, |sum, p| a[i * wide + p].mul_add(b[p * wide + j - 5], sum));
            assert_eq!(y.to_bits(), chain.to_bits(), "{level}, {i}, {j}");
        }
    }
}
