//! The weights of a model of which each rank has a share.
//!
//! Two buffers ("slots") hold the weights of two stages: the one in use, and the next one, which is
//! gathered meanwhile. The tensors of all parameters are views of the slots. A parameter that is
//! read makes the weights of its stage present.
//!
//! All ranks must gather the same stages in the same order, but they do not always read the same
//! stages: a batch without images does not use the vision encoder. So the order is fixed, and a
//! rank takes part in the gathers of the stages that it does not read.

use crate::dist::{Collective, DistError, Gather, Ticket, into_op_error};
use crate::tape::{Layout, Param, slot_lens};
use candle_core::{DType, Device, Result, Tensor};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a pass over the model reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum PassKind {
    /// Forward and head.
    Forward,
    /// Forward, head and backward.
    Train,
}

/// The stages in the order in which passes read their weights.
#[derive(Debug, Clone)]
struct Order {
    stages: Vec<usize>,
    /// Position of the head.
    head: usize,
}

pub struct ShardedWeights {
    order: Order,
    /// By parameter.
    stages: Vec<usize>,
    /// The share of this rank and all weights, for the buckets of each stage.
    buckets: Vec<Vec<(Tensor, Tensor)>>,
    /// For each parameter, the elements that this rank has.
    held: Vec<Vec<(Range<usize>, Tensor)>>,
    collective: Arc<dyn Collective>,
    /// The stage in each slot, or on its way there, and its gather.
    present: Mutex<Present>,
}

type Present = [Option<(usize, Option<Ticket>)>; 2];

/// The gathers of one pass over the model.
pub(super) struct GatherPass<'a> {
    slots: &'a ShardedWeights,
    /// The stages that the pass reads.
    order: &'a [usize],
    state: RefCell<Gathered>,
}

#[derive(Default)]
struct Gathered {
    /// Number of stages of the pass that were read or skipped.
    entered: usize,
    /// The gathers so far.
    tickets: Vec<Option<Ticket>>, // None: nothing to gather
}

/// The slot of a stage: neighbouring stages have different slots.
fn slot_of(stage: usize) -> usize {
    stage % 2
}

/// Numbers of elements of the slots.
pub(in super::super) fn slot_elements(layout: &Layout) -> [usize; 2] {
    let stages = layout.stages().iter().enumerate();
    slot_lens(stages.map(|(stage, buckets)| (slot_of(stage), buckets.num_elements())))
}

impl Order {
    /// `num_stages` are in the order of backward. `head` is the stage of the head, `table` that of
    /// the token embedding, whose weights backward does not read, and `trained` the last one that
    /// is trained.
    fn new(num_stages: usize, head: usize, table: usize, trained: usize) -> Self {
        // Backward always runs through the last norm, and through all mergers of a vision encoder
        // with a trained part; these are after the embedding.
        let last = if trained > table { num_stages - 1 } else { trained.max(1) };
        let mut stages: Vec<usize> = (0..num_stages).rev().collect();
        if stages.last() != Some(&head) {
            stages.push(head); // tied to the embedding
        }
        let position = stages.len() - 1;
        let first = usize::from(head == 0); // an own head is read once
        stages.extend((first..=last).filter(|stage| *stage != table));
        Self { stages, head: position }
    }

    fn of(&self, kind: PassKind) -> &[usize] {
        match kind {
            PassKind::Forward => &self.stages[..=self.head],
            PassKind::Train => &self.stages,
        }
    }
}

/// The shares of a rank, and the places of the parameters in two slots.
pub struct ShardTensors {
    /// The share of this rank and all weights, for the buckets of each stage.
    pub buckets: Vec<Vec<(Tensor, Tensor)>>,
}

impl ShardTensors {
    /// Allocates shares and slots, and makes the tensors of `params` views of the slots.
    pub fn new(layout: &Layout, params: &[Param], dtype: DType, device: &Device) -> Result<Self> {
        let stages = layout.stages();
        let [first, second] = slot_elements(layout);
        let slots = [Tensor::zeros(first, dtype, device)?, Tensor::zeros(second, dtype, device)?];
        let mut buckets = Vec::with_capacity(stages.len());
        for (stage, of_stage) in stages.iter().enumerate() {
            let (mut start, mut tensors) = (0, Vec::new());
            for bucket in of_stage.buckets() {
                let all = slots[slot_of(stage)].narrow(0, start, bucket.len())?;
                start += bucket.len();
                for (param, view) in layout.views(bucket, &all)? {
                    params[param].set_tensor(view)?;
                }
                tensors.push((Tensor::zeros(bucket.share_len(), dtype, device)?, all));
            }
            buckets.push(tensors);
        }
        Ok(Self { buckets })
    }
}

impl ShardedWeights {
    /// Gathers the weights of `tensors`, those of `params`, with `collective`.
    /// `table` is the parameter of the token embedding.
    pub fn new(
        layout: &Layout,
        member: usize,
        tensors: ShardTensors,
        (params, head, table): (&[Param], &Param, &Param),
        collective: Arc<dyn Collective>,
    ) -> Result<Self> {
        let mut held = vec![Vec::new(); params.len()];
        for (stage, tensors) in layout.stages().iter().zip(&tensors.buckets) {
            for (bucket, (own, _)) in stage.buckets().zip(tensors) {
                for part in bucket.parts(member) {
                    let values = own.narrow(0, part.at, part.elements.len())?;
                    held[part.param].push((part.elements, values));
                }
            }
        }
        let trained = |stage: &usize| !layout.stages()[*stage].trained.is_empty();
        let num_stages = layout.stages().len();
        let trained = (0..num_stages).rev().find(trained).unwrap_or_default();
        let order = Order::new(num_stages, layout.stage_of(head), layout.stage_of(table), trained);
        let ShardTensors { buckets } = tensors;
        let mut stages = vec![0; params.len()];
        for param in params {
            param.set_elsewhere()?;
            stages[param.index()] = layout.stage_of(param);
        }
        Ok(Self { order, stages, buckets, held, collective, present: Mutex::default() })
    }

