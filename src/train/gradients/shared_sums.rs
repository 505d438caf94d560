//! The gradients of a rank, and their sums over ranks.
//!
//! Each rank computes the gradients of a micro-batch in flat buffers, one for each stage. When
//! backward has finished a stage, its buffer is summed over the ranks, in the background; this rank
//! receives its share. With `shard: gradients` or `full`, the stages take turns in two buffers.

use super::super::error::Result;
use super::super::weights::PassWeights;
use super::rounds::{num_open, num_sums, pairs_after};
use crate::dist::into_op_error;
use crate::dist::{Collective, Gather, Reduce, Shard, Then, Ticket};
use crate::ops;
use crate::tape::{Gradients, Layout, Param, slot_lens};
use candle_core::{DType, Device, Tensor};
use std::cell::RefCell;
use std::sync::Arc;

/// A tensor for each stage with trained parameters.
type OfStages = Vec<Option<Tensor>>;

/// Number of sums of rounds that a rank keeps, each of the size of its share.
pub(in super::super) fn kept_sums(rounds: usize, exact: bool, shard: Shard) -> usize {
    let least = usize::from(shard >= Shard::Gradients);
    if exact { num_sums(rounds).max(least) } else { least }
}

/// The buffers for the gradients of a micro-batch.
pub(in super::super) struct Buffers {
    /// The stages that take turns in two buffers, in the order of backward.
    turns: Vec<usize>,
    /// Numbers of elements of the two buffers.
    pub(in super::super) slots: [usize; 2],
    /// The other stages with trained parameters: each has a buffer.
    pub(in super::super) own: Vec<usize>,
}

impl Buffers {
    pub(in super::super) fn new(layout: &Layout, shard: Shard, early: Option<usize>) -> Self {
        let len = |stage: usize| layout.stages()[stage].trained.len();
        let trained = (0..layout.stages().len()).filter(|stage| len(*stage) > 0);
        let takes_turns = |stage: &usize| shard >= Shard::Gradients && Some(*stage) != early;
        let (turns, own): (Vec<usize>, Vec<usize>) = trained.partition(takes_turns);
        let slots =
            slot_lens(turns.iter().enumerate().map(|(turn, stage)| (turn % 2, len(*stage))));
        Self { turns, slots, own }
    }
}

pub struct SharedSums {
    layout: Arc<Layout>,
    collective: Arc<dyn Collective>,
    /// The share of this rank.
    member: usize,
    shard: Shard,
    exact: bool,
    /// Flat gradients of a micro-batch.
    flat: OfStages,
    /// Views of them.
    buffers: Gradients,
    /// Sums of rounds: the share of this rank.
    sums: Vec<OfStages>,
    /// The stages that take turns in two buffers, in the order of backward.
    turns: Vec<usize>,
    device: Device,
}

impl SharedSums {
    /// Allocates the buffers for sums with `collective`. `early` is the stage whose gradient is not
    /// complete when its turn ends: that of a tied head.
    pub fn new(
        layout: Arc<Layout>,
        collective: Arc<dyn Collective>,
        member: usize,
        (shard, exact): (Shard, bool),
        rounds: usize,
        early: Option<usize>,
        device: &Device,
    ) -> candle_core::Result<Self> {
        let zeros = |len: usize| Tensor::zeros(len, DType::F32, device);
        let Buffers { turns, slots: [first, second], own } = Buffers::new(&layout, shard, early);
        let slots = [zeros(first)?, zeros(second)?];
        let len = |stage: usize| layout.stages()[stage].trained.len();
        let mut flat: OfStages = vec![None; layout.stages().len()];
        for (turn, stage) in turns.iter().enumerate() {
            flat[*stage] = Some(slots[turn % 2].narrow(0, 0, len(*stage))?);
        }
        for stage in own {
            flat[stage] = Some(zeros(len(stage))?);
        }
        let shares = |_| {
            let share = |stage: &crate::tape::StageBuckets| match stage.trained.share_len() {
                0 => Ok(None),
                len => zeros(len).map(Some),
            };
            layout.stages().iter().map(share).collect::<candle_core::Result<OfStages>>()
        };
        Ok(Self {
            buffers: Gradients::in_buckets(&layout, &flat)?,
            sums: (0..kept_sums(rounds, exact, shard))
                .map(shares)
                .collect::<candle_core::Result<_>>()?,
            layout,
            collective,
            member,
            shard,
            exact,
            flat,
            turns,
            device: device.clone(),
        })
    }

