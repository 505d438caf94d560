//! Locates the answers of assistant turns in a rendered conversation. The number of renderings for
//! many turns does not depend on their number.
//!
//! Three conversations are rendered: with marks in place of all wanted turns, of every second one,
//! and of the others. The first shows the texts between the answers; the other two show the length
//! of each answer, because it is there between two known texts. The result is used only if these
//! texts and lengths make up the whole rendered conversation. Otherwise the turns are located one
//! by one.

use std::ops::Range;

use minijinja::Value;

use super::{
    Answer, Chat, ChatTemplate, GenerationPrompt, Lists, PROBE, ROLES, TemplateError,
    message_value, probe_turn,
};
use batch::{Content, Message, Part};

/// The text that a template writes around the answer of a turn.
struct Around {
    /// Text up to the content, or up to the thoughts.
    before: String,
    /// Text after the content.
    after: String,
}

impl Around {
    /// The bytes of the answer in `text`, with the end mark; `None` if `text` differs elsewhere.
    fn answer(&self, text: &str, end_mark: &str) -> Option<Range<usize>> {
        let content = text.strip_prefix(&self.before)?.strip_suffix(&self.after)?;
        let is_ended = self.after.starts_with(end_mark);
        let end = self.before.len() + content.len() + end_mark.len();
        is_ended.then_some(self.before.len()..end)
    }
}

/// Texts rendered in place of the thoughts and the content of a turn. They do not occur in `text`.
fn marks(text: &str) -> [String; 2] {
    let mark = |number: u32| format!("\u{f8f0}{number}\u{f8f1}"); // characters for private use
    let mut unused = (0..).map(mark).filter(|mark| !text.contains(mark.as_str()));
    std::array::from_fn(|_| unused.next().unwrap_or_default())
}

impl ChatTemplate {
    /// Learns how the template writes an assistant turn.
    pub(super) fn probe(&mut self) -> Result<(), TemplateError> {
        let messages = [("user", PROBE[0]), ("assistant", PROBE[1])].map(probe_turn);
        let chat = Chat::new(self, &messages, None);
        let text = chat.render(2, GenerationPrompt::Omit)?;
        let around = chat.around_content(1, &text)?;
        let around = around.filter(|around| around.answer(&text, "").is_some());
        let after = around.ok_or(TemplateError::NoAnswerRange { turn: 1 })?.after;
        let end_mark = after.trim_end();
        if end_mark.is_empty() {
            return Err(TemplateError::NoEndMark);
        }
        let before_thoughts = match chat.around_thoughts(1, &text)? {
            Some(Around { before, .. }) => {
                let prompt = chat.render(1, GenerationPrompt::Append)?;
                Some(before.strip_prefix(&prompt).unwrap_or_default().to_owned())
            }
            None => None,
        };
        let lists = ROLES.map(|role| self.probe_lists(role));
        end_mark.clone_into(&mut self.end_mark);
        self.lists = lists;
        self.before_thoughts = before_thoughts;
        Ok(())
    }

    /// Learns how the template writes a list of two texts in a turn of `role`: it is to be the same
    /// as both texts together.
    fn probe_lists(&self, role: &str) -> Lists {
        let render = |content: Content| {
            let user = probe_turn(("user", "start"));
            let turn = Message { content, ..probe_turn((role, "")) };
            let messages = match role {
                "system" => vec![turn, user],
                "user" => vec![turn],
                _ => vec![user, turn],
            };
            let text =
                Chat::new(self, &messages, None).render(messages.len(), GenerationPrompt::Omit);
            text.map(|text| text.split_whitespace().collect::<String>())
        };
        let parts = PROBE.map(|text| Part::Text(text.to_owned())).to_vec();
        // rows with lists report the error of a template that fails on them
        match (render(Content::Text(PROBE.concat())), render(Content::Parts(parts))) {
            (_, Ok(list)) if !list.contains(PROBE[0]) => Lists::Dropped,
            (Ok(text), Ok(list)) if PROBE.iter().all(|of| list.contains(of)) && text != list => {
                Lists::Printed
            }
            _ => Lists::AsText,
        }
    }
}

