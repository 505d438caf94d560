//! Turns rows into optimizer steps on its own threads, ahead of the training loop.
//!
//! A first pool of threads measures rows in the order of the epoch, or looks up their lengths. One
//! thread, the assembler, packs the lengths. A second pool reads the rows of the next steps, in the
//! order of the packs, and the assembler collates and unpads them. The steps depend only on order,
//! options and start.
//!
//! Samples are in memory only from packing to their step (a limited number of bytes), and in a few
//! finished steps. So a packing window may have any number of images.

mod assembler;
pub(crate) mod collate;
pub(crate) mod error;
#[cfg(test)]
mod mixture_tests;
pub(crate) mod plan;
#[cfg(test)]
mod read_tests;
pub(crate) mod share;
pub(crate) mod steps;
#[cfg(test)]
pub(crate) mod test_reader;
#[cfg(test)]
mod tests;
mod workers;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use assembler::{Assembler, Pools};

use crate::dataset::RowReader;
use crate::dataset::order::Order;
use crate::loader::workers::{QueueLimits, Workers, panic_message};
use crate::row::{Length, Rejection, SampleIndex};
use crate::source::retry;
use batch::EncodedSample;

pub(crate) use crate::loader::error::LoaderError;
use crate::loader::share::LoaderShare;
pub(crate) use crate::loader::steps::{DataState, LoaderOptions, StepData};

/// Maximum bytes of samples that wait for their step.
const AHEAD_BYTES: u64 = 256 << 20;

/// A running loader. Drop stops and joins its threads, each after its current row.
pub struct Loader {
    pools: Option<Arc<Pools>>,
    steps: Option<Receiver<Result<StepData, LoaderError>>>,
    assembler: Option<JoinHandle<Option<LoaderShare>>>,
    ended: Option<LoaderShare>,  // of an assembler that has ended
    failed: Option<LoaderError>, // returned by the first `next_step`
    peeked: Option<Result<StepData, LoaderError>>, // received by `is_ready`
    close_share: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Loader {
    /// Starts reading at `from`: the default state for the beginning, or the state of a step.
    ///
    /// The first [`Loader::next_step`] returns errors of the arguments.
    pub fn start(
        reader: Arc<dyn RowReader>,
        order: Order,
        options: LoaderOptions,
        from: DataState,
    ) -> Self {
        Self::start_shared(reader, order, options, from, None)
    }

    /// Starts reading the micro-batches of one rank, like [`Self::start`].
    pub fn start_shared(
        reader: Arc<dyn RowReader>,
        order: Order,
        options: LoaderOptions,
        from: DataState,
        share: Option<LoaderShare>,
    ) -> Self {
        let mut loader = Self {
            pools: None,
            steps: None,
            assembler: None,
            ended: None,
            failed: None,
            peeked: None,
            close_share: share.as_ref().map(|share| share.channel.closer()),
        };
        if options.epochs.is_none_or(|epochs| from.epoch < epochs.get()) {
            loader.failed = loader.spawn(reader, order, options, from, share).err();
        }
        loader
    }

    /// Whether [`Self::next_step`] would return without waiting.
    pub fn is_ready(&mut self) -> bool {
        if self.peeked.is_none() {
            self.peeked = self.steps.as_ref().and_then(|steps| steps.try_recv().ok());
        }
        self.peeked.is_some()
    }

    /// Whether [`Self::next_step`] would return without waiting; waits for this for at most
    /// `limit`.
    pub fn is_ready_within(&mut self, limit: Duration) -> bool {
        if self.peeked.is_some() || self.failed.is_some() {
            return true;
        }
        let Some(steps) = &self.steps else { return true };
        match steps.recv_timeout(limit) {
            Ok(step) => self.peeked = Some(step),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {}
        }
        true
    }

    /// Waits for the next step. `None` after the last epoch, and after an error.
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
        // the assembler has ended: at the end of the data, or by a panic
        self.steps = None;
        match self.assembler.take()?.join() {
            Ok(share) => {
                self.ended = share;
                None
            }
            Err(payload) => Some(Err(LoaderError::Crashed { message: panic_message(&*payload) })),
        }
    }

