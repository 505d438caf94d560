//! Renders conversations with the chat template of the model folder and locates the answers.
//!
//! To locate the answer of an assistant turn, the conversation is rendered a second time, with a
//! mark in place of the content of that turn. The text before the mark is the header of the answer,
//! and the text after it begins with the end mark. The text is not searched for markers, so text
//! written by a user can never become a target. A template may render earlier turns differently
//! from the last one, as templates of thinking models do. If there are many answers, they are
//! located together, so that the time is linear in the number of turns.

mod answers;
mod functions;
mod limits;

use std::ops::Range;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};

use crate::json::long_integer;
use batch::{Content, Message, Part};

/// Name under which the template is registered in minijinja.
const NAME: &str = "chat_template";
/// Contents of the user and the assistant turn that are rendered to learn how the template writes
/// an assistant turn.
const PROBE: [&str; 2] = ["question", "answer"];

#[derive(Debug)]
pub(crate) struct ChatTemplate {
    env: Environment<'static>,
    special_tokens: Vec<(&'static str, String)>,
    /// Mark after the content of an assistant turn, such as `<|im_end|>`.
    end_mark: String,
    /// Text that the template writes between the generation prompt and the thoughts of a turn, such
    /// as `"<think>\n"`; `None` if it does not render thoughts.
    before_thoughts: Option<String>,
    /// How the contents that are lists of parts are written, for each role of [`ROLES`].
    lists: [Lists; ROLES.len()],
}

const ROLES: [&str; 4] = ["user", "assistant", "system", "tool"];

/// How a template writes a content that is a list of parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Lists {
    /// As a text, or it fails.
    #[default]
    AsText,
    /// It writes none of the texts.
    Dropped,
    /// It writes more than the texts, such as the keys of the parts.
    Printed,
}

/// Whether to append the header of an assistant turn, so that the model answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GenerationPrompt {
    Append,
    Omit,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RenderedChat {
    /// Text with one placeholder per image or video.
    pub text: String,
    /// The requested answers that are in `text`, in order.
    pub answers: Vec<Answer>,
}

/// The answer of an assistant turn in a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Index of the turn.
    pub turn: usize,
    /// Bytes of its thoughts, its content and its end mark.
    pub range: Range<usize>,
}

/// A rendered conversation, split before the answer of its last assistant turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RenderedPrompt {
    /// Text up to and including the header of that turn.
    pub text: String,
    /// Thoughts and content of that turn, without its end mark.
    pub answer: String,
}

/// The reason why a chat template, or a conversation rendered with it, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum TemplateError {
    #[error("the chat template does not compile: {problem}")]
    #[fault(hint = "copy the chat template from the published model again", reason = "template")]
    Compile {
        /// Error of the template engine, with its line.
        problem: String,
    },
    #[error("the chat template fails while it renders a conversation: {problem}")]
    #[fault(
        hint = "that line of the chat template shows which keys and values it expects: change the row, or use the template of the published model",
        reason = "template"
    )]
    Render { problem: String },
    #[error("the chat template writes no end mark after an assistant turn")]
    #[fault(
        hint = "change the template to end assistant turns with a token such as `<|im_end|>`, so that the model learns to stop",
        reason = "template_end_mark"
    )]
    NoEndMark,
    #[error(
        "the chat template renders turn {turn} so that its answer cannot be located: the text around the answer depends on it"
    )]
    #[fault(
        hint = "use a template that writes the content of an assistant turn once, between a header and an end mark",
        reason = "template_answer"
    )]
    NoAnswerRange {
        /// Index of the turn, starting at 0.
        turn: usize,
    },
    #[error(
        "the chat template changes, moves or drops the text of turn {turn}: the rendered chat does not contain \"{missing}\" there"
    )]
    #[fault(
        hint = "use the chat template of the published model; it must write the text of each turn as it is, in order",
        reason = "template_text"
    )]
    TurnText {
        /// Index of the turn, starting at 0.
        turn: usize,
        /// The start of the text.
        missing: String,
    },
    #[error("the chat template drops tools: the rendered chat does not contain the tool `{name}`")]
    #[fault(
        hint = "use a model whose chat template writes tools, or remove them from the rows",
        reason = "template_text"
    )]
    Tools { name: String },
    #[error("the chat template prints the list of parts of turn {turn} instead of their texts")]
    #[fault(
        hint = "use the chat template of the published model; it must write the text of each turn as it is, in order",
        reason = "template_text"
    )]
    PrintedParts {
        /// Index of the turn, starting at 0.
        turn: usize,
    },
    #[error(
        "the chat template writes the end mark `{mark}` after an assistant turn: it is {num_tokens} tokens, and must be one"
    )]
    #[fault(
        hint = "change the template to end assistant turns with a token such as `<|im_end|>`, so that the model learns to stop",
        reason = "template_end_mark"
    )]
    EndMarkTokens { mark: String, num_tokens: usize },
}

