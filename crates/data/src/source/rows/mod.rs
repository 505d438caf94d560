//! Parses rows of all supported forms to [`Sample`].

mod context;
mod keys;
mod media;
mod turns;
mod values;

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use super::raw_row::RawRow;
use super::sample_error::SampleFault;
use batch::{Content, Message, Part, Sample, SampleId};
pub(crate) use context::RowParser;
use context::{Findings, RowContext, Survey};
pub use context::{RowRules, UnknownKeys};
pub use keys::RowForm;
pub(in crate::source) use keys::{IMAGE_ENDINGS, VIDEO_ENDINGS, is_row};
use keys::{ObjectKind, media_column, misnamed_media};
use media::RowMedia;
pub use media::texts;
pub(crate) use media::{BOX_PLACEHOLDER, NAME_PLACEHOLDER, texts_mut};
use turns::Turns;
pub(super) use values::type_name;
use values::{
    as_function, is_given, list_in_text, not_supported, object_in_text, take, text, weight,
    wrong_type,
};

impl RowParser {
    /// Parses a row of chats.
    pub(crate) fn parse(&self, id: &SampleId, row: RawRow) -> Result<Sample, SampleFault> {
        let RawRow { object: mut row, blobs } = row;
        let form = RowForm::of(&row)?;
        let at = RowContext { parser: self, id, blobs: &blobs, unread: RefCell::default() };
        if form == RowForm::Text {
            return Err(not_supported("text", "plain text in a data set of chats is"));
        }
        at.check_keys(ObjectKind::Row(form), "", &row)?;
        let parsed = sample(&at, form, &mut row).and_then(|sample| {
            match at.unread.take().filter(|_| sample.media.is_empty()) {
                // it would be trained on without its images
                Some((at, meant)) => Err(SampleFault::UnknownKey { at, nearest: Some(meant) }),
                None => Ok(sample),
            }
        });
        parsed.map_err(|error| match error {
            SampleFault::MediaMissing { kind, placeholders, media, .. } => {
                let misnamed = misnamed_media(form, &row);
                SampleFault::MediaMissing { kind, placeholders, media, misnamed }
            }
            other => other,
        })
    }

    /// Parses the document of a row of a corpus; keys other than `text` are ignored, but a row with
    /// images or videos is rejected.
    pub(crate) fn parse_text(mut row: RawRow) -> Result<String, SampleFault> {
        if let Some(column) = media_column(&row.object) {
            let what = "images and videos in a corpus are";
            return Err(SampleFault::NotSupported { at: column.to_owned(), what });
        }
        text("text", take(&mut row.object, "text"))
    }

    /// Parses the first rows of `file` and logs which of their keys are not read. Later rows report
    /// keys that these rows do not have.
    pub(crate) fn survey(&self, file: &Path, rows: impl Iterator<Item = (SampleId, RawRow)>) {
        self.survey_of(rows).log(file, &self.findings);
    }

    fn survey_of(&self, rows: impl Iterator<Item = (SampleId, RawRow)>) -> Survey {
        let (image_root, rules) = (self.image_root.clone(), self.rules.clone());
        let silent = Self { image_root, rules, findings: Findings::silent() };
        let mut survey = Survey::default();
        for (id, row) in rows {
            // rejected rows are reported when they are read
            let _ = silent.parse(&id, row);
            survey.add(silent.findings.take());
        }
        survey
    }
}

/// Weights of answers other than 0.
const WEIGHTS: RangeInclusive<f32> = 1.0 / 1048576.0..=1048576.0;

/// The parsed row `row`.
fn sample(
    at: &RowContext<'_>,
    form: RowForm,
    row: &mut Map<String, Value>,
) -> Result<Sample, SampleFault> {
    let weight = weight("", row)?;
    for key in ["rejected_response", "rejected_messages", "rejected_images"] {
        if is_given(&take(row, key)) {
            at.note("rejected answers (`rejected_response`, `rejected_messages`) are not used");
        }
    }
    let media = RowMedia::of_row(at, row)?;
    let tools = tools(take(row, "tools"))?;
    let mut turns = Turns::new(at, media);
    turns.system(take(row, "system"))?;
    match form {
        RowForm::Messages | RowForm::MessagesWithImages => {
            turns.list("messages", take(row, "messages"))?;
        }
        RowForm::Conversations => turns.list("conversations", take(row, "conversations"))?,
        RowForm::PromptCompletion => turns.prompt_and_completion(row)?,
        RowForm::QueryResponse => turns.query_and_response(row)?,
        RowForm::Alpaca => turns.alpaca(row)?,
        RowForm::BesideMedia(columns) => turns.with_media(row, columns)?,
        RowForm::Text => {}
    }
    let (mut messages, media) = turns.finish()?;
    if let Some(system) = &at.parser.rules.system
        && messages.iter().all(|message| message.role != "system")
    {
        messages.insert(0, Message::new("system", Content::Text(system.to_string())));
    }
    check_size(&messages, tools.as_ref())?;
    for message in &mut messages {
        message.weight *= weight;
        // outside of these limits, sums of weights are not exact
        if message.weight != 0.0 && !WEIGHTS.contains(&message.weight) {
            let what = "a weight of the loss below 2^-20 or above 2^20 is";
            return Err(not_supported("weight", what));
        }
    }
    let objects = at.objects(row, &messages)?;
    Ok(Sample { id: at.id.clone(), messages, media, tools, objects })
}

