use std::num::{NonZeroU32, NonZeroUsize};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::config::{OnError, Truncation};
use crate::dataset::order::RowOrder;
use crate::loader::plan::{first_epoch_packs, plan};
use crate::loader::test_reader::{
    Kind, TestReader, any_options, any_readable_rows, any_rows, options, order,
};
use crate::packing::{Overlong, Packing, PackingStrategy};
use batch::VarlenBatch;
use fault::Fault;

fn start(rows: &[Kind], row_order: RowOrder, options: LoaderOptions, from: DataState) -> Loader {
    let order = order(rows.len(), row_order);
    Loader::start(Arc::new(TestReader(rows.to_vec())), order, options, from)
}

fn all_steps(rows: &[Kind], options: LoaderOptions) -> Vec<StepData> {
    collect(start(rows, RowOrder::Shuffled, options, DataState::default()))
}

pub(super) fn collect(loader: Loader) -> Vec<StepData> {
    let (steps, error) = outcome(loader);
    assert_eq!(error, None);
    steps
}

/// All steps, and the error that ended them without its examples, which depend on the start.
fn outcome(mut loader: Loader) -> (Vec<StepData>, Option<LoaderError>) {
    let mut steps = Vec::new();
    while let Some(step) = loader.next_step() {
        match step {
            Ok(step) => steps.push(step),
            Err(mut error) => {
                if let LoaderError::TooManyRejected { first, .. }
                | LoaderError::EmptyEpoch { first, .. } = &mut error
                {
                    first.clear();
                }
                assert!(loader.next_step().is_none(), "nothing follows an error");
                return (steps, Some(error));
            }
        }
    }
    (steps, None)
}

/// The steps of a run from the beginning, and its error.
fn whole_run(rows: &[Kind], options: LoaderOptions) -> (Vec<StepData>, Option<LoaderError>) {
    outcome(start(rows, RowOrder::Shuffled, options, DataState::default()))
}

/// The steps of a loader that starts at the end of `step`. Its state is written and read.
fn resumed_after(
    rows: &[Kind],
    options: LoaderOptions,
    step: &StepData,
) -> (Vec<StepData>, Option<LoaderError>) {
    let text = serde_json::to_string(&step.state).unwrap();
    let from = serde_json::from_str(&text).unwrap();
    outcome(start(rows, RowOrder::Shuffled, options, from))
}

/// The number of steps before the error, and the error.
fn until_error(rows: &[Kind], options: LoaderOptions) -> (usize, LoaderError) {
    let mut loader = start(rows, RowOrder::File, options, DataState::default());
    let mut steps = 0;
    let error = loop {
        match loader.next_step().expect("an error comes before the end") {
            Ok(_) => steps += 1,
            Err(error) => break error,
        }
    };
    assert!(loader.next_step().is_none(), "nothing follows an error");
    (steps, error)
}

/// Rows of the samples in a step.
fn rows_of(step: &StepData) -> Vec<u32> {
    let rows = |batch: &VarlenBatch| {
        let segments = batch.cu_seqlens.segments();
        // padding begins with `pad_id` and has no second position
        let real = segments.filter(|segment| batch.position_ids[segment.start] != [0; 3]);
        real.map(|segment| batch.input_ids[segment.start]).collect::<Vec<_>>()
    };
    step.micro_batches.iter().flat_map(rows).collect()
}

