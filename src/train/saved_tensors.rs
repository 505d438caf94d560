//! The tensors of a checkpoint, with the parts of them that this rank has.

use super::step::StepRunner;
use super::weights::WeightDivision;
use crate::checkpoint::SavedTensor;
use crate::optim::{MASTER, StateKind};
use crate::tape::Param;
use candle_core::{DType, Device, Result, Tensor};
use std::collections::HashSet;
use std::ops::Range;

/// Elements of a flat tensor, and their values.
type HeldPart = (Range<usize>, Tensor);

#[derive(Debug, Clone)]
pub struct SavedAs {
    pub name: String,
    /// Names and shapes of the tensors that have its elements instead; empty: there is one tensor.
    pub pieces: Vec<(String, Vec<usize>)>,
    /// Name under which the tensor is stored a second time.
    pub twin: Option<String>,
    /// Constants that the tensor also contains.
    pub joined: Option<JoinedConstants>,
    /// Whether the tensor is in `f32` whatever the compute dtype is.
    pub in_f32: bool,
    /// The tensor of the model folder in `f32`, for a frozen parameter with `in_f32`.
    pub original: Option<SavedTensor>,
}

/// Constants in the tensor of a parameter.
#[derive(Debug, Clone)]
pub struct JoinedConstants {
    /// Rows, each of which follows as many elements of the parameter; on the CPU.
    pub values: Tensor,
    /// Shape of the tensor, which has twice the elements of the parameter.
    pub shape: Vec<usize>,
}

impl JoinedConstants {
    /// The part of the tensor that belongs to a part of the parameter: a row of constants to the
    /// last element of the row before it.
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
        let SavedAs { name, joined, in_f32, original, .. } = saved.clone()?;
        if in_f32 && param.dtype() != DType::F32 {
            let frozen = original.filter(|_| !trained.contains(&param.index()));
            return Some(frozen.map_or_else(|| saved_in_f32(runner, param, name), Ok));
        }
        let shape = joined.as_ref().map_or(param.shape().dims().to_vec(), |of| of.shape.clone());
        let join = |held: HeldPart| joined.as_ref().map_or(Ok(held.clone()), |of| of.with(held));
        let tensor = match &runner.weights.division {
            WeightDivision::Sharded(slots) => {
                let held = divided(slots.held(param), runner);
                let held = held.and_then(|held| held.into_iter().map(join).collect());
                held.map(|held| SavedTensor::parts(name, &shape, param.dtype(), held))
            }
            _ => runner.weights.saved(param).and_then(|weight| {
                let (_, weight) = join((0..weight.elem_count(), weight))?;
                Ok(SavedTensor::whole(name, weight.reshape(shape)?))
            }),
        };
        let is_fixed = !trained.contains(&param.index());
        Some(tensor.map(|tensor| if is_fixed { tensor.fixed() } else { tensor }))
    };
    let mut weights = Vec::new();
    for of in runner.params.iter().zip(&runner.saved_as) {
        let Some(tensor) = saved(of).transpose()? else { continue };
        match of.1 {
            Some(SavedAs { pieces, .. }) if !pieces.is_empty() => {
                weights.extend(tensor.split(pieces)?);
            }
            Some(SavedAs { twin: Some(twin), .. }) => {
                weights.push(tensor.clone());
                weights.push(tensor.named(twin));
            }
            _ => weights.push(tensor),
        }
    }
    weights.extend(runner.kept.iter().cloned());
    Ok(weights)
}

/// A weight in `f32`: the master weight, or the weight in the compute dtype if there is none.
fn saved_in_f32(runner: &StepRunner, param: &Param, name: String) -> Result<SavedTensor> {
    let kinds = runner.optimizer.kinds().find(|(trained, _)| trained.index() == param.index());
    let master = kinds.and_then(|(_, kinds)| kinds.iter().find(|kind| kind.name == MASTER));
    if let Some(master) = master {
        return saved_state(runner, param, master, name);
    }
    if let WeightDivision::Sharded(slots) = &runner.weights.division {
        let wide = |(range, values): HeldPart| Ok((range, values.to_dtype(DType::F32)?));
        let held = divided(slots.held(param), runner)?.into_iter().map(wide);
        let (held, shape) = (held.collect::<Result<_>>()?, param.shape());
        return Ok(SavedTensor::parts(name, shape.dims(), DType::F32, held));
    }
    let weight = runner.weights.saved(param)?.to_dtype(DType::F32)?;
    Ok(SavedTensor::whole(name, weight.reshape(param.shape())?))
}

/// The state of the optimizer: `exp_avg.<parameter>` and so on.
pub(super) fn saved_optimizer(runner: &StepRunner) -> Result<Vec<SavedTensor>> {
    let mut saved = Vec::new();
    for (param, kinds) in runner.optimizer.kinds() {
        for kind in kinds {
            let name = format!("{}.{}", kind.name, param.name());
            saved.push(saved_state(runner, param, kind, name)?);
        }
    }
    Ok(saved)
}

/// A state tensor of a parameter.
fn saved_state(
    runner: &StepRunner,
    param: &Param,
    kind: &StateKind,
    name: String,
) -> Result<SavedTensor> {
    let states = runner.optimizer.states().iter();
    let states = states.filter(|state| state.param.index() == param.index());
    let held = states.filter_map(|state| {
        Some((kind.elements(&state.elements), state.tensor(kind.name)?.clone()))
    });
    let shape = kind.shape(&param.shape());
    if matches!(runner.weights.division, WeightDivision::Whole) {
        let whole = held.map(|(_, values)| values.reshape(&shape));
        return Ok(SavedTensor::whole(name, whole.collect::<Result<Vec<_>>>()?.remove(0)));
    }
    let held = divided(held.collect(), runner)?;
    Ok(SavedTensor::parts(name, shape.dims(), kind.dtype, held))
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
