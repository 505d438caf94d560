//! Parses the turns of a conversation, and row forms whose turns are values of the row: a question
//! and its answer.

use serde_json::{Map, Value};

use super::super::sample_error::SampleFault;
use super::context::RowContext;
use super::keys::{OTHER_ARGUMENTS, ObjectKind, is_given};
use super::media::RowMedia;
use super::values::{
    as_function, join, list_in_text, missing, not_supported, object_in_text, optional_text,
    other_weight, take, text, weight, wrong_type,
};
use crate::json::{self, long_integer};
use batch::{Content, Medium, Message};

const THOUGHT_KEYS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// The turns parsed so far.
pub(super) struct Turns<'a> {
    pub(super) at: &'a RowContext<'a>,
    pub(super) media: RowMedia<'a>,
    pub(super) messages: Vec<Message>,
}

/// Kind of a turn, by its role.
enum Role {
    /// A role of the chat template.
    Plain(&'static str),
    /// An assistant turn whose text is the JSON of calls.
    Calls,
}

impl<'a> Turns<'a> {
    pub(super) fn new(at: &'a RowContext<'a>, media: RowMedia<'a>) -> Self {
        Self { at, media, messages: Vec::new() }
    }

    /// Adds the system turn of the row's key `system`.
    pub(super) fn system(&mut self, value: Value) -> Result<(), SampleFault> {
        if let Some(system) = optional_text("system", value)? {
            self.say("system", system);
        }
        Ok(())
    }

    /// Returns the messages, and the media in the order of the text.
    pub(super) fn finish(self) -> Result<(Vec<Message>, Vec<Medium>), SampleFault> {
        let Self { media, mut messages, .. } = self;
        let media = media.finish(&mut messages)?;
        Ok((messages, media))
    }

    /// Adds a turn that is a text.
    pub(super) fn say(&mut self, role: &str, text: String) {
        let content = self.media.text(text);
        self.messages.push(Message::new(role, content));
    }

    /// Parses each entry of the list under `key`.
    pub(super) fn list(&mut self, key: &'static str, value: Value) -> Result<(), SampleFault> {
        let values = match list_in_text(value) {
            Value::Array(values) => values,
            other => return Err(wrong_type(key, &other, "a list of turns")),
        };
        if values.is_empty() {
            return Err(SampleFault::NoMessages { at: key });
        }
        for (index, value) in values.into_iter().enumerate() {
            let at = format!("{key}[{index}]");
            let turn = match value {
                Value::Object(turn) => turn,
                other => return Err(wrong_type(&at, &other, "an object")),
            };
            let before = self.messages.len();
            self.turn(key, &at, turn)?;
            if before > 0 && self.messages[before..].iter().any(|turn| turn.role == "system") {
                return Err(SampleFault::SystemNotFirst { at });
            }
        }
        Ok(())
    }

    /// Parses a turn with `role` and `content`, as in OpenAI's and Qwen's formats, or with `from`
    /// and `value`, as in LLaVA and ShareGPT.
    fn turn(
        &mut self,
        list: &str,
        at: &str,
        mut turn: Map<String, Value>,
    ) -> Result<(), SampleFault> {
        self.at.check_keys(ObjectKind::Turn, at, &turn)?;
        let has = |key| turn.get(key).is_some_and(|value| !value.is_null());
        let (role_key, content_key) = match (list == "conversations", has("from"), has("role")) {
            (true, false, true) | (false, false, _) | (false, true, true) => ("role", "content"),
            (true, ..) | (false, true, false) => ("from", "value"),
        };
        refuse_second_text(at, content_key, &turn)?;
        let role = match role(at, role_key, take(&mut turn, role_key))? {
            Role::Plain(role) => role,
            Role::Calls => return self.calls(at, content_key, turn),
        };
        let is_answer = role == "assistant";
        let weight = if is_answer { weight(at, &mut turn)? } else { other_weight(at, &mut turn)? };
        let tool_calls = self.tool_calls(at, &mut turn)?;
        let reasoning_content = thoughts(at, &mut turn)?;
        let given = [
            ("tool_calls", tool_calls.is_some()),
            ("reasoning_content", reasoning_content.is_some()),
        ];
        if let Some((key, _)) = given.into_iter().find(|(_, given)| *given && !is_answer) {
            let what = "a key of assistant turns in another turn is";
            return Err(not_supported(&join(at, key), what));
        }
        let content_at = join(at, content_key);
        let content = match take(&mut turn, content_key) {
            // a turn that only calls tools has no content
            Value::Null if is_answer && tool_calls.is_some() => Content::Text(String::new()),
            Value::Null if content_key == "content" => {
                return Err(missing(&content_at, "text or a list of parts"));
            }
            value if content_key == "content" => self.media.content(&content_at, value)?,
            value => self.media.text(text(&content_at, value)?),
        };
        let role = role.to_owned();
        self.messages.push(Message { role, content, tool_calls, reasoning_content, weight });
        Ok(())
    }

