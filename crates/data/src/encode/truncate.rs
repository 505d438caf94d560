//! Truncation of a sample to `max_length` tokens. Media are never truncated.
//!
//! The tokens of a sample are divided into spans and text tokens. A *span* has all tokens of one
//! medium: its start token, its visual tokens, its end token and, for videos, the timestamps. Every
//! other token is a *text token*. Truncation keeps all spans and removes text tokens, from the end
//! or from the beginning. The decision depends on counts only, so the length of a sample that is
//! not decoded and the tokens of a decoded one are computed by the same code.

use std::num::NonZeroU32;
use std::ops::Range;

use batch::IGNORE_INDEX;

/// Maximum number of tokens of a row, before truncation. It limits the memory of a single row.
pub(crate) const MAX_TOKENS: usize = 1 << 20;

/// Which text tokens truncation keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptEnd {
    /// The first tokens: `truncation: right`.
    Beginning,
    /// The last tokens: `truncation: left`.
    End,
}

/// The limit of a sample and the text tokens that stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TruncationRule {
    /// Maximum length of a sample in tokens, spans included.
    pub max_length: NonZeroU32,
    /// Which text tokens truncation keeps.
    pub keep: KeptEnd,
}

/// The reason why a sample is too long, or cannot be truncated to the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum TruncationError {
    #[error("the row has more than {MAX_TOKENS} tokens")]
    #[fault(
        hint = "divide the row into several, or lower `data.image.max_tokens` (or `max_pixels`)",
        reason = "too_many_tokens"
    )]
    TooMany,
    #[error("its media have {media_tokens} tokens, the limit `max_length` is {max_length}")]
    #[fault(
        hint = "lower `data.image.max_tokens` (or `max_pixels`), or raise `data.max_length`",
        reason = "media_exceed_max_length"
    )]
    Media { media_tokens: usize, max_length: NonZeroU32 },
    #[error("truncated from {num_tokens} to {max_length} tokens, it has no supervised token")]
    #[fault(
        hint = "raise `data.max_length`, or keep the other end with `data.truncation`",
        reason = "no_target_after_truncation"
    )]
    NoTarget { num_tokens: usize, max_length: NonZeroU32 },
}

/// Fails for more than [`MAX_TOKENS`] tokens.
pub(crate) fn check_tokens(num_tokens: usize) -> Result<(), TruncationError> {
    if num_tokens > MAX_TOKENS { Err(TruncationError::TooMany) } else { Ok(()) }
}

/// The token counts of a sample, which decide its truncation. Indices count text tokens only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Number of tokens outside of all spans.
    pub text_tokens: usize,
    /// Number of tokens of all spans.
    pub media_tokens: usize,
    /// Number of text tokens before the first span; `text_tokens` without a span.
    pub text_before_media: usize,
    /// Number of supervised targets. The first token of a sample is not a target.
    pub num_targets: usize,
    /// Indices of the first and the last target. `None` without a target, or if a span has one,
    /// since truncation keeps spans.
    pub ends: Option<(usize, usize)>,
}

impl TokenCounts {
    /// Counts `labels` (`[T]`). `spans` are the token ranges of the media, ascending and disjoint.
    pub fn of(labels: &[i64], spans: &[Range<usize>]) -> Self {
        let mut token_counts = Self::default();
        let mut ends: Option<(usize, usize)> = None;
        let mut span_has_target = false;
        let mut rest = spans.iter().peekable();
        for (token, label) in labels.iter().enumerate() {
            while rest.peek().is_some_and(|span| span.end <= token) {
                rest.next();
            }
            let in_span = rest.peek().is_some_and(|span| span.contains(&token));
            if token > 0 && *label != IGNORE_INDEX {
                token_counts.num_targets += 1;
                span_has_target |= in_span;
                if !in_span {
                    let first = ends.map_or(token_counts.text_tokens, |ends| ends.0);
                    ends = Some((first, token_counts.text_tokens));
                }
            }
            if in_span {
                if token_counts.media_tokens == 0 {
                    token_counts.text_before_media = token_counts.text_tokens;
                }
                token_counts.media_tokens += 1;
            } else {
                token_counts.text_tokens += 1;
            }
        }
        if token_counts.media_tokens == 0 {
            token_counts.text_before_media = token_counts.text_tokens;
        }
        token_counts.ends = ends.filter(|_| !span_has_target);
        token_counts
    }

    /// The counts of a text of `num_tokens` tokens. All but the first are targets.
    pub fn of_text(num_tokens: usize) -> Self {
        Self {
            text_tokens: num_tokens,
            media_tokens: 0,
            text_before_media: num_tokens,
            num_targets: num_tokens.saturating_sub(1),
            ends: (num_tokens > 1).then(|| (1, num_tokens - 1)),
        }
    }