/// Maximum number of bytes of the texts of a row, also after the chat template.
pub(crate) use tokenizer::MAX_TEXT_BYTES;

const MAX_TURNS: usize = 100_000;

/// Rejects a row that would take the memory or the time of many others.
fn check_size(messages: &[Message], tools: Option<&Value>) -> Result<(), SampleFault> {
    let of_content = |content: &Content| match content {
        Content::Text(text) => text.len(),
        Content::Parts(parts) => {
            let texts = parts.iter().map(|part| match part {
                Part::Text(text) => text.len(),
                Part::Image | Part::Video => 0,
            });
            texts.sum::<usize>()
        }
    };
    let bytes: usize = messages
        .iter()
        .map(|message| {
            let thoughts = message.reasoning_content.as_ref().map_or(0, String::len);
            let calls = message.tool_calls.as_ref().map_or(0, bytes_of_texts);
            of_content(&message.content) + thoughts + calls
        })
        .sum();
    let bytes = bytes + tools.map_or(0, bytes_of_texts);
    for (what, found, most) in
        [("turns", messages.len(), MAX_TURNS), ("bytes of text", bytes, MAX_TEXT_BYTES)]
    {
        if found > most {
            return Err(SampleFault::TooLarge { what, found, most });
        }
    }
    Ok(())
}

/// The bytes of all keys and texts of a JSON value.
fn bytes_of_texts(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(bytes_of_texts).sum(),
        Value::Object(entries) => {
            entries.iter().map(|(key, value)| key.len() + bytes_of_texts(value)).sum()
        }
    }
}

