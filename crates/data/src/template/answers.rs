//! Locates the answers of assistant turns in a rendered conversation.

use std::ops::Range;

use minijinja::Value;

use super::{
    Chat, ChatTemplate, GenerationPrompt, Lists, PROBE, ROLES, TemplateError, message_value,
    probe_turn,
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
