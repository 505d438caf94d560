//! The order in which the gradients of the micro-batches of a step are added up, which is the same
//! for every number of ranks.
//!
//! Micro-batches have numbered slots, and slot `s` belongs to rank `s % world`. Neighbouring slots
//! are added in pairs, then neighbouring pairs, and so on; the sums that are left at the end are
//! added from the last to the first:
//!
//! ```text
//! 6 slots:  ((0 + 1) + (2 + 3)) + (4 + 5)
//! ```
//!
//! With `2^n` ranks, the slots of a *round* (one micro-batch of each rank) are the leaves of one
//! subtree. So ranks add up each round first and then the rounds, by the same rule, and all such
//! worlds compute the same bits. A rank that keeps a share of the gradients keeps shares of sums of
//! rounds only.

/// Number of pairs of sums that are added after the sum `index` (of a slot or a round) is complete.
pub(super) fn pairs_after(index: usize) -> usize {
    index.trailing_ones() as usize
}

/// Number of sums that wait for others while `index` is computed.
pub(super) fn num_open(index: usize) -> usize {
    index.count_ones() as usize
}

/// Number of sums of rounds that are kept at a time, of a step of `rounds` rounds. The last round
/// is added at once.
pub(super) fn num_sums(rounds: usize) -> usize {
    (0..rounds.saturating_sub(1)).map(|round| num_open(round + 1)).max().unwrap_or_default()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The sum by the definition; `None` if all leaves are missing.
    pub(in super::super) fn expected(leaves: &[Option<f32>]) -> Option<f32> {
        let add = |left: Option<f32>, right: Option<f32>| match (left, right) {
            (Some(left), Some(right)) => Some(left + right),
            (left, right) => left.or(right),
        };
        // whole subtrees, the largest first
        let mut rest = leaves;
        let mut sums = Vec::new();
        while !rest.is_empty() {
            let (subtree, others) = rest.split_at(1 << rest.len().ilog2());
            let mut level = subtree.to_vec();
            while level.len() > 1 {
                level = level.chunks(2).map(|pair| add(pair[0], pair[1])).collect();
            }
            sums.push(level[0]);
            rest = others;
        }
        sums.into_iter().rev().reduce(|right, left| add(left, right)).flatten()
    }

    #[test]
    fn few_sums_are_open_at_a_time() {
        for (rounds, sums) in [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 3), (16, 4)] {
            assert_eq!(num_sums(rounds), sums, "{rounds} rounds");
        }
    }
}
