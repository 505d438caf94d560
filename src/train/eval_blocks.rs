//! Exchanges the scores of an evaluation between ranks.

use super::eval::{EvalReport, SampleScore};
use super::ranks::{Bits, Ranks};
use crate::batch::SampleId;
use crate::data::{Rejection, SampleCounts};
use crate::dist::DistError;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Serialize, Deserialize)]
struct Block {
    samples: Vec<ScoreRecord>,
    rejected: Vec<Rejection>,
}

/// A [`SampleScore`] with all its fields.
#[derive(Serialize, Deserialize)]
struct ScoreRecord {
    file: PathBuf,
    line: u64,
    size: SampleCounts,
    is_chat: bool,
    nll_sum: Bits,
    num_targets: u64,
    target_weight: Bits,
    exact: bool,
}

impl Block {
    /// Adds the targets that another rank has scored.
    fn add(&mut self, other: Self) {
        let sum = |a: Bits, b: Bits| Bits::from(f64::from(a) + f64::from(b));
        for (score, other) in self.samples.iter_mut().zip(other.samples) {
            score.nll_sum = sum(score.nll_sum, other.nll_sum);
            score.num_targets += other.num_targets;
            score.target_weight = sum(score.target_weight, other.target_weight);
            score.exact &= other.exact;
        }
    }
}

impl From<SampleScore> for ScoreRecord {
    fn from(score: SampleScore) -> Self {
        Self {
            file: score.id.file.to_path_buf(),
            line: score.id.line,
            size: score.size,
            is_chat: score.is_chat,
            nll_sum: score.nll_sum.into(),
            num_targets: score.num_targets,
            target_weight: score.target_weight.into(),
            exact: score.exact,
        }
    }
}

impl From<ScoreRecord> for SampleScore {
    fn from(score: ScoreRecord) -> Self {
        Self {
            id: SampleId { file: score.file.into(), line: score.line },
            size: score.size,
            is_chat: score.is_chat,
            nll_sum: score.nll_sum.into(),
            num_targets: score.num_targets,
            target_weight: score.target_weight.into(),
            exact: score.exact,
        }
    }
}

/// Joins the reports of all blocks in the order of the rows. Sequence group `g` of `n` has scored
/// the blocks `g`, `g + n` and so on; each of its ranks has scored its own targets.
pub(super) fn join(own: Vec<EvalReport>, ranks: &Ranks) -> Result<EvalReport, DistError> {
    let block = |EvalReport { samples, rejected }: EvalReport| Block {
        samples: samples.into_iter().map(ScoreRecord::from).collect(),
        rejected,
    };
    let own: Vec<Block> = own.into_iter().map(block).collect();
    let mut groups = Vec::new();
    let mut of_ranks = ranks.gather(own)?.into_iter();
    while let Some(mut blocks) = of_ranks.next() {
        for others in of_ranks.by_ref().take(ranks.sequence().size - 1) {
            blocks.iter_mut().zip(others).for_each(|(block, other)| block.add(other));
        }
        groups.push(blocks.into_iter());
    }
    let num_groups = groups.len();
    let blocks = (0..).map_while(|index: usize| groups[index % num_groups].next());
    let mut all = EvalReport::default();
    for Block { samples, rejected } in blocks {
        all.samples.extend(samples.into_iter().map(SampleScore::from));
        all.rejected.extend(rejected);
    }
    Ok(all)
}
