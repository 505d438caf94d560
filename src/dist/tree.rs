//! The sum of a slice over ranks, by a binary tree over the ranks.

use super::{DistError, Rank};
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

/// Sums slices over ranks.
///
/// Each rank receives one share of every part from all ranks, adds the shares by the tree that
/// [`tree_sum`] describes, and sends the result to all. So the sum of `2^n` ranks that each hold
/// the sum of an aligned part of a larger tree has the bits of that tree.
pub(super) struct TreeSum {
    rank: Rank,
    transport: Box<dyn Transport>,
    /// The shares of the other ranks.
    received: Vec<f32>,
}

impl TreeSum {
    pub(super) fn new(rank: Rank, transport: Box<dyn Transport>) -> Self {
        Self { rank, transport, received: Vec::new() }
    }

    /// Replaces `values` by their sums over all ranks.
    pub(super) fn sum(&mut self, values: &mut [f32]) -> Result<(), DistError> {
        values.chunks_mut(PART).try_for_each(|part| self.sum_part(part))
    }

    pub(super) fn finish(&mut self) -> Result<(), DistError> {
        self.transport.finish()
    }

    fn sum_part(&mut self, values: &mut [f32]) -> Result<(), DistError> {
        let Rank { rank, world, .. } = self.rank;
        let len = values.len();
        let share = |of: usize| Rank { rank: of, ..self.rank }.own_part(len);
        // At each distance, a rank sends to one rank and receives from another.
        let partners = (1..world)
            .map(|distance| ((rank + distance) % world, (rank + world - distance) % world));
        // This rank adds up its share: it receives that share from all others.
        let own = share(rank);
        self.received.resize(own.len() * (world - 1), 0.0);
        let mut shares: Vec<&mut [f32]> = (0..world).map(|_| &mut [][..]).collect();
        let mut free = &mut self.received[..];
        for (to, from) in partners.clone() {
            let (receive, rest) = free.split_at_mut(own.len());
            free = rest;
            let send = bytemuck::cast_slice(&values[share(to)]);
            self.transport.exchange(to, send, from, bytemuck::cast_slice_mut(receive))?;
            shares[from] = receive;
        }
        shares[rank] = &mut values[own.clone()];
        tree_sum(&mut shares);
        if rank > 0 {
            let (sum, others) = shares.split_at_mut(1);
            others[rank - 1].copy_from_slice(sum[0]);
        }
        for (to, from) in partners {
            let (sum, receive) = two(values, own.clone(), share(from));
            let receive = bytemuck::cast_slice_mut(receive);
            self.transport.exchange(to, bytemuck::cast_slice(sum), from, receive)?;
        }
        Ok(())
    }
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
fn two(values: &mut [f32], read: Range<usize>, write: Range<usize>) -> (&[f32], &mut [f32]) {
    if read.end <= write.start {
        let (low, high) = values.split_at_mut(write.start);
        (&low[read], &mut high[..write.len()])
    } else {
        let (low, high) = values.split_at_mut(read.start);
        (&high[..read.len()], &mut low[write])
    }
}
