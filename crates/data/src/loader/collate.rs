//! Joins packs into the padded batch `[B, L]`.
//!
//! Shapes: `B` rows, one per pack; `L` tokens of the longest pack; `M` merged vision tokens.

use std::num::NonZeroU32;

use batch::{Batch, BatchError, EncodedSample, IGNORE_INDEX, Pack, PaddingSide};

/// Puts each pack into one row of `[B, L]` and pads the rows with `pad_id` on one side.
///
/// `merge_size` is the side, in patches, of the square that is merged into one vision token.
pub fn collate(
    packs: Vec<Pack>,
    pad_id: u32,
    side: PaddingSide,
    merge_size: NonZeroU32,
) -> Result<Batch, BatchError> {
    if let Some(row) = packs.iter().position(Pack::is_empty) {
        return Err(BatchError::NoSample { row });
    }
    for sample in packs.iter().flat_map(|pack| &pack.samples) {
        check(sample, merge_size)?;
    }
    let rows = packs.len();
    let length = packs.iter().map(Pack::len).max().ok_or(BatchError::NoSample { row: 0 })?;
    let places = rows.checked_mul(length).filter(|places| u32::try_from(*places).is_ok());
    let places = places.ok_or(BatchError::TooLarge { rows, length })?;
    let weighted =
        packs.iter().flat_map(|pack| &pack.samples).any(|sample| sample.weights.is_some());
    let mut batch = Batch {
        input_ids: vec![pad_id; places],              // [B, L]
        labels: vec![IGNORE_INDEX; places],           // [B, L]
        weights: weighted.then(|| vec![1.0; places]), // [B, L]
        attention_mask: vec![false; places],          // [B, L]
        position_ids: vec![[0; 3]; places],           // [B, L]
        vision_rows: Vec::new(),                      // [M]
        media: Vec::new(),
        segment_lengths: Vec::with_capacity(rows),
        length,
    };
    for (row, pack) in packs.into_iter().enumerate() {
        let padding = match side {
            PaddingSide::Left => length - pack.len(),
            PaddingSide::Right => 0,
        };
        let mut start = row * length + padding;
        let mut lengths = Vec::with_capacity(pack.samples.len());
        for sample in pack.samples {
            let places = start..start + sample.len();
            let segments = sample.segment_lengths();
            batch.input_ids[places.clone()].copy_from_slice(&sample.input_ids);
            batch.labels[places.clone()].copy_from_slice(&sample.labels);
            if let (Some(all), Some(weights)) = (&mut batch.weights, &sample.weights) {
                all[places.clone()].copy_from_slice(weights);
            }
            batch.attention_mask[places.clone()].fill(true);
            batch.position_ids[places.clone()].copy_from_slice(&sample.position_ids);
            batch.vision_rows.extend(sample.vision_rows.iter().map(|row| start as u32 + row));
            batch.media.extend(sample.media);
            lengths.extend(segments);
            start = places.end;
        }
        batch.segment_lengths.push(lengths);
    }
    Ok(batch)
}

