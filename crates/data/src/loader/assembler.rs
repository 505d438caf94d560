//! The assembler: the thread that packs lengths, fills the packs with samples and sends steps.
//!
//! A row with broken images leaves a gap in its pack. So the packs depend on the lengths only, and
//! not on errors found by decoding. A step is sent when a sample of the next step has been read or
//! the epoch has ended. The rejections of steps without a usable sample are reported with the
//! previous step; at the beginning of an epoch, with the next step.

use std::collections::{BTreeMap, VecDeque};
use std::mem::take;
use std::sync::mpsc::SyncSender;
use std::task::Poll;

use crate::config::OnError;
use crate::dataset::RowReader;
use crate::loader::error::LoaderError;
use crate::loader::share::{
    FilledStep, LoaderShare, RowsRead, collate_step, exchange, is_own, of_another_rank, plan_digest,
};
use crate::loader::steps::{
    Assembly, DataState, EpochRows, LoaderOptions, NUM_EXAMPLES, Step, StepData,
};
use crate::loader::workers::{JobResult, Workers};
use crate::packing::Item;
use crate::row::{Length, Rejection, SampleCounts, SampleIndex};
use batch::EncodedSample;
use ranks::DistError;

/// The threads that read rows.
pub(super) struct Pools {
    /// Measures rows in the order of the epoch, or looks up their lengths.
    pub(super) lengths: Workers<SampleIndex, (), Result<Length, Rejection>>,
    /// Reads the rows of planned steps.
    pub(super) samples: Workers<SampleIndex, Length, Result<EncodedSample, Rejection>>,
}

/// Receives the steps, and the error that ends them.
pub(super) type Sender = SyncSender<Result<StepData, LoaderError>>;

/// Number of steps planned ahead, regardless of their size.
const AHEAD_STEPS: usize = 2;
/// Number of samples per worker planned ahead, so that all workers are busy when steps are small.
const AHEAD_SAMPLES: usize = 16;

/// Packs rows, reads them and sends the steps of a loader.
pub(super) struct Assembler<'a> {
    reader: &'a dyn RowReader,
    pools: &'a Pools,
    steps: &'a Sender,
    options: LoaderOptions,
    share: Option<LoaderShare>,
    assembly: Assembly<SampleIndex>,
    planned: VecDeque<Step<SampleIndex>>,
    num_planned: usize, // number of samples in `planned`
    num_unread: usize,  // of these, given to the pool of samples
    /// `None` while planning continues; then `Ok` at the end of the data, or the error.
    end: Option<Result<(), LoaderError>>,
    /// A finished step. It is sent once it is certain whether it ends its epoch.
    finished: Option<StepData>,
    /// Whether no row of the epoch has been usable so far.
    epoch_is_empty: bool,
    late: LateRejections,
    first_rejections: Vec<Rejection>, // of finished steps
    unreported: Vec<Rejection>,       // of steps without a sample at the beginning of an epoch
}

/// The reason why assembling ends.
enum Stop {
    /// The receiver was dropped.
    Unwanted,
    Failed(LoaderError),
}

impl<E: Into<LoaderError>> From<E> for Stop {
    fn from(error: E) -> Self {
        match error.into() {
            // the loader was dropped
            LoaderError::Ranks(DistError::Closed) => Self::Unwanted,
            error => Self::Failed(error),
        }
    }
}

/// Number of rows rejected when their step was filled, by file and reason. The assembly does not
/// count them.
#[derive(Default)]
struct LateRejections(BTreeMap<(String, String), u64>);

impl LateRejections {
    fn count(&mut self, rejection: &Rejection) {
        let key = (rejection.file.clone(), rejection.reason.clone());
        *self.0.entry(key).or_default() += 1;
    }

    fn add_to(&self, state: &mut DataState) {
        for ((file, reason), rows) in &self.0 {
            state.count(file, reason, *rows);
            state.rejected_late += rows;
        }
    }
}

