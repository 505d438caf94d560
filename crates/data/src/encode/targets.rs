//! Which parts of a rendered chat are supervised, and with which weight. The rendered chat is
//! compared with the row: it must contain the text of each turn, in order.
//!
//! A template may trim texts, drop or rewrite the thoughts of an answer, and write the content of a
//! tool turn as JSON. Anything else, such as a template that changes letters, drops turns or prints
//! lists of parts, would train on another conversation than that of the row.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use settings::Choice;

use crate::template::{Answer, Lists, RenderedChat, TemplateError};
use batch::{Content, IGNORE_INDEX, Message, Part};

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

const THOUGHTS_END: &str = "</think>";
/// Number of characters of a missing text in the message.
const SHOWN: usize = 60;

/// Fails with the first turn whose text is not in `chat`, after that of the turns before it.
///
/// The text of a located answer must be in its range. The texts of the turns before it must precede
/// it. The system turn may be anywhere. `lists` is how the template writes lists of parts in turns of
/// a role; a short text of a dropped one may be found in the template's own words.
pub(super) fn check_turns(
    messages: &[Message],
    chat: &RenderedChat,
    lists: impl Fn(&str) -> Lists,
) -> Result<(), TemplateError> {
    let text = chat.text.as_str();
    let mut answers = chat.answers.iter().peekable();
    let mut at = 0; // end of the last text that was found
    for (turn, message) in messages.iter().enumerate() {
        let mut within = match answers.peek() {
            Some(answer) => at.min(answer.range.start)..answer.range.start,
            None => at..text.len(),
        };
        if let Some(answer) = answers.next_if(|answer| answer.turn == turn) {
            within = answer.range.clone();
            at = answer.range.end;
        } else if message.role == "system" {
            within = 0..text.len();
        }
        let is_list = matches!(message.content, Content::Parts(_));
        let lists = if is_list { lists(&message.role) } else { Lists::AsText };
        if lists == Lists::Printed {
            return Err(TemplateError::PrintedParts { turn });
        }
        for piece in pieces(message) {
            let found = position(text, within.clone(), piece, &message.role);
            let Some(found) = found.filter(|_| lists != Lists::Dropped) else {
                return Err(TemplateError::TurnText { turn, missing: shown(piece) });
            };
            within.start = found.end;
        }
        if message.role != "system" {
            at = at.max(within.start);
        }
    }
    Ok(())
}

/// Fails if the name of a tool, or of a tool that a turn calls, is not in the rendered chat.
pub(super) fn check_tools(
    messages: &[Message],
    tools: Option<&Value>,
    rendered: &str,
) -> Result<(), TemplateError> {
    let calls = messages.iter().filter_map(|message| message.tool_calls.as_ref());
    let names = tools.into_iter().chain(calls).filter_map(Value::as_array).flatten();
    match names.filter_map(function_name).find(|name| !rendered.contains(name)) {
        Some(name) => Err(TemplateError::Tools { name: name.to_owned() }),
        None => Ok(()),
    }
}

/// The name of the function of a tool or of a call.
fn function_name(tool: &Value) -> Option<&str> {
    tool["function"]["name"].as_str().or(tool["name"].as_str())
}

/// The texts of a turn that a template must render, trimmed; not the thoughts of an answer.
fn pieces(message: &Message) -> impl Iterator<Item = &str> {
    let parts = match &message.content {
        Content::Text(text) => vec![text.as_str()],
        Content::Parts(parts) => parts
            .iter()
            .filter_map(|part| match part {
                Part::Text(text) => Some(text.as_str()),
                Part::Image | Part::Video => None,
            })
            .collect(),
    };
    let is_answer = message.role == "assistant";
    let without_thoughts = move |text| match str::rsplit_once(text, THOUGHTS_END) {
        Some((_, answer)) if is_answer => answer,
        _ => text,
    };
    parts.into_iter().map(without_thoughts).map(str::trim).filter(|text| !text.is_empty())
}

/// Where `piece` is in these bytes of `text`.
fn position(text: &str, within: Range<usize>, piece: &str, role: &str) -> Option<Range<usize>> {
    let find = |piece: &str| {
        let text = &text[within.clone()];
        // A search for a long text reads all of it first, which takes longer than to compare it
        // with the place where its head is.
        let head = &piece[..piece.floor_char_boundary(32)];
        let first = text.find(head)?;
        let is_there = text[first..].starts_with(piece);
        let start = within.start + if is_there { first } else { text.find(piece)? };
        Some(start..start + piece.len())
    };
    let as_json = || {
        let json = serde_json::to_string(piece).ok()?;
        find(json.get(1..json.len() - 1)?)
    };
    find(piece).or_else(|| if role == "tool" { as_json() } else { None })
}