/// Checks the lengths and the vision rows of a sample.
fn check(sample: &EncodedSample, merge_size: NonZeroU32) -> Result<(), BatchError> {
    let id = || sample.id.clone();
    let num_tokens = sample.len();
    let (num_labels, num_positions) = (sample.labels.len(), sample.position_ids.len());
    if sample.is_empty() {
        return Err(BatchError::NoTokens { id: id() });
    }
    let num_weights = sample.weights.as_ref().map_or(num_tokens, Vec::len);
    if num_weights != num_tokens {
        return Err(BatchError::Weights { id: id(), num_tokens, num_weights });
    }
    if num_labels != num_tokens || num_positions != num_tokens {
        return Err(BatchError::Lengths { id: id(), num_tokens, num_labels, num_positions });
    }
    let mut lowest = 0;
    for row in &sample.vision_rows {
        if *row < lowest || *row as usize >= num_tokens {
            return Err(BatchError::VisionRow { id: id(), vision_row: *row, num_tokens });
        }
        lowest = row + 1;
    }
    let merged_patches = (merge_size.get() as usize).pow(2);
    let num_merged = sample.media.iter().map(|media| media.num_patches() / merged_patches).sum();
    if sample.vision_rows.len() != num_merged {
        let num_vision_rows = sample.vision_rows.len();
        return Err(BatchError::VisionRows { id: id(), num_vision_rows, num_merged });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use batch::{MediumKind, SampleId};
    use proptest::prelude::*;

    use super::*;
    use crate::loader::test_reader::sample;
    use batch::{Patches, VarlenBatch};

    const TWO: NonZeroU32 = NonZeroU32::new(2).unwrap();

    fn id(line: u64) -> SampleId {
        SampleId { file: Arc::from(Path::new("a.jsonl")), line }
    }

    fn patches() -> Patches {
        let (pixel_values, kind) = (vec![0.25; 8 * 3], MediumKind::Image);
        Patches { pixel_values, grid_thw: [1, 2, 4], kind, continues_medium: false }
    }

    fn any_packs() -> impl Strategy<Value = Vec<Pack>> {
        // the ids are below 5, and so is the pad id of the tests
        let sample = (1usize..9, 0u32..5, 0usize..3).prop_map(|(tokens, first, images)| {
            sample(id(1), tokens.max(2 * images), first, &vec![patches(); images])
        });
        let pack = prop::collection::vec(sample, 1..4).prop_map(|samples| Pack { samples });
        prop::collection::vec(pack, 1..5)
    }

    /// Id and position of each vision row of a sample or a stream.
    fn seen(rows: &[u32], ids: &[u32], positions: &[[u32; 3]]) -> Vec<(u32, [u32; 3])> {
        rows.iter().map(|row| (ids[*row as usize], positions[*row as usize])).collect()
    }

    fn concat<T: Clone>(packs: &[Pack], part: fn(&EncodedSample) -> &[T]) -> Vec<T> {
        packs.iter().flat_map(|pack| &pack.samples).flat_map(part).cloned().collect()
    }

    fn check_vision(packs: &[Pack], stream: &VarlenBatch) -> Result<(), TestCaseError> {
        let of_sample = |s: &EncodedSample| seen(&s.vision_rows, &s.input_ids, &s.position_ids);
        let expected: Vec<_> =
            packs.iter().flat_map(|pack| &pack.samples).flat_map(of_sample).collect();
        let found = seen(&stream.vision_rows, &stream.input_ids, &stream.position_ids);
        prop_assert_eq!(found, expected);
        prop_assert!(stream.vision_rows.is_sorted_by(|before, after| before < after));
        prop_assert_eq!(&stream.media, &concat(packs, |sample| &sample.media));
        Ok(())
    }

    proptest! {
        #[test]
        fn unpad_undoes_collate(packs in any_packs(), pad_id in 0u32..5, left in any::<bool>()) {
            let side = if left { PaddingSide::Left } else { PaddingSide::Right };
            let batch = collate(packs.clone(), pad_id, side, TWO).unwrap();
            prop_assert_eq!(batch.length, packs.iter().map(Pack::len).max().unwrap());
            for row in batch.attention_mask.chunks(batch.length) {
                let touched = if left { row.last() } else { row.first() };
                prop_assert_eq!(touched, Some(&true));
            }
            let stream = batch.unpad().unwrap();
            prop_assert_eq!(&stream.input_ids, &concat(&packs, |sample| &sample.input_ids));
            prop_assert_eq!(&stream.labels, &concat(&packs, |sample| &sample.labels));
            prop_assert_eq!(&stream.position_ids, &concat(&packs, |sample| &sample.position_ids));
            let lengths: Vec<_> = stream.cu_seqlens.segments().map(|segment| segment.len()).collect();
            let samples = || packs.iter().flat_map(|pack| &pack.samples);
            prop_assert_eq!(lengths, samples().map(EncodedSample::len).collect::<Vec<_>>());
            check_vision(&packs, &stream)?;
        }

        #[test]
        fn keep_padding_keeps_every_real_token_position_and_target(
            packs in any_packs(), pad_id in 0u32..5, left in any::<bool>()
        ) {
            let side = if left { PaddingSide::Left } else { PaddingSide::Right };
            let batch = collate(packs.clone(), pad_id, side, TWO).unwrap();
            let mask = batch.attention_mask.clone();
            let stream = batch.keep_padding().unwrap();
            let samples: Vec<_> = packs.iter().flat_map(|pack| &pack.samples).collect();
            let mut next = samples.iter();
            for segment in stream.cu_seqlens.segments() {
                let (ids, labels) = (&stream.input_ids[segment.clone()], &stream.labels[segment.clone()]);
                if mask[segment.start] {
                    let sample = next.next().unwrap();
                    prop_assert_eq!(ids, &sample.input_ids[..]);
                    prop_assert_eq!(labels, &sample.labels[..]);
                    prop_assert_eq!(&stream.position_ids[segment], &sample.position_ids[..]);
                } else {
                    prop_assert!(ids.iter().all(|id| *id == pad_id));
                    prop_assert!(labels.iter().all(|label| *label == IGNORE_INDEX));
                }
            }
            prop_assert!(next.next().is_none());
            prop_assert_eq!(stream.num_tokens, packs.iter().map(Pack::len).sum::<usize>());
            check_vision(&packs, &stream)?;
        }
    }

    #[test]
    fn a_sample_whose_parts_disagree_is_named() {
        let good = sample(id(7), 5, 1, &[patches()]);
        let collate = |sample: EncodedSample| {
            let pack = Pack { samples: vec![sample] };
            collate(vec![pack], 0, PaddingSide::Right, TWO).map(drop)
        };
        assert_eq!(collate(good.clone()), Ok(()));
        let id = || id(7);
        let fewer = EncodedSample { vision_rows: vec![0], ..good.clone() };
        let expected = BatchError::VisionRows { id: id(), num_vision_rows: 1, num_merged: 2 };
        assert_eq!(collate(fewer), Err(expected.clone()));
        let message = "a.jsonl:7: 1 vision rows, but its images make 2 merged tokens";
        assert_eq!(expected.to_string(), message);
        for vision_rows in [vec![1, 1], vec![1, 0], vec![0, 5]] {
            let error = collate(EncodedSample { vision_rows, ..good.clone() }).unwrap_err();
            assert!(matches!(error, BatchError::VisionRow { .. }), "{error}");
        }
        let labels = EncodedSample { labels: vec![1; 4], ..good };
        assert!(matches!(collate(labels), Err(BatchError::Lengths { num_labels: 4, .. })));
        assert_eq!(collate(sample(id(), 0, 1, &[])), Err(BatchError::NoTokens { id: id() }));
    }

    #[test]
    fn nothing_makes_no_batch() {
        let empty = |packs| collate(packs, 0, PaddingSide::Right, TWO).unwrap_err();
        assert_eq!(empty(Vec::new()), BatchError::NoSample { row: 0 });
        assert_eq!(empty(vec![Pack { samples: Vec::new() }]), BatchError::NoSample { row: 0 });
    }
}
