//! Frozen weights that are not kept on the device in the compute dtype.
//!
//! The weights of a stage are stored in host memory, or in NF4. When one of them is read, those of
//! the stage are copied or dequantised into one of two slots. Neighbouring stages have different
//! slots, and a stage that is still present is not copied again. Other parameters keep their own
//! tensors: those that are trained, and tables, norms and biases.
//!
//! Passes read the stages from the last to the first and back. A read of a stage also starts to
//! copy its neighbour in this direction from host memory to the other slot, while the stage
//! computes. If another stage is read next, the run is slower and its results are the same.

use super::prefetch::Prefetch;
use crate::metrics::Division;
use crate::ops::{Nf4, nf4_bytes};
use crate::tape::{Param, slot_lens};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

/// Elements between the starts of two weights in a slot: kernels read aligned weights faster.
const ALIGNMENT: usize = 64;

/// Where the weights of linear layers are kept while no stage uses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightStorage {
    /// On the device, in the compute dtype.
    #[default]
    Device,
    /// In host memory, in the compute dtype.
    Host,
    /// On the device, in NF4.
    Nf4,
}

#[derive(Debug, Clone)]
pub enum StoredWeight {
    /// In host memory, in the compute dtype.
    Host(Tensor),
    /// In NF4, on the device.
    Nf4(Nf4),
}

/// Frozen weights that are stored elsewhere and copied to two slots.
pub struct StoredWeights {
    /// Copies from host memory; `None`: no weight is stored there. Dropped before the slots, since
    /// the last copies to them may still be in progress.
    prefetch: Option<Prefetch>,
    /// By stage.
    weights: Vec<Vec<SlotWeight>>,
    slots: Vec<usize>, // by stage
    /// Stage and place in it, by the index of a parameter.
    places: BTreeMap<usize, (usize, usize)>,
    /// The stages that have weights here.
    stages: Vec<usize>,
    state: Mutex<CopyState>,
}

#[derive(Debug)]
struct CopyState {
    /// The stage in each slot, or on its way there, and the number of its copy until it was waited
    /// for.
    present: [Option<(usize, Option<u64>)>; 2],
    /// The place in `stages` of the stage that was read last.
    last: Option<usize>,
    /// Whether the next stage to be read is probably the one before it.
    backwards: bool,
}

impl Default for CopyState {
    fn default() -> Self {
        Self { present: [None; 2], last: None, backwards: true } // as forward passes read them
    }
}

struct SlotWeight {
    stored: StoredWeight,
    place: Tensor,
}

/// The device memory of weights that are stored elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredMemory {
    /// Number of elements of all of them.
    pub elements: usize,
    /// Number of elements of the slots, in the compute dtype.
    pub slots: usize,
    pub stored_bytes: usize,
}

impl StoredMemory {
    /// Memory of the process if frozen weights use slots, from `division` without slots.
    pub fn of(self, division: Division) -> Division {
        Division {
            weights: division.weights - self.elements as f64,
            weight_slots: division.weight_slots + self.slots as f64,
            stored_bytes: self.stored_bytes as f64,
            ..division
        }
    }
}

pub fn stored_memory(
    stages: &[Vec<&Param>],
    is_stored: &[bool],
    storage: WeightStorage,
) -> StoredMemory {
    let places = SlotPlaces::new(stages, is_stored);
    let sizes =
        || stages.iter().flatten().filter(|param| is_stored[param.index()]).map(|param| len(param));
    let stored_bytes = match storage {
        WeightStorage::Nf4 => sizes().map(nf4_bytes).sum(),
        WeightStorage::Device | WeightStorage::Host => 0,
    };
    StoredMemory { elements: sizes().sum(), slots: places.slot_lens.iter().sum(), stored_bytes }
}

fn len(param: &Param) -> usize {
    param.shape().elem_count()
}

struct SlotPlaces {
    /// By stage: index and first element of each weight.
    starts: Vec<Vec<(usize, usize)>>,
    /// By stage.
    slots: Vec<usize>,
    slot_lens: [usize; 2],
}

