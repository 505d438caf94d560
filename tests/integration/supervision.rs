//! Which tokens are supervised, and with which weight: thoughts, weights of turns and
//! `data.loss_scale`.

use std::num::NonZeroU32;
use std::sync::Arc;

use fault::Fault;
use serde_json::{Value, json};
use trainer::batch::{EncodedSample, IGNORE_INDEX, Sample};
use trainer::data::{Encoder, ImageConfig, KeptEnd, Length, LossScale, RowFile, TruncationRule};

use super::encoding::{
    assert_matches, assistant, encoder, golden, golden_json, load_changed, row, rows,
    supervised_text, user, write,
};
use super::harness::Place;
use super::length_cache;

/// A template that writes thoughts as that of Qwen3: the prompt has no `<think>`, and the last turn
/// always has a block.
const QWEN3: &str = "{%- set last = namespace(query=-1) -%}\
    {%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}{%- endfor -%}\
    {%- for m in messages -%}\
    {%- set text = m.content -%}{%- set thought = '' -%}\
    {%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}\
    {%- elif m.role == 'assistant' and '</think>' in text -%}\
    {%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}\
    {%- set text = text.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}\
    {{- '<|im_start|>' ~ m.role ~ '\n' -}}\
    {%- if m.role == 'assistant' and loop.index0 > last.query and (loop.last or thought) -%}\
    {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' -}}{%- endif -%}\
    {{- text ~ '<|im_end|>\n' -}}{%- endfor -%}\
    {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";

pub(super) fn with_template(template: &str) -> Encoder {
    load_changed(|folder| write(&folder.join("chat_template.jinja"), template.as_bytes())).unwrap()
}

pub(super) fn qwen35() -> Encoder {
    Encoder::from_folder(&golden("models/small-qwen35"), &ImageConfig::default()).unwrap()
}

fn read(row: Value) -> Sample {
    let (_folder, file) = rows(&[row]);
    file.read(0).unwrap()
}

/// The sample of a chat; `thoughts` is the `reasoning_content` of a turn.
pub(super) fn chat(messages: &[Value], thoughts: &[(usize, &str)]) -> Sample {
    let mut sample = read(row(messages));
    for (turn, text) in thoughts {
        sample.messages[*turn].reasoning_content = Some((*text).to_owned());
    }
    sample
}

pub(super) fn supervised(encoder: &Encoder, sample: &Sample) -> String {
    let encoded = encoder.encode(sample).unwrap();
    assert_eq!(encoder.length(sample).unwrap(), Length::of(&encoded));
    supervised_text(&encoded)
}

/// The supervised texts and their weights.
fn weighted(sample: &EncodedSample) -> Vec<(String, f32)> {
    let of = |at: usize| sample.weights.as_ref().map_or(1.0, |weights| weights[at]);
    let targets: Vec<usize> =
        (0..sample.len()).filter(|at| sample.labels[*at] != IGNORE_INDEX).collect();
    let runs = targets.chunk_by(|a, b| a + 1 == *b && of(*a) == of(*b));
    runs.map(|run| {
        let ids: Vec<u32> = run.iter().map(|at| sample.input_ids[*at]).collect();
        (encoder().decode_with_specials(&ids).unwrap(), of(run[0]))
    })
    .collect()
}

/// The expected values were computed with transformers 5.23. Several chats have more than one answer,
/// and the template writes an empty thinking block before the last one only.
#[test]
fn rows_encode_as_in_transformers_with_a_template_that_rewrites_earlier_turns() {
    let encoder = qwen35();
    let file = RowFile::open(&golden("data/text.jsonl"), None).unwrap();
    let expected = golden_json("enc_small-qwen35_text.json");
    for (row, expected) in expected.iter().enumerate() {
        assert_matches(&encoder.encode(&file.read(row).unwrap()).unwrap(), expected);
    }
}

#[test]
fn thoughts_are_targets_where_the_template_renders_them() {
    let messages = [user("a"), assistant("b"), user("c"), assistant("d")];
    let sample = chat(&messages, &[(1, "early"), (3, "late")]);
    for (encoder, expected) in [
        // the prompt of Qwen3.5 ends with `<think>\n`, so the model does not write it
        (&qwen35(), "b<|im_end|>late\n</think>\n\nd<|im_end|>"),
        (&with_template(QWEN3), "b<|im_end|><think>\nlate\n</think>\n\nd<|im_end|>"),
        (encoder(), "b<|im_end|>d<|im_end|>"),
    ] {
        assert_eq!(supervised(encoder, &sample), expected);
        let hidden = encoder.hidden_thoughts(&sample).unwrap();
        assert_eq!(hidden, if expected.contains("late") { vec![1] } else { vec![1, 3] });
    }
}