impl<'a> Assembler<'a> {
    /// Continues from `from`. Its held samples are measured again.
    pub(super) fn resume(
        reader: &'a dyn RowReader,
        pools: &'a Pools,
        options: LoaderOptions,
        rows_of: EpochRows,
        from: DataState,
        steps: &'a Sender,
        share: Option<LoaderShare>,
    ) -> Result<Self, LoaderError> {
        let measure_again = |position| {
            let stopped =
                || LoaderError::State { problem: "its rows cannot be read again".to_owned() };
            let (row, result) = pools.lengths.next().ok_or_else(stopped)?;
            let result = result.map_err(|message| panicked(reader, row, message))?;
            let checked = LoaderError::unless_transient(result)?.and_then(|length| {
                options.check_length(length, || reader.id(row)).map(|()| length)
            });
            let length = checked.map_err(|rejection| LoaderError::Changed { rejection })?;
            Ok(Item { position, length, value: row })
        };
        let epoch_is_empty = from.next == 0;
        Ok(Self {
            reader,
            pools,
            steps,
            options,
            share,
            assembly: Assembly::resume(options, rows_of, from, measure_again)?,
            planned: VecDeque::new(),
            num_planned: 0,
            num_unread: 0,
            end: None,
            finished: None,
            epoch_is_empty,
            late: LateRejections::default(),
            first_rejections: Vec::new(),
            unreported: Vec::new(),
        })
    }

    /// Sends steps until the data ends or the receiver is dropped. Returns the connection to the
    /// other ranks: if it closed now, they would report a lost rank before this one reports its
    /// error.
    pub(super) fn run(mut self) -> Option<LoaderShare> {
        let ended = self.make_steps();
        if let Err(Stop::Failed(error)) = ended
            && self.send_finished().is_ok()
        {
            // fails if the loader was dropped
            let _ = self.steps.send(Err(error));
        }
        self.share
    }

    fn make_steps(&mut self) -> Result<(), Stop> {
        while let Some(step) = self.next_planned()? {
            let step = self.fill(step)?;
            self.finish(step)?;
        }
        Ok(())
    }

    /// Returns the next planned step. Plans further steps from the rows that are already
    /// measured.
    fn next_planned(&mut self) -> Result<Option<Step<SampleIndex>>, LoaderError> {
        while self.needs_more() && !matches!(self.end, Some(Err(_))) {
            if let Some(step) = self.assembly.pop() {
                self.add(step);
                continue;
            }
            let row = match &self.end {
                Some(_) => break,
                None if self.planned.is_empty() => self.pools.lengths.next(),
                None => match self.pools.lengths.try_next() {
                    Poll::Ready(row) => row,
                    Poll::Pending => break,
                },
            };
            match row.map(|row| self.plan(row)) {
                Some(Ok(())) => {}
                Some(Err(error)) => self.end = Some(Err(error)),
                None => self.end = Some(Ok(())),
            }
        }
        if let Some(step) = self.planned.pop_front() {
            self.num_planned -= step.samples().count();
            return Ok(Some(step));
        }
        match self.end.take() {
            Some(Err(error)) => Err(self.complete(error)),
            _ => Ok(None),
        }
    }

    fn needs_more(&self) -> bool {
        let workers = self.options.workers.get();
        let all_have_work = self.num_unread >= 2 * workers;
        self.planned.len() < AHEAD_STEPS
            || (!all_have_work && self.num_planned < AHEAD_SAMPLES * workers)
    }

    fn plan(
        &mut self,
        (row, result): JobResult<SampleIndex, Result<Length, Rejection>>,
    ) -> Result<(), LoaderError> {
        let result = result.map_err(|message| panicked(self.reader, row, message))?;
        let outcome = LoaderError::unless_transient(result)?.map(|length| (length, row));
        self.assembly.push(outcome, || self.reader.id(row))
    }

    /// Adds a step to the plan and passes the samples that this rank reads to their pool.
    fn add(&mut self, step: Step<SampleIndex>) {
        let slots = step.micro_batches.iter().enumerate();
        let own = slots.filter(|(slot, _)| is_own(self.share.as_ref(), *slot));
        let items = own.flat_map(|(_, packs)| packs.iter().flatten());
        let unread: Vec<_> = items.map(|item| (item.value, item.length)).collect();
        self.num_planned += step.samples().count();
        self.num_unread += unread.len();
        self.pools.samples.feed(unread);
        self.planned.push_back(step);
    }

