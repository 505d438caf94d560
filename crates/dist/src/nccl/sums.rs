//! Sums of tensors over all ranks, and sums and copies of which each rank of a shard group has one
//! share, on the communication stream.

use super::super::{DistError, Exchange, Gather, Reduce, Then, Ticket};
use super::library::{Communicator, Span, Streams};
use super::plan::{Level, Piece, Sizes, groups, pieces, share};
use candle_core::{DType, Device, Tensor};
use std::collections::VecDeque;
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

/// Names of sends and receives in errors.
const MESSAGES: [&str; 2] = ["a sum over ranks (ncclSend)", "a sum over ranks (ncclRecv)"];

/// An operation that no wait has covered.
struct Started {
    ticket: u64,
    /// The work up to its end; `None` if it could not be started.
    mark: Option<usize>,
    /// The tensors that the communication stream uses.
    _tensors: Vec<Tensor>,
}

/// Starts sums on the communication stream.
pub(super) struct Sums {
    pub(super) communicator: Arc<Communicator>,
    pub(super) streams: Box<dyn Streams>,
    sizes: Sizes,
    pub(super) way: Way,
    pub(super) group: Level,
    /// The ranks at the same place of all shard groups.
    pub(super) across: Level,
    /// Maximum number of elements of a share that are summed at once.
    pub(super) step: usize,
    /// Holds small tensors.
    small: Tensor,
    /// Holds the shares of all members of a level. Empty if NCCL adds all of them.
    shares: Tensor,
    started: VecDeque<Started>,
    last_ticket: u64,
    num_marks: usize,
    free_marks: Vec<usize>,
}

impl Sums {
    /// Allocates the buffers on `device`.
    pub(super) fn new(
        communicator: Arc<Communicator>,
        streams: Box<dyn Streams>,
        device: &Device,
        sizes: Sizes,
        way: Way,
        (group, across): (Level, Level),
    ) -> candle_core::Result<Self> {
        let needed = |level: &Level, part: usize| {
            let members = level.members.len();
            members * share(part, members, 0).len()
        };
        let step = share(sizes.part, group.members.len(), 0).len();
        let for_sums = match &way {
            Way::Exact(levels) => levels.iter().map(|level| needed(level, sizes.part)).max(),
            Way::Fast => None,
        };
        let left_to_nccl = matches!(way, Way::Fast) && across.members.len() == 1;
        let for_shares = if group.members.len() > 1 && !left_to_nccl {
            needed(&group, sizes.part).max(needed(&across, step))
        } else {
            0
        };
        let shares = for_sums.unwrap_or_default().max(for_shares);
        let sizes = match way {
            Way::Exact(_) => sizes,
            // NCCL needs no buffers of ours, so it sums a large tensor at once.
            Way::Fast => Sizes { part: usize::MAX, ..sizes },
        };
        let buffer = |len: usize| Tensor::zeros(len, DType::F32, device);
        let (small, shares) = (buffer(sizes.buffer)?, buffer(shares)?);
        Ok(Self {
            communicator,
            streams,
            sizes,
            way,
            group,
            across,
            step,
            small,
            shares,
            started: VecDeque::new(),
            last_ticket: 0,
            num_marks: 0,
            free_marks: Vec::new(),
        })
    }

    pub(super) fn are_complete(&self) -> std::result::Result<bool, DistError> {
        self.on_device(self.streams.is_idle())
    }

    /// Starts the sums of `tensors`, after the work that the compute stream has now.
    pub(super) fn start(&mut self, tensors: Vec<Tensor>) -> std::result::Result<Ticket, DistError> {
        self.communicator.check()?;
        let spans: candle_core::Result<Vec<Span>> =
            tensors.iter().map(|tensor| self.streams.span(tensor)).collect();
        let spans = self.on_device(spans)?;
        self.operation(tensors, |sums| {
            let lens: Vec<usize> = spans.iter().map(|span| span.len()).collect();
            pieces(&lens, sums.sizes).into_iter().try_for_each(|piece| match piece {
                Piece::Range(tensor, range) => sums.sum(spans[tensor].part(range)),
                Piece::Small(tensors) => {
                    let tensors: Vec<Span> = tensors.into_iter().map(|at| spans[at]).collect();
                    sums.sum_small(&tensors)
                }
            })
        })
    }

    /// Lets `start` put an operation on the communication stream, after the work that the compute
    /// stream has now. Keeps `tensors` until a wait covers the operation.
    pub(super) fn operation(
        &mut self,
        tensors: Vec<Tensor>,
        start: impl FnOnce(&Self) -> std::result::Result<(), DistError>,
    ) -> std::result::Result<Ticket, DistError> {
        self.on_device(self.streams.bind())?;
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        self.started.push_back(Started { ticket, mark: None, _tensors: tensors });
        self.on_device(self.streams.communication_waits())?;
        start(self)?;
        let mark = self.free_marks.pop().unwrap_or(self.num_marks);
        self.num_marks = self.num_marks.max(mark + 1);
        self.on_device(self.streams.record(mark))?;
        if let Some(started) = self.started.back_mut() {
            started.mark = Some(mark);
        }
        Ok(Ticket(ticket))
    }

