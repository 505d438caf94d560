//! The layouts in which a verification computes the same rows.

use super::rows::{Batched, Rows, loaded};
use crate::batch::{EncodedSample, Pack, VarlenBatch};
use crate::data::{LoaderOptions, Overlong, Packing, PackingStrategy, Rmpad, collate};
use crate::run::RunError;
use serde::Serialize;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;

/// A way to divide rows into micro-batches.
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
    /// The name in the report.
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
