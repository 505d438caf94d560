//! Sums of tensors over all ranks, on the communication stream.

use super::super::DistError;
use super::communicator::Communicator;
use super::plan::{Level, Piece, Sizes, pieces, share};
use super::streams::{Span, Streams};
use candle_core::{DType, Device, Result, Tensor};
use std::ops::Range;
use std::sync::Arc;

const OPERATION: &str = "a sum over ranks";

/// How the values of the ranks are added up.
pub(super) enum Way {
    /// In the order of a tree over the ranks.
    Exact(Vec<Level>),
    /// In the order that NCCL chooses.
    Fast,
}

/// Starts sums on the communication stream.
pub(super) struct Sums {
    communicator: Arc<Communicator>,
    streams: Box<dyn Streams>,
    sizes: Sizes,
    way: Way,
    /// Holds small tensors.
    small: Tensor,
    /// Holds the shares of all members of a level. Empty if sums are not exact.
    shares: Tensor,
    /// The tensors that the communication stream uses.
    used: Vec<Tensor>,
}

impl Sums {
    /// Allocates the buffers on `device`.
    pub(super) fn new(
        communicator: Arc<Communicator>,
        streams: Box<dyn Streams>,
        device: &Device,
        sizes: Sizes,
        way: Way,
    ) -> Result<Self> {
        let needed = |level: &Level| {
            let members = level.members.len();
            members * share(sizes.part, members, 0).len()
        };
        let shares = match &way {
            Way::Exact(levels) => levels.iter().map(needed).max().unwrap_or_default(),
            Way::Fast => 0,
        };
        let buffer = |len: usize| Tensor::zeros(len, DType::F32, device);
        let (small, shares) = (buffer(sizes.buffer)?, buffer(shares)?);
        Ok(Self { communicator, streams, sizes, way, small, shares, used: Vec::new() })
    }

    /// Whether all sums are complete.
    pub(super) fn are_complete(&self) -> std::result::Result<bool, DistError> {
        self.on_device(self.streams.is_idle())
    }

    /// Starts the sums of `tensors`, after the work that the compute stream has now.
    pub(super) fn start(&mut self, tensors: Vec<Tensor>) -> std::result::Result<(), DistError> {
        self.communicator.check()?;
        let spans: Result<Vec<Span>> =
            tensors.iter().map(|tensor| self.streams.span(tensor)).collect();
        let spans = self.on_device(spans)?;
        self.on_device(self.streams.bind())?;
        self.used.extend(tensors);
        self.on_device(self.streams.communication_waits())?;
        let lens: Vec<usize> = spans.iter().map(|span| span.len()).collect();
        for piece in pieces(&lens, self.sizes) {
            match piece {
                Piece::Range(tensor, range) => self.sum(spans[tensor].part(range))?,
                Piece::Small(tensors) => {
                    let tensors: Vec<Span> = tensors.into_iter().map(|at| spans[at]).collect();
                    self.sum_small(&tensors)?;
                }
            }
        }
        Ok(())
    }

    /// Makes the compute stream wait for all sums.
    pub(super) fn wait(&mut self) -> std::result::Result<(), DistError> {
        self.on_device(self.streams.compute_waits())?;
        self.communicator.check()?;
        self.used.clear();
        Ok(())
    }

    fn sum_small(&self, tensors: &[Span]) -> std::result::Result<(), DistError> {
        let small = self.on_device(self.streams.span(&self.small))?;
        let mut end = 0;
        let place = |tensor: &Span| {
            let start = end;
            end += tensor.len();
            (*tensor, small.part(start..end))
        };
        let places: Vec<(Span, Span)> = tensors.iter().map(place).collect();
        for (tensor, place) in &places {
            self.on_device(self.streams.copy(*tensor, *place))?;
        }
        self.sum(small.part(0..end))?;
        for (tensor, place) in &places {
            self.on_device(self.streams.copy(*place, *tensor))?;
        }
        Ok(())
    }

    fn sum(&self, span: Span) -> std::result::Result<(), DistError> {
        let Way::Exact(levels) = &self.way else {
            let stream = self.streams.communication();
            return self.communicator.call("a sum over ranks (ncclAllReduce)", |nccl, comm| {
                nccl.all_reduce(span, comm, stream)
            });
        };
        // Each level sums the share that the level before has left to this rank.
        let mut summed = Vec::new();
        let mut own = span;
        for level in levels {
            summed.push((level, own));
            self.sum_shares(level, own)?;
            own = own.part(share(own.len(), level.members.len(), level.own));
        }
        summed.into_iter().rev().try_for_each(|(level, span)| self.gather_shares(level, span))
    }

    /// Replaces this rank's share of `span` by the sum of the members' shares.
    fn sum_shares(&self, level: &Level, span: Span) -> std::result::Result<(), DistError> {
        let members = level.members.len();
        let part = |of: usize| span.part(share(span.len(), members, of));
        let own = part(level.own);
        let shares = self.on_device(self.streams.span(&self.shares))?;
        let at = |positions: Range<usize>| {
            shares.part(positions.start * own.len()..positions.end * own.len())
        };
        let received = |from: usize| at(level.tree.position[from]..level.tree.position[from] + 1);
        self.exchange(level, part, received)?;
        if own.len() == 0 {
            return Ok(());
        }
        self.on_device(self.streams.copy(own, received(level.own)))?;
        for &(to, from, count) in &level.tree.adds {
            self.on_device(self.streams.add(at(from..from + count), at(to..to + count)))?;
        }
        self.on_device(self.streams.copy(at(0..1), own))
    }

    /// Sends this rank's share of `span` to all members, and receives theirs.
    fn gather_shares(&self, level: &Level, span: Span) -> std::result::Result<(), DistError> {
        let part = |of: usize| span.part(share(span.len(), level.members.len(), of));
        self.exchange(level, |_| part(level.own), part)
    }

    /// Sends `send(to)` to all other members and receives `receive(from)` from them, all at the same
    /// time.
    fn exchange(
        &self,
        level: &Level,
        send: impl Fn(usize) -> Span,
        receive: impl Fn(usize) -> Span,
    ) -> std::result::Result<(), DistError> {
        let stream = self.streams.communication();
        let members = level.members.len();
        self.communicator.group(|group| {
            for distance in 1..members {
                let to = (level.own + distance) % members;
                let from = (level.own + members - distance) % members;
                // Both sides leave out empty messages, which they know from the sizes.
                if send(to).len() > 0 {
                    group.call("a sum over ranks (ncclSend)", |nccl, comm| {
                        nccl.send(send(to), level.members[to], comm, stream)
                    })?;
                }
                if receive(from).len() > 0 {
                    group.call("a sum over ranks (ncclRecv)", |nccl, comm| {
                        nccl.recv(receive(from), level.members[from], comm, stream)
                    })?;
                }
            }
            Ok(())
        })
    }

    /// An error of the device ends the communicator, so that other ranks do not wait for this one.
    fn on_device<T>(&self, result: Result<T>) -> std::result::Result<T, DistError> {
        result.map_err(|error| self.communicator.failed(OPERATION, &error.to_string()))
    }
}
