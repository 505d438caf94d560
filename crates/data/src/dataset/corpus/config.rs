//! The section `corpus` of a data set: how samples are taken from plain text.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use settings::{Choice, section};

use super::windows::Spacing;

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

#[cfg(test)]
mod tests {
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
}
