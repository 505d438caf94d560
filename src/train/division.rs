//! What a rank holds of the training state, for predictions of its memory.

use super::gradients::{Buffers, kept_sums};
use super::weights::slot_elements;
use crate::dist::Shard;
use crate::metrics::Division;
use crate::tape::{Bucket, Layout, StageBuckets};

/// The elements that a rank holds if the ranks of a group divide the state as `shard` says. `early`
/// is the stage with the tied head, if there is one. `rounds` is the number of micro-batches of a
/// rank in a step.
pub fn division(
    layout: &Layout,
    (shard, exact): (Shard, bool),
    rounds: usize,
    early: Option<usize>,
) -> Division {
    let stages = layout.stages();
    let share = |bucket: &Bucket| bucket.share_len() as f64;
    let own_trained: f64 = stages.iter().map(|stage| share(&stage.trained)).sum();
    let weights = |of: fn(&Bucket) -> usize| -> f64 {
        stages.iter().flat_map(StageBuckets::buckets).map(|bucket| of(bucket) as f64).sum()
    };
    let buffers = Buffers::new(layout, shard, early);
    let own: usize = buffers.own.iter().map(|stage| stages[*stage].trained.len()).sum();
    let gradients = (own + buffers.slots.iter().sum::<usize>()) as f64;
    Division {
        weights: weights(if shard == Shard::Full { Bucket::share_len } else { Bucket::len }),
        weight_slots: match shard {
            Shard::Full => slot_elements(layout).iter().sum::<usize>() as f64,
            _ => 0.0,
        },
        stored_bytes: 0.0,
        gradients: gradients + kept_sums(rounds, exact, shard) as f64 * own_trained,
        optimizer: if shard >= Shard::Optimizer { own_trained } else { trained_elements(layout) },
    }
}

/// Number of elements of all trained parameters.
fn trained_elements(layout: &Layout) -> f64 {
    let places = layout.stages().iter().flat_map(|stage| stage.trained.places());
    places.map(|(_, place)| place.len() as f64).sum()
}
