//! Encoders of unusual and broken model folders, and truncated chats.

use super::encoding::{assistant, encoder, load_changed, row, rows, user, write};
use fault::Fault;
use serde_json::json;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::Path;
use trainer::batch::EncodedSample;
use trainer::data::{KeptEnd, Length, ModelFolderError, TruncationRule};

#[test]
fn a_template_is_found_in_each_of_its_three_places() {
    let remove = |folder: &Path, names: &[&str]| {
        for name in names {
            std::fs::remove_file(folder.join(name)).unwrap();
        }
    };
    load_changed(|folder| remove(folder, &["chat_template.jinja"])).unwrap();
    load_changed(|folder| remove(folder, &["chat_template.jinja", "chat_template.json"])).unwrap();
    let error = load_changed(|folder| {
        remove(folder, &["chat_template.jinja", "chat_template.json"]);
        write(
            &folder.join("tokenizer_config.json"),
            b"{\"eos_token\": {\"content\": \"<|im_end|>\"}}",
        );
    });
    assert!(matches!(error, Err(ModelFolderError::NoChatTemplate { .. })));
}

#[test]
fn errors_of_a_broken_model_folder_name_the_file_and_the_problem() {
    let replace = |name: &'static str, text: &'static str| {
        load_changed(|folder| write(&folder.join(name), text.as_bytes())).err().unwrap().to_string()
    };
    let config = r#"{"image_token_id": 2029, "text_config": {"vocab_size": 2000}}"#;
    let cases = [
        (replace("tokenizer.json", "{}"), "cannot load tokenizer `"),
        (replace("config.json", "{"), "config.json` is not JSON: EOF"),
        (
            replace("config.json", r#"{"vision_config": {}}"#),
            "config.json`: `image_token_id` is missing or is not a token id",
        ),
        (
            replace("config.json", r#"{"image_token_id": 9999}"#),
            "`image_token_id` is `9999`, which",
        ),
        (
            replace("config.json", r#"{"image_token_id": 2029}"#),
            "`text_config.vocab_size` is missing",
        ),
        (replace("config.json", config), "ids up to 2042, but"),
        (
            replace("tokenizer_config.json", r#"{"eos_token": "</s>"}"#),
            "`eos_token` is `</s>`, which",
        ),
        (replace("chat_template.jinja", "{% if %}"), "does not compile"),
        (
            replace("chat_template.jinja", "{{ raise_exception('no') }}"),
            "while it renders a conversation: no (line 1)",
        ),
        (
            replace("chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}"),
            "no end mark",
        ),
        (replace("chat_template.jinja", "{{ messages | length }}"), "cannot be located"),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected), "{found}");
    }
    let missing =
        load_changed(|folder| std::fs::remove_file(folder.join("tokenizer.json")).unwrap());
    assert!(missing.err().unwrap().to_string().contains("tokenizer.json`: No such file"));
}

#[test]
fn templates_can_call_the_methods_and_functions_of_transformers() {
    let template = "{{ bos_token }}{% for m in messages %}{% if m.role.startswith('u') %}\n  {% if m.content.strip().split(' ')[0] == 'stop' %}{% break %}{% endif %}\n  {% endif %}{{ m.role.upper() }}:{{ m['content'].strip() }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}\n";
    let encoder = load_changed(|folder| {
        write(&folder.join("chat_template.jinja"), template.as_bytes());
        let config = json!({"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}});
        write(&folder.join("tokenizer_config.json"), config.to_string().as_bytes());
    })
    .unwrap();
    let (_folder, file) =
        rows(&[row(&[user(" a "), assistant("b"), user("stop it"), assistant("c")])]);
    let text = encoder.render(&file.read(0).unwrap()).unwrap();
    assert_eq!(text, "<|endoftext|>USER:a<|im_end|>ASSISTANT:b<|im_end|>");
}

/// Truncates a chat with two images to every length. The result must contain both images, fit the
/// limit and have the length that the planner computes, and its positions must start at zero.
#[test]
fn a_truncated_chat_keeps_its_images_and_has_the_predicted_length() {
    let images = ["images/exact_moon_96x64.png", "images/exact_moon_64x64.png"];
    let image = |name: &str| json!({"type": "image", "image": name});
    let text = |text: &str| json!({"type": "text", "text": text});
    let (_folder, file) = rows(&[json!({"messages": [
        {"role": "user", "content": [text("First"), image(images[0]), text("and then"), image(images[1]), text("?")]},
        {"role": "assistant", "content": "One answer"},
        {"role": "user", "content": "And more?"},
        {"role": "assistant", "content": "Another one, longer"},
    ]})]);
    let sample = file.read(0).unwrap();
    let whole = encoder().encode(&sample).unwrap();
    let visual = whole.vision_rows.len();
    let mut refused = BTreeSet::new();
    for max_length in 1..=whole.len() as u32 + 1 {
        for keep in [KeptEnd::Beginning, KeptEnd::End] {
            let cut =
                Some(TruncationRule { max_length: NonZeroU32::new(max_length).unwrap(), keep });
            let encoded = encoder().encode_truncated(&sample, cut);
            assert_eq!(
                encoder().length_truncated(&sample, cut).map_err(|error| error.to_string()),
                encoded.as_ref().map(Length::of).map_err(ToString::to_string)
            );
            let left = match encoded {
                Ok(left) => left,
                Err(error) => {
                    refused.insert(error.reason());
                    assert_eq!(
                        error.reason() == "media_exceed_max_length",
                        (max_length as usize) < visual + 5
                    );
                    continue;
                }
            };
            assert_eq!(left.len(), whole.len().min(max_length as usize));
            assert!(left.num_targets() > 0);
            assert_eq!(left.media, whole.media);
            let image_token = whole.input_ids[whole.vision_rows[0] as usize];
            let of_images = |sample: &EncodedSample| -> Vec<u32> {
                (0..sample.len() as u32)
                    .filter(|at| sample.input_ids[*at as usize] == image_token)
                    .collect()
            };
            assert_eq!(left.vision_rows, of_images(&left));
            assert_eq!(left.vision_rows.len(), visual);
            for row in [left.vision_rows[0] - 1, left.vision_rows[visual - 1] + 1] {
                assert!(
                    !left.input_ids[row as usize].eq(&image_token),
                    "vision_start and vision_end are kept"
                );
            }
            // Positions advance by 1 per text token and by the longer side of an image.
            let mut next = 0;
            let mut images = left.media.iter().map(|patches| patches.grid_thw);
            let mut token = 0;
            while token < left.len() {
                if left.input_ids[token] == image_token {
                    let [_, height, width] = images.next().unwrap();
                    assert_eq!(left.position_ids[token], [next; 3]);
                    token += (height * width / 4) as usize;
                    next += height.max(width) / 2;
                } else {
                    assert_eq!(left.position_ids[token], [next; 3]);
                    (token, next) = (token + 1, next + 1);
                }
            }
        }
    }
    let expected = ["media_exceed_max_length", "no_target_after_truncation"];
    assert_eq!(refused.into_iter().collect::<Vec<_>>(), expected);
}
