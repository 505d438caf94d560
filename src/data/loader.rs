//! Rows to optimizer steps, ahead of the training loop, on threads of its own.
//!
//! Workers encode rows in parallel; one thread takes them in order, packs, collates and unpads. The
//! steps are a function of order, options and start alone. Memory is bounded: encoded rows ahead
//! (by bytes), one packing window, and two steps.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use super::collate::collate;
use super::order::Order;
use super::packing::{Item, WINDOW_SAMPLES};
use super::row::{Length, Rejection, Row, RowReader, SampleSize};
use super::steps::{Assembly, EpochRows, Step};
use super::workers::{Limits, Workers, panic_message};
use crate::batch::{EncodedSample, Pack, VarlenBatch};

pub(super) use super::loader_error::LoaderError;
pub(super) use super::steps::{DataState, LoaderOptions, Rmpad};

/// Bytes of encoded rows that wait to be packed.
const AHEAD_BYTES: u64 = 256 << 20;

/// The data of one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepData {
    /// `gradient_accumulation_steps` of them, fewer at the end of an epoch.
    pub micro_batches: Vec<VarlenBatch>,
    /// Epochs consumed as of the end of this step, fractional by rows.
    pub epoch: f64,
    /// Samples in all micro-batches.
    pub num_samples: usize,
    /// Real tokens in all micro-batches.
    pub num_tokens: usize,
    /// Each sample, in the order of the streams.
    pub samples: Vec<SampleSize>,
    /// Share of the packs' length that tokens take; with packing off, of the padded batches.
    pub fill: f64,
    /// Rows found unusable since the step before.
    pub rejected: Vec<Rejection>,
    /// As of the end of this step: a loader started from it yields the steps that follow.
    pub state: DataState,
}

/// A running loader. Dropping it stops and joins its threads; each ends after the row it is at.
pub struct Loader {
    workers: Option<Arc<EncodingWorkers>>,
    steps: Option<Receiver<Result<StepData, LoaderError>>>,
    assembler: Option<JoinHandle<()>>,
    failed: Option<LoaderError>, // to be told by the first `next_step`
    peeked: Option<Result<StepData, LoaderError>>, // by `is_ready`
}

type EncodingWorkers = Workers<Result<EncodedSample, Rejection>>;
type Tagged = (u32, EncodedSample); // with the index of its data set

impl Loader {
    /// Starts to read at `from`: the default for the beginning, else the state of a step.
    ///
    /// Whatever is wrong with the arguments comes out of the first [`Loader::next_step`].
    pub fn start(
        reader: Arc<dyn RowReader>,
        order: Order,
        options: LoaderOptions,
        from: DataState,
    ) -> Self {
        let mut loader =
            Self { workers: None, steps: None, assembler: None, failed: None, peeked: None };
        if options.epochs.is_none_or(|epochs| from.epoch < epochs.get()) {
            loader.failed = loader.spawn(reader, order, options, from).err();
        }
        loader
    }

    /// Whether a step lies ready, so that [`Self::next_step`] would not wait.
    pub fn is_ready(&mut self) -> bool {
        if self.peeked.is_none() {
            self.peeked = self.steps.as_ref().and_then(|steps| steps.try_recv().ok());
        }
        self.peeked.is_some()
    }

    /// The next step; waits for it. `None` after the last epoch, and after an error.
    pub fn next_step(&mut self) -> Option<Result<StepData, LoaderError>> {
        if let Some(error) = self.failed.take() {
            return Some(Err(error));
        }
        if let Some(step) = self.peeked.take() {
            return Some(step);
        }
        if let Ok(step) = self.steps.as_ref()?.recv() {
            return Some(step);
        }
        // the assembler has ended: at the end of the data, or in a panic
        self.steps = None;
        let message =
            self.assembler.take()?.join().err().map(|payload| panic_message(&*payload))?;
        Some(Err(LoaderError::Crashed { message }))
    }

