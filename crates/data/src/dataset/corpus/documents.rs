//! Divides a token stream into documents by their separators.

use batch::{EncodedSample, IGNORE_INDEX, SampleId};

/// Ids that separate documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Separators {
    /// Id that ends a document; `None` if only `bos` separates documents.
    pub(super) eos: Option<u32>,
    /// Id that starts a document; `None` if only `eos` separates documents.
    pub(super) bos: Option<u32>,
}

impl Separators {
    /// Returns whether a document starts at `id`, which follows `before`.
    pub(super) fn separate(self, before: u32, id: u32) -> bool {
        self.eos == Some(before) || self.bos == Some(id)
    }

    /// Converts a span of tokens, `[T]`, to a sample. Each document in it is a segment with
    /// positions from 0, and every token except the first of a segment is a target.
    pub(super) fn sample(self, id: SampleId, ids: Vec<u32>) -> EncodedSample {
        let mut labels: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
        let mut position_ids = Vec::with_capacity(ids.len());
        let mut start = 0;
        for at in 0..ids.len() {
            if at == 0 || self.separate(ids[at - 1], ids[at]) {
                start = at;
                labels[at] = IGNORE_INDEX;
            }
            position_ids.push([(at - start) as u32; 3]);
        }
        EncodedSample {
            weights: None,
            id,
            input_ids: ids,
            labels,
            position_ids,
            vision_rows: Vec::new(),
            media: Vec::new(),
        }
    }
}

/// Pieces of the documents of a stream: whole documents, or parts of a limited number of tokens.
///
/// A piece starts with the last token of the piece before, so that every token of a document except
/// its first is a target exactly once.
#[derive(Debug)]
pub(super) struct Pieces {
    /// Maximum number of tokens of a piece; `None` does not split documents.
    at_most: Option<u32>,
    /// Number of pieces before each document, and in total, `[documents + 1]`. Empty if documents
    /// are not split.
    before: Vec<u32>,
}

impl Pieces {
    /// Splits documents of these `lengths` into pieces of at most `at_most` tokens, which must be
    /// above 1. Returns `None` if there are more than `u32::MAX` pieces.
    pub(super) fn new(lengths: impl Iterator<Item = u32>, at_most: Option<u32>) -> Option<Self> {
        let mut before = Vec::new();
        if let Some(at_most) = at_most {
            let mut total = 0u32;
            before.push(0);
            for length in lengths {
                total = total.checked_add((length - 1).div_ceil(at_most - 1).max(1))?;
                before.push(total);
            }
        }
        Some(Self { at_most, before })
    }

    /// Number of pieces; `documents` is the number of documents.
    pub(super) fn len(&self, documents: usize) -> usize {
        self.before.last().map_or(documents, |pieces| *pieces as usize)
    }

    /// Returns the document of a piece, and the index of its first token in that document.
    pub(super) fn place(&self, piece: u32) -> (usize, u32) {
        match self.at_most {
            None => (piece as usize, 0),
            Some(at_most) => {
                let document = self.before.partition_point(|before| *before <= piece) - 1;
                (document, (piece - self.before[document]) * (at_most - 1))
            }
        }
    }

