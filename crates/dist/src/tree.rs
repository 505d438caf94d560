//! The sum of a slice over ranks, by a binary tree over the ranks.

use super::{DistError, Rank};
use ranks::own_part;
use std::ops::Range;

/// Sends and receives bytes between two ranks.
pub trait Transport {
    /// Sends `send` to rank `to` and receives `receive` from rank `from`, both at the same time.
    /// Either may be empty; the other rank then passes an empty slice too.
    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
    ) -> Result<(), DistError>;

    /// Ends the connections. All ranks call this at the end of a run that succeeds.
    fn finish(&mut self) -> Result<(), DistError> {
        Ok(())
    }
}

/// Maximum number of elements that are summed at a time. Larger parts leave the processor's cache
/// between their exchange and their addition; smaller parts are exchanged more often.
pub(super) const PART: usize = 1 << 19;

/// Ranks that exchange shares of a slice. Each of them sums one share.
struct Members {
    ranks: Vec<usize>,
    /// Index of this rank in `ranks`.
    own: usize,
}

impl Members {
    fn new(ranks: impl Iterator<Item = usize>, rank: usize) -> Self {
        let ranks: Vec<usize> = ranks.collect();
        let own = ranks.iter().position(|of| *of == rank);
        Self { ranks, own: own.expect("this rank is a member") }
    }

    fn len(&self) -> usize {
        self.ranks.len()
    }

    /// At each distance, a member sends to one member and receives from another.
    fn partners(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (own, len) = (self.own, self.len());
        (1..len).map(move |distance| ((own + distance) % len, (own + len - distance) % len))
    }
}

/// Sums slices over ranks.
///
/// Each rank receives one share of every part from all ranks, adds the shares by the tree that
/// [`tree_sum`] describes, and sends the result to all. So the sum of `2^n` ranks that each hold
/// the sum of an aligned part of a larger tree has the bits of that tree.
pub(super) struct TreeSum {
    all: Members,
    /// The ranks of the own shard group.
    group: Members,
    /// The ranks at the same place of all shard groups.
    across: Members,
    transport: Box<dyn Transport>,
    /// The shares of the other ranks.
    received: Vec<f32>,
}

impl TreeSum {
    /// `shard_group` divides the number of ranks.
    pub(super) fn new(rank: Rank, shard_group: usize, transport: Box<dyn Transport>) -> Self {
        let Rank { rank, world, .. } = rank;
        Self {
            all: Members::new(0..world, rank),
            group: Members::new(group_of(rank, shard_group), rank),
            across: Members::new((rank % shard_group..world).step_by(shard_group), rank),
            transport,
            received: Vec::new(),
        }
    }

    /// Replaces `values` by their sums over all ranks.
    pub(super) fn sum(&mut self, values: &mut [f32]) -> Result<(), DistError> {
        let Self { all, transport, received, .. } = self;
        values.chunks_mut(PART).try_for_each(|part| sum_part(all, transport, received, part))
    }

    /// Replaces the share of this rank by its sum over all ranks. The ranks of a shard group have
    /// shares of the same size. The other shares stay as they are.
    pub(super) fn reduce(&mut self, values: &mut [f32]) -> Result<(), DistError> {
        let Self { group, across, transport, received, .. } = self;
        let share = values.len() / group.len();
        let step = (PART / group.len()).max(1);
        for start in (0..share).step_by(step) {
            let end = share.min(start + step);
            let part = |of: usize| of * share + start..of * share + end;
            sum_shares(group, transport, received, values, part)?;
            if across.len() > 1 {
                sum_part(across, transport, received, &mut values[part(group.own)])?;
            }
        }
        Ok(())
    }

    /// Copies the share of each rank of the shard group to all of them. `own` is the share of this
    /// rank; `None`: it is in `all`.
    pub(super) fn gather(&mut self, own: Option<&[u8]>, all: &mut [u8]) -> Result<(), DistError> {
        let share = all.len() / self.group.len();
        let part = |of: usize| of * share..(of + 1) * share;
        if let Some(own) = own {
            all[part(self.group.own)].copy_from_slice(own);
        }
        gather_shares(&self.group, &mut self.transport, all, part)
    }

    /// The share of this rank in `len` elements, as [`Self::reduce`] and [`Self::gather`] divide
    /// them.
    pub(super) fn own_share(&self, len: usize) -> Range<usize> {
        let share = len / self.group.len();
        self.group.own * share..(self.group.own + 1) * share
    }