    fn spawn(
        &mut self,
        reader: Arc<dyn RowReader>,
        order: Order,
        options: LoaderOptions,
        from: DataState,
    ) -> Result<(), LoaderError> {
        let spawn_error = |error: std::io::Error| LoaderError::Spawn { message: error.to_string() };
        from.check_epoch(order.epoch_len(from.epoch))?;
        let rows_of = order.epoch_sizes();
        let step_packs = options.batch_size.saturating_mul(options.gradient_accumulation_steps);
        let limits = Limits {
            workers: options.workers,
            rows: step_packs.get().saturating_mul(2).max(WINDOW_SAMPLES),
            bytes: AHEAD_BYTES,
        };
        let encoder = Arc::clone(&reader);
        let encode = move |row| {
            encoder.read_admitted(row, &|length| options.admit(length, || encoder.id(row)))
        };
        let size = |sample: &Result<EncodedSample, _>| {
            sample.as_ref().map_or(0, |sample| Length::of(sample).bytes())
        };
        let rows = rows_from(order, &from, options.epochs);
        let workers = Arc::new(Workers::start(rows, encode, size, limits).map_err(spawn_error)?);
        self.workers = Some(Arc::clone(&workers));
        let (sender, receiver) = sync_channel(1);
        self.steps = Some(receiver);
        let assemble = move || {
            if let Err(error) = assemble(&*reader, &workers, options, rows_of, from, &sender) {
                // without a receiver the loader was dropped, and nobody wants to know
                let _ = sender.send(Err(error));
            }
        };
        let builder = thread::Builder::new().name("loader-assembler".to_owned());
        self.assembler = Some(builder.spawn(assemble).map_err(spawn_error)?);
        Ok(())
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.steps = None; // an assembler that waits to send goes on, and ends
        if let Some(workers) = &self.workers {
            workers.stop(); // one that waits for a row ends, too
        }
        if let Some(assembler) = self.assembler.take() {
            // its panic would have come out of `next_step`; now nobody asks
            let _ = assembler.join();
        }
    }
}

/// The rows that `from` holds, those left in its epoch, and those of the epochs after it.
fn rows_from(
    order: Order,
    from: &DataState,
    epochs: Option<NonZeroU64>,
) -> impl Iterator<Item = Row> + Send + 'static {
    let rows = order.epoch(from.epoch);
    let held: Vec<Row> = from.held().map(|position| rows[position as usize]).collect();
    let rest = rows.into_iter().skip(from.next as usize);
    let later = from.epoch + 1..epochs.map_or(u64::MAX, NonZeroU64::get);
    held.into_iter().chain(rest).chain(later.flat_map(move |epoch| order.epoch(epoch)))
}

/// Takes encoded rows in order and sends steps, until the data ends or nobody receives.
fn assemble(
    reader: &dyn RowReader,
    workers: &EncodingWorkers,
    options: LoaderOptions,
    rows_of: EpochRows,
    from: DataState,
    steps: &SyncSender<Result<StepData, LoaderError>>,
) -> Result<(), LoaderError> {
    let next = || {
        let (row, result) = workers.next()?;
        Some(result.map(|sample| (row, sample)).map_err(|message| {
            let id = reader.id(row);
            LoaderError::Panicked { file: id.file.display().to_string(), row: id.line, message }
        }))
    };
    let read_again = |position| {
        let stopped = || LoaderError::State { problem: "its rows cannot be read again".to_owned() };
        let (row, sample) = next().ok_or_else(stopped)??;
        let sample = sample.map_err(|rejection| LoaderError::Changed { rejection })?;
        Ok(Item { position, length: Length::of(&sample), value: (row.dataset, sample) })
    };
    let mut assembly = Assembly::resume(options, rows_of, from, read_again)?;
    loop {
        while let Some(step) = assembly.pop() {
            if steps.send(Ok(collate_step(step, &options)?)).is_err() {
                return Ok(());
            }
        }
        let Some(next) = next() else {
            return Ok(());
        };
        let (row, sample) = next?;
        let outcome = sample.map(|sample| (Length::of(&sample), (row.dataset, sample)));
        assembly.push(outcome, || reader.id(row))?;
    }
}

