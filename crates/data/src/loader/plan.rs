//! The number of steps of a run, computed from lengths alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::dataset::RowReader;
use crate::dataset::order::Order;
use crate::loader::steps::{Assembly, MicroBatches, Rmpad, Step, fill};
use crate::loader::workers::{QueueLimits, Workers};
use crate::loader::{DataState, LoaderError, LoaderOptions};
use crate::packing::Item;
use crate::row::{Length, Rejection, SampleIndex};

/// Maximum number of rows measured ahead of the next stored one.
const AHEAD_ROWS: usize = 1024;
/// Rows between two calls of the progress function.
const PROGRESS_ROWS: u64 = 64;

/// The size of a run over the data.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Number of optimizer steps.
    pub steps: u64,
    /// Number of packs, or of samples with packing off.
    pub packs: u64,
    /// Number of samples, counted once per use.
    pub samples: u64,
    /// Number of tokens, vision tokens included.
    pub tokens: u64,
    /// Number of rows read, usable or not.
    pub rows_read: u64,
    /// Number of rejected rows, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// Real tokens / (packs * `packing_length`), or real tokens / padded tokens without packing.
    pub fill: f64,
    /// The micro-batches with the most tokens and with the most pixels. Tokens are those that the
    /// model computes, with padding if it receives any.
    pub largest: [Length; 2],
    /// Maximum bytes of the pixels of a step.
    pub step_pixel_bytes: u64,
}

impl Plan {
    fn add<T>(&mut self, options: &LoaderOptions, micro_batches: &MicroBatches<T>) {
        let tokens =
            |pack: &Vec<Item<T>>| pack.iter().map(|item| item.length.tokens).sum::<usize>();
        let mut step_pixel_bytes = 0;
        for packs in micro_batches {
            let real: usize = packs.iter().map(tokens).sum();
            let longest = packs.iter().map(tokens).max().unwrap_or(0);
            let size = Length {
                tokens: match options.rmpad {
                    Rmpad::Unpad => real,
                    Rmpad::KeepPadding => packs.len() * longest,
                },
                pixel_bytes: packs.iter().flatten().map(|item| item.length.pixel_bytes).sum(),
            };
            step_pixel_bytes += size.pixel_bytes;
            let [most_tokens, most_pixels] = self.largest;
            let by_tokens = |size: Length| (size.tokens, size.pixel_bytes);
            let by_pixels = |size: Length| (size.pixel_bytes, size.tokens);
            if by_tokens(size) > by_tokens(most_tokens) {
                self.largest[0] = size;
            }
            if by_pixels(size) > by_pixels(most_pixels) {
                self.largest[1] = size;
            }
        }
        self.packs += micro_batches.iter().map(|packs| packs.len() as u64).sum::<u64>();
        self.step_pixel_bytes = self.step_pixel_bytes.max(step_pixel_bytes);
    }
}

/// Measures every row once, in parallel, then packs the lengths as a loader packs the samples.
///
/// The numbers are exact unless an image turns out to be broken when it is decoded. Its row leaves
/// a gap in its pack; there are fewer steps only if a step has no other row. The function fails
/// where the loader would fail, and the error has the rejections of all previous steps. `epochs`
/// replaces `options.epochs`. `progress` receives the number of measured rows and of all rows.
pub fn plan(
    reader: &Arc<dyn RowReader>,
    order: &Order,
    options: &LoaderOptions,
    epochs: u64,
    progress: &dyn Fn(u64, u64),
) -> Result<Plan, LoaderError> {
    let mut plan = Plan {
        steps: 0,
        packs: 0,
        samples: 0,
        tokens: 0,
        rows_read: 0,
        rejected: BTreeMap::new(),
        fill: 1.0,
        largest: [Length::default(); 2],
        step_pixel_bytes: 0,
    };
    let (mut rejected, mut capacity) = (Vec::new(), 0.0);
    simulate(reader, order, options, epochs, progress, |step| {
        plan.steps += 1;
        plan.add(options, &step.micro_batches);
        plan.samples += step.samples().count() as u64;
        plan.tokens += step.num_tokens() as u64;
        capacity += step.num_tokens() as f64 / fill(options.packing, &step.micro_batches);
        rejected.extend(step.rejected);
        plan.rows_read = step.state.rows_read;
        plan.rejected = step.state.rejected;
    })
    .map_err(|error| error.after(rejected))?;
    plan.fill = if capacity > 0.0 { plan.tokens as f64 / capacity } else { 1.0 };
    Ok(plan)
}