impl Chat<'_> {
    /// The bytes of the answer of assistant turn `turn` in `text`, the rendered conversation: its
    /// thoughts, its content and its end mark. `None` if the template does not render the turn.
    ///
    /// An empty thinking block that the template adds to a turn without thoughts is part of the
    /// header.
    pub(super) fn answer(
        &self,
        turn: usize,
        text: &str,
    ) -> Result<Option<Range<usize>>, TemplateError> {
        let end_mark = self.template.end_mark.as_str();
        let Some(around) = self.around_content(turn, text)? else { return Ok(None) };
        if let Some(answer) = around.answer(text, end_mark) {
            return Ok(Some(answer));
        }
        // the header of a turn with thoughts differs from the header of a turn without
        if let Some(written) = &self.template.before_thoughts
            && let Some(around) = self.around_thoughts(turn, text)?
            && let Some(answer) = around.answer(text, end_mark)
        {
            let written = if around.before.ends_with(written) { written.len() } else { 0 };
            return Ok(Some(answer.start - written..answer.end));
        }
        Err(TemplateError::NoAnswerRange { turn })
    }

    /// The text around the content of a turn, if the turn had no thoughts and no tool calls. `None`
    /// if the template does not render the content.
    fn around_content(&self, turn: usize, text: &str) -> Result<Option<Around>, TemplateError> {
        let [content, _] = marks(text);
        let rendered = self.render_with(turn, &probe_turn(("assistant", &content)))?;
        let mut parts = rendered.split(&content);
        match (parts.next(), parts.next(), parts.next()) {
            (Some(before), Some(after), None) => {
                Ok(Some(Around { before: before.to_owned(), after: after.to_owned() }))
            }
            (_, None, _) => Ok(None),
            _ => Err(TemplateError::NoAnswerRange { turn }),
        }
    }

    /// The text around the thoughts and the content of a turn, if it had both and no tool calls.
    /// `None` if the template does not render both.
    fn around_thoughts(&self, turn: usize, text: &str) -> Result<Option<Around>, TemplateError> {
        let [content, thoughts] = marks(text);
        let message = Message {
            reasoning_content: Some(thoughts.clone()),
            ..probe_turn(("assistant", &content))
        };
        let rendered = self.render_with(turn, &message)?;
        let around = rendered.split_once(&thoughts).and_then(|(before, rest)| {
            let (_, after) = rest.split_once(&content)?;
            Some(Around { before: before.to_owned(), after: after.to_owned() })
        });
        Ok(around)
    }

    /// Renders the conversation with another message in place of turn `turn`.
    fn render_with(&self, turn: usize, message: &Message) -> Result<String, TemplateError> {
        let mut messages: Vec<Value> = self.messages.clone();
        messages[turn] = message_value(message);
        self.render_turns(messages, GenerationPrompt::Omit)
    }
}

/// With fewer answers, locating each one alone needs as few renderings.
const FEWEST: usize = 4;
/// First and last character of a mark: for private use.
const MARK: [char; 2] = ['\u{f8f2}', '\u{f8f3}'];

/// A wanted turn and what is rendered in its place.
struct Marked {
    turn: usize,
    message: Value,
    /// Rendered in place of the thoughts; not rendered by every template.
    thoughts: String,
    /// Rendered in place of the content.
    content: String,
}

/// A conversation that was rendered with marks: the texts around the marks, one more than marks,
/// and for each mark whether that of the thoughts was rendered, too.
struct Split<'a> {
    texts: Vec<&'a str>,
    with_thoughts: Vec<bool>,
}

impl<'a> Split<'a> {
    /// `None` if a mark is missing or not rendered once.
    fn new<'m>(rendered: &'a str, marked: impl Iterator<Item = &'m Marked>) -> Option<Self> {
        let mut split = Self { texts: Vec::new(), with_thoughts: Vec::new() };
        let mut rest = rendered;
        let mut num_marks = 0;
        for Marked { thoughts, content, .. } in marked {
            let (before, after) = rest.split_once(content.as_str())?;
            let header = before.split_once(thoughts.as_str()).map(|(header, _)| header);
            split.texts.push(header.unwrap_or(before));
            split.with_thoughts.push(header.is_some());
            num_marks += 1 + usize::from(header.is_some());
            rest = after;
        }
        split.texts.push(rest);
        (rendered.matches(MARK[0]).count() == num_marks).then_some(split)
    }
}

