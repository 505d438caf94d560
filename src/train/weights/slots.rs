//! The weights of a model of which each rank has a share.
//!
//! Two buffers ("slots") hold the weights of two stages: the one in use, and the next one, which is
//! gathered meanwhile. The tensors of all parameters are views of the slots. A parameter that is
//! read makes the weights of its stage present.
//!
//! All ranks must gather the same stages in the same order, but they do not always read the same
//! stages: a batch without images does not use the vision encoder. So the order is fixed, and a
//! rank takes part in the gathers of the stages that it does not read.

use crate::dist::{Collective, DistError, Gather, Ticket};
use crate::tape::{Layout, Param, Residency, slot_lens};
use candle_core::{DType, Device, Result, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a pass over the model reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Pass {
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

pub struct WeightSlots {
    order: Order,
    /// The share of this rank and all weights, for the buckets of each stage.
    buckets: Vec<Vec<(Tensor, Tensor)>>,
    /// For each parameter, the elements that this rank has.
    held: Vec<Vec<(Range<usize>, Tensor)>>,
    collective: Arc<dyn Collective>,
    state: Mutex<GatherState>,
}

#[derive(Default)]
struct GatherState {
    pass: Option<Pass>,
    /// Number of stages of the pass that were read or skipped.
    entered: usize,
    /// The gathers of the pass so far.
    tickets: Vec<Option<Ticket>>, // None: nothing to gather
    /// The stage in each slot, or on its way there, and its gather.
    present: [Option<(usize, Option<Ticket>)>; 2],
    error: Option<DistError>,
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

    fn of(&self, pass: Pass) -> &[usize] {
        match pass {
            Pass::Forward => &self.stages[..=self.head],
            Pass::Train => &self.stages,
        }
    }
}

/// The shares of a rank, and the places of the parameters in two slots.
pub struct SlotTensors {
    /// The share of this rank and all weights, for the buckets of each stage.
    pub buckets: Vec<Vec<(Tensor, Tensor)>>,
}

impl SlotTensors {
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

impl WeightSlots {
    /// Gathers the weights of `tensors` with `collective`, and becomes the home of `params`.
    /// `table` is the parameter of the token embedding.
    pub fn new(
        layout: &Layout,
        member: usize,
        tensors: SlotTensors,
        (params, head, table): (&[Param], &Param, &Param),
        collective: Arc<dyn Collective>,
    ) -> Result<Arc<Self>> {
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
        let SlotTensors { buckets } = tensors;
        let state = Mutex::default();
        let slots = Arc::new(Self { order, buckets, held, collective, state });
        for param in params {
            let home: Arc<dyn Residency> = Arc::<Self>::clone(&slots);
            param.set_home(layout.stage_of(param), home)?;
        }
        Ok(slots)
    }

    /// The elements of a parameter that this rank has.
    pub(in super::super) fn held(&self, param: &Param) -> Vec<(Range<usize>, Tensor)> {
        self.held[param.index()].clone()
    }

    fn state(&self) -> MutexGuard<'_, GatherState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that all weights have changed.
    pub(super) fn forget(&self) {
        self.state().present = [None; 2];
    }

    pub(super) fn begin(&self, pass: Pass) {
        let mut state = self.state();
        (state.pass, state.entered) = (Some(pass), 0);
        state.tickets.clear();
    }

    pub(super) fn pass(&self, stage: usize) {
        let mut state = self.state();
        let Some(pass) = state.pass else { return };
        let of_stage = |order: &[usize]| order.iter().rposition(|of| *of == stage);
        let position = of_stage(self.order.of(pass)).filter(|at| *at >= self.order.head);
        if let Some(position) = position {
            self.advance(&mut state, pass, position);
        }
    }

    pub(super) fn end(&self) -> std::result::Result<(), DistError> {
        let mut state = self.state();
        if let Some(pass) = state.pass.take() {
            self.advance(&mut state, pass, self.order.of(pass).len() - 1);
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Takes part in all gathers up to `position` of the pass, and starts the next one.
    fn advance(&self, state: &mut GatherState, pass: Pass, position: usize) {
        let order = self.order.of(pass);
        while state.entered <= position && state.error.is_none() {
            let at = state.entered;
            state.entered += 1;
            let next = (at + 1).min(order.len() - 1);
            // The next stage can be gathered now if it does not replace the weights in use.
            let end = if slot_of(order[next]) == slot_of(order[at]) { at } else { next };
            while state.tickets.len() <= end && state.error.is_none() {
                self.gather(state, order[state.tickets.len()]);
            }
        }
    }

    /// Starts the gather of a stage, unless it is present.
    fn gather(&self, state: &mut GatherState, stage: usize) {
        let slot = slot_of(stage);
        if let Some((present, ticket)) = state.present[slot]
            && present == stage
        {
            state.tickets.push(ticket); // an earlier pass may not have waited for it
            return;
        }
        let mut last = None;
        for (own, all) in &self.buckets[stage] {
            let gather = Gather { own: Some(own.clone()), all: all.clone() };
            match self.collective.start_gather(gather) {
                Ok(ticket) => last = Some(ticket),
                Err(error) => state.error = Some(error),
            }
        }
        state.present[slot] = Some((stage, last));
        state.tickets.push(last);
    }
}

impl Residency for WeightSlots {
    fn enter(&self, stage: usize) -> Result<()> {
        let mut state = self.state();
        // A read outside of a pass is a bug: the slots may have the weights of another stage.
        let pass =
            state.pass.expect("weights that are divided among ranks are read in a pass only");
        let order = self.order.of(pass);
        if state.entered > 0 && order[state.entered - 1] == stage {
            return Ok(());
        }
        let Some(ahead) = order[state.entered..].iter().position(|of| *of == stage) else {
            let problem = format!("the weights of stage {stage} were read out of order");
            state.error.get_or_insert(DistError::Collective { operation: "a gather", problem });
            return Ok(());
        };
        let position = state.entered + ahead;
        self.advance(&mut state, pass, position);
        if let Some(Some(ticket)) = state.tickets.get(position).copied()
            && let Err(error) = self.collective.wait_for(ticket)
        {
            state.error.get_or_insert(error);
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
        assert_eq!(own.of(Pass::Train), [4, 3, 2, 1, 0, 1, 2, 3]);
        assert_eq!(own.of(Pass::Forward), [4, 3, 2, 1, 0]);
        // norm 0, layers 1 and 2, embedding 3 with the tied head, merger 4, patches 5
        let tied = Order::new(6, 3, 3, 5);
        assert_eq!(tied.of(Pass::Train), [5, 4, 3, 2, 1, 0, 3, 0, 1, 2, 4, 5]);
        assert_eq!(tied.of(Pass::Forward), [5, 4, 3, 2, 1, 0, 3]);
        // only the last layer is trained
        assert_eq!(Order::new(5, 0, 4, 2).of(Pass::Train), [4, 3, 2, 1, 0, 1, 2]);
        // only the own head is trained: backward runs through the norm
        assert_eq!(Order::new(5, 0, 4, 0).of(Pass::Train), [4, 3, 2, 1, 0, 1]);
        // the main merger is trained: backward runs through the other mergers too
        let vision = Order::new(8, 3, 3, 4);
        assert_eq!(vision.of(Pass::Train)[9..], [0, 1, 2, 4, 5, 6, 7]);
    }
}