    /// Number of tokens before truncation.
    pub fn num_tokens(&self) -> usize {
        self.text_tokens + self.media_tokens
    }

    /// Whether `cut` removes the first or the last target, and the sample keeps others.
    pub fn loses_targets(&self, cut: Option<TruncationRule>) -> bool {
        let Ok(kept) = self.kept_text(cut) else { return false };
        self.ends.is_some_and(|(first, last)| first < kept.start || last >= kept.end)
    }

    /// The text tokens that `cut` keeps: all of them if the sample is not too long.
    pub fn kept_text(&self, cut: Option<TruncationRule>) -> Result<Range<usize>, TruncationError> {
        let num_tokens = self.num_tokens();
        let Some(TruncationRule { max_length, keep }) =
            cut.filter(|cut| num_tokens > cut.max_length.get() as usize)
        else {
            return Ok(0..self.text_tokens);
        };
        let media_tokens = self.media_tokens;
        let room = (max_length.get() as usize).saturating_sub(media_tokens);
        if room == 0 {
            return Err(TruncationError::Media { media_tokens, max_length });
        }
        let kept = match keep {
            KeptEnd::Beginning => 0..room,
            KeptEnd::End => self.text_tokens - room..self.text_tokens,
        };
        // the first token of a sample is never a target
        let leads = kept.start < self.text_before_media;
        let has_target = self.ends.is_none_or(|(first, last)| match keep {
            KeptEnd::Beginning => first < kept.end,
            KeptEnd::End => last >= kept.start + usize::from(leads),
        });
        if has_target {
            Ok(kept)
        } else {
            Err(TruncationError::NoTarget { num_tokens, max_length })
        }
    }
}

/// The tokens, of `num_tokens`, that stay if [`TokenCounts::kept_text`] returned `kept`: ascending,
/// disjoint ranges.
pub(crate) fn kept_tokens(
    num_tokens: usize,
    spans: &[Range<usize>],
    kept: &Range<usize>,
) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut push = |range: Range<usize>| match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    };
    let (mut token, mut text) = (0, 0); // the next token, and the number of text tokens before it
    let end = num_tokens..num_tokens;
    for span in spans.iter().chain([&end]) {
        // tokens token..span.start are text tokens from index `text` on
        let tokens = span.start - token;
        let first = kept.start.clamp(text, text + tokens) - text;
        let last = kept.end.clamp(text, text + tokens) - text;
        push(token + first..token + last);
        push(span.clone());
        (token, text) = (span.end, text + tokens);
    }
    ranges
}

/// Tokens that truncation removed from one place of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppedTokens {
    /// Number of kept tokens before them.
    pub before: usize,
    /// The tokens; never empty.
    pub ids: Vec<u32>,
}