impl Chat<'_> {
    /// The answers of `turns` in `text`, the rendered conversation, or `None` if they must be
    /// located one by one.
    pub(super) fn all_answers(
        &self,
        turns: &[usize],
        originals: &[Message],
        text: &str,
    ) -> Option<Vec<Answer>> {
        if turns.len() < FEWEST || text.contains(MARK[0]) {
            return None;
        }
        [false, true].into_iter().find_map(|with_thoughts| {
            let marked = |turn: &usize| mark(*turn, &originals[*turn], with_thoughts);
            let marked: Vec<Marked> = turns.iter().map(marked).collect();
            self.located(&marked, text)
        })
    }

    fn located(&self, marked: &[Marked], text: &str) -> Option<Vec<Answer>> {
        // a template that refuses the marks may accept them one by one
        let all = self.render_marked(marked.iter()).ok()?;
        let all = Split::new(&all, marked.iter())?;
        let mut halves = [Vec::new(), Vec::new()]; // lengths of the texts around the marks of each half
        for (half, lengths) in halves.iter_mut().enumerate() {
            let of_half = || marked.iter().skip(half).step_by(2);
            let rendered = self.render_marked(of_half()).ok()?;
            let split = Split::new(&rendered, of_half())?;
            *lengths = split.texts.iter().map(|text| text.len()).collect();
        }
        // answer `index` is in the texts of the half in which it is not marked
        let length = |index: usize| {
            let around = halves[(index + 1) % 2].get(index.div_ceil(2))?;
            around.checked_sub(all.texts[index].len() + all.texts[index + 1].len())
        };
        self.joined(marked, &all, length, text)
    }

    /// The answers, if the texts of `all` and answers of these lengths make up `text`.
    fn joined(
        &self,
        marked: &[Marked],
        all: &Split<'_>,
        length: impl Fn(usize) -> Option<usize>,
        text: &str,
    ) -> Option<Vec<Answer>> {
        let end_mark = self.template.end_mark.as_str();
        let mut rest = text;
        let mut answers = Vec::with_capacity(marked.len());
        for (index, Marked { turn, .. }) in marked.iter().enumerate() {
            rest = rest.strip_prefix(all.texts[index])?;
            let start = text.len() - rest.len();
            let (answer, after) = rest.split_at_checked(length(index)?)?;
            // A template that writes an empty block of thoughts before an answer with inline
            // thoughts: the block is part of the header, and is located turn by turn.
            if all.with_thoughts[index] && answer.trim_start().starts_with("</think>") {
                return None;
            }
            rest = after;
            let end = text.len() - rest.len();
            if !all.texts[index + 1].starts_with(end_mark) {
                return None;
            }
            let written = match &self.template.before_thoughts {
                Some(written)
                    if all.with_thoughts[index] && all.texts[index].ends_with(written.as_str()) =>
                {
                    written.len()
                }
                _ => 0,
            };
            let range: Range<usize> = start - written..end + end_mark.len();
            answers.push(Answer { turn: *turn, range });
        }
        (rest == *all.texts.last()?).then_some(answers)
    }

    fn render_marked<'m>(
        &self,
        marked: impl Iterator<Item = &'m Marked>,
    ) -> Result<String, TemplateError> {
        let mut messages: Vec<Value> = self.messages.clone();
        for Marked { turn, message, .. } in marked {
            messages[*turn] = message.clone();
        }
        self.render_turns(messages, GenerationPrompt::Omit)
    }
}

/// The marks of a turn; with one for thoughts only if the turn has some. An empty thinking block is
/// part of the header, as the template writes it.
fn mark(turn: usize, original: &Message, with_thoughts: bool) -> Marked {
    let [first, last] = MARK;
    let thoughts = format!("{first}t{turn}{last}");
    let content = format!("{first}c{turn}{last}");
    let message = Message {
        reasoning_content: (with_thoughts && has_thoughts(original)).then(|| thoughts.clone()),
        ..probe_turn(("assistant", &content))
    };
    Marked { turn, message: message_value(&message), thoughts, content }
}

/// Whether a turn has thoughts that are not empty, as `reasoning_content` or within its content.
fn has_thoughts(message: &Message) -> bool {
    let is_inline = |text: &str| match text.split_once("</think>") {
        Some((before, _)) => {
            let thoughts = before.rsplit_once("<think>").map_or(before, |(_, thoughts)| thoughts);
            !thoughts.trim().is_empty()
        }
        None => false,
    };
    match (&message.reasoning_content, &message.content) {
        (Some(thoughts), _) => !thoughts.trim().is_empty(),
        (None, Content::Text(text)) => is_inline(text),
        (None, Content::Parts(parts)) => {
            parts.iter().any(|part| matches!(part, Part::Text(text) if is_inline(text)))
        }
    }
}
