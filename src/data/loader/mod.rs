//! Rows to optimizer steps, ahead of the training loop, on threads of its own.
//!
//! Some workers look at rows in the order of the epoch: how long each is. One thread packs the lengths and
//! tells other workers which samples the next steps need, in the order of the packs; it collates and
//! unpads what they read. The steps are a function of order, options and start alone. Memory is bounded:
//! samples without images ahead (by bytes), those of one packing window, samples with images
//! ahead (by bytes), and the few steps that are planned or made. However many images share a window, their pixels do not wait for it.

mod assembler;
pub(in crate::data) mod collate;
pub(in crate::data) mod error;
#[cfg(test)]
mod mixture_tests;
pub(in crate::data) mod plan;
pub(in crate::data) mod steps;
#[cfg(test)]
mod test_reader;
#[cfg(test)]
mod tests;
mod workers;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};

use assembler::{Assembler, Pools};

use crate::batch::{EncodedSample, VarlenBatch};
use crate::data::dataset::order::Order;
use crate::data::dataset::row_reader::{Prefetched, RowReader};
use crate::data::loader::workers::{Limits, Workers, panic_message};
use crate::data::row::{Length, Rejection, Row, SampleSize};

pub(in crate::data) use crate::data::loader::error::LoaderError;
pub(in crate::data) use crate::data::loader::steps::{DataState, LoaderOptions};

/// Bytes of samples that wait to be packed, and as many of those that wait for their step.
const AHEAD_BYTES: u64 = 256 << 20;

/// The data of one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepData {
    /// `gradient_accumulation_steps` of them, fewer at the end of an epoch or where all rows of one
    /// were found broken.
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
    pools: Option<Arc<Pools>>,
    steps: Option<Receiver<Result<StepData, LoaderError>>>,
    assembler: Option<JoinHandle<()>>,
    failed: Option<LoaderError>, // to be told by the first `next_step`
    peeked: Option<Result<StepData, LoaderError>>, // by `is_ready`
}

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
            Self { pools: None, steps: None, assembler: None, failed: None, peeked: None };
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
            items: step_packs.get().saturating_mul(2).max(options.pack_rules.window.get()),
            bytes: AHEAD_BYTES,
        };
        let rows = rows_from(order, &from, options.epochs);
        let rows = rows.map(|row| (row, ()));
        let prefetcher = Arc::clone(&reader);
        let prefetch = move |row, ()| prefetcher.prefetch(row);
        let size =
            |row: &Result<Prefetched, _>| row.as_ref().map_or(0, |prefetched| prefetched.bytes());
        let headers = Workers::start(rows, prefetch, size, limits).map_err(spawn_error)?;
        let completer = Arc::clone(&reader);
        let load = move |row, prefetched| load_pixels(&*completer, row, prefetched);
        let size = |sample: &Result<EncodedSample, _>| {
            sample.as_ref().map_or(0, |sample| Length::of(sample).bytes())
        };
        let limits = Limits { items: usize::MAX, ..limits };
        let pixels = Workers::start_fed(load, size, limits).map_err(spawn_error)?;
        let pools = Arc::new(Pools { headers, pixels });
        self.pools = Some(Arc::clone(&pools));
        let (sender, receiver) = sync_channel(1);
        self.steps = Some(receiver);
        let assemble = move || {
            match Assembler::resume(&*reader, &pools, options, rows_of, from, &sender) {
                Ok(assembler) => assembler.run(),
                // without a receiver the loader was dropped, and nobody wants to know
                Err(error) => drop(sender.send(Err(error))),
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
        if let Some(pools) = &self.pools {
            pools.headers.stop(); // an assembler that waits for a row ends, too
            pools.pixels.stop();
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

/// Completes a row, and rejects it if it no longer has the length that it was packed with.
fn load_pixels(
    reader: &dyn RowReader,
    row: Row,
    prefetched: Prefetched,
) -> Result<EncodedSample, Rejection> {
    let length = prefetched.length();
    let sample = reader.load_pixels(row, prefetched)?;
    length.check_unchanged(Length::of(&sample), || reader.id(row)).map(|()| sample)
}
