//! Cutting a sample down to `max_length` tokens without touching its media.
//!
//! A sample is a row of units: a *span* is everything that stands for one medium (its start mark, its
//! visual tokens, its end mark, with videos also the timestamps), and every other token is a *text
//! token* of its own. Spans always stay, whole and in their order; text tokens give way, from the end
//! or from the beginning. What is decided here needs counts only, so the length of a sample that is
//! not decoded and the tokens of one that is come from the same few lines.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::batch::IGNORE_INDEX;

/// Which text tokens stay when a sample is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The first ones: `truncation: right`.
    Beginning,
    /// The last ones: `truncation: left`.
    End,
}

/// How samples are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Upper bound on a sample, in tokens, spans included.
    pub max_length: NonZeroU32,
    /// Which text tokens stay.
    pub keep: Keep,
}

/// Why a sample cannot be cut to the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// No room is left for text.
    #[error("its media alone take {media_tokens} tokens, `max_length` is {max_length}")]
    Media {
        /// Tokens of all spans.
        media_tokens: usize,
        /// The limit.
        max_length: NonZeroU32,
    },
    /// All that is learned from was cut off.
    #[error("cut from {num_tokens} to {max_length} tokens, it has no supervised token left")]
    NoTarget {
        /// Length before the cut.
        num_tokens: usize,
        /// The limit.
        max_length: NonZeroU32,
    },
}

impl CutError {
    /// Short key, for counting rejected rows by reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Media { .. } => "media_exceed_max_length",
            Self::NoTarget { .. } => "no_target_after_truncation",
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Media { .. } => {
                "lower `data.image.max_tokens` (or `max_pixels`), or raise `data.max_length`"
            }
            Self::NoTarget { .. } => {
                "raise `data.max_length`, or keep the other end with `data.truncation`"
            }
        }
    }
}

/// A sample in counts: all that decides how it is cut. Indices count text tokens only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outline {
    /// Tokens outside of all spans.
    pub text_tokens: usize,
    /// Tokens of all spans.
    pub media_tokens: usize,
    /// Text tokens before the first span; `text_tokens` without a span.
    pub text_before_media: usize,
    /// Supervised targets: the first token of a sample is none.
    pub num_targets: usize,
    /// The first and the last target; `None` without one, or if one lies inside a span and so always stays.
    pub ends: Option<(usize, usize)>,
}

impl Outline {
    /// Counts `labels` (`[T]`); `spans` are the token ranges of the media, ascending and apart.
    pub fn of(labels: &[i64], spans: &[Range<usize>]) -> Self {
        let mut outline = Self::default();
        let mut ends: Option<(usize, usize)> = None;
        let mut span_has_target = false;
        let mut rest = spans.iter().peekable();
        for (token, label) in labels.iter().enumerate() {
            while rest.peek().is_some_and(|span| span.end <= token) {
                rest.next();
            }
            let in_span = rest.peek().is_some_and(|span| span.contains(&token));
            if token > 0 && *label != IGNORE_INDEX {
                outline.num_targets += 1;
                span_has_target |= in_span;
                if !in_span {
                    let first = ends.map_or(outline.text_tokens, |ends| ends.0);
                    ends = Some((first, outline.text_tokens));
                }
            }
            if in_span {
                if outline.media_tokens == 0 {
                    outline.text_before_media = outline.text_tokens;
                }
                outline.media_tokens += 1;
            } else {
                outline.text_tokens += 1;
            }
        }
        if outline.media_tokens == 0 {
            outline.text_before_media = outline.text_tokens;
        }
        outline.ends = ends.filter(|_| !span_has_target);
        outline
    }

    /// A text of `num_tokens` tokens, all of them targets but the first.
    pub fn of_text(num_tokens: usize) -> Self {
        Self {
            text_tokens: num_tokens,
            media_tokens: 0,
            text_before_media: num_tokens,
            num_targets: num_tokens.saturating_sub(1),
            ends: (num_tokens > 1).then(|| (1, num_tokens - 1)),
        }
    }

    /// Tokens before any cut.
    pub fn num_tokens(&self) -> usize {
        self.text_tokens + self.media_tokens
    }

    /// The text tokens that stay under `cut`; all of them in a sample that is not too long.
    pub fn kept_text(&self, cut: Option<Cut>) -> Result<Range<usize>, CutError> {
        let num_tokens = self.num_tokens();
        let Some(Cut { max_length, keep }) =
            cut.filter(|cut| num_tokens > cut.max_length.get() as usize)
        else {
            return Ok(0..self.text_tokens);
        };
        let media_tokens = self.media_tokens;
        let room = (max_length.get() as usize).saturating_sub(media_tokens);
        if room == 0 {
            return Err(CutError::Media { media_tokens, max_length });
        }
        let kept = match keep {
            Keep::Beginning => 0..room,
            Keep::End => self.text_tokens - room..self.text_tokens,
        };
        // the token that a sample begins with predicts nothing and is predicted by nothing
        let leads = kept.start < self.text_before_media;
        let has_target = self.ends.is_none_or(|(first, last)| match keep {
            Keep::Beginning => first < kept.end,
            Keep::End => last >= kept.start + usize::from(leads),
        });
        if has_target { Ok(kept) } else { Err(CutError::NoTarget { num_tokens, max_length }) }
    }
}

