use proptest::prelude::*;

use super::*;

fn order(shares: &[(u64, f64)], row_order: RowOrder, seed: u64) -> Order {
    let share = |(rows, weight): &(u64, f64)| DatasetShare { rows: *rows, weight: *weight };
    let datasets: Vec<_> = shares.iter().map(share).collect();
    Order::new(&datasets, row_order, seed, [7; 32]).unwrap()
}

fn pairs(rows: &[SampleIndex]) -> Vec<(u32, u32)> {
    rows.iter().map(|row| (row.dataset, row.row)).collect()
}

#[test]
fn without_shuffle_the_order_is_that_of_config_and_file() {
    let order = order(&[(2, 1.0), (3, 1.0)], RowOrder::File, 1);
    assert_eq!(pairs(&order.epoch(0)), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]);
    assert_eq!(order.epoch(0), order.epoch(5));
}

/// The numbers must not change, because runs of older builds are resumed.
#[test]
fn the_shuffle_is_the_same_on_every_machine() {
    let order = order(&[(8, 1.0)], RowOrder::Shuffled, 42);
    let rows = |epoch| order.epoch(epoch).iter().map(|row| row.row).collect::<Vec<_>>();
    assert_eq!(rows(0), [2, 7, 6, 4, 1, 3, 5, 0]);
    assert_eq!(rows(1), [6, 0, 4, 3, 1, 2, 7, 5]);
}

#[test]
fn seed_epoch_and_fingerprint_each_change_the_order() {
    let base = order(&[(50, 1.0)], RowOrder::Shuffled, 1);
    let other_seed = order(&[(50, 1.0)], RowOrder::Shuffled, 2);
    let other_data = Order { fingerprint: [8; 32], ..base.clone() };
    assert_eq!(base.epoch(0), base.clone().epoch(0));
    assert_ne!(base.epoch(0), base.epoch(1));
    assert_ne!(base.epoch(0), other_seed.epoch(0));
    assert_ne!(base.epoch(0), other_data.epoch(0));
}

#[test]
fn every_place_of_a_shuffle_is_equally_likely() {
    let order = order(&[(4, 1.0)], RowOrder::Shuffled, 3);
    let mut seen = [[0u32; 4]; 4]; // [row][place]
    for epoch in 0..4000 {
        for (place, row) in order.epoch(epoch).iter().enumerate() {
            seen[row.row as usize][place] += 1;
        }
    }
    // 1000 expected with a deviation of 27
    assert!(seen.iter().flatten().all(|count| count.abs_diff(1000) < 140), "{seen:?}");
}

#[test]
fn a_fraction_of_a_weight_draws_another_subset_each_epoch() {
    let order = order(&[(100, 0.25)], RowOrder::File, 3);
    assert_eq!(order.len(), 25);
    assert_ne!(order.epoch(0), order.epoch(1));
    assert!(order.epoch(0).is_sorted());
}

#[test]
fn impossible_weights_and_sizes_are_refused() {
    let new = |rows, weight| {
        Order::new(&[DatasetShare { rows, weight }], RowOrder::File, 0, [0; 32]).map(drop)
    };
    for weight in [0.0, -0.5, f64::NAN, f64::INFINITY] {
        assert!(matches!(new(1, weight), Err(OrderError::Weight { dataset: 0, .. })));
    }
    assert!(matches!(new(2, 1e300), Err(OrderError::TooManyRows { dataset: 0, .. })));
    assert!(matches!(new(1 << 33, 1e-9), Err(OrderError::TooManyRows { dataset: 0, .. })));
    assert!(new(0, 1.0).is_ok());
    assert!(order(&[(0, 1e300)], RowOrder::File, 0).epoch(0).is_empty());
}