/// The start of a text, for a message.
fn shown(text: &str) -> String {
    let start: String = text.chars().take(SHOWN).collect();
    let more = if start.len() < text.len() { ".." } else { "" };
    format!("{}{more}", start.escape_debug())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::Answer;

    fn text(role: &str, text: &str) -> Message {
        Message::new(role, Content::Text(text.to_owned()))
    }

    /// Checks turns against a rendering without located answers.
    fn check(messages: &[Message], rendered: &str) -> Result<(), TemplateError> {
        let chat = RenderedChat { text: rendered.to_owned(), answers: Vec::new() };
        check_turns(messages, &chat, |_| Lists::AsText)
    }

    #[test]
    fn tools_and_calls_that_a_template_drops_are_named() {
        let tools = serde_json::json!([{"type": "function", "function": {"name": "find_city"}}]);
        assert_eq!(check_tools(&[], Some(&tools), "<tools>find_city</tools>"), Ok(()));
        let dropped = Err(TemplateError::Tools { name: "find_city".to_owned() });
        assert_eq!(check_tools(&[], Some(&tools), "<|im_start|>user"), dropped);
        let calls = serde_json::json!([{"name": "find_city", "arguments": {}}]);
        let call = Message { tool_calls: Some(calls), ..text("assistant", "") };
        assert_eq!(check_tools(&[call], None, "<|im_end|>"), dropped);
    }

    #[test]
    fn the_text_of_a_list_is_missing_if_the_template_drops_lists() {
        let parts = [Message::new("user", Content::Parts(vec![Part::Text("hi".to_owned())]))];
        let chat = RenderedChat { text: "<think>: hi".to_owned(), answers: Vec::new() };
        assert_eq!(check_turns(&parts, &chat, |_| Lists::AsText), Ok(()));
        let missing = TemplateError::TurnText { turn: 0, missing: "hi".to_owned() };
        assert_eq!(check_turns(&parts, &chat, |_| Lists::Dropped), Err(missing));
        assert_eq!(check_turns(&[text("user", "hi")], &chat, |_| Lists::Dropped), Ok(()));
    }

    #[test]
    fn trimmed_texts_dropped_thoughts_and_json_of_tools_are_accepted() {
        let messages = [
            text("user", " question\n"),
            text("assistant", "<think>\nlong\n</think>\n\nanswer"),
            text("tool", "a \"b\"\n"),
            text("assistant", ""),
            text("user", "question"),
        ];
        assert_eq!(check(&messages, "<question><answer><\"a \\\"b\\\"\\n\"><><question>"), Ok(()));
    }

    #[test]
    fn a_long_text_is_found_behind_another_one_with_the_same_head() {
        let head = "ab\u{e9}".repeat(20);
        let rendered = format!("{head}1 {head}2");
        let found = |piece: &str| position(&rendered, 0..rendered.len(), piece, "user");
        assert_eq!(found(&format!("{head}2")), Some(head.len() + 2..rendered.len()));
        assert_eq!(found(&format!("{head}3")), None);
        assert_eq!(found(&rendered), Some(0..rendered.len()));
    }

    #[test]
    fn the_system_turn_may_be_moved_and_other_turns_may_not() {
        let messages = [text("system", "rule"), text("user", "one"), text("user", "two")];
        assert_eq!(check(&messages, "one, rule: two"), Ok(()));
        let missing = TemplateError::TurnText { turn: 2, missing: "two".to_owned() };
        assert_eq!(check(&messages, "rule: two, one"), Err(missing));
    }

    #[test]
    fn a_text_with_other_letters_is_missing() {
        let long = "Answer ".repeat(20);
        let messages = [text("user", "q"), text("assistant", &long)];
        let missing = format!("{}..", &long[..60]);
        let error = TemplateError::TurnText { turn: 1, missing };
        assert_eq!(check(&messages, &format!("q {}", long.to_uppercase())), Err(error));
    }

    #[test]
    fn an_answer_must_be_in_its_range() {
        let messages = [text("user", "yes?"), text("assistant", "yes")];
        let answers = vec![Answer { turn: 1, range: 5..12 }];
        let chat = RenderedChat { text: "yes? NO<end> yes".to_owned(), answers };
        let missing = TemplateError::TurnText { turn: 1, missing: "yes".to_owned() };
        assert_eq!(check_turns(&messages, &chat, |_| Lists::AsText), Err(missing));
    }

    #[test]
    fn a_list_of_parts_is_an_error_if_the_template_prints_lists_of_its_role() {
        let parts = vec![Part::Text("one".to_owned()), Part::Text(" two".to_owned())];
        let messages = [text("user", "zero"), Message::new("tool", Content::Parts(parts))];
        let chat = RenderedChat { text: "zero one two".to_owned(), answers: Vec::new() };
        let printed_by =
            |role| {
                check_turns(&messages, &chat, move |of| {
                    if of == role { Lists::Printed } else { Lists::AsText }
                })
            };
        assert_eq!(printed_by("user"), Ok(()));
        assert_eq!(printed_by("tool"), Err(TemplateError::PrintedParts { turn: 1 }));
    }
}