/// Which of `num_tokens` tokens stay when `kept` is what [`Outline::kept_text`] says; ascending ranges
/// that lie apart.
pub(in crate::data) fn kept_tokens(
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
    let (mut token, mut text) = (0, 0); // the next token, and text tokens before it
    let end = num_tokens..num_tokens;
    for span in spans.iter().chain([&end]) {
        // tokens token..span.start are the text tokens text..text + their number
        let tokens = span.start - token;
        let first = kept.start.clamp(text, text + tokens) - text;
        let last = kept.end.clamp(text, text + tokens) - text;
        push(token + first..token + last);
        push(span.clone());
        (token, text) = (span.end, text + tokens);
    }
    ranges
}

/// Tokens that a cut took from one place of a sample, for showing it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Tokens of what is left that stand before them.
    pub before: usize,
    /// The tokens, never none.
    pub ids: Vec<u32>,
}

/// What lies between the ranges of `ids` that stay, in order; the ranges ascend and lie apart.
pub(in crate::data) fn dropped(ids: &[u32], kept: &[Range<usize>]) -> Vec<Dropped> {
    let mut all = Vec::new();
    let (mut end, mut before) = (0, 0); // of the range before, and tokens that stay up to it
    for range in kept.iter().chain([&(ids.len()..ids.len())]) {
        if end < range.start {
            all.push(Dropped { before, ids: ids[end..range.start].to_vec() });
        }
        (end, before) = (range.end, before + range.len());
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(max_length: u32, keep: Keep) -> Cut {
        Cut { max_length: NonZeroU32::new(max_length).unwrap(), keep }
    }

    /// A sample as a word: `t` text, `T` supervised text, `[mm]` a medium, `M` a supervised token of one.
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

    /// What is left of the word, or the reason why nothing is.
    fn cut_word(word: &str, cut: Cut) -> Result<String, &'static str> {
        let (labels, spans) = sample(word);
        let kept =
            Outline::of(&labels, &spans).kept_text(Some(cut)).map_err(|error| error.reason())?;
        let ranges = kept_tokens(labels.len(), &spans, &kept);
        Ok(ranges.into_iter().map(|range| &word[range]).collect())
    }

    #[test]
    fn text_gives_way_and_media_stay() {
        let word = "abc[mm]deFG[m]hI";
        for (max_length, keep, left) in [
            (16, Keep::Beginning, "abc[mm]deFG[m]hI"),
            (14, Keep::Beginning, "abc[mm]deFG[m]"),
            (13, Keep::Beginning, "abc[mm]deF[m]"),
            (15, Keep::End, "bc[mm]deFG[m]hI"),
            (11, Keep::End, "[mm]FG[m]hI"),
            (8, Keep::End, "[mm][m]I"),
        ] {
            assert_eq!(cut_word(word, cut(max_length, keep)).as_deref(), Ok(left), "{max_length}");
        }
    }

    #[test]
    fn media_that_fill_the_limit_and_cuts_without_a_target_are_refused() {
        let word = "abc[mm]deFG[m]hI";
        for keep in [Keep::Beginning, Keep::End] {
            for max_length in [1, 6, 7] {
                let refused = cut_word(word, cut(max_length, keep));
                assert_eq!(refused, Err("media_exceed_max_length"));
            }
        }
        assert_eq!(cut_word(word, cut(12, Keep::Beginning)), Err("no_target_after_truncation"));
        assert_eq!(cut_word("abCd", cut(1, Keep::End)), Err("no_target_after_truncation"));
        // the first token of what is left is no target, unless a medium stands before it
        assert_eq!(cut_word("abC", cut(1, Keep::End)), Err("no_target_after_truncation"));
        assert_eq!(cut_word("[m]abC", cut(4, Keep::End)).as_deref(), Ok("[m]C"));
        assert_eq!(cut_word("ab[m]C", cut(4, Keep::End)).as_deref(), Ok("[m]C"));
        // .. and a target inside of a medium always stays
        assert_eq!(cut_word("ab[M]c", cut(4, Keep::End)).as_deref(), Ok("[M]c"));
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
            let keep = if end { Keep::End } else { Keep::Beginning };
            let (labels, spans) = sample(&word);
            let outline = Outline::of(&labels, &spans);
            let (cut, spans_of_word) = (cut(max_length, keep), spans.clone());
            prop_assert_eq!(outline.num_tokens(), word.len());
            let targets = |word: &str| word.chars().skip(1).filter(|c| c.is_uppercase()).count();
            prop_assert_eq!(outline.num_targets, targets(&word));
            prop_assume!(outline.num_targets > 0);
            let media: String = spans.iter().map(|span| &word[span.clone()]).collect();
            // written another way: drop one text token after the other
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
                    // what was dropped, set back to its places, makes the whole again
                    let ids: Vec<u32> = word.chars().map(u32::from).collect();
                    let text = outline.kept_text(Some(cut)).unwrap();
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
