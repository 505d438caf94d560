//! Cases about sums. Every rank computes the expected sum alone.

use super::{Checked, Context, Problem, ensure};
use crate::gather;
use candle_core::{Shape, Tensor};
use std::time::Instant;

/// Maximum number of values that a rank computes for a comparison. Of larger sums it compares
/// elements at a regular distance.
const MAX_EXPECTED: usize = 1 << 26;

/// The value of an element of a rank.
pub(super) type Value = fn(rank: usize, index: usize) -> f32;

fn hash(rank: usize, index: usize) -> u32 {
    let mixed = (index as u32).wrapping_mul(2_654_435_761) ^ (rank as u32).wrapping_mul(40_503);
    (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b)
}

/// A value from -1 to 1.
pub(super) fn plain(rank: usize, index: usize) -> f32 {
    (hash(rank, index) >> 8) as f32 / 8_388_608.0 - 1.0
}

/// Values of very different sizes: every other order of additions rounds differently.
pub(super) fn uneven(rank: usize, index: usize) -> f32 {
    plain(rank, index) * ((hash(index, rank) % 24) as f32).exp2()
}

/// The tree sum of one element over the ranks `first..end`.
pub(super) fn expected(value: Value, first: usize, end: usize, index: usize) -> f32 {
    if end - first == 1 {
        return value(first, index);
    }
    let middle = first + (end - first) / 2;
    expected(value, first, middle, index) + expected(value, middle, end, index)
}

pub(super) fn tensor(
    context: &Context,
    shape: impl Into<Shape>,
    value: Value,
) -> Result<Tensor, Problem> {
    let shape = shape.into();
    let rank = context.rank.rank;
    let values: Vec<f32> = (0..shape.elem_count()).map(|index| value(rank, index)).collect();
    Ok(Tensor::from_vec(values, shape, context.device)?)
}

/// Compares a sum with the expected bits, and with the bits of the other ranks.
fn compare(context: &mut Context, tensor: &Tensor, value: Value) -> Checked {
    let values = tensor.flatten_all()?.to_vec1::<f32>()?;
    let world = context.rank.world;
    let distance = (values.len() * world).div_ceil(MAX_EXPECTED).max(1);
    let wrong = (0..values.len()).step_by(distance).find_map(|index| {
        let (sum, expected) = (values[index], expected(value, 0, world, index));
        (sum.to_bits() != expected.to_bits())
            .then(|| format!("element {index} of {} is {sum}, not {expected}", values.len()))
    });
    let fold =
        |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x100000001b3);
    let own = values.iter().fold(0xcbf29ce484222325, fold);
    let hashes = gather(context.group.step.as_mut(), &own)?;
    match wrong {
        Some(wrong) => Err(Problem::Found(wrong)),
        None => ensure(hashes.iter().all(|hash| *hash == own), || {
            format!("sums of {} elements differ between ranks", values.len())
        }),
    }
}

/// Sums a tensor of `len` elements and compares the result.
fn check(context: &mut Context, len: usize, value: Value) -> Checked {
    let tensor = tensor(context, len, value)?;
    context.group.sums.start_sum(vec![tensor.clone()])?;
    context.group.sums.wait()?;
    compare(context, &tensor, value)
}

pub(super) fn nothing(context: &mut Context) -> Checked {
    check(context, 0, plain)
}

pub(super) fn few(context: &mut Context) -> Checked {
    [1, context.rank.world - 1].into_iter().try_for_each(|len| check(context, len, plain))
}

pub(super) fn odd(context: &mut Context) -> Checked {
    const PART: usize = crate::host_collective::PART;
    // Some shares are 1024 elements, the largest small message of MPI's engine; others are larger.
    let uneven = 1024 * context.rank.world + 1;
    let sizes = [1023, uneven, 100_003, PART - 1, PART, PART + 1, 2 * PART];
    sizes.into_iter().try_for_each(|len| check(context, len, plain))
}