fn collate_step(step: Step<Tagged>, options: &LoaderOptions) -> Result<StepData, LoaderError> {
    let Step { micro_batches, epoch, num_samples, num_tokens, fill, rejected, state } = step;
    let items = micro_batches.iter().flatten().flatten();
    let samples = items.map(|item| SampleSize::of(item.value.0, &item.value.1)).collect();
    let samples_of = |items: Vec<Item<Tagged>>| items.into_iter().map(|i| i.value.1).collect();
    let batch = |packs: Vec<_>| {
        let packs = packs.into_iter().map(|items| Pack { samples: samples_of(items) }).collect();
        let batch = collate(packs, options.pad_id, options.side, options.merge_size)?;
        Ok(match options.rmpad {
            Rmpad::Unpad => batch.unpad()?,
            Rmpad::KeepPadding => batch.keep_padding()?,
        })
    };
    let micro_batches = micro_batches.into_iter().map(batch).collect::<Result<_, LoaderError>>()?;
    Ok(StepData { micro_batches, epoch, num_samples, num_tokens, samples, fill, rejected, state })
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU32, NonZeroUsize};
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::super::config::{OnError, PackingStrategy, Truncation};
    use super::super::order::RowOrder;
    use super::super::packing::{Overlong, Packing};
    use super::super::test_reader::{Kind, TestReader, any_options, any_rows, options, order};
    use super::*;

    fn start(
        rows: &[Kind],
        row_order: RowOrder,
        options: LoaderOptions,
        from: DataState,
    ) -> Loader {
        let order = order(rows.len(), row_order);
        Loader::start(Arc::new(TestReader(rows.to_vec())), order, options, from)
    }

    fn all_steps(rows: &[Kind], options: LoaderOptions) -> Vec<StepData> {
        collect(start(rows, RowOrder::Shuffled, options, DataState::default()))
    }

    fn collect(mut loader: Loader) -> Vec<StepData> {
        std::iter::from_fn(|| loader.next_step()).map(Result::unwrap).collect()
    }

    /// The steps of a loader that starts where `step` ends; its state went through a file.
    fn resumed_after(rows: &[Kind], options: LoaderOptions, step: &StepData) -> Vec<StepData> {
        let text = serde_json::to_string(&step.state).unwrap();
        let from = serde_json::from_str(&text).unwrap();
        collect(start(rows, RowOrder::Shuffled, options, from))
    }

    /// The steps before the error, and the error.
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
            let steps = all_steps(&rows, options);
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
        fn a_loader_started_from_any_step_yields_the_steps_that_follow(
            rows in any_rows(), options in any_options(), first in 0usize..9
        ) {
            let steps = all_steps(&rows, options);
            for index in (first..steps.len()).step_by(steps.len() / 8 + 1) {
                prop_assert!(resumed_after(&rows, options, &steps[index]) == steps[index + 1..]);
            }
        }

        #[test]
        fn the_number_of_workers_changes_nothing(rows in any_rows(), options in any_options()) {
            let workers = |n| LoaderOptions { workers: NonZeroUsize::new(n).unwrap(), ..options };
            prop_assert!(all_steps(&rows, workers(1)) == all_steps(&rows, workers(4)));
        }

        #[test]
        fn steps_have_their_size_and_packs_their_limit(
            rows in any_rows(), options in any_options()
        ) {
            for step in all_steps(&rows, options) {
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
                    resumed_after(&rows, options(strategy), step) == steps[index + 1..],
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
        let (steps, error) =
            until_error(&[Kind::Text(3), Kind::Text(3), Kind::Panic], one_a_step());
        assert_eq!(steps, 1); // the second waits for the third row
        let message = error.to_string();
        assert_eq!(message, "made-up.jsonl:3: reading the row panicked: made-up panic");
    }

    #[test]
    fn the_first_bad_row_stops_the_run_if_the_config_says_so() {
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
        assert!(error.hint().contains("max_length"));
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
        let state = |next, carry: &[u64], ready: &[&[u64]]| DataState {
            next,
            carry: carry.to_vec(),
            ready: ready.iter().map(|pack| pack.to_vec()).collect(),
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
        let slow = Kind::Slow(Duration::from_millis(20));
        for (rows, packing) in [
            (vec![Kind::Text(1); 100_000], Packing::Off), // the assembler waits for a receiver
            (vec![slow; 100_000], options(PackingStrategy::BestFit).packing), // .. for rows
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
}