    fn tool_calls(
        &self,
        at: &str,
        turn: &mut Map<String, Value>,
    ) -> Result<Option<Value>, SampleFault> {
        let call = take(turn, "function_call"); // OpenAI's older key, with one call
        let calls = match (list_in_text(take(turn, "tool_calls")), call) {
            (calls, call) if !is_given(&calls) => {
                if !is_given(&call) {
                    return Ok(None);
                }
                let call = self.call(&join(at, "function_call"), call)?;
                return Ok(Some(Value::from(vec![call])));
            }
            (calls, call) if !is_given(&call) => calls,
            _ => {
                let what = "`function_call` together with `tool_calls` is";
                return Err(not_supported(&join(at, "function_call"), what));
            }
        };
        let at = join(at, "tool_calls");
        let Value::Array(calls) = calls else {
            return Err(wrong_type(&at, &calls, "a list"));
        };
        let calls = calls.into_iter().enumerate();
        let call = |(index, call)| self.call(&format!("{at}[{index}]"), call);
        Ok(Some(calls.map(call).collect::<Result<_, _>>()?))
    }

    /// A call in the form of OpenAI's `tool_calls`, which chat templates read. As in serving
    /// engines, its arguments are an object: JSON text is parsed, and `""` and null become `{}`.
    fn call(&self, at: &str, call: Value) -> Result<Value, SampleFault> {
        const EXPECTED: &str = "an object with the `name` of a function and its `arguments`";
        let call = object_in_text(call);
        let has_wrapper = call.get("function").is_some();
        if !is_given(&call["arguments"]) && !is_given(&call["function"]["arguments"]) {
            let inside = join(at, "function");
            for (at, of) in [(at, &call), (&inside, &call["function"])] {
                let Some(of) = of.as_object() else { continue };
                self.at.check_keys(ObjectKind::Call, at, of)?;
                let other = of.iter().find(|(key, value)| {
                    *key != "function" && value.as_object().is_some_and(|of| !of.is_empty())
                });
                if let Some((key, _)) = other {
                    return Err(not_supported(&join(at, key), OTHER_ARGUMENTS));
                }
            }
        }
        let value = |of: &Value| object_in_text(of.clone());
        let differs = |key: &&str| {
            is_given(&call[*key]) && value(&call[*key]) != value(&call["function"][*key])
        };
        if has_wrapper && let Some(key) = ["name", "arguments"].into_iter().find(differs) {
            let what = "a name or arguments outside of the `function` of a call are";
            return Err(not_supported(&join(at, key), what));
        }
        let at = if has_wrapper { join(at, "function") } else { at.to_owned() };
        let mut call = as_function(call);
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let Some(function) = function.filter(|of| of.get("name").is_some_and(Value::is_string))
        else {
            return Err(wrong_type(&at, &call, EXPECTED));
        };
        let arguments = function.entry("arguments").or_insert(Value::Null);
        *arguments = match arguments.take() {
            given if !is_given(&given) => Value::Object(Map::new()),
            given => object_in_text(given),
        };
        if !arguments.is_object() || long_integer(arguments).is_some() {
            let at = join(&at, "arguments");
            return Err(wrong_type(&at, arguments, "an object, or JSON text of one"));
        }
        Ok(call)
    }

