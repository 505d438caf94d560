//! The tokens that truncation removed from a sample, at their original places.

use crate::data::{DroppedTokens, KeptEnd};
use std::ops::Range;

/// A piece of a sample before truncation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'a, R> {
    /// A run of tokens of the truncated sample.
    Kept(R, Range<usize>),
    /// Removed tokens.
    Cut(&'a [u32]),
}

/// The runs of the truncated sample with the dropped tokens between them. A run is split where
/// tokens were dropped inside it.
pub(super) fn pieces<R: Copy>(
    runs: Vec<(R, Range<usize>)>,
    dropped: &[DroppedTokens],
) -> Vec<Piece<'_, R>> {
    let mut pieces = Vec::with_capacity(runs.len() + dropped.len());
    let mut dropped = dropped.iter().peekable();
    for (run, mut range) in runs {
        while let Some(cut) = dropped.next_if(|cut| cut.before < range.end) {
            if range.start < cut.before {
                pieces.push(Piece::Kept(run, range.start..cut.before));
                range.start = cut.before;
            }
            pieces.push(Piece::Cut(&cut.ids));
        }
        pieces.push(Piece::Kept(run, range));
    }
    pieces.extend(dropped.map(|cut| Piece::Cut(&cut.ids)));
    pieces
}

/// Number of dropped tokens.
pub(super) fn num_tokens(dropped: &[DroppedTokens]) -> usize {
    dropped.iter().map(|cut| cut.ids.len()).sum()
}

/// The side at which truncation removes text: `left` or `right`, as in `data.truncation`.
pub(super) fn side(keep: KeptEnd) -> &'static str {
    match keep {
        KeptEnd::Beginning => "right",
        KeptEnd::End => "left",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_tokens_return_to_their_places() {
        let runs = vec![('a', 0..3), ('b', 3..5), ('a', 5..6)];
        let cut = |before, id| DroppedTokens { before, ids: vec![id] };
        let dropped = [cut(0, 7), cut(2, 8), cut(3, 9), cut(6, 10)];
        let expected = [
            Piece::Cut(&[7]),
            Piece::Kept('a', 0..2),
            Piece::Cut(&[8]),
            Piece::Kept('a', 2..3),
            Piece::Cut(&[9]),
            Piece::Kept('b', 3..5),
            Piece::Kept('a', 5..6),
            Piece::Cut(&[10]),
        ];
        assert_eq!(pieces(runs.clone(), &dropped), expected);
        assert_eq!(num_tokens(&dropped), 4);
        let whole = runs.iter().map(|(run, range)| Piece::Kept(*run, range.clone()));
        assert_eq!(pieces(runs.clone(), &[]), whole.collect::<Vec<_>>());
    }
}
