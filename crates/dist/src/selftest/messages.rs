//! Cases about messages on channels.

use super::{Checked, Context, ensure};
use crate::{Channel, DistError, gather};
use std::collections::BTreeSet;
use std::thread;
use std::time::Instant;

pub(super) fn same_version(context: &mut Context) -> Checked {
    let own = env!("CARGO_PKG_VERSION").to_owned();
    let versions = gather(context.group.step.as_mut(), &own)?;
    ensure(versions.iter().all(|version| *version == own), || format!("versions {versions:?}"))
}

pub(super) fn local_ranks(context: &mut Context) -> Checked {
    // Only Linux has this file; elsewhere the case checks nothing.
    let host = files::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let own = (host.trim().to_owned(), context.rank.local_rank, context.rank.local_world);
    let all = gather(context.group.step.as_mut(), &own)?;
    let same: Vec<_> = all.iter().filter(|(host, ..)| *host == own.0 && !host.is_empty()).collect();
    let different: BTreeSet<usize> = same.iter().map(|(_, local_rank, _)| *local_rank).collect();
    let valid = different.len() == same.len() && own.1 < own.2;
    ensure(valid, || format!("local ranks {different:?} of {} ranks on `{}`", same.len(), own.0))
}

/// Exchanges one message, which is a function of rank and round.
fn round(channel: &mut dyn Channel, rank: usize, world: usize, round: usize) -> Checked {
    let message = |rank: usize| format!("{rank} in round {round}").into_bytes();
    let received = channel.all_gather(message(rank))?;
    let expected: Vec<_> = (0..world).map(message).collect();
    ensure(received == expected, || {
        let received: Vec<_> = received.iter().map(|text| String::from_utf8_lossy(text)).collect();
        format!("received {received:?}")
    })
}

pub(super) fn order(context: &mut Context) -> Checked {
    let channels = [&mut context.group.step, &mut context.group.data];
    let (rank, world) = (context.rank.rank, context.rank.world);
    channels.into_iter().try_for_each(|channel| round(channel.as_mut(), rank, world, 0))
}

pub(super) fn sizes(context: &mut Context) -> Checked {
    const SIZES: [usize; 5] = [0, 1, 4099, 65_537, 1_000_003];
    let (own, world) = (context.rank.rank, context.rank.world);
    for shift in 0..SIZES.len() {
        let message = |rank: usize| {
            let len = SIZES[(rank + shift) % SIZES.len()];
            (0..len).map(|at| (at * 31 + rank) as u8).collect::<Vec<u8>>()
        };
        let received = context.group.data.all_gather(message(own))?;
        let same = received.len() == world
            && received.iter().enumerate().all(|(rank, received)| *received == message(rank));
        ensure(same, || {
            let sizes: Vec<_> = received.iter().map(Vec::len).collect();
            format!("received messages of {sizes:?} bytes")
        })?;
    }
    Ok(())
}

pub(super) fn rounds(context: &mut Context) -> Checked {
    const ROUNDS: usize = 1000;
    let started = Instant::now();
    let (rank, world) = (context.rank.rank, context.rank.world);
    (0..ROUNDS).try_for_each(|at| round(context.group.step.as_mut(), rank, world, at))?;
    let mean = started.elapsed().as_secs_f64() * 1e6 / ROUNDS as f64;
    context.measured = Some(format!("{mean:.0} us a round"));
    Ok(())
}

pub(super) fn two_channels(context: &mut Context) -> Checked {
    let (rank, world) = (context.rank.rank, context.rank.world);
    let (data, step) = (context.group.data.as_mut(), context.group.step.as_mut());
    thread::scope(|scope| {
        let on_data = scope.spawn(move || (0..200).try_for_each(|at| round(data, rank, world, at)));
        let on_step = (1000..1200).try_for_each(|at| round(step, rank, world, at));
        on_data.join().expect("a round does not panic").and(on_step)
    })
}

pub(super) fn slow_rank(context: &mut Context) -> Checked {
    for (at, slow) in context.some_ranks().into_iter().enumerate() {
        context.delay(slow);
        round(context.group.step.as_mut(), context.rank.rank, context.rank.world, at)?;
    }
    Ok(())
}

/// Rank 0 sends nothing, so the other ranks wait until they close their own channel.
pub(super) fn closed(context: &mut Context) -> Checked {
    let channel = context.group.data.as_mut();
    let close = channel.closer();
    let waits = context.rank.rank > 0;
    let returned = thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let first = if waits { channel.all_gather(Vec::new()) } else { Err(DistError::Closed) };
            first.and_then(|_| channel.all_gather(Vec::new()))
        });
        thread::sleep(std::time::Duration::from_millis(50));
        close();
        waiting.join().expect("a channel does not panic")
    });
    // Another rank may have closed its channel before.
    let closed = matches!(returned, Err(DistError::Closed | DistError::Lost { .. }));
    ensure(closed, || format!("the channel returned {returned:?}"))
}
