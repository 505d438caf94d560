//! What kernels execute as a function of their sizes, and the time that this takes an H100 at least.
//!
//! The PTX of each kernel is executed whole at a few small sizes. A polynomial through them has the
//! counts at the sizes of training; it is tested at two other sizes.

use crate::cuda::interpreted::counted;
use crate::launch::with_kernels;
use candle_core::Result;
use std::collections::BTreeMap;
use std::rc::Rc;

mod shapes;

use shapes::{Op, SHAPES, Shape, TOKENS, matrix_products, with_ops};

/// What a kernel takes: instructions of warps that have an issue slot, those of the units for
/// special functions, different bytes of global memory, bytes that shared memory could have moved
/// meanwhile, products of elements; the blocks of a launch, and the barriers of all its blocks.
type Work = [f64; 7];
const MEMORY: usize = 2;
const PRODUCTS: usize = 4;
const BLOCKS: usize = 5;
const BARRIERS: usize = 6;
const LIMITS: [&str; 5] =
    ["instructions", "special functions", "memory", "shared memory", "tensor cores"];

const MULTIPROCESSORS: f64 = 132.0;
/// Cycles a second of all multiprocessors of an H100 SXM together, at the clock that the vendor's
/// figure for dense bf16 has.
const CYCLES: f64 = MULTIPROCESSORS * 1.83e9;
/// Rates of an H100 SXM, in the order of [`LIMITS`]: four instructions, 16 lanes of special functions
/// and 128 bytes of shared memory a cycle, 3.35 TB/s, and 989 TFLOP/s.
const RATES: [f64; 5] = [4.0 * CYCLES, 0.5 * CYCLES, 3.35e12, 128.0 * CYCLES, 494.7e12];

/// Work of an op with `tokens`, by kernel.
fn measure(op: &Op<'_>, tokens: usize) -> Result<BTreeMap<String, Work>> {
    let mut all: BTreeMap<String, (Work, f64)> = BTreeMap::new();
    for launched in counted(|| with_kernels(|| (op.run)(tokens)))? {
        let counts = launched.counts;
        let numbers = [
            counts.instructions - counts.moves,
            counts.special,
            counts.memory_read + counts.memory_written,
            counts.shared_busy,
            counts.products,
            launched.blocks.into(),
            counts.barriers / u64::from(launched.warps),
        ];
        let (work, launches) = all.entry(launched.name).or_default();
        *launches += 1.0;
        for (sum, number) in work.iter_mut().zip(numbers) {
            *sum += number as f64;
        }
    }
    assert!(!all.is_empty(), "no PTX is executed: export TRAINER_PTX=$(scripts/cuda/ptx.sh)");
    let of_launch = |(mut work, launches): (Work, f64)| {
        work[BLOCKS] /= launches;
        work
    };
    Ok(all.into_iter().map(|(kernel, all)| (kernel, of_launch(all))).collect())
}

/// The value at `x` of the polynomial through `points` (Lagrange).
fn polynomial(points: &[(f64, f64)], x: f64) -> f64 {
    let others = |at: usize| points.iter().enumerate().filter(move |(other, _)| *other != at);
    let basis = |at: usize, (own, _): &(f64, f64)| -> f64 {
        others(at).map(|(_, (other, _))| (x - other) / (own - other)).product()
    };
    points.iter().enumerate().map(|(at, point)| point.1 * basis(at, point)).sum()
}

/// The work of an op as a function of the tokens.
struct Formula {
    measured: Vec<(f64, BTreeMap<String, Work>)>,
}

impl Formula {
    /// The work with `tokens`, by kernel.
    fn at(&self, tokens: usize) -> BTreeMap<String, Work> {
        let work = |kernel: &String| {
            std::array::from_fn(|kind| {
                let points = self.measured.iter().map(|(size, all)| (*size, all[kernel][kind]));
                polynomial(&points.collect::<Vec<_>>(), tokens as f64)
            })
        };
        let kernels = self.measured[0].1.keys();
        kernels.map(|kernel| (kernel.clone(), work(kernel))).collect()
    }
}

/// Formulas by the key of their op, and how far off their predictions were.
#[derive(Default)]
struct Formulas {
    all: BTreeMap<String, Rc<Formula>>,
    /// The largest relative difference of each op, and where it was.
    off: BTreeMap<&'static str, (f64, String)>,
    wrong: Vec<String>,
}

