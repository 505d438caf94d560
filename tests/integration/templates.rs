//! Chat templates that print or drop turns are refused; transformers' tags and media in answers.

use fault::Fault;
use serde_json::{Value, json};
use trainer::data::{Encoder, LossScale};

use super::encoding::{assistant, row, rows, user};
use super::supervision::{chat, qwen35, supervised, with_template};

/// Why `encode` refuses a chat with this text for each turn.
fn refusal(content: &str) -> String {
    let template =
        format!("{{% for m in messages %}}[{{{{ m.role }}}}]{content}<|im_end|>{{% endfor %}}");
    let text = |text: &str| json!([{"type": "text", "text": text}]);
    let messages = [
        json!({"role": "user", "content": text("Who?")}),
        assistant("Early one"),
        user("And now?"),
        assistant("Later one"),
    ];
    let error = with_template(&template).encode(&chat(&messages, &[])).unwrap_err();
    assert_eq!(error.reason(), "template_text");
    error.to_string()
}

#[test]
fn a_template_that_drops_a_turn_is_refused_with_the_turn() {
    let parts =
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}";
    let dropping = format!("{{% if loop.index0 != 2 %}}{parts}{{% endif %}}");
    assert!(refusal(&dropping).contains("drops the text of turn 2"), "{}", refusal(&dropping));
    let changing = "{{ (m.content if m.content is string else m.content[0].text) | upper }}";
    assert!(refusal(changing).contains("does not contain \"Who?\""), "{}", refusal(changing));
}

#[test]
fn a_template_that_prints_lists_of_parts_is_refused_with_the_turn() {
    for printing in [
        "{{ m.content }}",
        "{{ m.content | escape }}",
        "{{ m.content | replace('z', 'y') }}",
        "{{ m.content | string }}",
        "{{ m.content if m.content is string else m.content | tojson }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
         {{ part.items() }}{% endfor %}{% endif %}",
        "{% autoescape true %}{{ m.content }}{% endautoescape %}",
    ] {
        let refusal = refusal(printing);
        assert!(refusal.contains("prints the list of parts of turn 0"), "{printing}: {refusal}");
    }
}

/// Only the assistant's lists are printed, so those of the user are read.
#[test]
fn lists_of_parts_are_checked_for_each_role() {
    let encoder = with_template(
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string or m.role == 'assistant' %}\
         {{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\
         <|im_end|>{% endfor %}",
    );
    let parts = |text: &str| json!([{"type": "text", "text": text}]);
    let read = chat(&[user(parts("a")), assistant("b")], &[]);
    assert_eq!(supervised(&encoder, &read), "b<|im_end|>");
    let printed = chat(&[user("a"), assistant(parts("b"))], &[]);
    let error = encoder.encode(&printed).unwrap_err().to_string();
    assert!(error.contains("prints the list of parts of turn 1"), "{error}");
}

/// transformers marks the answers with these tags for TRL; variables that are set between them are
/// not seen after them.
#[test]
fn the_generation_tags_of_a_template_have_no_effect_on_the_text() {
    let with = |open: &str, close: &str| {
        with_template(&format!(
            "{{% for m in messages %}}\n{{{{ m.role }}}}:\n  {{%- if m.role == 'assistant' %}}\n  \
             {open}\n{{{{ m.content }}}}<|im_end|>{close}\n{{%- else %}}{{{{ m.content }}}}{{% endif %}}\
             {{% endfor %}}{{% if add_generation_prompt %}}\nassistant:{{% endif %}}"
        ))
    };
    let sample = chat(&[user("a"), assistant("b"), user("c"), assistant("d")], &[]);
    let encode = |encoder: &Encoder| {
        let encoded = encoder.encode(&sample).unwrap();
        (encoder.render(&sample).unwrap(), encoded.labels)
    };
    let plain = encode(&with("{% if true %}", "{% endif %}"));
    let marked = with("{% generation %}", "{% endgeneration %}");
    assert_eq!(encode(&marked), plain);
    assert_eq!(supervised(&marked, &sample), "b<|im_end|>d<|im_end|>");
    let scope = with_template(
        "{% for m in messages %}{% set x = 'out' %}{% if m.role == 'assistant' %}{% generation %}\
         {% set x = 'in' %}{% endgeneration %}{{ x }}: {{ m.content }}<|im_end|>{% else %}\
         {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}out: {% endif %}",
    );
    assert_eq!(scope.render(&sample).unwrap(), "aout: b<|im_end|>cout: d<|im_end|>");
}

#[test]
fn media_in_an_answer_are_no_targets() {
    let part = |key: &str, source: Value| json!({"type": key, key: source});
    let [image, frames] =
        [json!("images/exact_moon_64x64.png"), json!(vec!["images/exact_moon_64x64.png"; 2])];
    let answer = json!([
        {"type": "text", "text": "Here"}, part("image", image), {"type": "text", "text": "and"},
        part("video", frames), {"type": "text", "text": "done."},
    ]);
    let (_folder, file) = rows(&[row(&[user("Draw."), assistant(answer)])]);
    let sample = file.read(0).unwrap();
    for loss_scale in [LossScale::Default, LossScale::LastRound, LossScale::IgnoreEmptyThink] {
        let encoder = qwen35().with_loss_scale(loss_scale);
        assert_eq!(supervised(&encoder, &sample), "Hereanddone.<|im_end|>", "{loss_scale:?}");
    }
    let all = supervised(&qwen35().with_loss_scale(LossScale::All), &sample);
    assert!(all.ends_with("Hereanddone.<|im_end|>\n") && !all.contains("vision"), "{all}");
    // a template that writes all roles alike, as the published one of Qwen2.5-VL
    let alike = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}\
        {{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
        <|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}\
        <|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}\
        {% endif %}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    assert_eq!(supervised(&with_template(alike), &sample), "Hereanddone.<|im_end|>");
}
