//! The chat template of the model folder: turns to text, and where in that text the targets stand.
//!
//! Targets are found by rendering: the prefix before an assistant turn with the generation prompt
//! ends where the turn's content begins, and the prefix that includes it ends where it ends. No
//! text is searched for, so nothing that a user writes can start a target.

mod json_dumps;
mod strftime;
pub(in crate::data) mod tokenizer;

use std::ops::Range;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};

use crate::batch::{Content, Message, Part};

const NAME: &str = "chat_template";
/// Contents of the exchange that shows how the template opens and closes an assistant turn.
const PROBE: [&str; 2] = ["question", "answer"];

/// A compiled chat template.
#[derive(Debug)]
pub(in crate::data) struct ChatTemplate {
    env: Environment<'static>,
    special_tokens: Vec<(&'static str, String)>,
    /// What follows the content of an assistant turn, as in `"<|im_end|>\n"`.
    tail: String,
}

/// Whether the text ends with the header of an assistant turn to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) enum GenerationPrompt {
    /// It does: the model is to answer.
    Append,
    /// It does not.
    Omit,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) struct RenderedChat {
    /// The text, media as one placeholder each.
    pub text: String,
    /// Bytes of `text` that are targets: content and end mark of each trained assistant turn.
    pub targets: Vec<Range<usize>>,
}

/// A conversation cut before its last assistant turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) struct RenderedPrompt {
    /// Everything up to and with the header of that turn.
    pub text: String,
    /// Content of that turn, without its end mark.
    pub answer: String,
}

/// Why a template, or a conversation with it, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// Not a template.
    #[error("the chat template does not compile: {problem}")]
    Compile {
        /// What the engine says, with the line.
        problem: String,
    },
    /// The template refused these turns.
    #[error("the chat template fails: {problem}")]
    Render {
        /// What the engine or the template says.
        problem: String,
    },
    /// An assistant turn without a mark at its end could not be told from what follows.
    #[error("the chat template writes no end mark after an assistant turn")]
    NoEndMark,
    /// Rendering a part of the conversation gives other text than rendering all of it.
    #[error(
        "the chat template is not prefix-stable: it renders turn {turn} differently when more turns follow"
    )]
    NotPrefixStable {
        /// Index of the turn, starting at 0.
        turn: usize,
    },
}

impl TemplateError {
    /// Short key, for counting rejected rows by reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Compile { .. } | Self::Render { .. } => "template",
            Self::NoEndMark => "template_end_mark",
            Self::NotPrefixStable { .. } => "template_not_prefix_stable",
        }
    }

    /// What to do about it, where that is not plain from the message.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NotPrefixStable { .. } => {
                "targets could not be told apart: use a template that renders earlier turns unchanged"
            }
            Self::NoEndMark => {
                "the model would never learn to stop: end assistant turns with a mark"
            }
            Self::Compile { .. } => "copy the chat template from the published model again",
            Self::Render { .. } => return None,
        };
        Some(hint.to_owned())
    }
}

impl ChatTemplate {
    /// Compiles `source` with the settings and functions of transformers, and tries it on one
    /// exchange. `special_tokens` are variables of the template, such as `bos_token`.
    pub(in crate::data) fn new(
        source: String,
        special_tokens: Vec<(&'static str, String)>,
    ) -> Result<Self, TemplateError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|error| compile_error(&error))?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_filter("tojson", to_json);
        env.add_function("raise_exception", raise_exception);
        let loaded = SystemTime::now(); // one run, one date
        env.add_function("strftime_now", move |format: &str| strftime::strftime(format, loaded));
        env.add_template_owned(NAME, source).map_err(|error| compile_error(&error))?;
        let mut this = Self { env, special_tokens, tail: String::new() };
        this.tail = this.probe()?;
        Ok(this)
    }

    /// Text of a conversation, media as one placeholder each.
    pub(in crate::data) fn render(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        prompt: GenerationPrompt,
    ) -> Result<String, TemplateError> {
        Chat::new(self, messages, tools).render(messages.len(), prompt)
    }

    /// Text of a conversation, and where its targets are.
    pub(in crate::data) fn render_with_targets(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
    ) -> Result<RenderedChat, TemplateError> {
        let chat = Chat::new(self, messages, tools);
        let text = chat.render(messages.len(), GenerationPrompt::Omit)?;
        let mut targets = Vec::new();
        for (turn, message) in messages.iter().enumerate() {
            if message.role == "assistant" && message.train {
                let content = chat.content_of(turn, &text)?;
                targets.push(content.start..content.end + self.tail.trim_end().len());
            }
        }
        Ok(RenderedChat { text, targets })
    }

    /// The conversation up to its last assistant turn, and that turn; `None` without one.
    pub(in crate::data) fn render_prompt(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
    ) -> Result<Option<RenderedPrompt>, TemplateError> {
        let Some(turn) = messages.iter().rposition(|message| message.role == "assistant") else {
            return Ok(None);
        };
        let chat = Chat::new(self, &messages[..=turn], tools);
        let mut text = chat.render(turn + 1, GenerationPrompt::Omit)?;
        let content = chat.content_of(turn, &text)?;
        let answer = text[content.clone()].to_owned();
        text.truncate(content.start);
        Ok(Some(RenderedPrompt { text, answer }))
    }

    /// What the template writes after the content of an assistant turn.
    fn probe(&self) -> Result<String, TemplateError> {
        let messages = [("user", PROBE[0]), ("assistant", PROBE[1])].map(probe_turn);
        let chat = Chat::new(self, &messages, None);
        let text = chat.render(2, GenerationPrompt::Omit)?;
        let head = chat.render(1, GenerationPrompt::Append)?;
        let tail = text.strip_prefix(&head).and_then(|rest| rest.strip_prefix(PROBE[1]));
        let tail = tail.ok_or(TemplateError::NotPrefixStable { turn: 1 })?;
        if tail.trim_end().is_empty() {
            return Err(TemplateError::NoEndMark);
        }
        Ok(tail.to_owned())
    }
}

