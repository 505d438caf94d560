//! The section `corpus` of a data set: how samples are taken from plain text; and the positions of
//! windows in a token stream, as a function of an offset.
//!
//! A window of length `T` has `T + 1` tokens: `T` inputs, and `T` targets that are shifted by one
//! token. Windows that are placed end to end share one token, which is the last target of one and
//! the first input of the next, so that each token is a target once.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use settings::{Choice, section};

/// The section `corpus` of a data set. It declares that the file is plain text instead of chats.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusConfig {
    /// How samples are taken
    pub sampling: Sampling,
    /// Input tokens of a window; required for windows
    pub length: Option<NonZeroU32>,
    /// Tokens from the start of a window to the next, with `sliding_window`; `null`: `length`
    pub stride: Option<NonZeroU32>,
    /// Ends each document; `null`: see [corpora](corpora.md)
    pub eos_token: Option<String>,
    /// Begins each document; `null`: nothing
    pub bos_token: Option<String>,
}

/// How samples are taken from a corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// A sample is a window; one starts every `stride` tokens, from the first token on.
    SlidingWindow,
    /// A sample is a window. Windows are placed end to end, from an offset below `length` that each
    /// pass draws.
    Random,
    /// Like `Random`, in as many parallel lanes as a batch has rows: each row of a batch continues
    /// the text of the same row of the batch before.
    Sequential,
    /// A sample is a document.
    Document,
}

impl CorpusConfig {
    /// Returns key, found value and expected value of the first invalid setting; `None` if all are
    /// valid.
    pub(crate) fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        let Self { sampling, length, stride, eos_token, bos_token } = self;
        let shown = |value: &Option<NonZeroU32>| {
            value.map_or_else(|| "null".to_owned(), |value| value.to_string())
        };
        let windows = *sampling != Sampling::Document;
        if windows && length.is_none() {
            return Some(("length", shown(length), "the number of input tokens of a window"));
        }
        if !windows && length.is_some() {
            return Some(("length", shown(length), "`null`, because `document` has no windows"));
        }
        if stride.is_some() && *sampling != Sampling::SlidingWindow {
            return Some((
                "stride",
                shown(stride),
                "`null`, unless `sampling` is `sliding_window`",
            ));
        }
        for (key, token) in [("eos_token", eos_token), ("bos_token", bos_token)] {
            if token.as_deref() == Some("") {
                return Some((key, String::new(), "a token of the model folder's tokenizer"));
            }
        }
        None
    }

    /// Number of tokens of a window, including its last target; `None` for documents.
    pub(crate) fn window_tokens(&self) -> Option<u64> {
        self.length.filter(|_| self.sampling != Sampling::Document).map(|t| u64::from(t.get()) + 1)
    }

    /// Spacing of the windows in training with `lanes` rows per batch; `None` for documents.
    pub(super) fn spacing(&self, lanes: u32) -> Option<Spacing> {
        let length = self.length?.get();
        match self.sampling {
            Sampling::SlidingWindow => {
                Some(Spacing::Stride(self.stride.map_or(length, NonZeroU32::get)))
            }
            Sampling::Random => Some(Spacing::Tiled),
            Sampling::Sequential => Some(Spacing::Lanes(lanes)),
            Sampling::Document => None,
        }
    }
}

/// Positions of the windows in a pass over a corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Number of tokens of the corpus.
    tokens: u32,
    /// Number of inputs of a window.
    length: u32,
    spacing: Spacing,
}

/// How windows are spaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spacing {
    /// Windows start at the first token and then after each stride, in tokens.
    Stride(u32),
    /// Windows are placed end to end, from an offset that each pass draws.
    Tiled,
    /// From the offset on, the corpus is divided into this many lanes of equal length, with windows
    /// end to end in each. A batch has the next window of every lane.
    Lanes(u32),
}

