//! From rows in the order of the epochs to the packs of each optimizer step.
//!
//! Lengths decide everything here, so the loader and the plan run the same code: one carries samples
//! along, the other nothing.

use std::collections::{BTreeMap, VecDeque};
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use serde::{Deserialize, Serialize};

use crate::batch::{PaddingSide, SampleId};
use crate::data::config::{OnError, Truncation};
use crate::data::loader::error::LoaderError;
use crate::data::packing::{Item, Overlong, PackRules, Packer, Packing};
use crate::data::row::{Length, Rejection};

/// Rows read before rejections are judged in the middle of an epoch.
const JUDGED_ROWS: u64 = 100;

/// Rejections that an error names.
pub(in crate::data) const NUM_EXAMPLES: usize = 5;

/// How rows become steps.
#[derive(Debug, Clone, Copy)]
pub struct LoaderOptions {
    /// Which samples share a pack.
    pub packing: Packing,
    /// What else decides about packs.
    pub pack_rules: PackRules,
    /// Upper bound on one sample, in tokens.
    pub max_length: Option<NonZeroU32>,
    /// What becomes of a sample longer than that.
    pub truncation: Truncation,
    /// Packs a micro-batch.
    pub batch_size: NonZeroUsize,
    /// Micro-batches a step.
    pub gradient_accumulation_steps: NonZeroUsize,
    /// Threads that look at rows, and as many that read those of the next steps; they change no result.
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

impl LoaderOptions {
    /// Rejects a sample that is empty or longer than a limit; `id` names it.
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

    /// Whether a run loses too much of its data, as soon as that is certain: in the first epoch the share
    /// is one of all its rows, so that bad rows at the beginning do not weigh more than others.
    /// `without` of the rejected rows do not count.
    pub(in crate::data) fn too_many_rejected(
        &self,
        state: &DataState,
        without: u64,
        epoch_rows: u64,
        epoch_has_ended: bool,
    ) -> bool {
        let num_rejected: u64 = state.rejected.values().sum::<u64>() - without;
        let judged = state.rows_read >= JUDGED_ROWS || epoch_has_ended; // enough of them to tell why
        judged && num_rejected as f64 > self.max_rejected * state.rows_read.max(epoch_rows) as f64
    }
}

/// Which form of a batch the model gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rmpad {
    /// Real tokens only.
    Unpad,
    /// The padded batch, row by row.
    KeepPadding,
}

/// Where a run stands in its data. A position is an index into the order of the epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataState {
    /// Epochs before this one.
    pub epoch: u64,
    /// Position of the next row to read.
    pub next: u64,
    /// Positions of samples that were read and are in no pack yet.
    pub carry: Vec<u64>,
    /// Positions in packs that were made and not trained on yet.
    pub ready: Vec<Vec<u64>>,
    /// Rows read since the run began.
    pub rows_read: u64,
    /// Rows rejected since the run began, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// The same by data file and reason.
    #[serde(default)]
    pub rejected_by_file: BTreeMap<String, BTreeMap<String, u64>>,
    /// How many of them had been measured, and were found unusable when their step was made.
    #[serde(default)]
    pub rejected_late: u64,
}

impl DataState {
    /// Refuses a state that epochs of `epoch_rows` rows cannot have led to, and epochs of none.
    pub(in crate::data) fn check_epoch(&self, epoch_rows: u64) -> Result<(), LoaderError> {
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
            return error(format!("it is at row {} of {epoch_rows} rows", self.next));
        }
        if let Some(position) = held.last().filter(|position| **position >= self.next) {
            return error(format!("it holds row {position} but was only at row {}", self.next));
        }
        if !held.is_sorted_by(|before, after| before < after) {
            return error("it holds a row twice".to_owned());
        }
        if self.ready.iter().any(Vec::is_empty) {
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

    /// Positions of all samples to look at again on resume, in the order of [`Assembly::resume`].
    pub(in crate::data) fn held(&self) -> impl Iterator<Item = u64> + '_ {
        self.ready.iter().flatten().chain(&self.carry).copied()
    }
}

/// Micro-batches of packs of samples.
pub(in crate::data) type MicroBatches<T> = Vec<Vec<Vec<Item<T>>>>;

/// The packs of one optimizer step, and where the run stands after it.
#[derive(Debug)]
pub(in crate::data) struct Step<T> {
    pub(in crate::data) micro_batches: MicroBatches<T>,
    /// Rows of its epoch.
    pub(in crate::data) epoch_rows: u64,
    /// Epochs consumed as of the end of this step.
    pub(in crate::data) epoch: f64,
    /// Rejections met since the step before.
    pub(in crate::data) rejected: Vec<Rejection>,
    /// As of the end of this step.
    pub(in crate::data) state: DataState,
}