    /// Makes the compute stream wait for the operation with this ticket and all earlier ones.
    pub(super) fn wait_for(&mut self, ticket: Ticket) -> std::result::Result<(), DistError> {
        let covered = self.started.partition_point(|started| started.ticket <= ticket.0);
        let last = covered.checked_sub(1).and_then(|at| self.started[at].mark);
        if let Some(mark) = last {
            self.on_device(self.streams.compute_waits_for(mark))?;
        }
        self.communicator.check()?;
        self.covered(covered);
        Ok(())
    }

    /// Makes the compute stream wait for all operations.
    pub(super) fn wait(&mut self) -> std::result::Result<(), DistError> {
        self.on_device(self.streams.compute_waits())?;
        self.communicator.check()?;
        self.covered(self.started.len());
        Ok(())
    }

    /// A wait covers the first `count` operations. The memory of their tensors is freed on the
    /// compute stream, so after this wait.
    fn covered(&mut self, count: usize) {
        let marks = self.started.drain(..count).filter_map(|started| started.mark);
        self.free_marks.extend(marks);
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

    pub(super) fn sum(&self, span: Span) -> std::result::Result<(), DistError> {
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
    pub(super) fn sum_shares(
        &self,
        level: &Level,
        span: Span,
    ) -> std::result::Result<(), DistError> {
        let members = level.members.len();
        self.add_shares(level, |of| span.part(share(span.len(), members, of)))
    }

    /// Replaces this rank's `part` by the sum of the members' parts.
    fn add_shares(
        &self,
        level: &Level,
        part: impl Fn(usize) -> Span,
    ) -> std::result::Result<(), DistError> {
        let own = part(level.own);
        let shares = self.on_device(self.streams.span(&self.shares))?;
        let at = |positions: Range<usize>| {
            shares.part(positions.start * own.len()..positions.end * own.len())
        };
        let received = |from: usize| at(level.tree.position[from]..level.tree.position[from] + 1);
        self.exchange(MESSAGES, level, &part, received)?;
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
    pub(super) fn gather_shares(
        &self,
        level: &Level,
        span: Span,
    ) -> std::result::Result<(), DistError> {
        let part = |of: usize| span.part(share(span.len(), level.members.len(), of));
        self.exchange(MESSAGES, level, |_| part(level.own), part)
    }

    /// Sends `send(to)` to all other members and receives `receive(from)` from them, all at the
    /// same time.
    pub(super) fn exchange(
        &self,
        [sends, receives]: [&'static str; 2],
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
                    group.call(sends, |nccl, comm| {
                        nccl.send(send(to), level.members[to], comm, stream)
                    })?;
                }
                if receive(from).len() > 0 {
                    group.call(receives, |nccl, comm| {
                        nccl.recv(receive(from), level.members[from], comm, stream)
                    })?;
                }
            }
            Ok(())
        })
    }

    /// An error of the device ends the communicator, so that other ranks do not wait for this one.
    pub(super) fn on_device<T>(
        &self,
        result: candle_core::Result<T>,
    ) -> std::result::Result<T, DistError> {
        result.map_err(|error| self.communicator.failed(OPERATION, &error.to_string()))
    }
}

const GATHER: &str = "a copy of shares between ranks";
const SHARE_MESSAGES: [&str; 2] =
    ["a copy of shares between ranks (ncclSend)", "a copy of shares between ranks (ncclRecv)"];

const EXCHANGE: &str = "an exchange of tensors between ranks";
const EXCHANGES: [&str; 2] = [
    "an exchange of tensors between ranks (ncclSend)",
    "an exchange of tensors between ranks (ncclRecv)",
];

impl Sums {
    /// Starts the sum of a share, after the work that the compute stream has now.
    pub(super) fn start_reduce(&mut self, reduce: Reduce) -> Result<Ticket, DistError> {
        let Reduce { values, then } = reduce;
        self.communicator.check()?;
        let all = self.on_device(self.streams.span(&values))?;
        let own = self.share(OPERATION, all, self.group.own)?;
        let (copies, targets) = match then {
            Then::Keep => (false, Vec::new()),
            Then::CopyTo(target) => (true, vec![target]),
            Then::AddTo(targets) => (false, targets),
        };
        let spans: candle_core::Result<Vec<Span>> =
            targets.iter().map(|target| self.streams.span(target)).collect();
        let spans = self.on_device(spans)?;
        for span in &spans {
            self.expect_len(OPERATION, span.len(), own.len())?;
        }
        let mut tensors: Vec<Tensor> = targets;
        tensors.push(values);
        self.operation(tensors, |sums| {
            sums.reduce(all, own)?;
            let mut from = own;
            for to in spans {
                let streams = &sums.streams;
                sums.on_device(if copies {
                    streams.copy(from, to)
                } else {
                    streams.add(from, to)
                })?;
                from = to;
            }
            Ok(())
        })
    }

