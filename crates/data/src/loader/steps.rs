//! Assembles the packs of each optimizer step from rows in the order of the epochs.
//!
//! The result depends on lengths only, so the loader and the plan run the same code: the loader
//! with samples, the plan without.

use std::collections::{BTreeMap, VecDeque};
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{OnError, Truncation};
use crate::loader::error::LoaderError;
use crate::packing::{Item, Overlong, PackRules, Packer, Packing};
use crate::row::{Length, Rejection, SampleCounts};
use batch::{PaddingSide, SampleId, VarlenBatch};

/// Minimum number of rows read before the share of rejections is checked within an epoch.
const JUDGED_ROWS: u64 = 100;

/// Number of rejections listed in an error.
pub(crate) const NUM_EXAMPLES: usize = 5;

/// Options of a loader that decide how rows become steps.
#[derive(Debug, Clone, Copy)]
pub struct LoaderOptions {
    /// Whether and how samples share a pack.
    pub packing: Packing,
    /// Packing window, limit on patches, and order of the packs.
    pub pack_rules: PackRules,
    /// Maximum length of a sample in tokens.
    pub max_length: Option<NonZeroU32>,
    /// How a longer sample is handled.
    pub truncation: Truncation,
    /// Number of packs per micro-batch.
    pub batch_size: NonZeroUsize,
    /// Number of micro-batches per step.
    pub gradient_accumulation_steps: NonZeroUsize,
    /// Number of threads that measure rows, and of threads that read them. It does not change the steps.
    pub workers: NonZeroUsize,
    /// Id of the padding token.
    pub pad_id: u32,
    /// Side, in patches, of the square that is merged into one vision token.
    pub merge_size: NonZeroU32,
    /// Whether the model receives padding.
    pub rmpad: Rmpad,
    /// Side on which short rows are padded.
    pub side: PaddingSide,
    /// Number of epochs; `None`: no limit.
    pub epochs: Option<NonZeroU64>,
    /// How a rejected row is handled.
    pub on_error: OnError,
    /// Maximum share of rejected rows.
    pub max_rejected: f64,
    /// Time to read one row after which the log names the row.
    pub slow_row: Duration,
}

impl LoaderOptions {
    /// Rejects a sample that is empty or longer than a limit. `id` returns its file and line.
    pub fn check_length(
        &self,
        length: Length,
        id: impl FnOnce() -> SampleId,
    ) -> Result<(), Rejection> {
        let tokens = length.tokens;
        let refuse = |reason, message| Err(Rejection::new(&id(), reason, message));
        if tokens == 0 {
            return refuse("empty", "the sample has no tokens".to_owned());
        }
        if let Some(most) = self.max_length.filter(|most| tokens > most.get() as usize) {
            return refuse(TOO_LONG, format!("{tokens} tokens, `max_length` is {most}"));
        }
        match self.packing {
            Packing::On { length, overlong: Overlong::Reject, .. }
                if tokens > length.get() as usize =>
            {
                refuse("overlong", format!("{tokens} tokens, `packing_length` is {length}"))
            }
            _ => Ok(()),
        }
    }

    /// Whether more rows than allowed are rejected. In the first epoch this is the share of all its
    /// rows, so that bad rows at the beginning do not weigh more than others. `without` is the
    /// number of rejected rows to leave out.
    pub(crate) fn too_many_rejected(
        &self,
        state: &DataState,
        without: u64,
        epoch_rows: u64,
        epoch_has_ended: bool,
    ) -> bool {
        let num_rejected: u64 = state.rejected.values().sum::<u64>() - without;
        let judged = state.rows_read >= JUDGED_ROWS || epoch_has_ended; // enough rows for a useful error
        judged && num_rejected as f64 > self.max_rejected * state.rows_read.max(epoch_rows) as f64
    }
}

/// Whether the model receives padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rmpad {
    /// The model receives no padding, only real tokens.
    Unpad,
    /// The model receives the padded batch.
    KeepPadding,
}