impl Windows {
    /// Places windows over `tokens` tokens. `length`, the stride and the number of lanes must be
    /// above 0.
    ///
    /// If some offset would have no window, fails with the minimum number of tokens.
    pub fn new(tokens: u32, length: u32, spacing: Spacing) -> Result<Self, u64> {
        let length_u64 = u64::from(length);
        let fewest = match spacing {
            Spacing::Stride(_) => length_u64 + 1,
            Spacing::Tiled => 2 * length_u64,
            Spacing::Lanes(lanes) => (u64::from(lanes) + 1) * length_u64,
        };
        let windows = Self { tokens, length, spacing };
        if u64::from(tokens) < fewest { Err(fewest) } else { Ok(windows) }
    }

    /// Number of inputs of a window, `T`.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Number of tokens of the corpus.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Number of offsets: a pass draws one from `0..num_offsets()`.
    pub fn num_offsets(&self) -> u32 {
        match self.spacing {
            Spacing::Stride(_) => 1,
            Spacing::Tiled | Spacing::Lanes(_) => self.length,
        }
    }

    /// Returns whether the windows must be read in order and must not be shuffled.
    pub fn are_ordered(&self) -> bool {
        matches!(self.spacing, Spacing::Lanes(_))
    }

    /// Number of windows in a pass; at least one.
    ///
    /// With `n` tokens from `offset` on, `Tiled` has `(n - 1) / T` windows, and `Lanes` has
    /// `(n - 1) / lanes / T` windows in each lane, with both quotients rounded down.
    pub fn count(&self, offset: u32) -> u32 {
        let targets = self.tokens - offset - 1;
        match self.spacing {
            Spacing::Stride(stride) => (targets - self.length) / stride + 1,
            Spacing::Tiled => targets / self.length,
            Spacing::Lanes(lanes) => targets / lanes / self.length * lanes,
        }
    }

    /// Minimum number of windows in a pass, over all offsets.
    pub fn fewest(&self) -> u32 {
        self.count(self.num_offsets() - 1)
    }

