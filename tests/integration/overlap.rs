//! Ranks exchange gradients and weights while they compute.
//!
//! The tests see the calls of a run to its collective, and the flat gradients at the time of a call.

use super::ranks::{config, place};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use trainer::dist::{Collective, DistError, Exchange, Gather, Group, Reduce, Ticket, threads};
use trainer::metrics::{EvalMetrics, StepMetrics};
use trainer::run::{Run, RunOptions};
use trainer::train::Observer;

/// A call to a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// The sum of the gradients of a stage, by its number in the order of the first calls. `computed`
    /// is the number of later stages with gradients of this step.
    Sum {
        stage: usize,
        ticket: Ticket,
        computed: usize,
    },
    Gather(Ticket),
    Wait(Ticket),
    WaitForAll,
}

/// Makes the calls of a rank, and records them.
struct Recorded {
    sums: Arc<dyn Collective>,
    calls: Mutex<Vec<Call>>,
    /// The flat gradients of the stages in the order of the first calls, and their values at the end
    /// of the step before: the buffers of linear layers keep them until their next product.
    stages: Mutex<Vec<(Tensor, Vec<f32>)>>,
}

impl Recorded {
    fn record(&self, call: Call) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    fn stages(&self) -> MutexGuard<'_, Vec<(Tensor, Vec<f32>)>> {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a stage, and the number of stages after it with gradients of this step.
    fn stage(&self, values: &Tensor) -> (usize, usize) {
        let mut stages = self.stages();
        let known = stages.iter().position(|(stage, _)| stage.id() == values.id());
        let Some(stage) = known else {
            stages.push((values.clone(), Vec::new()));
            return (stages.len() - 1, 0);
        };
        // Other buffers than those of linear layers are zeroed when a step begins.
        let is_computed = |(gradient, before): &&(Tensor, Vec<f32>)| {
            let values = gradient.to_vec1::<f32>().unwrap();
            values.iter().zip(before).any(|(value, before)| *value != 0.0 && value != before)
        };
        (stage, stages[stage + 1..].iter().filter(is_computed).count())
    }

    fn end_step(&self) {
        for (gradient, before) in self.stages().iter_mut() {
            *before = gradient.to_vec1().unwrap();
        }
    }
}

impl Collective for Recorded {
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<Ticket, DistError> {
        self.sums.start_sum(tensors)
    }

    fn start_reduce(&self, reduce: Reduce) -> Result<Ticket, DistError> {
        let (stage, computed) = self.stage(&reduce.values);
        let ticket = self.sums.start_reduce(reduce)?;
        self.record(Call::Sum { stage, ticket, computed });
        Ok(ticket)
    }

    fn start_gather(&self, gather: Gather) -> Result<Ticket, DistError> {
        let ticket = self.sums.start_gather(gather)?;
        self.record(Call::Gather(ticket));
        Ok(ticket)
    }

    fn start_exchange(&self, exchange: Exchange) -> Result<Ticket, DistError> {
        self.sums.start_exchange(exchange)
    }

    fn wait_for(&self, ticket: Ticket) -> Result<(), DistError> {
        self.record(Call::Wait(ticket));
        self.sums.wait_for(ticket)
    }

    fn wait(&self) -> Result<(), DistError> {
        self.record(Call::WaitForAll);
        self.sums.wait()
    }

    fn error(&self) -> Option<DistError> {
        self.sums.error()
    }

    fn finish(&self) -> Result<(), DistError> {
        self.sums.finish()
    }
}

/// Notes how many calls there were at the end of each step.
struct Steps<'a>(&'a Recorded, Vec<usize>);

impl Observer for Steps<'_> {
    fn step(&mut self, _: &StepMetrics, _: u64) {
        self.1.push(self.0.calls.lock().unwrap().len());
        self.0.end_step();
    }

    fn evaluating(&mut self, _: usize, _: usize) {}

    fn evaluated(&mut self, _: &EvalMetrics) {}
}