/// The position of a run in its data. A row's position is its index in the order of the epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataState {
    /// Number of finished epochs.
    pub epoch: u64,
    /// Position of the next row to read.
    pub next: u64,
    /// Positions of samples that are not in a pack yet.
    #[serde(rename = "carry")]
    pub pending: Vec<u64>,
    /// Positions of the samples of each pack that has not been trained on yet.
    #[serde(rename = "ready")]
    pub packed: Vec<Vec<u64>>,
    /// Number of rows read since the run began.
    pub rows_read: u64,
    /// Number of rows rejected since the run began, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// Number of rejected rows by data file and reason.
    pub rejected_by_file: BTreeMap<String, BTreeMap<String, u64>>,
    /// Number of rejected rows whose error was found only when their step was filled.
    pub rejected_late: u64,
}

impl DataState {
    /// Checks that this is a possible state for epochs of `epoch_rows` rows.
    pub(crate) fn check_epoch(&self, epoch_rows: u64) -> Result<(), LoaderError> {
        if epoch_rows == 0 {
            return Err(LoaderError::EmptyEpoch {
                epoch: self.epoch,
                rows: 0,
                rejected: self.rejected.clone(),
                first: Vec::new(),
                unreported: Vec::new(),
            });
        }
        let error = |problem| Err(LoaderError::State { problem });
        let mut held: Vec<u64> = self.held().collect();
        held.sort_unstable();
        if self.next > epoch_rows || (self.next == epoch_rows && held.is_empty()) {
            return error(format!("its next row is {} of {epoch_rows} rows", self.next));
        }
        if let Some(position) = held.last().filter(|position| **position >= self.next) {
            return error(format!("it has row {position}, but its next row is {}", self.next));
        }
        if !held.is_sorted_by(|before, after| before < after) {
            return error("it has a row twice".to_owned());
        }
        if self.packed.iter().any(Vec::is_empty) {
            return error("it has a pack without samples".to_owned());
        }
        Ok(())
    }

    /// Counts rejected rows.
    pub fn count(&mut self, file: &str, reason: &str, rows: u64) {
        *self.rejected.entry(reason.to_owned()).or_default() += rows;
        let of_file = self.rejected_by_file.entry(file.to_owned()).or_default();
        *of_file.entry(reason.to_owned()).or_default() += rows;
    }

    /// Positions of all samples to measure again on resume, in the order of [`Assembly::resume`].
    pub(crate) fn held(&self) -> impl Iterator<Item = u64> + '_ {
        self.packed.iter().flatten().chain(&self.pending).copied()
    }
}

/// The data of one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepData {
    /// `gradient_accumulation_steps` micro-batches; fewer at the end of an epoch, or if all rows of
    /// a micro-batch are broken.
    ///
    /// If ranks share the step, only those of this rank.
    pub micro_batches: Vec<VarlenBatch>,
    /// Slot of each of them among the micro-batches of the step.
    pub slots: Vec<usize>,
    /// Epochs consumed as of the end of this step, as a fraction of rows.
    pub epoch: f64,
    /// Number of samples in all micro-batches, of all ranks.
    pub num_samples: usize,
    /// Number of real tokens in all micro-batches, of all ranks.
    pub num_tokens: usize,
    /// Counts of each sample of all ranks, in the order of the token streams.
    pub samples: Vec<SampleCounts>,
    /// The sequence group that has each of `samples` in its micro-batches.
    pub owners: Vec<usize>,
    /// The sequence group of this rank.
    pub rank: usize,
    /// Packing efficiency: real tokens divided by the length of the packs. With packing off,
    /// divided by the size of the padded batches.
    pub fill: f64,
    /// Rows rejected since the previous step.
    pub rejected: Vec<Rejection>,
    /// State at the end of this step. A loader started from it returns the following steps.
    pub state: DataState,
}

impl StepData {
    /// Counts of the samples in the micro-batches of this rank.
    pub fn own_samples(&self) -> Vec<SampleCounts> {
        let samples = self.samples.iter().zip(&self.owners);
        samples.filter(|(_, owner)| **owner == self.rank).map(|(size, _)| *size).collect()
    }
}

