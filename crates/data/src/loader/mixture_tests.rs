//! Orders, loaders and plans over corpora and mixtures by share.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use crate::dataset::RowReader;
use crate::dataset::corpus::{Spacing, Windows};
use crate::dataset::order::{DatasetShare, Mixture, Order, RowOrder, StoppingStrategy};
use crate::loader::plan::plan;
use crate::loader::test_reader::{any_options, options, sample};
use crate::loader::{DataState, Loader, LoaderOptions, StepData};
use crate::packing::PackingStrategy;
use crate::row::{Length, Rejection, SampleIndex};
use batch::{EncodedSample, SampleId};

/// Windows of three tokens in data set 0, whose first id is their row; in data set 1 chats of
/// `1 + row % 7` tokens, one in eleven unusable.
struct MixedReader;

impl RowReader for MixedReader {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        let length = self.length(row)?.tokens;
        Ok(sample(self.id(row), length, row.row, &[]))
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        let tokens = match row {
            SampleIndex { dataset: 0, .. } => 3,
            SampleIndex { row, .. } if row % 11 == 5 => {
                return Err(Rejection::new(
                    &self.id(row_of(1, row)),
                    "broken",
                    "broken".to_owned(),
                ));
            }
            SampleIndex { row, .. } => 1 + row as usize % 7,
        };
        Ok(Length { tokens, ..Length::default() })
    }

    fn uniform_length(&self, dataset: u32) -> Option<Length> {
        (dataset == 0).then_some(Length { tokens: 3, ..Length::default() })
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        let file = Path::new(["corpus.txt", "chats.jsonl"][row.dataset as usize]).into();
        SampleId { file, line: u64::from(row.row) + 1 }
    }
}

fn row_of(dataset: u32, row: u32) -> SampleIndex {
    SampleIndex { dataset, row }
}

fn tiled(tokens: u32, length: u32) -> Windows {
    Windows::new(tokens, length, Spacing::Tiled).unwrap()
}

/// An order over data sets with these rows and weights. The first is a corpus of windows.
fn order_of(windows: Windows, chats: &[(u64, f64)], weight: f64, row_order: RowOrder) -> Order {
    let mut shares = vec![DatasetShare { rows: windows.fewest().into(), weight }];
    shares.extend(chats.iter().map(|(rows, weight)| DatasetShare { rows: *rows, weight: *weight }));
    Order::new(&shares, row_order, 5, [3; 32]).unwrap().with_windows(0, windows).unwrap()
}

fn rows(order: &Order, epoch: u64) -> Vec<u32> {
    order.epoch(epoch).iter().map(|row| row.row).collect()
}

/// The numbers must not change, because runs of older builds are resumed.
#[test]
fn thirty_five_tokens_in_shuffled_windows_of_five() {
    let order = order_of(tiled(35, 5), &[], 1.0, RowOrder::Shuffled);
    assert_eq!(rows(&order, 0), GOLDEN[0]);
    assert_eq!(rows(&order, 1), GOLDEN[1]);
    let in_order = order_of(tiled(35, 5), &[], 1.0, RowOrder::File);
    let mut sorted = GOLDEN[0];
    sorted.sort_unstable();
    assert_eq!(rows(&in_order, 0), sorted);
}

const GOLDEN: [[u32; 6]; 2] = [[22, 27, 17, 7, 2, 12], [7, 2, 27, 12, 17, 22]];

#[test]
fn lanes_are_never_shuffled_and_have_another_offset_each_epoch() {
    let windows = Windows::new(1000, 7, Spacing::Lanes(3)).unwrap();
    let order = order_of(windows, &[], 2.0, RowOrder::Shuffled);
    let mut offsets = Vec::new();
    for epoch in 0..20 {
        let rows = rows(&order, epoch);
        let passes = [rows[0], *rows.iter().rev().nth(windows.count(0) as usize - 1).unwrap()];
        assert_eq!(
            rows[..windows.count(passes[0]) as usize],
            windows.starts(passes[0]).collect::<Vec<_>>()
        );
        offsets.push(passes[0]);
    }
    offsets.sort_unstable();
    offsets.dedup();
    assert!(offsets.len() > 4, "{offsets:?}");
}