    /// The elements of a parameter that this rank has.
    pub(in super::super) fn held(&self, param: &Param) -> Vec<(Range<usize>, Tensor)> {
        self.held[param.index()].clone()
    }

    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that all weights have changed.
    pub(super) fn invalidate(&self) {
        *self.present() = [None; 2];
    }

    pub(super) fn pass(&self, kind: PassKind) -> GatherPass<'_> {
        GatherPass { slots: self, order: self.order.of(kind), state: RefCell::default() }
    }

    /// Starts the gather of a stage, unless it is present.
    fn gather(&self, stage: usize) -> std::result::Result<Option<Ticket>, DistError> {
        let (mut present, slot) = (self.present(), slot_of(stage));
        if let Some((of, ticket)) = present[slot]
            && of == stage
        {
            return Ok(ticket); // an earlier pass may not have waited for it
        }
        present[slot] = None;
        let mut last = None;
        for (own, all) in &self.buckets[stage] {
            let gather = Gather { own: Some(own.clone()), all: all.clone() };
            last = Some(self.collective.start_gather(gather)?);
        }
        present[slot] = Some((stage, last));
        Ok(last)
    }
}

impl GatherPass<'_> {
    /// The weight of a parameter, after the gather of its stage.
    pub(super) fn weight(&self, param: &Param) -> Result<Tensor> {
        self.enter(self.slots.stages[param.index()]).map_err(into_op_error)?;
        Ok(param.buffer())
    }

    fn enter(&self, stage: usize) -> std::result::Result<(), DistError> {
        let mut state = self.state.borrow_mut();
        if state.entered > 0 && self.order[state.entered - 1] == stage {
            return Ok(());
        }
        let Some(ahead) = self.order[state.entered..].iter().position(|of| *of == stage) else {
            let problem = format!("the weights of stage {stage} were read out of order");
            return Err(DistError::Collective { operation: "a gather", problem });
        };
        let position = state.entered + ahead;
        self.advance(&mut state, position)?;
        match state.tickets.get(position) {
            Some(Some(ticket)) => self.slots.collective.wait_for(*ticket),
            _ => Ok(()),
        }
    }

    /// Reports that backward has finished a stage, whose weights it may not have read.
    pub(super) fn stage_done(&self, stage: usize) -> std::result::Result<(), DistError> {
        let position = self.order.iter().rposition(|of| *of == stage);
        match position.filter(|at| *at >= self.slots.order.head) {
            Some(position) => self.advance(&mut self.state.borrow_mut(), position),
            None => Ok(()),
        }
    }

    /// Takes part in the gathers of the stages that this rank has not read.
    pub(super) fn end(self) -> std::result::Result<(), DistError> {
        self.advance(&mut self.state.borrow_mut(), self.order.len() - 1)
    }

    /// Takes part in all gathers up to `position` of the pass, and starts the next one.
    fn advance(&self, state: &mut Gathered, position: usize) -> std::result::Result<(), DistError> {
        let order = self.order;
        while state.entered <= position {
            let at = state.entered;
            state.entered += 1;
            let next = (at + 1).min(order.len() - 1);
            // The next stage can be gathered now if it does not replace the weights in use.
            let end = if slot_of(order[next]) == slot_of(order[at]) { at } else { next };
            while state.tickets.len() <= end {
                state.tickets.push(self.slots.gather(order[state.tickets.len()])?);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_read_the_stages_forward_and_back() {
        // own head 0, norm 1, layers 2 and 3, embedding 4
        let own = Order::new(5, 0, 4, 4);
        assert_eq!(own.of(PassKind::Train), [4, 3, 2, 1, 0, 1, 2, 3]);
        assert_eq!(own.of(PassKind::Forward), [4, 3, 2, 1, 0]);
        // norm 0, layers 1 and 2, embedding 3 with the tied head, merger 4, patches 5
        let tied = Order::new(6, 3, 3, 5);
        assert_eq!(tied.of(PassKind::Train), [5, 4, 3, 2, 1, 0, 3, 0, 1, 2, 4, 5]);
        assert_eq!(tied.of(PassKind::Forward), [5, 4, 3, 2, 1, 0, 3]);
        // only the last layer is trained
        assert_eq!(Order::new(5, 0, 4, 2).of(PassKind::Train), [4, 3, 2, 1, 0, 1, 2]);
        // only the own head is trained: backward runs through the norm
        assert_eq!(Order::new(5, 0, 4, 0).of(PassKind::Train), [4, 3, 2, 1, 0, 1]);
        // the main merger is trained: backward runs through the other mergers too
        let vision = Order::new(8, 3, 3, 4);
        assert_eq!(vision.of(PassKind::Train)[9..], [0, 1, 2, 4, 5, 6, 7]);
    }
}