/// Micro-batches, each a list of packs.
pub(crate) type MicroBatches<T> = Vec<Vec<Vec<Item<T>>>>;

/// The packs of one optimizer step, and the state after it.
#[derive(Debug)]
pub(crate) struct Step<T> {
    pub(crate) micro_batches: MicroBatches<T>,
    pub(crate) epoch_rows: u64,
    /// Epochs consumed as of the end of this step.
    pub(crate) epoch: f64,
    /// Rejections since the previous step.
    pub(crate) rejected: Vec<Rejection>,
    /// State at the end of this step.
    pub(crate) state: DataState,
}

impl<T> Step<T> {
    pub(crate) fn samples(&self) -> impl Iterator<Item = &Item<T>> {
        self.micro_batches.iter().flatten().flatten()
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.samples().map(|item| item.length.tokens).sum()
    }

    pub(crate) fn ends_epoch(&self) -> bool {
        self.state.next == 0
    }
}

/// Number of rows of an epoch, given its index.
pub(crate) type EpochRows = Box<dyn Fn(u64) -> u64 + Send>;

/// Collects rows, epoch by epoch, and returns steps. No step crosses the end of an epoch.
///
/// A full step is held back until another sample of its epoch is packed or the epoch has ended. The
/// last step of an epoch is known in this way, and it reports the rows rejected after its own.
pub(crate) struct Assembly<T> {
    options: LoaderOptions,
    rows_of: EpochRows,
    epoch_rows: u64, // of the epoch of `state`
    packer: Packer<T>,
    packed: VecDeque<Vec<Item<T>>>,
    state: DataState, // with empty `pending` and `packed`: these are in the fields above
    new_rejections: Vec<Rejection>,
    first_rejections: Vec<Rejection>,
}

impl<T> Assembly<T> {
    /// Continues from a checked state. `read` returns the samples of [`DataState::held`], in order.
    pub(crate) fn resume(
        options: LoaderOptions,
        rows_of: EpochRows,
        mut from: DataState,
        mut read: impl FnMut(u64) -> Result<Item<T>, LoaderError>,
    ) -> Result<Self, LoaderError> {
        let packed = std::mem::take(&mut from.packed);
        let packed: VecDeque<Vec<_>> = packed
            .into_iter()
            .map(|pack| pack.into_iter().map(&mut read).collect())
            .collect::<Result<_, _>>()?;
        let overfull = |pack: &Vec<Item<T>>| {
            let tokens: usize = pack.iter().map(|item| item.length.tokens).sum();
            pack.len() > 1 && options.packing.max_tokens().is_some_and(|max| tokens > max)
        };
        if packed.iter().any(overfull) {
            let problem = "the rows of a pack have become longer than the pack".to_owned();
            return Err(LoaderError::State { problem });
        }
        let pending = std::mem::take(&mut from.pending);
        let pending = pending.into_iter().map(read).collect::<Result<_, _>>()?;
        Ok(Self {
            packer: Packer::new(options.packing, options.pack_rules, pending),
            options,
            epoch_rows: rows_of(from.epoch),
            rows_of,
            packed,
            state: from,
            new_rejections: Vec::new(),
            first_rejections: Vec::new(),
        })
    }

    /// Adds the next row: a sample or a rejection. Call [`Assembly::pop`] until it returns `None`
    /// before the next row.
    pub(crate) fn push(
        &mut self,
        outcome: Result<(Length, T), Rejection>,
        id: impl FnOnce() -> SampleId,
    ) -> Result<(), LoaderError> {
        let position = self.state.next;
        self.state.next += 1;
        self.state.rows_read += 1;
        let outcome = outcome.and_then(|(length, value)| {
            self.options.check_length(length, id).map(|()| Item { position, length, value })
        });
        match outcome {
            Ok(item) => self.packed.extend(self.packer.push(item)),
            Err(rejection) => self.reject(rejection)?,
        }
        if self.epoch_has_ended() {
            self.packed.extend(self.packer.finish());
        }
        self.judge()
    }