impl SlotPlaces {
    fn new(stages: &[Vec<&Param>], is_stored: &[bool]) -> Self {
        let (mut starts, mut slots, mut lens, mut num_stages) = (vec![], vec![], vec![], 0);
        for stage in stages {
            let (mut end, mut of_stage) = (0, Vec::new());
            for param in stage.iter().filter(|param| is_stored[param.index()]) {
                of_stage.push((param.index(), end));
                end = (end + len(param)).next_multiple_of(ALIGNMENT);
            }
            slots.push(num_stages % 2);
            num_stages += usize::from(end > 0);
            lens.push(end);
            starts.push(of_stage);
        }
        let slot_lens = slot_lens(slots.iter().copied().zip(lens));
        Self { starts, slots, slot_lens }
    }
}

impl StoredWeights {
    /// Allocates slots on `device` for the weights of `stored`, which has them by the indexes of
    /// their parameters.
    pub fn install(
        stages: &[Vec<&Param>],
        params: &[Param],
        mut stored: HashMap<usize, StoredWeight>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let is_stored: Vec<bool> =
            (0..params.len()).map(|index| stored.contains_key(&index)).collect();
        let SlotPlaces { starts, slots, slot_lens: [first, second] } =
            SlotPlaces::new(stages, &is_stored);
        let buffers = [Tensor::zeros(first, dtype, device)?, Tensor::zeros(second, dtype, device)?];
        let (mut weights, mut places) = (Vec::with_capacity(stages.len()), BTreeMap::new());
        for (stage, starts) in starts.iter().enumerate() {
            let mut of_stage = Vec::with_capacity(starts.len());
            for (index, start) in starts {
                let param = &params[*index];
                let place = buffers[slots[stage]].narrow(0, *start, len(param))?;
                param.set_tensor(place.reshape(param.shape())?)?;
                if let Some(stored) = stored.remove(index) {
                    places.insert(*index, (stage, of_stage.len()));
                    of_stage.push(SlotWeight { stored, place });
                }
            }
            weights.push(of_stage);
        }
        let is_on_host = |weight: &SlotWeight| matches!(weight.stored, StoredWeight::Host(_));
        let num_on_host = weights.iter().flatten().filter(|weight| is_on_host(weight)).count();
        if num_on_host > 0 && num_on_host < places.len() {
            // Both would be written to one slot at the same time.
            candle_core::bail!("some stored weights are on the host and some in NF4");
        }
        let prefetch = (num_on_host > 0).then(|| Prefetch::new(device));
        let (prefetch, state) = (prefetch.transpose()?, Mutex::default());
        let stages = (0..stages.len()).filter(|stage| !weights[*stage].is_empty()).collect();
        places.keys().try_for_each(|index| params[*index].set_elsewhere())?;
        Ok(Self { prefetch, weights, slots, places, stages, state })
    }
}

impl StoredWeights {
    /// Starts to bring the weights of a stage into its slot.
    fn bring(&self, state: &mut CopyState, stage: usize) -> Result<()> {
        let (slot, mut copies, mut quantized) = (self.slots[stage], Vec::new(), Vec::new());
        state.present[slot] = None; // until all weights are there, or on their way
        for SlotWeight { stored, place } in &self.weights[stage] {
            match stored {
                StoredWeight::Host(weight) => copies.push((weight.clone(), place.clone())),
                StoredWeight::Nf4(weight) => quantized.push((weight, place)),
            }
        }
        Nf4::dequantize_all(&quantized)?;
        let copy = self.prefetch.as_ref().map(|prefetch| prefetch.start(slot, copies));
        state.present[slot] = Some((stage, copy.transpose()?));
        Ok(())
    }

    /// Waits until the weights of a stage are in its slot.
    fn wait(&self, state: &mut CopyState, stage: usize) -> Result<()> {
        let slot = self.slots[stage];
        if let (Some((_, Some(copy))), Some(prefetch)) = (state.present[slot], &self.prefetch) {
            state.present[slot] = None;
            prefetch.wait(copy, slot)?;
            state.present[slot] = Some((stage, None));
        }
        Ok(())
    }

