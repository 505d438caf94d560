//! The tensors of a checkpoint, with the parts of them that this rank has.

use super::step::StepRunner;
use super::weights::RankWeights;
use crate::checkpoint::SavedTensor;
use crate::tape::Param;
use candle_core::{Result, Tensor};
use std::ops::Range;

/// Elements of a flat tensor, and their values.
type HeldPart = (Range<usize>, Tensor);

/// The weights that checkpoints contain, with their names there.
pub(super) fn saved_weights(runner: &StepRunner) -> Result<Vec<SavedTensor>> {
    let saved = |(param, name): (&Param, &Option<String>)| {
        let name = name.clone()?;
        Some(match &runner.weights {
            RankWeights::Slots(slots) => divided(slots.held(param), runner)
                .map(|held| SavedTensor::parts(name, param.shape().dims(), param.dtype(), held)),
            _ => param.stored().map(|weight| SavedTensor::whole(name, weight)),
        })
    };
    runner.params.iter().zip(&runner.saved_names).filter_map(saved).collect()
}

/// The state of the optimizer: `exp_avg.<parameter>` and so on.
pub(super) fn saved_optimizer(runner: &StepRunner) -> Result<Vec<SavedTensor>> {
    let mut saved = Vec::new();
    for (param, kinds) in runner.optimizer.kinds() {
        let states = || {
            let states = runner.optimizer.states().iter();
            states.filter(|state| state.param.index() == param.index())
        };
        for kind in kinds {
            let name = format!("{}.{}", kind.name, param.name());
            let held = states().filter_map(|state| {
                Some((kind.elements(&state.elements), state.tensor(kind.name)?.clone()))
            });
            let shape = kind.shape(&param.shape());
            saved.push(if matches!(runner.weights, RankWeights::Whole) {
                let whole = held.map(|(_, values)| values.reshape(&shape));
                SavedTensor::whole(name, whole.collect::<Result<Vec<_>>>()?.remove(0))
            } else {
                let held = divided(held.collect(), runner)?;
                SavedTensor::parts(name, shape.dims(), kind.dtype, held)
            });
        }
    }
    Ok(saved)
}

/// The part of `held` that this rank writes: shard groups have the same state and divide the work.
fn divided(held: Vec<HeldPart>, runner: &StepRunner) -> Result<Vec<HeldPart>> {
    let (group, num_groups) = runner.ranks.group();
    let part = |(elements, values): HeldPart| {
        let len = elements.len();
        let (start, end) = (len * group / num_groups, len * (group + 1) / num_groups);
        let values = values.flatten_all()?.narrow(0, start, end - start)?;
        Ok((elements.start + start..elements.start + end, values))
    };
    held.into_iter().map(part).collect()
}