fn one_a_step() -> LoaderOptions {
    let one = NonZeroUsize::MIN;
    let options = options(PackingStrategy::Sequential);
    let packing = Packing::Off;
    LoaderOptions { batch_size: one, gradient_accumulation_steps: one, packing, ..options }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn every_usable_row_comes_once_an_epoch_and_every_other_is_reported(
        rows in any_rows(), options in any_options()
    ) {
        let steps = all_steps(&rows, LoaderOptions { max_rejected: 1.0, ..options });
        for epoch in 0..2u64 {
            let of_epoch = |step: &&StepData| (step.epoch.ceil() as u64).max(1) - 1 == epoch;
            let steps: Vec<_> = steps.iter().filter(of_epoch).collect();
            let mut seen: Vec<u32> = steps.iter().copied().flat_map(rows_of).collect();
            let samples: usize = steps.iter().map(|step| step.num_samples).sum();
            prop_assert_eq!(seen.len(), samples);
            let rejected = steps.iter().flat_map(|step| &step.rejected);
            seen.extend(rejected.map(|rejection| rejection.row as u32 - 1));
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..rows.len() as u32).collect::<Vec<_>>());
            prop_assert_eq!(steps.last().unwrap().epoch, epoch as f64 + 1.0);
        }
        let last = &steps.last().unwrap().state;
        prop_assert_eq!((last.epoch, last.next, last.rows_read), (2, 0, 2 * rows.len() as u64));
    }

    #[test]
    fn a_loader_started_from_any_step_yields_the_steps_that_follow_and_ends_alike(
        rows in any_rows(), options in any_options(), first in 0usize..9
    ) {
        let (steps, error) = whole_run(&rows, options);
        for index in (first..steps.len()).step_by(steps.len() / 8 + 1) {
            let (rest, end) = resumed_after(&rows, options, &steps[index]);
            prop_assert!(rest == steps[index + 1..], "resumed after step {}", index);
            prop_assert_eq!(&end, &error, "resumed after step {}", index);
        }
    }

    #[test]
    fn the_number_of_workers_changes_nothing(rows in any_rows(), options in any_options()) {
        let workers = |n| LoaderOptions { workers: NonZeroUsize::new(n).unwrap(), ..options };
        prop_assert!(whole_run(&rows, workers(1)) == whole_run(&rows, workers(4)));
    }

    #[test]
    fn broken_pixels_leave_gaps_in_the_packs_that_the_lengths_give(
        rows in any_rows(), options in any_options()
    ) {
        let reader: Arc<dyn RowReader> = Arc::new(TestReader(rows.clone()));
        let order = order(rows.len(), RowOrder::Shuffled);
        let options = LoaderOptions { epochs: NonZeroU64::new(1), max_rejected: 1.0, ..options };
        let packs = first_epoch_packs(&reader, &order, &options, &|_, _| ()).unwrap();
        let planned = packs.into_iter().flatten().map(|(row, _)| row.row);
        let whole = |row: &u32| !matches!(rows[*row as usize], Kind::BrokenPixels(_));
        let planned: Vec<u32> = planned.filter(whole).collect();
        let steps = all_steps(&rows, options);
        prop_assert_eq!(steps.iter().flat_map(rows_of).collect::<Vec<_>>(), planned);
        let plan = plan(&reader, &order, &options, 1, &|_, _| ()).unwrap();
        prop_assert!(steps.len() as u64 <= plan.steps);
        let counted: u64 = steps.last().unwrap().state.rejected.values().sum();
        prop_assert_eq!(counted as usize, steps.iter().map(|step| step.rejected.len()).sum::<usize>());
    }

    #[test]
    fn steps_have_their_size_and_packs_their_limit(
        rows in any_readable_rows(), options in any_options()
    ) {
        for step in whole_run(&rows, options).0 {
            let ends_epoch = step.state.next == 0;
            let micro_batches = options.gradient_accumulation_steps.get();
            prop_assert!(step.micro_batches.len() == micro_batches || ends_epoch);
            let num_tokens: usize = step.micro_batches.iter().map(|batch| batch.num_tokens).sum();
            prop_assert_eq!(step.num_tokens, num_tokens);
            prop_assert!(step.fill > 0.0 && step.fill <= 1.0);
            if let Packing::On { length, overlong: Overlong::Reject, .. } = options.packing {
                let limit = options.batch_size.get() * length.get() as usize;
                prop_assert!(step.micro_batches.iter().all(|batch| batch.num_tokens <= limit));
            }
        }
    }
}