    fn spawn(
        &mut self,
        reader: Arc<dyn RowReader>,
        order: Order,
        options: LoaderOptions,
        from: DataState,
        share: Option<LoaderShare>,
    ) -> Result<(), LoaderError> {
        let spawn_error = |error: std::io::Error| LoaderError::Spawn { message: error.to_string() };
        from.check_epoch(order.epoch_len(from.epoch))?;
        let rows_of = order.epoch_sizes();
        let step_packs = options.batch_size.saturating_mul(options.gradient_accumulation_steps);
        let limits = QueueLimits {
            workers: options.workers,
            items: step_packs.get().saturating_mul(2).max(options.pack_rules.window.get()),
            bytes: AHEAD_BYTES,
        };
        let rows = rows_from(order, &from, options.epochs);
        let rows = rows.map(|row| (row, ()));
        let measurer = Arc::clone(&reader);
        let measure = move |row, ()| retry(Rejection::transient_failure, || measurer.length(row));
        let lengths = Workers::start(rows, measure, |_| 0, limits).map_err(spawn_error)?;
        let sample_reader = Arc::clone(&reader);
        let read = move |row, length| {
            retry(Rejection::transient_failure, || sample_reader.read_of_length(row, length))
        };
        let size = |sample: &Result<EncodedSample, _>| {
            sample.as_ref().map_or(0, |sample| Length::of(sample).bytes())
        };
        let limits = QueueLimits { items: usize::MAX, ..limits };
        let samples = Workers::start_fed(read, size, limits).map_err(spawn_error)?;
        let slow = Arc::clone(&reader);
        let limit = options.slow_row;
        let report = move |row| {
            let (row, seconds) = (slow.id(row), limit.as_secs_f64());
            tracing::warn!(%row, "this row has been read for {seconds} s");
        };
        let lengths = lengths.reporting_slow(limit, report.clone());
        let samples = samples.reporting_slow(limit, report);
        let pools = Arc::new(Pools { lengths, samples });
        self.pools = Some(Arc::clone(&pools));
        let (sender, receiver) = sync_channel(1);
        self.steps = Some(receiver);
        let assemble = move || {
            match Assembler::resume(&*reader, &pools, options, rows_of, from, &sender, share) {
                Ok(assembler) => assembler.run(),
                Err(error) => {
                    // fails if the loader was dropped
                    let _ = sender.send(Err(error));
                    None
                }
            }
        };
        let builder = thread::Builder::new().name("loader-assembler".to_owned());
        self.assembler = Some(builder.spawn(assemble).map_err(spawn_error)?);
        Ok(())
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.steps = None; // ends an assembler that waits to send
        if let Some(close) = &self.close_share {
            close(); // ends an assembler that waits for other ranks
        }
        if let Some(pools) = &self.pools {
            pools.lengths.stop(); // ends an assembler that waits for a row
            pools.samples.stop();
        }
        if let Some(assembler) = self.assembler.take() {
            // a panic is reported by `next_step` only
            let _ = assembler.join();
        }
    }
}

/// The held rows of `from`, then the remaining rows of its epoch, then the following epochs.
fn rows_from(
    order: Order,
    from: &DataState,
    epochs: Option<NonZeroU64>,
) -> impl Iterator<Item = SampleIndex> + Send + 'static {
    let rows = order.epoch(from.epoch);
    let held: Vec<SampleIndex> = from.held().map(|position| rows[position as usize]).collect();
    let rest = rows.into_iter().skip(from.next as usize);
    let later = from.epoch + 1..epochs.map_or(u64::MAX, NonZeroU64::get);
    held.into_iter().chain(rest).chain(later.flat_map(move |epoch| order.epoch(epoch)))
}