impl ChatTemplate {
    /// Compiles `source` with the settings and functions of transformers, and checks it on a short
    /// conversation. `special_tokens` become variables of the template, such as `bos_token`.
    pub(crate) fn new(
        source: &str,
        special_tokens: Vec<(&'static str, String)>,
    ) -> Result<Self, TemplateError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|error| TemplateError::Compile { problem: error.to_string() });
        env.set_syntax(syntax?);
        limits::limit(&mut env);
        env.add_filter("tojson", to_json);
        env.add_function("raise_exception", raise_exception);
        let loaded = SystemTime::now(); // the date must not change within a run
        env.add_function("strftime_now", move |format: &str| functions::strftime(format, loaded));
        limits::add_template(&mut env, NAME, source)
            .map_err(|problem| TemplateError::Compile { problem })?;
        let mut this = Self {
            env,
            special_tokens,
            end_mark: String::new(),
            before_thoughts: None,
            lists: <[Lists; ROLES.len()]>::default(),
        };
        this.probe()?;
        Ok(this)
    }

    /// Renders a conversation, with one placeholder per image or video.
    pub(crate) fn render(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        prompt: GenerationPrompt,
    ) -> Result<String, TemplateError> {
        Chat::new(self, messages, tools).render(messages.len(), prompt)
    }

    /// Renders a conversation and locates the answers of the assistant turns for which `is_wanted`
    /// returns true.
    pub(crate) fn render_with_answers(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<RenderedChat, TemplateError> {
        let chat = Chat::new(self, messages, tools);
        let text = chat.render(messages.len(), GenerationPrompt::Omit)?;
        let is_wanted = |turn: &usize| messages[*turn].role == "assistant" && is_wanted(*turn);
        let wanted: Vec<usize> = (0..messages.len()).filter(is_wanted).collect();
        if let Some(answers) = chat.all_answers(&wanted, messages, &text) {
            return Ok(RenderedChat { text, answers });
        }
        let mut answers = Vec::new();
        for turn in wanted {
            let range = chat.answer(turn, &text)?;
            answers.extend(range.map(|range| Answer { turn, range }));
        }
        Ok(RenderedChat { text, answers })
    }

    /// Renders a conversation up to its last assistant turn, split before the answer of that turn.
    /// Returns `None` if it has no assistant turn.
    pub(crate) fn render_prompt(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
    ) -> Result<Option<RenderedPrompt>, TemplateError> {
        let Some(turn) = messages.iter().rposition(|message| message.role == "assistant") else {
            return Ok(None);
        };
        let chat = Chat::new(self, &messages[..=turn], tools);
        let mut text = chat.render(turn + 1, GenerationPrompt::Omit)?;
        let answer = chat.answer(turn, &text)?.ok_or(TemplateError::NoAnswerRange { turn })?;
        text.truncate(answer.end - self.end_mark.len());
        let answer = text.split_off(answer.start);
        Ok(Some(RenderedPrompt { text, answer }))
    }

    /// The mark after the content of an assistant turn, such as `<|im_end|>`.
    pub(crate) fn end_mark(&self) -> &str {
        &self.end_mark
    }

    /// How the template writes a turn of this role whose content is a list of parts.
    pub(crate) fn lists(&self, role: &str) -> Lists {
        let index = ROLES.iter().position(|known| *known == role);
        index.map_or(Lists::AsText, |index| self.lists[index])
    }

    /// Whether the template renders the thoughts (`reasoning_content`) of any turn.
    pub(crate) fn renders_thoughts(&self) -> bool {
        self.before_thoughts.is_some()
    }
}

