//! Cases about shares, which the ranks of a shard group sum and copy. Every rank computes the
//! expected values alone.

use super::sums::{Value, expected, plain, tensor, uneven};
use super::{Checked, Context, Problem, ensure};
use crate::{Gather, Reduce, Then};
use candle_core::{DType, Device, Tensor};

/// The place of this rank in its shard group, and the number of ranks of a group.
fn place(context: &Context) -> (usize, usize) {
    let members = context.group.shard_group;
    (context.rank.rank % members, members)
}

/// The sum of one element over the shard groups `first..end`: within each group, then over groups.
fn over_groups(value: Value, members: usize, first: usize, end: usize, index: usize) -> f32 {
    if end - first == 1 {
        return expected(value, first * members, end * members, index);
    }
    let middle = first + (end - first) / 2;
    over_groups(value, members, first, middle, index)
        + over_groups(value, members, middle, end, index)
}

fn own_sums(context: &Context, share: usize, value: Value) -> Vec<f32> {
    let (place, members) = place(context);
    let groups = context.rank.world / members;
    let indices = place * share..(place + 1) * share;
    indices.map(|index| over_groups(value, members, 0, groups, index)).collect()
}

/// Compares the bits of a tensor.
fn compare(what: &str, found: &Tensor, expected: &[f32]) -> Checked {
    let found = found.to_vec1::<f32>()?;
    let differs = |(found, expected): (&f32, &f32)| found.to_bits() != expected.to_bits();
    let wrong = found.iter().zip(expected).position(differs);
    ensure(wrong.is_none() && found.len() == expected.len(), || {
        let at = wrong.unwrap_or_default();
        let (found, expected) = (found.get(at), expected.get(at));
        format!("{what}: element {at} is {found:?}, not {expected:?}")
    })
}

/// Sums shares of `share` elements and compares that of this rank.
fn check(context: &mut Context, share: usize, value: Value) -> Checked {
    let (place, members) = place(context);
    let values = tensor(context, share * members, value)?;
    let reduce = Reduce { values: values.clone(), then: Then::Keep };
    let ticket = context.group.sums.start_reduce(reduce)?;
    context.group.sums.wait_for(ticket)?;
    let own = values.narrow(0, place * share, share)?;
    compare("a share", &own, &own_sums(context, share, value))
}

pub(super) fn odd(context: &mut Context) -> Checked {
    const PART: usize = crate::host_collective::PART;
    let part = PART / context.group.shard_group; // as many elements are summed at a time
    [1, 63, 1023, 100_003, part - 1, part, part + 1]
        .into_iter()
        .try_for_each(|share| check(context, share, plain))
}

pub(super) fn ordered(context: &mut Context) -> Checked {
    check(context, 100_003, uneven)
}

pub(super) fn then(context: &mut Context) -> Checked {
    const SHARE: usize = 10_007;
    let (_, members) = place(context);
    let before = |rank: usize| -> Vec<f32> { (0..SHARE).map(|at| plain(rank, at)).collect() };
    let target = |rank: usize| -> Result<Tensor, Problem> {
        Ok(Tensor::from_vec(before(rank), SHARE, context.device)?)
    };
    let (copy, first, second) = (target(7)?, target(8)?, target(9)?);
    for then in [Then::CopyTo(copy.clone()), Then::AddTo(vec![first.clone(), second.clone()])] {
        let values = tensor(context, SHARE * members, plain)?;
        context.group.sums.start_reduce(Reduce { values, then })?;
    }
    context.group.sums.wait()?;
    let add = |left: Vec<f32>, right: &[f32]| -> Vec<f32> {
        left.iter().zip(right).map(|(left, right)| left + right).collect()
    };
    let sums = own_sums(context, SHARE, plain);
    compare("the copy", &copy, &sums)?;
    let once = add(before(8), &sums);
    compare("the first sum", &first, &once)?;
    compare("the second sum", &second, &add(before(9), &once))
}

pub(super) fn gathered(context: &mut Context) -> Checked {
    let (place, members) = place(context);
    let first = context.rank.rank - place;
    for dtype in [DType::F32, DType::BF16, DType::U8] {
        for (share, in_place) in [(1, false), (1, true), (10_007, false), (10_007, true)] {
            let make = |rank: usize| -> candle_core::Result<Tensor> {
                let value = |at: usize| ((at * 7 + rank * 31) % 251) as f32; // exact in all dtypes
                let values: Vec<f32> = (0..share).map(value).collect();
                Tensor::from_vec(values, share, &Device::Cpu)?.to_dtype(dtype)
            };
            let own = make(context.rank.rank)?.to_device(context.device)?;
            let all = Tensor::zeros(members * share, dtype, context.device)?;
            if in_place {
                all.slice_set(&own, 0, place * share)?;
            }
            let own = (!in_place).then_some(own);
            let ticket = context.group.sums.start_gather(Gather { own, all: all.clone() })?;
            context.group.sums.wait_for(ticket)?;
            let found = all.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            for of in 0..members {
                let expected = make(first + of)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                let what = format!("{dtype:?} of rank {}", first + of);
                compare(&what, &found.narrow(0, of * share, share)?, &expected)?;
            }
        }
    }
    Ok(())
}

/// Later calls wait for a slow rank; the wait for the first does not.
pub(super) fn tickets(context: &mut Context) -> Checked {
    const SHARE: usize = 1009;
    let (place, members) = place(context);
    let mut calls = Vec::new();
    for call in 0..20 {
        if call == 10 {
            context.delay(context.rank.world - 1);
        }
        let share = SHARE + call;
        let values = tensor(context, share * members, plain)?;
        let reduce = Reduce { values: values.clone(), then: Then::Keep };
        calls.push((share, values, context.group.sums.start_reduce(reduce)?));
    }
    for (share, values, ticket) in calls {
        context.group.sums.wait_for(ticket)?;
        let own = values.narrow(0, place * share, share)?;
        compare("a share", &own, &own_sums(context, share, plain))?;
    }
    Ok(())
}
