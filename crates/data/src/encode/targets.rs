//! Which parts of a rendered chat are supervised, and with which weight.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use settings::Choice;

use crate::template::{Answer, RenderedChat};
use batch::{Content, IGNORE_INDEX, Message};

/// Which tokens of a chat are supervised. The names are those of ms-swift.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum LossScale {
    /// The answers of all assistant turns, without the media in them.
    #[default]
    Default,
    /// The answers of the assistant turns after the last user turn.
    LastRound,
    /// All text tokens: system, user and tool turns and headers too, but no media.
    All,
    /// The answers of all assistant turns, without an empty `<think>` block at their start.
    IgnoreEmptyThink,
}

impl LossScale {
    /// Whether the answer of turn `turn` must be located in the rendered chat.
    pub(super) fn needs_answer(self, messages: &[Message], turn: usize) -> bool {
        match self {
            Self::All => true, // a turn with weight 0 is excluded
            Self::Default | Self::IgnoreEmptyThink => messages[turn].weight > 0.0,
            Self::LastRound => {
                let is_later = messages[turn..].iter().all(|message| message.role != "user");
                is_later && messages[turn].weight > 0.0
            }
        }
    }

    /// The weight of the text outside of answers, with [`LossScale::All`]: that of the turns of the
    /// others, which have the weight of the row unless they are excluded.
    fn rest(messages: &[Message]) -> f32 {
        let others = messages.iter().filter(|message| message.role != "assistant");
        others.chain(messages).next().map_or(1.0, |message| message.weight)
    }

    /// The index of a turn that [`LossScale::All`] cannot give its own weight: one that is not the
    /// assistant's, with another weight than the earlier ones.
    pub(super) fn unequal_turn(self, messages: &[Message]) -> Option<usize> {
        let rest = Self::rest(messages);
        let is_unequal = |message: &Message| message.role != "assistant" && message.weight != rest;
        messages.iter().position(is_unequal).filter(|_| self == Self::All)
    }

    /// The supervised parts of a chat whose needed answers were located. With `train_empty_think`,
    /// an empty `<think>` block that the template wrote before an answer belongs to it.
    pub(super) fn supervision(
        self,
        messages: &[Message],
        chat: &RenderedChat,
        train_empty_think: bool,
    ) -> Supervision {
        let target = |answer: &Answer| {
            let Range { mut start, end } = answer.range;
            if self == Self::IgnoreEmptyThink {
                start += empty_thoughts(&chat.text[start..end]);
            }
            if train_empty_think {
                start = before_empty_thoughts(&chat.text[..start]).unwrap_or(start);
            }
            Target { range: start..end, weight: messages[answer.turn].weight }
        };
        let targets = chat.answers.iter().map(target).collect();
        let rest = if self == Self::All { Self::rest(messages) } else { 0.0 };
        Supervision { targets, rest }
    }
}

/// Number of bytes of the empty `<think>` block at the start of an answer, with the whitespace
/// after it; 0 if it has none.
fn empty_thoughts(answer: &str) -> usize {
    let rest = answer.trim_start().strip_prefix("<think>");
    let rest = rest.and_then(|rest| rest.trim_start().strip_prefix("</think>"));
    rest.map_or(0, |rest| answer.len() - rest.trim_start().len())
}

/// The start of the empty `<think>` block at the end of the text before an answer; `None` if it has
/// none.
fn before_empty_thoughts(header: &str) -> Option<usize> {
    let rest = header.trim_end().strip_suffix("</think>")?;
    Some(rest.trim_end().strip_suffix("<think>")?.len())
}

/// A part of a rendered chat and the weight of its tokens.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Target {
    /// Bytes of the text.
    pub(super) range: Range<usize>,
    /// Factor of the loss; 0 excludes the part.
    pub(super) weight: f32,
}

/// The supervised parts of a rendered chat.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Supervision {
    /// Ascending and disjoint.
    pub(super) targets: Vec<Target>,
    /// Weight of the text tokens outside of `targets`.
    pub(super) rest: f32,
}

impl Supervision {
    /// The labels and the weights of the tokens; `[T]`. `offsets` are their bytes in the text, and
    /// `spans` the tokens of media, which are no targets, in an answer either. A token that overlaps
    /// a target only partly, such as newlines merged with those of the header, does not belong to
    /// the target.
    pub(super) fn labels(
        &self,
        ids: &[u32],
        offsets: &[(usize, usize)],
        spans: &[Range<usize>],
    ) -> (Vec<i64>, Option<Vec<f32>>) {
        let mut weights = vec![self.rest; ids.len()];
        for (weight, (start, end)) in weights.iter_mut().zip(offsets) {
            let candidate = self.targets.partition_point(|target| target.range.end < *end);
            match self.targets.get(candidate) {
                _ if end <= start => *weight = 0.0,
                Some(target) if target.range.start <= *start => *weight = target.weight,
                _ => {}
            }
        }
        for span in spans {
            weights[span.clone()].fill(0.0);
        }
        let label = |(id, weight): (&u32, &f32)| {
            if *weight > 0.0 { i64::from(*id) } else { IGNORE_INDEX }
        };
        let labels = ids.iter().zip(&weights).map(label).collect();
        (labels, Some(weights).filter(|weights| differ(weights)))
    }
}

/// Whether the weight of a supervised token is not 1.
pub(super) fn differ(weights: &[f32]) -> bool {
    weights.iter().any(|weight| *weight > 0.0 && *weight != 1.0)
}

/// The thoughts that a message brings: its `reasoning_content`, or what its content has between
/// `<think>` and `</think>`. `None` if they are empty.
pub(super) fn thoughts(message: &Message) -> Option<&str> {
    let inline = match &message.content {
        Content::Text(text) => text.split_once("</think>"),
        Content::Parts(_) => None,
    };
    let inline = inline.map(|(thoughts, _)| thoughts.trim_start().trim_start_matches("<think>"));
    message.reasoning_content.as_deref().or(inline).map(str::trim).filter(|text| !text.is_empty())
}