/// The packs of the first epoch in order: each row and its number of tokens.
pub fn first_epoch_packs(
    reader: &Arc<dyn RowReader>,
    order: &Order,
    options: &LoaderOptions,
    progress: &dyn Fn(u64, u64),
) -> Result<Vec<Vec<(SampleIndex, usize)>>, LoaderError> {
    let rows = order.epoch(0);
    let mut packs = Vec::new();
    simulate(reader, order, options, 1, progress, |step| {
        for pack in step.micro_batches.into_iter().flatten() {
            let row = |item: Item<()>| (rows[item.position as usize], item.length.tokens);
            packs.push(pack.into_iter().map(row).collect());
        }
    })?;
    Ok(packs)
}

/// Measures every row once, then computes the steps of the loader without their samples.
fn simulate(
    reader: &Arc<dyn RowReader>,
    order: &Order,
    options: &LoaderOptions,
    epochs: u64,
    progress: &dyn Fn(u64, u64),
    mut each: impl FnMut(Step<()>),
) -> Result<(), LoaderError> {
    if epochs == 0 {
        return Ok(());
    }
    let start = DataState::default();
    start.check_epoch(order.len())?;
    let lengths = measure(reader, order, options, epochs, progress)?;
    let no_samples = |_| unreachable!("a run that begins holds no samples");
    let mut assembly = Assembly::resume(*options, order.epoch_sizes(), start, no_samples)?;
    for row in (0..epochs).flat_map(|epoch| order.epoch(epoch)) {
        let outcome = match reader.uniform_length(row.dataset) {
            Some(length) => Ok(length),
            None => lengths[row.dataset as usize][row.row as usize]
                .clone()
                .expect("every row of these epochs is measured"),
        };
        let outcome = outcome.map(|length| (length, ())).map_err(|rejection| *rejection);
        assembly.push(outcome, || reader.id(row))?;
        while let Some(step) = assembly.pop() {
            each(step);
        }
    }
    Ok(())
}

/// The length of each row by data set and row, `None` if no epoch uses it. Rejections are rare, so
/// they are boxed.
type LengthsByRow = Vec<Vec<Option<Result<Length, Box<Rejection>>>>>;

/// The lengths of the rows of these epochs.
fn measure(
    reader: &Arc<dyn RowReader>,
    order: &Order,
    options: &LoaderOptions,
    epochs: u64,
    progress: &dyn Fn(u64, u64),
) -> Result<LengthsByRow, LoaderError> {
    let varying = |dataset| reader.uniform_length(dataset).is_none();
    let rows = distinct_rows(order, epochs, &varying);
    let total = rows.len() as u64;
    let limits = QueueLimits { workers: options.workers, items: AHEAD_ROWS, bytes: u64::MAX };
    let measurer = Arc::clone(reader);
    let measure = move |row, ()| measurer.length(row).map_err(Box::new);
    let workers = Workers::start(rows.into_iter().map(|row| (row, ())), measure, |_| 0, limits)
        .map_err(|error| LoaderError::Spawn { message: error.to_string() })?;
    let mut lengths: Vec<Vec<_>> =
        measured_rows(order, &varying).map(|rows| vec![None; rows as usize]).collect();
    let mut done = 0;
    while let Some((row, result)) = workers.next() {
        let length = result.map_err(|message| {
            let id = reader.id(row);
            LoaderError::Panicked { file: id.file.display().to_string(), row: id.line, message }
        })?;
        lengths[row.dataset as usize][row.row as usize] = Some(length);
        done += 1;
        if done % PROGRESS_ROWS == 0 || done == total {
            progress(done, total);
        }
    }
    Ok(lengths)
}

/// Number of rows to measure of each data set: 0 if all rows have the same length.
fn measured_rows(order: &Order, varying: &dyn Fn(u32) -> bool) -> impl Iterator<Item = u32> {
    (0u32..).zip(order.dataset_rows()).map(|(set, rows)| if varying(set) { rows } else { 0 })
}