proptest! {
    #[test]
    fn each_row_comes_as_often_as_its_weight_says(
        shares in prop::collection::vec((0u64..40, 1u32..350), 1..4),
        shuffle in any::<bool>(),
        seed in any::<u64>(),
        epoch in 0u64..9,
    ) {
        let shares: Vec<_> =
            shares.iter().map(|(rows, percent)| (*rows, f64::from(*percent) / 100.0)).collect();
        let row_order = if shuffle { RowOrder::Shuffled } else { RowOrder::File };
        let order = order(&shares, row_order, seed);
        let rows = order.epoch(epoch);
        prop_assert_eq!(rows.len() as u64, order.len());
        for (dataset, (num_rows, weight)) in shares.iter().enumerate() {
            let mut seen = vec![0u32; *num_rows as usize];
            for row in rows.iter().filter(|row| row.dataset as usize == dataset) {
                seen[row.row as usize] += 1;
            }
            let whole = weight.floor() as u32;
            prop_assert!(seen.iter().all(|times| *times == whole || *times == whole + 1));
            let extra = seen.iter().filter(|times| **times > whole).count();
            let share = (weight.fract() * *num_rows as f64).round() as usize;
            let fewest = usize::from(*weight < 1.0 && *num_rows > 0); // at least one row
            prop_assert_eq!(extra, share.max(fewest));
        }
    }
}

fn first(weights: &[f64], rows: usize) -> Vec<usize> {
    Shares::new(weights).interleave().take(rows).collect()
}

#[test]
fn a_mixture_written_out() {
    assert_eq!(first(&[0.5, 0.5], 6), [0, 1, 0, 1, 0, 1]);
    assert_eq!(first(&[3.0, 1.0], 8), [0, 0, 0, 1, 0, 0, 0, 1]);
    assert_eq!(first(&[1.0, 3.0], 8), [1, 1, 0, 1, 1, 1, 0, 1]);
    assert_eq!(first(&[2.0, 1.0, 1.0], 8), [0, 1, 0, 2, 0, 1, 0, 2]);
    assert_eq!(first(&[7.0], 3), [0, 0, 0]);
}

#[test]
fn an_epoch_ends_with_the_last_data_set_or_before_the_first_is_repeated() {
    let shares = Shares::new(&[3.0, 1.0]);
    let rows = |stopping| shares.epoch_rows(&[30, 100], stopping);
    assert_eq!(rows(StoppingStrategy::AllExhausted), 400); // 100 rows are a quarter
    assert_eq!(rows(StoppingStrategy::FirstExhausted), 40); // 30 rows are three quarters
    let huge = Shares::new(&[f64::MAX, f64::MAX, 1e-300]);
    assert!(
        huge.epoch_rows(&[1, 1, u64::from(u32::MAX)], StoppingStrategy::AllExhausted) > 1 << 60
    );
}

proptest! {
    #[test]
    fn each_data_set_has_its_due_within_a_row_in_every_prefix(
        weights in prop::collection::vec(prop_oneof![1e-4f64..1.0, 1.0f64..2.0, Just(1.0)], 1..9),
        rows in 1usize..2000,
    ) {
        let shares = Shares::new(&weights);
        let total = i128::from(shares.total);
        let mut seen = vec![0i128; weights.len()];
        for (slot, dataset) in (1i128..).zip(shares.interleave().take(rows)) {
            seen[dataset] += 1;
            for (seen, units) in seen.iter().zip(&shares.units) {
                let off = seen * total - slot * i128::from(*units);
                prop_assert!(off.abs() < total, "slot {slot}: off by {off} / {total}");
            }
        }
        prop_assert_eq!(seen.iter().sum::<i128>(), rows as i128);
    }

    #[test]
    fn an_epoch_exhausts_what_it_should(
        sets in prop::collection::vec((1u64..60, 1u32..30), 1..6), all in any::<bool>(),
    ) {
        let weights: Vec<f64> = sets.iter().map(|set| f64::from(set.1)).collect();
        let rows: Vec<u64> = sets.iter().map(|set| set.0).collect();
        let stopping =
            [StoppingStrategy::FirstExhausted, StoppingStrategy::AllExhausted][usize::from(all)];
        let shares = Shares::new(&weights);
        let length = shares.epoch_rows(&rows, stopping) as usize;
        let mut seen = vec![0; rows.len()];
        for dataset in shares.interleave().take(length) {
            seen[dataset] += 1;
        }
        let pairs = || seen.iter().zip(&rows);
        if all {
            prop_assert!(pairs().all(|(seen, rows)| seen >= rows), "{seen:?} of {rows:?}");
        } else if length > 1 {
            prop_assert!(pairs().all(|(seen, rows)| seen <= rows), "{seen:?} of {rows:?}");
        }
    }
}