pub(super) fn several(context: &mut Context) -> Checked {
    let shapes: [&[usize]; 6] = [&[3, 5], &[0], &[1], &[1000, 7], &[2, 3, 4], &[65_537]];
    let make = |shape: &&[usize]| tensor(context, *shape, plain);
    let tensors = shapes.iter().map(make).collect::<Result<Vec<_>, _>>()?;
    context.group.sums.start_sum(tensors.clone())?;
    context.group.sums.wait()?;
    tensors.iter().try_for_each(|tensor| compare(context, tensor, plain))
}

pub(super) fn without_wait(context: &mut Context) -> Checked {
    let make = |call: usize| tensor(context, 1 + call * 37, plain);
    let tensors = (0..100).map(make).collect::<Result<Vec<_>, _>>()?;
    for tensor in &tensors {
        context.group.sums.start_sum(vec![tensor.clone()])?;
    }
    context.group.sums.wait()?;
    tensors.iter().try_for_each(|tensor| compare(context, tensor, plain))
}

pub(super) fn ordered(context: &mut Context) -> Checked {
    check(context, 300_007, uneven)
}

pub(super) fn special(context: &mut Context) -> Checked {
    fn value(rank: usize, index: usize) -> f32 {
        match (index % 5, rank) {
            (0, 0) => f32::INFINITY,
            (1, 0) => f32::NAN,
            (2, _) => -0.0,
            (3, 0) => f32::from_bits(1), // the smallest number above 0
            (4, _) => f32::MAX,          // the sum of two is too large
            _ => 0.0,
        }
    }
    let tensor = tensor(context, 5005, value)?;
    context.group.sums.start_sum(vec![tensor.clone()])?;
    context.group.sums.wait()?;
    let sums = tensor.to_vec1::<f32>()?;
    let wrong = sums.iter().enumerate().find(|(index, sum)| {
        let expected = expected(value, 0, context.rank.world, *index);
        // The bits of NaN depend on the processor.
        !(sum.is_nan() && expected.is_nan() || sum.to_bits() == expected.to_bits())
    });
    ensure(wrong.is_none(), || format!("a sum of special values is wrong: {wrong:?}"))
}

pub(super) fn slow_rank(context: &mut Context) -> Checked {
    for slow in context.some_ranks() {
        context.delay(slow);
        check(context, 10_007, plain)?;
    }
    Ok(())
}

pub(super) fn with_messages(context: &mut Context) -> Checked {
    let tensor = tensor(context, context.large / 4 + 1, plain)?;
    context.group.sums.start_sum(vec![tensor.clone()])?;
    for round in 0..100 {
        let received = gather(context.group.step.as_mut(), &(context.rank.rank, round))?;
        let expected: Vec<_> = (0..context.rank.world).map(|rank| (rank, round)).collect();
        ensure(received == expected, || format!("received {received:?} in round {round}"))?;
    }
    context.group.sums.wait()?;
    compare(context, &tensor, plain)
}

pub(super) fn large(context: &mut Context) -> Checked {
    let tensor = tensor(context, context.large, plain)?;
    // The first use of the connections may be slower.
    let warm = Tensor::zeros_like(&tensor)?;
    context.group.sums.start_sum(vec![warm])?;
    context.group.sums.wait()?;
    gather(context.group.step.as_mut(), &())?;
    let started = Instant::now();
    context.group.sums.start_sum(vec![tensor.clone()])?;
    context.group.sums.wait()?;
    context.device.synchronize()?;
    let (seconds, megabytes) = (started.elapsed().as_secs_f64(), context.large as f64 * 4e-6);
    let rate = megabytes / 1e3 / seconds;
    context.measured =
        Some(format!("{megabytes:.1} MB in {:.1} ms, {rate:.2} GB/s", seconds * 1e3));
    compare(context, &tensor, plain)
}
