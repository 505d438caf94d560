//! The tokens of a sample, and their truncation.

use std::ops::Range;

use super::targets::differ;
use super::truncate::{TokenCounts, TruncationRule, kept_tokens};
use crate::source::SampleFault;

/// The tokens of a sample, before positions and media.
pub(super) struct EncodedText {
    pub(super) input_ids: Vec<u32>,       // [T]
    pub(super) labels: Vec<i64>,          // [T]
    pub(super) weights: Option<Vec<f32>>, // [T]; `None`: 1 for all supervised tokens
    pub(super) vision_rows: Vec<u32>,     // [M]
    pub(super) spans: Vec<Range<usize>>,  // one per medium, ascending: all of its tokens
}

impl EncodedText {
    /// Truncates the tokens; an error if no target is left.
    pub(super) fn cut(self, cut: Option<TruncationRule>) -> Result<Self, SampleFault> {
        let token_counts = TokenCounts::of(&self.labels, &self.spans);
        let kept = kept_text(&token_counts, cut)?;
        if kept.len() == token_counts.text_tokens {
            return Ok(self);
        }
        let Self { input_ids, labels, weights, vision_rows, spans } = self;
        let ranges = kept_tokens(input_ids.len(), &spans, &kept);
        let mut moved = Vec::with_capacity(vision_rows.len()); // truncation keeps all of them
        let mut num_kept = 0;
        for range in &ranges {
            let before = |end: usize| vision_rows.partition_point(|row| (*row as usize) < end);
            let inside = &vision_rows[before(range.start)..before(range.end)];
            let shift = (range.start - num_kept) as u32;
            moved.extend(inside.iter().map(|row| row - shift));
            num_kept += range.len();
        }
        let weights = weights.map(|weights| kept_of(&weights, &ranges));
        Ok(Self {
            input_ids: kept_of(&input_ids, &ranges),
            labels: kept_of(&labels, &ranges),
            weights: weights.filter(|weights| differ(weights)),
            vision_rows: moved,
            spans: Vec::new(), // not used after truncation
        })
    }
}

/// The values of the tokens in `ranges`.
fn kept_of<T: Copy>(values: &[T], ranges: &[Range<usize>]) -> Vec<T> {
    ranges.iter().flat_map(|range| &values[range.clone()]).copied().collect()
}

/// The text tokens that truncation keeps; an error if no target is left.
pub(super) fn kept_text(
    token_counts: &TokenCounts,
    cut: Option<TruncationRule>,
) -> Result<Range<usize>, SampleFault> {
    if token_counts.num_targets == 0 {
        let num_tokens = token_counts.num_tokens();
        return Err(SampleFault::NoSupervisedToken { num_tokens });
    }
    Ok(token_counts.kept_text(cut)?)
}

/// The tokens of each medium: those of its bytes in the text (`media`, ascending), and the start
/// and end token next to them.
pub(super) fn spans(
    ids: &[u32],
    offsets: &[(usize, usize)],
    media: &[Range<usize>],
    [start_mark, end_mark]: [Option<u32>; 2],
) -> Vec<Range<usize>> {
    let is = |token: usize, mark: Option<u32>| mark.is_some() && ids.get(token).copied() == mark;
    let span = |bytes: &Range<usize>| {
        let first = offsets.partition_point(|(_, end)| *end <= bytes.start);
        let end = offsets.partition_point(|(start, _)| *start < bytes.end);
        let before = usize::from(first > 0 && is(first - 1, start_mark));
        first - before..end + usize::from(is(end, end_mark))
    };
    media.iter().map(span).collect()
}

/// Replaces each of the `places` of `text`, which ascend, by its new text, and shifts `targets`.
/// Returns the text and the byte ranges of the replacements.
pub(super) fn expand<'a>(
    text: &str,
    places: &[(Range<usize>, String)],
    targets: impl Iterator<Item = &'a mut Range<usize>>,
) -> (String, Vec<Range<usize>>) {
    let more = places.iter().map(|(_, with)| with.len()).sum::<usize>();
    let mut out = String::with_capacity(text.len() + more);
    let mut grown = vec![(0, 0)]; // (byte of `text`, shift of the bytes after it)
    let mut put = Vec::with_capacity(places.len());
    let mut last = 0;
    for (place, with) in places {
        out.push_str(&text[last..place.start]);
        put.push(out.len()..out.len() + with.len());
        out.push_str(with);
        last = place.end;
        grown.push((last, out.len() as isize - last as isize));
    }
    out.push_str(&text[last..]);
    let moved = |byte: usize| {
        let after = grown.partition_point(|(from, _)| *from <= byte);
        byte.wrapping_add_signed(grown[after - 1].1)
    };
    for target in targets {
        *target = moved(target.start)..moved(target.end);
    }
    (out, put)
}