    /// Parses a turn whose content is the JSON of one call or of a list of calls. Calls directly
    /// after an answer, or after other calls, belong to the same assistant turn.
    fn calls(
        &mut self,
        at: &str,
        key: &str,
        mut turn: Map<String, Value>,
    ) -> Result<(), SampleFault> {
        const EXPECTED: &str =
            "JSON text of a call with `name` and `arguments`, or of a list of calls";
        let weight = weight(at, &mut turn)?;
        let value = take(&mut turn, key);
        let parsed = match &value {
            Value::String(text) => json::parse(text.as_bytes()).unwrap_or(Value::Null),
            other => other.clone(),
        };
        let calls = match parsed {
            Value::Array(calls) => calls,
            call => vec![call],
        };
        if calls.is_empty() || calls.iter().any(|call| !call["name"].is_string()) {
            return Err(wrong_type(&join(at, key), &value, EXPECTED));
        }
        let at_key = join(at, key);
        let calls = calls.into_iter().map(|call| self.call(&at_key, call));
        let mut calls = calls.collect::<Result<Vec<_>, _>>()?;
        let before = self.messages.last_mut();
        match before.filter(|message| message.role == "assistant") {
            Some(message) if message.weight.to_bits() != weight.to_bits() => {
                let what = "calls whose weight differs from the answer before them are";
                Err(not_supported(at, what))
            }
            Some(message) => {
                if let Some(Value::Array(earlier)) = message.tool_calls.take() {
                    calls.splice(0..0, earlier);
                }
                message.tool_calls = Some(Value::from(calls));
                Ok(())
            }
            None => {
                let tool_calls = Some(Value::from(calls));
                let empty = Message::new("assistant", Content::Text(String::new()));
                self.messages.push(Message { tool_calls, weight, ..empty });
                Ok(())
            }
        }
    }
}

fn thoughts(at: &str, turn: &mut Map<String, Value>) -> Result<Option<String>, SampleFault> {
    let values = THOUGHT_KEYS.map(|key| (key, take(turn, key)));
    let mut given = values.into_iter().filter(|(_, value)| is_given(value));
    let Some((key, value)) = given.next() else { return Ok(None) };
    if let Some((other, _)) = given.find(|(_, other)| *other != value) {
        let what = "a second key for the thoughts of a turn is";
        return Err(not_supported(&join(at, other), what));
    }
    optional_text(&join(at, key), value)
}

/// Fails if the turn has another text, or parts, under the key of the other form.
fn refuse_second_text(
    at: &str,
    content_key: &str,
    turn: &Map<String, Value>,
) -> Result<(), SampleFault> {
    let other_key = if content_key == "content" { "value" } else { "content" };
    let [first, second] = [content_key, other_key].map(|key| turn.get(key));
    // a reward, for example, is a number
    let is_text = |value: &&Value| is_given(value) && !value.is_number() && !value.is_boolean();
    let Some(second) = second.filter(is_text) else { return Ok(()) };
    let text_of = |value: &Value| match value {
        Value::Array(parts) => parts.iter().map(|part| part["text"].as_str()).collect(),
        value => value.as_str().map(str::to_owned),
    };
    let is_same = first.is_some_and(|first| {
        first == second || (text_of(first).is_some() && text_of(first) == text_of(second))
    });
    if is_same {
        return Ok(());
    }
    let what = "a text under both keys, or under that of the other form (`content` belongs to `role`, `value` to `from`), is";
    Err(not_supported(&join(at, other_key), what))
}

fn role(at: &str, key: &str, value: Value) -> Result<Role, SampleFault> {
    let role = text(&join(at, key), value)?;
    Ok(Role::Plain(match role.as_str() {
        "system" | "developer" => "system",
        "user" | "human" => "user",
        "assistant" | "gpt" => "assistant",
        "tool" | "function" | "observation" | "tool_response" => "tool",
        "tool_call" | "function_call" => return Ok(Role::Calls),
        _ => {
            let expected = "`system`, `developer`, `user`, `human`, `assistant`, `gpt`, `tool`, `function`, \
                            `observation`, `tool_response`, `tool_call` or `function_call`";
            return Err(SampleFault::UnknownRole { at: join(at, key), role, expected });
        }
    }))
}

impl Turns<'_> {
    /// Parses an Alpaca row: pairs of turns in `history`, then `instruction` with `input` as the
    /// user turn and `output` as the assistant turn.
    pub(super) fn alpaca(&mut self, row: &mut Map<String, Value>) -> Result<(), SampleFault> {
        self.history(take(row, "history"))?;
        let mut question = text("instruction", take(row, "instruction"))?;
        if let Some(input) = optional_text("input", take(row, "input"))? {
            if !question.is_empty() {
                question.push('\n');
            }
            question.push_str(&input);
        }
        self.say("user", question);
        self.say("assistant", text("output", take(row, "output"))?);
        Ok(())
    }

