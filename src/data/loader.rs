//! Rows to optimizer steps, ahead of the training loop, on threads of its own.
//!
//! Workers encode rows in parallel; one thread takes them in order, packs, collates and unpads. The
//! steps are a function of order, options and start alone. Memory is bounded: encoded rows ahead
//! (by bytes), one packing window, and two steps.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use super::collate::collate;
use super::config::{OnError, Truncation};
use super::order::Order;
use super::packing::{Item, Packing, WINDOW_SAMPLES};
use super::row::{Length, Rejection, Row, RowReader};
use super::steps::{Assembly, Step};
use super::workers::{Limits, Workers, panic_message};
use crate::batch::{EncodedSample, Pack, PaddingSide, VarlenBatch};

pub use super::loader_error::LoaderError;
pub use super::steps::DataState;

/// Bytes of encoded rows that wait to be packed.
const AHEAD_BYTES: u64 = 256 << 20;

/// How rows become steps.
#[derive(Debug, Clone)]
pub struct LoaderOptions {
    /// Which samples share a pack.
    pub packing: Packing,
    /// Upper bound on one sample, in tokens.
    pub max_length: Option<NonZeroU32>,
    /// What becomes of a sample longer than that.
    pub truncation: Truncation,
    /// Packs a micro-batch.
    pub batch_size: NonZeroUsize,
    /// Micro-batches a step.
    pub gradient_accumulation_steps: NonZeroUsize,
    /// Threads that read and encode; they change no result.
    pub workers: NonZeroUsize,
    /// Id that fills short rows up.
    pub pad_id: u32,
    /// Edge, in patches, of the square that becomes one vision token.
    pub merge_size: NonZeroU32,
    /// Which form of a batch the model gets.
    pub rmpad: Rmpad,
    /// Where short rows are filled up.
    pub side: PaddingSide,
    /// Epochs after which the data ends; `None`: never.
    pub epochs: Option<NonZeroU64>,
    /// What becomes of the run when a row cannot be used.
    pub on_error: OnError,
    /// Share of the rows read that may be rejected.
    pub max_rejected: f64,
}

/// Which form of a batch the model gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rmpad {
    /// Real tokens only.
    Unpad,
    /// The padded batch, row by row.
    KeepPadding,
}

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
}

type EncodingWorkers = Workers<Result<EncodedSample, Rejection>>;

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
        let mut loader = Self { workers: None, steps: None, assembler: None, failed: None };
        if options.epochs.is_none_or(|epochs| from.epoch < epochs.get()) {
            loader.failed = loader.spawn(reader, order, options, from).err();
        }
        loader
    }

    /// The next step; waits for it. `None` after the last epoch, and after an error.
    pub fn next_step(&mut self) -> Option<Result<StepData, LoaderError>> {
        if let Some(error) = self.failed.take() {
            return Some(Err(error));
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
        let epoch_rows = order.len();
        from.check_epoch(epoch_rows)?;
        let step_packs = options.batch_size.saturating_mul(options.gradient_accumulation_steps);
        let limits = Limits {
            workers: options.workers,
            rows: step_packs.get().saturating_mul(2).max(WINDOW_SAMPLES),
            bytes: AHEAD_BYTES,
        };
        let encoder = Arc::clone(&reader);
        let encode = move |row| encoder.read(row);
        let size = |sample: &Result<EncodedSample, _>| {
            sample.as_ref().map_or(0, |sample| Length::of(sample).bytes())
        };
        let rows = rows_from(order, &from, options.epochs);
        let workers = Workers::start(rows, encode, size, limits).map_err(spawn_error)?;
        let workers = Arc::new(workers);
        self.workers = Some(Arc::clone(&workers));
        let (sender, receiver) = sync_channel(1);
        self.steps = Some(receiver);
        let assemble = move || {
            if let Err(error) = assemble(&*reader, &workers, options, epoch_rows, from, &sender) {
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
    epoch_rows: u64,
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
        let (_, sample) = next().ok_or_else(stopped)??;
        let value = sample.map_err(|rejection| LoaderError::Changed { rejection })?;
        Ok(Item { position, length: Length::of(&value), value })
    };
    let mut assembly = Assembly::resume(options.clone(), epoch_rows, from, read_again)?;
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
        let outcome = sample.map(|sample| (Length::of(&sample), sample));
        assembly.push(outcome, || reader.id(row))?;
    }
}

fn collate_step(
    step: Step<EncodedSample>,
    options: &LoaderOptions,
) -> Result<StepData, LoaderError> {
    let Step { micro_batches, epoch, num_samples, num_tokens, fill, rejected, state } = step;
    let pack = |items: Vec<Item<_>>| Pack { samples: items.into_iter().map(|i| i.value).collect() };
    let batch = |packs: Vec<_>| {
        let packs = packs.into_iter().map(pack).collect();
        let batch = collate(packs, options.pad_id, options.side, options.merge_size)?;
        Ok(match options.rmpad {
            Rmpad::Unpad => batch.unpad()?,
            Rmpad::KeepPadding => batch.keep_padding()?,
        })
    };
    let micro_batches = micro_batches.into_iter().map(batch).collect::<Result<_, LoaderError>>()?;
    Ok(StepData { micro_batches, epoch, num_samples, num_tokens, fill, rejected, state })
}