/// The parts of `ids` between the `kept` ranges, which are ascending and disjoint.
pub(crate) fn dropped(ids: &[u32], kept: &[Range<usize>]) -> Vec<DroppedTokens> {
    let mut all = Vec::new();
    let (mut end, mut before) = (0, 0); // end of the previous range, and the number of kept tokens up to it
    for range in kept.iter().chain([&(ids.len()..ids.len())]) {
        if end < range.start {
            all.push(DroppedTokens { before, ids: ids[end..range.start].to_vec() });
        }
        (end, before) = (range.end, before + range.len());
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use fault::Fault;

    fn cut(max_length: u32, keep: KeptEnd) -> TruncationRule {
        TruncationRule { max_length: NonZeroU32::new(max_length).unwrap(), keep }
    }

    /// A sample as a word: `t` text, `T` supervised text, `[mm]` a medium, `M` a supervised token
    /// in it.
    fn sample(word: &str) -> (Vec<i64>, Vec<Range<usize>>) {
        let mut spans: Vec<Range<usize>> = Vec::new();
        let mut labels = Vec::new();
        for letter in word.chars() {
            if letter == '[' {
                spans.push(labels.len()..labels.len());
            }
            labels.push(if letter.is_uppercase() { 7 } else { IGNORE_INDEX });
            if letter == ']' {
                spans.last_mut().unwrap().end = labels.len();
            }
        }
        (labels, spans)
    }

    /// The truncated word, or the reason of the rejection.
    fn cut_word(word: &str, cut: TruncationRule) -> Result<String, &'static str> {
        let (labels, spans) = sample(word);
        let kept = TokenCounts::of(&labels, &spans)
            .kept_text(Some(cut))
            .map_err(|error| error.reason())?;
        let ranges = kept_tokens(labels.len(), &spans, &kept);
        Ok(ranges.into_iter().map(|range| &word[range]).collect())
    }

    #[test]
    fn text_gives_way_and_media_stay() {
        let word = "abc[mm]deFG[m]hI";
        for (max_length, keep, left) in [
            (16, KeptEnd::Beginning, "abc[mm]deFG[m]hI"),
            (14, KeptEnd::Beginning, "abc[mm]deFG[m]"),
            (13, KeptEnd::Beginning, "abc[mm]deF[m]"),
            (15, KeptEnd::End, "bc[mm]deFG[m]hI"),
            (11, KeptEnd::End, "[mm]FG[m]hI"),
            (8, KeptEnd::End, "[mm][m]I"),
        ] {
            assert_eq!(cut_word(word, cut(max_length, keep)).as_deref(), Ok(left), "{max_length}");
        }
    }

    #[test]
    fn media_that_fill_the_limit_and_cuts_without_a_target_are_refused() {
        let word = "abc[mm]deFG[m]hI";
        for keep in [KeptEnd::Beginning, KeptEnd::End] {
            for max_length in [1, 6, 7] {
                let refused = cut_word(word, cut(max_length, keep));
                assert_eq!(refused, Err("media_exceed_max_length"));
            }
        }
        assert_eq!(cut_word(word, cut(12, KeptEnd::Beginning)), Err("no_target_after_truncation"));
        assert_eq!(cut_word("abCd", cut(1, KeptEnd::End)), Err("no_target_after_truncation"));
        // the first kept token is no target, unless a medium precedes it
        assert_eq!(cut_word("abC", cut(1, KeptEnd::End)), Err("no_target_after_truncation"));
        assert_eq!(cut_word("[m]abC", cut(4, KeptEnd::End)).as_deref(), Ok("[m]C"));
        assert_eq!(cut_word("ab[m]C", cut(4, KeptEnd::End)).as_deref(), Ok("[m]C"));
        // a target inside of a medium always stays
        assert_eq!(cut_word("ab[M]c", cut(4, KeptEnd::End)).as_deref(), Ok("[M]c"));
    }

    fn any_word() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => Just("t".to_owned()),
            2 => Just("T".to_owned()),
            1 => (0usize..4).prop_map(|n| format!("[{}]", "m".repeat(n))),
        ];
        prop::collection::vec(piece, 1..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn a_cut_sample_has_the_limit_all_its_media_and_a_target(
            word in any_word(), max_length in 1u32..60, end in any::<bool>()
        ) {
            let keep = if end { KeptEnd::End } else { KeptEnd::Beginning };
            let (labels, spans) = sample(&word);
            let token_counts = TokenCounts::of(&labels, &spans);
            let (cut, spans_of_word) = (cut(max_length, keep), spans.clone());
            prop_assert_eq!(token_counts.num_tokens(), word.len());
            let targets = |word: &str| word.chars().skip(1).filter(|c| c.is_uppercase()).count();
            prop_assert_eq!(token_counts.num_targets, targets(&word));
            prop_assume!(token_counts.num_targets > 0);
            let media: String = spans.iter().map(|span| &word[span.clone()]).collect();
            // another way to compute it: remove one text token after the other
            let mut letters: Vec<(char, bool)> = Vec::new();
            for (at, letter) in word.chars().enumerate() {
                letters.push((letter, spans.iter().any(|span| span.contains(&at))));
            }
            while letters.len() > max_length as usize {
                let text = |(_, in_span): &(char, bool)| !in_span;
                let at = if end { letters.iter().position(text) } else { letters.iter().rposition(text) };
                let Some(at) = at else { break };
                letters.remove(at);
            }
            let expected: String = letters.iter().map(|(letter, _)| *letter).collect();
            match cut_word(&word, cut) {
                Ok(left) => {
                    prop_assert_eq!(&left, &expected);
                    prop_assert_eq!(left.len(), word.len().min(max_length as usize));
                    prop_assert!(targets(&left) > 0);
                    let (_, spans) = sample(&left);
                    let kept: String = spans.iter().map(|span| &left[span.clone()]).collect();
                    prop_assert_eq!(kept, media);
                    // the removed tokens, put back, give the whole sample
                    let ids: Vec<u32> = word.chars().map(u32::from).collect();
                    let text = token_counts.kept_text(Some(cut)).unwrap();
                    let ranges = kept_tokens(ids.len(), &spans_of_word, &text);
                    let mut whole: Vec<u32> = left.chars().map(u32::from).collect();
                    for gap in dropped(&ids, &ranges).into_iter().rev() {
                        prop_assert!(!gap.ids.is_empty());
                        whole.splice(gap.before..gap.before, gap.ids);
                    }
                    prop_assert_eq!(whole, ids);
                }
                Err("media_exceed_max_length") => prop_assert!(media.len() >= max_length as usize),
                Err(_) => prop_assert_eq!(targets(&expected), 0),
            }
        }
    }
}