impl Formulas {
    /// Executes an op at small sizes, unless its formula is known.
    fn of(&mut self, op: &Op<'_>) -> Result<Rc<Formula>> {
        if let Some(known) = self.all.get(&op.key) {
            return Ok(known.clone());
        }
        println!("{} with {:?}", op.key, op.sizes);
        let measured = op.sizes.iter().map(|tokens| Ok((*tokens as f64, measure(op, *tokens)?)));
        let mut measured = measured.collect::<Result<Vec<_>>>()?;
        let tested = measured.split_off(op.sizes.len() - 2);
        let formula = Rc::new(Formula { measured });
        for (tokens, measured) in tested {
            let predicted = formula.at(tokens as usize);
            for (kernel, work) in measured {
                for (kind, (found, expected)) in work.iter().zip(predicted[&kernel]).enumerate() {
                    let off = (found - expected).abs() / found.max(1.0);
                    let what = LIMITS.get(kind).unwrap_or(&"blocks, barriers");
                    let line = format!(
                        "{} with {tokens} tokens: {kernel} has {found} {what}, predicted {expected}",
                        op.key
                    );
                    if off > op.tolerance {
                        self.wrong.push(line.clone());
                    }
                    let worst = self.off.entry(op.name).or_default();
                    if off >= worst.0 {
                        *worst = (off, line);
                    }
                }
            }
        }
        Ok(self.all.entry(op.key.clone()).or_insert(formula).clone())
    }
}

/// The least time of a kernel in ms for each limit, `times` times, if a launch has the work of
/// `at_once` of them. Multiprocessors without a block do not help.
fn least_times(work: &Work, at_once: f64, times: f64) -> [f64; 5] {
    let share = (work[BLOCKS] * at_once / MULTIPROCESSORS).min(1.0);
    std::array::from_fn(|kind| {
        let share = if kind == MEMORY { 1.0 } else { share };
        1e3 * work[kind] * times / (RATES[kind] * share)
    })
}

/// The least time of all kernels of an op, one after the other, by the limit that they have.
fn by_limit(all: &BTreeMap<String, Work>, at_once: f64, times: f64) -> [f64; 5] {
    let mut sums = [0.0; 5];
    for work in all.values() {
        let each = least_times(work, at_once, times);
        let largest = (0..5).max_by(|a, b| each[*a].total_cmp(&each[*b])).unwrap();
        sums[largest] += each[largest];
    }
    sums
}

/// Limits with more than a tenth of the time, the largest first.
fn name_limits(times: &[f64; 5]) -> String {
    let mut limits: Vec<usize> = (0..5).collect();
    limits.sort_by(|a, b| times[*b].total_cmp(&times[*a]));
    let sum: f64 = times.iter().sum();
    let names = limits.iter().filter(|limit| times[**limit] > 0.1 * sum).map(|at| LIMITS[*at]);
    names.collect::<Vec<_>>().join(", ")
}

/// A row of the table: its name, the limits, and the times of [`TOKENS`] for each shape.
struct Row {
    name: &'static str,
    limits: Vec<String>,
    times: Vec<Option<[f64; 2]>>,
}

#[derive(Default)]
struct Table {
    rows: Vec<Row>,
}

impl Table {
    fn set(&mut self, shape: usize, name: &'static str, limits: String, times: [f64; 2]) {
        let at = self.rows.iter().position(|row| row.name == name).unwrap_or_else(|| {
            self.rows.push(Row { name, limits: Vec::new(), times: vec![None; SHAPES.len()] });
            self.rows.len() - 1
        });
        let row = &mut self.rows[at];
        row.times[shape] = Some(times);
        if !row.limits.contains(&limits) {
            row.limits.push(limits);
        }
    }

    fn print(&self) {
        let names = SHAPES.map(|shape| shape.name).join(" | ");
        println!("| op | limit | {names} |\n|---|---|{}", "---|".repeat(SHAPES.len()));
        for Row { name, limits, times } in &self.rows {
            let cell = |times: &Option<[f64; 2]>| {
                times.map_or(String::new(), |[a, b]| format!("{a:.1}, {b:.1}"))
            };
            let cells: Vec<String> = times.iter().map(cell).collect();
            println!("| {name} | {} | {} |", limits.join("; "), cells.join(" | "));
        }
        let sum = |shape: usize, at: usize| -> f64 {
            self.rows.iter().filter_map(|row| row.times[shape].map(|times| times[at])).sum()
        };
        let sums = (0..SHAPES.len()).map(|at| format!("{:.0}, {:.0}", sum(at, 0), sum(at, 1)));
        println!("| sum | | {} |", sums.collect::<Vec<_>>().join(" | "));
    }
}

