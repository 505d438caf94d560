//! The `corpus` section of a data set: plain text, and how it becomes samples.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::windows::Spacing;

/// Plain text instead of chats, and how samples are taken from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorpusConfig {
    /// What a sample is.
    pub sampling: Sampling,
    /// Inputs, and so targets, of a window; all but `document` need it.
    #[serde(default)]
    pub length: Option<NonZeroU32>,
    /// Tokens from the begin of a window to that of the next, with `sliding_window`; null: `length`.
    #[serde(default)]
    pub stride: Option<NonZeroU32>,
    /// Token that ends each document, written where a text does not end in it. With neither this nor
    /// `bos_token` it is the model folder's.
    #[serde(default)]
    pub eos_token: Option<String>,
    /// Token that begins each document, written where a text does not begin with it.
    #[serde(default)]
    pub bos_token: Option<String>,
}

/// What a sample of a corpus is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// A window every `stride` tokens, from the first token on.
    SlidingWindow,
    /// Windows end to end, from an offset below `length` on that each pass draws.
    Random,
    /// The same, in as many parallel tracks as a batch has rows: the next batch goes on where this
    /// one ends.
    Sequential,
    /// One document.
    Document,
}

impl CorpusConfig {
    /// The key that cannot be what it is, what it is, and what was expected.
    pub(in crate::data) fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        let Self { sampling, length, stride, eos_token, bos_token } = self;
        let said = |value: &Option<NonZeroU32>| {
            value.map_or_else(|| "null".to_owned(), |value| value.to_string())
        };
        let windows = *sampling != Sampling::Document;
        if windows && length.is_none() {
            return Some(("length", said(length), "the number of inputs of a window"));
        }
        if !windows && length.is_some() {
            return Some(("length", said(length), "null: a document is as long as it is"));
        }
        if stride.is_some() && *sampling != Sampling::SlidingWindow {
            return Some(("stride", said(stride), "null: only `sliding_window` has a stride"));
        }
        for (key, token) in [("eos_token", eos_token), ("bos_token", bos_token)] {
            if token.as_deref() == Some("") {
                return Some((key, String::new(), "a token of the model folder's tokenizer"));
            }
        }
        None
    }

    /// Tokens of a window, its last target included; `None` for documents.
    pub(in crate::data) fn window_tokens(&self) -> Option<u64> {
        self.length.filter(|_| self.sampling != Sampling::Document).map(|t| u64::from(t.get()) + 1)
    }

    /// How windows follow each other in training with `tracks` rows a batch; `None` for documents.
    pub(super) fn spacing(&self, tracks: u32) -> Option<Spacing> {
        let length = self.length?.get();
        match self.sampling {
            Sampling::SlidingWindow => {
                Some(Spacing::Stride(self.stride.map_or(length, NonZeroU32::get)))
            }
            Sampling::Random => Some(Spacing::Tiled),
            Sampling::Sequential => Some(Spacing::Tracks(tracks)),
            Sampling::Document => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_contradict_the_sampling_are_named() {
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
    fn the_stride_is_the_length_unless_it_is_given() {
        let spacing = |text: &str| serde_json::from_str::<CorpusConfig>(text).unwrap().spacing(3);
        let sliding = r#"{"sampling": "sliding_window", "length": 8}"#;
        assert_eq!(spacing(sliding), Some(Spacing::Stride(8)));
        let sequential = r#"{"sampling": "sequential", "length": 8}"#;
        assert_eq!(spacing(sequential), Some(Spacing::Tracks(3)));
        assert_eq!(spacing(r#"{"sampling": "document"}"#), None);
    }
}
