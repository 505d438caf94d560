//! The tensors of a checkpoint, with the parts of them that this rank has.

use super::step::StepRunner;
use super::weights::RankWeights;
use crate::checkpoint::SavedTensor;
use crate::tape::Param;
use candle_core::{Device, Result, Tensor};
use std::collections::HashSet;
use std::ops::Range;

/// Elements of a flat tensor, and their values.
type HeldPart = (Range<usize>, Tensor);

/// How checkpoints contain a parameter.
#[derive(Debug, Clone)]
pub struct SavedAs {
    /// Name of the tensor.
    pub name: String,
    /// Constants that the tensor also contains.
    pub joined: Option<Joined>,
}

/// Constants in the tensor of a parameter.
#[derive(Debug, Clone)]
pub struct Joined {
    /// Rows, each of which follows as many elements of the parameter; on the CPU.
    pub values: Tensor,
    /// Shape of the tensor, which has twice the elements of the parameter.
    pub shape: Vec<usize>,
}

impl Joined {
    /// The part of the tensor that belongs to a part of the parameter: a row of constants to the last
    /// element of the row before it.
    fn with(&self, (range, values): HeldPart) -> Result<HeldPart> {
        let width = self.values.dim(1)?;
        let place = |element: usize| element / width * 2 * width + element % width;
        let (first, last) = (range.start / width, range.end.div_ceil(width));
        let joined = place(range.start)..place(range.end);
        let values = values.flatten_all()?.to_device(&Device::Cpu)?;
        let (before, after) = (range.start - first * width, last * width - range.end);
        let rows = values.pad_with_zeros(0, before, after)?.reshape((last - first, width))?;
        let rows = Tensor::cat(&[&rows, &self.values.narrow(0, first, last - first)?], 1)?;
        let part =
            rows.flatten_all()?.narrow(0, joined.start - place(first * width), joined.len())?;
        Ok((joined, part))
    }
}

/// The weights that checkpoints contain.
pub(super) fn saved_weights(runner: &StepRunner) -> Result<Vec<SavedTensor>> {
    let trained: HashSet<usize> = runner.optimizer.trained().iter().map(Param::index).collect();
    let saved = |(param, saved): (&Param, &Option<SavedAs>)| {
        let SavedAs { name, joined } = saved.clone()?;
        let shape = joined.as_ref().map_or(param.shape().dims().to_vec(), |of| of.shape.clone());
        let join = |held: HeldPart| joined.as_ref().map_or(Ok(held.clone()), |of| of.with(held));
        let tensor = match &runner.weights {
            RankWeights::Slots(slots) => {
                let held = divided(slots.held(param), runner);
                let held = held.and_then(|held| held.into_iter().map(join).collect());
                held.map(|held| SavedTensor::parts(name, &shape, param.dtype(), held))
            }
            _ => param.stored().and_then(|weight| {
                let (_, weight) = join((0..weight.elem_count(), weight))?;
                Ok(SavedTensor::whole(name, weight.reshape(shape)?))
            }),
        };
        let is_fixed = !trained.contains(&param.index());
        Some(tensor.map(|tensor| if is_fixed { tensor.fixed() } else { tensor }))
    };
    runner.params.iter().zip(&runner.saved_as).filter_map(saved).collect()
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
