//! Parses row forms whose turns are values of the row: a question and its answer.

use serde_json::{Map, Value};

use super::super::error::SampleFault;
use super::turns::Turns;
use super::values::{list_in_text, optional_text, take, text, wrong_type};

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