/// Fails if the counts with many tokens are not those of the definition of an op.
fn check_by_reasoning(op: &Op<'_>, shape: &Shape, all: &BTreeMap<String, Work>) {
    let t = TOKENS[1] as f64;
    let sum = |kind: usize| all.values().map(|work| work[kind]).sum::<f64>();
    let is = |what: &str, found: f64, expected: f64, most: f64| {
        let ratio = found / expected;
        assert!((1.0..most).contains(&ratio), "{}: {found} {what}, at least {expected}", op.key);
    };
    // Half of the pairs of tokens, of one head. Tiles at the diagonal are computed whole.
    let pairs = t * t / 2.0 * shape.head_dim as f64;
    let row = 2.0 * t * shape.hidden as f64;
    match op.name {
        "attention, forward" => is("products", sum(PRODUCTS), 2.0 * pairs, 1.02),
        // Scores and their gradients, and one product for each of dq, dk and dv.
        "attention, backward" => {
            // With 256 columns, dq has a pass of its own, and dk and dv have a consumer each: scores are
            // computed three times, and their gradients twice.
            let products = if shape.head_dim > 128 { 8.0 } else { 5.0 };
            is("products", sum(PRODUCTS), products * pairs, 1.02);
        }
        // 2, 2 and 4 tensors, with the gradient of the residual; and sums in f32.
        "norms" => is("bytes", sum(MEMORY), 8.0 * row, 1.03),
        // 3 tensors forward, and 6 backward, which also computes the activation again.
        "SwiGLU" => is("bytes", sum(MEMORY), 9.0 * 2.0 * t * shape.intermediate as f64, 1.001),
        // A logit is read in f32, and its gradient written in bf16, for half of the tokens.
        "cross-entropy" => {
            is("bytes", sum(MEMORY), 6.0 * t / 2.0 * shape.vocabulary as f64, 1.001);
        }
        // 4 numbers in f32 are read, the gradient again, and 3 and a weight in bf16 written.
        "AdamW" => is("bytes", sum(MEMORY), 34.0 * op.at[1] as f64, 1.001),
        _ => {}
    }
}

/// An op of the bench on a GPU (`docs/dev/performance.md`): its name, and which op of which shape it
/// is with how many segments of how many tokens, and how many such ops it has.
const MEASURED: [(&str, usize, &str, usize, usize, usize); 6] = [
    ("attention, forward, 8 x 4,096, 32 and 8 heads", 1, "attention, forward", 8, 4096, 32),
    ("attention, backward, 8 x 4,096, 32 and 8 heads", 1, "attention, backward", 8, 4096, 32),
    ("delta rule, forward, 16,384", 3, "delta rule, forward", 1, 16384, 16),
    ("delta rule, backward, 16,384", 3, "delta rule, backward", 1, 16384, 16),
    ("delta rule, forward, 8 x 2,048", 3, "delta rule, forward", 8, 2048, 16),
    ("delta rule, backward, 8 x 2,048", 3, "delta rule, backward", 8, 2048, 16),
];

/// Prints what ops of the bench take at least.
fn print_measured(shape: usize, op: &Op<'_>, formula: &Formula) {
    for (name, of, op_name, segments, tokens, heads) in MEASURED {
        if of == shape && op.name == op_name {
            let (all, at_once) = (formula.at(tokens), (segments * op.at_once[1]) as f64);
            let times = (segments * heads) as f64;
            let each = by_limit(&all, at_once, times);
            println!("{name}: {:.2} ms, {}", each.iter().sum::<f64>(), name_limits(&each));
            print_kernels(&all, at_once, times);
        }
    }
}

#[test]
#[ignore = "prints the table of docs/dev/performance.md; needs TRAINER_PTX, and takes minutes"]
fn the_time_of_a_step_on_an_h100_is_at_least() -> Result<()> {
    let (mut formulas, mut table) = (Formulas::default(), Table::default());
    for (number, shape) in SHAPES.iter().enumerate() {
        let floor = TOKENS.map(|tokens| 1e3 * matrix_products(shape, tokens) / RATES[PRODUCTS]);
        table.set(number, "matrix products (cuBLASLt)", LIMITS[PRODUCTS].to_owned(), floor);
        with_ops(shape, |ops| {
            for op in ops {
                let formula = formulas.of(op)?;
                check_by_reasoning(op, shape, &formula.at(op.at[1]));
                let times = op.at_once.map(|at_once| at_once as f64);
                let each =
                    [0, 1].map(|at| by_limit(&formula.at(op.at[at]), times[at], op.times as f64));
                let sums = each.map(|each| each.iter().sum());
                table.set(number, op.name, name_limits(&each[1]), sums);
                print_measured(number, op, &formula);
            }
            Ok(())
        })?;
    }
    table.print();
    for (name, (off, line)) in &formulas.off {
        println!("{name}: at most {:.3} % off: {line}", 100.0 * off);
    }
    assert!(formulas.wrong.is_empty(), "{}", formulas.wrong.join("\n"));
    Ok(())
}

/// Prints the least time of each kernel for each limit.
fn print_kernels(all: &BTreeMap<String, Work>, at_once: f64, times: f64) {
    for (kernel, work) in all {
        let each = least_times(work, at_once, times);
        let limits = LIMITS.iter().zip(each).map(|(limit, ms)| format!("{limit} {ms:.2}"));
        let (blocks, barriers) = (work[BLOCKS] * at_once, work[BARRIERS] / work[BLOCKS]);
        let limits = limits.collect::<Vec<_>>().join(", ");
        println!("  {kernel}: {limits} ms; {blocks:.0} blocks, of {barriers:.0} barriers each");
    }
}