#[test]
fn thoughts_inside_the_content_are_those_of_reasoning_content() {
    let inline = |thought: &str, text: &str| format!("<think>\n{thought}\n</think>\n\n{text}");
    let sample = chat(
        &[user("a"), assistant(inline("early", "b")), user("c"), assistant(inline("late", "d"))],
        &[],
    );
    let apart =
        chat(&[user("a"), assistant("b"), user("c"), assistant("d")], &[(1, "early"), (3, "late")]);
    for encoder in [qwen35(), with_template(QWEN3)] {
        let [one, other] = [&sample, &apart].map(|sample| encoder.encode(sample).unwrap());
        assert_eq!((one.input_ids, one.labels), (other.input_ids, other.labels));
        assert_eq!(encoder.hidden_thoughts(&sample).unwrap(), [1]);
    }
    let plain = "<think>\nearly\n</think>\n\nb<|im_end|><think>\nlate\n</think>\n\nd<|im_end|>";
    assert_eq!(supervised(encoder(), &sample), plain);
    assert!(encoder().hidden_thoughts(&sample).unwrap().is_empty());
}

#[test]
fn an_empty_thinking_block_that_the_template_writes_is_no_target() {
    for encoder in [qwen35(), with_template(QWEN3)] {
        for answer in ["b", "<think>\n\n</think>\n\nb"] {
            let sample = chat(&[user("a"), assistant(answer)], &[]);
            let text = "<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n";
            assert!(encoder.render(&sample).unwrap().ends_with(text));
            assert_eq!(supervised(&encoder, &sample), "b<|im_end|>");
        }
    }
    for encoder in [qwen35(), with_template(QWEN3)] {
        let encoder = encoder.with_empty_thoughts(true);
        let both = [user("a"), assistant("b"), user("c"), assistant("d")];
        // the block of an earlier turn is not rendered
        let expected = "b<|im_end|><think>\n\n</think>\n\nd<|im_end|>";
        assert_eq!(supervised(&encoder, &chat(&both, &[])), expected);
        let thoughts = supervised(&encoder, &chat(&both, &[(3, "late")]));
        assert!(thoughts.ends_with("late\n</think>\n\nd<|im_end|>"), "{thoughts}");
    }
}

#[test]
fn thoughts_between_tool_calls_are_targets() {
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
    let messages = [
        user("a"),
        json!({"role": "assistant", "content": "b", "tool_calls": call}),
        json!({"role": "tool", "content": "1"}),
        assistant("c"),
    ];
    let sample = chat(&messages, &[(1, "first"), (3, "second")]);
    assert_eq!(
        supervised(&qwen35(), &sample),
        "first\n</think>\n\nb\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>\
         second\n</think>\n\nc<|im_end|>"
    );
}

#[test]
fn a_user_who_writes_thoughts_headers_and_marks_starts_no_target() {
    let nasty = "<|im_end|>\n<|im_start|>assistant\n<think>\nno\n</think>\n\nx<|im_end|>\n\u{f8f0}0\u{f8f1}\u{f8f0}1\u{f8f1}";
    let sample = chat(
        &[user(nasty), assistant("b"), user(nasty), assistant(format!("d{nasty}"))],
        &[(3, "late")],
    );
    let expected = format!("b<|im_end|>late\n</think>\n\nd{}<|im_end|>", nasty.trim());
    assert_eq!(supervised(&qwen35(), &sample), expected);
}

#[test]
fn an_end_mark_of_several_tokens_is_refused() {
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</end of turn>{% endfor %}";
    let error = load_changed(|folder| {
        write(&folder.join("chat_template.jinja"), template.as_bytes());
    });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("the end mark `</end of turn>`"), "{error}");
}

/// The answers of a long chat are located together, those of its end one by one.
#[test]
fn the_answers_of_a_long_chat_are_those_of_its_end() {
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
    let mut messages = Vec::new();
    for turn in 0..3 {
        messages.extend([
            user("say <|im_end|>"),
            assistant(format!("<think>\nwhy {turn}\n</think>\n\nbecause\n")),
            user("call"),
            json!({"role": "assistant", "content": "calling", "tool_calls": call}),
            json!({"role": "tool", "content": "1"}),
            assistant("done"),
        ]);
    }
    for encoder in [&qwen35(), &with_template(QWEN3), encoder()] {
        let long = supervised(encoder, &chat(&messages, &[(15, "first"), (17, "second")]));
        let short = supervised(encoder, &chat(&messages[12..], &[(3, "first"), (5, "second")]));
        assert_eq!(long.matches("<|im_end|>").count(), 9);
        assert!(long.ends_with(&short), "{short:?} {long:?}");
    }
}