    /// The next step, if it is complete.
    pub(crate) fn pop(&mut self) -> Option<Step<T>> {
        let LoaderOptions { batch_size, gradient_accumulation_steps, .. } = self.options;
        let full = batch_size.get().saturating_mul(gradient_accumulation_steps.get());
        let certain = self.packed.len() > full || self.epoch_has_ended();
        if !certain || self.packed.is_empty() {
            return None;
        }
        let mut packs = self.packed.drain(..full.min(self.packed.len()));
        let mut micro_batches = Vec::new();
        loop {
            let micro_batch: Vec<_> = packs.by_ref().take(batch_size.get()).collect();
            if micro_batch.is_empty() {
                break;
            }
            micro_batches.push(micro_batch);
        }
        drop(packs);
        let epoch_rows = self.epoch_rows;
        if self.epoch_has_ended() && self.packed.is_empty() {
            self.state.epoch += 1;
            self.state.next = 0;
            self.epoch_rows = (self.rows_of)(self.state.epoch);
        }
        let state = self.state();
        let consumed = state.next - state.held().count() as u64;
        Some(Step {
            epoch_rows,
            epoch: (state.epoch * self.epoch_rows + consumed) as f64 / self.epoch_rows as f64,
            rejected: std::mem::take(&mut self.new_rejections),
            state,
            micro_batches,
        })
    }

    fn epoch_has_ended(&self) -> bool {
        self.state.next == self.epoch_rows
    }

    fn state(&self) -> DataState {
        let positions = |pack: &Vec<Item<T>>| pack.iter().map(|item| item.position).collect();
        DataState {
            pending: self.packer.held().collect(),
            packed: self.packed.iter().map(positions).collect(),
            ..self.state.clone()
        }
    }

    fn reject(&mut self, rejection: Rejection) -> Result<(), LoaderError> {
        let too_long = rejection.reason == TOO_LONG;
        if self.options.on_error == OnError::Stop
            || (too_long && self.options.truncation == Truncation::Error)
        {
            return Err(LoaderError::Rejected { rejection });
        }
        self.state.count(&rejection.file, &rejection.reason, 1);
        if self.first_rejections.len() < NUM_EXAMPLES {
            self.first_rejections.push(rejection.clone());
        }
        self.new_rejections.push(rejection);
        Ok(())
    }

    /// Fails if too many rows are rejected or an epoch is empty.
    fn judge(&mut self) -> Result<(), LoaderError> {
        // Late rejections are checked with their step: a resumed run already counts those of the
        // steps ahead, an uninterrupted run does not.
        let late = self.state.rejected_late;
        let ended = self.epoch_has_ended();
        if self.options.too_many_rejected(&self.state, late, self.epoch_rows, ended) {
            return Err(LoaderError::TooManyRejected {
                rows_read: self.state.rows_read,
                rejected: self.state.rejected.clone(),
                max_rejected: self.options.max_rejected,
                first: std::mem::take(&mut self.first_rejections),
                unreported: std::mem::take(&mut self.new_rejections),
            });
        }
        // the last step of an epoch is still held back here
        if self.epoch_has_ended() && self.packed.is_empty() {
            return Err(LoaderError::EmptyEpoch {
                epoch: self.state.epoch,
                rows: self.epoch_rows,
                rejected: self.state.rejected.clone(),
                first: std::mem::take(&mut self.first_rejections),
                unreported: std::mem::take(&mut self.new_rejections),
            });
        }
        Ok(())
    }
}

/// Reason of the rejection of samples longer than `max_length`.
const TOO_LONG: &str = "too_long";

/// Packing efficiency: tokens divided by the capacity of the packs, or of the padded rows.
pub(crate) fn fill<T>(packing: Packing, micro_batches: &MicroBatches<T>) -> f64 {
    let (mut tokens, mut room) = (0, 0);
    for packs in micro_batches {
        let lengths = || packs.iter().map(|p| p.iter().map(|item| item.length.tokens).sum());
        let longest = lengths().max().unwrap_or(0);
        tokens += lengths().sum::<usize>();
        room += lengths().map(|n: usize| packing.capacity(n).unwrap_or(longest)).sum::<usize>();
    }
    tokens as f64 / room as f64
}
