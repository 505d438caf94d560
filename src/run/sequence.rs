//! Ranks that compute the same micro-batches, each a part of the tokens (`distributed.sequence`).

use super::error::RunError;
use super::load_model::OpenModel;
use crate::config::RunConfig;
use crate::dist::SequenceAttention;
use crate::train::Ranks;
use std::sync::Arc;

/// Checks that the micro-batches of a step can be divided evenly among `world` ranks.
pub(crate) fn check_world(config: &RunConfig, world: usize) -> Result<(), RunError> {
    let sequence = config.distributed.sequence.get();
    if !world.is_multiple_of(sequence) {
        return Err(RunError::SequenceWorld { sequence, world });
    }
    let slots = config.train.gradient_accumulation_steps.get();
    let groups = world / sequence;
    if slots.is_multiple_of(groups) {
        return Ok(());
    }
    let fits = |groups: &usize| slots.is_multiple_of(*groups);
    let below = (1..groups).rev().find(fits).map(|groups| groups * sequence);
    let above = (groups + 1..=slots).find(fits).map(|groups| groups * sequence);
    Err(RunError::World { world, sequence, slots, below, above })
}

/// Checks that `sequence` ranks can share the heads of the decoder's attention and linear attention
/// evenly.
pub(super) fn check_heads(open: &OpenModel, sequence: usize) -> Result<(), RunError> {
    let text = open.text();
    // The numbers of query heads and of value heads are multiples of these.
    let mut heads = vec![(text.num_key_value_heads, "key-value heads")];
    if let Some(hybrid) = &text.hybrid {
        heads.push((hybrid.num_key_heads, "key heads of linear attention"));
    }
    let fits = |size: &usize| heads.iter().all(|(heads, _)| heads.is_multiple_of(*size));
    if fits(&sequence) {
        return Ok(());
    }
    let fitting = (1..=heads[0].0).filter(fits).collect();
    let heads = heads.iter().map(|(number, name)| format!("{number} {name}")).collect();
    Err(RunError::SequenceHeads { sequence, heads, fitting })
}

/// Makes the ranks of a sequence group share the heads of the decoder's attention and linear
/// attention. Fails if they cannot share them evenly.
pub(super) fn share_attention(open: &mut OpenModel, ranks: &Ranks) -> Result<(), RunError> {
    let sequence = ranks.sequence();
    check_heads(open, sequence.size)?;
    if let Some(collective) = ranks.collective().filter(|_| sequence.size > 1) {
        open.wrap_attention(|inner| Arc::new(SequenceAttention::new(inner, collective, sequence)));
    }
    Ok(())
}