#[test]
fn a_chat_whose_answers_cannot_be_located_is_rejected() {
    let counted = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% if not loop.last %}{{ m.content | length }}{% endif %}{% endfor %}";
    let encoder = with_template(counted);
    let one = chat(&[user("x"), assistant("y")], &[]);
    assert_eq!(supervised(&encoder, &one), "y<|im_end|>");
    let two = chat(&[user("x"), assistant("y"), user("x"), assistant("y")], &[]);
    assert_eq!(encoder.encode(&two).unwrap_err().reason(), "template_answer");
}

#[test]
fn a_prompt_of_a_thinking_template_ends_where_the_targets_begin() {
    let messages = [user("a"), assistant("b"), user("c"), assistant("d")];
    for (thoughts, end, answer) in [
        (&[(3, "late")][..], "<think>\n", "late\n</think>\n\nd"),
        (&[], "<think>\n\n</think>\n\n", "d"),
    ] {
        let encoder = qwen35();
        let (prompt, found) = encoder.encode_prompt(&chat(&messages, thoughts)).unwrap();
        assert_eq!(found, answer);
        let prompt = encoder.decode_with_specials(&prompt.input_ids).unwrap();
        assert!(prompt.ends_with(&format!("<|im_start|>assistant\n{end}")), "{prompt}");
    }
}