    /// Adds the late rejections to an error of the assembly, after all its steps are finished.
    fn complete(&mut self, mut error: LoaderError) -> LoaderError {
        self.note(error.unreported());
        if let LoaderError::TooManyRejected { rejected, first, .. }
        | LoaderError::EmptyEpoch { rejected, first, .. } = &mut error
        {
            for ((_, reason), rows) in &self.late.0 {
                *rejected.entry(reason.clone()).or_default() += rows;
            }
            *first = take(&mut self.first_rejections);
        }
        error.after(take(&mut self.unreported))
    }

    /// Keeps the first few rejections as examples for errors.
    fn note(&mut self, rejections: &[Rejection]) {
        let room = NUM_EXAMPLES - self.first_rejections.len();
        self.first_rejections.extend(rejections.iter().take(room).cloned());
    }

    /// Fills a step with its samples. Rejected samples, and packs without others, are left out.
    fn fill(&mut self, step: Step<SampleIndex>) -> Result<FilledStep, Stop> {
        let Step { micro_batches, epoch_rows, epoch, mut rejected, state } = step;
        let plan = self.share.as_ref().map(|_| plan_digest(&micro_batches, &state));
        let mut read = RowsRead { plan: plan.unwrap_or_default(), ..RowsRead::default() };
        let mut all = Vec::with_capacity(micro_batches.len());
        for (slot, packs) in micro_batches.into_iter().enumerate() {
            let mut filled = Vec::with_capacity(packs.len());
            for pack in packs {
                filled.push(if is_own(self.share.as_ref(), slot) {
                    self.read(slot, pack, &mut read)?
                } else {
                    of_another_rank(pack)
                });
            }
            all.push((slot, filled));
        }
        let rows = exchange(self.share.as_mut(), read)?;
        if let Some(rejection) = rows.failed {
            return Err(LoaderError::Rejected { rejection }.into());
        }
        if !rows.sizes.is_empty() {
            self.send_finished()?; // its epoch continues
        }
        rows.rejected.iter().for_each(|rejection| self.late.count(rejection));
        rejected.extend(rows.rejected);
        for packs in all.iter_mut().map(|(_, packs)| packs) {
            for pack in &mut *packs {
                pack.retain(|item| !rows.without.contains(&item.position));
            }
            packs.retain(|pack| !pack.is_empty());
        }
        all.retain(|(_, packs)| !packs.is_empty());
        let (slots, micro_batches) = all.into_iter().unzip();
        let step = Step { micro_batches, epoch_rows, epoch, rejected, state };
        let rank = self.share.as_ref().map_or(0, |share| share.group.rank);
        Ok(FilledStep { step, slots, sizes: rows.sizes, owners: rows.owners, rank })
    }

    /// Reads the samples of a pack. Those of rejected rows are `None`.
    fn read(
        &mut self,
        slot: usize,
        pack: Vec<Item<SampleIndex>>,
        read: &mut RowsRead,
    ) -> Result<Vec<Item<Option<EncodedSample>>>, Stop> {
        let mut filled = Vec::with_capacity(pack.len());
        for Item { position, length, value: row } in pack {
            let sample = match self.sample(row)? {
                Ok(sample) => {
                    if self.share.is_none() {
                        self.send_finished()?; // its epoch continues
                    }
                    read.sizes.push((slot, SampleCounts::of(row, &sample)));
                    Some(sample)
                }
                Err(rejection) => {
                    if self.options.on_error == OnError::Stop {
                        read.failed.get_or_insert((slot, rejection));
                    } else {
                        read.rejected.push((slot, position, rejection));
                    }
                    None
                }
            };
            filled.push(Item { position, length, value: sample });
        }
        Ok(filled)
    }

    fn sample(&mut self, row: SampleIndex) -> Result<Result<EncodedSample, Rejection>, Stop> {
        self.num_unread -= 1;
        let (_, sample) = self.pools.samples.next().ok_or(Stop::Unwanted)?;
        let sample = sample.map_err(|message| panicked(self.reader, row, message))?;
        Ok(LoaderError::unless_transient(sample)?)
    }

