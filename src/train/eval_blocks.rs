//! Exchanges the scores of an evaluation between ranks.

use super::eval::{EvalReport, SampleScore};
use super::ranks::{Bits, Ranks};
use crate::batch::SampleId;
use crate::data::{Rejection, SampleSize};
use crate::dist::DistError;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The scores of one block of rows.
#[derive(Serialize, Deserialize)]
struct Block {
    samples: Vec<Score>,
    rejected: Vec<Rejection>,
}

/// A [`SampleScore`] with all its fields.
#[derive(Serialize, Deserialize)]
struct Score {
    file: PathBuf,
    line: u64,
    size: SampleSize,
    is_chat: bool,
    nll_sum: Bits,
    num_targets: u64,
    target_weight: Bits,
    exact: bool,
}

impl From<SampleScore> for Score {
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

impl From<Score> for SampleScore {
    fn from(score: Score) -> Self {
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

/// Joins the reports of all blocks in the order of the rows. Rank `r` of `world` has scored the blocks
/// `r`, `r + world` and so on.
pub(super) fn join(own: Vec<EvalReport>, ranks: &Ranks) -> Result<EvalReport, DistError> {
    let block = |EvalReport { samples, rejected }: EvalReport| Block {
        samples: samples.into_iter().map(Score::from).collect(),
        rejected,
    };
    let own: Vec<Block> = own.into_iter().map(block).collect();
    let mut of_ranks: Vec<_> = ranks.gather(own)?.into_iter().map(Vec::into_iter).collect();
    let world = of_ranks.len();
    let blocks = (0..).map_while(|index: usize| of_ranks[index % world].next());
    let mut all = EvalReport::default();
    for Block { samples, rejected } in blocks {
        all.samples.extend(samples.into_iter().map(SampleScore::from));
        all.rejected.extend(rejected);
    }
    Ok(all)
}