#[test]
fn the_weight_of_a_turn_becomes_that_of_its_tokens() {
    let messages =
        [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")];
    let mut sample = chat(&messages, &[]);
    assert_eq!(encoder().encode(&sample).unwrap().weights, None);
    for (turn, weight) in [(1, 0.5), (3, 0.0), (5, 2.0)] {
        sample.messages[turn].weight = weight;
    }
    let encoded = encoder().encode(&sample).unwrap();
    let of = |text: &str, weight| (format!("{text}<|im_end|>"), weight);
    assert_eq!(weighted(&encoded), [of("b", 0.5), of("f", 2.0)]);
    assert_eq!(encoded.weights.map(|weights| weights.len()), Some(encoded.input_ids.len()));
    // only weights of supervised tokens count
    (sample.messages[1].weight, sample.messages[5].weight) = (1.0, 0.0);
    assert_eq!(encoder().encode(&sample).unwrap().weights, None);
}

#[test]
fn weights_stay_with_their_tokens_when_a_chat_is_truncated() {
    let messages = [user("a"), assistant("b"), user("c"), assistant("d")];
    let mut sample = chat(&messages, &[]);
    (sample.messages[1].weight, sample.messages[3].weight) = (0.5, 3.0);
    let whole = encoder().encode(&sample).unwrap();
    for max_length in 4..whole.len() as u32 {
        for keep in [KeptEnd::Beginning, KeptEnd::End] {
            let cut = TruncationRule { max_length: NonZeroU32::new(max_length).unwrap(), keep };
            let Ok(encoded) = encoder().encode_truncated(&sample, Some(cut)) else { continue };
            let kept = match keep {
                KeptEnd::Beginning => 0..encoded.len(),
                KeptEnd::End => whole.len() - encoded.len()..whole.len(),
            };
            assert_eq!(encoded.weights.unwrap(), whole.weights.as_ref().unwrap()[kept]);
        }
    }
    sample.messages[1].weight = 1.0; // all that is left of the chat below
    let max_length = NonZeroU32::new(whole.len() as u32 / 2).unwrap();
    let cut = TruncationRule { max_length, keep: KeptEnd::Beginning };
    assert_eq!(encoder().encode_truncated(&sample, Some(cut)).unwrap().weights, None);
}

#[test]
fn each_loss_scale_selects_its_tokens() {
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    let mut sample = chat(
        &[
            user("a"),
            assistant("<think>\n\n</think>\n\nb"),
            user("c"),
            json!({"role": "assistant", "content": "d", "tool_calls": call}),
            json!({"role": "tool", "content": "1"}),
            assistant("<think>\nhm\n</think>\n\nf"),
        ],
        &[],
    );
    let with = |loss_scale| load_changed(|_| ()).unwrap().with_loss_scale(loss_scale);
    let call = "d\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>";
    let thinking = "<think>\nhm\n</think>\n\nf<|im_end|>";
    for (loss_scale, expected) in [
        (LossScale::Default, format!("<think>\n\n</think>\n\nb<|im_end|>{call}{thinking}")),
        (LossScale::LastRound, format!("{call}{thinking}")),
        (LossScale::IgnoreEmptyThink, format!("b<|im_end|>{call}{thinking}")),
        (LossScale::All, encoder().render(&sample).unwrap()),
    ] {
        assert_eq!(supervised(&with(loss_scale), &sample), expected, "{loss_scale:?}");
    }
    // turns with weight 0 are no targets under `all` either
    sample.messages[3].weight = 0.0;
    let rest = encoder().render(&sample).unwrap().replace(call, "");
    assert_eq!(supervised(&with(LossScale::All), &sample), rest);
}

#[test]
fn the_loss_scale_all_excludes_media_and_their_marks() {
    let sample = read(json!({
        "messages": [user("<image>What?"), assistant("A moon.")],
        "images": ["images/exact_moon_64x64.png"],
    }));
    let encoder = load_changed(|_| ()).unwrap().with_loss_scale(LossScale::All);
    let text = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nA moon.<|im_end|>\n";
    assert_eq!(supervised(&encoder, &sample), text);
}

#[test]
fn the_loss_scale_all_keeps_the_weights_of_rows_and_of_excluded_turns() {
    let encoder = load_changed(|_| ()).unwrap().with_loss_scale(LossScale::All);
    let turns = || json!([user("What?"), assistant("A moon.")]);
    let half = encoder.encode(&read(json!({"weight": 0.5, "messages": turns()}))).unwrap();
    assert!(half.labels.iter().all(|label| *label != IGNORE_INDEX));
    assert_eq!(half.weights.unwrap(), vec![0.5; half.labels.len()]);
    let reason = |row: Value| encoder.encode(&read(row)).unwrap_err().reason();
    assert_eq!(reason(json!({"train": false, "messages": turns()})), "no_supervised_token");
    let quiet = |role: &str, text: &str| json!({"role": role, "content": text, "train": false});
    let both = json!([quiet("system", "Be brief."), quiet("user", "What?"), assistant("A moon.")]);
    let sample = read(json!({ "messages": both }));
    assert_eq!(supervised(&encoder, &sample), "A moon.<|im_end|>");
    let one = json!([{"role": "system", "content": "Be brief."}, quiet("user", "What?"), assistant("A moon.")]);
    assert_eq!(reason(json!({ "messages": one })), "not_supported");
    let prompt = json!({"prompt": [user("What?")], "completion": [assistant("A moon.")]});
    assert_eq!(supervised(&encoder, &read(prompt)), "A moon.<|im_end|>");
}

#[test]
fn another_loss_scale_has_another_length_cache() {
    let place = length_cache::Place::new(&[length_cache::chat("a", "b")]);
    for (loss_scale, measured) in
        [(LossScale::Default, 1), (LossScale::All, 1), (LossScale::Default, 0), (LossScale::All, 0)]
    {
        let encoder = Arc::new(load_changed(|_| ()).unwrap().with_loss_scale(loss_scale));
        assert_eq!(place.update(&encoder).1.measured, measured, "{loss_scale:?}");
    }
}

#[test]
fn inspect_shows_weights_and_thoughts_that_are_not_rendered() {
    let place = Place::empty();
    let answer = |text: &str, more: Value| {
        let mut turn = assistant(text);
        turn.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        turn
    };
    let row = row(&[
        user("a"),
        answer("b", json!({"weight": 0.5})),
        user("c"),
        answer("d", json!({"reasoning_content": "hm"})),
    ]);
    place.write("rows.jsonl", &row.to_string());
    let model = golden("models/small-tied");
    let config = format!(
        "output_dir: run\nmodel: {{path: '{}'}}\ndata: {{train: [{{path: rows.jsonl}}]}}\n",
        model.display()
    );
    place.write("config.yaml", &config);
    let output = place.trainer(&["inspect", "--config", "config.yaml"]).ends_with(0);
    let text = output.stdout;
    assert!(text.contains(", thoughts not rendered: turns 3\n"), "{text}");
    assert!(text.contains("[[b<|im_end|>]] * 0.5\n"), "{text}");
    assert!(text.contains("[[d<|im_end|>]]\n"), "{text}");
}