impl<T> Step<T> {
    /// Samples in all packs.
    pub(in crate::data) fn samples(&self) -> impl Iterator<Item = &Item<T>> {
        self.micro_batches.iter().flatten().flatten()
    }

    /// Tokens in all packs.
    pub(in crate::data) fn num_tokens(&self) -> usize {
        self.samples().map(|item| item.length.tokens).sum()
    }

    /// Whether no step of its epoch follows.
    pub(in crate::data) fn ends_epoch(&self) -> bool {
        self.state.next == 0
    }
}

/// Rows of each epoch, by its number.
pub(in crate::data) type EpochRows = Box<dyn Fn(u64) -> u64 + Send>;

/// Takes the rows of one epoch after the other and gives steps, none of which crosses an epoch.
///
/// A full step waits until another sample of its epoch is packed or the epoch has ended, so that the
/// last step of an epoch knows that it is, and reports the rows rejected after its own.
pub(in crate::data) struct Assembly<T> {
    options: LoaderOptions,
    rows_of: EpochRows,
    epoch_rows: u64, // of the epoch of `state`
    packer: Packer<T>,
    ready: VecDeque<Vec<Item<T>>>,
    state: DataState, // its `carry` and `ready` are empty: `packer` and `ready` above have them
    new_rejections: Vec<Rejection>,
    first_rejections: Vec<Rejection>,
}

impl<T> Assembly<T> {
    /// Goes on from a checked state; `read` gives again the samples of [`DataState::held`], in order.
    pub(in crate::data) fn resume(
        options: LoaderOptions,
        rows_of: EpochRows,
        mut from: DataState,
        mut read: impl FnMut(u64) -> Result<Item<T>, LoaderError>,
    ) -> Result<Self, LoaderError> {
        let ready = std::mem::take(&mut from.ready);
        let ready: VecDeque<Vec<_>> = ready
            .into_iter()
            .map(|pack| pack.into_iter().map(&mut read).collect())
            .collect::<Result<_, _>>()?;
        let overfull = |pack: &Vec<Item<T>>| {
            let tokens: usize = pack.iter().map(|item| item.length.tokens).sum();
            pack.len() > 1 && options.packing.max_tokens().is_some_and(|max| tokens > max)
        };
        if ready.iter().any(overfull) {
            let problem = "rows that share a pack have become longer than it".to_owned();
            return Err(LoaderError::State { problem });
        }
        let carry = std::mem::take(&mut from.carry);
        let carry = carry.into_iter().map(read).collect::<Result<_, _>>()?;
        Ok(Self {
            packer: Packer::new(options.packing, options.pack_rules, carry),
            options,
            epoch_rows: rows_of(from.epoch),
            rows_of,
            ready,
            state: from,
            new_rejections: Vec::new(),
            first_rejections: Vec::new(),
        })
    }

    /// Takes the next row: a sample, or why there is none. [`Assembly::pop`] until it gives no more
    /// before the next one.
    pub(in crate::data) fn push(
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
            Ok(item) => self.ready.extend(self.packer.push(item)),
            Err(rejection) => self.reject(rejection)?,
        }
        if self.epoch_has_ended() {
            self.ready.extend(self.packer.finish());
        }
        self.judge()
    }

    /// The next step, once it is certain.
    pub(in crate::data) fn pop(&mut self) -> Option<Step<T>> {
        let LoaderOptions { batch_size, gradient_accumulation_steps, .. } = self.options;
        let full = batch_size.get().saturating_mul(gradient_accumulation_steps.get());
        let certain = self.ready.len() > full || self.epoch_has_ended();
        if !certain || self.ready.is_empty() {
            return None;
        }
        let mut packs = self.ready.drain(..full.min(self.ready.len()));
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
        if self.epoch_has_ended() && self.ready.is_empty() {
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
            carry: self.packer.held().collect(),
            ready: self.ready.iter().map(positions).collect(),
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

    /// Stops a run that loses too much of its data.
    fn judge(&mut self) -> Result<(), LoaderError> {
        // Those that a resumed run knows of, and one that was not stopped does not, are judged with their step.
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
        // a step is held back until its epoch goes on or ends, so an epoch that had one has it here
        if self.epoch_has_ended() && self.ready.is_empty() {
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

/// The reason of samples longer than `max_length`.
const TOO_LONG: &str = "too_long";

/// Tokens over the room that they are given: packs of full length, or rows as long as the longest.
pub(in crate::data) fn fill<T>(packing: Packing, micro_batches: &MicroBatches<T>) -> f64 {
    let (mut tokens, mut room) = (0, 0);
    for packs in micro_batches {
        let lengths = || packs.iter().map(|p| p.iter().map(|item| item.length.tokens).sum());
        let longest = lengths().max().unwrap_or(0);
        tokens += lengths().sum::<usize>();
        room += lengths().map(|n: usize| packing.capacity(n).unwrap_or(longest)).sum::<usize>();
    }
    tokens as f64 / room as f64
}
