//! Loss and exact answers on held-out rows.
//!
//! An answer is exact if each of its tokens is the most likely one after the tokens before it, so
//! that greedy decoding would produce it. One forward pass computes both.

use super::datasets::{DatasetLoss, by_dataset};
use super::ranks::Ranks;
use super::sequence::own_part;
use super::step_result::SampleResult;
use super::weights::RankWeights;
use crate::batch::{EncodedSample, Pack, PaddingSide};
use crate::data::{DatasetRows, collate};
use crate::data::{Rejection, RowReader, SampleCounts, SampleIndex, TransientRowError};
use crate::dist::{DistError, Rank};
use crate::loss::{TargetLosses, scores};
use crate::models::Model;
use crate::train::TrainError;
use candle_core::{DType, Device};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleScore {
    pub result: SampleResult,
    /// Whether it is a chat. Samples of a corpus have no answer.
    pub is_chat: bool,
    /// Whether greedy decoding produces every supervised token.
    pub exact: bool,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct EvalReport {
    pub samples: Vec<SampleScore>,
    /// Rows that could not be scored.
    pub rejected: Vec<Rejection>,
}

impl EvalReport {
    /// Weighted mean over all supervised targets; 0 without targets.
    pub fn loss(&self) -> f64 {
        let sum: f64 = self.results().map(|sample| sample.nll_sum).sum();
        let weight: f64 = self.results().map(|sample| sample.target_weight).sum();
        if self.num_targets() == 0 { 0.0 } else { sum / weight }
    }

    pub fn num_targets(&self) -> u64 {
        self.results().map(|sample| u64::from(sample.size.num_targets)).sum()
    }

    pub fn by_dataset(&self, num_datasets: usize) -> Vec<DatasetLoss> {
        by_dataset(num_datasets, self.results())
    }

    fn results(&self) -> impl Iterator<Item = &SampleResult> {
        self.samples.iter().map(|sample| &sample.result)
    }

    /// The samples that are chats.
    pub fn chats(&self) -> impl Iterator<Item = &SampleScore> {
        self.samples.iter().filter(|sample| sample.is_chat)
    }

    /// Fraction of chats whose answers are exact; `None` without chats.
    pub fn accuracy(&self) -> Option<f64> {
        let (total, exact) = (self.chats().count(), self.chats().filter(|chat| chat.exact).count());
        (total > 0).then(|| exact as f64 / total as f64)
    }

    /// Joins the reports of all blocks in the order of the rows. Sequence group `g` of `n` has
    /// scored the blocks `g`, `g + n` and so on; each of its ranks has scored its own targets.
    fn join(own: Vec<Self>, ranks: &Ranks) -> Result<Self, DistError> {
        let mut groups = Vec::new();
        let mut of_ranks = ranks.gather(own)?.into_iter();
        while let Some(mut blocks) = of_ranks.next() {
            for others in of_ranks.by_ref().take(ranks.sequence().size - 1) {
                blocks.iter_mut().zip(&others).for_each(|(block, other)| block.add(other));
            }
            groups.push(blocks.into_iter());
        }
        let num_groups = groups.len();
        let mut all = Self::default();
        for block in (0..).map_while(|index: usize| groups[index % num_groups].next()) {
            all.samples.extend(block.samples);
            all.rejected.extend(block.rejected);
        }
        Ok(all)
    }

    /// Adds the targets that another rank has scored.
    fn add(&mut self, other: &Self) {
        for (score, other) in self.samples.iter_mut().zip(&other.samples) {
            score.result.add(&other.result);
            score.exact &= other.exact;
        }
    }
}

/// Scores rows in packs of at most `max_tokens`. Sequence groups share the rows, and the ranks of a
/// group share each pack.
pub struct Evaluator<'a> {
    pub rows: &'a DatasetRows,
    /// Maximum number of tokens of one forward pass; a longer sample is scored alone.
    pub max_tokens: usize,
    pub dtype: DType,
    pub device: &'a Device,
    /// The ranks that share the rows; each returns the whole report.
    pub ranks: &'a Ranks,
    /// How the weights are divided among the ranks.
    pub weights: &'a RankWeights,
}

/// Number of rows that are encoded in parallel: enough for all cores, few enough for the memory.
const ROWS_AT_A_TIME: usize = 8;
/// Number of rows that one sequence group scores at a time. No pack has rows of two blocks, so that
/// packs do not depend on the number of ranks.
const BLOCK_ROWS: usize = 32;