    /// Collates the step. The rejections of a step without samples join a neighbouring step's.
    fn finish(&mut self, filled: FilledStep) -> Result<(), Stop> {
        let FilledStep { mut step, slots, sizes, owners, rank } = filled;
        self.late.add_to(&mut step.state);
        self.note(&step.rejected);
        let ends_epoch = step.ends_epoch();
        if self.options.too_many_rejected(&step.state, 0, step.epoch_rows, ends_epoch) {
            let error = LoaderError::TooManyRejected {
                rows_read: step.state.rows_read,
                rejected: step.state.rejected,
                max_rejected: self.options.max_rejected,
                first: take(&mut self.first_rejections),
                unreported: step.rejected,
            };
            return Err(error.after(take(&mut self.unreported)).into());
        }
        if !step.micro_batches.is_empty() {
            self.epoch_is_empty = false;
            let unreported = take(&mut self.unreported);
            step.rejected.splice(..0, unreported);
            let filled = FilledStep { step, slots, sizes, owners, rank };
            self.finished = Some(collate_step(filled, &self.options)?);
        } else if let Some(before) = &mut self.finished {
            before.rejected.append(&mut step.rejected);
            (before.epoch, before.state) = (step.epoch, step.state);
        } else if ends_epoch && self.epoch_is_empty {
            let error = LoaderError::EmptyEpoch {
                epoch: step.state.epoch - 1,
                rows: step.epoch_rows,
                rejected: step.state.rejected,
                first: take(&mut self.first_rejections),
                unreported: step.rejected,
            };
            return Err(error.after(take(&mut self.unreported)).into());
        } else {
            self.unreported.append(&mut step.rejected);
        }
        if ends_epoch {
            self.epoch_is_empty = true;
            self.send_finished()?;
        }
        Ok(())
    }

    fn send_finished(&mut self) -> Result<(), Stop> {
        let Some(step) = self.finished.take() else { return Ok(()) };
        self.steps.send(Ok(step)).map_err(|_| Stop::Unwanted)
    }
}

fn panicked(reader: &dyn RowReader, row: SampleIndex, message: String) -> LoaderError {
    let id = reader.id(row);
    LoaderError::Panicked { file: id.file.display().to_string(), row: id.line, message }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::mpsc::sync_channel;

    use super::*;
    use crate::loader::test_reader::{Kind, TestReader, options};
    use crate::loader::workers::QueueLimits;
    use crate::packing::PackingStrategy;

    /// The state of a planned step lists all packs of the window. If all steps of a window were
    /// planned at once, the memory would be quadratic in its length.
    #[test]
    fn few_steps_of_a_window_are_planned_at_once() {
        let (one, num_rows) = (NonZeroUsize::MIN, 400);
        let options = LoaderOptions {
            batch_size: one,
            gradient_accumulation_steps: one,
            workers: one,
            ..options(PackingStrategy::BestFit)
        };
        for kind in [Kind::Text(60), Kind::Image(58)] {
            let reader = || TestReader(vec![kind; num_rows]);
            let rows = (0..num_rows as u32).map(|row| SampleIndex { dataset: 0, row });
            let limits = QueueLimits { workers: one, items: num_rows, bytes: u64::MAX };
            let [measurer, sample_reader] = [reader(), reader()];
            let measure = move |row, ()| measurer.length(row);
            let rows = rows.map(|row| (row, ()));
            let lengths = Workers::start(rows, measure, |_| 0, limits).unwrap();
            let read = move |row, length| sample_reader.read_of_length(row, length);
            let samples = Workers::start_fed(read, |_| 0, limits).unwrap();
            let (sender, _receiver) = sync_channel(1);
            let rows_of = Box::new(move |_| num_rows as u64);
            let from = DataState::default();
            let (reader, pools) = (reader(), Pools { lengths, samples });
            let assembler =
                Assembler::resume(&reader, &pools, options, rows_of, from, &sender, None);
            let mut assembler = assembler.unwrap();
            let first = assembler.next_planned().unwrap().unwrap();
            assert_eq!(first.state.packed.len(), 149, "a window of 200 packs, a quarter carried");
            assert!(assembler.planned.len() <= AHEAD_STEPS, "{} steps", assembler.planned.len());
        }
    }
}