    /// The places in a group of `group` neighbouring ranks that this rank sends to and receives
    /// from, one pair after the other.
    pub(super) fn partners_in_group(&self, group: usize) -> Vec<(usize, usize)> {
        let members = Members::new(group_of(self.all.own, group), self.all.own);
        [(members.own, members.own)].into_iter().chain(members.partners()).collect()
    }

    /// Sends and receives within a group of `group` neighbouring ranks, with places in the group.
    pub(super) fn exchange(
        &mut self,
        group: usize,
        (to, send): (usize, &[u8]),
        (from, receive): (usize, &mut [u8]),
    ) -> Result<(), DistError> {
        let ranks = group_of(self.all.own, group);
        if ranks.start + to == self.all.own {
            receive.copy_from_slice(send);
            return Ok(());
        }
        self.transport.exchange(ranks.start + to, send, ranks.start + from, receive)
    }

    pub(super) fn finish(&mut self) -> Result<(), DistError> {
        self.transport.finish()
    }
}

/// The ranks of the group of `rank`, if `size` neighbouring ranks are a group.
fn group_of(rank: usize, size: usize) -> Range<usize> {
    let first = rank / size * size;
    first..first + size
}

fn sum_part(
    members: &Members,
    transport: &mut Box<dyn Transport>,
    received: &mut Vec<f32>,
    values: &mut [f32],
) -> Result<(), DistError> {
    let (len, parts) = (values.len(), members.len());
    let share = |of: usize| own_part(of, parts, len);
    sum_shares(members, transport, received, values, share)?;
    let bytes = |range: Range<usize>| 4 * range.start..4 * range.end;
    gather_shares(members, transport, bytemuck::cast_slice_mut(values), |of| bytes(share(of)))
}

/// Replaces the share of this rank by its sum over the members.
fn sum_shares(
    members: &Members,
    transport: &mut Box<dyn Transport>,
    received: &mut Vec<f32>,
    values: &mut [f32],
    share: impl Fn(usize) -> Range<usize>,
) -> Result<(), DistError> {
    let own = share(members.own);
    received.resize(own.len() * (members.len() - 1), 0.0);
    let mut shares: Vec<&mut [f32]> = members.ranks.iter().map(|_| &mut [][..]).collect();
    let mut free = &mut received[..];
    for (to, from) in members.partners() {
        let (receive, rest) = free.split_at_mut(own.len());
        free = rest;
        let send = bytemuck::cast_slice(&values[share(to)]);
        let (to, from_rank) = (members.ranks[to], members.ranks[from]);
        transport.exchange(to, send, from_rank, bytemuck::cast_slice_mut(receive))?;
        shares[from] = receive;
    }
    shares[members.own] = &mut values[own];
    tree_sum(&mut shares);
    if members.own > 0 {
        let (sum, others) = shares.split_at_mut(1);
        others[members.own - 1].copy_from_slice(sum[0]);
    }
    Ok(())
}

/// Sends the share of this rank to all members, and receives theirs.
fn gather_shares(
    members: &Members,
    transport: &mut Box<dyn Transport>,
    values: &mut [u8],
    share: impl Fn(usize) -> Range<usize>,
) -> Result<(), DistError> {
    for (to, from) in members.partners() {
        let (own, receive) = two(values, share(members.own), share(from));
        transport.exchange(members.ranks[to], own, members.ranks[from], receive)?;
    }
    Ok(())
}

/// Adds up `parts` into the first of them: the sum of the first half plus the sum of the second
/// half, each computed in the same way.
fn tree_sum(parts: &mut [&mut [f32]]) {
    if parts.len() < 2 {
        return;
    }
    let (left, right) = parts.split_at_mut(parts.len() / 2);
    tree_sum(left);
    tree_sum(right);
    for (sum, value) in left[0].iter_mut().zip(&*right[0]) {
        *sum += *value;
    }
}

/// Two disjoint ranges of `values`: the first to read, the second to write.
fn two(values: &mut [u8], read: Range<usize>, write: Range<usize>) -> (&[u8], &mut [u8]) {
    if read.end <= write.start {
        let (low, high) = values.split_at_mut(write.start);
        (&low[read], &mut high[..write.len()])
    } else {
        let (low, high) = values.split_at_mut(read.start);
        (&high[..read.len()], &mut low[write])
    }
}