/// The distinct rows of these epochs in the order of the files, from data sets with varying
/// lengths.
fn distinct_rows(order: &Order, epochs: u64, varying: &dyn Fn(u32) -> bool) -> Vec<SampleIndex> {
    let mut seen: Vec<Vec<bool>> =
        measured_rows(order, varying).map(|rows| vec![false; rows as usize]).collect();
    let mut unseen: u64 = measured_rows(order, varying).map(u64::from).sum();
    for epoch in 0..epochs {
        if unseen == 0 {
            break;
        }
        for row in order.epoch(epoch) {
            if let Some(seen) = seen[row.dataset as usize].get_mut(row.row as usize) {
                unseen -= u64::from(!*seen);
                *seen = true;
            }
        }
    }
    let rows = |(dataset, seen): (u32, Vec<bool>)| {
        let seen = (0u32..).zip(seen).filter(|(_, seen)| *seen);
        seen.map(move |(row, _)| SampleIndex { dataset, row })
    };
    (0u32..).zip(seen).flat_map(rows).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::num::NonZeroU64;

    use proptest::prelude::*;

    use super::*;
    use crate::config::OnError;
    use crate::dataset::order::{DatasetShare, RowOrder};
    use crate::loader::test_reader::{
        Kind, TestReader, any_options, any_readable_rows, options, order,
    };
    use crate::loader::{Loader, StepData};
    use crate::packing::PackingStrategy;

    fn reader(rows: &[Kind]) -> Arc<dyn RowReader> {
        Arc::new(TestReader(rows.to_vec()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn a_plan_has_the_steps_that_the_loader_yields(
            rows in any_readable_rows(), options in any_options(), weight in 1u32..250, epochs in 1u64..4
        ) {
            let weight = f64::from(weight) / 100.0;
            let share = DatasetShare { rows: rows.len() as u64, weight };
            let order = Order::new(&[share], RowOrder::Shuffled, 3, [9; 32]).unwrap();
            let options = LoaderOptions { epochs: NonZeroU64::new(epochs), ..options };
            let planned = plan(&reader(&rows), &order, &options, epochs, &|_, _| ());
            let mut loader = Loader::start(reader(&rows), order, options, DataState::default());
            let mut steps: Vec<StepData> = Vec::new();
            let mut failed = None;
            for step in std::iter::from_fn(|| loader.next_step()) {
                match step {
                    Ok(step) => steps.push(step),
                    Err(error) => failed = Some(error),
                }
            }
            // With a low weight an epoch may have no usable row. Then both fail with the same
            // error; the plan's has the rejections that the loader reported step by step.
            let reported = || steps.iter().flat_map(|step| step.rejected.clone()).collect();
            let failed = failed.map(|error| error.after(reported()));
            let Ok(planned) = planned.as_ref() else {
                prop_assert_eq!(planned.err(), failed);
                return Ok(());
            };
            prop_assert_eq!(failed, None);
            let sum = |count: fn(&StepData) -> usize| steps.iter().map(count).sum::<usize>() as u64;
            prop_assert_eq!(planned.steps, steps.len() as u64);
            prop_assert_eq!(planned.samples, sum(|step| step.num_samples));
            prop_assert_eq!(planned.tokens, sum(|step| step.num_tokens));
            let last = steps.into_iter().next_back().unwrap().state;
            prop_assert_eq!((planned.rows_read, &planned.rejected), (last.rows_read, &last.rejected));
        }
    }

    #[test]
    fn each_row_is_measured_once_and_progress_ends_at_all_of_them() {
        let rows = [Kind::Text(3); 150];
        let order = order(rows.len(), RowOrder::Shuffled);
        let reported = Cell::new((0, 0));
        let progress = |done, total| {
            assert!(done > reported.get().0);
            reported.set((done, total));
        };
        let options = options(PackingStrategy::Sequential);
        let plan = plan(&reader(&rows), &order, &options, 3, &progress).unwrap();
        assert_eq!(reported.get(), (150, 150));
        // 21 samples of 3 tokens fill 63 of 64; 4 packs a step
        assert_eq!((plan.packs, plan.steps, plan.samples), (3 * 8, 3 * 2, 450));
        assert_eq!(plan.largest, [Length { tokens: 2 * 63, pixel_bytes: 0 }; 2]);
        assert!((plan.fill - 450.0 / (8.0 * 64.0)).abs() < 1e-9, "{plan:?}");
    }

    #[test]
    fn a_plan_fails_where_the_run_would() {
        let options = options(PackingStrategy::BestFit);
        let order = order(2, RowOrder::File);
        let plan = |rows: &[Kind], options| plan(&reader(rows), &order, &options, 1, &|_, _| ());
        let error = plan(&[Kind::Text(1), Kind::Panic], options).unwrap_err();
        assert!(matches!(error, LoaderError::Panicked { row: 2, .. }), "{error}");
        let stop = LoaderOptions { on_error: OnError::Stop, ..options };
        let error = plan(&[Kind::Broken, Kind::Text(1)], stop).unwrap_err();
        assert!(matches!(error, LoaderError::Rejected { .. }), "{error}");
        assert_eq!(plan(&[Kind::BrokenPixels(1), Kind::Text(1)], stop).unwrap().samples, 2);
    }
}