    /// Parses a row of ms-swift: pairs of turns in `history`, then `query` and `response`.
    pub(super) fn query_and_response(
        &mut self,
        row: &mut Map<String, Value>,
    ) -> Result<(), SampleFault> {
        self.history(take(row, "history"))?;
        for (role, key) in [("user", "query"), ("assistant", "response")] {
            self.say(role, text(key, take(row, key))?);
        }
        Ok(())
    }

    /// Parses a row with media and the columns of a question and an answer, of an answer alone, or
    /// `texts`, a list of such pairs. Media without placeholders are put in front.
    pub(super) fn with_media(
        &mut self,
        row: &mut Map<String, Value>,
        columns: &[&'static str],
    ) -> Result<(), SampleFault> {
        if let ["texts"] = columns {
            return self.texts(take(row, "texts"));
        }
        if let [_] = columns {
            self.at
                .note("the text of an image without a question is the answer to the image alone");
            self.say("user", String::new());
        }
        let roles = ["user", "assistant"];
        for (role, key) in roles[roles.len() - columns.len()..].iter().zip(columns) {
            self.say(role, text(key, take(row, key))?);
        }
        Ok(())
    }

    /// Adds the turns of a list of objects with the texts `user` and `assistant`.
    fn texts(&mut self, value: Value) -> Result<(), SampleFault> {
        let pairs = match list_in_text(value) {
            Value::Array(pairs) => pairs,
            other => return Err(wrong_type("texts", &other, "a list of objects")),
        };
        if pairs.is_empty() {
            return Err(SampleFault::NoMessages { at: "texts" });
        }
        for (index, mut pair) in pairs.into_iter().enumerate() {
            for role in ["user", "assistant"] {
                let said = pair.get_mut(role).map_or(Value::Null, Value::take);
                self.say(role, text(&format!("texts[{index}].{role}"), said)?);
            }
        }
        Ok(())
    }

    /// Parses a row of TRL: a prompt, and a completion that alone is trained on. Each is a text or
    /// a list of messages.
    pub(super) fn prompt_and_completion(
        &mut self,
        row: &mut Map<String, Value>,
    ) -> Result<(), SampleFault> {
        for (role, key) in [("user", "prompt"), ("assistant", "completion")] {
            match take(row, key) {
                Value::String(text) => {
                    self.at.note(
                        "the texts `prompt` and `completion` are a user and an assistant turn of the chat template",
                    );
                    self.say(role, text);
                }
                list @ Value::Array(_) => self.list(key, list)?,
                other => {
                    return Err(wrong_type(key, &other, "text or a list of turns"));
                }
            }
            if key == "prompt" {
                for message in &mut self.messages {
                    message.weight = 0.0;
                }
            }
        }
        Ok(())
    }

    /// Adds the earlier turns of a row: a list of pairs of texts.
    fn history(&mut self, value: Value) -> Result<(), SampleFault> {
        let pairs = match list_in_text(value) {
            Value::Null => Vec::new(),
            Value::Array(pairs) => pairs,
            other => return Err(wrong_type("history", &other, "a list of pairs")),
        };
        for (index, pair) in pairs.into_iter().enumerate() {
            let at = format!("history[{index}]");
            let pair = match pair {
                Value::Array(pair) => <[Value; 2]>::try_from(pair)
                    .map_err(|pair| wrong_type(&at, &Value::Array(pair), "a pair of texts"))?,
                other => return Err(wrong_type(&at, &other, "a pair of texts")),
            };
            for (side, (role, value)) in ["user", "assistant"].into_iter().zip(pair).enumerate() {
                self.say(role, text(&format!("{at}[{side}]"), value)?);
            }
        }
        Ok(())
    }
}