/// A conversation as values of the template.
struct Chat<'a> {
    template: &'a ChatTemplate,
    messages: Vec<Value>,
    tools: Value,
}

impl<'a> Chat<'a> {
    fn new(
        template: &'a ChatTemplate,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
    ) -> Self {
        let messages = messages.iter().map(message_value).collect();
        Self { template, messages, tools: tools.map_or(Value::from(()), value_of_json) }
    }

    fn render(
        &self,
        num_messages: usize,
        prompt: GenerationPrompt,
    ) -> Result<String, TemplateError> {
        self.render_turns(self.messages[..num_messages].to_vec(), prompt)
    }

    fn render_turns(
        &self,
        messages: Vec<Value>,
        prompt: GenerationPrompt,
    ) -> Result<String, TemplateError> {
        let add_generation_prompt = prompt == GenerationPrompt::Append;
        let special_tokens = self.template.special_tokens.iter();
        let context =
            special_tokens.map(|(name, token)| (*name, Value::from(token.as_str()))).chain([
                ("messages", Value::from(messages)),
                ("tools", self.tools.clone()),
                ("documents", Value::from(())),
                ("add_generation_prompt", Value::from(add_generation_prompt)),
            ]);
        let template = self.template.env.get_template(NAME).expect("added by the constructor");
        template
            .render(Value::from_pairs(context))
            .map_err(|error| TemplateError::Render { problem: describe(&error) })
    }

    /// Where the content of assistant turn `turn` stands in `text`, the whole conversation.
    fn content_of(&self, turn: usize, text: &str) -> Result<Range<usize>, TemplateError> {
        let tail = self.template.tail.as_str();
        let rendered;
        let upto = if turn + 1 == self.messages.len() {
            text
        } else {
            rendered = self.render(turn + 1, GenerationPrompt::Omit)?;
            &rendered
        };
        let head = self.head_of(turn)?;
        let body = upto.strip_suffix(tail).filter(|body| body.starts_with(&head));
        match body {
            Some(body) if text.starts_with(upto) => Ok(head.len()..body.len()),
            _ => Err(TemplateError::NotPrefixStable { turn }),
        }
    }

    /// What stands before the content of assistant turn `turn`.
    fn head_of(&self, turn: usize) -> Result<String, TemplateError> {
        if turn > 0 {
            return self.render(turn, GenerationPrompt::Append);
        }
        // Templates look at the first turn, so there is no rendering of no turns: take the
        // opening from a conversation that begins with a known answer.
        let answer = message_value(&probe_turn(("assistant", PROBE[1])));
        let mut opening = self.render_turns(vec![answer], GenerationPrompt::Omit)?;
        let body = opening.strip_suffix(self.template.tail.as_str());
        let head = body.and_then(|body| body.strip_suffix(PROBE[1])).map(str::len);
        opening.truncate(head.ok_or(TemplateError::NotPrefixStable { turn })?);
        Ok(opening)
    }
}

fn probe_turn((role, text): (&str, &str)) -> Message {
    let content = Content::Text(text.to_owned());
    Message { role: role.to_owned(), content, tool_calls: None, train: true }
}

fn message_value(message: &Message) -> Value {
    let content = match &message.content {
        Content::Text(text) => Value::from(text.as_str()),
        Content::Parts(parts) => parts.iter().map(part_value).collect(),
    };
    let tool_calls = message.tool_calls.iter().map(|calls| ("tool_calls", value_of_json(calls)));
    let always = [("role", Value::from(message.role.as_str())), ("content", content)];
    Value::from_pairs(always.into_iter().chain(tool_calls))
}

fn part_value(part: &Part) -> Value {
    match part {
        Part::Text(text) => Value::from_pairs([("type", "text"), ("text", text.as_str())]),
        Part::Image => Value::from_pairs([("type", "image")]),
        Part::Video => Value::from_pairs([("type", "video")]),
    }
}

/// Keeps the order of keys.
fn value_of_json(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), _, _) => Value::from(value),
            (None, Some(value), _) => Value::from(value),
            (None, None, value) => Value::from(value.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => values.iter().map(value_of_json).collect(),
        Json::Object(entries) => {
            let entries = entries.iter();
            Value::from_pairs(entries.map(|(key, value)| (key.as_str(), value_of_json(value))))
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the signature of a filter")]
/// `tojson` as transformers replaces it: `json.dumps` without escapes of HTML or of non-ASCII.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    // Accepted because transformers has it; non-ASCII text stays as it is.
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    json_dumps::dumps(value, indent)
}

fn raise_exception(message: &str) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

fn compile_error(error: &Error) -> TemplateError {
    TemplateError::Compile { problem: describe(error) }
}

/// One line: what, and where in the template.
fn describe(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or_else(|| what.clone(), |line| format!("{what} (line {line})"))
}