#[test]
fn a_run_may_be_resumed_after_every_one_of_its_steps() {
    let kind = |i: usize| match i % 11 {
        3 => Kind::Broken,
        5 => Kind::Text(65),
        7 => Kind::Image(i % 17),
        _ => Kind::Text(1 + i * 7919 % 29),
    };
    let rows: Vec<_> = (0..600).map(kind).collect();
    for strategy in [PackingStrategy::Sequential, PackingStrategy::BestFit] {
        let steps = all_steps(&rows, options(strategy));
        assert!(steps.len() > 20 && steps.iter().any(|step| !step.rejected.is_empty()));
        for (index, step) in steps.iter().enumerate() {
            assert!(
                resumed_after(&rows, options(strategy), step).0 == steps[index + 1..],
                "{strategy:?}, resumed after step {index}"
            );
        }
    }
}

#[test]
fn fill_counts_padding_when_packing_is_off() {
    let two = NonZeroUsize::new(2).unwrap();
    let options = LoaderOptions { batch_size: two, ..one_a_step() };
    let rows = [Kind::Text(8), Kind::Text(4)];
    let steps = collect(start(&rows, RowOrder::File, options, DataState::default()));
    assert_eq!(steps[0].fill, 12.0 / 16.0);
}

#[test]
fn without_a_number_of_epochs_the_data_never_ends() {
    let options = LoaderOptions { epochs: None, ..one_a_step() };
    let mut loader = start(&[Kind::Text(1); 3], RowOrder::File, options, DataState::default());
    for step in 1..50 {
        assert_eq!(loader.next_step().unwrap().unwrap().epoch, f64::from(step) / 3.0);
    }
}

#[test]
fn a_panic_in_a_worker_is_an_error_that_names_the_row() {
    let (steps, error) = until_error(&[Kind::Text(3), Kind::Text(3), Kind::Panic], one_a_step());
    assert_eq!(steps, 1); // the second waits for the third row
    let message = error.to_string();
    assert_eq!(message, "made-up.jsonl:3: reading the row panicked: made-up panic");
    let decoded = until_error(&[Kind::Text(3), Kind::Image(3), Kind::PanicPixels], one_a_step());
    assert_eq!(decoded, (2, error));
}

#[test]
fn the_first_bad_row_stops_the_run_if_the_config_requires_it() {
    let rows = [Kind::Text(3), Kind::Text(90), Kind::Broken];
    let stop = LoaderOptions { on_error: OnError::Stop, ..one_a_step() };
    assert_eq!(until_error(&rows, stop).1.to_string(), "made-up.jsonl:3: the row is broken");
    let limited = LoaderOptions {
        max_length: NonZeroU32::new(89),
        truncation: Truncation::Error,
        ..one_a_step()
    };
    let error = until_error(&rows, limited).1;
    assert_eq!(error.to_string(), "made-up.jsonl:2: 90 tokens, `max_length` is 89");
    assert!(error.hint().unwrap().contains("max_length"));
}

