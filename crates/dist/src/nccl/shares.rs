//! Sums and copies of which each rank of a shard group has one share, on the communication stream.

use super::super::{DistError, Exchange, Gather, Reduce, Then, Ticket};
use super::plan::groups;
use super::streams::Span;
use super::sums::{OPERATION, Sums, Way};
use candle_core::Tensor;

const GATHER: &str = "a copy of shares between ranks";
const MESSAGES: [&str; 2] =
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
        self.exchange(MESSAGES, &self.group, |_| from, share)
    }
}
