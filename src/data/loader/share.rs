//! The part of a loader when several ranks share each step.
//!
//! Every rank plans all steps and reads only the samples of its own micro-batches. Then the ranks
//! exchange which rows were rejected, so that a row that one rank cannot read is left out by all.

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::data::row::{Rejection, SampleSize};
use crate::dist::{DistError, Lane, Rank, gather};

/// The connection of a loader to those of the other ranks.
pub struct LoaderShare {
    /// The place of this rank.
    pub rank: Rank,
    /// Used by the loader alone.
    pub lane: Box<dyn Lane>,
}

/// The rows of one step that a rank has read.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RowsRead {
    /// Position in the epoch and reason of each row that was rejected.
    pub(super) rejected: Vec<(u64, Rejection)>,
    /// Counts of the samples, in order.
    pub(super) sizes: Vec<SampleSize>,
    /// The row that ends the run (`data.on_error: stop`).
    pub(super) failed: Option<Rejection>,
}

/// The rows of one step that all ranks have read.
pub(super) struct RowsOfAll {
    pub(super) rejected: Vec<Rejection>,
    /// Positions of the rejected rows.
    pub(super) without: BTreeSet<u64>,
    pub(super) sizes: Vec<SampleSize>,
    /// The part of `sizes` that this rank has read.
    pub(super) own: Range<usize>,
    pub(super) failed: Option<Rejection>,
}

/// The slots of a step's micro-batches that this rank reads.
pub(super) fn own_slots(share: Option<&LoaderShare>, num_slots: usize) -> Range<usize> {
    share.map_or(Rank::ALONE, |share| share.rank).own(num_slots)
}

/// Exchanges the rows of a step with the other ranks.
pub(super) fn exchange(
    share: Option<&mut LoaderShare>,
    read: RowsRead,
) -> Result<RowsOfAll, DistError> {
    let (rank, all) = match share {
        Some(share) => (share.rank.rank, gather(&mut *share.lane, &read)?),
        None => (0, vec![read]),
    };
    let mut rows = RowsOfAll {
        rejected: Vec::new(),
        without: BTreeSet::new(),
        sizes: Vec::new(),
        own: 0..0,
        failed: None,
    };
    for (of, RowsRead { rejected, sizes, failed }) in all.into_iter().enumerate() {
        for (position, rejection) in rejected {
            rows.without.insert(position);
            rows.rejected.push(rejection);
        }
        let start = rows.sizes.len();
        rows.sizes.extend(sizes);
        if of == rank {
            rows.own = start..rows.sizes.len();
        }
        rows.failed = rows.failed.or(failed);
    }
    Ok(rows)
}