impl Evaluator<'_> {
    /// Scores every row; `progress` receives the number of rows done.
    pub fn run(&self, model: &Model, progress: &dyn Fn(usize)) -> Result<EvalReport, TrainError> {
        let report = self.run_until(model, &|| false, progress)?;
        Ok(report.expect("nothing stops this evaluation"))
    }

    /// Scores every row, unless `stop` returns `true` on a rank: then all ranks return `None`.
    pub fn run_until(
        &self,
        model: &Model,
        stop: &dyn Fn() -> bool,
        progress: &dyn Fn(usize),
    ) -> Result<Option<EvalReport>, TrainError> {
        let rows: Vec<SampleIndex> = self.rows.rows().collect();
        let Rank { rank, world, .. } = self.ranks.sequence_group();
        // The ranks of a sequence group compute each pack together, so they stop at the same block.
        // If they also gather weights for each pack, they do not stop in between.
        let stops_here = || match self.ranks.sequence().size {
            1 => Ok(stop()),
            _ if self.weights.are_whole() => {
                self.ranks.gather(stop()).map(|all| all.contains(&true))
            }
            _ => Ok(false),
        };
        // Within a block, a rank may stop only if no other one computes or gathers with it.
        let alone = self.ranks.sequence().size == 1 && self.weights.are_whole();
        let stop_in_block = || alone && stop();
        let all: Vec<_> = rows.chunks(BLOCK_ROWS).enumerate().collect();
        let mut blocks = Vec::new();
        for round in all.chunks(world) {
            if stops_here()? {
                break;
            }
            if let Some((index, block)) = round.get(rank) {
                let before = index * BLOCK_ROWS;
                let progress = |done| progress(before + done);
                blocks.push(self.score_block(model, block, &stop_in_block, &progress)?);
            }
        }
        self.weights.take_part(self.ranks)?; // another rank may have more rows
        if self.ranks.gather(stop())?.contains(&true) {
            return Ok(None);
        }
        progress(rows.len());
        Ok(Some(EvalReport::join(blocks, self.ranks)?))
    }

    /// Scores the rows of one block, or the first of them if `stop` returns `true`.
    fn score_block(
        &self,
        model: &Model,
        rows: &[SampleIndex],
        stop: &dyn Fn() -> bool,
        progress: &dyn Fn(usize),
    ) -> Result<EvalReport, TrainError> {
        let mut report = EvalReport::default();
        let mut pack: Vec<(SampleIndex, EncodedSample)> = Vec::new();
        let mut pack_tokens = 0;
        for (done, chunk) in rows.chunks(ROWS_AT_A_TIME).enumerate() {
            if stop() {
                return Ok(report); // all ranks return no result
            }
            self.ranks.report("evaluation");
            let encoded: Result<Vec<_>, TransientRowError> =
                chunk.par_iter().map(|row| self.rows.read_patiently(*row)).collect();
            for (row, sample) in chunk.iter().zip(encoded?) {
                match sample {
                    Err(rejection) => report.rejected.push(rejection),
                    Ok(sample) => {
                        if !pack.is_empty() && pack_tokens + sample.len() > self.max_tokens {
                            self.score(model, std::mem::take(&mut pack), &mut report)?;
                            pack_tokens = 0;
                        }
                        pack_tokens += sample.len();
                        pack.push((*row, sample));
                    }
                }
            }
            progress((done * ROWS_AT_A_TIME + chunk.len()).min(rows.len()));
        }
        self.score(model, pack, &mut report)?;
        Ok(report)
    }

    fn score(
        &self,
        model: &Model,
        samples: Vec<(SampleIndex, EncodedSample)>,
        report: &mut EvalReport,
    ) -> Result<(), TrainError> {
        if samples.is_empty() {
            return Ok(());
        }
        let sizes: Vec<_> =
            samples.iter().map(|(row, sample)| SampleCounts::of(*row, sample)).collect();
        let samples = samples.into_iter().map(|(_, sample)| sample).collect();
        let merge = model.merge_size();
        let packs = vec![Pack { samples }];
        let batch = collate(packs, 0, PaddingSide::Right, merge)?.unpad()?; // one row: no padding
        let (batch, own) = own_part(batch, self.ranks.sequence(), merge);
        let targets = &own.targets;
        let input = model.upload(batch, self.dtype, self.device)?;
        let scores = self.weights.inference(self.ranks, |pass| {
            let hidden = model.hidden(&input, pass)?;
            Ok(scores(&hidden, model.lm_head(), targets, pass)?)
        })?;
        let (mut next, mut end) = (0, 0); // targets ascend, as samples do
        for size in sizes {
            let first = next;
            end += size.num_tokens as usize;
            while next < targets.len() && own.row(next) < end {
                next += 1;
            }
            let range = first..next;
            let losses = TargetLosses {
                nll: scores.nll[range.clone()].to_vec(),
                weights: targets.weights.as_ref().map(|weights| weights[range.clone()].to_vec()),
            };
            let is_whole = self.ranks.sequence().size == 1;
            debug_assert!(!is_whole || range.len() == size.num_targets as usize);
            report.samples.push(SampleScore {
                result: SampleResult {
                    size,
                    nll_sum: losses.sum(),
                    target_weight: losses.pairs().map(|(_, weight)| weight).sum(),
                },
                is_chat: self.rows.sets()[size.dataset as usize].corpus().is_none(),
                exact: scores.argmax[range.clone()] == targets.ids[range],
            });
        }
        Ok(())
    }
}