    pub(super) fn buffers(&self) -> &Gradients {
        &self.buffers
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn collective(&self) -> &dyn Collective {
        &*self.collective
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The share of this rank.
    pub(super) fn member(&self) -> usize {
        self.member
    }

    /// Whether the sums have the same bits for every number of ranks.
    pub(super) fn is_exact(&self) -> bool {
        self.exact
    }

    /// Whether this rank has a share of the sums only.
    pub(in super::super) fn is_sharded(&self) -> bool {
        self.shard >= Shard::Optimizer
    }

    fn takes_turns(&self) -> bool {
        self.shard >= Shard::Gradients
    }

    /// Whether the sums of rounds are computed when each round ends.
    fn sums_rounds(&self) -> bool {
        self.exact || self.takes_turns()
    }

    fn sum(&self, depth: usize, stage: usize) -> Option<Tensor> {
        self.sums.get(depth).and_then(|sums| sums[stage].clone())
    }

    /// What happens with the sum of a round.
    fn then(&self, stage: usize, round: usize, is_last: bool) -> Then {
        let add_to = |count: usize, open: usize| {
            Then::AddTo((open - count..open).rev().filter_map(|at| self.sum(at, stage)).collect())
        };
        let copy_to = |depth| self.sum(depth, stage).map_or(Then::Keep, Then::CopyTo);
        match (self.exact, is_last, num_open(round), pairs_after(round)) {
            (false, _, _, _) if round == 0 => copy_to(0),
            (false, _, _, _) => add_to(usize::from(self.takes_turns()), self.sums.len().min(1)),
            (true, true, 0, _) if self.takes_turns() => copy_to(0),
            (true, true, 0, _) => Then::Keep,
            (true, true, open, _) => add_to(open, open),
            (true, false, open, 0) => copy_to(open),
            (true, false, open, pairs) => add_to(pairs, open),
        }
    }

    /// The tensor that has the share of a stage's sum at the end of a step of `rounds` rounds;
    /// `None`: the flat gradients have it.
    fn own_sum(&self, stage: usize, rounds: usize) -> Option<Tensor> {
        let in_sums = self.takes_turns() || (self.exact && rounds > 1);
        in_sums.then(|| self.sum(0, stage)).flatten()
    }

    /// The flat gradients of the optimizer's states, at the end of a step.
    pub(super) fn sums(&self, rounds: usize) -> Result<Vec<Tensor>> {
        if !self.is_sharded() {
            let buffers = self.buffers.iter().flatten();
            return Ok(buffers.map(Tensor::flatten_all).collect::<candle_core::Result<_>>()?);
        }
        let mut sums = Vec::new();
        for (stage, (buckets, flat)) in self.layout.stages().iter().zip(&self.flat).enumerate() {
            let Some(flat) = flat else { continue };
            let bucket = &buckets.trained;
            let own = match self.own_sum(stage, rounds) {
                Some(sum) => sum,
                None => flat.narrow(0, bucket.share(self.member).start, bucket.share_len())?,
            };
            for part in bucket.parts(self.member) {
                sums.push(own.narrow(0, part.at, part.elements.len())?);
            }
        }
        Ok(sums)
    }
}

/// Receives the gradients of one round.
pub(super) struct SharedRound<'a> {
    sums: &'a SharedSums,
    params: &'a [Param],
    weights: &'a PassWeights<'a>,
    round: usize,
    rounds: usize,
    /// The sums of the stages in turn, by the number of the turn.
    tickets: RefCell<Vec<Ticket>>,
}

impl<'a> SharedRound<'a> {
    pub(super) fn new(
        sums: &'a SharedSums,
        (params, weights): (&'a [Param], &'a PassWeights<'a>),
        round: usize,
        rounds: usize,
    ) -> Self {
        Self { sums, params, weights, round, rounds, tickets: RefCell::default() }
    }

    fn is_last(&self) -> bool {
        self.round + 1 == self.rounds
    }

    /// Begins new sums in the buffers, after the sums of the round before. The first stage in turn
    /// has a buffer that is zeroed as a whole, because its gaps contain values of other stages.
    pub(super) fn begin(&self) -> Result<()> {
        if self.round > 0 && !self.sums.sums_rounds() {
            return Ok(()); // added in place
        }
        self.sums.collective.wait()?;
        let stage_of = |param: &Param| self.sums.layout.stage_of(param);
        let own = self.params.iter().filter(|param| !self.sums.turns.contains(&stage_of(param)));
        self.sums.buffers.begin(own)?;
        let first = self.sums.turns.first().and_then(|stage| self.sums.flat[*stage].as_ref());
        Ok(first.map_or(Ok(()), ops::fill_zero)?)
    }

    /// Adds up the gradients of a stage over the ranks.
    pub(super) fn finished(&self, params: &[&Param]) -> candle_core::Result<()> {
        let Some(param) = params.first() else { return Ok(()) };
        let stage = self.sums.layout.stage_of(param);
        self.weights.stage_done(stage).map_err(into_op_error)?; // in the same order on a rank that has not read them
        let Some(flat) = &self.sums.flat[stage] else { return Ok(()) };
        self.sums.buffers.end(params.iter().copied())?;
        if !self.sums.sums_rounds() && !self.is_last() {
            return Ok(());
        }
        let collective = self.sums.collective();
        let ticket = if self.sums.exact || self.sums.is_sharded() {
            let then = self.sums.then(stage, self.round, self.is_last());
            let reduce = Reduce { values: flat.clone(), then };
            let ticket = collective.start_reduce(reduce).map_err(into_op_error)?;
            if self.is_last() && !self.sums.is_sharded() {
                let own = self.sums.own_sum(stage, self.rounds);
                let gather = Gather { own, all: flat.clone() };
                collective.start_gather(gather).map_err(into_op_error)?;
            }
            ticket
        } else {
            collective.start_sum(vec![flat.clone()]).map_err(into_op_error)?
        };
        self.prepare_next(stage, ticket)
    }

    /// Zeroes the buffer of the next stage in turn, after the sum of the stage that used it before.
    fn prepare_next(&self, stage: usize, ticket: Ticket) -> candle_core::Result<()> {
        let turns = &self.sums.turns;
        let Some(turn) = turns.iter().position(|of| *of == stage) else { return Ok(()) };
        let mut tickets = self.tickets.borrow_mut();
        tickets.push(ticket);
        let Some(next) = turns.get(turn + 1).and_then(|next| self.sums.flat[*next].as_ref()) else {
            return Ok(());
        };
        if let Some(before) = turn.checked_sub(1) {
            self.sums.collective.wait_for(tickets[before]).map_err(into_op_error)?;
        }
        ops::fill_zero(next)
    }
}