#[test]
fn more_rejected_rows_than_allowed_stop_the_run() {
    let mut rows = vec![Kind::Text(2); 300];
    let options = LoaderOptions { max_rejected: 0.01, ..one_a_step() };
    rows[7] = Kind::Broken;
    rows[200] = Kind::Broken;
    rows[299] = Kind::Broken;
    let order = RowOrder::File;
    assert_eq!(collect(start(&rows, order, options, DataState::default())).len(), 297);
    rows[8] = Kind::Broken;
    let (steps, error) = until_error(&rows, options);
    assert_eq!(steps, 295); // only the fourth is more than 1 % of 300; one step held back
    let LoaderError::TooManyRejected { rows_read: 300, rejected, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(rejected["broken"], 4);
    rows.truncate(20);
    assert!(matches!(
        until_error(&rows, options).1,
        LoaderError::TooManyRejected { rows_read: 20, .. }
    ));
}

#[test]
fn an_epoch_without_a_usable_sample_is_an_error_and_no_endless_loop() {
    let options = LoaderOptions { epochs: None, ..one_a_step() };
    for rows in [vec![], vec![Kind::Broken; 3]] {
        let (steps, error) = until_error(&rows, options);
        assert!(matches!(error, LoaderError::EmptyEpoch { epoch: 0, .. }), "{error}");
        assert_eq!((steps, error.unreported().len()), (0, rows.len()));
    }
}

#[test]
fn a_state_that_the_data_cannot_have_led_to_is_refused() {
    let state = |next, pending: &[u64], packed: &[&[u64]]| DataState {
        next,
        pending: pending.to_vec(),
        packed: packed.iter().map(|pack| pack.to_vec()).collect(),
        ..DataState::default()
    };
    let rows = [Kind::Text(3); 4];
    for from in [
        state(5, &[0], &[]),
        state(4, &[], &[]),
        state(2, &[2], &[]),
        state(3, &[1], &[&[0, 1]]),
        state(3, &[1], &[&[]]),
    ] {
        let mut loader = start(&rows, RowOrder::File, one_a_step(), from.clone());
        let error = loader.next_step().unwrap().unwrap_err();
        assert!(matches!(error, LoaderError::State { .. }), "{from:?}: {error}");
        assert!(loader.next_step().is_none());
    }
    let from = state(3, &[], &[&[2]]);
    let rows = [Kind::Text(3), Kind::Text(3), Kind::Broken, Kind::Text(3)];
    let error = start(&rows, RowOrder::File, one_a_step(), from).next_step().unwrap();
    assert!(matches!(error, Err(LoaderError::Changed { .. })));
}

#[test]
fn a_loader_after_its_last_epoch_yields_nothing() {
    let from = DataState { epoch: 1, ..DataState::default() };
    assert!(start(&[Kind::Text(1)], RowOrder::File, one_a_step(), from).next_step().is_none());
}

#[test]
fn dropping_a_loader_in_the_middle_does_not_wait_for_the_data() {
    let [slow, slow_pixels] =
        [Kind::Slow, Kind::SlowPixels].map(|kind| kind(Duration::from_millis(20)));
    for (rows, packing) in [
        (vec![Kind::Text(1); 100_000], Packing::Off), // the assembler waits for a receiver
        (vec![slow; 100_000], options(PackingStrategy::BestFit).packing), // .. for rows
        (vec![slow_pixels; 100_000], Packing::Off),   // .. for images
    ] {
        let options = LoaderOptions { packing, ..one_a_step() };
        let mut loader = start(&rows, RowOrder::File, options, DataState::default());
        if packing == Packing::Off {
            loader.next_step().unwrap().unwrap();
        }
        std::thread::sleep(Duration::from_millis(30));
        let began = Instant::now();
        drop(loader);
        assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    }
}

/// Per step: the rows trained on and the rejected rows.
fn outline(rows: &[Kind], options: LoaderOptions) -> Vec<(Vec<u32>, Vec<u64>)> {
    let steps = collect(start(rows, RowOrder::File, options, DataState::default()));
    let rejected = |step: &StepData| step.rejected.iter().map(|rejection| rejection.row).collect();
    steps.iter().map(|step| (rows_of(step), rejected(step))).collect()
}

#[test]
fn steps_of_broken_pixels_alone_are_reported_with_the_previous_or_next_step() {
    let (good, bad) = (Kind::Image(1), Kind::BrokenPixels(1));
    let rows = [bad, bad, good, bad, good, bad, bad];
    let expected = [(vec![2], vec![1, 2, 4]), (vec![4], vec![6, 7])];
    assert_eq!(outline(&rows, one_a_step()), expected);
    let steps = collect(start(&rows, RowOrder::File, one_a_step(), DataState::default()));
    assert_eq!((steps[0].epoch, steps[1].epoch), (4.0 / 7.0, 1.0));
    assert_eq!((steps[0].state.next, steps[1].state.next), (5, 0)); // it holds the fifth
    // with the second epoch's first rows
    let options = LoaderOptions { epochs: NonZeroU64::new(2), ..one_a_step() };
    assert_eq!(outline(&rows, options), [expected.clone(), expected].concat());
    // a step with a gap is complete
    let two = NonZeroUsize::new(2).unwrap();
    let options = LoaderOptions { batch_size: two, ..one_a_step() };
    assert_eq!(outline(&[good, bad, good], options), [(vec![0], vec![2]), (vec![2], vec![])]);
}

#[test]
fn broken_pixels_count_as_rejected() {
    let mut rows = vec![Kind::Image(2); 300];
    let options = LoaderOptions { max_rejected: 0.01, ..one_a_step() };
    for row in [7, 100, 200] {
        rows[row] = Kind::BrokenPixels(2);
    }
    let steps = collect(start(&rows, RowOrder::File, options, DataState::default()));
    assert_eq!((steps.len(), steps[296].state.rejected["broken"]), (297, 3));
    assert_eq!(steps[296].state.rejected_by_file["made-up.jsonl"]["broken"], 3);
    rows[250] = Kind::BrokenPixels(2);
    let (steps, error) = until_error(&rows, options);
    let LoaderError::TooManyRejected { rejected, first, unreported, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((steps, rejected["broken"], first.len(), unreported.len()), (247, 4, 4, 1));
    let stop = LoaderOptions { on_error: OnError::Stop, ..one_a_step() };
    let (steps, error) = until_error(&rows, stop);
    assert_eq!((steps, error.to_string().as_str()), (7, "made-up.jsonl:8: the row is broken"));
    // the error counts both kinds of rejections
    let rows = [Kind::Broken, Kind::BrokenPixels(0), Kind::BrokenPixels(0)];
    let (steps, error) = until_error(&rows, one_a_step());
    let LoaderError::EmptyEpoch { epoch: 0, rows: 3, rejected, first, unreported } = error else {
        panic!("{error}");
    };
    assert_eq!((steps, rejected["broken"], first.len(), unreported.len()), (0, 3, 3, 3));
}

#[test]
fn a_row_that_has_changed_since_it_was_measured_is_rejected() {
    let steps = collect(start(
        &[Kind::Image(3), Kind::Grown(4), Kind::Image(5)],
        RowOrder::File,
        options(PackingStrategy::BestFit),
        DataState::default(),
    ));
    assert_eq!(steps.iter().flat_map(rows_of).collect::<Vec<_>>(), [0, 2]);
    let [rejection] = &steps[0].rejected[..] else { panic!("{:?}", steps[0].rejected) };
    assert_eq!((rejection.row, rejection.reason.as_str()), (2, "changed"));
    assert!(
        rejection.message.contains("7 tokens and 96 bytes of pixels, and had 6 tokens"),
        "{rejection}"
    );
}

#[test]
fn a_held_row_that_has_grown_while_the_run_was_stopped_is_an_error() {
    let rows = [Kind::Text(40), Kind::Text(30), Kind::Text(30), Kind::Image(20), Kind::Image(30)];
    let options = LoaderOptions {
        batch_size: NonZeroUsize::MIN,
        gradient_accumulation_steps: NonZeroUsize::MIN,
        max_length: NonZeroU32::new(60),
        ..options(PackingStrategy::BestFit)
    };
    let step = all_steps(&rows, options).swap_remove(0);
    let held = step.state.packed.clone();
    assert!(held.iter().any(|pack| pack.len() == 2), "{held:?}");
    let with = |image| {
        let rows: Vec<Kind> = rows
            .iter()
            .map(|kind| if matches!(kind, Kind::Image(_)) { image } else { *kind })
            .collect();
        resumed_after(&rows, options, &step)
    };
    let (steps, error) = with(Kind::Image(59));
    assert!(steps.is_empty() && matches!(error, Some(LoaderError::Changed { .. })), "{error:?}");
    let (steps, error) = with(Kind::Image(45));
    assert!(steps.is_empty() && matches!(error, Some(LoaderError::State { .. })), "{error:?}");
}