    /// Number of tokens of the piece that starts at token `start` of a document of `length` tokens.
    pub(super) fn tokens(&self, length: u32, start: u32) -> u32 {
        (length - start).min(self.at_most.unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::collate;
    use batch::{Pack, PaddingSide};

    const EOS: Separators = Separators { eos: Some(0), bos: None };
    const BOS: Separators = Separators { eos: None, bos: Some(1) };
    const BOTH: Separators = Separators { eos: Some(0), bos: Some(1) };

    fn sample(separators: Separators, ids: &[u32]) -> EncodedSample {
        let id = SampleId { file: Path::new("a.txt").into(), line: 1 };
        separators.sample(id, ids.to_vec())
    }

    #[test]
    fn a_document_ends_after_an_eos_and_begins_at_a_bos() {
        for (separators, ids, lengths) in [
            (EOS, &[5, 6, 0, 7, 8, 0][..], &[3, 3][..]),
            (EOS, &[5, 6, 0, 7], &[3, 1]),
            (EOS, &[0, 7, 8], &[1, 2]), // starts with the end of the document before
            (EOS, &[5, 6], &[2]),
            (EOS, &[5, 1, 6], &[3]), // without `bos`, id 1 is an ordinary token
            (BOS, &[1, 5, 1, 6, 7], &[2, 3]),
            (BOS, &[5, 6, 1], &[2, 1]),
            (BOTH, &[1, 5, 0, 1, 6, 0], &[3, 3]),
            (BOTH, &[1, 5, 0, 6], &[3, 1]),
        ] {
            let sample = sample(separators, ids);
            assert_eq!(sample.segment_lengths(), lengths, "{ids:?}");
            let positions: Vec<u32> = lengths.iter().flat_map(|length| 0..*length).collect();
            let found: Vec<u32> = sample.position_ids.iter().map(|axes| axes[0]).collect();
            assert_eq!(found, positions, "{ids:?}");
            for (at, label) in sample.labels.iter().enumerate() {
                let expected = if positions[at] == 0 { IGNORE_INDEX } else { i64::from(ids[at]) };
                assert_eq!(*label, expected, "token {at} of {ids:?}");
            }
        }
    }

    #[test]
    fn pieces_of_a_document_share_one_token() {
        // documents of 1, 2, 5 and 6 tokens in pieces of at most 3
        let lengths = [1u32, 2, 5, 6];
        let pieces = Pieces::new(lengths.into_iter(), Some(3)).unwrap();
        let expected =
            [(0, 0, 1), (1, 0, 2), (2, 0, 3), (2, 2, 3), (3, 0, 3), (3, 2, 3), (3, 4, 2)];
        assert_eq!(pieces.len(4), expected.len());
        for (piece, expected) in (0..).zip(expected) {
            let (document, start) = pieces.place(piece);
            let tokens = pieces.tokens(lengths[document], start);
            assert_eq!((document, start, tokens), expected);
        }
        let whole = Pieces::new(lengths.into_iter(), None).unwrap();
        assert_eq!((whole.len(4), whole.place(3), whole.tokens(6, 0)), (4, (3, 0), 6));
        assert!(Pieces::new([u32::MAX; 3].into_iter(), Some(2)).is_none());
    }

    /// Element (`i`, `j`) of the dense attention mask `[B * L, B * L]`, computed from the ids:
    /// whether token `i` attends to token `j`. Both are (row, place).
    fn dense(
        rows: &[Vec<u32>],
        separators: Separators,
        i: (usize, usize),
        j: (usize, usize),
    ) -> bool {
        let starts_document = |at: usize| {
            let ids = &rows[i.0];
            separators.eos == Some(ids[at - 1]) || separators.bos == Some(ids[at])
        };
        i.0 == j.0 && j.1 <= i.1 && !(j.1 + 1..=i.1).any(starts_document)
    }

    proptest! {
        #[test]
        fn segment_boundaries_of_a_batch_equal_the_dense_mask(
            rows in prop::collection::vec(prop::collection::vec(0u32..5, 1..12), 1..5),
            kind in 0usize..3,
        ) {
            let separators = [EOS, BOS, BOTH][kind];
            let packs = rows.iter().map(|ids| Pack { samples: vec![sample(separators, ids)] });
            let merge = NonZeroU32::MIN;
            let batch = collate(packs.collect(), 3, PaddingSide::Right, merge).unwrap();
            let stream = batch.unpad().unwrap();
            let mut segment_of = vec![0; stream.num_tokens];
            for (index, segment) in stream.cu_seqlens.segments().enumerate() {
                segment_of[segment].fill(index);
            }
            let places: Vec<(usize, usize)> = rows.iter().enumerate()
                .flat_map(|(row, ids)| (0..ids.len()).map(move |at| (row, at))).collect();
            prop_assert_eq!(places.len(), stream.num_tokens);
            for (i, to) in places.iter().enumerate() {
                for (j, from) in places.iter().enumerate() {
                    let attends = j <= i && segment_of[i] == segment_of[j];
                    prop_assert_eq!(attends, dense(&rows, separators, *to, *from));
                }
            }
        }

        #[test]
        fn each_token_of_a_document_except_its_first_is_a_target_once(
            lengths in prop::collection::vec(1u32..60, 1..20), at_most in 2u32..20,
        ) {
            let pieces = Pieces::new(lengths.iter().copied(), Some(at_most)).unwrap();
            let mut targets: Vec<Vec<u32>> =
                lengths.iter().map(|length| vec![0; *length as usize]).collect();
            for piece in 0..pieces.len(lengths.len()) as u32 {
                let (document, start) = pieces.place(piece);
                let tokens = pieces.tokens(lengths[document], start);
                prop_assert!(tokens >= 1 && tokens <= at_most);
                for at in start + 1..start + tokens {
                    targets[document][at as usize] += 1;
                }
            }
            for document in targets {
                prop_assert_eq!(document[0], 0);
                prop_assert!(document[1..].iter().all(|times| *times == 1));
            }
        }
    }
}
