//! The layouts in which a verification computes the same rows, and the rows.

use super::super::inputs::{DataList, SetupObserver, encoder, loader_options, open_data, order};
use crate::batch::{EncodedSample, Pack, SampleId, VarlenBatch};
use crate::config::RunConfig;
use crate::data::{
    DataState, DatasetShare, Length, Loader, LoaderOptions, Order, Overlong, Packing,
    PackingStrategy, Rejection, Rmpad, RowOrder, RowReader, SampleIndex, collate,
    first_epoch_packs,
};
use crate::run::RunError;
use serde::Serialize;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Each row is a micro-batch: the reference.
    OneByOne,
    /// The layout of the config, if it is neither [`Self::Packed`] nor [`Self::Padded`].
    Configured,
    /// Packs without padding.
    Packed,
    /// Rows of one sample each, padded to the longest.
    Padded,
    /// Packs of 1, 2, 3, .. rows, each a micro-batch.
    Split,
}

impl Layout {
    pub fn name(self) -> &'static str {
        match self {
            Self::OneByOne => "one by one",
            Self::Configured => "configured",
            Self::Packed => "packed",
            Self::Padded => "padded",
            Self::Split => "split",
        }
    }
}

/// The layouts to compare with [`Layout::OneByOne`], the first one that of the config.
pub(super) fn layouts(options: &LoaderOptions) -> Vec<Layout> {
    match (options.packing, options.rmpad) {
        (Packing::On { .. }, Rmpad::Unpad) => vec![Layout::Packed, Layout::Padded, Layout::Split],
        (Packing::Off, Rmpad::KeepPadding) => vec![Layout::Padded, Layout::Packed, Layout::Split],
        _ => vec![Layout::Configured, Layout::Packed, Layout::Padded, Layout::Split],
    }
}

/// A micro-batch, and the tokens of each sample in it.
pub(super) struct LaidOut {
    pub(super) batch: VarlenBatch,
    pub(super) places: Vec<Place>,
}

/// The tokens of a sample in a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place {
    pub(super) sample: usize,
    pub(super) tokens: Range<usize>,
    /// The row of the batch before padding is removed.
    pub(super) row: usize,
}

/// Divides samples into micro-batches. `packing_length` limits the tokens of a pack.
pub(super) fn lay_out(
    layout: Layout,
    samples: &[EncodedSample],
    rows: &Rows,
    packing_length: NonZeroU32,
) -> Result<Vec<LaidOut>, RunError> {
    let options = &rows.options;
    let longest = samples.iter().map(EncodedSample::len).max().unwrap_or(1);
    let chunked = |sizes: &mut dyn Iterator<Item = usize>| {
        let mut rest = 0..samples.len();
        let mut batches = Vec::new();
        while !rest.is_empty() {
            let most = sizes.next().unwrap_or(1).min(rest.len());
            let chunk = chunk(samples, rest.start, most, packing_length);
            rest.start = chunk.end;
            batches.push(one_pack(samples, chunk, options)?);
        }
        Ok::<_, RunError>(batches)
    };
    let made = match layout {
        Layout::OneByOne => chunked(&mut std::iter::repeat(1))?,
        Layout::Split => chunked(&mut (1..))?,
        Layout::Configured => loaded(samples, options)?,
        Layout::Packed => {
            let packing = match options.packing {
                Packing::On { .. } => options.packing,
                Packing::Off => Packing::On {
                    length: packing_length,
                    strategy: PackingStrategy::BestFit,
                    overlong: Overlong::Alone,
                },
            };
            let batch_size = match options.packing {
                Packing::On { .. } => options.batch_size,
                Packing::Off => NonZeroUsize::MIN,
            };
            loaded(
                samples,
                &LoaderOptions { packing, batch_size, rmpad: Rmpad::Unpad, ..*options },
            )?
        }
        Layout::Padded => {
            let fits = (packing_length.get() as usize / longest).max(2);
            let batch_size = NonZeroUsize::new(fits).unwrap_or(NonZeroUsize::MIN);
            let packing = Packing::Off;
            let rmpad = Rmpad::KeepPadding;
            loaded(samples, &LoaderOptions { packing, batch_size, rmpad, ..*options })?
        }
    };
    Ok(made.into_iter().map(|(batch, packs)| placed(batch, &packs, samples)).collect())
}

/// At most `most` samples from `start` on that fit into a pack; at least one.
fn chunk(samples: &[EncodedSample], start: usize, most: usize, length: NonZeroU32) -> Range<usize> {
    let mut tokens = 0;
    let fits = samples[start..start + most].iter().take_while(|sample| {
        tokens += sample.len();
        tokens <= length.get() as usize
    });
    start..start + fits.count().max(1)
}

fn one_pack(
    samples: &[EncodedSample],
    chunk: Range<usize>,
    options: &LoaderOptions,
) -> Result<Batched, RunError> {
    let pack = Pack { samples: samples[chunk.clone()].to_vec() };
    let batch = collate(vec![pack], options.pad_id, options.side, options.merge_size)?;
    Ok((batch.unpad()?, vec![chunk.collect()]))
}

/// Finds the tokens of each sample: packs follow each other, or begin at multiples of the padded
/// length.
fn placed(batch: VarlenBatch, packs: &[Vec<usize>], samples: &[EncodedSample]) -> LaidOut {
    let padded = (batch.input_ids.len() > batch.num_tokens)
        .then(|| batch.input_ids.len() / packs.len().max(1));
    let mut places = Vec::new();
    let mut start = 0;
    for (row, pack) in packs.iter().enumerate() {
        start = padded.map_or(start, |length| row * length);
        for sample in pack {
            let tokens = start..start + samples[*sample].len();
            start = tokens.end;
            places.push(Place { sample: *sample, tokens, row });
        }
    }
    LaidOut { batch, places }
}