#[test]
fn every_offset_of_a_pass_is_about_equally_likely() {
    let order = order_of(tiled(100, 5), &[], 1.0, RowOrder::File);
    let mut seen = [0u32; 5];
    for epoch in 0..2000 {
        seen[order.epoch(epoch)[0].row as usize] += 1;
    }
    assert!(seen.iter().all(|times| times.abs_diff(400) < 90), "{seen:?}"); // deviation 18
}

proptest! {
    #[test]
    fn each_window_comes_once_a_pass_whatever_the_weight(
        tokens in 10u32..200, length in 1u32..6, passes in 1u32..4, epoch in 0u64..50,
    ) {
        let windows = tiled(tokens, length);
        let order = order_of(windows, &[(4, 1.0)], f64::from(passes), RowOrder::Shuffled);
        let rows = order.epoch(epoch);
        prop_assert_eq!(rows.len() as u64, order.epoch_len(epoch));
        prop_assert_eq!(rows.iter().filter(|row| row.dataset == 1).count(), 4);
        // each residue is one pass or several at the same offset, and has all windows of these
        let mut by_offset: BTreeMap<u32, BTreeMap<u32, u32>> = BTreeMap::new();
        for row in rows.iter().filter(|row| row.dataset == 0) {
            *by_offset.entry(row.row % length).or_default().entry(row.row).or_default() += 1;
        }
        let mut total = 0;
        for (offset, seen) in by_offset {
            let times = *seen.values().next().unwrap();
            total += times;
            prop_assert!(seen.values().all(|t| *t == times), "{seen:?}");
            prop_assert_eq!(seen.into_keys().collect::<Vec<_>>(), windows.starts(offset).collect::<Vec<_>>());
        }
        prop_assert_eq!(total, passes);
    }

    #[test]
    fn every_prefix_has_the_shares_and_each_row_is_used_as_often_as_any_other(
        sets in prop::collection::vec((1u64..40, 1u32..20), 1..5),
        all in any::<bool>(), shuffle in any::<bool>(), epochs in 1u64..6,
    ) {
        let shares: Vec<_> = sets.iter()
            .map(|(rows, weight)| DatasetShare { rows: *rows, weight: f64::from(*weight) }).collect();
        let stopping =
            [StoppingStrategy::FirstExhausted, StoppingStrategy::AllExhausted][usize::from(all)];
        let row_order = if shuffle { RowOrder::Shuffled } else { RowOrder::File };
        let order = Order::new(&shares, row_order, 1, [0; 32]).unwrap()
            .mixed(Mixture::Share, stopping).unwrap();
        let total: f64 = sets.iter().map(|set| f64::from(set.1)).sum();
        let mut times: Vec<Vec<u32>> = sets.iter().map(|set| vec![0; set.0 as usize]).collect();
        for epoch in 0..epochs {
            let rows = order.epoch(epoch);
            prop_assert_eq!(rows.len() as u64, order.epoch_len(epoch));
            let mut seen = vec![0u32; sets.len()];
            for (at, row) in rows.iter().enumerate() {
                seen[row.dataset as usize] += 1;
                times[row.dataset as usize][row.row as usize] += 1;
                for (seen, (_, weight)) in seen.iter().zip(&sets) {
                    let due = (at + 1) as f64 * f64::from(*weight) / total;
                    prop_assert!((f64::from(*seen) - due).abs() < 1.0 + 1e-6);
                }
            }
        }
        for times in times {
            // passes continue where the previous epoch ended
            let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
            prop_assert!(most - least <= 1, "{times:?}");
        }
    }
}

#[test]
fn a_share_of_next_to_nothing_makes_an_epoch_that_is_too_long() {
    let share = |rows, weight| DatasetShare { rows, weight };
    let order = Order::new(&[share(10, 1.0), share(10, 1e-9)], RowOrder::File, 0, [0; 32]).unwrap();
    let error = order.mixed(Mixture::Share, StoppingStrategy::AllExhausted).unwrap_err();
    let expected = "an epoch has 10737418240 rows up to data set 1, expected at most 4294967295";
    assert_eq!(error.to_string(), expected);
}