/// A conversation converted to template values.
struct Chat<'a> {
    template: &'a ChatTemplate,
    messages: Vec<Value>,
    tools: Value,
    /// Size of all texts.
    bytes: usize,
}

impl<'a> Chat<'a> {
    fn new(
        template: &'a ChatTemplate,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
    ) -> Self {
        let bytes = messages.iter().map(message_bytes).sum::<usize>() + tools.map_or(0, json_bytes);
        let messages = messages.iter().map(message_value).collect();
        let tools = tools.map_or(Value::from(()), value_of_json);
        Self { template, messages, tools, bytes }
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
        let size = [self.messages.len(), self.bytes];
        limits::render(&self.template.env, NAME, Value::from_pairs(context), size)
            .map_err(|problem| TemplateError::Render { problem })
    }
}

fn probe_turn((role, text): (&str, &str)) -> Message {
    Message::new(role, Content::Text(text.to_owned()))
}

fn message_value(message: &Message) -> Value {
    let content = match &message.content {
        Content::Text(text) => Value::from(text.as_str()),
        Content::Parts(parts) => parts.iter().map(part_value).collect(),
    };
    let tool_calls = message.tool_calls.iter().map(|calls| ("tool_calls", value_of_json(calls)));
    let thoughts = message.reasoning_content.as_deref().map(Value::from);
    let thoughts = thoughts.into_iter().map(|text| ("reasoning_content", text));
    let always = [("role", Value::from(message.role.as_str())), ("content", content)];
    Value::from_pairs(always.into_iter().chain(thoughts).chain(tool_calls))
}

/// The approximate size of a message.
fn message_bytes(message: &Message) -> usize {
    let content = match &message.content {
        Content::Text(text) => text.len(),
        Content::Parts(parts) => {
            parts.iter().map(|part| if let Part::Text(text) = part { text.len() } else { 16 }).sum()
        }
    };
    let thoughts = message.reasoning_content.as_ref().map_or(0, String::len);
    16 + content + thoughts + message.tool_calls.as_ref().map_or(0, json_bytes)
}

/// The approximate size of a JSON text.
fn json_bytes(json: &serde_json::Value) -> usize {
    use serde_json::Value as Json;
    match json {
        Json::Null | Json::Bool(_) | Json::Number(_) => 8,
        Json::String(text) => 8 + text.len(),
        Json::Array(values) => 8 + values.iter().map(json_bytes).sum::<usize>(),
        Json::Object(entries) => {
            8 + entries.iter().map(|(key, value)| key.len() + json_bytes(value)).sum::<usize>()
        }
    }
}

fn part_value(part: &Part) -> Value {
    match part {
        Part::Text(text) => Value::from_pairs([("type", "text"), ("text", text.as_str())]),
        Part::Image => Value::from_pairs([("type", "image")]),
        Part::Video => Value::from_pairs([("type", "video")]),
    }
}

/// Converts JSON to a template value and keeps the order of keys.
fn value_of_json(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    if let Some(digits) = long_integer(json) {
        return functions::integer(digits);
    }
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), _, _) => Value::from(value),
            (None, Some(value), _) => Value::from(value),
            (None, None, value) => functions::number(value.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => values.iter().map(value_of_json).collect(),
        Json::Object(entries) => {
            let entries = entries.iter();
            Value::from_pairs(entries.map(|(key, value)| (key.as_str(), value_of_json(value))))
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "required signature of a filter")]
/// The filter `tojson` as in transformers: `json.dumps` that escapes neither HTML nor non-ASCII.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    // Accepted for compatibility with transformers, and ignored.
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    limits::count_json(value, indent)?;
    functions::dumps(value, indent)
}

fn raise_exception(message: &str) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}
