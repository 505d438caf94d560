//! What a rank holds of the training state, for predictions of its memory.

use super::gradients::kept_sums;
use crate::dist::Shard;
use crate::metrics::Division;
use crate::tape::{Bucket, Layout, StageBuckets};

/// The elements that a rank holds if the ranks of a group divide the state as `shard` says. `early` is
/// the stage with the tied head, if there is one. `rounds` is the number of micro-batches of a rank in
/// a step.
pub fn division(
    layout: &Layout,
    (shard, exact): (Shard, bool),
    rounds: usize,
    early: Option<usize>,
) -> Division {
    let stages = layout.stages();
    let trained = |stage: usize| stages[stage].trained.len() as f64;
    let all = 0..stages.len();
    let share = |bucket: &Bucket| bucket.share_len() as f64;
    let own_trained: f64 = stages.iter().map(|stage| share(&stage.trained)).sum();
    let weights = |of: fn(&Bucket) -> usize| -> f64 {
        stages.iter().flat_map(StageBuckets::buckets).map(|bucket| of(bucket) as f64).sum()
    };
    let gradients = if shard >= Shard::Gradients {
        let turns: Vec<usize> =
            all.clone().filter(|stage| trained(*stage) > 0.0 && Some(*stage) != early).collect();
        early.map_or(0.0, trained) + largest_of_two(&turns, |turn, _| turn % 2, trained)
    } else {
        all.clone().map(trained).sum()
    };
    let both = |stage: usize| stages[stage].buckets().map(Bucket::len).sum::<usize>() as f64;
    let all: Vec<usize> = all.collect();
    Division {
        weights: weights(if shard == Shard::Full { Bucket::share_len } else { Bucket::len }),
        weight_slots: match shard {
            Shard::Full => largest_of_two(&all, |_, stage| stage % 2, both),
            _ => 0.0,
        },
        gradients: gradients + kept_sums(rounds, exact, shard) as f64 * own_trained,
        optimizer: if shard >= Shard::Optimizer { own_trained } else { weights_trained(layout) },
    }
}

fn weights_trained(layout: &Layout) -> f64 {
    let places = layout.stages().iter().flat_map(|stage| stage.trained.places());
    places.map(|(_, place)| place.len() as f64).sum()
}

/// The elements of two buffers that stages use in turn.
fn largest_of_two(
    stages: &[usize],
    slot: impl Fn(usize, usize) -> usize,
    len: impl Fn(usize) -> f64,
) -> f64 {
    let mut slots = [0.0f64; 2];
    for (turn, stage) in stages.iter().enumerate() {
        let slot = &mut slots[slot(turn, *stage)];
        *slot = slot.max(len(*stage));
    }
    slots.iter().sum()
}