/// Parses the tools of a row: a list of definitions, or a string with JSON of one. Each becomes
/// `{"type": "function", "function": ..}`, as an OpenAI-compatible server has them.
fn tools(value: Value) -> Result<Option<Value>, SampleFault> {
    if value.as_str().is_some_and(|text| text.trim().is_empty()) {
        return Ok(None);
    }
    match list_in_text(value) {
        Value::Null => Ok(None),
        Value::Array(tools) => {
            let tools = tools.into_iter().enumerate();
            let tool = |(index, tool)| match as_function(object_in_text(tool)) {
                tool @ Value::Object(_) => Ok(tool),
                other => {
                    let at = format!("tools[{index}]");
                    Err(wrong_type(&at, &other, "the definition of a function"))
                }
            };
            Ok(Some(tools.map(tool).collect::<Result<_, _>>()?))
        }
        other => Err(wrong_type("tools", &other, "a list, or JSON text of a list")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use batch::{MediaSource, Medium};
    use fault::Fault;
    use serde_json::json;

    fn row(row: Value) -> RawRow {
        let Value::Object(object) = row else { panic!("{row}") };
        RawRow { object, blobs: Vec::new() }
    }

    fn id(line: u64) -> SampleId {
        SampleId { file: Path::new("rows.jsonl").into(), line }
    }

    fn parser(unknown_keys: UnknownKeys) -> RowParser {
        RowParser::new(Path::new("."), RowRules { unknown_keys, ..RowRules::default() })
    }

    /// A row with these keys besides its turns.
    fn with(more: Value) -> RawRow {
        let turns =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        let mut row = row(json!({"messages": turns}));
        row.object.extend(self::row(more).object);
        row
    }

    #[test]
    fn binary_values_are_images_wherever_a_path_may_stand() {
        let wrap: [fn(Value) -> Value; 4] = [
            |blob| blob,
            |blob| json!({"bytes": blob, "path": "a.png"}),
            |blob| json!([{"bytes": blob, "path": null}]),
            |blob| json!([blob]),
        ];
        for wrap in wrap {
            let mut row = with(json!({}));
            let blob = row.blob_value([7u8].as_slice().into());
            row.object.insert("images".to_owned(), wrap(blob));
            let sample = parser(UnknownKeys::Error).parse(&id(1), row).unwrap();
            let [Medium::Image(image)] = sample.media.as_slice() else { panic!("{sample:?}") };
            assert_eq!(image.source, MediaSource::Bytes([7u8].as_slice().into()));
        }
    }

    #[test]
    fn the_system_turn_of_the_config_is_that_of_rows_without_one() {
        let of = |system: Option<&str>, row: Value| {
            let system = system.map(Into::into);
            let rules = RowRules { system, ..RowRules::default() };
            let parser = RowParser::new(Path::new("."), rules);
            parser.parse(&id(1), self::row(row)).unwrap().messages
        };
        let turns =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        for (without, with) in [
            (json!({"messages": turns}), json!({"messages": turns, "system": "Short."})),
            (
                json!({"instruction": "a", "output": "b"}),
                json!({"instruction": "a", "output": "b", "system": "Short."}),
            ),
            (
                json!({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
                json!({"conversations": [
                    {"from": "system", "value": "Short."}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
                ]}),
            ),
        ] {
            assert_eq!(of(Some("Short."), without.clone()), of(None, with.clone()));
            assert_eq!(of(Some("Long."), with.clone()), of(None, with));
            assert_eq!(of(None, without.clone()).len() + 1, of(Some("Short."), without).len());
        }
        // it has no images
        let system = &of(Some("See <image>"), json!({"messages": turns}))[0];
        assert_eq!(system.content, Content::Text("See <image>".to_owned()));
    }

    #[test]
    fn a_row_with_too_much_text_or_too_many_turns_is_rejected() {
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let parse = |turns: Vec<Value>| {
            parser(UnknownKeys::Error).parse(&id(1), row(json!({"messages": turns})))
        };
        let text = "a".repeat(MAX_TEXT_BYTES);
        parse(vec![turn("user", &text[1..]), turn("assistant", "b")]).unwrap();
        let error = parse(vec![turn("user", &text), turn("assistant", "b")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the row has 4194305 bytes of text, expected at most 4194304"
        );
        assert_eq!(error.reason(), "row_too_large");
        let error = parse(vec![turn("user", "a"); MAX_TURNS + 1]).unwrap_err();
        assert!(error.to_string().contains("100001 turns, expected at most 100000"), "{error}");
    }

    /// Finding the next `<image>` of a text that has only `<video>` must not read the rest of the
    /// text for each of them.
    #[test]
    fn placeholders_take_linear_time() {
        let seconds = |count: usize| {
            let (text, videos) = ("<video>".repeat(count), vec![json!(["a.png", "b.png"]); count]);
            let measure = || {
                let turns = json!([{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]);
                let row = row(json!({"messages": turns, "videos": videos}));
                let started = std::time::Instant::now();
                let sample = parser(UnknownKeys::Error).parse(&id(1), row).unwrap();
                let seconds = started.elapsed().as_secs_f64();
                assert_eq!(sample.media.len(), count);
                seconds
            };
            // the best of three, because other processes may interrupt one
            (0..3).map(|_| measure()).fold(f64::INFINITY, f64::min)
        };
        let (few, many) = (seconds(5_000), seconds(80_000));
        // linear time: 16 times as long; quadratic: 256 times
        assert!(many < 60.0 * few, "5,000: {few:.4} s, 80,000: {many:.4} s");
    }

    #[test]
    fn the_survey_counts_the_rows_with_each_key_that_is_not_read() {
        let rows = (1..=10).map(|line| {
            let row = match line {
                1..=4 => with(json!({"image_path": "a.png", "source": "web"})),
                5 => with(json!({"image_path": null, "rejected_response": "c"})),
                _ => with(json!({"messages": [
                    {"role": "user", "content": "a", "wieght": 1}, {"role": "assistant", "content": "b", "wieght": 1}
                ]})),
            };
            (id(line), row)
        });
        let survey = parser(UnknownKeys::Warn).survey_of(rows);
        let lines: Vec<String> = survey.lines().map(|(_, line)| line).collect();
        let expected = [
            "unknown key `image_path` is ignored, did you mean `images`? (4 of the first 10 rows)",
            "unknown key `wieght` of a turn is ignored, did you mean `weight`? (5 of the first 10 rows)",
            "key `source` is not used (4 of the first 10 rows)",
            "rejected answers (`rejected_response`, `rejected_messages`) are not used (1 of the first 10 rows)",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_key_that_the_survey_found_is_not_reported_again_and_a_later_one_is() {
        let parser = parser(UnknownKeys::Warn);
        let survey = [(id(1), with(json!({"zebra": 1})))];
        parser.survey(Path::new("rows.jsonl"), survey.into_iter());
        parser.parse(&id(2), with(json!({"zebra": 1, "yak": 1}))).unwrap();
        let place = ObjectKind::Row(RowForm::Messages);
        let known = |key: &str| context::Finding::Unknown(place, key.to_owned());
        assert_eq!(parser.findings.take(), ["yak", "zebra"].map(known).into());
        assert!(self::parser(UnknownKeys::Ignore).parse(&id(1), with(json!({"yak": 1}))).is_ok());
    }
}