    /// Returns the first token of each of the `count(offset)` windows of a pass, in order.
    pub fn starts(&self, offset: u32) -> impl Iterator<Item = u32> + use<> {
        let Self { tokens, length, spacing } = *self;
        (0..self.count(offset)).map(move |window| match spacing {
            Spacing::Stride(stride) => window * stride,
            Spacing::Tiled => offset + window * length,
            Spacing::Lanes(lanes) => {
                let lane_tokens = (tokens - offset - 1) / lanes;
                offset + window % lanes * lane_tokens + window / lanes * length
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fault_names_the_key_that_contradicts_the_sampling() {
        let fault = |text: &str| {
            let config: CorpusConfig = serde_json::from_str(text).unwrap();
            config.fault().map(|(key, ..)| key)
        };
        for (text, key) in [
            (r#"{"sampling": "random", "length": 8}"#, None),
            (r#"{"sampling": "sliding_window", "length": 8, "stride": 1}"#, None),
            (r#"{"sampling": "document", "bos_token": "<s>"}"#, None),
            (r#"{"sampling": "sequential"}"#, Some("length")),
            (r#"{"sampling": "document", "length": 8}"#, Some("length")),
            (r#"{"sampling": "random", "length": 8, "stride": 8}"#, Some("stride")),
            (r#"{"sampling": "document", "eos_token": ""}"#, Some("eos_token")),
        ] {
            assert_eq!(fault(text), key, "{text}");
        }
        assert!(serde_json::from_str::<CorpusConfig>(r#"{"length": 8}"#).is_err());
    }

    #[test]
    fn the_stride_defaults_to_the_length() {
        let spacing = |text: &str| serde_json::from_str::<CorpusConfig>(text).unwrap().spacing(3);
        let sliding = r#"{"sampling": "sliding_window", "length": 8}"#;
        assert_eq!(spacing(sliding), Some(Spacing::Stride(8)));
        let sequential = r#"{"sampling": "sequential", "length": 8}"#;
        assert_eq!(spacing(sequential), Some(Spacing::Lanes(3)));
        assert_eq!(spacing(r#"{"sampling": "document"}"#), None);
    }

    fn windows(tokens: u32, length: u32, spacing: Spacing) -> Windows {
        Windows::new(tokens, length, spacing).unwrap()
    }

    fn starts(spacing: Spacing, offset: u32) -> Vec<u32> {
        windows(35, 5, spacing).starts(offset).collect()
    }

    /// The example of docs/corpora.md: 35 tokens, windows of 5, batches of 2.
    #[test]
    fn windows_of_the_documented_example_start_where_it_says() {
        assert_eq!(starts(Spacing::Stride(1), 0), (0..30).collect::<Vec<_>>());
        assert_eq!(starts(Spacing::Stride(4), 0), [0, 4, 8, 12, 16, 20, 24, 28]);
        assert_eq!(starts(Spacing::Stride(5), 0), [0, 5, 10, 15, 20, 25]);
        for offset in 0..5 {
            let expected = [0, 5, 10, 15, 20, 25].map(|start| start + offset);
            assert_eq!(starts(Spacing::Tiled, offset), expected);
        }
        // two lanes of 17 tokens from token 0, of 16 from token 2, of 15 from token 4
        assert_eq!(starts(Spacing::Lanes(2), 0), [0, 17, 5, 22, 10, 27]);
        assert_eq!(starts(Spacing::Lanes(2), 2), [2, 18, 7, 23, 12, 28]);
        assert_eq!(starts(Spacing::Lanes(2), 4), [4, 19, 9, 24, 14, 29]);
    }

    #[test]
    fn a_corpus_without_a_window_at_some_offset_is_rejected_with_the_minimum() {
        for (spacing, fewest) in
            [(Spacing::Stride(3), 6), (Spacing::Tiled, 10), (Spacing::Lanes(2), 15)]
        {
            assert_eq!(Windows::new(fewest as u32 - 1, 5, spacing), Err(fewest));
            let windows = windows(fewest as u32, 5, spacing);
            assert!(windows.fewest() >= 1, "{spacing:?}");
        }
        assert!(Windows::new(u32::MAX, u32::MAX - 1, Spacing::Tiled).is_err());
    }

    proptest! {
        #[test]
        fn windows_lie_inside_the_corpus_and_cover_it(
            tokens in 2u32..400, length in 1u32..40, step in 1u32..50, kind in 0usize..3
        ) {
            let spacing =
                [Spacing::Stride(step), Spacing::Tiled, Spacing::Lanes(step % 5 + 1)][kind];
            let Ok(windows) = Windows::new(tokens, length, spacing) else { return Ok(()) };
            for offset in 0..windows.num_offsets() {
                let starts: Vec<u32> = windows.starts(offset).collect();
                prop_assert_eq!(starts.len() as u32, windows.count(offset));
                prop_assert!(starts.len() as u32 >= windows.fewest() && !starts.is_empty());
                let mut targets = vec![0; tokens as usize];
                for start in &starts {
                    let last = start + length; // the last target
                    prop_assert!(*start >= offset && last < tokens);
                    targets[*start as usize + 1..=last as usize].iter_mut().for_each(|n| *n += 1);
                }
                let twice = targets.iter().any(|times| *times > 1);
                match spacing {
                    Spacing::Stride(stride) => {
                        prop_assert_eq!(twice, stride < length && starts.len() > 1);
                        // one more window would not fit
                        prop_assert!(starts.last().unwrap() + stride + length >= tokens);
                    }
                    Spacing::Tiled => {
                        prop_assert!(!twice);
                        // after the first token, only a rest shorter than a window is not a target
                        let left = targets[offset as usize + 1..].iter().filter(|n| **n == 0).count();
                        prop_assert!(left < length as usize);
                    }
                    Spacing::Lanes(lanes) => {
                        prop_assert!(!twice);
                        for batch in starts.chunks(lanes as usize) {
                            prop_assert_eq!(batch.len(), lanes as usize);
                        }
                        // each row of the next batch continues where that of this batch ends
                        for (now, next) in starts.iter().zip(&starts[lanes as usize..]) {
                            prop_assert_eq!(now + length, *next);
                        }
                    }
                }
            }
        }
    }
}