    /// Starts the copy of all shares, after the work that the compute stream has now.
    pub(super) fn start_gather(&mut self, gather: Gather) -> Result<Ticket, DistError> {
        let Gather { own, all } = gather;
        self.communicator.check()?;
        let to = self.on_device(self.streams.bytes(&all))?;
        let share = self.share(GATHER, to, self.group.own)?;
        let from = match &own {
            Some(own) => self.on_device(self.streams.bytes(own))?,
            None => share,
        };
        self.expect_len(GATHER, from.len(), share.len())?;
        let tensors = own.into_iter().chain([all]).collect();
        self.operation(tensors, |sums| sums.gather(from, share, to))
    }

    /// Starts the exchange of tensors between neighbouring ranks, after the work that the compute
    /// stream has now.
    pub(super) fn start_exchange(&mut self, exchange: Exchange) -> Result<Ticket, DistError> {
        let Exchange { send, receive } = exchange;
        self.communicator.check()?;
        let spans = |tensors: &[Tensor]| {
            let spans = tensors.iter().map(|tensor| self.streams.bytes(tensor));
            self.on_device(spans.collect::<candle_core::Result<Vec<Span>>>())
        };
        let (from, to) = (spans(&send)?, spans(&receive)?);
        let (group, _) = groups(self.communicator.rank(), from.len());
        self.expect_len(EXCHANGE, to.len(), from.len())?;
        self.expect_len(EXCHANGE, to[group.own].len(), from[group.own].len())?;
        let tensors = send.into_iter().chain(receive).collect();
        self.operation(tensors, |sums| {
            sums.on_device(sums.streams.copy(from[group.own], to[group.own]))?;
            sums.exchange(EXCHANGES, &group, |place| from[place], |place| to[place])
        })
    }

    /// Share `of` in `all`, which has one for each rank of the shard group.
    fn share(&self, operation: &'static str, all: Span, of: usize) -> Result<Span, DistError> {
        let members = self.group.members.len();
        let share = all.len() / members;
        self.expect_len(operation, all.len(), share * members)?;
        Ok(all.part(of * share..(of + 1) * share))
    }

    /// Fails, and ends the communicator, if a tensor has not the length that the other ranks
    /// expect.
    fn expect_len(
        &self,
        operation: &'static str,
        found: usize,
        expected: usize,
    ) -> Result<(), DistError> {
        if found == expected {
            return Ok(());
        }
        let problem = format!("found a tensor of length {found}, expected {expected}");
        Err(self.communicator.failed(operation, &problem))
    }

    /// Replaces `own`, the share of this rank in `all`, by its sum over all ranks: within the shard
    /// group, then over the shard groups.
    fn reduce(&self, all: Span, own: Span) -> Result<(), DistError> {
        let Self { group, across, step, .. } = self;
        let share = own.len();
        if group.members.len() == 1 {
            let step = if let Way::Fast = self.way { share.max(1) } else { *step };
            let mut parts = (0..share).step_by(step).map(|start| start..share.min(start + step));
            return parts.try_for_each(|part| self.sum(own.part(part)));
        }
        if let Way::Fast = self.way
            && across.members.len() == 1
            && share > 0
        {
            let stream = self.streams.communication();
            return self.communicator.call("a sum over ranks (ncclReduceScatter)", |nccl, comm| {
                nccl.reduce_scatter(all, own, comm, stream)
            });
        }
        for start in (0..share).step_by(*step) {
            let end = share.min(start + step);
            let part = |of: usize| all.part(of * share + start..of * share + end);
            self.add_shares(group, part)?;
            if across.members.len() > 1 {
                self.sum_shares(across, part(group.own))?;
                self.gather_shares(across, part(group.own))?;
            }
        }
        Ok(())
    }

    /// Copies `from` of each rank of the shard group to its share of `all`; `own` is that of this
    /// rank.
    fn gather(&self, from: Span, own: Span, all: Span) -> Result<(), DistError> {
        if from.len() == 0 {
            return Ok(());
        }
        if self.group.members.len() > 1 && self.across.members.len() == 1 {
            let stream = self.streams.communication();
            let name = "a copy of shares between ranks (ncclAllGather)";
            return self
                .communicator
                .call(name, |nccl, comm| nccl.all_gather(from, all, comm, stream));
        }
        if from != own {
            self.on_device(self.streams.copy(from, own))?;
        }
        if self.group.members.len() == 1 {
            return Ok(());
        }
        let share = |of: usize| all.part(of * from.len()..(of + 1) * from.len());
        self.exchange(SHARE_MESSAGES, &self.group, |_| from, share)
    }
}