fn mixed(mixture: Mixture) -> Order {
    // 64 tokens in windows of 3: 21 windows from offset 0, 20 from the others
    let order = order_of(tiled(64, 3), &[(30, 0.8)], 1.0, RowOrder::Shuffled);
    order.mixed(mixture, StoppingStrategy::AllExhausted).unwrap()
}

fn all_steps(order: &Order, options: LoaderOptions, from: DataState) -> Vec<StepData> {
    let mut loader = Loader::start(Arc::new(MixedReader), order.clone(), options, from);
    std::iter::from_fn(|| loader.next_step()).map(Result::unwrap).collect()
}

/// Three epochs, whose lengths differ.
fn three_epochs(options: LoaderOptions) -> LoaderOptions {
    LoaderOptions { epochs: NonZeroU64::new(3), max_rejected: 1.0, ..options }
}

#[test]
fn epochs_of_a_corpus_differ_in_length() {
    let lengths: Vec<u64> = (0..40).map(|epoch| mixed(Mixture::Repeat).epoch_len(epoch)).collect();
    assert!(lengths.iter().all(|length| [44, 45].contains(length)), "{lengths:?}");
    assert!(lengths.contains(&44) && lengths.contains(&45), "{lengths:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_mixture_resumed_after_any_step_continues_as_uninterrupted_and_as_planned(
        any in any_options(), share in any::<bool>(), first in 0usize..5,
    ) {
        let order = mixed(if share { Mixture::Share } else { Mixture::Repeat });
        let options = three_epochs(any);
        let steps = all_steps(&order, options, DataState::default());
        for index in (first..steps.len()).step_by(steps.len() / 6 + 1) {
            let text = serde_json::to_string(&steps[index].state).unwrap();
            let from: DataState = serde_json::from_str(&text).unwrap();
            prop_assert!(all_steps(&order, options, from) == steps[index + 1..], "after {index}");
        }
        let reader: Arc<dyn RowReader> = Arc::new(MixedReader);
        let planned = plan(&reader, &order, &options, 3, &|_, _| ()).unwrap();
        let sum = |count: fn(&StepData) -> usize| steps.iter().map(count).sum::<usize>() as u64;
        prop_assert_eq!(planned.steps, steps.len() as u64);
        prop_assert_eq!(planned.samples, sum(|step| step.num_samples));
        prop_assert_eq!(planned.tokens, sum(|step| step.num_tokens));
        let last = steps.last().unwrap();
        prop_assert_eq!(last.epoch, 3.0);
        prop_assert_eq!(planned.rows_read, last.state.rows_read);
        prop_assert_eq!(planned.rows_read, (0..3).map(|epoch| order.epoch_len(epoch)).sum::<u64>());
    }
}

#[test]
fn a_step_lists_its_samples_with_their_data_sets_in_the_order_of_the_stream() {
    let options = three_epochs(options(PackingStrategy::BestFit));
    for step in all_steps(&mixed(Mixture::Repeat), options, DataState::default()) {
        assert_eq!(step.samples.len(), step.num_samples);
        let segments = step.micro_batches.iter().flat_map(|batch| {
            batch
                .cu_seqlens
                .segments()
                .map(|segment| (segment.len(), batch.labels[segment].to_vec()))
        });
        for (sample, (length, labels)) in step.samples.iter().zip(segments) {
            assert_eq!(sample.num_tokens as usize, length);
            let targets = labels.iter().skip(1).filter(|label| **label >= 0).count();
            assert_eq!(sample.num_targets as usize, targets);
        }
        let tokens: u32 = step.samples.iter().map(|sample| sample.num_tokens).sum();
        assert_eq!(tokens as usize, step.num_tokens);
        assert!(step.samples.iter().all(|sample| sample.dataset == 1 || sample.num_tokens == 3));
    }
}