/// Checks that each sample is in the batch as it was encoded: its tokens, labels, and positions,
/// which begin at 0 in each segment. Returns the first problem.
pub(super) fn misplaced(
    laid_out: &[LaidOut],
    samples: &[EncodedSample],
) -> Option<(usize, String)> {
    let mut found = vec![0; samples.len()];
    for LaidOut { batch, places } in laid_out {
        for Place { sample, tokens, .. } in places {
            found[*sample] += 1;
            let of = &samples[*sample];
            if let Some(problem) = problem(batch, of, tokens) {
                return Some((*sample, problem));
            }
        }
    }
    let lost = found.iter().position(|count| *count != 1)?;
    Some((lost, format!("the row is in {} packs, expected 1", found[lost])))
}

fn problem(batch: &VarlenBatch, sample: &EncodedSample, tokens: &Range<usize>) -> Option<String> {
    if tokens.end > batch.input_ids.len() {
        return Some(format!("token {} is outside of the micro-batch", tokens.end - 1));
    }
    if batch.input_ids[tokens.clone()] != sample.input_ids {
        return Some("other tokens than those of the row".to_owned());
    }
    if batch.labels[tokens.clone()] != sample.labels {
        return Some("other labels than those of the row".to_owned());
    }
    let positions = &batch.position_ids[tokens.clone()];
    if let Some(at) = (0..positions.len()).find(|at| positions[*at] != sample.position_ids[*at]) {
        let (found, expected) = (positions[at], sample.position_ids[at]);
        return Some(format!("token {at} has the position {found:?}, expected {expected:?}"));
    }
    let mut start = tokens.start;
    let mut ends = vec![start as u32];
    for length in sample.segment_lengths() {
        start += length as usize;
        ends.push(start as u32);
    }
    let boundaries = batch.cu_seqlens.as_slice();
    let missing = ends.iter().find(|end| boundaries.binary_search(end).is_err());
    missing.map(|end| format!("no segment boundary at token {end} of the micro-batch"))
}

pub(super) struct Rows {
    pub(super) samples: Vec<EncodedSample>,
    /// File and line of each.
    pub(super) labels: Vec<String>,
    /// Number of rejected rows before the last row in use.
    pub(super) rejected: usize,
    /// How a run of the config packs them.
    pub(super) options: LoaderOptions,
}

impl Rows {
    /// Reads the first `num` rows of the first epoch that are not rejected.
    pub(super) fn first(
        config: &RunConfig,
        num: usize,
        observer: &dyn SetupObserver,
    ) -> Result<Self, RunError> {
        let encoder = encoder(config)?;
        let data = open_data(config, DataList::Train, &encoder, observer)?;
        let options = loader_options(config, &encoder);
        let mut rows = Self { samples: Vec::new(), labels: Vec::new(), rejected: 0, options };
        let mut first = String::new();
        for row in order(config, &data)?.epoch(0) {
            if rows.samples.len() == num {
                break;
            }
            let sample = data.read_patiently(row)?.and_then(|sample| {
                options.check_length(Length::of(&sample), || data.id(row)).map(|()| sample)
            });
            match sample {
                Ok(sample) => {
                    rows.labels.push(data.label(row));
                    rows.samples.push(sample);
                }
                Err(rejection) => {
                    tracing::warn!(row = %rejection, "rejected");
                    if rows.rejected == 0 {
                        first = format!(": {rejection}");
                    }
                    rows.rejected += 1;
                }
            }
        }
        if rows.samples.is_empty() {
            return Err(RunError::NoRows { rejected: rows.rejected, first });
        }
        Ok(rows)
    }
}

/// A micro-batch, and the samples in each of its rows.
pub(super) type Batched = (VarlenBatch, Vec<Vec<usize>>);

/// The micro-batches of these samples in one epoch of a run, and the samples in each row of each.
pub(super) fn loaded(
    samples: &[EncodedSample],
    options: &LoaderOptions,
) -> Result<Vec<Batched>, RunError> {
    let options = LoaderOptions { epochs: Some(NonZeroU64::MIN), max_rejected: 1.0, ..*options };
    let share = DatasetShare { rows: samples.len() as u64, weight: 1.0 };
    let order = Order::new(&[share], RowOrder::File, 0, [0; 32])?;
    let reader: Arc<dyn RowReader> = Arc::new(InMemory(samples.to_vec()));
    let packs = first_epoch_packs(&reader, &order, &options, &|_, _| {})?;
    let pack = |pack: &Vec<(SampleIndex, usize)>| -> Vec<usize> {
        pack.iter().map(|(sample, _)| sample.row as usize).collect()
    };
    let packs: Vec<Vec<usize>> = packs.iter().map(pack).collect();
    let mut rows = packs.chunks(options.batch_size.get()).map(<[_]>::to_vec);
    let mut loader = Loader::start(reader, order, options, DataState::default());
    let mut batches = Vec::new();
    while let Some(step) = loader.next_step() {
        batches.extend(step?.micro_batches.into_iter().zip(rows.by_ref()));
    }
    Ok(batches)
}

/// Samples that need not be read.
struct InMemory(Vec<EncodedSample>);

impl RowReader for InMemory {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        Ok(self.0[row.row as usize].clone())
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        Ok(Length::of(&self.0[row.row as usize]))
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        self.0[row.row as usize].id.clone()
    }
}