/// The calls of rank 0 of 2 in the second of two steps, which have a micro-batch per rank.
fn calls(shard: &str) -> Vec<Call> {
    let place = place();
    let shard = format!("distributed.shard={shard}");
    let settings =
        ["train.epochs=null", "train.max_steps=2", "train.gradient_accumulation_steps=2"];
    let own = ["data.eval=[]", "checkpoint.every_steps=0", shard.as_str()];
    let config = config(&place, "run", &[&settings[..], &own].concat());
    let [mut first, second] = <[Group; 2]>::try_from(threads(2).unwrap()).ok().unwrap();
    let (sums, calls, stages) = (first.sums.clone(), Mutex::default(), Mutex::default());
    let recorded = Arc::new(Recorded { sums, calls, stages });
    first.sums = recorded.clone();
    let train = |group: Group, observer: &mut dyn Observer| {
        let mut run = Run::with_group(&config, &RunOptions::default(), Some(group)).unwrap();
        run.train(observer).unwrap();
    };
    let mut steps = Steps(&recorded, Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| train(second, &mut ()));
        train(first, &mut steps);
    });
    let [begin, end] = steps.1[..] else { panic!("{} steps", steps.1.len()) };
    recorded.calls.lock().unwrap()[begin..end].to_vec()
}

#[test]
fn the_sum_of_a_stage_starts_before_the_backward_pass_of_the_next_one() {
    for shard in ["none", "optimizer"] {
        let calls = calls(shard);
        let sums = calls.iter().filter_map(|call| match call {
            Call::Sum { computed, .. } => Some(*computed),
            _ => None,
        });
        let sums: Vec<usize> = sums.collect();
        // The table of a tied head has a gradient from the head from the beginning.
        let early = sums[0];
        assert!(sums.len() > 5 && early <= 1, "{shard}: {sums:?}");
        assert!(sums.iter().all(|computed| *computed <= early), "{shard}: {sums:?}");
        // no wait between the first sum and the last one
        let is_sum = |call: &Call| matches!(call, Call::Sum { .. });
        let first = calls.iter().position(is_sum).unwrap();
        let last = calls.iter().rposition(is_sum).unwrap();
        let is_wait = |call: &&Call| matches!(call, Call::Wait(_) | Call::WaitForAll);
        assert_eq!(calls[first..last].iter().find(is_wait), None, "{shard}");
    }
}

#[test]
fn the_sum_of_a_stage_in_a_shared_buffer_is_waited_for_two_turns_later() {
    let calls = calls("gradients");
    let mut sums = Vec::new();
    let mut num_waits = 0;
    for call in calls {
        match call {
            Call::Sum { ticket, .. } => sums.push(ticket),
            Call::Wait(ticket) => {
                let Some(turn) = sums.iter().position(|sum| *sum == ticket) else { continue };
                num_waits += 1;
                let newer = sums.len() - 1 - turn;
                assert!(newer >= 1, "sum {turn} is waited for before the next one has started");
            }
            Call::WaitForAll if !sums.is_empty() => break, // the end of the step
            _ => {}
        }
    }
    assert!(
        num_waits >= 3 && num_waits + 3 >= sums.len(),
        "{num_waits} waits, {} sums",
        sums.len()
    );
}

#[test]
fn the_weights_of_the_next_stage_are_on_their_way_before_a_stage_is_read() {
    let calls = calls("full");
    let mut gathers: Vec<Ticket> = Vec::new();
    let mut newer_of_waits: BTreeMap<Ticket, usize> = BTreeMap::new();
    for call in &calls {
        match call {
            Call::Gather(ticket) => gathers.push(*ticket),
            Call::Wait(ticket) => {
                if let Some(at) = gathers.iter().position(|gather| gather == ticket) {
                    newer_of_waits.entry(*ticket).or_insert(gathers.len() - 1 - at);
                }
            }
            _ => {}
        }
    }
    let alone: BTreeSet<&Ticket> =
        newer_of_waits.iter().filter(|(_, newer)| **newer == 0).map(|(ticket, _)| ticket).collect();
    // The next stage cannot be gathered at the two turns of a pass, where it has the same slot, and
    // there is none after the last one.
    // A gather that has ended needs no wait, so their number varies with the load of the machine.
    assert!(newer_of_waits.len() > 4, "{calls:?}");
    assert!(alone.len() <= 3, "{} of {} waits: {calls:?}", alone.len(), newer_of_waits.len());
}