    /// The stage that is probably read after `stage`.
    fn next(&self, state: &mut CopyState, stage: usize) -> Option<usize> {
        let at = self.stages.binary_search(&stage).ok()?;
        if let Some(last) = state.last.replace(at)
            && last != at
        {
            state.backwards = at < last;
        }
        let neighbour = |backwards: bool| {
            let place = if backwards { at.checked_sub(1)? } else { at + 1 };
            self.stages.get(place)
        };
        let next = neighbour(state.backwards);
        state.backwards ^= next.is_none(); // a pass turns, or the next one begins
        next.or_else(|| neighbour(state.backwards)).copied()
    }
}

impl StoredWeights {
    /// Whether the weight of `param` is stored here.
    pub(super) fn has(&self, param: &Param) -> bool {
        self.places.contains_key(&param.index())
    }

    /// The weight of `param`, in its slot.
    pub(super) fn weight(&self, param: &Param) -> Result<Tensor> {
        if let Some((stage, _)) = self.places.get(&param.index()) {
            self.enter(*stage)?;
        }
        Ok(param.buffer())
    }

    /// Brings the weights of a stage into its slot, and starts to bring those of the next one.
    fn enter(&self, stage: usize) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_present = |state: &CopyState, stage: usize| {
            state.present[self.slots[stage]].is_some_and(|(present, _)| present == stage)
        };
        if !is_present(&state, stage) {
            self.bring(&mut state, stage)?;
        }
        self.wait(&mut state, stage)?;
        // Values in NF4 are computed on the stream of the tensors, so nothing would be gained.
        if self.prefetch.is_some()
            && let Some(next) = self.next(&mut state, stage)
            && !is_present(&state, next)
        {
            self.bring(&mut state, next)?;
        }
        Ok(())
    }

    /// The weight of `param` for a checkpoint; `None` if it is not stored here. The slots stay as
    /// they are.
    pub fn saved(&self, param: &Param) -> Result<Option<Tensor>> {
        let Some((stage, at)) = self.places.get(&param.index()) else { return Ok(None) };
        let SlotWeight { stored, place } = &self.weights[*stage][*at];
        match stored {
            StoredWeight::Host(weight) => Ok(Some(weight.clone())),
            StoredWeight::Nf4(weight) => {
                let values = place.zeros_like()?;
                weight.dequantize_into(&values)?;
                Ok(Some(values.reshape(param.shape())?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three stages of two matrices each, the first ones of which are stored elsewhere.
    fn model() -> (Vec<Param>, Vec<bool>) {
        let sizes = [(2, 3), (1, 2), (3, 30), (2, 2), (1, 5), (4, 1)];
        let param = |(index, (m, k))| {
            let weight = Tensor::zeros((m, k), DType::F32, &Device::Cpu).unwrap();
            Param::new(format!("p{index}"), index, weight)
        };
        let params = sizes.into_iter().enumerate().map(param).collect();
        (params, (0..6).map(|index| index % 2 == 0).collect())
    }

    fn stages(params: &[Param]) -> Vec<Vec<&Param>> {
        params.chunks(2).map(|stage| stage.iter().collect()).collect()
    }

    /// A tensor on the host with the value `index + 1`.
    fn on_host(param: &Param) -> StoredWeight {
        let value = param.index() as f32 + 1.0;
        StoredWeight::Host(Tensor::full(value, param.shape(), &Device::Cpu).unwrap())
    }

    fn install(params: &[Param], is_stored: &[bool]) -> StoredWeights {
        let stored = params.iter().filter(|param| is_stored[param.index()]);
        let stored = stored.map(|param| (param.index(), on_host(param))).collect();
        let stages = stages(params);
        StoredWeights::install(&stages, params, stored, DType::F32, &Device::Cpu).unwrap()
    }

    /// The weight of `param` as a pass reads it.
    fn read(weights: &StoredWeights, param: &Param) -> Vec<f32> {
        let has = weights.has(param);
        assert!(has != param.tensor().is_ok());
        let weight = if has { weights.weight(param) } else { param.tensor() };
        weight.unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn a_weight_that_is_read_is_in_its_slot_and_the_others_stay_as_they_are() {
        let (params, is_stored) = model();
        let weights = install(&params, &is_stored);
        for stage in [0, 1, 2, 1, 0, 0, 2] {
            let [stored, kept] = [&params[2 * stage], &params[2 * stage + 1]];
            let expected = vec![2.0 * stage as f32 + 1.0; stored.shape().elem_count()];
            assert_eq!(read(&weights, stored), expected);
            assert_eq!(read(&weights, kept), vec![0.0; kept.shape().elem_count()]);
        }
    }

    /// The stages in the slots, or on their way there.
    fn present(weights: &StoredWeights) -> Vec<usize> {
        let present = weights.state.lock().unwrap().present;
        let mut stages: Vec<usize> = present.iter().flatten().map(|(stage, _)| *stage).collect();
        stages.sort_unstable();
        stages
    }

    #[test]
    fn a_stage_that_is_present_is_not_copied_again() {
        let (params, is_stored) = model();
        let weights = install(&params, &is_stored);
        read(&weights, &params[0]);
        read(&weights, &params[2]); // in the other slot
        let weight = params[2].buffer();
        weight.slice_set(&Tensor::full(9f32, (3, 30), &Device::Cpu).unwrap(), 0, 0).unwrap();
        read(&weights, &params[4]); // in the slot of the first
        assert_eq!(read(&weights, &params[2]), [9.0; 90]);
        assert_eq!(read(&weights, &params[0]), [1.0; 6]);
    }

    #[test]
    fn the_stage_that_a_pass_reads_next_is_brought_while_one_is_in_use() {
        let sizes = [(2, 3), (1, 1), (4, 4), (1, 1), (3, 3), (1, 1), (2, 2), (1, 1)];
        let param = |(index, (m, k))| {
            let weight = Tensor::zeros((m, k), DType::F32, &Device::Cpu).unwrap();
            Param::new(format!("p{index}"), index, weight)
        };
        let params: Vec<Param> = sizes.into_iter().enumerate().map(param).collect();
        let weights = install(&params, &[true, false].repeat(4));
        for _ in 0..3 {
            // forward and back, as recomputation reads a stage twice
            for (stage, expected) in [
                (3, [2, 3]),
                (2, [1, 2]),
                (1, [0, 1]),
                (0, [0, 1]),
                (0, [0, 1]),
                (1, [1, 2]),
                (1, [1, 2]),
                (2, [2, 3]),
                (3, [2, 3]),
            ] {
                let stored = &params[2 * stage];
                let values = vec![2.0 * stage as f32 + 1.0; stored.shape().elem_count()];
                assert_eq!(read(&weights, stored), values);
                assert_eq!(present(&weights), expected, "after stage {stage}");
            }
        }
    }

    #[test]
    fn a_checkpoint_has_the_stored_weight_although_another_stage_is_in_the_slot() {
        let (params, is_stored) = model();
        let weights = install(&params, &is_stored);
        read(&weights, &params[4]);
        let stored = weights.saved(&params[0]).unwrap().unwrap().flatten_all().unwrap();
        assert_eq!(stored.to_vec1::<f32>().unwrap(), [1.0; 6]);
        assert_eq!(read(&weights, &params[4]), [5.0; 5]);
    }

    #[test]
    fn slots_have_the_size_of_the_largest_stages_and_nf4_an_eighth_of_f32() {
        let (params, is_stored) = model();
        let memory = |storage| stored_memory(&stages(&params), &is_stored, storage);
        let expected = StoredMemory { elements: 6 + 90 + 5, slots: 64 + 128, stored_bytes: 0 };
        assert_eq!(memory(WeightStorage::Host), expected);
        let bytes = (3 + 1 + 4) + (45 + 2 + 4) + (3 + 1 + 4);
        assert_eq!(memory(WeightStorage::Nf4).stored_bytes, bytes);
    }

    #[test]
    fn a_weight_that_cannot_be_copied_is_an_error_of_the_pass_that_reads_it() {
        for (elements, is_copied) in [(4, true), (5, false)] {
            let stored =
                StoredWeight::Host(Tensor::zeros(elements, DType::F32, &Device::Cpu).unwrap());
            let (params, _) = model();
            let (stages, stored) = (stages(&params), [(3, stored)].into()); // of the shape [2, 2]
            let dtype = DType::F32;
            let weights =
                StoredWeights::install(&stages, &params, stored, dtype, &Device::Cpu).unwrap();
            assert_eq!(weights.weight(&params[3]).is_ok(), is_copied);
        }
    }
}
