//! The choices of the routers in a step: the load of the experts, and the auxiliary loss.

use super::ranks::Ranks;
use super::sequence::OwnTargets;
use super::step::StepRunner;
use crate::batch::VarlenBatch;
use crate::models::ModelInput;
use crate::nn::Routers;
use crate::tape::{DropoutPlace, Pass, Recorded, RouterChoices, RouterLog};
use crate::train::TrainError;
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(super) struct StepRouters {
    /// What the routers chose for the micro-batches of this rank, with their slots.
    own: Vec<(usize, Vec<RouterChoices>)>,
    /// The choices of the whole step, if they are known already.
    all: Option<StepChoices>,
}

/// What the routers chose for all tokens of a step, over all micro-batches and ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepChoices {
    /// Number of choices of each expert, by layer.
    counts: Vec<Vec<u64>>,
    /// Sums of the probabilities of each expert over all layers; empty without an auxiliary loss.
    probabilities: Vec<f64>,
    experts_per_token: usize,
}

impl StepRunner {
    /// Whether the auxiliary loss is a part of the loss of a step.
    pub(super) fn has_aux_loss(&self) -> bool {
        self.aux_loss > 0.0 && self.model.routers().is_some()
    }

    /// Prepares the routers for a step. Its auxiliary loss depends on the choices for all of its
    /// tokens, so if there are several micro-batches or ranks, each micro-batch first runs forward
    /// once without a tape. `inputs` are the first micro-batch of this rank and the others; `place`
    /// is that of the dropout.
    pub(super) fn begin_routers(
        &self,
        targets: &[(usize, OwnTargets)],
        (first, rest): (Option<&ModelInput>, &[(usize, VarlenBatch)]),
        rounds: usize,
        place: &dyn Fn(&usize, &OwnTargets) -> Option<DropoutPlace>,
    ) -> Result<StepRouters, TrainError> {
        let is_alone = rounds == 1 && self.ranks.rank().world == 1;
        let Some(routers) = self.model.routers().filter(|_| self.has_aux_loss() && !is_alone)
        else {
            return Ok(StepRouters::default());
        };
        let mut of_step = StepRouters::default();
        for round in 0..rounds {
            let batch = targets.get(round);
            if !self.weights.any_has_work(&self.ranks, batch.is_some())? {
                continue;
            }
            let own = self.weights.forward_pass(&self.ranks, |pass| {
                let Some((slot, targets)) = batch else { return Ok(None) };
                let later = round.checked_sub(1).and_then(|at| rest.get(at));
                let later = later.map(|(_, batch)| self.upload(batch.clone())).transpose()?;
                let Some(input) = later.as_ref().or(first) else { return Ok(None) };
                let (dropout, log) =
                    (place(slot, targets), RouterLog::new(Recorded::Probabilities));
                let (dropout, router_log) = (dropout.as_ref(), Some(&log));
                self.model.hidden(input, &Pass { dropout, router_log, ..*pass })?;
                Ok(Some((*slot, log.into_choices())))
            })?;
            of_step.own.extend(own);
        }
        let all = of_step.gather(routers, &self.ranks)?;
        Ok(StepRouters { all: Some(all), ..of_step })
    }

    /// The log of a micro-batch's forward pass; `None` if there is nothing to record, or if it is
    /// known already.
    pub(super) fn router_log(&self, of_step: &StepRouters) -> Option<RouterLog> {
        let is_open = self.model.routers().is_some() && of_step.all.is_none();
        let has_aux_loss = self.has_aux_loss();
        let recorded = if has_aux_loss { Recorded::Probabilities } else { Recorded::Choices };
        is_open.then(|| RouterLog::new(recorded))
    }

    /// Adds the choices of the micro-batch in `slot`.
    pub(super) fn add_choices(
        &self,
        slot: usize,
        log: RouterLog,
        of_step: &mut StepRouters,
    ) -> Result<(), TrainError> {
        of_step.own.push((slot, log.into_choices()));
        if let Some(routers) = self.model.routers().filter(|_| self.has_aux_loss()) {
            // the only micro-batch of the step
            of_step.all = Some(of_step.gather(routers, &self.ranks)?);
        }
        Ok(())
    }

    /// The slopes of the auxiliary loss; `None` if it is no part of the loss.
    pub(super) fn router_slopes(
        &self,
        of_step: &StepRouters,
    ) -> candle_core::Result<Option<Tensor>> {
        let all = of_step.all.as_ref().filter(|_| self.has_aux_loss());
        all.map(|all| Tensor::new(all.slopes(self.aux_loss), &self.device)).transpose()
    }

    /// The choices of a step on all ranks; `None` without experts. Waits for a GPU.
    pub(super) fn choices(&self, of_step: &StepRouters) -> Result<Option<StepChoices>, TrainError> {
        let Some(routers) = self.model.routers() else { return Ok(None) };
        let all = of_step.all.clone();
        all.map_or_else(|| of_step.gather(routers, &self.ranks), Ok).map(Some)
    }
}

impl StepRouters {
    /// The choices of all ranks. Waits for a GPU.
    fn gather(&self, routers: Routers, ranks: &Ranks) -> Result<StepChoices, TrainError> {
        let read =
            |(slot, choices): &(_, Vec<_>)| Ok((*slot, StepChoices::read(choices, routers)?));
        let own = self.own.iter().map(read).collect::<candle_core::Result<Vec<_>>>()?;
        let mut all: Vec<(usize, StepChoices)> = ranks.gather(own)?.into_iter().flatten().collect();
        all.sort_by_key(|(slot, _)| *slot); // stable: ranks of a sequence group share a slot
        let mut sum = StepChoices::none(routers);
        for (_, choices) in &all {
            sum.add(choices);
        }
        Ok(sum)
    }
}

impl StepChoices {
    fn none(routers: Routers) -> Self {
        Self {
            counts: vec![vec![0; routers.num_experts]; routers.num_layers],
            probabilities: Vec::new(),
            experts_per_token: routers.experts_per_token,
        }
    }

    /// The choices for a micro-batch.
    fn read(choices: &[RouterChoices], routers: Routers) -> candle_core::Result<Self> {
        let mut read = Self::none(routers);
        let offsets: Vec<&Tensor> = choices.iter().map(|choices| &choices.offsets).collect();
        if offsets.is_empty() {
            return Ok(read);
        }
        let offsets = Tensor::stack(&offsets, 0)?.to_vec2::<u32>()?; // one copy from a GPU for all layers
        for (of, offsets) in choices.iter().zip(offsets) {
            read.counts[of.layer] =
                offsets.windows(2).map(|ends| u64::from(ends[1] - ends[0])).collect();
        }
        let sums: Vec<&Tensor> =
            choices.iter().filter_map(|choices| choices.probabilities.as_ref()).collect();
        if !sums.is_empty() {
            let sums = Tensor::stack(&sums, 0)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            for layer in sums.to_vec2()? {
                add(&mut read.probabilities, &layer);
            }
        }
        Ok(read)
    }

    fn add(&mut self, other: &Self) {
        for (sums, counts) in self.counts.iter_mut().zip(&other.counts) {
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        add(&mut self.probabilities, &other.probabilities);
    }

    /// Number of choices of each expert over all layers, divided by the square of the number of
    /// tokens times layers, times the number of experts.
    fn shares(&self) -> Vec<f64> {
        let experts = self.counts.first().map_or(0, Vec::len);
        let sum = |expert: usize| self.counts.iter().map(|layer| layer[expert]).sum::<u64>() as f64;
        let sums: Vec<f64> = (0..experts).map(sum).collect();
        let tokens = sums.iter().sum::<f64>() / self.experts_per_token as f64;
        sums.into_iter().map(|sum| experts as f64 * sum / tokens.max(1.0).powi(2)).collect()
    }

    /// The derivatives of `factor` times the auxiliary loss by the sums of the probabilities.
    fn slopes(&self, factor: f64) -> Vec<f32> {
        self.shares().into_iter().map(|share| (factor * share) as f32).collect()
    }

    /// The auxiliary loss; `None` if the probabilities are not known.
    pub fn aux_loss(&self) -> Option<f64> {
        let products = self.shares().into_iter().zip(&self.probabilities);
        let loss = products.map(|(share, sum)| share * sum).sum();
        (!self.probabilities.is_empty()).then_some(loss)
    }

    /// The largest load of an expert over the mean load of its layer, in the layer where it is
    /// largest.
    pub fn load(&self) -> f64 {
        let of_layer = |counts: &Vec<u64>| {
            let (largest, sum) = (counts.iter().max().copied(), counts.iter().sum::<u64>());
            largest.unwrap_or(0) as f64 * counts.len() as f64 / sum.max(1) as f64
        };
        self.counts.iter().map(of_layer).fold(0.0, f64::max)
    }

    /// The share of the experts of all layers that computed no token.
    pub fn idle(&self) -> f64 {
        let all = self.counts.iter().flatten();
        all.clone().filter(|count| **count == 0).count() as f64 / all.count().max(1) as f64
    }

    /// The keys of `metrics.jsonl`.
    pub(super) fn metrics(&self) -> BTreeMap<String, Value> {
        let mut metrics = BTreeMap::from([
            ("expert_load".to_owned(), self.load().into()),
            ("experts_idle".to_owned(), self.idle().into()),
        ]);
        metrics.extend(self.aux_loss().map(|loss| ("aux_loss".to_owned(), loss.into())));
        metrics
    }
}

/// Adds to the sums of the probabilities, which are empty at first.
fn add(sums: &mut Vec<f64>, probabilities: &[f64]) {
    sums.resize(probabilities.len().max(sums.len()), 0.0);
    sums.iter_mut().zip(probabilities).for_each(|(sum, p)| *sum += p);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_even_load_has_the_loss_k_and_an_uneven_one_more() {
        let even = StepChoices {
            counts: vec![vec![4; 6]; 2], // 12 tokens, 2 experts each
            probabilities: vec![4.0; 6],
            experts_per_token: 2,
        };
        assert!((even.aux_loss().unwrap() - 2.0).abs() < 1e-12);
        assert_eq!((even.load(), even.idle()), (1.0, 0.0));
        let uneven = StepChoices {
            counts: vec![vec![12, 12, 0, 0, 0, 0], vec![4; 6]],
            probabilities: vec![8.0, 8.0, 2.0, 2.0, 2.0, 2.0],
            ..even
        };
        assert!(uneven.aux_loss().unwrap() > 2.1);
        assert_eq!((uneven.load(), uneven.idle()), (3.0, 4.0 / 12.0));
        let without = StepChoices { probabilities: Vec::new(), ..uneven };
        assert_eq!(without.aux_loss(), None);
        assert_eq!(without.metrics().len(), 2);
    }

    #[test]
    fn the_slopes_are_the_derivatives_of_the_loss() {
        let mut choices = StepChoices {
            counts: vec![vec![5, 3, 0, 4], vec![1, 1, 9, 1]],
            probabilities: vec![2.0, 4.0, 3.0, 3.0],
            experts_per_token: 2,
        };
        let (slopes, before) = (choices.slopes(0.5), choices.aux_loss().unwrap());
        choices.probabilities[2] += 0.25;
        let change = 0.5 * (choices.aux_loss().unwrap() - before) / 0.25;
        assert!((change - f64::from(slopes[2])).abs() < 1e-6, "{change} {slopes:?}");
    }
}
